//! Start, metrics and end.

use std::time::Duration;

use kvferry_client::{ClientError, Progress, PublishRequest};
use kvferry_handshake::{Code, Ready, Role};
use kvferry_tests::engine::{Engine, fetch_request, named, tokens};
use kvferry_tests::geometry::{launch, llama_8b};
use kvferry_tests::memory::Kind;
use kvferry_tests::node::{Cluster, Options, free_port, get, get_status};
use kvferry_tests::pattern::Stamp;
use kvferry_tests::wait::{PATIENCE, until, within};

use crate::{carry, daemon};

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
