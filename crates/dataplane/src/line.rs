//! The line of jobs that have chunks to take: each is served one chunk in turn, so that none waits for
//! another's end.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use crate::job::{ALIVE, Job};
use crate::source::View;

/// A chunk that was taken.
#[derive(Clone, Debug)]
pub(crate) struct Taken {
    pub(crate) job: Arc<Job>,
    pub(crate) view: Arc<View>,
    pub(crate) chunk: u32,
}

/// Jobs in the order in which they are served next.
#[derive(Debug, Default)]
pub(crate) struct Line {
    jobs: VecDeque<Arc<Job>>,
    /// When those who wait were last told that what they wait behind moves.
    lived: Option<Instant>,
}

impl Line {
    /// Puts a job into the line whose source said so; not one that was stopped meanwhile.
    pub(crate) fn join(&mut self, job: &Arc<Job>) {
        if job.source().is_some_and(|source| !source.is_stopped()) {
            self.jobs.push_back(Arc::clone(job));
        }
    }

    /// Removes a job that was stopped.
    pub(crate) fn leave(&mut self, job: &Job) {
        self.jobs.retain(|other| other.id != job.id);
    }

    /// The next chunk of the job whose turn it is.
    pub(crate) fn take(&mut self) -> Option<Taken> {
        while let Some(job) = self.jobs.pop_front() {
            let (taken, again) = job.source()?.take();
            let taken = taken.map(|(view, chunk)| Taken {
                job: Arc::clone(&job),
                view,
                chunk,
            });
            if again {
                self.jobs.push_back(job);
            }
            if taken.is_some() {
                return taken;
            }
        }
        None
    }

    /// Chunks that wait, counted up to `enough`.
    pub(crate) fn waiting(&self, enough: usize) -> usize {
        let mut waiting = 0;
        for job in &self.jobs {
            waiting += job.source().map_or(0, |source| source.waiting());
            if waiting >= enough {
                return enough;
            }
        }
        waiting
    }

    /// What they wait behind moves. Gives the jobs that are to be told that they are not stuck, once the line is not held
    /// any more: none where that was told a moment ago.
    pub(crate) fn moves(&mut self, now: Instant) -> Vec<Arc<Job>> {
        let told = |at: Instant| now.saturating_duration_since(at) < ALIVE;
        if self.lived.is_some_and(told) {
            return Vec::new();
        }
        self.lived = Some(now);
        self.jobs.iter().cloned().collect()
    }

    /// All jobs in the line.
    pub(crate) fn jobs(&self) -> impl Iterator<Item = &Arc<Job>> {
        self.jobs.iter()
    }
}
