//! A lane's receiving end: puts chunks where *our* plan says, and acknowledges them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_handshake::Code;

use crate::job::{Job, MAX_DAMAGED, Role, Trouble};
use crate::jobs::Jobs;
use crate::lane::frame::{
    ACK_BYTES, Ack, HEADER_BYTES, HELLO, Header, MAX_PAYLOAD, TRAILER_BYTES, Trailer, Verdict,
};
use crate::lane::landing::{Halt, Landed, Landing};
use crate::lane::scatter::{AHEAD_BYTES, Inbox, Pieces};
use crate::lane::{LaneEnd, Link, would_block};
use crate::peer::Peer;
use crate::source::View;
use crate::target::Arrival;
use crate::wake::Wake;
use crate::{Config, Event, JobId, LaneTrouble};

/// Acknowledgements that may wait for the sender to take them before nothing more is read.
const MAX_ACK_BYTES: usize = 4096 * ACK_BYTES;

/// What a receiving end needs to begin.
#[derive(Debug)]
pub(crate) struct Start {
    pub(crate) peer: Arc<Peer>,
    pub(crate) wake: Arc<Wake>,
}

pub(super) struct Receiver<'l> {
    start: &'l Start,
    pub(super) config: &'l Config,
    jobs: &'l Jobs,
    pub(super) link: Link,
    pub(super) inbox: Inbox,
    acks: Vec<u8>,
    /// When something last moved.
    pub(super) moved: Instant,
    /// A chunk has begun to arrive, and has not ended.
    within: bool,
}

/// A chunk that is arriving: missing again, should the lane break meanwhile.
struct Arriving<'c> {
    job: &'c Job,
    chunk: u32,
    settled: bool,
}

/// How a payload's way ended.
enum Payload {
    Landed(Landed),
    /// The job was closed, or failed, underway.
    Stopped(Verdict),
}

/// A receiving end's life.
pub(crate) fn run(config: &Config, jobs: &Jobs, start: &Start, link: Link) -> LaneEnd {
    let mut receiver = Receiver {
        start,
        config,
        jobs,
        link,
        inbox: Inbox::new(),
        acks: Vec::new(),
        moved: Instant::now(),
        within: false,
    };
    match receiver.serve() {
        Ok(never) => match never {},
        Err(LaneEnd::Closed) if receiver.within => LaneEnd::Cut,
        Err(end) => end,
    }
}

enum Never {}

impl Receiver<'_> {
    fn serve(&mut self) -> Result<Never, LaneEnd> {
        self.link.tune()?;
        if let Some(tls) = &self.config.tls {
            self.link.start_server_tls(tls)?;
        }
        self.acks.extend_from_slice(HELLO);
        let mut pieces = Pieces::default();
        loop {
            // Not only when there is nothing to read: a lane that is to end may still be fed.
            if self.start.wake.is_ending() {
                return Err(LaneEnd::Told);
            }
            // A sender that is idle is not a stalled one.
            self.within = false;
            self.fill(1, AHEAD_BYTES, None)?;
            self.within = true;
            self.fill(HEADER_BYTES, AHEAD_BYTES, Some(self.config.stall))?;
            let header = self
                .inbox
                .filled()
                .first_chunk::<HEADER_BYTES>()
                .map(Header::decode);
            let header = header.flatten().ok_or(LaneEnd::Violation("a damaged header"))?;
            if header.bytes > MAX_PAYLOAD {
                return Err(LaneEnd::Violation("a payload beyond any limit"));
            }
            let crc = crc32c::crc32c(&self.inbox.filled()[..HEADER_BYTES]);
            self.inbox.consume(HEADER_BYTES);
            self.moved = Instant::now();
            let verdict = self.chunk(&header, crc, &mut pieces)?;
            let ack = Ack {
                slot: header.slot,
                chunk: header.chunk,
                verdict,
            };
            self.acks.extend_from_slice(&ack.encode());
            // Those of small chunks go together.
            if self.inbox.filled().len() < HEADER_BYTES || self.acks.len() >= MAX_ACK_BYTES {
                self.send_acks()?;
            }
            while self.acks.len() >= MAX_ACK_BYTES {
                self.wait_for_room()?;
            }
        }
    }

    /// Receives a chunk's payload and trailer, and says what became of it.
    fn chunk(&mut self, header: &Header, crc: u32, pieces: &mut Pieces) -> Result<Verdict, LaneEnd> {
        let id = JobId(header.slot);
        let job = self.jobs.get(id).filter(|job| match &job.role {
            Role::Receive { peer, .. } => Arc::ptr_eq(peer, &self.start.peer),
            _ => false,
        });
        let Some(job) = job else {
            let known = self.jobs.has_completed(id, &self.start.peer);
            let verdict = if known { Verdict::Landed } else { Verdict::Unknown };
            return self.refuse(header, verdict);
        };
        if job.is_closed() {
            let known = job.has_completed();
            let verdict = if known { Verdict::Landed } else { Verdict::Unknown };
            return self.refuse(header, verdict);
        }
        if job.has_failed() {
            return self.refuse(header, Verdict::Failed);
        }
        let arrival = job
            .target()
            .map(|mut target| target.arrives(header.chunk, header.end, header.bytes));
        let view = match arrival {
            Some(Arrival::Write(view)) => view,
            Some(Arrival::Repeat) => return self.refuse(header, Verdict::Landed),
            Some(Arrival::Doubled) => {
                return Err(LaneEnd::Violation("a chunk that is arriving on another lane"));
            }
            Some(Arrival::Differs(what)) => {
                job.fail(Trouble {
                    code: Code::VerdictsDiffer,
                    message: format!("chunk {} is not what our plan has there: {what}", header.chunk),
                });
                return self.refuse(header, Verdict::Differs);
            }
            None => return self.refuse(header, Verdict::Unknown),
        };
        let mut arriving = Arriving {
            job: &job,
            chunk: header.chunk,
            settled: false,
        };
        let payload = self.payload(header, &job, &view, crc, pieces)?;
        let trailer = self.trailer()?;
        let landed = match payload {
            Payload::Landed(landed) => landed,
            Payload::Stopped(verdict) => return Ok(verdict),
        };
        match trailer {
            Trailer::Void => return Ok(Verdict::Void),
            Trailer::Whole(sent) if header.checksum && sent != landed.crc => {
                self.damaged(&job, header, sent, landed.crc);
                return Ok(Verdict::Damaged);
            }
            Trailer::Whole(_) => {}
        }
        arriving.settled = true;
        self.start.peer.traffic.received(header.bytes);
        job.moved(header.bytes, landed.moves, landed.bounced);
        let complete = job.target().is_some_and(|mut target| target.landed(header.chunk));
        if complete {
            job.complete();
        }
        Ok(Verdict::Landed)
    }

    fn damaged(&self, job: &Job, header: &Header, sent: u32, came: u32) {
        let peer = &self.start.peer.name;
        (self.jobs.sink)(Event::Trouble {
            peer: Some(Arc::clone(peer)),
            kind: LaneTrouble::Violation("a chunk's checksum does not match"),
            what: format!(
                "chunk {} came damaged: sent with {sent:#010x}, came with {came:#010x}",
                header.chunk
            ),
        });
        if job.came_damaged() >= MAX_DAMAGED {
            job.fail(Trouble {
                code: Code::Checksum,
                message: format!(
                    "{MAX_DAMAGED} chunks from {peer} came damaged, the last one chunk {}: sent with {sent:#010x}, came with \
                     {came:#010x}; look for faulty hardware, and for pages published before they were finished",
                    header.chunk
                ),
            });
        }
    }

    /// Drops a payload that is not wanted.
    fn refuse(&mut self, header: &Header, verdict: Verdict) -> Result<Verdict, LaneEnd> {
        self.discard(header.bytes)?;
        let trailer = self.trailer()?;
        Ok(match trailer {
            Trailer::Void => Verdict::Void,
            Trailer::Whole(_) => verdict,
        })
    }

    fn trailer(&mut self) -> Result<Trailer, LaneEnd> {
        self.fill(TRAILER_BYTES, AHEAD_BYTES, Some(self.config.stall))?;
        let trailer = self
            .inbox
            .filled()
            .first_chunk::<TRAILER_BYTES>()
            .and_then(Trailer::decode);
        self.inbox.consume(TRAILER_BYTES);
        trailer.ok_or(LaneEnd::Violation("a damaged trailer"))
    }

    fn discard(&mut self, mut bytes: u64) -> Result<(), LaneEnd> {
        while bytes > 0 {
            self.fill(1, usize::MAX, Some(self.config.stall))?;
            let filled = self.inbox.filled().len();
            let len = usize::try_from(bytes).map_or(filled, |bytes| bytes.min(filled));
            self.inbox.consume(len);
            bytes -= u64::try_from(len).unwrap_or(0);
        }
        Ok(())
    }

    /// Receives a payload into the pages that our plan has for it.
    fn payload(
        &mut self,
        header: &Header,
        job: &Job,
        view: &View,
        crc: u32,
        pieces: &mut Pieces,
    ) -> Result<Payload, LaneEnd> {
        let memory = match &job.role {
            Role::Receive { memory, .. } => memory.get(),
            _ => None,
        };
        let Some(memory) = memory else {
            self.discard(header.bytes)?;
            return Ok(Payload::Stopped(Verdict::Unknown));
        };
        let mut landing = Landing::new(self, job, pieces, header, crc);
        let landed = landing.land(header, view, &memory);
        let left = landing.left();
        // Draining what is left may take long.
        drop(landing);
        drop(memory);
        match landed {
            Ok(landed) => Ok(Payload::Landed(landed)),
            Err(Halt::Lane(end)) => Err(end),
            Err(Halt::Closed) => {
                self.discard(left)?;
                Ok(Payload::Stopped(Verdict::Unknown))
            }
            Err(Halt::Trouble(trouble)) => {
                job.fail(trouble);
                self.discard(left)?;
                Ok(Payload::Stopped(Verdict::Failed))
            }
        }
    }

    /// Has at least so many bytes, which fit, in the inbox, reading `most` at once: what follows a header may rather go
    /// straight into pages. Without a limit, waits for as long as it takes.
    fn fill(&mut self, least: usize, most: usize, limit: Option<Duration>) -> Result<(), LaneEnd> {
        while self.inbox.filled().len() < least {
            match self.link.receive(&mut self.inbox, most) {
                Ok(_) => self.moved = Instant::now(),
                Err(error) if would_block(&error) => self.wait(limit)?,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Waits until there is something to read, sending acknowledgements meanwhile; fails when nothing moved for so long.
    pub(super) fn wait(&mut self, limit: Option<Duration>) -> Result<(), LaneEnd> {
        self.send_acks()?;
        let left = match limit {
            None => Duration::from_secs(3600),
            Some(limit) => match limit.saturating_sub(self.moved.elapsed()) {
                Duration::ZERO => return Err(LaneEnd::Stalled(limit)),
                left => left,
            },
        };
        self.link.wait(&self.start.wake, !self.acks.is_empty(), left)?;
        if self.start.wake.is_ending() {
            return Err(LaneEnd::Told);
        }
        Ok(())
    }

    /// Waits until acknowledgements can be sent, and sends them: what there is to read has to wait.
    fn wait_for_room(&mut self) -> Result<(), LaneEnd> {
        match self.config.stall.saturating_sub(self.moved.elapsed()) {
            Duration::ZERO => return Err(LaneEnd::Stalled(self.config.stall)),
            left => self.link.wait_for_room(&self.start.wake, left)?,
        };
        if self.start.wake.is_ending() {
            return Err(LaneEnd::Told);
        }
        self.send_acks()
    }

    fn send_acks(&mut self) -> Result<(), LaneEnd> {
        self.link.flush()?;
        while !self.acks.is_empty() {
            match self.link.send(&self.acks) {
                Ok(sent) => {
                    self.acks.drain(..sent);
                    self.moved = Instant::now();
                }
                Err(error) if would_block(&error) => break,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

impl Drop for Arriving<'_> {
    fn drop(&mut self) {
        if !self.settled
            && let Some(mut target) = self.job.target()
        {
            target.broke_off(self.chunk);
        }
    }
}
