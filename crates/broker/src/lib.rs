//! The broker: brings publish and fetch together, and ends every one of them on both sides.
//!
//! A state machine without I/O and without a clock: [`Broker::handle`] takes what happened,
//! [`Broker::poll`] gives what is to be done, [`Broker::next_deadline`] says when to call
//! [`Broker::tick`]. It lives in a crate of its own so that the compiler keeps it so.
//!
//! Where to find what:
//!
//! - engines: `ranks` (attached here), `regions`, `seats` (the home's directory of ranks), `siblings`;
//! - links: `links` and `links/answers` (the decode side), `judged` (the prefill side);
//! - the decode side of a transfer: `fetches`, and `wanted` for its part at each prefill rank;
//! - the prefill side: `publishes`, `announced` for each fetch that came, `servings` for each engine served, `leases`;
//! - what both use: `jobs` (of the data plane), `timers`, `ended` (bounded memories), `pages` (a budget), `written` (pages that fetches write), `cause`, `standing`
//!   and `faults` (why transfers fail), `stated` (envelopes on their way), `peers`, `peer` and `wire` (what daemons say).
//!
//! A fetch whose engine, or one of its ranks, is not attached yet waits for it until its deadline; everything else
//! that an engine may rely on is in `docs/transfers.md`.
#![forbid(unsafe_code)]

mod announced;
mod broker;
mod calls;
mod cause;
mod config;
mod disagreement;
mod ended;
mod faults;
mod fetches;
mod io;
mod jobs;
mod judged;
mod leases;
mod links;
mod pages;
mod peer;
mod peers;
mod progress;
mod publishes;
mod ranks;
mod regions;
mod reports;
mod seats;
mod servings;
mod siblings;
mod source;
mod standing;
mod stated;
mod status;
mod timers;
mod wanted;
mod wire;
mod written;

pub use broker::Broker;
pub use cause::{Arose, Cause, Place, Standing};
pub use config::{Config, Limits};
pub use io::{
    DataCommand, DataEvent, Input, JobId, Micros, Output, PeerAddress, Record, RegionKey, SessionId, Tally,
};
pub use peer::{
    Announce, Body, EngineId, FetchState, LinkAnswer, Offer, PartState, PeerMessage, Seat, SiblingFailure,
};
pub use stated::Stated;
pub use wire::OutOfBounds;
