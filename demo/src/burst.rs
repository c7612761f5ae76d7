//! Carries one burst of requests between two engines, and keeps the books.

use std::collections::BTreeMap;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use serde_json::{Value, json};

use crate::fleet::{Fleet, Side};
use crate::requests::{BYTES_PER_TOKEN, Burst};

/// What became of one transfer.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Carried {
    /// Tokens.
    pub(crate) tokens: u64,
    /// Bytes that the decode ranks received.
    pub(crate) bytes: u64,
    /// Paths that they came by.
    pub(crate) paths: Vec<String>,
    /// Contiguous ranges on the decode side.
    pub(crate) moves: u64,
    /// When the first rank published, on the machine's monotonic clock.
    pub(crate) published_us: u64,
    /// When the last rank was told that all is there.
    pub(crate) delivered_us: u64,
    /// Bytes compared with the pattern.
    pub(crate) verified: u64,
    /// Bytes of its pages that nobody was to touch, compared with the poison.
    pub(crate) untouched: u64,
    /// Rows that were wrong.
    pub(crate) wrong: u64,
}

impl Carried {
    /// Seconds from the first publish until all is delivered.
    #[expect(clippy::cast_precision_loss, reason = "for reading")]
    pub(crate) fn seconds(&self) -> f64 {
        self.delivered_us.saturating_sub(self.published_us) as f64 / 1e6
    }
}

/// Transfers by id.
pub(crate) type Ledger = BTreeMap<String, Carried>;

/// Carries all requests of a burst at once. Every byte has to come by `path`, be verified, and be where it belongs.
pub(crate) fn carry(
    fleet: &mut Fleet,
    burst: &Burst,
    source: &str,
    path: &str,
    label: &str,
) -> anyhow::Result<Ledger> {
    let requests: Vec<(String, u64)> = (1..)
        .zip(&burst.tokens)
        .map(|(number, tokens)| (format!("{label}-{number}"), *tokens))
        .collect();
    let total: u64 = burst.tokens.iter().sum::<u64>() * BYTES_PER_TOKEN;
    let bar = progress(total);
    let mut ledger = Ledger::new();

    bar.set_message("prefill: filling pages");
    for (id, tokens) in &requests {
        fleet.order(
            Side::Prefill,
            &json!({"do": "fill", "transfer": id, "tokens": tokens}),
        )?;
    }
    let all = |side, fleet: &Fleet| requests.len() * fleet.count(side);
    fleet.collect("filled", all(Side::Prefill, fleet), |_, _, event| {
        if event["event"] == "filled" {
            bar.inc(number(event, "bytes"));
        }
    })?;

    bar.set_position(0);
    bar.set_message("decode: poisoning pages, asking for them");
    for (id, tokens) in &requests {
        let order = json!({"do": "fetch", "source": source, "transfer": id, "to": tokens, "verify": "later"});
        fleet.order(Side::Decode, &order)?;
    }
    let decoders = fleet.count(Side::Decode) as u64;
    fleet.collect("fetching", all(Side::Decode, fleet), |_, _, event| {
        if event["event"] == "fetching" {
            bar.inc(number(event, "to") * BYTES_PER_TOKEN / decoders);
        }
    })?;

    bar.set_position(0);
    bar.set_message("moving");
    for (id, tokens) in &requests {
        fleet.order(
            Side::Prefill,
            &json!({"do": "publish", "transfer": id, "tokens": tokens}),
        )?;
    }
    let mut moved: BTreeMap<(usize, String), u64> = BTreeMap::new();
    let mut published = 0;
    fleet.collect(
        "delivered",
        all(Side::Decode, fleet) + all(Side::Prefill, fleet),
        |side, rank, event| {
            let id = event["transfer"].as_str().unwrap_or_default().to_owned();
            match event["event"].as_str() {
                Some("published") => {
                    published += 1;
                    let carried = ledger.entry(id).or_default();
                    let at = number(event, "at_us");
                    carried.published_us = if carried.published_us == 0 {
                        at
                    } else {
                        carried.published_us.min(at)
                    };
                }
                Some("progress" | "delivered") if side == Side::Decode => {
                    let bytes = number(event, "bytes");
                    moved.insert((rank, id.clone()), bytes);
                    bar.set_position(moved.values().sum());
                    if event["event"] == "delivered" {
                        delivered(ledger.entry(id).or_default(), event);
                    }
                }
                _ => {}
            }
        },
    )?;

    bar.set_position(0);
    bar.set_message("decode: verifying every byte");
    fleet.order(Side::Decode, &json!({"do": "verify"}))?;
    fleet.collect("verified", all(Side::Decode, fleet), |_, _, event| {
        if event["event"] != "verified" {
            return;
        }
        let id = event["transfer"].as_str().unwrap_or_default().to_owned();
        let carried = ledger.entry(id).or_default();
        carried.verified += number(event, "bytes");
        carried.untouched += number(event, "untouched_bytes");
        carried.wrong += number(event, "wrong");
        bar.inc(number(event, "bytes"));
    })?;
    bar.finish_and_clear();

    for (id, tokens) in &requests {
        let carried = ledger.entry(id.clone()).or_default();
        check(id, carried, tokens * BYTES_PER_TOKEN, path)?;
    }
    Ok(ledger)
}

/// What was carried is all of it, right, and came by the path that it should come by.
fn check(id: &str, carried: &Carried, expected: u64, path: &str) -> anyhow::Result<()> {
    anyhow::ensure!(
        carried.wrong == 0 && carried.verified == expected && carried.bytes == expected,
        "{id}: {} wrong rows; {} bytes moved and {} verified of {expected}",
        carried.wrong,
        carried.bytes,
        carried.verified
    );
    anyhow::ensure!(
        carried.paths == [path],
        "{id}: the bytes came by {:?}, not by {path}",
        carried.paths
    );
    Ok(())
}

fn delivered(carried: &mut Carried, event: &Value) {
    carried.tokens = number(event, "tokens");
    carried.bytes += number(event, "bytes");
    carried.moves += number(event, "moves");
    carried.delivered_us = carried.delivered_us.max(number(event, "at_us"));
    for path in event["paths"].as_array().into_iter().flatten() {
        if let Some(name) = path[0].as_str()
            && !carried.paths.iter().any(|known| known == name)
        {
            carried.paths.push(name.to_owned());
        }
    }
}

fn number(event: &Value, key: &str) -> u64 {
    event[key].as_u64().unwrap_or(0)
}

fn progress(total: u64) -> ProgressBar {
    let bar = ProgressBar::new(total);
    if let Ok(style) =
        ProgressStyle::with_template("  {bar:30} {bytes:>10} of {total_bytes}  {msg} ({elapsed})")
    {
        bar.set_style(style);
    }
    bar.enable_steady_tick(Duration::from_millis(100));
    bar
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_add_up() {
        let mut carried = Carried::default();
        for (at, path) in [(70, "tcp"), (50, "tcp")] {
            let event = json!({"event": "delivered", "tokens": 964, "bytes": 10, "moves": 3, "at_us": at,
                "paths": [[path, 10]]});
            delivered(&mut carried, &event);
        }
        assert_eq!((carried.bytes, carried.moves, carried.delivered_us), (20, 6, 70));
        assert_eq!(carried.paths, ["tcp"]);
    }

    #[test]
    fn another_path_another_length_and_a_wrong_row_do_not_pass() {
        let sound = Carried {
            bytes: 8,
            verified: 8,
            paths: vec!["tcp".to_owned()],
            ..Carried::default()
        };
        assert!(check("r", &sound, 8, "tcp").is_ok());
        let error = check("r", &sound, 8, "local").unwrap_err().to_string();
        assert!(error.contains("tcp") && error.contains("not by local"), "{error}");
        let with = |change: fn(&mut Carried)| {
            let mut carried = sound.clone();
            change(&mut carried);
            check("r", &carried, 8, "tcp").is_err()
        };
        assert!(with(|carried| carried.paths.push("local".to_owned())));
        assert!(with(|carried| carried.paths.clear()));
        assert!(with(|carried| carried.wrong = 1));
        assert!(with(|carried| carried.verified = 7));
        assert!(with(|carried| carried.bytes = 9));
    }
}
