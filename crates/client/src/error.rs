//! Why a call failed.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use kvferry_control::Fault;

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The daemon refused it.
    #[error(transparent)]
    Refused(#[from] Fault),
    /// The daemon is away: it has not come up in the time given, or its connection is lost and not back yet.
    #[error("no daemon answers at {}: {cause}; start kvferryd, or name its socket", socket.display())]
    DaemonAway {
        /// The socket.
        socket: PathBuf,
        /// What the last try met.
        cause: io::Error,
    },
    /// The daemon is back, or is asked to take the attachment again, and does not have all regions yet.
    #[error("the daemon at {} is being given the attachment and its regions again; wait for Rank::ready", socket.display())]
    Resuming {
        /// The socket.
        socket: PathBuf,
    },
    /// The daemon has the call, or is to be sent it, and did not answer in time. The call may still take effect: what it
    /// named is not free before it is aborted, unregistered, or every handle of the attachment is dropped.
    #[error(
        "the daemon at {} did not answer {call} in {} s; it is stopped or stuck: look at its process and its log. The call \
         may still take effect: abort or unregister what it named, or close the client, before its memory is used again",
        socket.display(), waited.as_secs_f64()
    )]
    Unanswered {
        /// The call.
        call: &'static str,
        /// The socket.
        socket: PathBuf,
        /// How long the answer was waited for.
        waited: Duration,
    },
    /// The client's side of it failed: a memfd could not be made, or is not what it must be.
    #[error("{what}: {cause}")]
    Memory {
        /// What was tried.
        what: &'static str,
        /// What the system said.
        cause: io::Error,
    },
    /// The client was dropped while the call was under way.
    #[error("the client was closed")]
    Closed,
}

impl ClientError {
    /// Whether trying again unchanged, after a pause, can help. Not after [`ClientError::Unanswered`]: what the first try
    /// did, or will do, is not known.
    pub fn can_retry(&self) -> bool {
        match self {
            ClientError::Refused(fault) => fault.code.can_retry(),
            ClientError::DaemonAway { .. } | ClientError::Resuming { .. } => true,
            ClientError::Unanswered { .. } | ClientError::Memory { .. } | ClientError::Closed => false,
        }
    }
}
