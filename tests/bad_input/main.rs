//! What engines can do wrong: each gets a code and a message that names what is wrong, nothing is left half done, and
//! everyone else goes on.

#![allow(clippy::unwrap_used, missing_docs)] // a panic here is a failed test

mod attachments;
mod bounds;
mod memory;
mod transfers;

use kvferry_client::{ClientError, Fault};
use kvferry_handshake::{Code, Envelope, Launch, ModelShape, PageLists, Ready, Role};
use kvferry_tests::engine::{Carry, Engine, named};
use kvferry_tests::geometry::{launch, llama_8b};
use kvferry_tests::memory::Kind;
use kvferry_tests::node::{Cluster, Footprint, Node, Options};

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
