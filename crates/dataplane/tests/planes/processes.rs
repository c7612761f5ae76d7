//! Memory that an engine already has: reached without a bounce where the other side is a memfd on this node, and through
//! a bounded one where it is not, which the job's tally states.

use kvferry_handshake::Code;
use memmap2::MmapMut;

use crate::pair::{Flow, LARGE, Node, Pair, Size, close, config, next_job};

/// Rows of 576 bytes.
const ROWS: Size = Size {
    layers: 4,
    tokens: 1500,
    page_size: 1,
    width: 288,
};

/// Pages of 3 MiB, longer than any buffer.
const HUGE: Size = Size {
    layers: 1,
    tokens: 6,
    page_size: 1,
    width: 3 << 19,
};

/// A flow of which the source, the target or both are a process's memory.
fn flow(from: &Node, to: &Node, size: Size, source: bool, target: bool) -> (Flow, Vec<MmapMut>) {
    let mut flow = Flow::new(from, to, size, 1);
    let mut held = Vec::new();
    if source {
        let (keys, maps) = flow.prefill.ranks[0].register_process(&from.plane, next_job().0 << 32);
        flow.source = keys;
        held.extend(maps);
    }
    if target {
        let (keys, maps) = flow.decode.ranks[0].register_process(&to.plane, next_job().0 << 32);
        flow.target = keys;
        held.extend(maps);
    }
    (flow, held)
}

#[test]
fn within_the_node_only_process_to_process_bounces() {
    let pair = Pair::new(config());
    for size in [LARGE, ROWS, HUGE] {
        for (source, target) in [(true, false), (false, true), (true, true)] {
            let (flow, _held) = flow(&pair.a, &pair.a, size, source, target);
            let before = flow.decode.ranks[0].bytes();
            let job = flow.copy(&pair.a);
            flow.ready(&pair.a, job);
            pair.a.log.complete(job);
            pair.a.plane.close(job);
            let tally = pair.a.log.closed(job).closed[0];
            flow.check(&before);
            let total = flow.map.total_bytes();
            assert_eq!(tally.bytes, total);
            assert_eq!(tally.bounced, if source && target { total } else { 0 });
        }
    }
}

#[test]
fn over_tcp_each_process_side_bounces() {
    let checked = kvferry_dataplane::Config {
        checksum: true,
        ..config()
    };
    for config in [config(), checked] {
        let pair = Pair::new(config);
        for size in [LARGE, ROWS, HUGE] {
            for (source, target) in [(true, false), (false, true), (true, true)] {
                let (flow, _held) = flow(&pair.a, &pair.b, size, source, target);
                let before = flow.decode.ranks[0].bytes();
                let (send, receive) = flow.start(&pair);
                pair.a.log.complete(send);
                pair.b.log.complete(receive);
                close(&pair, send, receive);
                flow.check(&before);
                let total = flow.map.total_bytes();
                let bounced = |process| if process { total } else { 0 };
                assert_eq!(pair.a.log.closed(send).closed[0].bounced, bounced(source));
                assert_eq!(pair.b.log.closed(receive).closed[0].bounced, bounced(target));
            }
        }
    }
}

#[test]
fn memory_that_is_gone_fails_the_job_and_not_the_lane() {
    let pair = Pair::new(config());
    let good = Flow::new(&pair.a, &pair.b, LARGE, 5);
    good.carry(&pair);
    for (source, target) in [(true, false), (false, true)] {
        let (flow, held) = flow(&pair.a, &pair.b, LARGE, source, target);
        drop(held);
        let (send, receive) = flow.start(&pair);
        let (node, job) = if source {
            (&pair.a, send)
        } else {
            (&pair.b, receive)
        };
        let seen = node.log.until(job, "failed", |seen| seen.failed.is_some());
        let (code, message) = seen.failed.unwrap();
        assert_eq!(code, Code::MemoryFault);
        assert!(message.contains(&std::process::id().to_string()), "{message}");
        close(&pair, send, receive);
        assert_eq!(
            pair.a.log.seen(send).complete + pair.b.log.seen(receive).complete,
            0
        );
    }
    for (source, target) in [(true, false), (false, true), (true, true)] {
        let (flow, held) = flow(&pair.a, &pair.a, LARGE, source, target);
        drop(held);
        let job = flow.copy(&pair.a);
        flow.ready(&pair.a, job);
        let seen = pair.a.log.until(job, "failed", |seen| seen.failed.is_some());
        assert_eq!(seen.failed.unwrap().0, Code::MemoryFault);
        pair.a.plane.close(job);
        pair.a.log.closed(job);
    }
    good.carry(&pair);
    assert_eq!(pair.a.plane.traffic()[0].lost_lanes, 0);
}
