//! Which channels there are. No I/O: the driver carries out the changes.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_broker::PeerAddress;
use kvferry_control::Fault;
use kvferry_handshake::Code;

use super::Arrival;
use crate::outbox::{Outbox, Parcel};

/// An open channel; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ChannelId(u64);

/// A try to open one; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct DialId(u64);

/// What a channel's task works with.
#[derive(Clone, Debug)]
pub(crate) struct Ticket {
    pub(crate) channel: ChannelId,
    pub(crate) outbox: Arc<Outbox>,
}

/// What becomes of a peer that greets us.
#[derive(Debug)]
pub(crate) enum Decision {
    Accept(Ticket),
    Duplicate,
    Refuse(Fault),
}

/// What the driver is to do.
#[derive(Debug, PartialEq)]
pub(crate) enum Change {
    /// Connect, after a pause.
    Dial {
        peer: PeerAddress,
        dial: DialId,
        after: Duration,
    },
    /// Tell broker and data plane.
    Up { peer: PeerAddress, arrival: Arrival },
    /// Tell broker and data plane.
    Down { peer: PeerAddress, cause: Fault },
}

const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// All peers.
#[derive(Debug)]
pub(crate) struct PeerSet {
    own: PeerAddress,
    own_incarnation: u64,
    peers: HashMap<PeerAddress, Peer>,
    channels: HashMap<ChannelId, PeerAddress>,
    most: usize,
    queue_bytes: usize,
    next: u64,
    /// Why no channel is opened any more.
    closing: Option<Fault>,
}

#[derive(Debug)]
struct Peer {
    state: State,
    /// Tries that failed since the last channel.
    failures: u32,
    retry_at: Instant,
    last_cause: Option<Code>,
}

#[derive(Debug)]
enum State {
    Idle,
    Dialling {
        dial: DialId,
        /// Our greeting may have reached the peer.
        greeted: bool,
        outbox: Arc<Outbox>,
    },
    Up {
        channel: ChannelId,
        incarnation: u64,
        /// We connected, not the peer.
        ours: bool,
        outbox: Arc<Outbox>,
    },
}

impl PeerSet {
    /// No peers; at most `most`, for each of which `queue_bytes` may wait.
    pub(crate) fn new(own: PeerAddress, own_incarnation: u64, most: usize, queue_bytes: usize) -> PeerSet {
        PeerSet {
            own,
            own_incarnation,
            peers: HashMap::new(),
            channels: HashMap::new(),
            most,
            queue_bytes,
            next: 0,
            closing: None,
        }
    }

    /// Queues a frame for a peer, and has a channel opened where there is none.
    pub(crate) fn send(&mut self, now: Instant, peer: &PeerAddress, frame: impl Into<Parcel>) -> Vec<Change> {
        if self.closing.is_some() {
            return Vec::new();
        }
        if let Err(cause) = self.make_room(now, peer) {
            return vec![down(peer, cause)];
        }
        let next = self.next;
        let queue_bytes = self.queue_bytes;
        let entry = self.peers.entry(peer.clone()).or_insert_with(|| Peer::new(now));
        match &entry.state {
            State::Dialling { outbox, .. } | State::Up { outbox, .. } => match outbox.push(frame) {
                Ok(()) => Vec::new(),
                Err(overflow) => {
                    let cause = Fault::new(
                        Code::PeerLost,
                        format!(
                            "peer {} leaves {} bytes unread, of {} that may wait (limits.peer_queue_bytes); \
                             the channel to it is cut",
                            peer.0, overflow.waiting, overflow.limit
                        ),
                    );
                    self.lose(now, peer, cause)
                }
            },
            State::Idle => {
                self.next += 1;
                let dial = DialId(next);
                let outbox = Arc::new(Outbox::new(queue_bytes));
                // The first frame always passes.
                let _ = outbox.push(frame);
                let after = entry.retry_at.saturating_duration_since(now);
                entry.state = State::Dialling {
                    dial,
                    greeted: false,
                    outbox,
                };
                vec![Change::Dial {
                    peer: peer.clone(),
                    dial,
                    after,
                }]
            }
        }
    }

    /// Queues a frame for a peer, if a channel to it is open.
    pub(crate) fn send_if_open(
        &mut self,
        now: Instant,
        peer: &PeerAddress,
        frame: impl Into<Parcel>,
    ) -> Vec<Change> {
        match self.peers.get(peer).map(|peer| &peer.state) {
            Some(State::Up { .. }) => self.send(now, peer, frame),
            _ => Vec::new(),
        }
    }

    /// Whether a dialled connection may still greet.
    pub(crate) fn may_greet(&mut self, peer: &PeerAddress, dialled: DialId) -> bool {
        match self.peers.get_mut(peer).map(|peer| &mut peer.state) {
            Some(State::Dialling { dial, greeted, .. }) if *dial == dialled => {
                *greeted = true;
                true
            }
            _ => false,
        }
    }

    /// A dialled peer welcomed us.
    pub(crate) fn dialled(
        &mut self,
        peer: &PeerAddress,
        dialled: DialId,
        arrival: Arrival,
    ) -> (Option<Ticket>, Vec<Change>) {
        match self.peers.get(peer).map(|peer| &peer.state) {
            Some(State::Dialling { dial, outbox, .. }) if *dial == dialled => {
                let outbox = Arc::clone(outbox);
                let (ticket, up) = self.open(peer, arrival, true, outbox);
                (Some(ticket), vec![up])
            }
            _ => (None, Vec::new()),
        }
    }

    /// A dialled peer could not be reached, or refused.
    pub(crate) fn dial_failed(
        &mut self,
        now: Instant,
        peer: &PeerAddress,
        failed: DialId,
        cause: Fault,
    ) -> Vec<Change> {
        match self.peers.get(peer).map(|peer| &peer.state) {
            Some(State::Dialling { dial, .. }) if *dial == failed => self.lose(now, peer, cause),
            _ => Vec::new(),
        }
    }

    /// A peer greeted us. Of two connections that cross, the one is kept that the peer with the lower
    /// address opened: both sides decide alike.
    pub(crate) fn called(
        &mut self,
        now: Instant,
        peer: &PeerAddress,
        arrival: Arrival,
    ) -> (Decision, Vec<Change>) {
        if arrival.incarnation == self.own_incarnation || *peer == self.own {
            let message = format!(
                "it is the daemon that calls itself {0}; write kvferry://{0}/ENGINE",
                self.own.0
            );
            return (
                Decision::Refuse(Fault::new(Code::AddressInvalid, message)),
                Vec::new(),
            );
        }
        if let Some(why) = &self.closing {
            return (Decision::Refuse(why.clone()), Vec::new());
        }
        if let Err(cause) = self.make_room(now, peer) {
            return (Decision::Refuse(cause), Vec::new());
        }
        let own_is_lower = self.own < *peer;
        let queue_bytes = self.queue_bytes;
        let entry = self.peers.entry(peer.clone()).or_insert_with(|| Peer::new(now));
        let mut changes = Vec::new();
        let outbox = match &entry.state {
            State::Idle => Arc::new(Outbox::new(queue_bytes)),
            State::Dialling { greeted: true, .. } if own_is_lower => return (Decision::Duplicate, changes),
            // Our try will find that it is not wanted any more.
            State::Dialling { outbox, .. } => Arc::clone(outbox),
            // Crossed: it dialled before it took ours. If it lost ours instead, we will notice, too.
            State::Up {
                ours: true,
                incarnation,
                ..
            } if *incarnation == arrival.incarnation => return (Decision::Duplicate, changes),
            State::Up { incarnation, .. } => {
                let how = if *incarnation == arrival.incarnation {
                    "opened a new channel"
                } else {
                    "restarted"
                };
                let cause = Fault::new(Code::PeerLost, format!("peer {} {how}", peer.0));
                changes = self.lose(now, peer, cause);
                Arc::new(Outbox::new(queue_bytes))
            }
        };
        let (ticket, up) = self.open(peer, arrival, false, outbox);
        changes.push(up);
        (Decision::Accept(ticket), changes)
    }

    /// A channel broke.
    pub(crate) fn down(&mut self, now: Instant, broken: ChannelId, cause: Fault) -> Vec<Change> {
        match self.channels.get(&broken).cloned() {
            Some(peer) => self.lose(now, &peer, cause),
            None => Vec::new(),
        }
    }

    /// Who speaks on a channel, and in which life; `None` when it is not open any more.
    pub(crate) fn speaker(&self, channel: ChannelId) -> Option<(PeerAddress, u64)> {
        let peer = self.channels.get(&channel)?;
        match &self.peers.get(peer)?.state {
            State::Up { incarnation, .. } => Some((peer.clone(), *incarnation)),
            _ => None,
        }
    }

    /// Ends all channels once what waits is written, and opens no more.
    pub(crate) fn finish(&mut self, why: &Fault) {
        self.closing = Some(why.clone());
        for peer in self.peers.values() {
            if let State::Dialling { outbox, .. } | State::Up { outbox, .. } = &peer.state {
                outbox.finish(why.clone());
            }
        }
    }

    /// Peers and their states, in a word.
    pub(crate) fn states(&self) -> Vec<(PeerAddress, &'static str)> {
        let word = |peer: &Peer| match (&peer.state, peer.last_cause) {
            (State::Up { .. }, _) => "connected",
            (State::Dialling { .. }, _) => "connecting",
            (State::Idle, Some(code)) => code.name(),
            (State::Idle, None) => "idle",
        };
        let mut states: Vec<_> = self
            .peers
            .iter()
            .map(|(address, peer)| (address.clone(), word(peer)))
            .collect();
        states.sort();
        states
    }

    /// Open channels.
    pub(crate) fn open_channels(&self) -> usize {
        self.channels.len()
    }

    fn open(
        &mut self,
        peer: &PeerAddress,
        arrival: Arrival,
        ours: bool,
        outbox: Arc<Outbox>,
    ) -> (Ticket, Change) {
        let channel = ChannelId(self.next);
        self.next += 1;
        self.channels.insert(channel, peer.clone());
        if let Some(entry) = self.peers.get_mut(peer) {
            entry.failures = 0;
            entry.last_cause = None;
            entry.state = State::Up {
                channel,
                incarnation: arrival.incarnation,
                ours,
                outbox: Arc::clone(&outbox),
            };
        }
        let peer = peer.clone();
        (Ticket { channel, outbox }, Change::Up { peer, arrival })
    }

    fn lose(&mut self, now: Instant, peer: &PeerAddress, cause: Fault) -> Vec<Change> {
        let Some(entry) = self.peers.get_mut(peer) else {
            return Vec::new();
        };
        match std::mem::replace(&mut entry.state, State::Idle) {
            State::Idle => return Vec::new(),
            State::Dialling { outbox, .. } => {
                outbox.cut(cause.clone());
                let pause = FIRST_PAUSE * 2u32.pow(entry.failures.min(10));
                entry.failures += 1;
                entry.retry_at = now + pause.min(LONGEST_PAUSE);
            }
            State::Up { channel, outbox, .. } => {
                outbox.cut(cause.clone());
                self.channels.remove(&channel);
                entry.retry_at = now;
            }
        }
        entry.last_cause = Some(cause.code);
        vec![down(peer, cause)]
    }

    /// Makes room for one more peer by forgetting those that nothing goes on with.
    fn make_room(&mut self, now: Instant, peer: &PeerAddress) -> Result<(), Fault> {
        if self.peers.len() < self.most || self.peers.contains_key(peer) {
            return Ok(());
        }
        self.peers
            .retain(|_, peer| !matches!(peer.state, State::Idle) || peer.retry_at > now);
        if self.peers.len() < self.most {
            return Ok(());
        }
        Err(Fault::new(
            Code::OverLimit,
            format!(
                "there are {} peers, the most there may be (limits.peers); {} is one too many",
                self.most, peer.0
            ),
        ))
    }
}

impl Peer {
    fn new(now: Instant) -> Peer {
        Peer {
            state: State::Idle,
            failures: 0,
            retry_at: now,
            last_cause: None,
        }
    }
}

fn down(peer: &PeerAddress, cause: Fault) -> Change {
    Change::Down {
        peer: peer.clone(),
        cause,
    }
}

#[cfg(test)]
mod tests;
