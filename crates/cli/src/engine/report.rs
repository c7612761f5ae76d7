//! What an engine tells: JSON lines for programs, or sentences for people.

use std::io::Write as _;

use kvferry_client::{Path, Report};
use kvferry_handshake::{Code, Mismatch, Numbered, Verdict};
use serde::Serialize;

use super::run::Checked;
use crate::exit::Output;
use crate::text::{bytes, counted};

/// Something that happened. Times `at_us` are of the machine's monotonic clock, equal in all processes.
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "event", rename_all = "lowercase")]
pub(crate) enum Told {
    Attached {
        engine: String,
        rank: u32,
        daemon: String,
        release: String,
        pool_bytes: u64,
    },
    Registered {
        /// Region and generation of each.
        regions: Vec<(u16, u64)>,
        bytes: u64,
        paths: Vec<Path>,
    },
    Unregistered {
        region: u16,
    },
    Filled {
        transfer: String,
        attempt: u32,
        tokens: u64,
        bytes: u64,
        us: u64,
    },
    Published {
        transfer: String,
        attempt: u32,
        step: u32,
        of: u32,
        tokens: u64,
        last: bool,
        at_us: u64,
    },
    Fetching {
        transfer: String,
        attempt: u32,
        from: u64,
        to: u64,
        at_us: u64,
    },
    Progress {
        transfer: String,
        attempt: u32,
        bytes: u64,
        total: u64,
    },
    Delivered {
        side: &'static str,
        transfer: String,
        attempt: u32,
        tokens: u64,
        bytes: u64,
        paths: Vec<(Path, u64)>,
        peers: Vec<String>,
        moves: u64,
        resent: u64,
        bounced: u64,
        met_us: u64,
        moved_us: u64,
        #[serde(skip_serializing_if = "Option::is_none")]
        metadata: Option<String>,
        at_us: u64,
    },
    Failed {
        side: &'static str,
        transfer: String,
        attempt: u32,
        code: String,
        message: String,
        mismatches: Vec<Mismatch>,
        bytes: u64,
        at_us: u64,
    },
    Verified {
        transfer: String,
        attempt: u32,
        #[serde(flatten)]
        found: Found,
    },
    Audited {
        #[serde(flatten)]
        found: Found,
    },
    Refused {
        engine: String,
        verdict: Box<Verdict>,
    },
    Notice {
        message: String,
    },
    /// An order that could not be carried out.
    Error {
        order: String,
        #[serde(skip_serializing_if = "Option::is_none")]
        code: Option<String>,
        message: String,
        mismatches: Vec<Mismatch>,
    },
}

/// What a verification found.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Found {
    /// Bytes that had to hold the pattern.
    pub(crate) bytes: u64,
    /// Bytes that nobody was to touch.
    pub(crate) untouched_bytes: u64,
    /// Rows that hold something else.
    pub(crate) wrong: u64,
    /// The first of them.
    pub(crate) wrong_rows: Vec<String>,
    pub(crate) us: u64,
}

impl Found {
    pub(crate) fn new(checked: Checked, us: u64) -> Found {
        Found {
            bytes: checked.pattern,
            untouched_bytes: checked.untouched,
            wrong: checked.wrong,
            wrong_rows: checked.told,
            us,
        }
    }
}

/// Bytes of a report, over all paths.
pub(crate) fn report_bytes(report: &Report) -> u64 {
    report.paths.iter().map(|(_, bytes)| bytes).sum()
}

/// Writes what happened to standard output.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Teller {
    /// JSON lines rather than sentences.
    pub(crate) json: bool,
}

impl Teller {
    pub(crate) fn tell(&self, told: &Told) -> anyhow::Result<()> {
        let mut out = Output(std::io::stdout().lock());
        if self.json {
            serde_json::to_writer(&mut out, told)?;
            writeln!(out)?;
        } else {
            say(&mut out, told)?;
        }
        out.flush()?;
        Ok(())
    }
}

fn named(transfer: &str, attempt: u32) -> String {
    match attempt {
        0 => transfer.to_owned(),
        _ => format!("{transfer} (attempt {attempt})"),
    }
}

fn say(out: &mut impl std::io::Write, told: &Told) -> std::io::Result<()> {
    match told {
        Told::Attached {
            engine,
            rank,
            daemon,
            release,
            pool_bytes,
        } => {
            let pool = bytes(*pool_bytes);
            writeln!(
                out,
                "attached as {engine} rank {rank} to kvferryd {release} at {daemon}; pool of {pool}"
            )
        }
        Told::Registered {
            regions,
            bytes: count,
            paths,
        } => {
            let (number, size) = (counted(regions.len(), "region"), bytes(*count));
            writeln!(out, "registered {number}: {size}, paths {}", path_names(paths))
        }
        Told::Unregistered { region } => writeln!(out, "unregistered region {region}"),
        Told::Filled {
            transfer,
            attempt,
            tokens,
            bytes: count,
            us,
        } => writeln!(
            out,
            "filled {} tokens of {}: {} in {} ms",
            tokens,
            named(transfer, *attempt),
            bytes(*count),
            us / 1000
        ),
        Told::Published {
            transfer,
            attempt,
            step,
            of,
            tokens,
            last,
            ..
        } => {
            let end = if *last { ", final" } else { "" };
            writeln!(
                out,
                "published {}: step {step} of {of}, {tokens} tokens{end}",
                named(transfer, *attempt)
            )
        }
        Told::Fetching {
            transfer,
            attempt,
            from,
            to,
            ..
        } => {
            writeln!(
                out,
                "fetching tokens {from}..{to} of {}",
                named(transfer, *attempt)
            )
        }
        Told::Progress {
            transfer,
            attempt,
            bytes: count,
            total,
        } => {
            writeln!(
                out,
                "moving {}: {} of {}",
                named(transfer, *attempt),
                bytes(*count),
                bytes(*total)
            )
        }
        Told::Delivered {
            transfer,
            attempt,
            tokens,
            bytes: count,
            paths,
            moves,
            bounced,
            resent,
            met_us,
            moved_us,
            metadata,
            ..
        } => {
            let names: Vec<Path> = paths.iter().map(|(path, _)| *path).collect();
            write!(
                out,
                "delivered {}: {tokens} tokens, {} by {}, {moves} moves, {:.1} ms after meeting the other side (met after {:.1} ms)",
                named(transfer, *attempt),
                bytes(*count),
                path_names(&names),
                millis(*moved_us),
                millis(*met_us),
            )?;
            if *bounced > 0 {
                write!(out, ", {} through a bounce buffer", bytes(*bounced))?;
            }
            if *resent > 0 {
                write!(
                    out,
                    ", {} sent again",
                    counted(usize::try_from(*resent).unwrap_or(usize::MAX), "chunk")
                )?;
            }
            match metadata {
                Some(metadata) => writeln!(out, ", metadata {metadata:?}"),
                None => writeln!(out),
            }
        }
        Told::Failed {
            transfer,
            attempt,
            code,
            message,
            mismatches,
            ..
        } => {
            writeln!(out, "FAILED {}: {code}: {message}", named(transfer, *attempt))?;
            // A refused link was told in full when the verdict came.
            match code == Code::LinkRefused.name() {
                true => Ok(()),
                false => write!(out, "{}", Numbered(mismatches)),
            }
        }
        Told::Verified {
            transfer,
            attempt,
            found,
        } => say_found(out, &named(transfer, *attempt), found),
        Told::Audited { found } => say_found(out, "whole pool", found),
        Told::Refused { engine, verdict } => {
            writeln!(out, "the pair with engine {engine} is refused:")?;
            write!(out, "{verdict}")
        }
        Told::Notice { message } => writeln!(out, "{message}"),
        Told::Error {
            order,
            code,
            message,
            mismatches,
        } => {
            let code = code
                .as_deref()
                .map(|code| format!("{code}: "))
                .unwrap_or_default();
            writeln!(out, "ERROR in {order}: {code}{message}")?;
            write!(out, "{}", Numbered(mismatches))
        }
    }
}

fn say_found(out: &mut impl std::io::Write, what: &str, found: &Found) -> std::io::Result<()> {
    let (held, untouched) = (bytes(found.bytes), bytes(found.untouched_bytes));
    if found.wrong == 0 {
        return writeln!(
            out,
            "verified {what}: {held} as published, {untouched} untouched, nothing wrong"
        );
    }
    writeln!(
        out,
        "WRONG {what}: {} rows of {held} and {untouched} that must be untouched",
        found.wrong
    )?;
    for row in &found.wrong_rows {
        writeln!(out, "    {row}")?;
    }
    Ok(())
}

#[expect(clippy::cast_precision_loss, reason = "for reading")]
fn millis(us: u64) -> f64 {
    us as f64 / 1000.0
}

fn path_names(paths: &[Path]) -> String {
    match paths {
        [] => "no path".to_owned(),
        _ => paths.iter().map(|path| path.name()).collect::<Vec<_>>().join("+"),
    }
}
