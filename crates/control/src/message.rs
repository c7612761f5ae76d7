//! The messages of the Unix socket: what an engine calls, what it is answered, what it is told.

use kvferry_handshake::{Code, Envelope, Mismatch, PageLists, Ready, TokenRange, Verdict, Versions};
use serde::{Deserialize, Serialize};

/// Longest transfer id in bytes.
pub const MAX_TRANSFER_ID: usize = 256;
/// Longest metadata of a publish in bytes.
pub const MAX_METADATA: usize = 64 << 10;

/// From engine to daemon. A `Register` of a memfd carries exactly one fd; nothing else carries any.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Request {
    /// First frame on a connection: the protocol versions that the client speaks.
    Hello(Versions),
    /// A call; answered by [`Response::Answer`] with the same number.
    Call {
        /// Chosen by the client, unique among its open calls.
        number: u64,
        /// The call.
        call: Call,
    },
}

/// From daemon to engine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Response {
    /// Answer to `Hello`: the version to speak. A refusal may come at any time, and is the last frame.
    Hello(Result<Welcome, Fault>),
    /// Answer to a call. Calls never wait for a transfer.
    Answer {
        /// The call's number.
        number: u64,
        /// The answer.
        answer: Result<Answer, Fault>,
    },
    /// Something happened.
    Event(Event),
}

/// What the daemon says of itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Welcome {
    /// The version to speak.
    pub version: u32,
    /// One life of the daemon.
    pub incarnation: u64,
    /// The address that peers and routers name it by: `host:port`.
    pub address: String,
    /// Its release.
    pub release: String,
}

/// A transfer: the id comes from the router or the prefill engine's response, never from an engine's
/// internal request id. A higher attempt aborts a lower one.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct TransferId {
    /// The id, at most [`MAX_TRANSFER_ID`] bytes.
    pub id: String,
    /// Attempt, from 0.
    pub attempt: u32,
}

impl From<&str> for TransferId {
    /// The first attempt of a transfer.
    fn from(id: &str) -> TransferId {
        TransferId {
            id: id.to_owned(),
            attempt: 0,
        }
    }
}

/// Which side of a transfer a rank is on. One rank may be on both, of one transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Side {
    /// The prefill engine's.
    Publish,
    /// The decode engine's.
    Fetch,
}

impl Side {
    /// `publish` or `fetch`.
    pub fn name(self) -> &'static str {
        match self {
            Side::Publish => "publish",
            Side::Fetch => "fetch",
        }
    }
}

/// What an engine's rank asks of its daemon.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Call {
    /// Attach as one rank of an engine. One attachment per connection.
    Attach {
        /// The whole engine's envelope, equal on all ranks.
        envelope: Box<Envelope>,
        /// Which rank this is.
        rank: u32,
        /// `host:port` of the daemon of rank 0; `None` when it is this daemon.
        home: Option<String>,
    },
    /// Hand memory over as one region of the rank.
    Register {
        /// Region number, as the rank's placements name it.
        region: u16,
        /// The memory.
        memory: Memory,
    },
    /// Take a region back. Answered once no byte of it can be read or written any more.
    Unregister {
        /// Region number.
        region: u16,
    },
    /// State what is ready of a transfer. May be repeated until `ready.end` is set.
    Publish(Publish),
    /// Ask for pages of a transfer.
    Fetch(Fetch),
    /// End this rank's side of a transfer, whichever it is on, or both; it ends on all ranks.
    Abort {
        /// The transfer.
        transfer: TransferId,
    },
    /// From the decode engine: a fetch will come; renews the publish's lease.
    Expect {
        /// `kvferry://node:port/engine` of the prefill engine.
        source: String,
        /// The transfer.
        transfer: TransferId,
    },
    /// From the decode engine: no fetch will come; ends the publish's lease.
    Decline {
        /// `kvferry://node:port/engine` of the prefill engine.
        source: String,
        /// The transfer.
        transfer: TransferId,
    },
    /// What the daemon is doing. Needs no attachment.
    Status,
}

impl Call {
    /// Its name, as documents have it.
    pub fn name(&self) -> &'static str {
        match self {
            Call::Attach { .. } => "attach",
            Call::Register { .. } => "register",
            Call::Unregister { .. } => "unregister",
            Call::Publish(_) => Side::Publish.name(),
            Call::Fetch(_) => Side::Fetch.name(),
            Call::Abort { .. } => "abort",
            Call::Expect { .. } => "expect",
            Call::Decline { .. } => "decline",
            Call::Status => "status",
        }
    }
}

/// Memory as it is handed over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Memory {
    /// `[offset, offset + len)` of the memfd that comes with the frame. `offset` is a multiple of the page size.
    Memfd {
        /// Byte offset.
        offset: u64,
        /// Bytes.
        len: u64,
    },
    /// `[address, address + len)` of the calling process.
    Process {
        /// Address in the calling process.
        address: u64,
        /// Bytes.
        len: u64,
    },
}

impl Memory {
    /// Bytes.
    pub fn len(&self) -> u64 {
        let (Memory::Memfd { len, .. } | Memory::Process { len, .. }) = self;
        *len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// See [`Call::Publish`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Publish {
    /// The transfer.
    pub transfer: TransferId,
    /// The whole page lists so far. Must begin with what was published before, except that pages of
    /// window components may have become absent. `None`: as before.
    pub pages: Option<PageLists>,
    /// Generation of each region that the rank has registered: (region, generation).
    pub generations: Vec<(u16, u64)>,
    /// What is ready now; must not shrink.
    pub ready: Ready,
    /// Small metadata for the decode engine, at most [`MAX_METADATA`] bytes; `None`: as before. Of the
    /// ranks' metadata, the decode engine is given that of the lowest rank that set any.
    pub metadata: Option<Vec<u8>>,
    /// How many decode engines will fetch this; at least 1, equal in every publish of the transfer.
    pub serves: u32,
}

/// See [`Call::Fetch`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fetch {
    /// `kvferry://node:port/engine` of the prefill engine.
    pub source: String,
    /// The transfer.
    pub transfer: TransferId,
    /// The rank's page lists; they also tell what is absent, which is then not written.
    pub pages: PageLists,
    /// Generation of each region that the rank has registered: (region, generation).
    pub generations: Vec<(u16, u64)>,
    /// Tokens wanted: those below `from` are held already.
    pub tokens: TokenRange,
    /// The least end that will do: a final publish of fewer tokens fails as `short`.
    pub least: u64,
}

/// Answer to a call.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Answer {
    /// Done or accepted.
    Done,
    /// To `Register`.
    Registered {
        /// Generation to name in page lists.
        generation: u64,
        /// Paths by which the memory can be reached.
        paths: Vec<Path>,
    },
    /// To `Status`.
    Status(Box<Status>),
}

/// How bytes travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Path {
    /// A copy within the node.
    Local,
    /// TCP lanes.
    Tcp,
}

impl Path {
    /// Its name, as documents have it.
    pub fn name(self) -> &'static str {
        match self {
            Path::Local => "local",
            Path::Tcp => "tcp",
        }
    }
}

/// A refusal or failure.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Fault {
    /// Stable code.
    pub code: Code,
    /// What is wrong, with both values, and what to do.
    pub message: String,
    /// For `link_refused`: every mismatch.
    pub mismatches: Vec<Mismatch>,
}

/// Something that an engine's rank is told.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Event {
    /// To the publisher: a decode engine came for the transfer.
    Matched {
        /// The transfer.
        transfer: TransferId,
        /// The decode engine.
        engine: String,
        /// Tokens that it holds already.
        held: u64,
    },
    /// Bytes moved so far, at most a few times a second.
    Progress {
        /// Whose end of it: the publish's or the fetch's.
        side: Side,
        /// The transfer.
        transfer: TransferId,
        /// Bytes of this rank.
        bytes: u64,
        /// Bytes of this rank in all, as far as known.
        total: u64,
    },
    /// Ended well, and fenced. To the decode rank: every byte may be read.
    Delivered {
        /// Which has ended: the publish or the fetch. The other may still go on for a rank that is on both.
        side: Side,
        /// The transfer.
        transfer: TransferId,
        /// Tokens `[0, tokens)` are now held.
        tokens: u64,
        /// To the decode rank: the publisher's metadata.
        metadata: Vec<u8>,
        /// How it went.
        report: Report,
    },
    /// Ended with a fault, and fenced. `aborted` and `lease_expired` are told apart by the code.
    Failed {
        /// Which has ended: the publish or the fetch.
        side: Side,
        /// The transfer.
        transfer: TransferId,
        /// The cause: names peer, phase and bytes done.
        cause: Fault,
        /// How it went until then.
        report: Report,
    },
    /// An engine that asked for this one was refused (to rank 0 of the prefill side and the fetching rank).
    Refused {
        /// The other engine.
        engine: String,
        /// The verdict.
        verdict: Box<Verdict>,
    },
    /// This rank's attachment was taken back (`ranks_disagree`); the connection may attach again.
    Detached {
        /// Why.
        cause: Fault,
    },
}

/// How a transfer went, for one rank. Times are in microseconds.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// Peers (`host:port`) that bytes went to or came from.
    pub peers: Vec<String>,
    /// Bytes per path.
    pub paths: Vec<(Path, u64)>,
    /// Bytes that went through a bounce buffer because the memory could not be mapped.
    pub bounced: u64,
    /// Moves: contiguous ranges on this rank's side.
    pub moves: u64,
    /// Chunks that were sent again after a lane was lost.
    pub resent: u64,
    /// From this rank's call until the other side was met.
    pub met_us: u64,
    /// From then until the last byte and the fence.
    pub moved_us: u64,
}

/// What a daemon is doing.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// Its address.
    pub address: String,
    /// Its release.
    pub release: String,
    /// One life of the daemon.
    pub incarnation: u64,
    /// Seconds since it started.
    pub uptime_s: u64,
    /// Engines with attached ranks.
    pub engines: Vec<EngineStatus>,
    /// Peers.
    pub peers: Vec<PeerStatus>,
    /// Everything that must return to where it was: (name, count), in a stable order.
    pub counts: Vec<(String, u64)>,
}

/// An engine as its daemon sees it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct EngineStatus {
    /// Engine name.
    pub engine: String,
    /// Model name.
    pub model: String,
    /// Ranks attached here.
    pub ranks: Vec<u32>,
    /// Ranks of the engine in all.
    pub of: u32,
    /// Bytes registered here.
    pub registered_bytes: u64,
    /// Open publishes.
    pub publishes: u64,
    /// Open fetches.
    pub fetches: u64,
    /// Links: peer engine, and the verdict in a word.
    pub links: Vec<(String, String)>,
}

/// A peer daemon.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PeerStatus {
    /// Its address.
    pub address: String,
    /// `connected`, `connecting` or the code of the last failure.
    pub state: String,
    /// Open TCP lanes.
    pub lanes: u32,
    /// Bytes sent to it.
    pub sent_bytes: u64,
    /// Bytes received from it.
    pub received_bytes: u64,
    /// System calls that sent bytes to it.
    pub send_calls: u64,
}

impl Fault {
    /// A fault with a message.
    pub fn new(code: Code, message: impl Into<String>) -> Fault {
        Fault {
            code,
            message: message.into(),
            mismatches: Vec::new(),
        }
    }
}

impl std::fmt::Display for Fault {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.code, self.message)
    }
}

impl std::error::Error for Fault {}
