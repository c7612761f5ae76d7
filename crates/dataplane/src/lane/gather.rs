//! What a lane's sending end hands to the kernel next: pieces of mapped pages and of a staging buffer.
//!
//! Pages go out straight from where they are. Short pieces are collected in the staging buffer first, and so are headers and
//! trailers.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::job::{Job, Pass};
use crate::lane::DIRECT_BYTES;
use crate::lane::frame::{TRAILER_BYTES, Trailer};
use crate::memory::Span;
use crate::process::MAX_RANGES;

/// Most pieces of one system call.
const MAX_PIECES: usize = MAX_RANGES;
/// Longest single piece, so that zeros can stand in for any.
const PIECE_BYTES: usize = 1 << 20;
/// Size of the staging buffer; it stays in the second-level cache.
pub(crate) const STAGING_BYTES: usize = 256 << 10;

/// Stands in for pages that must not be touched any more.
static ZEROS: [u8; PIECE_BYTES] = [0; PIECE_BYTES];

/// A lane's buffers, kept from batch to batch.
pub(crate) struct Buffers {
    staging: Box<[u8]>,
    pieces: Vec<libc::iovec>,
    owners: Vec<u32>,
}

/// A window of the stream. `'b` is how long the jobs of its frames, and their memory, are held.
pub(crate) struct Gather<'b> {
    buffers: &'b mut Buffers,
    /// Used bytes of the staging buffer.
    staged: usize,
    /// First piece that is not sent.
    next: usize,
    /// Bytes taken up so far, and how many of them were sent.
    taken: u64,
    sent: u64,
    frames: Vec<Frame<'b>>,
    /// Frames before this one were sent whole.
    gone: usize,
    /// Frames before this one have nothing to send from their pages any more.
    first_frame: usize,
    /// Whether pieces may be sent straight from the pages.
    direct: bool,
}

/// A chunk that is being sent.
struct Frame<'b> {
    job: &'b Job,
    /// Its pages must not be touched any more.
    void: bool,
    /// Pieces straight from its pages that are not sent.
    direct: usize,
    /// Where its trailer is in the staging buffer.
    trailer: Option<usize>,
    /// How many bytes will have been sent once it is sent whole; known when it has its trailer.
    end: Option<u64>,
}

/// The owner of pieces that are in the staging buffer or zeros.
const NOBODY: u32 = u32::MAX;

// SAFETY: the pointers in `pieces` are used only through a `Gather`, which lives on one thread and leaves none behind.
unsafe impl Send for Buffers {}

impl Buffers {
    pub(crate) fn new() -> Buffers {
        Buffers {
            staging: vec![0; STAGING_BYTES].into_boxed_slice(),
            pieces: Vec::with_capacity(MAX_PIECES),
            owners: Vec::with_capacity(MAX_PIECES),
        }
    }
}

impl<'b> Gather<'b> {
    pub(crate) fn new(buffers: &'b mut Buffers, direct: bool) -> Gather<'b> {
        buffers.pieces.clear();
        buffers.owners.clear();
        Gather {
            buffers,
            staged: 0,
            next: 0,
            taken: 0,
            sent: 0,
            frames: Vec::new(),
            gone: 0,
            first_frame: 0,
            direct,
        }
    }

    /// Begins a frame of a job; gives its number.
    pub(crate) fn begin(&mut self, job: &'b Job) -> u32 {
        self.frames.push(Frame {
            job,
            void: false,
            direct: 0,
            trailer: None,
            end: None,
        });
        u32::try_from(self.frames.len() - 1).unwrap_or(NOBODY)
    }

    /// Whether everything was sent.
    pub(crate) fn is_empty(&self) -> bool {
        self.next == self.buffers.pieces.len()
    }

    /// Bytes that can be staged before the window has to be sent.
    pub(crate) fn room(&self) -> usize {
        if self.buffers.pieces.len() + 2 > MAX_PIECES {
            return 0;
        }
        self.buffers.staging.len() - self.staged
    }

    /// Stages private bytes; there is room for them.
    pub(crate) fn put(&mut self, bytes: &[u8]) {
        self.buffers.staging[self.staged..self.staged + bytes.len()].copy_from_slice(bytes);
        self.stage(bytes.len());
    }

    /// Stages what `fill` writes into a buffer of so many bytes; there is room for them. Nothing is staged on an error.
    pub(crate) fn put_with<E>(
        &mut self,
        len: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<&[u8], E> {
        let at = self.staged;
        fill(&mut self.buffers.staging[at..at + len])?;
        self.stage(len);
        Ok(&self.buffers.staging[at..at + len])
    }

    /// Takes up the beginning of a span of a frame's pages, whose fence the caller is inside of; gives how many bytes,
    /// 0 when the window has to be sent first, and continues the checksum over them.
    pub(crate) fn take(
        &mut self,
        frame: u32,
        span: Span<'b>,
        _inside: &Pass<'_>,
        checksum: Option<&mut u32>,
    ) -> usize {
        let room = self.room();
        if room == 0 {
            return 0;
        }
        if self.direct && span.len() >= DIRECT_BYTES {
            let (part, _) = span.split(PIECE_BYTES);
            if let Some(crc) = checksum {
                *crc = part.checksum(*crc);
            }
            self.push(part.as_ptr(), part.len(), frame);
            if let Some(frame) = self.frame_mut(frame) {
                frame.direct += 1;
            }
            return part.len();
        }
        let (part, _) = span.split(room);
        let staging = &mut self.buffers.staging[self.staged..self.staged + part.len()];
        part.read(staging);
        if let Some(crc) = checksum {
            *crc = crc32c::crc32c_append(*crc, staging);
        }
        self.stage(part.len());
        part.len()
    }

    /// Takes up zeros in place of the rest of a void frame; gives how many bytes, 0 when the window has to be sent
    /// first.
    pub(crate) fn take_zeros(&mut self, bytes: u64) -> usize {
        let room = self.room();
        if room == 0 {
            return 0;
        }
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        if self.direct {
            let len = bytes.min(PIECE_BYTES);
            self.push(ZEROS.as_ptr().cast_mut(), len, NOBODY);
            return len;
        }
        let len = bytes.min(room);
        self.buffers.staging[self.staged..self.staged + len].fill(0);
        self.stage(len);
        len
    }

    /// Ends a frame; there is room for its trailer.
    pub(crate) fn end(&mut self, frame: u32, crc: u32) {
        let at = self.staged;
        let trailer = match self.frame_mut(frame) {
            Some(frame) if !frame.void => {
                frame.trailer = Some(at);
                Trailer::Whole(crc)
            }
            _ => Trailer::Void,
        };
        self.put(&trailer.encode());
        let end = self.taken;
        if let Some(frame) = self.frame_mut(frame) {
            frame.end = Some(end);
        }
    }

    /// How many frames were sent whole. They go in their order.
    pub(crate) fn gone(&self) -> usize {
        self.gone
    }

    /// Makes a frame void: what of it is not sent becomes zeros.
    pub(crate) fn make_void(&mut self, frame: u32) {
        let next = self.next;
        let Some(of) = self.frame_mut(frame) else { return };
        of.void = true;
        of.direct = 0;
        let trailer = of.trailer;
        for at in next..self.buffers.pieces.len() {
            if self.buffers.owners[at] == frame {
                self.buffers.owners[at] = NOBODY;
                self.buffers.pieces[at].iov_base = ZEROS.as_ptr().cast_mut().cast();
            }
        }
        // Its trailer comes behind its pieces: as long as one of those is not sent, the trailer is not.
        if let Some(at) = trailer {
            self.buffers.staging[at..at + TRAILER_BYTES].copy_from_slice(&Trailer::Void.encode());
        }
    }

    pub(crate) fn is_void(&self, frame: u32) -> bool {
        usize::try_from(frame).is_ok_and(|at| self.frames.get(at).is_some_and(|frame| frame.void))
    }

    /// Sends what the socket takes. Frames whose jobs are closed become void; the others' fences are entered for the
    /// time of the system call.
    pub(crate) fn send(&mut self, socket: BorrowedFd<'_>) -> io::Result<usize> {
        let mut passes: Vec<Pass<'b>> = Vec::new();
        for at in self.first_frame..self.frames.len() {
            let frame = &self.frames[at];
            if frame.direct == 0 {
                continue;
            }
            match frame.job.enter() {
                Some(pass) => passes.push(pass),
                None => self.make_void(u32::try_from(at).unwrap_or(NOBODY)),
            }
        }
        let pieces = &mut self.buffers.pieces[self.next..];
        // SAFETY: all-zero is a valid msghdr.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = pieces.as_mut_ptr();
        message.msg_iovlen = pieces.len();
        let flags = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;
        // SAFETY: every piece is in the staging buffer, which is not borrowed now, in `ZEROS`, or in a span of a mapping that
        // is held for `'b`; the kernel only reads it.
        let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, flags) };
        drop(passes);
        let sent = usize::try_from(sent).map_err(|_| io::Error::last_os_error())?;
        self.advance(sent);
        Ok(sent)
    }

    /// The staged bytes that are not sent: all of them, when nothing is sent straight from the pages.
    pub(crate) fn unsent(&self) -> &[u8] {
        let left: usize = self.buffers.pieces[self.next..]
            .iter()
            .map(|piece| piece.iov_len)
            .sum();
        &self.buffers.staging[self.staged - left..self.staged]
    }

    /// So many bytes were sent.
    pub(crate) fn advance(&mut self, mut sent: usize) {
        self.sent += wide(sent);
        let is_gone = |frame: &Frame<'_>| frame.end.is_some_and(|end| end <= self.sent);
        while self.frames.get(self.gone).is_some_and(is_gone) {
            self.gone += 1;
        }
        while sent > 0 {
            let piece = &mut self.buffers.pieces[self.next];
            if sent < piece.iov_len {
                piece.iov_base = piece.iov_base.wrapping_byte_add(sent);
                piece.iov_len -= sent;
                break;
            }
            sent -= piece.iov_len;
            let owner = self.buffers.owners[self.next];
            self.next += 1;
            if let Some(frame) = self.frame_mut(owner) {
                frame.direct -= 1;
            }
        }
        if self.is_empty() {
            self.next = 0;
            self.staged = 0;
            self.buffers.pieces.clear();
            self.buffers.owners.clear();
            for frame in &mut self.frames[self.first_frame..] {
                frame.trailer = None;
            }
            self.first_frame = self.frames.len().saturating_sub(1);
        }
    }

    fn frame_mut(&mut self, frame: u32) -> Option<&mut Frame<'b>> {
        self.frames.get_mut(usize::try_from(frame).ok()?)
    }

    /// So many bytes more of the staging buffer are to be sent.
    fn stage(&mut self, len: usize) {
        if len == 0 {
            return;
        }
        let at = self.staged;
        self.staged += len;
        let extends = self.buffers.owners.last() == Some(&NOBODY) && self.last_piece_ends_at(at);
        match self.buffers.pieces.last_mut() {
            Some(piece) if extends && self.next < self.buffers.owners.len() => {
                piece.iov_len += len;
                self.taken += wide(len);
            }
            _ => {
                let base = self.buffers.staging.as_mut_ptr().wrapping_add(at);
                self.push(base, len, NOBODY);
            }
        }
    }

    fn last_piece_ends_at(&self, staged: usize) -> bool {
        let end = self.buffers.staging.as_ptr().wrapping_add(staged).addr();
        self.buffers
            .pieces
            .last()
            .is_some_and(|piece| piece.iov_base.addr() + piece.iov_len == end)
    }

    fn push(&mut self, base: *mut u8, len: usize, owner: u32) {
        self.buffers.pieces.push(libc::iovec {
            iov_base: base.cast(),
            iov_len: len,
        });
        self.buffers.owners.push(owner);
        self.taken += wide(len);
    }
}

/// A length as the stream counts.
pub(super) fn wide(len: usize) -> u64 {
    u64::try_from(len).unwrap_or(u64::MAX)
}
