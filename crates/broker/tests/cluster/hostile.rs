//! A peer that says anything at all: no panic, no growth, and nothing of it is left.

use kvferry_broker::{Body, Input, PeerAddress, PeerMessage};
use kvferry_control::Fault;
use kvferry_handshake::{Code, Ready};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use std::sync::{Arc, Mutex};

use crate::engines::{id, tokens};
use crate::scene::{MOMENT, pair};
use crate::sim::{Cluster, DEADLINE};
use crate::wire::samples;

/// Real messages of a run, to be said again with something changed.
fn overheard() -> Vec<PeerMessage> {
    let mut cluster = Cluster::new(1, 3);
    let heard = Arc::new(Mutex::new(Vec::new()));
    let record = heard.clone();
    cluster.change(move |_, message| {
        record.lock().unwrap().push(message.clone());
        true
    });
    let (p, d) = pair(&mut cluster, &[0, 1], &[2, 1]);
    for name in ["a", "b", "c"] {
        cluster.publish_all(p, &id(name, 0), 9);
        cluster.fetch_all(d, p, &id(name, 0), 9);
        cluster.run_for(MOMENT);
    }
    cluster.publish_all(p, &id("e", 0), 9);
    cluster.abort(cluster.ranks_of(p)[0], &id("e", 0));
    cluster.hint(cluster.ranks_of(d)[0], p, &id("f", 0), true);
    cluster.run_for(2 * DEADLINE);
    let mut heard = heard.lock().unwrap().clone();
    heard.extend(samples().into_iter().map(|(_, body)| PeerMessage { to: 0, body }));
    // Many of them only say that a rank is still there.
    let mut keeps = 0;
    heard.retain(|message| {
        keeps += usize::from(matches!(message.body, Body::Keep { .. }));
        keeps < 10 || !matches!(message.body, Body::Keep { .. })
    });
    heard
}

/// The same message with a byte or two changed, if that is still a message.
fn changed(message: &PeerMessage, rng: &mut SmallRng) -> PeerMessage {
    for _ in 0..20 {
        let mut bytes = message.to_bytes().unwrap();
        for _ in 0..rng.random_range(1..3) {
            let at = rng.random_range(0..bytes.len());
            bytes[at] = [rng.random(), bytes[at].wrapping_add(1), 0, 1][rng.random_range(0..4)];
        }
        if let Ok(message) = PeerMessage::from_bytes(&bytes) {
            return message;
        }
    }
    message.clone()
}

#[test]
fn a_peer_that_says_anything_at_all() {
    let heard = overheard();
    for seed in 0..60 {
        let mut rng = SmallRng::seed_from_u64(seed);
        let mut cluster = Cluster::with(seed, 3, |_, config| {
            config.limits.pages = 5_000;
            config.limits.announced_per_peer = 50;
            config.limits.links = 20;
            config.limits.ended = 100;
            config.limits.declines = 100;
        });
        let (p, d) = pair(&mut cluster, &[0, 1], &[2, 1]);
        for name in ["a", "b"] {
            cluster.publish_all(p, &id(name, 0), 9);
        }
        cluster.fetch_all(d, p, &id("a", 0), 9);
        for _ in 0..2_000 {
            let node = rng.random_range(0..3usize);
            let from = rng.random_range(0..3usize);
            let message = &heard[rng.random_range(0..heard.len())];
            let mut message = changed(message, &mut rng);
            if rng.random_bool(0.8) {
                message.to = cluster.nodes[node].life;
            }
            let incarnation = cluster.nodes[from].life;
            let peer = if rng.random_bool(0.9) {
                cluster.nodes[from].address.clone()
            } else {
                PeerAddress(Arc::from("stranger:7400"))
            };
            cluster.input(
                node,
                Input::Peer {
                    peer,
                    incarnation,
                    message,
                },
            );
            if rng.random_range(0..20) == 0 {
                cluster.run_for(1_000);
            }
        }
        for node in 0..3 {
            let broker = cluster.nodes[node].broker.as_ref().unwrap();
            for (name, count) in broker.counts().into_iter().chain(broker.remembered()) {
                assert!(count <= 5_000, "{count} {name}");
            }
        }
        let rank = cluster.ranks_of(d)[0];
        cluster.fetch(rank, p, &id("b", 0), tokens(0, 9), 9);
        let peer = PeerAddress(Arc::from("stranger:7400"));
        for node in 0..3 {
            let cause = Fault::new(Code::PeerLost, "gone");
            cluster.input(
                node,
                Input::PeerDown {
                    peer: peer.clone(),
                    cause,
                },
            );
        }
        cluster.run_for(4 * DEADLINE);
        assert!(cluster.ledger.open.is_empty(), "{:?}", cluster.ledger.open);
        cluster.assert_nothing_is_left();
    }
}

#[test]
fn memory_of_what_a_peer_says_is_bounded() {
    let mut cluster = Cluster::with(1, 2, |_, config| {
        config.limits.ended = 50;
        config.limits.declines = 50;
        config.limits.links = 5;
        config.limits.announced_per_peer = 20;
    });
    let (p, d) = pair(&mut cluster, &[0], &[1]);
    let (prefill, decode) = (cluster.ranks_of(p)[0], cluster.ranks_of(d)[0]);
    for round in 0..400 {
        let name = format!("t{round}");
        cluster.hint(decode, p, &id(&name, 7), true);
        cluster.fetch(decode, p, &id(&name, 0), tokens(0, 1), 1);
        cluster.run_for(2_000);
        cluster.publish(prefill, &id(&name, 0), 1, Ready::complete(1), 1, None);
        if round % 2 == 0 {
            cluster.abort(decode, &id(&name, 0));
        }
        cluster.run_for(2_000);
    }
    for node in 0..2 {
        for (name, count) in cluster.nodes[node].broker.as_ref().unwrap().remembered() {
            assert!(count <= 120, "{count} {name} at node {node}");
        }
        let counts = cluster.counts(node);
        for name in ["publishes", "fetches", "announced", "jobs", "page_entries"] {
            assert_eq!(counts[name], 0, "{name} at node {node}");
        }
    }
    // Thousands of decode engines that were never heard of before.
    let (peer, incarnation) = (cluster.nodes[1].address.clone(), cluster.nodes[1].life);
    for life in 0..500 {
        let Some((
            _,
            Body::LinkOpen {
                envelope,
                policy,
                decode,
                ..
            },
        )) = samples().into_iter().find(|(name, _)| *name == "link_open")
        else {
            panic!("a sample");
        };
        let decode = kvferry_broker::EngineId { life, ..decode };
        let body = Body::LinkOpen {
            name: "p".to_owned(),
            decode,
            policy,
            envelope,
            known: None,
        };
        cluster.input(
            0,
            Input::Peer {
                peer: peer.clone(),
                incarnation,
                message: PeerMessage { to: 0, body },
            },
        );
    }
    let remembered = cluster.nodes[0].broker.as_ref().unwrap().remembered();
    let judgements = remembered
        .iter()
        .find(|(name, _)| name == "judgements")
        .unwrap()
        .1;
    assert_eq!(judgements, 5);
}

#[test]
fn a_message_beyond_its_bounds_is_not_acted_on() {
    for (len, end) in [(65_537, Err(Code::ProtocolViolation)), (65_536, Ok(0))] {
        let mut cluster = Cluster::new(1, 2);
        let announced = Arc::new(Mutex::new(None));
        let number = announced.clone();
        cluster.change(move |_, message| {
            if let Body::Announce(announce) = &message.body {
                *number.lock().unwrap() = Some(announce.fetch);
            }
            true
        });
        let (p, d) = pair(&mut cluster, &[0], &[1]);
        let decode = cluster.ranks_of(d)[0];
        cluster.fetch(decode, p, &id("a", 0), tokens(0, 0), 0);
        cluster.run_for(MOMENT);
        let fetch = announced.lock().unwrap().unwrap();
        let (peer, incarnation) = (cluster.nodes[0].address.clone(), cluster.nodes[0].life);
        let body = Body::PartState {
            fetch,
            rank: 0,
            serial: 0,
            moving: false,
            state: kvferry_broker::PartState::Final {
                end: 0,
                metadata: Some(vec![1; len]),
            },
        };
        let to = cluster.nodes[1].life;
        cluster.input(
            1,
            Input::Peer {
                peer: peer.clone(),
                incarnation,
                message: PeerMessage { to, body },
            },
        );
        let ended = cluster
            .end_of(decode, &id("a", 0))
            .map(|end| end.map_err(|cause| cause.code));
        assert_eq!(ended, Some(end), "{len}");
    }
}
