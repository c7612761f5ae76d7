//! The pool of one rank: its memory, and what every page of it should hold.

use std::sync::Arc;

use anyhow::Context as _;
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

    fn stamp(&mut self, lists: &PageLists, stamp: impl Fn(u32) -> Stamp) -> anyhow::Result<()> {
        Pool::each_entry(lists, |group, entry, page| {
            let owner = self.owner(group);
            let pages = &mut self.pages[owner];
            let count = pages.len();
            let owned = pages
                .get_mut(page as usize)
                .with_context(|| format!("page {page} of group {group}: the pool has {count}"))?;
            *owned = Owned {
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
