//! Where a lane's receiving end has the kernel put what comes: pieces of mapped pages, and a private inbox behind them.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use crate::job::Pass;
use crate::memory::Span;
use crate::process::MAX_RANGES;

/// Most pieces of one system call, less one for the inbox.
const MAX_PIECES: usize = MAX_RANGES - 1;
/// How far a read into pages may run into what follows them: enough for the trailer, the next header and some small
/// chunks; what of it is payload is copied once more.
pub(crate) const AHEAD_BYTES: usize = 16 << 10;
/// Size of the inbox.
const INBOX_BYTES: usize = 256 << 10;

/// Private bytes that came and were not consumed.
pub(crate) struct Inbox {
    bytes: Box<[u8]>,
    start: usize,
    end: usize,
}

/// Memory for the pieces of a [`Scatter`], kept from chunk to chunk.
#[derive(Default)]
pub(crate) struct Pieces(Vec<libc::iovec>);

/// The spans that the next payload bytes go to. `'b` is how long the job, and thus its memory, is held.
pub(crate) struct Scatter<'b> {
    pieces: &'b mut Vec<libc::iovec>,
    next: usize,
    spans: std::marker::PhantomData<Span<'b>>,
}

// SAFETY: the pointers in it are used only through a `Scatter`, which lives on one thread and leaves none behind.
unsafe impl Send for Pieces {}

impl Inbox {
    pub(crate) fn new() -> Inbox {
        Inbox {
            bytes: vec![0; INBOX_BYTES].into_boxed_slice(),
            start: 0,
            end: 0,
        }
    }

    /// What can be consumed.
    pub(crate) fn filled(&self) -> &[u8] {
        &self.bytes[self.start..self.end]
    }

    /// So many bytes were consumed.
    pub(crate) fn consume(&mut self, len: usize) {
        self.start = (self.start + len).min(self.end);
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
    }

    /// Room for more; never empty unless the inbox is full.
    pub(crate) fn space(&mut self) -> &mut [u8] {
        if self.start > 0 {
            self.bytes.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        &mut self.bytes[self.end..]
    }

    /// So many bytes were put into the space.
    pub(crate) fn grow(&mut self, len: usize) {
        self.end = (self.end + len).min(self.bytes.len());
    }
}

impl<'b> Scatter<'b> {
    pub(crate) fn new(pieces: &'b mut Pieces) -> Scatter<'b> {
        pieces.0.clear();
        Scatter {
            pieces: &mut pieces.0,
            next: 0,
            spans: std::marker::PhantomData,
        }
    }

    pub(crate) fn is_full(&self) -> bool {
        self.pieces.len() >= MAX_PIECES
    }

    /// Whether every piece was filled.
    pub(crate) fn is_empty(&self) -> bool {
        self.next == self.pieces.len()
    }

    /// Has the next bytes go there, behind those of the spans before.
    pub(crate) fn push(&mut self, span: Span<'b>) {
        if span.len() > 0 {
            self.pieces.push(libc::iovec {
                iov_base: span.as_ptr().cast(),
                iov_len: span.len(),
            });
        }
    }

    /// Reads what the socket has into the pieces, and a little of what follows into the inbox, which is empty. The
    /// caller is inside the fence of the job that the spans belong to. Gives the bytes that went to pieces;
    /// 0 bytes is the end of the stream.
    pub(crate) fn receive(
        &mut self,
        socket: BorrowedFd<'_>,
        inbox: &mut Inbox,
        checksum: Option<&mut u32>,
        _inside: &Pass<'_>,
    ) -> io::Result<usize> {
        let pieces_left = self.pieces.len();
        let ahead = &mut inbox.space()[..AHEAD_BYTES];
        self.pieces.push(libc::iovec {
            iov_base: ahead.as_mut_ptr().cast(),
            iov_len: ahead.len(),
        });
        let pieces = &mut self.pieces[self.next..];
        // SAFETY: all-zero is a valid msghdr.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = pieces.as_mut_ptr();
        message.msg_iovlen = pieces.len();
        // SAFETY: every piece but the last is in a span of a mapping that is held for `'b`; the last is the inbox's space, which
        // is borrowed mutably.
        let got = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_DONTWAIT) };
        let got = usize::try_from(got).map_err(|_| io::Error::last_os_error());
        self.pieces.truncate(pieces_left);
        let got = got?;
        let landed = self.advance(got, checksum);
        inbox.grow(got - landed);
        if got == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(landed)
    }

    /// Takes `got` bytes off the front; gives how many of them went to pieces.
    fn advance(&mut self, got: usize, mut checksum: Option<&mut u32>) -> usize {
        let mut left = got;
        while left > 0 && self.next < self.pieces.len() {
            let piece = &mut self.pieces[self.next];
            let len = left.min(piece.iov_len);
            if let Some(crc) = checksum.as_deref_mut() {
                // SAFETY: the piece is the rest of a span that is held for `'b`.
                let span: Span<'b> = unsafe { Span::from_raw(piece.iov_base.cast(), len) };
                *crc = span.checksum(*crc);
            }
            left -= len;
            if len < piece.iov_len {
                piece.iov_base = piece.iov_base.wrapping_byte_add(len);
                piece.iov_len -= len;
            } else {
                self.next += 1;
            }
        }
        if self.is_empty() {
            self.pieces.clear();
            self.next = 0;
        }
        got - left
    }
}

#[cfg(test)]
mod tests {
    use super::Inbox;

    #[test]
    fn the_inbox_gives_out_what_came_in() {
        let mut inbox = Inbox::new();
        inbox.space()[..5].copy_from_slice(b"abcde");
        inbox.grow(5);
        inbox.consume(2);
        assert_eq!(inbox.filled(), b"cde");
        inbox.space()[..2].copy_from_slice(b"fg");
        inbox.grow(2);
        assert_eq!(inbox.filled(), b"cdefg");
        inbox.consume(9);
        assert!(inbox.filled().is_empty());
        assert_eq!(inbox.space().len(), super::INBOX_BYTES);
    }
}
