//! Random engines: for each side ranks, and where they keep what.

use kvferry_handshake::{
    Component, Envelope, HeadSpan, Identity, PageGroup, Placement, Rank, Role, Strides, Unit,
};

use super::draw::Draw;
use super::model::{Cut, Launch, Model};

/// An engine of this model, with pools large enough for `tokens` tokens and `slots` slots. Names say what
/// belongs together: components, parts and page groups are in any order.
pub(crate) fn engine(
    draw: &mut Draw,
    model: &Model,
    launch: &Launch,
    cut: &Cut,
    tokens: u64,
    slots: u32,
) -> Envelope {
    let (components, page_groups) = declare(draw, model, cut, tokens, slots);
    let split = components.iter().any(|component| component.dcp.size > 1);
    let mut ranks = Vec::new();
    for stage in 0..launch.pp {
        for tp_rank in 0..launch.tp {
            let mut regions = Regions::default();
            let mut placements = Vec::new();
            for (number, component) in (0u16..).zip(&components) {
                let layers: Vec<u32> = (0u32..)
                    .zip(&component.layers)
                    .filter(|(at, _)| at % launch.pp == stage)
                    .map(|(_, layer)| *layer)
                    .collect();
                let place = Place {
                    number,
                    component,
                    group: &page_groups[usize::from(component.page_group)],
                    layers,
                    tp_rank,
                    tp: launch.tp,
                };
                place.place(draw, &mut regions, &mut placements);
            }
            ranks.push(Rank {
                rank: stage * launch.tp + tp_rank,
                dcp_rank: if split { tp_rank % launch.dcp } else { 0 },
                placements,
            });
        }
    }
    Envelope {
        identity: identity(),
        page_groups,
        components,
        ranks,
    }
}

fn declare(
    draw: &mut Draw,
    model: &Model,
    cut: &Cut,
    tokens: u64,
    slots: u32,
) -> (Vec<Component>, Vec<PageGroup>) {
    let mut order: Vec<usize> = (0..model.components.len()).collect();
    draw.shuffle(&mut order);
    let mut components: Vec<Component> = Vec::new();
    let mut groups: Vec<PageGroup> = Vec::new();
    for at in order {
        let mut component = model.components[at].clone();
        component.dcp = cut.dcp[at];
        draw.shuffle(&mut component.parts);
        let slot = component.unit == Unit::Slot;
        let fits = components.iter().find(|other| {
            let group = &groups[usize::from(other.page_group)];
            other.dcp == component.dcp
                && group.page_size == cut.page_size[at]
                && slot == (other.unit == Unit::Slot)
        });
        component.page_group = match fits {
            Some(other) if draw.once_in(2) => {
                draw.saw("page lists", "shared");
                other.page_group
            }
            _ => groups.len() as u16,
        };
        if usize::from(component.page_group) == groups.len() {
            let page_size = cut.page_size[at];
            let entries = tokens.div_ceil(u64::from(page_size * component.dcp.size)) as u32;
            groups.push(PageGroup {
                name: format!("group{}", groups.len()),
                page_size,
                pool_pages: if slot { slots } else { entries } + draw.between(1, 4),
                pool: component.page_group,
            });
        }
        components.push(component);
    }
    (components, groups)
}

fn identity() -> Identity {
    Identity {
        engine: "e".to_owned(),
        role: Role::Both,
        incarnation: 1,
        model: "m".to_owned(),
        revision: None,
        weights_digest: None,
        config_digest: None,
        framework: "f".to_owned(),
        framework_version: String::new(),
        prefill_context_parallel: 1,
    }
}

#[derive(Default)]
struct Regions {
    /// End of what is placed, by region.
    ends: Vec<u64>,
}

struct Place<'a> {
    number: u16,
    component: &'a Component,
    group: &'a PageGroup,
    layers: Vec<u32>,
    tp_rank: u32,
    tp: u32,
}

impl Place<'_> {
    /// Heads of a part that the rank owns: the ranks of one DCP group own the same.
    fn heads(&self, heads: u32) -> HeadSpan {
        let groups = self.tp / self.component.dcp.size;
        let at = self.tp_rank / self.component.dcp.size;
        let first = at * heads / groups;
        let end = ((at + 1) * heads).div_ceil(groups);
        HeadSpan {
            first,
            count: end - first,
        }
    }

    fn place(&self, draw: &mut Draw, regions: &mut Regions, placements: &mut Vec<Placement>) {
        if self.layers.is_empty() {
            return;
        }
        let mut layers = self.layers.clone();
        if draw.once_in(8) {
            draw.saw("layer order", "permuted");
            draw.shuffle(&mut layers);
        }
        let layers_apart = draw.once_in(3);
        let spans: Vec<HeadSpan> = self
            .component
            .parts
            .iter()
            .map(|part| self.heads(part.heads))
            .collect();
        let parts_apart = draw.once_in(2) || spans.windows(2).any(|pair| pair[0] != pair[1]);
        let heads_apart = draw.once_in(8);
        draw.saw("layers", if layers_apart { "apart" } else { "together" });
        draw.saw("parts", if parts_apart { "apart" } else { "together" });
        draw.saw("heads of a rank", if heads_apart { "apart" } else { "together" });
        let mut parts: Vec<u16> = (0u16..).zip(&spans).map(|(at, _)| at).collect();
        draw.shuffle(&mut parts);
        let order = Order::draw(draw);
        let layer_sets: Vec<&[u32]> = layers
            .chunks(if layers_apart { 1 } else { layers.len() })
            .collect();
        let part_sets: Vec<&[u16]> = parts.chunks(if parts_apart { 1 } else { parts.len() }).collect();
        for layer_set in layer_sets {
            for part_set in &part_sets {
                let span = spans[usize::from(part_set[0])];
                for heads in halves(span, heads_apart) {
                    placements.push(self.one(draw, regions, &order, layer_set, part_set, heads));
                }
            }
        }
    }

    fn one(
        &self,
        draw: &mut Draw,
        regions: &mut Regions,
        order: &Order,
        layers: &[u32],
        parts: &[u16],
        heads: HeadSpan,
    ) -> Placement {
        let row = parts
            .iter()
            .map(|part| self.component.row_bytes(*part))
            .max()
            .unwrap();
        let tokens = match self.component.unit {
            Unit::Token => self.group.page_size,
            Unit::Page | Unit::Slot => 1,
        };
        let counts = [
            u64::from(self.group.pool_pages),
            u64::from(tokens),
            u64::from(heads.count),
            parts.len() as u64,
            layers.len() as u64,
        ];
        let mut strides = [0u64; 5];
        let mut extent = row;
        for (axis, pad) in order.axes.iter().zip(order.pads) {
            strides[*axis] = extent + pad;
            extent += strides[*axis] * (counts[*axis] - 1);
        }
        let region = draw.between(0, 2) as usize;
        while regions.ends.len() <= region {
            let far = draw.once_in(2);
            draw.saw("offset", if far { "beyond 4 GiB" } else { "small" });
            regions.ends.push(if far {
                (5 << 30) + draw.below(1 << 40)
            } else {
                draw.below(64)
            });
        }
        let offset = regions.ends[region] + draw.below(3);
        regions.ends[region] = offset + extent;
        Placement {
            component: self.number,
            layers: layers.to_vec(),
            parts: parts.to_vec(),
            heads,
            region: region as u16,
            offset,
            strides: Strides {
                page: strides[0],
                token: strides[1],
                head: strides[2],
                part: strides[3],
                layer: strides[4],
            },
        }
    }
}

fn halves(span: HeadSpan, apart: bool) -> Vec<HeadSpan> {
    if !apart || span.count < 2 {
        return vec![span];
    }
    let first = HeadSpan {
        first: span.first,
        count: span.count / 2,
    };
    let second = HeadSpan {
        first: first.end(),
        count: span.count - first.count,
    };
    vec![first, second]
}

/// Order of page (0), token (1), head (2), part (3) and layer (4), innermost first, and what is left free.
struct Order {
    axes: [usize; 5],
    pads: [u64; 5],
}

impl Order {
    fn draw(draw: &mut Draw) -> Order {
        let mut axes = match draw.below(6) {
            0 => [2, 1, 0, 3, 4],
            1 => [1, 2, 0, 3, 4],
            2 => [2, 1, 3, 4, 0],
            3 => [3, 2, 1, 0, 4],
            4 => [1, 2, 3, 0, 4],
            _ => {
                draw.saw("axes", "any permutation");
                let mut axes = [0, 1, 2, 3, 4];
                draw.shuffle(&mut axes);
                axes
            }
        };
        let place = |axes: &[usize; 5], axis: usize| axes.iter().position(|at| *at == axis).unwrap();
        let nhd = place(&axes, 2) < place(&axes, 1);
        draw.saw("axes", if nhd { "NHD" } else { "HND" });
        let page_major = place(&axes, 4) < place(&axes, 0);
        draw.saw(
            "axes",
            if page_major {
                "layers in pages"
            } else {
                "pages in layers"
            },
        );
        let mut pads = [0; 5];
        if draw.once_in(3) {
            draw.saw("strides", "padded");
            pads = std::array::from_fn(|_| draw.below(4));
        } else {
            draw.saw("strides", "dense");
        }
        if draw.once_in(64) {
            draw.saw("strides", "huge");
            axes.swap(0, 4);
            pads[4] = 3 << 30;
        }
        Order { axes, pads }
    }
}
