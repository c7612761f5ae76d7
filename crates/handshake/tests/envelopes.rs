//! Envelopes by themselves: every fault is found, named, and told at once.

#![allow(clippy::unwrap_used)] // a panic here is a failed test

use kvferry_handshake::{Code, Dcp, Element, Envelope, Kind, Launch, ModelShape, Scales, Unit, limits};

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
        ("page_group", |e| e.page_groups.clear()),
        ("component", |e| e.components = vec![e.components[0].clone(); 65]),
        ("rank", |e| e.ranks = vec![e.ranks[0].clone(); 1025]),
        ("rank", |e| e.ranks.clear()),
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
            e.ranks[0].placements = vec![many; limits::MAX_PLACEMENTS + 1];
        }),
        ("rank", |e| {
            e.ranks[0].placements[0].layers = vec![0; limits::MAX_PLACED + 1];
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
fn a_dcp_rank_out_of_bounds_is_one_fault_of_the_rank() {
    let dcp = Dcp {
        size: 2,
        interleave: 1,
    };
    let launch = Launch {
        tp: 2,
        dcp,
        ..Launch::default()
    };
    let mut envelope = launch.envelope(&ModelShape::new("m", 4).kv(0..4, 2, 8)).unwrap();
    assert!(envelope.ranks[1].placements.len() > 1);
    envelope.ranks[1].dcp_rank = 2;
    let faults = envelope.validate().unwrap_err().faults;
    let fields: Vec<&str> = faults.iter().map(|fault| fault.field.as_str()).collect();
    assert_eq!(fields, ["rank.1.dcp_rank"]);
    assert!(faults[0].message.contains("is 2") && faults[0].message.contains("0 to 1"));
}

/// `layers` layers whose pages lie inside one another, each with a page stride of its own: nothing overlaps, and each
/// look at the outermost tells only one of them from the rest.
fn nested(layers: u32) -> Envelope {
    const ROW: u64 = 32;
    let launch = Launch {
        page_size: 1,
        pool_pages: 2,
        ..Launch::default()
    };
    let model = ModelShape::new("m", layers).latent(0..layers, 16);
    let mut envelope = launch.envelope(&model).unwrap();
    let widest = 4 * ROW * u64::from(layers);
    for (at, placement) in (0u64..).zip(&mut envelope.ranks[0].placements) {
        placement.region = 0;
        placement.offset = at * ROW;
        placement.strides.page = widest - 2 * at * ROW;
    }
    envelope
}

/// The proof takes time by the number of placements, not by its square: an envelope comes from outside.
#[test]
fn strides_that_differ_in_every_placement_are_not_followed_to_the_end() {
    assert_eq!(nested(40).validate(), Ok(()));
    for layers in [400, 4096] {
        let invalid = nested(layers).validate().unwrap_err();
        assert_eq!(invalid.code(), Code::PlacementOverlap, "{layers} layers");
        assert!(
            invalid.to_string().contains("cannot be shown to lie beside"),
            "{invalid}"
        );
    }
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
