//! Transfers from publish to their end, between two nodes and on one: every way in which they can go.

#![allow(clippy::unwrap_used, missing_docs)] // a panic here is a failed test

use std::time::Duration;

use kvferry_client::{ClientError, Fault, Path, Progress, Publication, PublishRequest, TransferId};
use kvferry_handshake::{Code, Envelope, Launch, ModelShape, PageLists, Ready, Role};
use kvferry_tests::engine::{Carry, End, Engine, Fetched, bytes, fetch_request, named, tokens};
use kvferry_tests::geometry::{hybrid, launch};
use kvferry_tests::memory::Kind;
use kvferry_tests::node::{Cluster, Node, Options};
use kvferry_tests::pattern::Stamp;
use kvferry_tests::wait::{PATIENCE, by_width, seed, within};
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

/// Long enough for anything that must not happen to show.
const A_WHILE: Duration = Duration::from_millis(300);

/// Two nodes; a prefill engine on the first, and a decode engine on each.
struct Setting {
    prefill: Engine,
    far: Engine,
    near: Engine,
    a: Node,
    b: Node,
    _cluster: Cluster,
}

fn model() -> ModelShape {
    ModelShape::new("four-layers", 4).kv(0..4, 8, 128)
}

fn envelope(tp: u32) -> Envelope {
    launch(tp, 16).envelope(&model()).unwrap()
}

/// With pools for long prompts.
fn long(tp: u32) -> Envelope {
    let launch = Launch {
        pool_pages: 600,
        ..launch(tp, 16)
    };
    launch.envelope(&model()).unwrap()
}

impl Setting {
    async fn new(options: Options) -> Setting {
        Setting::with(options, &envelope(2), &envelope(1), Kind::Memfd, Kind::Memfd).await
    }

    async fn with(
        options: Options,
        prefill: &Envelope,
        decode: &Envelope,
        prefill_memory: Kind,
        decode_memory: Kind,
    ) -> Setting {
        let cluster = Cluster::new();
        let [a, b] = cluster.start_two(options).await;
        Setting {
            prefill: Engine::attach(named(prefill, "prefill", Role::Prefill), &[&a], prefill_memory).await,
            far: Engine::attach(named(decode, "far", Role::Decode), &[&b], decode_memory).await,
            near: Engine::attach(named(decode, "near", Role::Decode), &[&a], decode_memory).await,
            a,
            b,
            _cluster: cluster,
        }
    }

    /// The decode engines, each with its name for transfer ids.
    fn decodes(&self) -> [(&'static str, &Engine); 2] {
        [("far", &self.far), ("near", &self.near)]
    }

    /// Engines and daemons go on as if nothing had been.
    async fn goes_on(&self, what: &str) {
        for (path, decode) in [(Path::Tcp, &self.far), (Path::Local, &self.near)] {
            let carry = Carry {
                transfer: &format!("{what}, afterwards, {path:?}"),
                tokens: 130,
                held: 0,
                sparse: false,
                fetch_first: false,
                path: Some(path),
            };
            carry.run(&self.prefill, decode).await;
        }
        for engine in [&self.prefill, &self.far, &self.near] {
            engine.check_all(what);
        }
    }

    async fn fetch(&self, decode: &Engine, stamp: &Stamp, count: u64) -> Fetched {
        decode
            .fetch(&self.prefill.address(), stamp, tokens(0, count), count, false)
            .await
    }
}

fn cause(end: &End) -> &Fault {
    match end {
        Ok(delivered) => panic!("delivered: {delivered:?}"),
        Err(failed) => &failed.cause,
    }
}

/// Every rank's end has this code.
fn all_ended(ends: &[End], code: Code, what: &str) {
    for end in ends {
        let cause = cause(end);
        // Another rank's failure names the cause.
        let of_sibling = cause.code == Code::SiblingFailed && cause.message.contains(code.name());
        assert!(
            cause.code == code || of_sibling,
            "{what}: {code} expected: {cause}"
        );
    }
}

fn refused<T: std::fmt::Debug>(answer: Result<T, ClientError>, what: &str) -> Fault {
    match answer {
        Err(ClientError::Refused(fault)) => fault,
        other => panic!("{what}: not refused: {other:?}"),
    }
}

/// One rank's publish of what is ready, filled just before.
async fn publish(
    engine: &Engine,
    rank: usize,
    stamp: &Stamp,
    lists: &PageLists,
    ready: Ready,
    metadata: Option<Vec<u8>>,
) -> Publication {
    engine.ranks[rank].pool().fill(lists, stamp, &ready);
    let request = PublishRequest {
        transfer: stamp.transfer(),
        pages: Some(lists.clone()),
        ready,
        metadata,
        serves: 1,
    };
    engine.ranks[rank].publish(request).await.unwrap()
}

fn of_tokens(tokens: u64) -> Ready {
    Ready {
        tokens,
        front_tokens: tokens,
        ..Ready::default()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_ready_moves_before_the_rest_is() {
    let setting = Setting::with(Options::default(), &long(1), &long(1), Kind::Memfd, Kind::Memfd).await;
    let by_layers = Ready {
        front_tokens: 3_000,
        front_layers: 2,
        ..Ready::default()
    };
    for (what, first) in [("tokens", of_tokens(2_900)), ("layers", by_layers)] {
        for (name, decode) in setting.decodes() {
            let what = format!("{what} {name}");
            let stamp = Stamp::of(&what);
            let source = setting.prefill.draw(3_000, false);
            let publication = publish(&setting.prefill, 0, &stamp, &source[0], first, None).await;
            let fetched = setting.fetch(decode, &stamp, 3_000).await;
            let mut seen = Progress::default();
            while seen.bytes == 0 {
                let moved = within(PATIENCE, &what, fetched.fetchings[0].moved_on(&seen)).await;
                assert_ne!(moved, seen, "{what}: it ended");
                seen = moved;
            }
            publish(
                &setting.prefill,
                0,
                &stamp,
                &source[0],
                Ready::complete(3_000),
                None,
            )
            .await;
            let ends = fetched.ended(PATIENCE).await;
            assert!(ends[0].is_ok(), "{what}: {ends:?}");
            decode.settle_fetch(&fetched, &ends, &what);
            within(PATIENCE, &what, publication.ended()).await.unwrap();
            setting.prefill.give_back(&source);
        }
    }
    setting.goes_on("streams").await;
}

/// Publishes in many steps, of tokens and of layers, on several ranks out of step, with the fetch somewhere between.
/// Each step writes what it says is ready just before, so that a byte that is moved too early is wrong.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn streams_of_every_kind_are_exact() {
    let setting = Setting::with(
        Options::default(),
        &arranged(2),
        &arranged(1),
        Kind::Memfd,
        Kind::Memfd,
    )
    .await;
    let mut random = StdRng::seed_from_u64(seed(7));
    for turn in 0..by_width(12, 48, 500) {
        let (name, decode) = setting.decodes()[turn % 2];
        let what = format!("stream {turn} to {name}");
        let stamp = Stamp::of(&what);
        let length = random.random_range(1..900);
        let source = setting.prefill.draw(length, turn % 3 == 0);
        let fetch_at = random.random_range(0..6);
        let mut ready = vec![Ready::default(); source.len()];
        let mut publications = Vec::new();
        let mut fetched = None;
        for step in 0..6 {
            if step == fetch_at {
                let from = random.random_range(0..=length);
                let source = setting.prefill.address();
                fetched = Some(
                    decode
                        .fetch(&source, &stamp, tokens(from, length), length, turn % 3 == 0)
                        .await,
                );
            }
            for rank in 0..source.len() {
                ready[rank] = match step {
                    5 => Ready::complete(length),
                    _ => grown(ready[rank], length, &mut random),
                };
                let (lists, ready) = (&source[rank], ready[rank]);
                let publication = publish(&setting.prefill, rank, &stamp, lists, ready, None).await;
                if step == 0 {
                    publications.push(publication);
                }
            }
        }
        let fetched = fetched.unwrap();
        let ends = fetched.ended(PATIENCE).await;
        assert!(ends.iter().all(Result::is_ok), "{what}: {ends:?}");
        decode.settle_fetch(&fetched, &ends, &what);
        for publication in publications {
            within(PATIENCE, &what, publication.ended()).await.unwrap();
        }
        setting.prefill.give_back(&source);
    }
    for engine in [&setting.prefill, &setting.far, &setting.near] {
        engine.check_all("after the streams");
    }
}

fn arranged(tp: u32) -> Envelope {
    let launch = Launch {
        pool_pages: 300,
        ..launch(tp, 16)
    };
    launch.envelope(&hybrid()).unwrap()
}

/// A little more is ready: tokens in all layers, or in the first ones.
fn grown(ready: Ready, length: u64, random: &mut StdRng) -> Ready {
    let tokens = random.random_range(ready.tokens..=length);
    if random.random_bool(0.5) {
        let front = ready.front_tokens.max(tokens);
        return Ready {
            tokens,
            front_tokens: front,
            front_layers: if front == ready.front_tokens {
                ready.front_layers
            } else {
                0
            },
            end: None,
        };
    }
    Ready {
        tokens: ready.tokens,
        front_tokens: random.random_range(ready.front_tokens..=length),
        front_layers: ready.front_layers.max(random.random_range(0..6)),
        end: None,
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn page_lists_grow_with_the_prompt() {
    let setting = Setting::with(
        Options::default(),
        &envelope(1),
        &envelope(1),
        Kind::Memfd,
        Kind::Memfd,
    )
    .await;
    for (name, decode) in setting.decodes() {
        let stamp = Stamp::of(name);
        let source = setting.prefill.draw(300, false);
        let fetched = setting.fetch(decode, &stamp, 300).await;
        let mut publication = None;
        for tokens in [40, 41, 160, 300] {
            let ready = if tokens == 300 {
                Ready::complete(300)
            } else {
                of_tokens(tokens)
            };
            let mut so_far = source[0].clone();
            so_far.groups[0].truncate(usize::try_from(tokens.div_ceil(16)).unwrap());
            setting.prefill.ranks[0].pool().fill(&source[0], &stamp, &ready);
            let request = PublishRequest {
                transfer: stamp.transfer(),
                pages: Some(so_far),
                ready,
                metadata: None,
                serves: 1,
            };
            publication = Some(setting.prefill.ranks[0].publish(request).await.unwrap());
        }
        let ends = fetched.ended(PATIENCE).await;
        assert!(ends[0].is_ok(), "{ends:?}");
        decode.settle_fetch(&fetched, &ends, name);
        within(PATIENCE, name, publication.unwrap().ended())
            .await
            .unwrap();
        setting.prefill.give_back(&source);
    }
    setting.goes_on("lists that grew").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn metadata_of_up_to_64_kib_arrives() {
    let setting = Setting::new(Options::default()).await;
    for (name, decode) in setting.decodes() {
        for length in [0, 1, 64 << 10] {
            let what = format!("{length} bytes of metadata to {name}");
            let stamp = Stamp::of(&what);
            let metadata: Vec<u8> = (0..length).map(|at: u32| at.to_le_bytes()[0] ^ 0x5a).collect();
            let source = setting.prefill.draw(40, false);
            let mut publications = Vec::new();
            // First without; then with the final one, another on each rank: the lowest rank's counts.
            for (ready, with) in [(of_tokens(20), false), (Ready::complete(40), true)] {
                for (rank, lists) in source.iter().enumerate() {
                    let metadata = match rank {
                        _ if !with => None,
                        0 => Some(metadata.clone()),
                        _ => Some(b"another".to_vec()),
                    };
                    publications.push(publish(&setting.prefill, rank, &stamp, lists, ready, metadata).await);
                }
            }
            let fetched = setting.fetch(decode, &stamp, 40).await;
            let ends = fetched.ended(PATIENCE).await;
            assert_eq!(ends[0].as_ref().unwrap().metadata, metadata, "{what}");
            decode.settle_fetch(&fetched, &ends, &what);
            for publication in publications {
                within(PATIENCE, &what, publication.ended()).await.unwrap();
            }
            setting.prefill.give_back(&source);
        }
    }
    let source = setting.prefill.draw(40, false);
    let request = PublishRequest {
        transfer: "too long".into(),
        pages: Some(source[0].clone()),
        ready: Ready::complete(40),
        metadata: Some(vec![0; (64 << 10) + 1]),
        serves: 1,
    };
    let fault = refused(setting.prefill.ranks[0].publish(request).await, "too long");
    assert_eq!(fault.code, Code::MetadataTooLong);
    assert!(
        fault.message.contains("65537") && fault.message.contains("65536"),
        "{fault}"
    );
    setting.prefill.give_back(&source);
    setting.goes_on("metadata").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shorter_prompt_is_delivered_if_it_will_do_and_else_fails_as_short() {
    let setting = Setting::new(Options::default()).await;
    for (name, decode) in setting.decodes() {
        for (end, least, held, does) in [
            (100, 100, 0, true),
            (100, 90, 33, true),
            (100, 101, 0, false),
            (100, 150, 64, false),
        ] {
            let what = format!("{end} of {least}, {held} held, {name}");
            let stamp = Stamp::of(&what);
            let source = setting.prefill.address();
            let fetched = decode
                .fetch(&source, &stamp, tokens(held, 150), least, false)
                .await;
            let published = setting.prefill.publish(&stamp, end, false).await;
            let (fetch_ends, publish_ends) = (fetched.ended(PATIENCE).await, published.ended(PATIENCE).await);
            if does {
                let delivered = fetch_ends[0]
                    .as_ref()
                    .unwrap_or_else(|failed| panic!("{what}: {failed}"));
                assert_eq!(delivered.tokens, end, "{what}");
                assert!(publish_ends.iter().all(Result::is_ok), "{what}: {publish_ends:?}");
            } else {
                all_ended(&fetch_ends, Code::Short, &what);
                all_ended(&publish_ends, Code::Short, &what);
                let message = &cause(&fetch_ends[0]).message;
                assert!(
                    message.contains("100") && message.contains(&least.to_string()),
                    "{message}"
                );
            }
            decode.settle_fetch(&fetched, &fetch_ends, &what);
            setting.prefill.settle_publish(&published, &what);
        }
    }
    setting.goes_on("short").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_higher_attempt_takes_the_place_of_a_lower_one() {
    let setting = Setting::new(Options::default()).await;
    let attempt = |transfer: &str, attempt| Stamp {
        attempt,
        ..Stamp::of(transfer)
    };
    for (name, decode) in setting.decodes() {
        // Of the publish, while nobody came; and of the fetch, while nothing was published.
        let published = setting.prefill.publish(&attempt(name, 0), 50, false).await;
        let again = setting.prefill.publish(&attempt(name, 3), 50, false).await;
        let ends = published.ended(PATIENCE).await;
        all_ended(&ends, Code::Superseded, name);
        setting.prefill.settle_publish(&published, name);
        let stale = setting.prefill.ranks[0].publish(PublishRequest {
            transfer: attempt(name, 2).transfer(),
            pages: Some(again.lists[0].clone()),
            ready: Ready::complete(50),
            metadata: None,
            serves: 1,
        });
        assert_eq!(refused(stale.await, name).code, Code::StaleAttempt);

        let fetched = setting.fetch(decode, &attempt(name, 3), 50).await;
        let ends = fetched.ended(PATIENCE).await;
        assert!(ends[0].is_ok(), "{ends:?}");
        decode.settle_fetch(&fetched, &ends, name);
        assert!(again.ended(PATIENCE).await.iter().all(Result::is_ok));
        setting.prefill.settle_publish(&again, name);

        let other = format!("{name}, fetched first");
        let fetched = setting.fetch(decode, &attempt(&other, 0), 50).await;
        let again = setting.fetch(decode, &attempt(&other, 1), 50).await;
        let ends = fetched.ended(PATIENCE).await;
        all_ended(&ends, Code::Superseded, &other);
        decode.settle_fetch(&fetched, &ends, &other);
        let published = setting.prefill.publish(&attempt(&other, 1), 50, false).await;
        let ends = again.ended(PATIENCE).await;
        assert!(ends[0].is_ok(), "{ends:?}");
        decode.settle_fetch(&again, &ends, &other);
        published.ended(PATIENCE).await;
        setting.prefill.settle_publish(&published, &other);
    }
    setting.goes_on("attempts").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unfetched_publish_ends_with_its_lease_unless_it_is_expected() {
    let setting = Setting::new(Options::default().set("lease_ms", 2_000)).await;
    let forgotten = setting.prefill.publish(&Stamp::of("forgotten"), 50, false).await;
    let mut expected = Vec::new();
    for (name, decode) in setting.decodes() {
        expected.push((decode, setting.prefill.publish(&Stamp::of(name), 50, false).await));
    }
    for _ in 0..20 {
        for (decode, published) in &expected {
            let transfer = published.stamp.transfer();
            decode.ranks[0]
                .rank
                .expect(&setting.prefill.address(), &transfer)
                .await
                .unwrap();
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    all_ended(&forgotten.ended(PATIENCE).await, Code::LeaseExpired, "forgotten");
    for (decode, published) in &expected {
        let fetched = setting.fetch(decode, &published.stamp, 50).await;
        let ends = fetched.ended(PATIENCE).await;
        assert!(ends[0].is_ok(), "{ends:?}");
        decode.settle_fetch(&fetched, &ends, "expected");
        assert!(published.ended(PATIENCE).await.iter().all(Result::is_ok));
    }
    // The lease of what nobody expects any more ends too.
    let given_up = setting.prefill.publish(&Stamp::of("given up"), 50, false).await;
    setting.far.ranks[0]
        .rank
        .expect(&setting.prefill.address(), &"given up".into())
        .await
        .unwrap();
    all_ended(&given_up.ended(PATIENCE).await, Code::LeaseExpired, "given up");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_declined_publish_ends_at_once() {
    // A lease beyond the test's patience: only decline can end it.
    let setting = Setting::new(Options::default().set("lease_ms", 600_000)).await;
    for (name, decode) in setting.decodes() {
        let published = setting.prefill.publish(&Stamp::of(name), 50, false).await;
        let transfer: TransferId = name.into();
        decode.ranks[0]
            .rank
            .decline(&setting.prefill.address(), &transfer)
            .await
            .unwrap();
        all_ended(&published.ended(PATIENCE).await, Code::Declined, name);
        setting.prefill.settle_publish(&published, name);
        let fetched = setting.fetch(decode, &published.stamp, 50);
        let fetched = within(PATIENCE, "fetch", fetched).await;
        let ends = fetched.ended(PATIENCE).await;
        assert!(
            ends.iter().all(Result::is_err),
            "a declined transfer was delivered: {ends:?}"
        );
        decode.settle_fetch(&fetched, &ends, name);
    }
    setting.goes_on("declined").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_publish_serves_as_many_engines_as_it_says() {
    let setting = Setting::new(Options::default()).await;
    let stamp = Stamp::of("twice");
    let published = setting.prefill.publish_with(&stamp, 333, false, 2, None).await;
    let first = setting.fetch(&setting.far, &stamp, 333).await;
    let ends = first.ended(PATIENCE).await;
    assert!(ends[0].is_ok(), "{ends:?}");
    setting.far.settle_fetch(&first, &ends, "first");
    let early = tokio::time::timeout(A_WHILE, published.publications[0].ended()).await;
    assert!(early.is_err(), "ended before the second engine came: {early:?}");
    let source = setting.prefill.address();
    let second = setting
        .near
        .fetch(&source, &stamp, tokens(16, 333), 333, false)
        .await;
    let ends = second.ended(PATIENCE).await;
    assert!(ends[0].is_ok(), "{ends:?}");
    setting.near.settle_fetch(&second, &ends, "second");
    assert!(published.ended(PATIENCE).await.iter().all(Result::is_ok));
    setting.prefill.settle_publish(&published, "twice");
    setting.goes_on("twice").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_waits_longer_than_its_deadline() {
    let setting = Setting::new(Options::default().set("deadline_ms", 2_000)).await;
    let mut open = Vec::new();
    for (name, decode) in setting.decodes() {
        // Nothing is published; and of another, half of the prompt.
        let never = setting
            .fetch(decode, &Stamp::of(&format!("never {name}")), 50)
            .await;
        let stamp = Stamp::of(&format!("half {name}"));
        let source = setting.prefill.draw(100, false);
        let mut halves = Vec::new();
        for (rank, lists) in source.iter().enumerate() {
            halves.push(publish(&setting.prefill, rank, &stamp, lists, of_tokens(50), None).await);
        }
        let half = setting.fetch(decode, &stamp, 100).await;
        open.push((decode, never, half, halves));
    }
    for (decode, never, half, halves) in &open {
        for fetched in [never, half] {
            let ends = fetched.ended(PATIENCE).await;
            all_ended(&ends, Code::Deadline, &fetched.stamp.transfer);
            let message = &cause(&ends[0]).message;
            assert!(
                message.contains("prefill") || message.contains(setting.a.address()),
                "{message}"
            );
            decode.settle_fetch(fetched, &ends, "deadline");
        }
        for publication in halves {
            let end = within(PATIENCE, "a half published", publication.ended()).await;
            all_ended(&[end], Code::Deadline, "a half published");
        }
    }
    setting.goes_on("deadlines").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn either_side_ends_a_transfer_for_both() {
    let setting = Setting::new(Options::default()).await;
    for (name, decode) in setting.decodes() {
        for by_decode in [true, false] {
            let what = format!("aborted by the decode side: {by_decode}, {name}");
            let stamp = Stamp::of(&what);
            let source = setting.prefill.draw(900, false);
            let mut publications = Vec::new();
            for (rank, lists) in source.iter().enumerate() {
                publications.push(publish(&setting.prefill, rank, &stamp, lists, of_tokens(700), None).await);
            }
            let fetched = setting.fetch(decode, &stamp, 900).await;
            let unmet = Progress::default();
            within(PATIENCE, &what, publications[0].moved_on(&unmet)).await;
            let rank = if by_decode {
                &decode.ranks[0]
            } else {
                &setting.prefill.ranks[1]
            };
            rank.rank.abort(&stamp.transfer()).await.unwrap();
            let ends = fetched.ended(PATIENCE).await;
            all_ended(&ends, Code::Aborted, &what);
            // From here on nothing lands.
            for (rank, lists) in decode.ranks.iter().zip(&fetched.lists) {
                rank.pool().poison(lists);
            }
            for publication in &publications {
                let end = within(PATIENCE, &what, publication.ended()).await;
                all_ended(&[end], Code::Aborted, &what);
            }
            tokio::time::sleep(A_WHILE).await;
            for (rank, lists) in decode.ranks.iter().zip(&fetched.lists) {
                rank.pool().check(lists, &format!("{what}: after the end"));
            }
            decode.give_back(&fetched.lists);
            setting.prefill.give_back(&source);
        }
    }
    setting.goes_on("aborted").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_of_the_engines_process() {
    for (prefill, decode) in [
        (Kind::Process, Kind::Memfd),
        (Kind::Memfd, Kind::Process),
        (Kind::Process, Kind::Process),
    ] {
        let setting = Setting::with(Options::default(), &envelope(2), &envelope(1), prefill, decode).await;
        for (path, engine) in [(Path::Tcp, &setting.far), (Path::Local, &setting.near)] {
            for (length, held) in [(1, 0), (777, 0), (1_000, 33)] {
                let carry = Carry {
                    transfer: &format!("{length} {held} {path:?}"),
                    tokens: length,
                    held,
                    sparse: false,
                    fetch_first: false,
                    path: Some(path),
                };
                let carried = carry.run(&setting.prefill, engine).await;
                // From a mapping to a process and back no buffer is needed; two processes, or one and a socket, need one.
                let (at_source, at_target) = match path {
                    Path::Tcp => (prefill == Kind::Process, decode == Kind::Process),
                    Path::Local => {
                        let both = prefill == Kind::Process && decode == Kind::Process;
                        (both, both)
                    }
                };
                for (delivered, buffered) in carried
                    .publishes
                    .iter()
                    .zip([at_source; 2])
                    .chain(carried.fetches.iter().zip([at_target]))
                {
                    let bounced = if buffered { bytes(delivered) } else { 0 };
                    assert_eq!(
                        delivered.report.bounced, bounced,
                        "{prefill:?} to {decode:?}, {path:?}"
                    );
                }
            }
        }
        setting.goes_on("process memory").await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unregister_ends_the_transfers_that_use_the_region() {
    let setting = Setting::new(Options::default()).await;
    for (name, decode) in setting.decodes() {
        for at_decode in [true, false] {
            let what = format!("unregistered at the decode side: {at_decode}, {name}");
            let stamp = Stamp::of(&what);
            let source = setting.prefill.draw(900, false);
            let mut publications = Vec::new();
            for (rank, lists) in source.iter().enumerate() {
                publications.push(publish(&setting.prefill, rank, &stamp, lists, of_tokens(700), None).await);
            }
            let fetched = setting.fetch(decode, &stamp, 900).await;
            let unmet = Progress::default();
            within(PATIENCE, &what, publications[0].moved_on(&unmet)).await;
            let rank = if at_decode {
                &decode.ranks[0]
            } else {
                &setting.prefill.ranks[0]
            };
            within(PATIENCE, &what, rank.rank.unregister(0)).await.unwrap();
            if at_decode {
                // The memory is the engine's again.
                decode.ranks[0].pool().poison(&fetched.lists[0]);
            }
            all_ended(&fetched.ended(PATIENCE).await, Code::Unregistered, &what);
            for publication in &publications {
                let end = within(PATIENCE, &what, publication.ended()).await;
                all_ended(&[end], Code::Unregistered, &what);
            }
            tokio::time::sleep(A_WHILE).await;
            if at_decode {
                decode.ranks[0].pool().check(&fetched.lists[0], &what);
            } else {
                decode.ranks[0].pool().poison(&fetched.lists[0]);
            }
            let again = {
                let pool = rank.pool();
                let (_, memory) = pool.regions().next().unwrap();
                memory.region()
            };
            within(PATIENCE, &what, rank.rank.register(0, again))
                .await
                .unwrap();
            decode.give_back(&fetched.lists);
            setting.prefill.give_back(&source);
        }
    }
    setting.goes_on("unregistered").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_ends_takes_its_transfers_with_it() {
    let setting = Setting::new(Options::default()).await;
    let before = [
        setting.a.footprint().await.memfd_maps,
        setting.b.footprint().await.memfd_maps,
    ];
    for node in [&setting.a, &setting.b] {
        // A decode engine ends while it fetches.
        let doomed = Engine::attach(named(&envelope(1), "doomed", Role::Decode), &[node], Kind::Memfd).await;
        let stamp = Stamp::of(&format!("to the doomed on {}", node.address()));
        let source = setting.prefill.draw(900, false);
        let mut publications = Vec::new();
        for (rank, lists) in source.iter().enumerate() {
            publications.push(publish(&setting.prefill, rank, &stamp, lists, of_tokens(700), None).await);
        }
        let fetched = setting.fetch(&doomed, &stamp, 900).await;
        let unmet = Progress::default();
        within(PATIENCE, "the match", publications[0].moved_on(&unmet)).await;
        drop((fetched, doomed));
        for publication in &publications {
            let end = within(PATIENCE, "the end", publication.ended()).await;
            all_ended(&[end], Code::EngineGone, "the doomed decode engine");
        }
        setting.prefill.give_back(&source);

        // A prefill engine ends while it is fetched from, and its successor of the same name is found.
        let doomed = Engine::attach(named(&envelope(1), "doomed", Role::Prefill), &[node], Kind::Memfd).await;
        let stamp = Stamp::of(&format!("from the doomed on {}", node.address()));
        let lists = doomed.draw(900, false);
        let publication = publish(&doomed, 0, &stamp, &lists[0], of_tokens(700), None).await;
        let fetched = setting
            .far
            .fetch(&doomed.address(), &stamp, tokens(0, 900), 900, false)
            .await;
        within(PATIENCE, "the match", publication.moved_on(&unmet)).await;
        drop((publication, doomed));
        let ends = fetched.ended(PATIENCE).await;
        all_ended(&ends, Code::EngineGone, "the doomed prefill engine");
        setting.far.settle_fetch(&fetched, &ends, "gone");
        let successor =
            Engine::attach(named(&envelope(1), "doomed", Role::Prefill), &[node], Kind::Memfd).await;
        let carry = Carry {
            transfer: &format!("from the successor on {}", node.address()),
            tokens: 100,
            held: 0,
            sparse: false,
            fetch_first: false,
            path: None,
        };
        carry.run(&successor, &setting.far).await;
        drop(successor);
    }
    setting.goes_on("ended engines").await;
    for (node, maps) in [&setting.a, &setting.b].into_iter().zip(before) {
        let probe = || async {
            let now = node.footprint().await.memfd_maps;
            if now == maps {
                Ok(())
            } else {
                Err(format!("{now} mappings"))
            }
        };
        kvferry_tests::wait::until(PATIENCE, format!("{maps} mappings again"), probe).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_daemon_that_is_killed_comes_back_to_its_engines() {
    let mut setting = Setting::new(Options::default().set("deadline_ms", 10_000)).await;
    for (turn, prefill_side) in [true, false].into_iter().enumerate() {
        let what = format!("the prefill side's daemon: {prefill_side}");
        let stamp = Stamp::of(&what);
        let source = setting.prefill.draw(900, false);
        let mut publications = Vec::new();
        for (rank, lists) in source.iter().enumerate() {
            publications.push(publish(&setting.prefill, rank, &stamp, lists, of_tokens(700), None).await);
        }
        let fetched = setting.fetch(&setting.far, &stamp, 900).await;
        let unmet = Progress::default();
        within(PATIENCE, &what, publications[0].moved_on(&unmet)).await;
        let node = if prefill_side {
            &mut setting.a
        } else {
            &mut setting.b
        };
        node.kill();
        let ends = fetched.ended(PATIENCE).await;
        assert!(ends.iter().all(Result::is_err), "{what}: {ends:?}");
        setting.far.settle_fetch(&fetched, &ends, &what);
        for publication in &publications {
            let end = within(PATIENCE, &what, publication.ended()).await;
            assert!(end.is_err(), "{what}: {end:?}");
            if prefill_side {
                assert_eq!(cause(&end).code, Code::DaemonRestarted, "{what}");
            }
        }
        if !prefill_side {
            assert_eq!(cause(&ends[0]).code, Code::DaemonRestarted, "{what}");
        }
        let node = if prefill_side {
            &mut setting.a
        } else {
            &mut setting.b
        };
        node.restart().await;
        setting.prefill.give_back(&source);
        for engine in [&setting.prefill, &setting.far, &setting.near] {
            for rank in &engine.ranks {
                within(PATIENCE, "attached again", rank.rank.ready())
                    .await
                    .unwrap();
            }
        }
        setting.goes_on(&format!("{what} {turn}")).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fetch_from_nowhere_says_why() {
    let setting = Setting::new(Options::default().set("deadline_ms", 3_000)).await;
    let nobody = format!("kvferry://127.0.0.1:{}/prefill", kvferry_tests::node::free_port());
    let unknown = format!("kvferry://{}/nobody", setting.a.address());
    let itself = format!("kvferry://{}/nobody", setting.b.address());
    for (source, codes) in [
        (nobody, &[Code::PeerUnreachable][..]),
        (unknown, &[Code::EngineUnknown]),
        (itself, &[Code::EngineUnknown]),
        ("http://127.0.0.1:1/x".to_owned(), &[Code::AddressInvalid]),
        (
            format!("kvferry://{}", setting.a.address()),
            &[Code::AddressInvalid],
        ),
        ("kvferry://127.0.0.1:0/x".to_owned(), &[Code::AddressInvalid]),
    ] {
        let lists = setting.far.draw(50, false);
        let request = fetch_request(&source, &Stamp::of(&source), &lists[0], tokens(0, 50), 50);
        let fault = match setting.far.ranks[0].fetch(request).await {
            Ok(fetching) => {
                within(PATIENCE, &source, fetching.ended())
                    .await
                    .unwrap_err()
                    .cause
            }
            Err(ClientError::Refused(fault)) => fault,
            Err(other) => panic!("{source}: {other}"),
        };
        assert!(codes.contains(&fault.code), "{source}: {fault}");
        assert!(
            fault.message.contains(&source) || fault.message.len() > 30,
            "{source}: {fault}"
        );
        setting.far.ranks[0].pool().check(&lists[0], &source);
        setting.far.give_back(&lists);
    }
    setting.goes_on("nowhere").await;
}
