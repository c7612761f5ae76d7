//! Links that are slow, or shared by many: what moves is said to be alive, and nothing else is.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kvferry_dataplane::Config;

use crate::pair::{Faults, Flow, LARGE, LIMIT, Pair, Proxy, Spell, close, config};

/// Everything goes through one lane, which a proxy does something to.
fn one_lane(spell: Spell) -> (Pair, Proxy) {
    let config = Config {
        lanes_per_peer: 1,
        stall: Duration::from_secs(60),
        ..config()
    };
    let pair = Pair::with(config.clone(), config, Faults::none());
    let proxy = Proxy::new(pair.b.plane.listen_address(), move |_| spell);
    pair.faults.port.store(proxy.port, Ordering::Relaxed);
    (pair, proxy)
}

#[test]
fn what_moves_within_a_chunk_or_waits_behind_it_is_alive() {
    let (pair, proxy) = one_lane(Spell::Slow);
    let flows: Vec<Flow> = (1..=4)
        .map(|seed| Flow::new(&pair.a, &pair.b, LARGE, seed))
        .collect();
    let before: Vec<_> = flows.iter().map(|flow| flow.decode.ranks[0].bytes()).collect();
    let jobs: Vec<_> = flows[..3].iter().map(|flow| flow.start(&pair)).collect();
    // Its publisher has nothing ready.
    let receive = flows[3].receive(&pair.b, "a");
    let send = flows[3].send(&pair.a, "b", receive);
    for (send, receive) in &jobs {
        let first = jobs[0] == (*send, *receive);
        let seen = pair.a.log.until(*send, "alive", |seen| seen.alive >= 4);
        assert_eq!(seen.progress, 0, "no chunk is through");
        if first {
            let seen = pair.b.log.until(*receive, "alive", |seen| seen.alive >= 4);
            assert_eq!(seen.progress, 0, "no chunk is through");
        }
    }
    assert_eq!(pair.a.log.seen(send).alive, 0, "nothing of it is ready");
    proxy.hurry.store(true, Ordering::Relaxed);
    flows[3].ready(&pair.a, send);
    pair.b.plane.end(receive, flows[3].tokens);
    for ((send, receive), (flow, before)) in jobs
        .into_iter()
        .chain([(send, receive)])
        .zip(flows.iter().zip(&before))
    {
        pair.a.log.complete(send);
        pair.b.log.complete(receive);
        close(&pair, send, receive);
        flow.check(before);
    }
}

#[test]
fn nothing_is_alive_where_nothing_moves() {
    let (pair, _proxy) = one_lane(Spell::Stall(1 << 16));
    let flows: Vec<Flow> = (1..=2)
        .map(|seed| Flow::new(&pair.a, &pair.b, LARGE, seed))
        .collect();
    let jobs: Vec<_> = flows.iter().map(|flow| flow.start(&pair)).collect();
    let alive = || -> Vec<u32> {
        let of = |(send, receive): &(_, _)| pair.a.log.seen(*send).alive + pair.b.log.seen(*receive).alive;
        jobs.iter().map(of).collect()
    };
    // Until what the kernels hold has moved.
    let deadline = Instant::now() + LIMIT;
    let mut before = vec![u32::MAX];
    while before != alive() {
        assert!(Instant::now() < deadline, "alive for ever: {before:?}");
        before = alive();
        std::thread::sleep(Duration::from_millis(700));
    }
    std::thread::sleep(Duration::from_millis(1500));
    assert_eq!(before, alive());
    for (send, receive) in jobs {
        close(&pair, send, receive);
    }
}
