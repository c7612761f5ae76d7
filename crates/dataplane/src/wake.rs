//! Waking a thread that waits in poll(2), and waiting there.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;

/// Wakes one thread, and tells it whether it is to end.
#[derive(Debug)]
pub(crate) struct Wake {
    event: OwnedFd,
    ending: AtomicBool,
}

/// What a wait ended with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Waited {
    /// The socket can be read, or has failed.
    pub(crate) readable: bool,
    /// The socket can be written.
    pub(crate) writable: bool,
}

impl Wake {
    pub(crate) fn new() -> io::Result<Wake> {
        Ok(Wake {
            event: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            ending: AtomicBool::new(false),
        })
    }

    /// Ends the thread's current or next wait.
    pub(crate) fn wake(&self) {
        // It fails only when the counter is full: then the thread is woken anyway.
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }

    /// Tells the thread to end.
    pub(crate) fn end(&self) {
        self.ending.store(true, Ordering::Release);
        self.wake();
    }

    pub(crate) fn is_ending(&self) -> bool {
        self.ending.load(Ordering::Acquire)
    }

    /// Forgets wake-ups up to now.
    pub(crate) fn clear(&self) {
        let _ = rustix::io::read(&self.event, &mut [0u8; 8]);
    }

    /// Waits for the socket or a wake-up.
    pub(crate) fn wait(&self, socket: &impl AsFd, want: PollFlags, limit: Duration) -> io::Result<Waited> {
        let mut fds = [PollFd::new(&self.event, PollFlags::IN), PollFd::new(socket, want)];
        poll_for(&mut fds, Some(limit))?;
        let (event, socket) = (fds[0].revents(), fds[1].revents());
        if !event.is_empty() {
            self.clear();
        }
        let failed = socket.intersects(PollFlags::ERR | PollFlags::HUP | PollFlags::NVAL);
        Ok(Waited {
            readable: failed || socket.contains(PollFlags::IN),
            writable: failed || socket.contains(PollFlags::OUT),
        })
    }
}

impl AsFd for Wake {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }
}

/// poll(2); an interruption by a signal is a return without events.
pub(crate) fn poll_for(fds: &mut [PollFd<'_>], limit: Option<Duration>) -> io::Result<()> {
    let limit = limit.map(|limit| Timespec {
        tv_sec: i64::try_from(limit.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: limit.subsec_nanos().into(),
    });
    match poll(fds, limit.as_ref()) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
