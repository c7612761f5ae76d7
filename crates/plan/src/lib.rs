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

#![forbid(unsafe_code)]

use std::sync::Arc;

use kvferry_handshake::{Code, Envelope, Mismatch, PageLists, Policy, Ready, TokenRange, Verdict};
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
    /// `pages_invalid`, `page_absent`, `tokens_invalid`, `opaque_alignment` or `over_limit`.
    pub code: Code,
    /// What is wrong, with both values, and what to do.
    pub message: String,
}

/// Who sends what to whom on one link, for every pair of ranks. Made once, from two envelopes.
#[derive(Clone, Debug)]
pub struct LinkPlan {}

impl LinkPlan {
    /// Plans a link. Fails with *every* mismatch in coverage, never just the first.
    pub fn new(prefill: &Envelope, decode: &Envelope) -> Result<LinkPlan, Vec<Mismatch>> {
        let _ = (prefill, decode);
        todo!()
    }

    /// Digest over [`PLANNER_VERSION`], [`CHUNK_BYTES`] and every stream: equal on both daemons or no byte moves.
    pub fn digest(&self) -> [u8; 32] {
        todo!()
    }

    /// Prefill ranks that send something to `decode_rank`, ascending.
    pub fn sources(&self, decode_rank: u32) -> Vec<u32> {
        let _ = decode_rank;
        todo!()
    }

    /// Decode ranks that `prefill_rank` sends something to, ascending.
    pub fn targets(&self, prefill_rank: u32) -> Vec<u32> {
        let _ = prefill_rank;
        todo!()
    }
}

/// The verdict that `kvferry check` and both daemons use: the comparison of the envelopes, and the
/// planner's proof. The plan comes with it where the verdict allows a link.
pub fn judge(prefill: &Envelope, decode: &Envelope, policy: Policy) -> (Verdict, Option<LinkPlan>) {
    let _ = (prefill, decode, policy);
    todo!()
}

/// Checks one rank's page lists for the first `tokens` tokens: the number of groups, ids in the pool,
/// enough entries and not too many; on the decode side (`unique`) no page twice.
pub fn check_pages(
    envelope: &Envelope,
    rank: u32,
    pages: &PageLists,
    tokens: u64,
    unique: bool,
) -> Result<(), PlanError> {
    let _ = (envelope, rank, pages, tokens, unique);
    todo!()
}

/// The numbered chunks of one (prefill rank, decode rank) pair for one fetch. Cheap to clone.
#[derive(Clone, Debug)]
pub struct ChunkMap {}

impl ChunkMap {
    /// Numbers the chunks for tokens `range`. `decode_pages` are the decode rank's lists: what is absent
    /// there is not wanted. Both daemons make this map, and it must be equal.
    pub fn new(
        link: &Arc<LinkPlan>,
        prefill_rank: u32,
        decode_rank: u32,
        range: TokenRange,
        decode_pages: Arc<PageLists>,
    ) -> Result<ChunkMap, PlanError> {
        let _ = (link, prefill_rank, decode_rank, range, decode_pages);
        todo!()
    }

    /// The same chunk numbers with tokens cut at `end`: a final publish may be shorter than what is wanted.
    pub fn cut(&self, end: u64) -> ChunkMap {
        let _ = end;
        todo!()
    }

    /// One past the last token.
    pub fn end(&self) -> u64 {
        todo!()
    }

    /// Number of chunks; the same for every cut.
    pub fn chunks(&self) -> u32 {
        todo!()
    }

    /// Bytes of a chunk; 0 for one that holds nothing.
    pub fn chunk_bytes(&self, chunk: u32) -> u64 {
        let _ = chunk;
        todo!()
    }

    /// Bytes of all chunks.
    pub fn total_bytes(&self) -> u64 {
        todo!()
    }

    /// Whether everything in the chunk is ready at the source.
    pub fn is_ready(&self, chunk: u32, ready: &Ready) -> bool {
        let _ = (chunk, ready);
        todo!()
    }

    /// Checks that every page that the map needs is present in the prefill rank's lists.
    pub fn check_source(&self, prefill_pages: &PageLists) -> Result<(), PlanError> {
        let _ = prefill_pages;
        todo!()
    }

    /// One side's byte ranges of a chunk, in the order in which its bytes travel; neighbours are merged.
    pub fn extents<'a>(
        &'a self,
        chunk: u32,
        side: Side,
        pages: &'a PageLists,
    ) -> impl Iterator<Item = Extent> + 'a {
        let _ = (chunk, side, pages);
        std::iter::empty()
    }

    /// Both sides' byte ranges of a chunk, merged where both are contiguous.
    pub fn moves<'a>(&'a self, chunk: u32, prefill_pages: &'a PageLists) -> impl Iterator<Item = Move> + 'a {
        let _ = (chunk, prefill_pages);
        std::iter::empty()
    }
}
