//! What daemons say on a channel: frames of four bytes of length and a message in bincode.

use std::io;
use std::net::IpAddr;

use kvferry_broker::PeerMessage;
use kvferry_control::{Fault, FrameError};
use kvferry_dataplane::LaneMessage;
use kvferry_handshake::{FRAME_HEADER, Versions, WireError, decode};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncReadExt};

/// Versions of the peers' protocol that this release speaks.
pub(crate) const VERSIONS: Versions = Versions {
    lowest: 1,
    highest: 1,
};
/// First bytes of a greeting.
pub(crate) const MAGIC: [u8; 8] = *b"kvferry\n";
/// Longest greeting and answer to one.
pub(crate) const MAX_GREETING: usize = 4096;

/// First frame of the side that connected. Its form is the same in all versions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Hello {
    pub(crate) magic: [u8; 8],
    pub(crate) versions: Versions,
    pub(crate) introduction: Introduction,
}

/// Who a daemon is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Introduction {
    /// The address by which peers name it.
    pub(crate) address: String,
    /// One life of it.
    pub(crate) incarnation: u64,
    /// Where its data port is; `None`: where the channel comes from or goes to.
    pub(crate) data_host: Option<IpAddr>,
    /// Its release, for the log.
    pub(crate) release: String,
}

/// Answer to [`Hello`]. Its form is the same in all versions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum HelloAnswer {
    /// The channel is open, in this version.
    Welcome {
        version: u32,
        introduction: Introduction,
    },
    /// A channel between the two is open or opening already; that one is kept.
    Duplicate,
    /// No.
    Refused(Fault),
}

/// Any later frame.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum PeerFrame {
    /// From broker to broker.
    Broker(Box<PeerMessage>),
    /// From data plane to data plane.
    Lane(LaneMessage),
    /// Said each second when there is nothing else to say.
    Alive,
}

/// A frame, with its length before it.
pub(crate) fn encode<T: Serialize>(message: &T) -> Result<Vec<u8>, WireError> {
    kvferry_handshake::frame(&kvferry_handshake::encode(message)?)
}

/// Reads a frame of up to `limit` bytes. `Ok(Ok(None))`: the stream ended between frames.
pub(crate) async fn read<T: DeserializeOwned>(
    stream: &mut (impl AsyncRead + Unpin),
    limit: usize,
) -> io::Result<Result<Option<T>, FrameError>> {
    let mut header = [0; FRAME_HEADER];
    if stream.read(&mut header[..1]).await? == 0 {
        return Ok(Ok(None));
    }
    if let Err(error) = stream.read_exact(&mut header[1..]).await {
        return ended(error, FRAME_HEADER - 1);
    }
    let len = usize::try_from(u32::from_le_bytes(header)).unwrap_or(usize::MAX);
    if len > limit {
        return Ok(Err(FrameError::TooLong { len, limit }));
    }
    // Grows as bytes arrive: a length alone reserves nothing.
    let mut payload = Vec::new();
    stream
        .take(u64::from(u32::from_le_bytes(header)))
        .read_to_end(&mut payload)
        .await?;
    if payload.len() < len {
        return Ok(Err(FrameError::Truncated {
            missing: len - payload.len(),
        }));
    }
    Ok(decode(&payload).map(Some).map_err(FrameError::from))
}

fn ended<T>(error: io::Error, missing: usize) -> io::Result<Result<Option<T>, FrameError>> {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => Ok(Err(FrameError::Truncated { missing })),
        _ => Err(error),
    }
}
