//! An engine whose ranks have no place for something that its own envelope declares is refused on either side.

#![allow(clippy::unwrap_used)] // a panic here is a failed test

use kvferry_handshake::{
    Cached, Code, Dcp, Element, Envelope, Kind, Launch, Mismatch, ModelShape, Policy, Stages,
};
use kvferry_plan::{LinkPlan, judge};

fn split(tp: u32, dcp: u32) -> Launch {
    Launch {
        tp,
        dcp: Dcp {
            size: dcp,
            interleave: 1,
        },
        ..Launch::default()
    }
}

fn llama(tp: u32) -> Envelope {
    let model = ModelShape::new("llama", 4).kv(0..4, 8, 128);
    split(tp, 1).envelope(&model).unwrap()
}

fn deepseek(dcp: u32) -> Envelope {
    let model = ModelShape::new("deepseek", 4).latent(0..4, 576);
    split(8, dcp).envelope(&model).unwrap()
}

/// What the verdict says, each time with the spoilt envelope on one side: the lacking side is the one named.
fn refused(good: &Envelope, lacking: &Envelope) -> [Vec<Mismatch>; 2] {
    let of = |prefill, decode| {
        let (verdict, plan) = judge(prefill, decode, Policy::Bridge);
        assert!(plan.is_none() && !verdict.allows());
        verdict.mismatches
    };
    [of(lacking, good), of(good, lacking)]
}

fn assert_named(good: &Envelope, lacking: &Envelope, code: Code, said: &[&str]) {
    let [as_prefill, as_decode] = refused(good, lacking);
    for found in [&as_prefill, &as_decode] {
        let codes: Vec<Code> = found.iter().map(|mismatch| mismatch.code).collect();
        assert!(
            !codes.is_empty() && codes.iter().all(|found| *found == code),
            "{found:#?}"
        );
    }
    for word in said {
        let says = |found: &[Mismatch]| found.iter().any(|mismatch| mismatch.decode.contains(word));
        assert!(says(&as_decode), "{word}: {as_decode:#?}");
    }
    assert!(
        as_decode
            .iter()
            .all(|mismatch| mismatch.fix.contains("decode envelope")),
        "{as_decode:#?}"
    );
    // Against itself it is no better, whichever side it takes.
    let both = LinkPlan::new(lacking, lacking).unwrap_err();
    for side in ["the prefill envelope", "the decode envelope"] {
        let names = |mismatch: &Mismatch| mismatch.code == code && mismatch.fix.contains(side);
        assert!(both.iter().any(names), "{side}: {both:#?}");
    }
}

#[test]
fn layers_without_a_place() {
    let mut lacking = llama(2);
    for placement in lacking.ranks.iter_mut().flat_map(|rank| &mut rank.placements) {
        placement.layers.retain(|layer| *layer != 2);
    }
    lacking
        .ranks
        .iter_mut()
        .for_each(|rank| rank.placements.retain(|p| !p.layers.is_empty()));
    assert_named(&llama(2), &lacking, Code::LayerCoverage, &["layers 2"]);
}

#[test]
fn a_rank_without_placements() {
    let mut only = llama(1);
    only.ranks[0].placements.clear();
    assert_named(&llama(1), &only, Code::LayerCoverage, &["layers 0-3"]);
    let mut one_of_two = llama(2);
    one_of_two.ranks[0].placements.clear();
    assert_named(&llama(2), &one_of_two, Code::HeadCoverage, &["heads 0-3"]);
}

#[test]
fn a_file_cut_short_lacks_the_last_ranks() {
    let mut lacking = llama(4);
    lacking.ranks.pop();
    assert_named(
        &llama(4),
        &lacking,
        Code::HeadCoverage,
        &["heads 6-7", "layers 0-3"],
    );
}

#[test]
fn heads_missing_in_one_layer_alone() {
    let mut lacking = llama(2);
    let mut cut = lacking.ranks[1].placements[0].clone();
    cut.heads.count = 1;
    lacking.ranks[1].placements[0] = cut;
    assert_named(
        &llama(2),
        &lacking,
        Code::HeadCoverage,
        &["heads 5-7 of layers 0"],
    );
}

#[test]
fn parts_without_a_place() {
    let mut lacking = llama(2);
    for rank in &mut lacking.ranks {
        rank.placements
            .iter_mut()
            .for_each(|placement| placement.parts.retain(|part| *part == 0));
        rank.placements.retain(|placement| !placement.parts.is_empty());
    }
    assert_named(&llama(2), &lacking, Code::PartCoverage, &["part v of layers 0-3"]);
}

#[test]
fn dcp_ranks_forgotten() {
    let mut lacking = deepseek(8);
    lacking.ranks.iter_mut().for_each(|rank| rank.dcp_rank = 0);
    for good in [deepseek(1), deepseek(8)] {
        let (verdict, _) = judge(&good, &lacking, Policy::Strict);
        let found = &verdict.mismatches;
        assert_eq!(found.len(), 1, "{found:#?}");
        assert_eq!(found[0].code, Code::TokenCoverage);
        assert!(found[0].decode.contains("dcp_rank 1-7 of 8"), "{found:#?}");
    }
    assert_named(&deepseek(8), &lacking, Code::TokenCoverage, &["layers 0-3"]);
}

#[test]
fn heads_of_one_dcp_rank() {
    let model = ModelShape::new("llama", 2).kv(0..2, 4, 64);
    let good = split(4, 2).envelope(&model).unwrap();
    let mut lacking = good.clone();
    lacking.ranks[3].placements.clear();
    let (verdict, _) = judge(&good, &lacking, Policy::Strict);
    let found = &verdict.mismatches;
    assert_eq!(found[0].code, Code::HeadCoverage, "{found:#?}");
    assert!(
        found[0]
            .decode
            .contains("with dcp_rank 1 has a place for heads 2-3"),
        "{found:#?}"
    );
}

#[test]
fn whole_engines_are_not_refused() {
    // Stages, a draft on the last of them, recurrent state whose parts are split by themselves, scales, replicated
    // heads, tokens split over ranks: each a rank that lacks what another has.
    let model = ModelShape::new("all", 6)
        .kv([0, 3], 2, 64)
        .window([1, 4], 2, 64, 32)
        .state("conv", [2, 5], &[("x", 4, 6), ("b", 2, 4)], Element::Bf16)
        .with(Cached::new("scales", Kind::Scales, [0, 3], &[("k", 2, 1), ("v", 2, 1)]).element(Element::Fp32))
        .draft(1, 2, 64);
    let latent = ModelShape::new("latent", 3).latent(0..3, 576).draft(1, 4, 64);
    let staged = |tp| Launch {
        pp: Stages::Layers(vec![2, 4]),
        ..split(tp, 1)
    };
    for (model, launch) in [
        (&model, staged(1)),
        (&model, staged(2)),
        (&model, staged(4)),
        (&latent, split(8, 4)),
        (
            &latent,
            Launch {
                prefill_cp: 2,
                ..split(2, 1)
            },
        ),
    ] {
        let envelope = launch.envelope(model).unwrap();
        let (verdict, plan) = judge(&envelope, &envelope, Policy::Strict);
        assert!(plan.is_some(), "{verdict}");
    }
}
