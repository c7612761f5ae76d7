//! A lane's sending end: takes chunks from its peer's outbox, sends them, and takes acknowledgements.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_handshake::Code;

use crate::job::{ALIVE, Job, Role, Trouble};
use crate::lane::departing::Departing;
use crate::lane::frame::{ACK_BYTES, Ack, HELLO, HELLO_BYTES, Verdict, hello};
use crate::lane::gather::{Buffers, Gather};
use crate::lane::scatter::Inbox;
use crate::lane::{LaneEnd, Link, would_block};
use crate::line::Taken;
use crate::peer::Peer;
use crate::wake::{Waited, Wake};
use crate::{Config, Token};

/// Most frames that may be unacknowledged on a lane.
const MAX_UNACKED: usize = 4096;
/// Most chunks of one batch, and how many bytes fill one.
const BATCH_CHUNKS: usize = 64;
const BATCH_BYTES: u64 = 512 << 10;

/// How long pages of closed jobs are held for the sake of the others on the lane: it moves on or is destroyed.
const MAX_HELD: Duration = Duration::from_millis(500);

/// Batches after which acknowledgements are looked for.
const ACKS_EACH: u32 = 8;

/// What a sending end needs to begin.
#[derive(Debug)]
pub(crate) struct Start {
    pub(crate) peer: Arc<Peer>,
    /// Which life of the peer's channel this lane belongs to.
    pub(crate) life: u64,
    pub(crate) epoch: u64,
    pub(crate) address: SocketAddr,
    pub(crate) token: Token,
    pub(crate) wake: Arc<Wake>,
}

/// A chunk that was sent, or is being sent, and not acknowledged.
#[derive(Debug)]
pub(crate) struct Unacked {
    pub(crate) taken: Taken,
    bytes: u64,
    moves: u64,
    bounced: u64,
}

/// What a lane's life left.
#[derive(Debug, Default)]
pub(crate) struct Left {
    /// Sent, or begun, and not acknowledged: in the order in which they were taken.
    pub(crate) unacked: VecDeque<Unacked>,
    /// The receiver took the token.
    pub(crate) proven: bool,
    /// At least one chunk landed.
    pub(crate) carried: bool,
}

pub(super) struct Sender<'l> {
    start: &'l Start,
    pub(super) config: &'l Config,
    link: Link,
    acks: Inbox,
    left: &'l mut Left,
    /// When something last moved.
    moved: Instant,
    /// When the jobs of what is unacknowledged, and those behind them, were last said to be alive.
    told: Instant,
    /// Bytes that our kernel held when last looked, because the peer's had not taken them.
    unsent: usize,
    /// Whose pages are held by the batch that is being sent: the job of each of its chunks.
    holding: Vec<Arc<Job>>,
    /// Chunks at the end of what is unacknowledged whose frames were not handed on whole, to the kernel or to TLS.
    departing: usize,
    /// Since when one of them is known to be closed.
    held: Option<Instant>,
}

/// A sending end's life. What it leaves is put into `left` as it goes.
pub(crate) fn run(config: &Config, start: &Start, left: &mut Left) -> LaneEnd {
    let link = match open(config, start) {
        Ok(link) => link,
        Err(end) => return end,
    };
    left.proven = true;
    start.peer.lanes().sender_proven(start.epoch);
    let mut sender = Sender {
        start,
        config,
        link,
        acks: Inbox::new(),
        left,
        moved: Instant::now(),
        told: Instant::now(),
        unsent: 0,
        holding: Vec::new(),
        departing: 0,
        held: None,
    };
    match sender.serve() {
        Ok(never) => match never {},
        Err(end) => end,
    }
}

/// Connects, shows the token and waits until it was taken.
fn open(config: &Config, start: &Start) -> Result<Link, LaneEnd> {
    let limit = Instant::now() + config.hello;
    let left = |limit: Instant| match limit.saturating_duration_since(Instant::now()) {
        Duration::ZERO => Err(LaneEnd::Stalled(config.hello)),
        left => Ok(left),
    };
    let mut link = Link::connect(start.address)?;
    while !link.wait(&start.wake, true, left(limit)?)?.writable {
        if start.wake.is_ending() {
            return Err(LaneEnd::Told);
        }
    }
    link.connect_error()?;
    link.tune()?;
    // A fresh connection's buffer holds a hello.
    if link.send(&hello(start.epoch, &start.token))? != HELLO_BYTES {
        return Err(LaneEnd::Violation("no room for a hello"));
    }
    if let Some(tls) = &config.tls {
        link.start_client_tls(tls, &start.peer.name)?;
        link.flush()?;
    }
    let mut inbox = Inbox::new();
    while inbox.filled().len() < HELLO.len() {
        match link.receive(&mut inbox, usize::MAX) {
            Ok(_) => {}
            Err(error) if would_block(&error) => {
                link.wait(&start.wake, false, left(limit)?)?;
                link.flush()?;
            }
            Err(error) => return Err(error.into()),
        }
        if start.wake.is_ending() {
            return Err(LaneEnd::Told);
        }
    }
    if inbox.filled() != HELLO {
        return Err(LaneEnd::Violation("another answer to hello"));
    }
    Ok(link)
}

enum Never {}

impl Sender<'_> {
    fn serve(&mut self) -> Result<Never, LaneEnd> {
        let mut buffers = Buffers::new();
        let mut batch = Vec::new();
        let mut used = Instant::now();
        // Acknowledgements are looked for when the socket has something to read, and now and then while it is not waited
        // for.
        let mut batches = 0;
        loop {
            if batches == 0 {
                self.take_acks()?;
            }
            if self.start.wake.is_ending() {
                return Err(LaneEnd::Told);
            }
            batch.clear();
            if self.left.unacked.len() < MAX_UNACKED {
                let outbox = &self.start.peer.outbox;
                outbox.take(
                    self.start.life,
                    &self.start.wake,
                    &mut batch,
                    BATCH_CHUNKS,
                    BATCH_BYTES,
                );
            }
            if !batch.is_empty() {
                self.send_batch(&batch, &mut buffers)?;
                used = Instant::now();
                batches = (batches + 1) % ACKS_EACH;
                continue;
            }
            batches = 0;
            if self.left.unacked.is_empty() {
                let idle = self.config.idle.saturating_sub(used.elapsed());
                if idle.is_zero() {
                    // Nobody is to count on this lane from here on; what came meanwhile is for the others.
                    return Err(LaneEnd::Idle);
                }
                self.link.wait(&self.start.wake, false, idle)?;
            } else {
                let limit = self.stall_limit()?;
                self.wait(false, limit)?;
            }
        }
    }

    /// Waits, but not for so long that bytes could leave unseen.
    fn wait(&mut self, writing: bool, limit: Duration) -> Result<Waited, LaneEnd> {
        let waited = self.link.wait(&self.start.wake, writing, limit.min(ALIVE))?;
        // On a slow link a chunk is in our kernel's buffer for long, and nothing else shows that it leaves there.
        let unsent = self.link.unacknowledged()?;
        if unsent < std::mem::replace(&mut self.unsent, unsent) {
            self.moves();
        }
        Ok(waited)
    }

    /// Something moved.
    fn moves(&mut self) {
        let now = Instant::now();
        self.moved = now;
        if now.saturating_duration_since(self.told) < ALIVE {
            return;
        }
        self.told = now;
        for unacked in &self.left.unacked {
            unacked.taken.job.lives(now);
        }
        self.start.peer.outbox.lives(now);
    }

    /// How long nothing may move from now on.
    fn stall_limit(&self) -> Result<Duration, LaneEnd> {
        match self.config.stall.saturating_sub(self.moved.elapsed()) {
            Duration::ZERO => Err(LaneEnd::Stalled(self.config.stall)),
            limit => Ok(limit),
        }
    }

    /// How long the pages of closed jobs may be held from now on.
    fn held_limit(&mut self) -> Result<Duration, LaneEnd> {
        if !self.holding.iter().any(|job| job.is_closed()) {
            return Ok(Duration::MAX);
        }
        let since = self.held.get_or_insert_with(Instant::now);
        match MAX_HELD.saturating_sub(since.elapsed()) {
            Duration::ZERO => Err(LaneEnd::Held(MAX_HELD)),
            limit => Ok(limit),
        }
    }

    /// Sends the chunks of a batch, whole, whatever becomes of their jobs meanwhile.
    fn send_batch(&mut self, batch: &[Taken], buffers: &mut Buffers) -> Result<(), LaneEnd> {
        // All are this lane's from here on, should it break.
        let before = self.left.unacked.len();
        self.left.unacked.extend(batch.iter().map(|taken| Unacked {
            taken: taken.clone(),
            bytes: taken.view.map.chunk_bytes(taken.chunk),
            moves: 0,
            bounced: 0,
        }));
        if before == 0 {
            self.moved = Instant::now();
        }
        self.held = None;
        self.holding.clear();
        self.holding
            .extend(batch.iter().map(|taken| Arc::clone(&taken.job)));
        self.departing = batch.len();
        let sent = self.send_frames(batch, buffers);
        self.holding.clear();
        sent
    }

    fn send_frames(&mut self, batch: &[Taken], buffers: &mut Buffers) -> Result<(), LaneEnd> {
        // Held until the window, which points into it, is sent.
        let memories: Vec<_> = batch
            .iter()
            .map(|taken| match &taken.job.role {
                Role::Send { memory, .. } => memory.get(),
                _ => None,
            })
            .collect();
        let mut window = Gather::new(buffers, self.link.is_direct());
        let mut unsent = batch.len();
        for (taken, memory) in batch.iter().zip(&memories) {
            let Role::Send { slot, .. } = &taken.job.role else {
                continue;
            };
            let mut frame = Departing::begin(self, &mut window, taken, *slot)?;
            frame.pages(self, &mut window, taken, memory.as_deref())?;
            let counted = frame.end(self, &mut window)?;
            // Acknowledgements come in the order of frames, and none is taken for a frame that has not left.
            let at = self.left.unacked.len() - unsent;
            self.left.unacked[at].moves = counted.0;
            self.left.unacked[at].bounced = counted.1;
            unsent -= 1;
        }
        self.drain(&mut window)
    }

    /// Sends the whole window, and takes acknowledgements while it waits for room.
    pub(super) fn drain(&mut self, window: &mut Gather<'_>) -> Result<(), LaneEnd> {
        while !window.is_empty() {
            match self.link.send_window(window) {
                Ok(_) => {
                    self.departing = self.holding.len().saturating_sub(window.gone());
                    self.start.peer.traffic.called();
                    self.moves();
                }
                Err(error) if would_block(&error) => self.wait_for_room()?,
                Err(error) => return Err(error.into()),
            }
        }
        while self.link.is_unsent() {
            self.link.flush()?;
            if self.link.is_unsent() {
                self.wait_for_room()?;
            }
        }
        Ok(())
    }

    fn wait_for_room(&mut self) -> Result<(), LaneEnd> {
        let limit = self.stall_limit()?.min(self.held_limit()?);
        let waited = self.wait(true, limit)?;
        if self.start.wake.is_ending() {
            return Err(LaneEnd::Told);
        }
        if waited.readable {
            self.take_acks()?;
        }
        Ok(())
    }

    /// Takes the acknowledgements that are there.
    fn take_acks(&mut self) -> Result<(), LaneEnd> {
        loop {
            match self.link.receive(&mut self.acks, usize::MAX) {
                Ok(_) => {}
                Err(error) if would_block(&error) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
            self.moves();
            while let Some(bytes) = self.acks.filled().first_chunk::<ACK_BYTES>() {
                let ack = Ack::decode(bytes).ok_or(LaneEnd::Violation("a damaged acknowledgement"))?;
                self.acks.consume(ACK_BYTES);
                self.take_ack(&ack)?;
            }
        }
    }

    fn take_ack(&mut self, ack: &Ack) -> Result<(), LaneEnd> {
        let is_sent = self.left.unacked.len() > self.departing;
        let Some(unacked) = is_sent.then(|| self.left.unacked.pop_front()).flatten() else {
            return Err(LaneEnd::Violation("an acknowledgement of what was not sent"));
        };
        let Taken { job, chunk, .. } = &unacked.taken;
        let named = match &job.role {
            Role::Send { slot, .. } => *slot == ack.slot && *chunk == ack.chunk,
            _ => false,
        };
        if !named {
            // It may be acknowledged yet, as far as we know.
            self.left.unacked.push_front(unacked);
            return Err(LaneEnd::Violation("an acknowledgement of another chunk"));
        }
        match ack.verdict {
            Verdict::Landed => {
                self.left.carried = true;
                self.start.peer.traffic.sent(unacked.bytes);
                job.moved(unacked.bytes, unacked.moves, unacked.bounced);
                let complete = job.source().is_some_and(|mut source| source.done());
                if complete {
                    job.complete();
                }
            }
            // The receiver's broker tells ours why.
            Verdict::Unknown | Verdict::Failed => job.stop(),
            // Only for a job that was closed or failed here.
            Verdict::Void => {}
            Verdict::Differs => job.fail(Trouble {
                code: Code::VerdictsDiffer,
                message: format!(
                    "chunk {chunk} is another one by the receiver's plan; run the same release on both nodes"
                ),
            }),
            Verdict::Damaged => self.start.peer.damaged(&unacked.taken),
        }
        Ok(())
    }
}
