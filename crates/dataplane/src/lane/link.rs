//! A lane's connection: a TCP socket, plain or with TLS on it. Nothing here waits but [`Link::wait`].

use std::io::{self, Read, Write};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::PollFlags;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};
use rustls::pki_types::ServerName;
use rustls::{ClientConnection, Connection, ServerConnection};

use crate::LaneTls;
use crate::lane::gather::Gather;
use crate::lane::queued;
use crate::lane::scatter::Inbox;
use crate::wake::{Waited, Wake};

/// Bytes that TLS keeps for the socket before it takes no more.
const TLS_BUFFER_BYTES: usize = 512 << 10;
/// A peer that does not acknowledge anything for so long has its connection broken by the kernel.
const USER_TIMEOUT_MS: u32 = 30_000;

/// One end of a lane's connection.
pub(crate) struct Link {
    socket: OwnedFd,
    tls: Option<Box<Connection>>,
}

/// The socket alone, as rustls reads and writes it.
struct Raw<'s>(&'s OwnedFd);

impl Link {
    /// Begins to connect. The connection stands when the socket can be written.
    pub(crate) fn connect(address: SocketAddr) -> io::Result<Link> {
        let family = match address.ip() {
            IpAddr::V4(_) => AddressFamily::INET,
            IpAddr::V6(_) => AddressFamily::INET6,
        };
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
        match rustix::net::connect(&socket, &address) {
            Ok(()) | Err(rustix::io::Errno::INPROGRESS) => Ok(Link { socket, tls: None }),
            Err(error) => Err(error.into()),
        }
    }

    /// An accepted socket, which is non-blocking.
    pub(crate) fn accepted(socket: OwnedFd) -> Link {
        Link { socket, tls: None }
    }

    /// Why connecting failed, if it did.
    pub(crate) fn connect_error(&self) -> io::Result<()> {
        match rustix::net::sockopt::socket_error(&self.socket)? {
            Ok(()) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Sets what a lane's socket needs. Buffer sizes are left to the kernel, whose tuning reaches further
    /// (tcp_rmem, tcp_wmem) than what a program may ask for (rmem_max, wmem_max).
    pub(crate) fn tune(&self) -> io::Result<()> {
        // A window's last part must not wait for an acknowledgement.
        rustix::net::sockopt::set_tcp_nodelay(&self.socket, true)?;
        rustix::net::sockopt::set_socket_keepalive(&self.socket, true)?;
        rustix::net::sockopt::set_tcp_user_timeout(&self.socket, USER_TIMEOUT_MS)?;
        Ok(())
    }

    /// Puts TLS on the connecting end. The other end must have a certificate for the host that the peer's name states.
    pub(crate) fn start_client_tls(&mut self, tls: &LaneTls, peer: &str) -> io::Result<()> {
        let name = ServerName::try_from(host(peer).to_owned()).map_err(io::Error::other)?;
        let connection = ClientConnection::new(tls.client(), name);
        self.start_tls(connection.map(Connection::Client))
    }

    /// Puts TLS on the accepting end.
    pub(crate) fn start_server_tls(&mut self, tls: &LaneTls) -> io::Result<()> {
        let connection = ServerConnection::new(tls.server());
        self.start_tls(connection.map(Connection::Server))
    }

    fn start_tls(&mut self, connection: Result<Connection, rustls::Error>) -> io::Result<()> {
        let mut connection = connection.map_err(io::Error::other)?;
        connection.set_buffer_limit(Some(TLS_BUFFER_BYTES));
        self.tls = Some(Box::new(connection));
        Ok(())
    }

    /// Whether payload may go straight between the socket and pages.
    pub(crate) fn is_direct(&self) -> bool {
        self.tls.is_none()
    }

    pub(crate) fn socket(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// Bytes that our kernel holds because the peer's has not taken them.
    pub(crate) fn unacknowledged(&self) -> io::Result<usize> {
        queued::unacknowledged(self.socket.as_fd())
    }

    /// Waits until there is something to read, or room to write if `writing`.
    pub(crate) fn wait(&self, wake: &Wake, writing: bool, limit: Duration) -> io::Result<Waited> {
        let writing = writing || self.is_unsent();
        let want = if writing {
            PollFlags::IN | PollFlags::OUT
        } else {
            PollFlags::IN
        };
        wake.wait(&self.socket, want, limit)
    }

    /// Waits until there is room to write, whatever there is to read: where nothing more is to be read, polling for it would
    /// return at once, again and again.
    pub(crate) fn wait_for_room(&self, wake: &Wake, limit: Duration) -> io::Result<Waited> {
        wake.wait(&self.socket, PollFlags::OUT, limit)
    }

    /// Sends of the window what the socket takes.
    pub(crate) fn send_window(&mut self, window: &mut Gather<'_>) -> io::Result<usize> {
        if self.tls.is_none() {
            return window.send(self.socket.as_fd());
        }
        let sent = self.send(window.unsent())?;
        window.advance(sent);
        Ok(sent)
    }

    /// Sends of `bytes` what the socket takes.
    pub(crate) fn send(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.tls.is_none() {
            return Raw(&self.socket).write(bytes);
        }
        self.flush()?;
        let taken = match &mut self.tls {
            Some(tls) => tls.writer().write(bytes)?,
            None => 0,
        };
        self.flush()?;
        match taken {
            0 if !bytes.is_empty() => Err(io::ErrorKind::WouldBlock.into()),
            taken => Ok(taken),
        }
    }

    /// Whether TLS holds bytes that the socket did not take.
    pub(crate) fn is_unsent(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.wants_write())
    }

    /// Sends what TLS holds, as far as the socket takes it.
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        if let Some(tls) = &mut self.tls {
            while tls.wants_write() {
                match tls.write_tls(&mut Raw(&self.socket)) {
                    Ok(_) => {}
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                    Err(error) => return Err(error),
                }
            }
        }
        Ok(())
    }

    /// Reads what there is into the inbox, at most so many bytes; the end of the stream is an error.
    pub(crate) fn receive(&mut self, inbox: &mut Inbox, most: usize) -> io::Result<usize> {
        let space = inbox.space();
        let len = space.len().min(most);
        let space = &mut space[..len];
        let got = match &mut self.tls {
            None => Raw(&self.socket).read(space),
            Some(tls) => receive_tls(tls, &self.socket, space),
        };
        // Reading may have made TLS want to say something: its handshake, a key update.
        self.flush()?;
        let got = got?;
        if got == 0 && !space.is_empty() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        inbox.grow(got);
        Ok(got)
    }
}

/// The host of `host:port` or `[address]:port`; all of it where there is no port.
fn host(peer: &str) -> &str {
    let host = match peer.rsplit_once(':') {
        Some((host, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => host,
        _ => peer,
    };
    host.strip_prefix('[')
        .and_then(|host| host.strip_suffix(']'))
        .unwrap_or(host)
}

fn receive_tls(tls: &mut Connection, socket: &OwnedFd, space: &mut [u8]) -> io::Result<usize> {
    let mut filled = 0;
    loop {
        while filled < space.len() {
            match tls.reader().read(&mut space[filled..]) {
                Ok(0) => return Ok(filled),
                Ok(got) => filled += got,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(_) if filled > 0 => return Ok(filled),
                Err(error) => return Err(error),
            }
        }
        if filled == space.len() {
            return Ok(filled);
        }
        match tls.read_tls(&mut Raw(socket)) {
            Ok(0) if filled == 0 => return Ok(0),
            Ok(0) => return Ok(filled),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock && filled > 0 => return Ok(filled),
            Err(error) => return Err(error),
        }
        tls.process_new_packets().map_err(io::Error::other)?;
    }
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Read for Raw<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let (got, _) = rustix::net::recv(self.0, bytes, RecvFlags::DONTWAIT)?;
        Ok(got)
    }
}

impl Write for Raw<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(rustix::net::send(
            self.0,
            bytes,
            SendFlags::DONTWAIT | SendFlags::NOSIGNAL,
        )?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    use super::{Link, host};
    use crate::wake::Wake;

    #[test]
    fn waiting_for_room_is_not_ended_by_what_can_be_read() {
        let (near, mut far) = UnixStream::pair().unwrap();
        near.set_nonblocking(true).unwrap();
        let mut link = Link::accepted(near.into());
        while link.send(&[0; 4096]).is_ok() {}
        std::io::Write::write_all(&mut far, b"more").unwrap();
        let wake = Wake::new().unwrap();
        let limit = Duration::from_millis(5);
        let waited = link.wait_for_room(&wake, limit).unwrap();
        assert!(!waited.readable && !waited.writable, "{waited:?}");
        assert!(link.wait(&wake, true, limit).unwrap().readable);
        let mut all = vec![0; 1 << 20];
        let _ = std::io::Read::read(&mut far, &mut all).unwrap();
        while !link
            .wait_for_room(&wake, Duration::from_secs(20))
            .unwrap()
            .writable
        {
            let _ = std::io::Read::read(&mut far, &mut all).unwrap();
        }
    }

    #[test]
    fn a_peer_is_named_by_its_host() {
        for (peer, named) in [
            ("node7.example:7400", "node7.example"),
            ("10.1.2.3:7400", "10.1.2.3"),
            ("[fd00::7]:7400", "fd00::7"),
            ("node7", "node7"),
        ] {
            assert_eq!(host(peer), named);
        }
    }
}
