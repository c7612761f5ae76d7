//! Names for layouts, made from strides. The strides are the truth; these are for messages and for the
//! comparison's one question: whether tokens and heads come in the same order inside a page.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use crate::envelope::{Component, Envelope, Placement, Unit};
use crate::spans::spans;

/// The order of tokens (N), heads (H) and elements (D) inside one page of one layer and part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Order {
    /// Token, head, element.
    Nhd,
    /// Head, token, element.
    Hnd,
    /// A rank's heads lie in placements of their own.
    HeadsApart,
}

impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Order::Nhd => "NHD",
            Order::Hnd => "HND",
            Order::HeadsApart => "heads apart",
        })
    }
}

/// The orders that a component's ranks use, by part and layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PageOrder {
    parts: BTreeMap<String, BTreeMap<u32, Orders>>,
}

/// The orders of one part of one layer, each with the heads that lie so: first and number.
type Orders = BTreeSet<(Order, u32, u32)>;

impl PageOrder {
    /// The order of component `at`. A layer's part has none where no rank holds more than one token and more
    /// than one head in a page.
    pub(crate) fn of(envelope: &Envelope, at: u16) -> PageOrder {
        let mut parts: BTreeMap<String, BTreeMap<u32, Orders>> = BTreeMap::new();
        let Some(component) = envelope.components.get(usize::from(at)) else {
            return PageOrder { parts };
        };
        let page_size = envelope
            .page_groups
            .get(usize::from(component.page_group))
            .map_or(1, |g| g.page_size);
        if component.unit != Unit::Token || page_size == 1 {
            return PageOrder { parts };
        }
        for rank in &envelope.ranks {
            let mut placed: BTreeSet<(u32, u16)> = BTreeSet::new();
            for placement in rank
                .placements
                .iter()
                .filter(|placement| placement.component == at)
            {
                for part in &placement.parts {
                    let Some(declared) = component.parts.get(usize::from(*part)) else {
                        continue;
                    };
                    for layer in &placement.layers {
                        let again = !placed.insert((*layer, *part));
                        let order = match placement.heads.count {
                            _ if again => Order::HeadsApart,
                            1 => continue,
                            _ if placement.strides.token >= placement.strides.head => Order::Nhd,
                            _ => Order::Hnd,
                        };
                        let layers = parts.entry(declared.name.clone()).or_default();
                        let heads = placement.heads;
                        layers
                            .entry(*layer)
                            .or_default()
                            .insert((order, heads.first, heads.count));
                    }
                }
            }
        }
        PageOrder { parts }
    }

    /// Where tokens and heads do not come in the same order though both sides have one: in words, each
    /// side's. Layers and parts are named unless it is all of them. `None` where they agree.
    pub(crate) fn differences(&self, other: &PageOrder) -> Option<[String; 2]> {
        let mut agree = false;
        let mut found: BTreeMap<[BTreeSet<Order>; 2], Places<'_>> = BTreeMap::new();
        for (part, layers) in &self.parts {
            let mut of_part: BTreeMap<[BTreeSet<Order>; 2], Vec<u32>> = BTreeMap::new();
            for (layer, orders) in layers {
                let Some(others) = other.parts.get(part).and_then(|layers| layers.get(layer)) else {
                    continue;
                };
                let kinds = [orders, others].map(|side| side.iter().map(|(order, ..)| *order).collect());
                let [mine, theirs]: &[BTreeSet<Order>; 2] = &kinds;
                // Several orders in one layer and part are equal only where the same heads lie in each.
                if orders == others || (mine == theirs && mine.len() == 1) {
                    agree = true;
                } else {
                    of_part.entry(kinds).or_default().push(*layer);
                }
            }
            for (orders, layers) in of_part {
                found
                    .entry(orders)
                    .or_default()
                    .entry(layers)
                    .or_default()
                    .push(part);
            }
        }
        let everywhere = !agree && found.len() == 1;
        let mut said = [Vec::new(), Vec::new()];
        for (orders, places) in &found {
            let named = places
                .iter()
                .map(|(layers, parts)| format!("{} of layers {}", parts.join(" and "), spans(layers)))
                .collect::<Vec<_>>()
                .join(", ");
            for (said, orders) in said.iter_mut().zip(orders) {
                said.push(match everywhere {
                    true => names(orders),
                    false => format!("{named}: {}", names(orders)),
                });
            }
        }
        (!found.is_empty()).then(|| said.map(|side| side.join("; ")))
    }
}

/// Parts, by their layers.
type Places<'a> = BTreeMap<Vec<u32>, Vec<&'a str>>;

fn names(orders: &BTreeSet<Order>) -> String {
    match orders.len() {
        1 => orders.iter().map(Order::to_string).collect(),
        _ => {
            let all: Vec<String> = orders.iter().map(Order::to_string).collect();
            format!("{}, by heads", all.join(" and "))
        }
    }
}

impl fmt::Display for PageOrder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let of_part = |layers: &BTreeMap<u32, Orders>| {
            let orders: BTreeSet<&Order> = layers.values().flatten().map(|(order, ..)| order).collect();
            orders
                .iter()
                .map(ToString::to_string)
                .collect::<Vec<_>>()
                .join(" and ")
        };
        let all: Vec<String> = self.parts.values().map(of_part).collect();
        match all.first() {
            None => f.write_str("free"),
            Some(first) if all.iter().all(|other| other == first) => f.write_str(first),
            Some(_) => {
                let named: Vec<String> = self
                    .parts
                    .keys()
                    .zip(&all)
                    .map(|(part, orders)| format!("{part}: {orders}"))
                    .collect();
                f.write_str(&named.join(", "))
            }
        }
    }
}

/// How a component lies in memory, for people: the order inside a page, then the axes from the widest stride to
/// the narrowest, as `NHD [L, 2, B, N, H, D]` with L layer, 2 (or as many as there are) part, B page, N token, H head,
/// D element.
/// `opaque TAG` for an opaque one. Made from its first placement.
pub fn layout_label(envelope: &Envelope, component: u16) -> String {
    let Some(declared) = envelope.components.get(usize::from(component)) else {
        return "unknown".to_owned();
    };
    if let Some(tag) = &declared.opaque {
        return format!("opaque {tag}");
    }
    let first = envelope
        .ranks
        .iter()
        .flat_map(|rank| &rank.placements)
        .find(|p| p.component == component);
    let axes = first.map_or("nowhere".to_owned(), |placement| {
        axes(envelope, declared, placement)
    });
    match PageOrder::of(envelope, component) {
        order if order.parts.is_empty() => axes,
        order => format!("{order} {axes}"),
    }
}

fn axes(envelope: &Envelope, component: &Component, placement: &Placement) -> String {
    let group = envelope.page_groups.get(usize::from(component.page_group));
    let tokens = match component.unit {
        Unit::Token => group.map_or(1, |group| group.page_size) as usize,
        Unit::Page | Unit::Slot => 1,
    };
    let pages = group.map_or(1, |group| group.pool_pages) as usize;
    let strides = placement.strides;
    let parts = placement.parts.len().to_string();
    let mut axes = vec![
        (strides.layer, placement.layers.len(), "L"),
        (strides.part, placement.parts.len(), parts.as_str()),
        (strides.page, pages, "B"),
        (strides.token, tokens, "N"),
        (strides.head, placement.heads.count as usize, "H"),
    ];
    axes.retain(|(_, count, _)| *count > 1);
    axes.sort_by_key(|(stride, _, _)| std::cmp::Reverse(*stride));
    let mut names: Vec<&str> = axes.into_iter().map(|(_, _, name)| name).collect();
    names.push("D");
    format!("[{}]", names.join(", "))
}
