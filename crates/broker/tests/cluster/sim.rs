//! The simulation: nodes with a broker and a data plane each, a network between them, and time.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvferry_broker::{
    Body, Broker, Config, DataEvent, Input, Limits, Output, PeerAddress, PeerMessage, SessionId,
};
use kvferry_control::{Call, Fault};
use kvferry_handshake::{Code, Policy};
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};

use crate::data::{Act, DataPlane, Later, Troubles};
use crate::engines::{Engine, SimRank};
use crate::ledger::Ledger;

/// Progress deadline of all brokers.
pub(crate) const DEADLINE: u64 = 4_000_000;
/// Lease of all publishes.
pub(crate) const LEASE: u64 = 6_000_000;

/// How the network behaves.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Net {
    /// Messages of a hundred that are lost.
    pub(crate) lost: u32,
    /// Messages of a hundred that come twice.
    pub(crate) twice: u32,
    /// Longest delay; messages overtake each other within it.
    pub(crate) delay: u64,
    /// Whether messages to oneself fare the same.
    pub(crate) loops_too: bool,
}

/// One machine.
#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) address: PeerAddress,
    pub(crate) life: u64,
    /// `None` while it is down.
    pub(crate) broker: Option<Broker>,
    pub(crate) data: DataPlane,
    /// Peers that it has a channel with: (node, the peer's life).
    pub(crate) channels: BTreeMap<usize, u64>,
    /// Where it differs from the others'.
    config: Option<Config>,
}

/// What happens later.
#[derive(Debug)]
enum Happening {
    Deliver {
        to: usize,
        from: usize,
        from_life: u64,
        message: Box<PeerMessage>,
    },
    Up {
        at: usize,
        life: u64,
        peer: usize,
        peer_life: u64,
    },
    Down {
        at: usize,
        life: u64,
        peer: usize,
        cause: Fault,
    },
    Data {
        at: usize,
        life: Option<u64>,
        later: Later,
    },
    Report {
        at: usize,
        life: u64,
        event: DataEvent,
    },
    Action(Action),
}

/// What the scenario does later.
#[derive(Clone, Debug)]
pub(crate) enum Action {
    Attach(usize),
    Step {
        rank: usize,
        script: usize,
    },
    Fetch {
        rank: usize,
        script: usize,
    },
    Abort {
        rank: usize,
        script: usize,
    },
    Hint {
        rank: usize,
        script: usize,
        decline: bool,
    },
    Disconnect(usize),
    Unregister(usize),
    Crash(usize),
    Restart(usize),
    Cut(usize, usize),
    /// The rank comes back with another envelope than its engine's.
    Disagree(usize),
    /// The daemon is asked to end.
    Shutdown(usize),
}

type Tamper = dyn FnMut(usize, &mut PeerMessage) -> bool + Send;

/// The whole of it.
pub(crate) struct Cluster {
    pub(crate) now: u64,
    pub(crate) rng: SmallRng,
    queue: BTreeMap<(u64, u64), Happening>,
    sequence: u64,
    pub(crate) nodes: Vec<Node>,
    pub(crate) net: Net,
    pub(crate) engines: Vec<Engine>,
    pub(crate) ranks: Vec<SimRank>,
    pub(crate) ledger: Ledger,
    next_life: u64,
    next_session: u64,
    pub(crate) next_region: u64,
    pub(crate) next_call: u64,
    pub(crate) config: Config,
    pub(crate) trace: bool,
    /// Scenario actions that came due, for the scenario to do.
    pub(crate) due: Vec<Action>,
    /// Ranks that were refused or taken back, or whose daemon came back.
    pub(crate) unattached: Vec<usize>,
    /// Messages to a node that was down.
    pub(crate) to_the_dead: u64,
    /// What peers said that they must not: (who noticed, kind).
    pub(crate) violations: Vec<(usize, &'static str)>,
    /// What broker messages were sent, by kind.
    pub(crate) said: BTreeMap<String, u64>,
    /// Changes messages on their way, from the node named; false loses them.
    pub(crate) tamper: Option<Box<Tamper>>,
    /// Whether an attached rank registers its regions by itself.
    pub(crate) registers: bool,
    /// Generations to claim instead of the true ones.
    pub(crate) claims: Option<Vec<(u16, u64)>>,
}

impl Cluster {
    pub(crate) fn new(seed: u64, nodes: usize) -> Cluster {
        let config = Config {
            address: PeerAddress(Arc::from("unset:1")),
            incarnation: 0,
            policy: Policy::Strict,
            deadline_us: DEADLINE,
            lease_us: LEASE,
            max_transfers_per_rank: 16,
            max_ranks: 16,
            require_rdma: false,
            limits: Limits::default(),
        };
        let mut cluster = Cluster {
            now: 1,
            rng: SmallRng::seed_from_u64(seed),
            queue: BTreeMap::new(),
            sequence: 0,
            nodes: Vec::new(),
            net: Net {
                lost: 0,
                twice: 0,
                delay: 100,
                loops_too: false,
            },
            engines: Vec::new(),
            ranks: Vec::new(),
            ledger: Ledger::default(),
            next_life: 1000,
            next_session: 1,
            next_region: 1,
            next_call: 1,
            config,
            trace: std::env::var_os("TRACE").is_some(),
            due: Vec::new(),
            unattached: Vec::new(),
            to_the_dead: 0,
            violations: Vec::new(),
            said: BTreeMap::new(),
            tamper: None,
            registers: true,
            claims: None,
        };
        for number in 0..nodes {
            cluster.nodes.push(Node {
                address: PeerAddress(Arc::from(format!("node{number}:7400"))),
                life: 0,
                broker: None,
                data: DataPlane::default(),
                channels: BTreeMap::new(),
                config: None,
            });
            cluster.boot(number);
        }
        cluster
    }

    /// The same with other settings for every daemon.
    pub(crate) fn with(seed: u64, nodes: usize, set: impl Fn(usize, &mut Config)) -> Cluster {
        let mut cluster = Cluster::new(seed, nodes);
        for number in 0..nodes {
            let mut config = cluster.node_config(number);
            set(number, &mut config);
            cluster.boot_with(number, config);
        }
        cluster
    }

    pub(crate) fn node_config(&self, number: usize) -> Config {
        let node = &self.nodes[number];
        Config {
            address: node.address.clone(),
            incarnation: node.life,
            ..node.config.clone().unwrap_or(self.config.clone())
        }
    }

    pub(crate) fn boot_with(&mut self, number: usize, config: Config) {
        self.nodes[number].config = Some(config.clone());
        self.nodes[number].broker = Some(Broker::new(config));
    }

    /// Starts a daemon, in a new life.
    pub(crate) fn boot(&mut self, number: usize) {
        self.next_life += 1;
        self.nodes[number].life = self.next_life;
        let troubles = self.nodes[number].data.troubles;
        self.nodes[number].data = DataPlane::default();
        self.nodes[number].data.troubles = troubles;
        self.nodes[number].broker = Some(Broker::new(self.node_config(number)));
    }

    /// Ends a daemon without a word.
    pub(crate) fn crash(&mut self, number: usize) {
        if self.nodes[number].broker.take().is_none() {
            return;
        }
        self.note(format!("node {number} crashes"));
        self.nodes[number].channels.clear();
        self.ledger.node_died(number);
        for rank in 0..self.ranks.len() {
            if self.ranks[rank].node == number {
                if let Some(session) = self.ranks[rank].session {
                    self.ledger.session_died(rank, session);
                }
                self.rank_lost(rank);
            }
        }
        for peer in 0..self.nodes.len() {
            if self.nodes[peer].channels.remove(&number).is_some() {
                let cause = Fault::new(Code::PeerLost, "the connection was reset");
                self.later(
                    50,
                    Happening::Down {
                        at: peer,
                        life: self.nodes[peer].life,
                        peer: number,
                        cause,
                    },
                );
            }
        }
    }

    /// Breaks the channel between two nodes; both notice.
    pub(crate) fn cut(&mut self, a: usize, b: usize) {
        for (at, peer) in [(a, b), (b, a)] {
            if self.nodes[at].channels.remove(&peer).is_some() {
                let cause = Fault::new(Code::PeerLost, "the connection was reset");
                let delay = self.rng.random_range(1..5_000);
                self.later(
                    delay,
                    Happening::Down {
                        at,
                        life: self.nodes[at].life,
                        peer,
                        cause,
                    },
                );
            }
        }
    }

    pub(crate) fn troubles(&mut self, troubles: Troubles) {
        for node in &mut self.nodes {
            node.data.troubles = troubles;
        }
    }

    /// From now on no new job moves anything.
    pub(crate) fn stall(&mut self) {
        for node in &mut self.nodes {
            node.data.troubles.stalled = 100;
        }
    }

    pub(crate) fn unstall(&mut self) {
        for node in &mut self.nodes {
            node.data.troubles.stalled = 0;
        }
    }

    pub(crate) fn note(&self, what: String) {
        if self.trace {
            eprintln!("{:>10} {what}", self.now);
        }
    }

    fn later(&mut self, delay: u64, happening: Happening) {
        self.sequence += 1;
        self.queue.insert((self.now + delay, self.sequence), happening);
    }

    pub(crate) fn act_later(&mut self, delay: u64, action: Action) {
        self.later(delay, Happening::Action(action));
    }

    pub(crate) fn new_session(&mut self, node: usize) -> SessionId {
        // Sessions are never reused, not even by the next life of the daemon.
        self.next_session += 1;
        assert!(self.nodes[node].broker.is_some(), "nobody listens at node {node}");
        SessionId(self.next_session)
    }

    /// Tells a node's broker something, and does what it wants.
    pub(crate) fn input(&mut self, node: usize, input: Input) {
        let now = self.now;
        if self.trace {
            self.note(format!("-> {node} {}", short(&input)));
        }
        if let Some(broker) = &mut self.nodes[node].broker {
            broker.handle(now, input);
            self.drain(node);
        }
    }

    pub(crate) fn call(&mut self, node: usize, session: SessionId, call: Call) -> u64 {
        self.next_call += 1;
        let number = self.next_call;
        self.input(
            node,
            Input::Call {
                session,
                number,
                call,
            },
        );
        number
    }

    fn drain(&mut self, node: usize) {
        while let Some(output) = self.nodes[node].broker.as_mut().and_then(Broker::poll) {
            if self.trace {
                self.note(format!("<- {node} {}", short(&output)));
            }
            match output {
                Output::Answer {
                    session,
                    number,
                    answer,
                } => self.answered(node, session, number, answer),
                Output::Event { session, event } => self.event(node, session, event),
                Output::Send { peer, message } => self.send(node, &peer, message),
                Output::Data(command) => {
                    let acts = self.nodes[node].data.command(command, &mut self.rng);
                    self.act(node, acts);
                }
                Output::Release { key } => self.released(node, key),
                Output::Record(record) => self.recorded(node, record),
                Output::Violation { kind, .. } => self.violations.push((node, kind)),
            }
        }
    }

    fn send(&mut self, from: usize, peer: &PeerAddress, message: PeerMessage) {
        let from_life = self.nodes[from].life;
        *self.said.entry(kind(&message.body)).or_default() += 1;
        let mut message = message;
        if let Some(mut tamper) = self.tamper.take() {
            let arrives = tamper(from, &mut message);
            self.tamper = Some(tamper);
            if !arrives {
                return self.note("   lost".to_owned());
            }
        }
        let bytes = message.to_bytes().expect("it has a wire form");
        let message = PeerMessage::from_bytes(&bytes).expect("what a broker says is within its bounds");
        let to = self.nodes.iter().position(|node| node.address == *peer);
        let up = |to: &usize| self.nodes[*to].broker.is_some();
        let Some(to) = to.filter(up) else {
            self.to_the_dead += 1;
            let cause = Fault::new(Code::PeerUnreachable, "connection refused");
            let Some(peer) = to else {
                let down = Input::PeerDown {
                    peer: peer.clone(),
                    cause,
                };
                // Nobody is at that address at all; at once is as good as later.
                return self.input(from, down);
            };
            self.later(
                100,
                Happening::Down {
                    at: from,
                    life: from_life,
                    peer,
                    cause,
                },
            );
            return;
        };
        let loops = to == from;
        if !loops && self.nodes[from].channels.get(&to) != Some(&self.nodes[to].life) {
            for (at, peer) in [(from, to), (to, from)] {
                let (life, peer_life) = (self.nodes[at].life, self.nodes[peer].life);
                self.nodes[at].channels.insert(peer, peer_life);
                self.later(
                    0,
                    Happening::Up {
                        at,
                        life,
                        peer,
                        peer_life,
                    },
                );
            }
        }
        let net = self.net;
        let faulty = !loops || net.loops_too;
        if faulty && self.rng.random_range(0..100) < net.lost {
            return self.note("   lost".to_owned());
        }
        let copies = 1 + usize::from(faulty && self.rng.random_range(0..100) < net.twice);
        for _ in 0..copies {
            let delay = if faulty {
                self.rng.random_range(1..=net.delay.max(1))
            } else {
                1
            };
            self.later(
                delay,
                Happening::Deliver {
                    to,
                    from,
                    from_life,
                    message: Box::new(message.clone()),
                },
            );
        }
    }

    fn act(&mut self, node: usize, acts: Vec<Act>) {
        let life = self.nodes[node].life;
        self.check_touched(node);
        for act in acts {
            match act {
                Act::Later(delay, later) => self.later(
                    delay,
                    Happening::Data {
                        at: node,
                        life: Some(life),
                        later,
                    },
                ),
                Act::At(peer, life, delay, later) => {
                    if let Some(at) = self.nodes.iter().position(|node| node.address == peer) {
                        self.later(delay, Happening::Data { at, life, later });
                    }
                }
                Act::Report(event) => self.later(
                    1,
                    Happening::Report {
                        at: node,
                        life,
                        event,
                    },
                ),
            }
        }
    }

    /// Lets the next thing happen, if it does until `until`.
    pub(crate) fn step(&mut self, until: u64) -> bool {
        let tick = (0..self.nodes.len())
            .filter_map(|node| Some((self.nodes[node].broker.as_ref()?.next_deadline()?, node)))
            .min();
        let next = self.queue.first_key_value().map(|((at, _), _)| *at);
        match (tick, next) {
            (Some((at, node)), next) if next.is_none_or(|next| at < next) => {
                if at > until {
                    return false;
                }
                self.now = self.now.max(at);
                let now = self.now;
                if let Some(broker) = &mut self.nodes[node].broker {
                    broker.tick(now);
                    self.drain(node);
                }
            }
            (_, Some(next)) if next <= until => {
                self.now = self.now.max(next);
                if let Some((_, happening)) = self.queue.pop_first() {
                    self.happen(happening);
                }
            }
            _ => return false,
        }
        true
    }

    fn happen(&mut self, happening: Happening) {
        match happening {
            Happening::Deliver {
                to,
                from,
                from_life,
                message,
            } => {
                let peer = self.nodes[from].address.clone();
                self.input(
                    to,
                    Input::Peer {
                        peer,
                        incarnation: from_life,
                        message: *message,
                    },
                );
            }
            Happening::Up {
                at,
                life,
                peer,
                peer_life,
            } => {
                if self.nodes[at].life == life {
                    let peer = self.nodes[peer].address.clone();
                    self.input(
                        at,
                        Input::PeerUp {
                            peer,
                            incarnation: peer_life,
                        },
                    );
                }
            }
            Happening::Down {
                at,
                life,
                peer,
                cause,
            } => {
                if self.nodes[at].life == life {
                    let peer = self.nodes[peer].address.clone();
                    self.input(at, Input::PeerDown { peer, cause });
                }
            }
            Happening::Data { at, life, later } => {
                let node = &mut self.nodes[at];
                if node.broker.is_some() && life.is_none_or(|life| life == node.life) {
                    let (address, own_life) = (node.address.clone(), node.life);
                    let acts = node.data.later((&address, own_life), later, &mut self.rng);
                    self.act(at, acts);
                }
            }
            Happening::Report { at, life, event } => {
                if self.nodes[at].life == life {
                    self.input(at, Input::Data(event));
                }
            }
            Happening::Action(action) => self.due.push(action),
        }
    }

    /// Lets `time` pass.
    pub(crate) fn run_for(&mut self, time: u64) {
        let until = self.now + time;
        while self.step(until) {}
        self.now = until;
    }

    /// Lets time pass until something holds; false if it does not within `time`.
    pub(crate) fn run_until(&mut self, time: u64, holds: impl Fn(&Cluster) -> bool) -> bool {
        let until = self.now + time;
        while !holds(self) {
            if !self.step(until) {
                return holds(self);
            }
        }
        true
    }

    pub(crate) fn counts(&self, node: usize) -> BTreeMap<String, u64> {
        let broker = self.nodes[node].broker.as_ref().expect("the node is up");
        broker.counts().into_iter().collect()
    }
}

/// The kind of a message, and of the state that it tells.
pub(crate) fn kind(body: &Body) -> String {
    let text = match body {
        Body::PartState { state, .. } => format!("Part{state:?}"),
        Body::FetchState { state, .. } => format!("Fetch{state:?}"),
        Body::Join { .. } => "Join".to_owned(),
        Body::LinkOpen { .. } => "LinkOpen".to_owned(),
        other => format!("{other:?}"),
    };
    text.split([' ', '(']).next().unwrap_or_default().to_owned()
}

/// A line of a trace.
fn short(what: &impl std::fmt::Debug) -> String {
    let text = format!("{what:?}");
    text.chars().take(300).collect()
}
