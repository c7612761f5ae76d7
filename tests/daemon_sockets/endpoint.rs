//! The Prometheus endpoint.

use std::net::SocketAddr;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::rig::{Engine, Node, soon};

async fn get(address: SocketAddr, path: &str) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: test\r\n\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut response = String::new();
    soon("the response", stream.read_to_string(&mut response))
        .await
        .unwrap();
    response
}

#[tokio::test]
async fn transfers_are_counted_and_health_is_told() {
    let node = Node::start(&["--metrics-listen=127.0.0.1:0"]);
    let address = node.program.metrics.parse().unwrap();
    let (prefill, decode) = (
        Engine::attach(node.socket(), "p").await,
        Engine::attach(node.socket(), "d").await,
    );
    let publication = prefill
        .rank
        .publish(prefill.publish_of("t", &[1], 4))
        .await
        .unwrap();
    let fetching = decode
        .rank
        .fetch(decode.fetch_of(&node.source("p"), "t", &[2], 4))
        .await
        .unwrap();
    soon("delivery", fetching.ended()).await.unwrap();
    soon("the publish's end", publication.ended()).await.unwrap();
    decode.rank.unregister(9).await.unwrap_err();

    let metrics = get(address, "/metrics").await;
    for line in [
        "HTTP/1.1 200 OK\r",
        "kvferry_transfers_total{side=\"fetch\",path=\"local\",cause=\"delivered\"} 1",
        "kvferry_transfers_total{side=\"publish\",path=\"local\",cause=\"delivered\"} 1",
        "kvferry_refusals_total{code=\"region_unknown\"} 1",
        "kvferry_ranks{engine=\"p\"} 1",
        "kvferry_counts{name=\"data_regions\"} 2",
    ] {
        assert!(
            metrics.split('\n').any(|found| found == line),
            "{line} is not in\n{metrics}"
        );
    }
    assert!(get(address, "/healthz").await.starts_with("HTTP/1.1 200 OK"));
    assert!(get(address, "/").await.starts_with("HTTP/1.1 404"));
}

#[tokio::test]
async fn idle_scrapers_give_way() {
    let node = Node::start(&["--metrics-listen=127.0.0.1:0"]);
    let address = node.program.metrics.parse().unwrap();
    let mut idle = Vec::new();
    for _ in 0..40 {
        idle.push(TcpStream::connect(address).await.unwrap());
    }
    assert!(get(address, "/healthz").await.starts_with("HTTP/1.1 200 OK"));
}
