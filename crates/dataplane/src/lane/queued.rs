//! What of a stream has not reached the other end: the kernel knows.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Bytes that were written to a socket and not acknowledged by the other end's kernel: SIOCOUTQ (tcp(7)), which has the
/// number of TIOCOUTQ.
pub(super) fn unacknowledged(socket: BorrowedFd<'_>) -> io::Result<usize> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: the fd is open for as long as it is borrowed, and this request writes one int.
    let done = unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    if done < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(usize::try_from(bytes).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};
    use std::os::fd::AsFd;

    use super::unacknowledged;

    #[test]
    fn what_the_other_end_took_is_not_counted_any_more() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (mut far, _) = listener.accept().unwrap();
        assert_eq!(unacknowledged(near.as_fd()).unwrap(), 0);
        near.set_nonblocking(true).unwrap();
        // Two full buffers: what ours holds is still ours.
        while near.write(&[0; 1 << 16]).is_ok() {}
        let held = unacknowledged(near.as_fd()).unwrap();
        assert!(held > 0);
        let mut buffer = vec![0; 1 << 20];
        while unacknowledged(near.as_fd()).unwrap() == held {
            let _ = far.read(&mut buffer).unwrap();
        }
        assert!(unacknowledged(near.as_fd()).unwrap() < held);
    }
}
