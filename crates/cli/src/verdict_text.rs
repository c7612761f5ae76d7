//! A verdict as an operator reads it: every difference with both values, why it matters and what to set.

use std::io::{self, Write};

use kvferry_handshake::{Mismatch, Outcome, Policy, Verdict};

use crate::text::{counted, labelled};

/// Writes a verdict in full.
pub fn write_verdict(out: &mut impl Write, verdict: &Verdict) -> io::Result<()> {
    let policy = match verdict.policy {
        Policy::Strict => "strict",
        Policy::Bridge => "bridge",
    };
    match verdict.outcome {
        Outcome::Compatible => writeln!(out, "COMPATIBLE under policy {policy}: the pair may be linked.")?,
        Outcome::Bridgeable => writeln!(
            out,
            "BRIDGEABLE under policy {policy}: the pair differs in {}, carried exactly.",
            counted(verdict.bridged.len(), "point")
        )?,
        Outcome::Refused => writeln!(
            out,
            "REFUSED under policy {policy}: {}. Nothing would be carried.",
            counted(verdict.mismatches.len(), "mismatch")
        )?,
    }
    write_mismatches(out, &verdict.mismatches)?;
    section(out, "Differences that are bridged", &verdict.bridged)?;
    section(out, "Warnings", &verdict.warnings)?;
    if verdict.outcome == Outcome::Refused {
        writeln!(out, "\n`kvferry explain CODE` says more about a code.")?;
    }
    Ok(())
}

/// Writes each mismatch, numbered.
pub fn write_mismatches(out: &mut impl Write, mismatches: &[Mismatch]) -> io::Result<()> {
    for (number, mismatch) in (1u32..).zip(mismatches) {
        writeln!(out, "\n {number}. {}: {}", mismatch.code, mismatch.field)?;
        labelled(out, "prefill", &mismatch.prefill)?;
        labelled(out, "decode", &mismatch.decode)?;
        labelled(out, "why", &mismatch.why)?;
        labelled(out, "set", &mismatch.fix)?;
    }
    Ok(())
}

fn section(out: &mut impl Write, title: &str, mismatches: &[Mismatch]) -> io::Result<()> {
    if !mismatches.is_empty() {
        writeln!(out, "\n{title}:")?;
        write_mismatches(out, mismatches)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use kvferry_handshake::Code;

    use super::*;

    fn mismatch(code: Code, prefill: &str, decode: &str) -> Mismatch {
        Mismatch {
            code,
            field: format!("field.of.{code}"),
            prefill: prefill.into(),
            decode: decode.into(),
            why: "it would corrupt".into(),
            fix: "set it alike".into(),
        }
    }

    #[test]
    fn a_refusal_names_everything() {
        let verdict = Verdict {
            outcome: Outcome::Refused,
            policy: Policy::Strict,
            mismatches: vec![
                mismatch(Code::PageSize, "16", "1"),
                mismatch(Code::ElementType, "bf16", "fp8_e5m2"),
            ],
            bridged: Vec::new(),
            warnings: vec![mismatch(Code::NotCompared, "rev-a", "not stated")],
        };
        let mut out = Vec::new();
        write_verdict(&mut out, &verdict).unwrap();
        let text = String::from_utf8(out).unwrap();
        for word in [
            "REFUSED",
            "2 mismatches",
            "page_size",
            "element_type",
            "bf16",
            "fp8_e5m2",
            "it would corrupt",
            "set it alike",
            "Warnings",
            "not_compared",
            "rev-a",
        ] {
            assert!(text.contains(word), "{word} is missing in\n{text}");
        }
    }
}
