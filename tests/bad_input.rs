//! What engines can do wrong: each gets a code and a message that names what is wrong, nothing is left half done, and
//! everyone else goes on.

#![allow(clippy::unwrap_used, missing_docs)] // a panic here is a failed test

use std::os::fd::OwnedFd;

use kvferry_client::{Client, ClientError, Event, Fault, Notice, PublishRequest, RegionMemory, SealedMemory};
use kvferry_control::{Call, Fetch, Publish};
use kvferry_handshake::{
    ABSENT, Cached, Code, Envelope, Kind as Cache, Launch, ModelShape, PageLists, Ready, Role,
};
use kvferry_tests::engine::{Carry, Engine, attach_rank, fetch_request, named, tokens};
use kvferry_tests::geometry::{hybrid, launch, llama_8b};
use kvferry_tests::memory::Kind;
use kvferry_tests::node::{Cluster, Footprint, Node, Options};
use kvferry_tests::pattern::Stamp;
use kvferry_tests::wait::{PATIENCE, within};
use rustix::fs::{MemfdFlags, SealFlags};

/// A node with a pair of engines that must go on, whatever others do.
struct Bystanders {
    node: Node,
    prefill: Engine,
    decode: Engine,
    before: Footprint,
    _cluster: Cluster,
}

impl Bystanders {
    async fn new(options: Options) -> Bystanders {
        let cluster = Cluster::new();
        let node = cluster.start("a", options).await;
        let envelope = launch(1, 16).envelope(&llama_8b()).unwrap();
        let prefill = Engine::attach(named(&envelope, "prefill", Role::Prefill), &[&node], Kind::Memfd).await;
        let decode = Engine::attach(named(&envelope, "decode", Role::Decode), &[&node], Kind::Memfd).await;
        let mut bystanders = Bystanders {
            before: node.footprint().await,
            node,
            prefill,
            decode,
            _cluster: cluster,
        };
        bystanders.carry("before").await;
        bystanders.before = bystanders.node.footprint().await;
        bystanders
    }

    async fn carry(&self, transfer: &str) {
        let carry = Carry {
            transfer,
            tokens: 99,
            held: 0,
            sparse: false,
            fetch_first: false,
            path: None,
        };
        carry.run(&self.prefill, &self.decode).await;
    }

    /// The daemon holds what it held before, and the engines go on.
    async fn go_on(&self) {
        self.node.settles_to(&self.before).await;
        self.carry("after").await;
        self.prefill.check_all("the prefill pool");
        self.decode.check_all("the decode pool");
    }
}

fn refused<T: std::fmt::Debug>(answer: Result<T, ClientError>, what: &str) -> Fault {
    match answer {
        Err(ClientError::Refused(fault)) => fault,
        other => panic!("{what}: not refused: {other:?}"),
    }
}

/// Refused with this code, in words that name all of `named`.
fn check(fault: &Fault, code: Code, names: &[&str], what: &str) {
    assert_eq!(fault.code, code, "{what}: {fault}");
    for name in names {
        assert!(
            fault.message.contains(name),
            "{what}: {name:?} is not in {:?}",
            fault.message
        );
    }
}

/// One region of exactly two pages of memory.
fn small() -> Envelope {
    let model = ModelShape::new("small", 1).kv(0..1, 1, 64);
    let launch = Launch {
        pool_pages: 2,
        ..launch(1, 16)
    };
    let envelope = launch.envelope(&model).unwrap();
    named(&envelope, "small", Role::Both)
}

const SMALL: u64 = 8_192;

fn memfd(len: u64, seals: SealFlags) -> OwnedFd {
    let fd = rustix::fs::memfd_create("bad", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&fd, len).unwrap();
    rustix::fs::fcntl_add_seals(&fd, seals).unwrap();
    fd
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_that_cannot_be_used_is_refused_by_name() {
    let bystanders = Bystanders::new(Options::default()).await;
    let sealed = SealFlags::SHRINK | SealFlags::GROW;
    let of_memfd = |seals, offset, len| RegionMemory::Memfd {
        fd: memfd(2 * SMALL, seals),
        offset,
        len,
    };
    let of_fd = |fd: OwnedFd| RegionMemory::Memfd {
        fd,
        offset: 0,
        len: SMALL,
    };
    let file = tempfile::tempfile().unwrap();
    file.set_len(SMALL).unwrap();
    let (reader, _writer) = std::io::pipe().unwrap();
    let own = [0u8; 16];
    let address = own.as_ptr().expose_provenance() as u64;
    let of_process = |address, len| RegionMemory::Process { address, len };
    let cases = [
        (
            "no seals",
            0,
            of_memfd(SealFlags::empty(), 0, SMALL),
            Code::RegionSeals,
            &["SHRINK", "GROW"][..],
        ),
        (
            "no GROW seal",
            0,
            of_memfd(SealFlags::SHRINK, 0, SMALL),
            Code::RegionSeals,
            &["F_SEAL_GROW missing"],
        ),
        (
            "no SHRINK seal",
            0,
            of_memfd(SealFlags::GROW, 0, SMALL),
            Code::RegionSeals,
            &["F_SEAL_SHRINK missing"],
        ),
        (
            "a WRITE seal",
            0,
            of_memfd(sealed | SealFlags::WRITE, 0, SMALL),
            Code::RegionSeals,
            &["F_SEAL_WRITE"],
        ),
        (
            "a FUTURE_WRITE seal",
            0,
            of_memfd(sealed | SealFlags::FUTURE_WRITE, 0, SMALL),
            Code::RegionSeals,
            &["F_SEAL_FUTURE_WRITE"],
        ),
        (
            "too short",
            0,
            of_memfd(sealed, 0, SMALL - 1),
            Code::RegionTooSmall,
            &["8191", "8192"],
        ),
        (
            "longer than the memfd",
            0,
            of_memfd(sealed, 0, 3 * SMALL),
            Code::RegionOutOfBounds,
            &["24576", "16384"],
        ),
        (
            "begins behind the end",
            0,
            of_memfd(sealed, 4 * SMALL, SMALL),
            Code::RegionOutOfBounds,
            &["32768"],
        ),
        (
            "wraps",
            0,
            of_memfd(sealed, u64::MAX - 4095, SMALL),
            Code::RegionOutOfBounds,
            &["offset"],
        ),
        (
            "not aligned",
            0,
            of_memfd(sealed, 100, SMALL),
            Code::RegionOutOfBounds,
            &["100", "4096"],
        ),
        (
            "empty",
            0,
            of_memfd(sealed, 0, 0),
            Code::RegionOutOfBounds,
            &["len"],
        ),
        ("a file", 0, of_fd(file.into()), Code::RegionKind, &["memfd"]),
        ("a pipe", 0, of_fd(reader.into()), Code::RegionKind, &["memfd"]),
        (
            "no such region",
            7,
            of_memfd(sealed, 0, SMALL),
            Code::RegionUnknown,
            &["7"],
        ),
        (
            "addresses that are not mapped",
            0,
            of_process(4_096, SMALL),
            Code::RegionOutOfBounds,
            &["region 0"],
        ),
        (
            "addresses that wrap",
            0,
            of_process(u64::MAX - 100, SMALL),
            Code::RegionOutOfBounds,
            &["region 0"],
        ),
        (
            "a process's few bytes",
            0,
            of_process(address, 16),
            Code::RegionTooSmall,
            &["16", "8192"],
        ),
    ];
    let rank = attach_rank(&small(), 0, &bystanders.node, bystanders.node.address())
        .await
        .unwrap();
    for (what, region, memory, code, names) in cases {
        let answer = within(PATIENCE, what, rank.register(region, memory)).await;
        check(&refused(answer, what), code, names, what);
    }
    // Nothing of it is left: what is right is taken, once.
    let good = SealedMemory::create("good", SMALL).unwrap();
    rank.register(0, good.region().unwrap()).await.unwrap();
    let again = SealedMemory::create("again", SMALL).unwrap();
    let fault = refused(rank.register(0, again.region().unwrap()).await, "twice");
    check(
        &fault,
        Code::RegionRegistered,
        &["region 0", "unregister"],
        "twice",
    );
    rank.unregister(0).await.unwrap();
    let fault = refused(rank.unregister(0).await, "unregistered twice");
    check(&fault, Code::RegionUnknown, &["region 0"], "unregistered twice");
    drop(rank);
    bystanders.go_on().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn regions_that_share_bytes_are_refused() {
    let bystanders = Bystanders::new(Options::default()).await;
    // A region for each layer and part: four of them.
    let model = ModelShape::new("small", 2).kv(0..2, 1, 64);
    let launch = Launch {
        pool_pages: 2,
        allocation: kvferry_handshake::Allocation::LayerPart,
        ..launch(1, 16)
    };
    let envelope = named(&launch.envelope(&model).unwrap(), "small", Role::Both);
    let rank = attach_rank(&envelope, 0, &bystanders.node, bystanders.node.address())
        .await
        .unwrap();
    let half = SMALL / 2;
    let memory = SealedMemory::create("shared", 4 * half).unwrap();
    rank.register(0, memory.region_of(0, half).unwrap())
        .await
        .unwrap();
    for (offset, len) in [(0, half), (0, 2 * half)] {
        let fault = refused(
            rank.register(1, memory.region_of(offset, len).unwrap()).await,
            "overlapping",
        );
        check(&fault, Code::RegionOverlap, &["region 1"], "overlapping");
    }
    rank.register(1, memory.region_of(half, half).unwrap())
        .await
        .unwrap();
    let bytes = vec![0u8; 3 * 4096];
    let address = bytes.as_ptr().expose_provenance() as u64;
    rank.register(2, RegionMemory::Process { address, len: half })
        .await
        .unwrap();
    let overlapping = RegionMemory::Process {
        address: address + half - 1,
        len: half,
    };
    let fault = refused(rank.register(3, overlapping).await, "overlapping addresses");
    check(
        &fault,
        Code::RegionOverlap,
        &["region 3"],
        "overlapping addresses",
    );
    drop(rank);
    drop(bytes);
    bystanders.go_on().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn attachments_that_do_not_fit_are_refused_by_name() {
    let bystanders = Bystanders::new(Options::default()).await;
    let node = &bystanders.node;
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
    let bystanders = Bystanders::new(Options::default()).await;
    let node = &bystanders.node;
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

fn lists(pages: &[u32]) -> PageLists {
    PageLists {
        groups: vec![pages.to_vec()],
    }
}

fn of_tokens(tokens: u64) -> Ready {
    Ready {
        tokens,
        front_tokens: tokens,
        ..Ready::default()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn publishes_that_do_not_fit_are_refused_by_name() {
    let bystanders = Bystanders::new(Options::default()).await;
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
    bystanders.carry("after").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fetches_that_do_not_fit_are_refused_by_name() {
    let bystanders = Bystanders::new(Options::default()).await;
    let rank = &bystanders.decode.ranks[0];
    let pool = bystanders.decode.envelope.page_groups[0].pool_pages;
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
        .decode
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
    bystanders.decode.settle_fetch(&fetched, &ends, "the first");
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
        check(cause, Code::PageAbsent, &["group 1", "entry 12"], name);
        let cause = within(PATIENCE, name, publication.ended())
            .await
            .unwrap_err()
            .cause;
        check(&cause, Code::PageAbsent, &["group 1", "entry 12"], name);
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
    let bystanders = Bystanders::new(Options::default()).await;
    let rank = attach_rank(&small(), 0, &bystanders.node, bystanders.node.address())
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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bounds_are_named_and_a_retry_helps() {
    let options = Options::default()
        .set("limits.transfers_per_rank", 4)
        .set("limits.pages_per_transfer", 64)
        .set("limits.ranks", 3)
        .set("limits.connections", 8);
    let bystanders = Bystanders::new(options).await;
    let rank = &bystanders.prefill.ranks[0];
    let publish = |id: &str, pages: &[u32], ready| {
        rank.publish(PublishRequest {
            transfer: id.into(),
            pages: Some(lists(pages)),
            ready,
            metadata: None,
            serves: 1,
        })
    };
    let mut open = Vec::new();
    for at in 0..4u32 {
        open.push(publish(&at.to_string(), &[at], of_tokens(5)).await.unwrap());
    }
    let fault = refused(publish("5", &[9], of_tokens(5)).await, "a fifth");
    check(&fault, Code::OverLimit, &["4", "transfers_per_rank"], "a fifth");
    assert!(fault.code.can_retry());
    rank.rank.abort(&"2".into()).await.unwrap();
    within(PATIENCE, "the end", open[2].ended()).await.unwrap_err();
    let fifth = publish("5", &[9], of_tokens(5)).await.unwrap();
    for (id, publication) in [("0", &open[0]), ("1", &open[1]), ("3", &open[3]), ("5", &fifth)] {
        rank.rank.abort(&id.into()).await.unwrap();
        within(PATIENCE, "the end", publication.ended())
            .await
            .unwrap_err();
    }
    let many: Vec<u32> = (0..65).collect();
    let fault = refused(publish("many", &many, Ready::complete(65 * 16)).await, "65 pages");
    check(&fault, Code::OverLimit, &["page lists", "64"], "65 pages");

    // Two ranks are attached; a third is taken, a fourth not.
    let third = attach_rank(&small(), 0, &bystanders.node, bystanders.node.address())
        .await
        .unwrap();
    let other = named(&small(), "other", Role::Both);
    let fault = refused(
        attach_rank(&other, 0, &bystanders.node, bystanders.node.address()).await,
        "a fourth rank",
    );
    check(&fault, Code::OverLimit, &["3", "ranks"], "a fourth rank");
    drop(third);

    // Connections that have not attached give way to new ones; attached ones stay.
    let mut idle = Vec::new();
    for _ in 0..20 {
        idle.push(
            within(PATIENCE, "connecting", Client::connect(bystanders.node.socket()))
                .await
                .unwrap(),
        );
    }
    bystanders.carry("among idle connections").await;
    drop(idle);
    bystanders.go_on().await;
}
