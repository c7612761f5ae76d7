//! Lanes: one TCP connection each, with one thread at either end.

mod departing;
pub(crate) mod frame;
mod gather;
mod landing;
mod link;
mod queued;
pub(crate) mod receiver;
mod scatter;
pub(crate) mod sender;

pub(crate) use link::Link;

use std::io;

/// Pieces at least so long go straight between the socket and the pages. Shorter ones are collected in a buffer first, since
/// a piece costs the kernel more than copying it.
const DIRECT_BYTES: usize = 2048;

/// Why a lane's life ended.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LaneEnd {
    /// It was not used for a while.
    #[error("not used")]
    Idle,
    /// We were told to.
    #[error("told to end")]
    Told,
    /// The other end closed it.
    #[error("closed by the other end")]
    Closed,
    /// Bytes were due, and nothing moved.
    #[error("nothing moved for {} s", .0.as_secs_f64())]
    Stalled(std::time::Duration),
    /// Pages of a closed job were due to be let go, and hardly anything moved.
    #[error("pages of a closed transfer were held for {} s", .0.as_secs_f64())]
    Held(std::time::Duration),
    /// The other end said what it must not.
    #[error("the other end broke the lane's protocol: {0}")]
    Violation(&'static str),
    /// The other end closed it within a chunk.
    #[error("closed by the other end within a chunk")]
    Cut,
    /// We had no thread for it.
    #[error("no thread for a lane: {0}")]
    Thread(io::Error),
    /// A defect of ours.
    #[error("a defect on our side")]
    Defect,
    /// The socket failed.
    #[error("{0}")]
    Socket(io::Error),
}

impl From<io::Error> for LaneEnd {
    fn from(error: io::Error) -> LaneEnd {
        match error.kind() {
            io::ErrorKind::UnexpectedEof => LaneEnd::Closed,
            _ => LaneEnd::Socket(error),
        }
    }
}

/// Whether the socket just has nothing, or no room, now.
fn would_block(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
    )
}
