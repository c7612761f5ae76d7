//! The data port: accepts connections, and drops those that show no token.
//!
//! A connection that says nothing costs an fd for a while, and no thread. Their number is bounded, and the oldest gives
//! way: a peer that was granted a lane connects and shows its token at once.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType};

use crate::StartError;
use crate::core::Core;
use crate::lane::frame::{HELLO_BYTES, read_hello};
use crate::wake::poll_for;

/// Connections that the kernel keeps for us; more than may be unproven, so that a burst is not lost.
const BACKLOG: i32 = 1024;
/// When no fd is left for a connection, accepting rests for so long.
const REST: Duration = Duration::from_millis(200);

/// A connection that has not shown its token.
struct Unproven {
    socket: OwnedFd,
    since: Instant,
    hello: [u8; HELLO_BYTES],
    filled: usize,
}

/// What reading a connection came to.
enum Said {
    Nothing,
    Hello,
    Rubbish,
}

/// Binds the data port. Gives the socket and its address.
pub(crate) fn bind(address: SocketAddr) -> Result<(OwnedFd, SocketAddr), StartError> {
    let bound = || -> Result<(OwnedFd, SocketAddr), Errno> {
        let family = if address.is_ipv4() {
            AddressFamily::INET
        } else {
            AddressFamily::INET6
        };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
        rustix::net::sockopt::set_socket_reuseaddr(&socket, true)?;
        rustix::net::bind(&socket, &address)?;
        rustix::net::listen(&socket, BACKLOG)?;
        let bound = SocketAddr::try_from(rustix::net::getsockname(&socket)?)?;
        Ok((socket, bound))
    };
    bound().map_err(|source| StartError::Listen {
        address,
        source: source.into(),
    })
}

/// The listener's life.
pub(crate) fn run(core: &Arc<Core>, socket: &OwnedFd) {
    let mut unproven: VecDeque<Unproven> = VecDeque::new();
    let mut rest_until: Option<Instant> = None;
    loop {
        let now = Instant::now();
        while unproven
            .front()
            .is_some_and(|first| now >= first.since + core.config.hello)
        {
            unproven.pop_front();
        }
        rest_until = rest_until.filter(|until| *until > now);
        let next = [
            unproven.front().map(|first| first.since + core.config.hello),
            rest_until,
        ];
        let limit = next
            .into_iter()
            .flatten()
            .min()
            .map(|at| at.saturating_duration_since(now));
        let ready = match wait(core, socket, rest_until.is_some(), &unproven, limit) {
            Ok(ready) => ready,
            Err(error) => {
                // Out of memory at worst: it must not become a busy loop.
                tracing::warn!(%error, "waiting at the data port");
                std::thread::sleep(REST);
                if core.listener.is_ending() {
                    return;
                }
                continue;
            }
        };
        if core.listener.is_ending() {
            return;
        }
        // From behind, so that what is removed does not move what comes.
        for at in ready.connections.into_iter().rev() {
            match unproven[at].read() {
                Said::Nothing => {}
                Said::Rubbish => drop(unproven.remove(at)),
                Said::Hello => {
                    if let Some(connection) = unproven.remove(at)
                        && let Some((epoch, token)) = read_hello(&connection.hello)
                    {
                        core.proven(epoch, &token, connection.socket);
                    }
                }
            }
        }
        if ready.listener {
            rest_until = accept(core, socket, &mut unproven).map(|()| None).unwrap_or_else(|error| {
                tracing::warn!(%error, "accepting at the data port rests for {REST:?}; raise the limit of open files");
                Some(Instant::now() + REST)
            });
        }
        core.unproven
            .store(u64::try_from(unproven.len()).unwrap_or(0), Ordering::Relaxed);
    }
}

/// What can be read.
struct Ready {
    listener: bool,
    connections: Vec<usize>,
}

fn wait(
    core: &Core,
    socket: &OwnedFd,
    resting: bool,
    unproven: &VecDeque<Unproven>,
    limit: Option<Duration>,
) -> std::io::Result<Ready> {
    let listener = core.listener.as_fd();
    let mut fds = vec![PollFd::from_borrowed_fd(listener, PollFlags::IN)];
    let accepting = if resting {
        PollFlags::empty()
    } else {
        PollFlags::IN
    };
    fds.push(PollFd::new(socket, accepting));
    fds.extend(
        unproven
            .iter()
            .map(|connection| PollFd::new(&connection.socket, PollFlags::IN)),
    );
    poll_for(&mut fds, limit)?;
    Ok(Ready {
        listener: !resting && !fds[1].revents().is_empty(),
        connections: (0..unproven.len())
            .filter(|at| !fds[at + 2].revents().is_empty())
            .collect(),
    })
}

/// Accepts what there is. Fails when no fd is left for it.
fn accept(core: &Core, socket: &OwnedFd, unproven: &mut VecDeque<Unproven>) -> Result<(), Errno> {
    // Not for ever: those that are there must be read too.
    for _ in 0..BACKLOG {
        match rustix::net::accept_with(socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok(accepted) => {
                if unproven.len() >= core.config.max_unproven {
                    unproven.pop_front();
                }
                unproven.push_back(Unproven {
                    socket: accepted,
                    since: Instant::now(),
                    hello: [0; HELLO_BYTES],
                    filled: 0,
                });
            }
            Err(Errno::AGAIN) => return Ok(()),
            Err(error @ (Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM)) => return Err(error),
            // The connection failed before it was accepted (accept(2)); the next one may be good.
            Err(_) => {}
        }
    }
    Ok(())
}

impl Unproven {
    fn read(&mut self) -> Said {
        let rest = &mut self.hello[self.filled..];
        match rustix::net::recv(&self.socket, rest, RecvFlags::DONTWAIT) {
            Ok((_, 0)) => Said::Rubbish,
            Ok((_, got)) => {
                self.filled += got;
                let magic = crate::lane::frame::HELLO;
                let begun = self.filled.min(magic.len());
                if self.hello[..begun] != magic[..begun] {
                    Said::Rubbish
                } else if self.filled == HELLO_BYTES {
                    Said::Hello
                } else {
                    Said::Nothing
                }
            }
            Err(Errno::AGAIN | Errno::INTR) => Said::Nothing,
            Err(_) => Said::Rubbish,
        }
    }
}
