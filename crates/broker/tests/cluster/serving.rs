//! Whom a publish serves: attempts, several engines, leases, hints.

use std::sync::{Arc, Mutex};

use kvferry_broker::{Body, Input};
use kvferry_control::Event;
use kvferry_handshake::{Code, Ready};

use crate::engines::{id, tokens};
use crate::scene::{MOMENT, assert_codes, decode_engine, pair, under_way};
use crate::sim::{Cluster, DEADLINE, LEASE};

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
    // A publish that nobody fetched, and a fetch that knows of a later attempt.
    cluster.publish_all(p, &id("e", 0), 4);
    cluster.fetch_all(d, p, &id("e", 1), 4);
    cluster.run_for(MOMENT);
    assert_eq!(cluster.codes_of(p, &id("e", 0)), [Some(Code::Superseded); 2]);
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
fn a_decode_rank_is_served_once_whichever_of_its_lives_asks() {
    let mut cluster = Cluster::new(1, 2);
    let (p, d) = pair(&mut cluster, &[0], &[1, 1]);
    let (prefill, decode) = (cluster.ranks_of(p)[0], cluster.ranks_of(d));
    let transfer = id("a", 0);
    cluster.publish_all(p, &transfer, 17);
    cluster.fetch(decode[0], p, &transfer, tokens(0, 17), 17);
    cluster.run_for(MOMENT);
    assert_eq!(cluster.end_of(decode[0], &transfer), Some(Ok(17)));
    // Its next life knows nothing of that; the publisher's daemon does.
    cluster.disconnect(decode[0]);
    cluster.ranks[decode[0]].events.clear();
    cluster.start(d);
    cluster.ledger.forgetful = true;
    cluster.fetch(decode[0], p, &transfer, tokens(0, 17), 17);
    cluster.run_for(MOMENT);
    assert_eq!(cluster.code_of(decode[0], &transfer), Some(Code::TransferExists));
    assert_eq!(
        cluster.code_of(prefill, &transfer),
        None,
        "and the publish is not harmed"
    );
}

#[test]
fn a_publish_whose_fetch_has_failed_already_ends_at_once() {
    let mut cluster = Cluster::new(1, 3);
    let (p, d) = pair(&mut cluster, &[0, 1], &[2]);
    let e = decode_engine(&mut cluster, "e", &[2]);
    for name in ["one", "two"] {
        cluster.fetch_all(d, p, &id(name, 0), 9);
    }
    cluster.run_for(MOMENT);
    for name in ["one", "two"] {
        cluster.abort(cluster.ranks_of(d)[0], &id(name, 0));
    }
    cluster.run_for(MOMENT);
    cluster.publish_all(p, &id("one", 0), 9);
    for rank in cluster.ranks_of(p) {
        cluster.publish(rank, &id("two", 0), 9, Ready::complete(9), 2, None);
    }
    cluster.run_for(MOMENT);
    assert_eq!(cluster.codes_of(p, &id("one", 0)), [Some(Code::Aborted); 2]);
    // One that serves another engine too goes on for that one.
    assert_eq!(cluster.codes_of(p, &id("two", 0)), [None; 2]);
    cluster.fetch_all(e, p, &id("two", 0), 9);
    cluster.run_for(MOMENT);
    assert!(cluster.all_delivered(e, &id("two", 0)));
    assert_eq!(cluster.codes_of(p, &id("two", 0)), [Some(Code::Aborted); 2]);
}

#[test]
fn the_end_of_one_engine_leaves_the_others_a_whole_lease() {
    for fails in [false, true] {
        let mut cluster = Cluster::new(1, 3);
        let (p, d) = pair(&mut cluster, &[0], &[1]);
        let e = decode_engine(&mut cluster, "e", &[2]);
        let (prefill, decode, transfer) = (cluster.ranks_of(p)[0], cluster.ranks_of(d)[0], id("a", 0));
        cluster.publish(prefill, &transfer, 17, Ready::complete(17), 2, None);
        let begun = cluster.now;
        cluster.run_for(LEASE - MOMENT);
        // It is served beyond the publish's first lease.
        for node in &mut cluster.nodes {
            node.data.troubles.delay = DEADLINE / 2;
        }
        cluster.fetch_all(d, p, &transfer, 17);
        if fails {
            cluster.run_for(2 * MOMENT);
            cluster.abort(decode, &transfer);
        }
        let ended = |cluster: &Cluster| cluster.end_of(decode, &id("a", 0)).is_some();
        assert!(cluster.run_until(2 * DEADLINE, ended));
        assert!(cluster.now > begun + LEASE);
        for node in &mut cluster.nodes {
            node.data.troubles.delay = 20;
        }
        cluster.run_for(LEASE / 2);
        assert_eq!(
            cluster.end_of(decode, &transfer).map(|end| end.is_err()),
            Some(fails)
        );
        assert_eq!(
            cluster.code_of(prefill, &transfer),
            None,
            "it waits for the second engine"
        );
        cluster.fetch_all(e, p, &transfer, 17);
        cluster.run_for(MOMENT);
        assert!(cluster.all_delivered(e, &transfer));
    }
}

#[test]
fn only_the_daemons_of_its_ranks_and_its_home_speak_for_an_engine() {
    let mut cluster = Cluster::new(1, 3);
    let heard = Arc::new(Mutex::new(Vec::new()));
    let record = heard.clone();
    cluster.change(move |_, message| {
        if matches!(message.body, Body::Hint { .. } | Body::Expect { .. }) {
            record.lock().unwrap().push(message.clone());
        }
        true
    });
    // Its home is node 1; node 2 has nothing of it.
    let (p, d) = pair(&mut cluster, &[0], &[1]);
    let (prefill, decode) = (cluster.ranks_of(p)[0], cluster.ranks_of(d)[0]);
    cluster.hint(decode, p, &id("a", 0), true);
    cluster.run_for(MOMENT);
    cluster.be_honest();
    let heard = std::mem::take(&mut *heard.lock().unwrap());
    assert_eq!(heard.len(), 2, "it goes by way of the home: {heard:?}");
    cluster.publish(prefill, &id("a", 0), 4, Ready::complete(4), 1, None);
    assert_eq!(cluster.code_of(prefill, &id("a", 0)), Some(Code::Declined));
    cluster.publish(prefill, &id("b", 0), 4, Ready::complete(4), 1, None);
    for (node, message) in [(1, &heard[0]), (0, &heard[1])] {
        let mut message = message.clone();
        if let Body::Hint { transfer, .. } | Body::Expect { transfer, .. } = &mut message.body {
            *transfer = id("b", 0);
        }
        let said = |peer: usize, incarnation: u64| Input::Peer {
            peer: cluster.nodes[peer].address.clone(),
            incarnation,
            message: message.clone(),
        };
        let (stranger, late) = (
            said(2, cluster.nodes[2].life),
            said(1, cluster.nodes[1].life - 100),
        );
        cluster.input(node, stranger);
        cluster.input(node, late);
        cluster.run_for(MOMENT);
        assert_eq!(cluster.code_of(prefill, &id("b", 0)), None, "{message:?}");
    }
    cluster.hint(decode, p, &id("b", 0), true);
    cluster.run_for(MOMENT);
    assert_eq!(cluster.code_of(prefill, &id("b", 0)), Some(Code::Declined));
}

#[test]
fn a_later_life_of_an_engine_is_told_that_an_earlier_one_fetches() {
    let mut cluster = Cluster::new(1, 3);
    cluster.stall();
    // The decode engine's ranks are on two daemons; its home restarts.
    let (p, d) = pair(&mut cluster, &[0], &[1, 2]);
    let decode = cluster.ranks_of(d);
    cluster.publish_all(p, &id("a", 0), 17);
    cluster.fetch(decode[1], p, &id("a", 0), tokens(0, 17), 17);
    cluster.run_for(MOMENT);
    cluster.crash(1);
    cluster.run_for(MOMENT);
    cluster.boot(1);
    cluster.start(d);
    cluster.run_for(DEADLINE / 2);
    cluster.fetch(decode[0], p, &id("a", 0), tokens(0, 17), 17);
    cluster.run_for(MOMENT);
    let Some(Err(cause)) = cluster.end_of(decode[0], &id("a", 0)) else {
        panic!("it is refused");
    };
    assert_eq!(cause.code, Code::StaleIncarnation);
    let words = "an earlier life of engine d fetches it";
    assert!(cause.message.contains(words), "{}", cause.message);
    assert!(cause.message.contains("higher attempt"), "{}", cause.message);
    // As it says: a higher attempt is served.
    cluster.unstall();
    cluster.publish_all(p, &id("a", 1), 17);
    cluster.fetch_all(d, p, &id("a", 1), 17);
    cluster.run_for(MOMENT);
    assert!(cluster.all_delivered(d, &id("a", 1)));
}
