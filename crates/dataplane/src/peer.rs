//! A peer: what is to be sent to it, its lanes as far as they are known here, and its traffic.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Instant;

use kvferry_handshake::Code;

use crate::job::{Job, MAX_DAMAGED, Trouble};
use crate::lanes::Lanes;
use crate::line::{Line, Taken};
use crate::wake::Wake;

/// A peer daemon.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) name: Arc<str>,
    pub(crate) outbox: Outbox,
    pub(crate) traffic: Traffic,
    lanes: Mutex<Lanes>,
}

/// The jobs with chunks to send to a peer, and the lanes that wait for some.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    line: Line,
    idle: Vec<Arc<Wake>>,
    /// Lanes of an earlier life of the channel get nothing any more.
    life: u64,
}

/// Counters of a peer.
#[derive(Debug, Default)]
pub(crate) struct Traffic {
    sent: AtomicU64,
    received: AtomicU64,
    resent: AtomicU64,
    lost: AtomicU64,
    sends: AtomicU64,
}

impl Peer {
    pub(crate) fn new(name: &str) -> Peer {
        Peer {
            name: Arc::from(name),
            outbox: Outbox::default(),
            traffic: Traffic::default(),
            lanes: Mutex::default(),
        }
    }

    pub(crate) fn lanes(&self) -> MutexGuard<'_, Lanes> {
        self.lanes.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// A chunk has to be taken again. Whoever calls wakes lanes then.
    pub(crate) fn put_back(&self, taken: &Taken) {
        taken.job.sent_in_vain();
        self.traffic.resent.fetch_add(1, Ordering::Relaxed);
        let join = taken
            .job
            .source()
            .is_some_and(|mut source| source.put_back(taken.chunk));
        if join {
            self.outbox.join(&taken.job);
        }
    }

    /// The receiver found another checksum than a chunk was sent with.
    pub(crate) fn damaged(&self, taken: &Taken) {
        if taken.job.came_damaged() < MAX_DAMAGED {
            self.put_back(taken);
            self.outbox.kick();
        } else {
            taken.job.fail(Trouble {
                code: Code::Checksum,
                message: format!(
                    "{MAX_DAMAGED} chunks came damaged at {}, the last one chunk {}; look for faulty hardware, and for pages \
                     published before they were finished",
                    self.name, taken.chunk
                ),
            });
        }
    }
}

impl Outbox {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Puts a job into the line.
    pub(crate) fn join(&self, job: &Arc<Job>) {
        self.state().line.join(job);
    }

    /// Removes a job that was stopped.
    pub(crate) fn leave(&self, job: &Job) {
        self.state().line.leave(job);
    }

    /// Wakes a lane that waits, if there is something to take.
    pub(crate) fn kick(&self) {
        let mut state = self.state();
        if state.line.waiting(1) > 0
            && let Some(wake) = state.idle.pop()
        {
            wake.wake();
        }
    }

    /// Takes chunks for a lane: one, or several small ones. If there are none, the lane is woken when there are.
    pub(crate) fn take(&self, life: u64, wake: &Arc<Wake>, batch: &mut Vec<Taken>, most: usize, bytes: u64) {
        let mut state = self.state();
        state.idle.retain(|idle| !Arc::ptr_eq(idle, wake));
        if state.life != life {
            return;
        }
        let mut sum = 0;
        while batch.len() < most && sum < bytes {
            let Some(taken) = state.line.take() else { break };
            sum += taken.view.map.chunk_bytes(taken.chunk);
            batch.push(taken);
        }
        if batch.is_empty() {
            state.idle.push(Arc::clone(wake));
        } else if state.line.waiting(1) > 0
            && let Some(idle) = state.idle.pop()
        {
            // One wakes the next, so that nobody has to know how many are needed.
            idle.wake();
        }
    }

    /// A lane moves: those who wait their turn behind what it moves are not stuck.
    pub(crate) fn lives(&self, now: Instant) {
        let jobs = self.state().line.moves(now);
        for job in jobs {
            job.lives(now);
        }
    }

    /// A lane ended: it takes nothing any more.
    pub(crate) fn lane_ended(&self, wake: &Arc<Wake>) {
        self.state().idle.retain(|idle| !Arc::ptr_eq(idle, wake));
    }

    /// A new life of the channel.
    pub(crate) fn begin_life(&self, life: u64) {
        self.state().life = life;
    }

    /// Chunks that wait, counted up to `enough`.
    pub(crate) fn waiting(&self, enough: usize) -> usize {
        self.state().line.waiting(enough)
    }

    /// The jobs that wait.
    pub(crate) fn jobs(&self) -> Vec<Arc<Job>> {
        self.state().line.jobs().cloned().collect()
    }
}

impl Traffic {
    pub(crate) fn sent(&self, bytes: u64) {
        self.sent.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn received(&self, bytes: u64) {
        self.received.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(crate) fn lost(&self) {
        self.lost.fetch_add(1, Ordering::Relaxed);
    }

    /// A system call took pages.
    pub(crate) fn called(&self) {
        self.sends.fetch_add(1, Ordering::Relaxed);
    }

    /// System calls that took pages.
    pub(crate) fn sends(&self) -> u64 {
        self.sends.load(Ordering::Relaxed)
    }

    /// Bytes sent, bytes received, chunks sent again, lanes lost.
    pub(crate) fn totals(&self) -> (u64, u64, u64, u64) {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        (
            get(&self.sent),
            get(&self.received),
            get(&self.resent),
            get(&self.lost),
        )
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use crate::testing;
    use crate::wake::Wake;

    fn taken(peer: &super::Peer, life: u64, wake: &Arc<Wake>) -> usize {
        let mut batch = Vec::new();
        peer.outbox.take(life, wake, &mut batch, 64, 1);
        batch.len()
    }

    #[test]
    fn lanes_of_an_earlier_life_take_nothing() {
        let (peer, _taken) = testing::send(1);
        let wake = Arc::new(Wake::new().unwrap());
        peer.outbox.begin_life(2);
        assert_eq!(taken(&peer, 1, &wake), 0);
        assert_eq!(taken(&peer, 2, &wake), 1);
    }

    #[test]
    fn what_is_put_back_is_taken_again_and_a_stopped_job_gives_nothing() {
        let (peer, first) = testing::send(1);
        let wake = Arc::new(Wake::new().unwrap());
        peer.put_back(&first);
        assert_eq!(peer.traffic.totals().2, 1);
        let mut batch = Vec::new();
        peer.outbox.take(0, &wake, &mut batch, 64, u64::MAX);
        let chunks: Vec<_> = batch.iter().map(|taken| taken.chunk).collect();
        assert_eq!(chunks, [0, 1, 2, 3]);
        first.job.stop();
        peer.put_back(&first);
        assert_eq!(taken(&peer, 0, &wake), 0);
        assert_eq!(peer.outbox.waiting(1), 0);
    }

    #[test]
    fn a_stopped_job_leaves_the_line() {
        let (peer, taken) = testing::send(1);
        assert_eq!(peer.outbox.waiting(10), 3);
        taken.job.stop();
        assert!(peer.outbox.jobs().is_empty());
        peer.outbox.join(&taken.job);
        assert!(
            peer.outbox.jobs().is_empty(),
            "it joined the line after it was stopped"
        );
    }
}
