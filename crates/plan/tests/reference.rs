//! The planner against an element-by-element copy, over random pairs of engines.
//!
//! What was seen to catch what, by breaking the planner on purpose:
//!
//! - a run or a block of tokens one too long: a byte is read that is not ready, or a region is left;
//! - a holder picked twice, a layer left out, atoms joined over a gap: the planner's own proof;
//! - a loop's stride or base wrong, a page table's entry mixed up: a byte is written twice, or is another's;
//! - sides merged or ordered differently: the moves differ from both sides' ranges laid side by side;
//! - absent pages, windows or a cut counted differently from what is walked: a chunk's bytes and its ranges' sum;
//! - layers, windows or states ready too early: a byte is read that the source has not written yet;
//! - loops in a bad order, parts or layers not taken together: only the numbers of moves in `pairs.rs`.

#![allow(clippy::cast_possible_truncation, clippy::unwrap_used)]

mod random;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use kvferry_handshake::{
    Cached, Element, Envelope, HeadSpan, Kind, Launch, ModelShape, PageLists, Placement, Strides, TokenRange,
};
use kvferry_plan::{ChunkMap, LinkPlan};
use random::draw::{Draw, Seen};
use random::{axes, case, spoil};

const CASES: u64 = 20_000;

/// As many as `scripts/test` asks for: `--quick`, CI, or `--full`.
fn cases_of_width() -> u64 {
    match std::env::var("KVFERRY_TESTS").as_deref() {
        Ok("quick") => CASES / 4,
        Ok("full") => CASES * 10,
        _ => CASES,
    }
}

#[test]
fn moves_equal_the_element_by_element_copy() {
    let first: u64 = std::env::var("KVFERRY_SEED").map_or(0, |seed| seed.parse().unwrap());
    let cases: u64 =
        std::env::var("KVFERRY_CASES").map_or_else(|_| cases_of_width(), |cases| cases.parse().unwrap());
    let next = AtomicU64::new(first);
    let carrying = AtomicU64::new(0);
    let seen = Mutex::new(Seen::new());
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                let mut mine = Seen::new();
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= first + cases {
                        break;
                    }
                    let mut draw = Draw::new(seed);
                    let run = std::panic::AssertUnwindSafe(|| case::run(&mut draw));
                    let bytes = std::panic::catch_unwind(run).unwrap_or_else(|_| {
                        panic!("seed {seed}: KVFERRY_SEED={seed} KVFERRY_CASES=1 repeats it")
                    });
                    carrying.fetch_add(u64::from(bytes > 0), Ordering::Relaxed);
                    for (value, count) in draw.seen {
                        *mine.entry(value).or_default() += count;
                    }
                }
                let mut seen = seen.lock().unwrap();
                for (value, count) in mine {
                    *seen.entry(value).or_insert(0) += count;
                }
            });
        }
    });
    let carrying = carrying.into_inner();
    eprintln!("{carrying} of {cases} cases carry bytes");
    assert!(carrying * 10 >= cases * 6, "too few cases carry bytes");
    if cases >= CASES {
        axes::check(&seen.into_inner().unwrap());
    }
}

/// One rank whose three parts lie as given: (offset, token stride) of each.
fn parts_at(places: [(u64, u64); 3]) -> Envelope {
    let parts = [("a", 1, 2), ("b", 1, 2), ("c", 1, 2)];
    let model = ModelShape::new("m", 2).with(Cached::new("keys", Kind::Indexer, 0..2, &parts));
    let launch = Launch {
        page_size: 4,
        pool_pages: 8,
        element: Element::Int8,
        ..Launch::default()
    };
    let mut envelope = launch.envelope(&model).unwrap();
    envelope.ranks[0].placements = (0u16..)
        .zip(places)
        .map(|(part, (offset, token))| Placement {
            component: 0,
            layers: vec![0, 1],
            parts: vec![part],
            heads: HeadSpan { first: 0, count: 1 },
            region: 0,
            offset,
            strides: Strides {
                page: 1000,
                token,
                head: 0,
                part: 0,
                layer: 100_000,
            },
        })
        .collect();
    envelope
}

#[test]
fn parts_in_one_page_need_not_lie_evenly_or_alike() {
    let even = [(0, 2), (8, 2), (16, 2)];
    let unevenly = [(0, 2), (8, 2), (24, 2)];
    let unlike = [(0, 2), (8, 4), (24, 2)];
    let swapped = [(8, 2), (0, 2), (16, 2)];
    let side_by_side = [(0, 6), (2, 6), (4, 6)];
    let all = [even, unevenly, unlike, swapped, side_by_side];
    for from in all {
        for to in all {
            let pages = PageLists {
                groups: vec![vec![5, 2, 3]],
            };
            let range = TokenRange { from: 1, to: 11 };
            let case = case::Case::new(
                (parts_at(from), vec![pages.clone()]),
                (parts_at(to), vec![pages]),
                range,
                11,
            );
            assert_eq!(case.check(&mut Draw::new(0)), 2 * 3 * 10 * 2);
        }
    }
}

/// What validation and `check_pages` would have refused may be refused here or planned in vain, but it never
/// panics, hangs, or leads outside what 64 bits can address.
#[test]
fn what_was_not_validated_never_panics() {
    let mut planned = 0;
    for seed in 0..4_000 {
        let mut draw = Draw::new(seed);
        let mut case = case::Case::draw(&mut draw);
        for _ in 0..draw.below(3) {
            spoil::envelope(&mut draw, &mut case.prefill);
        }
        for _ in 0..draw.below(3) {
            spoil::envelope(&mut draw, &mut case.decode);
        }
        for lists in &mut case.prefill_pages {
            spoil::lists(&mut draw, lists);
        }
        for lists in &mut case.decode_pages {
            let mut spoilt = (**lists).clone();
            spoil::lists(&mut draw, &mut spoilt);
            *lists = Arc::new(spoilt);
        }
        let Ok(link) = LinkPlan::new(&case.prefill, &case.decode) else {
            continue;
        };
        let link = Arc::new(link);
        for (decode_rank, pages) in (0u32..).zip(&case.decode_pages) {
            for prefill_rank in link.sources(decode_rank) {
                let map = ChunkMap::new(&link, prefill_rank, decode_rank, case.range, Arc::clone(pages));
                let Ok(map) = map else { continue };
                planned += 1;
                let Some(source) = case.prefill_pages.get(prefill_rank as usize) else {
                    continue;
                };
                let _ = map.check_source(source);
                let _ = map.total_bytes();
                for chunk in 0..map.chunks().min(20) {
                    let _ = (map.chunk_bytes(chunk), map.is_ready(chunk, &case.early));
                    assert!(map.moves(chunk, source).take(1000).all(|step| step.len > 0));
                }
            }
        }
    }
    assert!(planned > 1000, "too few plans: {planned}");
}
