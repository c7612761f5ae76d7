//! The Unix socket, driven by tokio.

use std::io;
use std::path::Path;
use std::time::Duration;

use kvferry_control::{
    Fds, Frame, FrameError, FrameReader, FrameWriter, MAX_FRAME, Request, Response, VERSIONS, Welcome,
};
use kvferry_handshake::{Code, decode, encode};
use tokio::io::Interest;
use tokio::net::UnixStream;

use crate::tracer::Named;
use crate::{ClientError, Fault};

/// A daemon that accepts but does not answer `Hello` for so long counts as away.
pub(crate) const HELLO_PATIENCE: Duration = Duration::from_secs(10);

/// A connection on which both sides said `Hello`. Reading and writing are apart so that one may wait for
/// the other.
#[derive(Debug)]
pub(crate) struct Socket {
    pub(crate) stream: UnixStream,
    pub(crate) reader: FrameReader,
    pub(crate) writer: FrameWriter,
    /// Once memory of this process is registered here: the daemon may reach it.
    pub(crate) named: Option<Named>,
}

impl Socket {
    /// Connects once and greets, both within `within`.
    pub(crate) async fn open(path: &Path, within: Duration) -> Result<(Socket, Welcome), ClientError> {
        let away = |cause| ClientError::DaemonAway {
            socket: path.to_owned(),
            cause,
        };
        let greeted = tokio::time::timeout(within, greet(path)).await;
        match greeted {
            Ok(Ok(Ok(pair))) => Ok(pair),
            Ok(Ok(Err(fault))) => Err(ClientError::Refused(fault)),
            Ok(Err(cause)) => Err(away(cause)),
            Err(_) => Err(away(io::Error::new(
                io::ErrorKind::TimedOut,
                format!(
                    "connected, but not greeted within {:.1} s: what listens there is stopped, stuck, out of files to open (the log of \
                     kvferryd says so), or no kvferryd",
                    within.as_secs_f64()
                ),
            ))),
        }
    }
}

async fn greet(path: &Path) -> io::Result<Result<(Socket, Welcome), Fault>> {
    let mut socket = Socket {
        stream: UnixStream::connect(path).await?,
        reader: FrameReader::new(MAX_FRAME),
        writer: FrameWriter::new(),
        named: None,
    };
    let hello = encode(&Request::Hello(VERSIONS)).map_err(io::Error::other)?;
    socket.writer.push(hello, None).map_err(io::Error::other)?;
    // A daemon that refuses says so unasked and closes: the answer counts, not whether the greeting went out.
    let written = write(&socket.stream, &mut socket.writer).await;
    let answer = match read(&socket.stream, &mut socket.reader).await? {
        Ok(Some(response)) => response,
        Ok(None) => return Err(written.err().unwrap_or_else(closed)),
        Err(error) => return Ok(Err(error.into())),
    };
    Ok(match answer {
        Response::Hello(Ok(welcome)) => Ok((socket, welcome)),
        Response::Hello(Err(fault)) => Err(fault),
        _ => Err(Fault::new(
            Code::ProtocolViolation,
            "the daemon's first frame is no answer to Hello",
        )),
    })
}

fn closed() -> io::Error {
    io::Error::new(io::ErrorKind::UnexpectedEof, "the daemon closed the connection")
}

/// The next message; `None` at the end of the stream. May be dropped and called again without loss.
pub(crate) async fn read(
    stream: &UnixStream,
    reader: &mut FrameReader,
) -> io::Result<Result<Option<Response>, FrameError>> {
    let frame = stream
        .async_io(Interest::READABLE, || reader.read(stream))
        .await?;
    Ok(match frame {
        Err(error) => Err(error),
        Ok(None) => Ok(None),
        // A daemon sends no fds; what comes is closed.
        Ok(Some(Frame {
            payload,
            fds: Fds::None | Fds::One(_) | Fds::Several | Fds::Untaken,
        })) => decode(&payload).map(Some).map_err(FrameError::from),
    })
}

/// Writes what is queued. May be dropped and called again without loss.
pub(crate) async fn write(stream: &UnixStream, writer: &mut FrameWriter) -> io::Result<()> {
    stream.async_io(Interest::WRITABLE, || writer.write(stream)).await
}
