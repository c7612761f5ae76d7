//! What the builder makes: valid, disjoint, and split as frameworks split it. The proof of disjointness is
//! compared with enumeration.

#![allow(clippy::unwrap_used)] // a panic here is a failed test

use std::cell::Cell;
use std::collections::{BTreeMap, HashSet};

use kvferry_handshake::{
    Allocation, Cached, Code, Dcp, Element, Envelope, Kind, Launch, LaunchError, ModelShape, Order, Padding,
    Policy, Stages, Unit, compare,
};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

fn small_hybrid() -> ModelShape {
    ModelShape::new("hybrid", 6)
        .kv_widths([0, 3], 4, 6, 4)
        .window([1, 4], 4, 4, 8)
        .state(
            "conv",
            [2, 5],
            &[("x", 4, 6), ("b", 2, 3), ("c", 2, 3)],
            Element::Bf16,
        )
        .with(Cached::new("scales", Kind::Scales, [0, 3], &[("k", 4, 1), ("v", 4, 1)]).element(Element::Fp32))
        .draft(1, 4, 4)
}

const ALLOCATIONS: [Allocation; 6] = [
    Allocation::LayerPart,
    Allocation::Layer,
    Allocation::LayerPages,
    Allocation::PackedRows,
    Allocation::OneRegion,
    Allocation::PageMajor,
];

fn launches() -> Vec<Launch> {
    let mut found = Vec::new();
    for allocation in ALLOCATIONS {
        for order in [Order::Nhd, Order::Hnd] {
            for padding in [
                Padding::default(),
                Padding {
                    row: 2,
                    page: 32,
                    start: 64,
                },
            ] {
                found.push(Launch {
                    tp: 2,
                    pp: Stages::Layers(vec![2, 4]),
                    page_size: 4,
                    pool_pages: 5,
                    slots: 3,
                    allocation,
                    order,
                    padding,
                    ..Launch::default()
                });
            }
        }
    }
    found
}

/// Every byte of every row of a rank, by enumeration.
fn bytes_of(envelope: &Envelope, rank: usize) -> Result<BTreeMap<(u16, u64), u16>, (u16, u64)> {
    let mut owner = BTreeMap::new();
    for placement in &envelope.ranks[rank].placements {
        let component = &envelope.components[usize::from(placement.component)];
        let group = &envelope.page_groups[usize::from(component.page_group)];
        let tokens = if component.unit == Unit::Token {
            group.page_size
        } else {
            1
        };
        for (l, _) in placement.layers.iter().enumerate() {
            for (p, part) in placement.parts.iter().enumerate() {
                for page in 0..u64::from(group.pool_pages) {
                    for token in 0..u64::from(tokens) {
                        for head in 0..u64::from(placement.heads.count) {
                            let s = placement.strides;
                            let row = placement.offset
                                + page * s.page
                                + token * s.token
                                + head * s.head
                                + p as u64 * s.part
                                + l as u64 * s.layer;
                            for byte in row..row + component.row_bytes(*part) {
                                if owner
                                    .insert((placement.region, byte), placement.component)
                                    .is_some()
                                {
                                    return Err((placement.region, byte));
                                }
                            }
                        }
                    }
                }
            }
        }
    }
    Ok(owner)
}

#[test]
fn every_arrangement_is_disjoint_and_fills_its_regions() {
    for launch in launches() {
        let envelope = launch.envelope(&small_hybrid()).unwrap();
        for rank in 0..envelope.ranks.len() {
            let bytes =
                bytes_of(&envelope, rank).unwrap_or_else(|at| panic!("{launch:?}: overlap at {at:?}"));
            let mut ends: BTreeMap<u16, u64> = BTreeMap::new();
            for (region, byte) in bytes.keys() {
                let end = ends.entry(*region).or_default();
                *end = (*end).max(byte + 1);
            }
            assert_eq!(
                envelope.region_bytes(u32::try_from(rank).unwrap()),
                ends,
                "{launch:?}"
            );
            let rows: u64 = bytes.len() as u64;
            let expected: u64 = envelope.ranks[rank]
                .placements
                .iter()
                .map(|p| {
                    let component = &envelope.components[usize::from(p.component)];
                    let group = &envelope.page_groups[usize::from(component.page_group)];
                    let tokens = if component.unit == Unit::Token {
                        group.page_size
                    } else {
                        1
                    };
                    let row: u64 = p.parts.iter().map(|part| component.row_bytes(*part)).sum();
                    row * p.layers.len() as u64 * u64::from(p.heads.count * tokens * group.pool_pages)
                })
                .sum();
            assert_eq!(rows, expected);
        }
    }
}

#[test]
fn a_moved_placement_is_refused_whenever_enumeration_finds_an_overlap() {
    let mut overlaps = 0;
    for launch in launches() {
        let sound = launch.envelope(&small_hybrid()).unwrap();
        for index in 0..sound.ranks[1].placements.len() {
            for shift in [1u64, 8, 40, 96] {
                for axis in 0..6 {
                    let mut envelope = sound.clone();
                    let placement = &mut envelope.ranks[1].placements[index];
                    let field = match axis {
                        0 => &mut placement.strides.page,
                        1 => &mut placement.strides.token,
                        2 => &mut placement.strides.head,
                        3 => &mut placement.strides.part,
                        4 => &mut placement.strides.layer,
                        _ => &mut placement.offset,
                    };
                    *field = field.saturating_sub(shift);
                    if bytes_of(&envelope, 1).is_err() {
                        overlaps += 1;
                        let invalid = envelope.validate().expect_err("an overlap that validate missed");
                        assert!(
                            invalid
                                .faults
                                .iter()
                                .any(|fault| fault.code == Code::PlacementOverlap)
                        );
                    }
                }
            }
        }
    }
    assert!(overlaps > 1000, "only {overlaps} overlaps were made");
}

#[test]
fn groups_of_a_shared_pool_lie_over_each_other_and_others_may_not() {
    let model = ModelShape::new("hybrid", 4)
        .kv([0, 2], 2, 8)
        .window([1, 3], 2, 8, 16);
    for allocation in [Allocation::LayerPages, Allocation::PackedRows] {
        let launch = Launch {
            allocation,
            shared_pool: true,
            ..Launch::default()
        };
        let shared = launch.envelope(&model).unwrap();
        assert_eq!(
            shared.region_bytes(0).len(),
            2,
            "two layers of each group share two regions"
        );
        assert_eq!(shared.page_groups[1].pool, 0);

        let mut apart = shared.clone();
        apart.page_groups[1].pool = 1;
        let invalid = apart.validate().unwrap_err();
        assert!(
            invalid
                .faults
                .iter()
                .all(|fault| fault.code == Code::PlacementOverlap)
        );

        // Page k of one group must be page k of the other: shifted by a page, ids mean other bytes.
        let mut shifted = shared.clone();
        let placement = &mut shifted.ranks[0].placements[0];
        placement.offset += placement.strides.page;
        assert!(shifted.validate().is_err());

        let mut sizes = shared;
        sizes.page_groups[1].pool_pages += 1;
        assert!(sizes.validate().unwrap_err().to_string().contains("pool_pages"));
    }
    let launch = Launch {
        shared_pool: true,
        ..Launch::default()
    };
    assert_eq!(
        launch.envelope(&model),
        Err(LaunchError::SharedPool {
            allocation: "layer_part"
        })
    );
}

#[test]
fn heads_are_split_and_replicated_and_ranks_run_over_tp_first() {
    let model = ModelShape::new("m", 4).kv(0..4, 8, 16);
    let launch = Launch {
        tp: 16,
        pp: Stages::Even(2),
        ..Launch::default()
    };
    let envelope = launch.envelope(&model).unwrap();
    assert_eq!(envelope.ranks.len(), 32);
    let held = |rank: usize| {
        let p = &envelope.ranks[rank].placements[0];
        (p.layers[0], p.heads.first, p.heads.count)
    };
    assert_eq!(held(0), (0, 0, 1));
    assert_eq!(held(1), (0, 0, 1));
    assert_eq!(held(2), (0, 1, 1));
    assert_eq!(held(31), (2, 7, 1));

    let three = Launch {
        tp: 3,
        ..Launch::default()
    };
    assert!(matches!(
        three.envelope(&model),
        Err(LaunchError::Heads {
            heads: 8,
            ranks: 3,
            ..
        })
    ));
    let stages = Launch {
        pp: Stages::Layers(vec![2, 1]),
        ..Launch::default()
    };
    assert_eq!(
        stages.envelope(&model),
        Err(LaunchError::Layers { stages: 3, layers: 4 })
    );
    let dcp = Launch {
        tp: 4,
        dcp: Dcp {
            size: 3,
            interleave: 1,
        },
        ..Launch::default()
    };
    assert_eq!(dcp.envelope(&model), Err(LaunchError::Dcp { dcp: 3, tp: 4 }));
}

#[test]
fn prefill_context_parallel_ranks_hold_the_same() {
    let model = ModelShape::new("m", 4).kv(0..4, 8, 16);
    let launch = Launch {
        tp: 2,
        prefill_cp: 3,
        pp: Stages::Even(2),
        ..Launch::default()
    };
    let envelope = launch.envelope(&model).unwrap();
    assert_eq!(envelope.ranks.len(), 12);
    assert_eq!(envelope.ranks[0].placements, envelope.ranks[4].placements);
    assert_eq!(envelope.ranks[1].placements, envelope.ranks[5].placements);
    assert_ne!(envelope.ranks[0].placements, envelope.ranks[1].placements);
    assert_ne!(envelope.ranks[0].placements, envelope.ranks[6].placements);
}

#[test]
fn dcp_ranks_of_a_group_own_the_same_heads() {
    let model = ModelShape::new("m", 2).kv(0..2, 8, 16);
    for tp in [2, 8, 16] {
        let launch = Launch {
            tp,
            dcp: Dcp {
                size: 2,
                interleave: 4,
            },
            ..Launch::default()
        };
        let envelope = launch.envelope(&model).unwrap();
        let held: HashSet<(u32, u32)> = envelope
            .ranks
            .iter()
            .flat_map(|rank| {
                let heads = rank.placements[0].heads;
                (heads.first..heads.end()).map(|head| (rank.dcp_rank, head))
            })
            .collect();
        assert_eq!(held.len(), 16, "every head on both DCP ranks at TP {tp}");
    }
}

fn random_launch() -> impl Strategy<Value = (Launch, ModelShape)> {
    let padding =
        prop_oneof![8 => Just(0u64), 4 => Just(1), 4 => Just(64), 1 => Just(u64::MAX), 8 => 0..4096u64];
    // Mostly sizes that divide one another; some that do not.
    let powers = || prop_oneof![Just(1u32), Just(2), Just(4)];
    let heads = prop_oneof![4 => powers(), 1 => 1u32..5];
    let tp = prop_oneof![4 => powers(), 1 => 1u32..9];
    let dcp = prop_oneof![4 => Just(1u32), 4 => Just(2), 1 => 1u32..5];
    let shape = (1u32..9, heads, 1u32..20, 1u32..20, 0u32..3);
    let sizes = (tp, 1u32..4, 1u32..3, dcp, 1u32..40, 1u32..50);
    let placed = (
        0usize..6,
        any::<bool>(),
        prop::bool::weighted(0.2),
        padding.clone(),
        padding,
    );
    (shape, sizes, placed).prop_map(
        |(
            (layers, heads, k, v, drafts),
            (tp, pp, cp, dcp, page_size, pool_pages),
            (at, hnd, shared_pool, row, page),
        )| {
            let model = ModelShape::new("m", layers)
                .kv_widths(0..layers, heads, k, v)
                .window(0..layers, heads, k, 7)
                .state("state", 0..layers, &[("x", heads, k), ("b", 1, v)], Element::Fp32)
                .draft(drafts, heads, v);
            let launch = Launch {
                tp,
                pp: Stages::Even(pp),
                prefill_cp: cp,
                dcp: Dcp {
                    size: dcp,
                    interleave: 1,
                },
                page_size,
                pool_pages,
                allocation: ALLOCATIONS[at],
                order: if hnd { Order::Hnd } else { Order::Nhd },
                padding: Padding {
                    row,
                    page,
                    start: row,
                },
                shared_pool,
                ..Launch::default()
            };
            (launch, model)
        },
    )
}

#[test]
fn whatever_is_launched_is_valid_compatible_with_itself_and_survives_its_file() {
    const DRAWS: u32 = 2000;
    let mut runner = TestRunner::new(ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases(DRAWS)
    });
    let launched = Cell::new(0);
    let checked = runner.run(&random_launch(), |(launch, model)| {
        let Ok(envelope) = launch.envelope(&model) else {
            return Ok(());
        };
        launched.set(launched.get() + 1);
        prop_assert_eq!(envelope.validate(), Ok(()));
        let mut single = envelope.clone();
        single.identity.prefill_context_parallel = 1;
        let verdict = compare(&single, &single, Policy::Strict);
        prop_assert!(verdict.allows() && verdict.warnings.is_empty(), "{}", verdict);
        prop_assert_eq!(&Envelope::from_toml(&envelope.to_toml()).unwrap(), &envelope);
        prop_assert_eq!(
            &Envelope::from_bytes(&envelope.to_bytes().unwrap()).unwrap(),
            &envelope
        );
        Ok(())
    });
    checked.unwrap();
    assert!(
        launched.get() > DRAWS / 6,
        "{} of {DRAWS} draws can be launched",
        launched.get()
    );
}
