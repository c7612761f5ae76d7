//! An engine's process, as the kernel vouches for it, and copies to and from its memory.
#![allow(unsafe_code)]

use std::io;
use std::mem::size_of;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt as _;

use rustix::event::{PollFd, PollFlags};

use crate::memory::Span;
use crate::wake::poll_for;

/// Most ranges that one system call takes (IOV_MAX).
pub(crate) const MAX_RANGES: usize = 1024;

/// The process at the other end of a Unix socket.
#[derive(Debug)]
pub struct EngineProcess {
    pid: i32,
    uid: u32,
    /// Readable once the process has ended. `None` when `pid` is 0.
    pidfd: Option<OwnedFd>,
}

/// Why the peer's process could not be told.
#[derive(Debug, thiserror::Error)]
#[error("the engine's process cannot be told from its socket ({what}): {source}")]
pub struct ProcessError {
    /// Which step.
    pub what: &'static str,
    /// Why.
    pub source: io::Error,
}

/// A range of another process's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Remote {
    pub(crate) address: u64,
    pub(crate) len: usize,
}

impl Remote {
    /// The first `at` bytes, and the rest.
    pub(crate) fn split(self, at: usize) -> (Remote, Remote) {
        let at = at.min(self.len);
        let rest = Remote {
            address: self.address.saturating_add(u64::try_from(at).unwrap_or(0)),
            len: self.len - at,
        };
        (Remote { len: at, ..self }, rest)
    }
}

/// Which way bytes go between us and an engine's process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// `process_vm_readv`.
    FromEngine,
    /// `process_vm_writev`.
    ToEngine,
}

impl EngineProcess {
    /// The process that connected `socket`, by the socket's credentials and a pidfd: never by a pid that
    /// somebody states.
    pub fn of(socket: &impl AsFd) -> Result<EngineProcess, ProcessError> {
        let fd = socket.as_fd().as_raw_fd();
        let credentials: libc::ucred = option(fd, libc::SO_PEERCRED).map_err(|source| ProcessError {
            what: "SO_PEERCRED",
            source,
        })?;
        let pidfd = match credentials.pid {
            0 => None,
            pid => {
                let peer = option::<libc::c_int>(fd, libc::SO_PEERPIDFD).and_then(owned);
                let pidfd = peer.or_else(|error| opened(&error, pid, credentials.uid));
                Some(pidfd.map_err(|source| ProcessError {
                    what: "pidfd",
                    source,
                })?)
            }
        };
        Ok(EngineProcess {
            pid: credentials.pid,
            uid: credentials.uid,
            pidfd,
        })
    }

    /// One that cannot be had in a test.
    #[cfg(test)]
    pub(crate) fn stated(pid: i32, uid: u32) -> EngineProcess {
        EngineProcess {
            pid,
            uid,
            pidfd: None,
        }
    }

    /// Its pid as we see it; 0 when it lives in a PID namespace that we cannot see.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// The user id that it connected with.
    pub fn uid(&self) -> u32 {
        self.uid
    }

    /// Whether it has not ended, so that its pid is still its own.
    pub fn is_alive(&self) -> bool {
        let Some(pidfd) = &self.pidfd else { return false };
        let mut fds = [PollFd::new(pidfd, PollFlags::IN)];
        let polled = poll_for(&mut fds, Some(std::time::Duration::ZERO));
        polled.is_ok() && fds[0].revents().is_empty()
    }

    /// Copies between mapped memory and the process, pair by pair; both sides of a pair have one length.
    pub(crate) fn copy_spans(&self, way: Way, spans: &[Span<'_>], remote: &[Remote]) -> io::Result<()> {
        for (spans, remote) in spans.chunks(MAX_RANGES).zip(remote.chunks(MAX_RANGES)) {
            let own: Vec<libc::iovec> = spans
                .iter()
                .map(|span| libc::iovec {
                    iov_base: span.as_ptr().cast(),
                    iov_len: span.len(),
                })
                .collect();
            // SAFETY: the spans lie in mappings that outlive this call, and no reference to mapped memory exists.
            unsafe { self.copy(way, &own, remote) }?;
        }
        Ok(())
    }

    /// Reads the ranges, one behind the other, into `bytes`, which is as long as they are together.
    pub(crate) fn read(&self, remote: &[Remote], bytes: &mut [u8]) -> io::Result<()> {
        let mut at = 0;
        for remote in remote.chunks(MAX_RANGES) {
            let len: usize = remote.iter().map(|range| range.len).sum();
            let part = bytes.get_mut(at..at + len).ok_or(io::ErrorKind::InvalidInput)?;
            let own = libc::iovec {
                iov_base: part.as_mut_ptr().cast(),
                iov_len: len,
            };
            // SAFETY: `own` is `part`, borrowed mutably for the call.
            unsafe { self.copy(Way::FromEngine, &[own], remote) }?;
            at += len;
        }
        Ok(())
    }

    /// Writes `bytes` into the ranges, one behind the other; they are together as long as it is.
    pub(crate) fn write(&self, remote: &[Remote], bytes: &[u8]) -> io::Result<()> {
        let mut at = 0;
        for remote in remote.chunks(MAX_RANGES) {
            let len: usize = remote.iter().map(|range| range.len).sum();
            let part = bytes.get(at..at + len).ok_or(io::ErrorKind::InvalidInput)?;
            let own = libc::iovec {
                iov_base: part.as_ptr().cast_mut().cast(),
                iov_len: len,
            };
            // SAFETY: the kernel only reads `own`, which is `part`, borrowed for the call.
            unsafe { self.copy(Way::ToEngine, &[own], remote) }?;
            at += len;
        }
        Ok(())
    }

    /// One system call; all of it or an error.
    ///
    /// # Safety
    /// `own` names memory that the kernel may read, and for [`Way::FromEngine`] write, during the call.
    unsafe fn copy(&self, way: Way, own: &[libc::iovec], remote: &[Remote]) -> io::Result<()> {
        let engine: Vec<libc::iovec> = remote
            .iter()
            .map(|range| libc::iovec {
                iov_base: std::ptr::without_provenance_mut(usize::try_from(range.address).unwrap_or(0)),
                iov_len: range.len,
            })
            .collect();
        let (owns, engines) = (
            libc::c_ulong::try_from(own.len()),
            libc::c_ulong::try_from(engine.len()),
        );
        let (Ok(owns), Ok(engines)) = (owns, engines) else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        // A pid is its process's own until the process is reaped, and the pidfd says when it ended: looked at after a
        // read, so that nothing of another process is believed, and right before a write. Should the process end and its
        // pid be given away between that look and the call, another process is written to, of those that the kernel lets
        // us write to: there is no call that takes a pidfd.
        if !self.is_alive() {
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        // SAFETY: `own` is as the caller promises; `engine` names memory of another address space, which the kernel checks.
        let copied = unsafe {
            match way {
                Way::FromEngine => {
                    libc::process_vm_readv(self.pid, own.as_ptr(), owns, engine.as_ptr(), engines, 0)
                }
                Way::ToEngine => {
                    libc::process_vm_writev(self.pid, own.as_ptr(), owns, engine.as_ptr(), engines, 0)
                }
            }
        };
        let copied = usize::try_from(copied).map_err(|_| io::Error::last_os_error())?;
        if way == Way::FromEngine && !self.is_alive() {
            return Err(io::Error::from_raw_os_error(libc::ESRCH));
        }
        // The kernel stops early where a range is not mapped.
        if copied != remote.iter().map(|range| range.len).sum::<usize>() {
            return Err(io::Error::from_raw_os_error(libc::EFAULT));
        }
        Ok(())
    }
}

/// A pidfd by pid, for kernels whose sockets have none of their own (before Linux 6.5); `error` is what asking the socket
/// gave. Any other error is final: the kernel also fails when the process that connected has ended and been reaped, while
/// the socket lives on in whoever it was handed to, and by then the pid may be another's.
///
/// On those kernels a pid that was given away between connecting and here shows only by its user; what is reached
/// then belongs to the same user.
fn opened(error: &io::Error, pid: i32, uid: u32) -> io::Result<OwnedFd> {
    if error.raw_os_error() != Some(libc::ENOPROTOOPT) {
        return Err(io::Error::new(error.kind(), error.to_string()));
    }
    // SAFETY: pidfd_open takes a pid and flags, and no memory.
    let raw = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    let raw = libc::c_int::try_from(raw).map_err(|_| io::ErrorKind::InvalidData)?;
    let pidfd = owned(raw)?;
    // What has the pid from here on is what the pidfd names, or nothing.
    let owner = std::fs::metadata(format!("/proc/{pid}"))?.uid();
    if owner != uid {
        return Err(io::Error::from_raw_os_error(libc::ESRCH));
    }
    Ok(pidfd)
}

/// An fd as the kernel gives it: -1 with `errno`, or new.
fn owned(raw: libc::c_int) -> io::Result<OwnedFd> {
    if raw < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel made this fd for us just now, and nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(raw) })
}

/// A socket option that is plain data.
fn option<T: Plain>(socket: libc::c_int, name: libc::c_int) -> io::Result<T> {
    let mut value = T::ZERO;
    let size = libc::socklen_t::try_from(size_of::<T>()).map_err(|_| io::ErrorKind::InvalidInput)?;
    let mut len = size;
    // SAFETY: `value` has `len` bytes, and any bytes make a `T`.
    let got = unsafe {
        libc::getsockopt(
            socket,
            libc::SOL_SOCKET,
            name,
            (&raw mut value).cast(),
            &raw mut len,
        )
    };
    if got != 0 {
        return Err(io::Error::last_os_error());
    }
    if len != size {
        return Err(io::ErrorKind::InvalidData.into());
    }
    Ok(value)
}

/// Types of which any bytes are a value.
trait Plain {
    const ZERO: Self;
}

impl Plain for libc::c_int {
    const ZERO: libc::c_int = 0;
}

impl Plain for libc::ucred {
    const ZERO: libc::ucred = libc::ucred {
        pid: 0,
        uid: 0,
        gid: 0,
    };
}

#[cfg(test)]
mod tests {
    use super::{EngineProcess, Remote, Way};
    use crate::memory::Mapping;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use std::io;
    use std::os::unix::net::UnixStream;

    fn ourselves() -> EngineProcess {
        let (a, _b) = UnixStream::pair().unwrap();
        EngineProcess::of(&a).unwrap()
    }

    fn remote(bytes: &[u8]) -> Remote {
        Remote {
            address: u64::try_from(bytes.as_ptr().addr()).unwrap(),
            len: bytes.len(),
        }
    }

    #[test]
    fn the_peer_of_a_socket_pair_is_this_process() {
        let process = ourselves();
        assert_eq!(u32::try_from(process.pid()).unwrap(), std::process::id());
        assert!(process.is_alive());
    }

    #[test]
    fn copies_between_own_memory_and_a_process() {
        let process = ourselves();
        let source = b"abcdefgh".to_vec();
        let mut bytes = [0u8; 4];
        process
            .read(&[remote(&source[1..3]), remote(&source[5..7])], &mut bytes)
            .unwrap();
        assert_eq!(&bytes, b"bcfg");

        let memfd = memfd_create("test", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&memfd, 4096).unwrap();
        let mapping = Mapping::new(&memfd, 0, 4096).unwrap();
        let span = mapping.span(7, 8).unwrap();
        process
            .copy_spans(Way::FromEngine, &[span], &[remote(&source)])
            .unwrap();
        let mut read = [0u8; 8];
        span.read(&mut read);
        assert_eq!(&read[..], &source[..]);
    }

    #[test]
    fn unmapped_memory_is_an_error_even_after_a_part() {
        let process = ourselves();
        let source = [1u8; 8];
        let nowhere = Remote {
            address: 4096,
            len: 8,
        };
        let mut bytes = [0u8; 16];
        assert!(process.read(&[nowhere], &mut bytes[..8]).is_err());
        let part = process.read(&[remote(&source), nowhere], &mut bytes).unwrap_err();
        assert_eq!(part.raw_os_error(), Some(libc::EFAULT));
    }

    /// What a kernel says whose sockets have no pidfd.
    fn unknown_option() -> io::Error {
        io::Error::from_raw_os_error(libc::ENOPROTOOPT)
    }

    #[test]
    fn a_pid_is_believed_only_where_sockets_have_no_pidfd() {
        let (process, own) = (ourselves(), std::process::id().cast_signed());
        super::opened(&unknown_option(), own, process.uid()).unwrap();
        // What it says of a process that was reaped; the pid is somebody's all the same.
        for errno in [libc::ESRCH, libc::EINVAL, libc::ENODATA] {
            let error = io::Error::from_raw_os_error(errno);
            super::opened(&error, own, process.uid()).unwrap_err();
        }
        // Whoever has the pid now is another user.
        super::opened(&unknown_option(), own, process.uid() + 1).unwrap_err();
    }

    #[test]
    fn a_process_that_ended_is_not_touched() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        drop(theirs);
        let mut process = EngineProcess::of(&ours).unwrap();
        // A child that has ended and been reaped, under the pid of one that is alive.
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        process.pidfd = Some(super::opened(&unknown_option(), pid, process.uid()).unwrap());
        child.wait().unwrap();
        assert!(!process.is_alive());
        let source = [1u8; 8];
        let mut bytes = [0u8; 8];
        let refused = process.read(&[remote(&source)], &mut bytes).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::ESRCH));
        assert_eq!(bytes, [0u8; 8]);
    }
}
