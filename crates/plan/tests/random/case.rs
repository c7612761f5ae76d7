//! One random case: two engines, a fetch, and everything that must hold.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kvferry_handshake::{ABSENT, Component, Dcp, Envelope, PageLists, Ready, TokenRange, Unit};
use kvferry_plan::{CHUNK_BYTES, ChunkMap, Extent, LinkPlan, Move, Side, check_pages};

use super::draw::Draw;
use super::engine::engine;
use super::memory::Memory;
use super::model::{Cut, Launch, Model, launches};
use super::reference::{fill, rows, wanted};

/// Rows that a case may have on the decode side.
const MOST_ROWS: u64 = 6_000;

pub(crate) struct Case {
    pub(crate) prefill: Envelope,
    pub(crate) decode: Envelope,
    pub(crate) prefill_pages: Vec<PageLists>,
    pub(crate) decode_pages: Vec<Arc<PageLists>>,
    pub(crate) range: TokenRange,
    /// Tokens of the prompt at the source.
    pub(crate) prompt: u64,
    /// What was ready before the prompt's end was known.
    pub(crate) early: Ready,
    /// Target size of a chunk.
    pub(crate) chunk_bytes: u64,
    /// Bytes of each side's ranks' regions.
    pub(crate) regions: [Vec<BTreeMap<u16, u64>>; 2],
}

/// Runs the case of a seed; gives the bytes that it carried.
pub(crate) fn run(draw: &mut Draw) -> u64 {
    let case = Case::draw(draw);
    case.check(draw)
}

impl Case {
    pub(crate) fn draw(draw: &mut Draw) -> Case {
        let model = Model::draw(draw);
        let (launches, cuts) = launches(draw, &model);
        let (range, prompt) = tokens(draw, &model, &launches, &cuts);
        let slots = draw.between(1, 3);
        let scattered = draw.once_in(2);
        draw.saw("page ids", if scattered { "scattered" } else { "in order" });
        let holes = draw.once_in(4);
        let mut sides = Vec::new();
        for (side, tokens) in [prompt, range.to].into_iter().enumerate() {
            let envelope = engine(draw, &model, &launches[side], &cuts[side], tokens, slots);
            let mut lists = Vec::new();
            for rank in &envelope.ranks {
                lists.push(page_lists(
                    draw,
                    &envelope,
                    rank.dcp_rank,
                    tokens,
                    slots,
                    scattered,
                ));
            }
            sides.push((envelope, lists));
        }
        let (decode, mut decode_pages) = sides.pop().unwrap();
        let (prefill, mut prefill_pages) = sides.pop().unwrap();
        let end = prompt.min(range.to);
        if prompt <= range.to {
            leave_window(draw, &prefill, &mut prefill_pages, prompt);
            if prompt == range.to {
                leave_window(draw, &decode, &mut decode_pages, range.to);
            }
        }
        if holes {
            draw.saw("decode pages", "some absent");
            for list in decode_pages.iter_mut().flat_map(|lists| &mut lists.groups) {
                for page in list {
                    if draw.once_in(4) {
                        *page = ABSENT;
                    }
                }
            }
        }
        let tokens = draw.below(end + 1);
        let chunk_bytes = draw.pick(&[1, 16, 128, 1024, CHUNK_BYTES]);
        draw.saw("chunk bytes", chunk_bytes);
        let early = Ready {
            tokens,
            front_tokens: tokens + draw.below(end - tokens + 1),
            front_layers: draw.between(0, 6),
            end: None,
        };
        Case {
            early,
            chunk_bytes,
            ..Case::new((prefill, prefill_pages), (decode, decode_pages), range, prompt)
        }
    }

    /// A case with everything ready at once and chunks of the usual size.
    pub(crate) fn new(
        (prefill, prefill_pages): (Envelope, Vec<PageLists>),
        (decode, decode_pages): (Envelope, Vec<PageLists>),
        range: TokenRange,
        prompt: u64,
    ) -> Case {
        let regions = [&prefill, &decode].map(|envelope| {
            let ranks = envelope.ranks.iter();
            ranks.map(|rank| envelope.region_bytes(rank.rank)).collect()
        });
        Case {
            prefill,
            decode,
            prefill_pages,
            decode_pages: decode_pages.into_iter().map(Arc::new).collect(),
            range,
            prompt,
            early: Ready::default(),
            chunk_bytes: CHUNK_BYTES,
            regions,
        }
    }

    pub(crate) fn check(&self, draw: &mut Draw) -> u64 {
        for (envelope, lists, tokens) in [
            (
                &self.prefill,
                self.prefill_pages.iter().collect::<Vec<_>>(),
                self.prompt,
            ),
            (
                &self.decode,
                self.decode_pages.iter().map(|l| &**l).collect(),
                self.range.to,
            ),
        ] {
            envelope.validate().unwrap();
            for (rank, lists) in (0u32..).zip(lists) {
                check_pages(envelope, rank, lists, tokens, true).unwrap();
            }
        }
        let plan = || LinkPlan::with_chunk_bytes(&self.prefill, &self.decode, self.chunk_bytes).unwrap();
        let link = Arc::new(plan());
        assert_eq!(link.digest(), plan().digest());
        let mut sources: Vec<Memory> = self.prefill.ranks.iter().map(|_| Memory::default()).collect();
        let mut targets: Vec<Memory> = self.decode.ranks.iter().map(|_| Memory::default()).collect();
        let mut early: BTreeMap<(u32, u32), BTreeSet<u32>> = BTreeMap::new();

        // What is ready early moves while the end is not known; the rest after the cut.
        for ready in [self.early, Ready::complete(self.prompt)] {
            let end = self.prompt.min(self.range.to);
            for (rank, memory) in self.prefill.ranks.iter().zip(&mut sources) {
                let lists = &self.prefill_pages[rank.rank as usize];
                fill(&self.prefill, rank, lists, self.prompt, end, &ready, memory);
            }
            for (decode_rank, target) in (0u32..).zip(&mut targets) {
                for prefill_rank in link.sources(decode_rank) {
                    assert!(link.targets(prefill_rank).contains(&decode_rank));
                    let pages = Arc::clone(&self.decode_pages[decode_rank as usize]);
                    let map = ChunkMap::new(&link, prefill_rank, decode_rank, self.range, pages).unwrap();
                    let whole = map.chunks();
                    let map = if ready.end.is_some() {
                        map.cut(self.prompt)
                    } else {
                        map
                    };
                    assert_eq!(map.chunks(), whole, "a cut keeps the numbers");
                    if ready.end.is_some() {
                        map.check_source(&self.prefill_pages[prefill_rank as usize])
                            .unwrap();
                    }
                    let done = early.entry((prefill_rank, decode_rank)).or_default();
                    let mut total = 0;
                    for chunk in 0..map.chunks() {
                        total += map.chunk_bytes(chunk);
                        let is_ready = map.is_ready(chunk, &ready);
                        assert!(is_ready || ready.end.is_none(), "everything is ready at the end");
                        if is_ready && !done.contains(&chunk) {
                            done.insert(chunk);
                            if map.chunk_bytes(chunk) > 0 {
                                let end = if ready.end.is_some() { "known" } else { "open" };
                                draw.saw("chunks that moved with the end", end);
                            }
                            let source = &sources[prefill_rank as usize];
                            self.carry(&map, chunk, (prefill_rank, source), (decode_rank, target));
                        }
                    }
                    assert_eq!(total, map.total_bytes());
                }
            }
        }
        self.check_targets(&targets)
    }

    /// Carries one chunk, byte by byte.
    fn carry(
        &self,
        map: &ChunkMap,
        chunk: u32,
        (prefill_rank, source): (u32, &Memory),
        (decode_rank, target): (u32, &mut Memory),
    ) {
        let lists = [
            &self.prefill_pages[prefill_rank as usize],
            &*self.decode_pages[decode_rank as usize],
        ];
        let moves: Vec<Move> = map.moves(chunk, lists[0]).collect();
        let extents = [(Side::Prefill, lists[0]), (Side::Decode, lists[1])]
            .map(|(side, list)| map.extents(chunk, side, list).collect::<Vec<Extent>>());
        for extents in &extents {
            let sum: u64 = extents.iter().map(|extent| extent.len).sum();
            assert_eq!(
                sum,
                map.chunk_bytes(chunk),
                "a chunk's ranges sum up to its bytes"
            );
            let touching = extents.windows(2).any(|pair| {
                pair[0].region == pair[1].region && pair[0].offset + pair[0].len == pair[1].offset
            });
            assert!(!touching, "neighbours are merged");
        }
        assert_eq!(moves, zip(&extents[0], &extents[1]), "both sides' orders agree");
        let regions = [
            &self.regions[0][prefill_rank as usize],
            &self.regions[1][decode_rank as usize],
        ];
        let mut bytes = Vec::new();
        for step in moves {
            assert!(step.source_offset + step.len <= regions[0][&step.source_region]);
            assert!(step.offset + step.len <= regions[1][&step.region]);
            source.read_into(step.source_region, step.source_offset, &mut bytes, step.len);
            assert!(!bytes.contains(&0), "only what is ready is read: {step:?}");
            assert!(
                target.write(step.region, step.offset, &bytes),
                "each byte is written once: {step:?}"
            );
        }
    }

    /// Every byte that was asked for is there, and no other.
    fn check_targets(&self, targets: &[Memory]) -> u64 {
        let mut carried = 0;
        let end = self.prompt.min(self.range.to);
        let mut bytes = Vec::new();
        for (rank, memory) in self.decode.ranks.iter().zip(targets) {
            let lists = &self.decode_pages[rank.rank as usize];
            let mut expected = 0;
            rows(&self.decode, rank, lists, end, &mut |row| {
                if wanted(&row, self.range.from, end) {
                    memory.read_into(row.region, row.offset, &mut bytes, row.len);
                    assert!(
                        bytes.iter().copied().eq(row.bytes()),
                        "rank {} layer {} tokens {:?}: {bytes:?} at {}",
                        rank.rank,
                        row.layer,
                        row.tokens,
                        row.offset
                    );
                    expected += row.len;
                }
            });
            assert_eq!(memory.written, expected, "nothing else is written");
            carried += expected;
        }
        carried
    }
}

/// The moves that two sides' ranges make.
fn zip(source: &[Extent], target: &[Extent]) -> Vec<Move> {
    let (mut a, mut b) = (source.iter().copied(), target.iter().copied());
    let (mut from, mut to) = (a.next(), b.next());
    let mut moves = Vec::new();
    while let (Some(source), Some(target)) = (&mut from, &mut to) {
        let len = source.len.min(target.len);
        moves.push(Move {
            source_region: source.region,
            source_offset: source.offset,
            region: target.region,
            offset: target.offset,
            len,
        });
        for extent in [source, target] {
            extent.offset += len;
            extent.len -= len;
        }
        if from.is_some_and(|extent| extent.len == 0) {
            from = a.next();
        }
        if to.is_some_and(|extent| extent.len == 0) {
            to = b.next();
        }
    }
    moves
}

/// The tokens asked for, and those of the prompt.
fn tokens(draw: &mut Draw, model: &Model, launches: &[Launch; 2], cuts: &[Cut; 2]) -> (TokenRange, u64) {
    let page = u64::from(*cuts.iter().flat_map(|cut| &cut.page_size).max().unwrap());
    let heads: u64 = model
        .components
        .iter()
        .map(|c| c.layers.len() as u64 * c.parts.iter().map(|p| u64::from(p.heads) + 2).sum::<u64>())
        .sum();
    let replicas = u64::from(launches[1].tp / 8 + 1);
    let most = (MOST_ROWS / (heads * replicas)).max(1);
    let (name, to) = match draw.below(6) {
        0 => ("1", 1),
        1 => ("P-1", page - 1),
        2 => ("P", page),
        3 => ("P+1", page + 1),
        4 => ("4P+3", 4 * page + 3),
        _ => ("any", draw.below(600)),
    };
    let to = to.min(most);
    draw.saw("tokens", name);
    // Pages that only move whole are held whole.
    let step = (model.components.iter().zip(&cuts[1].page_size).zip(&cuts[1].dcp))
        .filter(|((component, _), _)| component.unit == Unit::Page)
        .map(|((_, page), dcp)| u64::from(page * dcp.size))
        .fold(1, lcm);
    let (held, from) = match draw.below(4) {
        0 | 1 => ("nothing", 0),
        2 => ("a page", page),
        _ => ("any", draw.below(to + 1)),
    };
    let from = if draw.once_in(16) {
        to
    } else {
        from.min(to) / step * step
    };
    draw.saw("held", if from == to { "everything" } else { held });
    let range = TokenRange { from, to };
    let (name, prompt) = match draw.below(4) {
        0 => ("shorter", draw.below(to + 1)),
        1 => ("longer", to + draw.below(20)),
        _ => ("as asked", to),
    };
    draw.saw("prompt", name);
    (range, prompt)
}

fn lcm(a: u64, b: u64) -> u64 {
    let mut c = a;
    while !c.is_multiple_of(b) {
        c += a;
    }
    c
}

fn page_lists(
    draw: &mut Draw,
    envelope: &Envelope,
    dcp_rank: u32,
    tokens: u64,
    slots: u32,
    scattered: bool,
) -> PageLists {
    let groups = (0u16..).zip(&envelope.page_groups).map(|(number, group)| {
        let component = component_of(envelope, number);
        let Dcp { size, .. } = component.dcp;
        let local = component
            .dcp
            .count_below(if size > 1 { dcp_rank } else { 0 }, tokens);
        let count = match component.unit {
            Unit::Slot => slots as usize,
            _ => local.div_ceil(u64::from(group.page_size)) as usize,
        };
        let mut ids: Vec<u32> = (0..group.pool_pages).collect();
        if scattered {
            draw.shuffle(&mut ids);
        } else {
            let by = draw.below(ids.len() as u64 - count as u64 + 1) as usize;
            ids.rotate_left(by);
        }
        ids.truncate(count);
        ids
    });
    PageLists {
        groups: groups.collect(),
    }
}

/// Marks pages of windows absent that hold only tokens before the window.
fn leave_window(draw: &mut Draw, envelope: &Envelope, lists: &mut [PageLists], end: u64) {
    for (rank, lists) in envelope.ranks.iter().zip(lists) {
        for (number, list) in (0u16..).zip(&mut lists.groups) {
            let sharing = envelope.components.iter().filter(|c| c.page_group == number);
            // Components without a window keep every page.
            let Some(window) = sharing.map(|c| c.window.unwrap_or(u32::MAX)).max() else {
                continue;
            };
            let component = component_of(envelope, number);
            let page = u64::from(envelope.page_groups[usize::from(component.page_group)].page_size);
            let dcp = component.dcp;
            let dcp_rank = if dcp.size > 1 { rank.dcp_rank } else { 0 };
            for (entry, id) in (0u64..).zip(list) {
                let last = dcp.global(dcp_rank, (entry + 1) * page - 1);
                if last < end.saturating_sub(u64::from(window)) {
                    draw.saw("window", "left pages");
                    *id = ABSENT;
                }
            }
        }
    }
}

/// One of the components of a page group.
fn component_of(envelope: &Envelope, group: u16) -> &Component {
    let found = envelope
        .components
        .iter()
        .find(|component| component.page_group == group);
    found.unwrap()
}
