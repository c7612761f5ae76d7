//! Two envelopes make chunks; chunks and page lists make moves. Pure: no I/O, no unsafe, no clock.
//!
//! Each side's memory is a map from (layer, part, token, head, byte) to an address. A plan is the set
//! of byte ranges in which the destination's map, cut to the tokens asked for, meets the source's.
//!
//! - At *link* time, without page lists: [`LinkPlan::new`] decides which prefill rank sends what to
//!   which decode rank, proves that every byte is covered exactly once, and groups it into streams.
//! - At *transfer* time: [`ChunkMap::new`] numbers the chunks of one (prefill rank, decode rank) pair
//!   for one token range; [`ChunkMap::extents`] maps a chunk through one side's page lists, in an order
//!   that both sides share, and [`ChunkMap::moves`] through both.
//!
//! Nothing is built per (layer, page) before it is walked: chunks and extents are computed on demand.
//!
//! To read it: `link` makes streams out of what `owners` groups and `spread` deals out, and `coverage` proves
//! them; `whole` asks whether each engine has a place for what it declares; `stream` is what they are, `tokens` which tokens two ranks have in common and where; `grid` and `chunks`
//! number, `walk` goes through a chunk's bytes.

#![forbid(unsafe_code)]

mod chunks;
mod coverage;
mod grid;
mod judge;
mod link;
mod mismatch;
mod owners;
mod pages;
mod soundness;
mod spread;
mod stream;
mod tokens;
mod walk;
mod whole;

pub use chunks::{ChunkMap, MAX_CHUNKS};
pub use judge::judge;
use kvferry_handshake::Code;
pub use link::LinkPlan;
pub use pages::{MAX_PAGE_ENTRIES, MAX_TOKENS, WrittenPages, check_pages, written_pages};
use serde::{Deserialize, Serialize};

/// Version of the planner's rules; part of [`LinkPlan::digest`], so it must agree before the first byte.
pub const PLANNER_VERSION: u32 = 1;

/// Target size of a chunk in bytes.
pub const CHUNK_BYTES: u64 = 4 << 20;

/// Which side of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Side {
    /// The source.
    Prefill,
    /// The destination.
    Decode,
}

/// A contiguous byte range on one side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Region number of the rank.
    pub region: u16,
    /// Byte offset in it.
    pub offset: u64,
    /// Bytes; never 0.
    pub len: u64,
}

/// One contiguous byte range, with both its ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Move {
    /// Region number of the prefill rank.
    pub source_region: u16,
    /// Byte offset in it.
    pub source_offset: u64,
    /// Region number of the decode rank.
    pub region: u16,
    /// Byte offset in it.
    pub offset: u64,
    /// Bytes; never 0.
    pub len: u64,
}

/// Why page lists or a token range do not fit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct PlanError {
    /// `pages_invalid`, `page_absent`, `tokens_invalid`, `opaque_alignment`, `rank_unknown` or `over_limit`.
    pub code: Code,
    /// What is wrong, with both values, and what to do.
    pub message: String,
}
