//! What is published bit by bit, and what arrives.

use kvferry_client::{Progress, PublishRequest};
use kvferry_handshake::{Code, Envelope, Launch, Ready};
use kvferry_tests::engine::{of_tokens, refused, tokens};
use kvferry_tests::geometry::{hybrid, launch};
use kvferry_tests::memory::Kind;
use kvferry_tests::node::Options;
use kvferry_tests::pattern::Stamp;
use kvferry_tests::wait::{PATIENCE, within};
use kvferry_tests::width::{by_width, seed};
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

use crate::{Setting, all_ended, cause, envelope, long, publish};

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
