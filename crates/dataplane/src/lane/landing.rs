//! A payload on its way into the pages that *our* plan has for it: straight from the socket where pieces are long, through
//! the inbox where they are short or belong to a process.

use std::time::Instant;

use kvferry_handshake::Code;
use kvferry_plan::Side;

use crate::batches::in_batches;
use crate::copy::fault;
use crate::job::{Job, Pass, RankMemory, Trouble};
use crate::lane::frame::Header;
use crate::lane::receiver::Receiver;
use crate::lane::scatter::{Pieces, Scatter};
use crate::lane::{DIRECT_BYTES, LaneEnd, would_block};
use crate::memory::Span;
use crate::process::{EngineProcess, MAX_RANGES, Remote};
use crate::region::Piece;
use crate::source::View;

/// Why a payload does not go on landing.
pub(super) enum Halt {
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
pub(super) struct Landing<'b, 'l, 'r> {
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

/// A payload that is in its pages.
pub(super) struct Landed {
    /// CRC32C of header and payload, if the header asks for it.
    pub(super) crc: u32,
    pub(super) moves: u64,
    pub(super) bounced: u64,
}

impl<'b, 'l, 'r> Landing<'b, 'l, 'r> {
    /// `crc` is that of the header.
    pub(super) fn new(
        lane: &'b mut Receiver<'r>,
        job: &'l Job,
        pieces: &'l mut Pieces,
        header: &Header,
        crc: u32,
    ) -> Landing<'b, 'l, 'r> {
        Landing {
            lane,
            job,
            window: Scatter::new(pieces),
            left: header.bytes,
            crc: header.checksum.then_some(crc),
            pass: None,
            remote: Vec::new(),
            process: None,
            queued: 0,
            bounced: 0,
        }
    }

    /// Payload bytes that were not taken off the stream.
    pub(super) fn left(&self) -> u64 {
        self.left
    }

    pub(super) fn land(
        &mut self,
        header: &Header,
        view: &View,
        memory: &'l RankMemory,
    ) -> Result<Landed, Halt> {
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
        Ok(Landed {
            crc: self.crc.unwrap_or(0),
            moves,
            bounced: self.bounced,
        })
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
        self.lane.wait(Some(stall))?;
        // What was closed is let go now, not when the sender goes on.
        if self.job.is_closed() {
            return Err(Halt::Closed);
        }
        Ok(())
    }

    fn consumed(&mut self, bytes: usize) {
        self.left = self.left.saturating_sub(u64::try_from(bytes).unwrap_or(0));
        self.job.lives(self.lane.moved);
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
