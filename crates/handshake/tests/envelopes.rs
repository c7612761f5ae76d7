//! Envelopes by themselves: what the builder makes is valid and disjoint, and every fault is found.

#![allow(clippy::unwrap_used)] // a panic here is a failed test
use std::collections::{BTreeMap, HashSet};

use kvferry_handshake::{
    Allocation, Cached, Code, Dcp, Element, Envelope, Kind, Launch, LaunchError, ModelShape, Order, Padding,
    Scales, Stages, Unit,
};

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
    assert_eq!(launch.envelope(&model), Err(LaunchError::SharedPool));
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

fn llama() -> Envelope {
    let launch = Launch {
        tp: 2,
        ..Launch::default()
    };
    launch
        .envelope(&ModelShape::new("llama", 4).kv(0..4, 8, 128))
        .unwrap()
}

/// One change of a sound envelope, and the field that must be named.
#[test]
fn each_broken_field_is_named() {
    type Break = fn(&mut Envelope);
    let cases: &[(&str, Break)] = &[
        ("engine", |e| e.identity.engine = String::new()),
        ("engine", |e| e.identity.engine = "a/b".to_owned()),
        ("engine", |e| e.identity.engine = "x".repeat(257)),
        ("framework", |e| e.identity.framework = "v llm".to_owned()),
        ("framework_version", |e| {
            e.identity.framework_version = "a\nb".to_owned()
        }),
        ("model", |e| e.identity.model = String::new()),
        ("model", |e| e.identity.model = "x".repeat(1025)),
        ("revision", |e| e.identity.revision = Some(String::new())),
        ("weights_digest", |e| {
            e.identity.weights_digest = Some("\u{7}".to_owned())
        }),
        ("prefill_context_parallel", |e| {
            e.identity.prefill_context_parallel = 0
        }),
        ("page_groups", |e| e.page_groups.clear()),
        ("components", |e| e.components = vec![e.components[0].clone(); 65]),
        ("ranks", |e| e.ranks = vec![e.ranks[0].clone(); 1025]),
        ("ranks", |e| e.ranks.clear()),
        ("page_group.pages.page_size", |e| e.page_groups[0].page_size = 0),
        ("page_group.pages.pool_pages", |e| e.page_groups[0].pool_pages = 0),
        ("page_group.pages.pool", |e| e.page_groups[0].pool = 3),
        ("page_group.pages.name", |e| {
            e.page_groups.push(e.page_groups[0].clone())
        }),
        ("page_group.other", |e| {
            let mut other = e.page_groups[0].clone();
            other.name = "other".to_owned();
            other.pool = 1;
            e.page_groups.push(other);
        }),
        ("component.kv.name", |e| {
            e.components.push(e.components[0].clone())
        }),
        ("component.kv.page_group", |e| e.components[0].page_group = 1),
        ("component.kv.layers", |e| e.components[0].layers.clear()),
        ("component.kv.layers", |e| {
            e.components[0].layers = vec![0, 0, 1, 2, 3]
        }),
        ("component.kv.layers", |e| {
            e.components[0].layers = vec![0, 1, 2, 3, 4096]
        }),
        ("component.kv.parts", |e| e.components[0].parts.clear()),
        ("component.kv.part.k.name", |e| {
            e.components[0].parts[1].name = "k".to_owned()
        }),
        ("component.kv.part.k.heads", |e| {
            e.components[0].parts[0].heads = 0
        }),
        ("component.kv.part.k.width", |e| {
            e.components[0].parts[0].width = 0
        }),
        ("component.kv.part.v.width", |e| {
            e.components[0].element = Element::Fp4E2m1;
            e.components[0].parts[1].width = 127;
        }),
        ("component.kv.part.k.heads", |e| {
            e.components[0].kind = Kind::Latent
        }),
        ("component.kv.unit", |e| e.components[0].unit = Unit::Slot),
        ("component.kv.unit", |e| e.components[0].kind = Kind::State),
        ("component.kv.window", |e| e.components[0].kind = Kind::Window),
        ("component.kv.window", |e| e.components[0].window = Some(5)),
        ("component.kv.opaque", |e| {
            e.components[0].opaque = Some("amx".to_owned())
        }),
        ("component.kv.scales", |e| {
            e.components[0].scales = Scales::Component("none".to_owned())
        }),
        ("component.kv.scales", |e| {
            e.components[0].scales = Scales::Component("kv".to_owned())
        }),
        ("component.kv.dcp.size", |e| e.components[0].dcp.size = 0),
        ("component.kv.dcp.interleave", |e| {
            e.components[0].dcp.interleave = 0
        }),
        ("component.kv.dcp.interleave", |e| {
            e.components[0].dcp = Dcp {
                size: 2,
                interleave: 3,
            }
        }),
        ("rank.1.rank", |e| e.ranks[1].rank = 0),
        ("rank.1.dcp_rank", |e| e.ranks[1].dcp_rank = 1),
        ("rank.1.dcp_rank", |e| {
            e.components[0].dcp.size = 2;
            e.ranks[1].dcp_rank = 2;
        }),
        ("rank.0.placement.3.component", |e| {
            e.ranks[0].placements[3].component = 1
        }),
        ("rank.0.placement.3.layers", |e| {
            e.ranks[0].placements[3].layers.clear()
        }),
        ("rank.0.placement.3.layers", |e| {
            e.ranks[0].placements[3].layers = vec![4]
        }),
        ("rank.0.placement.3.layers", |e| {
            e.ranks[0].placements[3].layers = vec![1, 1]
        }),
        ("rank.0.placement.3.parts", |e| {
            e.ranks[0].placements[3].parts.clear()
        }),
        ("rank.0.placement.3.parts", |e| {
            e.ranks[0].placements[3].parts = vec![2]
        }),
        ("rank.0.placement.3.parts", |e| {
            e.ranks[0].placements[3].parts = vec![1, 1]
        }),
        ("rank.0.placement.3.heads", |e| {
            e.ranks[0].placements[3].heads.count = 0
        }),
        ("rank.0.placement.3.heads", |e| {
            e.ranks[0].placements[3].heads.first = u32::MAX
        }),
        ("rank.0.placement.3.heads", |e| {
            e.ranks[0].placements[3].heads.first = 5
        }),
        ("rank.0.placement.3", |e| {
            e.ranks[0].placements[3].layers = vec![0]
        }),
        ("rank.0.placement.3.offset", |e| {
            e.ranks[0].placements[3].offset = u64::MAX
        }),
        ("rank.0.placement.3", |e| {
            e.ranks[0].placements[3].offset = (1 << 63) - 1
        }),
        ("rank.0.placement.3.strides.page", |e| {
            e.ranks[0].placements[3].strides.page = u64::MAX
        }),
        ("rank.0.placement.3", |e| {
            e.ranks[0].placements[3].strides.page = 1 << 60
        }),
        ("rank.0.placement.3.strides.page", |e| {
            e.ranks[0].placements[3].strides.page -= 1
        }),
        ("rank.0.placement.3.strides.token", |e| {
            e.ranks[0].placements[3].strides.token -= 1
        }),
        ("rank.0.placement.3.strides.head", |e| {
            e.ranks[0].placements[3].strides.head = 0
        }),
        ("rank.0.placement.2", |e| e.ranks[0].placements[3].region = 2),
        ("rank", |e| {
            let many = e.ranks[0].placements[0].clone();
            e.ranks[0].placements = vec![many; 131_073];
        }),
        ("rank", |e| {
            e.ranks[0].placements[0].layers = vec![0; 2_097_153];
        }),
    ];
    assert_eq!(llama().validate(), Ok(()));
    for (at, (field, break_it)) in cases.iter().enumerate() {
        let mut envelope = llama();
        break_it(&mut envelope);
        let invalid = envelope
            .validate()
            .expect_err(&format!("case {at}: {field} passed"));
        let named = invalid.faults.iter().any(|fault| fault.field == *field);
        assert!(named, "case {at}: {field} is not among {invalid}");
    }
}

#[test]
fn every_fault_is_reported_at_once_and_the_list_is_bounded() {
    let mut envelope = llama();
    envelope.identity.engine = String::new();
    envelope.page_groups[0].page_size = 0;
    envelope.components[0].dcp.size = 0;
    assert_eq!(envelope.validate().unwrap_err().faults.len(), 3);

    let mut envelope = llama();
    for rank in &mut envelope.ranks {
        rank.placements = vec![rank.placements[0].clone(); 1000];
    }
    let invalid = envelope.validate().unwrap_err();
    assert_eq!(invalid.faults.len(), 100);
    assert!(invalid.more > 1000);
    assert!(invalid.to_string().ends_with("more"));
}

#[test]
fn page_lists_hold_one_split_and_slots_stand_alone() {
    let model = ModelShape::new("m", 2).kv(0..2, 2, 8).draft(1, 2, 8);
    let launch = Launch {
        tp: 2,
        ..Launch::default()
    };
    let mut envelope = launch.envelope(&model).unwrap();
    envelope.components[1].dcp = Dcp {
        size: 2,
        interleave: 1,
    };
    assert!(
        envelope
            .validate()
            .unwrap_err()
            .to_string()
            .contains("component.draft.dcp")
    );

    let model = ModelShape::new("m", 2)
        .kv([0], 2, 8)
        .state("state", [1], &[("x", 2, 8)], Element::Fp32);
    let sound = launch.envelope(&model).unwrap();
    let mut envelope = sound.clone();
    envelope.page_groups[1].page_size = 2;
    assert!(
        envelope
            .validate()
            .unwrap_err()
            .to_string()
            .contains("page_group.slots.page_size")
    );
    let mut envelope = sound.clone();
    envelope.components[1].dcp.size = 2;
    assert!(
        envelope
            .validate()
            .unwrap_err()
            .to_string()
            .contains("component.state.dcp.size")
    );
    let mut envelope = sound;
    envelope.components[1].page_group = 0;
    envelope.page_groups.truncate(1);
    assert!(
        envelope
            .validate()
            .unwrap_err()
            .to_string()
            .contains("component.state.page_group")
    );
}

#[test]
fn an_unresolved_element_type_is_valid_by_itself() {
    let launch = Launch {
        element: Element::Auto,
        ..Launch::default()
    };
    let envelope = launch.envelope(&ModelShape::new("m", 2).kv(0..2, 2, 8)).unwrap();
    assert_eq!(envelope.region_bytes(0).values().copied().max(), Some(0));
    assert!(envelope.region_bytes(7).is_empty());
}
