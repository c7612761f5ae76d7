//! How transfers end: on both sides, on all ranks, with a cause, and never for want of one message.

use kvferry_broker::{Body, FetchState, Input, PartState};
use kvferry_control::Event;
use kvferry_handshake::{Code, Ready};

use crate::engines::{id, tokens};
use crate::scene::{MOMENT, decode_engine, pair};
use crate::sim::{Cluster, DEADLINE, LEASE};

/// Both engines on two daemons each, the transfer published, fetched and stalled.
fn under_way() -> (Cluster, usize, usize) {
    let mut cluster = Cluster::new(1, 3);
    cluster.stall();
    let (p, d) = pair(&mut cluster, &[0, 1], &[2, 1]);
    cluster.publish_all(p, &id("a", 0), 17);
    cluster.fetch_all(d, p, &id("a", 0), 17);
    cluster.run_for(MOMENT);
    (cluster, p, d)
}

fn assert_codes(cluster: &Cluster, engine: usize, codes: &[Code]) {
    let found = cluster.codes_of(engine, &id("a", 0));
    let wanted: Vec<Option<Code>> = codes.iter().copied().map(Some).collect();
    assert_eq!(found, wanted);
}

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
        side: kvferry_broker::Side::Publish,
        transfer: id("a", 0),
        rank: 0,
        cause: kvferry_control::Fault::new(Code::Aborted, "so there"),
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
    let (mut cluster, p, d) = under_way();
    let (peer, life) = (cluster.nodes[2].address.clone(), cluster.nodes[2].life);
    let own = cluster.nodes[0].life;
    // The fetch's number: that of the first announcement.
    for fetch in 0..200 {
        let body = Body::FetchState {
            fetch,
            state: FetchState::Delivered,
        };
        for (incarnation, to) in [(life + 1, own), (life, own + 1)] {
            let message = kvferry_broker::PeerMessage {
                to,
                body: body.clone(),
            };
            cluster.input(
                0,
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
    assert!(!cluster.all_delivered(p, &id("a", 0)) && !cluster.all_delivered(d, &id("a", 0)));
}

#[test]
fn a_higher_attempt_takes_the_lower_ones_place_whoever_brings_it() {
    // The publisher.
    let (mut cluster, p, d) = under_way();
    cluster.publish_all(p, &id("a", 1), 17);
    cluster.run_for(MOMENT);
    assert_codes(&cluster, p, &[Code::Superseded; 2]);
    assert_codes(&cluster, d, &[Code::Superseded; 2]);
    // The fetching engine.
    let (mut cluster, p, d) = under_way();
    cluster.fetch_all(d, p, &id("a", 1), 17);
    cluster.run_for(MOMENT);
    assert_codes(&cluster, p, &[Code::Superseded; 2]);
    assert_codes(&cluster, d, &[Code::Superseded; 2]);
    // The new attempt is not harmed by the end of the old one.
    cluster.unstall();
    cluster.publish_all(p, &id("a", 1), 17);
    cluster.run_for(MOMENT);
    assert!(cluster.all_delivered(d, &id("a", 1)) && cluster.all_delivered(p, &id("a", 1)));
    // The publisher lags behind a fetch that waits for the next attempt.
    cluster.fetch_all(d, p, &id("b", 1), 4);
    cluster.run_for(MOMENT);
    let rank = cluster.ranks_of(p)[0];
    let call = cluster
        .publish(rank, &id("b", 0), 4, Ready::complete(4), 1, None)
        .unwrap();
    assert_eq!(cluster.refusal(rank, call), Code::StaleAttempt);
    // A fetch lags behind the publish, and one waits for an attempt that is skipped.
    cluster.publish_all(p, &id("c", 1), 4);
    cluster.fetch_all(d, p, &id("c", 0), 4);
    cluster.fetch_all(d, p, &id("d", 0), 4);
    cluster.run_for(MOMENT);
    cluster.publish_all(p, &id("d", 1), 4);
    cluster.run_for(MOMENT);
    assert_eq!(cluster.codes_of(d, &id("c", 0)), [Some(Code::StaleAttempt); 2]);
    assert_eq!(cluster.codes_of(d, &id("d", 0)), [Some(Code::Superseded); 2]);
}

#[test]
fn a_publish_serves_as_many_engines_as_it_says() {
    let mut cluster = Cluster::new(1, 3);
    let (p, d) = pair(&mut cluster, &[0, 1], &[2, 1]);
    let e = decode_engine(&mut cluster, "e", &[0]);
    let f = decode_engine(&mut cluster, "f", &[0]);
    let transfer = id("a", 0);
    for rank in cluster.ranks_of(p) {
        cluster.publish(rank, &transfer, 17, Ready::complete(17), 2, None);
    }
    cluster.fetch_all(d, p, &transfer, 17);
    cluster.run_for(MOMENT);
    assert!(cluster.all_delivered(d, &transfer));
    assert_eq!(
        cluster.codes_of(p, &transfer),
        [None, None],
        "it waits for the second"
    );
    cluster.fetch_all(e, p, &transfer, 17);
    cluster.run_for(MOMENT);
    assert!(cluster.all_delivered(e, &transfer) && cluster.all_delivered(p, &transfer));
    for rank in cluster.ranks_of(p) {
        assert_eq!(
            cluster.events_like(rank, |event| matches!(event, Event::Matched { .. })),
            2
        );
    }
    cluster.fetch_all(f, p, &transfer, 17);
    cluster.run_for(MOMENT);
    assert_eq!(cluster.codes_of(f, &transfer), [Some(Code::TransferExists)]);
}

#[test]
fn one_engine_too_many_is_refused_and_the_first_is_not_harmed() {
    let mut cluster = Cluster::new(1, 3);
    cluster.stall();
    let (p, d) = pair(&mut cluster, &[0], &[1]);
    let e = decode_engine(&mut cluster, "e", &[2]);
    let transfer = id("a", 0);
    cluster.publish_all(p, &transfer, 17);
    cluster.fetch_all(d, p, &transfer, 17);
    cluster.run_for(MOMENT);
    cluster.fetch_all(e, p, &transfer, 17);
    cluster.run_for(MOMENT);
    assert_eq!(cluster.codes_of(e, &transfer), [Some(Code::TransferExists)]);
    assert_eq!(cluster.codes_of(d, &transfer), [None]);
    assert_eq!(cluster.codes_of(p, &transfer), [None]);
}

#[test]
fn of_two_engines_one_may_fail_and_the_other_is_served() {
    let mut cluster = Cluster::new(1, 3);
    let (p, d) = pair(&mut cluster, &[0], &[1]);
    let e = decode_engine(&mut cluster, "e", &[2]);
    let transfer = id("a", 0);
    let rank = cluster.ranks_of(p)[0];
    cluster.publish(
        rank,
        &transfer,
        17,
        Ready {
            tokens: 4,
            ..Ready::default()
        },
        2,
        None,
    );
    cluster.fetch_all(d, p, &transfer, 17);
    cluster.fetch_all(e, p, &transfer, 17);
    cluster.run_for(MOMENT);
    cluster.abort(cluster.ranks_of(d)[0], &transfer);
    cluster.run_for(MOMENT);
    assert_eq!(cluster.codes_of(p, &transfer), [None]);
    cluster.publish(rank, &transfer, 17, Ready::complete(17), 2, None);
    cluster.run_for(MOMENT);
    assert!(cluster.all_delivered(e, &transfer));
    assert_eq!(
        cluster.codes_of(p, &transfer),
        [Some(Code::Aborted)],
        "not all that it serves have it"
    );
}

#[test]
fn an_unmatched_publish_is_kept_for_its_lease_which_expect_renews_and_decline_ends() {
    let mut cluster = Cluster::new(1, 3);
    let (p, d) = pair(&mut cluster, &[0, 1], &[2]);
    let decode = cluster.ranks_of(d)[0];
    for name in ["plain", "expected", "declined"] {
        cluster.publish_all(p, &id(name, 0), 4);
    }
    cluster.run_for(LEASE / 2);
    cluster.hint(decode, p, &id("expected", 0), false);
    cluster.hint(decode, p, &id("declined", 0), true);
    cluster.run_for(MOMENT);
    assert_eq!(cluster.codes_of(p, &id("declined", 0)), [Some(Code::Declined); 2]);
    cluster.run_for(LEASE / 2);
    assert_eq!(
        cluster.codes_of(p, &id("plain", 0)),
        [Some(Code::LeaseExpired); 2]
    );
    assert_eq!(cluster.codes_of(p, &id("expected", 0)), [None; 2]);
    cluster.run_for(LEASE / 2);
    assert_eq!(
        cluster.codes_of(p, &id("expected", 0)),
        [Some(Code::LeaseExpired); 2]
    );
    // Who comes late is told why.
    cluster.fetch_all(d, p, &id("plain", 0), 4);
    cluster.run_for(MOMENT);
    assert_eq!(cluster.codes_of(d, &id("plain", 0)), [Some(Code::LeaseExpired)]);
}

#[test]
fn a_step_renews_the_lease() {
    let mut cluster = Cluster::new(1, 1);
    let (p, _) = pair(&mut cluster, &[0], &[0]);
    let rank = cluster.ranks_of(p)[0];
    cluster.publish(rank, &id("a", 0), 8, Ready::default(), 1, None);
    cluster.run_for(LEASE / 2);
    cluster.publish(rank, &id("a", 0), 8, Ready::default(), 1, None);
    cluster.run_for(LEASE * 3 / 4);
    assert_eq!(cluster.code_of(rank, &id("a", 0)), None);
    cluster.run_for(LEASE / 2);
    assert_eq!(cluster.code_of(rank, &id("a", 0)), Some(Code::LeaseExpired));
}

#[test]
fn a_decline_that_comes_first_is_remembered_unless_it_is_taken_back() {
    let mut cluster = Cluster::new(1, 3);
    let (p, d) = pair(&mut cluster, &[0, 1], &[2]);
    let e = decode_engine(&mut cluster, "e", &[2]);
    let (decode, other) = (cluster.ranks_of(d)[0], cluster.ranks_of(e)[0]);
    for name in ["a", "b", "c"] {
        cluster.hint(decode, p, &id(name, 0), true);
        cluster.run_for(MOMENT);
    }
    cluster.hint(decode, p, &id("b", 0), false);
    // A second decline of the same engine is none of another's.
    cluster.hint(decode, p, &id("c", 0), true);
    cluster.run_for(MOMENT);
    cluster.publish_all(p, &id("a", 0), 4);
    cluster.publish_all(p, &id("b", 0), 4);
    for rank in cluster.ranks_of(p) {
        cluster.publish(rank, &id("c", 0), 4, Ready::complete(4), 2, None);
    }
    cluster.run_for(MOMENT);
    assert_eq!(cluster.codes_of(p, &id("a", 0)), [Some(Code::Declined); 2]);
    assert_eq!(cluster.codes_of(p, &id("b", 0)), [None; 2]);
    assert_eq!(cluster.codes_of(p, &id("c", 0)), [None; 2]);
    cluster.fetch(other, p, &id("c", 0), tokens(0, 4), 4);
    cluster.run_for(MOMENT);
    assert!(
        cluster.all_delivered(p, &id("c", 0)),
        "the one that did not decline has it"
    );
    // Who declined is not served after all.
    cluster.hint(decode, p, &id("d", 0), true);
    cluster.run_for(MOMENT);
    for rank in cluster.ranks_of(p) {
        cluster.publish(rank, &id("d", 0), 4, Ready::complete(4), 2, None);
    }
    cluster.fetch(decode, p, &id("d", 0), tokens(0, 4), 4);
    cluster.run_for(MOMENT);
    assert_eq!(cluster.code_of(decode, &id("d", 0)), Some(Code::Declined));
}

#[test]
fn a_decline_of_what_is_being_fetched_is_too_late() {
    let (mut cluster, p, d) = under_way();
    cluster.hint(cluster.ranks_of(d)[0], p, &id("a", 0), true);
    cluster.run_for(MOMENT);
    assert_eq!(cluster.codes_of(p, &id("a", 0)), [None; 2]);
    cluster.unstall();
}

#[test]
fn what_does_not_go_forward_fails_at_the_deadline_and_says_where_it_stood() {
    let fail = |cluster: &mut Cluster, engine: usize, words: &[&str]| {
        cluster.run_for(2 * DEADLINE + LEASE);
        for rank in cluster.ranks_of(engine) {
            let Some(Err(cause)) = cluster.end_of(rank, &id("a", 0)) else {
                panic!("it failed");
            };
            assert_eq!(cause.code, Code::Deadline, "{cause}");
            for word in words {
                assert!(cause.message.contains(word), "{word:?} in {}", cause.message);
            }
        }
    };
    // Nobody publishes.
    let mut cluster = Cluster::new(1, 2);
    let (p, d) = pair(&mut cluster, &[0], &[1]);
    cluster.fetch_all(d, p, &id("a", 0), 17);
    fail(
        &mut cluster,
        d,
        &[
            "waiting for the publish of prefill rank 0 at node0:7400",
            "0 of 1088 bytes done",
        ],
    );
    assert_eq!(cluster.counts(0)["announced"], 0);
    // Nobody finishes the publish.
    let mut cluster = Cluster::new(1, 2);
    let (p, d) = pair(&mut cluster, &[0], &[1]);
    let rank = cluster.ranks_of(p)[0];
    cluster.publish(rank, &id("a", 0), 17, Ready::default(), 1, None);
    cluster.fetch_all(d, p, &id("a", 0), 17);
    fail(
        &mut cluster,
        d,
        &["final publish of prefill rank 0 at node0:7400"],
    );
    fail(&mut cluster, p, &["not final", "engine d at node1:7400"]);
    // A decode rank does not come.
    let mut cluster = Cluster::new(1, 2);
    let (p, d) = pair(&mut cluster, &[0], &[1, 1]);
    cluster.publish_all(p, &id("a", 0), 17);
    let rank = cluster.ranks_of(d)[0];
    cluster.fetch(rank, p, &id("a", 0), tokens(0, 17), 17);
    cluster.run_for(MOMENT);
    assert_eq!(
        cluster.end_of(rank, &id("a", 0)),
        Some(Ok(17)),
        "the rank that came has its own"
    );
    fail(
        &mut cluster,
        p,
        &["waiting for the fetch of its rank 1", "engine d at node1:7400"],
    );
    // Bytes do not move.
    let (mut cluster, p, d) = under_way();
    fail(
        &mut cluster,
        d,
        &["moving from prefill rank", "0 of 544 bytes done"],
    );
    fail(&mut cluster, p, &["bytes done"]);
}

#[test]
fn steps_of_a_publish_are_progress() {
    let mut cluster = Cluster::new(1, 2);
    let (p, d) = pair(&mut cluster, &[0], &[1]);
    let rank = cluster.ranks_of(p)[0];
    let transfer = id("a", 0);
    cluster.fetch_all(d, p, &transfer, 17);
    for tokens in 0..17 {
        cluster.publish(
            rank,
            &transfer,
            17,
            Ready {
                tokens,
                ..Ready::default()
            },
            1,
            None,
        );
        cluster.run_for(DEADLINE / 2);
    }
    cluster.publish(rank, &transfer, 17, Ready::complete(17), 1, None);
    cluster.run_for(MOMENT);
    assert!(cluster.all_delivered(d, &transfer) && cluster.all_delivered(p, &transfer));
}

#[test]
fn no_single_lost_message_fails_a_transfer() {
    type Named = fn(&Body) -> bool;
    let kinds: [(&str, Named); 6] = [
        ("LinkOpen", |body| matches!(body, Body::LinkOpen { .. })),
        ("LinkAnswer", |body| matches!(body, Body::LinkAnswer(_))),
        ("LinkOffer", |body| matches!(body, Body::LinkOffer { .. })),
        ("Announce", |body| matches!(body, Body::Announce(_))),
        ("Final", |body| {
            let is_final = |state: &PartState| matches!(state, PartState::Final { .. });
            matches!(body, Body::PartState { state, .. } if is_final(state))
        }),
        ("Delivered", |body| {
            matches!(
                body,
                Body::FetchState {
                    state: FetchState::Delivered,
                    ..
                }
            )
        }),
    ];
    for (name, named) in kinds {
        for which in 0..4 {
            let mut cluster = Cluster::new(1, 3);
            let (p, d) = pair(&mut cluster, &[0, 1], &[2, 1]);
            let mut seen = 0;
            cluster.change(move |_, message| {
                seen += usize::from(named(&message.body));
                !(named(&message.body) && seen == which + 1)
            });
            cluster.publish_all(p, &id("a", 0), 17);
            cluster.fetch_all(d, p, &id("a", 0), 17);
            cluster.run_for(DEADLINE * 3 / 4);
            for engine in [p, d] {
                assert!(
                    cluster.all_delivered(engine, &id("a", 0)),
                    "{name} {which}: {:?}",
                    cluster.codes_of(engine, &id("a", 0))
                );
            }
        }
    }
}

#[test]
fn no_single_lost_failure_keeps_the_other_side_for_long() {
    type Named = fn(&Body) -> bool;
    let kinds: [Named; 3] = [
        |body| {
            matches!(
                body,
                Body::PartState {
                    state: PartState::Failed(_),
                    ..
                }
            )
        },
        |body| {
            matches!(
                body,
                Body::FetchState {
                    state: FetchState::Failed(_),
                    ..
                }
            )
        },
        |body| matches!(body, Body::Failed(_) | Body::SiblingFailed(_)),
    ];
    for named in kinds {
        for side in [0, 1] {
            let (mut cluster, p, d) = under_way();
            let mut first = true;
            cluster.change(move |_, message| !(named(&message.body) && std::mem::take(&mut first)));
            cluster.abort(cluster.ranks_of([p, d][side])[1], &id("a", 0));
            // Somebody asks, well before the deadline.
            cluster.run_for(DEADLINE / 3);
            assert_codes(&cluster, p, &[Code::Aborted; 2]);
            assert_codes(&cluster, d, &[Code::Aborted; 2]);
        }
    }
}

#[test]
fn a_job_that_fails_ends_the_transfer_on_both_sides_with_its_cause() {
    for (prefill, decode) in [([0, 0], [0, 0]), ([0, 1], [2, 2])] {
        let mut cluster = Cluster::new(3, 3);
        // In order: a publish is failed at once by a fetch that was announced to it.
        cluster.net.delay = 1;
        cluster.troubles(crate::data::Troubles {
            failing: 100,
            delay: 10,
            ..Default::default()
        });
        cluster.stall();
        let (p, d) = pair(&mut cluster, &prefill, &decode);
        cluster.publish_all(p, &id("a", 0), 17);
        cluster.fetch_all(d, p, &id("a", 0), 17);
        cluster.run_for(MOMENT);
        for code in [p, d]
            .iter()
            .flat_map(|engine| cluster.codes_of(*engine, &id("a", 0)))
        {
            let code = code.expect("it failed");
            assert!(
                matches!(code, Code::MemoryFault | Code::Checksum | Code::SiblingFailed),
                "{code}"
            );
        }
        cluster.assert_nothing_is_left();
    }
}

#[test]
fn a_daemon_that_shuts_down_ends_everything_and_then_is_idle() {
    let (mut cluster, p, d) = under_way();
    cluster.input(1, Input::Shutdown);
    let rank = cluster.ranks_of(p)[1];
    for call in [
        cluster
            .publish(rank, &id("b", 0), 4, Ready::complete(4), 1, None)
            .unwrap(),
        cluster.fetch(rank, p, &id("b", 0), tokens(0, 4), 4).unwrap(),
        cluster.hint(rank, p, &id("b", 0), false),
        cluster.hint(rank, p, &id("b", 0), true),
    ] {
        assert_eq!(cluster.refusal(rank, call), Code::Shutdown);
    }
    assert!(
        !cluster.nodes[1].broker.as_ref().unwrap().is_idle(),
        "jobs are not fenced yet"
    );
    cluster.run_for(MOMENT);
    assert!(cluster.nodes[1].broker.as_ref().unwrap().is_idle());
    assert_eq!(cluster.code_of(rank, &id("a", 0)), Some(Code::Shutdown));
    assert_eq!(
        cluster.code_of(cluster.ranks_of(d)[1], &id("a", 0)),
        Some(Code::Shutdown)
    );
    assert!(cluster.codes_of(p, &id("a", 0)).iter().all(Option::is_some));
    assert!(cluster.codes_of(d, &id("a", 0)).iter().all(Option::is_some));
    // Nothing new begins there, from wherever it comes.
    cluster.fetch(cluster.ranks_of(d)[0], p, &id("c", 0), tokens(0, 4), 4);
    let q = cluster.engine(
        crate::geometry::envelope("q", kvferry_handshake::Role::Prefill, 1, 0),
        &[1],
    );
    let call = cluster.attach(cluster.ranks_of(q)[0]);
    cluster.run_for(MOMENT);
    assert_eq!(cluster.refusal(cluster.ranks_of(q)[0], call), Code::Shutdown);
    assert_eq!(
        cluster.code_of(cluster.ranks_of(d)[0], &id("c", 0)),
        Some(Code::Shutdown)
    );
    // A region is still given back.
    cluster.registers = false;
    let call = cluster.unregister(rank, 0);
    assert!(cluster.answer_to(rank, call).is_ok());
    let call = cluster.register(rank, 0, 1 << 16);
    assert_eq!(cluster.refusal(rank, call), Code::Shutdown);
}

#[test]
fn attaches_and_links_that_wait_for_a_daemon_that_shuts_down() {
    let mut cluster = Cluster::new(1, 2);
    let d = decode_engine(&mut cluster, "d", &[0]);
    let p = cluster.engine(
        crate::geometry::envelope("p", kvferry_handshake::Role::Prefill, 2, 0),
        &[0, 1],
    );
    let ranks = cluster.ranks_of(p);
    // An attach that waits for its home's answer.
    cluster.lose(|body| matches!(body, Body::Joined { .. }));
    let waits = cluster.attach(ranks[0]);
    cluster.run_for(MOMENT);
    cluster.input(0, Input::Shutdown);
    assert_eq!(cluster.refusal(ranks[0], waits), Code::Shutdown);
    cluster.be_honest();
    // A join, and a link, that come to a home that shuts down.
    let call = cluster.attach(ranks[1]);
    cluster.run_for(MOMENT);
    assert_eq!(cluster.refusal(ranks[1], call), Code::Shutdown);
    let e = decode_engine(&mut cluster, "e", &[1]);
    cluster.fetch_all(e, d, &id("a", 0), 4);
    cluster.run_for(MOMENT);
    assert_eq!(cluster.codes_of(e, &id("a", 0)), [Some(Code::Shutdown)]);
}

#[test]
fn between_nodes_nothing_moves_but_by_rdma_where_that_is_required() {
    for strict in [0, 1] {
        let mut cluster = Cluster::with(1, 2, |node, config| config.require_rdma = node == strict);
        let (p, d) = pair(&mut cluster, &[0], &[1]);
        cluster.publish_all(p, &id("a", 0), 17);
        cluster.fetch_all(d, p, &id("a", 0), 17);
        cluster.run_for(MOMENT);
        assert_eq!(cluster.codes_of(d, &id("a", 0)), [Some(Code::PathRequired)]);
        // What moves no bytes needs no path.
        let (prefill, decode) = (cluster.ranks_of(p)[0], cluster.ranks_of(d)[0]);
        cluster.publish(prefill, &id("b", 0), 17, Ready::complete(17), 1, None);
        cluster.fetch(decode, p, &id("b", 0), tokens(17, 17), 17);
        cluster.run_for(MOMENT);
        assert_eq!(cluster.end_of(decode, &id("b", 0)), Some(Ok(17)));
        assert_eq!(cluster.end_of(prefill, &id("b", 0)), Some(Ok(17)));
    }
    let mut cluster = Cluster::with(1, 1, |_, config| config.require_rdma = true);
    let (p, d) = pair(&mut cluster, &[0], &[0]);
    cluster.publish_all(p, &id("a", 0), 17);
    cluster.fetch_all(d, p, &id("a", 0), 17);
    cluster.run_for(MOMENT);
    assert!(
        cluster.all_delivered(d, &id("a", 0)),
        "within a node it is a copy"
    );
}
