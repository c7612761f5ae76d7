//! Which pages a transfer gets: as many as it needs, scattered over what is free, or those that were named.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};

use kvferry_handshake::{ABSENT, Component, Envelope, Kind, PageLists, Unit};
use kvferry_plan::MAX_PAGE_ENTRIES;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

/// The free pages of each pool of a rank.
#[derive(Debug)]
pub(crate) struct FreePages {
    /// Per page group: the group whose pool it draws from.
    owners: Vec<usize>,
    /// Per page group that owns a pool.
    free: Vec<Vec<u32>>,
    /// Per page group that owns a pool: how many transfers have each page that is in use. Whoever names pages may give
    /// one to several.
    used: Vec<HashMap<u32, u32>>,
}

impl FreePages {
    pub(crate) fn new(envelope: &Envelope) -> FreePages {
        let owners: Vec<usize> = envelope
            .page_groups
            .iter()
            .map(|group| usize::from(group.pool))
            .collect();
        let all = |(at, group): (usize, &kvferry_handshake::PageGroup)| match owners[at] == at {
            true => (0..group.pool_pages).collect(),
            false => Vec::new(),
        };
        let free: Vec<Vec<u32>> = envelope.page_groups.iter().enumerate().map(all).collect();
        let used = vec![HashMap::new(); free.len()];
        FreePages { owners, free, used }
    }

    /// Draws pages for the first `tokens` tokens of a prompt: scattered, and the same for the same seed and history.
    pub(crate) fn draw(
        &mut self,
        envelope: &Envelope,
        rank: u32,
        tokens: u64,
        seed: u64,
    ) -> anyhow::Result<PageLists> {
        let mut random = StdRng::seed_from_u64(seed);
        let mut lists = PageLists::default();
        for (group, needed) in needed(envelope, rank, tokens).into_iter().enumerate() {
            let owner = self.owners[group];
            let free = &mut self.free[owner];
            let (name, left) = (&envelope.page_groups[group].name, free.len());
            // Before a list is made: tokens are what somebody wrote on a command line.
            let present = usize::try_from(needed.present)
                .ok()
                .filter(|count| *count <= left);
            let absent = usize::try_from(needed.absent).ok();
            let fitting = present.zip(absent).filter(|(present, absent)| {
                present
                    .checked_add(*absent)
                    .is_some_and(|len| len <= MAX_PAGE_ENTRIES)
            });
            let Some((present, absent)) = fitting else {
                self.give_back(&lists);
                let wanted = needed.present;
                anyhow::bail!(
                    "page group {name}: {tokens} tokens need {wanted} pages, in a list of {} entries; {left} are free, \
                     and a list has {MAX_PAGE_ENTRIES} entries at most; wait for transfers to end, or raise pool_pages \
                     in the envelope",
                    needed.present.saturating_add(needed.absent)
                );
            };
            let mut list = vec![ABSENT; absent];
            list.extend((0..present).map(|_| free.swap_remove(random.random_range(0..free.len()))));
            for page in list.iter().filter(|page| **page != ABSENT) {
                *self.used[owner].entry(*page).or_default() += 1;
            }
            lists.groups.push(list);
        }
        Ok(lists)
    }

    /// Takes pages that were named out of what is free. A page that is in use already is taken all the same: whoever
    /// names pages may want that.
    pub(crate) fn take(&mut self, lists: &PageLists) {
        for (group, list) in lists.groups.iter().enumerate() {
            let owner = self.owners[group];
            let taken: HashSet<u32> = list.iter().copied().filter(|page| *page != ABSENT).collect();
            self.free[owner].retain(|page| !taken.contains(page));
            for page in taken {
                *self.used[owner].entry(page).or_default() += 1;
            }
        }
    }

    /// Pages of an ended transfer are free again, unless another one has them too.
    pub(crate) fn give_back(&mut self, lists: &PageLists) {
        for (group, list) in lists.groups.iter().enumerate() {
            let owner = self.owners[group];
            let given: HashSet<u32> = list.iter().copied().filter(|page| *page != ABSENT).collect();
            let mut freed: Vec<u32> = Vec::with_capacity(given.len());
            for page in given {
                if let Entry::Occupied(mut count) = self.used[owner].entry(page) {
                    *count.get_mut() -= 1;
                    if *count.get() == 0 {
                        count.remove();
                        freed.push(page);
                    }
                }
            }
            // A set has no order of its own, and what is drawn next must depend on the history alone.
            freed.sort_unstable();
            self.free[owner].extend(freed);
        }
    }
}

/// The entries that a prompt needs in a page list: pages that are absent come before those that are there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Needed {
    absent: u64,
    present: u64,
}

/// Per page group, what a prompt of `tokens` tokens needs.
fn needed(envelope: &Envelope, rank: u32, tokens: u64) -> Vec<Needed> {
    let of_group = |group: usize| {
        let components = || {
            envelope
                .components
                .iter()
                .filter(move |one| usize::from(one.page_group) == group)
        };
        if components().any(|one| one.unit == Unit::Slot) {
            return Needed {
                absent: 0,
                present: 1,
            };
        }
        let page_size = u64::from(envelope.page_groups[group].page_size);
        let local = |component: &Component, tokens: u64| {
            let dcp_rank = envelope.ranks.get(rank as usize).map_or(0, |rank| rank.dcp_rank);
            let dcp_rank = if component.dcp.size > 1 { dcp_rank } else { 0 };
            component.dcp.count_below(dcp_rank, tokens)
        };
        let most = components().map(|one| local(one, tokens)).max().unwrap_or(0);
        // The first local token that any component of the group still keeps.
        let kept = |component: &Component| match (component.kind, component.window) {
            (Kind::Window, Some(window)) => local(component, tokens.saturating_sub(u64::from(window))),
            _ => 0,
        };
        let first = components().map(kept).min().unwrap_or(0);
        let entries = most.div_ceil(page_size);
        let absent = (first / page_size).min(entries);
        Needed {
            absent,
            present: entries - absent,
        }
    };
    (0..envelope.page_groups.len()).map(of_group).collect()
}

#[cfg(test)]
mod tests {
    use kvferry_handshake::{Dcp, Launch, ModelShape};

    use super::*;

    fn llama(pool_pages: u32) -> Envelope {
        let shape = ModelShape::new("m", 2).kv(0..2, 2, 8);
        Launch {
            pool_pages,
            ..Launch::default()
        }
        .envelope(&shape)
        .unwrap()
    }

    #[test]
    fn pages_are_scattered_distinct_and_given_back() {
        let envelope = llama(8);
        let mut free = FreePages::new(&envelope);
        let first = free.draw(&envelope, 0, 65, 1).unwrap();
        assert_eq!(first.groups[0].len(), 5);
        let second = free.draw(&envelope, 0, 48, 1).unwrap();
        let mut all: Vec<u32> = first.groups[0].iter().chain(&second.groups[0]).copied().collect();
        all.sort_unstable();
        assert_eq!(all, (0..8).collect::<Vec<u32>>());
        let error = free.draw(&envelope, 0, 16, 1).unwrap_err().to_string();
        assert!(
            error.contains("need 1 pages, in a list of 1 entries; 0 are free"),
            "{error}"
        );
        free.give_back(&first);
        assert_eq!(free.draw(&envelope, 0, 80, 1).unwrap().groups[0].len(), 5);
    }

    #[test]
    fn named_pages_are_not_drawn_again() {
        let envelope = llama(4);
        let mut free = FreePages::new(&envelope);
        free.take(&PageLists {
            groups: vec![vec![2, ABSENT, 0]],
        });
        let mut drawn = free.draw(&envelope, 0, 32, 9).unwrap().groups.remove(0);
        drawn.sort_unstable();
        assert_eq!(drawn, [1, 3]);
    }

    #[test]
    fn a_prompt_beyond_the_pool_takes_no_memory() {
        let envelope = llama(4);
        let mut free = FreePages::new(&envelope);
        let error = free
            .draw(&envelope, 0, 1_000_000_000_000_000, 1)
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("62500000000000 pages") && error.contains("4 are free"),
            "{error}"
        );
        assert_eq!(free.draw(&envelope, 0, 64, 1).unwrap().groups[0].len(), 4);
    }

    #[test]
    fn a_page_of_two_transfers_is_free_once_and_after_both() {
        let envelope = llama(2);
        let mut free = FreePages::new(&envelope);
        let both = PageLists {
            groups: vec![vec![0, 1]],
        };
        free.take(&both);
        free.take(&both);
        free.give_back(&both);
        assert!(free.draw(&envelope, 0, 16, 1).is_err());
        free.give_back(&both);
        let mut drawn = free.draw(&envelope, 0, 32, 1).unwrap().groups.remove(0);
        drawn.sort_unstable();
        assert_eq!(drawn, [0, 1]);
        assert!(free.draw(&envelope, 0, 16, 1).is_err());
    }

    #[test]
    fn windows_slots_and_dcp() {
        let shape = ModelShape::new("m", 2).kv([0], 2, 8).window([1], 2, 8, 20);
        let envelope = Launch {
            pool_pages: 16,
            ..Launch::default()
        }
        .envelope(&shape)
        .unwrap();
        let of = |tokens| needed(&envelope, 0, tokens);
        let entries = |absent, present| Needed { absent, present };
        // 70 tokens are 5 pages; the window keeps tokens 50 to 69, so pages 3 and 4.
        assert_eq!(of(70), [entries(0, 5), entries(3, 2)]);
        assert_eq!(of(0), [entries(0, 0); 2]);
        let lists = FreePages::new(&envelope).draw(&envelope, 0, 70, 1).unwrap();
        assert_eq!(lists.groups[1][..3], [ABSENT; 3]);
        assert!(lists.groups[1][3..].iter().all(|page| *page < 16));
        // The window's pages would do; the list of those that are absent would be too long.
        let shape = ModelShape::new("m", 1).window([0], 2, 8, 20);
        let windows = Launch::default().envelope(&shape).unwrap();
        let error = FreePages::new(&windows)
            .draw(&windows, 0, 1 << 40, 1)
            .unwrap_err()
            .to_string();
        assert!(error.contains("68719476736 entries"), "{error}");

        let shape = ModelShape::new("m", 1).latent(0..1, 8);
        let dcp = Dcp {
            size: 2,
            interleave: 1,
        };
        let envelope = Launch {
            tp: 2,
            dcp,
            ..Launch::default()
        }
        .envelope(&shape)
        .unwrap();
        assert_eq!(needed(&envelope, 0, 33)[0].present, 2);
        assert_eq!(needed(&envelope, 1, 33)[0].present, 1);
    }
}
