//! The order inside a page is compared layer by layer and part by part.

#![allow(clippy::unwrap_used)] // a panic here is a failed test

use kvferry_handshake::{Allocation, Code, Envelope, Launch, Mismatch, ModelShape, Order, Policy, compare};

/// One placement a layer and part; those that `hnd` names keep head before token.
fn engine(hnd: impl Fn(u32, u16) -> bool) -> Envelope {
    let made = |order| {
        let launch = Launch {
            tp: 2,
            order,
            allocation: Allocation::LayerPart,
            ..Launch::default()
        };
        launch
            .envelope(&ModelShape::new("llama", 4).kv(0..4, 8, 128))
            .unwrap()
    };
    let (mut envelope, other) = (made(Order::Nhd), made(Order::Hnd));
    for (rank, other) in envelope.ranks.iter_mut().zip(other.ranks) {
        for (placement, other) in rank.placements.iter_mut().zip(other.placements) {
            if hnd(placement.layers[0], placement.parts[0]) {
                *placement = other;
            }
        }
    }
    envelope.validate().unwrap();
    envelope
}

fn layout(prefill: &Envelope, decode: &Envelope) -> Option<Mismatch> {
    let mut found = compare(prefill, decode, Policy::Strict).mismatches;
    assert!(
        found.len() <= 1 && found.iter().all(|m| m.code == Code::Layout),
        "{found:?}"
    );
    found.pop()
}

#[test]
fn orders_that_differ_from_layer_to_layer_or_part_to_part_are_equal_to_themselves() {
    for envelope in [
        engine(|layer, _| layer == 1),
        engine(|_, part| part == 1),
        engine(|layer, part| layer % 2 == 0 && part == 0),
    ] {
        assert_eq!(layout(&envelope, &envelope), None);
    }
}

/// Rank 1's heads lie in another order than rank 0's.
#[test]
fn orders_that_differ_from_head_to_head_are_equal_only_to_the_same() {
    let (mut mixed, hnd) = (engine(|_, _| false), engine(|_, _| true));
    mixed.ranks[1] = hnd.ranks[1].clone();
    assert_eq!(layout(&mixed, &mixed), None);
    let mut other = hnd.clone();
    other.ranks[1] = engine(|_, _| false).ranks[1].clone();
    let found = layout(&mixed, &other).unwrap();
    assert!(found.prefill.contains("NHD and HND, by heads"), "{found:?}");
    assert!(layout(&mixed, &hnd).is_some());
}

#[test]
fn the_layers_and_parts_that_differ_are_named() {
    let plain = engine(|_, _| false);
    let said = |prefill: &Envelope, decode: &Envelope| {
        let found = layout(prefill, decode).unwrap();
        (found.prefill, found.decode)
    };
    let pair = |a: &str, b: &str| (a.to_owned(), b.to_owned());
    assert_eq!(said(&plain, &engine(|_, _| true)), pair("NHD", "HND"));
    assert_eq!(
        said(&plain, &engine(|layer, _| layer == 1 || layer == 2)),
        pair("k and v of layers 1-2: NHD", "k and v of layers 1-2: HND")
    );
    assert_eq!(
        said(&plain, &engine(|_, part| part == 1)),
        pair("v of layers 0-3: NHD", "v of layers 0-3: HND")
    );
    // The same orders, but not in the same layers: the set of both sides' orders is equal.
    assert_eq!(
        said(&engine(|layer, _| layer == 0), &engine(|layer, _| layer == 3)),
        pair(
            "k and v of layers 3: NHD; k and v of layers 0: HND",
            "k and v of layers 3: HND; k and v of layers 0: NHD"
        )
    );
}
