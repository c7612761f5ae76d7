//! What the data plane reports.

use std::sync::Arc;

use kvferry_handshake::Code;

use crate::LaneMessage;

/// A job; never reused within a daemon's life. A receive job's number is also the slot that the sending
/// data plane names in its chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct JobId(pub u64);

/// Something that the data plane reports. The sink is called from the data plane's threads and from
/// within calls of [`crate::DataPlane`]; it must not block.
#[derive(Debug)]
pub enum Event {
    /// Send this to the peer's data plane through the daemons' channel. It may be lost, doubled or late.
    ToPeer {
        /// To whom.
        peer: Arc<str>,
        /// What.
        message: LaneMessage,
    },
    /// Bytes landed or acknowledged so far: some ten times a second at most, and when a job starts to move.
    Progress {
        /// Job.
        job: JobId,
        /// Bytes.
        bytes: u64,
    },
    /// The job is alive: bytes of a chunk that is under way moved, or its chunks wait their turn behind others of the
    /// same peer whose lanes move, or behind other copies. Some times a second at most; nothing more is done than
    /// [`Event::Progress`] said.
    Alive {
        /// Job.
        job: JobId,
    },
    /// Every chunk up to the final end landed and is visible, or was acknowledged by the receiver.
    Complete {
        /// Job.
        job: JobId,
    },
    /// The job cannot go on and stopped; [`crate::DataPlane::close`] is still due.
    Failed {
        /// Job.
        job: JobId,
        /// Stable code.
        code: Code,
        /// What is wrong and what to do.
        message: String,
    },
    /// A lane did not open, or broke, or somebody did at the data port what nobody may. Jobs go on as long as they can; should one
    /// come to nothing, this may be why.
    Trouble {
        /// Whose lane it is; `None` where that is not known.
        peer: Option<Arc<str>>,
        /// Which kind.
        kind: LaneTrouble,
        /// What happened.
        what: String,
    },
    /// Fenced and forgotten: no byte lands in or leaves the job's pages any more.
    Closed {
        /// Job.
        job: JobId,
        /// What was done.
        tally: Tally,
    },
}

/// Kinds of trouble with lanes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LaneTrouble {
    /// A connection to the data port showed a token that was not granted, was used before, or came too late.
    Token,
    /// The other end said what the lane's protocol does not allow, or its bytes came damaged.
    Violation(&'static str),
    /// This daemon had no thread, fd or memory for a lane.
    Resources,
    /// A connection could not be opened, or broke.
    Broken,
}

/// What a job did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Bytes landed or acknowledged.
    pub bytes: u64,
    /// Contiguous ranges on this side.
    pub moves: u64,
    /// Bytes through a bounce buffer, because memory could not be mapped.
    pub bounced: u64,
    /// Chunks sent again.
    pub resent: u64,
}

/// What went to and came from one peer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerTraffic {
    /// The peer.
    pub peer: Arc<str>,
    /// Open lanes, both directions.
    pub lanes: u64,
    /// Payload bytes sent and acknowledged.
    pub sent_bytes: u64,
    /// Payload bytes received and landed.
    pub received_bytes: u64,
    /// Chunks sent again.
    pub resent_chunks: u64,
    /// Lanes that broke.
    pub lost_lanes: u64,
    /// System calls that sent payload. Each gathers many rows, where they are short.
    pub send_calls: u64,
}
