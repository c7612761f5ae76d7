//! Attaching, registering, and their refusals.

use kvferry_broker::{Body, Input};
use kvferry_control::{Call, Event, Memory};
use kvferry_handshake::{Code, Element, Ready, Role};

use crate::engines::{Asked, id};
use crate::geometry::envelope;
use crate::scene::{MOMENT, pair, prefill_engine};
use crate::sim::{Cluster, DEADLINE};

#[test]
fn a_rank_that_the_envelope_does_not_list() {
    let mut cluster = Cluster::new(1, 1);
    let p = cluster.engine(envelope("p", Role::Prefill, 1, 0), &[0]);
    let rank = cluster.ranks_of(p)[0];
    cluster.ranks[rank].rank = 1;
    let call = cluster.attach(rank);
    assert_eq!(cluster.refusal(rank, call), Code::RankUnknown);
    cluster.ranks[rank].rank = 0;
    // Nothing was left half-attached: the same connection attaches.
    cluster.start(p);
}

#[test]
fn an_envelope_that_is_not_valid() {
    let mut cluster = Cluster::new(1, 1);
    let mut bad = envelope("p", Role::Prefill, 1, 0);
    bad.page_groups[0].page_size = 0;
    let p = cluster.engine(bad, &[0]);
    let rank = cluster.ranks_of(p)[0];
    let call = cluster.attach(rank);
    assert_eq!(cluster.refusal(rank, call), Code::EnvelopeInvalid);
}

#[test]
fn an_attached_rank_and_an_attached_connection_are_refused_and_stay() {
    let mut cluster = Cluster::new(1, 2);
    let p = prefill_engine(&mut cluster, &[0]);
    let rank = cluster.ranks_of(p)[0];
    let call = cluster.attach(rank);
    assert_eq!(cluster.refusal(rank, call), Code::RankAttached);
    // The same rank of the same engine over another connection, here and at another daemon.
    for node in [0, 1] {
        let twin = cluster.engine(envelope("p", Role::Prefill, 1, 0), &[node]);
        cluster.engines[twin].home = 0;
        let twin = cluster.ranks_of(twin)[0];
        let call = cluster.attach(twin);
        cluster.run_for(MOMENT);
        assert_eq!(cluster.refusal(twin, call), Code::RankAttached);
    }
    assert!(cluster.ranks[rank].attached);
    assert_eq!(cluster.counts(0)["ranks"], 1);
    assert_eq!(cluster.counts(1)["ranks"], 0);
}

#[test]
fn a_home_that_is_no_address_or_where_nobody_is() {
    let mut cluster = Cluster::new(1, 2);
    let p = cluster.engine(envelope("p", Role::Prefill, 1, 0), &[0]);
    let rank = cluster.ranks_of(p)[0];
    for (home, code) in [
        ("nowhere", Code::AddressInvalid),
        ("nobody:7400", Code::HomeUnreachable),
    ] {
        let session = cluster.new_session(0);
        cluster.ranks[rank].session = Some(session);
        let call = Call::Attach {
            envelope: Box::new(cluster.engines[p].envelope.clone()),
            rank: 0,
            home: Some(home.to_owned()),
        };
        let call = cluster.rank_call(rank, Asked::Attach, call);
        cluster.run_for(MOMENT);
        assert_eq!(cluster.refusal(rank, call), code);
    }
    assert_eq!(cluster.counts(0)["ranks"], 0);
}

#[test]
fn a_home_that_does_not_answer_is_unreachable_at_the_deadline() {
    let mut cluster = Cluster::new(1, 2);
    let p = cluster.engine(envelope("p", Role::Prefill, 2, 0), &[0, 1]);
    cluster.lose(|body| matches!(body, Body::Join { .. }));
    let rank = cluster.ranks_of(p)[1];
    let call = cluster.attach(rank);
    cluster.run_for(DEADLINE / 2);
    assert!(!cluster.ranks[rank].answers.contains_key(&call));
    cluster.run_for(DEADLINE);
    assert_eq!(cluster.refusal(rank, call), Code::HomeUnreachable);
    assert_eq!(cluster.counts(1)["ranks"], 0);
}

#[test]
fn a_lost_join_or_answer_is_asked_for_again() {
    for lost in [
        (|body: &Body| matches!(body, Body::Join { .. })) as fn(&Body) -> bool,
        |body| matches!(body, Body::Joined { .. }),
    ] {
        let mut cluster = Cluster::new(1, 2);
        let p = cluster.engine(envelope("p", Role::Prefill, 2, 0), &[0, 1]);
        let mut first = true;
        cluster.change(move |_, message| !(lost(&message.body) && std::mem::take(&mut first)));
        cluster.start(p);
    }
}

#[test]
fn ranks_that_disagree_are_refused_all_of_them() {
    let mut cluster = Cluster::new(1, 3);
    let p = cluster.engine(envelope("p", Role::Prefill, 4, 0), &[0, 1, 1, 2]);
    let ranks = cluster.ranks_of(p);
    for rank in &ranks[..3] {
        cluster.attach(*rank);
    }
    cluster.run_for(MOMENT);
    let transfer = id("a", 0);
    cluster.publish(ranks[1], &transfer, 8, Ready::complete(8), 1, None);
    let mut other = cluster.engines[p].envelope.clone();
    other.identity.model = "another".to_owned();
    let call = cluster.attach_as(ranks[3], other);
    cluster.run_for(MOMENT);
    assert_eq!(cluster.refusal(ranks[3], call), Code::RanksDisagree);
    let Err(fault) = cluster.answer_to(ranks[3], call) else {
        panic!("refused");
    };
    assert!(fault.message.contains("identity.model"), "{}", fault.message);
    for rank in &ranks[..3] {
        let detached =
            |event: &Event| matches!(event, Event::Detached { cause } if cause.code == Code::RanksDisagree);
        assert_eq!(cluster.events_like(*rank, detached), 1);
        let call = cluster.rank_call(*rank, Asked::Other, Call::Abort { transfer: id("a", 0) });
        assert_eq!(cluster.refusal(*rank, call), Code::NotAttached);
    }
    // What was under way ended first, and its regions are released.
    let ended = cluster.ranks[ranks[1]]
        .events
        .iter()
        .position(|event| matches!(event, Event::Failed { .. }));
    let detached = cluster.ranks[ranks[1]]
        .events
        .iter()
        .position(|event| matches!(event, Event::Detached { .. }));
    assert!(ended.unwrap() < detached.unwrap());
    for node in 0..3 {
        assert_eq!(cluster.counts(node)["regions"], 0);
        assert_eq!(cluster.counts(node)["seats"], 0);
    }
    // The connections may attach again, in agreement.
    cluster.start(p);
    cluster.assert_nothing_is_left();
}

#[test]
fn another_life_of_an_engine_waits_until_the_first_has_gone() {
    let mut cluster = Cluster::new(1, 1);
    let old = cluster.engine(envelope("p", Role::Prefill, 1, 1), &[0]);
    cluster.start(old);
    let new = cluster.engine(envelope("p", Role::Prefill, 2, 2), &[0, 0]);
    let rank = cluster.ranks_of(new)[1];
    let call = cluster.attach(rank);
    cluster.run_for(MOMENT);
    assert_eq!(cluster.refusal(rank, call), Code::EngineNameTaken);
    assert!(cluster.ranks[cluster.ranks_of(old)[0]].attached);
    let gone = cluster.ranks_of(old)[0];
    cluster.disconnect(gone);
    cluster.run_for(MOMENT);
    cluster.start(new);
}

#[test]
fn more_ranks_than_configured() {
    let mut cluster = Cluster::with(1, 1, |_, config| config.max_ranks = 1);
    let p = cluster.engine(envelope("p", Role::Prefill, 2, 0), &[0, 0]);
    let ranks = cluster.ranks_of(p);
    cluster.attach(ranks[0]);
    cluster.run_for(MOMENT);
    let call = cluster.attach(ranks[1]);
    assert_eq!(cluster.refusal(ranks[1], call), Code::OverLimit);
}

#[test]
fn a_daemon_may_not_seat_more_ranks_at_a_home_than_it_may_have() {
    // The other daemon allows itself more than its home does.
    let mut cluster = Cluster::with(1, 2, |node, config| config.max_ranks = [1, 8][node]);
    let p = cluster.engine(envelope("p", Role::Prefill, 4, 0), &[0, 1, 1, 1]);
    let ranks = cluster.ranks_of(p);
    for rank in &ranks {
        cluster.attach(*rank);
    }
    cluster.run_for(MOMENT);
    let attached = ranks.iter().filter(|rank| cluster.ranks[**rank].attached).count();
    assert_eq!(attached, 2);
    assert_eq!(cluster.ledger.codes[&(Code::OverLimit, "answer")], 2);
}

#[test]
fn calls_without_an_attachment() {
    let mut cluster = Cluster::new(1, 1);
    let p = cluster.engine(envelope("p", Role::Prefill, 1, 0), &[0]);
    let rank = cluster.ranks_of(p)[0];
    let session = cluster.new_session(0);
    cluster.ranks[rank].session = Some(session);
    for call in [
        Call::Unregister { region: 0 },
        Call::Abort { transfer: id("a", 0) },
        Call::Expect {
            source: "kvferry://node0:7400/p".to_owned(),
            transfer: id("a", 0),
        },
        Call::Decline {
            source: "kvferry://node0:7400/p".to_owned(),
            transfer: id("a", 0),
        },
    ] {
        let call = cluster.rank_call(rank, Asked::Other, call);
        assert_eq!(cluster.refusal(rank, call), Code::NotAttached);
    }
    let call = cluster
        .publish(rank, &id("a", 0), 0, Ready::default(), 1, None)
        .unwrap();
    assert_eq!(cluster.refusal(rank, call), Code::NotAttached);
    let call = cluster
        .fetch(rank, p, &id("a", 0), crate::engines::tokens(0, 0), 0)
        .unwrap();
    assert_eq!(cluster.refusal(rank, call), Code::NotAttached);
    // Its memory is not kept either.
    let call = cluster.register(rank, 0, 4096);
    assert_eq!(cluster.refusal(rank, call), Code::NotAttached);
    assert!(cluster.nodes[0].data.memory.is_empty());
}

#[test]
fn calls_that_do_not_come_to_the_broker() {
    let mut cluster = Cluster::new(1, 1);
    let p = prefill_engine(&mut cluster, &[0]);
    let rank = cluster.ranks_of(p)[0];
    let register = Call::Register {
        region: 0,
        memory: Memory::Process { address: 0, len: 0 },
    };
    for call in [Call::Status, register] {
        let call = cluster.rank_call(rank, Asked::Other, call);
        assert_eq!(cluster.refusal(rank, call), Code::Internal);
    }
}

#[test]
fn regions_that_do_not_fit_are_let_go() {
    let mut cluster = Cluster::new(1, 1);
    let p = prefill_engine(&mut cluster, &[0]);
    let rank = cluster.ranks_of(p)[0];
    let needed = cluster.engines[p].envelope.region_bytes(0)[&0];
    let call = cluster.register(rank, 7, needed);
    assert_eq!(cluster.refusal(rank, call), Code::RegionUnknown);
    let call = cluster.register(rank, 0, needed);
    assert_eq!(cluster.refusal(rank, call), Code::RegionRegistered);
    let call = cluster.rank_call(rank, Asked::Other, Call::Unregister { region: 7 });
    assert_eq!(cluster.refusal(rank, call), Code::RegionUnknown);
    assert_eq!(cluster.nodes[0].data.memory.len(), 2);

    let q = cluster.engine(envelope("q", Role::Prefill, 1, 0), &[0]);
    let rank = cluster.ranks_of(q)[0];
    cluster.registers = false;
    cluster.attach(rank);
    cluster.run_for(MOMENT);
    let call = cluster.register(rank, 0, needed - 1);
    assert_eq!(cluster.refusal(rank, call), Code::RegionTooSmall);
    assert_eq!(cluster.nodes[0].data.memory.len(), 2);
    let most = needed.next_multiple_of(2 << 20);
    let call = cluster.register(rank, 0, most + 1);
    assert_eq!(cluster.refusal(rank, call), Code::RegionTooLarge);
    assert_eq!(cluster.nodes[0].data.memory.len(), 2);
    let call = cluster.register(rank, 0, most);
    assert!(cluster.answer_to(rank, call).is_ok());
}

#[test]
fn a_region_whose_rows_are_of_no_known_length_may_have_any() {
    let mut cluster = Cluster::new(1, 1);
    let mut open = envelope("open", Role::Prefill, 1, 0);
    for component in &mut open.components {
        component.element = Element::Auto;
    }
    assert!(open.region_bytes(0).values().all(|end| *end == 0));
    let p = cluster.engine(open, &[0]);
    let rank = cluster.ranks_of(p)[0];
    cluster.registers = false;
    cluster.attach(rank);
    cluster.run_for(MOMENT);
    let call = cluster.register(rank, 0, 1 << 30);
    assert!(cluster.answer_to(rank, call).is_ok());
}

#[test]
fn a_generation_belongs_to_one_registration() {
    let mut cluster = Cluster::new(1, 1);
    let p = prefill_engine(&mut cluster, &[0]);
    let rank = cluster.ranks_of(p)[0];
    let old = cluster.generations(rank);
    cluster.unregister(rank, 0);
    cluster.run_for(MOMENT);
    let new = cluster.generations(rank);
    assert_ne!(old[0], new[0]);
    assert_eq!(old[1], new[1]);
    for (generations, code) in [
        (old.clone(), Code::StaleGeneration),
        (vec![new[0]], Code::StaleGeneration),
        (vec![new[0], new[1], (9, 1)], Code::RegionUnknown),
    ] {
        cluster.claims = Some(generations);
        let call = cluster
            .publish(rank, &id("a", 0), 8, Ready::complete(8), 1, None)
            .unwrap();
        assert_eq!(cluster.refusal(rank, call), code);
        let call = cluster
            .fetch(rank, p, &id("a", 0), crate::engines::tokens(0, 8), 8)
            .unwrap();
        assert_eq!(cluster.refusal(rank, call), code);
    }
    // Nor may a region be missing altogether.
    cluster.registers = false;
    cluster.unregister(rank, 1);
    cluster.claims = Some(vec![new[0]]);
    let call = cluster
        .publish(rank, &id("a", 0), 8, Ready::complete(8), 1, None)
        .unwrap();
    assert_eq!(cluster.refusal(rank, call), Code::RegionUnknown);
}

#[test]
fn unregistering_ends_the_ranks_transfers_before_it_is_answered() {
    let mut cluster = Cluster::new(1, 2);
    cluster.stall();
    let (p, d) = pair(&mut cluster, &[0, 0], &[1, 1]);
    let transfer = id("a", 0);
    cluster.publish_all(p, &transfer, 17);
    cluster.fetch_all(d, p, &transfer, 17);
    cluster.run_for(MOMENT);
    let rank = cluster.ranks_of(d)[1];
    cluster.registers = false;
    let call = cluster.unregister(rank, 1);
    // Its jobs are not fenced yet, so it is neither ended nor answered.
    assert!(!cluster.ranks[rank].answers.contains_key(&call));
    assert!(cluster.end_of(rank, &transfer).is_none());
    // A second call finds it on its way out.
    let again = cluster.rank_call(rank, Asked::Other, Call::Unregister { region: 1 });
    assert_eq!(cluster.refusal(rank, again), Code::RegionUnknown);
    let refused = cluster
        .fetch(rank, p, &id("b", 0), crate::engines::tokens(0, 4), 4)
        .unwrap();
    assert_eq!(cluster.refusal(rank, refused), Code::RegionUnknown);
    cluster.run_for(MOMENT);
    assert!(cluster.answer_to(rank, call).is_ok());
    assert_eq!(cluster.code_of(rank, &transfer), Some(Code::Unregistered));
    assert_eq!(cluster.counts(1)["regions"], 3);
    let sibling = cluster.ranks_of(d)[0];
    assert_eq!(cluster.code_of(sibling, &transfer), Some(Code::SiblingFailed));
    assert!(cluster.codes_of(p, &transfer).iter().all(Option::is_some));
    cluster.assert_nothing_is_left();
}

#[test]
fn a_rank_is_found_where_it_is_now() {
    let mut cluster = Cluster::new(1, 3);
    let (p, d) = pair(&mut cluster, &[0, 1], &[2]);
    let carry = |cluster: &mut Cluster, name: &str| {
        let transfer = id(name, 0);
        cluster.publish_all(p, &transfer, 9);
        cluster.fetch_all(d, p, &transfer, 9);
        cluster.run_for(10 * MOMENT);
        assert!(
            cluster.all_delivered(d, &transfer) && cluster.all_delivered(p, &transfer),
            "{name}"
        );
    };
    carry(&mut cluster, "a");
    // Another life of the rank, at the same daemon and then at another.
    for node in [1, 2] {
        let rank = cluster.ranks_of(p)[1];
        cluster.disconnect(rank);
        cluster.run_for(MOMENT);
        cluster.ranks[rank].node = node;
        cluster.start(p);
        carry(&mut cluster, ["", "b", "c"][node]);
    }
}

#[test]
fn a_seat_whose_rank_left_without_a_word_expires() {
    let mut cluster = Cluster::new(1, 2);
    let p = prefill_engine(&mut cluster, &[0, 1]);
    let rank = cluster.ranks_of(p)[1];
    cluster.lose(|body| matches!(body, Body::Leave { .. }));
    cluster.disconnect(rank);
    cluster.run_for(DEADLINE / 2);
    assert_eq!(cluster.counts(0)["seats"], 2);
    cluster.run_for(DEADLINE);
    assert_eq!(cluster.counts(0)["seats"], 1);
    // What is there is kept.
    cluster.run_for(4 * DEADLINE);
    assert_eq!(cluster.counts(0)["seats"], 1);
}

#[test]
fn ranks_join_again_when_their_home_came_back_or_forgot_them() {
    let mut cluster = Cluster::new(1, 3);
    let (p, d) = pair(&mut cluster, &[0, 1], &[2]);
    let ranks = cluster.ranks_of(p);
    // The home restarts, and rank 0 with it.
    cluster.crash(0);
    cluster.run_for(MOMENT);
    cluster.boot(0);
    cluster.run_for(DEADLINE);
    assert_eq!(cluster.counts(0)["seats"], 1, "rank 1 joined again by itself");
    cluster.attach(ranks[0]);
    cluster.run_for(MOMENT);
    // The home alone believes the other daemon dead.
    let peer = cluster.nodes[1].address.clone();
    let cause = kvferry_control::Fault::new(Code::PeerLost, "a glitch");
    cluster.input(0, Input::PeerDown { peer, cause });
    assert_eq!(cluster.counts(0)["seats"], 1);
    cluster.run_for(DEADLINE);
    assert_eq!(cluster.counts(0)["seats"], 2);
    let transfer = id("a", 0);
    cluster.publish_all(p, &transfer, 9);
    cluster.fetch_all(d, p, &transfer, 9);
    cluster.run_for(DEADLINE);
    assert!(cluster.all_delivered(d, &transfer));
}

#[test]
fn late_words_about_an_earlier_life_of_a_rank_change_nothing() {
    let mut cluster = Cluster::new(1, 2);
    let p = cluster.engine(envelope("p", Role::Prefill, 2, 0), &[0, 1]);
    let heard = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
    let record = heard.clone();
    cluster.change(move |_, message| {
        record.lock().unwrap().push(message.clone());
        true
    });
    cluster.start(p);
    let rank = cluster.ranks_of(p)[1];
    cluster.disconnect(rank);
    cluster.run_for(MOMENT);
    cluster.start(p);
    // Everything that was said of the first life, once more.
    let seats = cluster.counts(0)["seats"];
    let (address, life) = (cluster.nodes[1].address.clone(), cluster.nodes[1].life);
    let said = heard.lock().unwrap().clone();
    for message in said.into_iter().rev() {
        cluster.input(
            0,
            Input::Peer {
                peer: address.clone(),
                incarnation: life,
                message,
            },
        );
    }
    assert_eq!(cluster.counts(0)["seats"], seats);
    // The rank is found where it is, without a moment's doubt.
    let d = crate::scene::decode_engine(&mut cluster, "d", &[0]);
    cluster.publish_all(p, &id("a", 0), 9);
    cluster.fetch_all(d, p, &id("a", 0), 9);
    cluster.run_for(5_000);
    assert!(cluster.all_delivered(d, &id("a", 0)));
    cluster.ranks[rank].events.clear();
    cluster.run_for(3 * DEADLINE);
    assert_eq!(cluster.counts(0)["seats"], 3);
    assert!(cluster.ranks[rank].attached);
    assert_eq!(cluster.ranks[rank].events.len(), 0);
}

#[test]
fn a_home_that_is_down_is_asked_for_now_and_then() {
    let mut cluster = Cluster::new(1, 2);
    let p = prefill_engine(&mut cluster, &[0, 1]);
    cluster.crash(0);
    cluster.run_for(2 * DEADLINE);
    assert!(
        (8..40).contains(&cluster.to_the_dead),
        "{} times",
        cluster.to_the_dead
    );
    assert!(cluster.ranks[cluster.ranks_of(p)[1]].attached, "the engine stays");
}

#[test]
fn only_its_home_takes_an_attachment_back() {
    let mut cluster = Cluster::new(1, 3);
    let engine = std::sync::Arc::new(std::sync::Mutex::new(None));
    let seen = engine.clone();
    cluster.change(move |_, message| {
        if let Body::Joined { engine, .. } = &message.body {
            *seen.lock().unwrap() = Some(engine.clone());
        }
        true
    });
    let p = prefill_engine(&mut cluster, &[0, 1]);
    let engine = engine.lock().unwrap().clone().unwrap();
    let rank = cluster.ranks_of(p)[1];
    for (from, detached) in [(2, 0), (0, 1)] {
        let cause = kvferry_control::Fault::new(Code::RanksDisagree, "they say");
        let body = Body::Detach {
            engine: engine.clone(),
            cause,
        };
        let (peer, incarnation) = (cluster.nodes[from].address.clone(), cluster.nodes[from].life);
        let message = kvferry_broker::PeerMessage { to: 0, body };
        cluster.input(
            1,
            Input::Peer {
                peer,
                incarnation,
                message,
            },
        );
        assert_eq!(
            cluster.events_like(rank, |event| matches!(event, Event::Detached { .. })),
            detached
        );
    }
}

#[test]
fn a_late_join_of_an_earlier_life_of_a_daemon() {
    let mut cluster = Cluster::new(1, 2);
    let joins = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
    let seen = joins.clone();
    cluster.change(move |from, message| {
        if from == 1 && matches!(message.body, Body::Join { .. }) {
            seen.lock().unwrap().push(message.clone());
        }
        true
    });
    let p = prefill_engine(&mut cluster, &[0, 1]);
    let (peer, incarnation) = (cluster.nodes[1].address.clone(), cluster.nodes[1].life);
    cluster.crash(1);
    cluster.run_for(MOMENT);
    cluster.boot(1);
    cluster.start(p);
    let message = joins.lock().unwrap()[0].clone();
    cluster.input(
        0,
        Input::Peer {
            peer,
            incarnation,
            message,
        },
    );
    let d = crate::scene::decode_engine(&mut cluster, "d", &[0]);
    cluster.publish_all(p, &id("a", 0), 9);
    cluster.fetch_all(d, p, &id("a", 0), 9);
    cluster.run_for(5_000);
    assert!(cluster.all_delivered(d, &id("a", 0)));
}
