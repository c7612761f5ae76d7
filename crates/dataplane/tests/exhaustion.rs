//! Fds and threads: all come back, and running out of fds is survived. Alone in its process, because it counts and
//! limits what is the process's.

#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    dead_code,
    unused_imports
)]

#[path = "planes/pair/mod.rs"]
mod pair;

use std::net::TcpStream;
use std::time::{Duration, Instant};

use pair::{Flow, LARGE, Pair, config};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

fn count(directory: &str) -> usize {
    std::fs::read_dir(directory).unwrap().count()
}

/// Fds and threads of this process.
fn used() -> (usize, usize) {
    (count("/proc/self/fd"), count("/proc/self/task"))
}

fn round(seed: u64) {
    let pair = Pair::new(config());
    let flow = Flow::new(&pair.a, &pair.b, LARGE, seed);
    if seed.is_multiple_of(2) {
        flow.carry(&pair);
    } else {
        flow.start(&pair);
    }
}

#[test]
fn fds_and_threads_come_back_and_a_lack_of_fds_is_survived() {
    round(0);
    let before = used();
    for seed in 1..12 {
        round(seed);
    }
    let deadline = Instant::now() + pair::LIMIT;
    while used() != before {
        assert!(Instant::now() < deadline, "before {before:?}, now {:?}", used());
        std::thread::sleep(Duration::from_millis(10));
    }

    let pair = Pair::new(config());
    let flow = Flow::new(&pair.a, &pair.b, LARGE, 1);
    let limits = getrlimit(Resource::Nofile);
    let few = Rlimit {
        current: Some(count("/proc/self/fd") as u64 + 4),
        ..limits
    };
    setrlimit(Resource::Nofile, few).unwrap();
    // Until neither end of a connection can be had: lanes cannot be opened, and the listener cannot accept.
    let mut idle = Vec::new();
    while let Ok(stream) = TcpStream::connect(pair.b.plane.listen_address()) {
        idle.push(stream);
    }
    let before = flow.decode.ranks[0].bytes();
    let (send, receive) = flow.start(&pair);
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(pair.a.log.seen(send).complete, 0, "lanes were opened without fds");
    assert!(pair.a.log.seen(send).failed.is_none());
    let what = pair.a.log.trouble(kvferry_dataplane::LaneTrouble::Resources);
    assert!(what.contains("no fd for a lane"), "{what}");
    drop(idle);
    setrlimit(Resource::Nofile, limits).unwrap();
    pair.a.log.complete(send);
    pair.b.log.complete(receive);
    flow.check(&before);
}
