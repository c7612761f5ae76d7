//! Two data planes in one process, joined by a channel that can be made to fail, and engines' memory to move.

mod channel;
mod engine;
mod flow;
mod proxy;

use std::net::{IpAddr, Ipv4Addr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

pub(crate) use channel::Faults;
pub(crate) use engine::{Engine, expected, geometry, sealed, transfers};
pub(crate) use flow::{Flow, LARGE, Size, close};
use kvferry_dataplane::{Config, DataPlane, Event, JobId, LaneTrouble, Tally};
use kvferry_handshake::Code;
pub(crate) use proxy::{Proxy, Spell};

/// Nothing in these tests takes so long; a test that waits longer hangs.
pub(crate) const LIMIT: Duration = Duration::from_secs(60);
pub(crate) const HOST: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// What is known of a job.
#[derive(Clone, Debug, Default)]
pub(crate) struct Seen {
    pub(crate) progress: u64,
    /// How often it was said to be alive.
    pub(crate) alive: u32,
    pub(crate) complete: u32,
    pub(crate) failed: Option<(Code, String)>,
    pub(crate) closed: Vec<Tally>,
    /// Events after `Closed`.
    pub(crate) late: u32,
}

/// The events of one data plane.
#[derive(Default)]
pub(crate) struct Log {
    jobs: Mutex<std::collections::HashMap<JobId, Seen>>,
    changed: Condvar,
    troubles: Mutex<Vec<(LaneTrouble, String)>>,
}

impl Log {
    pub(crate) fn note(&self, event: &Event) {
        let mut jobs = self.jobs.lock().unwrap();
        let job = match event {
            Event::ToPeer { .. } => return,
            Event::Trouble { kind, what, .. } => {
                self.troubles.lock().unwrap().push((*kind, what.clone()));
                return self.changed.notify_all();
            }
            Event::Progress { job, .. }
            | Event::Alive { job }
            | Event::Complete { job }
            | Event::Failed { job, .. }
            | Event::Closed { job, .. } => *job,
        };
        let seen = jobs.entry(job).or_default();
        seen.late += u32::from(!seen.closed.is_empty());
        match event {
            Event::Progress { bytes, .. } => seen.progress = seen.progress.max(*bytes),
            Event::Alive { .. } => seen.alive += 1,
            Event::Complete { .. } => seen.complete += 1,
            Event::Failed { code, message, .. } => seen.failed = Some((*code, message.clone())),
            Event::Closed { tally, .. } => seen.closed.push(*tally),
            Event::ToPeer { .. } | Event::Trouble { .. } => {}
        }
        self.changed.notify_all();
    }

    pub(crate) fn seen(&self, job: JobId) -> Seen {
        self.jobs.lock().unwrap().get(&job).cloned().unwrap_or_default()
    }

    /// What lanes ended for, so far.
    pub(crate) fn troubles(&self) -> Vec<(LaneTrouble, String)> {
        self.troubles.lock().unwrap().clone()
    }

    /// Waits until trouble of a kind was told.
    pub(crate) fn trouble(&self, kind: LaneTrouble) -> String {
        let deadline = Instant::now() + LIMIT;
        loop {
            let told = self.troubles();
            if let Some((_, what)) = told.iter().find(|(of, _)| *of == kind) {
                return what.clone();
            }
            assert!(Instant::now() < deadline, "no {kind:?}: {told:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Waits until a job is as asked.
    pub(crate) fn until(&self, job: JobId, what: &str, is: impl Fn(&Seen) -> bool) -> Seen {
        let deadline = Instant::now() + LIMIT;
        let mut jobs = self.jobs.lock().unwrap();
        loop {
            let seen = jobs.get(&job).cloned().unwrap_or_default();
            if is(&seen) {
                return seen;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "job {job:?} is not {what}: {seen:?}");
            jobs = self.changed.wait_timeout(jobs, left).unwrap().0;
        }
    }

    /// Waits until a job is complete. A failure is one.
    pub(crate) fn complete(&self, job: JobId) -> Seen {
        let seen = self.until(job, "complete", |seen| seen.complete > 0 || seen.failed.is_some());
        assert!(seen.failed.is_none(), "{job:?}: {:?}", seen.failed);
        seen
    }

    pub(crate) fn closed(&self, job: JobId) -> Seen {
        self.until(job, "closed", |seen| !seen.closed.is_empty())
    }
}

/// One side.
pub(crate) struct Node {
    pub(crate) plane: DataPlane,
    pub(crate) log: Arc<Log>,
}

/// Two sides and the channel between them: `a` is where engines prefill, `b` where they decode.
pub(crate) struct Pair {
    pub(crate) a: Node,
    pub(crate) b: Node,
    pub(crate) faults: Arc<Faults>,
    channel: channel::Channel,
}

/// Settings with short times, so that what has to be repeated is repeated soon.
pub(crate) fn config() -> Config {
    Config {
        lanes_per_peer: 3,
        answer: Duration::from_millis(100),
        stall: Duration::from_secs(2),
        ..Config::default()
    }
}

impl Pair {
    pub(crate) fn new(config: Config) -> Pair {
        Pair::with(config.clone(), config, Faults::none())
    }

    pub(crate) fn with(a: Config, b: Config, faults: Faults) -> Pair {
        let faults = Arc::new(faults);
        let channel = channel::Channel::new(Arc::clone(&faults));
        let node = |name: &'static str, config: Config| {
            let log = Arc::new(Log::default());
            let (to, noted) = (channel.sender(), Arc::clone(&log));
            let sink = move |event: Event| {
                noted.note(&event);
                if let Event::ToPeer { peer, message } = event {
                    let _ = to.send((name, peer, message));
                }
            };
            let plane = DataPlane::start(config, Arc::new(sink)).unwrap();
            Node { plane, log }
        };
        let (a, b) = (node("a", a), node("b", b));
        channel.join([("a", a.plane.clone()), ("b", b.plane.clone())]);
        a.plane.peer_up("b", HOST);
        b.plane.peer_up("a", HOST);
        Pair {
            a,
            b,
            faults,
            channel,
        }
    }

    /// Waits until a side's counters are as asked.
    pub(crate) fn until(&self, node: &Node, what: &str, is: impl Fn(&[(String, u64)]) -> bool) {
        let deadline = Instant::now() + LIMIT;
        while !is(&node.plane.counts()) {
            let counts = node.plane.counts();
            assert!(Instant::now() < deadline, "not {what}: {counts:?}");
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Pair {
    /// Waits until so many lanes from `a` to `b` broke.
    pub(crate) fn until_lost(&self, lanes: u64) {
        let deadline = Instant::now() + LIMIT;
        while self.a.plane.traffic()[0].lost_lanes < lanes {
            assert!(Instant::now() < deadline, "{:?}", self.a.plane.traffic());
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        self.channel.end();
        self.a.plane.shutdown();
        self.b.plane.shutdown();
    }
}

/// A counter by name.
pub(crate) fn count(counts: &[(String, u64)], name: &str) -> u64 {
    counts.iter().find(|(other, _)| other == name).unwrap().1
}

static NEXT: AtomicU64 = AtomicU64::new(1);

/// A job's number, never used before.
pub(crate) fn next_job() -> JobId {
    JobId(NEXT.fetch_add(1, Ordering::Relaxed))
}
