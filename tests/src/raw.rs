//! Connections that speak as no client does: frames by hand, fds where none belong, bytes that are no frames.

use std::io::{IoSlice, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::net::TcpStream;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use kvferry_control::{Call, Fault, Request, Response, VERSIONS};
use kvferry_handshake::{Frames, MAX_PAYLOAD, decode, encode, frame};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::process::{Resource, getrlimit, setrlimit};

use crate::wait::PATIENCE;

/// A connection to the Unix socket.
#[derive(Debug)]
pub struct RawEngine {
    stream: UnixStream,
    frames: Frames,
    ready: Vec<u8>,
}

/// The bytes of a call's frame.
pub fn call(number: u64, call: Call) -> Vec<u8> {
    framed(&Request::Call { number, call })
}

/// The bytes of a good greeting's frame.
pub fn hello() -> Vec<u8> {
    framed(&Request::Hello(VERSIONS))
}

/// The bytes of a message's frame.
pub fn framed(request: &Request) -> Vec<u8> {
    frame(&encode(request).unwrap()).unwrap()
}

impl RawEngine {
    /// Connects; says nothing.
    pub fn connect(socket: &Path) -> RawEngine {
        let stream = UnixStream::connect(socket).unwrap();
        stream.set_write_timeout(Some(PATIENCE)).unwrap();
        RawEngine {
            stream,
            frames: Frames::new(MAX_PAYLOAD),
            ready: Vec::new(),
        }
    }

    /// Connects and greets.
    pub fn greeted(socket: &Path) -> RawEngine {
        let mut raw = RawEngine::connect(socket);
        assert!(raw.say(&hello()));
        match raw.hear(PATIENCE) {
            Some(Response::Hello(Ok(_))) => raw,
            other => panic!("no welcome: {other:?}"),
        }
    }

    /// Sends bytes; false when the daemon has closed.
    pub fn say(&mut self, bytes: &[u8]) -> bool {
        self.stream.write_all(bytes).is_ok()
    }

    /// Sends bytes, and fds with the first of them; false when the daemon has closed.
    pub fn say_with_fds(&mut self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> bool {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(64))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(fds)));
        let slices = [IoSlice::new(bytes)];
        match sendmsg(&self.stream, &slices, &mut control, SendFlags::NOSIGNAL) {
            Ok(sent) => self.say(&bytes[sent..]),
            Err(_) => false,
        }
    }

    /// The next response; `None` when the daemon closed, or said nothing for so long.
    pub fn hear(&mut self, patience: Duration) -> Option<Response> {
        self.stream.set_read_timeout(Some(patience)).unwrap();
        loop {
            let mut input = self.ready.as_slice();
            let taken = self.frames.take(&mut input).unwrap();
            self.ready = input.to_vec();
            if let Some(payload) = taken {
                return Some(decode(&payload).unwrap());
            }
            let mut buffer = [0; 4096];
            match self.stream.read(&mut buffer) {
                Ok(count @ 1..) => self.ready.extend_from_slice(&buffer[..count]),
                Ok(0) | Err(_) => return None,
            }
        }
    }

    /// The refusal that the daemon says before it closes, or as an answer.
    pub fn refusal(&mut self) -> Fault {
        loop {
            match self.hear(PATIENCE) {
                Some(
                    Response::Hello(Err(fault))
                    | Response::Answer {
                        answer: Err(fault), ..
                    },
                ) => return fault,
                Some(_) => {}
                None => panic!("the daemon says nothing"),
            }
        }
    }

    /// Whether the daemon closes within `patience`.
    pub fn is_closed(&mut self, patience: Duration) -> bool {
        self.stream.set_read_timeout(Some(patience)).unwrap();
        let mut buffer = [0; 4096];
        loop {
            match self.stream.read(&mut buffer) {
                Ok(0) => return true,
                Ok(_) => {}
                Err(error) => {
                    let waiting = [std::io::ErrorKind::WouldBlock, std::io::ErrorKind::TimedOut];
                    return !waiting.contains(&error.kind());
                }
            }
        }
    }
}

/// Sends bytes to a TCP port and reads what comes back, until it closes or is silent for `patience`.
pub fn throw_at(port: u16, bytes: &[u8], patience: Duration) {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    stream.set_read_timeout(Some(patience)).unwrap();
    // It may close at the first bytes.
    let _ = stream.write_all(bytes);
    let mut buffer = [0; 4096];
    while let Ok(1..) = stream.read(&mut buffer) {}
}

/// Lets this process open as many fds as it may.
pub fn raise_fd_limit() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    setrlimit(Resource::Nofile, limit).unwrap();
}
