//! What daemons say to each other.
//!
//! The channel is ordered and reliable, but it can break at any moment and come back with another life
//! at its end. So no message is ever needed once only: whoever waits for something asks again, and every
//! message says where things stand rather than what changed. Repeats, delays and losses change nothing
//! but the time that it takes.

use std::sync::Arc;

use kvferry_control::{Fault, Side, TransferId};
use kvferry_handshake::{PageLists, Policy, Ready, TokenRange, Verdict};
use serde::{Deserialize, Serialize};

use crate::cause::Cause;
use crate::stated::Stated;

/// A message from broker to broker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PeerMessage {
    /// The life of the receiver whose ranks or transfers the message is about; any other drops it.
    /// 0 where it is about none.
    pub to: u64,
    /// What is said.
    pub body: Body,
}

/// One life of an engine, as its home daemon numbers it.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct EngineId {
    /// `host:port` of the home daemon.
    pub home: String,
    /// Its life.
    pub home_incarnation: u64,
    /// The engine's name.
    pub name: String,
    /// Which life of that name.
    pub life: u64,
}

/// Where a rank is attached.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Seat {
    /// `host:port` of its daemon.
    pub address: String,
    /// That daemon's life.
    pub incarnation: u64,
    /// The rank's life there.
    pub life: u64,
}

/// What is said.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Body {
    /// To the home: a rank attached with the sender.
    Join {
        /// The whole engine's envelope.
        envelope: Stated,
        /// The rank.
        rank: u32,
        /// The rank's life.
        life: u64,
    },
    /// From the home: the rank has its place.
    Joined {
        /// The engine.
        engine: EngineId,
        /// The rank.
        rank: u32,
        /// The rank's life.
        life: u64,
    },
    /// From the home: the rank is refused.
    JoinRefused {
        /// The rank's life.
        life: u64,
        /// Why.
        cause: Fault,
    },
    /// To the home, from time to time: the rank is still there.
    Keep {
        /// The engine.
        engine: EngineId,
        /// The rank.
        rank: u32,
        /// The rank's life.
        life: u64,
    },
    /// From the home: it knows nothing of that rank; join again.
    SeatLost {
        /// The engine as the rank's daemon named it.
        engine: EngineId,
        /// The rank's life.
        life: u64,
    },
    /// To the home: the rank is gone.
    Leave {
        /// The engine's name.
        name: String,
        /// The rank.
        rank: u32,
        /// The rank's life.
        life: u64,
    },
    /// From the home: the engine's ranks disagree; take every one of them back.
    Detach {
        /// The engine.
        engine: EngineId,
        /// Why.
        cause: Fault,
    },
    /// To the home of an engine: one rank's publish or fetch failed by itself; tell the other ranks.
    Failed(SiblingFailure),
    /// From the home: another rank's failed.
    SiblingFailed(SiblingFailure),
    /// To the home of the decode engine: one of its ranks says that it will fetch, or will not.
    Hint {
        /// `host:port` of the prefill engine's home.
        home: String,
        /// The prefill engine's name.
        name: String,
        /// The transfer.
        transfer: TransferId,
        /// The decode engine.
        by: EngineId,
        /// It will not.
        declined: bool,
    },
    /// From there to the home of the prefill engine: the decode engine will fetch, or will not.
    Expect {
        /// The prefill engine's name.
        name: String,
        /// The transfer.
        transfer: TransferId,
        /// The decode engine.
        by: EngineId,
        /// It will not.
        declined: bool,
    },
    /// From the home, to the daemons of its ranks: see `Expect`.
    Expected {
        /// The prefill engine.
        engine: EngineId,
        /// The transfer.
        transfer: TransferId,
        /// The decode engine.
        by: EngineId,
        /// It will not fetch.
        declined: bool,
    },
    /// To the home of a prefill engine: link with this decode engine.
    LinkOpen {
        /// The prefill engine's name.
        name: String,
        /// The decode engine.
        decode: EngineId,
        /// The sender's policy.
        policy: Policy,
        /// The decode engine's envelope; `None` where the home should remember it.
        envelope: Option<Stated>,
        /// The life of the prefill engine whose envelope the sender has.
        known: Option<EngineId>,
    },
    /// No link: no such engine is attached (the asker waits), or something that asking again won't mend.
    NoLink {
        /// As asked.
        name: String,
        /// As asked.
        decode: EngineId,
        /// Why.
        cause: Fault,
    },
    /// Ask again with the envelope.
    LinkNeedsEnvelope {
        /// As asked.
        name: String,
        /// As asked.
        decode: EngineId,
    },
    /// What the home makes of the pair, and where the ranks are.
    LinkAnswer(LinkAnswer),
    /// To the daemons of the other ranks: judge this pair too.
    LinkOffer {
        /// The prefill engine.
        engine: EngineId,
        /// The decode engine.
        decode: EngineId,
        /// The sender's policy.
        policy: Policy,
        /// The decode engine's envelope.
        envelope: Stated,
    },
    /// To the home: the sender, or the daemon of another rank, refuses the pair.
    LinkFailed {
        /// The prefill engine.
        engine: EngineId,
        /// The decode engine.
        decode: EngineId,
        /// Why.
        verdict: Box<Verdict>,
    },
    /// To the daemon of one or more prefill ranks: a decode rank fetches.
    Announce(Announce),
    /// To the same: where do these stand?
    Ask {
        /// The fetch.
        fetch: u64,
        /// (prefill rank, its life).
        ranks: Vec<(u32, u64)>,
        /// Echoed in the answers.
        serial: u64,
    },
    /// From the prefill rank's daemon: where it stands.
    PartState {
        /// The fetch.
        fetch: u64,
        /// The prefill rank.
        rank: u32,
        /// Of the question; 0 where nobody asked.
        serial: u64,
        /// Its bytes are under way, or wait their turn behind others that are.
        moving: bool,
        /// Where it stands.
        state: PartState,
    },
    /// From the decode rank's daemon: where the fetch stands.
    FetchState {
        /// The fetch.
        fetch: u64,
        /// Where it stands.
        state: FetchState,
    },
    /// To the decode rank's daemon: where does the fetch stand?
    AskFetch {
        /// The fetch.
        fetch: u64,
    },
}

/// A failure that one rank's siblings are told.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SiblingFailure {
    /// The engine.
    pub engine: EngineId,
    /// Which of its sides.
    pub side: Side,
    /// The transfer.
    pub transfer: TransferId,
    /// The rank that failed.
    pub rank: u32,
    /// Why.
    pub cause: Cause,
}

/// See [`Body::LinkAnswer`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LinkAnswer {
    /// The decode engine.
    pub decode: EngineId,
    /// The prefill engine.
    pub engine: EngineId,
    /// The stricter of both daemons' policies.
    pub policy: Policy,
    /// The prefill engine's envelope, unless it was known.
    pub envelope: Option<Stated>,
    /// The verdict.
    pub verdict: Box<Verdict>,
    /// Digest of the plan, where the verdict allows one.
    pub digest: Option<[u8; 32]>,
    /// Where each rank is attached.
    pub seats: Vec<Option<Seat>>,
}

/// See [`Body::Announce`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Announce {
    /// The sender's number of the fetch.
    pub fetch: u64,
    /// The prefill engine.
    pub engine: EngineId,
    /// The decode engine.
    pub decode: EngineId,
    /// The rank that fetches.
    pub decode_rank: u32,
    /// The transfer.
    pub transfer: TransferId,
    /// Tokens wanted.
    pub tokens: TokenRange,
    /// The least end that will do.
    pub least: u64,
    /// The decode rank's page lists.
    pub pages: Arc<PageLists>,
    /// Digest of the sender's plan.
    pub digest: [u8; 32],
    /// The prefill ranks.
    pub offers: Vec<Offer>,
}

/// What one prefill rank is offered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Offer {
    /// The prefill rank.
    pub rank: u32,
    /// Its life.
    pub life: u64,
    /// The receive job to send to; `None` where there is nothing to send, or within one daemon.
    pub slot: Option<u64>,
}

/// Where one decode rank's fetch stands at one prefill rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum PartState {
    /// It was never announced, or is forgotten.
    Unknown,
    /// The rank's life is over.
    Stale,
    /// The pair of engines must be offered first.
    NeedsLink,
    /// The publish has not come.
    Waiting,
    /// The publish is there; so much is ready.
    Ready(Ready),
    /// The publish is final.
    Final {
        /// Tokens of the prompt.
        end: u64,
        /// The rank's metadata, if it set any.
        metadata: Option<Vec<u8>>,
    },
    /// It failed.
    Failed(Cause),
}

/// Where a decode rank's fetch stands.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum FetchState {
    /// It is forgotten.
    Unknown,
    /// Under way.
    Open {
        /// Bytes that landed so far, of all prefill ranks.
        landed: u64,
        /// More are under way.
        moving: bool,
    },
    /// Ended well: everything is there and fenced.
    Delivered,
    /// It failed.
    Failed(Cause),
    /// It was taken back to be announced anew.
    Withdrawn,
}
