//! The configuration file: TOML, of which every key must be known.

use std::io;
use std::path::Path;

use kvferry_handshake::edits;
use toml::de::{DeTable, DeValue};

use super::Config;
use super::keys::{KEYS, Setting};

/// Characters of a line that cannot be read that are shown.
const SHOWN: usize = 120;

/// What is wrong with the configuration.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("{file}: {message}")]
    File {
        /// Which.
        file: String,
        /// Why.
        message: String,
    },
    /// A line of the file.
    #[error("{file}:{line}: {message}")]
    Line {
        /// Which file.
        file: String,
        /// Which line, from 1.
        line: usize,
        /// What is wrong with it.
        message: String,
    },
    /// A key, wherever it was set.
    #[error("{key}: {message}")]
    Key {
        /// Which.
        key: &'static str,
        /// What is wrong with it.
        message: String,
    },
    /// The command line; the message is complete.
    #[error("{0}")]
    Flags(String),
}

impl ConfigError {
    pub(super) fn key(key: &'static str, message: impl Into<String>) -> ConfigError {
        ConfigError::Key {
            key,
            message: message.into(),
        }
    }
}

/// What the file says.
pub(super) fn read(path: &Path) -> io::Result<String> {
    String::from_utf8(crate::files::read(path)?).map_err(|error| {
        io::Error::other(format!(
            "it is no text: byte {} is not UTF-8",
            error.utf8_error().valid_up_to()
        ))
    })
}

/// Puts what the file says into `config`. Reports the first thing that is wrong.
pub(super) fn apply(config: &mut Config, name: &str, content: &str) -> Result<(), ConfigError> {
    let at = |offset: usize, message: String| ConfigError::Line {
        file: name.to_owned(),
        line: line_of(content, offset),
        message,
    };
    let table = DeTable::parse(content).map_err(|error| {
        let offset = error.span().map_or(0, |span| span.start);
        let line = content
            .lines()
            .nth(line_of(content, offset) - 1)
            .unwrap_or_default();
        let shown: String = line.trim().chars().take(SHOWN).collect();
        let message = error.message();
        at(offset, format!("{message}, in: {shown}"))
    })?;
    apply_table(config, "", table.get_ref(), &at)
}

fn apply_table(
    config: &mut Config,
    prefix: &str,
    table: &DeTable<'_>,
    at: &dyn Fn(usize, String) -> ConfigError,
) -> Result<(), ConfigError> {
    // The table is sorted by name; errors are wanted in the order of the file.
    let mut entries: Vec<_> = table.iter().collect();
    entries.sort_by_key(|(key, _)| key.span().start);
    for (key, value) in entries {
        let name = format!("{prefix}{}", key.get_ref());
        let offset = key.span().start;
        let inside = format!("{name}.");
        if let DeValue::Table(table) = value.get_ref()
            && KEYS.iter().any(|key| key.name.starts_with(&inside))
        {
            apply_table(config, &inside, table, at)?;
            continue;
        }
        let Some(known) = KEYS.iter().find(|key| key.name == name) else {
            return Err(at(offset, unknown(&name)));
        };
        let set = (known.set)(config, &setting(value.get_ref()));
        set.map_err(|message| at(offset, format!("{name}: {message}")))?;
    }
    Ok(())
}

fn unknown(name: &str) -> String {
    let inside = format!("{name}.");
    if let Some(key) = KEYS.iter().find(|key| key.name.starts_with(&inside)) {
        return format!(
            "{name:?} is a table: write the line [{name}], and its keys below it; one is {}",
            key.name
        );
    }
    let nearest = KEYS.iter().map(|key| (edits(name, key.name), key.name)).min();
    match nearest {
        Some((_, nearest)) => {
            format!(
                "there is no key {name:?}; the nearest is {nearest:?} (docs/configuration.md lists them all)"
            )
        }
        None => format!("there is no key {name:?}"),
    }
}

fn setting(value: &DeValue<'_>) -> Setting {
    match value {
        DeValue::String(text) => Setting::Text(text.to_string()),
        DeValue::Boolean(value) => Setting::Bool(*value),
        DeValue::Integer(integer) => {
            let text = integer.as_str().replace('_', "");
            i64::from_str_radix(&text, integer.radix()).map_or(Setting::Other(text), Setting::Integer)
        }
        DeValue::Float(float) => Setting::Other(float.as_str().to_owned()),
        DeValue::Array(values) => {
            Setting::List(values.iter().map(|value| setting(value.get_ref())).collect())
        }
        other => Setting::Other(format!("a {}", other.type_str())),
    }
}

fn line_of(content: &str, offset: usize) -> usize {
    let before = content.get(..offset).unwrap_or(content);
    before.matches('\n').count() + 1
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error(content: &str) -> String {
        let mut config = Config::default();
        apply(&mut config, "kvferryd.toml", content)
            .unwrap_err()
            .to_string()
    }

    #[test]
    fn a_misspelt_key_is_named_with_its_line_and_the_nearest_key() {
        let error = error("# comment\nlease_ms = 5000\n\nlanes_per_pear = 3\n");
        assert_eq!(
            error,
            "kvferryd.toml:4: there is no key \"lanes_per_pear\"; the nearest is \"lanes_per_peer\" \
             (docs/configuration.md lists them all)"
        );
    }

    #[test]
    fn a_misspelt_key_in_a_table_is_named_too() {
        let error = error("[limits]\nconnections = 10\nrank = 3\n");
        assert!(
            error.starts_with(
                "kvferryd.toml:3: there is no key \"limits.rank\"; the nearest is \"limits.ranks\""
            ),
            "{error}"
        );
        let error = self::error("[tsl]\nca = \"x\"\n");
        assert!(
            error.starts_with("kvferryd.toml:1: there is no key \"tsl\""),
            "{error}"
        );
    }

    #[test]
    fn values_out_of_bounds_or_of_another_type_are_named() {
        for (content, expected) in [
            (
                "lanes_per_peer = 0",
                ":1: lanes_per_peer: 0 is out of range: it must be a whole number from 1 to 64",
            ),
            (
                "lanes_per_peer = \"4\"",
                ":1: lanes_per_peer: \"4\" is no whole number from 1 to 64; write it without quotes",
            ),
            ("checksum = 1", ":1: checksum: 1 is not true or false"),
            (
                "socket = 3",
                ":1: socket: 3 is not text; write it in quotes: \"3\"",
            ),
            (
                "socket_mode = \"0999\"",
                ":1: socket_mode: \"0999\" is not octal from 0 to 0777",
            ),
            (
                "allow_users = [-1]",
                ":1: allow_users: -1 is out of range: it must be a whole number from 0 to 4294967295",
            ),
            (
                "policy = \"lax\"",
                ":1: policy: \"lax\" is not one of \"strict\", \"bridge\"",
            ),
            (
                "metrics_listen = \"9460\"",
                ":1: metrics_listen: \"9460\" is not an IP address and port, like 127.0.0.1:7460",
            ),
            ("advertise = \"node\"", ":1: advertise: \"node\" is not HOST:PORT"),
            ("limits = 3", ":1: \"limits\" is a table: write the line [limits]"),
            (
                "deadline_ms = 1.5",
                ":1: deadline_ms: 1.5 is no whole number from 100 to 86400000",
            ),
            (
                "advertise = \"0.0.0.0:7460\"",
                ":1: advertise: \"0.0.0.0:7460\" is every address of a node",
            ),
            (
                "socket = \"/run/\\u0000\"",
                ":1: socket: must not contain a NUL byte",
            ),
            (
                "log_level = \"a=b=c\"",
                ":1: log_level: \"c\" is no level; there are off, error, warn",
            ),
            (
                "log_level = \"warning\"",
                ":1: log_level: \"warning\" is no level",
            ),
            (
                "log_level = \"info,kvfery=debug\"",
                ":1: log_level: \"kvfery\" logs nothing; what logs begins with kvferry",
            ),
            ("\n\nchecksum = tru", ":3: "),
            (
                "socket_mode = 0600",
                ":1: unexpected leading zero, expected nothing, in: socket_mode = 0600",
            ),
            ("socket = \"\"", ":1: socket: is empty"),
            (
                "deadline_ms = 99999999999999999999",
                ":1: deadline_ms: 99999999999999999999 is no whole number from 100 to 86400000",
            ),
            (
                "allow_users = [\"root\"]",
                ":1: allow_users: \"root\" is no whole number from 0 to 4294967295",
            ),
            (
                "allow_users = 1000",
                ":1: allow_users: 1000 is no list of user ids; write it like [1000, 1001]",
            ),
            ("policy = {a = 1}", ":1: policy: a table is not text"),
        ] {
            let error = error(content);
            assert!(error.starts_with(&format!("kvferryd.toml{expected}")), "{error}");
        }
    }

    #[test]
    fn filters_of_levels_and_known_targets_are_taken() {
        for filter in [
            "warn",
            "INFO",
            "off",
            "info,kvferry_broker=debug",
            "warn,kvferry::transfer=off",
        ] {
            let mut config = Config::default();
            apply(&mut config, "a", &format!("log_level = {filter:?}")).unwrap();
            assert_eq!(config.log_level, filter);
        }
    }

    #[test]
    fn a_socket_path_is_no_longer_than_the_system_takes() {
        let with = |len: usize| {
            apply(
                &mut Config::default(),
                "a",
                &format!("socket = \"{}\"", "x".repeat(len)),
            )
        };
        with(103).unwrap();
        let error = with(104).unwrap_err().to_string();
        assert!(error.contains("104 bytes") && error.contains("103"), "{error}");
    }

    #[test]
    fn dotted_keys_and_tables_are_the_same() {
        let mut dotted = Config::default();
        apply(&mut dotted, "a", "limits.ranks = 7\ntls.ca = \"ca\"\n").unwrap();
        let mut tables = Config::default();
        apply(&mut tables, "b", "[tls]\nca = \"ca\"\n[limits]\nranks = 0x7\n").unwrap();
        assert_eq!(dotted, tables);
        assert_eq!(dotted.limits.ranks, 7);
    }
}
