//! What all threads of the data plane share, and how a lane is opened, ended and mended.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, RwLock};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::jobs::Jobs;
use crate::lane::{LaneEnd, Link, receiver, sender};
use crate::lanes::{Due, SenderEnd};
use crate::peer::Peer;
use crate::region::Regions;
use crate::steward::Bell;
use crate::threads::Threads;
use crate::wake::Wake;
use crate::{Config, Event, LaneMessage, LaneTrouble, Token};

/// Tokens that are not good are told at most so often.
const ODD_TOKENS_EVERY: Duration = Duration::from_millis(250);

/// What all threads share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) config: Config,
    pub(crate) address: SocketAddr,
    pub(crate) regions: Regions,
    pub(crate) jobs: Arc<Jobs>,
    pub(crate) threads: Threads,
    pub(crate) bell: Bell,
    pub(crate) listener: Wake,
    pub(crate) unproven: AtomicU64,
    peers: RwLock<HashMap<Arc<str>, Arc<Peer>>>,
    last: AtomicU64,
    odd_tokens: Mutex<OddTokens>,
}

/// Connections that showed a token that is not good.
#[derive(Debug, Default)]
struct OddTokens {
    /// When one is told again.
    next: Option<Instant>,
    /// Since the last one that was told.
    unsaid: u64,
}

impl Shared {
    pub(crate) fn new(config: Config, address: SocketAddr, jobs: Arc<Jobs>, listener: Wake) -> Shared {
        // Asks and epochs grow over restarts too, as far as the clock does.
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        Shared {
            regions: Regions::new(config.max_regions, config.max_region_bytes),
            config,
            address,
            jobs,
            threads: Threads::default(),
            bell: Bell::default(),
            listener,
            unproven: AtomicU64::new(0),
            peers: RwLock::default(),
            last: AtomicU64::new(u64::try_from(now.as_nanos()).unwrap_or(0)),
            odd_tokens: Mutex::default(),
        }
    }

    /// A number that grows.
    fn fresh(&self) -> u64 {
        self.last.fetch_add(1, Ordering::Relaxed)
    }

    fn fresh_token(&self) -> Option<(u64, Token)> {
        let mut token = [0; 32];
        let drawn = rustix::rand::getrandom(&mut token, rustix::rand::GetRandomFlags::empty());
        if let Err(error) = drawn {
            tracing::error!(%error, "no random numbers for a lane's token");
            return None;
        }
        if drawn != Ok(token.len()) {
            tracing::error!("too few random numbers for a lane's token");
            return None;
        }
        Some((self.fresh(), Token(token)))
    }

    pub(crate) fn known_peer(&self, name: &str) -> Option<Arc<Peer>> {
        let peers = self.peers.read().unwrap_or_else(|e| e.into_inner());
        peers.get(name).cloned()
    }

    pub(crate) fn peer(&self, name: &str) -> Arc<Peer> {
        if let Some(peer) = self.known_peer(name) {
            return peer;
        }
        let mut peers = self.peers.write().unwrap_or_else(|e| e.into_inner());
        let peer = peers
            .entry(Arc::from(name))
            .or_insert_with(|| Arc::new(Peer::new(name)));
        // Should it never come up, the steward forgets it.
        self.bell.ring();
        Arc::clone(peer)
    }

    /// Forgets the peers that were down for as long as an idle lane is kept and that no job and no lane has to do with, with
    /// their counters. Tells when to come again.
    pub(crate) fn forget_peers(&self, now: Instant) -> Option<Instant> {
        let mut next: Option<Instant> = None;
        let mut peers = self.peers.write().unwrap_or_else(|e| e.into_inner());
        peers.retain(|_, peer| {
            let Some(since) = peer.lanes().down_since() else {
                return true;
            };
            let due = since + self.config.idle;
            // Who has no clone now gets none: they are made from this table, which is locked, or from another clone.
            if due <= now && Arc::strong_count(peer) == 1 {
                return false;
            }
            let again = due.max(now + self.config.idle / 2);
            next = Some(next.map_or(again, |next| next.min(again)));
            true
        });
        next
    }

    pub(crate) fn peers(&self) -> Vec<Arc<Peer>> {
        self.peers
            .read()
            .unwrap_or_else(|e| e.into_inner())
            .values()
            .cloned()
            .collect()
    }

    /// Tells the peer's data plane.
    pub(crate) fn tell(&self, peer: &Peer, messages: Vec<LaneMessage>) {
        for message in messages {
            (self.jobs.sink)(Event::ToPeer {
                peer: Arc::clone(&peer.name),
                message,
            });
        }
    }

    /// There may be chunks to send: wakes a lane, and asks for lanes that are missing.
    pub(crate) fn work(&self, peer: &Peer) {
        peer.outbox.kick();
        let demand = peer.outbox.waiting(self.config.lanes_per_peer);
        let messages = peer
            .lanes()
            .open(Instant::now(), &self.config, demand, || self.fresh());
        if !messages.is_empty() {
            self.tell(peer, messages);
            self.bell.ring();
        }
    }

    /// Does what became due with a peer's lanes.
    fn follow(&self, peer: &Peer, due: Due) {
        let put_back = !due.put_back.is_empty();
        // They are put in front, so the first of them goes last.
        for taken in due.put_back.iter().rev() {
            peer.put_back(taken);
        }
        self.tell(peer, due.messages);
        if put_back {
            self.work(peer);
        }
        self.bell.ring();
    }

    /// The peer's data plane said something.
    pub(crate) fn heard(self: &Arc<Self>, peer: &Arc<Peer>, message: LaneMessage) {
        let now = Instant::now();
        let due = match message {
            LaneMessage::Want { lane, ask } => {
                let port = self.address.port();
                peer.lanes()
                    .wanted(now, &self.config, lane, ask, port, || self.fresh_token())
            }
            LaneMessage::Grant {
                lane,
                ask,
                epoch,
                token,
                port,
            } => {
                self.connect(peer, lane, ask, epoch, token, port);
                return;
            }
            LaneMessage::Lost { lane, epoch } => peer.lanes().lost(lane, epoch),
            LaneMessage::Gone { lane, epoch } => peer.lanes().gone(now, lane, epoch),
        };
        self.follow(peer, due);
    }

    /// Starts the sending end of a lane that was granted.
    fn connect(self: &Arc<Self>, peer: &Arc<Peer>, lane: u16, ask: u64, epoch: u64, token: Token, port: u16) {
        let wake = match Wake::new() {
            Ok(wake) => Arc::new(wake),
            Err(error) => {
                // The grant comes again when it is asked for again.
                let what = format!("no fd for a lane: {error}");
                return self.trouble(Some(peer), LaneTrouble::Resources, what);
            }
        };
        let Some(opening) = peer.lanes().granted(lane, ask, epoch, &wake) else {
            return;
        };
        let start = sender::Start {
            peer: Arc::clone(peer),
            life: opening.life,
            epoch,
            address: SocketAddr::new(opening.host, port),
            token,
            wake,
        };
        let shared = Arc::clone(self);
        let spawned = self.threads.spawn("kvferry-send", move || {
            shared.sender_life(lane, &start);
            shared.threads.ending();
            shared.bell.ring();
        });
        if let Err(error) = spawned {
            let end = LaneEnd::Thread(error);
            self.sender_ended(peer, lane, epoch, &end, sender::Left::default());
        }
    }

    fn sender_life(&self, lane: u16, start: &sender::Start) {
        let mut left = sender::Left::default();
        let end = catch_unwind(AssertUnwindSafe(|| sender::run(&self.config, start, &mut left)));
        let end = end.unwrap_or(LaneEnd::Defect);
        start.peer.outbox.lane_ended(&start.wake);
        self.sender_ended(&start.peer, lane, start.epoch, &end, left);
    }

    fn sender_ended(&self, peer: &Peer, lane: u16, epoch: u64, end: &LaneEnd, left: sender::Left) {
        let orderly = matches!(end, LaneEnd::Idle) && left.unacked.is_empty();
        tracing::debug!(peer = %peer.name, lane, epoch, %end, unacked = left.unacked.len(), "sending end of a lane ended");
        if !matches!(end, LaneEnd::Idle) {
            self.lane_ended(peer, "to it", end);
        }
        let now = Instant::now();
        let ended = SenderEnd {
            lane,
            epoch,
            unacked: left.unacked.into_iter().map(|unacked| unacked.taken).collect(),
            orderly,
            carried: left.carried,
        };
        let due = {
            let mut lanes = peer.lanes();
            let due = lanes.sender_ended(now, &self.config, ended);
            if due.broke && !left.proven {
                lanes.opening_failed(now, || end.to_string());
            }
            due
        };
        if due.broke {
            peer.traffic.lost();
        }
        self.follow(peer, due);
        // What came for this lane while it ended is for the others, or for its next life.
        self.work(peer);
    }

    /// A connection to the data port showed a token. Starts the receiving end of the lane, if it was granted.
    pub(crate) fn proven(self: &Arc<Self>, epoch: u64, token: &Token, socket: OwnedFd) {
        let wake = match Wake::new() {
            Ok(wake) => Arc::new(wake),
            Err(error) => {
                let peers = self.peers();
                let peer = peers.iter().find(|peer| peer.lanes().has_granted(epoch));
                let what = format!("no fd for a lane: {error}");
                return self.trouble(peer.map(AsRef::as_ref), LaneTrouble::Resources, what);
            }
        };
        let now = Instant::now();
        let found = self.peers().into_iter().find_map(|peer| {
            peer.lanes()
                .proven(now, epoch, token, &wake)
                .map(|lane| (Arc::clone(&peer), lane))
        });
        let Some((peer, lane)) = found else {
            return self.odd_token(now, &socket);
        };
        let shared = Arc::clone(self);
        let start = receiver::Start {
            peer: Arc::clone(&peer),
            wake,
        };
        let spawned = self.threads.spawn("kvferry-receive", move || {
            shared.receiver_life(lane, epoch, &start, socket);
            shared.threads.ending();
            shared.bell.ring();
        });
        if let Err(error) = spawned {
            self.lane_ended(&peer, "from it", &LaneEnd::Thread(error));
            self.receiver_ended(&peer, lane, epoch);
        }
    }

    fn receiver_life(&self, lane: u16, epoch: u64, start: &receiver::Start, socket: OwnedFd) {
        let end = catch_unwind(AssertUnwindSafe(|| {
            receiver::run(&self.config, &self.jobs, start, Link::accepted(socket))
        }));
        let end = end.unwrap_or(LaneEnd::Defect);
        tracing::debug!(peer = %start.peer.name, lane, epoch, %end, "receiving end of a lane ended");
        // A sender closes a lane that it does not use.
        if !matches!(end, LaneEnd::Closed) {
            self.lane_ended(&start.peer, "from it", &end);
        }
        // The socket is closed and the thread writes nothing any more: what is said now holds.
        self.receiver_ended(&start.peer, lane, epoch);
    }

    /// Tells why a lane ended, unless we ended it.
    fn lane_ended(&self, peer: &Peer, way: &str, end: &LaneEnd) {
        let kind = match end {
            LaneEnd::Told | LaneEnd::Held(_) => return,
            LaneEnd::Violation(what) => LaneTrouble::Violation(what),
            LaneEnd::Thread(_) => LaneTrouble::Resources,
            LaneEnd::Idle
            | LaneEnd::Closed
            | LaneEnd::Cut
            | LaneEnd::Stalled(_)
            | LaneEnd::Socket(_)
            | LaneEnd::Defect => LaneTrouble::Broken,
        };
        self.trouble(Some(peer), kind, format!("a lane {way} ended: {end}"));
    }

    /// Whoever reaches the data port can do this as often as he likes, and what is told waits for its reader.
    fn odd_token(&self, now: Instant, socket: &OwnedFd) {
        let mut odd = self.odd_tokens.lock().unwrap_or_else(|e| e.into_inner());
        if odd.next.is_some_and(|next| now < next) {
            odd.unsaid += 1;
            return;
        }
        odd.next = Some(now + ODD_TOKENS_EVERY);
        let more = std::mem::take(&mut odd.unsaid);
        drop(odd);
        let from = rustix::net::getpeername(socket).ok().flatten();
        let from = from.and_then(|from| SocketAddr::try_from(from).ok());
        let from = from.map_or_else(|| "somewhere".to_owned(), |from| from.to_string());
        let what = format!(
            "a connection from {from} showed a token that is not good, or not any more; {more} before it"
        );
        self.trouble(None, LaneTrouble::Token, what);
    }

    fn trouble(&self, peer: Option<&Peer>, kind: LaneTrouble, what: String) {
        let peer = peer.map(|peer| Arc::clone(&peer.name));
        (self.jobs.sink)(Event::Trouble { peer, kind, what });
    }

    fn receiver_ended(&self, peer: &Peer, lane: u16, epoch: u64) {
        let port = self.address.port();
        let now = Instant::now();
        let due = peer
            .lanes()
            .receiver_ended(now, &self.config, lane, epoch, port, || self.fresh_token());
        self.follow(peer, due);
    }
}
