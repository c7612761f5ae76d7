//! Bounds on what an engine may have open.

use kvferry_client::{Client, PublishRequest};
use kvferry_handshake::{Code, Ready, Role};
use kvferry_tests::engine::{attach_rank, named, of_tokens, refused};
use kvferry_tests::node::Options;
use kvferry_tests::wait::{PATIENCE, within};

use crate::{bystanders, check, lists, small};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bounds_are_named_and_a_retry_helps() {
    let options = Options::default()
        .set("limits.transfers_per_rank", 4)
        .set("limits.pages_per_transfer", 64)
        .set("limits.ranks", 3)
        .set("limits.connections", 8);
    let (_cluster, bystanders) = bystanders(options).await;
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
    check(
        &fault,
        Code::OverLimit,
        &["4", "limits.transfers_per_rank"],
        "a fifth",
    );
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
    let third = attach_rank(&small(), 0, &bystanders.nodes[0], bystanders.nodes[0].address())
        .await
        .unwrap();
    let other = named(&small(), "other", Role::Both);
    let fault = refused(
        attach_rank(&other, 0, &bystanders.nodes[0], bystanders.nodes[0].address()).await,
        "a fourth rank",
    );
    check(&fault, Code::OverLimit, &["3", "limits.ranks"], "a fourth rank");
    drop(third);

    // Connections that have not attached give way to new ones; attached ones stay.
    let mut idle = Vec::new();
    for _ in 0..20 {
        idle.push(
            within(
                PATIENCE,
                "connecting",
                Client::connect(bystanders.nodes[0].socket()),
            )
            .await
            .unwrap(),
        );
    }
    bystanders.carry().await;
    drop(idle);
    bystanders.go_on().await;
}
