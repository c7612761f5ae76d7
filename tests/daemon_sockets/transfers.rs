//! Pages move, and every end is told.

use std::time::Duration;

use kvferry_client::{Event, Notice, Path, Progress, Side, TransferId};
use kvferry_handshake::{Code, Ready};

use crate::rig::{Authority, Engine, Node, PAGE_SIZE, POOL, count, envelope, soon, split};

/// Prefill and decode engines on these nodes; one transfer of `tokens`.
async fn carry(prefill_node: &Node, decode_node: &Node, path: Path) {
    let prefill = Engine::attach(prefill_node.socket(), "prefill").await;
    let decode = Engine::attach(decode_node.socket(), "decode").await;
    let source = prefill_node.source("prefill");
    for (at, tokens) in [1, 4, 37, 128].into_iter().enumerate() {
        let id = format!("t{at}");
        let seed = at as u64;
        let count = u32::try_from(tokens).unwrap().div_ceil(PAGE_SIZE);
        let from: Vec<u32> = (0..count).map(|k| (k * 7 + 3) % POOL).collect();
        let into: Vec<u32> = (0..count).map(|k| (k * 5 + 60) % POOL).collect();
        prefill.fill(&from, tokens, seed);
        decode.poison();
        let (publication, fetching) = if at % 2 == 0 {
            let publication = prefill
                .rank
                .publish(prefill.publish_of(&id, &from, tokens))
                .await
                .unwrap();
            let fetching = decode
                .rank
                .fetch(decode.fetch_of(&source, &id, &into, tokens))
                .await
                .unwrap();
            (publication, fetching)
        } else {
            let fetching = decode
                .rank
                .fetch(decode.fetch_of(&source, &id, &into, tokens))
                .await
                .unwrap();
            let publication = prefill
                .rank
                .publish(prefill.publish_of(&id, &from, tokens))
                .await
                .unwrap();
            (publication, fetching)
        };
        let delivered = soon("delivery", fetching.ended()).await.unwrap();
        decode.verify(&into, 0, tokens, seed);
        assert_eq!(delivered.tokens, tokens);
        assert_eq!(delivered.metadata, id.as_bytes());
        assert_eq!(delivered.report.paths, [(path, tokens * 3 * 2 * 2 * 512 * 2)]);
        let published = soon("the publish's end", publication.ended()).await.unwrap();
        assert_eq!(published.report.paths, delivered.report.paths);
    }
    for (node, name) in [
        (prefill_node, "publishes"),
        (decode_node, "fetches"),
        (decode_node, "jobs"),
    ] {
        node.settles(name, 0).await;
    }
}

#[tokio::test]
async fn within_a_node() {
    let node = Node::start(&[]);
    carry(&node, &node, Path::Local).await;
    node.settles("regions", 0).await;
    node.settles("data_regions", 0).await;
    node.settles("data_mapped_bytes", 0).await;
}

#[tokio::test]
async fn between_nodes_without_tls_on_loopback() {
    let (a, b) = (Node::start(&[]), Node::start(&["--checksum"]));
    carry(&a, &b, Path::Tcp).await;
    let status = a.status().await;
    let peer = &status.peers[0];
    assert_eq!(peer.address, b.program.advertised);
    assert_eq!(peer.state, "connected");
    assert!(peer.sent_bytes > 0 && peer.received_bytes == 0, "{peer:?}");
}

#[tokio::test]
async fn between_nodes_with_tls_and_encrypted_lanes() {
    let authority = Authority::new();
    for encrypt in [false, true] {
        let (a, b) = (
            authority.issue("a", &["127.0.0.1"]),
            authority.issue("b", &["127.0.0.1"]),
        );
        let more: &[&str] = if encrypt { &["--encrypt-lanes"] } else { &[] };
        let (a, b) = (Node::with_tls(&a, more), Node::with_tls(&b, more));
        carry(&a, &b, Path::Tcp).await;
    }
}

#[tokio::test]
async fn from_an_engine_whose_ranks_have_two_daemons() {
    let (home, other, third) = (Node::start(&[]), Node::start(&[]), Node::start(&[]));
    let at_home = Some(home.program.advertised.clone());
    // The second rank knocks before the first: its home takes it in all the same.
    let second = Engine::attach_rank(other.socket(), split("prefill"), 1, at_home).await;
    let first = Engine::attach_rank(home.socket(), split("prefill"), 0, None).await;
    let decode = Engine::attach(third.socket(), "decode").await;
    decode.poison();
    for rank in [&first, &second] {
        // Each fills all layers, but only its own are taken.
        rank.fill(&[7, 8, 9], 10, 3);
        rank.rank
            .publish(rank.publish_of("t", &[7, 8, 9], 10))
            .await
            .unwrap();
    }
    let fetching = decode
        .rank
        .fetch(decode.fetch_of(&home.source("prefill"), "t", &[1, 2, 3], 10))
        .await
        .unwrap();
    let delivered = soon("delivery", fetching.ended()).await.unwrap();
    decode.verify(&[1, 2, 3], 0, 10, 3);
    assert_eq!(delivered.report.peers.len(), 2);
    // Each came from the daemon that has the rank.
    let sent = |status: kvferry_client::Status| status.peers.iter().map(|peer| peer.sent_bytes).sum::<u64>();
    let (home, other) = (sent(home.status().await), sent(other.status().await));
    assert_eq!((home, other), (10 * 2 * 2 * 2 * 512 * 2, 10 * 2 * 2 * 512 * 2));
}

#[tokio::test]
async fn both_ways_over_one_channel() {
    let (a, b) = (Node::start(&[]), Node::start(&[]));
    let (at_a, at_b) = (
        Engine::attach(a.socket(), "x").await,
        Engine::attach(b.socket(), "y").await,
    );
    // Both daemons open a channel at the same time.
    let fetch_a = at_a.rank.fetch(at_a.fetch_of(&b.source("y"), "to-a", &[1, 2], 8));
    let fetch_b = at_b.rank.fetch(at_b.fetch_of(&a.source("x"), "to-b", &[1, 2], 8));
    let (fetch_a, fetch_b) = tokio::join!(fetch_a, fetch_b);
    at_a.fill(&[5, 6], 8, 1);
    at_b.fill(&[5, 6], 8, 2);
    at_a.rank
        .publish(at_a.publish_of("to-b", &[5, 6], 8))
        .await
        .unwrap();
    at_b.rank
        .publish(at_b.publish_of("to-a", &[5, 6], 8))
        .await
        .unwrap();
    soon("delivery to a", fetch_a.unwrap().ended()).await.unwrap();
    soon("delivery to b", fetch_b.unwrap().ended()).await.unwrap();
    assert_eq!(
        (a.count("peer_channels").await, b.count("peer_channels").await),
        (1, 1)
    );
}

#[tokio::test]
async fn one_rank_may_be_on_both_sides_of_a_transfer() {
    let node = Node::start(&[]);
    let engine = Engine::attach(node.socket(), "e").await;
    let mut notices = engine.rank.notices();
    engine.poison();
    engine.fill(&[1, 2], 8, 1);
    let publish = engine.publish_of("t", &[1, 2], 8);
    let publication = engine.rank.publish(publish).await.unwrap();
    let fetch = engine.fetch_of(&node.source("e"), "t", &[5, 6], 8);
    let fetching = engine.rank.fetch(fetch).await.unwrap();
    soon("delivery", fetching.ended()).await.unwrap();
    soon("the publish's end", publication.ended()).await.unwrap();
    let told = async {
        let mut told = Vec::new();
        while told.len() < 2 {
            if let Some(Notice::Event(Event::Delivered { side, .. })) = notices.next().await {
                told.push(side);
            }
        }
        told.sort();
        told
    };
    assert_eq!(soon("both ends", told).await, [Side::Publish, Side::Fetch]);
    node.settles("page_entries", 0).await;
}

#[tokio::test]
async fn a_refusal_names_every_mismatch_to_both_engines() {
    let (a, b) = (Node::start(&[]), Node::start(&[]));
    let prefill = Engine::attach(a.socket(), "prefill").await;
    let mut other = envelope("decode");
    other.identity.model = "another".into();
    other.components[0].element = kvferry_handshake::Element::Bf16;
    let decode = Engine::attach_as(b.socket(), other).await;
    let (mut at_prefill, mut at_decode) = (prefill.rank.notices(), decode.rank.notices());
    let fetching = decode
        .rank
        .fetch(decode.fetch_of(&a.source("prefill"), "t", &[1], 4))
        .await
        .unwrap();
    let failed = soon("the refusal", fetching.ended()).await.unwrap_err();
    assert_eq!(failed.cause.code, Code::LinkRefused, "{failed}");
    let codes: Vec<Code> = failed
        .cause
        .mismatches
        .iter()
        .map(|mismatch| mismatch.code)
        .collect();
    assert!(
        codes.contains(&Code::Model) && codes.contains(&Code::ElementType),
        "{codes:?}"
    );
    for notices in [&mut at_prefill, &mut at_decode] {
        let refused = async {
            loop {
                if let Some(Notice::Event(Event::Refused { verdict, .. })) = notices.next().await {
                    return verdict;
                }
            }
        };
        assert_eq!(
            soon("the refusal's notice", refused).await.mismatches.len(),
            codes.len()
        );
    }
}

#[tokio::test]
async fn an_engine_that_ends_frees_what_it_had_and_fails_what_it_did() {
    let (a, b) = (Node::start(&[]), Node::start(&[]));
    let prefill = Engine::attach(a.socket(), "prefill").await;
    let decode = Engine::attach(b.socket(), "decode").await;
    let publish = kvferry_client::PublishRequest {
        // Not all of it: it waits for more, which never comes.
        ready: Ready {
            tokens: 4,
            front_tokens: 4,
            front_layers: 0,
            end: None,
        },
        ..prefill.publish_of("t", &[1, 2], 8)
    };
    let publication = prefill.rank.publish(publish).await.unwrap();
    let fetching = decode
        .rank
        .fetch(decode.fetch_of(&a.source("prefill"), "t", &[1, 2], 8))
        .await
        .unwrap();
    soon("meeting", publication.moved_on(&Progress::default())).await;
    drop((prefill, publication));
    let failed = soon("the fetch's failure", fetching.ended()).await.unwrap_err();
    assert_eq!(failed.cause.code, Code::EngineGone, "{failed}");
    a.settles("ranks", 0).await;
    a.settles("data_regions", 0).await;
    a.settles("data_jobs", 0).await;
    b.settles("data_jobs", 0).await;
}

#[tokio::test]
async fn an_abort_ends_both_sides() {
    let (a, b) = (Node::start(&[]), Node::start(&[]));
    let prefill = Engine::attach(a.socket(), "prefill").await;
    let decode = Engine::attach(b.socket(), "decode").await;
    let mut publish = prefill.publish_of("t", &[1, 2], 8);
    publish.ready.end = None;
    publish.ready.tokens = 0;
    publish.ready.front_tokens = 0;
    let publication = prefill.rank.publish(publish).await.unwrap();
    let fetching = decode
        .rank
        .fetch(decode.fetch_of(&a.source("prefill"), "t", &[1, 2], 8))
        .await
        .unwrap();
    soon("meeting", publication.moved_on(&Progress::default())).await;
    decode.rank.abort(&TransferId::from("t")).await.unwrap();
    let (fetch, publish) = tokio::join!(
        soon("the fetch's end", fetching.ended()),
        soon("the publish's end", publication.ended())
    );
    assert_eq!(fetch.unwrap_err().cause.code, Code::Aborted);
    assert_eq!(publish.unwrap_err().cause.code, Code::Aborted);
}

/// Both engines abort, decline and fail at every stage; nothing of it is left.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hundreds_of_aborted_transfers_leave_the_counts_where_they_were() {
    let (a, b) = (Node::start(&[]), Node::start(&[]));
    let prefill = Engine::attach(a.socket(), "prefill").await;
    let decode = Engine::attach(b.socket(), "decode").await;
    let source = a.source("prefill");
    let warm = async |id: String| {
        let publication = prefill
            .rank
            .publish(prefill.publish_of(&id, &[1, 2, 3, 4], 16))
            .await
            .unwrap();
        let fetching = decode
            .rank
            .fetch(decode.fetch_of(&source, &id, &[5, 6, 7, 8], 16))
            .await
            .unwrap();
        soon("delivery", fetching.ended()).await.unwrap();
        soon("the publish's end", publication.ended()).await.unwrap();
    };
    warm("warm".into()).await;
    let counted = [
        "ranks",
        "regions",
        "links",
        "publishes",
        "fetches",
        "announced",
        "jobs",
        "page_entries",
        "data_regions",
        "data_jobs",
        "connections",
        "peer_channels",
    ];
    let mut before = Vec::new();
    for node in [&a, &b] {
        let status = node.status().await;
        before.push(counted.map(|name| count(&status, name)));
    }

    let mut ends = Vec::new();
    for at in 0..300 {
        let id = format!("t{at}");
        let transfer = TransferId::from(id.as_str());
        let publish = prefill.publish_of(&id, &[1, 2, 3, 4], 16);
        let fetch = decode.fetch_of(&source, &id, &[5, 6, 7, 8], 16);
        match at % 6 {
            // The publisher aborts before, or after, the fetch comes.
            0 => {
                ends.push(prefill.rank.publish(publish).await.unwrap());
                prefill.rank.abort(&transfer).await.unwrap();
            }
            1 | 2 => {
                ends.push(prefill.rank.publish(publish).await.unwrap());
                let fetching = decode.rank.fetch(fetch).await.unwrap();
                if at % 6 == 1 {
                    tokio::task::yield_now().await
                } else {
                    tokio::time::sleep(Duration::from_millis(2)).await
                }
                // It may have ended by itself.
                let _ = prefill.rank.abort(&transfer).await;
                let _ = soon("the fetch's end", fetching.ended()).await;
            }
            // The fetcher aborts before, or after, the publish comes; the publish it leaves behind is aborted, too.
            3 | 4 => {
                let fetching = decode.rank.fetch(fetch).await.unwrap();
                if at % 6 == 4 {
                    ends.push(prefill.rank.publish(publish).await.unwrap());
                }
                let _ = decode.rank.abort(&transfer).await;
                let _ = soon("the fetch's end", fetching.ended()).await;
                let _ = prefill.rank.abort(&transfer).await;
            }
            _ => {
                ends.push(prefill.rank.publish(publish).await.unwrap());
                decode.rank.decline(&source, &transfer).await.unwrap();
            }
        }
    }
    for publication in ends {
        let _ = soon("a publish's end", publication.ended()).await;
    }
    warm("after".into()).await;
    for (node, before) in [&a, &b].into_iter().zip(before) {
        for (name, before) in counted.into_iter().zip(before) {
            node.settles(name, before).await;
        }
    }
}
