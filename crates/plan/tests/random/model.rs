//! Random models, and how the two sides split their tokens and cut their pages.

use kvferry_handshake::{Component, Dcp, Element, Kind, Part, Scales, Unit};

use super::draw::Draw;

pub(crate) const PAGE_SIZES: [u32; 10] = [1, 2, 3, 4, 8, 12, 16, 32, 64, 128];

/// What both sides agree on.
pub(crate) struct Model {
    pub(crate) components: Vec<Component>,
    /// By component. The sides may differ where rows are tokens.
    page_size: Vec<u32>,
}

/// How one side splits tokens and cuts pages, by component of the model.
pub(crate) struct Cut {
    pub(crate) dcp: Vec<Dcp>,
    pub(crate) page_size: Vec<u32>,
}

/// The ranks of one side.
pub(crate) struct Launch {
    pub(crate) tp: u32,
    pub(crate) pp: u32,
    pub(crate) dcp: u32,
}

impl Model {
    pub(crate) fn draw(draw: &mut Draw) -> Model {
        let mut model = Model {
            components: Vec::new(),
            page_size: Vec::new(),
        };
        for number in 0..draw.pick(&[1, 1, 1, 2, 3]) {
            let component = component(draw, number);
            model.page_size.push(match component.unit {
                Unit::Slot => 1,
                Unit::Token | Unit::Page => draw.pick(&PAGE_SIZES),
            });
            model.components.push(component);
        }
        draw.saw("components", model.components.len());
        model
    }

    /// Whether some pages move whole.
    pub(crate) fn whole_pages(&self) -> bool {
        self.components
            .iter()
            .any(|component| component.unit == Unit::Page)
    }
}

fn component(draw: &mut Draw, number: u32) -> Component {
    let kind = draw.pick(&[
        Kind::Kv,
        Kind::Kv,
        Kind::Kv,
        Kind::Latent,
        Kind::Latent,
        Kind::Window,
        Kind::Indexer,
        Kind::Scales,
        Kind::State,
    ]);
    draw.saw("kind", kind);
    let (layers, first, gap) = (draw.between(1, 5), draw.between(0, 3), draw.between(1, 2));
    let heads = draw.between(1, 16);
    let parts: &[(&str, u32)] = match kind {
        Kind::Kv | Kind::Window => &[("k", heads), ("v", heads)],
        Kind::Latent => &[("latent", 1)],
        Kind::Indexer => &[("a", heads), ("b", heads), ("c", heads)],
        Kind::Scales => &[("scale", heads)],
        Kind::State => &[("x", heads), ("b", heads.div_ceil(2)), ("c", 1)],
    };
    if kind != Kind::Latent {
        draw.saw("heads", heads);
    }
    let widths = [draw.between(1, 4), draw.between(1, 4), draw.between(1, 4)];
    let equal = draw.once_in(2);
    if kind == Kind::Kv {
        draw.saw(
            "k and v",
            if equal || widths[0] == widths[1] {
                "equal"
            } else {
                "unequal"
            },
        );
    }
    Component {
        name: format!("component{number}"),
        kind,
        page_group: 0,
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
        element: draw.pick(&[Element::Int8, Element::Int8, Element::Bf16]),
        scales: Scales::None,
        unit: match kind {
            Kind::Scales => Unit::Page,
            Kind::State => Unit::Slot,
            _ => Unit::Token,
        },
        opaque: None,
        window: (kind == Kind::Window).then(|| draw.between(1, 100)),
        dcp: Dcp::NONE,
    }
}

/// Ranks of both sides, and how they split tokens.
pub(crate) fn launches(draw: &mut Draw, model: &Model) -> ([Launch; 2], [Cut; 2]) {
    let tp = [draw.between(1, 16), draw.between(1, 16)];
    draw.saw("prefill TP", tp[0]);
    draw.saw("decode TP", tp[1]);
    let divisors = |n: u32| -> Vec<u32> { (1..=n).filter(|d| n.is_multiple_of(*d)).collect() };
    let (of_prefill, of_decode) = (divisors(tp[0]), divisors(tp[1]));
    let (dcp, alike) = match draw.below(if model.whole_pages() { 3 } else { 6 }) {
        0 | 3 => ([1, 1], true),
        1 | 2 => {
            let common: Vec<u32> = of_prefill.into_iter().filter(|n| of_decode.contains(n)).collect();
            let n = draw.pick(&common);
            ([n, n], true)
        }
        4 => ([1, draw.pick(&of_decode)], false),
        _ => ([draw.pick(&of_prefill), draw.pick(&of_decode)], false),
    };
    draw.saw(
        "dcp",
        match dcp {
            [1, 1] => "1 -> 1",
            [1, _] => "1 -> N",
            [_, 1] => "N -> 1",
            [n, m] if n == m && alike => "N -> N",
            [n, m] if n == m => "N -> N, interleaves drawn apart",
            _ => "N -> M",
        },
    );
    let prefill = cut(draw, model, dcp[0], None);
    let decode = cut(draw, model, dcp[1], alike.then_some(&prefill));
    let launch = |draw: &mut Draw, side: usize| Launch {
        tp: tp[side],
        pp: draw.pick(&[1, 1, 1, 2, 3]),
        dcp: dcp[side],
    };
    let launches = [launch(draw, 0), launch(draw, 1)];
    draw.saw("prefill PP", launches[0].pp);
    draw.saw("decode PP", launches[1].pp);
    (launches, [prefill, decode])
}

/// A random split of each component's tokens that fits its pages; `like` the other side's where given.
fn cut(draw: &mut Draw, model: &Model, dcp: u32, like: Option<&Cut>) -> Cut {
    let mut cut = Cut {
        dcp: Vec::new(),
        page_size: Vec::new(),
    };
    for (at, (component, page)) in model.components.iter().zip(&model.page_size).enumerate() {
        let other = draw.pick(&PAGE_SIZES);
        let mut page = match component.unit {
            Unit::Token => draw.pick(&[*page, *page, *page, other]),
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
                let interleave = draw.pick(&divisors);
                draw.saw("interleave", interleave);
                Dcp {
                    size: dcp,
                    interleave,
                }
            }
        };
        if component.unit != Unit::Slot {
            draw.saw("page size", page);
            if let Some(like) = like {
                draw.saw(
                    "pages",
                    if like.page_size[at] == page {
                        "equal"
                    } else {
                        "unequal"
                    },
                );
            }
        }
        cut.dcp.push(split);
        cut.page_size.push(page);
    }
    cut
}
