//! Frames on a Unix stream socket, with the fds that come with them.

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

use kvferry_handshake::{Code, FRAME_HEADER, WireError};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags,
};

use crate::Fault;

/// Fds that one recvmsg takes in: one more than a frame may have, to tell.
const ROOM: usize = 2;
/// How far a payload's buffer runs ahead of what has arrived: a length alone costs the reader no more.
const READ_AHEAD: usize = 64 << 10;

/// One frame as it arrived.
#[derive(Debug)]
pub struct Frame {
    /// The message's bytes.
    pub payload: Vec<u8>,
    /// The fds that came with it.
    pub fds: Fds,
}

/// Fds that came with a frame. No message carries more than one; surplus ones are closed on arrival.
#[derive(Debug)]
pub enum Fds {
    /// None.
    None,
    /// One.
    One(OwnedFd),
    /// Several, all of them closed again.
    Several,
    /// Some that could not be taken in: this process may open no more files, or may not have these.
    Untaken,
}

/// Why the stream cannot be read further.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// The sender announces more than is accepted.
    #[error("a frame of {len} bytes, where {limit} are the most")]
    TooLong {
        /// Bytes announced.
        len: usize,
        /// Most bytes now.
        limit: usize,
    },
    /// The stream ended inside a frame.
    #[error("the stream ended {missing} bytes before the end of a frame")]
    Truncated {
        /// Bytes missing.
        missing: usize,
    },
    /// The frame is not a message.
    #[error("a frame that is not a message: {0}")]
    Wire(#[from] WireError),
}

impl FrameError {
    /// The stable code.
    pub fn code(&self) -> Code {
        match self {
            FrameError::TooLong { .. } => Code::FrameTooLong,
            FrameError::Truncated { .. } => Code::FrameMalformed,
            FrameError::Wire(error) => error.code(),
        }
    }
}

impl From<FrameError> for Fault {
    fn from(error: FrameError) -> Fault {
        Fault::new(error.code(), error.to_string())
    }
}

/// Reads frames from a socket that does not block.
///
/// It never reads beyond the frame that it is in, so that fds belong to the frame they arrive with. It
/// reads with recvmsg only: any other read would lose fds, or leave them open.
#[derive(Debug)]
pub struct FrameReader {
    limit: usize,
    header: [u8; FRAME_HEADER],
    /// Bytes of the header that arrived.
    headed: usize,
    payload: Vec<u8>,
    /// Bytes of the payload that arrived.
    filled: usize,
    fds: Fds,
}

impl FrameReader {
    /// A reader that accepts frames of up to `limit` bytes.
    pub fn new(limit: usize) -> FrameReader {
        FrameReader {
            limit,
            header: [0; FRAME_HEADER],
            headed: 0,
            payload: Vec::new(),
            filled: 0,
            fds: Fds::None,
        }
    }

    /// Changes the longest frame accepted; between frames.
    pub fn set_limit(&mut self, limit: usize) {
        self.limit = limit;
    }

    /// Reads on until a frame is whole. `Ok(Ok(None))`: the stream ended between frames. An `Err` of
    /// `WouldBlock` means that the rest has not arrived; after an inner error the stream is of no use.
    pub fn read(&mut self, socket: impl AsFd) -> io::Result<Result<Option<Frame>, FrameError>> {
        while self.headed < FRAME_HEADER {
            let got = receive(&socket, &mut self.header[self.headed..], &mut self.fds)?;
            if got == 0 {
                let missing = FRAME_HEADER - self.headed;
                return Ok(match self.headed {
                    0 => Ok(None),
                    _ => Err(FrameError::Truncated { missing }),
                });
            }
            self.headed += got;
        }
        let len = usize::try_from(u32::from_le_bytes(self.header)).unwrap_or(usize::MAX);
        if len > self.limit {
            return Ok(Err(FrameError::TooLong {
                len,
                limit: self.limit,
            }));
        }
        while self.filled < len {
            if self.payload.len() == self.filled {
                let ahead = self.filled.max(READ_AHEAD);
                self.payload.resize(len.min(self.filled + ahead), 0);
            }
            let got = receive(&socket, &mut self.payload[self.filled..], &mut self.fds)?;
            if got == 0 {
                return Ok(Err(FrameError::Truncated {
                    missing: len - self.filled,
                }));
            }
            self.filled += got;
        }
        self.headed = 0;
        self.filled = 0;
        Ok(Ok(Some(Frame {
            payload: std::mem::take(&mut self.payload),
            fds: std::mem::replace(&mut self.fds, Fds::None),
        })))
    }
}

/// One recvmsg. Fds that come along are taken into `fds`, or closed where there are several.
fn receive(socket: impl AsFd, buffer: &mut [u8], fds: &mut Fds) -> io::Result<usize> {
    // What a third would need, the kernel closes, and says so by CTRUNC.
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(ROOM))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let got = loop {
        match rustix::net::recvmsg(
            &socket,
            &mut [IoSliceMut::new(buffer)],
            &mut control,
            RecvFlags::CMSG_CLOEXEC,
        ) {
            Err(rustix::io::Errno::INTR) => {}
            other => break other?,
        }
    };
    let mut taken = 0;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            for fd in rights {
                taken += 1;
                *fds = match fds {
                    Fds::None => Fds::One(fd),
                    Fds::One(_) | Fds::Several => Fds::Several,
                    Fds::Untaken => Fds::Untaken,
                };
            }
        }
    }
    if got.flags.contains(ReturnFlags::CTRUNC) {
        // What there was room for did not come, either.
        let untaken = taken < ROOM || matches!(fds, Fds::Untaken);
        *fds = if untaken { Fds::Untaken } else { Fds::Several };
    }
    Ok(got.bytes)
}

/// Writes frames to a socket that does not block.
#[derive(Debug, Default)]
pub struct FrameWriter {
    queue: VecDeque<Outgoing>,
    queued: usize,
}

#[derive(Debug)]
struct Outgoing {
    header: [u8; FRAME_HEADER],
    payload: Vec<u8>,
    sent: usize,
    fd: Option<OwnedFd>,
}

impl FrameWriter {
    /// Nothing to write.
    pub fn new() -> FrameWriter {
        FrameWriter::default()
    }

    /// Adds a frame. `fd` travels with its first byte.
    pub fn push(&mut self, payload: Vec<u8>, fd: Option<OwnedFd>) -> Result<(), FrameError> {
        let too_long = || FrameError::TooLong {
            len: payload.len(),
            limit: crate::MAX_FRAME,
        };
        if payload.len() > crate::MAX_FRAME {
            return Err(too_long());
        }
        let header = u32::try_from(payload.len())
            .map_err(|_| too_long())?
            .to_le_bytes();
        self.queued += FRAME_HEADER + payload.len();
        self.queue.push_back(Outgoing {
            header,
            payload,
            sent: 0,
            fd,
        });
        Ok(())
    }

    /// Drops what is not written: the other end takes no more.
    pub fn clear(&mut self) {
        self.queue.clear();
        self.queued = 0;
    }

    /// Bytes not written yet.
    pub fn queued(&self) -> usize {
        self.queued
    }

    /// Writes until nothing is left. An `Err` of `WouldBlock` means that the socket takes no more now.
    pub fn write(&mut self, socket: impl AsFd) -> io::Result<()> {
        while let Some(frame) = self.queue.front_mut() {
            let sent = send(&socket, frame)?;
            frame.sent += sent;
            frame.fd = None;
            self.queued -= sent;
            if frame.sent == FRAME_HEADER + frame.payload.len() {
                self.queue.pop_front();
            }
        }
        Ok(())
    }
}

fn send(socket: impl AsFd, frame: &Outgoing) -> io::Result<usize> {
    let header = IoSlice::new(frame.header.get(frame.sent..).unwrap_or_default());
    let payload = IoSlice::new(&frame.payload[frame.sent.saturating_sub(FRAME_HEADER)..]);
    let fds: Vec<_> = frame.fd.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&fds)) {
        return Err(io::Error::other("no room for the fd in the control message"));
    }
    loop {
        match rustix::net::sendmsg(&socket, &[header, payload], &mut control, SendFlags::NOSIGNAL) {
            Err(rustix::io::Errno::INTR) => {}
            other => return Ok(other?),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    fn pair() -> (UnixStream, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        (ours, theirs)
    }

    fn memfd() -> OwnedFd {
        rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap()
    }

    fn send_fds(socket: &UnixStream, bytes: &[u8], fds: &[OwnedFd]) {
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        let sent = rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::empty());
        assert_eq!(sent.unwrap(), bytes.len());
    }

    fn inode(fd: impl AsFd) -> u64 {
        rustix::fs::fstat(fd).unwrap().st_ino
    }

    #[test]
    fn a_frame_arrives_byte_by_byte() {
        let (ours, mut theirs) = pair();
        let mut reader = FrameReader::new(100);
        for byte in [3, 0, 0, 0, b'a', b'b'] {
            let blocked = reader.read(&ours).unwrap_err();
            assert_eq!(blocked.kind(), io::ErrorKind::WouldBlock);
            theirs.write_all(&[byte]).unwrap();
        }
        theirs.write_all(b"c\x01\0\0\0d").unwrap();
        let first = reader.read(&ours).unwrap().unwrap().unwrap();
        assert_eq!(first.payload, b"abc");
        let second = reader.read(&ours).unwrap().unwrap().unwrap();
        assert_eq!(second.payload, b"d");
        drop(theirs);
        assert!(reader.read(&ours).unwrap().unwrap().is_none());
    }

    #[test]
    fn long_frames_cross_a_socket_that_takes_little_at_a_time() {
        let (ours, theirs) = pair();
        theirs.set_nonblocking(true).unwrap();
        let payload: Vec<u8> = (0u32..3 << 20).map(|i| (i % 251) as u8).collect();
        let mut writer = FrameWriter::new();
        writer.push(payload.clone(), None).unwrap();
        writer.push(vec![7], None).unwrap();
        let mut reader = FrameReader::new(4 << 20);
        let mut got = Vec::new();
        for _ in 0..1_000 {
            let _ = writer.write(&theirs);
            if let Ok(frame) = reader.read(&ours) {
                got.push(frame.unwrap().unwrap().payload);
            }
            if got.len() == 2 {
                break;
            }
        }
        assert_eq!(got, [payload, vec![7]]);
        assert_eq!(writer.queued(), 0);
    }

    #[test]
    fn a_length_beyond_the_limit_is_refused_before_its_payload() {
        let (ours, mut theirs) = pair();
        theirs.write_all(&101u32.to_le_bytes()).unwrap();
        let error = FrameReader::new(100).read(&ours).unwrap().unwrap_err();
        assert_eq!(error, FrameError::TooLong { len: 101, limit: 100 });
        assert_eq!(error.code(), Code::FrameTooLong);
    }

    #[test]
    fn a_length_alone_reserves_little() {
        let (ours, mut theirs) = pair();
        theirs
            .write_all(&u32::try_from(crate::MAX_FRAME).unwrap().to_le_bytes())
            .unwrap();
        let mut reader = FrameReader::new(crate::MAX_FRAME);
        assert!(reader.read(&ours).is_err());
        assert!(reader.payload.capacity() <= READ_AHEAD);
    }

    #[test]
    fn a_stream_that_ends_inside_a_frame_is_named() {
        for (bytes, missing) in [(&[5, 0][..], 2), (&[5, 0, 0, 0, 1][..], 4)] {
            let (ours, mut theirs) = pair();
            theirs.write_all(bytes).unwrap();
            drop(theirs);
            let error = FrameReader::new(100).read(&ours).unwrap().unwrap_err();
            assert_eq!(error, FrameError::Truncated { missing });
        }
    }

    #[test]
    fn an_fd_belongs_to_its_frame_and_is_closed_on_exec() {
        let (ours, theirs) = pair();
        let fd = memfd();
        let expected = inode(&fd);
        let mut writer = FrameWriter::new();
        writer.push(b"without".to_vec(), None).unwrap();
        writer.push(b"with".to_vec(), Some(fd)).unwrap();
        writer.push(b"after".to_vec(), None).unwrap();
        writer.write(&theirs).unwrap();
        let mut reader = FrameReader::new(100);
        let mut next = || reader.read(&ours).unwrap().unwrap().unwrap();
        assert!(matches!(next().fds, Fds::None));
        let Fds::One(fd) = next().fds else { panic!("no fd") };
        assert_eq!(inode(&fd), expected);
        assert!(
            rustix::io::fcntl_getfd(&fd)
                .unwrap()
                .contains(rustix::io::FdFlags::CLOEXEC)
        );
        assert!(matches!(next().fds, Fds::None));
    }

    /// The pipe's reading end sees its end only when every copy of the writing end is closed.
    fn all_closed(mut reading: std::io::PipeReader) -> bool {
        rustix::io::ioctl_fionbio(&reading, true).unwrap();
        matches!(reading.read(&mut [0]), Ok(0))
    }

    #[test]
    fn surplus_fds_are_counted_and_closed() {
        for count in [2, 3, 8] {
            let (ours, theirs) = pair();
            let (reading, writing) = std::io::pipe().unwrap();
            let fds: Vec<OwnedFd> = (0..count)
                .map(|_| OwnedFd::from(writing.try_clone().unwrap()))
                .collect();
            drop(writing);
            send_fds(&theirs, &[1, 0, 0, 0, b'x'], &fds);
            drop(fds);
            let frame = FrameReader::new(100).read(&ours).unwrap().unwrap().unwrap();
            assert!(matches!(frame.fds, Fds::Several), "{count}");
            assert!(all_closed(reading), "{count}");
        }
    }

    #[test]
    fn fds_spread_over_the_bytes_of_one_frame_are_surplus_too() {
        let (ours, theirs) = pair();
        let (reading, writing) = std::io::pipe().unwrap();
        let writing = [OwnedFd::from(writing)];
        for byte in [1, 0, 0, 0, b'x'] {
            send_fds(&theirs, &[byte], &writing);
        }
        drop(writing);
        let frame = FrameReader::new(100).read(&ours).unwrap().unwrap().unwrap();
        assert!(matches!(frame.fds, Fds::Several));
        assert!(all_closed(reading));
    }

    #[test]
    fn a_reader_that_is_dropped_closes_the_fd_of_its_unfinished_frame() {
        let (ours, theirs) = pair();
        let (reading, writing) = std::io::pipe().unwrap();
        let writing = [OwnedFd::from(writing)];
        send_fds(&theirs, &[9, 0, 0, 0], &writing);
        drop(writing);
        let mut reader = FrameReader::new(100);
        assert!(reader.read(&ours).is_err());
        drop(reader);
        assert!(all_closed(reading));
    }
}
