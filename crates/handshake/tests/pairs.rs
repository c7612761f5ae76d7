//! Geometry pairs that people run: what the comparison makes of each, under both policies. Numbered rows are those of
//! docs/geometry-pairs.md; others are row 0.

#![allow(clippy::unwrap_used)] // a panic here is a failed test

use kvferry_handshake::{
    Allocation, Cached, Code, Dcp, Element, Envelope, Kind, Launch, ModelShape, Order, Outcome, Policy, Role,
    Stages, compare,
};

fn llama_8b() -> ModelShape {
    ModelShape::new("meta-llama/Llama-3.1-8B", 32).kv(0..32, 8, 128)
}

fn llama_70b() -> ModelShape {
    ModelShape::new("meta-llama/Llama-3.1-70B", 80).kv(0..80, 8, 128)
}

fn deepseek_v3() -> ModelShape {
    ModelShape::new("deepseek-ai/DeepSeek-V3", 61).latent(0..61, 576)
}

fn dcp(size: u32) -> Dcp {
    Dcp { size, interleave: 1 }
}

/// A launch with the given TP size and page size.
fn launch(tp: u32, page_size: u32) -> Launch {
    Launch {
        tp,
        page_size,
        pool_pages: 113,
        ..Launch::default()
    }
}

/// What must come out of a policy: the outcome, and the code of each mismatch or bridged difference.
type Expected<'a> = (Outcome, &'a [Code]);

const EXACT: Expected<'static> = (Outcome::Compatible, &[]);

fn check(row: u32, prefill: &Envelope, decode: &Envelope, strict: Expected<'_>, bridge: Expected<'_>) {
    let mut prefill = prefill.clone();
    let mut decode = decode.clone();
    prefill.identity.role = Role::Prefill;
    decode.identity.role = Role::Decode;
    for (policy, (outcome, codes)) in [(Policy::Strict, strict), (Policy::Bridge, bridge)] {
        let verdict = compare(&prefill, &decode, policy);
        let found = match outcome {
            Outcome::Bridgeable => &verdict.bridged,
            Outcome::Refused | Outcome::Compatible => &verdict.mismatches,
        };
        let found: Vec<Code> = found.iter().map(|mismatch| mismatch.code).collect();
        assert_eq!(
            (verdict.outcome, found.as_slice()),
            (outcome, codes),
            "row {row}, {policy:?}"
        );
        if row > 0 && outcome == Outcome::Refused {
            let told = page_row(row);
            for code in &found {
                assert!(told.contains(code.name()), "docs/geometry-pairs.md: {told}");
            }
        }
        assert_eq!(verdict.policy, policy);
        for mismatch in verdict
            .mismatches
            .iter()
            .chain(&verdict.bridged)
            .chain(&verdict.warnings)
        {
            // What is wrong on both sides alike may have one value; everything else differs.
            let alike = [Code::Role, Code::ElementUnresolved, Code::PrefillContextParallel];
            assert!(
                mismatch.prefill != mismatch.decode || alike.contains(&mismatch.code),
                "row {row}: {mismatch:?}"
            );
            assert!(!mismatch.why.is_empty() && !mismatch.fix.is_empty());
        }
    }
}

const fn refused(codes: &[Code]) -> Expected<'_> {
    (Outcome::Refused, codes)
}

const fn bridged(codes: &[Code]) -> Expected<'_> {
    (Outcome::Bridgeable, codes)
}

/// A row of docs/geometry-pairs.md.
fn page_row(row: u32) -> &'static str {
    let page = include_str!("../../../docs/geometry-pairs.md");
    let start = format!("| {row} |");
    page.lines()
        .find(|line| line.starts_with(&start))
        .unwrap_or_else(|| panic!("no row {row}"))
}

#[test]
fn rows_1_to_9_and_17_plain_attention() {
    let page_64 = launch(8, 64).envelope(&llama_70b()).unwrap();
    check(1, &page_64, &page_64, EXACT, EXACT);

    let page_1 = launch(8, 1).envelope(&llama_70b()).unwrap();
    check(
        2,
        &page_64,
        &page_1,
        refused(&[Code::PageSize]),
        bridged(&[Code::PageSize]),
    );

    let element = |element| {
        Launch {
            element,
            ..launch(8, 64)
        }
        .envelope(&llama_70b())
        .unwrap()
    };
    let differ = refused(&[Code::ElementType]);
    check(3, &page_64, &element(Element::Fp8E5m2), differ, differ);
    let unresolved = refused(&[Code::ElementUnresolved]);
    check(4, &element(Element::Auto), &page_64, unresolved, unresolved);
    check(4, &page_64, &element(Element::Auto), unresolved, unresolved);
    check(
        4,
        &element(Element::Auto),
        &element(Element::Auto),
        unresolved,
        unresolved,
    );
    check(
        5,
        &element("bfloat16".parse().unwrap()),
        &element("bf16".parse().unwrap()),
        EXACT,
        EXACT,
    );

    let tp = |tp| launch(tp, 16).envelope(&llama_8b()).unwrap();
    check(6, &tp(4), &tp(2), EXACT, EXACT);
    check(7, &tp(2), &tp(4), EXACT, EXACT);
    check(8, &tp(8), &tp(16), EXACT, EXACT);

    let order = |order, tp| {
        Launch {
            order,
            ..launch(tp, 16)
        }
        .envelope(&llama_8b())
        .unwrap()
    };
    let layout = [Code::Layout];
    check(
        9,
        &order(Order::Nhd, 2),
        &order(Order::Hnd, 2),
        refused(&layout),
        bridged(&layout),
    );
    // With one head a rank there is no order to differ in.
    check(9, &order(Order::Nhd, 8), &order(Order::Hnd, 8), EXACT, EXACT);
    check(9, &order(Order::Nhd, 8), &order(Order::Hnd, 2), EXACT, EXACT);

    let pool = Launch {
        pool_pages: 211,
        ..launch(2, 16)
    }
    .envelope(&llama_8b())
    .unwrap();
    check(17, &tp(2), &pool, EXACT, EXACT);
}

#[test]
fn rows_10_to_14_and_22_decode_context_parallelism() {
    let deepseek = |dcp| Launch { dcp, ..launch(8, 64) }.envelope(&deepseek_v3()).unwrap();
    check(10, &deepseek(dcp(1)), &deepseek(dcp(8)), EXACT, EXACT);
    let llama = |dcp| {
        Launch {
            dcp,
            ..launch(16, 16)
        }
        .envelope(&llama_8b())
        .unwrap()
    };
    let latent = [Code::DcpNeedsLatent];
    check(
        11,
        &llama(dcp(1)),
        &llama(dcp(2)),
        refused(&latent),
        bridged(&latent),
    );
    let topology = [Code::DcpTopology];
    check(
        12,
        &deepseek(dcp(4)),
        &deepseek(dcp(2)),
        refused(&topology),
        bridged(&topology),
    );
    check(
        12,
        &deepseek(dcp(8)),
        &deepseek(dcp(1)),
        refused(&topology),
        bridged(&topology),
    );
    let interleave = |interleave| deepseek(Dcp { size: 4, interleave });
    check(
        12,
        &interleave(1),
        &interleave(64),
        refused(&topology),
        bridged(&topology),
    );
    check(13, &deepseek(dcp(8)), &deepseek(dcp(8)), EXACT, EXACT);
    check(13, &llama(dcp(2)), &llama(dcp(2)), EXACT, EXACT);

    let mut cp = deepseek(dcp(1));
    cp.identity.prefill_context_parallel = 2;
    let context = refused(&[Code::PrefillContextParallel]);
    check(14, &cp, &deepseek(dcp(2)), context, context);
    let mut both = deepseek(dcp(2));
    both.identity.prefill_context_parallel = 2;
    check(14, &both, &both, context, context);
    check(14, &cp, &cp, EXACT, EXACT);
    check(14, &cp, &deepseek(dcp(1)), EXACT, EXACT);

    let fp8 = Launch {
        element: Element::Fp8E4m3,
        dcp: dcp(8),
        ..launch(8, 64)
    };
    let fp8_prefill = Launch {
        dcp: dcp(1),
        ..fp8.clone()
    };
    let sparse = deepseek_v3().indexer(0..61, 132, Element::Uint8);
    check(
        22,
        &fp8_prefill.envelope(&sparse).unwrap(),
        &fp8.envelope(&sparse).unwrap(),
        EXACT,
        EXACT,
    );
}

#[test]
fn rows_15_16_and_18_to_21_models_and_components() {
    let four = ModelShape::new("four", 4).kv(0..4, 2, 16);
    let stages = |pp| Launch { pp, ..launch(1, 16) }.envelope(&four).unwrap();
    for split in [vec![2, 2], vec![3, 1]] {
        check(
            15,
            &stages(Stages::Layers(split)),
            &stages(Stages::Even(1)),
            EXACT,
            EXACT,
        );
    }

    let components = refused(&[Code::Components]);
    let plain = launch(2, 16).envelope(&llama_8b()).unwrap();
    let draft = launch(2, 16).envelope(&llama_8b().draft(1, 8, 128)).unwrap();
    check(16, &plain, &draft, components, components);
    check(16, &draft, &plain, components, components);

    let fp8 = Launch {
        element: Element::Fp8E4m3,
        ..launch(2, 16)
    };
    let scaled = llama_8b().with(
        Cached::new("scales", Kind::Scales, 0..32, &[("k", 8, 1), ("v", 8, 1)])
            .element(Element::Fp32)
            .per_page(),
    );
    check(
        18,
        &fp8.envelope(&scaled).unwrap(),
        &fp8.envelope(&llama_8b()).unwrap(),
        components,
        components,
    );

    let opaque = |tag: &str, page| {
        let kv = Cached::new("kv", Kind::Kv, 0..4, &[("kv", 2, 4096)]).opaque(tag);
        launch(1, page)
            .envelope(&ModelShape::new("cpu", 4).with(kv))
            .unwrap()
    };
    let page_size = refused(&[Code::PageSize]);
    check(19, &opaque("amx", 32), &opaque("amx", 128), page_size, page_size);
    check(19, &opaque("amx", 32), &opaque("amx", 32), EXACT, EXACT);
    let tag = refused(&[Code::OpaqueTag]);
    check(19, &opaque("amx", 32), &opaque("vsx", 32), tag, tag);

    let revision = |revision: &str| {
        let mut envelope = plain.clone();
        envelope.identity.revision = Some(revision.to_owned());
        envelope
    };
    let differ = refused(&[Code::Revision]);
    check(20, &revision("A"), &revision("B"), differ, differ);

    let unequal = ModelShape::new("mimo", 4).kv_widths(0..4, 4, 192, 128);
    let tp = |tp| launch(tp, 16).envelope(&unequal).unwrap();
    check(21, &tp(2), &tp(4), EXACT, EXACT);
}

#[test]
fn equal_envelopes_are_compatible_in_every_arrangement() {
    let hybrid = ModelShape::new("hybrid", 6)
        .kv([0, 3], 4, 16)
        .window([1, 4], 4, 16, 64)
        .state(
            "state",
            [2, 5],
            &[("x", 4, 64), ("b", 2, 16), ("c", 2, 16)],
            Element::Fp32,
        )
        .draft(1, 4, 16);
    let arrangements = [
        Allocation::LayerPart,
        Allocation::Layer,
        Allocation::LayerPages,
        Allocation::PackedRows,
        Allocation::OneRegion,
        Allocation::PageMajor,
    ];
    let envelopes: Vec<Envelope> = arrangements
        .into_iter()
        .map(|allocation| {
            Launch {
                allocation,
                ..launch(2, 16)
            }
            .envelope(&hybrid)
            .unwrap()
        })
        .collect();
    for prefill in &envelopes {
        for decode in &envelopes {
            check(0, prefill, decode, EXACT, EXACT);
        }
    }
}

#[test]
fn every_mismatch_is_named_at_once_with_both_values() {
    let prefill = Launch {
        element: Element::Bf16,
        order: Order::Hnd,
        ..launch(2, 64)
    };
    let mut prefill = prefill.envelope(&llama_8b().draft(1, 8, 128)).unwrap();
    prefill.identity.role = Role::Decode;
    prefill.identity.revision = Some("A".to_owned());
    prefill.identity.config_digest = Some("x".to_owned());
    let model = ModelShape::new("other", 40).kv(0..40, 4, 64);
    let mut decode = Launch {
        element: Element::Fp8E4m3,
        ..launch(2, 16)
    }
    .envelope(&model)
    .unwrap();
    decode.identity.config_digest = Some("y".to_owned());

    let verdict = compare(&prefill, &decode, Policy::Strict);
    let found: Vec<(Code, &str, &str, &str)> = verdict
        .mismatches
        .iter()
        .map(|m| (m.code, m.field.as_str(), m.prefill.as_str(), m.decode.as_str()))
        .collect();
    assert_eq!(
        found,
        [
            (Code::Role, "role", "decode", "both"),
            (Code::Model, "model", "meta-llama/Llama-3.1-8B", "other"),
            (Code::ConfigDigest, "config_digest", "x", "y"),
            (Code::Components, "component.draft", "kv, layers 32", "absent"),
            (Code::ElementType, "component.kv.element", "bf16", "fp8_e4m3"),
            (
                Code::Parts,
                "component.kv.part.k",
                "8 heads of 128 elements",
                "4 heads of 64 elements"
            ),
            (
                Code::Parts,
                "component.kv.part.v",
                "8 heads of 128 elements",
                "4 heads of 64 elements"
            ),
            (Code::Layers, "component.kv.layers", "0-31", "0-39"),
            (Code::Layout, "component.kv.layout", "HND", "NHD"),
            (Code::PageSize, "page_group.pages.page_size", "64", "16"),
        ]
    );
    assert_eq!(verdict.warnings.len(), 1);
    assert_eq!(verdict.warnings[0].field, "revision");

    // Under bridge the same pair is refused for what cannot be bridged; the rest stays named.
    let verdict = compare(&prefill, &decode, Policy::Bridge);
    let bridged: Vec<Code> = verdict.bridged.iter().map(|m| m.code).collect();
    assert_eq!(bridged, [Code::Layout, Code::PageSize]);
    assert_eq!(verdict.mismatches.len(), 8);
    assert_eq!(verdict.outcome, Outcome::Refused);
}

#[test]
fn roles_have_a_direction() {
    let side = |role| {
        let mut envelope = launch(1, 16).envelope(&llama_8b()).unwrap();
        envelope.identity.role = role;
        envelope
    };
    for (prefill, decode, sound) in [
        (Role::Prefill, Role::Decode, true),
        (Role::Both, Role::Both, true),
        (Role::Both, Role::Decode, true),
        (Role::Prefill, Role::Both, true),
        (Role::Prefill, Role::Prefill, false),
        (Role::Decode, Role::Decode, false),
        (Role::Decode, Role::Prefill, false),
    ] {
        let verdict = compare(&side(prefill), &side(decode), Policy::Bridge);
        assert_eq!(verdict.allows(), sound, "{prefill} to {decode}");
    }
}

#[test]
fn equal_weights_override_names_and_revisions() {
    let side = |model: &str, revision: Option<&str>, weights: Option<&str>| {
        let mut envelope = launch(1, 16).envelope(&llama_8b()).unwrap();
        envelope.identity.model = model.to_owned();
        envelope.identity.revision = revision.map(str::to_owned);
        envelope.identity.weights_digest = weights.map(str::to_owned);
        envelope
    };
    let codes = |prefill: &Envelope, decode: &Envelope| {
        let verdict = compare(prefill, decode, Policy::Strict);
        let code = |mismatches: &[kvferry_handshake::Mismatch]| -> Vec<(Code, String)> {
            mismatches.iter().map(|m| (m.code, m.field.clone())).collect()
        };
        (code(&verdict.mismatches), code(&verdict.warnings))
    };
    let at = |code, field: &str| (code, field.to_owned());
    let path = side("/mnt/llama", Some("A"), Some("w"));
    assert_eq!(
        codes(&path, &side("llama", Some("B"), Some("w"))),
        (vec![], vec![])
    );
    assert_eq!(
        codes(&path, &side("llama", Some("B"), None)),
        (
            vec![at(Code::Model, "model"), at(Code::Revision, "revision")],
            vec![at(Code::NotCompared, "weights_digest")]
        )
    );
    assert_eq!(
        codes(&path, &side("/mnt/llama", Some("A"), Some("v"))),
        (vec![at(Code::Model, "weights_digest")], vec![])
    );
    assert_eq!(
        codes(&side("m", None, None), &side("m", Some("B"), None)),
        (vec![], vec![at(Code::NotCompared, "revision")])
    );
}

#[test]
fn names_and_order_of_groups_components_and_parts_are_free() {
    let model = ModelShape::new("m", 4)
        .kv([0, 2], 2, 16)
        .window([1, 3], 2, 16, 64)
        .with(Cached::new("aux", Kind::Kv, [0, 2], &[("b", 2, 8), ("a", 2, 4)]));
    let mut turned = model.clone();
    turned.cached.reverse();
    turned.cached[0].parts.reverse();
    for cached in &mut turned.cached {
        cached.group = format!("other-{}", cached.group);
    }
    let prefill = launch(2, 16).envelope(&model).unwrap();
    let decode = launch(2, 16).envelope(&turned).unwrap();
    check(0, &prefill, &decode, EXACT, EXACT);

    // The verdict of a differing pair does not depend on the order either.
    let smaller = launch(2, 8).envelope(&model).unwrap();
    let smaller_turned = launch(2, 8).envelope(&turned).unwrap();
    let rename = |mut verdict: kvferry_handshake::Verdict| {
        for mismatch in &mut verdict.mismatches {
            mismatch.decode = mismatch.decode.split(' ').next().unwrap_or_default().to_owned();
            mismatch.prefill = mismatch.prefill.split(' ').next().unwrap_or_default().to_owned();
        }
        verdict
    };
    assert_eq!(
        rename(compare(&prefill, &smaller, Policy::Strict)),
        rename(compare(&prefill, &smaller_turned, Policy::Strict))
    );
}

#[test]
fn page_groups_are_compared_by_what_they_hold() {
    let model = ModelShape::new("m", 4)
        .kv([0, 2], 2, 16)
        .window([1, 3], 2, 16, 64);
    let mut together = model.clone();
    together.cached[1].group = "pages".to_owned();
    let groups = [Code::PageGroups];
    check(
        0,
        &launch(2, 16).envelope(&model).unwrap(),
        &launch(2, 16).envelope(&together).unwrap(),
        refused(&groups),
        bridged(&groups),
    );
}

#[test]
fn kind_unit_window_and_scales_are_compared() {
    let window = |window| {
        launch(1, 16)
            .envelope(&ModelShape::new("m", 2).window(0..2, 2, 16, window))
            .unwrap()
    };
    let kind = refused(&[Code::ComponentKind]);
    check(0, &window(64), &window(128), kind, kind);

    let named = |kind| {
        let cached = Cached::new("kv", kind, 0..2, &[("k", 1, 16)]);
        launch(1, 16)
            .envelope(&ModelShape::new("m", 2).with(cached))
            .unwrap()
    };
    check(0, &named(Kind::Kv), &named(Kind::Indexer), kind, kind);

    let unit = |page: bool| {
        let scales = Cached::new("scales", Kind::Scales, 0..2, &[("k", 2, 1)]).element(Element::Fp32);
        let scales = if page { scales.per_page() } else { scales };
        let mut kv = Cached::new("kv", Kind::Kv, 0..2, &[("k", 2, 16)]).scaled_by("scales");
        kv.element = Some(Element::Fp8E4m3);
        launch(1, 16)
            .envelope(&ModelShape::new("m", 2).with(kv).with(scales))
            .unwrap()
    };
    check(0, &unit(true), &unit(true), EXACT, EXACT);
    check(0, &unit(true), &unit(false), kind, kind);

    let mut model_scales = unit(false);
    model_scales.components[0].scales = kvferry_handshake::Scales::Model;
    let scales = refused(&[Code::Scales]);
    check(0, &unit(false), &model_scales, scales, scales);
}

#[test]
fn whole_pages_are_never_bridged() {
    // Scales of whole pages beside plain keys and values: the page size cannot be bridged for the group.
    let model = ModelShape::new("m", 2).kv(0..2, 2, 16).with(
        Cached::new("scales", Kind::Scales, 0..2, &[("k", 2, 1)])
            .element(Element::Fp32)
            .per_page(),
    );
    let page = |page| launch(1, page).envelope(&model).unwrap();
    let size = refused(&[Code::PageSize]);
    check(0, &page(16), &page(32), size, size);

    let opaque = |dcp| {
        let cached = Cached::new("latent", Kind::Latent, 0..2, &[("latent", 1, 640)]).opaque("fp4");
        Launch { dcp, ..launch(4, 16) }
            .envelope(&ModelShape::new("m", 2).with(cached))
            .unwrap()
    };
    let topology = refused(&[Code::DcpTopology]);
    check(0, &opaque(dcp(1)), &opaque(dcp(2)), topology, topology);
    check(0, &opaque(dcp(4)), &opaque(dcp(2)), topology, topology);
    check(0, &opaque(dcp(2)), &opaque(dcp(2)), EXACT, EXACT);
}
