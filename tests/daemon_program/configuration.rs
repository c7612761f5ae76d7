//! Files, flags, and what is said about those that cannot be used.

use std::collections::BTreeMap;
use std::path::Path;

use kvferry_tests::certificates::Authority;

use crate::daemon;

/// The lines `key = value` of a printed configuration; keys that are not set have no value.
fn settings(printed: &str) -> BTreeMap<String, Option<String>> {
    let of_line = |line: &str| match line.split_once(" = ") {
        Some((key, value)) => Some((key.to_owned(), Some(value.to_owned()))),
        None => {
            let key = line.strip_prefix("# ")?.strip_suffix(" is not set")?;
            Some((key.to_owned(), None))
        }
    };
    printed.lines().filter_map(of_line).collect()
}

#[test]
fn a_checked_configuration_gives_itself_again() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("kvferryd.toml");
    let content = "lease_ms = 5000\nsocket = \"/tmp/a b\"\n[limits]\nranks = 7\n";
    std::fs::write(&file, content).unwrap();
    let first = daemon(&["--check-config", "--config", file.to_str().unwrap()]);
    assert_eq!(first.code, Some(0), "{}", first.stderr);
    let printed = settings(&first.stdout);
    assert_eq!(printed["lease_ms"].as_deref(), Some("5000"));
    assert_eq!(printed["limits.ranks"].as_deref(), Some("7"));
    assert_eq!(printed["socket"].as_deref(), Some("\"/tmp/a b\""));
    std::fs::write(&file, &first.stdout).unwrap();
    let again = daemon(&["--check-config", "--config", file.to_str().unwrap()]);
    assert_eq!((again.code, again.stdout), (Some(0), first.stdout));
    assert!(!Path::new("/tmp/a b").exists(), "checking has a side effect");
}

#[test]
fn a_misspelt_key_is_named_with_its_line_and_the_nearest() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("kvferryd.toml");
    for (content, line, key, nearest) in [
        ("# fine\nlese_ms = 5\n", 2, "lese_ms", "lease_ms"),
        (
            "lease_ms = 5000\n[limits]\nrank = 5\n",
            3,
            "limits.rank",
            "limits.ranks",
        ),
        ("[tlss]\nca = \"x\"\n", 1, "tlss", "tls"),
    ] {
        std::fs::write(&file, content).unwrap();
        for check in [&["--check-config"][..], &[]] {
            let mut arguments = vec!["--config", file.to_str().unwrap()];
            arguments.extend(check);
            let ran = daemon(&arguments);
            assert_eq!(ran.code, Some(2), "{content}: {ran:?}");
            for told in [
                format!("kvferryd.toml:{line}:"),
                format!("{key:?}"),
                nearest.to_owned(),
            ] {
                assert!(
                    ran.stderr.contains(&told),
                    "{content}: {told} is not in {}",
                    ran.stderr
                );
            }
        }
    }
    let ran = daemon(&["--lese-ms", "5"]);
    assert_eq!(ran.code, Some(2));
    assert!(
        ran.stderr.contains("--lese-ms") && ran.stderr.contains("--lease-ms"),
        "{}",
        ran.stderr
    );
}

#[test]
fn values_that_no_key_takes_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("kvferryd.toml");
    for (content, named) in [
        ("lanes_per_peer = 0\n", "lanes_per_peer"),
        ("policy = \"lax\"\n", "policy"),
        ("checksum = 1\n", "checksum"),
        ("peer_listen = \"localhost\"\n", "peer_listen"),
        ("lease_ms = -1\n", "lease_ms"),
        ("lease_ms = 99999999999999999999\n", "lease_ms"),
        ("lease_ms = 5\nlease_ms = 6\n", "kvferryd.toml:2: duplicate key"),
        ("socket = \"\"\n", "socket"),
        ("advertise = \"nowhere\"\n", "advertise"),
        ("[tls]\nca = \"x\"\n", "tls.cert"),
        (
            "peer_listen = \"0.0.0.0:7460\"\ninsecure_peers_without_tls = true\n",
            "advertise",
        ),
        ("encrypt_lanes = true\n", "encrypt_lanes"),
        ("lease_ms = \n", "kvferryd.toml:1"),
    ] {
        std::fs::write(&file, content).unwrap();
        let ran = daemon(&["--check-config", "--config", file.to_str().unwrap()]);
        assert_eq!(ran.code, Some(2), "{content}: {ran:?}");
        assert!(
            ran.stderr.contains(named),
            "{content}: {named} is not in {}",
            ran.stderr
        );
    }
    let ran = daemon(&["--check-config", "--config", "/nowhere/kvferryd.toml"]);
    assert_eq!(ran.code, Some(2));
    assert!(ran.stderr.contains("/nowhere/kvferryd.toml"), "{}", ran.stderr);
}

/// What is wrong with a certificate is found before the daemon starts, and told with what to do.
#[test]
fn certificates_that_peers_would_refuse_are_told_with_dates_and_names() {
    let folder = tempfile::tempdir().unwrap();
    let authority = Authority::new(folder.path(), "ca");
    let good = authority.node("good");
    let others = Authority::new(folder.path(), "other-ca").node("foreign");
    let fifo = folder.path().join("fifo.pem");
    let made = std::process::Command::new("mkfifo").arg(&fifo).status().unwrap();
    assert!(made.success());
    let (past, future) = (
        authority.node_until("past", 2021),
        authority.node_until("future", 2090),
    );
    let cases: [(&Path, &Path, &Path, &[&str]); 9] = [
        (
            &past.ca,
            &past.cert,
            &past.key,
            &[
                "tls.cert",
                "past.pem",
                "until 2021-01-01 00:00 UTC, and now is 20",
                "issue",
            ],
        ),
        (
            &future.ca,
            &future.cert,
            &future.key,
            &["tls.cert", "from 2089-01-01 00:00 UTC on", "clock"],
        ),
        (
            &good.ca,
            &others.cert,
            &others.key,
            &["tls.cert", "foreign.pem", "no authority in", "ca.pem"],
        ),
        (
            &good.ca,
            &good.cert,
            &past.key,
            &["tls.key", "past.key", "good.pem"],
        ),
        (
            &good.ca,
            &good.cert,
            &good.cert,
            &["tls.key", "no private key in it"],
        ),
        (
            &good.key,
            &good.cert,
            &good.key,
            &["tls.ca", "no certificate in it"],
        ),
        (
            &good.ca,
            &good.cert,
            &fifo,
            &["tls.key", "fifo.pem", "no regular file"],
        ),
        (
            &good.ca,
            folder.path(),
            &good.key,
            &["tls.cert", "is a directory"],
        ),
        (
            &good.ca,
            Path::new("/nowhere.pem"),
            &good.key,
            &["tls.cert", "/nowhere.pem: cannot be read: No such file"],
        ),
    ];
    let check = |ca: &Path, cert: &Path, key: &Path, advertise: &str| {
        let flags = [("tls-ca", ca), ("tls-cert", cert), ("tls-key", key)];
        let mut flags: Vec<String> = flags
            .iter()
            .map(|(flag, path)| format!("--{flag}={}", path.display()))
            .collect();
        flags.push(format!("--advertise={advertise}"));
        flags.push("--check-config".to_owned());
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        daemon(&flags)
    };
    for (ca, cert, key, words) in cases {
        let ran = check(ca, cert, key, "127.0.0.1:7460");
        assert_eq!(ran.code, Some(2), "{ran:?}");
        for word in words {
            assert!(ran.stderr.contains(word), "{word} is not in {}", ran.stderr);
        }
    }
    let ran = check(&good.ca, &good.cert, &good.key, "node-1.example:7460");
    assert_eq!(ran.code, Some(2), "{ran:?}");
    for word in ["it is for", "localhost", "\"node-1.example\"", "advertise"] {
        assert!(ran.stderr.contains(word), "{word} is not in {}", ran.stderr);
    }
    assert_eq!(
        check(&good.ca, &good.cert, &good.key, "127.0.0.1:7460").code,
        Some(0)
    );
    let ran = daemon(&["--check-config", "--config", fifo.to_str().unwrap()]);
    assert!(
        ran.code == Some(2) && ran.stderr.contains("no regular file"),
        "{ran:?}"
    );
}

/// For each key, what the file says, and what the flag says against it.
const TEXTS: &[(&str, &str, &str)] = &[
    ("socket", "/tmp/x", "/tmp/y"),
    ("socket_mode", "0640", "0660"),
    ("peer_listen", "127.0.0.1:1", "127.0.0.1:2"),
    ("advertise", "localhost:1", "127.0.0.1:2"),
    ("data_listen", "127.0.0.1:3", "127.0.0.1:4"),
    ("policy", "strict", "bridge"),
    ("require", "any", "rdma"),
    ("metrics_listen", "127.0.0.1:5", "off"),
    ("log_level", "warn", "debug"),
    ("log_format", "text", "json"),
];

#[test]
fn every_flag_overrides_the_file() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("kvferryd.toml");
    let defaults = settings(&daemon(&["--check-config"]).stdout);
    assert!(defaults.len() > 25, "{defaults:?}");
    // Certificates are looked at, so they have to be good ones.
    let files = |name: &str| {
        let files = Authority::new(folder.path(), name).node(&format!("{name}-node"));
        [files.ca, files.cert, files.key].map(|path| path.display().to_string())
    };
    let (ours, others) = (files("ours"), files("others"));
    let tls = ["tls.ca", "tls.cert", "tls.key"]
        .iter()
        .zip(ours.iter().zip(&others));
    let texts: Vec<(&str, &str, &str)> = TEXTS
        .iter()
        .copied()
        .chain(tls.map(|(key, (file, flag))| (*key, file.as_str(), flag.as_str())))
        .collect();
    let (mut content, mut arguments) = (String::new(), vec!["--check-config".to_owned()]);
    let mut wanted = BTreeMap::new();
    for (key, default) in &defaults {
        let text = texts.iter().find(|(name, _, _)| name == key);
        let (in_file, in_flag, shown) = match (text, default.as_deref()) {
            (Some((_, file, flag)), _) => (format!("{file:?}"), (*flag).to_owned(), format!("{flag:?}")),
            (None, Some("[]")) => ("[1]".to_owned(), "2,3".to_owned(), "[2, 3]".to_owned()),
            (None, Some("false")) => ("false".to_owned(), "true".to_owned(), "true".to_owned()),
            (None, Some(number)) => {
                let number: u64 = number
                    .parse()
                    .unwrap_or_else(|_| panic!("{key}: what else does it take?"));
                (
                    (number + 1).to_string(),
                    (number + 2).to_string(),
                    (number + 2).to_string(),
                )
            }
            (None, None) => panic!("{key}: what does it take?"),
        };
        content.push_str(&format!("{key} = {in_file}\n"));
        arguments.push(format!("--{}={in_flag}", key.replace(['.', '_'], "-")));
        wanted.insert(key.clone(), Some(shown));
    }
    std::fs::write(&file, content).unwrap();
    let only_file = daemon(&["--check-config", "--config", file.to_str().unwrap()]);
    assert_eq!(only_file.code, Some(0), "{}", only_file.stderr);
    let from_file = settings(&only_file.stdout);
    arguments.extend(["--config".to_owned(), file.display().to_string()]);
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let overridden = daemon(&arguments);
    assert_eq!(overridden.code, Some(0), "{}", overridden.stderr);
    assert_eq!(settings(&overridden.stdout), wanted);
    for (key, value) in from_file {
        assert_ne!(value, wanted[&key], "{key} was not set by the file");
    }
}

#[test]
fn a_peer_port_that_others_reach_needs_tls_or_a_word_of_warning() {
    let listen = "--peer-listen=0.0.0.0:7460";
    let ran = daemon(&["--check-config", listen, "--advertise=node:7460"]);
    assert_eq!(ran.code, Some(2));
    for told in ["peer_listen", "tls.ca", "insecure_peers_without_tls"] {
        assert!(ran.stderr.contains(told), "{told} is not in {}", ran.stderr);
    }
    // It does not start either, which would be worse.
    assert_eq!(daemon(&[listen, "--advertise=node:7460"]).code, Some(2));
    let data = daemon(&["--check-config", "--data-listen=0.0.0.0:7461"]);
    assert_eq!(data.code, Some(2));
    for told in ["data_listen", "tls.ca", "insecure_peers_without_tls"] {
        assert!(data.stderr.contains(told), "{told} is not in {}", data.stderr);
    }
    let accepted = [
        "--check-config",
        listen,
        "--advertise=node:7460",
        "--insecure-peers-without-tls",
    ];
    assert_eq!(daemon(&accepted).code, Some(0));
}

#[test]
fn output_that_cannot_be_written_is_a_failure_that_names_it() {
    for asked in ["--check-config", "--version", "--help"] {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let ran = std::process::Command::new(kvferry_tests::programs::kvferryd())
            .arg(asked)
            .stdout(full)
            .output()
            .unwrap();
        let told = String::from_utf8(ran.stderr).unwrap();
        assert_eq!(ran.status.code(), Some(1), "{asked}: {told}");
        assert!(told.contains("standard output: No space left"), "{asked}: {told}");
    }
}
