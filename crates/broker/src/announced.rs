//! The prefill side of announced fetches: each waits for its publish, is bound to it, and ends.

mod announcing;
mod ends;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kvferry_control::{Fault, Side, TransferId};
use kvferry_handshake::{Code, Envelope, TokenRange};
use kvferry_plan::ChunkMap;

use crate::Broker;
use crate::cause::{Cause, Place};
use crate::ended::Memory;
use crate::io::{JobId, Micros, PeerAddress};
use crate::pages::Held;
use crate::peer::{Body, EngineId, FetchState, PartState};
use crate::progress::ALIVE_FOR;
use crate::publishes::PublishKey;
use crate::ranks::RankLife;
use crate::timers::Timer;

/// One decode rank's fetch at one prefill rank here.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PartKey {
    pub(crate) peer: PeerAddress,
    pub(crate) incarnation: u64,
    pub(crate) fetch: u64,
    pub(crate) life: RankLife,
}

#[derive(Debug)]
pub(crate) struct Part {
    transfer: TransferId,
    pub(crate) rank: u32,
    pub(crate) decode: EngineId,
    pub(crate) decode_rank: u32,
    pub(crate) decode_ranks: u32,
    pub(crate) decode_envelope: Arc<Envelope>,
    pub(crate) tokens: TokenRange,
    pub(crate) least: u64,
    pub(crate) pages: Held,
    pub(crate) slot: Option<u64>,
    /// `None`: this rank has nothing for that one.
    pub(crate) map: Option<ChunkMap>,
    pub(crate) total: u64,
    pub(crate) bytes: u64,
    pub(crate) job: Option<JobId>,
    /// When bytes of it were last known to be under way, or waiting their turn.
    pub(crate) alive: Option<Micros>,
    pub(crate) stage: Stage,
    /// The decode rank said that it has everything.
    delivered: bool,
    /// When the fetch's daemon last spoke of it.
    pub(crate) heard: Micros,
    /// When bytes of it last left, or it was announced.
    pub(crate) moved: Micros,
    /// Bytes of all prefill ranks that had landed there when last heard.
    pub(crate) landed: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// For the publish.
    Waiting,
    /// To the publish.
    Bound,
    /// Its job is being closed.
    Ended,
}

impl Part {
    pub(crate) fn publish_key(&self, key: &PartKey) -> PublishKey {
        (key.life, self.transfer.clone())
    }
}

#[derive(Debug)]
pub(crate) struct Announced {
    parts: BTreeMap<PartKey, Part>,
    waiting: BTreeMap<PublishKey, BTreeSet<PartKey>>,
    per_peer: BTreeMap<PeerAddress, usize>,
    /// Why parts failed, for daemons that ask or announce again.
    ended: Memory<PartKey, Cause>,
}

impl Announced {
    pub(crate) fn new(most: usize) -> Announced {
        Announced {
            parts: BTreeMap::new(),
            waiting: BTreeMap::new(),
            per_peer: BTreeMap::new(),
            ended: Memory::new(most),
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.parts.len()
    }

    pub(crate) fn remembered(&self) -> usize {
        self.ended.len()
    }

    pub(crate) fn get(&self, key: &PartKey) -> Option<&Part> {
        self.parts.get(key)
    }

    pub(crate) fn get_mut(&mut self, key: &PartKey) -> Option<&mut Part> {
        self.parts.get_mut(key)
    }

    /// Attempts of an id that fetches wait for.
    pub(crate) fn attempts_of<'a>(&'a self, life: RankLife, id: &'a str) -> impl Iterator<Item = u32> + 'a {
        crate::siblings::of_id(&self.waiting, life, id).map(|(transfer, _)| transfer.attempt)
    }

    /// The parts of one fetch.
    pub(crate) fn of_fetch(&self, peer: &PeerAddress, incarnation: u64, fetch: u64) -> Vec<PartKey> {
        let first = PartKey {
            peer: peer.clone(),
            incarnation,
            fetch,
            life: RankLife(0),
        };
        let range = self.parts.range(first..).map(|(key, _)| key);
        range
            .take_while(|key| key.peer == *peer && key.incarnation == incarnation && key.fetch == fetch)
            .cloned()
            .collect()
    }

    fn keys(&self, wanted: impl Fn(&PartKey, &Part) -> bool) -> Vec<PartKey> {
        self.parts
            .iter()
            .filter(|(key, part)| wanted(key, part))
            .map(|(key, _)| key.clone())
            .collect()
    }

    pub(crate) fn bind(&mut self, key: &PartKey) {
        if let Some(part) = self.parts.get_mut(key) {
            part.stage = Stage::Bound;
            self.stop_waiting(key);
        }
    }

    fn stop_waiting(&mut self, key: &PartKey) {
        let Some(part) = self.parts.get(key) else {
            return;
        };
        let publish = part.publish_key(key);
        if let Some(waiting) = self.waiting.get_mut(&publish) {
            waiting.remove(key);
            if waiting.is_empty() {
                self.waiting.remove(&publish);
            }
        }
    }

    fn insert(&mut self, key: PartKey, part: Part) {
        self.waiting
            .entry(part.publish_key(&key))
            .or_default()
            .insert(key.clone());
        *self.per_peer.entry(key.peer.clone()).or_default() += 1;
        self.parts.insert(key, part);
    }

    fn remove(&mut self, key: &PartKey) -> Option<Part> {
        self.stop_waiting(key);
        let part = self.parts.remove(key)?;
        if let Some(count) = self.per_peer.get_mut(&key.peer) {
            *count -= 1;
            if *count == 0 {
                self.per_peer.remove(&key.peer);
            }
        }
        Some(part)
    }

    pub(crate) fn expire(&mut self, now: Micros) {
        self.ended.expire(now);
    }

    pub(crate) fn next_expiry(&self) -> Option<Micros> {
        self.ended.next_expiry()
    }
}

impl Broker {
    fn part_state(&self, key: &PartKey) -> PartState {
        let Some(part) = self.announced.get(key) else {
            let cause = self.announced.ended.get(key);
            return cause.map_or(PartState::Unknown, |cause| PartState::Failed(cause.clone()));
        };
        let publish = self.publishes.get(&part.publish_key(key));
        match (part.stage, publish) {
            (Stage::Waiting, _) => PartState::Waiting,
            (Stage::Bound, Some(publish)) => match publish.end() {
                Some(end) => PartState::Final {
                    end,
                    metadata: publish.metadata.clone(),
                },
                None => PartState::Ready(publish.ready),
            },
            (Stage::Bound, None) | (Stage::Ended, _) => {
                let cause = self.announced.ended.get(key);
                cause.map_or(PartState::Unknown, |cause| PartState::Failed(cause.clone()))
            }
        }
    }

    /// Whether bytes of it are under way, or wait their turn behind others that are: the decode side cannot see our line.
    fn part_moves(&self, key: &PartKey) -> bool {
        let lately = self.interval().max(ALIVE_FOR);
        let alive = self.announced.get(key).and_then(|part| part.alive);
        alive.is_some_and(|at| self.now <= at + lately)
    }

    pub(crate) fn tell_part_state(&mut self, key: &PartKey, serial: u64) {
        let Some(rank) = self.announced.get(key).map(|part| part.rank) else {
            return;
        };
        let body = Body::PartState {
            fetch: key.fetch,
            rank,
            serial,
            moving: self.part_moves(key),
            state: self.part_state(key),
        };
        self.say(&key.peer, key.incarnation, body);
    }

    pub(crate) fn on_ask(
        &mut self,
        peer: &PeerAddress,
        incarnation: u64,
        fetch: u64,
        ranks: &[(u32, u64)],
        serial: u64,
    ) {
        for (rank, life) in ranks {
            let key = PartKey {
                peer: peer.clone(),
                incarnation,
                fetch,
                life: RankLife(*life),
            };
            if let Some(part) = self.announced.get_mut(&key) {
                part.heard = self.now;
            }
            let body = Body::PartState {
                fetch,
                rank: *rank,
                serial,
                moving: self.part_moves(&key),
                state: self.part_state(&key),
            };
            self.say(peer, incarnation, body);
        }
    }

    /// Asks where the fetch stands, unless its daemon spoke of it lately.
    pub(crate) fn part_due(&mut self, key: &PartKey) {
        let (now, interval, deadline) = (self.now, self.interval(), self.config.deadline_us);
        let Some(part) = self.announced.get(key) else {
            return;
        };
        match part.stage {
            Stage::Ended => {
                // Its last acknowledgements did not come.
                if let Some(job) = part.job {
                    self.close_job(job);
                }
                return;
            }
            Stage::Waiting if part.heard + deadline <= now => {
                let cause = Fault::new(
                    Code::Deadline,
                    format!("{} no longer speaks of the fetch", key.peer.0),
                );
                return self.part_failed_here(key, &cause.into());
            }
            Stage::Waiting | Stage::Bound => {}
        }
        if part.heard + interval <= now {
            self.say(&key.peer, key.incarnation, Body::AskFetch { fetch: key.fetch });
        }
        self.timers.set(Timer::Part(key.clone()), now + interval);
    }

    pub(crate) fn on_ask_fetch(&mut self, peer: &PeerAddress, incarnation: u64, fetch: u64) {
        let state = self.fetches.state(fetch, self.now);
        self.say(peer, incarnation, Body::FetchState { fetch, state });
    }

    pub(crate) fn on_fetch_state(
        &mut self,
        peer: &PeerAddress,
        incarnation: u64,
        fetch: u64,
        state: &FetchState,
    ) {
        for key in self.announced.of_fetch(peer, incarnation, fetch) {
            match state {
                FetchState::Open { landed, moving } => self.fetch_moves_there(&key, *landed, *moving),
                FetchState::Delivered => self.part_delivered(&key),
                FetchState::Withdrawn => self.withdraw_part(&key),
                FetchState::Failed(cause) => {
                    let cause = cause.clone().of(|| {
                        let part = self.announced.get(&key);
                        Place {
                            side: Side::Fetch,
                            rank: part.map_or(0, |part| part.decode_rank),
                            engine: part.map_or_else(String::new, |part| part.decode.name.clone()),
                            daemon: peer.0.to_string(),
                        }
                    });
                    self.fetch_failed_there(&key, &cause);
                }
                FetchState::Unknown => {
                    let cause = Fault::new(Code::TransferUnknown, format!("{} forgot the fetch", peer.0));
                    self.fetch_failed_there(&key, &cause.into());
                }
            }
        }
    }
}
