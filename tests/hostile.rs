//! Connections that mean no good, or nothing at all: the daemon answers with a code or closes, holds nothing for them, and
//! serves everyone else.

#![allow(clippy::unwrap_used, missing_docs)] // a panic here is a failed test

use std::net::TcpStream;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use kvferry_client::SealedMemory;
use kvferry_control::{Call, Fetch, Memory, Publish, Request, Response};
use kvferry_handshake::{Code, PageLists, Ready, Role, Versions};
use kvferry_tests::bystanders::Bystanders;
use kvferry_tests::engine::{Carry, Engine, named, tokens};
use kvferry_tests::geometry::{launch, llama_8b, small};
use kvferry_tests::memory::Kind;
use kvferry_tests::node::{Cluster, Options, free_port};
use kvferry_tests::pattern::Stamp;
use kvferry_tests::proxy::{Proxy, mutate};
use kvferry_tests::raw::{RawEngine, call, framed, hello, raise_fd_limit, throw_at};
use kvferry_tests::wait::{PATIENCE, within};
use kvferry_tests::width::{by_width, seed};
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thousands_of_idle_connections() {
    raise_fd_limit();
    let cluster = Cluster::new();
    let nodes = cluster.start_two(Options::default()).await;
    let mut bystanders = Bystanders::on(nodes.into()).await;
    let (mut engines, mut peers) = (Vec::new(), Vec::new());
    for _ in 0..1_000 {
        engines.push(UnixStream::connect(bystanders.nodes[0].socket()).unwrap());
        let ports = bystanders.nodes[0].ports();
        for port in [ports.peer, ports.data] {
            peers.push(TcpStream::connect(("127.0.0.1", port)).unwrap());
        }
    }
    bystanders.carry().await;
    // Engines and daemons that come now are served too.
    let late = cluster.start("late", Options::default()).await;
    let envelope = launch(1, 16).envelope(&llama_8b()).unwrap();
    let far = Engine::attach(named(&envelope, "late-far", Role::Decode), &[&late], Kind::Memfd).await;
    let near = named(&envelope, "late-near", Role::Decode);
    let near = Engine::attach(near, &[&bystanders.nodes[0]], Kind::Memfd).await;
    for decode in [&far, &near] {
        let carry = Carry {
            transfer: decode.name(),
            tokens: 333,
            held: 0,
            sparse: false,
            fetch_first: false,
            path: None,
        };
        carry.run(&bystanders.prefill, decode).await;
    }
    drop((far, near, engines, peers));
    drop(late);
    // A late peer is one more link, for a while.
    for (node, before) in bystanders.nodes.iter().zip(&mut bystanders.before) {
        before.set("links", node.footprint().await.count("links"));
    }
    bystanders.go_on().await;
}

/// Memory that is handed over with any frame but the right one, or in numbers, is closed again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fds_where_none_belong() {
    let cluster = Cluster::new();
    let nodes = cluster.start_two(Options::default()).await;
    let bystanders = Bystanders::on(nodes.into()).await;
    let socket = bystanders.nodes[0].socket();
    let memory = SealedMemory::create("surplus", 8_192).unwrap();
    let register = |number| {
        let memory = Memory::Memfd {
            offset: 0,
            len: 8_192,
        };
        call(number, Call::Register { region: 0, memory })
    };
    for turn in 0..50 {
        let mut raw = RawEngine::greeted(&socket);
        let attach = Call::Attach {
            envelope: Box::new(named(&small(), &format!("fds-{turn}"), Role::Both)),
            rank: 0,
            home: None,
        };
        raw.say(&call(1, attach));
        assert!(matches!(
            raw.hear(PATIENCE),
            Some(Response::Answer { answer: Ok(_), .. })
        ));
        match turn % 4 {
            0 => {
                raw.say_with_fds(&register(2), &[memory.as_fd(), memory.as_fd()]);
                assert_eq!(raw.refusal().code, Code::RegionKind);
            }
            1 => {
                raw.say(&register(2));
                let fault = raw.refusal();
                assert_eq!(fault.code, Code::RegionKind);
                assert!(fault.message.contains("region 0"), "{fault}");
            }
            2 => {
                raw.say_with_fds(&call(2, Call::Status), &[memory.as_fd()]);
                let answer = raw.hear(PATIENCE);
                assert!(answer.is_some(), "a surplus fd leaves a call without answer");
            }
            _ => {
                let many = [memory.as_fd(); 64];
                raw.say_with_fds(&register(2), &many);
                assert_eq!(raw.refusal().code, Code::RegionKind);
            }
        }
    }
    bystanders.go_on().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_the_protocol_does_not_allow_is_refused_by_name() {
    let cluster = Cluster::new();
    let nodes = cluster.start_two(Options::default()).await;
    let bystanders = Bystanders::on(nodes.into()).await;
    let socket = bystanders.nodes[0].socket();
    let versions = |lowest, highest| framed(&Request::Hello(Versions { lowest, highest }));
    let cases = [
        (
            "only versions to come",
            vec![versions(7, 9)],
            Code::ProtocolVersion,
        ),
        ("no versions at all", vec![versions(1, 0)], Code::ProtocolVersion),
        (
            "no greeting",
            vec![call(1, Call::Status)],
            Code::ProtocolViolation,
        ),
        ("two greetings", vec![hello(), hello()], Code::ProtocolViolation),
        ("a long greeting", vec![vec![200, 0, 0, 0]], Code::FrameTooLong),
        (
            "a frame of 4 GiB",
            vec![hello(), vec![0xff; 4]],
            Code::FrameTooLong,
        ),
        (
            "no message",
            vec![hello(), vec![4, 0, 0, 0, 0xff, 0xff, 0xff, 0xff]],
            Code::FrameMalformed,
        ),
        ("an empty frame", vec![hello(), vec![0; 4]], Code::FrameMalformed),
        (
            "bytes left over",
            vec![hello(), longer(call(1, Call::Status))],
            Code::FrameMalformed,
        ),
        (
            "HTTP",
            vec![b"GET / HTTP/1.1\r\n\r\n".to_vec()],
            Code::FrameTooLong,
        ),
    ];
    for (what, frames, code) in cases {
        let mut raw = RawEngine::connect(&socket);
        for frame in frames {
            raw.say(&frame);
        }
        let fault = raw.refusal();
        assert_eq!(fault.code, code, "{what}: {fault}");
        assert!(raw.is_closed(PATIENCE), "{what}: the daemon keeps the connection");
    }
    // Calls before attach are answered, and the connection goes on.
    let mut raw = RawEngine::greeted(&socket);
    for forbidden in calls() {
        let attached = matches!(forbidden, Call::Attach { .. } | Call::Status);
        if !attached {
            raw.say(&call(1, forbidden));
            let fault = raw.refusal();
            let codes = [Code::NotAttached, Code::RegionKind];
            assert!(codes.contains(&fault.code), "{fault}");
        }
    }
    raw.say(&call(2, Call::Status));
    assert!(matches!(
        raw.hear(PATIENCE),
        Some(Response::Answer {
            number: 2,
            answer: Ok(_)
        })
    ));
    drop(raw);
    // A frame of which the end never comes.
    let mut raw = RawEngine::greeted(&socket);
    raw.say(&call(1, Call::Status)[..6]);
    drop(raw);
    bystanders.go_on().await;
}

/// The frame with one byte more.
fn longer(mut frame: Vec<u8>) -> Vec<u8> {
    frame[0] += 1;
    frame.push(0);
    frame
}

/// One call of each kind.
fn calls() -> Vec<Call> {
    let source = "kvferry://127.0.0.1:1/prefill".to_owned();
    let pages = PageLists {
        groups: vec![vec![0, 1]],
    };
    let generations = vec![(0, 1)];
    vec![
        Call::Attach {
            envelope: Box::new(named(&small(), "mutated", Role::Both)),
            rank: 0,
            home: None,
        },
        Call::Register {
            region: 0,
            memory: Memory::Memfd {
                offset: 0,
                len: 8_192,
            },
        },
        Call::Publish(Publish {
            transfer: "mutated".into(),
            pages: Some(pages.clone()),
            generations: generations.clone(),
            ready: Ready::complete(20),
            metadata: Some(vec![1, 2, 3]),
            serves: 1,
        }),
        Call::Fetch(Fetch {
            source: source.clone(),
            transfer: "fetched".into(),
            pages,
            generations,
            tokens: tokens(0, 20),
            least: 20,
        }),
        Call::Expect {
            source: source.clone(),
            transfer: "mutated".into(),
        },
        Call::Decline {
            source,
            transfer: "mutated".into(),
        },
        Call::Status,
        Call::Abort {
            transfer: "mutated".into(),
        },
        Call::Unregister { region: 0 },
    ]
}

/// A whole conversation, of which some frames are changed: their payload, or their length too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mutated_frames_of_engines() {
    let mut random = StdRng::seed_from_u64(seed(11));
    let cluster = Cluster::new();
    let options = Options::default()
        .set("log_level", "\"error\"")
        .set("deadline_ms", 2_000);
    let nodes = cluster.start_two(options).await;
    let bystanders = Bystanders::on(nodes.into()).await;
    let socket = bystanders.nodes[0].socket();
    let memory = SealedMemory::create("mutated", 8_192).unwrap();
    let turns = by_width(200, 600, 20_000);
    let (mut taken, mut refused) = (0, 0);
    for turn in 0..turns {
        let mut raw = RawEngine::connect(&socket);
        let mut frames = vec![hello()];
        frames.extend((1..).zip(calls()).map(|(number, frame)| call(number, frame)));
        let rate = [0.1, 0.4][turn % 2];
        for (at, mut frame) in frames.into_iter().enumerate() {
            if random.random_bool(rate) {
                if random.random_bool(0.8) {
                    // The length fits what follows.
                    let mut payload = frame.split_off(4);
                    mutate(&mut payload, &mut random);
                    frame = kvferry_handshake::frame(&payload).unwrap();
                } else {
                    mutate(&mut frame, &mut random);
                }
            }
            if at == 2 && !frame.is_empty() {
                raw.say_with_fds(&frame, &[memory.as_fd()]);
            } else if !raw.say(&frame) {
                break;
            }
        }
        // Some wait for what comes of it, some go at once.
        if turn % 3 == 0 {
            while let Some(response) = raw.hear(Duration::from_millis(20)) {
                match response {
                    Response::Answer { answer: Ok(_), .. } => taken += 1,
                    Response::Answer { .. } | Response::Hello(Err(_)) => refused += 1,
                    _ => {}
                }
            }
        }
        if turn % 100 == 99 {
            bystanders.carry().await;
        }
    }
    println!("{taken} calls were taken, {refused} refused");
    assert!(
        taken > turns / 20 && refused > turns / 20,
        "the changes are all too much, or none"
    );
    bystanders.go_on().await;
}

/// What a peer says to open a channel and to fetch, sent again with changes; and a channel on which bytes change.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mutated_frames_of_peers() {
    let mut random = StdRng::seed_from_u64(seed(12));
    let cluster = Cluster::new();
    let plain = Options {
        tls: false,
        ..Options::default()
            .set("log_level", "\"error\"")
            .set("deadline_ms", 2_000)
            .set("lease_ms", 2_000)
            .set("peer_timeout_ms", 2_000)
    };
    let port = free_port();
    let proxy = Proxy::start(port);
    let own = plain
        .clone()
        .set("peer_listen", format!("\"127.0.0.1:{port}\""))
        .set("advertise", format!("\"127.0.0.1:{}\"", proxy.port()));
    let target = cluster.start("target", own).await;
    let victim = cluster.start("victim", plain.clone()).await;
    // The bystanders' other node has a name that no change of a few bytes gives.
    let bystander_port = free_port();
    let other = plain
        .clone()
        .set("peer_listen", format!("\"127.0.0.1:{bystander_port}\""))
        .set("advertise", format!("\"localhost:{bystander_port}\""));
    let other = cluster.start("other", other).await;

    // Engines whose transfers run over the channel that is harmed, and what they said while it was whole.
    let envelope = launch(1, 16).envelope(&llama_8b()).unwrap();
    let source = Engine::attach(named(&envelope, "source", Role::Prefill), &[&target], Kind::Memfd).await;
    let decode = Engine::attach(named(&envelope, "decode", Role::Decode), &[&victim], Kind::Memfd).await;
    let whole = Carry {
        transfer: "whole",
        tokens: 200,
        held: 0,
        sparse: false,
        fetch_first: false,
        path: None,
    };
    whole.run(&source, &decode).await;
    let said: Vec<Vec<u8>> = proxy
        .seen()
        .into_iter()
        .filter(|bytes| bytes.len() > 100)
        .collect();
    assert!(!said.is_empty(), "no channel went through the proxy");
    let bystanders = Bystanders::on(vec![target, other]).await;

    let turns = by_width(50, 200, 5_000);
    for turn in 0..turns {
        let mut bytes = said[turn % said.len()].clone();
        // Further on, most times: behind a good greeting.
        let at = if random.random_bool(0.2) {
            0
        } else {
            random.random_range(0..bytes.len())
        };
        let mut rest = bytes.split_off(at);
        mutate(&mut rest, &mut random);
        bytes.extend(rest);
        let ports = bystanders.nodes[turn % 2].ports();
        throw_at(ports.peer, &bytes, Duration::from_millis(5));
        throw_at(ports.data, &bytes, Duration::from_millis(1));
        if turn % 50 == 49 {
            bystanders.carry().await;
        }
    }

    // The real channel, with changed bytes: whatever comes of the transfers, they end, and nothing lands elsewhere.
    proxy.harm(random.random());
    for turn in 0..by_width(3, 12, 200) {
        let stamp = Stamp::of(&format!("harmed {turn}"));
        let published = source.publish(&stamp, 200, false).await;
        let fetched = decode
            .fetch(&source.address(), &stamp, tokens(0, 200), 200, false)
            .await;
        fetched.ended(PATIENCE).await;
        published.ended(PATIENCE).await;
        for (engine, lists) in [(&source, &published.lists), (&decode, &fetched.lists)] {
            engine.ranks[0].pool().poison(&lists[0]);
            engine.give_back(lists);
        }
    }
    proxy.heal();
    proxy.cut();
    decode.check_all("harmed transfers");
    source.check_all("harmed transfers");
    let probe = || async {
        let stamp = Stamp::of(&format!("healed {}", rand::random::<u64>()));
        let published = source.publish(&stamp, 200, false).await;
        let fetched = decode
            .fetch(&source.address(), &stamp, tokens(0, 200), 200, false)
            .await;
        let ends = within(PATIENCE, "the end", fetched.ended(PATIENCE)).await;
        decode.settle_fetch(&fetched, &ends, "healed");
        published.ended(PATIENCE).await;
        source.settle_publish(&published, "healed");
        match &ends[0] {
            Ok(_) => Ok(()),
            Err(failed) => Err(failed.to_string()),
        }
    };
    kvferry_tests::wait::until(2 * PATIENCE, "the healed channel carries again", probe).await;
    drop((source, decode));
    bystanders.carry().await;
    bystanders.check_all("bystanders");
}

/// Bytes that are no TLS at the peer port, and no lane at the data port.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn noise_on_the_ports() {
    let mut random = StdRng::seed_from_u64(seed(13));
    let cluster = Cluster::new();
    let options = Options::default().set("log_level", "\"error\"");
    let nodes = cluster.start_two(options).await;
    let bystanders = Bystanders::on(nodes.into()).await;
    for turn in 0..200 {
        let mut noise = vec![0; random.random_range(1..600)];
        random.fill(noise.as_mut_slice());
        match turn % 4 {
            // The begin of a TLS record.
            0 => noise.splice(0..0, [0x16, 3, 1, 2, 0]).for_each(drop),
            1 => noise = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_vec(),
            _ => {}
        }
        for node in &bystanders.nodes {
            throw_at(node.ports().peer, &noise, Duration::from_millis(2));
            throw_at(node.ports().data, &noise, Duration::from_millis(2));
        }
        if turn % 50 == 49 {
            bystanders.carry().await;
        }
    }
    bystanders.go_on().await;
}
