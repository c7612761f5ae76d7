//! The pool of one rank: its memory, and what every page of it should hold.

use std::sync::Arc;

use kvferry_handshake::{ABSENT, Envelope, PageLists};

use super::content::{Content, Expected, Extent, Stamp};
use super::memory::{MemoryKind, PoolMemory};
use super::pattern::poison_seed;
use super::rows::{RankRows, Row};
use super::run::{Checked, Checker, Writer};

/// Poison of what was never given to anyone.
const FRESH: u64 = 0;

/// One rank's pool.
#[derive(Debug)]
pub(crate) struct Pool {
    rows: RankRows,
    memory: Vec<(u16, PoolMemory)>,
    /// Per page group that owns a pool: whose each page is, and what it holds.
    pages: Vec<Vec<Owned>>,
    gaps: Vec<(u16, u64, u64)>,
    poisoned: bool,
}

#[derive(Clone, Debug)]
struct Owned {
    group: usize,
    stamp: Stamp,
}

impl Pool {
    /// Allocates every region that the rank's placements name.
    pub(crate) fn allocate(envelope: Envelope, rank: u32, kind: MemoryKind) -> anyhow::Result<Pool> {
        let name = format!("{}-{rank}", envelope.identity.engine);
        let fresh = |(at, group): (usize, &kvferry_handshake::PageGroup)| {
            let owner = usize::from(group.pool) == at;
            let count = if owner { group.pool_pages as usize } else { 0 };
            vec![
                Owned {
                    group: at,
                    stamp: Stamp::Fresh
                };
                count
            ]
        };
        let pages = envelope.page_groups.iter().enumerate().map(fresh).collect();
        let rows = RankRows::new(envelope, rank);
        let (mut memory, mut gaps) = (Vec::new(), Vec::new());
        for (region, len) in rows.regions() {
            let allocated = PoolMemory::allocate(kind, &format!("{name}-{region}"), len)?;
            memory.push((region, allocated));
            gaps.extend(
                rows.gaps(region, len)?
                    .into_iter()
                    .map(|(offset, len)| (region, offset, len)),
            );
        }
        Ok(Pool {
            rows,
            memory,
            pages,
            gaps,
            poisoned: false,
        })
    }

    pub(crate) fn rows(&self) -> &RankRows {
        &self.rows
    }

    /// Each region's number and memory.
    pub(crate) fn regions(&self) -> &[(u16, PoolMemory)] {
        &self.memory
    }

    /// Bytes of all regions.
    pub(crate) fn bytes(&self) -> u64 {
        self.memory.iter().map(|(_, memory)| memory.len()).sum()
    }

    /// Fills everything with poison, padding too: whatever is written where nobody asked shows.
    pub(crate) fn poison(&mut self) -> anyhow::Result<()> {
        self.poisoned = true;
        let mut writer = Writer::new(&self.memory);
        for (owner, pages) in self.pages.iter().enumerate() {
            for page in 0..u32::try_from(pages.len())? {
                self.rows
                    .of_page(owner, page, &mut |row| writer.write(row, self.fresh(row)))?;
            }
        }
        writer.finish()?;
        for (region, offset, len) in &self.gaps {
            self.each_gap_piece(*region, *offset, *len, |memory, offset, expected| {
                memory.write(offset, expected)
            })?;
        }
        Ok(())
    }

    fn fresh(&self, row: &Row) -> Expected {
        match self.poisoned {
            true => Expected::Poison(poison_seed(FRESH, row.region, row.offset)),
            false => Expected::Zero,
        }
    }

    fn owner(&self, group: usize) -> usize {
        usize::from(self.rows.envelope().page_groups[group].pool)
    }

    fn each_entry(
        lists: &PageLists,
        mut each: impl FnMut(usize, u32, u32) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        for (group, list) in lists.groups.iter().enumerate() {
            for (entry, page) in (0u32..).zip(list).filter(|(_, page)| **page != ABSENT) {
                each(group, entry, *page)?;
            }
        }
        Ok(())
    }

    /// Whether every page of the lists is in its pool.
    pub(crate) fn holds(&self, lists: &PageLists) -> anyhow::Result<()> {
        Pool::each_entry(lists, |group, entry, page| {
            let count = self.pages[self.owner(group)].len();
            let name = &self.rows.envelope().page_groups[group].name;
            anyhow::ensure!(
                (page as usize) < count,
                "page group {name}, entry {entry}: there is no page {page}; the pool has {count}, from 0 to {}",
                count.saturating_sub(1)
            );
            Ok(())
        })
    }

    /// Stamps all pages of the lists, or none where one of them is not in the pool.
    fn stamp(&mut self, lists: &PageLists, stamp: impl Fn(u32) -> Stamp) -> anyhow::Result<()> {
        self.holds(lists)?;
        Pool::each_entry(lists, |group, entry, page| {
            let owner = self.owner(group);
            self.pages[owner][page as usize] = Owned {
                group,
                stamp: stamp(entry),
            };
            Ok(())
        })
    }

    /// Writes `content` into the pages of the lists: all rows, or those that it holds and `earlier` did not. Gives
    /// the bytes written.
    pub(crate) fn give(
        &mut self,
        lists: &PageLists,
        content: &Arc<Content>,
        earlier: Option<&Extent>,
    ) -> anyhow::Result<u64> {
        self.stamp(lists, |entry| Stamp::Entry(Arc::clone(content), entry))?;
        let mut writer = Writer::new(&self.memory);
        Pool::each_entry(lists, |group, entry, page| {
            self.rows.of_page(group, page, &mut |row| match earlier {
                Some(earlier) if !content.extent.adds(earlier, &self.rows, row, entry) => Ok(()),
                _ => writer.write(row, content.expected(&self.rows, row, entry)),
            })
        })?;
        writer.finish()
    }

    /// States that the pages hold `content` now, without writing it.
    pub(crate) fn expect(&mut self, lists: &PageLists, content: &Arc<Content>) -> anyhow::Result<()> {
        self.stamp(lists, |entry| Stamp::Entry(Arc::clone(content), entry))
    }

    /// States that something is under way in the pages.
    pub(crate) fn in_flight(&mut self, lists: &PageLists) -> anyhow::Result<()> {
        self.stamp(lists, |_| Stamp::InFlight)
    }

    /// Compares every byte of the pages of the lists with what they should hold.
    pub(crate) fn check(&self, lists: &PageLists) -> anyhow::Result<Checked> {
        let mut checker = Checker::new(&self.rows, &self.memory);
        Pool::each_entry(lists, |group, _, page| {
            let owned = &self.pages[self.owner(group)][page as usize];
            self.check_page(&mut checker, owned, page)
        })?;
        checker.finish()
    }

    /// Compares every byte of the pool with what it should hold, padding too. Pages under way are left out.
    pub(crate) fn audit(&self) -> anyhow::Result<Checked> {
        let mut checker = Checker::new(&self.rows, &self.memory);
        for pages in &self.pages {
            for (page, owned) in (0u32..).zip(pages) {
                self.check_page(&mut checker, owned, page)?;
            }
        }
        let mut checked = checker.finish()?;
        for (region, offset, len) in &self.gaps {
            self.each_gap_piece(*region, *offset, *len, |memory, offset, expected| {
                let mut found = vec![0; expected.len()];
                memory.read(offset, &mut found)?;
                checked.padding(*region, offset, expected, &found);
                Ok(())
            })?;
        }
        Ok(checked)
    }

    fn check_page(&self, checker: &mut Checker<'_>, owned: &Owned, page: u32) -> anyhow::Result<()> {
        match &owned.stamp {
            Stamp::InFlight => Ok(()),
            Stamp::Fresh => self.rows.of_page(owned.group, page, &mut |row| {
                checker.check(row, page, self.fresh(row))
            }),
            Stamp::Entry(content, entry) => self.rows.of_page(owned.group, page, &mut |row| {
                checker.check(row, page, content.expected(&self.rows, row, *entry))
            }),
        }
    }

    fn each_gap_piece(
        &self,
        region: u16,
        offset: u64,
        len: u64,
        mut each: impl FnMut(&PoolMemory, u64, &[u8]) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        const PIECE: u64 = 1 << 20;
        let memory = super::run::region(&self.memory, region)?;
        let mut at = offset;
        while at < offset + len {
            let piece = PIECE.min(offset + len - at);
            let mut expected = vec![0; usize::try_from(piece)?];
            if self.poisoned {
                Expected::Poison(poison_seed(FRESH, region, at)).fill(&mut expected);
            }
            each(memory, at, &expected)?;
            at += piece;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use kvferry_handshake::{Launch, ModelShape, Order, Padding, Ready, TokenRange};

    use super::super::pattern::Filling;
    use super::super::run::region;
    use super::super::scatter::FreePages;
    use super::*;

    const TOKENS: u64 = 41;

    fn launch(tp: u32, order: Order, page_size: u32) -> Envelope {
        let shape = ModelShape::new("m", 3)
            .kv_widths(0..3, 4, 24, 12)
            .window([1], 2, 8, 20);
        Launch {
            tp,
            order,
            page_size,
            pool_pages: 9,
            ..Launch::default()
        }
        .envelope(&shape)
        .unwrap()
    }

    fn pool(envelope: &Envelope, rank: u32) -> Pool {
        let mut pool = Pool::allocate(envelope.clone(), rank, MemoryKind::Memfd).unwrap();
        pool.poison().unwrap();
        pool
    }

    fn content(extent: Extent) -> Arc<Content> {
        Arc::new(Content {
            nonce: 3,
            filling: Filling::new("t", 1, 2),
            extent,
        })
    }

    /// A row by what it is: component, layer, part, token, head.
    type Global = (usize, u32, usize, u64, u32);

    fn rows_of(pool: &Pool, lists: &PageLists, page_size: u64) -> HashMap<Global, Row> {
        let mut rows = HashMap::new();
        Pool::each_entry(lists, |group, entry, page| {
            pool.rows.of_page(group, page, &mut |row| {
                let token = u64::from(entry) * page_size + u64::from(row.position);
                rows.insert((row.component, row.layer, row.part, token, row.head), *row);
                Ok(())
            })
        })
        .unwrap();
        rows
    }

    fn bytes(pool: &Pool, row: &Row) -> Vec<u8> {
        let mut bytes = vec![0; row.len];
        region(&pool.memory, row.region)
            .unwrap()
            .read(row.offset, &mut bytes)
            .unwrap();
        bytes
    }

    #[test]
    fn lists_that_do_not_fit_change_nothing() {
        let mut pool = pool(&launch(1, Order::Nhd, 8), 0);
        let lists = PageLists {
            groups: vec![vec![0, 9], vec![]],
        };
        let error = pool
            .give(&lists, &content(Extent::Nothing), None)
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("page group pages, entry 1: there is no page 9; the pool has 9"),
            "{error}"
        );
        assert!(pool.audit().unwrap().is_right());
    }

    /// Two engines of unlike geometry: what one fills, copied row by row, is what the other expects.
    #[test]
    fn engines_of_different_geometry_agree_on_every_byte() {
        let (prefill, decode) = (launch(4, Order::Hnd, 8), launch(2, Order::Nhd, 16));
        let mut target = pool(&decode, 1);
        let lists = FreePages::new(&decode).draw(&decode, 1, TOKENS, 7).unwrap();
        target.give(&lists, &content(Extent::Nothing), None).unwrap();
        let wanted = rows_of(&target, &lists, 16);

        let range = TokenRange { from: 5, to: TOKENS };
        let fetched = content(Extent::Fetched(range));
        for rank in 0..4 {
            let mut source = pool(&prefill, rank);
            let lists = FreePages::new(&prefill).draw(&prefill, rank, TOKENS, 3).unwrap();
            source
                .give(&lists, &content(Extent::Ready(Ready::complete(TOKENS))), None)
                .unwrap();
            assert!(source.check(&lists).unwrap().is_right());
            for (global, from) in rows_of(&source, &lists, 8) {
                let (component, _, _, token, _) = global;
                let window_from = if component == 1 { TOKENS - 20 } else { 5 };
                if (window_from..TOKENS).contains(&token)
                    && let Some(to) = wanted.get(&global)
                {
                    let memory = region(&target.memory, to.region).unwrap();
                    memory.write(to.offset, &bytes(&source, &from)).unwrap();
                }
            }
        }
        target.expect(&lists, &fetched).unwrap();
        let checked = target.check(&lists).unwrap();
        assert!(checked.is_right(), "{:?}", checked.told);
        // 2 of 4 heads, 3 layers, K 24 and V 12 wide; 1 of 2 heads of the window's 20 tokens; bf16.
        assert_eq!(checked.pattern, 36 * 3 * 2 * 36 * 2 + 20 * 16 * 2);
        assert!(target.audit().unwrap().is_right());
    }

    /// Every byte of the pool is watched: pages asked for, held tokens, pages not asked for, padding.
    #[test]
    fn one_wrong_byte_anywhere_shows() {
        let shape = ModelShape::new("m", 2).kv(0..2, 2, 8);
        let padding = Padding {
            page: 64,
            ..Padding::default()
        };
        let envelope = Launch {
            page_size: 4,
            pool_pages: 3,
            padding,
            ..Launch::default()
        }
        .envelope(&shape)
        .unwrap();
        let mut pool = pool(&envelope, 0);
        assert!(!pool.gaps.is_empty(), "the padding is not seen");
        let lists = PageLists {
            groups: vec![vec![2, 0]],
        };
        pool.give(
            &lists,
            &content(Extent::Fetched(TokenRange { from: 2, to: 7 })),
            None,
        )
        .unwrap();
        assert!(pool.audit().unwrap().is_right());
        for (region, memory) in &pool.memory {
            for at in 0..memory.len() {
                let mut byte = [0];
                memory.read(at, &mut byte).unwrap();
                memory.write(at, &[byte[0] ^ 0x10]).unwrap();
                let checked = pool.audit().unwrap();
                assert_eq!(
                    (checked.wrong, checked.told.len()),
                    (1, 1),
                    "region {region}, offset {at}"
                );
                memory.write(at, &byte).unwrap();
            }
        }
        assert!(pool.audit().unwrap().is_right());
    }

    #[test]
    fn steps_fill_only_what_is_new() {
        let envelope = launch(1, Order::Nhd, 16);
        let mut pool = pool(&envelope, 0);
        let lists = FreePages::new(&envelope).draw(&envelope, 0, TOKENS, 7).unwrap();
        let half = Extent::Ready(Ready {
            tokens: 20,
            front_tokens: TOKENS,
            front_layers: 1,
            end: None,
        });
        let all = Extent::Ready(Ready::complete(TOKENS));
        pool.give(&lists, &content(half), None).unwrap();
        let checked = pool.check(&lists).unwrap();
        // 4 heads of 36 elements in bf16: 41 tokens of layer 0, 20 of layers 1 and 2; nothing of the window yet.
        assert_eq!((checked.pattern, checked.wrong), (4 * 36 * 2 * (41 + 20 + 20), 0));
        let written = pool.give(&lists, &content(all), Some(&half)).unwrap();
        // The rest of layers 1 and 2, and the window's tokens in its pages that are kept (16 to 40).
        assert_eq!(written, 4 * 36 * 2 * (21 + 21) + 2 * 16 * 2 * 25);
        assert!(pool.audit().unwrap().is_right());
    }

    #[test]
    fn pages_under_way_are_left_out_and_pages_outside_are_refused() {
        let envelope = launch(1, Order::Nhd, 16);
        let mut pool = pool(&envelope, 0);
        let lists = PageLists {
            groups: vec![vec![4], vec![1]],
        };
        pool.in_flight(&lists).unwrap();
        let row = *rows_of(&pool, &lists, 16).values().next().unwrap();
        region(&pool.memory, row.region)
            .unwrap()
            .write(row.offset, &[1; 4])
            .unwrap();
        assert!(pool.audit().unwrap().is_right());
        let outside = PageLists {
            groups: vec![vec![9], vec![]],
        };
        assert!(pool.give(&outside, &content(Extent::Nothing), None).is_err());
    }
}
