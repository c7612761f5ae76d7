//! The storm over many seeds, and what must have come up in all of them together.

use std::collections::BTreeMap;

use kvferry_handshake::Code;

use crate::sim::Cluster;
use crate::storm::one;

/// What came up in all seeds together.
#[derive(Debug, Default)]
struct Seen {
    codes: BTreeMap<(Code, &'static str), u64>,
    events: BTreeMap<&'static str, u64>,
    said: BTreeMap<String, u64>,
    bytes: u64,
    delivered: u64,
    failed: u64,
}

impl Seen {
    fn add(&mut self, cluster: Cluster) {
        let records = cluster.ledger.records.values().flatten();
        let delivered = records.clone().filter(|cause| cause.is_none()).count() as u64;
        self.merge(Seen {
            delivered,
            failed: records.count() as u64 - delivered,
            codes: cluster.ledger.codes,
            events: cluster.ledger.events,
            said: cluster.said,
            bytes: cluster.ledger.delivered_bytes,
        });
    }

    fn merge(&mut self, other: Seen) {
        fn add<K: Ord>(into: &mut BTreeMap<K, u64>, from: BTreeMap<K, u64>) {
            for (key, count) in from {
                *into.entry(key).or_default() += count;
            }
        }
        add(&mut self.codes, other.codes);
        add(&mut self.events, other.events);
        add(&mut self.said, other.said);
        self.bytes += other.bytes;
        self.delivered += other.delivered;
        self.failed += other.failed;
    }
}

/// Codes that need a broken engine, daemon or data plane, not a broken network; each has a test of its own.
const NOT_BY_CHANCE: &[Code] = &[
    Code::AddressInvalid,
    Code::EnvelopeInvalid,
    Code::Internal,
    Code::MetadataTooLong,
    Code::NotAttached,
    Code::PageAbsent,
    Code::PageInUse,
    Code::PagesInvalid,
    Code::ProtocolViolation,
    Code::RankUnknown,
    Code::RegionRegistered,
    Code::RegionTooLarge,
    Code::RegionTooSmall,
    Code::RegionUnknown,
    Code::StaleGeneration,
    Code::StaleIncarnation,
    Code::TokensInvalid,
    Code::VerdictsDiffer,
];

/// Every code that the broker's source names.
fn codes_in_source() -> Vec<Code> {
    let mut folders = vec![std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src")];
    let mut text = String::new();
    while let Some(folder) = folders.pop() {
        for file in std::fs::read_dir(folder).unwrap() {
            let path = file.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else {
                let file = std::fs::read_to_string(path).unwrap();
                text += file.split("#[cfg(test)]").next().unwrap();
            }
        }
    }
    let named = |code: &&Code| {
        let name = format!("Code::{code:?}");
        text.match_indices(&name)
            .any(|(at, _)| !text[at + name.len()..].starts_with(|next: char| next.is_alphanumeric()))
    };
    Code::ALL.iter().filter(named).copied().collect()
}

fn number(name: &str, default: u64) -> u64 {
    let set = std::env::var(name).ok();
    set.and_then(|value| value.parse().ok()).unwrap_or(default)
}

/// Enough seeds for everything that must come up.
const ENOUGH: u64 = 4_000;

/// Seeds to run: as wide as the test run is, or `BROKER_SEEDS`.
fn seeds() -> u64 {
    let width = std::env::var("KVFERRY_TESTS").unwrap_or_default();
    let default = match width.as_str() {
        "quick" => 300,
        "full" => 10 * ENOUGH,
        // A build without optimisation is for finding out, not for proving.
        _ if cfg!(debug_assertions) => 400,
        _ => ENOUGH,
    };
    number("BROKER_SEEDS", default)
}

/// `BROKER_FIRST=17 BROKER_SEEDS=1 TRACE=1` runs one seed and tells everything that happens.
#[test]
fn every_transfer_ends_and_none_ends_wrongly() {
    let (first, seeds) = (number("BROKER_FIRST", 0), seeds());
    let threads = 2;
    let work = |thread: u64| {
        let mut seen = Seen::default();
        for seed in (first + thread..first + seeds).step_by(threads) {
            match std::panic::catch_unwind(|| one(seed)) {
                Ok(cluster) => seen.add(cluster),
                Err(panic) => {
                    eprintln!("seed {seed} failed: BROKER_FIRST={seed} BROKER_SEEDS=1 TRACE=1");
                    std::panic::resume_unwind(panic);
                }
            }
        }
        seen
    };
    let seen = std::thread::scope(|scope| {
        let work: Vec<_> = (0..threads as u64)
            .map(|thread| scope.spawn(move || work(thread)))
            .collect();
        let mut all = Seen::default();
        for thread in work {
            all.merge(thread.join().expect("a seed failed"));
        }
        all
    });
    eprintln!("{seen:?}");
    if seeds < ENOUGH {
        return;
    }
    for event in [
        "matched",
        "progress",
        "delivered",
        "failed",
        "refused",
        "detached",
    ] {
        assert!(seen.events.contains_key(event), "no {event} came up");
    }
    for (name, body) in crate::wire::samples() {
        // Two daemons that come to different verdicts have a test of their own.
        if name == "link_failed" {
            continue;
        }
        let kind = crate::sim::kind(&body);
        assert!(seen.said.contains_key(&kind), "nobody ever said {name}");
    }
    let came_up = |code: &Code| seen.codes.keys().any(|(seen, _)| seen == code);
    let never: Vec<Code> = codes_in_source()
        .into_iter()
        .filter(|code| !came_up(code))
        .collect();
    let unexpected: Vec<&Code> = never
        .iter()
        .filter(|code| !NOT_BY_CHANCE.contains(code))
        .collect();
    assert!(unexpected.is_empty(), "never came up: {unexpected:?}");
    assert!(seen.delivered > 2 * seen.failed, "most transfers are delivered");
}
