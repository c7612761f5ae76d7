//! Real pairs of engines: who sends what, how long moves are, what is refused.

#![allow(clippy::cast_possible_truncation, clippy::unwrap_used)]

use std::sync::Arc;

use kvferry_handshake::{
    Allocation, Cached, Code, Dcp, Envelope, HeadSpan, Kind, Launch, Mismatch, ModelShape, Order, Outcome,
    PageLists, Placement, Policy, Stages, TokenRange, Unit,
};
use kvferry_plan::{ChunkMap, LinkPlan, Move, Side, judge};

fn llama() -> ModelShape {
    ModelShape::new("llama", 4).kv(0..4, 8, 128)
}

fn deepseek() -> ModelShape {
    ModelShape::new("deepseek", 4).latent(0..4, 576)
}

fn launch(tp: u32) -> Launch {
    Launch {
        tp,
        ..Launch::default()
    }
}

fn split(tp: u32, dcp: u32) -> Launch {
    Launch {
        dcp: Dcp {
            size: dcp,
            interleave: 1,
        },
        ..launch(tp)
    }
}

fn plan(prefill: &Envelope, decode: &Envelope) -> Arc<LinkPlan> {
    Arc::new(LinkPlan::new(prefill, decode).unwrap())
}

/// Lists for `tokens` tokens; every `step`-th page.
fn lists(envelope: &Envelope, tokens: u64, step: u32) -> Arc<PageLists> {
    let groups = envelope.page_groups.iter().map(|group| {
        let pages = tokens.div_ceil(u64::from(group.page_size));
        (0..u32::try_from(pages).unwrap()).map(|k| 3 + k * step).collect()
    });
    Arc::new(PageLists {
        groups: groups.collect(),
    })
}

/// Lists under DCP: entries of the rank alone.
fn split_lists(envelope: &Envelope, rank: usize, tokens: u64) -> Arc<PageLists> {
    let component = &envelope.components[0];
    let local = component.dcp.count_below(envelope.ranks[rank].dcp_rank, tokens);
    lists(envelope, local, 2)
}

fn moves(map: &ChunkMap, prefill_pages: &PageLists) -> Vec<Move> {
    (0..map.chunks())
        .flat_map(|chunk| map.moves(chunk, prefill_pages))
        .collect()
}

/// Moves of rank 0 from its first source, and their total length.
fn moves_of(model: &ModelShape, from: &Launch, to: &Launch, tokens: u64, step: u32) -> (usize, u64) {
    let (prefill, decode) = (from.envelope(model).unwrap(), to.envelope(model).unwrap());
    let link = plan(&prefill, &decode);
    let source = link.sources(0)[0];
    let range = TokenRange { from: 0, to: tokens };
    let map = ChunkMap::new(&link, source, 0, range, lists(&decode, tokens, step)).unwrap();
    let moves = moves(&map, &lists(&prefill, tokens, step));
    assert_eq!(moves.iter().map(|m| m.len).sum::<u64>(), map.total_bytes());
    (moves.len(), map.total_bytes())
}

#[test]
fn moves_are_as_long_as_the_two_layouts_allow() {
    let with = |allocation, order, tp| Launch {
        allocation,
        order,
        ..launch(tp)
    };
    use Allocation::{Layer, LayerPages, LayerPart, OneRegion, PackedRows, PageMajor};
    use Order::{Hnd, Nhd};
    // 4 layers, 2 parts, 10 pages of 16 tokens; 8 heads.
    let (layers, parts, pages, tokens, heads) = (4, 2, 10, 160, 8);
    let scattered = |from: Launch, to: Launch| moves_of(&llama(), &from, &to, tokens, 2).0;
    for order in [Nhd, Hnd] {
        let same = |allocation| scattered(with(allocation, order, 2), with(allocation, order, 2));
        assert_eq!(same(LayerPart), layers * parts * pages, "a page of a part");
        assert_eq!(same(Layer), layers * parts * pages);
        assert_eq!(same(OneRegion), layers * parts * pages);
        assert_eq!(same(LayerPages), layers * pages, "K and V lie in one page");
        assert_eq!(same(PackedRows), layers * pages);
        assert_eq!(same(PageMajor), pages, "all layers lie in one page");
    }
    // Pages that follow each other are one move in a chunk: of all 64 tokens, or of half of them where a
    // page holds all layers.
    let in_order = |allocation| {
        moves_of(
            &llama(),
            &with(allocation, Nhd, 2),
            &with(allocation, Nhd, 2),
            64,
            1,
        )
        .0
    };
    assert_eq!(in_order(LayerPart), layers * parts);
    assert_eq!(in_order(PageMajor), 2);
    // Heads are cut out of each token, or in one piece out of each page.
    let tokens = tokens as usize;
    let cut = |order| scattered(with(LayerPart, order, 4), with(LayerPart, order, 2));
    assert_eq!(cut(Nhd), layers * parts * tokens);
    assert_eq!(cut(Hnd), layers * parts * pages);
    // Other orders: single rows.
    let rows = scattered(with(LayerPart, Nhd, 1), with(LayerPart, Hnd, 1));
    assert_eq!(rows, layers * parts * tokens * heads);
    // A page-major source in whole, split for the target.
    let unlike = scattered(with(PageMajor, Nhd, 2), with(LayerPart, Nhd, 2));
    assert_eq!(unlike, layers * parts * pages);
}

#[test]
fn parts_of_one_page_move_together_however_they_are_placed() {
    let launch = Launch {
        allocation: Allocation::LayerPages,
        ..launch(2)
    };
    let together = launch.envelope(&llama()).unwrap();
    let mut apart = together.clone();
    for rank in &mut apart.ranks {
        rank.placements = std::mem::take(&mut rank.placements)
            .into_iter()
            .flat_map(|placement| {
                let parts = placement.parts.clone();
                (0u64..).zip(parts).map(move |(at, part)| Placement {
                    parts: vec![part],
                    offset: placement.offset + at * placement.strides.part,
                    ..placement.clone()
                })
            })
            .collect();
    }
    for (prefill, decode) in [(&together, &apart), (&apart, &together), (&apart, &apart)] {
        let range = TokenRange { from: 0, to: 160 };
        let map = ChunkMap::new(&plan(prefill, decode), 0, 0, range, lists(decode, 160, 2)).unwrap();
        assert_eq!(moves(&map, &lists(prefill, 160, 2)).len(), 4 * 10);
    }
}

#[test]
fn a_partial_page_moves_in_part() {
    let (count, bytes) = moves_of(&llama(), &launch(1), &launch(1), 17, 2);
    assert_eq!(count, 4 * 2 * 2);
    assert_eq!(bytes, 4 * 2 * 17 * 8 * 256);
}

#[test]
fn split_tokens_are_gathered_into_whole_pages() {
    let (prefill, decode) = (
        launch(8).envelope(&deepseek()).unwrap(),
        split(8, 8).envelope(&deepseek()).unwrap(),
    );
    let link = plan(&prefill, &decode);
    let tokens = 16 * 8 * 4;
    for rank in 0..8 {
        // Every holder serves one rank.
        assert_eq!(link.sources(rank), [rank]);
        assert_eq!(link.targets(rank), [rank]);
        let pages = split_lists(&decode, rank as usize, tokens);
        let range = TokenRange { from: 0, to: tokens };
        let map = ChunkMap::new(&link, rank, rank, range, Arc::clone(&pages)).unwrap();
        let count = |side, pages: &PageLists| {
            let chunks = 0..map.chunks();
            chunks
                .map(|chunk| map.extents(chunk, side, pages).count())
                .sum::<usize>()
        };
        assert_eq!(count(Side::Decode, &pages), 4 * 4, "a page of a layer");
        let source_pages = lists(&prefill, tokens, 2);
        assert_eq!(count(Side::Prefill, &source_pages), 4 * 16 * 4, "a row");
    }
}

#[test]
fn each_byte_crosses_once_and_replicas_share_the_work() {
    let bytes = |model: &ModelShape, from: &Launch, to: &Launch| -> Vec<(u32, u32, u64)> {
        let (prefill, decode) = (from.envelope(model).unwrap(), to.envelope(model).unwrap());
        let link = plan(&prefill, &decode);
        let mut found = Vec::new();
        for rank in 0..u32::try_from(decode.ranks.len()).unwrap() {
            for source in link.sources(rank) {
                let range = TokenRange { from: 0, to: 16 };
                let map = ChunkMap::new(&link, source, rank, range, lists(&decode, 16, 1)).unwrap();
                found.push((source, rank, map.total_bytes()));
            }
        }
        found
    };
    // One latent on every rank: 4 layers of 16 tokens.
    let all = 4 * 16 * 1152;
    assert_eq!(
        bytes(&deepseek(), &launch(2), &launch(2)),
        [(0, 0, all), (1, 1, all)]
    );
    let more_wanters = bytes(&deepseek(), &launch(2), &launch(4));
    assert_eq!(more_wanters, [(0, 0, all), (1, 1, all), (0, 2, all), (1, 3, all)]);
    let more_holders = bytes(&deepseek(), &launch(4), &launch(2));
    let half = all / 2;
    assert_eq!(
        more_holders,
        [(0, 0, half), (2, 0, half), (1, 1, half), (3, 1, half)]
    );
    // Eight heads on four ranks, then on sixteen, each head on two of them.
    let head = 4 * 2 * 16 * 256;
    let wider = bytes(&llama(), &launch(4), &launch(16));
    let expected: Vec<_> = (0..16).map(|rank| (rank / 4, rank, head)).collect();
    assert_eq!(wider, expected);
    let narrower = bytes(&llama(), &launch(16), &launch(8));
    let expected: Vec<_> = (0..16).map(|rank| (rank, rank / 2, head / 2)).collect();
    assert_eq!(narrower, expected);
}

#[test]
fn stages_are_paired_by_layer_id() {
    let stages = |layers: &[u32]| Launch {
        pp: Stages::Layers(layers.to_vec()),
        ..launch(1)
    };
    let [two, other, one] =
        [&[2, 2][..], &[3, 1], &[4]].map(|layers| stages(layers).envelope(&llama()).unwrap());
    assert_eq!(plan(&two, &one).sources(0), [0, 1]);
    let link = plan(&other, &two);
    assert_eq!([link.sources(0), link.sources(1)], [vec![0], vec![0, 1]]);
    assert_eq!([link.targets(0), link.targets(1)], [vec![0, 1], vec![1]]);
}

#[test]
fn the_digest_follows_the_plan_alone() {
    let digest = |from: &Envelope, to: &Envelope| plan(from, to).digest();
    let one = launch(2).envelope(&llama()).unwrap();
    let mut renamed = one.clone();
    renamed.identity.engine = "other".to_owned();
    renamed.page_groups[0].pool_pages += 5;
    assert_eq!(
        digest(&one, &one),
        digest(&one, &renamed),
        "what moves is the same"
    );
    let mut shifted = one.clone();
    shifted.ranks[1].placements[0].offset += 2;
    assert_ne!(digest(&one, &one), digest(&one, &shifted));
    assert_ne!(digest(&one, &shifted), digest(&shifted, &one));
    let chunks = |bytes| LinkPlan::with_chunk_bytes(&one, &one, bytes).unwrap().digest();
    assert_ne!(chunks(1 << 20), chunks(1 << 21));
}

fn codes(mismatches: &[Mismatch]) -> Vec<Code> {
    mismatches.iter().map(|mismatch| mismatch.code).collect()
}

#[test]
fn everything_that_is_not_covered_is_named_at_once() {
    let model = llama().latent(0..4, 576);
    let decode = split(4, 2).envelope(&model).unwrap();
    let mut prefill = split(4, 2).envelope(&model).unwrap();
    let latent = prefill.component("latent").unwrap().0;
    for rank in &mut prefill.ranks {
        // Nobody has layer 3 of the latents, nobody heads 6 and 7, and of DCP rank 1 nobody heads 4 and 5.
        for placement in rank.placements.iter_mut().filter(|p| p.component == latent) {
            placement.layers.retain(|layer| *layer != 3);
        }
        rank.placements.retain(|placement| !placement.layers.is_empty());
        for placement in rank.placements.iter_mut().filter(|p| p.component != latent) {
            if placement.heads.first == 4 {
                placement.heads.count = 2;
            }
        }
        if rank.rank == 3 {
            rank.placements.retain(|placement| placement.component == latent);
        }
    }
    let mismatches = LinkPlan::new(&prefill, &decode).unwrap_err();
    assert_eq!(
        codes(&mismatches),
        [Code::HeadCoverage, Code::TokenCoverage, Code::LayerCoverage],
        "{mismatches:#?}"
    );
    let text = format!("{mismatches:?}");
    for part in [
        "heads 6-7",
        "heads 4-5",
        "dcp_rank 1 of 2",
        "layers 0-2",
        "layers 3",
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
    // The verdict has them too, though the envelopes state the same.
    let (verdict, link) = judge(&prefill, &decode, Policy::Strict);
    assert_eq!((verdict.outcome, link.is_none()), (Outcome::Refused, true));
    assert_eq!(verdict.mismatches, mismatches);
}

#[test]
fn a_verdict_comes_with_a_plan_only_where_it_allows_a_link() {
    let page = |page_size| Launch {
        page_size,
        ..launch(2)
    };
    let (a, b) = (
        page(16).envelope(&llama()).unwrap(),
        page(1).envelope(&llama()).unwrap(),
    );
    for (decode, policy, outcome) in [
        (&a, Policy::Strict, Outcome::Compatible),
        (&b, Policy::Strict, Outcome::Refused),
        (&b, Policy::Bridge, Outcome::Bridgeable),
    ] {
        let (verdict, plan) = judge(&a, decode, policy);
        assert_eq!(verdict.outcome, outcome);
        assert_eq!(plan.is_some(), verdict.allows());
    }
}

#[test]
fn coverage_is_named_next_to_other_differences_but_not_because_of_them() {
    let decode = launch(2).envelope(&llama()).unwrap();
    let mut prefill = Launch {
        page_size: 1,
        ..launch(2)
    }
    .envelope(&llama())
    .unwrap();
    prefill.ranks[1].placements.clear();
    let (verdict, _) = judge(&prefill, &decode, Policy::Strict);
    let found = codes(&verdict.mismatches);
    assert!(
        found.contains(&Code::PageSize) && found.contains(&Code::HeadCoverage),
        "{found:?}"
    );
    // A model of other layers does not cover them either: that is said once.
    let other = launch(2)
        .envelope(&ModelShape::new("llama", 3).kv(0..3, 8, 128))
        .unwrap();
    let (verdict, _) = judge(&other, &decode, Policy::Bridge);
    assert_eq!(codes(&verdict.mismatches), [Code::Layers]);
}

#[test]
fn what_no_list_of_moves_can_carry_is_refused() {
    let opaque = |page_size, dcp| {
        let model = ModelShape::new("m", 2)
            .with(Cached::new("tiles", Kind::Latent, 0..2, &[("t", 1, 640)]).opaque("amx"));
        let launch = Launch {
            page_size,
            ..split(4, dcp)
        };
        launch.envelope(&model).unwrap()
    };
    let refused = |a: &Envelope, b: &Envelope| codes(&LinkPlan::new(a, b).unwrap_err());
    assert_eq!(refused(&opaque(32, 1), &opaque(128, 1)), [Code::PageSize]);
    assert_eq!(refused(&opaque(32, 1), &opaque(32, 2)), [Code::DcpTopology]);
    assert!(LinkPlan::new(&opaque(32, 2), &opaque(32, 2)).is_ok());

    let mut other = opaque(32, 1);
    other.components[0].unit = Unit::Token;
    assert_eq!(refused(&other, &opaque(32, 1)), [Code::ComponentKind]);
    let wide = launch(1)
        .envelope(&ModelShape::new("m", 2).kv_widths(0..2, 2, 192, 128))
        .unwrap();
    let narrow = launch(1)
        .envelope(&ModelShape::new("m", 2).kv_widths(0..2, 2, 192, 64))
        .unwrap();
    assert_eq!(refused(&wide, &narrow), [Code::Parts]);
    let renamed =
        ModelShape::new("m", 2).with(Cached::new("kw", Kind::Kv, 0..2, &[("k", 2, 192), ("v", 2, 64)]));
    assert_eq!(
        refused(&launch(1).envelope(&renamed).unwrap(), &narrow),
        [Code::Components]
    );
}

#[test]
fn an_envelope_that_was_not_validated_is_refused_and_not_computed_with() {
    let good = launch(2).envelope(&llama()).unwrap();
    let spoilt: [fn(&mut Envelope); 10] = [
        |e| e.ranks[1].placements[0].offset = u64::MAX / 2,
        |e| e.page_groups[0].page_size = 0,
        |e| e.components[0].dcp.size = 0,
        |e| e.components[0].page_group = 9,
        |e| e.components[0].parts[1].width = 0,
        |e| e.ranks[0].placements[0].component = 9,
        |e| e.ranks[0].placements[0].parts = vec![7],
        |e| e.ranks[1].placements[0].strides.page = u64::MAX / 4,
        |e| e.ranks[1].rank = 5,
        |e| {
            e.ranks[1].placements[0].heads = HeadSpan {
                first: u32::MAX,
                count: 2,
            }
        },
    ];
    for (number, spoil) in spoilt.into_iter().enumerate() {
        let mut bad = good.clone();
        spoil(&mut bad);
        for (prefill, decode) in [(&bad, &good), (&good, &bad)] {
            let mismatches = LinkPlan::new(prefill, decode).unwrap_err();
            assert_eq!(codes(&mismatches), [Code::EnvelopeInvalid], "{number}");
        }
    }
    // A row in two places would be written twice.
    let mut twice = good.clone();
    let again = twice.ranks[0].placements[0].clone();
    twice.ranks[0].placements.push(again);
    assert_eq!(
        codes(&LinkPlan::new(&good, &twice).unwrap_err()),
        [Code::Internal]
    );
}

#[test]
fn a_hostile_pair_costs_little() {
    // Every prefill rank has a piece of every head for every decode rank, in as many classes as can be.
    let model = ModelShape::new("m", 1).kv(0..1, 1, 1);
    let mut prefill = split(1, 1).envelope(&model).unwrap();
    prefill.components[0].dcp = Dcp {
        size: 1024,
        interleave: 1,
    };
    prefill.page_groups[0].page_size = 1024;
    let template = prefill.ranks[0].clone();
    prefill.ranks = (0..1024)
        .map(|rank| {
            let mut new = template.clone();
            new.rank = rank;
            new.dcp_rank = rank;
            for placement in &mut new.placements {
                placement.layers = (0..1000).collect();
            }
            new
        })
        .collect();
    prefill.components[0].layers = (0..1000).collect();
    let mut decode = prefill.clone();
    decode.components[0].dcp.interleave = 1024;
    let mismatches = LinkPlan::new(&prefill, &decode).unwrap_err();
    assert_eq!(codes(&mismatches), [Code::OverLimit]);
}

#[test]
fn splits_that_meet_everywhere_are_refused_where_their_product_is_large() {
    let of = |dcp| split(dcp, dcp).envelope(&deepseek()).unwrap();
    assert!(LinkPlan::new(&of(128), &of(127)).is_ok());
    for sizes in [(1024, 1023), (256, 255)] {
        let mismatches = LinkPlan::new(&of(sizes.0), &of(sizes.1)).unwrap_err();
        assert_eq!(codes(&mismatches), [Code::OverLimit]);
        assert!(mismatches[0].why.contains("DCP size"), "{}", mismatches[0].why);
    }
    // As many ranks whose splits meet one to one.
    assert!(LinkPlan::new(&of(1024), &of(1024)).is_ok());
}
