//! All jobs, and the sink that events go to.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex, RwLock, Weak};

use crate::copy::Copies;
use crate::job::{Job, Role};
use crate::peer::Peer;
use crate::{Event, JobId};

/// How many completed receives are remembered after they were closed.
const REMEMBERED: usize = 4096;

/// The open jobs.
pub(crate) struct Jobs {
    pub(crate) sink: Arc<dyn Fn(Event) + Send + Sync>,
    pub(crate) copies: Copies,
    table: RwLock<HashMap<JobId, Arc<Job>>>,
    completed: Mutex<Completed>,
}

/// Receives that completed and were closed. A chunk that comes again because its acknowledgement was lost with
/// its lane is then still acknowledged, and its sender completes too.
#[derive(Debug, Default)]
struct Completed {
    order: VecDeque<JobId>,
    /// They keep no peer: one that was forgotten and came again is another.
    peers: HashMap<JobId, Weak<Peer>>,
}

impl Completed {
    fn clear(&mut self) {
        self.order.clear();
        self.peers.clear();
    }
}

impl Jobs {
    pub(crate) fn new(sink: Arc<dyn Fn(Event) + Send + Sync>) -> Jobs {
        Jobs {
            sink,
            copies: Copies::default(),
            table: RwLock::default(),
            completed: Mutex::default(),
        }
    }

    /// Adds a job; a number that is in use is refused.
    pub(crate) fn add(self: &Arc<Self>, id: JobId, role: Role) -> Option<Arc<Job>> {
        let job = Arc::new(Job::new(id, role, Arc::downgrade(self)));
        let mut table = self.table.write().unwrap_or_else(|e| e.into_inner());
        match table.entry(id) {
            Entry::Occupied(_) => None,
            Entry::Vacant(entry) => Some(Arc::clone(entry.insert(job))),
        }
    }

    pub(crate) fn get(&self, id: JobId) -> Option<Arc<Job>> {
        self.table
            .read()
            .unwrap_or_else(|e| e.into_inner())
            .get(&id)
            .cloned()
    }

    /// A closed job is at rest.
    pub(crate) fn forget(&self, job: &Job, completed: bool) {
        if completed && let Role::Receive { peer, .. } = &job.role {
            let mut completed = self.completed.lock().unwrap_or_else(|e| e.into_inner());
            completed.order.push_back(job.id);
            completed.peers.insert(job.id, Arc::downgrade(peer));
            if completed.order.len() > REMEMBERED
                && let Some(oldest) = completed.order.pop_front()
            {
                completed.peers.remove(&oldest);
            }
        }
        // After it is remembered, so that a chunk that comes again meanwhile finds it in one place or the other.
        let removed = self
            .table
            .write()
            .unwrap_or_else(|e| e.into_inner())
            .remove(&job.id);
        drop(removed);
    }

    /// Whether this receive from this peer completed before it was closed, as far as remembered.
    pub(crate) fn has_completed(&self, id: JobId, peer: &Arc<Peer>) -> bool {
        let completed = self.completed.lock().unwrap_or_else(|e| e.into_inner());
        let of = completed.peers.get(&id);
        of.is_some_and(|of| std::ptr::eq(of.as_ptr(), Arc::as_ptr(peer)))
    }

    /// Drops all jobs, without a word.
    pub(crate) fn clear(&self) {
        let jobs = std::mem::take(&mut *self.table.write().unwrap_or_else(|e| e.into_inner()));
        for job in jobs.values() {
            job.stop();
        }
        self.completed.lock().unwrap_or_else(|e| e.into_inner()).clear();
    }

    pub(crate) fn count(&self) -> usize {
        self.table.read().unwrap_or_else(|e| e.into_inner()).len()
    }
}

impl fmt::Debug for Jobs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Jobs")
            .field("open", &self.count())
            .finish_non_exhaustive()
    }
}
