//! What daemons say on a channel: frames of four bytes of length and a message in bincode.

use std::io;
use std::net::IpAddr;

use kvferry_broker::PeerMessage;
use kvferry_control::{Fault, FrameError};
use kvferry_dataplane::LaneMessage;
use kvferry_handshake::{Code, FRAME_HEADER, Versions, WireError, decode};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncReadExt};

use super::Shared;

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
    /// Whether its lanes are encrypted; both sides must think alike.
    pub(crate) encrypts_lanes: bool,
    /// Its release, for the log.
    pub(crate) release: String,
}

impl Introduction {
    /// Who we are.
    pub(crate) fn of(shared: &Shared) -> Introduction {
        Introduction {
            address: shared.address.to_string(),
            incarnation: shared.incarnation,
            data_host: shared.data_host,
            encrypts_lanes: shared.encrypts_lanes,
            release: env!("CARGO_PKG_VERSION").to_owned(),
        }
    }

    /// Refuses a peer with which no lane would ever open.
    pub(crate) fn check_lanes(&self, shared: &Shared) -> Result<(), Fault> {
        if self.encrypts_lanes == shared.encrypts_lanes {
            return Ok(());
        }
        let (ours, theirs) = (shared.address.to_string(), self.address.clone());
        let (encrypts, does_not) = if self.encrypts_lanes {
            (theirs, ours)
        } else {
            (ours, theirs)
        };
        Err(Fault::new(
            Code::PeerTls,
            format!(
                "{encrypts} encrypts lanes and {does_not} does not: set encrypt_lanes alike on both daemons"
            ),
        ))
    }
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

/// What went wrong with a connection, in words.
pub(crate) fn how(error: &io::Error) -> String {
    match error.kind() {
        // TLS says it at length.
        io::ErrorKind::UnexpectedEof => "it closed the connection".to_owned(),
        _ => error.to_string(),
    }
}

fn ended<T>(error: io::Error, missing: usize) -> io::Result<Result<Option<T>, FrameError>> {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => Ok(Err(FrameError::Truncated { missing })),
        _ => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use kvferry_dataplane::Token;

    use super::*;

    /// What each message is on the wire in version 1. These lines are never changed once released: a
    /// release speaks its predecessor's version, and this is what proves it.
    fn golden<T: Serialize + DeserializeOwned + PartialEq + std::fmt::Debug>(message: &T, hex: &str) {
        let hex = hex.replace(' ', "");
        let bytes: Vec<u8> = (0..hex.len())
            .step_by(2)
            .map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap())
            .collect();
        let written = encode(message).unwrap();
        let shown: String = written[FRAME_HEADER..]
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        assert_eq!(shown, hex, "{message:?} is written differently");
        assert_eq!(
            &decode::<T>(&bytes).unwrap(),
            message,
            "{message:?} is read differently"
        );
    }

    fn introduction(data_host: Option<IpAddr>) -> Introduction {
        Introduction {
            address: "n:1".into(),
            incarnation: 5,
            data_host,
            encrypts_lanes: true,
            release: "0".into(),
        }
    }

    #[test]
    fn golden_greetings() {
        let hello = Hello {
            magic: MAGIC,
            versions: VERSIONS,
            introduction: introduction(None),
        };
        let introduced = "0300000000000000 6e3a31 0500000000000000";
        golden(
            &hello,
            &format!("6b7666657272790a 01000000 01000000 {introduced} 00 01 0100000000000000 30"),
        );
        let welcome = HelloAnswer::Welcome {
            version: 1,
            introduction: introduction(Some([10, 0, 0, 1].into())),
        };
        let host = "01 00000000 0a000001";
        golden(
            &welcome,
            &format!("00000000 01000000 {introduced} {host} 01 0100000000000000 30"),
        );
        golden(&HelloAnswer::Duplicate, "01000000");
        let refused = HelloAnswer::Refused(Fault::new(Code::PeerTls, "no"));
        golden(
            &refused,
            "02000000 0800000000000000 706565725f746c73 0200000000000000 6e6f 0000000000000000",
        );
    }

    #[test]
    fn golden_frames() {
        golden(&PeerFrame::Alive, "02000000");
        let want = LaneMessage::Want { lane: 1, ask: 2 };
        golden(&PeerFrame::Lane(want), "01000000 00000000 0100 0200000000000000");
        let grant = LaneMessage::Grant {
            lane: 1,
            ask: 2,
            epoch: 3,
            token: Token([7; 32]),
            port: 4,
        };
        let token = "07".repeat(32);
        let numbers = "0100 0200000000000000 0300000000000000";
        golden(
            &PeerFrame::Lane(grant),
            &format!("01000000 01000000 {numbers} {token} 0400"),
        );
        let lost = LaneMessage::Lost { lane: 1, epoch: 3 };
        golden(&PeerFrame::Lane(lost), "01000000 02000000 0100 0300000000000000");
        let gone = LaneMessage::Gone { lane: 1, epoch: 3 };
        golden(&PeerFrame::Lane(gone), "01000000 03000000 0100 0300000000000000");
    }

    #[tokio::test]
    async fn a_length_beyond_the_limit_or_the_stream_is_named() {
        let mut long = [11u8, 0, 0, 0].as_slice();
        let error = read::<PeerFrame>(&mut long, 10).await.unwrap().unwrap_err();
        assert_eq!(error, FrameError::TooLong { len: 11, limit: 10 });
        let mut cut = [10u8, 0, 0, 0, 1].as_slice();
        let error = read::<PeerFrame>(&mut cut, 10).await.unwrap().unwrap_err();
        assert_eq!(error, FrameError::Truncated { missing: 9 });
        let mut cut = [10u8, 0].as_slice();
        let error = read::<PeerFrame>(&mut cut, 10).await.unwrap().unwrap_err();
        assert_eq!(error, FrameError::Truncated { missing: 3 });
        let mut end = [0u8; 0].as_slice();
        assert_eq!(read::<PeerFrame>(&mut end, 10).await.unwrap(), Ok(None));
    }
}
