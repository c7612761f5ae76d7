//! What the data plane reports, and what it must not be believed.

use kvferry_broker::{DataEvent, Input, JobId, Tally};
use kvferry_control::Event;
use kvferry_handshake::{Code, Ready};

use crate::engines::id;
use crate::scene::{MOMENT, pair};
use crate::sim::{Cluster, DEADLINE};

/// One rank each, published but not finally, fetched; the node of each, and its only job.
fn open(local: bool) -> (Cluster, usize, usize, Vec<(usize, JobId)>) {
    let mut cluster = Cluster::new(1, 2);
    cluster.stall();
    let (p, d) = pair(&mut cluster, &[0], &[usize::from(!local)]);
    let rank = cluster.ranks_of(p)[0];
    let ready = Ready {
        tokens: 8,
        ..Ready::default()
    };
    cluster.publish(rank, &id("a", 0), 17, ready, 1, None);
    cluster.fetch_all(d, p, &id("a", 0), 17);
    cluster.run_for(MOMENT);
    let jobs = |node: usize| {
        cluster.nodes[node]
            .data
            .open_jobs()
            .into_iter()
            .map(move |job| (node, job))
    };
    let jobs: Vec<_> = jobs(0).chain(jobs(1)).collect();
    assert_eq!(jobs.len(), if local { 1 } else { 2 });
    (cluster, p, d, jobs)
}

#[test]
fn complete_before_the_end_is_known() {
    for local in [false, true] {
        let (_, _, _, jobs) = open(local);
        for which in 0..jobs.len() {
            let (mut cluster, p, d, jobs) = open(local);
            let (node, job) = jobs[which];
            cluster.input(node, Input::Data(DataEvent::Complete { job }));
            cluster.run_for(MOMENT);
            for engine in [p, d] {
                assert_eq!(cluster.codes_of(engine, &id("a", 0)), [Some(Code::Internal)]);
            }
            cluster.assert_nothing_is_left();
        }
    }
}

#[test]
fn closed_without_being_asked() {
    for local in [false, true] {
        let (_, _, _, jobs) = open(local);
        for which in 0..jobs.len() {
            let (mut cluster, p, d, jobs) = open(local);
            let (node, job) = jobs[which];
            let tally = Tally::default();
            cluster.nodes[node].data.forget(job);
            cluster.input(node, Input::Data(DataEvent::Closed { job, tally }));
            cluster.run_for(MOMENT);
            for engine in [p, d] {
                assert_eq!(cluster.codes_of(engine, &id("a", 0)), [Some(Code::Internal)]);
            }
            cluster.assert_nothing_is_left();
        }
    }
}

#[test]
fn reports_of_jobs_that_are_not_open() {
    let (mut cluster, p, d, jobs) = open(false);
    let job = JobId(jobs[0].1.0 + 1_000);
    let cause = kvferry_control::Fault::new(Code::MemoryFault, "of nothing");
    for event in [
        DataEvent::Progress { job, bytes: 1 },
        DataEvent::Complete { job },
        DataEvent::Failed { job, cause },
        DataEvent::Closed {
            job,
            tally: Tally::default(),
        },
    ] {
        cluster.input(0, Input::Data(event));
    }
    cluster.run_for(MOMENT);
    assert_eq!(cluster.codes_of(p, &id("a", 0)), [None]);
    assert_eq!(cluster.codes_of(d, &id("a", 0)), [None]);
}

#[test]
fn the_same_bytes_again_are_no_progress() {
    for bytes in [0, 5] {
        let (mut cluster, p, d, jobs) = open(false);
        for _ in 0..12 {
            for (node, job) in &jobs {
                let event = DataEvent::Progress { job: *job, bytes };
                cluster.input(*node, Input::Data(event));
            }
            cluster.run_for(DEADLINE / 8);
        }
        for engine in [p, d] {
            assert_eq!(
                cluster.codes_of(engine, &id("a", 0)),
                [Some(Code::Deadline)],
                "{bytes}"
            );
        }
    }
}

#[test]
fn more_bytes_are_progress_on_both_sides() {
    for local in [false, true] {
        let (mut cluster, p, d, jobs) = open(local);
        for bytes in 0..12 {
            for (node, job) in &jobs {
                let event = DataEvent::Progress { job: *job, bytes };
                cluster.input(*node, Input::Data(event));
            }
            cluster.run_for(DEADLINE / 4);
        }
        for engine in [p, d] {
            assert_eq!(cluster.codes_of(engine, &id("a", 0)), [None]);
            let rank = cluster.ranks_of(engine)[0];
            let told = cluster.events_like(rank, |event| matches!(event, Event::Progress { .. }));
            assert!(told > 5, "{told}");
        }
    }
}

#[test]
fn bytes_under_way_keep_both_sides_alive_though_only_the_sender_sees_them() {
    for local in [false, true] {
        let (mut cluster, p, d, jobs) = open(local);
        // The sender's word is enough: the receiver does not see chunks that wait their turn.
        let (node, job) = jobs[0];
        for _ in 0..12 {
            cluster.input(node, Input::Data(DataEvent::Alive { job }));
            cluster.run_for(DEADLINE / 4);
        }
        for engine in [p, d] {
            assert_eq!(cluster.codes_of(engine, &id("a", 0)), [None], "{local}");
        }
        // And no longer than it is said.
        cluster.run_for(2 * DEADLINE);
        for engine in [p, d] {
            assert_eq!(
                cluster.codes_of(engine, &id("a", 0)),
                [Some(Code::Deadline)],
                "{local}"
            );
        }
    }
}

#[test]
fn nothing_is_alive_for_ever_without_a_whole_chunk() {
    for local in [false, true] {
        let (mut cluster, p, d, jobs) = open(local);
        let mut rounds = 0;
        while cluster.codes_of(d, &id("a", 0)) == [None] {
            for (node, job) in &jobs {
                cluster.input(*node, Input::Data(DataEvent::Alive { job: *job }));
            }
            cluster.run_for(DEADLINE / 4);
            rounds += 1;
            assert!(rounds < 4 * 40, "it ends");
        }
        assert!(rounds > 4 * 20, "{rounds}");
        cluster.run_for(DEADLINE);
        assert_eq!(cluster.codes_of(p, &id("a", 0)), [Some(Code::Deadline)]);
    }
}

#[test]
fn a_publisher_with_nothing_ready_is_not_alive_because_others_are() {
    let mut cluster = Cluster::new(1, 2);
    cluster.stall();
    let (p, d) = pair(&mut cluster, &[0], &[1]);
    let rank = cluster.ranks_of(p)[0];
    cluster.publish_all(p, &id("busy", 0), 17);
    cluster.publish(rank, &id("idle", 0), 17, Ready::default(), 1, None);
    cluster.fetch_all(d, p, &id("busy", 0), 17);
    cluster.run_for(MOMENT);
    let busy: Vec<_> = (0..2).map(|node| cluster.nodes[node].data.open_jobs()).collect();
    cluster.fetch_all(d, p, &id("idle", 0), 17);
    for _ in 0..12 {
        for (node, jobs) in busy.iter().enumerate() {
            cluster.input(node, Input::Data(DataEvent::Alive { job: jobs[0] }));
        }
        cluster.run_for(DEADLINE / 4);
    }
    for engine in [p, d] {
        assert_eq!(cluster.codes_of(engine, &id("busy", 0)), [None]);
        assert_eq!(cluster.codes_of(engine, &id("idle", 0)), [Some(Code::Deadline)]);
    }
}
