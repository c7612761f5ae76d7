//! Small engines whose pages are easy to tell: page-major, keys and values in a region each.

use kvferry_handshake::{
    Component, Dcp, Element, Envelope, HeadSpan, Identity, Kind, PageGroup, Part, Placement, Rank, Role,
    Scales, Strides, Unit,
};

/// Heads over all ranks.
pub(crate) const HEADS: u32 = 4;
/// Layers.
pub(crate) const LAYERS: u32 = 2;
/// Tokens a page.
pub(crate) const PAGE: u32 = 4;
/// Pages of each rank.
pub(crate) const POOL: u32 = 48;
/// Bytes of one head of one token in one layer and part.
pub(crate) const ROW: u64 = 4;

/// An engine of `tp` ranks.
pub(crate) fn envelope(engine: &str, role: Role, tp: u32, incarnation: u64) -> Envelope {
    let heads = HEADS / tp;
    let placement = |rank: u32, part: u16| {
        let token = u64::from(heads) * ROW;
        let layer = token * u64::from(PAGE);
        Placement {
            component: 0,
            layers: (0..LAYERS).collect(),
            parts: vec![part],
            heads: HeadSpan {
                first: rank * heads,
                count: heads,
            },
            region: part,
            offset: 0,
            strides: Strides {
                page: layer * u64::from(LAYERS),
                token,
                head: ROW,
                part: 0,
                layer,
            },
        }
    };
    Envelope {
        identity: Identity {
            engine: engine.to_owned(),
            role,
            incarnation,
            model: "small".to_owned(),
            revision: None,
            weights_digest: None,
            config_digest: None,
            framework: "simulated".to_owned(),
            framework_version: "1".to_owned(),
            prefill_context_parallel: 1,
        },
        page_groups: vec![PageGroup {
            name: "main".to_owned(),
            page_size: PAGE,
            pool_pages: POOL,
            pool: 0,
        }],
        components: vec![Component {
            name: "kv".to_owned(),
            kind: Kind::Kv,
            page_group: 0,
            layers: (0..LAYERS).collect(),
            parts: ["k", "v"]
                .map(|name| Part {
                    name: name.to_owned(),
                    heads: HEADS,
                    width: 2,
                })
                .to_vec(),
            element: Element::Bf16,
            scales: Scales::None,
            unit: Unit::Token,
            opaque: None,
            window: None,
            dcp: Dcp::NONE,
        }],
        ranks: (0..tp)
            .map(|rank| Rank {
                rank,
                dcp_rank: 0,
                placements: vec![placement(rank, 0), placement(rank, 1)],
            })
            .collect(),
    }
}

/// The same with recurrent state: one slot list more, a group of its own.
pub(crate) fn with_state(mut envelope: Envelope) -> Envelope {
    envelope.page_groups.push(PageGroup {
        name: "slots".to_owned(),
        page_size: 1,
        pool_pages: POOL,
        pool: 1,
    });
    let tp = u32::try_from(envelope.ranks.len()).unwrap();
    envelope.components.push(Component {
        name: "state".to_owned(),
        kind: Kind::State,
        page_group: 1,
        layers: vec![LAYERS],
        parts: vec![Part {
            name: "s".to_owned(),
            heads: HEADS,
            width: 8,
        }],
        element: Element::Bf16,
        scales: Scales::None,
        unit: Unit::Slot,
        opaque: None,
        window: None,
        dcp: Dcp::NONE,
    });
    let heads = HEADS / tp;
    for rank in &mut envelope.ranks {
        rank.placements.push(Placement {
            component: 1,
            layers: vec![LAYERS],
            parts: vec![0],
            heads: HeadSpan {
                first: rank.rank * heads,
                count: heads,
            },
            region: 2,
            offset: 0,
            strides: Strides {
                page: u64::from(heads) * 16,
                token: 0,
                head: 16,
                part: 0,
                layer: 0,
            },
        });
    }
    envelope
}

/// The same with a sliding window of four tokens beside it, in a group of its own.
pub(crate) fn with_window(mut envelope: Envelope) -> Envelope {
    envelope.page_groups.push(PageGroup {
        name: "window".to_owned(),
        page_size: PAGE,
        pool_pages: POOL,
        pool: 1,
    });
    let mut component = envelope.components[0].clone();
    component.name = "window".to_owned();
    component.kind = Kind::Window;
    component.window = Some(4);
    component.page_group = 1;
    component.layers = vec![LAYERS, LAYERS + 1];
    envelope.components.push(component);
    for rank in &mut envelope.ranks {
        for mut placement in rank.placements.clone() {
            placement.component = 1;
            placement.layers = vec![LAYERS, LAYERS + 1];
            placement.region += 2;
            rank.placements.push(placement);
        }
    }
    envelope
}

/// The same with all pages of a layer together, as most engines have it: layers move one by one.
pub(crate) fn layers_apart(mut envelope: Envelope) -> Envelope {
    for placement in envelope.ranks.iter_mut().flat_map(|rank| &mut rank.placements) {
        placement.strides.page = placement.strides.layer;
        placement.strides.layer = placement.strides.page * u64::from(POOL);
    }
    envelope
}

/// Bytes of a page of a rank in the regions for keys and values.
pub(crate) fn page_bytes(tp: u32) -> u64 {
    u64::from(HEADS / tp) * ROW * u64::from(PAGE) * u64::from(LAYERS)
}
