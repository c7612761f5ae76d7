//! An open channel: reads frames for the driver, writes what waits, and notices silence.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use kvferry_control::{Fault, FrameError, MAX_FRAME};
use kvferry_handshake::Code;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::time::{Instant, Sleep};

use super::wire::{PeerFrame, encode, how, read};
use super::{PeerEvent, Shared, Ticket};
use crate::aside::{Undone, caught};
use crate::outbox::Outbox;

/// A channel on which nothing was said for so long says that it is alive.
const ALIVE_EVERY: Duration = Duration::from_secs(1);

/// A stream between daemons, with TLS or without.
pub(crate) trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// Runs a channel to its end.
pub(crate) async fn run(stream: Box<dyn Stream>, name: &str, ticket: Ticket, shared: Shared) {
    let (reading, writing) = tokio::io::split(stream);
    let life = async {
        tokio::select! {
            cause = receive(reading, name, &ticket, &shared) => cause,
            cause = transmit(writing, name, &ticket.outbox, shared.timeout) => cause,
        }
    };
    // Whatever happens in it, the driver learns of its end.
    let ended = caught(life).await;
    let cause = ended.unwrap_or_else(|| Undone::Defect.fault(&format!("the channel to peer {name}")));
    let channel = ticket.channel;
    // An error means that the driver has ended, and the daemon with it.
    let _ = shared.driver.send(PeerEvent::Down { channel, cause }).await;
}

async fn receive(stream: impl AsyncRead + Unpin, name: &str, ticket: &Ticket, shared: &Shared) -> Fault {
    let lost = |how: String| {
        Fault::new(
            Code::PeerLost,
            format!("the channel to peer {name} is lost: {how}"),
        )
    };
    let mut stream = Impatient::new(stream, shared.timeout);
    loop {
        let frame = match read(&mut stream, MAX_FRAME).await {
            Err(error) => return lost(how(&error)),
            Ok(Ok(None)) => return lost("the peer closed it".to_owned()),
            Ok(Err(error)) => {
                return Fault::new(
                    error.code(),
                    format!("the channel to peer {name} is cut: {error}"),
                );
            }
            Ok(Ok(Some(PeerFrame::Alive))) => continue,
            Ok(Ok(Some(frame))) => frame,
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
    mut stream: impl AsyncWrite + Unpin,
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
        if let Err(error) = write(&mut stream, &frame, patience).await {
            return lost(how(&error));
        }
    }
}

/// Writes a frame to a peer that takes some of it at least once in `patience`: a long one may take longer.
async fn write(stream: &mut (impl AsyncWrite + Unpin), frame: &[u8], patience: Duration) -> io::Result<()> {
    let stuck = |_| {
        let silence = patience.as_millis();
        io::Error::new(
            io::ErrorKind::TimedOut,
            format!("it took nothing for {silence} ms (peer_timeout_ms)"),
        )
    };
    let mut rest = frame;
    while !rest.is_empty() {
        let written = tokio::time::timeout(patience, stream.write(rest)).await;
        match written.map_err(stuck)?? {
            0 => return Err(io::ErrorKind::WriteZero.into()),
            written => rest = rest.get(written..).unwrap_or_default(),
        }
    }
    tokio::time::timeout(patience, stream.flush())
        .await
        .map_err(stuck)?
}

/// Reads that fail when nothing has arrived for a time. Whatever arrives is a sign of life, not only what
/// completes a frame: a long one may take longer.
struct Impatient<S> {
    stream: S,
    patience: Duration,
    silence: Pin<Box<Sleep>>,
}

impl<S> Impatient<S> {
    fn new(stream: S, patience: Duration) -> Impatient<S> {
        Impatient {
            stream,
            patience,
            silence: Box::pin(tokio::time::sleep(patience)),
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Impatient<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        // Looked at first: what arrived while nobody read was no silence.
        if let Poll::Ready(read) = Pin::new(&mut self.stream).poll_read(context, buffer) {
            let until = Instant::now() + self.patience;
            self.silence.as_mut().reset(until);
            return Poll::Ready(read);
        }
        ready!(self.silence.as_mut().poll(context));
        let silence = self.patience.as_millis();
        Poll::Ready(Err(io::Error::new(
            io::ErrorKind::TimedOut,
            format!("it was silent for {silence} ms (peer_timeout_ms)"),
        )))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use kvferry_dataplane::LaneMessage;
    use tokio::io::AsyncReadExt;
    use tokio::sync::mpsc;

    use super::*;
    use crate::peers::{Neighbourhood, PeerSet};

    const PATIENCE: Duration = Duration::from_secs(10);
    /// Between two pieces: less than the patience, but more than it for all of a frame.
    const PAUSE: Duration = Duration::from_secs(6);

    fn frame() -> PeerFrame {
        PeerFrame::Lane(LaneMessage::Want { lane: 1, ask: 2 })
    }

    #[tokio::test(start_paused = true)]
    async fn a_frame_that_takes_long_to_arrive_is_no_silence() {
        let (driver, mut events) = mpsc::channel(1);
        let shared = Arc::new(Neighbourhood {
            address: "n:1".parse().unwrap(),
            incarnation: 1,
            data_host: None,
            tls: None,
            encrypts_lanes: false,
            timeout: PATIENCE,
            driver,
            floods: Default::default(),
        });
        let now = std::time::Instant::now();
        let mut set = PeerSet::new(kvferry_broker::PeerAddress("n:1".into()), 1, 1, 1000);
        let arrival = crate::peers::Arrival {
            incarnation: 2,
            data_host: [127, 0, 0, 1].into(),
        };
        let caller = kvferry_broker::PeerAddress("n:2".into());
        let (crate::peers::Decision::Accept(ticket), _) = set.called(now, &caller, arrival) else {
            panic!("there is room");
        };
        let (mut far, near) = tokio::io::duplex(1000);
        let receiving = tokio::spawn(async move { receive(near, "n:2", &ticket, &shared).await });
        for byte in encode(&frame()).unwrap() {
            far.write_all(&[byte]).await.unwrap();
            tokio::time::sleep(PAUSE).await;
        }
        let Some(PeerEvent::Frame { frame: got, .. }) = events.recv().await else {
            panic!("the channel is cut");
        };
        assert_eq!(got, frame());
        let cause = receiving.await.unwrap();
        assert_eq!(cause.code, Code::PeerLost);
        assert!(cause.message.contains("silent for 10000 ms"), "{cause}");
        drop(far);
    }

    #[tokio::test(start_paused = true)]
    async fn a_frame_that_takes_long_to_be_taken_is_written_and_one_that_is_not_taken_is_not() {
        let (mut far, mut near) = tokio::io::duplex(4);
        let sent = encode(&frame()).unwrap();
        let writing = tokio::spawn({
            let sent = sent.clone();
            async move { (write(&mut near, &sent, PATIENCE).await, near) }
        });
        let mut got = Vec::new();
        while got.len() < sent.len() {
            tokio::time::sleep(PAUSE).await;
            got.push(far.read_u8().await.unwrap());
        }
        let (written, mut near) = writing.await.unwrap();
        written.unwrap();
        assert_eq!(got, sent);
        let error = write(&mut near, &sent, PATIENCE).await.unwrap_err();
        assert!(error.to_string().contains("took nothing for 10000 ms"), "{error}");
    }
}
