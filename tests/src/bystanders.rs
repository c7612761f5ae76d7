//! Engines that must go on whatever others do, and nodes that must hold nothing for those others.

use std::sync::atomic::{AtomicU32, Ordering};

use kvferry_handshake::Role;

use crate::engine::{Carry, Engine, named};
use crate::geometry::{launch, llama_8b};
use crate::memory::Kind;
use crate::node::{Footprint, Node};

/// A prefill engine on the first node, a decode engine beside it, and one on the second node, if there is one.
#[derive(Debug)]
pub struct Bystanders {
    /// The nodes.
    pub nodes: Vec<Node>,
    /// What the nodes held when only the bystanders were there, having carried something.
    pub before: Vec<Footprint>,
    /// Prefill, on the first node.
    pub prefill: Engine,
    /// Decode, on the first node.
    pub near: Engine,
    /// Decode, on the second.
    pub far: Option<Engine>,
    turn: AtomicU32,
}

impl Bystanders {
    /// Attaches them.
    pub async fn on(nodes: Vec<Node>) -> Bystanders {
        let envelope = launch(1, 16).envelope(&llama_8b()).unwrap();
        let attach = async |name: &str, role, node: &Node| {
            Engine::attach(named(&envelope, name, role), &[node], Kind::Memfd).await
        };
        let far = match nodes.get(1) {
            Some(node) => Some(attach("far", Role::Decode, node).await),
            None => None,
        };
        let mut bystanders = Bystanders {
            prefill: attach("prefill", Role::Prefill, &nodes[0]).await,
            near: attach("near", Role::Decode, &nodes[0]).await,
            far,
            nodes,
            before: Vec::new(),
            turn: AtomicU32::new(0),
        };
        bystanders.carry().await;
        for node in &bystanders.nodes {
            bystanders.before.push(node.footprint().await);
        }
        bystanders
    }

    fn decodes(&self) -> impl Iterator<Item = &Engine> {
        self.far.iter().chain([&self.near])
    }

    /// Carries a prompt to each decode engine.
    pub async fn carry(&self) {
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        for decode in self.decodes() {
            let carry = Carry {
                // Each transfer id once at the prefill engine.
                transfer: &format!("bystanders {turn} {}", decode.name()),
                tokens: 333,
                held: 0,
                sparse: false,
                fetch_first: turn.is_multiple_of(2),
                path: None,
            };
            carry.run(&self.prefill, decode).await;
        }
    }

    /// No byte of their pools is wrong.
    pub fn check_all(&self, what: &str) {
        for engine in self.decodes().chain([&self.prefill]) {
            engine.check_all(what);
        }
    }

    /// The nodes hold what they held before, and the engines go on.
    pub async fn go_on(&self) {
        for (node, before) in self.nodes.iter().zip(&self.before) {
            node.settles_to(before).await;
        }
        self.carry().await;
        self.check_all("bystanders");
    }
}
