//! What single inputs cost the one task that drives a broker: `cargo bench -p kvferry-broker`.
//!
//! While it handles one, every other engine and peer waits. Writing short messages counts; reading them, validating
//! envelopes, writing long messages and moving bytes is done by others.

#![allow(missing_docs, clippy::unwrap_used)]

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_broker::{
    Body, Broker, Config, Input, Limits, Output, PeerAddress, PeerMessage, RegionKey, SessionId, Stated,
};
use kvferry_control::{Answer, Call, Fetch, Publish, TransferId};
use kvferry_handshake::{
    Allocation, Envelope, Launch, ModelShape, PageLists, Policy, Ready, Role, TokenRange,
};

/// Longest and summed time, and how many.
type Costs = BTreeMap<String, (Duration, Duration, u32)>;

struct Nodes {
    brokers: Vec<Broker>,
    messages: VecDeque<(usize, usize, PeerMessage)>,
    generations: BTreeMap<SessionId, Vec<(u16, u64)>>,
    pending: BTreeMap<(SessionId, u64), u16>,
    number: u64,
    costs: Costs,
    failures: Vec<String>,
}

fn address(node: usize) -> PeerAddress {
    PeerAddress(Arc::from(format!("node{node}:7400")))
}

impl Nodes {
    fn new(count: usize) -> Nodes {
        let broker = |node: usize| {
            Broker::new(Config {
                address: address(node),
                incarnation: 1,
                policy: Policy::Strict,
                deadline_us: 30_000_000,
                lease_us: 30_000_000,
                max_transfers_per_rank: 1024,
                max_ranks: 4096,
                require_rdma: false,
                limits: Limits::default(),
            })
        };
        Nodes {
            brokers: (0..count).map(broker).collect(),
            messages: VecDeque::new(),
            generations: BTreeMap::new(),
            pending: BTreeMap::new(),
            number: 0,
            costs: Costs::new(),
            failures: Vec::new(),
        }
    }

    fn input(&mut self, node: usize, what: String, input: Input) {
        let began = Instant::now();
        self.brokers[node].handle(1, input);
        let mut spent = began.elapsed();
        loop {
            let began = Instant::now();
            let Some(output) = self.brokers[node].poll() else {
                break;
            };
            match output {
                Output::Send { peer, message } => {
                    let to = (0..self.brokers.len())
                        .find(|node| address(*node) == peer)
                        .unwrap();
                    if to != node && message.long().is_none() {
                        std::hint::black_box(message.to_bytes().unwrap());
                    }
                    spent += began.elapsed();
                    self.messages.push_back((node, to, message));
                }
                Output::Answer {
                    session,
                    number,
                    answer,
                } => match (answer, self.pending.remove(&(session, number))) {
                    (Ok(Answer::Registered { generation, .. }), Some(region)) => {
                        self.generations
                            .entry(session)
                            .or_default()
                            .push((region, generation));
                    }
                    (Ok(_), _) => {}
                    (Err(fault), _) => self.failures.push(fault.to_string()),
                },
                _ => {}
            }
        }
        let cost = self.costs.entry(what).or_default();
        *cost = (cost.0.max(spent), cost.1 + spent, cost.2 + 1);
    }

    fn settle(&mut self) {
        while let Some((from, to, message)) = self.messages.pop_front() {
            let input = Input::Peer {
                peer: address(from),
                incarnation: 1,
                message,
            };
            let Input::Peer { message, .. } = &input else {
                continue;
            };
            self.input(to, kind(&message.body), input);
        }
    }

    fn call(&mut self, node: usize, session: SessionId, call: Call) {
        self.number += 1;
        let what = format!("{call:?}")
            .chars()
            .take_while(|c| c.is_alphabetic())
            .collect();
        let input = Input::Call {
            session,
            number: self.number,
            call,
        };
        self.input(node, what, input);
    }

    /// Attaches an engine, rank `r` at node `at(r)`; its sessions.
    fn attach(&mut self, envelope: &Envelope, first: u64, at: impl Fn(u32) -> usize) -> Vec<SessionId> {
        let mut sessions = Vec::new();
        for rank in &envelope.ranks {
            let (session, node) = (SessionId(first + u64::from(rank.rank)), at(rank.rank));
            let home = (node != at(0)).then(|| address(at(0)).0.to_string());
            let envelope = Box::new(envelope.clone());
            let rank = rank.rank;
            self.number += 1;
            let (number, what) = (self.number, "Attach".to_owned());
            let envelope = Stated::new(*envelope);
            let input = Input::Attach {
                session,
                number,
                envelope,
                rank,
                home,
            };
            self.input(node, what, input);
            self.settle();
            sessions.push(session);
        }
        sessions
    }

    fn register(&mut self, envelope: &Envelope, rank: u32, node: usize, session: SessionId) {
        for (region, len) in envelope.region_bytes(rank) {
            self.number += 1;
            self.pending.insert((session, self.number), region);
            let input = Input::Registered {
                session,
                number: self.number,
                region,
                key: RegionKey(self.number),
                len,
                paths: Vec::new(),
            };
            self.input(node, "Registered".to_owned(), input);
        }
    }

    fn report(&mut self, scene: &str) {
        println!("{scene}");
        for (what, (most, sum, count)) in &self.costs {
            println!(
                "  {what:<12} {count:>5} times, longest {:>8.3} ms, together {:>9.3} ms",
                most.as_secs_f64() * 1e3,
                sum.as_secs_f64() * 1e3
            );
        }
        for failure in &self.failures {
            println!("  failed: {failure}");
        }
        self.costs.clear();
    }
}

fn kind(body: &Body) -> String {
    let name = match body {
        Body::Join { .. } => "Join",
        Body::Joined { .. } => "Joined",
        Body::LinkOpen { .. } => "LinkOpen",
        Body::LinkAnswer(_) => "LinkAnswer",
        Body::LinkOffer { .. } => "LinkOffer",
        Body::Announce(_) => "Announce",
        Body::PartState { .. } => "PartState",
        _ => "another",
    };
    name.to_owned()
}

fn engine(name: &str, role: Role, model: &ModelShape, tp: u32, page_size: u32, pool: u32) -> Envelope {
    Launch {
        engine: name.to_owned(),
        role,
        tp,
        page_size,
        pool_pages: pool,
        ..Launch::default()
    }
    .envelope(model)
    .unwrap()
}

/// One fetch of `tokens` by rank 0 of an engine of `tp` ranks, from one whose ranks are on `daemons` nodes.
fn transfer(tp: u32, daemons: usize, page_size: u32, tokens: u64) {
    let model = ModelShape::new("meta-llama/Llama-3.1-70B", 80).kv(0..80, 8, 128);
    let pages = u32::try_from(tokens.div_ceil(u64::from(page_size))).unwrap();
    let prefill = engine("p", Role::Prefill, &model, tp, page_size, pages + 7);
    let decode = engine("d", Role::Decode, &model, tp, page_size, pages + 7);
    let mut nodes = Nodes::new(daemons + 1);
    let at = |rank: u32| rank as usize * daemons / tp as usize;
    let from = nodes.attach(&prefill, 1, at);
    let to = nodes.attach(&decode, 10_000, |_| daemons);
    for (rank, session) in (0u32..).zip(&from) {
        nodes.register(&prefill, rank, at(rank), *session);
    }
    nodes.register(&decode, 0, daemons, to[0]);
    nodes.settle();
    nodes.costs.clear();
    let lists = PageLists {
        groups: vec![(0..pages).rev().collect()],
    };
    for round in ["first", "second"] {
        let transfer = TransferId::from(round);
        for (rank, session) in (0u32..).zip(&from) {
            let publish = Publish {
                transfer: transfer.clone(),
                pages: Some(lists.clone()),
                generations: nodes.generations[session].clone(),
                ready: Ready::complete(tokens),
                metadata: None,
                serves: 1,
            };
            nodes.call(at(rank), *session, Call::Publish(publish));
            nodes.settle();
        }
        let fetch = Fetch {
            source: format!("kvferry://{}/p", address(0).0),
            transfer,
            pages: PageLists {
                groups: vec![(0..pages).rev().collect()],
            },
            generations: nodes.generations[&to[0]].clone(),
            tokens: TokenRange { from: 0, to: tokens },
            least: tokens,
        };
        nodes.call(daemons, to[0], Call::Fetch(fetch));
        nodes.settle();
        nodes.report(&format!(
            "{round} fetch of {tokens} tokens, page {page_size}, TP{tp} on {daemons} daemons"
        ));
    }
}

fn attach(scene: &str, envelope: &Envelope, ranks: usize) {
    let mut nodes = Nodes::new(2);
    for (rank, node) in [(0u32, 0usize), (1, 1)].into_iter().take(ranks) {
        nodes.number += 1;
        let input = Input::Attach {
            session: SessionId(u64::from(rank) + 1),
            number: nodes.number,
            envelope: Stated::new(envelope.clone()),
            rank,
            home: (node != 0).then(|| address(0).0.to_string()),
        };
        nodes.input(node, "Attach".to_owned(), input);
        nodes.settle();
    }
    let began = Instant::now();
    envelope.validate().unwrap();
    let validated = began.elapsed();
    let bytes = kvferry_handshake::encode(envelope).unwrap().len();
    nodes.report(&format!(
        "attach, {scene}: {bytes} bytes, validated in {:.3} ms",
        validated.as_secs_f64() * 1e3
    ));
}

fn main() {
    transfer(8, 1, 16, 128 << 10);
    transfer(8, 8, 1, 128 << 10);
    transfer(8, 8, 1, 1 << 20);
    transfer(64, 8, 16, 128 << 10);
    let llama = ModelShape::new("meta-llama/Llama-3.1-70B", 80).kv(0..80, 8, 128);
    attach("TP8", &engine("p", Role::Prefill, &llama, 8, 16, 1 << 14), 2);
    let tp64 = engine("p", Role::Prefill, &llama, 64, 16, 1 << 14);
    attach("TP64", &tp64, 2);
    link("TP64", &tp64);
    let wide = ModelShape::new("wide", 256).kv(0..256, 1024, 128);
    let widest = Launch {
        tp: 1024,
        pool_pages: 64,
        allocation: Allocation::PageMajor,
        ..Launch::default()
    };
    let widest = widest.envelope(&wide).unwrap();
    attach("TP1024, 256 layers: as much as may be placed", &widest, 2);
    link("TP1024", &widest);
}

/// What both daemons do once for a pair of engines.
fn link(scene: &str, envelope: &Envelope) {
    let began = Instant::now();
    let (verdict, plan) = kvferry_plan::judge(envelope, envelope, Policy::Strict);
    println!(
        "judge, {scene}: {:?} in {:.3} ms",
        verdict.outcome,
        began.elapsed().as_secs_f64() * 1e3
    );
    drop(plan);
}
