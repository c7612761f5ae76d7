//! The Unix-socket protocol between an engine and its daemon: both ends' types, and its frames.
//!
//! The socket is a stream of frames: four bytes of length, little-endian, then one [`Request`] (from the
//! engine) or [`Response`] (from the daemon) in bincode's fixed-width little-endian form. The first frame
//! either way is a `Hello`. [`FrameReader`] and [`FrameWriter`] work on sockets that do not block, so that
//! either end drives them from its own event loop.
#![forbid(unsafe_code)]

mod codec;
mod frame;
mod message;

pub use codec::{Malformed, decode, encode};
pub use frame::{Fds, Frame, FrameError, FrameReader, FrameWriter};
pub use message::{
    Answer, Call, EngineStatus, Event, Fault, Fetch, MAX_METADATA, MAX_TRANSFER_ID, Memory, Path, PeerStatus,
    Publish, Report, Request, Response, Status, TransferId, Welcome,
};

/// Lowest protocol version that this release speaks.
pub const LOWEST_VERSION: u32 = 1;
/// Highest protocol version that this release speaks.
pub const HIGHEST_VERSION: u32 = 1;

/// Longest frame in bytes.
pub const MAX_FRAME: usize = 64 << 20;
/// Longest frame before the attachment: an envelope, of any engine that exists.
pub const MAX_UNATTACHED_FRAME: usize = 4 << 20;
/// Longest first frame.
pub const MAX_HELLO_FRAME: usize = 64;

/// The highest version that both this release and one that speaks `lowest..=highest` speak.
pub fn common_version(lowest: u32, highest: u32) -> Result<u32, Fault> {
    let version = highest.min(HIGHEST_VERSION);
    if version < lowest || version < LOWEST_VERSION {
        return Err(Fault::new(
            kvferry_handshake::Code::ProtocolVersion,
            format!(
                "the other side speaks versions {lowest} to {highest}, this release (kvferry {}) \
                 {LOWEST_VERSION} to {HIGHEST_VERSION}; upgrade the older side",
                env!("CARGO_PKG_VERSION")
            ),
        ));
    }
    Ok(version)
}
