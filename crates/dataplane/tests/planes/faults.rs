//! Lanes that break, messages that get lost, and bytes that change: what was asked for still lands, exactly.

use std::sync::atomic::Ordering;
use std::time::Duration;

use kvferry_dataplane::Config;
use kvferry_handshake::Code;

use crate::pair::{self, Faults, Flow, LARGE, Pair, Proxy, Size, Spell, close, config};

/// Some MiB in rows of 576 bytes.
const ROWS: Size = Size {
    layers: 6,
    tokens: 1500,
    page_size: 1,
    width: 288,
};

fn checked() -> Config {
    Config {
        checksum: true,
        ..config()
    }
}

/// A pair whose lanes go through a proxy.
fn proxied(config: Config, faults: Faults, spell: impl Fn(u64) -> Spell + Send + 'static) -> (Pair, Proxy) {
    let pair = Pair::with(config.clone(), config, faults);
    let proxy = Proxy::new(pair.b.plane.listen_address(), spell);
    pair.faults.port.store(proxy.port, Ordering::Relaxed);
    (pair, proxy)
}

/// A number that looks random.
fn scatter(n: u64) -> u64 {
    (n + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20
}

#[test]
fn lanes_that_are_cut_are_opened_again_and_only_missing_chunks_sent_again() {
    // Later connections live longer, so that it ends.
    let (pair, proxy) = proxied(config(), Faults::none(), |n| {
        Spell::Cut(scatter(n) % (1 << 20) + n * 400_000)
    });
    for (seed, size) in [(1, LARGE), (2, ROWS)] {
        Flow::new(&pair.a, &pair.b, size, seed).carry(&pair);
    }
    let traffic = &pair.a.plane.traffic()[0];
    assert!(traffic.lost_lanes >= 3, "{traffic:?}");
    assert!(proxy.connections.load(Ordering::Relaxed) > 3);
    assert!(traffic.resent_chunks > 0, "{traffic:?}");
}

#[test]
fn lost_doubled_and_late_messages_about_lanes_do_no_harm() {
    for seed in 0..6 {
        let faults = Faults::some(seed, 25, 25, 30);
        let (pair, _proxy) = proxied(config(), faults, move |n| {
            Spell::Cut(scatter(n + seed * 100) % (2 << 20) + n * 600_000)
        });
        let size = if seed % 2 == 0 { LARGE } else { ROWS };
        Flow::new(&pair.a, &pair.b, size, seed).carry(&pair);
        assert!(pair.faults.delivered.load(Ordering::Relaxed) > 4);
    }
}

#[test]
fn a_chunk_in_doubt_is_not_sent_again_before_the_receiver_says_that_its_end_is_gone() {
    // The first connection's receiving end lives on and goes on landing what was sent.
    let spell = |n| {
        if n == 0 {
            Spell::Linger(5 << 20)
        } else {
            Spell::Nothing
        }
    };
    let one_lane = Config {
        lanes_per_peer: 1,
        ..config()
    };
    let (pair, _proxy) = proxied(one_lane, Faults::none(), spell);
    let flow = Flow::new(&pair.a, &pair.b, LARGE, 1);
    let before = flow.decode.ranks[0].bytes();
    // Lanes open for a small transfer first; then the channel falls silent.
    let small = Flow::new(&pair.a, &pair.b, Size { tokens: 16, ..LARGE }, 2);
    small.carry(&pair);
    pair.faults.lost.store(100, Ordering::Relaxed);
    let (send, receive) = flow.start(&pair);
    pair.until(&pair.a, "in doubt", |counts| {
        pair::count(counts, "chunks_in_doubt") > 0
    });
    std::thread::sleep(Duration::from_millis(400));
    assert!(pair::count(&pair.a.plane.counts(), "chunks_in_doubt") > 0);
    assert_eq!(pair.a.plane.traffic()[0].resent_chunks, 0);
    assert_eq!(pair.a.log.seen(send).complete, 0);
    pair.faults.lost.store(0, Ordering::Relaxed);
    pair.a.log.complete(send);
    pair.b.log.complete(receive);
    close(&pair, send, receive);
    flow.check(&before);
    assert!(pair.a.log.seen(send).closed[0].resent > 0);
}

#[test]
fn a_lane_that_stalls_is_destroyed_and_the_others_go_on_meanwhile() {
    let spell = |n| {
        if n == 0 {
            Spell::Stall(1 << 20)
        } else {
            Spell::Nothing
        }
    };
    let (pair, _proxy) = proxied(config(), Faults::none(), spell);
    let flow = Flow::new(&pair.a, &pair.b, LARGE, 1);
    // Until that lane has taken a chunk.
    for _ in 0..100 {
        flow.carry(&pair);
        if pair.a.plane.traffic()[0].lost_lanes > 0 {
            return;
        }
    }
    panic!("the lane that stalls was never used");
}

#[test]
fn a_peer_that_takes_nothing_costs_others_nothing() {
    let patient = Config {
        stall: Duration::from_secs(600),
        ..config()
    };
    let (pair, _proxy) = proxied(patient, Faults::none(), |_| Spell::Stall(100_000));
    let stuck = Flow::new(&pair.a, &pair.b, LARGE, 1);
    let (send, receive) = stuck.start(&pair);
    pair.until(&pair.a, "lanes", |counts| pair::count(counts, "lanes_out") == 3);
    // The other way, and within the node.
    pair.faults.port.store(0, Ordering::Relaxed);
    let back = Flow::new(&pair.b, &pair.a, LARGE, 2);
    let before = back.decode.ranks[0].bytes();
    let back_receive = back.receive(&pair.a, "b");
    let back_send = back.send(&pair.b, "a", back_receive);
    back.ready(&pair.b, back_send);
    pair.a.plane.end(back_receive, back.tokens);
    pair.a.log.complete(back_receive);
    back.check(&before);
    let local = Flow::new(&pair.a, &pair.a, LARGE, 3);
    let job = local.copy(&pair.a);
    local.ready(&pair.a, job);
    pair.a.log.complete(job);
    // And it is fenced at once all the same.
    close(&pair, send, receive);
    assert_eq!(pair.a.log.seen(send).complete, 0);
}

#[test]
fn a_checksum_that_does_not_match_has_its_chunk_sent_again() {
    let one_lane = || Config {
        lanes_per_peer: 1,
        ..checked()
    };
    // In the first header, and in payloads.
    for (seed, at) in (0..).zip([48 + 20, 500, 300_000, 3_000_000]) {
        for size in [LARGE, ROWS] {
            let spell = move |n| {
                if n == 0 {
                    Spell::Corrupt(at)
                } else {
                    Spell::Nothing
                }
            };
            let (pair, _proxy) = proxied(one_lane(), Faults::none(), spell);
            Flow::new(&pair.a, &pair.b, size, seed).carry(&pair);
            assert!(pair.a.plane.traffic()[0].resent_chunks > 0);
        }
    }
}

#[test]
fn chunks_that_come_damaged_again_and_again_fail_the_transfer_on_both_sides() {
    let one_lane = Config {
        lanes_per_peer: 1,
        ..checked()
    };
    // Each chunk is far longer than a header, so it is the payload that is hit.
    let (pair, _proxy) = proxied(one_lane, Faults::none(), |_| Spell::CorruptEach(1 << 20));
    let flow = Flow::new(&pair.a, &pair.b, LARGE, 1);
    let (send, receive) = flow.start(&pair);
    for (node, job) in [(&pair.a, send), (&pair.b, receive)] {
        let seen = node.log.until(job, "failed", |seen| seen.failed.is_some());
        assert_eq!(seen.failed.unwrap().0, Code::Checksum);
        assert_eq!(seen.complete, 0);
    }
    close(&pair, send, receive);
}

#[test]
fn a_channel_that_breaks_and_comes_back_carries_new_transfers() {
    let pair = Pair::new(config());
    let flow = Flow::new(&pair.a, &pair.b, LARGE, 1);
    for round in 0..6 {
        let (send, receive) = flow.start(&pair);
        std::thread::sleep(Duration::from_micros(round * 800));
        pair.a.plane.peer_down("b");
        pair.b.plane.peer_down("a");
        close(&pair, send, receive);
        pair.until(&pair.a, "quiet", |counts| pair::count(counts, "lanes_out") == 0);
        pair.a.plane.peer_up("b", pair::HOST);
        pair.b.plane.peer_up("a", pair::HOST);
        flow.carry(&pair);
    }
    pair.until(&pair.a, "in doubt", |counts| {
        pair::count(counts, "chunks_in_doubt") == 0
    });
}

#[test]
fn a_side_that_alone_thinks_the_channel_broke_still_carries_afterwards() {
    let pair = Pair::new(config());
    let flow = Flow::new(&pair.a, &pair.b, LARGE, 1);
    flow.carry(&pair);
    pair.a.plane.peer_down("b");
    pair.a.plane.peer_up("b", pair::HOST);
    flow.carry(&pair);
    pair.b.plane.peer_down("a");
    pair.b.plane.peer_up("a", pair::HOST);
    flow.carry(&pair);
}

#[test]
fn idle_lanes_are_closed_and_opened_again_on_demand() {
    let pair = Pair::new(Config {
        idle: Duration::from_millis(50),
        ..config()
    });
    let flow = Flow::new(&pair.a, &pair.b, ROWS, 1);
    for _ in 0..4 {
        flow.carry(&pair);
        let idle = |counts: &[(String, u64)]| {
            ["lanes_out", "lanes_in", "lane_grants"]
                .iter()
                .all(|name| pair::count(counts, name) == 0)
        };
        pair.until(&pair.a, "idle", idle);
        pair.until(&pair.b, "idle", idle);
    }
    assert_eq!(pair.a.plane.traffic()[0].lost_lanes, 0);
}
