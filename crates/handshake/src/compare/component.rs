//! Component by component, matched by name.

use std::collections::BTreeSet;

use super::{Difference, Differences, Gravity};
use crate::catalogue::Code;
use crate::element::Element;
use crate::envelope::{Component, Envelope, Kind, Unit};
use crate::layout::PageOrder;
use crate::spans::spans;

pub(super) fn all(prefill: &Envelope, decode: &Envelope, found: &mut Differences) {
    let names: BTreeSet<&str> = [prefill, decode]
        .iter()
        .flat_map(|side| &side.components)
        .map(|c| c.name.as_str())
        .collect();
    for name in names {
        match (prefill.component(name), decode.component(name)) {
            (Some((at_prefill, p)), Some((at_decode, d))) => {
                let pair = Pair { name, p, d };
                pair.kind(found);
                pair.element(found);
                pair.scales(found);
                pair.parts(found);
                pair.layers([prefill, decode], found);
                pair.opaque(found);
                pair.dcp(found);
                let orders = [
                    PageOrder::of(prefill, at_prefill),
                    PageOrder::of(decode, at_decode),
                ];
                pair.layout(orders, found);
            }
            (one, other) => {
                let said = |side: Option<(u16, &Component)>| {
                    side.map_or("absent".to_owned(), |(_, c)| {
                        format!("{}, layers {}", c.kind, spans(&c.layers))
                    })
                };
                let sides = [prefill, decode];
                let (has, lacks) = if one.is_some() {
                    (one, decode)
                } else {
                    (other, prefill)
                };
                let fix = has.and_then(|(_, component)| fix_for(component, lacks, sides));
                found.add_with(
                    fix,
                    Difference {
                        gravity: Gravity::Refused,
                        code: Code::Components,
                        field: format!("component.{name}"),
                        prefill: said(one),
                        decode: said(other),
                        why: match one {
                            Some(_) => {
                                "the decode side would drop what the prefill side computed, and compute \
                                    without it"
                            }
                            None => "the decode side would read memory that nobody filled",
                        }
                        .to_owned(),
                    },
                );
            }
        }
    }
}

const HYBRID: &str = "One side keeps sliding-window layers apart and the other caches them in full: use the same settings for \
                      hybrid models on both (vLLM --disable-hybrid-kv-cache-manager, SGLang \
                      --disable-hybrid-swa-memory). Where a framework has no such setting for the model, switch it off on the \
                      other side.";

const STATES: &str = "No setting mends this: the two sides keep recurrent state in differently shaped parts, as vLLM and SGLang \
                      do. Run the same framework, of the same release, on both.";

/// What mends a component that one side does not have, where it is not the usual.
fn fix_for(component: &Component, lacks: &Envelope, sides: [&Envelope; 2]) -> Option<&'static str> {
    match component.kind {
        Kind::State if lacks.components.iter().any(|other| other.kind == Kind::State) => Some(STATES),
        Kind::Kv | Kind::Window if hybrid(sides) => Some(HYBRID),
        _ => None,
    }
}

/// Whether one side has layers in a window's component that the other has among its keys and values.
fn hybrid([prefill, decode]: [&Envelope; 2]) -> bool {
    let apart = |windows: &Envelope, full: &Envelope| {
        let windows = windows.components.iter().filter(|c| c.kind == Kind::Window);
        let mut alone = windows.filter(|c| full.component(&c.name).is_none());
        alone.any(|window| {
            let full = full.components.iter().filter(|c| c.kind == Kind::Kv);
            full.into_iter().any(|kv| {
                window
                    .layers
                    .iter()
                    .all(|layer| kv.layers.binary_search(layer).is_ok())
            })
        })
    };
    apart(prefill, decode) || apart(decode, prefill)
}

/// One component on both sides.
struct Pair<'a> {
    name: &'a str,
    p: &'a Component,
    d: &'a Component,
}

impl Pair<'_> {
    fn difference(
        &self,
        gravity: Gravity,
        code: Code,
        key: &str,
        values: [String; 2],
        why: &str,
    ) -> Difference {
        let [prefill, decode] = values;
        Difference {
            gravity,
            code,
            field: format!("component.{}.{key}", self.name),
            prefill,
            decode,
            why: why.to_owned(),
        }
    }

    /// Only rows of single tokens can be put elsewhere; a whole page, or a slot, stays as it is.
    fn by_token(&self) -> Gravity {
        if self.p.unit == Unit::Token && self.d.unit == Unit::Token {
            Gravity::Bridgeable
        } else {
            Gravity::Refused
        }
    }

    fn kind(&self, found: &mut Differences) {
        let (p, d) = (self.p, self.d);
        let window = |c: &Component| {
            c.window
                .map_or("none".to_owned(), |window| format!("{window} tokens"))
        };
        let fields = [
            (
                "kind",
                p.kind.to_string(),
                d.kind.to_string(),
                "one name stands for two different things",
            ),
            (
                "unit",
                p.unit.to_string(),
                d.unit.to_string(),
                "a row belongs to a token on one side and to a whole page or slot on the other",
            ),
            (
                "window",
                window(p),
                window(d),
                "the sides keep different numbers of tokens, and would attend to different ones",
            ),
        ];
        for (key, prefill, decode, why) in fields {
            if prefill != decode {
                found.add(self.difference(
                    Gravity::Refused,
                    Code::ComponentKind,
                    key,
                    [prefill, decode],
                    why,
                ));
            }
        }
    }

    fn element(&self, found: &mut Differences) {
        let (p, d) = (self.p.element, self.d.element);
        let values = [p.to_string(), d.to_string()];
        if p == Element::Auto || d == Element::Auto {
            let why = "`auto` says nothing about the bytes: two engines may resolve it differently";
            found.add(self.difference(Gravity::Refused, Code::ElementUnresolved, "element", values, why));
        } else if p != d {
            let why = match p.bits() == d.bits() {
                true => {
                    "the same bytes would be read as other numbers; Kvferry moves bytes and converts none"
                }
                false => {
                    "elements of other sizes would be read as other numbers; Kvferry moves bytes and \
                          converts none"
                }
            };
            found.add(self.difference(Gravity::Refused, Code::ElementType, "element", values, why));
        }
    }

    fn scales(&self, found: &mut Differences) {
        if self.p.scales != self.d.scales {
            let values = [self.p.scales.to_string(), self.d.scales.to_string()];
            let why = "the decode side would multiply by scales that do not belong to these elements";
            found.add(self.difference(Gravity::Refused, Code::Scales, "scales", values, why));
        }
    }

    /// Parts are matched by name.
    fn parts(&self, found: &mut Differences) {
        let names: BTreeSet<&str> = [self.p, self.d]
            .iter()
            .flat_map(|c| &c.parts)
            .map(|part| part.name.as_str())
            .collect();
        for name in names {
            let [p, d] = [self.p, self.d].map(|c| c.parts.iter().find(|part| part.name == name));
            let alike = matches!((p, d), (Some(p), Some(d)) if p.heads == d.heads && p.width == d.width);
            if alike {
                continue;
            }
            let values = [p, d].map(|part| {
                part.map_or("absent".to_owned(), |part| match part.heads {
                    1 => format!("1 head of {} elements", part.width),
                    heads => format!("{heads} heads of {} elements", part.width),
                })
            });
            let why = "rows of other lengths or counts cannot be put one to one";
            found.add(self.difference(
                Gravity::Refused,
                Code::Parts,
                &format!("part.{name}"),
                values,
                why,
            ));
        }
    }

    fn layers(&self, sides: [&Envelope; 2], found: &mut Differences) {
        if self.p.layers != self.d.layers {
            let values = [spans(&self.p.layers), spans(&self.d.layers)];
            let why = "layers are paired by global id: a layer without its counterpart stays unfilled, or is \
                       filled with another's data";
            let fix = hybrid(sides).then_some(HYBRID);
            found.add_with(
                fix,
                self.difference(Gravity::Refused, Code::Layers, "layers", values, why),
            );
        }
    }

    fn opaque(&self, found: &mut Differences) {
        if self.p.opaque != self.d.opaque {
            let values = [self.p, self.d].map(|c| {
                c.opaque
                    .clone()
                    .unwrap_or("none: described by strides".to_owned())
            });
            let why = "what is inside an opaque page is known only to the kernel that wrote it";
            found.add(self.difference(Gravity::Refused, Code::OpaqueTag, "opaque", values, why));
        }
    }

    /// DCP pairs are N -> N between equal ranks, or 1 -> N for latent components; anything else is bridged.
    fn dcp(&self, found: &mut Differences) {
        let (p, d) = (self.p.dcp, self.d.dcp);
        if p.same(d) || (p.size == 1 && self.latent() && self.by_token() == Gravity::Bridgeable) {
            return;
        }
        let values = [p.to_string(), d.to_string()];
        let (code, why) = if self.by_token() == Gravity::Refused {
            (
                Code::DcpTopology,
                "its pages move whole, and tokens of one page would belong to several ranks",
            )
        } else if p.size == 1 {
            (
                Code::DcpNeedsLatent,
                "splitting the tokens of per-head data over DCP ranks sends every head's rows to other ranks \
                 than TP alone would; only bridging plans that",
            )
        } else {
            (
                Code::DcpTopology,
                "equal ranks hold different tokens on the two sides, so copying rank to rank would put tokens \
                 into wrong places",
            )
        };
        found.add(self.difference(self.by_token(), code, "dcp", values, why));
    }

    /// Whether every rank holds the whole row of a token: a latent, indexer keys, or their scales.
    fn latent(&self) -> bool {
        let one_row = |c: &Component| match c.kind {
            Kind::Latent | Kind::Indexer | Kind::Scales => c.parts.iter().all(|part| part.heads == 1),
            Kind::Kv | Kind::Window | Kind::State => false,
        };
        one_row(self.p) && one_row(self.d)
    }

    fn layout(&self, [p, d]: [PageOrder; 2], found: &mut Differences) {
        if self.by_token() == Gravity::Refused {
            return;
        }
        if let Some(values) = p.differences(&d) {
            let why = "pages hold the same bytes in another order: copied page by page, one token's heads would be \
                       read as another's";
            found.add(self.difference(Gravity::Bridgeable, Code::Layout, "layout", values, why));
        }
    }
}
