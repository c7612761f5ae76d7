//! Links: both daemons judge, refusals reach both engines and are remembered, and what is stale is found again.

use std::sync::{Arc, Mutex};

use kvferry_broker::{Body, EngineId, PartState, Stated};
use kvferry_control::Event;
use kvferry_handshake::{Code, Envelope, Policy, Ready, Role, Verdict};

use crate::engines::{id, tokens};
use crate::geometry::envelope;
use crate::scene::{MOMENT, decode_engine, pair, prefill_engine};
use crate::sim::{Cluster, DEADLINE};

/// Counts messages of some kind.
fn count(cluster: &mut Cluster, named: fn(&Body) -> bool) -> Arc<Mutex<Vec<Body>>> {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let record = seen.clone();
    cluster.change(move |_, message| {
        if named(&message.body) {
            record.lock().unwrap().push(message.body.clone());
        }
        true
    });
    seen
}

/// Makes an envelope invalid.
fn spoil(stated: &mut Stated) {
    let mut envelope = Envelope::clone(stated);
    envelope.components[0].page_group = 9;
    *stated = Stated::new(envelope);
}

fn refused_with(code: Code) -> impl Fn(&Event) -> bool {
    move |event| matches!(event, Event::Refused { verdict, .. } if verdict.mismatches.iter().any(|m| m.code == code))
}

/// Two engines that do not fit in two ways.
fn misfits(cluster: &mut Cluster) -> (usize, usize) {
    let p = prefill_engine(cluster, &[0, 1]);
    let mut other = envelope("d", Role::Decode, 1, 0);
    other.identity.model = "another".to_owned();
    other.components[0].element = kvferry_handshake::Element::Fp16;
    let d = cluster.engine(other, &[2]);
    cluster.start(d);
    (p, d)
}

#[test]
fn a_refusal_names_everything_to_both_engines_and_moves_nothing() {
    let mut cluster = Cluster::new(1, 3);
    let (p, d) = misfits(&mut cluster);
    let announced = count(&mut cluster, |body| matches!(body, Body::Announce(_)));
    cluster.publish_all(p, &id("a", 0), 9);
    cluster.fetch_all(d, p, &id("a", 0), 9);
    cluster.run_for(MOMENT);
    let (prefill, decode) = (cluster.ranks_of(p), cluster.ranks_of(d)[0]);
    let Some(Err(cause)) = cluster.end_of(decode, &id("a", 0)) else {
        panic!("it failed");
    };
    assert_eq!(cause.code, Code::LinkRefused);
    for code in [Code::Model, Code::ElementType] {
        assert!(cause.mismatches.iter().any(|mismatch| mismatch.code == code));
        assert_eq!(cluster.events_like(decode, refused_with(code)), 1);
        assert_eq!(cluster.events_like(prefill[0], refused_with(code)), 1);
        assert_eq!(
            cluster.events_like(prefill[1], refused_with(code)),
            0,
            "rank 0 alone is told"
        );
    }
    assert!(announced.lock().unwrap().is_empty());
    // It ends neither engine.
    let e = decode_engine(&mut cluster, "e", &[2]);
    cluster.fetch_all(e, p, &id("a", 0), 9);
    cluster.run_for(MOMENT);
    assert!(cluster.all_delivered(e, &id("a", 0)));
}

#[test]
fn a_refusal_is_remembered_for_that_pair_of_lives() {
    let mut cluster = Cluster::new(1, 3);
    let (p, d) = misfits(&mut cluster);
    let asked = count(&mut cluster, |body| {
        matches!(body, Body::LinkOpen { .. } | Body::LinkAnswer(_))
    });
    for name in ["a", "b", "c"] {
        cluster.fetch_all(d, p, &id(name, 0), 9);
        cluster.run_for(MOMENT);
        assert_eq!(cluster.codes_of(d, &id(name, 0)), [Some(Code::LinkRefused)]);
    }
    let envelopes: Vec<bool> = asked
        .lock()
        .unwrap()
        .iter()
        .map(|body| match body {
            Body::LinkOpen { envelope, .. } => envelope.is_some(),
            Body::LinkAnswer(answer) => answer.envelope.is_some(),
            _ => unreachable!(),
        })
        .collect();
    assert_eq!(
        envelopes,
        [true, true, false, false, false, false],
        "retries carry no envelope"
    );
    let rank = cluster.ranks_of(p)[0];
    assert_eq!(
        cluster.events_like(rank, refused_with(Code::Model)),
        1,
        "and tell the prefill side nothing new"
    );
    // A new life of the prefill engine, which fits, is judged anew.
    for rank in cluster.ranks_of(p) {
        cluster.disconnect(rank);
    }
    cluster.run_for(MOMENT);
    let fitting = Envelope {
        identity: kvferry_handshake::Identity {
            engine: "p".to_owned(),
            role: Role::Prefill,
            ..cluster.engines[d].envelope.identity.clone()
        },
        ..cluster.engines[d].envelope.clone()
    };
    let q = cluster.engine(fitting, &[0]);
    cluster.start(q);
    cluster.publish_all(q, &id("d", 0), 9);
    cluster.fetch_all(d, q, &id("d", 0), 9);
    cluster.run_for(MOMENT);
    assert!(cluster.all_delivered(d, &id("d", 0)));
}

#[test]
fn the_stricter_policy_applies_whoever_has_it() {
    for strict in [0, 1, 2] {
        // Rank 0's home, the other rank's daemon, the decode side.
        let mut cluster = Cluster::with(1, 3, |node, config| {
            config.policy = if node == strict {
                Policy::Strict
            } else {
                Policy::Bridge
            };
        });
        let p = prefill_engine(&mut cluster, &[0, 1]);
        let mut other = envelope("d", Role::Decode, 1, 0);
        other.page_groups[0].page_size = 8;
        other.components[0].layers = vec![0, 1];
        for placement in &mut other.ranks[0].placements {
            placement.strides.layer *= 2;
            placement.strides.page *= 2;
        }
        let d = cluster.engine(other, &[2]);
        cluster.start(d);
        let rank = cluster.ranks_of(d)[0];
        cluster.fetch(rank, p, &id("a", 0), tokens(0, 0), 0);
        cluster.run_for(MOMENT);
        let Some(Err(cause)) = cluster.end_of(rank, &id("a", 0)) else {
            panic!("refused by node {strict}");
        };
        assert_eq!(cause.code, Code::LinkRefused, "node {strict}: {cause}");
        assert!(
            cause
                .mismatches
                .iter()
                .any(|mismatch| mismatch.code == Code::PageSize)
        );
        assert_eq!(
            cluster.events_like(rank, refused_with(Code::PageSize)),
            1,
            "node {strict}"
        );
        assert_eq!(
            cluster.events_like(cluster.ranks_of(p)[0], refused_with(Code::PageSize)),
            1,
            "node {strict}"
        );
    }
}

#[test]
fn verdicts_or_plans_that_differ_refuse_the_link() {
    type Change = fn(&mut Body);
    let changes: [Change; 3] = [
        |body| {
            if let Body::LinkAnswer(answer) = body {
                answer.digest = Some([7; 32]);
            }
        },
        |body| {
            if let Body::LinkAnswer(answer) = body {
                answer.verdict.outcome = kvferry_handshake::Outcome::Bridgeable;
            }
        },
        |body| {
            if let Body::Announce(announce) = body {
                announce.digest = [7; 32];
            }
        },
    ];
    for change in changes {
        let mut cluster = Cluster::new(1, 3);
        let (p, d) = pair(&mut cluster, &[0, 1], &[2]);
        cluster.change(move |_, message| {
            change(&mut message.body);
            true
        });
        cluster.publish_all(p, &id("a", 0), 9);
        for name in ["a", "b"] {
            cluster.fetch_all(d, p, &id(name, 0), 9);
            cluster.run_for(MOMENT);
            assert_eq!(cluster.codes_of(d, &id(name, 0)), [Some(Code::VerdictsDiffer)]);
        }
        let told = refused_with(Code::VerdictsDiffer);
        assert_eq!(cluster.events_like(cluster.ranks_of(d)[0], &told), 2);
        assert_eq!(
            cluster.events_like(cluster.ranks_of(p)[0], &told),
            1,
            "the prefill side once"
        );
        assert_eq!(cluster.counts(2)["jobs"], 0);
    }
}

#[test]
fn a_home_that_sends_nonsense_is_not_believed() {
    type Change = fn(&mut Body);
    let changes: [Change; 3] = [
        |body| {
            if let Body::LinkAnswer(answer) = body {
                spoil(answer.envelope.as_mut().unwrap());
            }
        },
        |body| {
            if let Body::LinkAnswer(answer) = body {
                answer.seats.pop();
            }
        },
        |body| {
            if let Body::LinkAnswer(answer) = body {
                answer.seats[0].as_mut().unwrap().address = "nowhere".to_owned();
            }
        },
    ];
    for change in changes {
        let mut cluster = Cluster::new(1, 3);
        let (p, d) = pair(&mut cluster, &[0, 1], &[2]);
        cluster.change(move |_, message| {
            change(&mut message.body);
            true
        });
        cluster.fetch_all(d, p, &id("a", 0), 9);
        cluster.run_for(MOMENT);
        assert_eq!(cluster.codes_of(d, &id("a", 0)), [Some(Code::ProtocolViolation)]);
    }
}

#[test]
fn a_decode_side_that_sends_nonsense_is_not_believed() {
    type Change = fn(&mut Body);
    let changes: [(Code, Change); 5] = [
        (Code::EnvelopeInvalid, |body| {
            if let Body::LinkOpen {
                envelope: Some(envelope),
                ..
            } = body
            {
                spoil(envelope);
            }
        }),
        (Code::TokensInvalid, |body| {
            if let Body::Announce(announce) = body {
                announce.tokens.from = 10;
            }
        }),
        (Code::PagesInvalid, |body| {
            if let Body::Announce(announce) = body {
                Arc::make_mut(&mut announce.pages).groups[0].truncate(1);
            }
        }),
        (Code::PagesInvalid, |body| {
            if let Body::Announce(announce) = body {
                announce.decode_rank = 5;
            }
        }),
        (Code::ProtocolViolation, |body| {
            if let Body::Announce(announce) = body {
                announce.offers[0].slot = None;
            }
        }),
    ];
    for (code, change) in changes {
        let mut cluster = Cluster::new(1, 3);
        let (p, d) = pair(&mut cluster, &[0, 1], &[2]);
        cluster.publish_all(p, &id("a", 0), 9);
        cluster.change(move |_, message| {
            change(&mut message.body);
            true
        });
        cluster.fetch_all(d, p, &id("a", 0), 9);
        cluster.run_for(MOMENT);
        assert_eq!(cluster.codes_of(d, &id("a", 0)), [Some(code)]);
    }
}

#[test]
fn a_fetch_that_is_called_delivered_too_early_is_not_believed() {
    let mut cluster = Cluster::new(1, 2);
    let (p, d) = pair(&mut cluster, &[0], &[1]);
    let rank = cluster.ranks_of(p)[0];
    cluster.publish(rank, &id("a", 0), 9, Ready::default(), 1, None);
    cluster.change(|_, message| {
        if let Body::FetchState { state, .. } = &mut message.body {
            *state = kvferry_broker::FetchState::Delivered;
        }
        true
    });
    cluster.fetch_all(d, p, &id("a", 0), 9);
    cluster.run_for(MOMENT);
    cluster.abort(cluster.ranks_of(d)[0], &id("a", 0));
    cluster.run_for(MOMENT);
    assert_eq!(cluster.code_of(rank, &id("a", 0)), Some(Code::ProtocolViolation));
}

#[test]
fn a_link_is_asked_for_once_while_nothing_changes() {
    let mut cluster = Cluster::new(1, 3);
    let (p, d) = pair(&mut cluster, &[0, 1], &[2]);
    let asked = count(&mut cluster, |body| {
        matches!(body, Body::LinkOpen { .. } | Body::LinkOffer { .. })
    });
    for name in ["a", "b", "c"] {
        cluster.publish_all(p, &id(name, 0), 9);
        cluster.fetch_all(d, p, &id(name, 0), 9);
        cluster.run_for(MOMENT);
        assert!(cluster.all_delivered(d, &id(name, 0)));
    }
    assert_eq!(
        asked.lock().unwrap().len(),
        2,
        "one question, one offer to the other rank's daemon"
    );
    // Unused for long enough it is forgotten, and at once with the last rank that could use it.
    cluster.run_for(20 * DEADLINE);
    assert_eq!(cluster.counts(2)["links"], 0);
    cluster.fetch_all(d, p, &id("d", 0), 9);
    cluster.run_for(MOMENT);
    assert_eq!(cluster.counts(2)["links"], 1);
    cluster.disconnect(cluster.ranks_of(d)[0]);
    cluster.run_for(MOMENT);
    assert_eq!(cluster.counts(2)["links"], 0);
}

#[test]
fn a_daemon_that_forgot_a_pair_is_offered_it_again() {
    let mut cluster = Cluster::new(1, 3);
    let (p, d) = pair(&mut cluster, &[0, 1], &[2]);
    cluster.lose(|body| matches!(body, Body::LinkOffer { .. }));
    cluster.fetch_all(d, p, &id("a", 0), 9);
    cluster.run_for(MOMENT);
    let offers = cluster.said["LinkOffer"];
    assert!(offers <= 3, "{offers} offers at once");
    cluster.be_honest();
    cluster.publish_all(p, &id("a", 0), 9);
    cluster.run_for(DEADLINE / 2);
    assert!(cluster.all_delivered(d, &id("a", 0)));
    // The home too forgets, after a long time without a question.
    for round in 0..12 {
        let name = format!("b{round}");
        cluster.publish_all(p, &id(&name, 0), 9);
        cluster.fetch_all(d, p, &id(&name, 0), 9);
        cluster.run_for(6 * DEADLINE);
        assert!(cluster.all_delivered(d, &id(&name, 0)), "{name}");
    }
    assert!(cluster.said["LinkOffer"] > offers + 1);
}

#[test]
fn a_home_that_forgot_the_decode_engine_asks_for_its_envelope() {
    let mut cluster = Cluster::new(1, 2);
    let p = prefill_engine(&mut cluster, &[0]);
    let d = decode_engine(&mut cluster, "d", &[1]);
    cluster.publish_all(p, &id("a", 0), 9);
    // The answer is lost after the home has judged, and then the home restarts.
    cluster.fetch_all(d, p, &id("a", 0), 9);
    cluster.run_for(MOMENT);
    assert!(cluster.all_delivered(d, &id("a", 0)));
    cluster.disconnect(cluster.ranks_of(p)[0]);
    cluster.run_for(MOMENT);
    cluster.start(p);
    cluster.publish_all(p, &id("b", 0), 9);
    cluster.fetch_all(d, p, &id("b", 0), 9);
    cluster.run_for(10 * MOMENT);
    assert!(cluster.all_delivered(d, &id("b", 0)));
    assert_eq!(cluster.said["LinkNeedsEnvelope"], 1);
}

#[test]
fn a_fetch_is_announced_anew_where_a_rank_has_another_life() {
    let mut cluster = Cluster::new(1, 3);
    let (p, d) = pair(&mut cluster, &[0, 1], &[2]);
    let ranks = cluster.ranks_of(p);
    cluster.fetch_all(d, p, &id("warm", 0), 0);
    cluster.run_for(MOMENT);
    cluster.disconnect(ranks[1]);
    cluster.run_for(MOMENT);
    // The link names its old life. Rank 0's part is met and moves before that is found out.
    let transfer = id("a", 0);
    cluster.publish(ranks[0], &transfer, 9, Ready::complete(9), 1, None);
    let states = count(&mut cluster, |body| {
        matches!(
            body,
            Body::PartState {
                state: PartState::Stale,
                ..
            }
        )
    });
    cluster.fetch_all(d, p, &transfer, 9);
    cluster.run_for(DEADLINE / 2);
    assert_eq!(states.lock().unwrap().len(), 1, "it is not tried again and again");
    assert_eq!(cluster.codes_of(d, &transfer), [None]);
    cluster.attach(ranks[1]);
    cluster.run_for(DEADLINE / 4);
    cluster.publish(ranks[1], &transfer, 9, Ready::complete(9), 1, None);
    cluster.run_for(MOMENT);
    assert!(
        cluster.all_delivered(d, &transfer),
        "{:?}",
        cluster.codes_of(d, &transfer)
    );
    assert!(
        cluster.all_delivered(p, &transfer),
        "{:?}",
        cluster.codes_of(p, &transfer)
    );
    let matched = cluster.events_like(
        ranks[0],
        |event| matches!(event, Event::Matched { transfer, .. } if transfer.id == "a"),
    );
    assert_eq!(matched, 1, "the publisher is not told twice");
}

#[test]
fn finding_the_ranks_again_and_again_is_no_progress() {
    let mut cluster = Cluster::new(1, 3);
    let (p, d) = pair(&mut cluster, &[0, 1], &[2]);
    let rank = cluster.ranks_of(p)[1];
    // Whatever life of the rank is asked, its daemon calls it over.
    cluster.change(|from, message| {
        if let (1, Body::PartState { state, .. }) = (from, &mut message.body) {
            *state = PartState::Stale;
        }
        true
    });
    // Rank 0's part is met and moves each time anew.
    let other = cluster.ranks_of(p)[0];
    cluster.publish(other, &id("a", 0), 9, Ready::complete(9), 1, None);
    cluster.fetch_all(d, p, &id("a", 0), 9);
    let began = cluster.now;
    while cluster.codes_of(d, &id("a", 0)) == [None] {
        cluster.run_for(DEADLINE / 4);
        cluster.disconnect(rank);
        cluster.run_for(MOMENT);
        cluster.attach(rank);
        cluster.run_for(MOMENT);
        assert!(cluster.now < began + 2 * DEADLINE, "it goes on for ever");
    }
    assert!(cluster.said["LinkAnswer"] > 3, "the ranks were found again");
}

#[test]
fn a_fetch_that_is_withdrawn_can_still_fail() {
    let mut cluster = Cluster::new(1, 3);
    cluster.troubles(crate::data::Troubles {
        delay: 50_000,
        ..Default::default()
    });
    let (p, d) = pair(&mut cluster, &[0, 1], &[2]);
    let ranks = cluster.ranks_of(p);
    cluster.fetch_all(d, p, &id("warm", 0), 0);
    cluster.run_for(MOMENT);
    cluster.disconnect(ranks[1]);
    cluster.run_for(1_000);
    let decode = cluster.ranks_of(d)[0];
    cluster.fetch(decode, p, &id("a", 0), tokens(0, 9), 9);
    cluster.run_for(1_000);
    // Its jobs are being closed so that it can be announced anew.
    cluster.abort(decode, &id("a", 0));
    cluster.run_for(2 * MOMENT);
    assert_eq!(cluster.code_of(decode, &id("a", 0)), Some(Code::Aborted));
    cluster.assert_nothing_is_left();
}

#[test]
fn a_rank_that_its_home_still_names_is_not_asked_again_and_again() {
    let mut cluster = Cluster::new(1, 3);
    let (p, d) = pair(&mut cluster, &[0, 1], &[2]);
    let rank = cluster.ranks_of(p)[1];
    cluster.lose(|body| matches!(body, Body::Leave { .. }));
    cluster.disconnect(rank);
    cluster.run_for(MOMENT);
    let stale = count(&mut cluster, |body| {
        matches!(
            body,
            Body::PartState {
                state: PartState::Stale,
                ..
            }
        )
    });
    cluster.fetch_all(d, p, &id("a", 0), 9);
    cluster.run_for(DEADLINE / 2);
    assert_eq!(stale.lock().unwrap().len(), 1);
    // Its next life is another one.
    cluster.attach(rank);
    cluster.run_for(MOMENT);
    cluster.publish_all(p, &id("a", 0), 9);
    cluster.run_for(DEADLINE / 4);
    assert!(cluster.all_delivered(d, &id("a", 0)));
}

#[test]
fn a_rank_that_stayed_is_found_in_its_engines_next_life() {
    let mut cluster = Cluster::new(1, 3);
    let (p, d) = pair(&mut cluster, &[0, 1], &[2]);
    let ranks = cluster.ranks_of(p);
    cluster.fetch_all(d, p, &id("warm", 0), 0);
    cluster.run_for(MOMENT);
    // The home loses sight of both ranks, and so of the engine; rank 1 never went away.
    cluster.disconnect(ranks[0]);
    let peer = cluster.nodes[1].address.clone();
    let cause = kvferry_control::Fault::new(Code::PeerLost, "a glitch");
    cluster.input(0, kvferry_broker::Input::PeerDown { peer, cause });
    cluster.run_for(DEADLINE);
    cluster.attach(ranks[0]);
    cluster.run_for(MOMENT);
    let transfer = id("a", 0);
    cluster.publish_all(p, &transfer, 9);
    // The link still names the engine's earlier life. Rank 1's daemon answers first.
    let mut first = true;
    cluster.change(move |from, message| {
        let stale = matches!(
            &message.body,
            Body::PartState {
                state: PartState::Stale,
                ..
            }
        );
        !(stale && from == 0 && std::mem::take(&mut first))
    });
    cluster.fetch_all(d, p, &transfer, 9);
    cluster.run_for(DEADLINE / 2);
    assert!(
        cluster.all_delivered(d, &transfer),
        "{:?}",
        cluster.codes_of(d, &transfer)
    );
}

/// The pair that was linked, as node 1 named it.
fn linked(cluster: &mut Cluster) -> (EngineId, EngineId) {
    let asked = count(cluster, |body| matches!(body, Body::LinkOffer { .. }));
    let (p, d) = pair(cluster, &[0, 1], &[2]);
    cluster.publish_all(p, &id("a", 0), 9);
    cluster.fetch_all(d, p, &id("a", 0), 9);
    cluster.run_for(MOMENT);
    let asked = asked.lock().unwrap();
    match asked.first() {
        Some(Body::LinkOffer { engine, decode, .. }) => (engine.clone(), decode.clone()),
        _ => panic!("the pair is offered to the other prefill rank's daemon"),
    }
}

#[test]
fn a_refusal_by_a_peer_is_told_once_and_only_if_it_is_one() {
    let mut cluster = Cluster::new(1, 3);
    let (engine, decode) = linked(&mut cluster);
    let rank = cluster.ranks_of(0)[0];
    let told = |cluster: &Cluster| cluster.events_like(rank, |event| matches!(event, Event::Refused { .. }));
    let refusal = misfit_verdict();
    let mut said = |verdict: Verdict| {
        let message = kvferry_broker::PeerMessage {
            to: 0,
            body: Body::LinkFailed {
                engine: engine.clone(),
                decode: decode.clone(),
                verdict: Box::new(verdict),
            },
        };
        let peer = cluster.nodes[2].address.clone();
        let incarnation = cluster.nodes[2].life;
        let input = kvferry_broker::Input::Peer {
            peer,
            incarnation,
            message,
        };
        cluster.input(0, input);
        (told(&cluster), cluster.violations.len())
    };
    let allowing = Verdict {
        outcome: kvferry_handshake::Outcome::Compatible,
        ..refusal.clone()
    };
    let without_reason = Verdict {
        mismatches: Vec::new(),
        ..refusal.clone()
    };
    assert_eq!(said(allowing), (0, 1), "a failure that allows the pair is none");
    assert_eq!(said(without_reason), (0, 2), "nor is one without a reason");
    assert_eq!(
        said(refusal.clone()),
        (1, 2),
        "what is wrong before hides no refusal"
    );
    for _ in 0..100 {
        assert_eq!(said(refusal.clone()), (1, 2), "told once");
    }
}

#[test]
fn a_pair_that_is_judged_anew_is_told_once() {
    let mut cluster = Cluster::new(1, 3);
    let (p, d) = misfits(&mut cluster);
    let asked = count(&mut cluster, |body| matches!(body, Body::LinkOpen { .. }));
    cluster.fetch_all(d, p, &id("a", 0), 9);
    cluster.run_for(MOMENT);
    let body = asked
        .lock()
        .unwrap()
        .first()
        .cloned()
        .expect("the link is asked for");
    let rank = cluster.ranks_of(p)[0];
    for round in 0..10u32 {
        let mut body = body.clone();
        if let Body::LinkOpen { envelope, .. } = &mut body {
            let mut other = Envelope::clone(envelope.as_ref().expect("the first question has it"));
            other.identity.model = format!("model {round}");
            *envelope = Some(Stated::new(other));
        }
        let input = kvferry_broker::Input::Peer {
            peer: cluster.nodes[2].address.clone(),
            incarnation: cluster.nodes[2].life,
            message: kvferry_broker::PeerMessage { to: 0, body },
        };
        cluster.input(0, input);
    }
    assert_eq!(cluster.events_like(rank, refused_with(Code::Model)), 1);
}

fn misfit_verdict() -> Verdict {
    let prefill = envelope("p", Role::Prefill, 2, 0);
    let mut decode = envelope("d", Role::Decode, 1, 0);
    decode.identity.model = "another".to_owned();
    kvferry_handshake::compare(&prefill, &decode, kvferry_handshake::Policy::Strict)
}
