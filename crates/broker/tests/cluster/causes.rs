//! What ranks are told of why a transfer failed: the rank that lacks bytes, what was wrong with its lanes, and the first cause
//! once, wherever it arose.

use std::sync::{Arc, Mutex};

use kvferry_broker::{Body, DataEvent, FetchState, Input, JobId, PartState, PeerMessage};
use kvferry_control::{Fault, MAX_METADATA};
use kvferry_handshake::{Code, Ready};

use crate::engines::{id, tokens};
use crate::scene::{MOMENT, pair};
use crate::sim::{Cluster, DEADLINE};

impl Cluster {
    /// What a rank was told of the transfer's failure.
    fn told(&self, rank: usize) -> Fault {
        match self.end_of(rank, &id("a", 0)) {
            Some(Err(cause)) => cause,
            other => panic!("it failed: {other:?}"),
        }
    }

    /// A peer's message.
    fn said(&mut self, at: usize, from: usize, body: Body) {
        let input = Input::Peer {
            peer: self.nodes[from].address.clone(),
            incarnation: self.nodes[from].life,
            message: PeerMessage { to: 0, body },
        };
        self.input(at, input);
    }

    fn trouble(&mut self, at: usize, with: usize, what: &str) {
        let event = DataEvent::Trouble {
            peer: self.nodes[with].address.clone(),
            what: what.to_owned(),
        };
        self.input(at, Input::Data(event));
    }
}

/// Prefill ranks on nodes 0 and 1, a decode rank on node 2. Rank 0's bytes are stuck, rank 1's have landed. Gives the stuck jobs
/// with their nodes.
fn one_stuck() -> (Cluster, usize, usize, Vec<(usize, JobId)>) {
    let mut cluster = Cluster::new(1, 3);
    cluster.nodes[0].data.troubles.stalled = 100;
    let (p, d) = pair(&mut cluster, &[0, 1], &[2]);
    cluster.publish_all(p, &id("a", 0), 17);
    cluster.fetch_all(d, p, &id("a", 0), 17);
    cluster.run_for(MOMENT);
    let jobs = |node: usize| {
        let jobs = cluster.nodes[node].data.open_jobs();
        jobs.into_iter().map(move |job| (node, job))
    };
    let jobs: Vec<_> = jobs(0).chain(jobs(1)).chain(jobs(2)).collect();
    assert_eq!(jobs.len(), 2, "of rank 0, at both ends");
    (cluster, p, d, jobs)
}

#[test]
fn a_prefill_rank_that_has_sent_all_waits_as_long_as_the_others_go_on() {
    let (mut cluster, p, d, jobs) = one_stuck();
    for bytes in 1..13 {
        for (node, job) in &jobs {
            let event = DataEvent::Progress { job: *job, bytes };
            cluster.input(*node, Input::Data(event));
        }
        cluster.run_for(DEADLINE / 4);
    }
    assert_eq!(cluster.codes_of(p, &id("a", 0)), [None, None]);
    // The same where bytes of a chunk are under way.
    for _ in 0..12 {
        for (node, job) in &jobs {
            cluster.input(*node, Input::Data(DataEvent::Alive { job: *job }));
        }
        cluster.run_for(DEADLINE / 8);
    }
    assert_eq!(cluster.codes_of(p, &id("a", 0)), [None, None]);
    cluster.run_for(2 * DEADLINE);
    assert_eq!(cluster.codes_of(p, &id("a", 0)), [Some(Code::Deadline); 2]);
    assert_eq!(cluster.codes_of(d, &id("a", 0)), [Some(Code::Deadline)]);
}

#[test]
fn the_rank_that_lacks_bytes_is_named_by_all() {
    let (mut cluster, p, d, _) = one_stuck();
    cluster.run_for(2 * DEADLINE);
    let (prefill, decode) = (cluster.ranks_of(p), cluster.ranks_of(d)[0]);
    let told = cluster.told(decode).message;
    assert!(
        told.contains("moving from prefill rank 0 at node0:7400 (0 of 544 bytes)"),
        "{told}"
    );
    assert!(!told.contains("rank 1"), "{told}");
    let told = cluster.told(prefill[0]).message;
    assert!(
        told.contains("moving to its rank 0 at node2:7400 (0 of 544 bytes)"),
        "{told}"
    );
    let told = cluster.told(prefill[1]).message;
    let own = "all bytes sent; waiting for word of its rank 0 at node2:7400; 544 bytes done]";
    assert!(
        told.contains(own) && !told.contains("moving to its rank 0 at node2:7400 (544"),
        "{told}"
    );
}

#[test]
fn a_word_that_is_lost_is_told_as_that() {
    let mut cluster = Cluster::new(1, 2);
    let (p, d) = pair(&mut cluster, &[0], &[1]);
    cluster.lose(|body| matches!(body, Body::FetchState { .. }));
    cluster.publish_all(p, &id("a", 0), 17);
    cluster.fetch_all(d, p, &id("a", 0), 17);
    cluster.run_for(2 * DEADLINE);
    assert!(cluster.all_delivered(d, &id("a", 0)));
    let told = cluster.told(cluster.ranks_of(p)[0]);
    assert_eq!(told.code, Code::Deadline);
    let words = "engine d at node1:7400: all bytes sent; waiting for word of its rank 0 at node1:7400; 1088 bytes done]";
    assert!(told.message.contains(words), "{told}");
}

#[test]
fn a_publish_that_is_not_final_and_has_sent_what_is_ready_says_so() {
    let mut cluster = Cluster::new(1, 2);
    let (p, d) = pair(&mut cluster, &[0], &[1]);
    let rank = cluster.ranks_of(p)[0];
    cluster.publish(rank, &id("a", 0), 17, Ready::default(), 1, None);
    cluster.fetch_all(d, p, &id("a", 0), 17);
    cluster.run_for(2 * DEADLINE);
    let told = cluster.told(rank).message;
    assert!(
        told.contains("not final yet, 0 tokens ready; engine d at node1:7400: all that is ready was sent"),
        "{told}"
    );
}

#[test]
fn a_delivered_rank_stays_so_when_its_sibling_fails() {
    let mut cluster = Cluster::new(1, 3);
    let (p, d) = pair(&mut cluster, &[0], &[1, 2]);
    let ranks = cluster.ranks_of(d);
    cluster.publish_all(p, &id("a", 0), 17);
    cluster.fetch(ranks[0], p, &id("a", 0), tokens(0, 17), 17);
    cluster.run_for(MOMENT);
    cluster.stall();
    cluster.fetch(ranks[1], p, &id("a", 0), tokens(0, 17), 17);
    cluster.run_for(2 * DEADLINE);
    assert_eq!(cluster.end_of(ranks[0], &id("a", 0)), Some(Ok(17)));
    assert_eq!(cluster.told(ranks[1]).code, Code::Deadline);
    let told = cluster.told(cluster.ranks_of(p)[0]).message;
    assert!(
        !told.contains("its rank 0") && told.contains("its rank 1"),
        "{told}"
    );
}

#[test]
fn what_is_wrong_with_lanes_is_told_until_bytes_go_forward() {
    for overcome in [false, true] {
        let (mut cluster, p, d, jobs) = one_stuck();
        cluster.trouble(0, 2, "a lane broke: closed by the other end");
        cluster.trouble(2, 0, "no thread for a lane");
        // Of ranks that are done, it is nothing.
        cluster.trouble(1, 0, "with a stranger");
        cluster.trouble(2, 1, "with one that has landed");
        if overcome {
            cluster.run_for(1);
            for (node, job) in &jobs {
                let event = DataEvent::Progress { job: *job, bytes: 1 };
                cluster.input(*node, Input::Data(event));
            }
        }
        cluster.run_for(2 * DEADLINE);
        let (prefill, decode) = (cluster.ranks_of(p), cluster.ranks_of(d)[0]);
        let mut all = cluster.told(decode).message;
        all += &cluster.told(prefill[0]).message;
        assert_eq!(
            all.contains("s before, with node2:7400: a lane broke"),
            !overcome,
            "{all}"
        );
        assert_eq!(
            all.contains("s before, with node0:7400: no thread for a lane"),
            !overcome,
            "{all}"
        );
        all += &cluster.told(prefill[1]).message;
        assert!(!all.contains("stranger") && !all.contains("has landed"), "{all}");
        cluster.assert_nothing_is_left();
    }
}

#[test]
fn trouble_of_a_peer_that_went_is_forgotten() {
    let (mut cluster, p, d, _) = one_stuck();
    cluster.trouble(2, 0, "no thread for a lane");
    let peer = cluster.nodes[0].address.clone();
    let cause = Fault::new(Code::PeerLost, "reset");
    cluster.input(2, Input::PeerDown { peer, cause });
    cluster.run_for(MOMENT);
    assert_eq!(cluster.told(cluster.ranks_of(d)[0]).code, Code::PeerLost);
    cluster.publish_all(p, &id("b", 0), 17);
    cluster.fetch_all(d, p, &id("b", 0), 17);
    cluster.run_for(2 * DEADLINE);
    let Some(Err(told)) = cluster.end_of(cluster.ranks_of(d)[0], &id("b", 0)) else {
        panic!("it is stuck too");
    };
    assert!(!told.message.contains("no thread"), "{told}");
}

#[test]
fn words_beyond_their_bounds_fail_the_transfer_at_once_with_what_they_were() {
    for at_decode in [true, false] {
        let mut cluster = Cluster::new(1, 2);
        cluster.stall();
        let number = Arc::new(Mutex::new(0));
        let seen = number.clone();
        cluster.change(move |_, message| {
            if let Body::Announce(announce) = &message.body {
                *seen.lock().unwrap() = announce.fetch;
            }
            true
        });
        let (p, d) = pair(&mut cluster, &[0], &[1]);
        cluster.publish_all(p, &id("a", 0), 17);
        cluster.fetch_all(d, p, &id("a", 0), 17);
        cluster.run_for(MOMENT);
        let fetch = *number.lock().unwrap();
        if at_decode {
            let state = PartState::Final {
                end: 17,
                metadata: Some(vec![0; MAX_METADATA + 1]),
            };
            let body = Body::PartState {
                fetch,
                rank: 0,
                serial: 0,
                moving: false,
                state,
            };
            cluster.said(1, 0, body);
        } else {
            let cause = Fault::new(Code::Aborted, "x".repeat(5_000));
            let state = FetchState::Failed(cause.into());
            cluster.said(0, 1, Body::FetchState { fetch, state });
        }
        assert_eq!(cluster.violations.len(), 1);
        cluster.run_for(MOMENT);
        let field = if at_decode {
            "metadata has 65537"
        } else {
            "cause has 5000"
        };
        for engine in [p, d] {
            let told = cluster.told(cluster.ranks_of(engine)[0]);
            assert_eq!(told.code, Code::ProtocolViolation);
            assert!(told.message.contains(field), "{told}");
        }
    }
}

#[test]
fn the_first_cause_is_told_once_in_a_wide_transfer() {
    let mut cluster = Cluster::new(1, 4);
    cluster.stall();
    let (p, d) = pair(&mut cluster, &[0, 1, 0, 1], &[2, 3, 2, 3]);
    cluster.publish_all(p, &id("a", 0), 17);
    cluster.fetch_all(d, p, &id("a", 0), 17);
    cluster.run_for(MOMENT);
    cluster.disconnect(cluster.ranks_of(p)[1]);
    cluster.run_for(DEADLINE);
    let others = cluster.ranks_of(p).into_iter().chain(cluster.ranks_of(d));
    for rank in others.filter(|rank| *rank != cluster.ranks_of(p)[1]) {
        let told = cluster.told(rank);
        let first = "rank 1 of engine p at node1:7400: ";
        assert!(told.message.starts_with(first), "{told}");
        assert_eq!(told.message.matches("rank 1 of engine").count(), 1, "{told}");
        assert_eq!(told.message.matches(" [").count(), 2, "{told}");
        assert!(told.message.len() < 700, "{} {told}", told.message.len());
    }
}
