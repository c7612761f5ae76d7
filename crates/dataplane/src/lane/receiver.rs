//! A lane's receiving end: puts chunks where *our* plan says, and acknowledges them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_handshake::Code;
use kvferry_plan::Side;

use crate::batches::in_batches;
use crate::copy::fault;
use crate::job::{Job, Pass, RankMemory, Role, Trouble};
use crate::jobs::Jobs;
use crate::lane::frame::{
    ACK_BYTES, Ack, HEADER_BYTES, HELLO, Header, MAX_PAYLOAD, TRAILER_BYTES, Trailer, Verdict,
};
use crate::lane::scatter::{AHEAD_BYTES, Inbox, Pieces, Scatter};
use crate::lane::{LaneEnd, Link, would_block};
use crate::memory::Span;
use crate::peer::Peer;
use crate::process::{EngineProcess, MAX_RANGES, Remote};
use crate::region::Piece;
use crate::source::View;
use crate::target::Arrival;
use crate::wake::Wake;
use crate::{Config, JobId};

/// Pieces at least so long are received straight into the pages; shorter ones through the inbox.
const DIRECT_BYTES: usize = 2048;
/// Acknowledgements that may wait for the sender to take them before nothing more is read.
const MAX_ACK_BYTES: usize = 4096 * ACK_BYTES;
/// A transfer fails when so many of its chunks came damaged.
const MAX_DAMAGED: u32 = 3;

/// What a receiving end needs to begin.
#[derive(Debug)]
pub(crate) struct Start {
    pub(crate) peer: Arc<Peer>,
    pub(crate) wake: Arc<Wake>,
}

struct Receiver<'l> {
    start: &'l Start,
    config: &'l Config,
    jobs: &'l Jobs,
    link: Link,
    inbox: Inbox,
    acks: Vec<u8>,
    /// When something last moved.
    moved: Instant,
}

/// A chunk that is arriving: missing again, should the lane break meanwhile.
struct Arriving<'c> {
    job: &'c Job,
    chunk: u32,
    settled: bool,
}

/// How a payload's way ended.
enum Payload {
    /// It is in its pages, with this checksum; so many moves, and bytes bounced.
    Landed(u32, u64, u64),
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
    };
    match receiver.serve() {
        Ok(never) => match never {},
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
            // A sender that is idle is not a stalled one.
            self.fill(1, None)?;
            self.fill(HEADER_BYTES, Some(self.config.stall))?;
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
                self.wait(Some(self.config.stall))?;
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
            return self.refuse(header, Verdict::Unknown);
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
        let (crc, moves, bounced) = match payload {
            Payload::Landed(crc, moves, bounced) => (crc, moves, bounced),
            Payload::Stopped(verdict) => return Ok(verdict),
        };
        match trailer {
            Trailer::Void => return Ok(Verdict::Void),
            Trailer::Whole(sent) if header.checksum && sent != crc => {
                self.damaged(&job, header, sent, crc);
                return Ok(Verdict::Damaged);
            }
            Trailer::Whole(_) => {}
        }
        arriving.settled = true;
        self.start.peer.traffic.received(header.bytes);
        job.moved(header.bytes, moves, bounced);
        let complete = job
            .target()
            .is_some_and(|mut target| target.landed(header.chunk, header.end));
        if complete {
            job.complete();
        }
        Ok(Verdict::Landed)
    }

    fn damaged(&self, job: &Job, header: &Header, sent: u32, came: u32) {
        let peer = &self.start.peer.name;
        tracing::warn!(%peer, job = job.id.0, chunk = header.chunk, "checksum: sent {sent:#x}, came {came:#x}");
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
        self.fill(TRAILER_BYTES, Some(self.config.stall))?;
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
            self.fill(1, Some(self.config.stall))?;
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
        let Role::Receive { memory, .. } = &job.role else {
            self.discard(header.bytes)?;
            return Ok(Payload::Stopped(Verdict::Unknown));
        };
        let mut landing = Landing {
            lane: self,
            job,
            window: Scatter::new(pieces),
            left: header.bytes,
            crc: header.checksum.then_some(crc),
            pass: None,
            remote: Vec::new(),
            process: None,
            queued: 0,
            bounced: 0,
        };
        let moves = landing.land(header, view, memory);
        let (left, crc, bounced) = (landing.left, landing.crc.unwrap_or(0), landing.bounced);
        match moves {
            Ok(moves) => Ok(Payload::Landed(crc, moves, bounced)),
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

    /// Has at least so many bytes, which fit, in the inbox. Without a limit, waits for as long as it takes.
    fn fill(&mut self, least: usize, limit: Option<Duration>) -> Result<(), LaneEnd> {
        while self.inbox.filled().len() < least {
            // Not much: what follows a header may go straight into pages.
            match self.link.receive(&mut self.inbox, AHEAD_BYTES) {
                Ok(_) => self.moved = Instant::now(),
                Err(error) if would_block(&error) => self.wait(limit)?,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Waits until there is something to read, sending acknowledgements meanwhile; fails when nothing moved for so long.
    fn wait(&mut self, limit: Option<Duration>) -> Result<(), LaneEnd> {
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

/// Why a payload does not go on landing.
enum Halt {
    Lane(LaneEnd),
    Closed,
    Trouble(Trouble),
}

impl From<LaneEnd> for Halt {
    fn from(end: LaneEnd) -> Halt {
        Halt::Lane(end)
    }
}

/// A payload on its way into pages.
struct Landing<'b, 'l, 'r> {
    lane: &'b mut Receiver<'r>,
    job: &'l Job,
    window: Scatter<'l>,
    /// Payload bytes that are not consumed from the stream.
    left: u64,
    crc: Option<u32>,
    pass: Option<Pass<'l>>,
    /// Ranges of a process that the next bytes go to, and their sum.
    remote: Vec<Remote>,
    process: Option<&'l EngineProcess>,
    queued: usize,
    bounced: u64,
}

impl<'l> Landing<'_, 'l, '_> {
    fn land(&mut self, header: &Header, view: &View, memory: &'l RankMemory) -> Result<u64, Halt> {
        let mut moves = 0;
        let mut planned = 0;
        for extent in in_batches(view.map.extents(header.chunk, Side::Decode, &view.pages)) {
            moves += 1;
            planned += extent.len;
            if planned > header.bytes {
                break;
            }
            match memory.extent(&extent).map_err(Halt::Trouble)? {
                Piece::Mapped(span) => {
                    self.remote_pages()?;
                    self.span(span)?;
                }
                Piece::Process(process, remote) => {
                    self.drain()?;
                    self.remote_range(process, remote)?;
                }
            }
        }
        self.remote_pages()?;
        self.drain()?;
        self.pass = None;
        if planned != header.bytes {
            return Err(Halt::Trouble(Trouble {
                code: Code::Internal,
                message: format!("chunk {} has not as many bytes as its plan says", header.chunk),
            }));
        }
        Ok(moves)
    }

    fn inside(&mut self) -> Result<(), Halt> {
        if self.pass.is_none() {
            self.pass = self.job.enter();
        }
        if self.pass.is_some() {
            Ok(())
        } else {
            Err(Halt::Closed)
        }
    }

    /// Waits for more of the stream, outside the fence.
    fn wait(&mut self) -> Result<(), Halt> {
        self.pass = None;
        let stall = self.lane.config.stall;
        Ok(self.lane.wait(Some(stall))?)
    }

    fn consumed(&mut self, bytes: usize) {
        self.left = self.left.saturating_sub(u64::try_from(bytes).unwrap_or(0));
    }

    /// Has the next bytes go to a span.
    fn span(&mut self, mut span: Span<'l>) -> Result<(), Halt> {
        let direct = self.lane.link.is_direct() && span.len() >= DIRECT_BYTES;
        while span.len() > 0 {
            // What came already comes first, once the pieces before it are filled.
            if self.window.is_empty() && !self.lane.inbox.filled().is_empty() {
                self.inside()?;
                let filled = self.lane.inbox.filled();
                let bytes = &filled[..filled.len().min(span.len())];
                if let Some(crc) = &mut self.crc {
                    *crc = crc32c::crc32c_append(*crc, bytes);
                }
                span.write(bytes);
                let len = bytes.len();
                self.lane.inbox.consume(len);
                self.consumed(len);
                span = span.split(len).1;
            } else if direct {
                if self.window.is_full() {
                    self.drain()?;
                }
                // The window drained may have left something in the inbox.
                if self.window.is_empty() && !self.lane.inbox.filled().is_empty() {
                    continue;
                }
                self.window.push(span);
                return Ok(());
            } else {
                self.drain()?;
                self.fill()?;
            }
        }
        Ok(())
    }

    /// Has something in the inbox.
    fn fill(&mut self) -> Result<(), Halt> {
        self.pass = None;
        while self.lane.inbox.filled().is_empty() {
            match self.lane.link.receive(&mut self.lane.inbox, usize::MAX) {
                Ok(_) => self.lane.moved = Instant::now(),
                Err(error) if would_block(&error) => self.wait()?,
                Err(error) => return Err(Halt::Lane(error.into())),
            }
        }
        Ok(())
    }

    /// Fills all pieces of the window.
    fn drain(&mut self) -> Result<(), Halt> {
        while !self.window.is_empty() {
            self.inside()?;
            let Some(pass) = &self.pass else {
                return Err(Halt::Closed);
            };
            let lane = &mut *self.lane;
            match self
                .window
                .receive(lane.link.socket(), &mut lane.inbox, self.crc.as_mut(), pass)
            {
                Ok(landed) => {
                    lane.moved = Instant::now();
                    self.pass = None;
                    self.consumed(landed);
                }
                Err(error) if would_block(&error) => self.wait()?,
                Err(error) => return Err(Halt::Lane(error.into())),
            }
        }
        Ok(())
    }

    /// Queues a range of a process.
    fn remote_range(&mut self, process: &'l EngineProcess, mut range: Remote) -> Result<(), Halt> {
        if self.process.is_some_and(|queued| !std::ptr::eq(queued, process)) {
            self.remote_pages()?;
        }
        self.process = Some(process);
        while range.len > 0 {
            let room = self.lane.inbox.filled().len() - self.queued;
            if self.remote.len() == MAX_RANGES || (room == 0 && !self.more()?) {
                self.remote_pages()?;
                self.process = Some(process);
                continue;
            }
            let (part, rest) = range.split(room);
            if part.len > 0 {
                self.queued += part.len;
                self.remote.push(part);
            }
            range = rest;
        }
        Ok(())
    }

    /// Gets more into the inbox. If nothing is there yet, tells so, unless the inbox is empty: then waits for some.
    fn more(&mut self) -> Result<bool, Halt> {
        if self.queued == 0 {
            self.fill()?;
            return Ok(true);
        }
        if self.lane.inbox.space().is_empty() {
            return Ok(false);
        }
        match self.lane.link.receive(&mut self.lane.inbox, usize::MAX) {
            Ok(_) => {
                self.lane.moved = Instant::now();
                Ok(true)
            }
            Err(error) if would_block(&error) => Ok(false),
            Err(error) => Err(Halt::Lane(error.into())),
        }
    }

    /// Writes what the inbox has for the queued ranges.
    fn remote_pages(&mut self) -> Result<(), Halt> {
        let Some(process) = self.process.take() else {
            return Ok(());
        };
        self.inside()?;
        let bytes = &self.lane.inbox.filled()[..self.queued];
        process
            .write(&self.remote, bytes)
            .map_err(|error| Halt::Trouble(fault(process, &error)))?;
        if let Some(crc) = &mut self.crc {
            *crc = crc32c::crc32c_append(*crc, bytes);
        }
        let queued = std::mem::take(&mut self.queued);
        self.bounced += u64::try_from(queued).unwrap_or(0);
        self.lane.inbox.consume(queued);
        self.consumed(queued);
        self.remote.clear();
        self.pass = None;
        Ok(())
    }
}
