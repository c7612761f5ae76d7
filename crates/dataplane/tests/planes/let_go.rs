//! What is closed or gone holds nothing: no memory while a peer stalls, and no peer for ever.

use std::os::unix::fs::MetadataExt;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kvferry_dataplane::{Config, RegionKey};

use crate::pair::{self, Flow, LARGE, Node, Pair, Proxy, Size, Spell, close, config};

/// A chunk of 16 MiB, more than sockets hold that nobody reads from.
const HUGE: Size = Size {
    layers: 1,
    tokens: 1,
    page_size: 1,
    width: 8 << 20,
};

/// One lane, on which nothing is given up in a test's time.
fn patient() -> Config {
    Config {
        lanes_per_peer: 1,
        stall: Duration::from_secs(3600),
        ..config()
    }
}

fn until(what: &str, is: impl Fn() -> bool) {
    let deadline = Instant::now() + pair::LIMIT;
    while !is() {
        assert!(Instant::now() < deadline, "not {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Whether this process maps memory of the file.
fn is_mapped(inode: u64) -> bool {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let inode = inode.to_string();
    maps.lines()
        .any(|line| line.contains("kvferry-test") && line.split_whitespace().nth(4) == Some(inode.as_str()))
}

fn release(node: &Node, regions: &[(u16, RegionKey)]) {
    regions.iter().for_each(|(_, key)| node.plane.release(*key));
}

#[test]
fn memory_of_closed_jobs_is_unmapped_though_the_lane_stalls_in_the_middle_of_a_chunk() {
    let pair = Pair::new(patient());
    let proxy = Proxy::new(pair.b.plane.listen_address(), |n| match n {
        0 => Spell::Stall(3 << 20),
        _ => Spell::Nothing,
    });
    pair.faults.port.store(proxy.port, Ordering::Relaxed);
    let flow = Flow::new(&pair.a, &pair.b, HUGE, 1);
    let other = Flow::new(&pair.a, &pair.b, LARGE, 2);
    let inode = |engine: &pair::Engine| engine.ranks[0].file(0).metadata().unwrap().ino();
    let (source, target) = (inode(&flow.prefill), inode(&flow.decode));
    assert!(is_mapped(source) && is_mapped(target));
    let before = flow.decode.ranks[0].bytes();
    let (send, receive) = flow.start(&pair);
    until("arriving", || flow.decode.ranks[0].bytes() != before);

    // The receiving end lets go though the sending one says nothing.
    pair.b.plane.close(receive);
    pair.b.log.closed(receive);
    release(&pair.b, &flow.target);
    until("unmapped at the receiver", || !is_mapped(target));
    assert!(is_mapped(source));

    // The sending end lets go of its lane, which costs another transfer on it nothing but time.
    let before = other.decode.ranks[0].bytes();
    let (other_send, other_receive) = other.start(&pair);
    pair.a.plane.close(send);
    pair.a.log.closed(send);
    release(&pair.a, &flow.source);
    until("unmapped at the sender", || !is_mapped(source));
    pair.a.log.complete(other_send);
    pair.b.log.complete(other_receive);
    close(&pair, other_send, other_receive);
    other.check(&before);
}

#[test]
fn peers_that_are_down_are_forgotten_unless_a_job_waits_for_them() {
    let pair = Pair::new(Config {
        idle: Duration::from_millis(40),
        ..config()
    });
    let flow = Flow::new(&pair.a, &pair.b, LARGE, 1);
    flow.carry(&pair);
    let known = |node: &Node| {
        let mut names: Vec<String> = node
            .plane
            .traffic()
            .iter()
            .map(|peer| peer.peer.to_string())
            .collect();
        names.sort();
        names
    };
    for n in 0..50 {
        let name = format!("passing{n}");
        pair.a.plane.peer_up(&name, pair::HOST);
        pair.a.plane.peer_down(&name);
        // And some that never came up.
        let job = flow.send(&pair.a, &format!("never{n}"), pair::next_job());
        pair.a.plane.close(job);
    }
    let waiting = flow.send(&pair.a, "awaited", pair::next_job());
    until("forgotten", || known(&pair.a) == ["awaited", "b"]);
    pair.a.plane.close(waiting);
    until("forgotten", || known(&pair.a) == ["b"]);

    // One that transfers came from, too; when it comes back, all is as at first.
    pair.b.plane.peer_down("a");
    pair.a.plane.peer_down("b");
    until("forgotten", || {
        known(&pair.a).is_empty() && known(&pair.b).is_empty()
    });
    pair.a.plane.peer_up("b", pair::HOST);
    pair.b.plane.peer_up("a", pair::HOST);
    flow.carry(&pair);
}
