//! Chunks: what one pair of ranks moves for one fetch, cut into numbered pieces.
//!
//! A stream is cut into blocks of layers times blocks of tokens, on a grid of absolute token positions that
//! does not depend on where the prompt ends, so that a shorter end keeps the numbers.

use std::ops::Range;
use std::sync::Arc;

use kvferry_handshake::{ABSENT, Code, PageLists, Ready, TokenRange, Unit};

use crate::grid::Grid;
use crate::link::LinkPlan;
use crate::pages::PageRules;
use crate::stream::{SOURCE, Span, Stream, TARGET};
use crate::walk::Walk;
use crate::{Extent, Move, PlanError, Side};

/// Most chunks of one pair in one fetch.
pub const MAX_CHUNKS: u32 = 1 << 22;

/// The numbered chunks of one (prefill rank, decode rank) pair for one fetch. Cheap to clone.
#[derive(Clone, Debug)]
pub struct ChunkMap {
    fetch: Arc<Fetch>,
    end: u64,
}

/// What all cuts of a map share.
#[derive(Debug)]
struct Fetch {
    link: Arc<LinkPlan>,
    streams: Range<usize>,
    prefill_rank: u32,
    range: TokenRange,
    pages: Arc<PageLists>,
    /// Whether the decode list of each group has absent pages.
    absent: Vec<bool>,
    /// One grid a stream.
    grids: Vec<Grid>,
    chunks: u32,
}

/// A chunk: some layers of a stream, and some of its rows.
#[derive(Clone, Debug)]
struct Chunk<'a> {
    stream: &'a Stream,
    layers: Range<usize>,
    span: Span,
    /// One past the last token asked for.
    to: u64,
}

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
        if range.from > range.to {
            return Err(PlanError {
                code: Code::TokensInvalid,
                message: format!(
                    "tokens from {} to {}: the range is reversed",
                    range.from, range.to
                ),
            });
        }
        let at = |rank: u32| usize::try_from(rank).unwrap_or(usize::MAX);
        let rules = link.rules[TARGET].get(at(decode_rank));
        let (Some(rules), true) = (rules, at(prefill_rank) < link.rules[SOURCE].len()) else {
            return Err(PlanError {
                code: Code::RankUnknown,
                message: format!(
                    "ranks {prefill_rank} and {decode_rank}, but the engines have {} and {}",
                    link.rules[SOURCE].len(),
                    link.rules[TARGET].len()
                ),
            });
        };
        rules.check(&decode_pages, range.to)?;
        let streams = link.streams_of(prefill_rank, decode_rank);
        let mut grids = Vec::with_capacity(streams.len());
        let mut chunks = 0u64;
        for stream in &link.streams[streams.clone()] {
            check_alignment(stream, range)?;
            let list = decode_pages.groups.get(usize::from(stream.groups[TARGET]));
            let mut grid = Grid::new(
                stream,
                range,
                list.map_or(0, |list| list.len() as u64),
                link.chunk_bytes,
            );
            grid.first = u32::try_from(chunks).unwrap_or(u32::MAX);
            chunks = chunks.saturating_add(grid.chunks(stream));
            grids.push(grid);
        }
        let chunks = u32::try_from(chunks)
            .ok()
            .filter(|chunks| *chunks <= MAX_CHUNKS)
            .ok_or_else(|| PlanError {
                code: Code::OverLimit,
                message: format!("{chunks} chunks; at most {MAX_CHUNKS}: fetch fewer tokens at once"),
            })?;
        let absent = decode_pages.groups.iter().map(|list| list.contains(&ABSENT));
        Ok(ChunkMap {
            end: range.to,
            fetch: Arc::new(Fetch {
                link: Arc::clone(link),
                streams,
                prefill_rank,
                range,
                absent: absent.collect(),
                pages: decode_pages,
                grids,
                chunks,
            }),
        })
    }

    /// The same chunk numbers with tokens cut at `end`: a final publish may be shorter than what is wanted.
    ///
    /// A chunk of a sliding window may hold *more* bytes after a cut, because the window then begins earlier;
    /// such a chunk is never ready before the end is known.
    pub fn cut(&self, end: u64) -> ChunkMap {
        ChunkMap {
            fetch: Arc::clone(&self.fetch),
            end: end.min(self.fetch.range.to),
        }
    }

    /// The decode rank's page lists that it was made with.
    pub fn decode_pages(&self) -> &Arc<PageLists> {
        &self.fetch.pages
    }

    /// One past the last token.
    pub fn end(&self) -> u64 {
        self.end
    }

    /// Number of chunks; the same for every cut.
    pub fn chunks(&self) -> u32 {
        self.fetch.chunks
    }

    /// Bytes of a chunk; 0 for one that holds nothing.
    pub fn chunk_bytes(&self, chunk: u32) -> u64 {
        self.chunk(chunk).map_or(0, |chunk| {
            chunk.stream.layer_row() * chunk.layers.len() as u64 * self.rows(chunk.stream, chunk.span)
        })
    }

    /// Bytes of all chunks.
    pub fn total_bytes(&self) -> u64 {
        let mut total = 0;
        let mut counted: Option<(&Stream, u64)> = None;
        for stream in self.streams() {
            let rows = match counted {
                Some((other, rows)) if stream.same_rows(other) => rows,
                _ => self.rows(stream, self.whole_span(stream)),
            };
            counted = Some((stream, rows));
            total += stream.layer_row() * stream.layers.len() as u64 * rows;
        }
        total
    }

    /// Whether everything in the chunk is ready at the source. Recurrent state is ready when the end is
    /// known, a sliding window when the map is cut there.
    pub fn is_ready(&self, chunk: u32, ready: &Ready) -> bool {
        let Some(chunk) = self.chunk(chunk) else {
            return true;
        };
        let ended = ready.end.is_some_and(|end| chunk.to <= end);
        match (chunk.stream.unit, chunk.stream.window) {
            (Unit::Slot, _) => ready.end.is_some(),
            (_, Some(_)) => ready.end.is_some_and(|end| self.end <= end),
            (_, None) => {
                // Ascending: the last layer is ready last.
                let last = chunk.stream.layers[chunk.layers.clone()].last();
                ended || last.is_none_or(|base| ready.covers(base.layer, chunk.to))
            }
        }
    }

    /// Checks that every page that the map needs is present in the prefill rank's lists.
    pub fn check_source(&self, prefill_pages: &PageLists) -> Result<(), PlanError> {
        let mut checked: Option<&Stream> = None;
        for stream in self.streams() {
            if checked.is_some_and(|other| stream.same_rows(other)) {
                continue;
            }
            self.check_stream(stream, prefill_pages)?;
            checked = Some(stream);
        }
        Ok(())
    }

    /// The same for what is ready before the end is known: of a window or of recurrent state, nothing is.
    /// Where it passes, every chunk that [`ChunkMap::is_ready`] has its pages at the source.
    pub fn check_ready(&self, ready: &Ready, prefill_pages: &PageLists) -> Result<(), PlanError> {
        if let Some(end) = ready.end {
            return self.cut(end).check_source(prefill_pages);
        }
        let mut checked: Option<(&Stream, u64)> = None;
        for stream in self.streams() {
            if stream.unit == Unit::Slot || stream.window.is_some() {
                continue;
            }
            let front = stream
                .layers
                .first()
                .is_some_and(|base| base.layer < ready.front_layers);
            let to = if front { ready.front_tokens } else { ready.tokens };
            let to = to.max(self.fetch.range.from);
            if checked.is_some_and(|(other, as_far)| as_far == to && stream.same_rows(other)) {
                continue;
            }
            self.cut(to).check_stream(stream, prefill_pages)?;
            checked = Some((stream, to));
        }
        Ok(())
    }

    fn check_stream(&self, stream: &Stream, prefill_pages: &PageLists) -> Result<(), PlanError> {
        let group = stream.groups[SOURCE];
        let error = |code, what: String| PlanError {
            code,
            message: format!(
                "page list of group {:?} of prefill rank {}: {what}",
                rules(&self.fetch.link, SOURCE, stream.prefill_rank).map_or("", |rules| rules.name(group)),
                self.fetch.prefill_rank
            ),
        };
        let Some(list) = prefill_pages.groups.get(usize::from(group)) else {
            return Err(error(Code::PagesInvalid, "it is missing".to_owned()));
        };
        let pool = self.source_pool(stream);
        // Lists are long and nearly always whole: asked in a form that vectorises, which needs no walk.
        if stream.unit != Unit::Slot && list.len() as u64 >= self.source_entries(stream) {
            let whole = list.iter().fold(true, |whole, id| whole & (*id < pool));
            if whole {
                return Ok(());
            }
        }
        let wanted = self.wanted(stream);
        for run in stream.runs(self.whole_span(stream)) {
            let at = |entry: u64| usize::try_from(entry).unwrap_or(usize::MAX);
            if wanted.get(at(run.entry[TARGET])).is_none_or(|id| *id == ABSENT) {
                continue;
            }
            let entry = run.entry[SOURCE];
            match list.get(at(entry)) {
                Some(id) if *id < pool => {}
                Some(&ABSENT) => {
                    let what = format!("entry {entry} is absent, but the decode side wants it");
                    return Err(error(Code::PageAbsent, what));
                }
                Some(id) => {
                    let what = format!("entry {entry} is page {id}, but the pool has {pool} pages");
                    return Err(error(Code::PagesInvalid, what));
                }
                None => {
                    let what = format!("{} entries, but entry {entry} is wanted", list.len());
                    return Err(error(Code::PagesInvalid, what));
                }
            }
        }
        Ok(())
    }

    /// One side's byte ranges of a chunk, in the order in which its bytes travel; neighbours are merged.
    ///
    /// Both sides' ranges have equal sums if `pages` passed [`crate::check_pages`] and, for the source,
    /// [`ChunkMap::check_source`]; otherwise they end early.
    pub fn extents<'a>(
        &'a self,
        chunk: u32,
        side: Side,
        pages: &'a PageLists,
    ) -> impl Iterator<Item = Extent> + 'a {
        let side = match side {
            Side::Prefill => SOURCE,
            Side::Decode => TARGET,
        };
        self.walk(chunk, [side], [pages]).map(|piece| Extent {
            region: piece.region[0],
            offset: piece.offset[0],
            len: piece.len,
        })
    }

    /// Both sides' byte ranges of a chunk, merged where both are contiguous.
    pub fn moves<'a>(&'a self, chunk: u32, prefill_pages: &'a PageLists) -> impl Iterator<Item = Move> + 'a {
        self.walk(chunk, [SOURCE, TARGET], [prefill_pages, &self.fetch.pages])
            .map(|piece| Move {
                source_region: piece.region[SOURCE],
                source_offset: piece.offset[SOURCE],
                region: piece.region[TARGET],
                offset: piece.offset[TARGET],
                len: piece.len,
            })
    }

    fn walk<'a, const N: usize>(
        &'a self,
        chunk: u32,
        sides: [usize; N],
        pages: [&'a PageLists; N],
    ) -> Walk<'a, N> {
        let Some(chunk) = self.chunk(chunk) else {
            return Walk::empty();
        };
        let stream = chunk.stream;
        let lists = std::array::from_fn(|at| {
            let list = pages[at].groups.get(usize::from(stream.groups[sides[at]]));
            list.map_or(&[][..], Vec::as_slice)
        });
        let pools = sides.map(|side| match side {
            SOURCE => self.source_pool(stream),
            _ => self.target_pool(stream),
        });
        Walk::new(
            stream,
            chunk.layers,
            chunk.span,
            self.wanted(stream),
            sides,
            lists,
            pools,
        )
    }

    fn streams(&self) -> &[Stream] {
        &self.fetch.link.streams[self.fetch.streams.clone()]
    }

    /// The decode rank's list for a stream.
    fn wanted(&self, stream: &Stream) -> &[u32] {
        let list = self.fetch.pages.groups.get(usize::from(stream.groups[TARGET]));
        list.map_or(&[], Vec::as_slice)
    }

    /// Entries of the prefill rank's list that tokens up to the end take at most.
    fn source_entries(&self, stream: &Stream) -> u64 {
        let rank = usize::try_from(stream.prefill_rank).unwrap_or(usize::MAX);
        let rules = self.fetch.link.rules[SOURCE].get(rank);
        rules.map_or(u64::MAX, |rules| rules.needed(stream.groups[SOURCE], self.end))
    }

    fn source_pool(&self, stream: &Stream) -> u32 {
        pool(&self.fetch.link, SOURCE, stream.prefill_rank, stream)
    }

    fn target_pool(&self, stream: &Stream) -> u32 {
        pool(&self.fetch.link, TARGET, stream.decode_rank, stream)
    }

    /// All rows that are asked for.
    fn whole_span(&self, stream: &Stream) -> Span {
        match stream.unit {
            Unit::Slot => Span::Entries {
                from: 0,
                to: self.wanted(stream).len() as u64,
            },
            Unit::Token | Unit::Page => stream.span(self.fetch.range.from, self.end, self.end),
        }
    }

    /// Number of tokens, pages or slots of a span whose target page is present.
    fn rows(&self, stream: &Stream, span: Span) -> u64 {
        let absent = self.fetch.absent.get(usize::from(stream.groups[TARGET]));
        if absent != Some(&true) {
            return stream.count(span);
        }
        let list = self.wanted(stream);
        let (first, last) = stream.entries(span);
        let clamp = |entry: u64| usize::try_from(entry).unwrap_or(usize::MAX).min(list.len());
        let mut count = 0;
        let mut entry = first;
        for present in list[clamp(first)..clamp(last)].chunk_by(|a, b| (*a == ABSENT) == (*b == ABSENT)) {
            let next = entry + present.len() as u64;
            if present[0] != ABSENT {
                count += stream.count(stream.within(span, entry, next));
            }
            entry = next;
        }
        count
    }

    fn chunk(&self, chunk: u32) -> Option<Chunk<'_>> {
        if chunk >= self.fetch.chunks {
            return None;
        }
        let after = self.fetch.grids.partition_point(|grid| grid.first <= chunk);
        // Streams without chunks share their `first` with the next one, so the last one is the chunk's.
        let at = after.checked_sub(1)?;
        let (grid, stream) = (self.fetch.grids.get(at)?, self.streams().get(at)?);
        let number = u64::from(chunk - grid.first);
        let blocks = grid.blocks.1 - grid.blocks.0;
        let index = |layer: u64| {
            usize::try_from(layer)
                .unwrap_or(usize::MAX)
                .min(stream.layers.len())
        };
        let layers = index(number / blocks * grid.layers)..index((number / blocks + 1) * grid.layers);
        let block = grid.blocks.0 + number % blocks;
        let (from, to) = (
            block.saturating_mul(grid.step),
            (block + 1).saturating_mul(grid.step),
        );
        if stream.unit == Unit::Slot {
            let slots = self.wanted(stream).len() as u64;
            return Some(Chunk {
                stream,
                layers,
                span: Span::Entries {
                    from,
                    to: to.min(slots),
                },
                to: self.end,
            });
        }
        let (from, to) = (from.max(self.fetch.range.from), to.min(self.end));
        Some(Chunk {
            stream,
            layers,
            span: stream.span(from, to, self.end),
            to: if from < to { to } else { 0 },
        })
    }
}

fn pool(link: &LinkPlan, side: usize, rank: u32, stream: &Stream) -> u32 {
    rules(link, side, rank).map_or(0, |rules| rules.pool(stream.groups[side]))
}

fn rules(link: &LinkPlan, side: usize, rank: u32) -> Option<&PageRules> {
    link.rules[side].get(usize::try_from(rank).ok()?)
}

/// Pages that move whole must not be held in part.
fn check_alignment(stream: &Stream, range: TokenRange) -> Result<(), PlanError> {
    if stream.unit != Unit::Page {
        return Ok(());
    }
    let (share, page) = (&stream.tokens.target, stream.tokens.pages[TARGET]);
    let (from, to) = (share.count_below(range.from), share.count_below(range.to));
    if from < to && from % page != 0 {
        return Err(PlanError {
            code: Code::OpaqueAlignment,
            message: format!(
                "tokens from {}, which is inside a page of {page} tokens that only moves whole: fetch from {}",
                range.from,
                range.from - range.from % stream.tokens.grid
            ),
        });
    }
    Ok(())
}
