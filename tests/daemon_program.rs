//! `kvferryd` as operators meet it: its configuration, its socket, its ports, its end.

#![allow(clippy::unwrap_used, missing_docs)] // a panic here is a failed test

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use kvferry_client::{ClientError, Progress, PublishRequest};
use kvferry_handshake::{Code, Ready, Role};
use kvferry_tests::certificates::Authority;
use kvferry_tests::engine::{Carry, Engine, fetch_request, named, tokens};
use kvferry_tests::geometry::{launch, llama_8b};
use kvferry_tests::memory::Kind;
use kvferry_tests::node::{Cluster, Options, free_port, get, get_status};
use kvferry_tests::pattern::Stamp;
use kvferry_tests::process::{Ran, run};
use kvferry_tests::programs::kvferryd;
use kvferry_tests::wait::{PATIENCE, until, within};

fn daemon(arguments: &[&str]) -> Ran {
    run(&kvferryd(), arguments, PATIENCE)
}

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

/// For each key, what the file says, and what the flag says against it.
const TEXTS: &[(&str, &str, &str)] = &[
    ("socket", "/tmp/x", "/tmp/y"),
    ("socket_mode", "0640", "0660"),
    ("peer_listen", "127.0.0.1:1", "127.0.0.1:2"),
    ("advertise", "a:1", "b:2"),
    ("tls.ca", "/ca", "/other-ca"),
    ("tls.cert", "/cert", "/other-cert"),
    ("tls.key", "/key", "/other-key"),
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
    let (mut content, mut arguments) = (String::new(), vec!["--check-config".to_owned()]);
    let mut wanted = BTreeMap::new();
    for (key, default) in &defaults {
        let text = TEXTS.iter().find(|(name, _, _)| name == key);
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
    let accepted = [
        "--check-config",
        listen,
        "--advertise=node:7460",
        "--insecure-peers-without-tls",
    ];
    assert_eq!(daemon(&accepted).code, Some(0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn certificates_that_cannot_be_used_are_named() {
    let cluster = Cluster::new();
    let folder = cluster.folder();
    let (good, other) = (cluster.certificate("good"), cluster.certificate("other"));
    let garbage = folder.join("garbage");
    std::fs::write(&garbage, "no PEM here").unwrap();
    let nowhere = folder.join("nowhere.pem");
    let start = |ca: &Path, cert: &Path, key: &Path| {
        let socket = folder.join("tls.sock");
        let arguments = [
            format!("--socket={}", socket.display()),
            "--metrics-listen=off".to_owned(),
            format!("--peer-listen=127.0.0.1:{}", free_port()),
            format!("--tls-ca={}", ca.display()),
            format!("--tls-cert={}", cert.display()),
            format!("--tls-key={}", key.display()),
        ];
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        daemon(&arguments)
    };
    for (ca, cert, key, named) in [
        (&nowhere, &good.cert, &good.key, "nowhere.pem"),
        (&good.ca, &nowhere, &good.key, "nowhere.pem"),
        (&good.ca, &good.cert, &nowhere, "nowhere.pem"),
        (&garbage, &good.cert, &good.key, "garbage"),
        (&good.ca, &garbage, &good.key, "garbage"),
        (&good.ca, &good.cert, &garbage, "garbage"),
        (&good.ca, &good.cert, &other.key, "other.key"),
    ] {
        let ran = start(ca, cert, key);
        assert!(matches!(ran.code, Some(1 | 2)), "{ran:?}");
        assert!(ran.stderr.contains(named), "{named} is not in {}", ran.stderr);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_daemon_on_the_same_socket_or_port_is_refused() {
    let cluster = Cluster::new();
    let node = cluster.start("a", Options::default()).await;
    let socket = format!("--socket={}", node.socket().display());
    let peers = format!("--peer-listen=127.0.0.1:{}", free_port());
    let ran = daemon(&[&socket, &peers, "--metrics-listen=off"]);
    assert_eq!(ran.code, Some(1), "{}", ran.stderr);
    assert!(
        ran.stderr.contains(node.socket().to_str().unwrap()),
        "{}",
        ran.stderr
    );

    let other = format!("--socket={}", cluster.folder().join("other.sock").display());
    let ports = node.ports();
    for (key, port) in [
        ("peer-listen", ports.peer),
        ("metrics-listen", ports.metrics),
        ("data-listen", ports.data),
    ] {
        let taken = format!("--{key}=127.0.0.1:{port}");
        let mut arguments = vec![other.as_str(), taken.as_str()];
        if key != "peer-listen" {
            arguments.push(&peers);
        }
        if key != "metrics-listen" {
            arguments.push("--metrics-listen=off");
        }
        let ran = daemon(&arguments);
        assert_eq!(ran.code, Some(1), "{key}: {}", ran.stderr);
        assert!(ran.stderr.contains(&port.to_string()), "{key}: {}", ran.stderr);
    }
    // The first goes on, and its socket is still there.
    node.status().await;
    let prefill = launch(1, 16).envelope(&llama_8b()).unwrap();
    let decode = Engine::attach(named(&prefill, "decode", Role::Decode), &[&node], Kind::Memfd).await;
    let prefill = Engine::attach(named(&prefill, "prefill", Role::Prefill), &[&node], Kind::Memfd).await;
    carry("after the second", &prefill, &decode).await;
}

async fn carry(transfer: &str, prefill: &Engine, decode: &Engine) {
    let carry = Carry {
        transfer,
        tokens: 100,
        held: 0,
        sparse: false,
        fetch_first: false,
        path: None,
    };
    carry.run(prefill, decode).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_socket_left_by_a_killed_daemon_is_replaced() {
    let cluster = Cluster::new();
    let mut node = cluster.start("a", Options::default()).await;
    let before = node.status().await.incarnation;
    node.kill();
    assert!(node.socket().exists(), "a killed daemon cannot remove its socket");
    node.restart().await;
    assert_ne!(node.status().await.incarnation, before);
    let ended = node.terminate(PATIENCE);
    assert!(ended.success(), "{ended}");
    assert!(!node.socket().exists(), "a daemon that ends removes its socket");

    std::fs::write(node.socket(), "precious").unwrap();
    let socket = format!("--socket={}", node.socket().display());
    let ran = daemon(&[
        &socket,
        "--metrics-listen=off",
        &format!("--peer-listen=127.0.0.1:{}", free_port()),
    ]);
    assert_eq!(ran.code, Some(1));
    assert!(ran.stderr.contains("is not a socket"), "{}", ran.stderr);
    assert_eq!(std::fs::read(node.socket()).unwrap(), b"precious");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_metrics_tell_what_happened() {
    let cluster = Cluster::new();
    let [a, b] = cluster.start_two(Options::default()).await;
    assert_eq!(get(a.ports().metrics, "/healthz"), "ok\n");
    let envelope = launch(1, 16).envelope(&llama_8b()).unwrap();
    let prefill = Engine::attach(named(&envelope, "prefill", Role::Prefill), &[&a], Kind::Memfd).await;
    let far = Engine::attach(named(&envelope, "far", Role::Decode), &[&b], Kind::Memfd).await;
    let near = Engine::attach(named(&envelope, "near", Role::Decode), &[&a], Kind::Memfd).await;
    carry("one", &prefill, &far).await;
    carry("two", &prefill, &far).await;
    carry("three", &prefill, &near).await;
    let unknown = near.ranks[0].rank.abort(&Stamp::of("nobody").transfer()).await;
    assert!(matches!(unknown, Err(ClientError::Refused(fault)) if fault.code == Code::TransferUnknown));

    // 100 tokens of 2 layers, k and v, 8 heads of 128 elements of 2 bytes.
    let bytes = 100 * 2 * 2 * 8 * 128 * 2;
    let (at_a, at_b) = (a.metrics(), b.metrics());
    let has = |metrics: &str, line: String| {
        assert!(
            metrics.lines().any(|found| found == line),
            "{line} is not in\n{metrics}"
        );
    };
    has(
        &at_a,
        "kvferry_transfers_total{side=\"publish\",path=\"tcp\",cause=\"delivered\"} 2".into(),
    );
    has(
        &at_a,
        "kvferry_transfers_total{side=\"publish\",path=\"local\",cause=\"delivered\"} 1".into(),
    );
    has(
        &at_a,
        "kvferry_transfers_total{side=\"fetch\",path=\"local\",cause=\"delivered\"} 1".into(),
    );
    has(
        &at_b,
        "kvferry_transfers_total{side=\"fetch\",path=\"tcp\",cause=\"delivered\"} 2".into(),
    );
    let peer = |node: &kvferry_tests::node::Node| node.address().to_owned();
    has(
        &at_b,
        format!(
            "kvferry_transfer_bytes_total{{side=\"fetch\",path=\"tcp\",peer=\"{}\"}} {}",
            peer(&a),
            2 * bytes
        ),
    );
    has(
        &at_a,
        format!(
            "kvferry_peer_sent_bytes_total{{peer=\"{}\",path=\"tcp\"}} {}",
            peer(&b),
            2 * bytes
        ),
    );
    has(
        &at_b,
        format!(
            "kvferry_peer_received_bytes_total{{peer=\"{}\",path=\"tcp\"}} {}",
            peer(&a),
            2 * bytes
        ),
    );
    has(
        &at_a,
        "kvferry_refusals_total{code=\"transfer_unknown\"} 1".into(),
    );
    has(&at_a, "kvferry_ranks{engine=\"prefill\"} 1".into());

    // One line of the log for each transfer.
    for (node, transfer) in [(&a, "one"), (&a, "three"), (&b, "two")] {
        let log = node.log();
        let told = log
            .lines()
            .any(|line| line.contains(transfer) && line.contains(&bytes.to_string()));
        assert!(told, "no line of {transfer} with its bytes in\n{log}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sigterm_lets_open_transfers_finish_and_refuses_new_ones() {
    let cluster = Cluster::new();
    // A grace beyond the test's patience: the daemon ends with its last transfer.
    let mut node = cluster
        .start("a", Options::default().set("grace_ms", 600_000))
        .await;
    let envelope = launch(1, 16).envelope(&llama_8b()).unwrap();
    let prefill = Engine::attach(named(&envelope, "prefill", Role::Prefill), &[&node], Kind::Memfd).await;
    let decode = Engine::attach(named(&envelope, "decode", Role::Decode), &[&node], Kind::Memfd).await;

    // A prompt of which half is computed.
    let stamp = Stamp::of("half");
    let source = prefill.draw(200, false);
    let half = Ready {
        tokens: 96,
        front_tokens: 96,
        ..Ready::default()
    };
    prefill.ranks[0].pool().fill(&source[0], &stamp, &half);
    let request = PublishRequest {
        transfer: stamp.transfer(),
        pages: Some(source[0].clone()),
        ready: half,
        metadata: None,
        serves: 1,
    };
    let publication = prefill.ranks[0].publish(request).await.unwrap();
    let fetched = decode
        .fetch(&prefill.address(), &stamp, tokens(0, 200), 200, false)
        .await;
    let unmet = Progress::default();
    within(PATIENCE, "the match", publication.moved_on(&unmet)).await;

    node.process().signal(rustix::process::Signal::TERM);
    let probe = || async {
        match get_status(node.ports().metrics, "/healthz") {
            503 => Ok(()),
            other => Err(other),
        }
    };
    until(PATIENCE, "it says that it drains", probe).await;
    let lists = decode.draw(20, false);
    let request = fetch_request(
        &prefill.address(),
        &Stamp::of("new"),
        &lists[0],
        tokens(0, 20),
        20,
    );
    match decode.ranks[0].rank.fetch(request).await {
        Err(ClientError::Refused(fault)) => assert_eq!(fault.code, Code::Shutdown, "{fault}"),
        other => panic!("a new fetch is not refused: {other:?}"),
    }

    // The rest of the open one is computed now.
    prefill.ranks[0]
        .pool()
        .fill(&source[0], &stamp, &Ready::complete(200));
    let updated = publication.update(Ready::complete(200), None, None).await;
    updated.unwrap();
    let ends = fetched.ended(PATIENCE).await;
    assert!(ends[0].is_ok(), "{ends:?}");
    decode.settle_fetch(&fetched, &ends, "delivered while draining");
    let status = node.process().wait(PATIENCE);
    assert!(status.success(), "{status}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_the_grace_open_transfers_end_with_shutdown() {
    let cluster = Cluster::new();
    let mut node = cluster.start("a", Options::default().set("grace_ms", 100)).await;
    let envelope = launch(1, 16).envelope(&llama_8b()).unwrap();
    let prefill = Engine::attach(named(&envelope, "prefill", Role::Prefill), &[&node], Kind::Memfd).await;
    let decode = Engine::attach(named(&envelope, "decode", Role::Decode), &[&node], Kind::Memfd).await;
    let published = prefill.publish(&Stamp::of("unmet"), 100, false).await;
    let lists = decode.draw(100, false);
    let request = fetch_request(
        &prefill.address(),
        &Stamp::of("unpublished"),
        &lists[0],
        tokens(0, 100),
        100,
    );
    let fetching = decode.ranks[0].fetch(request).await.unwrap();
    let status = node.terminate(PATIENCE);
    assert!(status.success(), "{status}");
    let publish = published.ended(PATIENCE).await.remove(0).unwrap_err();
    let fetch = within(Duration::from_secs(5), "the end", fetching.ended())
        .await
        .unwrap_err();
    assert_eq!(
        (publish.cause.code, fetch.cause.code),
        (Code::Shutdown, Code::Shutdown),
        "{publish} {fetch}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_of_another_authority_or_without_tls_is_refused_by_name() {
    let cluster = Cluster::new();
    let a = cluster.start("a", Options::default()).await;
    let foreign = Authority::new(cluster.folder(), "foreign").node("stranger");
    let path = |path: &Path| format!("{path:?}");
    let stranger = Options::default()
        .set("tls.ca", path(&foreign.ca))
        .set("tls.cert", path(&foreign.cert))
        .set("tls.key", path(&foreign.key))
        .set("deadline_ms", 3_000);
    let plain = Options {
        tls: false,
        ..Options::default().set("deadline_ms", 3_000)
    };
    let envelope = launch(1, 16).envelope(&llama_8b()).unwrap();
    let prefill = Engine::attach(named(&envelope, "prefill", Role::Prefill), &[&a], Kind::Memfd).await;
    for (name, options) in [("stranger", stranger), ("plain", plain)] {
        let node = cluster.start(name, options).await;
        let decode = Engine::attach(named(&envelope, name, Role::Decode), &[&node], Kind::Memfd).await;
        let stamp = Stamp::of(name);
        let published = prefill.publish(&stamp, 100, false).await;
        let fetched = decode
            .fetch(&prefill.address(), &stamp, tokens(0, 100), 100, false)
            .await;
        let ends = fetched.ended(PATIENCE).await;
        let failed = ends[0].as_ref().unwrap_err();
        let codes = [Code::PeerTls, Code::PeerUnreachable, Code::PeerLost];
        assert!(codes.contains(&failed.cause.code), "{name}: {failed}");
        assert!(failed.cause.message.contains(a.address()), "{name}: {failed}");
        if name == "stranger" {
            assert_eq!(failed.cause.code, Code::PeerTls, "{failed}");
        }
        decode.settle_fetch(&fetched, &ends, name);
        prefill.ranks[0].rank.abort(&stamp.transfer()).await.unwrap();
        published.ended(PATIENCE).await;
    }
    // The node goes on with peers of its own authority.
    let b = cluster.start("b", Options::default()).await;
    let decode = Engine::attach(named(&envelope, "decode", Role::Decode), &[&b], Kind::Memfd).await;
    carry("afterwards", &prefill, &decode).await;
}
