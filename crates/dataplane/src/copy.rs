//! The local path: a small pool of threads that copy within the node, chunk by chunk.

use std::sync::{Arc, Condvar, Mutex};
use std::time::Instant;

use kvferry_handshake::Code;

use crate::batches::BATCH;
use crate::job::{Job, Pass, Role, Trouble};
use crate::line::{Line, Taken};
use crate::memory::Span;
use crate::process::{EngineProcess, MAX_RANGES, Remote, Way};
use crate::region::Piece;

/// Bytes copied before the fence is left for a moment, so that a close need not wait for a whole chunk.
const PASS_BYTES: usize = 1 << 20;
/// Most bytes of one system call that copies to or from a process.
const BATCH_BYTES: usize = 1 << 20;
/// Copies queued before they are made, for the reason that [`crate::batches`] tells. What is copied soon is known too, so that
/// it can be fetched into the cache meanwhile.
const QUEUED_COPIES: usize = BATCH;
/// How many copies ahead memory is fetched.
const FETCHED_AHEAD: usize = 2;

/// The jobs that wait for the pool.
#[derive(Debug, Default)]
pub(crate) struct Copies {
    state: Mutex<State>,
    more: Condvar,
}

#[derive(Debug, Default)]
struct State {
    line: Line,
    ending: bool,
}

impl Copies {
    /// Puts a job into the line.
    pub(crate) fn join(&self, job: &Arc<Job>) {
        let mut state = self.state.lock().unwrap_or_else(|e| e.into_inner());
        state.line.join(job);
        let waiting = state.line.waiting(2);
        drop(state);
        match waiting {
            0 => {}
            1 => self.more.notify_one(),
            _ => self.more.notify_all(),
        }
    }

    /// Removes a job that was stopped.
    pub(crate) fn leave(&self, job: &Job) {
        self.state
            .lock()
            .unwrap_or_else(|e| e.into_inner())
            .line
            .leave(job);
    }

    /// Jobs in the line.
    pub(crate) fn waiting(&self) -> usize {
        let state = self.state.lock().unwrap_or_else(|e| e.into_inner());
        state.line.jobs().count()
    }

    /// Ends all workers.
    pub(crate) fn end(&self) {
        self.state.lock().unwrap_or_else(|e| e.into_inner()).ending = true;
        self.more.notify_all();
    }

    /// Something was copied: those who wait their turn are not stuck.
    fn lives(&self) {
        let now = Instant::now();
        let jobs = self
            .state
            .lock()
            .unwrap_or_else(|e| e.into_inner())
            .line
            .moves(now);
        for job in jobs {
            job.lives(now);
        }
    }

    fn next(&self) -> Option<Taken> {
        let mut state = self.state.lock().unwrap_or_else(|e| e.into_inner());
        loop {
            if state.ending {
                return None;
            }
            if let Some(taken) = state.line.take() {
                return Some(taken);
            }
            state = self.more.wait(state).unwrap_or_else(|e| e.into_inner());
        }
    }

    /// A worker's life.
    pub(crate) fn work(&self) {
        let mut bounce = Vec::new();
        while let Some(taken) = self.next() {
            // A defect met in one job must not take the thread from the others.
            let copied = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| copy(&taken, &mut bounce)));
            match copied {
                Ok(Ok(done)) => {
                    finish(&taken.job, &done);
                    self.lives();
                }
                Ok(Err(Halt::Closed)) => {}
                Ok(Err(Halt::Trouble(trouble))) => taken.job.fail(trouble),
                Err(_) => taken.job.fail(Trouble {
                    code: Code::Internal,
                    message: format!("copying chunk {} met a defect", taken.chunk),
                }),
            }
        }
    }
}

/// What was copied of a chunk.
#[derive(Debug, Default)]
struct Done {
    bytes: u64,
    moves: u64,
    bounced: u64,
}

/// Why a chunk was not copied.
#[derive(Debug)]
enum Halt {
    Closed,
    Trouble(Trouble),
}

fn finish(job: &Job, done: &Done) {
    job.moved(done.bytes, done.moves, done.bounced);
    let complete = job.source().is_some_and(|mut source| source.done());
    if complete {
        job.complete();
    }
}

fn copy(taken: &Taken, bounce: &mut Vec<u8>) -> Result<Done, Halt> {
    let Role::Copy {
        source_memory,
        memory,
        ..
    } = &taken.job.role
    else {
        return Ok(Done::default());
    };
    let (Some(source_memory), Some(memory)) = (source_memory.get(), memory.get()) else {
        return Err(Halt::Closed);
    };
    let mut done = Done::default();
    let mut carrier = Carrier::new(&taken.job, bounce);
    for step in taken.view.map.moves(taken.chunk, &taken.view.pages) {
        let source = source_memory.piece(step.source_region, step.source_offset, step.len);
        let target = memory.piece(step.region, step.offset, step.len);
        let (source, target) = (source.map_err(Halt::Trouble)?, target.map_err(Halt::Trouble)?);
        carrier.carry(source, target)?;
        done.moves += 1;
        done.bytes += step.len;
    }
    carrier.finish()?;
    // A walk over lists that do not fit ends early; that must not pass for a copy.
    let planned = taken.view.map.chunk_bytes(taken.chunk);
    if done.bytes != planned {
        return Err(Halt::Trouble(Trouble {
            code: Code::Internal,
            message: format!(
                "chunk {} has {planned} bytes by its plan, and {} by its page lists",
                taken.chunk, done.bytes
            ),
        }));
    }
    done.bounced = carrier.bounced;
    Ok(done)
}

/// Carries bytes between two ranks' memory, of whatever kind each is.
struct Carrier<'c> {
    job: &'c Job,
    pass: Option<Pass<'c>>,
    /// Bytes until the fence is left for a moment.
    budget: usize,
    /// Copies between mappings that are due.
    copies: Vec<(Span<'c>, Span<'c>)>,
    /// Where a process takes part: ranges for the next system call.
    route: Option<Route<'c>>,
    spans: Vec<Span<'c>>,
    remote: Vec<Remote>,
    remote_targets: Vec<Remote>,
    queued: usize,
    bounce: &'c mut Vec<u8>,
    bounced: u64,
}

/// Between whom ranges are queued.
#[derive(Clone, Copy, Debug)]
enum Route<'c> {
    /// A mapping and a process: no bounce.
    Direct(Way, &'c EngineProcess),
    /// Two processes, through the bounce buffer.
    Bounce(&'c EngineProcess, &'c EngineProcess),
}

impl Route<'_> {
    fn same(&self, other: &Route<'_>) -> bool {
        match (self, other) {
            (Route::Direct(way, process), Route::Direct(other_way, other)) => {
                way == other_way && std::ptr::eq(*process, *other)
            }
            (Route::Bounce(from, to), Route::Bounce(other_from, other_to)) => {
                std::ptr::eq(*from, *other_from) && std::ptr::eq(*to, *other_to)
            }
            _ => false,
        }
    }
}

impl<'c> Carrier<'c> {
    fn new(job: &'c Job, bounce: &'c mut Vec<u8>) -> Carrier<'c> {
        Carrier {
            job,
            pass: None,
            budget: 0,
            copies: Vec::with_capacity(QUEUED_COPIES),
            route: None,
            spans: Vec::new(),
            remote: Vec::new(),
            remote_targets: Vec::new(),
            queued: 0,
            bounce,
            bounced: 0,
        }
    }

    /// Carries a move, which has one length on both sides.
    #[inline]
    fn carry(&mut self, source: Piece<'c>, target: Piece<'c>) -> Result<(), Halt> {
        match (source, target) {
            (Piece::Mapped(source), Piece::Mapped(target)) => {
                self.copies.push((source, target));
                if self.copies.len() == QUEUED_COPIES {
                    self.copy_queued()?;
                }
                Ok(())
            }
            (Piece::Mapped(span), Piece::Process(process, remote)) => {
                self.queue_direct(Route::Direct(Way::ToEngine, process), span, remote)
            }
            (Piece::Process(process, remote), Piece::Mapped(span)) => {
                self.queue_direct(Route::Direct(Way::FromEngine, process), span, remote)
            }
            (Piece::Process(from, source), Piece::Process(to, target)) => {
                self.queue_bounce(Route::Bounce(from, to), source, target)
            }
        }
    }

    /// Is inside the fence when this returns, now and then having left it.
    fn inside(&mut self, bytes: usize) -> Result<(), Halt> {
        if self.budget < bytes {
            self.pass = None;
            self.budget = PASS_BYTES;
            self.job.lives(Instant::now());
        }
        self.budget = self.budget.saturating_sub(bytes);
        if self.pass.is_none() {
            self.pass = self.job.enter();
        }
        if self.pass.is_some() {
            Ok(())
        } else {
            Err(Halt::Closed)
        }
    }

    /// Makes the copies that are queued.
    fn copy_queued(&mut self) -> Result<(), Halt> {
        let mut copies = std::mem::take(&mut self.copies);
        for (at, (source, target)) in copies.iter().enumerate() {
            if let Some((source, target)) = copies.get(at + FETCHED_AHEAD) {
                source.fetch_to_read();
                target.fetch_to_write();
            }
            self.copy(*source, *target)?;
        }
        copies.clear();
        self.copies = copies;
        Ok(())
    }

    fn copy(&mut self, mut source: Span<'c>, mut target: Span<'c>) -> Result<(), Halt> {
        while target.len() > 0 {
            let len = target.len().min(PASS_BYTES);
            self.inside(len)?;
            let (from, to);
            (from, source) = source.split(len);
            (to, target) = target.split(len);
            to.copy_from(from);
        }
        Ok(())
    }

    fn queue_direct(&mut self, route: Route<'c>, mut span: Span<'c>, mut remote: Remote) -> Result<(), Halt> {
        while span.len() > 0 {
            let (span_part, remote_part);
            (span_part, span) = span.split(BATCH_BYTES);
            (remote_part, remote) = remote.split(BATCH_BYTES);
            self.make_room(route, remote_part.len)?;
            self.spans.push(span_part);
            self.remote.push(remote_part);
        }
        Ok(())
    }

    fn queue_bounce(&mut self, route: Route<'c>, mut source: Remote, mut target: Remote) -> Result<(), Halt> {
        while source.len > 0 {
            let (source_part, target_part);
            (source_part, source) = source.split(BATCH_BYTES);
            (target_part, target) = target.split(BATCH_BYTES);
            self.make_room(route, source_part.len)?;
            self.remote.push(source_part);
            self.remote_targets.push(target_part);
        }
        Ok(())
    }

    /// Makes room in the queue for a range of so many bytes.
    fn make_room(&mut self, route: Route<'c>, bytes: usize) -> Result<(), Halt> {
        let same = self.route.is_some_and(|queued| queued.same(&route));
        if !same || self.remote.len() == MAX_RANGES || self.queued + bytes > BATCH_BYTES {
            self.flush()?;
        }
        self.route = Some(route);
        self.queued += bytes;
        Ok(())
    }

    /// Does everything that is queued.
    fn finish(&mut self) -> Result<(), Halt> {
        self.copy_queued()?;
        self.flush()
    }

    /// Does the system call that is queued.
    fn flush(&mut self) -> Result<(), Halt> {
        let Some(route) = self.route.take() else {
            return Ok(());
        };
        let bytes = std::mem::take(&mut self.queued);
        self.inside(bytes)?;
        match route {
            Route::Direct(way, process) => process
                .copy_spans(way, &self.spans, &self.remote)
                .map_err(|error| Halt::Trouble(fault(process, &error)))?,
            Route::Bounce(from, to) => {
                self.bounce.resize(BATCH_BYTES, 0);
                let bounce = &mut self.bounce[..bytes];
                from.read(&self.remote, bounce)
                    .map_err(|error| Halt::Trouble(fault(from, &error)))?;
                to.write(&self.remote_targets, bounce)
                    .map_err(|error| Halt::Trouble(fault(to, &error)))?;
                self.bounced += u64::try_from(bytes).unwrap_or(0);
            }
        }
        self.spans.clear();
        self.remote.clear();
        self.remote_targets.clear();
        Ok(())
    }
}

/// A process's memory could not be reached.
pub(crate) fn fault(process: &EngineProcess, error: &std::io::Error) -> Trouble {
    Trouble {
        code: Code::MemoryFault,
        message: format!(
            "memory of process {} could not be reached: {error}; unregister a region before freeing its memory",
            process.pid()
        ),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex, Weak};

    use kvferry_handshake::{Code, PageLists, Ready};

    use super::{Halt, copy};
    use crate::JobId;
    use crate::job::{Job, RankMemory, Role};
    use crate::line::Taken;
    use crate::source::Source;
    use crate::testing::map;

    #[test]
    fn a_walk_that_ends_early_is_no_copy() {
        let none = Arc::new(PageLists {
            groups: vec![Vec::new()],
        });
        let role = Role::Copy {
            source: Mutex::new(Source::new(map(), none)),
            source_memory: RankMemory::default().into(),
            memory: RankMemory::default().into(),
        };
        let job = Arc::new(Job::new(JobId(1), role, Weak::new()));
        let (view, chunk) = {
            let mut source = job.source().unwrap();
            source.advance(&Ready::complete(8), None);
            source.take().0.unwrap()
        };
        let halted = copy(&Taken { job, view, chunk }, &mut Vec::new());
        let Err(Halt::Trouble(trouble)) = halted else {
            panic!("{halted:?}");
        };
        assert_eq!(trouble.code, Code::Internal);
    }
}
