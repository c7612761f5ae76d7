//! A chunk on its way out: its header, its pages and its trailer are put into the lane's window, which is sent whenever
//! it is full. Once its job is closed or fails the rest is zeros, and the trailer says that it is void.

use kvferry_handshake::Code;
use kvferry_plan::Side;

use crate::batches::in_batches;
use crate::copy::fault;
use crate::job::{Job, Pass, RankMemory, Trouble};
use crate::lane::LaneEnd;
use crate::lane::frame::{HEADER_BYTES, Header, TRAILER_BYTES};
use crate::lane::gather::{Gather, STAGING_BYTES, wide};
use crate::lane::sender::Sender;
use crate::line::Taken;
use crate::memory::Span;
use crate::process::{EngineProcess, MAX_RANGES, Remote};
use crate::region::Piece;

/// A frame that is being put together.
pub(super) struct Departing<'b> {
    number: u32,
    job: &'b Job,
    lacks: Lacks,
    checksum: Option<u32>,
    pass: Option<Pass<'b>>,
    moves: u64,
    bounced: u64,
    /// Ranges of a process that are queued to be read.
    remote: Vec<Remote>,
}

/// Payload bytes that a frame lacks.
#[derive(Debug)]
struct Lacks {
    /// Not in the window yet.
    bytes: u64,
    /// Of these, what ranges that are queued will bring.
    queued: u64,
}

impl<'b> Departing<'b> {
    pub(super) fn begin(
        lane: &mut Sender<'_>,
        window: &mut Gather<'b>,
        taken: &'b Taken,
        slot: u64,
    ) -> Result<Departing<'b>, LaneEnd> {
        let map = &taken.view.map;
        let bytes = map.chunk_bytes(taken.chunk);
        let header = Header {
            slot,
            chunk: taken.chunk,
            end: map.end(),
            bytes,
            checksum: lane.config.checksum,
        }
        .encode();
        if window.room() < HEADER_BYTES {
            lane.drain(window)?;
        }
        let number = window.begin(&taken.job);
        window.put(&header);
        Ok(Departing {
            number,
            job: &taken.job,
            lacks: Lacks { bytes, queued: 0 },
            checksum: lane.config.checksum.then(|| crc32c::crc32c(&header)),
            pass: None,
            moves: 0,
            bounced: 0,
            remote: Vec::new(),
        })
    }

    /// Puts the chunk's pages into the window, sending it whenever it is full. When the job is closed or fails meanwhile,
    /// the frame becomes void.
    pub(super) fn pages(
        &mut self,
        lane: &mut Sender<'_>,
        window: &mut Gather<'b>,
        taken: &'b Taken,
        memory: Option<&'b RankMemory>,
    ) -> Result<(), LaneEnd> {
        let Some(memory) = memory else {
            // It was closed, and let go of it.
            window.make_void(self.number);
            return Ok(());
        };
        let view = &taken.view;
        let mut process: Option<&'b EngineProcess> = None;
        for extent in in_batches(view.map.extents(taken.chunk, Side::Prefill, &view.pages)) {
            if !self.lacks.has_room(extent.len) {
                self.fail(
                    window,
                    Trouble {
                        code: Code::Internal,
                        message: format!("chunk {} has more bytes than its plan says", taken.chunk),
                    },
                );
            }
            if window.is_void(self.number) {
                break;
            }
            self.moves += 1;
            match memory.extent(&extent) {
                Err(trouble) => self.fail(window, trouble),
                Ok(Piece::Mapped(span)) => {
                    self.remote_pages(lane, window, process)?;
                    self.span(lane, window, span)?;
                }
                Ok(Piece::Process(of, remote)) => {
                    if process.is_some_and(|process| !std::ptr::eq(process, &raw const **of)) {
                        self.remote_pages(lane, window, process)?;
                    }
                    process = Some(of);
                    self.remote.push(remote);
                    self.lacks.queue(remote.len);
                    if self.remote.len() >= MAX_RANGES || self.lacks.queued >= wide(STAGING_BYTES) {
                        self.remote_pages(lane, window, process)?;
                    }
                }
            }
        }
        self.remote_pages(lane, window, process)?;
        self.pass = None;
        if self.lacks.bytes > 0 && !window.is_void(self.number) {
            self.fail(
                window,
                Trouble {
                    code: Code::Internal,
                    message: format!("chunk {} has fewer bytes than its plan says", taken.chunk),
                },
            );
        }
        Ok(())
    }

    fn fail(&mut self, window: &mut Gather<'b>, trouble: Trouble) {
        self.pass = None;
        self.job.fail(trouble);
        window.make_void(self.number);
    }

    /// Whether the fence is entered; if the job is closed, the frame becomes void.
    fn inside(&mut self, window: &mut Gather<'b>) -> bool {
        if self.pass.is_none() {
            self.pass = self.job.enter();
        }
        if self.pass.is_none() {
            window.make_void(self.number);
        }
        self.pass.is_some()
    }

    fn span(
        &mut self,
        lane: &mut Sender<'_>,
        window: &mut Gather<'b>,
        mut span: Span<'b>,
    ) -> Result<(), LaneEnd> {
        while span.len() > 0 && self.inside(window) {
            let Some(pass) = &self.pass else { break };
            let taken = window.take(self.number, span, pass, self.checksum.as_mut());
            if taken == 0 {
                self.pass = None;
                lane.drain(window)?;
            }
            span = span.split(taken).1;
            self.lacks.bytes -= wide(taken);
        }
        Ok(())
    }

    /// Reads queued ranges of a process into the window's staging buffer.
    fn remote_pages(
        &mut self,
        lane: &mut Sender<'_>,
        window: &mut Gather<'b>,
        process: Option<&'b EngineProcess>,
    ) -> Result<(), LaneEnd> {
        let (Some(process), false) = (process, self.remote.is_empty()) else {
            return Ok(());
        };
        let mut ranges = std::mem::take(&mut self.remote);
        self.lacks.queued = 0;
        let mut rest = ranges.as_mut_slice();
        while !rest.is_empty() && self.inside(window) {
            let (count, bytes) = fitting(rest, window.room());
            if bytes == 0 {
                self.pass = None;
                lane.drain(window)?;
                continue;
            }
            // The last range may fit in part.
            let last = rest[count - 1];
            let before: usize = rest[..count - 1].iter().map(|range| range.len).sum();
            let (part, remainder) = last.split(bytes - before);
            rest[count - 1] = part;
            match window.put_with(bytes, |staging| process.read(&rest[..count], staging)) {
                Ok(staged) => {
                    if let Some(crc) = &mut self.checksum {
                        *crc = crc32c::crc32c_append(*crc, staged);
                    }
                }
                Err(error) => {
                    self.fail(window, fault(process, &error));
                    break;
                }
            }
            self.lacks.bytes -= wide(bytes);
            self.bounced += wide(bytes);
            if remainder.len > 0 {
                rest[count - 1] = remainder;
                rest = &mut rest[count - 1..];
            } else {
                rest = &mut rest[count..];
            }
        }
        ranges.clear();
        self.remote = ranges;
        Ok(())
    }

    /// Fills what a void frame lacks with zeros, and puts the trailer. Gives moves and bounced bytes.
    pub(super) fn end(
        mut self,
        lane: &mut Sender<'_>,
        window: &mut Gather<'b>,
    ) -> Result<(u64, u64), LaneEnd> {
        while self.lacks.bytes > 0 {
            let taken = window.take_zeros(self.lacks.bytes);
            if taken == 0 {
                lane.drain(window)?;
            }
            self.lacks.bytes -= wide(taken);
        }
        if window.room() < TRAILER_BYTES {
            lane.drain(window)?;
        }
        window.end(self.number, self.checksum.unwrap_or(0));
        Ok((self.moves, self.bounced))
    }
}

impl Lacks {
    /// Whether so many bytes more are still of the chunk.
    fn has_room(&self, bytes: u64) -> bool {
        bytes <= self.bytes.saturating_sub(self.queued)
    }

    /// A range of so many bytes is queued.
    fn queue(&mut self, bytes: usize) {
        self.queued += wide(bytes);
    }
}

/// How many ranges from the front, and how many bytes of them, fit into so much room.
fn fitting(ranges: &[Remote], room: usize) -> (usize, usize) {
    let mut bytes = 0;
    let mut count = 0;
    for range in ranges.iter().take(MAX_RANGES) {
        if bytes >= room {
            break;
        }
        bytes = room.min(bytes + range.len);
        count += 1;
    }
    (count, bytes)
}

#[cfg(test)]
mod tests {
    use super::Lacks;

    #[test]
    fn what_is_queued_takes_room_before_it_is_read() {
        let mut lacks = Lacks {
            bytes: 100,
            queued: 0,
        };
        assert!(lacks.has_room(100) && !lacks.has_room(101));
        lacks.queue(60);
        assert!(lacks.has_room(40) && !lacks.has_room(41));
    }
}
