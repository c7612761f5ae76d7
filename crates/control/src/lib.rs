//! The Unix-socket protocol between an engine and its daemon: both ends' types, and its frames.
//!
//! The socket is a stream of frames: four bytes of length, little-endian, then one [`Request`] (from the
//! engine) or [`Response`] (from the daemon) in bincode's fixed-width little-endian form. The first frame
//! either way is a `Hello`. [`FrameReader`] and [`FrameWriter`] work on sockets that do not block, so that
//! either end drives them from its own event loop.
#![forbid(unsafe_code)]

mod frame;
mod message;

pub use frame::{Fds, Frame, FrameError, FrameReader, FrameWriter};
pub use message::{
    Answer, Call, EngineStatus, Event, Fault, Fetch, MAX_METADATA, MAX_TRANSFER_ID, Memory, Path, PeerStatus,
    Publish, Report, Request, Response, Side, Status, TransferId, Welcome,
};

use kvferry_handshake::{MAX_ENVELOPE, MAX_PAYLOAD, Versions};

/// Protocol versions that this release speaks.
pub const VERSIONS: Versions = Versions {
    lowest: 1,
    highest: 1,
};

/// Longest frame in bytes.
pub const MAX_FRAME: usize = MAX_PAYLOAD;
/// Longest frame before the attachment: an envelope, and what goes with it.
pub const MAX_UNATTACHED_FRAME: usize = MAX_ENVELOPE + 1024;
/// Longest first frame.
pub const MAX_HELLO_FRAME: usize = 64;
