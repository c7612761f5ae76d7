//! Who owns the rows of one component, on both sides: (layer, part) pairs that the same ranks own with
//! the same heads are taken together, so that the work does not grow with placements times placements.

use std::collections::{BTreeMap, HashMap};

use kvferry_handshake::{Envelope, HeadSpan};

use crate::stream::{Both, SOURCE, TARGET};

/// A rank that owns heads of some (layer, part).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Owner {
    pub(crate) rank: u32,
    pub(crate) heads: HeadSpan,
}

/// Where an owner keeps one (layer, part): a placement, and the positions in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) placement: usize,
    pub(crate) layer: u64,
    pub(crate) part: u64,
}

/// One layer's part, and where each owner of its group keeps it.
#[derive(Clone, Debug)]
pub(crate) struct Plane {
    pub(crate) layer: u32,
    /// Position in the decode envelope's parts.
    pub(crate) part: u16,
    /// In the order of [`Group::owners`].
    pub(crate) places: Both<Vec<Place>>,
}

/// Planes that the same ranks own with the same heads.
#[derive(Clone, Debug)]
pub(crate) struct Group {
    /// Ascending by rank, then by heads.
    pub(crate) owners: Both<Vec<Owner>>,
    /// Ascending by layer, then by part.
    pub(crate) planes: Vec<Plane>,
}

type Owned = Vec<(Owner, Place)>;

/// The groups of one component, given its position on each side, and of each of its parts on the
/// prefill side the position on the decode side.
pub(crate) fn groups(
    envelopes: Both<&Envelope>,
    component: Both<u16>,
    part_on_decode: &[Option<u16>],
) -> Vec<Group> {
    let mut planes: BTreeMap<(u32, u16), Both<Owned>> = BTreeMap::new();
    for side in [SOURCE, TARGET] {
        for rank in &envelopes[side].ranks {
            for (number, placement) in rank.placements.iter().enumerate() {
                if placement.component != component[side] {
                    continue;
                }
                let owner = Owner {
                    rank: rank.rank,
                    heads: placement.heads,
                };
                for (part_at, part) in placement.parts.iter().enumerate() {
                    let part = match side {
                        SOURCE => part_on_decode.get(usize::from(*part)).copied().flatten(),
                        _ => Some(*part),
                    };
                    let Some(part) = part else { continue };
                    for (layer_at, layer) in placement.layers.iter().enumerate() {
                        let place = Place {
                            placement: number,
                            layer: layer_at as u64,
                            part: part_at as u64,
                        };
                        planes.entry((*layer, part)).or_default()[side].push((owner, place));
                    }
                }
            }
        }
    }
    let mut groups: Vec<Group> = Vec::new();
    let mut known: HashMap<Both<Vec<Owner>>, usize> = HashMap::new();
    for ((layer, part), mut owned) in planes {
        // A layer that the decode side does not hold is not asked for.
        if owned[TARGET].is_empty() {
            continue;
        }
        owned
            .iter_mut()
            .for_each(|side| side.sort_by_key(|(owner, _)| *owner));
        let owners = [SOURCE, TARGET].map(|side| owned[side].iter().map(|(owner, _)| *owner).collect());
        let places = owned.map(|side| side.into_iter().map(|(_, place)| place).collect());
        let at = *known.entry(owners).or_insert_with_key(|owners| {
            groups.push(Group {
                owners: owners.clone(),
                planes: Vec::new(),
            });
            groups.len() - 1
        });
        groups[at].planes.push(Plane { layer, part, places });
    }
    groups
}

impl Group {
    /// Its layer ids, ascending, each once.
    pub(crate) fn layers(&self) -> Vec<u32> {
        let mut layers: Vec<u32> = self.planes.iter().map(|plane| plane.layer).collect();
        layers.dedup();
        layers
    }

    /// The planes of the layers at `[low, high)` in [`Group::layers`].
    pub(crate) fn planes_of<'a>(&'a self, layers: &[u32], low: usize, high: usize) -> &'a [Plane] {
        let first = layers.get(low).copied().unwrap_or(u32::MAX);
        let from = self.planes.partition_point(|plane| plane.layer < first);
        let to = match layers.get(high) {
            Some(end) => self.planes.partition_point(|plane| plane.layer < *end),
            None => self.planes.len(),
        };
        &self.planes[from.min(to)..to]
    }
}
