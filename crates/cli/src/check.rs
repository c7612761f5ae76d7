//! `kvferry check`: the comparison that both daemons make, before anything is deployed.

use std::io::Write;
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use kvferry_handshake::{Envelope, Identity, Policy, Verdict, layout_label};
use kvferry_plan::judge;
use serde::Serialize;

use crate::envelope_file::read_envelope;
use crate::exit::{Exit, printed};
use crate::text::counted;

/// The two engines of a link, as envelope files.
#[derive(Args, Debug)]
pub(crate) struct Pair {
    /// Envelope file of the engine that computes prompts and publishes pages
    #[arg(long, value_name = "FILE")]
    prefill: PathBuf,
    /// Envelope file of the engine that fetches pages and generates
    #[arg(long, value_name = "FILE")]
    decode: PathBuf,
    /// What the operator allows: the stricter of both daemons' policies applies
    #[arg(long, value_enum, default_value = "strict")]
    pub(crate) policy: PolicyName,
}

/// A policy, as a flag.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum PolicyName {
    /// Page size, element type, layout, DCP geometry, components, layers and model must agree
    Strict,
    /// Unequal page sizes, orders and DCP are carried where that is proven to be exact
    Bridge,
}

impl From<PolicyName> for Policy {
    fn from(name: PolicyName) -> Policy {
        match name {
            PolicyName::Strict => Policy::Strict,
            PolicyName::Bridge => Policy::Bridge,
        }
    }
}

impl Pair {
    /// Reads both files. Errors of both are told at once.
    pub(crate) fn read(&self) -> anyhow::Result<(Envelope, Envelope)> {
        match (read_envelope(&self.prefill), read_envelope(&self.decode)) {
            (Ok(prefill), Ok(decode)) => Ok((prefill, decode)),
            (Err(one), Ok(_)) | (Ok(_), Err(one)) => Err(one),
            (Err(prefill), Err(decode)) => Err(crate::exit::bad_input(format!("{prefill:#}\n{decode:#}"))),
        }
    }
}

/// Compares two envelope files and says whether the engines may be linked.
///
/// Exit code 0: compatible or bridgeable; 3: refused, with every mismatch listed; 2: a file is unreadable or incomplete.
#[derive(Args, Debug)]
pub struct Check {
    #[command(flatten)]
    pair: Pair,
    /// Print the verdict as JSON; where a file is wrong, an object with what is wrong under `errors`
    #[arg(long)]
    json: bool,
}

impl Check {
    pub(crate) fn run(&self, out: &mut impl Write) -> anyhow::Result<Exit> {
        let (prefill, decode) = match self.pair.read() {
            Ok(pair) => pair,
            Err(error) => {
                if self.json {
                    let told = format!("{error:#}");
                    let errors: Vec<&str> = told.lines().collect();
                    printed(json(out, &serde_json::json!({ "errors": errors })))?;
                }
                return Err(error);
            }
        };
        let (verdict, _) = judge(&prefill, &decode, self.pair.policy.into());
        printed(match self.json {
            true => json(out, &verdict),
            false => describe_all(out, &prefill, &decode, &verdict).map_err(Into::into),
        })?;
        Ok(if verdict.allows() {
            Exit::Done
        } else {
            Exit::Refused
        })
    }
}

fn json(out: &mut impl Write, value: &impl Serialize) -> anyhow::Result<()> {
    // As one piece: serde_json's own errors would hide that the reader left.
    writeln!(out, "{}", serde_json::to_string_pretty(value)?)?;
    Ok(())
}

fn describe_all(
    out: &mut impl Write,
    prefill: &Envelope,
    decode: &Envelope,
    verdict: &Verdict,
) -> std::io::Result<()> {
    describe(out, "prefill", prefill)?;
    describe(out, "decode", decode)?;
    write!(out, "\n{verdict}")
}

/// A version that nobody stated leaves no gap.
fn framework(identity: &Identity) -> String {
    match identity.framework_version.as_str() {
        "" => identity.framework.clone(),
        version => format!("{} {version}", identity.framework),
    }
}

fn describe(out: &mut impl Write, side: &str, envelope: &Envelope) -> std::io::Result<()> {
    let identity = &envelope.identity;
    let pages: Vec<String> = envelope
        .page_groups
        .iter()
        .map(|group| format!("{} x {}", group.pool_pages, group.page_size))
        .collect();
    writeln!(
        out,
        "{side:8}{}: {}, {}, {}, pages x tokens {}",
        identity.engine,
        identity.model,
        framework(identity),
        counted(envelope.ranks.len(), "rank"),
        pages.join(" + "),
    )?;
    for (at, component) in (0u16..).zip(&envelope.components) {
        let (name, element) = (&component.name, component.element);
        writeln!(out, "{:8}{name}: {element}, {}", "", layout_label(envelope, at))?;
    }
    Ok(())
}
