//! A verdict as an operator reads it: one block for each difference, with both values, why it matters and what
//! to set.

use std::fmt;

use crate::verdict::{Mismatch, Outcome, Verdict};

/// Columns of a line.
const WIDTH: usize = 100;
/// Columns before a value.
const INDENT: usize = 13;

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let policy = self.policy;
        match self.outcome {
            Outcome::Compatible => writeln!(f, "COMPATIBLE under policy {policy}: the pair may be linked.")?,
            Outcome::Bridgeable => writeln!(
                f,
                "BRIDGEABLE under policy {policy}: the pair differs in {}, carried exactly.",
                counted(self.bridged.len(), "point", "points")
            )?,
            Outcome::Refused => writeln!(
                f,
                "REFUSED under policy {policy}: {}; nothing is carried.",
                counted(self.mismatches.len(), "mismatch", "mismatches")
            )?,
        }
        blocks(f, &self.mismatches)?;
        if !self.bridged.is_empty() {
            writeln!(f, "\nDifferences that are bridged:")?;
            blocks(f, &self.bridged)?;
        }
        if !self.warnings.is_empty() {
            writeln!(f, "\nWarnings:")?;
            blocks(f, &self.warnings)?;
        }
        if self.outcome == Outcome::Refused {
            writeln!(f, "\n`kvferry explain CODE` says more about a code.")?;
        }
        Ok(())
    }
}

/// Mismatches as blocks of text, numbered: of a refusal that came without its verdict.
#[derive(Clone, Copy, Debug)]
pub struct Numbered<'a>(pub &'a [Mismatch]);

impl fmt::Display for Numbered<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        blocks(f, self.0)
    }
}

fn counted(count: usize, one: &str, many: &str) -> String {
    format!("{count} {}", if count == 1 { one } else { many })
}

fn blocks(f: &mut fmt::Formatter<'_>, mismatches: &[Mismatch]) -> fmt::Result {
    for (number, mismatch) in (1u32..).zip(mismatches) {
        writeln!(f, "\n{number:>3}. {}: {}", mismatch.code, mismatch.field)?;
        for (label, value) in [
            ("prefill", &mismatch.prefill),
            ("decode", &mismatch.decode),
            ("why", &mismatch.why),
            ("set", &mismatch.fix),
        ] {
            write!(f, "     {label:<8}")?;
            wrapped(f, value)?;
        }
    }
    Ok(())
}

/// Writes a value, its further lines below its first.
fn wrapped(f: &mut fmt::Formatter<'_>, value: &str) -> fmt::Result {
    for (at, line) in wrap(value, WIDTH - INDENT).iter().enumerate() {
        let indent = if at == 0 { 0 } else { INDENT };
        writeln!(f, "{:indent$}{line}", "")?;
    }
    Ok(())
}

/// Lines of at most `width` characters where words allow it; at least one line.
pub fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines = Vec::new();
    let mut line = String::new();
    for word in text.split_whitespace() {
        if !line.is_empty() && line.chars().count() + 1 + word.chars().count() > width {
            lines.push(std::mem::take(&mut line));
        }
        if !line.is_empty() {
            line.push(' ');
        }
        line.push_str(word);
    }
    lines.push(line);
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalogue::Code;
    use crate::verdict::Policy;

    #[test]
    fn a_refusal_shows_every_value_within_the_line() {
        let verdict = Verdict {
            outcome: Outcome::Refused,
            policy: Policy::Strict,
            mismatches: vec![Mismatch {
                code: Code::PageSize,
                field: "page_group.pages.page_size".to_owned(),
                prefill: "64".to_owned(),
                decode: "1".to_owned(),
                why: "word ".repeat(40),
                fix: "Set it.".to_owned(),
            }],
            bridged: Vec::new(),
            warnings: Vec::new(),
        };
        let text = verdict.to_string();
        for part in [
            "REFUSED under policy strict: 1 mismatch;",
            "  1. page_size: page_group.pages.page_size\n",
            "     prefill 64\n",
            "     decode  1\n",
            "     why     word word",
            "\n             word",
            "     set     Set it.\n",
        ] {
            assert!(text.contains(part), "{part:?} is not in\n{text}");
        }
        assert!(text.lines().all(|line| line.len() <= WIDTH));
    }
}
