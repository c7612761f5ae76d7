//! The configuration file: TOML, of which every key must be known.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::Path;

use kvferry_handshake::edits;
use toml::de::{DeTable, DeValue};

use super::Config;
use super::keys::{KEYS, Setting};

/// Bytes of the longest file that is read.
const LONGEST: u64 = 1 << 20;

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

/// What the file holds, if that is no more than a configuration can need.
pub(super) fn read(path: &Path) -> io::Result<String> {
    let mut content = String::new();
    File::open(path)?.take(LONGEST + 1).read_to_string(&mut content)?;
    if u64::try_from(content.len()).is_ok_and(|len| len <= LONGEST) {
        return Ok(content);
    }
    Err(io::Error::other(format!("it has more than {LONGEST} bytes")))
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
        at(offset, error.message().to_owned())
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
        let set = setting(value.get_ref()).and_then(|setting| (known.set)(config, &setting));
        set.map_err(|message| at(offset, format!("{name}: {message}")))?;
    }
    Ok(())
}

fn unknown(name: &str) -> String {
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

fn setting(value: &DeValue<'_>) -> Result<Setting, String> {
    match value {
        DeValue::String(text) => Ok(Setting::Text(text.to_string())),
        DeValue::Boolean(value) => Ok(Setting::Bool(*value)),
        DeValue::Integer(integer) => {
            let text = integer.as_str().replace('_', "");
            let parsed = i64::from_str_radix(&text, integer.radix());
            parsed
                .map(Setting::Integer)
                .map_err(|_| format!("{text} is out of range"))
        }
        DeValue::Array(values) => {
            let values: Result<Vec<Setting>, String> =
                values.iter().map(|value| setting(value.get_ref())).collect();
            values.map(Setting::List)
        }
        other => Err(format!("a {} is not what it takes", other.type_str())),
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
                ":1: lanes_per_peer: must be a whole number from 1 to 64",
            ),
            ("checksum = 1", ":1: checksum: must be true or false"),
            ("socket = 3", ":1: socket: must be text in quotes"),
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
            ("limits = 3", ":1: there is no key \"limits\""),
            (
                "deadline_ms = 1.5",
                ":1: deadline_ms: a float is not what it takes",
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
    fn a_file_without_end_is_not_read_to_its_end() {
        let error = super::read(std::path::Path::new("/dev/zero")).unwrap_err();
        assert!(error.to_string().contains("1048576 bytes"), "{error}");
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
