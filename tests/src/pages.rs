//! Free pages of a rank, drawn scattered.

use kvferry_handshake::{ABSENT, PageLists, Unit};
use rand::Rng as _;
use rand::rngs::StdRng;

use crate::rows::RankRows;

/// The free pages of each pool of one rank.
#[derive(Debug)]
pub struct FreePages {
    /// Of each page group, the free pages of its own pool; empty where it draws from another's.
    pools: Vec<Vec<u32>>,
}

impl FreePages {
    /// All pages are free.
    pub fn new(rows: &RankRows) -> FreePages {
        let groups = rows.envelope.page_groups.iter().enumerate();
        FreePages {
            pools: groups
                .map(|(at, group)| match usize::from(group.pool) == at {
                    true => (0..group.pool_pages).collect(),
                    false => Vec::new(),
                })
                .collect(),
        }
    }

    /// Page lists for a prompt of `tokens` tokens, at random places. With `sparse`, pages that lie wholly before a
    /// sliding window are absent, as frameworks free them.
    ///
    /// # Panics
    ///
    /// When the pool has too few free pages: the test asks for more than it made room for.
    pub fn draw(&mut self, rows: &RankRows, tokens: u64, sparse: bool, random: &mut StdRng) -> PageLists {
        let mut lists = PageLists::default();
        for (at, group) in rows.envelope.page_groups.iter().enumerate() {
            let page = u64::from(group.page_size);
            let of_group = rows
                .envelope
                .components
                .iter()
                .filter(|c| usize::from(c.page_group) == at);
            let components: Vec<_> = of_group.collect();
            let entries = if components.iter().all(|component| component.unit == Unit::Slot) {
                1
            } else {
                rows.local_tokens(at, tokens).div_ceil(page)
            };
            // The window that reaches furthest back; a component without one keeps everything.
            let kept = components
                .iter()
                .map(|component| component.window.map_or(u64::MAX, u64::from))
                .max();
            let kept_from = tokens.saturating_sub(kept.unwrap_or(u64::MAX));
            let list = (0..entries).map(|entry| {
                let plain = components.iter().all(|component| component.dcp.size == 1);
                if sparse && plain && (entry + 1) * page <= kept_from {
                    return ABSENT;
                }
                let pool = &mut self.pools[usize::from(group.pool)];
                assert!(
                    !pool.is_empty(),
                    "no free page in group {} of rank {}",
                    group.name,
                    rows.rank
                );
                pool.swap_remove(random.random_range(0..pool.len()))
            });
            lists.groups.push(list.collect());
        }
        lists
    }

    /// The pages are free again.
    pub fn give_back(&mut self, rows: &RankRows, lists: &PageLists) {
        for (group, list) in rows.envelope.page_groups.iter().zip(&lists.groups) {
            let pool = &mut self.pools[usize::from(group.pool)];
            pool.extend(list.iter().filter(|page| **page != ABSENT));
        }
    }
}
