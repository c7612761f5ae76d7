//! Peer daemons: one channel to each, shared by all links and both directions.
//!
//! [`PeerSet`] decides, in the driver's task, which channels there are; `dial` and `accept` open them,
//! `channel` runs them, `wire` is what is said on them, `tls` who may say it, and `renewal` when that is read again.

mod accept;
mod channel;
mod dial;
mod renewal;
mod set;
mod tls;
mod wire;

use std::net::IpAddr;
use std::sync::Arc;

use kvferry_broker::PeerAddress;
use kvferry_control::Fault;
use tokio::sync::{mpsc, oneshot};

pub(crate) use accept::accept;
pub(crate) use dial::dial;
pub(crate) use renewal::Certificates;
pub(crate) use set::{Change, ChannelId, Decision, DialId, PeerSet, Ticket};
pub use tls::TlsError;
pub(crate) use tls::{Tls, check_own};
pub(crate) use wire::{PeerFrame, encode};

use crate::config::Advertised;
use crate::log::Floods;

/// What peers' tasks ask and tell the driver.
#[derive(Debug)]
pub(crate) enum PeerEvent {
    /// A dialled connection stands; may it greet?
    DialReady {
        peer: PeerAddress,
        dial: DialId,
        go: oneshot::Sender<bool>,
    },
    /// A dialled peer welcomed us.
    Dialled {
        peer: PeerAddress,
        dial: DialId,
        arrival: Arrival,
        ticket: oneshot::Sender<Option<Ticket>>,
    },
    /// A dialled peer could not be reached, or refused.
    DialFailed {
        peer: PeerAddress,
        dial: DialId,
        cause: Fault,
    },
    /// A peer greeted us.
    Called {
        peer: PeerAddress,
        arrival: Arrival,
        decision: oneshot::Sender<Decision>,
    },
    /// A peer said something.
    Frame { channel: ChannelId, frame: PeerFrame },
    /// A channel broke.
    Down { channel: ChannelId, cause: Fault },
}

/// Who is at the other end of a new channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Arrival {
    /// One life of the peer.
    pub(crate) incarnation: u64,
    /// Where its data port is.
    pub(crate) data_host: IpAddr,
}

/// What all peers' tasks need.
#[derive(Debug)]
pub(crate) struct Neighbourhood {
    /// Our address.
    pub(crate) address: Advertised,
    pub(crate) incarnation: u64,
    /// Where our data port is, when it is bound to one address.
    pub(crate) data_host: Option<IpAddr>,
    pub(crate) tls: Option<Arc<Certificates>>,
    pub(crate) encrypts_lanes: bool,
    /// Silence after which a peer counts as lost.
    pub(crate) timeout: std::time::Duration,
    pub(crate) driver: mpsc::Sender<PeerEvent>,
    pub(crate) floods: Floods,
}

pub(crate) type Shared = Arc<Neighbourhood>;
