//! The data port: accepts connections, and drops those that show no token.
//!
//! A connection that says nothing costs an fd for a while, and no thread. Their number is bounded, and the oldest gives
//! way, but none unread: a peer that was granted a lane connects and shows its token at once.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SocketFlags, SocketType};

use crate::lane::frame::{HELLO_BYTES, read_hello};
use crate::shared::Shared;
use crate::wake::poll_for;
use crate::{StartError, Token};

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
pub(crate) fn run(shared: &Arc<Shared>, socket: &OwnedFd) {
    let mut unproven: VecDeque<Unproven> = VecDeque::new();
    let mut rest_until: Option<Instant> = None;
    loop {
        let now = Instant::now();
        while unproven
            .front()
            .is_some_and(|first| now >= first.since + shared.config.hello)
        {
            unproven.pop_front();
        }
        rest_until = rest_until.filter(|until| *until > now);
        let next = [
            unproven.front().map(|first| first.since + shared.config.hello),
            rest_until,
        ];
        let limit = next
            .into_iter()
            .flatten()
            .min()
            .map(|at| at.saturating_duration_since(now));
        let ready = match wait(shared, socket, rest_until.is_some(), &unproven, limit) {
            Ok(ready) => ready,
            Err(error) => {
                // Out of memory at worst: it must not become a busy loop.
                tracing::warn!(%error, "waiting at the data port");
                std::thread::sleep(REST);
                if shared.listener.is_ending() {
                    return;
                }
                continue;
            }
        };
        if shared.listener.is_ending() {
            return;
        }
        let mut proven = |epoch, token: &Token, socket| shared.proven(epoch, token, socket);
        // From behind, so that what is removed does not move what comes.
        for at in ready.connections.into_iter().rev() {
            if let Some(connection) = unproven.remove(at)
                && let Some(connection) = connection.look(&mut proven)
            {
                unproven.insert(at, connection);
            }
        }
        if ready.listener {
            let most = shared.config.max_unproven;
            rest_until = accept(socket, most, &mut unproven, &mut proven).map(|()| None).unwrap_or_else(|error| {
                tracing::warn!(%error, "accepting at the data port rests for {REST:?}; raise the limit of open files");
                Some(Instant::now() + REST)
            });
        }
        shared
            .unproven
            .store(u64::try_from(unproven.len()).unwrap_or(0), Ordering::Relaxed);
    }
}

/// What can be read.
struct Ready {
    listener: bool,
    connections: Vec<usize>,
}

fn wait(
    shared: &Shared,
    socket: &OwnedFd,
    resting: bool,
    unproven: &VecDeque<Unproven>,
    limit: Option<Duration>,
) -> std::io::Result<Ready> {
    let listener = shared.listener.as_fd();
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
fn accept(
    socket: &OwnedFd,
    most: usize,
    unproven: &mut VecDeque<Unproven>,
    proven: &mut impl FnMut(u64, &Token, OwnedFd),
) -> Result<(), Errno> {
    // Not for ever: those that are there must be read too.
    for _ in 0..BACKLOG {
        match rustix::net::accept_with(socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok(accepted) => {
                let connection = Unproven {
                    socket: accepted,
                    since: Instant::now(),
                    hello: [0; HELLO_BYTES],
                    filled: 0,
                };
                // A peer's hello comes right behind its connection: most need no place among those that wait.
                let Some(connection) = connection.look(proven) else {
                    continue;
                };
                if unproven.len() >= most
                    && let Some(oldest) = unproven.pop_front()
                {
                    // It may have spoken since it was looked at.
                    drop(oldest.look(proven));
                }
                unproven.push_back(connection);
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
    /// Reads what came. Gives it back if that is not all yet.
    fn look(mut self, proven: &mut impl FnMut(u64, &Token, OwnedFd)) -> Option<Unproven> {
        match self.read() {
            Said::Nothing => return Some(self),
            Said::Rubbish => {}
            Said::Hello => {
                if let Some((epoch, token)) = read_hello(&self.hello) {
                    proven(epoch, &token, self.socket);
                }
            }
        }
        None
    }

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

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;
    use std::io::Write;
    use std::net::{SocketAddr, TcpStream};
    use std::os::fd::OwnedFd;

    use rustix::event::{PollFd, PollFlags};

    use super::{Unproven, accept, bind};
    use crate::lane::frame::hello;
    use crate::wake::poll_for;
    use crate::{Config, Token};

    /// Most that may be unproven.
    const MOST: usize = 2;

    /// A data port at which nothing is accepted but by [`Port::accept`].
    struct Port {
        socket: OwnedFd,
        address: SocketAddr,
        unproven: VecDeque<Unproven>,
        proven: Vec<u64>,
    }

    impl Port {
        fn new() -> Port {
            let (socket, address) = bind(Config::default().listen).unwrap();
            Port {
                socket,
                address,
                unproven: VecDeque::new(),
                proven: Vec::new(),
            }
        }

        /// A connection, complete as far as the kernel is concerned.
        fn connect(&self) -> TcpStream {
            TcpStream::connect(self.address).unwrap()
        }

        fn accept(&mut self) {
            let proven = &mut self.proven;
            let mut note = |epoch, _: &Token, _| proven.push(epoch);
            accept(&self.socket, MOST, &mut self.unproven, &mut note).unwrap();
        }
    }

    /// Says which epoch it has, and a token.
    fn speak(stream: &mut TcpStream, epoch: u64) {
        stream.write_all(&hello(epoch, &Token([7; 32]))).unwrap();
    }

    #[test]
    fn more_peers_at_once_than_may_be_unproven_are_all_heard() {
        let mut port = Port::new();
        let mut peers: Vec<_> = (0..20).map(|_| port.connect()).collect();
        for (epoch, peer) in (0..).zip(&mut peers) {
            speak(peer, epoch);
        }
        port.accept();
        assert!(port.proven.iter().copied().eq(0..20), "{:?}", port.proven);
        assert!(port.unproven.is_empty());
    }

    #[test]
    fn who_spoke_since_it_was_looked_at_is_heard_before_it_gives_way() {
        let mut port = Port::new();
        let mut first: Vec<_> = (0..MOST).map(|_| port.connect()).collect();
        port.accept();
        assert_eq!((port.unproven.len(), port.proven.len()), (MOST, 0));
        speak(&mut first[0], 1);
        poll_for(&mut [PollFd::new(&port.unproven[0].socket, PollFlags::IN)], None).unwrap();
        let _silent: Vec<_> = (0..MOST).map(|_| port.connect()).collect();
        port.accept();
        assert_eq!(port.proven, [1]);
        assert_eq!(port.unproven.len(), MOST, "the silent ones took their places");
    }
}
