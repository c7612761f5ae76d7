//! Jobs of the data plane: whose they are, and what becomes of their reports.

use std::collections::BTreeMap;

use kvferry_control::{Fault, Path};
use kvferry_handshake::Code;

use crate::Broker;
use crate::announced::PartKey;
use crate::io::{DataCommand, DataEvent, JobId, PeerAddress, Tally};

/// A job. A copy within this daemon belongs to both sides, any other to one.
#[derive(Debug)]
pub(crate) struct Job {
    pub(crate) peer: PeerAddress,
    pub(crate) path: Path,
    /// The publishing side, here.
    pub(crate) part: Option<PartKey>,
    /// The fetching side, here: (fetch, prefill rank).
    pub(crate) fetch: Option<(u64, u32)>,
    /// Bytes moved, once it began.
    bytes: Option<u64>,
    complete: bool,
    closing: bool,
}

#[derive(Debug, Default)]
pub(crate) struct Jobs {
    open: BTreeMap<JobId, Job>,
}

impl Jobs {
    pub(crate) fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.open.len()
    }

    /// Whether the job only writes what a peer sends.
    pub(crate) fn is_receive(&self, job: JobId) -> bool {
        self.open.get(&job).is_some_and(|job| job.part.is_none())
    }
}

impl Broker {
    pub(crate) fn open_job(
        &mut self,
        peer: PeerAddress,
        path: Path,
        part: Option<PartKey>,
        fetch: Option<(u64, u32)>,
    ) -> JobId {
        let job = JobId(self.number());
        self.jobs.open.insert(
            job,
            Job {
                peer,
                path,
                part,
                fetch,
                bytes: None,
                complete: false,
                closing: false,
            },
        );
        job
    }

    /// Whether the data plane still takes orders about the job.
    pub(crate) fn job_takes_orders(&self, job: JobId) -> bool {
        self.jobs.open.get(&job).is_some_and(|job| !job.closing)
    }

    pub(crate) fn close_job(&mut self, id: JobId) {
        if let Some(job) = self.jobs.open.get_mut(&id)
            && !job.closing
        {
            job.closing = true;
            self.data(DataCommand::Close { job: id });
        }
    }

    /// What the data plane says of a job that is not open belongs to nothing any more.
    pub(crate) fn data_event(&mut self, event: DataEvent) {
        match event {
            DataEvent::Progress { job, bytes } => self.job_moved(job, bytes),
            DataEvent::Alive { job } => self.job_lives(job),
            DataEvent::Complete { job } => self.job_complete(job),
            DataEvent::Failed { job, cause } => self.job_failed(job, &cause),
            DataEvent::Closed { job, tally } => self.job_closed(job, tally),
            DataEvent::Trouble { peer, what } => self.note_trouble(&peer, what),
        }
    }

    fn job_complete(&mut self, id: JobId) {
        let Some(job) = self.jobs.open.get_mut(&id) else {
            return;
        };
        let (part, fetch) = (job.part.clone(), job.fetch);
        // Nothing is complete before its end is known, whatever the data plane says.
        let known = match (&part, fetch) {
            (Some(key), _) => self.part_knows_end(key),
            (None, Some((number, rank))) => self.fetches.knows_end(number, rank),
            (None, None) => true,
        };
        if !known {
            let cause = Fault::new(
                Code::Internal,
                "the data plane calls a job complete before its end is known",
            );
            return self.job_failed(id, &cause);
        }
        let Some(job) = self.jobs.open.get_mut(&id) else {
            return;
        };
        job.complete = true;
        self.close_job(id);
    }

    fn job_moved(&mut self, id: JobId, bytes: u64) {
        let Some(job) = self.jobs.open.get_mut(&id) else {
            return;
        };
        // The first report says that the job began, whatever it has moved.
        if job.bytes.is_some_and(|known| bytes <= known) {
            return;
        }
        job.bytes = Some(bytes);
        let (part, fetch) = (job.part.clone(), job.fetch);
        if let Some((number, rank)) = fetch {
            self.fetch_moved(number, rank, bytes);
        }
        if let Some(key) = part {
            self.part_moved(&key, id, bytes);
        }
    }

    fn job_lives(&mut self, id: JobId) {
        let Some(job) = self.jobs.open.get(&id).filter(|job| !job.closing) else {
            return;
        };
        let (part, fetch) = (job.part.clone(), job.fetch);
        if let Some((number, _)) = fetch {
            self.fetch_lives(number);
        }
        if let Some(key) = part {
            self.part_lives(&key);
        }
    }

    fn job_failed(&mut self, id: JobId, cause: &Fault) {
        self.close_job(id);
        let Some(job) = self.jobs.open.get(&id) else {
            return;
        };
        let (part, fetch) = (job.part.clone(), job.fetch);
        if let Some((number, _)) = fetch {
            self.fail_fetch(number, cause.clone());
        }
        if let Some(key) = part {
            self.fail_part(&key, cause.clone().into());
        }
    }

    fn job_closed(&mut self, id: JobId, tally: Tally) {
        let Some(job) = self.jobs.open.remove(&id) else {
            return;
        };
        let unasked = !job.closing;
        let cause = Fault::new(
            Code::Internal,
            "the data plane closed a job that it was not asked to",
        );
        if let Some((number, rank)) = job.fetch {
            self.fetch_job_closed(number, rank, &job, &tally, job.complete);
            if unasked {
                self.fail_fetch(number, cause.clone());
            }
        }
        if let Some(key) = &job.part {
            self.part_job_closed(key, &job, &tally);
            if unasked {
                self.fail_part(key, cause.into());
            }
        }
    }
}
