//! Which holder sends what to which wanter.
//!
//! The head axis is cut wherever a rank's heads begin or end; inside such an *atom* each rank has all heads
//! or none. Per atom and token class of the source, the wanters are spread over the holders, so that each byte
//! crosses once to each decode rank that owns it, and replicated sources share the work.

use std::collections::HashMap;

use kvferry_handshake::HeadSpan;

use crate::owners::Group;
use crate::stream::{SOURCE, TARGET};
use crate::tokens::Share;

/// Heads and layers of a group that one owner sends to another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Assignment {
    /// Position in the group's source owners.
    pub(crate) source: usize,
    /// Position in the group's target owners.
    pub(crate) target: usize,
    pub(crate) heads: HeadSpan,
    /// Positions `[low, high)` in the group's layers.
    pub(crate) layers: (usize, usize),
}

/// Rows that no prefill rank holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Gap {
    pub(crate) heads: HeadSpan,
    /// The DCP rank that is missing; `None`: nobody has these heads at all.
    pub(crate) class: Option<u32>,
    /// A decode rank that wants them.
    pub(crate) wanter: u32,
}

/// Most steps that one group may take: far above any engine, low enough for a hostile envelope.
const MOST_STEPS: usize = 1 << 18;

/// Spreads one group of `layers` layers. `classes` is the number of shares that the source splits tokens
/// into, `share` the tokens that a rank holds on a side. `None`: more work than any engine needs.
pub(crate) fn spread(
    group: &Group,
    layers: usize,
    classes: u32,
    share: impl Fn(usize, u32) -> Share,
) -> Option<(Vec<Assignment>, Vec<Gap>)> {
    let shares_of = |side: usize| -> Vec<Share> {
        let owners = group.owners[side].iter();
        owners.map(|owner| share(side, owner.rank)).collect()
    };
    let (source_shares, target_shares) = (shares_of(SOURCE), shares_of(TARGET));
    // Which source classes concern a wanter does not depend on the atom.
    let mut concerned: HashMap<Share, Vec<usize>> = HashMap::new();
    if let Some(source) = source_shares.first() {
        for wanted in &target_shares {
            concerned.entry(*wanted).or_insert_with(|| {
                let class_shares = (0..classes).map(|rank| Share { rank, ..*source });
                let met = class_shares.enumerate().filter(|(_, class)| class.meets(wanted));
                met.map(|(class, _)| class).collect()
            });
        }
    }

    let mut spread = Spread::default();
    let mut gaps = Vec::new();
    let mut steps = 0;
    let classes = usize::try_from(classes).unwrap_or(usize::MAX);
    let mut by_class: Vec<[Vec<usize>; 2]> = vec![Default::default(); classes];
    for (heads, [holders, wanters]) in atoms(group)? {
        if holders.is_empty() {
            gaps.extend(wanters.first().map(|first| Gap {
                heads,
                class: None,
                wanter: group.owners[TARGET][*first].rank,
            }));
            continue;
        }
        let mut touched = Vec::new();
        for wanter in wanters {
            let classes = concerned
                .get(&target_shares[wanter])
                .map_or(&[][..], Vec::as_slice);
            steps += classes.len();
            for class in classes {
                let wanters = &mut by_class[*class][TARGET];
                if wanters.is_empty() {
                    touched.push(*class);
                }
                wanters.push(wanter);
            }
        }
        if steps > MOST_STEPS {
            return None;
        }
        for holder in holders {
            let class = usize::try_from(source_shares[holder].rank).unwrap_or(usize::MAX);
            if let Some(class) = by_class.get_mut(class) {
                class[SOURCE].push(holder);
            }
        }
        touched.sort_unstable();
        for class in touched {
            let [holders, wanters] = &by_class[class];
            if holders.is_empty() {
                gaps.extend(wanters.first().map(|first| Gap {
                    heads,
                    class: u32::try_from(class).ok(),
                    wanter: group.owners[TARGET][*first].rank,
                }));
            } else {
                spread.share_out(heads, holders, wanters, layers);
            }
        }
        by_class.iter_mut().flatten().for_each(Vec::clear);
    }
    Some((spread.done, gaps))
}

#[derive(Default)]
struct Spread {
    done: Vec<Assignment>,
    /// The last assignment of each (source, target, layers): the next atom is joined to it where it touches.
    last: HashMap<(usize, usize, (usize, usize)), usize>,
}

impl Spread {
    fn share_out(&mut self, heads: HeadSpan, holders: &[usize], wanters: &[usize], layers: usize) {
        for (number, wanter) in wanters.iter().enumerate() {
            if wanters.len() >= holders.len() {
                self.give(heads, holders[number % holders.len()], *wanter, (0, layers));
                continue;
            }
            // More holders than wanters: this wanter's holders share its layers in contiguous blocks.
            let mine: Vec<usize> = holders
                .iter()
                .copied()
                .skip(number)
                .step_by(wanters.len())
                .collect();
            for (at, holder) in mine.iter().enumerate() {
                let block = (at * layers / mine.len(), (at + 1) * layers / mine.len());
                if block.0 < block.1 {
                    self.give(heads, *holder, *wanter, block);
                }
            }
        }
    }

    fn give(&mut self, heads: HeadSpan, source: usize, target: usize, layers: (usize, usize)) {
        let key = (source, target, layers);
        if let Some(last) = self.last.get(&key).and_then(|at| self.done.get_mut(*at))
            && last.heads.end() == heads.first
        {
            last.heads.count += heads.count;
            return;
        }
        self.last.insert(key, self.done.len());
        self.done.push(Assignment {
            source,
            target,
            heads,
            layers,
        });
    }
}

/// Heads that no rank's span divides, with the owners that have them on either side.
type Atom = (HeadSpan, [Vec<usize>; 2]);

/// The atoms, ascending. `None`: more than any engine has.
fn atoms(group: &Group) -> Option<Vec<Atom>> {
    let mut cuts: Vec<u32> = group
        .owners
        .iter()
        .flatten()
        .flat_map(|owner| [owner.heads.first, owner.heads.end()])
        .collect();
    cuts.sort_unstable();
    cuts.dedup();
    let mut atoms: Vec<Atom> = cuts
        .windows(2)
        .map(|cut| {
            let heads = HeadSpan {
                first: cut[0],
                count: cut[1] - cut[0],
            };
            (heads, [Vec::new(), Vec::new()])
        })
        .collect();
    let mut steps = 0;
    for side in [SOURCE, TARGET] {
        for (number, owner) in group.owners[side].iter().enumerate() {
            let from = cuts.partition_point(|cut| *cut < owner.heads.first);
            let to = cuts.partition_point(|cut| *cut < owner.heads.end());
            steps += to - from;
            if steps > MOST_STEPS {
                return None;
            }
            for (_, owners) in atoms.iter_mut().take(to).skip(from) {
                owners[side].push(number);
            }
        }
    }
    Some(atoms)
}

#[cfg(test)]
mod tests {
    use kvferry_handshake::Dcp;

    use super::*;
    use crate::owners::{Owner, Plane};

    fn owner(rank: u32, first: u32, end: u32) -> Owner {
        Owner {
            rank,
            heads: HeadSpan {
                first,
                count: end - first,
            },
        }
    }

    fn group(source: &[Owner], target: &[Owner], layers: u32) -> Group {
        let plane = |layer| Plane {
            layer,
            part: 0,
            places: [Vec::new(), Vec::new()],
        };
        Group {
            owners: [source.to_vec(), target.to_vec()],
            planes: (0..layers).map(plane).collect(),
        }
    }

    /// Source rank, target rank, first head, end, layers.
    type Assigned = (u32, u32, u32, u32, (usize, usize));

    fn assigned(group: &Group, layers: usize) -> Vec<Assigned> {
        let (assignments, gaps) = spread(group, layers, 1, |_, _| Share::new(Dcp::NONE, 0)).unwrap();
        assert_eq!(gaps, []);
        let mut found: Vec<Assigned> = assignments
            .iter()
            .map(|a| {
                let source = group.owners[SOURCE][a.source].rank;
                let target = group.owners[TARGET][a.target].rank;
                (source, target, a.heads.first, a.heads.end(), a.layers)
            })
            .collect();
        found.sort_unstable();
        found
    }

    #[test]
    fn wanters_are_dealt_to_holders_in_turn() {
        let holders = [owner(0, 0, 1), owner(1, 0, 1)];
        let wanters = [owner(0, 0, 1), owner(1, 0, 1), owner(2, 0, 1)];
        let found = assigned(&group(&holders, &wanters, 4), 4);
        let whole = (0, 4);
        assert_eq!(
            found,
            [(0, 0, 0, 1, whole), (0, 2, 0, 1, whole), (1, 1, 0, 1, whole)]
        );
    }

    #[test]
    fn more_holders_than_wanters_share_layers() {
        let holders = [owner(0, 0, 1), owner(1, 0, 1), owner(2, 0, 1)];
        let found = assigned(&group(&holders, &[owner(5, 0, 1)], 5), 5);
        assert_eq!(
            found,
            [(0, 5, 0, 1, (0, 1)), (1, 5, 0, 1, (1, 3)), (2, 5, 0, 1, (3, 5))]
        );
    }

    #[test]
    fn neighbouring_atoms_are_joined_and_others_are_not() {
        // Head 1 and 2 have two holders, heads 0 and 3 only one.
        let holders = [owner(0, 0, 4), owner(1, 1, 3)];
        let found = assigned(&group(&holders, &[owner(0, 0, 4)], 2), 2);
        assert_eq!(
            found,
            [
                (0, 0, 0, 1, (0, 2)),
                (0, 0, 1, 3, (0, 1)),
                (0, 0, 3, 4, (0, 2)),
                (1, 0, 1, 3, (1, 2)),
            ]
        );
        // Cut by another rank's span only, so that one assignment is left.
        let wanters = [owner(0, 0, 4), owner(1, 2, 4)];
        let found = assigned(&group(&[owner(0, 0, 4)], &wanters, 2), 2);
        assert_eq!(found, [(0, 0, 0, 4, (0, 2)), (0, 1, 2, 4, (0, 2))]);
    }

    #[test]
    fn what_nobody_has_is_a_gap() {
        let group = group(&[owner(0, 0, 2)], &[owner(0, 0, 2), owner(7, 2, 4)], 1);
        let split = Dcp {
            size: 2,
            interleave: 1,
        };
        let (_, gaps) = spread(&group, 1, 2, |side, _| {
            Share::new(if side == SOURCE { split } else { Dcp::NONE }, 0)
        })
        .unwrap();
        let gap = |first, class, wanter| Gap {
            heads: HeadSpan { first, count: 2 },
            class,
            wanter,
        };
        assert_eq!(gaps, [gap(0, Some(1), 0), gap(2, None, 7)]);
    }
}
