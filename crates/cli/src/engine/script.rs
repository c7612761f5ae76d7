//! What an engine is told to do: JSON lines on standard input, or one command from the command line.

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

/// Parses one line; the error names what is wrong with it.
pub(crate) fn parse(line: &str) -> Result<Order, String> {
    serde_json::from_str(line).map_err(|error| error.to_string())
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
