//! Ranks that cannot attach.

use kvferry_client::{ClientError, Event, Notice, SealedMemory};
use kvferry_handshake::{Code, Role};
use kvferry_tests::engine::{attach_rank, named, refused};
use kvferry_tests::geometry::{launch, llama_8b};
use kvferry_tests::node::{Cluster, Options};
use kvferry_tests::wait::{PATIENCE, within};

use crate::{SMALL, bystanders, check, small};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn attachments_that_do_not_fit_are_refused_by_name() {
    let (_cluster, bystanders) = bystanders(Options::default()).await;
    let node = &bystanders.nodes[0];
    let mut invalid = small();
    invalid.page_groups[0].page_size = 0;
    let mut overlapping = small();
    overlapping.ranks[0].placements[0].strides.token = 1;
    let mut nameless = small();
    nameless.identity.engine.clear();
    let nowhere = format!("127.0.0.1:{}", kvferry_tests::node::free_port());
    for (what, envelope, rank, home, code, names) in [
        (
            "a page of no tokens",
            &invalid,
            0,
            None,
            Code::EnvelopeInvalid,
            &["page_size"][..],
        ),
        (
            "rows over each other",
            &overlapping,
            0,
            None,
            Code::PlacementOverlap,
            &["placement"],
        ),
        ("no name", &nameless, 0, None, Code::EnvelopeInvalid, &["engine"]),
        ("no such rank", &small(), 1, None, Code::RankUnknown, &["1"]),
        (
            "no such rank",
            &small(),
            u32::MAX,
            None,
            Code::RankUnknown,
            &["4294967295"],
        ),
        (
            "a home that is no address",
            &small(),
            0,
            Some("here"),
            Code::AddressInvalid,
            &["here", "HOST:PORT"],
        ),
        (
            "a home that is not there",
            &small(),
            0,
            Some(nowhere.as_str()),
            Code::HomeUnreachable,
            &[&nowhere],
        ),
    ] {
        let client = node.client().await;
        let attached = client.attach(envelope.clone(), rank, home.map(str::to_owned));
        let answer = within(PATIENCE, what, attached).await;
        check(&refused(answer, what), code, names, what);
    }
    bystanders.go_on().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rank_is_attached_once_and_an_engine_lives_once() {
    let (_cluster, bystanders) = bystanders(Options::default()).await;
    let node = &bystanders.nodes[0];
    let envelope = small();
    let rank = attach_rank(&envelope, 0, node, node.address()).await.unwrap();
    let fault = refused(attach_rank(&envelope, 0, node, node.address()).await, "twice");
    check(&fault, Code::RankAttached, &["rank 0", "small"], "twice");
    let other_life = named(&envelope, "small", Role::Both);
    let fault = refused(
        attach_rank(&other_life, 0, node, node.address()).await,
        "another life",
    );
    assert!(
        matches!(fault.code, Code::EngineNameTaken | Code::RankAttached),
        "another life: {fault}"
    );
    assert!(fault.code.can_retry(), "another life: {fault}");
    // The first is not disturbed, and its successor gets the name when it has ended.
    let memory = SealedMemory::create("good", SMALL).unwrap();
    rank.register(0, memory.region().unwrap()).await.unwrap();
    drop(rank);
    let probe = || async {
        match attach_rank(&other_life, 0, node, node.address()).await {
            Ok(rank) => Ok(rank),
            Err(error) if error.can_retry() => Err(error),
            Err(error) => panic!("{error}"),
        }
    };
    drop(kvferry_tests::wait::until(PATIENCE, "the name is free", probe).await);
    bystanders.go_on().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ranks_that_disagree_are_all_refused() {
    let cluster = Cluster::new();
    let [a, b] = cluster.start_two(Options::default()).await;
    let envelope = launch(2, 16).envelope(&llama_8b()).unwrap();
    let fits = named(&envelope, "pair", Role::Both);
    let mut differs = fits.clone();
    differs.identity.framework_version = "another".to_owned();
    for second in [&a, &b] {
        let first = attach_rank(&fits, 0, &a, a.address()).await.unwrap();
        let mut notices = first.notices();
        let fault = refused(
            attach_rank(&differs, 1, second, a.address()).await,
            "the second to attach",
        );
        check(
            &fault,
            Code::RanksDisagree,
            &["framework_version"],
            "the second to attach",
        );
        let detached = async {
            loop {
                if let Some(Notice::Event(Event::Detached { cause })) = notices.next().await {
                    return cause;
                }
            }
        };
        let cause = within(PATIENCE, "the first to attach does not win", detached).await;
        check(
            &cause,
            Code::RanksDisagree,
            &["framework_version"],
            "the first to attach",
        );
        drop(first);
    }
    // With one mind they attach.
    let probe = || async {
        let first = attach_rank(&fits, 0, &a, a.address()).await?;
        let second = attach_rank(&fits, 1, &b, a.address()).await?;
        Ok::<_, ClientError>((first, second))
    };
    kvferry_tests::wait::until(PATIENCE, "they attach", probe).await;
}
