//! The broker: brings publish and fetch together, and ends every one of them on both sides.
//!
//! A state machine without I/O and without a clock: [`Broker::handle`] takes what happened,
//! [`Broker::poll`] gives what is to be done, [`Broker::next_deadline`] says when to call
//! [`Broker::tick`]. It lives in a crate of its own so that the compiler keeps it so.
#![forbid(unsafe_code)]

mod io;
mod peer;

pub use io::{
    DataCommand, DataEvent, Input, JobId, Micros, Output, PeerAddress, Record, RegionKey, SessionId, Tally,
};
pub use peer::PeerMessage;

use kvferry_control::EngineStatus;
use kvferry_handshake::Policy;

/// What an operator sets.
#[derive(Clone, Debug)]
pub struct Config {
    /// Our address, `host:port`, as peers know it.
    pub address: PeerAddress,
    /// One life of this daemon.
    pub incarnation: u64,
    /// Verdict policy.
    pub policy: Policy,
    /// A transfer without progress for so long fails.
    pub deadline_us: Micros,
    /// A publish that nobody fetches is kept for so long.
    pub lease_us: Micros,
    /// Most open publishes and fetches of one rank.
    pub max_transfers_per_rank: usize,
    /// Most attached ranks.
    pub max_ranks: usize,
    /// Fail (`path_required`) rather than move bytes between nodes by anything but RDMA.
    pub require_rdma: bool,
    /// Bounds on what is remembered and queued.
    pub limits: Limits,
}

/// Bounds on what the broker remembers and queues, so that no peer and no engine can make it grow.
/// Past one of them a call or an announced fetch fails with the retryable `over_limit`; memories of what
/// ended are dropped oldest first instead.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Page-list entries of one publish or fetch.
    pub pages_per_transfer: u64,
    /// Page-list entries of all publishes, fetches and announced fetches together.
    pub pages: u64,
    /// Fetches that one peer daemon may have announced, counted per prefill rank.
    pub announced_per_peer: usize,
    /// Links, and remembered refusals, on each side of them.
    pub links: usize,
    /// Ended transfers that are remembered.
    pub ended: usize,
    /// Declined transfers that are remembered before their publish comes.
    pub declines: usize,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            pages_per_transfer: 4 << 20,
            pages: 64 << 20,
            announced_per_peer: 16 << 10,
            links: 1024,
            ended: 64 << 10,
            declines: 16 << 10,
        }
    }
}

/// The state machine.
#[derive(Debug)]
pub struct Broker {}

impl Broker {
    /// A broker with nothing attached.
    pub fn new(config: Config) -> Broker {
        let _ = config;
        todo!()
    }

    /// Takes what happened at `now`.
    pub fn handle(&mut self, now: Micros, input: Input) {
        let _ = (now, input);
        todo!()
    }

    /// Lets time pass.
    pub fn tick(&mut self, now: Micros) {
        let _ = now;
        todo!()
    }

    /// The next thing to do, until `None`.
    pub fn poll(&mut self) -> Option<Output> {
        todo!()
    }

    /// When [`Broker::tick`] is due next.
    pub fn next_deadline(&self) -> Option<Micros> {
        todo!()
    }

    /// Whether nothing is under way: after [`Input::Shutdown`], when the daemon may end.
    pub fn is_idle(&self) -> bool {
        todo!()
    }

    /// Everything that must return to where it was: (name, count).
    pub fn counts(&self) -> Vec<(String, u64)> {
        todo!()
    }

    /// The engines attached here.
    pub fn engines(&self) -> Vec<EngineStatus> {
        todo!()
    }
}
