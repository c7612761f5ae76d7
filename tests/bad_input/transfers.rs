//! Publishes and fetches that cannot be.

use kvferry_client::{ClientError, PublishRequest, SealedMemory};
use kvferry_control::{Call, Fetch, Publish};
use kvferry_handshake::{ABSENT, Cached, Code, Kind as Cache, Launch, ModelShape, PageLists, Ready, Role};
use kvferry_tests::engine::{Carry, Engine, attach_rank, fetch_request, named, of_tokens, refused, tokens};
use kvferry_tests::geometry::{hybrid, launch};
use kvferry_tests::memory::Kind;
use kvferry_tests::node::{Cluster, Options};
use kvferry_tests::pattern::Stamp;
use kvferry_tests::wait::{PATIENCE, within};

use crate::{SMALL, bystanders, check, lists, small};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn publishes_that_do_not_fit_are_refused_by_name() {
    let (_cluster, bystanders) = bystanders(Options::default()).await;
    let rank = &bystanders.prefill.ranks[0];
    let pool = bystanders.prefill.envelope.page_groups[0].pool_pages;
    let front = |tokens, front_tokens| Ready {
        tokens,
        front_tokens,
        front_layers: 1,
        end: None,
    };
    let ended = |tokens, end| Ready {
        end: Some(end),
        ..of_tokens(tokens)
    };
    let long = "x".repeat(257);
    let request = |id: &str, pages: Option<PageLists>, ready| PublishRequest {
        transfer: id.into(),
        pages,
        ready,
        metadata: None,
        serves: 1,
    };
    let two = || Some(lists(&[1, 2]));
    let of_pool = pool.to_string();
    let groups = PageLists {
        groups: vec![vec![1], vec![2]],
    };
    for (what, request, code, names) in [
        (
            "no pages at all",
            request("a", None, of_tokens(5)),
            Code::PagesInvalid,
            &["page"][..],
        ),
        (
            "too few pages",
            request("a", two(), Ready::complete(33)),
            Code::PagesInvalid,
            &["33", "2"],
        ),
        (
            "a page outside the pool",
            request("a", Some(lists(&[0, pool])), of_tokens(20)),
            Code::PagesInvalid,
            &[&of_pool],
        ),
        (
            "lists of two groups",
            request("a", Some(groups), of_tokens(5)),
            Code::PagesInvalid,
            &["2", "1"],
        ),
        (
            "fewer in front",
            request("a", two(), front(9, 8)),
            Code::TokensInvalid,
            &["8", "9"],
        ),
        (
            "ready beyond the end",
            request("a", two(), ended(30, 20)),
            Code::TokensInvalid,
            &["30", "20"],
        ),
        (
            "a long id",
            request(&long, two(), of_tokens(5)),
            Code::ProtocolViolation,
            &["257", "256"],
        ),
        (
            "no id",
            request("", two(), of_tokens(5)),
            Code::ProtocolViolation,
            &["transfer id"],
        ),
        (
            "for nobody",
            PublishRequest {
                serves: 0,
                ..request("a", two(), of_tokens(5))
            },
            Code::ProtocolViolation,
            &["serves 0"],
        ),
    ] {
        check(&refused(rank.publish(request).await, what), code, names, what);
    }

    // Against what was published before.
    let publication = rank.publish(request("a", two(), of_tokens(20))).await.unwrap();
    let metadata = Some(vec![0; (64 << 10) + 1]);
    for (what, request, code, names) in [
        (
            "shrinks",
            request("a", None, of_tokens(19)),
            Code::TokensInvalid,
            &["19", "20"][..],
        ),
        (
            "ends before",
            request("a", None, ended(19, 19)),
            Code::TokensInvalid,
            &["19", "20"],
        ),
        (
            "other pages",
            request("a", Some(lists(&[1, 3])), of_tokens(20)),
            Code::PagesInvalid,
            &["page list"],
        ),
        (
            "fewer pages",
            request("a", Some(lists(&[1])), of_tokens(20)),
            Code::PagesInvalid,
            &["page"],
        ),
        (
            "beyond its pages",
            request("a", None, of_tokens(33)),
            Code::PagesInvalid,
            &["33"],
        ),
        (
            "for more engines",
            PublishRequest {
                serves: 2,
                ..request("a", None, of_tokens(21))
            },
            Code::ProtocolViolation,
            &["serves 2"],
        ),
        (
            "long metadata",
            PublishRequest {
                metadata,
                ..request("a", None, of_tokens(21))
            },
            Code::MetadataTooLong,
            &["65537"],
        ),
    ] {
        check(&refused(rank.publish(request).await, what), code, names, what);
    }
    // All that left the open one as it was.
    rank.publish(request("a", None, Ready::complete(30)))
        .await
        .unwrap();
    let fault = refused(
        rank.publish(request("a", None, Ready::complete(30))).await,
        "after the final one",
    );
    check(&fault, Code::TransferExists, &["a"], "after the final one");
    rank.rank.abort(&"a".into()).await.unwrap();
    let end = within(PATIENCE, "the end", publication.ended()).await;
    assert_eq!(end.unwrap_err().cause.code, Code::Aborted);
    let fault = refused(
        rank.publish(request("a", two(), of_tokens(5))).await,
        "an id used before",
    );
    check(&fault, Code::TransferExists, &["a"], "an id used before");
    let fault = refused(rank.rank.abort(&"a".into()).await, "aborted twice");
    check(&fault, Code::TransferUnknown, &["a"], "aborted twice");
    bystanders.carry().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fetches_that_do_not_fit_are_refused_by_name() {
    let (_cluster, bystanders) = bystanders(Options::default()).await;
    let rank = &bystanders.near.ranks[0];
    let pool = bystanders.near.envelope.page_groups[0].pool_pages;
    let source = bystanders.prefill.address();
    let of_pool = pool.to_string();
    for (what, pages, from, to, least, code, names) in [
        (
            "a page outside the pool",
            vec![0, pool],
            0,
            20,
            20,
            Code::PagesInvalid,
            &[of_pool.as_str()][..],
        ),
        (
            "a page twice",
            vec![5, 6, 5],
            0,
            40,
            40,
            Code::PagesInvalid,
            &["5", "twice"],
        ),
        (
            "too few pages",
            vec![5, 6],
            0,
            40,
            40,
            Code::PagesInvalid,
            &["40", "2"],
        ),
        (
            "too many pages",
            vec![5, 6, 7],
            0,
            20,
            20,
            Code::PagesInvalid,
            &["20", "3"],
        ),
        (
            "reversed",
            vec![5, 6],
            20,
            10,
            20,
            Code::TokensInvalid,
            &["20", "10"],
        ),
        (
            "least beyond the end",
            vec![5, 6],
            0,
            20,
            21,
            Code::TokensInvalid,
            &["20", "21"],
        ),
        (
            "least before the begin",
            vec![5, 6],
            10,
            20,
            9,
            Code::TokensInvalid,
            &["10", "9"],
        ),
        (
            "tokens without bound",
            vec![5],
            0,
            u64::MAX,
            0,
            Code::OverLimit,
            &["18446744073709551615"],
        ),
    ] {
        let request = fetch_request(&source, &Stamp::of("f"), &lists(&pages), tokens(from, to), least);
        check(&refused(rank.fetch(request).await, what), code, names, what);
    }
    // A second fetch by the same rank, under way and after its end.
    let stamp = Stamp::of("f");
    let fetched = bystanders
        .near
        .fetch(&source, &stamp, tokens(0, 20), 20, false)
        .await;
    let second = || rank.fetch(fetch_request(&source, &stamp, &lists(&[0, 1]), tokens(0, 20), 20));
    check(
        &refused(second().await, "under way"),
        Code::TransferExists,
        &["f"],
        "under way",
    );
    let published = bystanders.prefill.publish(&stamp, 20, false).await;
    let ends = fetched.ended(PATIENCE).await;
    assert!(ends[0].is_ok(), "{ends:?}");
    bystanders.near.settle_fetch(&fetched, &ends, "the first");
    check(
        &refused(second().await, "delivered"),
        Code::TransferExists,
        &["f"],
        "delivered",
    );
    published.ended(PATIENCE).await;
    bystanders.prefill.settle_publish(&published, "f");
    bystanders.go_on().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pages_that_the_prefill_side_does_not_have_fail_both() {
    let cluster = Cluster::new();
    let [a, b] = cluster.start_two(Options::default()).await;
    let launch = Launch {
        pool_pages: 100,
        ..launch(1, 16)
    };
    let envelope = launch.envelope(&hybrid()).unwrap();
    let prefill = Engine::attach(named(&envelope, "prefill", Role::Prefill), &[&a], Kind::Memfd).await;
    for (name, node) in [("far", &b), ("near", &a)] {
        let decode = Engine::attach(named(&envelope, name, Role::Decode), &[node], Kind::Memfd).await;
        let stamp = Stamp::of(name);
        // The newest page of the window is absent at the source.
        let mut pages = prefill.draw(200, true);
        *pages[0].groups[1].last_mut().unwrap() = ABSENT;
        let request = PublishRequest {
            transfer: stamp.transfer(),
            pages: Some(pages[0].clone()),
            ready: Ready::complete(200),
            metadata: None,
            serves: 1,
        };
        let publication = prefill.ranks[0].publish(request).await.unwrap();
        let fetched = decode
            .fetch(&prefill.address(), &stamp, tokens(0, 200), 200, true)
            .await;
        let ends = fetched.ended(PATIENCE).await;
        let cause = &ends[0].as_ref().unwrap_err().cause;
        check(cause, Code::PageAbsent, &["group \"window\"", "entry 12"], name);
        let cause = within(PATIENCE, name, publication.ended())
            .await
            .unwrap_err()
            .cause;
        check(&cause, Code::PageAbsent, &["group \"window\"", "entry 12"], name);
        decode.settle_fetch(&fetched, &ends, name);
        prefill.give_back(&pages);
        // What is absent on both sides is not missed.
        let carry = Carry {
            transfer: &format!("{name}, afterwards"),
            tokens: 200,
            held: 0,
            sparse: true,
            fetch_first: false,
            path: None,
        };
        carry.run(&prefill, &decode).await;
        decode.check_all(name);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn opaque_pages_are_fetched_from_a_boundary() {
    let cluster = Cluster::new();
    let node = cluster.start("a", Options::default()).await;
    let kv = Cached::new("kv", Cache::Kv, 0..2, &[("kv", 2, 512)]).opaque("amx");
    let envelope = launch(1, 16)
        .envelope(&ModelShape::new("tiled", 2).with(kv))
        .unwrap();
    let prefill = Engine::attach(named(&envelope, "prefill", Role::Prefill), &[&node], Kind::Memfd).await;
    let decode = Engine::attach(named(&envelope, "decode", Role::Decode), &[&node], Kind::Memfd).await;
    let stamp = Stamp::of("inside a page");
    let lists = decode.draw(40, false);
    let request = fetch_request(&prefill.address(), &stamp, &lists[0], tokens(17, 40), 40);
    let fault = match decode.ranks[0].fetch(request).await {
        Ok(fetching) => {
            within(PATIENCE, "the end", fetching.ended())
                .await
                .unwrap_err()
                .cause
        }
        Err(ClientError::Refused(fault)) => fault,
        Err(other) => panic!("{other}"),
    };
    check(&fault, Code::OpaqueAlignment, &["17", "16"], "inside a page");
    decode.ranks[0].pool().check(&lists[0], "inside a page");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn references_to_earlier_registrations_are_refused() {
    let (_cluster, bystanders) = bystanders(Options::default()).await;
    let rank = attach_rank(&small(), 0, &bystanders.nodes[0], bystanders.nodes[0].address())
        .await
        .unwrap();
    let memory = SealedMemory::create("small", SMALL).unwrap();
    let source = bystanders.prefill.address();
    let publish = |generations: Vec<(u16, u64)>| {
        Call::Publish(Publish {
            transfer: "g".into(),
            pages: Some(lists(&[1])),
            generations,
            ready: of_tokens(5),
            metadata: None,
            serves: 1,
        })
    };
    let fetch = |generations: Vec<(u16, u64)>| {
        Call::Fetch(Fetch {
            source: source.clone(),
            transfer: "g".into(),
            pages: lists(&[1]),
            generations,
            tokens: tokens(0, 5),
            least: 5,
        })
    };
    for call in [publish(Vec::new()), fetch(Vec::new()), publish(vec![(0, 1)])] {
        let fault = refused(rank.call(call).await, "before register");
        check(&fault, Code::RegionUnknown, &["region 0"], "before register");
    }
    let first = rank
        .register(0, memory.region().unwrap())
        .await
        .unwrap()
        .generation;
    rank.unregister(0).await.unwrap();
    let second = rank
        .register(0, memory.region().unwrap())
        .await
        .unwrap()
        .generation;
    assert_ne!(first, second);
    for generations in [vec![(0, first)], vec![(0, second + 1)], Vec::new()] {
        for call in [publish(generations.clone()), fetch(generations.clone())] {
            let fault = refused(rank.call(call).await, "stale");
            check(
                &fault,
                Code::StaleGeneration,
                &["region 0"],
                &format!("{generations:?}"),
            );
        }
    }
    rank.call(publish(vec![(0, second)])).await.unwrap();
    drop(rank);
    bystanders.go_on().await;
}
