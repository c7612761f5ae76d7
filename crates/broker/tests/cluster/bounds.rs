//! What a publish or fetch must keep, each broken by itself.

use kvferry_control::{Call, Fetch, Publish, TransferId};
use kvferry_handshake::{ABSENT, Code, PageLists, Ready};

use crate::engines::{Asked, id, tokens};
use crate::geometry::POOL;
use crate::ledger::Side;
use crate::scene::{MOMENT, pair};
use crate::sim::{Cluster, DEADLINE};

fn lists(pages: impl IntoIterator<Item = u32>) -> PageLists {
    PageLists {
        groups: vec![pages.into_iter().collect()],
    }
}

fn asked(side: Side, transfer: &TransferId) -> Asked {
    Asked::Transfer((side, transfer.clone()))
}

#[test]
fn fetches_out_of_bounds_are_refused_and_leave_nothing() {
    let mut cluster = Cluster::with(1, 1, |_, config| config.limits.pages_per_transfer = 20);
    let (p, d) = pair(&mut cluster, &[0], &[0]);
    let rank = cluster.ranks_of(d)[0];
    let good = Fetch {
        source: cluster.source(p),
        transfer: id("a", 0),
        pages: lists(0..3),
        generations: cluster.generations(rank),
        tokens: tokens(2, 9),
        least: 5,
    };
    let cases: Vec<(&str, Code, Fetch)> = vec![
        (
            "no id",
            Code::ProtocolViolation,
            Fetch {
                transfer: id("", 0),
                ..good.clone()
            },
        ),
        (
            "a long id",
            Code::ProtocolViolation,
            Fetch {
                transfer: id(&"x".repeat(257), 0),
                ..good.clone()
            },
        ),
        (
            "no address",
            Code::AddressInvalid,
            Fetch {
                source: "node0:7400/p".to_owned(),
                ..good.clone()
            },
        ),
        (
            "reversed",
            Code::TokensInvalid,
            Fetch {
                tokens: tokens(9, 2),
                ..good.clone()
            },
        ),
        (
            "least below from",
            Code::TokensInvalid,
            Fetch {
                least: 1,
                ..good.clone()
            },
        ),
        (
            "least above to",
            Code::TokensInvalid,
            Fetch {
                least: 10,
                ..good.clone()
            },
        ),
        (
            "many pages",
            Code::OverLimit,
            Fetch {
                pages: lists(0..21),
                ..good.clone()
            },
        ),
        (
            "many groups",
            Code::PagesInvalid,
            Fetch {
                pages: PageLists {
                    groups: vec![vec![]; 21],
                },
                ..good.clone()
            },
        ),
        (
            "few pages",
            Code::PagesInvalid,
            Fetch {
                pages: lists(0..2),
                ..good.clone()
            },
        ),
        (
            "too many pages",
            Code::PagesInvalid,
            Fetch {
                pages: lists(0..4),
                ..good.clone()
            },
        ),
        (
            "no list",
            Code::PagesInvalid,
            Fetch {
                pages: PageLists::default(),
                ..good.clone()
            },
        ),
        (
            "a page twice",
            Code::PagesInvalid,
            Fetch {
                pages: lists([0, 1, 0]),
                ..good.clone()
            },
        ),
        (
            "no such page",
            Code::PagesInvalid,
            Fetch {
                pages: lists([0, 1, POOL]),
                ..good.clone()
            },
        ),
    ];
    for (name, code, fetch) in cases {
        let call = cluster.rank_call(rank, Asked::Other, Call::Fetch(fetch));
        assert_eq!(cluster.refusal(rank, call), code, "{name}");
    }
    assert_eq!(
        (cluster.counts(0)["fetches"], cluster.counts(0)["page_entries"]),
        (0, 0)
    );
    // What is refused is not used up.
    cluster.take_pages(rank, &(Side::Fetch, id("a", 0)), 9);
    let call = cluster.rank_call(rank, asked(Side::Fetch, &id("a", 0)), Call::Fetch(good));
    assert!(cluster.answer_to(rank, call).is_ok());
}

#[test]
fn publishes_out_of_bounds_are_refused_and_leave_nothing() {
    let mut cluster = Cluster::with(1, 1, |_, config| config.limits.pages_per_transfer = 20);
    let (p, _) = pair(&mut cluster, &[0], &[0]);
    let rank = cluster.ranks_of(p)[0];
    let good = Publish {
        transfer: id("a", 0),
        pages: Some(lists(0..3)),
        generations: cluster.generations(rank),
        ready: Ready::complete(9),
        metadata: None,
        serves: 1,
    };
    let ready = |tokens, front_tokens, front_layers, end| Ready {
        tokens,
        front_tokens,
        front_layers,
        end,
    };
    let cases: Vec<(&str, Code, Publish)> = vec![
        (
            "no id",
            Code::ProtocolViolation,
            Publish {
                transfer: id("", 0),
                ..good.clone()
            },
        ),
        (
            "a long id",
            Code::ProtocolViolation,
            Publish {
                transfer: id(&"x".repeat(257), 0),
                ..good.clone()
            },
        ),
        (
            "long metadata",
            Code::MetadataTooLong,
            Publish {
                metadata: Some(vec![0; 65_537]),
                ..good.clone()
            },
        ),
        (
            "serves none",
            Code::ProtocolViolation,
            Publish {
                serves: 0,
                ..good.clone()
            },
        ),
        (
            "serves too many",
            Code::ProtocolViolation,
            Publish {
                serves: 1025,
                ..good.clone()
            },
        ),
        (
            "no pages",
            Code::PagesInvalid,
            Publish {
                pages: None,
                ..good.clone()
            },
        ),
        (
            "few pages",
            Code::PagesInvalid,
            Publish {
                pages: Some(lists(0..2)),
                ..good.clone()
            },
        ),
        (
            "no such page",
            Code::PagesInvalid,
            Publish {
                pages: Some(lists([0, 1, POOL])),
                ..good.clone()
            },
        ),
        (
            "many pages",
            Code::OverLimit,
            Publish {
                pages: Some(lists(0..21)),
                ..good.clone()
            },
        ),
        (
            "front below",
            Code::TokensInvalid,
            Publish {
                ready: ready(5, 4, 1, None),
                ..good.clone()
            },
        ),
        (
            "end below",
            Code::TokensInvalid,
            Publish {
                ready: ready(5, 5, 0, Some(4)),
                ..good.clone()
            },
        ),
        (
            "end below front",
            Code::TokensInvalid,
            Publish {
                ready: ready(2, 6, 1, Some(4)),
                ..good.clone()
            },
        ),
    ];
    for (name, code, publish) in cases {
        let call = cluster.rank_call(rank, Asked::Other, Call::Publish(publish));
        assert_eq!(cluster.refusal(rank, call), code, "{name}");
    }
    assert_eq!(
        (cluster.counts(0)["publishes"], cluster.counts(0)["page_entries"]),
        (0, 0)
    );
    cluster.take_pages(rank, &(Side::Publish, id("a", 0)), 9);
    let most = Publish {
        metadata: Some(vec![0; 65_536]),
        ..good
    };
    let call = cluster.rank_call(rank, asked(Side::Publish, &id("a", 0)), Call::Publish(most));
    assert!(cluster.answer_to(rank, call).is_ok());
}

#[test]
fn a_publish_only_grows() {
    let mut cluster = Cluster::new(1, 1);
    let (p, _) = pair(&mut cluster, &[0], &[0]);
    let rank = cluster.ranks_of(p)[0];
    let transfer = id("a", 0);
    let first = Publish {
        transfer: transfer.clone(),
        pages: Some(lists(0..3)),
        generations: cluster.generations(rank),
        ready: Ready {
            tokens: 4,
            front_tokens: 8,
            front_layers: 1,
            end: None,
        },
        metadata: None,
        serves: 1,
    };
    cluster.take_pages(rank, &(Side::Publish, transfer.clone()), 12);
    let call = cluster.rank_call(
        rank,
        asked(Side::Publish, &transfer),
        Call::Publish(first.clone()),
    );
    assert!(cluster.answer_to(rank, call).is_ok());
    let held = cluster.counts(0)["page_entries"];
    let ready = |tokens, front_tokens, front_layers| Ready {
        tokens,
        front_tokens,
        front_layers,
        end: None,
    };
    let cases: Vec<(&str, Code, Publish)> = vec![
        (
            "fewer tokens",
            Code::TokensInvalid,
            Publish {
                ready: ready(3, 8, 1),
                ..first.clone()
            },
        ),
        (
            "a shorter front",
            Code::TokensInvalid,
            Publish {
                ready: ready(4, 7, 1),
                ..first.clone()
            },
        ),
        (
            "fewer front layers",
            Code::TokensInvalid,
            Publish {
                ready: ready(4, 12, 0),
                ..first.clone()
            },
        ),
        (
            "an end before the front",
            Code::TokensInvalid,
            Publish {
                ready: Ready::complete(7),
                ..first.clone()
            },
        ),
        (
            "other pages",
            Code::PagesInvalid,
            Publish {
                pages: Some(lists([0, 1, 4])),
                ..first.clone()
            },
        ),
        (
            "fewer pages",
            Code::PagesInvalid,
            Publish {
                pages: Some(lists(0..2)),
                ..first.clone()
            },
        ),
        (
            "absent pages",
            Code::PagesInvalid,
            Publish {
                pages: Some(lists([0, 1, ABSENT])),
                ..first.clone()
            },
        ),
        (
            "another count",
            Code::ProtocolViolation,
            Publish {
                serves: 2,
                ..first.clone()
            },
        ),
        (
            "beyond the pages",
            Code::PagesInvalid,
            Publish {
                pages: None,
                ready: ready(13, 13, 0),
                ..first.clone()
            },
        ),
    ];
    for (name, code, publish) in cases {
        let call = cluster.rank_call(rank, Asked::Other, Call::Publish(publish));
        assert_eq!(cluster.refusal(rank, call), code, "{name}");
        assert_eq!(cluster.counts(0)["page_entries"], held, "{name}");
    }
    // The front may become whole, and pages may follow.
    for publish in [
        Publish {
            ready: ready(8, 8, 0),
            pages: None,
            ..first.clone()
        },
        Publish {
            ready: Ready::complete(16),
            pages: Some(lists(0..4)),
            ..first.clone()
        },
    ] {
        let call = cluster.rank_call(rank, Asked::Other, Call::Publish(publish));
        assert!(
            cluster.answer_to(rank, call).is_ok(),
            "{:?}",
            cluster.answer_to(rank, call)
        );
    }
    // A publish after the final one.
    let call = cluster.rank_call(rank, Asked::Other, Call::Publish(first));
    assert_eq!(cluster.refusal(rank, call), Code::TransferExists);
}

#[test]
fn a_rank_has_so_many_open_transfers_and_no_more() {
    let mut cluster = Cluster::with(1, 1, |_, config| config.max_transfers_per_rank = 2);
    let (p, d) = pair(&mut cluster, &[0], &[0]);
    let (prefill, decode) = (cluster.ranks_of(p)[0], cluster.ranks_of(d)[0]);
    for name in ["a", "b"] {
        cluster.publish(prefill, &id(name, 0), 4, Ready::default(), 1, None);
        cluster.fetch(decode, p, &id(name, 0), tokens(0, 4), 4);
    }
    let call = cluster
        .publish(prefill, &id("c", 0), 4, Ready::default(), 1, None)
        .unwrap();
    assert_eq!(cluster.refusal(prefill, call), Code::OverLimit);
    let call = cluster.fetch(decode, p, &id("c", 0), tokens(0, 4), 4).unwrap();
    assert_eq!(cluster.refusal(decode, call), Code::OverLimit);
    // It is retryable: when one has ended, there is room.
    cluster.abort(prefill, &id("a", 0));
    cluster.run_for(MOMENT);
    let call = cluster
        .publish(prefill, &id("c", 0), 4, Ready::default(), 1, None)
        .unwrap();
    assert!(cluster.answer_to(prefill, call).is_ok());
}

#[test]
fn page_lists_of_all_transfers_have_a_bound() {
    let mut cluster = Cluster::with(1, 2, |_, config| config.limits.pages = 11);
    let (p, d) = pair(&mut cluster, &[0], &[1]);
    let (prefill, decode) = (cluster.ranks_of(p)[0], cluster.ranks_of(d)[0]);
    cluster.publish(prefill, &id("a", 0), 36, Ready::default(), 1, None);
    let call = cluster
        .publish(prefill, &id("b", 0), 12, Ready::default(), 1, None)
        .unwrap();
    assert_eq!(cluster.refusal(prefill, call), Code::OverLimit);
    // So have those that peers announce.
    let call = cluster.fetch(decode, p, &id("b", 0), tokens(0, 12), 12).unwrap();
    assert!(cluster.answer_to(decode, call).is_ok());
    cluster.run_for(MOMENT);
    assert_eq!(cluster.code_of(decode, &id("b", 0)), Some(Code::OverLimit));
    cluster.assert_nothing_is_left();
}

#[test]
fn a_peer_announces_so_many_fetches_and_no_more() {
    let mut cluster = Cluster::with(1, 2, |_, config| config.limits.announced_per_peer = 2);
    let (p, d) = pair(&mut cluster, &[0], &[1]);
    let decode = cluster.ranks_of(d)[0];
    for name in ["a", "b", "c"] {
        cluster.fetch(decode, p, &id(name, 0), tokens(0, 4), 4);
        cluster.run_for(MOMENT);
    }
    assert_eq!(cluster.code_of(decode, &id("c", 0)), Some(Code::OverLimit));
    assert_eq!(cluster.counts(0)["announced"], 2);
    // Its own ranks are another peer.
    let own = crate::scene::decode_engine(&mut cluster, "own", &[0]);
    let own = cluster.ranks_of(own)[0];
    cluster.fetch(own, p, &id("d", 0), tokens(0, 4), 4);
    cluster.run_for(MOMENT);
    assert_eq!(cluster.end_of(own, &id("d", 0)), None);
    cluster.abort(decode, &id("a", 0));
    cluster.run_for(MOMENT);
    cluster.fetch(decode, p, &id("e", 0), tokens(0, 4), 4);
    cluster.run_for(MOMENT);
    assert_eq!(cluster.end_of(decode, &id("e", 0)), None);
}

#[test]
fn so_many_links_and_no_more_but_idle_ones_make_room() {
    let mut cluster = Cluster::with(1, 2, |_, config| config.limits.links = 1);
    let (p, d) = pair(&mut cluster, &[0], &[1]);
    let decode = cluster.ranks_of(d)[0];
    let fetch = |cluster: &mut Cluster, source: &str, name: &str| {
        let call = Call::Fetch(Fetch {
            source: source.to_owned(),
            transfer: id(name, 0),
            pages: lists([]),
            generations: cluster.generations(decode),
            tokens: tokens(0, 0),
            least: 0,
        });
        cluster.rank_call(decode, asked(Side::Fetch, &id(name, 0)), call);
        cluster.run_for(MOMENT);
    };
    fetch(&mut cluster, "kvferry://node0:7400/nobody", "a");
    let source = cluster.source(p);
    fetch(&mut cluster, &source, "b");
    assert_eq!(cluster.code_of(decode, &id("b", 0)), Some(Code::OverLimit));
    cluster.run_for(DEADLINE);
    assert_eq!(cluster.code_of(decode, &id("a", 0)), Some(Code::EngineUnknown));
    fetch(&mut cluster, &source, "c");
    assert_eq!(cluster.end_of(decode, &id("c", 0)), None);
    assert_eq!(cluster.counts(1)["links"], 1);
}

#[test]
fn a_call_uses_an_id_once() {
    let mut cluster = Cluster::new(1, 2);
    let (p, d) = pair(&mut cluster, &[0], &[1]);
    let (prefill, decode) = (cluster.ranks_of(p)[0], cluster.ranks_of(d)[0]);
    let transfer = id("a", 1);
    cluster.publish_all(p, &transfer, 4);
    cluster.fetch_all(d, p, &transfer, 4);
    let again = cluster.fetch(decode, p, &transfer, tokens(0, 4), 4).unwrap();
    assert_eq!(
        cluster.refusal(decode, again),
        Code::TransferExists,
        "while it is open"
    );
    cluster.run_for(MOMENT);
    assert!(cluster.all_delivered(p, &transfer) && cluster.all_delivered(d, &transfer));
    let again = cluster.fetch(decode, p, &transfer, tokens(0, 4), 4).unwrap();
    assert_eq!(
        cluster.refusal(decode, again),
        Code::TransferExists,
        "after its end"
    );
    let again = cluster
        .publish(prefill, &transfer, 4, Ready::complete(4), 1, None)
        .unwrap();
    assert_eq!(cluster.refusal(prefill, again), Code::TransferExists);
    let lower = cluster.fetch(decode, p, &id("a", 0), tokens(0, 4), 4).unwrap();
    assert_eq!(cluster.refusal(decode, lower), Code::StaleAttempt);
    let lower = cluster
        .publish(prefill, &id("a", 0), 4, Ready::complete(4), 1, None)
        .unwrap();
    assert_eq!(cluster.refusal(prefill, lower), Code::StaleAttempt);
    let call = cluster.abort(prefill, &transfer);
    assert_eq!(cluster.refusal(prefill, call), Code::TransferUnknown);
    // Ids do not live for ever, and neither does their memory.
    cluster.run_for(8 * DEADLINE);
    cluster.ledger.forgetful = true;
    let again = cluster
        .publish(prefill, &transfer, 4, Ready::complete(4), 1, None)
        .unwrap();
    assert!(cluster.answer_to(prefill, again).is_ok());
}
