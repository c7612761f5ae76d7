//! Publish and fetch meet, in either order, and what is delivered is what was asked for.

use kvferry_broker::Body;
use kvferry_control::{Call, Event, Fetch, Path, Publish, Report};
use kvferry_handshake::{Code, Kind, PageLists, Ready, Role};

use crate::engines::{Asked, id, tokens};
use crate::geometry::{envelope, layers_apart, with_state, with_window};
use crate::ledger::Side;
use crate::scene::{MOMENT, pair};
use crate::sim::{Cluster, DEADLINE, LEASE};

fn carry(prefill: &[usize], decode: &[usize], fetch_first: bool) {
    let mut cluster = Cluster::new(1, 3);
    let (p, d) = pair(&mut cluster, prefill, decode);
    let transfer = id("a", 0);
    let fetch = |cluster: &mut Cluster| {
        for rank in cluster.ranks_of(d) {
            cluster.fetch(rank, p, &transfer, tokens(3, 21), 21);
        }
        cluster.run_for(MOMENT);
    };
    if fetch_first {
        fetch(&mut cluster);
        assert!(!cluster.all_delivered(d, &transfer));
    }
    cluster.publish_all(p, &transfer, 21);
    cluster.run_for(MOMENT);
    if !fetch_first {
        fetch(&mut cluster);
    }
    assert!(cluster.all_delivered(d, &transfer) && cluster.all_delivered(p, &transfer));
    assert_eq!(cluster.ledger.delivered_bytes, 18 * 2 * 2 * 4 * 4);
    cluster.assert_nothing_is_left();
}

#[test]
fn on_one_daemon_and_on_several_in_either_order() {
    for fetch_first in [false, true] {
        carry(&[0], &[0], fetch_first);
        carry(&[0], &[1], fetch_first);
        carry(&[0, 0, 0, 0], &[1, 1], fetch_first);
        carry(&[0, 0], &[0, 0, 0, 0], fetch_first);
        carry(&[0, 1], &[0, 2, 2, 1], fetch_first);
        carry(&[0, 1, 2, 0], &[2, 1], fetch_first);
    }
}

#[test]
fn a_fetch_waits_for_an_engine_and_for_each_of_its_ranks() {
    let mut cluster = Cluster::new(1, 3);
    let d = crate::scene::decode_engine(&mut cluster, "d", &[2]);
    let p = cluster.engine(envelope("p", Role::Prefill, 2, 0), &[0, 1]);
    let ranks = cluster.ranks_of(p);
    let transfer = id("a", 0);
    cluster.fetch_all(d, p, &transfer, 9);
    cluster.run_for(DEADLINE / 4);
    cluster.attach(ranks[0]);
    cluster.run_for(DEADLINE / 4);
    // Its regions come a moment later than its attachment.
    cluster.registers = false;
    cluster.attach(ranks[1]);
    cluster.run_for(DEADLINE / 4);
    let needed = cluster.engines[p].envelope.region_bytes(1);
    for (region, len) in needed {
        cluster.register(ranks[1], region, len);
    }
    cluster.run_for(DEADLINE / 4);
    cluster.publish_all(p, &transfer, 9);
    cluster.run_for(DEADLINE / 4);
    assert!(cluster.all_delivered(d, &transfer));
    assert_eq!(
        cluster.events_like(cluster.ranks_of(d)[0], |event| matches!(
            event,
            Event::Failed { .. }
        )),
        0
    );
}

#[test]
fn an_engine_or_a_rank_that_never_comes_is_named_at_the_deadline() {
    let mut cluster = Cluster::new(1, 3);
    let d = crate::scene::decode_engine(&mut cluster, "d", &[2]);
    let p = cluster.engine(envelope("p", Role::Prefill, 2, 0), &[0, 1]);
    let rank = cluster.ranks_of(d)[0];
    cluster.fetch_all(d, p, &id("a", 0), 9);
    cluster.run_for(DEADLINE + MOMENT);
    let Some(Err(cause)) = cluster.end_of(rank, &id("a", 0)) else {
        panic!("it failed");
    };
    assert_eq!(cause.code, Code::EngineUnknown);
    assert!(
        cause.message.contains("no engine p is attached at node0:7400"),
        "{cause}"
    );
    cluster.attach(cluster.ranks_of(p)[0]);
    cluster.fetch_all(d, p, &id("b", 0), 9);
    cluster.run_for(DEADLINE + MOMENT);
    let Some(Err(cause)) = cluster.end_of(rank, &id("b", 0)) else {
        panic!("it failed");
    };
    assert_eq!(cause.code, Code::RankMissing);
    assert!(cause.message.contains("rank 1 is not attached"), "{cause}");
    // Where nobody is at all, that is said at once.
    let nobody = Fetch {
        source: "kvferry://nobody:7400/p".to_owned(),
        transfer: id("c", 0),
        pages: PageLists { groups: vec![vec![]] },
        generations: cluster.generations(rank),
        tokens: tokens(0, 0),
        least: 0,
    };
    cluster.rank_call(
        rank,
        Asked::Transfer((Side::Fetch, id("c", 0))),
        Call::Fetch(nobody),
    );
    cluster.run_for(MOMENT);
    assert_eq!(cluster.code_of(rank, &id("c", 0)), Some(Code::PeerUnreachable));
}

#[test]
fn waiting_for_an_engine_does_not_keep_the_daemons_busy() {
    let mut cluster = Cluster::new(1, 2);
    let d = crate::scene::decode_engine(&mut cluster, "d", &[1]);
    let p = cluster.engine(envelope("p", Role::Prefill, 1, 0), &[0]);
    let before = cluster.said.get("LinkOpen").copied().unwrap_or_default();
    cluster.fetch_all(d, p, &id("a", 0), 9);
    cluster.run_for(DEADLINE + MOMENT);
    let asked = cluster.said["LinkOpen"] - before;
    assert!((8..20).contains(&asked), "{asked} questions");
}

#[test]
fn layers_and_tokens_move_while_prefill_runs() {
    let mut cluster = Cluster::new(1, 2);
    cluster.ledger.other_geometry = true;
    let p = cluster.engine(layers_apart(envelope("p", Role::Prefill, 1, 0)), &[0]);
    let d = cluster.engine(layers_apart(envelope("d", Role::Decode, 1, 0)), &[1]);
    cluster.start(p);
    cluster.start(d);
    let (prefill, decode) = (cluster.ranks_of(p)[0], cluster.ranks_of(d)[0]);
    let transfer = id("a", 0);
    cluster.fetch(decode, p, &transfer, tokens(0, 180), 180);
    let ready = |tokens, front_tokens, front_layers| Ready {
        tokens,
        front_tokens,
        front_layers,
        end: None,
    };
    let mut landed = Vec::new();
    for ready in [ready(0, 180, 1), ready(180, 180, 0)] {
        cluster.publish(prefill, &transfer, 180, ready, 1, None);
        cluster.run_for(MOMENT);
        landed.push(cluster.nodes[1].data.landed);
        assert_eq!(cluster.end_of(decode, &transfer), None);
    }
    let all = 180 * 2 * 2 * 4 * 4;
    assert_eq!(landed, [all / 2, all]);
    cluster.publish(prefill, &transfer, 180, Ready::complete(180), 1, None);
    cluster.run_for(MOMENT);
    assert_eq!(cluster.end_of(decode, &transfer), Some(Ok(180)));
}

#[test]
fn the_lowest_rank_that_set_metadata_is_heard() {
    let mut cluster = Cluster::new(1, 3);
    let (p, d) = pair(&mut cluster, &[0, 1, 1, 0], &[2]);
    let transfer = id("a", 0);
    for (rank, metadata) in cluster
        .ranks_of(p)
        .into_iter()
        .zip([None, Some(vec![1]), Some(vec![2]), None])
    {
        cluster.publish(rank, &transfer, 9, Ready::default(), 1, metadata);
        // It may be set until the final publish, and stays when that says nothing.
        cluster.publish(rank, &transfer, 9, Ready::complete(9), 1, None);
    }
    cluster.fetch_all(d, p, &transfer, 9);
    cluster.run_for(MOMENT);
    let told = |event: &Event| matches!(event, Event::Delivered { metadata, .. } if *metadata == [1]);
    assert_eq!(cluster.events_like(cluster.ranks_of(d)[0], told), 1);
}

#[test]
fn prompts_shorter_and_longer_than_asked_for() {
    // (published, wanted from, to, least, delivered)
    for (prompt, from, to, least, delivered) in [
        (9, 0, 12, 9, Some(9)),
        (9, 0, 12, 10, None),
        (9, 4, 9, 9, Some(9)),
        (9, 4, 6, 6, Some(6)),
        (9, 9, 9, 9, Some(9)),
        (0, 0, 5, 0, Some(0)),
        (0, 0, 0, 0, Some(0)),
        (3, 8, 12, 8, None),
    ] {
        for nodes in [[0, 0], [0, 1]] {
            for fetch_first in [false, true] {
                let mut cluster = Cluster::new(1, 2);
                let (p, d) = pair(&mut cluster, &nodes, &[1]);
                let decode = cluster.ranks_of(d)[0];
                let transfer = id("a", 0);
                if fetch_first {
                    cluster.fetch(decode, p, &transfer, tokens(from, to), least);
                    cluster.run_for(MOMENT);
                }
                cluster.publish_all(p, &transfer, prompt);
                if !fetch_first {
                    cluster.run_for(MOMENT);
                    cluster.fetch(decode, p, &transfer, tokens(from, to), least);
                }
                cluster.run_for(MOMENT);
                match delivered {
                    Some(tokens) => {
                        assert_eq!(cluster.end_of(decode, &transfer), Some(Ok(tokens)));
                        assert!(cluster.all_delivered(p, &transfer));
                    }
                    None => {
                        assert_eq!(cluster.code_of(decode, &transfer), Some(Code::Short));
                        assert_eq!(cluster.codes_of(p, &transfer), [Some(Code::Short); 2]);
                    }
                }
            }
        }
    }
}

#[test]
fn ranks_that_published_different_lengths() {
    let mut cluster = Cluster::new(1, 3);
    let (p, d) = pair(&mut cluster, &[0, 1], &[2]);
    let ranks = cluster.ranks_of(p);
    let transfer = id("a", 0);
    cluster.publish(ranks[0], &transfer, 9, Ready::complete(9), 1, None);
    cluster.publish(ranks[1], &transfer, 9, Ready::complete(8), 1, None);
    cluster.fetch(cluster.ranks_of(d)[0], p, &transfer, tokens(0, 9), 4);
    cluster.run_for(MOMENT);
    assert_eq!(cluster.codes_of(d, &transfer), [Some(Code::TokensInvalid)]);
    assert!(cluster.codes_of(p, &transfer).iter().all(Option::is_some));
}

#[test]
fn a_page_that_the_publisher_does_not_have() {
    let absent = kvferry_handshake::ABSENT;
    for early in [false, true] {
        let mut cluster = Cluster::new(1, 2);
        let (p, d) = pair(&mut cluster, &[0], &[1]);
        let (prefill, decode) = (cluster.ranks_of(p)[0], cluster.ranks_of(d)[0]);
        let publish = |cluster: &Cluster, name: &str, ready| {
            Call::Publish(Publish {
                transfer: id(name, 0),
                pages: Some(PageLists {
                    groups: vec![vec![absent, 40, 41]],
                }),
                generations: cluster.generations(prefill),
                ready,
                metadata: None,
                serves: 1,
            })
        };
        // The first page is absent: good for a fetch that holds it, not for one that wants it.
        let ready = if early {
            Ready {
                tokens: 8,
                front_tokens: 8,
                ..Ready::default()
            }
        } else {
            Ready::complete(12)
        };
        for (name, from, code) in [("held", 4, None), ("wanted", 0, Some(Code::PageAbsent))] {
            let call = publish(&cluster, name, ready);
            cluster.rank_call(prefill, Asked::Transfer((Side::Publish, id(name, 0))), call);
            cluster.stall();
            cluster.fetch(decode, p, &id(name, 0), tokens(from, 12), 12);
            cluster.run_for(MOMENT);
            assert_eq!(cluster.code_of(decode, &id(name, 0)), code, "{name}");
            assert_eq!(cluster.code_of(prefill, &id(name, 0)), code, "{name}");
        }
    }
}

#[test]
fn recurrent_state_does_not_pass_for_an_earlier_one() {
    for local in [false, true] {
        let mut cluster = Cluster::new(1, 2);
        cluster.ledger.other_geometry = true;
        let p = cluster.engine(with_state(envelope("p", Role::Prefill, 1, 0)), &[0]);
        let d = cluster.engine(
            with_state(envelope("d", Role::Decode, 1, 0)),
            &[usize::from(!local)],
        );
        assert_eq!(cluster.engines[p].envelope.components[1].kind, Kind::State);
        cluster.start(p);
        cluster.start(d);
        let (prefill, decode) = (cluster.ranks_of(p)[0], cluster.ranks_of(d)[0]);
        let lists = |slot: u32| PageLists {
            groups: vec![(0..3).collect(), vec![slot]],
        };
        for (name, to, slot, code) in [
            ("whole", 12, 5, None),
            ("earlier", 9, 5, Some(Code::TokensInvalid)),
            ("without", 9, kvferry_handshake::ABSENT, None),
        ] {
            for rank in [prefill, decode] {
                cluster.take_pages(
                    rank,
                    &(
                        if rank == prefill {
                            Side::Publish
                        } else {
                            Side::Fetch
                        },
                        id(name, 0),
                    ),
                    12,
                );
            }
            let publish = Call::Publish(Publish {
                transfer: id(name, 0),
                pages: Some(lists(3)),
                generations: cluster.generations(prefill),
                ready: Ready::complete(12),
                metadata: None,
                serves: 1,
            });
            cluster.rank_call(prefill, Asked::Transfer((Side::Publish, id(name, 0))), publish);
            let fetch = Call::Fetch(Fetch {
                source: cluster.source(p),
                transfer: id(name, 0),
                pages: lists(slot),
                generations: cluster.generations(decode),
                tokens: tokens(0, to),
                least: to,
            });
            cluster.rank_call(decode, Asked::Transfer((Side::Fetch, id(name, 0))), fetch);
            cluster.run_for(MOMENT);
            assert_eq!(cluster.code_of(decode, &id(name, 0)), code, "{name}");
            assert_eq!(cluster.code_of(prefill, &id(name, 0)), code, "{name}");
            if code.is_none() {
                assert_eq!(cluster.end_of(decode, &id(name, 0)), Some(Ok(to)), "{name}");
            }
        }
    }
}

#[test]
fn matched_says_who_came_and_what_they_hold() {
    let mut cluster = Cluster::new(1, 2);
    let (p, d) = pair(&mut cluster, &[0], &[1, 1]);
    let transfer = id("a", 0);
    cluster.publish_all(p, &transfer, 17);
    for rank in cluster.ranks_of(d) {
        cluster.fetch(rank, p, &transfer, tokens(5, 17), 17);
    }
    cluster.run_for(MOMENT);
    let matched: Vec<&Event> = cluster.ranks[cluster.ranks_of(p)[0]]
        .events
        .iter()
        .filter(|event| matches!(event, Event::Matched { .. }))
        .collect();
    let expected = Event::Matched {
        transfer,
        engine: "d".to_owned(),
        held: 5,
    };
    assert_eq!(matched, [&expected], "once an engine");
}

fn report(cluster: &Cluster, rank: usize) -> Report {
    let report = cluster.ranks[rank].events.iter().find_map(|event| match event {
        Event::Delivered { report, .. } | Event::Failed { report, .. } => Some(report.clone()),
        _ => None,
    });
    report.expect("it ended")
}

#[test]
fn the_report_says_by_which_path_and_with_whom() {
    let mut cluster = Cluster::new(1, 2);
    let (p, d) = pair(&mut cluster, &[0, 1], &[1]);
    let transfer = id("a", 0);
    cluster.publish_all(p, &transfer, 17);
    cluster.run_for(5_000);
    cluster.fetch_all(d, p, &transfer, 17);
    cluster.run_for(MOMENT);
    let half = 17 * 2 * 2 * 2 * 4;
    let fetched = report(&cluster, cluster.ranks_of(d)[0]);
    assert_eq!(fetched.paths, [(Path::Local, half), (Path::Tcp, half)]);
    assert_eq!(fetched.peers, ["node0:7400", "node1:7400"]);
    assert!(fetched.moves > 0);
    let published = report(&cluster, cluster.ranks_of(p)[0]);
    assert_eq!(
        (published.paths, published.peers),
        (vec![(Path::Tcp, half)], vec!["node1:7400".to_owned()])
    );
    assert!(
        (5_000..10_000).contains(&published.met_us),
        "{}",
        published.met_us
    );
    let published = report(&cluster, cluster.ranks_of(p)[1]);
    assert_eq!(
        (published.paths, published.peers),
        (vec![(Path::Local, half)], vec!["node1:7400".to_owned()])
    );
}

#[test]
fn progress_is_told_a_few_times_a_second() {
    let mut cluster = Cluster::new(1, 2);
    let (p, d) = pair(&mut cluster, &[0], &[1]);
    cluster.troubles(crate::data::Troubles {
        delay: 700_000,
        ..Default::default()
    });
    let transfer = id("a", 0);
    let (prefill, decode) = (cluster.ranks_of(p)[0], cluster.ranks_of(d)[0]);
    cluster.fetch(decode, p, &transfer, tokens(0, 180), 180);
    cluster.publish(prefill, &transfer, 180, Ready::complete(180), 1, None);
    cluster.run_for(LEASE);
    for rank in [prefill, decode] {
        let mut last = 0;
        for event in &cluster.ranks[rank].events {
            if let Event::Progress { bytes, total, .. } = event {
                assert!(*bytes > last && bytes <= total, "{event:?}");
                assert_eq!(*total, 180 * 2 * 2 * 4 * 4);
                last = *bytes;
            }
        }
        assert!(last > 0);
    }
}

#[test]
fn an_engine_that_fetches_from_itself() {
    let mut cluster = Cluster::new(1, 1);
    let both = cluster.engine(envelope("both", Role::Both, 2, 0), &[0, 0]);
    cluster.start(both);
    let transfer = id("a", 0);
    cluster.publish_all(both, &transfer, 9);
    for rank in cluster.ranks_of(both) {
        cluster.fetch(rank, both, &transfer, tokens(0, 9), 9);
    }
    cluster.run_for(MOMENT);
    for rank in cluster.ranks_of(both) {
        assert_eq!(
            cluster.events_like(rank, |event| matches!(event, Event::Delivered { .. })),
            2
        );
    }
    // An abort ends both its sides.
    let ranks = cluster.ranks_of(both);
    cluster.fetch(ranks[0], both, &id("b", 0), tokens(0, 9), 9);
    cluster.publish(ranks[0], &id("b", 0), 9, Ready::default(), 1, None);
    cluster.run_for(MOMENT);
    cluster.abort(ranks[0], &id("b", 0));
    cluster.run_for(MOMENT);
    let aborted = |event: &Event| matches!(event, Event::Failed { cause, .. } if cause.code == Code::Aborted);
    assert_eq!(cluster.events_like(ranks[0], aborted), 2);
}

#[test]
fn nothing_is_announced_before_its_slot_is_open() {
    // The data plane of the simulation drops what comes for a slot that is not open, so it is enough that
    // the fastest possible answer finds it open.
    let mut cluster = Cluster::new(1, 2);
    cluster.net.delay = 1;
    let (p, d) = pair(&mut cluster, &[0], &[1]);
    cluster.troubles(crate::data::Troubles {
        delay: 1,
        ..Default::default()
    });
    let transfer = id("a", 0);
    cluster.publish_all(p, &transfer, 9);
    cluster.change(|_, message| {
        if let Body::Announce(announce) = &message.body {
            assert!(announce.offers.iter().all(|offer| offer.slot.is_some()));
        }
        true
    });
    cluster.fetch_all(d, p, &transfer, 9);
    cluster.run_for(MOMENT);
    assert!(cluster.all_delivered(d, &transfer));
}

#[test]
fn pages_that_a_window_has_left_are_not_missed_while_prefill_runs() {
    let absent = kvferry_handshake::ABSENT;
    let mut cluster = Cluster::new(1, 2);
    cluster.ledger.other_geometry = true;
    let p = cluster.engine(with_window(envelope("p", Role::Prefill, 1, 0)), &[0]);
    let d = cluster.engine(with_window(envelope("d", Role::Decode, 1, 0)), &[1]);
    cluster.start(p);
    cluster.start(d);
    let (prefill, decode) = (cluster.ranks_of(p)[0], cluster.ranks_of(d)[0]);
    let lists = |window: [u32; 3]| PageLists {
        groups: vec![vec![0, 1, 2], window.to_vec()],
    };
    let publish = |cluster: &mut Cluster, name: &str, window, ready| {
        let call = Call::Publish(Publish {
            transfer: id(name, 0),
            pages: Some(lists(window)),
            generations: cluster.generations(prefill),
            ready,
            metadata: None,
            serves: 1,
        });
        let call = cluster.rank_call(prefill, Asked::Transfer((Side::Publish, id(name, 0))), call);
        assert!(
            cluster.answer_to(prefill, call).is_ok(),
            "{:?}",
            cluster.answer_to(prefill, call)
        );
    };
    let some = Ready {
        tokens: 8,
        ..Ready::default()
    };
    for (name, last, code) in [("kept", 7, None), ("left", absent, Some(Code::PageAbsent))] {
        publish(&mut cluster, name, [absent, 6, 7], some);
        let fetch = Call::Fetch(Fetch {
            source: cluster.source(p),
            transfer: id(name, 0),
            pages: lists([absent, absent, 5]),
            generations: cluster.generations(decode),
            tokens: tokens(0, 12),
            least: 12,
        });
        cluster.rank_call(decode, Asked::Transfer((Side::Fetch, id(name, 0))), fetch);
        cluster.run_for(MOMENT);
        assert_eq!(cluster.end_of(decode, &id(name, 0)), None, "{name}");
        // Its window moves on; what it left may vanish from the list.
        publish(&mut cluster, name, [absent, absent, last], Ready::complete(12));
        cluster.run_for(MOMENT);
        assert_eq!(cluster.code_of(decode, &id(name, 0)), code, "{name}");
        assert_eq!(cluster.code_of(prefill, &id(name, 0)), code, "{name}");
    }
}
