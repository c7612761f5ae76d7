//! What goes into the broker and what comes out of it. The broker itself has no I/O and no clock.

use std::sync::Arc;

use kvferry_control::{Answer, Call, Event, Fault, Path, Report, Side, TransferId};
use kvferry_handshake::{PageLists, Ready};
use kvferry_plan::ChunkMap;

use crate::{PeerMessage, Stated};

/// A connection of an engine's rank to this daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SessionId(pub u64);

/// A registered region in the data plane; never reused within a daemon's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RegionKey(pub u64);

/// A job of the data plane; never reused within a daemon's life. A receive job's number is also the
/// transfer slot that the sending daemon names in its chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct JobId(pub u64);

/// A peer daemon, named by the address that it is known by: `host:port`. Our own address names ourselves:
/// messages to it come back as [`Input::Peer`].
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PeerAddress(pub Arc<str>);

/// Monotonic time in microseconds from an arbitrary start.
pub type Micros = u64;

/// What happens to the broker.
#[derive(Debug)]
pub enum Input {
    /// A rank called. `Status` and `Register` are not passed on as calls: see [`Input::Registered`].
    Call {
        /// Who.
        session: SessionId,
        /// Number to answer with.
        number: u64,
        /// What.
        call: Call,
    },
    /// A rank's `Attach` whose envelope was validated on the way. One that comes as a call is validated here.
    Attach {
        /// Who.
        session: SessionId,
        /// Number to answer with.
        number: u64,
        /// The engine's envelope.
        envelope: Stated,
        /// The rank.
        rank: u32,
        /// The home daemon; `None`: this one.
        home: Option<String>,
    },
    /// A rank's `Register` whose memory the data plane has mapped and checked. Refusing it emits
    /// [`Output::Release`].
    Registered {
        /// Who.
        session: SessionId,
        /// Number to answer with.
        number: u64,
        /// Region number.
        region: u16,
        /// The mapped region.
        key: RegionKey,
        /// Bytes.
        len: u64,
        /// Paths by which it can be reached.
        paths: Vec<Path>,
    },
    /// A rank's connection closed.
    Disconnected {
        /// Who.
        session: SessionId,
    },
    /// The channel to a peer is up; a new incarnation is a restarted peer.
    PeerUp {
        /// Who.
        peer: PeerAddress,
        /// One life of the peer.
        incarnation: u64,
    },
    /// A peer said something.
    Peer {
        /// Who.
        peer: PeerAddress,
        /// One life of the peer.
        incarnation: u64,
        /// What.
        message: PeerMessage,
    },
    /// The channel to a peer broke or could not be opened.
    PeerDown {
        /// Who.
        peer: PeerAddress,
        /// Why (`peer_lost`, `peer_unreachable`, `peer_tls`, `protocol_version`).
        cause: Fault,
    },
    /// The data plane reports.
    Data(DataEvent),
    /// The daemon is asked to end: refuse what is new, abort what is under way with `shutdown`.
    Shutdown,
}

/// What the broker wants done, in order.
#[derive(Debug)]
pub enum Output {
    /// Answer a call.
    Answer {
        /// To whom.
        session: SessionId,
        /// The call's number.
        number: u64,
        /// The answer.
        answer: Result<Answer, Fault>,
    },
    /// Tell a rank.
    Event {
        /// To whom.
        session: SessionId,
        /// What.
        event: Event,
    },
    /// Send to a peer; the channel is opened on demand.
    Send {
        /// To whom.
        peer: PeerAddress,
        /// What.
        message: PeerMessage,
    },
    /// Have the data plane do something.
    Data(DataCommand),
    /// Unmap a region: nothing uses it any more. Comes before the answer to its `Unregister`.
    Release {
        /// The region.
        key: RegionKey,
    },
    /// A publish or fetch ended, on this side, for one rank: one log line, and metrics.
    Record(Record),
    /// A peer said what no honest daemon says, as often as it likes: one line, of which more of the kind are only counted.
    Violation {
        /// Who.
        peer: PeerAddress,
        /// Which kind.
        kind: &'static str,
        /// What.
        what: String,
    },
}

/// What the data plane is to do.
#[derive(Debug)]
pub enum DataCommand {
    /// Accept chunks from a peer into our pages. Until `Close`, chunks that name this slot are written.
    Receive {
        /// Job, and slot.
        job: JobId,
        /// Who sends.
        peer: PeerAddress,
        /// What.
        map: ChunkMap,
        /// Our page lists.
        pages: Arc<PageLists>,
        /// Our regions: (region number, key).
        regions: Arc<[(u16, RegionKey)]>,
    },
    /// Send chunks to a peer as they become ready.
    Send {
        /// Job.
        job: JobId,
        /// Who receives.
        peer: PeerAddress,
        /// The receiver's slot.
        slot: u64,
        /// What.
        map: ChunkMap,
        /// Our page lists.
        pages: Arc<PageLists>,
        /// Our regions.
        regions: Arc<[(u16, RegionKey)]>,
    },
    /// Copy within the node, as chunks become ready.
    Copy {
        /// Job.
        job: JobId,
        /// What.
        map: ChunkMap,
        /// The prefill rank's page lists.
        source_pages: Arc<PageLists>,
        /// The prefill rank's regions.
        source_regions: Arc<[(u16, RegionKey)]>,
        /// The decode rank's page lists.
        pages: Arc<PageLists>,
        /// The decode rank's regions.
        regions: Arc<[(u16, RegionKey)]>,
    },
    /// More is ready at the source of a `Send` or `Copy`; with longer page lists where they grew.
    Ready {
        /// Job.
        job: JobId,
        /// What is ready. Once `end` is set the map is cut there.
        ready: Ready,
        /// The source's page lists, if they changed.
        source_pages: Option<Arc<PageLists>>,
    },
    /// A `Receive` learns the final end: the map is cut there.
    End {
        /// Job.
        job: JobId,
        /// Tokens.
        end: u64,
    },
    /// Stop and fence: answered by [`DataEvent::Closed`], after which no byte lands in or leaves the job's
    /// pages. Also for jobs that are complete or failed.
    Close {
        /// Job.
        job: JobId,
    },
}

/// What the data plane reports.
#[derive(Debug)]
pub enum DataEvent {
    /// Bytes done, at most some times a second per job, and whenever a job starts to move.
    Progress {
        /// Job.
        job: JobId,
        /// Bytes acknowledged or landed so far.
        bytes: u64,
    },
    /// The job is alive: bytes of a chunk that is under way move, or its chunks wait their turn behind others that do.
    /// Some times a second.
    Alive {
        /// Job.
        job: JobId,
    },
    /// Every chunk up to the final end is done: landed and visible (`Receive`, `Copy`), or acknowledged
    /// by the receiver (`Send`). Never before the end is known.
    Complete {
        /// Job.
        job: JobId,
    },
    /// The job cannot go on. `Close` follows.
    Failed {
        /// Job.
        job: JobId,
        /// Why.
        cause: Fault,
    },
    /// Fenced and forgotten.
    Closed {
        /// Job.
        job: JobId,
        /// What was done.
        tally: Tally,
    },
    /// Something went wrong with a peer's lanes; jobs go on as long as others carry, or they can be opened again.
    Trouble {
        /// Who.
        peer: PeerAddress,
        /// What.
        what: String,
    },
}

/// What a job did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Bytes.
    pub bytes: u64,
    /// Contiguous ranges on this side.
    pub moves: u64,
    /// Bytes through a bounce buffer.
    pub bounced: u64,
    /// Chunks sent again.
    pub resent: u64,
}

/// How a publish or fetch ended for one rank.
#[derive(Clone, Debug)]
pub struct Record {
    /// The transfer.
    pub transfer: TransferId,
    /// This side's engine and rank.
    pub engine: String,
    /// Rank.
    pub rank: u32,
    /// Which has ended.
    pub side: Side,
    /// The other engine, as far as known.
    pub peer_engine: String,
    /// Tokens.
    pub tokens: u64,
    /// Bytes, paths, times.
    pub report: Report,
    /// `None`: delivered.
    pub cause: Option<Fault>,
}
