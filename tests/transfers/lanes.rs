//! What an operator sets about the paths between nodes.

use kvferry_client::Path;
use kvferry_handshake::Code;
use kvferry_tests::engine::{Carry, tokens};
use kvferry_tests::memory::Kind;
use kvferry_tests::node::Options;
use kvferry_tests::pattern::Stamp;
use kvferry_tests::wait::PATIENCE;

use crate::{Setting, all_ended, envelope};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lanes_of_every_setting_are_exact() {
    let one = Options::default().set("lanes_per_peer", 1).set("copy_threads", 1);
    let many = Options::default().set("lanes_per_peer", 16).set("checksum", true);
    let encrypted = Options::default().set("encrypt_lanes", true);
    let all = encrypted.clone().set("checksum", true).set("lanes_per_peer", 2);
    for (options, memory) in [
        (one, Kind::Memfd),
        (many, Kind::Memfd),
        (encrypted, Kind::Memfd),
        (all, Kind::Process),
    ] {
        let what = format!("{options:?}");
        let setting = Setting::with(options, &envelope(2), &envelope(1), memory, memory).await;
        for (at, (length, held)) in [(1, 0), (1_000, 0), (777, 33)].into_iter().enumerate() {
            let carry = Carry {
                transfer: &format!("{length} {held}"),
                tokens: length,
                held,
                sparse: false,
                fetch_first: at == 1,
                path: Some(Path::Tcp),
            };
            carry.run(&setting.prefill, &setting.far).await;
        }
        setting.goes_on(&what).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_required_path_that_is_not_there_fails_rather_than_falls_back() {
    let setting = Setting::new(Options::default().set("require", "\"rdma\"")).await;
    let stamp = Stamp::of("far");
    let published = setting.prefill.publish(&stamp, 300, false).await;
    let fetched = setting.fetch(&setting.far, &stamp, 300).await;
    let ends = fetched.ended(PATIENCE).await;
    all_ended(&ends, Code::PathRequired, "far");
    // The publish waits for an engine that it can reach, until it is aborted.
    setting.prefill.ranks[0]
        .rank
        .abort(&stamp.transfer())
        .await
        .unwrap();
    all_ended(&published.ended(PATIENCE).await, Code::Aborted, "far");
    for (rank, lists) in setting.far.ranks.iter().zip(&fetched.lists) {
        rank.pool().check(lists, "no byte has moved");
    }
    setting.prefill.settle_publish(&published, "far");
    // Within the node, and where there is nothing to move, no path is needed.
    let near = Carry {
        transfer: "near",
        tokens: 300,
        held: 0,
        sparse: false,
        fetch_first: false,
        path: Some(Path::Local),
    };
    near.run(&setting.prefill, &setting.near).await;
    let held = Stamp::of("held");
    let published = setting.prefill.publish(&held, 300, false).await;
    let source = setting.prefill.address();
    let fetched = setting
        .far
        .fetch(&source, &held, tokens(300, 300), 300, false)
        .await;
    let ends = fetched.ended(PATIENCE).await;
    assert!(ends[0].is_ok(), "{ends:?}");
    setting.far.settle_fetch(&fetched, &ends, "held");
    assert!(published.ended(PATIENCE).await.iter().all(Result::is_ok));
}
