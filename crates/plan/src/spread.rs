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

/// Spreads one group. `shares` gives the tokens that a rank holds, per side; `classes` is the number of
/// shares that the source splits tokens into.
pub(crate) fn spread(
    group: &Group,
    layers: usize,
    classes: u32,
    share: impl Fn(usize, u32) -> Share,
) -> (Vec<Assignment>, Vec<Gap>) {
    let source_shares: Vec<Share> = group.owners[SOURCE]
        .iter()
        .map(|o| share(SOURCE, o.rank))
        .collect();
    let target_shares: Vec<Share> = group.owners[TARGET]
        .iter()
        .map(|o| share(TARGET, o.rank))
        .collect();
    // Which wanters a source class concerns does not depend on the atom.
    let dcp = source_shares.first().map(|share| share.dcp);
    let mut meets: HashMap<(u32, Share), bool> = HashMap::new();

    let mut spread = Spread::default();
    let mut gaps = Vec::new();
    for (heads, [holders, wanters]) in atoms(group) {
        if wanters.is_empty() {
            continue;
        }
        let Some(dcp) = dcp.filter(|_| !holders.is_empty()) else {
            gaps.push(Gap {
                heads,
                class: None,
                wanter: group.owners[TARGET][wanters[0]].rank,
            });
            continue;
        };
        let mut by_class: Vec<Vec<usize>> = vec![Vec::new(); usize::try_from(classes).unwrap_or(0)];
        for holder in holders {
            let class = usize::try_from(source_shares[holder].rank).unwrap_or(usize::MAX);
            if let Some(class) = by_class.get_mut(class) {
                class.push(holder);
            }
        }
        for (class, holders) in (0..classes).zip(&by_class) {
            let class_share = Share { dcp, rank: class };
            let wanters: Vec<usize> = wanters
                .iter()
                .copied()
                .filter(|wanter| {
                    let wanted = target_shares[*wanter];
                    *meets
                        .entry((class, wanted))
                        .or_insert_with(|| class_share.meets(&wanted))
                })
                .collect();
            match (wanters.first(), holders.is_empty()) {
                (Some(first), true) => gaps.push(Gap {
                    heads,
                    class: Some(class),
                    wanter: group.owners[TARGET][*first].rank,
                }),
                (Some(_), false) => spread.share_out(heads, holders, &wanters, layers),
                (None, _) => {}
            }
        }
    }
    (spread.done, gaps)
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

/// The atoms, ascending, each with the owners that have it on either side.
fn atoms(group: &Group) -> Vec<(HeadSpan, [Vec<usize>; 2])> {
    let mut cuts: Vec<u32> = group
        .owners
        .iter()
        .flatten()
        .flat_map(|owner| [owner.heads.first, owner.heads.end()])
        .collect();
    cuts.sort_unstable();
    cuts.dedup();
    let mut atoms: Vec<(HeadSpan, [Vec<usize>; 2])> = cuts
        .windows(2)
        .map(|cut| {
            let heads = HeadSpan {
                first: cut[0],
                count: cut[1] - cut[0],
            };
            (heads, [Vec::new(), Vec::new()])
        })
        .collect();
    for side in [SOURCE, TARGET] {
        for (number, owner) in group.owners[side].iter().enumerate() {
            let from = cuts.partition_point(|cut| *cut < owner.heads.first);
            let to = cuts.partition_point(|cut| *cut < owner.heads.end());
            for (_, owners) in atoms.iter_mut().take(to).skip(from) {
                owners[side].push(number);
            }
        }
    }
    atoms
}
