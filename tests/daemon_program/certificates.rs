//! Certificates that cannot be used, and peers that have others.

use std::path::Path;

use kvferry_handshake::{Code, Role};
use kvferry_tests::certificates::Authority;
use kvferry_tests::engine::{Engine, named, tokens};
use kvferry_tests::geometry::{launch, llama_8b};
use kvferry_tests::memory::Kind;
use kvferry_tests::node::{Cluster, Options, free_port};
use kvferry_tests::pattern::Stamp;
use kvferry_tests::wait::PATIENCE;

use crate::{carry, daemon};

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
