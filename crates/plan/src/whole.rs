//! Whether an engine's ranks together have a place for everything that its own envelope declares.
//!
//! What a decode side declares and no rank of it places would be neither wanted by anybody nor written: the
//! pair would look compatible, and the engine would read memory that nobody filled. A rank left out, one whose
//! placements or `dcp_rank` were forgotten, and a file cut short all come to this.

use std::collections::{BTreeMap, BTreeSet};

use kvferry_handshake::{Code, Component, Dcp, Envelope, Mismatch, Unit};

use crate::mismatch;
use crate::stream::{Both, SOURCE, TARGET};

/// Mismatches that one component's heads or tokens make; a hostile envelope could make very many.
const MOST_NAMED: usize = 16;

/// Numbers without a place, as runs `(first, one past the last)`.
type Runs = Vec<(u32, u32)>;

/// What of one component has no place on any rank of its engine.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Lack {
    /// Layers that no rank places at all.
    layers: BTreeSet<u32>,
    /// Parts that no rank places, by the layers (of those placed) that lack them.
    parts: BTreeMap<BTreeSet<u32>, BTreeSet<u16>>,
    /// DCP ranks that no rank of the engine is, by layers.
    tokens: BTreeMap<Runs, BTreeSet<u32>>,
    /// Heads, by the DCP rank that lacks them (`None` where tokens are not split) and by layers.
    heads: BTreeMap<(Option<u32>, Runs), BTreeSet<u32>>,
}

/// Every component of one side, in envelope order, that lacks something; those that `skip` names are left out.
pub(crate) fn check(
    envelopes: Both<&Envelope>,
    side: usize,
    skip: impl Fn(u16) -> bool,
    found: &mut Vec<Mismatch>,
) {
    let envelope = envelopes[side];
    let components = (0u16..).zip(&envelope.components);
    for (at, component) in components.filter(|(at, _)| !skip(*at)) {
        lack(envelope, at, component).tell(envelopes, side, component, found);
    }
}

fn dcp(component: &Component) -> Dcp {
    match component.unit {
        Unit::Slot => Dcp::NONE,
        Unit::Token | Unit::Page => component.dcp,
    }
}

fn lack(envelope: &Envelope, at: u16, component: &Component) -> Lack {
    let mut lack = Lack::default();
    let split = dcp(component);
    let mut spans = Vec::new();
    let mut placed: BTreeMap<u32, BTreeSet<u16>> = BTreeMap::new();
    for rank in &envelope.ranks {
        let class = if split.size > 1 { rank.dcp_rank } else { 0 };
        for placement in rank.placements.iter().filter(|p| p.component == at) {
            for layer in &placement.layers {
                placed.entry(*layer).or_default().extend(&placement.parts);
                spans.extend(placement.parts.iter().map(|part| {
                    let heads = placement.heads;
                    (*layer, *part, class, heads.first, heads.end())
                }));
            }
        }
    }
    let unplaced = |layer: &&u32| !placed.contains_key(layer);
    lack.layers = component.layers.iter().filter(unplaced).copied().collect();
    let mut parts: BTreeMap<u16, BTreeSet<u32>> = BTreeMap::new();
    for (layer, held) in placed
        .iter()
        .filter(|(_, held)| held.len() < component.parts.len())
    {
        let missing = (0u16..).zip(&component.parts).map(|(part, _)| part);
        for part in missing.filter(|part| !held.contains(part)) {
            parts.entry(part).or_default().insert(*layer);
        }
    }
    for (part, layers) in parts {
        lack.parts.entry(layers).or_default().insert(part);
    }
    spans.sort_unstable();
    for plane in spans.chunk_by(|a, b| (a.0, a.1) == (b.0, b.1)) {
        let (layer, part, ..) = plane[0];
        let Some(declared) = component.parts.get(usize::from(part)) else {
            continue;
        };
        let classes = plane.chunk_by(|a, b| a.2 == b.2);
        let held = classes
            .clone()
            .map(|class| (class[0].2, class[0].2.saturating_add(1)));
        let absent = between(held, split.size);
        if !absent.is_empty() {
            lack.tokens.entry(absent).or_default().insert(layer);
        }
        for class in classes {
            let absent = between(class.iter().map(|span| (span.3, span.4)), declared.heads);
            if !absent.is_empty() {
                let class = (split.size > 1).then_some(class[0].2);
                lack.heads.entry((class, absent)).or_default().insert(layer);
            }
        }
    }
    lack
}

/// The runs of `0..end` that ascending runs leave out.
fn between(runs: impl Iterator<Item = (u32, u32)>, end: u32) -> Runs {
    let mut out = Vec::new();
    let mut next = 0;
    for (first, past) in runs {
        if first > next {
            out.push((next, first.min(end)));
        }
        next = next.max(past);
        if next >= end {
            return out;
        }
    }
    out.push((next, end));
    out
}

impl Lack {
    fn tell(self, envelopes: Both<&Envelope>, side: usize, component: &Component, found: &mut Vec<Mismatch>) {
        let name = &component.name;
        let (this, why) = match side {
            TARGET => ("decode", "the decode engine would read memory that nobody filled"),
            _ => ("prefill", "the decode engine's memory would stay unwritten there"),
        };
        let other = envelopes[if side == SOURCE { TARGET } else { SOURCE }];
        let other = other.component(name).map(|(_, component)| component);
        let mut add = |code, key: &str, has: Option<String>, lacks: String, do_this: &str| {
            let has = has.unwrap_or_else(|| "absent".to_owned());
            let values = if side == SOURCE {
                [lacks, has]
            } else {
                [has, lacks]
            };
            let mut mismatch = mismatch::new(code, format!("component.{name}.{key}"), values, why.to_owned());
            mismatch.fix = format!("Correct the {this} envelope: {do_this}");
            found.push(mismatch);
        };
        if !self.layers.is_empty() {
            add(
                Code::LayerCoverage,
                "layers",
                other.map(|other| {
                    format!(
                        "layers {}",
                        mismatch::ranges(&other.layers.iter().copied().collect())
                    )
                }),
                format!(
                    "no rank has a place for layers {}",
                    mismatch::ranges(&self.layers)
                ),
                "its ranks together must place every layer it declares. Look for a rank or pipeline stage left \
                 out, or a rank without placements.",
            );
        }
        for (layers, parts) in self.parts {
            let named = |part: &u16| {
                component
                    .parts
                    .get(usize::from(*part))
                    .map(|part| part.name.as_str())
            };
            let parts: Vec<&str> = parts.iter().filter_map(named).collect();
            let all = other.map(|other| {
                let parts: Vec<&str> = other.parts.iter().map(|part| part.name.as_str()).collect();
                format!("parts {}", parts.join(", "))
            });
            add(
                Code::PartCoverage,
                "parts",
                all,
                format!(
                    "no rank has a place for part {} of layers {}",
                    parts.join(", "),
                    mismatch::ranges(&layers)
                ),
                "its ranks together must place every part of every layer.",
            );
        }
        for (classes, layers) in self.tokens.into_iter().take(MOST_NAMED) {
            add(
                Code::TokenCoverage,
                "dcp",
                other.map(|other| format!("DCP {}", dcp(other))),
                format!(
                    "no rank is dcp_rank {} of {} for layers {}",
                    written(&classes),
                    dcp(component).size,
                    mismatch::ranges(&layers)
                ),
                "give each rank its own dcp_rank (0 when left out); together they must be every DCP rank.",
            );
        }
        for ((class, heads), layers) in self.heads.into_iter().take(MOST_NAMED) {
            let class = class.map_or(String::new(), |class| format!(" with dcp_rank {class}"));
            let all = other.map(|other| {
                let most = other.parts.iter().map(|part| part.heads).max();
                format!("{} heads in all", most.unwrap_or(0))
            });
            add(
                Code::HeadCoverage,
                "heads",
                all,
                format!(
                    "no rank{class} has a place for heads {} of layers {}",
                    written(&heads),
                    mismatch::ranges(&layers)
                ),
                "its ranks together must place every head. Look for a rank left out, or a file cut short.",
            );
        }
    }
}

/// `4-7, 12`; the first runs only where there are very many.
fn written(runs: &[(u32, u32)]) -> String {
    let some = runs
        .iter()
        .take(MOST_NAMED)
        .map(|(first, past)| match past - first {
            1 => first.to_string(),
            _ => format!("{first}-{}", past - 1),
        });
    let more = if runs.len() > MOST_NAMED { ", ..." } else { "" };
    some.collect::<Vec<_>>().join(", ") + more
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_lies_between_runs() {
        let between = |runs: &[(u32, u32)], end| between(runs.iter().copied(), end);
        assert_eq!(between(&[], 4), [(0, 4)]);
        assert_eq!(between(&[(0, 4)], 4), []);
        assert_eq!(between(&[(1, 2), (1, 3), (5, 6)], 8), [(0, 1), (3, 5), (6, 8)]);
        assert_eq!(between(&[(0, 6), (2, 3)], 7), [(6, 7)]);
        assert_eq!(between(&[(2, 9)], 8), [(0, 2)]);
        assert_eq!(between(&[(9, 10)], 8), [(0, 8)]);
    }

    #[test]
    fn runs_are_written_with_their_last() {
        assert_eq!(written(&[(0, 1), (3, 5)]), "0, 3-4");
    }
}
