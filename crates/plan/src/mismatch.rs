//! What the planner refuses, in words.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use kvferry_handshake::{Code, HeadSpan, Mismatch, Unit};

use crate::link::Pair;
use crate::owners::Group;
use crate::spread::Gap;
use crate::stream::{SOURCE, TARGET};

pub(crate) fn new(code: Code, field: String, [prefill, decode]: [String; 2], why: String) -> Mismatch {
    Mismatch {
        code,
        field,
        prefill,
        decode,
        why,
        fix: code.entry().fix.to_owned(),
    }
}

pub(crate) fn internal(what: &str) -> Mismatch {
    new(
        Code::Internal,
        "plan".to_owned(),
        ["", ""].map(str::to_owned),
        what.to_owned(),
    )
}

pub(crate) fn too_large(name: &str) -> Mismatch {
    new(
        Code::OverLimit,
        format!("component.{name}"),
        ["", ""].map(str::to_owned),
        "its heads, layers and tokens are split so that more pairs of ranks meet than the planner allows: let one DCP size divide \
         the other, or split over fewer ranks"
            .to_owned(),
    )
}

pub(crate) fn no_component(name: &str) -> Mismatch {
    new(
        Code::Components,
        format!("component.{name}"),
        ["absent".to_owned(), "present".to_owned()],
        "its pages would stay unwritten".to_owned(),
    )
}

/// Refuses what no list of moves can carry, whatever the policy.
pub(crate) fn check_carriable(pair: &Pair<'_>) -> Result<(), Box<Mismatch>> {
    let (source, target) = (pair.component(SOURCE), pair.component(TARGET));
    let field = |what: &str| format!("component.{}.{what}", target.name);
    if source.unit != target.unit || source.window != target.window {
        return Err(Box::new(new(
            Code::ComponentKind,
            field("unit"),
            [source, target].map(|c| match c.window {
                Some(window) => format!("{}, window {window}", c.unit),
                None => format!("{}, no window", c.unit),
            }),
            "rows of the two sides do not mean the same".to_owned(),
        )));
    }
    for part in &target.parts {
        let other = source.parts.iter().find(|other| other.name == part.name);
        let fits = other.is_some_and(|other| {
            other.heads == part.heads
                && u64::from(other.width) * u64::from(source.element.bits())
                    == u64::from(part.width) * u64::from(target.element.bits())
        });
        if !fits {
            return Err(Box::new(new(
                Code::Parts,
                field(&format!("parts.{}", part.name)),
                [
                    other.map_or("absent".to_owned(), |other| {
                        format!("{} heads of {} {}", other.heads, other.width, source.element)
                    }),
                    format!("{} heads of {} {}", part.heads, part.width, target.element),
                ],
                "rows of unequal length cannot be copied".to_owned(),
            )));
        }
    }
    if target.unit == Unit::Page {
        if pair.page_size(SOURCE) != pair.page_size(TARGET) {
            return Err(Box::new(new(
                Code::PageSize,
                field("page_size"),
                [SOURCE, TARGET].map(|side| pair.page_size(side).to_string()),
                "such pages can only be moved whole".to_owned(),
            )));
        }
        if pair.share(SOURCE, 0).dcp != pair.share(TARGET, 0).dcp {
            return Err(Box::new(new(
                Code::DcpTopology,
                field("dcp"),
                [SOURCE, TARGET].map(|side| pair.dcp(side).to_string()),
                "such pages can only be moved whole, and would hold other tokens".to_owned(),
            )));
        }
    }
    Ok(())
}

/// Everything of one component that the decode side owns and no prefill rank holds.
#[derive(Default)]
pub(crate) struct Gaps {
    /// By part, at its position on the decode side.
    layers: BTreeMap<u16, BTreeSet<u32>>,
    /// By missing DCP rank, and first and number of heads.
    rows: BTreeMap<(Option<u32>, u32, u32), Missing>,
}

#[derive(Default)]
struct Missing {
    layers: BTreeSet<u32>,
    /// A decode rank that wants them.
    wanter: u32,
}

impl Gaps {
    /// No prefill rank has the group's layers.
    pub(crate) fn layers(&mut self, group: &Group) {
        for plane in &group.planes {
            self.layers.entry(plane.part).or_default().insert(plane.layer);
        }
    }

    /// Rows that are missing in these layers.
    pub(crate) fn rows(&mut self, layers: &[u32], gap: Gap) {
        let HeadSpan { first, count } = gap.heads;
        let missing = self.rows.entry((gap.class, first, count)).or_default();
        missing.layers.extend(layers);
        missing.wanter = gap.wanter;
    }

    pub(crate) fn into_mismatches(self, pair: &Pair<'_>) -> Vec<Mismatch> {
        let name = &pair.component(TARGET).name;
        let mut mismatches = Vec::new();
        if !self.layers.is_empty() {
            missing_layers(pair, &self.layers, &mut mismatches);
        }
        for ((class, first, count), Missing { layers, wanter }) in self.rows {
            let heads: BTreeSet<u32> = (first..first + count).collect();
            let wanted = format!(
                "rank {wanter} owns heads {} of layers {}",
                ranges(&heads),
                ranges(&layers)
            );
            mismatches.push(match class {
                None => new(
                    Code::HeadCoverage,
                    format!("component.{name}.heads"),
                    ["no rank has them".to_owned(), wanted],
                    "those heads would stay unwritten".to_owned(),
                ),
                Some(class) => new(
                    Code::TokenCoverage,
                    format!("component.{name}.dcp"),
                    [
                        format!(
                            "no rank with dcp_rank {class} of {} has them",
                            pair.dcp(SOURCE).size
                        ),
                        wanted,
                    ],
                    "every token of that DCP rank would stay unwritten".to_owned(),
                ),
            });
        }
        mismatches
    }
}

/// Layers that no prefill rank has; parts that no rank has of layers of which it has others.
fn missing_layers(pair: &Pair<'_>, missing: &BTreeMap<u16, BTreeSet<u32>>, mismatches: &mut Vec<Mismatch>) {
    let target = pair.component(TARGET);
    let held: BTreeSet<u32> = pair.envelopes[SOURCE]
        .ranks
        .iter()
        .flat_map(|rank| &rank.placements)
        .filter(|placement| placement.component == pair.at[SOURCE])
        .flat_map(|placement| placement.layers.iter().copied())
        .collect();
    let whole: BTreeSet<u32> = missing
        .values()
        .flatten()
        .copied()
        .filter(|layer| !held.contains(layer))
        .collect();
    if !whole.is_empty() {
        mismatches.push(new(
            Code::LayerCoverage,
            format!("component.{}.layers", target.name),
            [
                format!("ranks hold layers {}", ranges(&held)),
                format!("ranks also own layers {}", ranges(&whole)),
            ],
            "those layers would stay unwritten".to_owned(),
        ));
    }
    for (part, layers) in missing {
        let Some(part) = target.parts.get(usize::from(*part)) else {
            continue;
        };
        let layers: BTreeSet<u32> = layers.intersection(&held).copied().collect();
        if !layers.is_empty() {
            let of = format!("part {} of layers {}", part.name, ranges(&layers));
            mismatches.push(new(
                Code::PartCoverage,
                format!("component.{}.part.{}", target.name, part.name),
                [format!("no rank has {of}"), format!("ranks own {of}")],
                "that part would stay unwritten".to_owned(),
            ));
        }
    }
}

/// `0-3, 7`.
pub(crate) fn ranges(numbers: &BTreeSet<u32>) -> String {
    let mut text = String::new();
    let mut numbers = numbers.iter().copied().peekable();
    while let Some(first) = numbers.next() {
        let mut last = first;
        while let Some(next) = numbers.next_if(|next| *next == last + 1) {
            last = next;
        }
        let comma = if text.is_empty() { "" } else { ", " };
        // Writing into a string cannot fail.
        let _ = if first == last {
            write!(text, "{comma}{first}")
        } else {
            write!(text, "{comma}{first}-{last}")
        };
    }
    if text.is_empty() {
        text.push_str("none");
    }
    text
}
