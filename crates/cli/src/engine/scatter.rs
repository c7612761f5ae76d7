//! Which pages a transfer gets: as many as it needs, scattered over what is free, or those that were named.

use kvferry_handshake::{ABSENT, Component, Envelope, Kind, PageLists, Unit};
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

/// The free pages of each pool of a rank.
#[derive(Debug)]
pub(crate) struct FreePages {
    /// Per page group: the group whose pool it draws from.
    owners: Vec<usize>,
    /// Per page group that owns a pool.
    free: Vec<Vec<u32>>,
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
        let free = envelope.page_groups.iter().enumerate().map(all).collect();
        FreePages { owners, free }
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
        for (group, entries) in entries(envelope, rank, tokens).into_iter().enumerate() {
            let free = &mut self.free[self.owners[group]];
            let wanted = entries.iter().filter(|present| **present).count();
            if wanted > free.len() {
                let (name, left) = (&envelope.page_groups[group].name, free.len());
                self.give_back(&lists);
                anyhow::bail!(
                    "page group {name}: {tokens} tokens need {wanted} pages and {left} are free; \
                     wait for transfers to end, or raise pool_pages in the envelope"
                );
            }
            let mut draw = |present: bool| match present {
                true => free.swap_remove(random.random_range(0..free.len())),
                false => ABSENT,
            };
            lists.groups.push(entries.into_iter().map(&mut draw).collect());
        }
        Ok(lists)
    }

    /// Takes pages that were named out of what is free. A page that is in use already is taken all the same: whoever
    /// names pages may want that.
    pub(crate) fn take(&mut self, lists: &PageLists) {
        for (group, list) in lists.groups.iter().enumerate() {
            let taken: std::collections::HashSet<u32> = list.iter().copied().collect();
            self.free[self.owners[group]].retain(|page| !taken.contains(page));
        }
    }

    /// Pages of an ended transfer are free again.
    pub(crate) fn give_back(&mut self, lists: &PageLists) {
        for (group, list) in lists.groups.iter().enumerate() {
            self.free[self.owners[group]].extend(list.iter().filter(|page| **page != ABSENT));
        }
    }
}

/// Per page group and entry, whether a prompt of `tokens` tokens needs a page there.
fn entries(envelope: &Envelope, rank: u32, tokens: u64) -> Vec<Vec<bool>> {
    let of_group = |group: usize| {
        let components = || {
            envelope
                .components
                .iter()
                .filter(move |one| usize::from(one.page_group) == group)
        };
        if components().any(|one| one.unit == Unit::Slot) {
            return vec![true];
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
        (0..most.div_ceil(page_size))
            .map(|entry| (entry + 1) * page_size > first)
            .collect()
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
        assert!(error.contains("need 1 pages and 0 are free"), "{error}");
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
    fn windows_slots_and_dcp() {
        let shape = ModelShape::new("m", 2).kv([0], 2, 8).window([1], 2, 8, 20);
        let envelope = Launch {
            pool_pages: 16,
            ..Launch::default()
        }
        .envelope(&shape)
        .unwrap();
        let of = |tokens| entries(&envelope, 0, tokens);
        // 70 tokens are 5 pages; the window keeps tokens 50 to 69, so pages 3 and 4.
        assert_eq!(of(70)[1], [false, false, false, true, true]);
        assert_eq!(of(70)[0], [true; 5]);
        assert_eq!(of(0), vec![Vec::<bool>::new(); 2]);

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
        assert_eq!(entries(&envelope, 0, 33)[0].len(), 2);
        assert_eq!(entries(&envelope, 1, 33)[0].len(), 1);
    }
}
