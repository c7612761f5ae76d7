//! Aborts, deaths and broken channels: transfers end on both sides and on all ranks, with a cause.

use kvferry_broker::{Body, FetchState, Input};
use kvferry_handshake::{Code, Ready};

use crate::engines::{id, tokens};
use crate::scene::{MOMENT, assert_codes, pair, under_way};
use crate::sim::{Cluster, DEADLINE};

#[test]
fn an_abort_by_any_rank_ends_all_ranks_on_both_sides_at_once() {
    for side in [0, 1] {
        for rank in [0, 1] {
            let (mut cluster, p, d) = under_way();
            let rank = cluster.ranks_of([p, d][side])[rank];
            cluster.abort(rank, &id("a", 0));
            cluster.run_for(MOMENT);
            assert_codes(&cluster, p, &[Code::Aborted; 2]);
            assert_codes(&cluster, d, &[Code::Aborted; 2]);
            cluster.assert_nothing_is_left();
        }
    }
}

#[test]
fn an_abort_before_the_other_side_came_ends_all_ranks_of_this_side() {
    let mut cluster = Cluster::new(1, 3);
    let (p, d) = pair(&mut cluster, &[0, 1], &[2, 1]);
    cluster.publish_all(p, &id("a", 0), 17);
    cluster.abort(cluster.ranks_of(p)[1], &id("a", 0));
    cluster.run_for(MOMENT);
    assert_codes(&cluster, p, &[Code::Aborted; 2]);
    // Whoever comes now learns it at once.
    cluster.fetch_all(d, p, &id("a", 0), 17);
    cluster.run_for(MOMENT);
    assert_codes(&cluster, d, &[Code::Aborted; 2]);
    // And the other way round, without a link: nobody publishes at that address.
    let rank = cluster.ranks_of(d)[0];
    for rank in cluster.ranks_of(d) {
        cluster.fetch(rank, d, &id("b", 0), tokens(0, 4), 4);
    }
    cluster.abort(rank, &id("b", 0));
    cluster.run_for(MOMENT);
    assert_eq!(cluster.codes_of(d, &id("b", 0)), [Some(Code::Aborted); 2]);
}

#[test]
fn what_one_rank_failed_with_the_others_need_not_begin() {
    let mut cluster = Cluster::new(1, 3);
    let (p, d) = pair(&mut cluster, &[0, 1], &[2, 1]);
    let (prefill, decode) = (cluster.ranks_of(p), cluster.ranks_of(d));
    cluster.publish(prefill[0], &id("a", 3), 4, Ready::complete(4), 1, None);
    cluster.abort(prefill[0], &id("a", 3));
    cluster.fetch(decode[0], p, &id("b", 3), tokens(0, 4), 4);
    cluster.abort(decode[0], &id("b", 3));
    cluster.run_for(MOMENT);
    for (attempt, code) in [(3, Code::Aborted), (2, Code::StaleAttempt)] {
        let call = cluster
            .publish(prefill[1], &id("a", attempt), 4, Ready::complete(4), 1, None)
            .unwrap();
        assert_eq!(cluster.refusal(prefill[1], call), code);
        let call = cluster
            .fetch(decode[1], p, &id("b", attempt), tokens(0, 4), 4)
            .unwrap();
        assert_eq!(cluster.refusal(decode[1], call), code);
    }
    let call = cluster
        .publish(prefill[1], &id("a", 4), 4, Ready::complete(4), 1, None)
        .unwrap();
    assert!(cluster.answer_to(prefill[1], call).is_ok());
}

#[test]
fn a_stranger_cannot_fail_another_engines_transfers() {
    let mut cluster = Cluster::new(1, 3);
    let p = crate::scene::prefill_engine(&mut cluster, &[0, 1]);
    cluster.publish_all(p, &id("a", 0), 4);
    // Node 2 has no rank of it.
    let seen = std::sync::Arc::new(std::sync::Mutex::new(None));
    let engine = seen.clone();
    cluster.change(move |_, message| {
        if let Body::Keep { engine: id, .. } = &message.body {
            *engine.lock().unwrap() = Some(id.clone());
        }
        true
    });
    cluster.run_for(DEADLINE);
    let engine = seen.lock().unwrap().clone().unwrap();
    let (peer, incarnation) = (cluster.nodes[2].address.clone(), cluster.nodes[2].life);
    let failure = kvferry_broker::SiblingFailure {
        engine,
        side: kvferry_control::Side::Publish,
        transfer: id("a", 0),
        rank: 0,
        cause: kvferry_control::Fault::new(Code::Aborted, "so there").into(),
    };
    for body in [Body::Failed(failure.clone()), Body::SiblingFailed(failure)] {
        for node in [0, 1] {
            let message = kvferry_broker::PeerMessage {
                to: 0,
                body: body.clone(),
            };
            cluster.input(
                node,
                Input::Peer {
                    peer: peer.clone(),
                    incarnation,
                    message,
                },
            );
        }
    }
    cluster.run_for(MOMENT);
    assert_eq!(cluster.codes_of(p, &id("a", 0)), [None, None]);
}

#[test]
fn an_engine_that_dies_ends_its_transfers_on_the_other_side() {
    // The decode engine's rank.
    let (mut cluster, p, d) = under_way();
    let dead = cluster.ranks_of(d)[0];
    cluster.disconnect(dead);
    cluster.run_for(MOMENT);
    // The other rank's fetch fails with it, and its word may come first.
    for code in cluster.codes_of(p, &id("a", 0)) {
        assert!(
            matches!(code, Some(Code::EngineGone | Code::SiblingFailed)),
            "{code:?}"
        );
    }
    assert_eq!(
        cluster.code_of(cluster.ranks_of(d)[1], &id("a", 0)),
        Some(Code::SiblingFailed)
    );
    assert_eq!(
        cluster.counts(2)["regions"],
        0,
        "its regions are released at once"
    );
    cluster.assert_nothing_is_left();
    // The prefill engine's.
    let (mut cluster, p, d) = under_way();
    let dead = cluster.ranks_of(p)[1];
    cluster.disconnect(dead);
    cluster.run_for(MOMENT);
    for code in cluster.codes_of(d, &id("a", 0)) {
        assert!(
            matches!(code, Some(Code::EngineGone | Code::SiblingFailed)),
            "{code:?}"
        );
    }
    let sibling = cluster.code_of(cluster.ranks_of(p)[0], &id("a", 0));
    assert!(
        matches!(sibling, Some(Code::EngineGone | Code::SiblingFailed)),
        "{sibling:?}"
    );
    // Also before it published.
    let mut cluster = Cluster::new(1, 2);
    let (p, d) = pair(&mut cluster, &[0], &[1]);
    cluster.fetch_all(d, p, &id("a", 0), 17);
    cluster.run_for(MOMENT);
    cluster.disconnect(cluster.ranks_of(p)[0]);
    cluster.run_for(MOMENT);
    assert_codes(&cluster, d, &[Code::EngineGone]);
}

#[test]
fn a_daemon_that_dies_ends_what_was_under_way_with_it() {
    for (node, p_codes, d_codes) in [
        (
            2,
            [Some(Code::PeerLost), Some(Code::PeerLost)],
            [None, Some(Code::SiblingFailed)],
        ),
        (
            0,
            [None, Some(Code::PeerLost)],
            [Some(Code::PeerLost), Some(Code::PeerLost)],
        ),
    ] {
        let (mut cluster, p, d) = under_way();
        cluster.crash(node);
        cluster.run_for(10 * MOMENT);
        let close = |found: Vec<Option<Code>>, wanted: [Option<Code>; 2]| {
            for (found, wanted) in found.into_iter().zip(wanted) {
                let same = found == wanted
                    || (found == Some(Code::SiblingFailed) && wanted.is_some())
                    || (found == Some(Code::PeerLost) && wanted.is_some());
                assert!(same, "{found:?} for {wanted:?}");
            }
        };
        close(cluster.codes_of(p, &id("a", 0)), p_codes);
        close(cluster.codes_of(d, &id("a", 0)), d_codes);
        // Its new life begins with nothing.
        cluster.boot(node);
        cluster.run_for(MOMENT);
        assert_eq!(cluster.counts(node)["announced"], 0);
        cluster.assert_nothing_is_left();
    }
}

#[test]
fn a_broken_channel_ends_only_what_still_needs_it() {
    let mut cluster = Cluster::new(1, 3);
    let (p, d) = pair(&mut cluster, &[0, 1], &[2]);
    let (prefill, decode) = (cluster.ranks_of(p), cluster.ranks_of(d)[0]);
    let transfer = id("a", 0);
    cluster.publish(prefill[0], &transfer, 17, Ready::complete(17), 1, None);
    cluster.fetch(decode, p, &transfer, tokens(0, 17), 17);
    cluster.run_for(MOMENT);
    // Rank 0's part has landed: its daemon is not needed any more.
    let peer = cluster.nodes[0].address.clone();
    let cause = kvferry_control::Fault::new(Code::PeerLost, "reset");
    cluster.input(2, Input::PeerDown { peer, cause });
    cluster.publish(prefill[1], &transfer, 17, Ready::complete(17), 1, None);
    cluster.run_for(10 * MOMENT);
    assert_eq!(cluster.end_of(decode, &transfer), Some(Ok(17)));
}

#[test]
fn a_restarted_peer_is_another_peer() {
    let (mut cluster, p, d) = under_way();
    // Only its new life is heard of, not the end of the old one.
    let peer = cluster.nodes[2].address.clone();
    for node in [0, 1] {
        cluster.input(
            node,
            Input::PeerUp {
                peer: peer.clone(),
                incarnation: 77,
            },
        );
    }
    cluster.run_for(MOMENT);
    assert_codes(&cluster, p, &[Code::PeerLost; 2]);
    assert!(cluster.codes_of(d, &id("a", 0)).iter().all(Option::is_some));
}

#[test]
fn messages_of_another_life_are_not_acted_on() {
    let mut cluster = Cluster::new(1, 2);
    cluster.stall();
    let announced = std::sync::Arc::new(std::sync::Mutex::new(None));
    let number = announced.clone();
    cluster.change(move |_, message| {
        if let Body::Announce(announce) = &message.body {
            *number.lock().unwrap() = Some(announce.fetch);
        }
        true
    });
    let (p, d) = pair(&mut cluster, &[0], &[1]);
    cluster.publish_all(p, &id("a", 0), 17);
    cluster.fetch_all(d, p, &id("a", 0), 17);
    cluster.run_for(MOMENT);
    let fetch = announced.lock().unwrap().unwrap();
    let peer = cluster.nodes[1].address.clone();
    let (theirs, ours) = (cluster.nodes[1].life, cluster.nodes[0].life);
    let mut say = |incarnation, to| {
        let message = kvferry_broker::PeerMessage {
            to,
            body: Body::FetchState {
                fetch,
                state: FetchState::Delivered,
            },
        };
        let said = Input::Peer {
            peer: peer.clone(),
            incarnation,
            message,
        };
        cluster.input(0, said);
        cluster.run_for(DEADLINE / 4 + MOMENT);
        cluster.all_delivered(p, &id("a", 0))
    };
    assert!(!say(theirs + 1, ours), "from another life of the peer");
    assert!(!say(theirs, ours + 1), "to another life of this daemon");
    assert!(say(theirs, ours), "the same words in this life are believed");
}

#[test]
fn a_daemon_that_died_is_not_called_back() {
    for (dies, stays) in [(0, 1), (1, 0)] {
        let mut cluster = Cluster::new(1, 2);
        cluster.stall();
        let (p, d) = pair(&mut cluster, &[0], &[1]);
        cluster.publish_all(p, &id("a", 0), 17);
        cluster.fetch_all(d, p, &id("a", 0), 17);
        cluster.run_for(MOMENT);
        cluster.crash(dies);
        cluster.run_for(2 * DEADLINE);
        assert_eq!(
            cluster.codes_of([p, d][stays], &id("a", 0)),
            [Some(Code::PeerLost)]
        );
        assert_eq!(cluster.to_the_dead, 0);
    }
}

#[test]
fn numbers_of_one_life_mean_nothing_in_the_next() {
    let mut jobs = Vec::new();
    let mut cluster = Cluster::new(1, 2);
    cluster.stall();
    for round in 0..2 {
        let name = ["a", "b"][round];
        if round == 0 {
            pair(&mut cluster, &[0], &[1]);
        } else {
            cluster.start(1);
        }
        cluster.publish_all(0, &id(name, 0), 17);
        cluster.fetch_all(1, 0, &id(name, 0), 17);
        cluster.run_for(MOMENT);
        jobs.extend(cluster.nodes[1].data.open_jobs());
        cluster.crash(1);
        cluster.run_for(MOMENT);
        cluster.boot(1);
    }
    assert_eq!(jobs.len(), 2);
    assert!(jobs[0].0.abs_diff(jobs[1].0) > 1 << 31, "{jobs:?}");
}

#[test]
fn a_fetch_that_is_ending_is_not_copied_to() {
    let mut cluster = Cluster::new(1, 2);
    cluster.net.delay = 1;
    cluster.troubles(crate::data::Troubles {
        delay: 10_000,
        ..Default::default()
    });
    // One prefill rank is on the same daemon, the other is not.
    let (p, d) = pair(&mut cluster, &[0, 1], &[0]);
    let decode = cluster.ranks_of(d)[0];
    cluster.publish_all(p, &id("a", 0), 17);
    cluster.fetch_all(d, p, &id("a", 0), 17);
    let announced = |cluster: &Cluster| cluster.said.contains_key("Announce");
    assert!(cluster.run_until(MOMENT, announced));
    // The announcement is on its way to this daemon itself, while the other job is being closed.
    cluster.abort(decode, &id("a", 0));
    assert_eq!(cluster.end_of(decode, &id("a", 0)), None);
    cluster.run_for(MOMENT);
    assert_eq!(cluster.code_of(decode, &id("a", 0)), Some(Code::Aborted));
    assert_eq!(cluster.nodes[0].data.copies, 0);
    assert_eq!(cluster.codes_of(p, &id("a", 0)), [Some(Code::Aborted); 2]);
}

#[test]
fn the_next_step_of_a_publish_that_has_ended_is_told_why_it_ended() {
    for sibling in [false, true] {
        let mut cluster = Cluster::new(1, 1);
        let p = crate::scene::prefill_engine(&mut cluster, &[0, 0]);
        let ranks = cluster.ranks_of(p);
        for rank in &ranks {
            cluster.publish(*rank, &id("a", 0), 17, Ready::default(), 1, None);
        }
        cluster.abort(ranks[usize::from(sibling)], &id("a", 0));
        let step = kvferry_control::Publish {
            transfer: id("a", 0),
            pages: None,
            generations: Vec::new(),
            ready: Ready::complete(17),
            metadata: None,
            serves: 1,
        };
        let call = kvferry_control::Call::Publish(step);
        let call = cluster.rank_call(ranks[0], crate::engines::Asked::Other, call);
        cluster.run_for(MOMENT);
        assert_eq!(cluster.refusal(ranks[0], call), Code::Aborted);
    }
}
