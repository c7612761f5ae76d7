//! What an engine is told to do: JSON lines on standard input, or one command from the command line.

use std::io::{BufRead, Read as _};

use serde::Deserialize;

/// One line of a script.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(tag = "do", rename_all = "lowercase")]
pub(crate) enum Order {
    /// Draw or take pages and fill them, ahead of `publish`.
    Fill(Fill),
    /// Publish, in steps, filling what each step says is ready.
    Publish(Publish),
    /// Poison pages and fetch into them; verify once delivered.
    Fetch(Fetch),
    /// End a transfer.
    Abort(Transfer),
    /// A fetch will come.
    Expect(Sourced),
    /// No fetch will come.
    Decline(Sourced),
    /// Wait until few enough transfers are open.
    Wait(Wait),
    /// Verify what was fetched with `"verify": "later"`.
    Verify(Nothing),
    /// Compare the whole pool with what it should hold.
    Audit(Nothing),
    /// Take a region back from the daemon.
    Unregister(Region),
    /// Hand a region over again.
    Register(Region),
    /// Pause.
    Sleep(Sleep),
}

/// Draws pages for a prompt and fills them.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Fill {
    /// Transfer id.
    pub(crate) transfer: String,
    /// Attempt.
    #[serde(default)]
    pub(crate) attempt: u32,
    /// Number of the filling, where pages are filled anew within an attempt; both sides must say the same. It has nothing
    /// to do with the generation of a region.
    #[serde(default)]
    pub(crate) generation: u64,
    /// The prompt's length.
    pub(crate) tokens: u64,
    /// `seed:N` draws scattered free pages; `pages=3,7,9-20` names them. Drawn by the transfer's name unless given.
    #[serde(default)]
    pub(crate) pages: Option<String>,
}

/// Publishes a prompt; see [`Fill`] for what is not told here.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Publish {
    pub(crate) transfer: String,
    #[serde(default)]
    pub(crate) attempt: u32,
    #[serde(default)]
    pub(crate) generation: u64,
    pub(crate) tokens: u64,
    #[serde(default)]
    pub(crate) pages: Option<String>,
    /// How far this order goes: `tokens` unless given. Short of it, the publish is not final, and another one follows.
    #[serde(default)]
    pub(crate) upto: Option<u64>,
    /// How many publishes it takes.
    #[serde(default = "one")]
    pub(crate) steps: u32,
    /// What grows from step to step.
    #[serde(default)]
    pub(crate) by: Growth,
    /// Pause between steps, in milliseconds.
    #[serde(default)]
    pub(crate) pause_ms: u64,
    /// How many decode engines will fetch it.
    #[serde(default = "one")]
    pub(crate) serves: u32,
    /// Metadata for the decode engine.
    #[serde(default)]
    pub(crate) metadata: Option<String>,
}

/// Fetches a prompt; see [`Fill`] for what is not told here.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Fetch {
    /// `kvferry://host:port/engine`.
    pub(crate) source: String,
    pub(crate) transfer: String,
    #[serde(default)]
    pub(crate) attempt: u32,
    #[serde(default)]
    pub(crate) generation: u64,
    /// First token wanted: those below it are held already, and must stay as they are.
    #[serde(default)]
    pub(crate) from: u64,
    /// One past the last token wanted.
    pub(crate) to: u64,
    /// The least end that will do; `to` unless given.
    #[serde(default)]
    pub(crate) least: Option<u64>,
    #[serde(default)]
    pub(crate) pages: Option<String>,
    /// When to verify.
    #[serde(default)]
    pub(crate) verify: When,
}

/// Names a transfer.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Transfer {
    pub(crate) transfer: String,
    #[serde(default)]
    pub(crate) attempt: u32,
}

/// Names a transfer at its source.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Sourced {
    /// `kvferry://host:port/engine`.
    pub(crate) source: String,
    pub(crate) transfer: String,
    #[serde(default)]
    pub(crate) attempt: u32,
}

/// Waits.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Wait {
    /// Until so many transfers are open at most.
    #[serde(default)]
    pub(crate) open: usize,
}

/// Names a region.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Region {
    pub(crate) region: u16,
}

/// Pauses.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Sleep {
    /// Milliseconds.
    pub(crate) ms: u64,
}

/// Takes nothing.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Nothing {}

/// What grows from one publish to the next.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Growth {
    /// More tokens in all layers
    #[default]
    Tokens,
    /// More layers of all tokens
    Layers,
}

/// When a fetch is verified.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum When {
    /// As soon as it is delivered.
    #[default]
    Now,
    /// With the next `verify`, so that it does not take time from other transfers.
    Later,
}

fn one() -> u32 {
    1
}

/// Publishes that one order may take.
pub(crate) const MAX_STEPS: u32 = 100_000;
/// Bytes of one line: room for the longest page lists.
const MAX_LINE: u64 = 1 << 28;

/// Parses one line; the error names what is wrong with it.
pub(crate) fn parse(line: &str) -> Result<Order, String> {
    let order = serde_json::from_str(line).map_err(|error| error.to_string())?;
    match &order {
        Order::Publish(publish) if publish.steps == 0 || publish.steps > MAX_STEPS => {
            Err(format!("steps is {}; write 1 to {MAX_STEPS}", publish.steps))
        }
        _ => Ok(order),
    }
}

/// Reads orders, each with the number of its line in what is wrong with it; ends at the end of the input, after a line that
/// cannot be read, or when `each` says so.
pub(crate) fn read(input: impl BufRead, each: impl FnMut(Result<Order, String>) -> bool) {
    read_lines(input, MAX_LINE, each);
}

fn read_lines(mut input: impl BufRead, most: u64, mut each: impl FnMut(Result<Order, String>) -> bool) {
    for number in 1u64.. {
        let mut line = String::new();
        // Bounded while it is read: it may have no end.
        let (order, last) = match input.by_ref().take(most).read_line(&mut line) {
            Ok(0) => return,
            Ok(_) if line.len() as u64 == most && !line.ends_with('\n') => (
                Err(format!("longer than {most} bytes; no more orders are read")),
                true,
            ),
            Ok(_) if line.trim().is_empty() => continue,
            Ok(_) => (parse(&line), false),
            Err(error) => (Err(format!("{error}; no more orders are read")), true),
        };
        if !each(order.map_err(|error| format!("line {number}: {error}"))) || last {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_with_defaults() {
        let order = parse(r#"{"do":"publish","transfer":"a","tokens":964}"#).unwrap();
        let Order::Publish(publish) = order else {
            panic!("{order:?}")
        };
        assert_eq!(
            (publish.tokens, publish.transfer.as_str(), publish.upto),
            (964, "a", None)
        );
        assert_eq!(
            (publish.steps, publish.by, publish.serves),
            (1, Growth::Tokens, 1)
        );
    }

    #[test]
    fn a_fetch_must_say_what_it_wants() {
        let whole =
            r#"{"do":"fetch","source":"kvferry://h:1/e","transfer":"a","from":16,"to":40,"verify":"later"}"#;
        let Ok(Order::Fetch(fetch)) = parse(whole) else {
            panic!("{whole}")
        };
        assert_eq!((fetch.from, fetch.to, fetch.verify), (16, 40, When::Later));
        let error = parse(r#"{"do":"fetch","transfer":"a","to":4}"#).unwrap_err();
        assert!(error.contains("source"), "{error}");
    }

    #[test]
    fn lines_are_numbered_and_bounded() {
        let orders = |input: &str, most: u64| {
            let mut read = Vec::new();
            read_lines(input.as_bytes(), most, |order| {
                read.push(order);
                true
            });
            read
        };
        let audit = r#"{"do":"audit"}"#;
        let read = orders(&format!("{audit}\n\nx\n{audit}"), 64);
        assert_eq!(read.len(), 3, "{read:?}");
        assert!(read[0].is_ok() && read[2].is_ok(), "{read:?}");
        let wrong = read[1].as_ref().unwrap_err();
        assert!(wrong.starts_with("line 3: "), "{wrong}");
        let read = orders(&format!("{audit}\n{}\n{audit}\n", "x".repeat(20)), 20);
        assert_eq!(read.len(), 2, "{read:?}");
        let wrong = read[1].as_ref().unwrap_err();
        assert!(wrong.contains("line 2: longer than 20 bytes"), "{wrong}");
    }

    #[test]
    fn steps_are_bounded() {
        for steps in [0, MAX_STEPS + 1] {
            let line = format!(r#"{{"do":"publish","transfer":"a","tokens":1,"steps":{steps}}}"#);
            let error = parse(&line).unwrap_err();
            assert!(
                error.contains(&format!("steps is {steps}; write 1 to")),
                "{error}"
            );
        }
    }

    #[test]
    fn misspelt_orders_and_keys_are_named() {
        let error = parse(r#"{"do":"publsh","transfer":"a","tokens":1}"#).unwrap_err();
        assert!(error.contains("publsh") && error.contains("publish"), "{error}");
        let error = parse(r#"{"do":"wait","opne":1}"#).unwrap_err();
        assert!(error.contains("opne"), "{error}");
        let error = parse(r#"{"do":"fetch","source":"s","transfer":"a","to":4,"form":2}"#).unwrap_err();
        assert!(error.contains("form"), "{error}");
        assert!(parse(r#"{"do":"audit","now":true}"#).is_err());
        assert!(parse("[]").is_err());
    }
}
