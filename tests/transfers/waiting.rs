//! Publishes and fetches that wait for the other side: attempts, leases, deadlines.

use std::time::Duration;

use kvferry_client::{PublishRequest, TransferId};
use kvferry_handshake::{Code, Ready};
use kvferry_tests::engine::{of_tokens, refused, tokens};
use kvferry_tests::node::Options;
use kvferry_tests::pattern::Stamp;
use kvferry_tests::wait::{PATIENCE, within};

use crate::{A_WHILE, Setting, all_ended, cause, publish};

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
