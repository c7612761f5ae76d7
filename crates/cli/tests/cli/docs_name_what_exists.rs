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
