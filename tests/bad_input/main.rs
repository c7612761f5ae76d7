//! What engines can do wrong: each gets a code and a message that names what is wrong, nothing is left half done, and
//! everyone else goes on.

#![allow(clippy::unwrap_used, missing_docs)] // a panic here is a failed test

mod attachments;
mod bounds;
mod memory;
mod transfers;

use kvferry_client::Fault;
use kvferry_handshake::{Code, Envelope, PageLists, Role};
use kvferry_tests::bystanders::Bystanders;
use kvferry_tests::engine::named;
use kvferry_tests::geometry;
use kvferry_tests::node::{Cluster, Options};

/// A node with engines that must go on, whatever others do.
async fn bystanders(options: Options) -> (Cluster, Bystanders) {
    let cluster = Cluster::new();
    let node = cluster.start("a", options).await;
    let bystanders = Bystanders::on(vec![node]).await;
    (cluster, bystanders)
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

/// Of the smallest engine.
fn small() -> Envelope {
    named(&geometry::small(), "small", Role::Both)
}

const SMALL: u64 = 8_192;

fn lists(pages: &[u32]) -> PageLists {
    PageLists {
        groups: vec![pages.to_vec()],
    }
}
