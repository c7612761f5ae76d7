//! After `Closed` no byte lands in or leaves the job's pages, whatever was underway.

use std::collections::BTreeMap;
use std::time::Duration;

use kvferry_dataplane::Config;

use crate::pair::{Flow, LARGE, Pair, Size, close, config};

/// Rows of 576 bytes, which go through buffers.
const ROWS: Size = Size {
    layers: 8,
    tokens: 2000,
    page_size: 1,
    width: 288,
};

/// Chunks of 8 MiB, so that a close comes in the middle of one.
const HUGE: Size = Size {
    layers: 1,
    tokens: 4,
    page_size: 1,
    width: 4 << 20,
};

/// One lane: what is sent later comes later, so a later transfer that is complete has flushed the earlier one.
fn one_lane() -> Config {
    Config {
        lanes_per_peer: 1,
        copy_threads: 1,
        ..config()
    }
}

/// From before the first byte to after the last, in steps.
fn delays() -> impl Iterator<Item = Duration> {
    (0..24).map(|step| Duration::from_micros(step * step * 30))
}

fn flat(bytes: &BTreeMap<u16, Vec<u8>>) -> Vec<u8> {
    bytes.values().flatten().copied().collect()
}

/// Whether memory that was filled with `byte` after a fence shows in what was sent: 64 such bytes in a row.
fn shows(bytes: &[u8], byte: u8) -> bool {
    bytes
        .chunk_by(|a, b| a == b)
        .any(|run| run[0] == byte && run.len() >= 64)
}

#[test]
fn nothing_lands_after_a_receive_is_closed() {
    for size in [LARGE, ROWS] {
        let pair = Pair::new(one_lane());
        let flow = Flow::new(&pair.a, &pair.b, size, 1);
        let later = Flow::new(&pair.a, &pair.b, Size { tokens: 100, ..size }, 2);
        later.carry(&pair);
        let poison = flow.decode.ranks[0].patterns(99);
        let mut cut_short = 0;
        for delay in delays() {
            let (send, receive) = flow.start(&pair);
            std::thread::sleep(delay);
            pair.b.plane.close(receive);
            let seen = pair.b.log.closed(receive);
            cut_short += u32::from(seen.complete == 0);
            flow.decode.ranks[0].write(&poison);
            later.carry(&pair);
            assert!(
                flow.decode.ranks[0].is_filled(99),
                "bytes landed after Closed, {delay:?}"
            );
            pair.a.plane.close(send);
            pair.a.log.closed(send);
            assert_eq!(pair.b.log.seen(receive).late, 0);
        }
        assert!(cut_short > 3, "the closes came too late to tell anything");
    }
}

#[test]
fn nothing_leaves_after_a_send_is_closed() {
    for size in [LARGE, ROWS] {
        let pair = Pair::new(one_lane());
        let later = Flow::new(&pair.a, &pair.b, Size { tokens: 100, ..size }, 2);
        later.carry(&pair);
        let flow = Flow::new(&pair.a, &pair.b, size, 1);
        let mut cut_short = 0;
        for delay in delays() {
            flow.prefill.fill(5);
            let (send, receive) = flow.start(&pair);
            std::thread::sleep(delay);
            pair.a.plane.close(send);
            let seen = pair.a.log.closed(send);
            cut_short += u32::from(seen.complete == 0);
            flow.prefill.ranks[0].fill_with(0xee);
            later.carry(&pair);
            let received = flow.decode.ranks[0].bytes();
            assert!(
                !shows(&flat(&received), 0xee),
                "bytes left after Closed, {delay:?}"
            );
            pair.b.plane.close(receive);
            pair.b.log.closed(receive);
        }
        assert!(cut_short > 3, "the closes came too late to tell anything");
    }
}

#[test]
fn nothing_is_copied_after_a_copy_is_closed() {
    let pair = Pair::new(one_lane());
    let flow = Flow::new(&pair.a, &pair.a, HUGE, 1);
    let later = Flow::new(&pair.a, &pair.a, Size { tokens: 16, ..LARGE }, 2);
    let poison = flow.decode.ranks[0].patterns(99);
    let mut cut_short = 0;
    for delay in delays() {
        let job = flow.copy(&pair.a);
        flow.ready(&pair.a, job);
        std::thread::sleep(delay);
        pair.a.plane.close(job);
        let seen = pair.a.log.closed(job);
        cut_short += u32::from(seen.complete == 0);
        flow.decode.ranks[0].write(&poison);
        // One thread copies one chunk after the other.
        let barrier = later.copy(&pair.a);
        later.ready(&pair.a, barrier);
        pair.a.log.complete(barrier);
        pair.a.plane.close(barrier);
        assert!(
            flow.decode.ranks[0].is_filled(99),
            "bytes copied after Closed, {delay:?}"
        );
    }
    assert!(cut_short > 3, "the closes came too late to tell anything");
}

#[test]
fn a_closed_transfer_costs_the_others_on_its_lane_nothing() {
    let pair = Pair::new(one_lane());
    let flow = Flow::new(&pair.a, &pair.b, LARGE, 1);
    let other = Flow::new(&pair.a, &pair.b, LARGE, 2);
    for delay in delays().step_by(4) {
        let before = other.decode.ranks[0].bytes();
        let (send, receive) = flow.start(&pair);
        let (other_send, other_receive) = other.start(&pair);
        std::thread::sleep(delay);
        close(&pair, send, receive);
        pair.a.log.complete(other_send);
        pair.b.log.complete(other_receive);
        close(&pair, other_send, other_receive);
        other.check(&before);
    }
    let traffic = pair.a.plane.traffic();
    assert_eq!((traffic[0].lost_lanes, traffic[0].resent_chunks), (0, 0));
}

#[test]
fn closed_is_told_once_for_jobs_that_never_moved() {
    let pair = Pair::new(config());
    let flow = Flow::new(&pair.a, &pair.b, LARGE, 1);
    let receive = flow.receive(&pair.b, "a");
    let send = flow.send(&pair.a, "b", receive);
    close(&pair, send, receive);
    pair.a.plane.close(send);
    pair.b.plane.close(receive);
    flow.ready(&pair.a, send);
    assert_eq!(pair.a.log.seen(send).closed.len(), 1);
    assert_eq!(pair.b.log.seen(receive).closed.len(), 1);
    assert_eq!(pair.a.log.seen(send).closed[0].bytes, 0);
}
