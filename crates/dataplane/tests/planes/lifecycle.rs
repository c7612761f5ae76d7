//! Jobs, regions and data planes come and go, and leave nothing.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::Duration;

use kvferry_dataplane::{Config, DataPlane, RegionKey, StartError};
use kvferry_handshake::{Code, Ready};

use crate::pair::{self, Flow, LARGE, Pair, Size, close, config};

/// One page.
const TINY: Size = Size {
    layers: 1,
    tokens: 1,
    page_size: 1,
    width: 64,
};

#[test]
fn ten_thousand_jobs_leave_the_counters_where_they_were() {
    let pair = Pair::new(config());
    let flow = Flow::new(&pair.a, &pair.b, TINY, 1);
    let local = Flow::new(&pair.a, &pair.a, TINY, 2);
    flow.carry(&pair);
    let jobs = |counts: Vec<(String, u64)>| {
        let kept = [
            "regions",
            "mapped_bytes",
            "jobs",
            "chunks_in_doubt",
            "unproven_connections",
            "waiting_jobs",
        ];
        kept.map(|name| pair::count(&counts, name))
    };
    let before = (jobs(pair.a.plane.counts()), jobs(pair.b.plane.counts()));
    for round in 0..2500u64 {
        let (send, receive) = flow.start(&pair);
        let idle = flow.send(&pair.a, "b", receive);
        let copy = local.copy(&pair.a);
        if round % 2 == 0 {
            local.ready(&pair.a, copy);
        }
        if round % 3 == 0 {
            pair.b.log.complete(receive);
        }
        for job in [send, idle, copy] {
            pair.a.plane.close(job);
        }
        pair.b.plane.close(receive);
        for job in [send, idle, copy] {
            pair.a.log.closed(job);
        }
        pair.b.log.closed(receive);
    }
    assert_eq!(before, (jobs(pair.a.plane.counts()), jobs(pair.b.plane.counts())));
    flow.carry(&pair);
}

#[test]
fn jobs_that_wait_for_a_peer_that_is_down_leave_when_they_are_closed() {
    let pair = Pair::new(config());
    let flow = Flow::new(&pair.a, &pair.b, TINY, 1);
    pair.a.plane.peer_down("b");
    let jobs: Vec<_> = (0..100)
        .map(|_| flow.send(&pair.a, "b", pair::next_job()))
        .collect();
    for job in &jobs {
        flow.ready(&pair.a, *job);
    }
    assert_eq!(pair::count(&pair.a.plane.counts(), "waiting_jobs"), 100);
    for job in &jobs {
        pair.a.plane.close(*job);
        pair.a.log.closed(*job);
    }
    assert_eq!(pair::count(&pair.a.plane.counts(), "waiting_jobs"), 0);
}

#[test]
fn a_send_whose_last_acknowledgement_was_lost_completes_after_the_receive_is_closed() {
    // Everything lands, and then the lane breaks before a single acknowledgement came back.
    let one_lane = Config {
        lanes_per_peer: 1,
        ..config()
    };
    let pair = Pair::with(one_lane.clone(), one_lane, pair::Faults::none());
    let proxy = pair::Proxy::new(pair.b.plane.listen_address(), |n| match n {
        0 => pair::Spell::Mute,
        _ => pair::Spell::Nothing,
    });
    pair.faults
        .port
        .store(proxy.port, std::sync::atomic::Ordering::Relaxed);
    let flow = Flow::new(&pair.a, &pair.b, LARGE, 1);
    let (send, receive) = flow.start(&pair);
    pair.b.log.complete(receive);
    pair.b.plane.close(receive);
    pair.b.log.closed(receive);
    assert_eq!(pair.a.log.seen(send).complete, 0);
    // After a while it counts as stalled, and the chunks are sent again.
    pair.a.log.complete(send);
    pair.a.plane.close(send);
    assert!(pair.a.log.closed(send).closed[0].resent > 0);
}

#[test]
fn empty_transfers_complete() {
    let pair = Pair::new(config());
    let flow = Flow::new(&pair.a, &pair.b, LARGE, 1);
    let receive = flow.receive(&pair.b, "a");
    let send = flow.send(&pair.a, "b", receive);
    assert_eq!(
        pair.a.log.seen(send).complete + pair.b.log.seen(receive).complete,
        0
    );
    pair.a.plane.ready(send, Ready::complete(0), None);
    pair.b.plane.end(receive, 0);
    pair.a.log.complete(send);
    pair.b.log.complete(receive);
    close(&pair, send, receive);
    assert_eq!(pair.a.log.seen(send).closed[0].bytes, 0);
}

#[test]
fn jobs_of_regions_that_are_not_there_fail_by_name() {
    let pair = Pair::new(config());
    let mut flow = Flow::new(&pair.a, &pair.b, LARGE, 1);
    let gone: Arc<[(u16, RegionKey)]> = Arc::new([(0, RegionKey(u64::MAX))]);
    (flow.source, flow.target) = (Arc::clone(&gone), gone);
    let receive = flow.receive(&pair.b, "a");
    let send = flow.send(&pair.a, "b", receive);
    let copy = flow.copy(&pair.a);
    for (node, job) in [(&pair.b, receive), (&pair.a, send), (&pair.a, copy)] {
        assert_eq!(node.log.seen(job).failed.unwrap().0, Code::RegionUnknown);
        node.plane.close(job);
        node.log.closed(job);
    }
}

#[test]
fn a_plan_that_runs_over_its_region_fails_by_name_and_writes_nothing_outside() {
    let pair = Pair::new(config());
    for (source_short, target_short) in [(true, false), (false, true)] {
        let mut flow = Flow::new(&pair.a, &pair.b, LARGE, 1);
        let mut local = Flow::new(&pair.a, &pair.a, LARGE, 2);
        let flows =
            [&flow, &local].map(|flow| [&flow.prefill, &flow.decode].map(|engine| engine.ranks[0].bytes()));
        // The region is the second half of a memfd.
        let mut memfds = Vec::new();
        let mut short = |plane: &DataPlane| -> Arc<[(u16, RegionKey)]> {
            let memfd = File::from(pair::sealed(8192));
            memfd.write_all_at(&[0xa5; 8192], 0).unwrap();
            let fd = memfd.try_clone().unwrap().into();
            memfds.push(memfd);
            Arc::new([(0, plane.map_memfd(77, fd, 4096, 4096).unwrap())])
        };
        if source_short {
            (flow.source, local.source) = (short(&pair.a.plane), short(&pair.a.plane));
        }
        if target_short {
            (flow.target, local.target) = (short(&pair.b.plane), short(&pair.a.plane));
        }
        let (send, receive) = flow.start(&pair);
        let copy = local.copy(&pair.a);
        local.ready(&pair.a, copy);
        let (node, job) = if source_short {
            (&pair.a, send)
        } else {
            (&pair.b, receive)
        };
        for (node, job) in [(node, job), (&pair.a, copy)] {
            let seen = node.log.until(job, "failed", |seen| seen.failed.is_some());
            assert_eq!(seen.failed.unwrap().0, Code::RegionOutOfBounds);
        }
        close(&pair, send, receive);
        pair.a.plane.close(copy);
        pair.a.log.closed(copy);
        for memfd in memfds {
            let mut outside = [0; 4096];
            memfd.read_exact_at(&mut outside, 0).unwrap();
            assert!(outside == [0xa5; 4096], "written before the region");
        }
        for (flow, [prefill, decode]) in [&flow, &local].into_iter().zip(flows) {
            assert!(flow.prefill.ranks[0].bytes() == prefill);
            if target_short {
                assert!(flow.decode.ranks[0].bytes() == decode, "it is no target");
            }
            flow.check_outside(&decode);
        }
    }
}

#[test]
fn a_data_port_that_cannot_be_reached_fails_what_waits_for_it_by_name() {
    let pair = Pair::new(Config {
        patience: Duration::from_millis(300),
        ..config()
    });
    // A port at which nobody listens.
    let port = std::net::TcpListener::bind((pair::HOST, 0))
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    pair.faults.port.store(port, std::sync::atomic::Ordering::Relaxed);
    let flow = Flow::new(&pair.a, &pair.b, LARGE, 1);
    let (send, receive) = flow.start(&pair);
    let seen = pair.a.log.until(send, "failed", |seen| seen.failed.is_some());
    let (code, message) = seen.failed.unwrap();
    assert_eq!(code, Code::PeerUnreachable);
    assert!(
        message.contains("data port of b") && message.contains("refused"),
        "{message}"
    );
    close(&pair, send, receive);
    pair.faults.port.store(0, std::sync::atomic::Ordering::Relaxed);
    flow.carry(&pair);
}

#[test]
fn progress_is_told_when_a_job_starts_to_move() {
    let pair = Pair::new(config());
    let flow = Flow::new(&pair.a, &pair.b, LARGE, 1);
    let (send, receive) = flow.start(&pair);
    assert!(pair.a.log.complete(send).progress > 0);
    assert!(pair.b.log.complete(receive).progress > 0);
}

#[test]
fn a_release_while_jobs_are_open_unmaps_nothing_under_them() {
    let pair = Pair::new(config());
    let flow = Flow::new(&pair.a, &pair.b, LARGE, 1);
    let before = flow.decode.ranks[0].bytes();
    let (send, receive) = flow.start(&pair);
    flow.source.iter().for_each(|(_, key)| pair.a.plane.release(*key));
    flow.target.iter().for_each(|(_, key)| pair.b.plane.release(*key));
    pair.a.log.complete(send);
    pair.b.log.complete(receive);
    flow.check(&before);
}

#[test]
fn settings_and_ports_that_do_not_do_are_named() {
    let start = |config| DataPlane::start(config, Arc::new(|_| {}));
    let zero = start(Config {
        lanes_per_peer: 0,
        ..config()
    });
    assert!(zero.unwrap_err().to_string().contains("lanes_per_peer is 0"));
    let first = start(config()).unwrap();
    let taken = start(Config {
        listen: first.listen_address(),
        ..config()
    });
    let Err(StartError::Listen { address, .. }) = taken else {
        panic!("two data planes listen at one port");
    };
    assert_eq!(address, first.listen_address());
}

#[test]
fn shutdown_ends_every_thread_while_jobs_are_underway() {
    for round in 0..4u64 {
        let pair = Pair::new(config());
        let flow = Flow::new(&pair.a, &pair.b, LARGE, 1);
        let local = Flow::new(&pair.a, &pair.a, LARGE, 2);
        flow.start(&pair);
        let copy = local.copy(&pair.a);
        local.ready(&pair.a, copy);
        std::thread::sleep(Duration::from_millis(round));
        for node in [&pair.a, &pair.b] {
            node.plane.shutdown();
            let counts = node.plane.counts();
            assert_eq!(
                (pair::count(&counts, "threads"), pair::count(&counts, "jobs")),
                (0, 0)
            );
        }
    }
}
