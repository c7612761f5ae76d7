//! A job: its memory, its fence, and what is told about it.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::time::{Duration, Instant};

use kvferry_handshake::Code;
use kvferry_plan::Extent;

use crate::fence::Fence;
use crate::jobs::Jobs;
use crate::peer::Peer;
use crate::region::{Piece, Region};
use crate::source::Source;
use crate::target::Target;
use crate::{Event, JobId, Tally};

/// Progress is told at most so often per job.
const PROGRESS_MS: u64 = 100;
/// And that it is alive, at most so often.
pub(crate) const ALIVE: Duration = Duration::from_millis(250);

/// A transfer fails when so many of its chunks came damaged.
pub(crate) const MAX_DAMAGED: u32 = 3;

const OPEN: u8 = 0;
const COMPLETE: u8 = 1;
const FAILED: u8 = 2;

/// Something that the data plane was asked to move.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) id: JobId,
    pub(crate) role: Role,
    jobs: Weak<Jobs>,
    fence: Fence,
    /// [`OPEN`], [`COMPLETE`] or [`FAILED`].
    outcome: AtomicU8,
    closed: AtomicBool,
    started: Instant,
    /// When progress is told next, in milliseconds since `started`.
    next_progress: AtomicU64,
    /// The same for its being alive.
    next_alive: AtomicU64,
    bytes: AtomicU64,
    moves: AtomicU64,
    bounced: AtomicU64,
    resent: AtomicU64,
    damaged: AtomicU32,
}

/// Which kind of job, with what each has.
#[derive(Debug)]
pub(crate) enum Role {
    Send {
        peer: Arc<Peer>,
        slot: u64,
        source: Mutex<Source>,
        memory: Held,
    },
    Receive {
        peer: Arc<Peer>,
        target: Mutex<Target>,
        memory: Held,
    },
    Copy {
        source: Mutex<Source>,
        source_memory: Held,
        memory: Held,
    },
}

/// The regions of one rank, by number.
#[derive(Debug, Default)]
pub(crate) struct RankMemory(Vec<Option<Arc<Region>>>);

/// A rank's memory as a job holds it: let go when the job is at rest, however long something still knows the job. Whoever
/// moves a chunk holds it too meanwhile.
#[derive(Debug)]
pub(crate) struct Held(Mutex<Option<Arc<RankMemory>>>);

/// Why a chunk cannot be moved.
#[derive(Debug)]
pub(crate) struct Trouble {
    pub(crate) code: Code,
    pub(crate) message: String,
}

/// Being inside a job's fence: for the time of one system call or copy, never while waiting.
#[derive(Debug)]
pub(crate) struct Pass<'j>(&'j Job);

impl RankMemory {
    pub(crate) fn new(regions: impl IntoIterator<Item = (u16, Arc<Region>)>) -> RankMemory {
        let mut memory = RankMemory::default();
        for (number, region) in regions {
            let at = usize::from(number);
            if memory.0.len() <= at {
                memory.0.resize(at + 1, None);
            }
            memory.0[at] = Some(region);
        }
        memory
    }

    /// The memory of an extent.
    #[inline]
    pub(crate) fn piece(&self, region: u16, offset: u64, len: u64) -> Result<Piece<'_>, Trouble> {
        let found = self.0.get(usize::from(region)).and_then(Option::as_ref);
        match found.and_then(|found| found.piece(offset, len)) {
            Some(piece) => Ok(piece),
            None => Err(outside(region, offset, len, found.is_some())),
        }
    }

    pub(crate) fn extent(&self, extent: &Extent) -> Result<Piece<'_>, Trouble> {
        self.piece(extent.region, extent.offset, extent.len)
    }
}

impl Held {
    /// The memory; `None` once it was let go.
    pub(crate) fn get(&self) -> Option<Arc<RankMemory>> {
        self.0.lock().unwrap_or_else(|e| e.into_inner()).clone()
    }

    /// Lets go. Tells whether somebody else holds it still.
    fn let_go(&self) -> bool {
        let memory = self.0.lock().unwrap_or_else(|e| e.into_inner()).take();
        memory.is_some_and(|memory| Arc::into_inner(memory).is_none())
    }
}

impl From<RankMemory> for Held {
    fn from(memory: RankMemory) -> Held {
        Held(Mutex::new(Some(Arc::new(memory))))
    }
}

#[cold]
fn outside(region: u16, offset: u64, len: u64, registered: bool) -> Trouble {
    let what = if registered {
        "the region ends before"
    } else {
        "the region is not registered"
    };
    Trouble {
        code: Code::RegionOutOfBounds,
        message: format!(
            "region {region}: bytes {offset} to {} are planned, and {what}; register it as long as the envelope says",
            offset.saturating_add(len)
        ),
    }
}

impl Job {
    pub(crate) fn new(id: JobId, role: Role, jobs: Weak<Jobs>) -> Job {
        Job {
            id,
            role,
            jobs,
            fence: Fence::default(),
            outcome: AtomicU8::new(OPEN),
            closed: AtomicBool::new(false),
            started: Instant::now(),
            next_progress: AtomicU64::new(0),
            next_alive: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            moves: AtomicU64::new(0),
            bounced: AtomicU64::new(0),
            resent: AtomicU64::new(0),
            damaged: AtomicU32::new(0),
        }
    }

    /// Enters the fence, unless the job is closed.
    pub(crate) fn enter(&self) -> Option<Pass<'_>> {
        let entered = self.fence.enter();
        // Dropped at once when turned away: it has been counted.
        let pass = Pass(self);
        entered.then_some(pass)
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.fence.is_closed()
    }

    /// The source of a send or copy.
    pub(crate) fn source(&self) -> Option<MutexGuard<'_, Source>> {
        match &self.role {
            Role::Send { source, .. } | Role::Copy { source, .. } => {
                Some(source.lock().unwrap_or_else(|e| e.into_inner()))
            }
            Role::Receive { .. } => None,
        }
    }

    /// The target of a receive.
    pub(crate) fn target(&self) -> Option<MutexGuard<'_, Target>> {
        match &self.role {
            Role::Receive { target, .. } => Some(target.lock().unwrap_or_else(|e| e.into_inner())),
            _ => None,
        }
    }

    /// A chunk of so many bytes in so many ranges is done.
    pub(crate) fn moved(&self, bytes: u64, moves: u64, bounced: u64) {
        self.moves.fetch_add(moves, Ordering::Relaxed);
        self.bounced.fetch_add(bounced, Ordering::Relaxed);
        let bytes = self
            .bytes
            .fetch_add(bytes, Ordering::Relaxed)
            .saturating_add(bytes);
        if self.is_due(&self.next_progress, Instant::now(), PROGRESS_MS) {
            self.tell(|job| Event::Progress { job, bytes });
        }
    }

    /// Bytes of it moved, or those before it in the line did.
    pub(crate) fn lives(&self, now: Instant) {
        let each = u64::try_from(ALIVE.as_millis()).unwrap_or(u64::MAX);
        if self.is_due(&self.next_alive, now, each) {
            self.tell(|job| Event::Alive { job });
        }
    }

    /// Whether something is to be told again; true for one who asks.
    fn is_due(&self, next: &AtomicU64, now: Instant, each: u64) -> bool {
        let now = now.saturating_duration_since(self.started);
        let now = u64::try_from(now.as_millis()).unwrap_or(u64::MAX);
        let due = next.load(Ordering::Relaxed);
        let again = now.saturating_add(each);
        now >= due
            && next
                .compare_exchange(due, again, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok()
    }

    /// A chunk has to be sent again.
    pub(crate) fn sent_in_vain(&self) {
        self.resent.fetch_add(1, Ordering::Relaxed);
    }

    /// A chunk's checksum did not match. Gives how many that were; [`MAX_DAMAGED`] are too many.
    pub(crate) fn came_damaged(&self) -> u32 {
        self.damaged.fetch_add(1, Ordering::Relaxed).saturating_add(1)
    }

    /// Every chunk is done. Told once.
    pub(crate) fn complete(&self) {
        if self.becomes(COMPLETE) {
            self.tell(|job| Event::Complete { job });
        }
    }

    /// The job cannot go on. Told once, and not after it completed.
    pub(crate) fn fail(&self, trouble: Trouble) {
        if self.becomes(FAILED) {
            self.tell(|job| Event::Failed {
                job,
                code: trouble.code,
                message: trouble.message,
            });
        }
        self.stop();
    }

    pub(crate) fn has_completed(&self) -> bool {
        self.outcome.load(Ordering::Acquire) == COMPLETE
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.outcome.load(Ordering::Acquire) == FAILED
    }

    /// The first outcome is the only one.
    fn becomes(&self, outcome: u8) -> bool {
        let changed = self
            .outcome
            .compare_exchange(OPEN, outcome, Ordering::AcqRel, Ordering::Acquire);
        changed.is_ok()
    }

    /// No chunk is taken from it any more.
    pub(crate) fn stop(&self) {
        let in_line = self.source().is_some_and(|mut source| source.stop());
        if !in_line {
            return;
        }
        match &self.role {
            Role::Send { peer, .. } => peer.outbox.leave(self),
            Role::Copy { .. } => {
                if let Some(jobs) = self.jobs.upgrade() {
                    jobs.copies.leave(self);
                }
            }
            Role::Receive { .. } => {}
        }
    }

    /// Stops, and closes the fence; [`Event::Closed`] is told when nobody is inside.
    pub(crate) fn close(&self) {
        self.stop();
        if self.fence.close() {
            self.at_rest();
        }
    }

    /// Events about a job come from inside its fence, so that none comes after `Closed`.
    fn tell(&self, event: impl FnOnce(JobId) -> Event) {
        if let Some(_pass) = self.enter()
            && let Some(jobs) = self.jobs.upgrade()
        {
            (jobs.sink)(event(self.id));
        }
    }

    fn at_rest(&self) {
        if self.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        // Before it is told, so that a region that is released then is not held by a job any more. A lane that is in the
        // middle of a chunk is woken to let go too.
        match &self.role {
            Role::Send { peer, memory, .. } => {
                if memory.let_go() {
                    peer.lanes().nudge_senders();
                }
            }
            Role::Receive { peer, memory, .. } => {
                if memory.let_go() {
                    peer.lanes().nudge_receivers();
                }
            }
            Role::Copy {
                source_memory,
                memory,
                ..
            } => {
                source_memory.let_go();
                memory.let_go();
            }
        }
        if let Some(jobs) = self.jobs.upgrade() {
            jobs.forget(self, self.has_completed());
            (jobs.sink)(Event::Closed {
                job: self.id,
                tally: Tally {
                    bytes: self.bytes.load(Ordering::Relaxed),
                    moves: self.moves.load(Ordering::Relaxed),
                    bounced: self.bounced.load(Ordering::Relaxed),
                    resent: self.resent.load(Ordering::Relaxed),
                },
            });
        }
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        if self.0.fence.leave() {
            self.0.at_rest();
        }
    }
}
