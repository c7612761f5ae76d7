//! Nothing waits for ever, and nothing fails for want of one message: deadlines, losses, shutdown.

use kvferry_broker::{Body, FetchState, Input, PartState};
use kvferry_handshake::{Code, Ready};

use crate::engines::{id, tokens};
use crate::scene::{MOMENT, assert_codes, decode_engine, pair, under_way};
use crate::sim::{Cluster, DEADLINE, LEASE};

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
    // Bytes do not move. Both sides are told the phase of the one that noticed it.
    for (impatient, words) in [
        (
            1,
            [
                "moving from prefill rank 0 at node0:7400 (0 of 1088 bytes)",
                "0 of 1088 bytes done",
            ],
        ),
        (
            0,
            [
                "engine d at node1:7400: moving to its rank 0 at node1:7400 (0 of 1088 bytes)",
                "0 bytes done",
            ],
        ),
    ] {
        let mut cluster = Cluster::with(1, 2, |node, config| {
            if node == impatient {
                config.deadline_us = DEADLINE / 2;
            }
        });
        cluster.stall();
        let (p, d) = pair(&mut cluster, &[0], &[1]);
        cluster.publish_all(p, &id("a", 0), 17);
        cluster.fetch_all(d, p, &id("a", 0), 17);
        fail(&mut cluster, d, &words);
        fail(&mut cluster, p, &words);
        for engine in [p, d] {
            let rank = cluster.ranks_of(engine)[0];
            let Some(Err(cause)) = cluster.end_of(rank, &id("a", 0)) else {
                panic!("it failed");
            };
            // The other side tells its own besides.
            let own = engine == [p, d][impatient];
            let phases = cause.message.matches('[').count();
            assert_eq!(phases, if own { 1 } else { 2 }, "{}", cause.message);
        }
    }
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

#[test]
fn a_fetch_whose_daemon_falls_silent_is_given_up() {
    let mut cluster = Cluster::new(1, 2);
    let (p, d) = pair(&mut cluster, &[0], &[1]);
    cluster.fetch_all(d, p, &id("a", 0), 17);
    cluster.run_for(MOMENT);
    assert_eq!(cluster.counts(0)["announced"], 1);
    // The channel stands, but nothing comes through it.
    cluster.change(|from, _| from != 1);
    cluster.run_for(3 * DEADLINE);
    assert_eq!(cluster.counts(0)["announced"], 0);
    assert_eq!(cluster.codes_of(d, &id("a", 0)), [Some(Code::Deadline)]);
    // A daemon that speaks again is heard, and is told what became of it.
    cluster.be_honest();
    cluster.publish_all(p, &id("b", 0), 17);
    cluster.fetch_all(d, p, &id("b", 0), 17);
    cluster.run_for(MOMENT);
    assert!(cluster.all_delivered(d, &id("b", 0)));
}
