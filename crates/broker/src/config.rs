//! What an operator sets.

use kvferry_handshake::Policy;

use crate::io::{Micros, PeerAddress};

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
    /// Ended transfers that are remembered, in each of four tables. An entry takes at most 1.5 KiB: what is
    /// remembered of a cause is shortened, and its mismatches are only counted.
    pub ended: usize,
    /// Engines that are remembered to have declined, or to have failed to fetch, before the publish came; as large.
    pub declines: usize,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            pages_per_transfer: 1 << 20,
            pages: 64 << 20,
            announced_per_peer: 16 << 10,
            links: 1024,
            ended: 64 << 10,
            declines: 16 << 10,
        }
    }
}
