//! Two brokers that hold the same meeting every time: what they say to each other is where fuzzing of the peers' channel
//! starts, and each of them is what the fuzzed messages are said to.

#![forbid(unsafe_code)]

use std::sync::Arc;

use kvferry_broker::{
    Broker, Config, DataCommand, DataEvent, Input, Limits, Micros, Output, PeerAddress, PeerMessage,
    RegionKey, SessionId, Tally,
};
use kvferry_control::{Answer, Call, Fault, Fetch, Path, Publish, TransferId};
use kvferry_handshake::{
    Code, Envelope, Launch, ModelShape, PageLists, Policy, Ready, Role, TokenRange, frame,
};

/// Which of the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Who {
    /// The daemon of a prefill engine, with a publish.
    Prefill,
    /// The daemon of a decode engine, with a fetch.
    Decode,
}

impl Who {
    fn other(self) -> Who {
        match self {
            Who::Prefill => Who::Decode,
            Who::Decode => Who::Prefill,
        }
    }

    fn address(self) -> PeerAddress {
        PeerAddress(Arc::from(match self {
            Who::Prefill => "10.0.0.1:7460",
            Who::Decode => "10.0.0.2:7460",
        }))
    }

    fn incarnation(self) -> u64 {
        match self {
            Who::Prefill => 1,
            Who::Decode => 2,
        }
    }
}

/// One broker, its engine attached and registered, and its data plane played.
#[derive(Debug)]
pub struct Node {
    who: Who,
    broker: Broker,
    now: Micros,
    /// What it said to the other.
    said: Vec<PeerMessage>,
    /// Generations that `register` was answered with, in order.
    generations: Vec<u64>,
    /// The first call that was refused.
    refused: Option<Fault>,
}

const SESSION: SessionId = SessionId(1);
const TOKENS: u64 = 10;

fn transfer() -> TransferId {
    TransferId {
        id: "req-1".to_owned(),
        attempt: 0,
    }
}

/// The engine of one side: a small model, one rank.
fn envelope(who: Who) -> anyhow::Result<Envelope> {
    let (engine, role) = match who {
        Who::Prefill => ("prefill", Role::Prefill),
        Who::Decode => ("decode", Role::Decode),
    };
    let shape = ModelShape::new("m", 2).kv(0..2, 2, 4);
    let launch = Launch {
        engine: engine.to_owned(),
        role,
        page_size: 4,
        pool_pages: 8,
        ..Launch::default()
    };
    Ok(launch.envelope(&shape)?)
}

impl Node {
    /// Attaches the engine, registers its memory, and publishes or fetches.
    pub fn new(who: Who) -> anyhow::Result<Node> {
        let config = Config {
            address: who.address(),
            incarnation: who.incarnation(),
            policy: Policy::Strict,
            deadline_us: 5_000_000,
            lease_us: 5_000_000,
            max_transfers_per_rank: 64,
            max_ranks: 8,
            require_rdma: false,
            limits: Limits {
                pages: 1 << 16,
                pages_per_transfer: 1 << 12,
                ended: 64,
                declines: 64,
                ..Limits::default()
            },
        };
        let mut node = Node {
            who,
            broker: Broker::new(config),
            now: 1,
            said: Vec::new(),
            refused: None,
            generations: Vec::new(),
        };
        let envelope = envelope(who)?;
        let regions = envelope.region_bytes(0);
        node.call(Call::Attach {
            envelope: Box::new(envelope),
            rank: 0,
            home: None,
        });
        for (number, (&region, &len)) in (1u64..).zip(&regions) {
            node.handle(Input::Registered {
                session: SESSION,
                number,
                region,
                key: RegionKey(number),
                len,
                paths: vec![Path::Local, Path::Tcp],
            });
        }
        let generations: Vec<(u16, u64)> = regions
            .into_keys()
            .zip(node.generations.iter().copied())
            .collect();
        let pages = PageLists {
            groups: vec![vec![5, 0, 3]],
        };
        match who {
            Who::Prefill => node.call(Call::Publish(Publish {
                transfer: transfer(),
                pages: Some(pages),
                generations,
                ready: Ready::complete(TOKENS),
                metadata: Some(b"token".to_vec()),
                serves: 1,
            })),
            Who::Decode => node.call(Call::Fetch(Fetch {
                source: format!("kvferry://{}/prefill", Who::Prefill.address().0),
                transfer: transfer(),
                pages,
                generations,
                tokens: TokenRange { from: 4, to: TOKENS },
                least: TOKENS,
            })),
        }
        match node.refused.take() {
            Some(fault) => Err(fault.into()),
            None => Ok(node),
        }
    }

    fn call(&mut self, call: Call) {
        self.handle(Input::Call {
            session: SESSION,
            number: 7,
            call,
        });
    }

    fn handle(&mut self, input: Input) {
        self.now += 1;
        self.broker.handle(self.now, input);
        self.carry_out();
    }

    /// Hears a message of the other.
    pub fn hear(&mut self, message: PeerMessage) {
        let other = self.who.other();
        self.handle(Input::Peer {
            peer: other.address(),
            incarnation: other.incarnation(),
            message,
        });
    }

    /// Does what the broker wants. Every job's bytes are there at once.
    fn carry_out(&mut self) {
        // Messages to itself and the data plane's answers lead to more; no input leads to many.
        for _ in 0..100_000 {
            let Some(output) = self.broker.poll() else { return };
            match output {
                Output::Send { peer, message } if peer == self.who.address() => {
                    let incarnation = self.who.incarnation();
                    self.broker.handle(
                        self.now,
                        Input::Peer {
                            peer,
                            incarnation,
                            message,
                        },
                    );
                }
                Output::Send { peer, message } if peer == self.who.other().address() => {
                    self.said.push(message)
                }
                Output::Send { peer, .. } => {
                    let cause = Fault::new(Code::PeerUnreachable, "there are only two");
                    self.broker.handle(self.now, Input::PeerDown { peer, cause });
                }
                Output::Data(command) => {
                    if let Some(event) = played(&command) {
                        self.broker.handle(self.now, Input::Data(event));
                    }
                }
                Output::Answer {
                    answer: Ok(Answer::Registered { generation, .. }),
                    ..
                } => {
                    self.generations.push(generation);
                }
                Output::Answer {
                    answer: Err(fault), ..
                } => {
                    self.refused.get_or_insert(fault);
                }
                Output::Answer { .. }
                | Output::Event { .. }
                | Output::Release { .. }
                | Output::Record(_)
                | Output::Violation { .. } => {}
            }
        }
        panic!("the broker does not come to rest");
    }

    /// Lets the engine and the other daemon go, and time pass: whatever was said, nothing may be left.
    pub fn end(mut self) {
        self.handle(Input::Disconnected { session: SESSION });
        let cause = Fault::new(Code::PeerLost, "gone");
        self.handle(Input::PeerDown {
            peer: self.who.other().address(),
            cause,
        });
        for _ in 0..1000 {
            if self.broker.is_idle() {
                return;
            }
            match self.broker.next_deadline() {
                Some(due) => self.now = self.now.max(due),
                None => break,
            }
            self.broker.tick(self.now);
            self.carry_out();
        }
        panic!("something is left under way: {:?}", self.broker.counts());
    }
}

fn played(command: &DataCommand) -> Option<DataEvent> {
    match command {
        DataCommand::Close { job } => Some(DataEvent::Closed {
            job: *job,
            tally: Tally::default(),
        }),
        DataCommand::End { job, .. } => Some(DataEvent::Complete { job: *job }),
        DataCommand::Ready { job, ready, .. } if ready.end.is_some() => {
            Some(DataEvent::Complete { job: *job })
        }
        _ => None,
    }
}

/// The meeting as each of the two hears it: a byte that tells who hears, then frames.
pub fn talks() -> anyhow::Result<Vec<Vec<u8>>> {
    let mut nodes = [Node::new(Who::Prefill)?, Node::new(Who::Decode)?];
    let mut heard = [vec![0u8], vec![1u8]];
    for _ in 0..100 {
        let mut quiet = true;
        for from in 0..2 {
            for message in std::mem::take(&mut nodes[from].said) {
                quiet = false;
                heard[1 - from].extend_from_slice(&frame(&message.to_bytes()?)?);
                nodes[1 - from].hear(message);
            }
        }
        if quiet {
            break;
        }
    }
    for node in nodes {
        let counts = node.broker.counts();
        let open: Vec<_> = counts
            .iter()
            .filter(|(name, _)| name == "fetches" || name == "publishes")
            .collect();
        anyhow::ensure!(
            open.len() == 2 && open.iter().all(|(_, count)| *count == 0),
            "the meeting did not end: {open:?}"
        );
        node.end();
    }
    Ok(heard.to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_meeting_ends_well_and_is_the_same_every_time() {
        let talks = talks().unwrap();
        assert!(
            talks.iter().all(|talk| talk.len() > 100),
            "hardly anything was said: {talks:?}"
        );
        assert_eq!(talks, super::talks().unwrap());
    }

    #[test]
    fn a_node_alone_comes_to_rest() {
        Node::new(Who::Prefill).unwrap().end();
        Node::new(Who::Decode).unwrap().end();
    }
}
