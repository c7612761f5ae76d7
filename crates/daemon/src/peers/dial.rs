//! Opens a channel to a peer.

use std::io;
use std::net::{IpAddr, ToSocketAddrs as _};
use std::time::Duration;

use kvferry_broker::PeerAddress;
use kvferry_control::{Fault, FrameError};
use kvferry_handshake::Code;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::sync::oneshot;

use super::channel::{self, Stream};
use super::tls::{is_of_tls, server_name};
use super::wire::{Hello, HelloAnswer, Introduction, MAGIC, MAX_GREETING, VERSIONS, encode, how, read};
use super::{Arrival, DialId, PeerEvent, Shared};
use crate::aside::{Undone, aside, caught};
use crate::config::Advertised;

/// How long a TCP connection may take to stand.
const CONNECT_PATIENCE: Duration = Duration::from_secs(3);
/// How long TLS and greetings may take.
pub(crate) const GREETING_PATIENCE: Duration = Duration::from_secs(5);

/// Connects after a pause, greets, and runs the channel to its end.
pub(crate) async fn dial(shared: Shared, peer: PeerAddress, dial: DialId, after: Duration) {
    tokio::time::sleep(after).await;
    let attempted = caught(attempt(&shared, &peer, dial)).await;
    let attempted =
        attempted.unwrap_or_else(|| Err(Undone::Defect.fault(&format!("connecting to peer {}", peer.0))));
    let cause = match attempted {
        Ok(Some((stream, arrival))) => {
            let (ticket, wait) = oneshot::channel();
            let name = peer.0.clone();
            let dialled = PeerEvent::Dialled {
                peer,
                dial,
                arrival,
                ticket,
            };
            if shared.driver.send(dialled).await.is_ok()
                && let Ok(Some(ticket)) = wait.await
            {
                channel::run(stream, &name, ticket, shared).await;
            }
            return;
        }
        Ok(None) => {
            // The peer's own connection is on its way; if it does not come, this one has failed.
            tokio::time::sleep(GREETING_PATIENCE).await;
            let message = format!("peer {} said that it was connecting, and did not", peer.0);
            Fault::new(Code::PeerUnreachable, message)
        }
        Err(cause) => cause,
    };
    let _ = shared
        .driver
        .send(PeerEvent::DialFailed { peer, dial, cause })
        .await;
}

/// Connects to the first address of `host` that answers.
async fn connect(host: &str, port: u16) -> io::Result<TcpStream> {
    if let Ok(ip) = host.parse::<IpAddr>() {
        return TcpStream::connect((ip, port)).await;
    }
    let named = (host.to_owned(), port);
    // The resolver waits for its servers.
    let resolved = aside("resolve", move || named.to_socket_addrs().map(Vec::from_iter)).await;
    let addresses = resolved.map_err(io::Error::other)??;
    // All are tried in turn.
    TcpStream::connect(addresses.as_slice()).await
}

/// `Ok(None)`: another connection of the two is preferred.
async fn attempt(
    shared: &Shared,
    peer: &PeerAddress,
    dial: DialId,
) -> Result<Option<(Box<dyn Stream>, Arrival)>, Fault> {
    let address: Advertised = peer
        .0
        .parse()
        .map_err(|error| Fault::new(Code::PeerUnreachable, format!("peer address {error}")))?;
    let unreachable = |how: String| {
        Fault::new(
            Code::PeerUnreachable,
            format!("peer {address} cannot be reached: {how}"),
        )
    };

    let connect = connect(address.host(), address.port());
    let stream = match tokio::time::timeout(CONNECT_PATIENCE, connect).await {
        Err(_) => {
            return Err(unreachable(format!(
                "no answer within {} s",
                CONNECT_PATIENCE.as_secs()
            )));
        }
        Ok(Err(error)) => return Err(unreachable(error.to_string())),
        Ok(Ok(stream)) => stream,
    };
    let nodelay = stream.set_nodelay(true).and_then(|()| stream.peer_addr());
    let seen = nodelay.map_err(|error| unreachable(error.to_string()))?;

    let (go, wait) = oneshot::channel();
    let ready = PeerEvent::DialReady {
        peer: peer.clone(),
        dial,
        go,
    };
    let _ = shared.driver.send(ready).await;
    if !wait.await.unwrap_or(false) {
        return Ok(None);
    }
    let greeted = tokio::time::timeout(GREETING_PATIENCE, greet(shared, &address, stream)).await;
    let (stream, answer) = greeted.unwrap_or_else(|_| {
        Err(unreachable(format!(
            "no greeting within {} s",
            GREETING_PATIENCE.as_secs()
        )))
    })?;
    match answer {
        HelloAnswer::Duplicate => Ok(None),
        HelloAnswer::Refused(fault) => Err(Fault::new(
            fault.code,
            format!("peer {address} refuses: {}", fault.message),
        )),
        HelloAnswer::Welcome {
            version,
            introduction,
        } => {
            if !(VERSIONS.lowest..=VERSIONS.highest).contains(&version) {
                let message =
                    format!("peer {address} chose version {version} of the protocol, which was not offered");
                return Err(Fault::new(Code::ProtocolVersion, message));
            }
            // A daemon is known by one name, or transfers would not find each other.
            if introduction.address != *peer.0 {
                let message = format!(
                    "peer address {}: the daemon there calls itself {own}; write kvferry://{own}/ENGINE",
                    peer.0,
                    own = introduction.address
                );
                return Err(Fault::new(Code::AddressInvalid, message));
            }
            introduction.check_lanes(shared)?;
            let data_host = introduction.data_host.unwrap_or(seen.ip());
            let incarnation = introduction.incarnation;
            Ok(Some((
                stream,
                Arrival {
                    incarnation,
                    data_host,
                },
            )))
        }
    }
}

async fn greet(
    shared: &Shared,
    address: &Advertised,
    stream: TcpStream,
) -> Result<(Box<dyn Stream>, HelloAnswer), Fault> {
    let mut stream: Box<dyn Stream> = match &shared.tls {
        None => Box::new(stream),
        Some(certificates) => {
            let tls = certificates.current();
            let connected = tls.connector.connect(server_name(address)?, stream).await;
            Box::new(connected.map_err(|error| tls_failed(address, &error))?)
        }
    };
    let hello = Hello {
        magic: MAGIC,
        versions: VERSIONS,
        introduction: Introduction::of(shared),
    };
    let hello = encode(&hello).map_err(FrameError::from)?;
    let exchange = async {
        stream.write_all(&hello).await?;
        stream.flush().await?;
        read(&mut stream, MAX_GREETING).await
    };
    let answer = match exchange.await {
        Ok(Ok(Some(answer))) => answer,
        // With TLS 1.3 a refused certificate shows here first.
        Err(error) if shared.tls.is_some() => return Err(tls_failed(address, &error)),
        Err(error) => return Err(odd(address, how(&error))),
        Ok(Ok(None)) => return Err(odd(address, "it closed the connection".to_owned())),
        Ok(Err(error)) => return Err(odd(address, error.to_string())),
    };
    Ok((stream, answer))
}

fn tls_failed(address: &Advertised, error: &io::Error) -> Fault {
    if !is_of_tls(error) {
        return Fault::new(
            Code::PeerUnreachable,
            format!(
                "the connection to peer {address} broke during the TLS handshake ({}); it is tried again: a daemon that \
                 starts or ends, a network that drops packets, or a peer without TLS",
                how(error)
            ),
        );
    }
    Fault::new(
        Code::PeerTls,
        format!(
            "the TLS handshake with peer {address} failed: {error}; both daemons need certificates of one authority, and \
             the peer's must be for {:?} (docs/security.md)",
            address.host()
        ),
    )
}

fn odd(address: &Advertised, how: String) -> Fault {
    Fault::new(
        Code::PeerUnreachable,
        format!(
            "peer {address} does not answer like a kvferryd without TLS: {how}; set the tls keys on both daemons or on \
             neither"
        ),
    )
}
