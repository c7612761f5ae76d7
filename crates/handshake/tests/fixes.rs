//! A mismatch's fix is one that mends it.

#![allow(clippy::unwrap_used)] // a panic here is a failed test

use kvferry_handshake::{
    Cached, Code, Element, Envelope, Kind, Launch, Mismatch, ModelShape, Order, Policy, Verdict, compare,
};

fn envelope(model: &ModelShape) -> Envelope {
    Launch {
        tp: 2,
        ..Launch::default()
    }
    .envelope(model)
    .unwrap()
}

fn of<'a>(verdict: &'a [Mismatch], code: Code, field: &str) -> &'a Mismatch {
    let mut found = verdict
        .iter()
        .filter(|m| m.code == code && m.field.contains(field));
    found
        .next()
        .unwrap_or_else(|| panic!("{code} at {field}: {verdict:#?}"))
}

#[test]
fn windows_kept_apart_on_one_side_only_name_the_hybrid_settings() {
    let apart = envelope(
        &ModelShape::new("m", 4)
            .kv([1, 3], 8, 64)
            .window([0, 2], 8, 64, 128),
    );
    let full = envelope(&ModelShape::new("m", 4).kv(0..4, 8, 64));
    for (prefill, decode) in [(&apart, &full), (&full, &apart)] {
        let found = compare(prefill, decode, Policy::Strict).mismatches;
        for (code, field) in [(Code::Components, "window"), (Code::Layers, "kv")] {
            let fix = &of(&found, code, field).fix;
            assert!(fix.contains("--disable-hybrid-kv-cache-manager"), "{fix}");
        }
    }
    // Another model: those settings would not mend it.
    let shorter = envelope(&ModelShape::new("m", 3).kv(0..3, 8, 64));
    let found = compare(&full, &shorter, Policy::Strict).mismatches;
    assert!(!of(&found, Code::Layers, "kv").fix.contains("hybrid"));
}

#[test]
fn recurrent_state_in_other_parts_says_that_no_setting_mends_it() {
    let with = |name: &str| {
        let model = ModelShape::new("m", 2).kv([1], 8, 64);
        envelope(&model.state(name, [0], &[("x", 4, 6)], Element::Bf16))
    };
    let found = compare(&with("conv_state"), &with("conv_state-0"), Policy::Strict).mismatches;
    for name in ["component.conv_state", "component.conv_state-0"] {
        assert!(
            of(&found, Code::Components, name)
                .fix
                .contains("No setting mends this"),
            "{found:#?}"
        );
    }
    let none = envelope(&ModelShape::new("m", 2).kv([1], 8, 64));
    let found = compare(&with("conv_state"), &none, Policy::Strict).mismatches;
    assert!(
        !of(&found, Code::Components, "conv_state")
            .fix
            .contains("No setting"),
        "{found:#?}"
    );
}

#[test]
fn bridging_is_advised_only_where_it_would_help() {
    let order = |order, page_size| {
        let launch = Launch {
            tp: 2,
            order,
            page_size,
            ..Launch::default()
        };
        launch.envelope(&ModelShape::new("m", 2).kv(0..2, 8, 64)).unwrap()
    };
    let (one, other) = (order(Order::Nhd, 16), order(Order::Hnd, 32));
    let says = |fix: &str| fix.contains("--policy bridge") && fix.contains("configuration");
    let strict: Verdict = compare(&one, &other, Policy::Strict);
    assert_eq!(strict.mismatches.len(), 2);
    assert!(strict.mismatches.iter().all(|m| says(&m.fix)), "{strict}");
    let bridged = compare(&one, &other, Policy::Bridge).bridged;
    assert_eq!(bridged.len(), 2);
    assert!(
        bridged
            .iter()
            .all(|m| !m.fix.contains("bridg") && m.fix.ends_with('.')),
        "{bridged:#?}"
    );
    // Pages that move whole are carried under no policy.
    let split = |size| {
        let launch = Launch {
            tp: 4,
            dcp: kvferry_handshake::Dcp { size, interleave: 1 },
            ..Launch::default()
        };
        let tiles = Cached::new("tiles", Kind::Latent, 0..2, &[("t", 1, 640)]).opaque("amx");
        launch.envelope(&ModelShape::new("m", 2).with(tiles)).unwrap()
    };
    for policy in [Policy::Strict, Policy::Bridge] {
        let found = compare(&split(1), &split(2), policy).mismatches;
        assert!(
            !of(&found, Code::DcpTopology, "tiles").fix.contains("bridg"),
            "{found:#?}"
        );
    }
}

#[test]
fn fp8_is_told_by_its_resolved_name() {
    let error = "fp8".parse::<Element>().unwrap_err().to_string();
    assert!(error.contains("mean fp8_e4m3"), "{error}");
    assert!(!"fp9".parse::<Element>().unwrap_err().to_string().contains("mean"));
}
