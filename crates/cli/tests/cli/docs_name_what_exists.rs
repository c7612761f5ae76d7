//! Paths and links in README.md and docs/ lead somewhere.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

fn pages(root: &Path) -> Vec<PathBuf> {
    let docs = fs::read_dir(root.join("docs"))
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let pages = docs.filter(|path| path.extension().is_some_and(|extension| extension == "md"));
    pages.chain([root.join("README.md")]).collect()
}

#[test]
fn every_path_and_link_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let (mut checked, mut missing) = (0, Vec::new());
    for page in pages(&root) {
        let text = fs::read_to_string(&page).unwrap();
        let quoted = text.split('`').filter(|word| {
            ["crates/", "docs/", "scripts/", "fuzz/"]
                .iter()
                .any(|prefix| word.starts_with(prefix))
                && !word.contains(|other: char| other.is_whitespace() || other == '*')
        });
        let linked = text.split("](").skip(1).filter_map(|rest| rest.split(')').next());
        let linked = linked.filter(|link| !link.contains("://") && !link.starts_with('#'));
        let paths = quoted
            .map(|path| root.join(path))
            .chain(linked.map(|link| page.parent().unwrap().join(link.split('#').next().unwrap())));
        for path in paths {
            checked += 1;
            if !path.exists() {
                missing.push(format!("{}: {}", page.display(), path.display()));
            }
        }
    }
    assert!(checked > 20, "only {checked} paths found: the search is broken");
    assert!(missing.is_empty(), "these do not exist:\n{}", missing.join("\n"));
}

fn words_in_quotes(text: &str) -> impl Iterator<Item = &str> {
    text.split('`').skip(1).step_by(2)
}

/// The tour names files by their whole path, and functions and types that are there.
#[test]
fn the_tour_of_the_code_names_whole_paths_and_what_is_there() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let tour = fs::read_to_string(root.join("docs/one-page.md")).unwrap();
    let mut sources = String::new();
    collect(&root.join("crates"), &mut sources);
    let (mut named, mut wrong) = (0, Vec::new());
    for word in words_in_quotes(&tour) {
        if word.ends_with(".rs") || word.ends_with('/') {
            named += 1;
            if !word.contains("crates/") {
                wrong.push(word);
            }
        } else if !word.contains(' ') && word != "kvferry" {
            named += 1;
            // `Type::function`, `Type` or a word of the protocol.
            let (of, name) = word
                .rsplit_once("::")
                .map_or((None, word), |(of, name)| (Some(of), name));
            let event = |name: &str| format!("Event::{}{}", name[..1].to_ascii_uppercase(), &name[1..]);
            let function = |name: &str| sources.contains(&format!("fn {name}("));
            let is_type = |name: &str| {
                ["struct", "enum", "trait"]
                    .iter()
                    .any(|kind| sources.contains(&format!("{kind} {name} ")))
            };
            let there = match of {
                Some(of) => is_type(of) && function(name),
                // Else an event.
                None => function(name) || is_type(name) || sources.contains(&event(name)),
            };
            if !there {
                wrong.push(word);
            }
        }
    }
    assert!(named > 40, "only {named} words found: the search is broken");
    assert!(
        wrong.is_empty(),
        "no whole paths, or not in the sources: {wrong:?}"
    );
}

/// All sources of the crates, one after the other.
fn collect(folder: &Path, sources: &mut String) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            if path.file_name().is_some_and(|name| name != "tests") {
                collect(&path, sources);
            }
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            sources.push_str(&fs::read_to_string(&path).unwrap());
        }
    }
}

#[test]
fn the_example_of_the_plan_page_prints_what_the_page_shows() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let page = fs::read_to_string(root.join("docs/plan.md")).unwrap();
    let command = page
        .split("    kvferry plan")
        .nth(1)
        .unwrap()
        .split("\n\n")
        .next()
        .unwrap();
    let arguments = command
        .split_whitespace()
        .filter(|word| *word != "\\")
        .map(|word| word.trim_matches('\''));
    let output = Command::new(env!("CARGO_BIN_EXE_kvferry"))
        .current_dir(&root)
        .arg("plan")
        .args(arguments)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let shown = page
        .lines()
        .map(str::trim)
        .find(|line| line.starts_with("{\"source_rank\""))
        .unwrap();
    let moves = String::from_utf8_lossy(&output.stdout);
    assert!(moves.lines().any(|line| line == shown), "{shown}\n{said}");
}
