//! Random engines: a model both sides share, and for each side ranks and where they keep what.

use kvferry_handshake::{
    Component, Dcp, Element, Envelope, HeadSpan, Identity, Kind, PageGroup, Part, Placement, Rank, Role,
    Scales, Strides, Unit,
};

use super::draw::Draw;

/// What both sides agree on.
pub(crate) struct Model {
    pub(crate) components: Vec<Component>,
    /// Page sizes may differ between the sides, component by component; `Page` components' may not.
    pub(crate) page_size: Vec<u32>,
}

const PAGE_SIZES: [u32; 10] = [1, 2, 3, 4, 8, 12, 16, 32, 64, 128];

pub(crate) fn model(draw: &mut Draw) -> Model {
    let count = draw.pick(&[1, 1, 1, 2, 3]);
    let mut components = Vec::new();
    let mut page_size = Vec::new();
    for number in 0..count {
        let kind = draw.pick(&[
            Kind::Kv,
            Kind::Kv,
            Kind::Latent,
            Kind::Latent,
            Kind::Window,
            Kind::Scales,
            Kind::State,
        ]);
        let layers = draw.between(1, 5);
        let first = draw.between(0, 3);
        let gap = draw.between(1, 2);
        let heads = draw.between(1, 16);
        let parts: &[(&str, u32)] = match kind {
            Kind::Kv | Kind::Window => &[("k", heads), ("v", heads)],
            Kind::Latent | Kind::Indexer => &[("latent", 1)],
            Kind::Scales => &[("scale", heads)],
            Kind::State => &[("x", heads), ("b", heads.div_ceil(2)), ("c", 1)],
        };
        let element = draw.pick(&[Element::Int8, Element::Int8, Element::Bf16]);
        let widths = [draw.between(1, 4), draw.between(1, 4), draw.between(1, 4)];
        let equal = draw.once_in(2);
        let unit = match kind {
            Kind::Scales => Unit::Page,
            Kind::State => Unit::Slot,
            _ => Unit::Token,
        };
        components.push(Component {
            name: format!("component{number}"),
            kind,
            page_group: number,
            layers: (0..layers).map(|layer| first + layer * gap).collect(),
            parts: parts
                .iter()
                .zip(widths)
                .map(|((name, heads), width)| Part {
                    name: (*name).to_owned(),
                    heads: *heads,
                    width: if equal { widths[0] } else { width },
                })
                .collect(),
            element,
            scales: Scales::None,
            unit,
            opaque: None,
            window: (kind == Kind::Window).then(|| draw.between(1, 100)),
            dcp: Dcp::NONE,
        });
        page_size.push(if unit == Unit::Slot {
            1
        } else {
            draw.pick(&PAGE_SIZES)
        });
    }
    Model {
        components,
        page_size,
    }
}

/// One side's choices.
pub(crate) struct Launch {
    pub(crate) tp: u32,
    pub(crate) pp: u32,
    pub(crate) dcp: u32,
}

/// How tokens are split and pages cut, of every component.
pub(crate) struct Cut {
    pub(crate) dcp: Vec<Dcp>,
    pub(crate) page_size: Vec<u32>,
}

/// A random split of each component's tokens that fits its pages; `like` the other side's where given.
pub(crate) fn cut(draw: &mut Draw, model: &Model, dcp: u32, like: Option<&Cut>) -> Cut {
    let mut cut = Cut {
        dcp: Vec::new(),
        page_size: Vec::new(),
    };
    for (at, (component, page)) in model.components.iter().zip(&model.page_size).enumerate() {
        let mut page = match component.unit {
            Unit::Token => draw.pick(&[*page, *page, *page, draw_page(*page)]),
            Unit::Page | Unit::Slot => *page,
        };
        let split = match like {
            Some(like) => {
                if !page.is_multiple_of(like.dcp[at].interleave) {
                    page = like.page_size[at];
                }
                like.dcp[at]
            }
            None if component.unit == Unit::Slot || dcp == 1 => Dcp::NONE,
            None => {
                let divisors: Vec<u32> = (1..=page).filter(|g| page.is_multiple_of(*g)).collect();
                Dcp {
                    size: dcp,
                    interleave: draw.pick(&divisors),
                }
            }
        };
        cut.dcp.push(split);
        cut.page_size.push(page);
    }
    cut
}

fn draw_page(page: u32) -> u32 {
    PAGE_SIZES[(page as usize * 7) % PAGE_SIZES.len()]
}

/// An engine of this model.
pub(crate) fn engine(draw: &mut Draw, model: &Model, launch: &Launch, cut: &Cut, pools: &[u32]) -> Envelope {
    let mut components = model.components.clone();
    for (component, dcp) in components.iter_mut().zip(&cut.dcp) {
        component.dcp = *dcp;
    }
    let page_groups: Vec<PageGroup> = (0u16..)
        .zip(&cut.page_size)
        .zip(pools)
        .map(|((number, page), pool)| PageGroup {
            name: format!("group{number}"),
            page_size: *page,
            pool_pages: *pool,
            pool: number,
        })
        .collect();
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
        draw.saw("heads", if heads_apart { "apart" } else { "together" });
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
