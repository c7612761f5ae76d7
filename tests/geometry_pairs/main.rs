//! The pairs of docs/geometry-pairs.md.
//! Geometry pairs that people really run, and what must come out, through the built `kvferry`: `check` under
//! both policies, and for each linked pair `plan`, whose moves an independent program applies and compares
//! with an element-by-element copy. Model sizes are real except for the number of layers of large models.

#![allow(clippy::unwrap_used)]

mod engine_file;
mod pair;
mod reference;

use std::collections::BTreeSet;

use engine_file::{Cached, Engine};
use pair::Expected::{Exact, Refused};
use pair::Pair;

fn engine(model: &'static str, layers: u32, cached: Cached) -> Engine {
    Engine {
        model,
        revision: None,
        tp: 1,
        stages: vec![(0..layers).collect()],
        dcp: (1, 1),
        prefill_context_parallel: 1,
        page_size: 0,
        pool_pages: 0,
        hnd: false,
        cached: vec![cached],
    }
    .page(16)
}

fn kv(layers: u32, heads: u32, k: u32, v: u32) -> Cached {
    Cached {
        name: "kv",
        kind: "kv",
        layers: (0..layers).collect(),
        parts: vec![("k", heads, k), ("v", heads, v)],
        element: "bf16",
        more: "",
    }
}

/// Llama-3.1-8B's heads on two layers.
fn llama_8b() -> Engine {
    engine("meta-llama/Llama-3.1-8B", 2, kv(2, 8, 128, 128))
}

/// Llama-3.1-70B's heads on two layers.
fn llama_70b() -> Engine {
    engine("meta-llama/Llama-3.1-70B", 2, kv(2, 8, 128, 128))
        .page(64)
        .tp(8)
}

/// DeepSeek-V3's latents on two layers.
fn deepseek_v3() -> Engine {
    let latent = Cached {
        name: "latent",
        kind: "latent",
        parts: vec![("latent", 1, 576)],
        ..kv(2, 1, 0, 0)
    };
    engine("deepseek-ai/DeepSeek-V3", 2, latent).page(64).tp(8)
}

#[test]
fn pair_01_the_same_engine_on_both_sides() {
    Pair::new(&llama_70b(), &llama_70b()).expect(Exact, Exact);
}

#[test]
fn pair_02_pages_of_64_tokens_and_of_1() {
    Pair::new(&llama_70b(), &llama_70b().page(1)).expect(Refused("page_size", ["64", "1"]), Exact);
}

#[test]
fn pair_03_bf16_and_fp8() {
    let refused = || Refused("element_type", ["bf16", "fp8_e5m2"]);
    Pair::new(&llama_8b(), &llama_8b().element("fp8_e5m2")).expect(refused(), refused());
}

#[test]
fn pair_04_an_unresolved_type() {
    let refused = || Refused("element_unresolved", ["auto", "bf16"]);
    Pair::new(&llama_8b().element("auto"), &llama_8b()).expect(refused(), refused());
}

#[test]
fn pair_05_one_type_of_two_names() {
    Pair::new(&llama_8b().element("bfloat16"), &llama_8b()).expect(Exact, Exact);
}

#[test]
fn pair_06_tp4_to_tp2() {
    Pair::new(&llama_8b().tp(4), &llama_8b().tp(2)).expect(Exact, Exact);
}

#[test]
fn pair_07_tp2_to_tp4() {
    Pair::new(&llama_8b().tp(2), &llama_8b().tp(4)).expect(Exact, Exact);
}

#[test]
fn pair_08_each_head_on_two_ranks() {
    Pair::new(&llama_8b().tp(8), &llama_8b().tp(16)).expect(Exact, Exact);
}

#[test]
fn pair_09_nhd_and_hnd_pages_of_equal_bytes() {
    let nhd = llama_8b().tp(2);
    let hnd = Engine {
        hnd: true,
        ..nhd.clone()
    };
    assert!(nhd.text("prefill").contains("page = 16384") && hnd.text("decode").contains("page = 16384"));
    Pair::new(&nhd, &hnd).expect(Refused("layout", ["NHD", "HND"]), Exact);
}

#[test]
fn pair_10_latents_to_dcp8() {
    Pair::new(&deepseek_v3(), &deepseek_v3().dcp(8, 1)).expect(Exact, Exact);
}

#[test]
fn pair_11_heads_to_dcp2() {
    let decode = llama_8b().tp(2).dcp(2, 1);
    Pair::new(&llama_8b().tp(2), &decode).expect(Refused("dcp_needs_latent", ["1", "2"]), Exact);
}

#[test]
fn pair_12_latents_from_dcp4_to_dcp2() {
    let [four, two] = [4, 2].map(|size| deepseek_v3().dcp(size, 1));
    Pair::new(&four, &two).expect(Refused("dcp_topology", ["4", "2"]), Exact);
}

#[test]
fn pair_13_latents_from_dcp8_to_dcp8_rank_by_rank() {
    let engine = deepseek_v3().dcp(8, 1);
    Pair::new(&engine, &engine).expect(Exact, Exact);
}

#[test]
fn pair_14_prefill_context_parallelism_and_dcp() {
    let prefill = Engine {
        prefill_context_parallel: 2,
        ..deepseek_v3()
    };
    let refused = || Refused("prefill_context_parallel", ["2", "1"]);
    Pair::new(&prefill, &deepseek_v3().dcp(2, 1)).expect(refused(), refused());
}

#[test]
fn pair_15_pipeline_stages() {
    let four = |stages: &[&[u32]]| Engine {
        stages: stages.iter().map(|layers| layers.to_vec()).collect(),
        ..engine("meta-llama/Llama-3.1-8B", 4, kv(4, 8, 128, 128))
    };
    let one = four(&[&[0, 1, 2, 3]]);
    Pair::new(&four(&[&[0, 1], &[2, 3]]), &one).expect(Exact, Exact);
    Pair::new(&four(&[&[0, 1, 2], &[3]]), &one).expect(Exact, Exact);
}

#[test]
fn pair_16_a_draft_layer_on_one_side() {
    let model = "meta-llama/Llama-3.1-8B";
    let prefill = engine(model, 32, kv(32, 8, 128, 128));
    let draft = Cached {
        name: "draft",
        layers: vec![32],
        ..kv(0, 8, 128, 128)
    };
    let decode = engine(model, 33, kv(32, 8, 128, 128)).with(draft);
    let refused = || Refused("components", ["absent", "kv"]);
    Pair::new(&prefill, &decode).expect(refused(), refused());
}

#[test]
fn pair_17_pools_of_unequal_size() {
    let pool = |pool_pages| Engine {
        pool_pages,
        ..llama_8b()
    };
    Pair::new(&pool(113), &pool(211)).expect(Exact, Exact);
}

#[test]
fn pair_18_scales_on_one_side() {
    let scales = Cached {
        name: "scales",
        kind: "scales",
        parts: vec![("k", 8, 1), ("v", 8, 1)],
        element: "fp32",
        more: "unit = \"page\"",
        ..kv(2, 8, 1, 1)
    };
    let mut prefill = llama_8b().element("fp8_e4m3");
    prefill.cached[0].more = "scales = { component = \"scales\" }";
    let mut decode = llama_8b().element("fp8_e4m3");
    decode.cached[0].more = "scales = \"model\"";
    let refused = || Refused("components", ["scales", "absent"]);
    Pair::new(&prefill.with(scales), &decode).expect(refused(), refused());
}

#[test]
fn pair_19_opaque_pages_of_unequal_size() {
    let mut tiled = llama_8b();
    tiled.cached[0].more = "opaque = \"amx\"";
    let refused = || Refused("page_size", ["32", "128"]);
    Pair::new(&tiled.clone().page(32), &tiled.page(128)).expect(refused(), refused());
}

#[test]
fn pair_20_two_revisions() {
    let revision = |revision| Engine {
        revision: Some(revision),
        ..llama_8b()
    };
    let refused = || Refused("revision", ["A", "B"]);
    Pair::new(&revision("A"), &revision("B")).expect(refused(), refused());
}

#[test]
fn pair_21_keys_wider_than_values() {
    let wide = || engine("keys-192", 2, kv(2, 8, 192, 128));
    Pair::new(&wide().tp(2), &wide().tp(4)).expect(Exact, Exact);
}

#[test]
fn pair_22_a_long_prompt_of_short_rows() {
    let tokens = 56 * 1024;
    // Rows of 1,152 bytes in bf16, and of 576 in fp8.
    for element in ["bf16", "fp8_e4m3"] {
        let roomy = |engine: Engine| {
            let mut engine = Engine {
                pool_pages: 900,
                stages: vec![vec![0]],
                ..engine.element(element)
            };
            engine.cached[0].layers = vec![0];
            engine
        };
        let (prefill, decode) = (roomy(deepseek_v3().tp(1)), roomy(deepseek_v3().dcp(8, 1)));
        let pair = Pair::new(&prefill, &decode);
        for policy in ["strict", "bridge"] {
            let moves = pair.is_exact_at(policy, &BTreeSet::from([0]), tokens, 3..4);
            assert_eq!(moves as u64, tokens / 8, "a move for each row");
        }
    }
}

/// The verification bites: moves for one layout do not pass for another.
#[test]
#[should_panic(expected = "rank 0, tokens 0 to 17")]
fn moves_for_another_layout_do_not_pass() {
    let nhd = llama_8b().tp(2);
    let hnd = Engine {
        hnd: true,
        ..nhd.clone()
    };
    let pair = Pair::new(&nhd, &nhd).mistaken_for(&hnd);
    pair.is_exact_at("strict", &BTreeSet::from([0]), 17, 0..1);
}
