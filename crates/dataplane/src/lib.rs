//! Regions, the local and TCP paths, lanes, completion and fencing: the part of the daemon that moves bytes.
//!
//! [`DataPlane`] owns the engines' mapped memory and all threads that touch it. The broker decides what
//! is to move and starts *jobs*; the data plane moves their chunks, by a copy within the node or over TCP
//! lanes to the peer's data plane, reports through one sink of [`Event`]s, and fences a job when it is
//! closed: after [`Event::Closed`] no byte lands in or leaves the job's pages.
//!
//! Plain threads and no async runtime: one thread per lane end, a small pool for local copies, a listener, a
//! steward that watches time, and one that enters new regions' pages into the page table.

#![deny(unsafe_code)]

mod batches;
mod config;
mod copy;
mod event;
mod fence;
mod job;
mod jobs;
mod lane;
mod lanes;
mod line;
mod listener;
mod memory;
mod message;
mod peer;
mod plane;
mod prefault;
mod probe;
mod process;
mod region;
mod shared;
mod source;
mod steward;
mod target;
#[cfg(test)]
mod testing;
mod threads;
mod wake;

pub use config::{Config, LaneTls, StartError};
pub use event::{Event, JobId, LaneTrouble, PeerTraffic, Tally};
pub use message::{LaneMessage, Token};
pub use plane::DataPlane;
pub use process::{EngineProcess, ProcessError};
pub use region::{RegionKey, RegisterError};
