//! The channel between daemons: who may open one, and what breaks one.

use std::time::Duration;

use kvferry_handshake::Code;
use kvferry_tests::certificates::NodeFiles;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::rig::{Authority, Engine, Node, soon};

/// A fetch from `source` at `node` fails; with which code and message.
async fn fetch_fails(node: &Node, source: &str) -> (Code, String) {
    let engine = Engine::attach(node.socket(), "decode").await;
    let fetching = engine
        .rank
        .fetch(engine.fetch_of(source, "t", &[1], 4))
        .await
        .unwrap();
    let failed = soon("the failure", fetching.ended()).await.unwrap_err();
    // A handle keeps the attachment.
    drop((engine, fetching));
    node.settles("ranks", 0).await;
    (failed.cause.code, failed.cause.message)
}

#[tokio::test]
async fn a_peer_that_is_not_there_is_named() {
    let node = Node::start(&[]);
    let free = TcpListener::bind("127.0.0.1:0")
        .await
        .unwrap()
        .local_addr()
        .unwrap();
    let (code, message) = fetch_fails(&node, &format!("kvferry://{free}/prefill")).await;
    assert_eq!(code, Code::PeerUnreachable);
    assert!(message.contains(&free.to_string()), "{message}");
    assert_eq!(node.status().await.peers[0].state, "peer_unreachable");
}

#[tokio::test]
async fn a_peer_that_dies_is_said_to_have_closed_the_connection() {
    let authority = Authority::new();
    let a = Node::with_tls(&authority.issue("a", &["127.0.0.1"]), &[]);
    let b = Node::with_tls(&authority.issue("b", &["127.0.0.1"]), &[]);
    let engine = Engine::attach(b.socket(), "decode").await;
    let prefill = Engine::attach(a.socket(), "prefill").await;
    let fetch = engine.fetch_of(&a.source("prefill"), "t", &[1], 4);
    let fetching = engine.rank.fetch(fetch).await.unwrap();
    a.settles("announced", 1).await;
    drop((a, prefill));
    let failed = soon("the failure", fetching.ended()).await.unwrap_err();
    assert_eq!(failed.cause.code, Code::PeerLost, "{failed}");
    assert!(
        failed.cause.message.contains("it closed the connection"),
        "{failed}"
    );
}

/// Puts the files of one authority in the place of another's.
fn renew(old: &NodeFiles, new: &NodeFiles) {
    for (old, new) in [(&old.ca, &new.ca), (&old.cert, &new.cert), (&old.key, &new.key)] {
        std::fs::copy(new, old).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn renewed_certificates_are_used_without_a_restart() {
    let (old, new) = (Authority::new(), Authority::new());
    let files = old.issue("a", &["127.0.0.1"]);
    let start = |files: &NodeFiles| Node::with_tls(files, &["--encrypt-lanes"]);
    let a = start(&files);
    let b = start(&new.issue("b", &["127.0.0.1"]));
    let prefill = Engine::attach(a.socket(), "prefill").await;
    let (code, message) = fetch_fails(&b, &a.source("prefill")).await;
    assert_eq!(code, Code::PeerTls, "{message}");

    renew(&files, &new.issue("renewed", &["127.0.0.1"]));
    prefill.fill(&[1], 4, 3);
    let decode = Engine::attach(b.socket(), "decode").await;
    decode.poison();
    // The channel, and a lane, with the new ones.
    let mut attempt = 0;
    let carried = async {
        loop {
            attempt += 1;
            let mut publish = prefill.publish_of("t", &[1], 4);
            let mut fetch = decode.fetch_of(&a.source("prefill"), "t", &[2], 4);
            (publish.transfer.attempt, fetch.transfer.attempt) = (attempt, attempt);
            prefill.rank.publish(publish).await.unwrap();
            let fetching = decode.rank.fetch(fetch).await.unwrap();
            match fetching.ended().await {
                Ok(_) => break,
                Err(failed) => assert_eq!(failed.cause.code, Code::PeerTls, "{failed}"),
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    soon("delivery with the new certificates", carried).await;
    decode.verify(&[2], 0, 4, 3);
}

#[tokio::test]
async fn certificates_of_another_authority_are_refused_either_way() {
    let (ours, theirs) = (Authority::new(), Authority::new());
    let a = Node::with_tls(&ours.issue("a", &["127.0.0.1"]), &[]);
    let b = Node::with_tls(&theirs.issue("b", &["127.0.0.1"]), &[]);
    for (from, to) in [(&a, &b), (&b, &a)] {
        let (code, message) = fetch_fails(from, &to.source("x")).await;
        assert_eq!(code, Code::PeerTls, "{message}");
        assert_eq!(to.count("peer_channels").await, 0);
    }
}

#[tokio::test]
async fn a_certificate_for_another_host_is_refused_either_way() {
    let authority = Authority::new();
    let a = Node::with_tls(&authority.issue("a", &["127.0.0.1"]), &[]);
    let b = Node::with_tls(&authority.issue("b", &["10.1.2.3", "elsewhere"]), &[]);
    // a does not believe the server; b's own greeting is not believed.
    let (code, message) = fetch_fails(&a, &b.source("x")).await;
    assert_eq!(code, Code::PeerTls, "{message}");
    let (code, message) = fetch_fails(&b, &a.source("x")).await;
    assert_eq!(code, Code::PeerTls);
    assert!(message.contains("subject alternative name"), "{message}");
}

#[tokio::test]
async fn tls_on_one_side_only_is_refused_either_way() {
    let a = Node::with_tls(&Authority::new().issue("a", &["127.0.0.1"]), &[]);
    let b = Node::start(&[]);
    let (code, message) = fetch_fails(&a, &b.source("x")).await;
    // It only closes: so does a daemon that ends just then.
    assert_eq!(code, Code::PeerUnreachable, "{message}");
    assert!(message.contains("or a peer without TLS"), "{message}");
    let (code, message) = fetch_fails(&b, &a.source("x")).await;
    assert_eq!(code, Code::PeerUnreachable);
    assert!(
        message.contains("set the tls keys on both daemons or on neither"),
        "{message}"
    );
}

#[tokio::test]
async fn daemons_that_do_not_encrypt_alike_refuse_each_other() {
    let authority = Authority::new();
    let a = Node::with_tls(&authority.issue("a", &["127.0.0.1"]), &[]);
    let files = authority.issue("b", &["127.0.0.1"]);
    let b = Node::with_tls(&files, &["--encrypt-lanes"]);
    for (from, to) in [(&a, &b), (&b, &a)] {
        let (code, message) = fetch_fails(from, &to.source("x")).await;
        assert_eq!(code, Code::PeerTls, "{message}");
        let b = &b.program.advertised;
        assert!(message.contains(&format!("{b} encrypts lanes and")), "{message}");
    }
}

#[tokio::test]
async fn a_daemon_has_one_name() {
    let (a, b) = (Node::start(&[]), Node::start(&[]));
    let port = b.program.port();
    let (code, message) = fetch_fails(&a, &format!("kvferry://localhost:{port}/x")).await;
    assert_eq!(code, Code::AddressInvalid);
    assert!(
        message.contains(&format!("calls itself 127.0.0.1:{port}")),
        "{message}"
    );
    // Itself, by another name.
    let port = a.program.port();
    let (code, message) = fetch_fails(&a, &format!("kvferry://localhost:{port}/x")).await;
    assert_eq!(code, Code::AddressInvalid, "{message}");
}

/// A greeting as the wire has it: length, magic, versions, address, incarnation, no data host, plain
/// lanes, release.
fn greeting(versions: (u32, u32), address: &str) -> Vec<u8> {
    let mut hello = b"kvferry\n".to_vec();
    hello.extend(versions.0.to_le_bytes());
    hello.extend(versions.1.to_le_bytes());
    hello.extend((address.len() as u64).to_le_bytes());
    hello.extend(address.as_bytes());
    hello.extend(77u64.to_le_bytes());
    hello.extend([0, 0]);
    hello.extend(5u64.to_le_bytes());
    hello.extend(b"9.9.9");
    let mut frame = u32::try_from(hello.len()).unwrap().to_le_bytes().to_vec();
    frame.extend(hello);
    frame
}

/// The answer's kind: 0 welcome, 1 duplicate, 2 refused; and its bytes.
async fn greet(node: &Node, greeting: &[u8]) -> (TcpStream, u32, Vec<u8>) {
    let mut stream = TcpStream::connect(&node.program.advertised).await.unwrap();
    stream.write_all(greeting).await.unwrap();
    let answer = async {
        let len = stream.read_u32_le().await.unwrap();
        let mut answer = vec![0; usize::try_from(len).unwrap()];
        stream.read_exact(&mut answer).await.unwrap();
        answer
    };
    let answer = soon("the answer", answer).await;
    let kind = u32::from_le_bytes(answer[..4].try_into().unwrap());
    (stream, kind, answer)
}

async fn is_closed(mut stream: TcpStream) {
    let mut rest = Vec::new();
    // Closed or reset: either way it is over.
    let _ = soon("the end of the connection", stream.read_to_end(&mut rest)).await;
}

#[tokio::test]
async fn no_common_version_is_refused_by_name() {
    let node = Node::start(&[]);
    let (stream, kind, answer) = greet(&node, &greeting((8, 9), "10.0.0.9:1")).await;
    assert_eq!(kind, 2);
    let answer = String::from_utf8_lossy(&answer).into_owned();
    assert!(
        answer.contains("protocol_version") && answer.contains("8 to 9"),
        "{answer}"
    );
    is_closed(stream).await;
    // One that speaks ours, too, is welcome.
    let (_stream, kind, _) = greet(&node, &greeting((1, 9), "10.0.0.9:1")).await;
    assert_eq!(kind, 0);
}

#[tokio::test]
async fn a_peer_that_says_nonsense_is_cut_and_costs_the_others_nothing() {
    let (node, other) = (Node::start(&[]), Node::start(&[]));
    let prefill = Engine::attach(node.socket(), "prefill").await;
    for (at, nonsense) in [
        [255, 255, 255, 255].as_slice(),
        &[4, 0, 0, 0, 9, 9, 9, 9],
        &[5, 0, 0, 0, 2, 0, 0, 0, 0],
        &[0, 0, 0, 0],
        &[100, 0, 0, 0, 1],
    ]
    .into_iter()
    .enumerate()
    {
        let address = format!("10.0.0.9:{}", at + 1);
        let (mut stream, kind, _) = greet(&node, &greeting((1, 1), &address)).await;
        assert_eq!(kind, 0);
        stream.write_all(nonsense).await.unwrap();
        stream.shutdown().await.unwrap();
        is_closed(stream).await;
    }
    for greeting in [
        greeting((1, 1), "no address"),
        greeting((1, 1), &node.program.advertised),
    ] {
        let (stream, kind, _) = greet(&node, &greeting).await;
        assert_eq!(kind, 2);
        is_closed(stream).await;
    }
    let mut not_ours = greeting((1, 1), "10.0.0.9:1");
    not_ours[4] = b'K';
    let (stream, kind, _) = greet(&node, &not_ours).await;
    assert_eq!(kind, 2);
    is_closed(stream).await;
    node.settles("peer_channels", 0).await;

    let decode = Engine::attach(other.socket(), "decode").await;
    prefill.fill(&[1], 4, 1);
    prefill
        .rank
        .publish(prefill.publish_of("t", &[1], 4))
        .await
        .unwrap();
    let fetching = decode
        .rank
        .fetch(decode.fetch_of(&node.source("prefill"), "t", &[2], 4))
        .await
        .unwrap();
    soon("delivery", fetching.ended()).await.unwrap();
}

#[tokio::test]
async fn a_silent_peer_is_noticed() {
    let node = Node::start(&["--peer-timeout-ms=2000"]);
    let (_stream, kind, _) = greet(&node, &greeting((1, 1), "10.0.0.9:1")).await;
    assert_eq!(kind, 0);
    assert_eq!(node.count("peer_channels").await, 1);
    node.settles("peer_channels", 0).await;
    assert_eq!(node.status().await.peers[0].state, "peer_lost");
}

#[tokio::test]
async fn peers_that_have_nothing_to_say_stay_connected() {
    let quick = ["--peer-timeout-ms=2000", "--deadline-ms=300"];
    let (a, b) = (Node::start(&quick), Node::start(&quick));
    let decode = Engine::attach(b.socket(), "decode").await;
    let fetching = decode
        .rank
        .fetch(decode.fetch_of(&a.source("nobody"), "t", &[1], 4))
        .await
        .unwrap();
    let failed = soon("the failure", fetching.ended()).await.unwrap_err();
    assert_eq!(failed.cause.code, Code::EngineUnknown, "{failed}");
    assert_ne!(a.status().await.incarnation, b.status().await.incarnation);
    tokio::time::sleep(Duration::from_millis(2_500)).await;
    assert_eq!(
        (a.count("peer_channels").await, b.count("peer_channels").await),
        (1, 1)
    );
}
