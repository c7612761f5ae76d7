//! The configuration as text: the effective one, the example file, and the reference page.

use super::Config;
use super::keys::{KEYS, Key};

/// The configuration in force, as a file that gives it again.
pub fn effective(config: &Config) -> String {
    let lines = KEYS.iter().map(|key| match (key.show)(config) {
        Some(value) => format!("{} = {value}\n", key.name),
        None => format!("# {} is not set\n", key.name),
    });
    lines.collect()
}

/// A complete example file: every key, with its default, and what it does.
pub fn example_file() -> String {
    let mut text = String::from(
        "# Configuration of kvferryd. Every key is here with its default; lines that begin with #key show what to\n\
         # write for keys that are not set by default. `kvferryd --check-config -c FILE` checks a file.\n",
    );
    for key in KEYS {
        text.push('\n');
        for line in wrapped(key.doc, 110) {
            text.push_str(&format!("# {line}\n"));
        }
        match default(key) {
            Some(value) => text.push_str(&format!("{} = {value}\n", key.name)),
            None => text.push_str(&format!("#{} = {}\n", key.name, key.example)),
        }
    }
    text
}

/// The reference page, `docs/configuration.md`.
pub fn reference_page() -> String {
    let mut text = String::from(
        "# Configuration of kvferryd\n\
         \n\
         `kvferryd --config FILE` reads a TOML file. Every key has a flag that overrides it: `limits.ranks` is\n\
         `--limits-ranks`. A key that does not exist is an error that names the line and the nearest key.\n\
         `kvferryd --check-config` prints the configuration that would be used and ends with 0, or with 2 when it is\n\
         not good, certificates included. `scripts/kvferryd.toml` is a complete file to begin with.\n\
         \n\
         This page is made from the code: `KVFERRY_WRITE_DOCS=1 cargo test -p kvferry-daemon` writes it again.\n",
    );
    for key in KEYS {
        let default = default(key).map_or_else(
            || format!("not set (example: `{}`)", key.example),
            |value| format!("`{value}`"),
        );
        text.push_str(&format!("\n## `{}`\n\n", key.name));
        for line in wrapped(key.doc, 110) {
            text.push_str(&format!("{line}\n"));
        }
        text.push_str(&format!("\nDefault: {default}\n"));
    }
    text
}

fn default(key: &Key) -> Option<String> {
    (key.show)(&Config::default())
}

fn wrapped(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let last = lines.len() - 1;
        if lines[last].is_empty() {
            lines[last].push_str(word);
        } else if lines[last].len() + 1 + word.len() <= width {
            lines[last].push(' ');
            lines[last].push_str(word);
        } else {
            lines.push(word.to_owned());
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::super::file;
    use super::*;

    #[test]
    fn the_effective_configuration_gives_itself_again() {
        let mut config = Config {
            checksum: true,
            allow_users: vec![3, 4],
            ..Config::default()
        };
        config.socket = "/tmp/with \"quotes\"".into();
        let mut again = Config::default();
        file::apply(&mut again, "effective", &effective(&config)).unwrap();
        assert_eq!(again, config);
    }

    #[test]
    fn the_example_file_is_the_default_and_its_examples_are_good() {
        let mut config = Config::default();
        file::apply(&mut config, "example", &example_file()).unwrap();
        assert_eq!(config, Config::default());
        let uncommented = example_file()
            .replace("\n#", "\n")
            .replace("\n ", "\n# ")
            .replacen('#', "##", 1);
        file::apply(&mut config, "example", &uncommented).unwrap();
        assert!(KEYS.iter().all(|key| (key.show)(&config).is_some()));
    }

    #[test]
    fn every_key_is_described() {
        for key in KEYS {
            assert!(key.doc.len() > 10, "{}", key.name);
            assert!(default(key).is_some() || !key.example.is_empty(), "{}", key.name);
        }
    }
}
