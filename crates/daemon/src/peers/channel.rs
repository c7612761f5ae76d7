//! An open channel: reads frames for the driver, writes what waits, and notices silence.

use std::time::Duration;

use kvferry_control::{Fault, FrameError, MAX_FRAME};
use kvferry_handshake::Code;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadHalf, WriteHalf};

use super::wire::{PeerFrame, encode, read};
use super::{PeerEvent, Shared, Ticket};
use crate::outbox::Outbox;

/// A channel on which nothing was said for so long says that it is alive.
const ALIVE_EVERY: Duration = Duration::from_secs(1);

/// A stream between daemons, with TLS or without.
pub(crate) trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// Runs a channel to its end.
pub(crate) async fn run(stream: Box<dyn Stream>, name: &str, ticket: Ticket, shared: Shared) {
    let (reading, writing) = tokio::io::split(stream);
    let cause = tokio::select! {
        cause = receive(reading, name, &ticket, &shared) => cause,
        cause = transmit(writing, name, &ticket.outbox, shared.timeout) => cause,
    };
    let channel = ticket.channel;
    // An error means that the driver has ended, and the daemon with it.
    let _ = shared.driver.send(PeerEvent::Down { channel, cause }).await;
}

async fn receive(
    mut stream: ReadHalf<Box<dyn Stream>>,
    name: &str,
    ticket: &Ticket,
    shared: &Shared,
) -> Fault {
    let lost = |how: String| {
        Fault::new(
            Code::PeerLost,
            format!("the channel to peer {name} is lost: {how}"),
        )
    };
    loop {
        let frame = match tokio::time::timeout(shared.timeout, read(&mut stream, MAX_FRAME)).await {
            Err(_) => {
                return lost(format!(
                    "it was silent for {} ms (peer_timeout_ms)",
                    shared.timeout.as_millis()
                ));
            }
            Ok(Err(error)) => return lost(error.to_string()),
            Ok(Ok(Ok(None))) => return lost("the peer closed it".to_owned()),
            Ok(Ok(Err(error))) => {
                return Fault::new(
                    error.code(),
                    format!("the channel to peer {name} is cut: {error}"),
                );
            }
            Ok(Ok(Ok(Some(PeerFrame::Alive)))) => continue,
            Ok(Ok(Ok(Some(frame)))) => frame,
        };
        let channel = ticket.channel;
        if shared
            .driver
            .send(PeerEvent::Frame { channel, frame })
            .await
            .is_err()
        {
            return Fault::new(Code::Shutdown, "the daemon is shutting down");
        }
    }
}

async fn transmit(
    mut stream: WriteHalf<Box<dyn Stream>>,
    name: &str,
    outbox: &Outbox,
    patience: Duration,
) -> Fault {
    let lost = |how: String| {
        Fault::new(
            Code::PeerLost,
            format!("the channel to peer {name} is lost: {how}"),
        )
    };
    let alive = match encode(&PeerFrame::Alive) {
        Ok(alive) => alive,
        Err(error) => return FrameError::from(error).into(),
    };
    loop {
        let frame = match tokio::time::timeout(ALIVE_EVERY, outbox.take()).await {
            Ok(Ok(frame)) => frame,
            Ok(Err(end)) => {
                // The peer is told that the stream ends here, if it still listens.
                let _ = tokio::time::timeout(ALIVE_EVERY, stream.shutdown()).await;
                return end;
            }
            Err(_) => alive.clone(),
        };
        let write = async {
            stream.write_all(&frame).await?;
            stream.flush().await
        };
        match tokio::time::timeout(patience, write).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => return lost(error.to_string()),
            Err(_) => {
                return lost(format!(
                    "it took nothing for {} ms (peer_timeout_ms)",
                    patience.as_millis()
                ));
            }
        }
    }
}
