//! Takes channels that peers open.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use kvferry_broker::PeerAddress;
use kvferry_control::{Fault, FrameError};
use kvferry_handshake::Code;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;

use super::channel::{self, Stream};
use super::dial::GREETING_PATIENCE;
use super::tls::{check_name, is_of_tls};
use super::wire::{Hello, HelloAnswer, Introduction, MAGIC, MAX_GREETING, VERSIONS, encode, how, read};
use super::{Arrival, Decision, PeerEvent, Shared};
use crate::config::Advertised;
use crate::crowd::Crowd;

/// Connections that have not greeted; past it the oldest gives way.
const MOST_UNPROVEN: usize = 256;

/// Accepts until it is dropped.
pub(crate) async fn accept(listener: TcpListener, shared: Shared) {
    let mut unproven = Crowd::new(MOST_UNPROVEN);
    loop {
        match listener.accept().await {
            Ok((stream, from)) => unproven.admit(receive(stream, from, Arc::clone(&shared))),
            Err(error) => {
                let what = "accepting a peer failed";
                if shared.floods.admit(what, None) {
                    tracing::warn!(%error, "{what}");
                }
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

async fn receive(stream: TcpStream, from: SocketAddr, shared: Shared) {
    match tokio::time::timeout(GREETING_PATIENCE, greet(stream, from, &shared)).await {
        // A task of its own: this one may be ended to make room.
        Ok(Ok(caller)) => drop(tokio::spawn(introduce(caller, from, shared))),
        Ok(Err(fault)) => {
            let what = "a peer's connection is refused";
            if shared.floods.admit(what, Some(fault.code)) {
                tracing::warn!(%from, %fault, "{what}");
            }
        }
        Err(_) => {
            let what = "a peer's connection did not greet in time";
            if shared.floods.admit(what, None) {
                tracing::warn!(%from, "{what}");
            }
        }
    }
}

/// A peer that greeted as it should.
struct Caller {
    stream: Box<dyn Stream>,
    peer: PeerAddress,
    version: u32,
    arrival: Arrival,
}

/// Asks the driver, answers, and runs the channel.
async fn introduce(caller: Caller, from: SocketAddr, shared: Shared) {
    let Caller {
        mut stream,
        peer,
        version,
        arrival,
    } = caller;
    let (decision, wait) = oneshot::channel();
    let name = peer.0.clone();
    let called = PeerEvent::Called {
        peer,
        arrival,
        decision,
    };
    if shared.driver.send(called).await.is_err() {
        return;
    }
    let Ok(decision) = wait.await else { return };
    let (answer, ticket) = match decision {
        Decision::Accept(ticket) => {
            let introduction = Introduction::of(&shared);
            (
                HelloAnswer::Welcome {
                    version,
                    introduction,
                },
                Some(ticket),
            )
        }
        Decision::Duplicate => (HelloAnswer::Duplicate, None),
        Decision::Refuse(fault) => {
            let what = "a peer is refused";
            if shared.floods.admit(what, Some(fault.code)) {
                tracing::warn!(%from, %fault, "{what}");
            }
            (HelloAnswer::Refused(fault), None)
        }
    };
    let said = say(&mut stream, &answer).await;
    let Some(ticket) = ticket else { return };
    match said {
        Ok(()) => channel::run(stream, &name, ticket, shared).await,
        Err(cause) => {
            let channel = ticket.channel;
            let _ = shared.driver.send(PeerEvent::Down { channel, cause }).await;
        }
    }
}

async fn greet(stream: TcpStream, from: SocketAddr, shared: &Shared) -> Result<Caller, Fault> {
    let broken = |error: std::io::Error| Fault::new(Code::PeerLost, how(&error));
    stream.set_nodelay(true).map_err(broken)?;
    let mut certificates = None;
    let mut stream: Box<dyn Stream> = match &shared.tls {
        None => Box::new(stream),
        Some(own) => {
            let stream = own.current().acceptor.accept(stream).await.map_err(|error| {
                let code = if is_of_tls(&error) {
                    Code::PeerTls
                } else {
                    Code::PeerLost
                };
                Fault::new(code, format!("the TLS handshake failed: {}", how(&error)))
            })?;
            certificates = stream.get_ref().1.peer_certificates().map(<[_]>::to_vec);
            Box::new(stream)
        }
    };
    let hello: Hello = match read(&mut stream, MAX_GREETING).await.map_err(broken)? {
        Ok(Some(hello)) => hello,
        Ok(None) => return Err(Fault::new(Code::PeerLost, "it closed before it greeted")),
        Err(error) => return Err(error.into()),
    };
    match check(&hello, certificates.as_deref(), shared) {
        Ok((address, version)) => Ok(Caller {
            stream,
            peer: PeerAddress(address.to_string().into()),
            version,
            arrival: Arrival {
                incarnation: hello.introduction.incarnation,
                data_host: hello.introduction.data_host.unwrap_or(from.ip()),
            },
        }),
        Err(fault) => {
            let _ = say(&mut stream, &HelloAnswer::Refused(fault.clone())).await;
            Err(fault)
        }
    }
}

fn check(
    hello: &Hello,
    certificates: Option<&[rustls::pki_types::CertificateDer<'_>]>,
    shared: &Shared,
) -> Result<(Advertised, u32), Fault> {
    let Introduction { address, release, .. } = &hello.introduction;
    if hello.magic != MAGIC {
        return Err(Fault::new(
            Code::ProtocolViolation,
            "the greeting is not a kvferryd's",
        ));
    }
    let version = VERSIONS.common(hello.versions).map_err(|none| {
        let us = format!("{} (kvferryd {})", shared.address, env!("CARGO_PKG_VERSION"));
        let message = format!("{none} (this side: {us}; the other: {address:?}, kvferryd {release:?})");
        Fault::new(Code::ProtocolVersion, message)
    })?;
    let address: Advertised = address
        .parse()
        .map_err(|error| Fault::new(Code::ProtocolViolation, format!("the greeting's address {error}")))?;
    if shared.tls.is_some() {
        check_name(certificates, &address)?;
    }
    hello.introduction.check_lanes(shared)?;
    Ok((address, version))
}

async fn say(stream: &mut Box<dyn Stream>, answer: &HelloAnswer) -> Result<(), Fault> {
    let frame = encode(answer).map_err(FrameError::from)?;
    let write = async {
        stream.write_all(&frame).await?;
        stream.flush().await
    };
    match tokio::time::timeout(GREETING_PATIENCE, write).await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(error)) => Err(Fault::new(Code::PeerLost, how(&error))),
        Err(_) => Err(Fault::new(
            Code::PeerLost,
            "it does not read the answer to its greeting",
        )),
    }
}
