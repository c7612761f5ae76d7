//! Envelopes that contradict themselves: every number is set to every extreme, alone and together.

#![allow(clippy::unwrap_used)] // a panic here is a failed test

use std::cell::Cell;

use kvferry_handshake::{
    Allocation, Cached, Element, Envelope, Kind, Launch, ModelShape, Policy, compare, layout_label,
};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use serde_json::Value;

fn envelope() -> Envelope {
    let model = ModelShape::new("m", 4)
        .kv_widths([0, 2], 2, 6, 4)
        .window([1], 2, 4, 8)
        .state("state", [3], &[("x", 2, 4)], Element::Fp32)
        .with(
            Cached::new("scales", Kind::Scales, [0, 2], &[("k", 2, 1)])
                .element(Element::Fp32)
                .per_page(),
        );
    let launch = Launch {
        tp: 2,
        page_size: 4,
        pool_pages: 5,
        allocation: Allocation::PageMajor,
        ..Launch::default()
    };
    launch.envelope(&model).unwrap()
}

/// Paths of all numbers in a JSON value.
fn numbers(value: &Value, at: String, found: &mut Vec<String>) {
    match value {
        Value::Number(_) => found.push(at),
        Value::Array(items) => {
            items
                .iter()
                .enumerate()
                .for_each(|(i, item)| numbers(item, format!("{at}/{i}"), found));
        }
        Value::Object(fields) => fields
            .iter()
            .for_each(|(key, item)| numbers(item, format!("{at}/{key}"), found)),
        _ => {}
    }
}

const EXTREMES: [u64; 12] = [
    0,
    1,
    2,
    3,
    7,
    255,
    u16::MAX as u64,
    u32::MAX as u64 - 1,
    u32::MAX as u64,
    1 << 62,
    u64::MAX - 1,
    u64::MAX,
];

/// Everything that may be asked of a valid envelope is asked; nothing may panic. Whether it was valid.
fn exercise(value: Value) -> bool {
    let Ok(envelope) = serde_json::from_value::<Envelope>(value) else {
        return false;
    };
    if envelope.validate().is_err() {
        return false;
    }
    for rank in 0..3 {
        for (_, bytes) in envelope.region_bytes(rank) {
            assert!(bytes < 1 << 63);
        }
    }
    for component in 0..5 {
        assert!(!layout_label(&envelope, component).is_empty());
    }
    compare(&envelope, &self::envelope(), Policy::Bridge);
    assert!(compare(&envelope, &envelope, Policy::Strict).allows());
    assert_eq!(Envelope::from_bytes(&envelope.to_bytes().unwrap()), Ok(envelope));
    true
}

#[test]
fn every_number_may_be_every_extreme() {
    let sound = serde_json::to_value(envelope()).unwrap();
    let mut paths = Vec::new();
    numbers(&sound, String::new(), &mut paths);
    assert!(paths.len() > 100);
    let mut valid = 0;
    for path in &paths {
        for extreme in EXTREMES {
            let mut value = sound.clone();
            *value.pointer_mut(path).unwrap() = extreme.into();
            valid += usize::from(exercise(value));
        }
    }
    assert!(
        valid > paths.len(),
        "{valid} envelopes of {} numbers were valid",
        paths.len()
    );
}

#[test]
fn numbers_may_be_extreme_together() {
    const DRAWS: u32 = 2000;
    let changes = proptest::collection::vec((any::<usize>(), 0..EXTREMES.len()), 2..6);
    let mut runner = TestRunner::new(ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases(DRAWS)
    });
    let valid = Cell::new(0);
    let checked = runner.run(&changes, |changes| {
        let mut value = serde_json::to_value(envelope()).unwrap();
        let mut paths = Vec::new();
        numbers(&value, String::new(), &mut paths);
        for (path, extreme) in changes {
            *value.pointer_mut(&paths[path % paths.len()]).unwrap() = EXTREMES[extreme].into();
        }
        valid.set(valid.get() + u32::from(exercise(value)));
        Ok(())
    });
    checked.unwrap();
    assert!(
        valid.get() > DRAWS / 100,
        "{} of {DRAWS} draws were valid",
        valid.get()
    );
}
