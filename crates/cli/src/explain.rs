//! `kvferry explain`: the error catalogue.

use std::io::Write;

use clap::Args;
use kvferry_handshake::{Area, Code, Entry, Retry, edits};

use crate::exit::{Exit, bad_input};
use crate::text::labelled;

/// What a code means, what triggers it and how to fix it.
#[derive(Args, Debug)]
pub struct Explain {
    /// The code, as messages, logs and metrics carry it; without it, all are listed
    code: Option<String>,
}

impl Explain {
    pub(crate) fn run(&self, out: &mut impl Write) -> anyhow::Result<Exit> {
        match &self.code {
            None => list(out)?,
            Some(name) => {
                let wanted = name.trim().to_ascii_lowercase().replace('-', "_");
                let code = Code::from_name(&wanted).ok_or_else(|| unknown(name, &wanted))?;
                entry(out, &code.entry())?;
            }
        }
        Ok(Exit::Done)
    }
}

fn list(out: &mut impl Write) -> std::io::Result<()> {
    let widest = Code::ALL.iter().map(|code| code.name().len()).max().unwrap_or(0);
    let mut area = None;
    for entry in Code::ALL.iter().map(|code| code.entry()) {
        if area != Some(entry.area) {
            let gap = if area.is_some() { "\n" } else { "" };
            writeln!(out, "{gap}{}:", area_name(entry.area))?;
            area = Some(entry.area);
        }
        writeln!(out, "  {:widest$}  {}", entry.name, entry.means)?;
    }
    Ok(())
}

fn entry(out: &mut impl Write, entry: &Entry) -> std::io::Result<()> {
    writeln!(out, "{}  ({})", entry.name, area_name(entry.area))?;
    labelled(out, "means", entry.means)?;
    labelled(out, "trigger", entry.trigger)?;
    labelled(out, "fix", entry.fix)?;
    let retry = match entry.retry {
        Retry::Yes => "Trying again after a pause can help.",
        Retry::No => "Trying again unchanged does not help.",
    };
    labelled(out, "retry", retry)
}

fn area_name(area: Area) -> &'static str {
    match area {
        Area::Envelope => "one envelope",
        Area::Verdict => "a pair of envelopes",
        Area::Attach => "attaching and registering",
        Area::Transfer => "transfers",
        Area::Peer => "between daemons",
        Area::Input => "frames, files and configuration",
    }
}

fn unknown(given: &str, wanted: &str) -> anyhow::Error {
    let mut names: Vec<&str> = Code::ALL.iter().map(|code| code.name()).collect();
    names.sort_by_key(|name| (!name.contains(wanted), edits(wanted, name)));
    bad_input(format!(
        "no code is named {given:?}; the nearest are {}. `kvferry explain` lists all.",
        names[..3.min(names.len())].join(", ")
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(code: Option<&str>) -> anyhow::Result<String> {
        let mut out = Vec::new();
        let code = code.map(str::to_owned);
        Explain { code }.run(&mut out)?;
        Ok(String::from_utf8(out).unwrap())
    }

    #[test]
    fn every_code_is_listed_and_explained() {
        let list = run(None).unwrap();
        for code in Code::ALL {
            assert!(list.contains(code.name()), "{code} is not listed");
            let text = run(Some(code.name())).unwrap();
            let first_word = code.entry().fix.split(' ').next().unwrap();
            assert!(text.contains(first_word) && text.contains("trigger"), "{text}");
        }
    }

    #[test]
    fn a_misspelt_code_names_the_nearest() {
        let error = run(Some("page_siez")).unwrap_err().to_string();
        assert!(error.contains("page_size"), "{error}");
        let error = run(Some("overlap")).unwrap_err().to_string();
        assert!(
            error.contains("region_overlap") && error.contains("placement_overlap"),
            "{error}"
        );
    }

    #[test]
    fn case_and_dashes_are_forgiven() {
        assert!(run(Some("Page-Size")).unwrap().starts_with("page_size"));
    }
}
