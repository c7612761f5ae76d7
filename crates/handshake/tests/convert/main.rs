//! The converter: what models cache under a launch, what is noted, and what is refused by name.

#![allow(clippy::unwrap_used)] // a panic here is a failed test

mod assumed;
mod attention;
mod launch;
mod models;
mod odd;
mod refused;
mod states;

use kvferry_handshake::{Code, Component, ConvertOptions, Converted, Envelope, Framework, convert};
use serde_json::Value;

fn words(command: &str) -> Vec<String> {
    command.split_whitespace().map(str::to_owned).collect()
}

fn converted(config: &Value, framework: Framework, command: &str) -> Converted {
    let converted = convert(
        &config.to_string(),
        framework,
        &words(command),
        &ConvertOptions::default(),
    );
    let converted = converted.unwrap_or_else(|error| panic!("{command}: {error}"));
    assert_eq!(
        Envelope::from_toml(&converted.to_toml()).as_ref(),
        Ok(&converted.envelope),
        "{command}"
    );
    converted
}

fn refused(config: &Value, framework: Framework, command: &str) -> String {
    let converted = convert(
        &config.to_string(),
        framework,
        &words(command),
        &ConvertOptions::default(),
    );
    let error = converted.map(|_| ()).expect_err(command);
    assert_eq!(error.code(), Code::FileInvalid);
    error.to_string()
}

fn component<'a>(converted: &'a Converted, name: &str) -> &'a Component {
    let found = converted.envelope.component(name);
    found.unwrap_or_else(|| panic!("{name} is not there")).1
}

/// Parts as (name, heads, width).
fn parts(component: &Component) -> Vec<(&str, u32, u32)> {
    component
        .parts
        .iter()
        .map(|part| (part.name.as_str(), part.heads, part.width))
        .collect()
}

fn noted(converted: &Converted, words: &str) -> bool {
    converted
        .notes
        .iter()
        .any(|note| note.text.contains(words) || note.field.contains(words))
}
