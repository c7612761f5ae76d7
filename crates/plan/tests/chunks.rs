//! Chunks: their numbers and sizes, when they are ready, and what is asked of page lists.

#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use kvferry_handshake::{
    ABSENT, Allocation, Cached, Code, Dcp, Element, Envelope, Kind, Launch, ModelShape, PageLists, Ready,
    TokenRange,
};
use kvferry_plan::{
    CHUNK_BYTES, ChunkMap, LinkPlan, MAX_TOKENS, PlanError, Side, check_pages, written_pages,
};

fn launch(tp: u32) -> Launch {
    Launch {
        tp,
        pool_pages: 1 << 20,
        ..Launch::default()
    }
}

fn llama_70b(allocation: Allocation) -> Envelope {
    let launch = Launch {
        allocation,
        ..launch(8)
    };
    launch
        .envelope(&ModelShape::new("llama", 80).kv(0..80, 8, 128))
        .unwrap()
}

/// A latent of one layer; each of two ranks holds every other 16 tokens.
fn split_in_two() -> Envelope {
    let launch = Launch {
        dcp: Dcp {
            size: 2,
            interleave: 16,
        },
        ..launch(2)
    };
    launch
        .envelope(&ModelShape::new("m", 1).latent(0..1, 576))
        .unwrap()
}

fn link(envelope: &Envelope) -> Arc<LinkPlan> {
    Arc::new(LinkPlan::new(envelope, envelope).unwrap())
}

/// One list a group, of pages in order.
fn lists(lengths: &[u32]) -> Arc<PageLists> {
    let groups = lengths.iter().map(|len| (0..*len).collect());
    Arc::new(PageLists {
        groups: groups.collect(),
    })
}

fn map(link: &Arc<LinkPlan>, from: u64, to: u64, pages: &Arc<PageLists>) -> Result<ChunkMap, PlanError> {
    ChunkMap::new(link, 0, 0, TokenRange { from, to }, Arc::clone(pages))
}

fn code<T>(result: Result<T, PlanError>) -> Code {
    match result {
        Ok(_) => panic!("it was accepted"),
        Err(error) => error.code,
    }
}

/// Tokens below this are ready in all layers.
fn tokens(tokens: u64) -> Ready {
    Ready {
        tokens,
        front_tokens: tokens,
        ..Ready::default()
    }
}

#[test]
fn a_request_of_128k_tokens_is_numbered_in_chunks_not_in_pages() {
    let tokens = 128 * 1024;
    for page_size in [1, 16, 64] {
        let launch = Launch {
            page_size,
            ..launch(8)
        };
        let envelope = launch
            .envelope(&ModelShape::new("llama", 80).kv(0..80, 8, 128))
            .unwrap();
        let pages = tokens / page_size;
        let map = map(&link(&envelope), 0, u64::from(tokens), &lists(&[pages])).unwrap();
        // 2 parts of 80 layers, one head a rank, bf16.
        let bytes = u64::from(tokens) * 160 * 128 * 2;
        assert_eq!(map.total_bytes(), bytes);
        assert!(
            u64::from(map.chunks()) <= bytes / (CHUNK_BYTES / 2),
            "{} chunks of {pages} pages",
            map.chunks()
        );
    }
}

#[test]
fn chunks_are_about_as_large_as_they_should_be_and_none_is_empty() {
    for allocation in [
        Allocation::LayerPart,
        Allocation::LayerPages,
        Allocation::PageMajor,
    ] {
        let link = link(&llama_70b(allocation));
        for tokens in [1u32, 15, 16, 17, 1000, 6_909, 27_367, 131_072] {
            let pages = lists(&[tokens.div_ceil(16)]);
            let map = map(&link, 0, u64::from(tokens), &pages).unwrap();
            let bytes: Vec<u64> = (0..map.chunks()).map(|chunk| map.chunk_bytes(chunk)).collect();
            assert!(bytes.iter().all(|bytes| (1..=CHUNK_BYTES).contains(bytes)));
            assert_eq!(bytes.iter().sum::<u64>(), u64::from(tokens) * 80 * 2 * 256);
            if tokens > 1000 {
                let large = bytes.iter().filter(|bytes| **bytes >= CHUNK_BYTES / 2).count();
                assert!(
                    large * 2 >= bytes.len(),
                    "{allocation:?} {tokens}: {large} of {}",
                    bytes.len()
                );
            }
        }
    }
}

#[test]
fn layers_that_are_ready_first_move_first() {
    let link = link(&llama_70b(Allocation::LayerPart));
    for count in [100, 1000, 131_072] {
        let map = map(&link, 0, count, &lists(&[8192])).unwrap();
        let front = Ready {
            front_tokens: count,
            front_layers: 40,
            ..Ready::default()
        };
        let moved: u64 = (0..map.chunks())
            .filter(|chunk| map.is_ready(*chunk, &front))
            .map(|chunk| map.chunk_bytes(chunk))
            .sum();
        // Long prompts move layer by layer, short ones several layers at once.
        let part = if count > 100_000 { 2 } else { 3 };
        assert!(moved >= map.total_bytes() / part, "{moved}");
    }
}

#[test]
fn numbers_do_not_depend_on_where_a_cut_ends() {
    let link = link(&llama_70b(Allocation::LayerPart));
    let pages = lists(&[4096]);
    let whole = map(&link, 100, 60_000, &pages).unwrap();
    for end in [0, 100, 101, 4_096, 59_999, 60_000, 70_000] {
        let cut = whole.cut(end);
        assert_eq!((cut.end(), cut.chunks()), (end.min(60_000), whole.chunks()));
        let mut equal = 0;
        for chunk in 0..cut.chunks() {
            // What lies before the end is the same chunk.
            if whole.is_ready(chunk, &tokens(end)) {
                assert!(cut.moves(chunk, &pages).eq(whole.moves(chunk, &pages)));
                equal += 1;
            }
            assert!(cut.chunk_bytes(chunk) <= whole.chunk_bytes(chunk));
        }
        assert_eq!(
            cut.total_bytes(),
            end.clamp(100, 60_000).saturating_sub(100) * 80 * 2 * 256
        );
        assert!(equal > 0 || end < 30_000);
        assert_eq!(
            cut.cut(60_000).total_bytes(),
            whole.total_bytes(),
            "a cut can be taken back"
        );
    }
}

#[test]
fn an_empty_rest_has_no_chunks() {
    let link = link(&llama_70b(Allocation::LayerPart));
    let map = map(&link, 32, 32, &lists(&[2])).unwrap();
    assert_eq!((map.chunks(), map.total_bytes()), (0, 0));
    assert_eq!(map.chunk_bytes(0), 0);
    assert!(map.is_ready(0, &Ready::default()));
    assert_eq!(map.extents(0, Side::Decode, &lists(&[2])).count(), 0);
    assert_eq!(map.moves(u32::MAX, &lists(&[2])).count(), 0);
    // A pair that has nothing for each other has none either.
    let other = ChunkMap::new(&link, 0, 1, TokenRange { from: 0, to: 32 }, lists(&[2])).unwrap();
    assert_eq!(other.chunks(), 0);
}

#[test]
fn windows_and_states_are_ready_at_the_end_and_tokens_before() {
    let model = ModelShape::new("hybrid", 2)
        .kv(0..1, 1, 64)
        .window(1..2, 1, 64, 100)
        .state("state", 0..2, &[("x", 1, 64)], Element::Fp32);
    let envelope = launch(1).envelope(&model).unwrap();
    // Several chunks in the window.
    let link = Arc::new(LinkPlan::with_chunk_bytes(&envelope, &envelope, 1 << 12).unwrap());
    let groups: Vec<u32> = envelope
        .page_groups
        .iter()
        .map(|group| if group.name == "slots" { 1 } else { 20 })
        .collect();
    let map = map(&link, 0, 300, &lists(&groups)).unwrap();
    let ready = |map: &ChunkMap, ready: &Ready| -> u64 {
        let chunks = (0..map.chunks()).filter(|chunk| map.is_ready(*chunk, ready));
        chunks.map(|chunk| map.chunk_bytes(chunk)).sum()
    };
    let row = 2 * 64 * 2;
    let state = 2 * 64 * 4;
    assert_eq!(ready(&map, &tokens(300)), 300 * row, "of the full layer");
    assert_eq!(ready(&map, &tokens(299)), 288 * row, "in blocks of 32 tokens");
    assert_eq!(ready(&map, &Ready::complete(300)), (300 + 100) * row + state);
    // The window of a shorter prompt is not the one that was asked for.
    let short = Ready::complete(250);
    assert_eq!(ready(&map, &short), 224 * row + state);
    assert_eq!(ready(&map.cut(250), &short), (250 + 100) * row + state);
    // The state moves even when every token is held.
    let held = ChunkMap::new(&link, 0, 0, TokenRange { from: 300, to: 300 }, lists(&groups)).unwrap();
    assert_eq!(held.total_bytes(), state);
}

fn opaque(dcp: u32) -> Envelope {
    let model = ModelShape::new("m", 1)
        .with(Cached::new("tiles", Kind::Latent, 0..1, &[("t", 1, 640)]).opaque("amx"));
    let launch = Launch {
        page_size: 32,
        dcp: Dcp {
            size: dcp,
            interleave: 8,
        },
        ..launch(2)
    };
    launch.envelope(&model).unwrap()
}

#[test]
fn whole_pages_are_fetched_from_a_page_boundary() {
    let link_one = link(&opaque(1));
    let pages = lists(&[4]);
    assert_eq!(map(&link_one, 0, 100, &pages).unwrap().total_bytes(), 4 * 1280);
    assert_eq!(map(&link_one, 64, 100, &pages).unwrap().total_bytes(), 2 * 1280);
    assert_eq!(
        map(&link_one, 64, 100, &pages).unwrap().cut(65).total_bytes(),
        1280
    );
    assert_eq!(map(&link_one, 100, 100, &pages).unwrap().total_bytes(), 0);
    let error = map(&link_one, 65, 100, &pages).unwrap_err();
    assert_eq!(error.code, Code::OpaqueAlignment);
    assert!(
        error.message.contains("65") && error.message.contains("fetch from 64"),
        "{error}"
    );
    // Split over two ranks, a page of one rank spans twice the tokens.
    let link_two = link(&opaque(2));
    assert_eq!(code(map(&link_two, 32, 100, &lists(&[2]))), Code::OpaqueAlignment);
    assert_eq!(map(&link_two, 64, 100, &lists(&[2])).unwrap().total_bytes(), 1280);
}

#[test]
fn ranges_and_ranks_are_checked() {
    let link = link(&llama_70b(Allocation::LayerPart));
    let pages = lists(&[8]);
    assert_eq!(code(map(&link, 5, 4, &pages)), Code::TokensInvalid);
    assert_eq!(code(map(&link, 0, 129, &pages)), Code::PagesInvalid);
    assert_eq!(code(map(&link, 0, MAX_TOKENS + 1, &pages)), Code::OverLimit);
    assert_eq!(code(map(&link, 0, 8, &lists(&[1, 1]))), Code::PagesInvalid);
    let outside = Arc::new(PageLists {
        groups: vec![vec![1 << 20]],
    });
    assert_eq!(code(map(&link, 0, 8, &outside)), Code::PagesInvalid);
    let range = TokenRange { from: 0, to: 8 };
    for (prefill_rank, decode_rank) in [(8, 0), (0, 8), (u32::MAX, 0)] {
        let found = ChunkMap::new(&link, prefill_rank, decode_rank, range, Arc::clone(&pages));
        assert_eq!(code(found), Code::RankUnknown);
    }
    let tiny = LinkPlan::with_chunk_bytes(
        &llama_70b(Allocation::LayerPart),
        &llama_70b(Allocation::LayerPart),
        1,
    );
    let tiny = Arc::new(tiny.unwrap());
    assert_eq!(code(map(&tiny, 0, 1 << 20, &lists(&[1 << 16]))), Code::OverLimit);
}

#[test]
fn page_lists_are_checked_by_name_and_number() {
    let envelope = llama_70b(Allocation::LayerPart);
    let check = |list: &[u32], tokens, unique| {
        let pages = PageLists {
            groups: vec![list.to_vec()],
        };
        check_pages(&envelope, 0, &pages, tokens, unique)
    };
    check(&[5, ABSENT, 7, ABSENT], 64, true).unwrap();
    for decode in [true, false] {
        let error = check(&[5, 7, 5], 33, decode).unwrap_err();
        assert_eq!(error.code, Code::PagesInvalid);
        assert!(
            error.message.contains("page 5") && error.message.contains("twice"),
            "{error}"
        );
    }
    let error = check(&[5, 7], 33, true).unwrap_err();
    assert!(
        error.message.contains("2 entries") && error.message.contains("3 pages"),
        "{error}"
    );
    // The decode side asks for pages that it will get; a publish may run ahead of what is ready.
    let error = check(&[5, 7, 8, 9], 33, true).unwrap_err();
    assert!(
        error.message.contains("4 entries") && error.message.contains("at most 3"),
        "{error}"
    );
    check(&[5, 7, 8, 9], 33, false).unwrap();
    let error = check(&[5, 1 << 20, 7], 33, false).unwrap_err();
    assert!(
        error.message.contains("entry 1") && error.message.contains("1048576"),
        "{error}"
    );
    assert_eq!(
        code(check_pages(&envelope, 8, &PageLists::default(), 0, true)),
        Code::PagesInvalid
    );
    // A pool that is large next to the list is checked another way.
    let mut vast = envelope.clone();
    vast.page_groups[0].pool_pages = u32::MAX;
    let pages = PageLists {
        groups: vec![vec![u32::MAX - 1, 3, u32::MAX - 1]],
    };
    assert_eq!(code(check_pages(&vast, 0, &pages, 33, true)), Code::PagesInvalid);
}

#[test]
fn lists_of_all_split_ranks_may_be_of_one_length() {
    let envelope = split_in_two();
    let check = |rank, len| check_pages(&envelope, rank, &lists(&[len]), 33, true);
    // Rank 0 holds tokens 0 to 15 and 32, rank 1 tokens 16 to 31.
    assert_eq!([code(check(0, 1)), code(check(0, 3))], [Code::PagesInvalid; 2]);
    assert_eq!([code(check(1, 0)), code(check(1, 3))], [Code::PagesInvalid; 2]);
    for (rank, len) in [(0, 2), (1, 1), (1, 2)] {
        check(rank, len).unwrap();
    }
}

#[test]
fn a_fetch_writes_the_pages_behind_the_tokens_held() {
    let envelope = split_in_two();
    // Pages of 16. Tokens 0 to 15 and 32 to 47 are rank 0's.
    let first = |rank, from, to| {
        let written = written_pages(&envelope, rank, TokenRange { from, to });
        written.iter().map(|written| written.first).collect::<Vec<_>>()
    };
    for (rank, from, to, pages) in [
        (0, 0, 48, vec![0]),
        (0, 15, 48, vec![0]),
        (0, 16, 48, vec![1]),
        (0, 33, 48, vec![1]),
        (1, 16, 48, vec![0]),
        (1, 32, 48, vec![1]),
        (0, 48, 48, vec![]),
    ] {
        assert_eq!(first(rank, from, to), pages, "rank {rank} from {from} to {to}");
    }
}

#[test]
fn groups_that_share_a_pool_share_no_page() {
    let model = ModelShape::new("gemma", 2)
        .kv(0..1, 1, 64)
        .window(1..2, 1, 64, 100);
    let shared = Launch {
        allocation: Allocation::LayerPages,
        shared_pool: true,
        ..launch(1)
    };
    let [shared, apart] = [shared, launch(1)].map(|launch| launch.envelope(&model).unwrap());
    let pages = PageLists {
        groups: vec![vec![1, 2], vec![2, 3]],
    };
    // On the prefill side as well: one of the two components would get the other's bytes.
    for decode in [true, false] {
        check_pages(&apart, 0, &pages, 32, decode).unwrap();
        let error = check_pages(&shared, 0, &pages, 32, decode).unwrap_err();
        assert_eq!(error.code, Code::PagesInvalid);
        assert!(
            error.message.contains("page 2") && error.message.contains("shares its pool"),
            "{error}"
        );
    }
}

#[test]
fn what_is_absent_at_the_source_is_named_and_never_read() {
    // A chunk a layer.
    let model = ModelShape::new("llama", 4).kv(0..4, 8, 128);
    let link = link(&launch(8).envelope(&model).unwrap());
    let source = |list: Vec<u32>| PageLists { groups: vec![list] };
    let wanting = |list: Vec<u32>| map(&link, 0, 48, &Arc::new(source(list))).unwrap();
    let all = wanting(vec![0, 1, 2]);
    all.check_source(&source(vec![9, 8, 7, 6])).unwrap();
    let error = all.check_source(&source(vec![9, ABSENT, 7])).unwrap_err();
    assert_eq!(error.code, Code::PageAbsent);
    assert!(
        error.message.contains("entry 1") && error.message.contains("prefill rank 0"),
        "{error}"
    );
    for list in [vec![9, 8], vec![9, 8, 1 << 20], vec![]] {
        assert_eq!(code(all.check_source(&source(list))), Code::PagesInvalid);
    }
    assert_eq!(code(all.check_source(&PageLists::default())), Code::PagesInvalid);
    // Marked in the fetch, or beyond the cut, it is not asked for.
    wanting(vec![0, ABSENT, 2])
        .check_source(&source(vec![9, ABSENT, 7]))
        .unwrap();
    all.cut(32).check_source(&source(vec![9, 8])).unwrap();
    // Without the check a walk ends there: too few bytes, but none from elsewhere.
    for bad in [vec![9, ABSENT, 7], vec![9, 1 << 20, 7], vec![9]] {
        let bad = source(bad);
        for chunk in 0..all.chunks() {
            let read: u64 = all
                .extents(chunk, Side::Prefill, &bad)
                .map(|extent| extent.len)
                .sum();
            assert_eq!(read, 16 * 256, "the first page of the layer");
            assert!(
                all.moves(chunk, &bad)
                    .all(|step| step.source_offset == 9 * 16 * 256)
            );
        }
    }
}

#[test]
fn the_first_tokens_of_a_short_prompt_move_before_its_end() {
    let heads_in_all_pages = [
        Allocation::LayerPart,
        Allocation::LayerPages,
        Allocation::PageMajor,
    ];
    for (tp, page_size, count, from) in [
        (1, 16, 964, 0),
        (8, 16, 964, 0),
        (4, 1, 300, 0),
        (1, 16, 6_000, 5_036),
    ] {
        for allocation in heads_in_all_pages {
            let launch = Launch {
                allocation,
                page_size,
                ..launch(tp)
            };
            let model = ModelShape::new("llama", 32).kv(0..32, 8, 128);
            let link = link(&launch.envelope(&model).unwrap());
            let pages = lists(&[u32::try_from(count).unwrap().div_ceil(page_size)]);
            let map = map(&link, from, count, &pages).unwrap();
            let ready = |to: u64| -> u64 {
                let chunks = (0..map.chunks()).filter(|chunk| map.is_ready(*chunk, &tokens(to)));
                chunks.map(|chunk| map.chunk_bytes(chunk)).sum()
            };
            let asked = count - from;
            let (total, half) = (map.total_bytes(), ready(from + asked / 2));
            assert!(
                half >= total / 5,
                "{allocation:?} TP{tp}: {half} of {total} after half of {asked} tokens"
            );
            // All but about a quarter, before the last token is there.
            assert!(ready(count - 1) >= total * 7 / 10, "{allocation:?} TP{tp}");
            assert!(
                map.chunks() <= 32 * 8,
                "{allocation:?} TP{tp}: {} chunks",
                map.chunks()
            );
        }
    }
}

#[test]
fn few_bytes_are_not_cut_smaller() {
    let envelope = launch(8)
        .envelope(&ModelShape::new("llama", 32).kv(0..32, 8, 128))
        .unwrap();
    let map = map(&link(&envelope), 0, 64, &lists(&[4])).unwrap();
    // 64 tokens of 8 layers are 256 KiB.
    assert_eq!(map.chunks(), 4 * 4);
    let map = ChunkMap::new(
        &link(&envelope),
        0,
        0,
        TokenRange { from: 0, to: 32 },
        lists(&[2]),
    )
    .unwrap();
    let sizes: Vec<u64> = (0..map.chunks()).map(|chunk| map.chunk_bytes(chunk)).collect();
    assert_eq!(sizes, [64 << 10; 8]);
}

#[test]
fn what_is_ready_has_its_pages_and_the_rest_may_wait_for_them() {
    let model = ModelShape::new("hybrid", 4)
        .kv(0..2, 1, 64)
        .window(2..3, 1, 64, 100)
        .state("state", 3..4, &[("x", 1, 64)], Element::Fp32);
    let envelope = launch(1).envelope(&model).unwrap();
    let at = |name: &str| {
        envelope
            .page_groups
            .iter()
            .position(|group| group.name == name)
            .unwrap()
    };
    let wanted: Vec<u32> = envelope
        .page_groups
        .iter()
        .map(|group| if group.name == "slots" { 1 } else { 20 })
        .collect();
    let map = map(&link(&envelope), 16, 320, &lists(&wanted)).unwrap();
    // Of the group of full layers, so many pages; of windows and states none yet.
    let source = |pages: u32| {
        let mut groups = vec![Vec::new(); envelope.page_groups.len()];
        groups[at("pages")] = (0..pages).collect();
        PageLists { groups }
    };
    let ready = |tokens: u64, front_tokens: u64, front_layers: u32| Ready {
        tokens,
        front_tokens,
        front_layers,
        end: None,
    };
    map.check_ready(&Ready::default(), &source(0)).unwrap();
    map.check_ready(&tokens(160), &source(10)).unwrap();
    assert_eq!(
        code(map.check_ready(&tokens(161), &source(10))),
        Code::PagesInvalid
    );
    // Layers that run ahead need their pages too, and those only.
    map.check_ready(&ready(160, 320, 0), &source(10)).unwrap();
    assert_eq!(
        code(map.check_ready(&ready(160, 320, 1), &source(10))),
        Code::PagesInvalid
    );
    map.check_ready(&ready(160, 320, 1), &source(20)).unwrap();
    let mut absent = source(20);
    absent.groups[at("pages")][9] = ABSENT;
    map.check_ready(&tokens(144), &absent).unwrap();
    let error = map.check_ready(&tokens(145), &absent).unwrap_err();
    assert_eq!(error.code, Code::PageAbsent);
    assert!(error.message.contains("group \"pages\""), "{error}");
    // What the decode side holds already is not asked for.
    absent.groups[at("pages")] = source(20).groups[at("pages")].clone();
    absent.groups[at("pages")][0] = ABSENT;
    map.check_ready(&tokens(320), &absent).unwrap();
    // At the end everything has to be there.
    let error = map.check_ready(&Ready::complete(320), &source(20)).unwrap_err();
    assert_eq!(error.code, Code::PagesInvalid);
    let mut whole = source(20);
    whole.groups[at("window")] = (0..20).collect();
    whole.groups[at("slots")] = vec![0];
    map.check_ready(&Ready::complete(320), &whole).unwrap();
    // A prompt that ends early needs fewer.
    whole.groups[at("pages")].truncate(3);
    map.check_ready(&Ready::complete(48), &whole).unwrap();
    assert_eq!(
        code(map.check_ready(&Ready::complete(49), &whole)),
        Code::PagesInvalid
    );
}
