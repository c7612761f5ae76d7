//! One random case: two engines, a fetch, and everything that must hold.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvferry_handshake::{ABSENT, Dcp, Envelope, PageLists, Ready, TokenRange, Unit};
use kvferry_plan::{ChunkMap, Extent, LinkPlan, Move, Side, check_pages};

use super::draw::Draw;
use super::engine::{Cut, Launch, Model, cut, engine, model};
use super::memory::Memory;
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
}

/// Runs the case of a seed; gives the bytes that it carried.
pub(crate) fn run(draw: &mut Draw) -> u64 {
    let case = Case::draw(draw);
    case.check()
}

impl Case {
    fn draw(draw: &mut Draw) -> Case {
        let model = model(draw);
        let (launches, cuts) = launches(draw, &model);
        let (range, prompt) = tokens(draw, &model, &launches, &cuts);
        let slots = draw.between(1, 3);
        let scattered = draw.once_in(2);
        draw.saw("page ids", if scattered { "scattered" } else { "in order" });
        let holes = draw.once_in(4);
        let mut sides = Vec::new();
        for (side, tokens) in [prompt, range.to].into_iter().enumerate() {
            let pools: Vec<u32> = entries(&model, &cuts[side], tokens, slots)
                .iter()
                .map(|most| most + draw.between(1, 4))
                .collect();
            let envelope = engine(draw, &model, &launches[side], &cuts[side], &pools);
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
        Case {
            prefill,
            decode,
            prefill_pages,
            decode_pages: decode_pages.into_iter().map(Arc::new).collect(),
            range,
            prompt,
            early: Ready {
                tokens,
                front_tokens: tokens + draw.below(end - tokens + 1),
                front_layers: draw.between(0, 6),
                end: None,
            },
        }
    }

    fn check(&self) -> u64 {
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
        let link = LinkPlan::new(&self.prefill, &self.decode).unwrap();
        assert_eq!(
            link.digest(),
            LinkPlan::new(&self.prefill, &self.decode).unwrap().digest()
        );
        let link = Arc::new(link);
        let mut sources: Vec<Memory> = self.prefill.ranks.iter().map(|_| Memory::default()).collect();
        let mut targets: Vec<Memory> = self.decode.ranks.iter().map(|_| Memory::default()).collect();
        let mut early: BTreeMap<(u32, u32), Vec<u32>> = BTreeMap::new();

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
                            done.push(chunk);
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
        let mut bytes = Vec::new();
        for step in moves {
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

fn launches(draw: &mut Draw, model: &Model) -> ([Launch; 2], [Cut; 2]) {
    let whole_pages = model.components.iter().any(|c| c.unit == Unit::Page);
    let tp = [draw.between(1, 16), draw.between(1, 16)];
    let divisor = |draw: &mut Draw, tp: u32| {
        let divisors: Vec<u32> = (1..=tp).filter(|n| tp.is_multiple_of(*n)).collect();
        draw.pick(&divisors)
    };
    let split = draw.below(if whole_pages { 2 } else { 4 });
    let (dcp, alike) = match split {
        0 => ([1, 1], true),
        1 => {
            let common: Vec<u32> = (1..=tp[0].min(tp[1]))
                .filter(|n| tp[0].is_multiple_of(*n) && tp[1].is_multiple_of(*n))
                .collect();
            let n = draw.pick(&common);
            ([n, n], true)
        }
        2 => ([1, divisor(draw, tp[1])], false),
        _ => ([divisor(draw, tp[0]), divisor(draw, tp[1])], false),
    };
    draw.saw(
        "dcp",
        match dcp {
            [1, 1] => "1 -> 1",
            [1, _] => "1 -> N",
            [_, 1] => "N -> 1",
            [n, m] if n == m && alike => "N -> N",
            [n, m] if n == m => "N -> N, other interleave",
            _ => "N -> M",
        },
    );
    let prefill = cut(draw, model, dcp[0], None);
    let decode = cut(draw, model, dcp[1], alike.then_some(&prefill));
    let launch = |draw: &mut Draw, side: usize| Launch {
        tp: tp[side],
        pp: draw.pick(&[1, 1, 1, 2, 3]),
        dcp: dcp[side],
    };
    ([launch(draw, 0), launch(draw, 1)], [prefill, decode])
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

/// Most entries of each group's list on any rank.
fn entries(model: &Model, cut: &Cut, tokens: u64, slots: u32) -> Vec<u32> {
    let each = model.components.iter().zip(&cut.page_size).zip(&cut.dcp);
    each.map(|((component, page), dcp)| match component.unit {
        Unit::Slot => slots,
        _ => tokens.div_ceil(u64::from(page * dcp.size)) as u32,
    })
    .collect()
}

fn page_lists(
    draw: &mut Draw,
    envelope: &Envelope,
    dcp_rank: u32,
    tokens: u64,
    slots: u32,
    scattered: bool,
) -> PageLists {
    let groups = envelope.page_groups.iter().zip(&envelope.components);
    let groups = groups.map(|(group, component)| {
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
        for (component, list) in envelope.components.iter().zip(&mut lists.groups) {
            let Some(window) = component.window else { continue };
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
