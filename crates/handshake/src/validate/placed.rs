//! Where the ranks' rows lie: references, bounds, each row placed once, no two rows over each other.

use std::collections::{BTreeMap, HashSet};

use super::Faults;
use super::overlap::{Along, Axis, Conflict, Lattice, conflicts};
use crate::catalogue::Code;
use crate::element::Element;
use crate::envelope::{Component, Envelope, Placement, Rank, Unit};
use crate::limits::{MAX_PLACED, MAX_PLACEMENTS, MAX_REGION_BYTES, MAX_REGIONS};

pub(super) fn check(envelope: &Envelope, faults: &mut Faults) {
    let placements: usize = envelope.ranks.iter().map(|rank| rank.placements.len()).sum();
    if placements > MAX_PLACEMENTS {
        faults.invalid(
            || "rank".to_owned(),
            || format!("{placements} placements in all; {MAX_PLACEMENTS} are allowed"),
        );
        return;
    }
    let placed = envelope
        .ranks
        .iter()
        .flat_map(|rank| &rank.placements)
        .fold(0usize, |sum, p| {
            sum.saturating_add(p.layers.len().saturating_mul(p.parts.len()))
        });
    if placed > MAX_PLACED {
        faults.invalid(
            || "rank".to_owned(),
            || format!("{placed} layers and parts placed in all; {MAX_PLACED} are allowed"),
        );
        return;
    }
    let dcp = envelope.components.iter().any(|component| component.dcp.size > 1);
    for (at, rank) in envelope.ranks.iter().enumerate() {
        if usize::try_from(rank.rank) != Ok(at) {
            faults.invalid(
                || format!("rank.{at}.rank"),
                || format!("is {}; ranks are listed in order, from 0", rank.rank),
            );
        }
        if !dcp && rank.dcp_rank != 0 {
            faults.invalid(
                || format!("rank.{at}.dcp_rank"),
                || format!("is {}, but no component's tokens are split", rank.dcp_rank),
            );
        }
        rank_placements(envelope, at, rank, faults);
    }
}

fn rank_placements(envelope: &Envelope, at: usize, rank: &Rank, faults: &mut Faults) {
    let before = faults.total();
    let mut regions = HashSet::new();
    // The first component whose split has no such DCP rank.
    let mut outside: Option<&Component> = None;
    for (index, placement) in rank.placements.iter().enumerate() {
        regions.insert(placement.region);
        let field = |key: &str| format!("rank.{at}.placement.{index}.{key}");
        let Some(component) = envelope.components.get(usize::from(placement.component)) else {
            faults.invalid(
                || field("component"),
                || {
                    format!(
                        "names component {}; there are {}",
                        placement.component,
                        envelope.components.len()
                    )
                },
            );
            continue;
        };
        if component.dcp.size > 1 && rank.dcp_rank >= component.dcp.size {
            outside.get_or_insert(component);
        }
        references(component, placement, faults, field);
    }
    if let Some(component) = outside {
        let size = component.dcp.size;
        faults.invalid(
            || format!("rank.{at}.dcp_rank"),
            || {
                format!(
                    "is {}; {:?} is split over {size} ranks, 0 to {}",
                    rank.dcp_rank,
                    component.name,
                    size - 1
                )
            },
        );
    }
    if regions.len() > MAX_REGIONS {
        faults.invalid(
            || format!("rank.{at}"),
            || format!("{} regions; {MAX_REGIONS} are allowed", regions.len()),
        );
    }
    if faults.total() > before {
        return;
    }
    placed_once(envelope, at, rank, faults);
    let mut by_region: BTreeMap<u16, Vec<Lattice>> = BTreeMap::new();
    for (index, placement) in rank.placements.iter().enumerate() {
        match lattices(envelope, placement, index) {
            Some(found) => by_region.entry(placement.region).or_default().extend(found),
            None => faults.invalid(
                || format!("rank.{at}.placement.{index}"),
                || {
                    let (offset, page) = (placement.offset, placement.strides.page);
                    format!(
                        "its last row ends beyond {MAX_REGION_BYTES} bytes, with offset {offset} and a page stride of \
                         {page}; lower the offset, the strides or pool_pages"
                    )
                },
            ),
        }
    }
    for (region, lattices) in by_region {
        for conflict in conflicts(lattices) {
            report(at, region, conflict, faults);
        }
    }
}

fn references(
    component: &Component,
    placement: &Placement,
    faults: &mut Faults,
    field: impl Fn(&str) -> String,
) {
    let mut seen = HashSet::new();
    if placement.layers.is_empty() {
        faults.invalid(
            || field("layers"),
            || "is empty; list the layers that it holds".to_owned(),
        );
    }
    for layer in &placement.layers {
        if component.layers.binary_search(layer).is_err() {
            faults.invalid(
                || field("layers"),
                || format!("{layer} is not a layer of component {:?}", component.name),
            );
        } else if !seen.insert(*layer) {
            faults.invalid(|| field("layers"), || format!("{layer} is listed twice"));
        }
    }
    let strides = placement.strides;
    for (key, value) in [
        ("offset", placement.offset),
        ("strides.page", strides.page),
        ("strides.token", strides.token),
        ("strides.head", strides.head),
        ("strides.part", strides.part),
        ("strides.layer", strides.layer),
    ] {
        faults.bounded(|| field(key), value, 0, MAX_REGION_BYTES);
    }
    let heads = placement.heads;
    if heads.count == 0 {
        faults.invalid(
            || field("heads"),
            || "counts 0 heads; leave the placement out".to_owned(),
        );
    }
    if placement.parts.is_empty() {
        faults.invalid(
            || field("parts"),
            || "is empty; list the parts that it holds".to_owned(),
        );
    }
    let mut seen = HashSet::new();
    for part in &placement.parts {
        let Some(declared) = component.parts.get(usize::from(*part)) else {
            faults.invalid(
                || field("parts"),
                || {
                    format!(
                        "names part {part}; component {:?} has {}",
                        component.name,
                        component.parts.len()
                    )
                },
            );
            continue;
        };
        if !seen.insert(*part) {
            faults.invalid(
                || field("parts"),
                || format!("{:?} is listed twice", declared.name),
            );
        }
        if u64::from(heads.first) + u64::from(heads.count) > u64::from(declared.heads) {
            faults.invalid(
                || field("heads"),
                || {
                    format!(
                        "{heads} is beyond the {} heads of part {:?}",
                        declared.heads, declared.name
                    )
                },
            );
        }
    }
}

/// Each (component, layer, part, head) of a rank lies in one place.
fn placed_once(envelope: &Envelope, at: usize, rank: &Rank, faults: &mut Faults) {
    let mut spans = Vec::new();
    for (index, placement) in rank.placements.iter().enumerate() {
        for layer in &placement.layers {
            for part in &placement.parts {
                let heads = placement.heads;
                spans.push((
                    placement.component,
                    *layer,
                    *part,
                    heads.first,
                    heads.end(),
                    index,
                ));
            }
        }
    }
    spans.sort_unstable();
    for pair in spans.windows(2) {
        let [
            (component, layer, part, _, end, index),
            (c, l, p, first, _, other),
        ] = [pair[0], pair[1]];
        if (component, layer, part) == (c, l, p) && first < end {
            let declared = &envelope.components[usize::from(component)];
            faults.invalid(
                || format!("rank.{at}.placement.{other}"),
                || {
                    format!(
                        "places head {first} of part {:?}, layer {layer}, component {:?} again; placement {index} has it",
                        declared.parts[usize::from(part)].name, declared.name
                    )
                },
            );
        }
    }
}

/// The lattices of a placement, one a part; `None` where a row would end beyond [`MAX_REGION_BYTES`].
/// Nothing for an unresolved element type, whose rows have no known length.
fn lattices(envelope: &Envelope, placement: &Placement, index: usize) -> Option<Vec<Lattice>> {
    let component = envelope.components.get(usize::from(placement.component))?;
    let group = envelope.page_groups.get(usize::from(component.page_group))?;
    if component.element == Element::Auto {
        return Some(Vec::new());
    }
    let tokens = match component.unit {
        Unit::Token => group.page_size,
        Unit::Page | Unit::Slot => 1,
    };
    let axes = [
        (placement.strides.page, group.pool_pages.into(), Along::Page),
        (placement.strides.token, tokens.into(), Along::Token),
        (placement.strides.head, placement.heads.count.into(), Along::Head),
        (
            placement.strides.layer,
            placement.layers.len() as u64,
            Along::Layer,
        ),
    ];
    let axes: Vec<Axis> = axes
        .into_iter()
        .filter(|(_, count, _)| *count > 1)
        .map(|(stride, count, along)| Axis { stride, count, along })
        .collect();
    let mut found = Vec::with_capacity(placement.parts.len());
    for (at, part) in placement.parts.iter().enumerate() {
        let row = component.row_bytes(*part);
        let start = placement
            .offset
            .checked_add(placement.strides.part.checked_mul(at as u64)?)?;
        let end = axes.iter().try_fold(start.checked_add(row)?, |end, axis| {
            end.checked_add(axis.stride.checked_mul(axis.count - 1)?)
        })?;
        if end > MAX_REGION_BYTES {
            return None;
        }
        found.push(Lattice {
            start,
            row,
            axes: axes.clone(),
            group: component.page_group,
            pool: group.pool,
            placement: index,
        });
    }
    Some(found)
}

fn report(rank: usize, region: u16, conflict: Conflict, faults: &mut Faults) {
    match conflict {
        Conflict::Within {
            placement,
            along,
            stride,
            inner,
        } => faults.add(
            Code::PlacementOverlap,
            || format!("rank.{rank}.placement.{placement}.strides.{}", along.name()),
            || format!("steps over {stride} bytes, but what it steps over takes {inner}"),
        ),
        Conflict::Between { placement, other } if placement == other => faults.add(
            Code::PlacementOverlap,
            || format!("rank.{rank}.placement.{placement}"),
            || {
                format!(
                    "its parts lie over each other in region {region}, or cannot be shown to lie beside each other"
                )
            },
        ),
        Conflict::Between { placement, other } => faults.add(
            Code::PlacementOverlap,
            || format!("rank.{rank}.placement.{placement}"),
            || {
                format!(
                    "its rows lie over those of placement {other} in region {region}, or cannot be shown to lie \
                     beside them"
                )
            },
        ),
    }
}

impl Envelope {
    /// The bytes that each region of a rank needs: one past the end of its last row. Empty for a rank
    /// that the envelope does not have. The envelope has to be valid.
    pub fn region_bytes(&self, rank: u32) -> BTreeMap<u16, u64> {
        let mut needed = BTreeMap::new();
        let rank = usize::try_from(rank).ok().and_then(|rank| self.ranks.get(rank));
        for (index, placement) in rank.into_iter().flat_map(|rank| &rank.placements).enumerate() {
            let end = needed.entry(placement.region).or_insert(0);
            for lattice in lattices(self, placement, index).unwrap_or_default() {
                *end = lattice.end().max(*end);
            }
        }
        needed
    }
}
