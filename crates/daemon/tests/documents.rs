//! The pages and the example file that are made from the code are up to date.

#![allow(clippy::unwrap_used)] // a panic here is a failed test

use std::path::Path;

fn is_current(path: &str, expected: &str) {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(path);
    if std::env::var_os("KVFERRY_WRITE_DOCS").is_some() {
        std::fs::write(&file, expected).unwrap();
    }
    let found = std::fs::read_to_string(&file).unwrap();
    assert!(
        found == expected,
        "{path} is not what the code says; KVFERRY_WRITE_DOCS=1 cargo test -p kvferry-daemon writes it again"
    );
}

#[test]
fn the_configuration_is_documented() {
    is_current("docs/configuration.md", &kvferry_daemon::config::reference_page());
    is_current("scripts/kvferryd.toml", &kvferry_daemon::config::example_file());
}

#[test]
fn the_metrics_are_documented() {
    is_current("docs/metrics.md", &kvferry_daemon::metrics_page());
}
