//! What a transfer did, for its report and its log line.

use std::collections::{BTreeMap, BTreeSet};

use kvferry_control::{Path, Report};

use crate::io::{Micros, PeerAddress, Tally};

/// Sums over the jobs of one transfer on one side.
#[derive(Debug, Default)]
pub(crate) struct Tallies {
    peers: BTreeSet<PeerAddress>,
    paths: BTreeMap<Path, u64>,
    bounced: u64,
    moves: u64,
    resent: u64,
}

impl Tallies {
    pub(crate) fn add(&mut self, peer: &PeerAddress, path: Path, tally: &Tally) {
        if tally.bytes > 0 {
            self.peers.insert(peer.clone());
            *self.paths.entry(path).or_default() += tally.bytes;
        }
        self.bounced += tally.bounced;
        self.moves += tally.moves;
        self.resent += tally.resent;
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.paths.values().sum()
    }

    /// The report of a transfer that was called at `called`, met its other side at `met` and ends `now`.
    pub(crate) fn report(&self, called: Micros, met: Option<Micros>, now: Micros) -> Report {
        Report {
            peers: self.peers.iter().map(|peer| peer.0.to_string()).collect(),
            paths: self.paths.iter().map(|(path, bytes)| (*path, *bytes)).collect(),
            bounced: self.bounced,
            moves: self.moves,
            resent: self.resent,
            met_us: met.unwrap_or(now).saturating_sub(called),
            moved_us: met.map_or(0, |met| now.saturating_sub(met)),
        }
    }
}
