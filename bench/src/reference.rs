//! What the machine can do: one thread's memcpy between two memfds, and two TCP connections with writev and readv straight
//! from and to scattered pages, in blocking mode.
#![allow(unsafe_code)]

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::Arc;

use crate::pool::{Cell, Pool};

/// Connections.
pub(crate) const CONNECTIONS: usize = 2;
/// Most ranges of a system call (IOV_MAX), and most bytes.
const RANGES: usize = 1024;
const BYTES: usize = 4 << 20;

/// Copies the moved pages, one after the other.
pub(crate) fn memcpy(cell: Cell, source: &Pool, target: &Pool) {
    for n in 0..cell.count {
        // SAFETY: `moved` gives pages inside two different mappings, of `cell.page` bytes.
        unsafe { std::ptr::copy_nonoverlapping(source.moved(n), target.moved(n), cell.page) };
    }
}

/// The pages that one connection carries.
fn share(cell: Cell, connection: usize) -> std::ops::Range<usize> {
    let each = cell.count.div_ceil(CONNECTIONS);
    (each * connection).min(cell.count)..(each * (connection + 1)).min(cell.count)
}

/// Carries pages by writev or readv until all are through.
fn carry(
    cell: Cell,
    pool: &Pool,
    pages: std::ops::Range<usize>,
    socket: &TcpStream,
    send: bool,
) -> io::Result<()> {
    let mut ranges: Vec<libc::iovec> = Vec::with_capacity(RANGES);
    let (mut page, mut offset) = (pages.start, 0);
    while page < pages.end {
        ranges.clear();
        let mut bytes = 0;
        for n in (page..pages.end).take(RANGES) {
            if bytes >= BYTES {
                break;
            }
            let skip = if n == page { offset } else { 0 };
            let len = (cell.page - skip).min(BYTES);
            ranges.push(libc::iovec {
                iov_base: pool.moved(n).wrapping_add(skip).cast(),
                iov_len: len,
            });
            bytes += len;
        }
        let (fd, count) = (
            socket.as_raw_fd(),
            libc::c_int::try_from(ranges.len()).unwrap_or(0),
        );
        // SAFETY: every range is inside a page of the mapping, which outlives the call.
        let moved = unsafe {
            if send {
                libc::writev(fd, ranges.as_ptr(), count)
            } else {
                libc::readv(fd, ranges.as_ptr(), count)
            }
        };
        let moved = usize::try_from(moved).map_err(|_| io::Error::last_os_error())?;
        if moved == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let at = offset + moved;
        page += at / cell.page;
        offset = at % cell.page;
    }
    Ok(())
}

/// The receiving side: a thread a connection, round after round, each acknowledged by one byte.
pub(crate) fn serve(cell: Cell, pool: Arc<Pool>) -> io::Result<u16> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let port = listener.local_addr()?.port();
    std::thread::spawn(move || {
        for connection in 0..CONNECTIONS {
            let Ok((mut socket, _)) = listener.accept() else {
                return;
            };
            let pool = Arc::clone(&pool);
            std::thread::spawn(move || {
                let _ = socket.set_nodelay(true);
                while carry(cell, &pool, share(cell, connection), &socket, false).is_ok() {
                    if socket.write_all(&[1]).is_err() {
                        break;
                    }
                }
            });
        }
    });
    Ok(port)
}

/// The sending side.
pub(crate) struct Stream {
    cell: Cell,
    pool: Arc<Pool>,
    sockets: Vec<TcpStream>,
}

impl Stream {
    pub(crate) fn connect(cell: Cell, pool: Arc<Pool>, port: u16) -> io::Result<Stream> {
        let sockets = (0..CONNECTIONS).map(|_| {
            let socket = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
            socket.set_nodelay(true)?;
            Ok(socket)
        });
        Ok(Stream {
            cell,
            pool,
            sockets: sockets.collect::<io::Result<_>>()?,
        })
    }

    /// Sends the moved pages once, and waits until they are acknowledged.
    pub(crate) fn send(&self) -> io::Result<()> {
        std::thread::scope(|scope| {
            let threads = self.sockets.iter().enumerate().map(|(connection, socket)| {
                scope.spawn(move || {
                    carry(self.cell, &self.pool, share(self.cell, connection), socket, true)?;
                    let mut socket = socket;
                    socket.read_exact(&mut [0])
                })
            });
            let threads: Vec<_> = threads.collect();
            for thread in threads {
                thread
                    .join()
                    .map_err(|_| io::Error::other("a thread panicked"))??;
            }
            Ok(())
        })
    }
}
