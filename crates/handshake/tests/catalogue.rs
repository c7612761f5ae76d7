//! The error catalogue: its page is current, and no source or page names a code that it does not have.

#![allow(clippy::unwrap_used)] // a panic here is a failed test

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

use kvferry_handshake::{Code, errors_page};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

#[test]
fn the_page_is_generated() {
    let path = root().join("docs/errors.md");
    if std::env::var_os("KVFERRY_WRITE_DOCS").is_some() {
        fs::write(&path, errors_page()).unwrap();
    }
    let stored = fs::read_to_string(&path).unwrap();
    assert!(
        stored == errors_page(),
        "docs/errors.md is not what the catalogue says; write it anew with\n    \
         KVFERRY_WRITE_DOCS=1 cargo test -p kvferry-handshake --test catalogue"
    );
}

#[test]
fn names_are_unique_and_entries_are_sentences() {
    let mut names = HashSet::new();
    let page = errors_page();
    for code in Code::ALL {
        let entry = code.entry();
        assert!(
            page.contains(&format!("\n### `{}`\n", entry.name)),
            "{} is not on the page",
            entry.name
        );
        assert!(names.insert(entry.name), "{} twice", entry.name);
        assert_eq!(Code::from_name(entry.name), Some(*code));
        assert!(
            entry.name.bytes().all(|b| b.is_ascii_lowercase() || b == b'_'),
            "{}",
            entry.name
        );
        for text in [entry.means, entry.trigger, entry.fix] {
            assert!(text.ends_with('.') && text.len() > 5, "{}: {text:?}", entry.name);
        }
    }
}

/// What stands before the name of a code wherever one is mentioned.
const BEFORE: [&str; 7] = [
    "kvferry explain ",
    "from_name(\"",
    "code=\"",
    "code = \"",
    "\"code\": \"",
    "\"code\":\"",
    "code `",
];

/// Names of codes in `text` that the catalogue does not have.
fn unknown_codes(text: &str) -> Vec<String> {
    let mut unknown = Vec::new();
    for before in BEFORE {
        for (at, _) in text.match_indices(before) {
            let rest = &text[at + before.len()..];
            let end = rest
                .find(|c: char| !c.is_ascii_lowercase() && c != '_')
                .unwrap_or(rest.len());
            let name = &rest[..end];
            if name.contains('_') && Code::from_name(name).is_none() {
                unknown.push(name.to_owned());
            }
        }
    }
    unknown
}

fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if name.starts_with('.') || name == "target" {
            continue;
        }
        if path.is_dir() {
            sources(&path, found);
        } else if [".rs", ".md", ".toml"].iter().any(|end| name.ends_with(end)) {
            found.push(path);
        }
    }
}

#[test]
fn every_code_that_is_mentioned_is_in_the_catalogue() {
    assert_eq!(
        unknown_codes("see `kvferry explain page_sise`, code `page_size`"),
        ["page_sise"]
    );
    let mut files = Vec::new();
    sources(&root(), &mut files);
    assert!(files.len() > 20);
    let this = Path::new(file!()).file_name();
    for path in files.iter().filter(|path| path.file_name() != this) {
        let text = fs::read_to_string(path).unwrap();
        assert_eq!(unknown_codes(&text), [""; 0], "{}", path.display());
    }
}

/// Words of docs/transfers.md that look like codes and are none: calls, states and keys.
const NO_CODES: &[&str] = &[
    "deadline_ms",
    "decline",
    "delivered",
    "expect",
    "failed",
    "lease_ms",
    "least",
    "refused",
    "unregister",
];

/// docs/transfers.md names codes as bare words, so each of its words is looked at.
#[test]
fn every_word_of_the_page_of_transfers_is_a_code_or_known_to_be_none() {
    let page = fs::read_to_string(root().join("docs/transfers.md")).unwrap();
    let words: HashSet<&str> = page
        .split('`')
        .skip(1)
        .step_by(2)
        .filter(|word| !word.is_empty() && word.bytes().all(|b| b.is_ascii_lowercase() || b == b'_'))
        .collect();
    let (codes, others): (Vec<&str>, Vec<&str>) = words
        .into_iter()
        .partition(|word| Code::from_name(word).is_some());
    assert!(codes.len() > 10, "only {codes:?}");
    let unknown: Vec<&&str> = others.iter().filter(|word| !NO_CODES.contains(word)).collect();
    assert!(unknown.is_empty(), "neither codes nor known words: {unknown:?}");
    for word in NO_CODES {
        assert!(others.contains(word), "{word:?} is not on the page any more");
    }
}
