//! The command line: a flag for every key of the file.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Arg, ArgAction, Command};

use super::keys::{KEYS, Key, Kind, Setting};
use super::{Config, ConfigError, file};

/// What the command line asks for.
#[derive(Clone, Debug, PartialEq)]
pub enum Invocation {
    /// Run with this configuration.
    Run(Box<Config>),
    /// Print it and end.
    Check(Box<Config>),
    /// Print this text and end: `--help` or `--version`.
    Print(String),
}

/// Reads flags, and the file that they name; flags override the file. Nothing but that file is touched.
pub fn parse(arguments: impl IntoIterator<Item = OsString>) -> Result<Invocation, ConfigError> {
    let matches = match command().try_get_matches_from(arguments) {
        Ok(matches) => matches,
        Err(error) if !error.use_stderr() => return Ok(Invocation::Print(error.to_string())),
        Err(error) => return Err(ConfigError::Flags(error.to_string().trim_end().to_owned())),
    };
    let mut config = Config::default();
    if let Some(path) = matches.get_one::<PathBuf>("config") {
        let name = path.display().to_string();
        let content = file::read(path).map_err(|error| ConfigError::File {
            file: name.clone(),
            message: format!("the configuration file cannot be read: {error}"),
        })?;
        file::apply(&mut config, &name, &content)?;
    }
    for key in KEYS {
        let Some(text) = matches.get_one::<String>(key.name) else {
            continue;
        };
        let set = setting(key.kind, text).and_then(|setting| (key.set)(&mut config, &setting));
        set.map_err(|message| ConfigError::Flags(format!("--{}: {message}", flag(key))))?;
    }
    complete_tls(&config)?;
    config.check()?;
    let config = Box::new(config);
    Ok(if matches.get_flag("check-config") {
        Invocation::Check(config)
    } else {
        Invocation::Run(config)
    })
}

fn complete_tls(config: &Config) -> Result<(), ConfigError> {
    let Some(tls) = &config.tls else {
        return Ok(());
    };
    for (key, path) in [
        ("tls.ca", &tls.ca),
        ("tls.cert", &tls.cert),
        ("tls.key", &tls.key),
    ] {
        if path.as_os_str().is_empty() {
            return Err(ConfigError::key(
                key,
                "is not set; tls.ca, tls.cert and tls.key are set together, or not at all",
            ));
        }
    }
    Ok(())
}

pub(super) fn command() -> Command {
    let keys = KEYS.iter().map(|key| {
        let argument = Arg::new(key.name)
            .long(flag(key))
            .help(key.doc)
            .hide_short_help(key.name.starts_with("limits."));
        match key.kind {
            // A flag alone says true.
            Kind::Bool => argument
                .num_args(0..=1)
                .default_missing_value("true")
                .require_equals(true)
                .value_name("BOOL"),
            Kind::Integer => argument.value_name("N").allow_negative_numbers(true),
            Kind::Integers => argument.value_name("N,N,..."),
            Kind::Text => argument.value_name("TEXT"),
        }
    });
    Command::new("kvferryd")
        .version(env!("CARGO_PKG_VERSION"))
        .about("The daemon that carries KV cache pages between inference engines; one runs on every node")
        .arg(
            Arg::new("config")
                .long("config")
                .short('c')
                .value_name("FILE")
                .value_parser(clap::value_parser!(PathBuf))
                .help("Configuration file (docs/configuration.md); the flags override it"),
        )
        .arg(
            Arg::new("check-config")
                .long("check-config")
                .action(ArgAction::SetTrue)
                .help("Print the configuration that would be used and end: 0 when it is good, 2 when not"),
        )
        .args(keys)
}

/// `limits.ranks` is `--limits-ranks`.
fn flag(key: &Key) -> String {
    key.name.replace(['.', '_'], "-")
}

fn setting(kind: Kind, text: &str) -> Result<Setting, String> {
    let integer = |text: &str| {
        let parsed = text.trim().parse::<i64>();
        parsed
            .map(Setting::Integer)
            .map_err(|_| format!("{text:?} is not a whole number"))
    };
    match kind {
        Kind::Text => Ok(Setting::Text(text.to_owned())),
        Kind::Integer => integer(text),
        Kind::Bool => match text {
            "true" => Ok(Setting::Bool(true)),
            "false" => Ok(Setting::Bool(false)),
            _ => Err(format!("{text:?} is not true or false")),
        },
        Kind::Integers if text.is_empty() => Ok(Setting::List(Vec::new())),
        Kind::Integers => {
            let values: Result<Vec<Setting>, String> = text.split(',').map(integer).collect();
            values.map(Setting::List)
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn run(arguments: &[&str]) -> Result<Config, String> {
        let arguments = ["kvferryd"].iter().chain(arguments).map(OsString::from);
        match parse(arguments) {
            Ok(Invocation::Run(config)) => Ok(*config),
            Ok(other) => panic!("{other:?}"),
            Err(error) => Err(error.to_string()),
        }
    }

    fn file(content: &str) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(content.as_bytes()).unwrap();
        file
    }

    #[test]
    fn the_command_line_is_sound() {
        command().debug_assert();
    }

    #[test]
    fn flags_override_the_file() {
        let file = file("lanes_per_peer = 3\ncopy_threads = 5\nlimits.ranks = 9\nchecksum = true\n");
        let config = [
            "--config",
            file.path().to_str().unwrap(),
            "--copy-threads",
            "6",
            "--limits-ranks=8",
            "--checksum=false",
        ];
        let config = run(&config).unwrap();
        assert_eq!(
            (config.lanes_per_peer, config.copy_threads, config.limits.ranks),
            (3, 6, 8)
        );
        assert!(!config.checksum);
    }

    #[test]
    fn every_key_has_a_flag_that_takes_what_the_key_shows() {
        let mut given = Config {
            insecure_peers_without_tls: true,
            checksum: true,
            ..Config::default()
        };
        given.advertise = Some("node-1:7460".parse().unwrap());
        given.data_listen = Some("10.0.0.1:7461".parse().unwrap());
        given.allow_users = vec![5, 6];
        given.tls = Some(super::super::TlsFiles {
            ca: "a".into(),
            cert: "b".into(),
            key: "c".into(),
        });
        let flags: Vec<String> = KEYS
            .iter()
            .map(|key| {
                let shown = (key.show)(&given).unwrap();
                let plain = shown.trim_matches(['"', '[', ']']).replace(", ", ",");
                format!("--{}={plain}", flag(key))
            })
            .collect();
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        assert_eq!(run(&flags).unwrap(), given);
    }

    #[test]
    fn without_tls_the_peer_port_is_loopback_unless_the_operator_accepts_it() {
        let error = run(&["--peer-listen", "10.0.0.1:7460"]).unwrap_err();
        assert!(
            error.starts_with("peer_listen: 10.0.0.1:7460 is not a loopback address"),
            "{error}"
        );
        run(&["--peer-listen", "10.0.0.1:7460", "--insecure-peers-without-tls"]).unwrap();
        run(&["--peer-listen", "127.0.0.9:7460"]).unwrap();
        let tls = [
            "--peer-listen=10.0.0.1:7460",
            "--tls-ca=a",
            "--tls-cert=b",
            "--tls-key=c",
        ];
        run(&tls).unwrap();
        let error = run(&tls[..3]).unwrap_err();
        assert!(error.starts_with("tls.key: is not set"), "{error}");
    }

    #[test]
    fn what_needs_another_key_says_so() {
        let error = run(&["--encrypt-lanes"]).unwrap_err();
        assert!(error.starts_with("encrypt_lanes: "), "{error}");
        let error = run(&["--peer-listen", "0.0.0.0:7460", "--insecure-peers-without-tls"]).unwrap_err();
        assert!(
            error.starts_with("advertise: peer_listen is 0.0.0.0:7460"),
            "{error}"
        );
    }

    #[test]
    fn a_bad_flag_or_file_is_named() {
        assert!(
            run(&["--lanes-per-pear", "3"])
                .unwrap_err()
                .contains("--lanes-per-peer")
        );
        assert_eq!(
            run(&["--lanes-per-peer", "x"]).unwrap_err(),
            "--lanes-per-peer: \"x\" is not a whole number"
        );
        assert!(
            run(&["--lease-ms=-1"])
                .unwrap_err()
                .starts_with("--lease-ms: -1 is out of range")
        );
        assert!(
            run(&["--config", "/nonexistent/x"])
                .unwrap_err()
                .starts_with("/nonexistent/x: ")
        );
    }
}
