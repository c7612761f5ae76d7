//! A pool of pages in a sealed memfd, scattered page lists, and a pattern to tell them by.
#![allow(unsafe_code)]

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use anyhow::{Context, ensure};
use kvferry_handshake::{Allocation, Envelope, Launch, ModelShape, PageLists, Policy, TokenRange};
use kvferry_plan::{ChunkMap, LinkPlan, judge};
use memmap2::{MmapOptions, MmapRaw};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

/// What is measured: so many pages of one size, out of a pool that is larger.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cell {
    /// Bytes of a page.
    pub(crate) page: usize,
    /// Pages moved.
    pub(crate) count: usize,
}

/// A pool.
pub(crate) struct Pool {
    file: File,
    map: MmapRaw,
    cell: Cell,
    /// Which page is moved n-th.
    pub(crate) pages: Arc<PageLists>,
}

impl Cell {
    /// Pages of the pool: a quarter is not moved.
    fn pool_pages(self) -> usize {
        self.count + self.count / 4 + 1
    }

    /// One rank whose page is one row.
    fn envelope(self) -> anyhow::Result<Envelope> {
        let width = u32::try_from(self.page / 2)?;
        let launch = Launch {
            page_size: 1,
            pool_pages: u32::try_from(self.pool_pages())?,
            allocation: Allocation::OneRegion,
            ..Launch::default()
        };
        Ok(launch.envelope(&ModelShape::new("bench", 1).latent([0], width))?)
    }

    /// The plan for these pages at the receiver.
    pub(crate) fn map(self, decode_pages: &Arc<PageLists>) -> anyhow::Result<ChunkMap> {
        let envelope = self.envelope()?;
        let (verdict, plan) = judge(&envelope, &envelope, Policy::Strict);
        let plan: Arc<LinkPlan> = Arc::new(plan.with_context(|| format!("{verdict:?}"))?);
        let range = TokenRange {
            from: 0,
            to: u64::try_from(self.count)?,
        };
        Ok(ChunkMap::new(&plan, 0, 0, range, Arc::clone(decode_pages))?)
    }
}

/// The pages of a side, in the order in which they are moved: both processes know both.
pub(crate) fn scattered(cell: Cell, seed: u64) -> anyhow::Result<Arc<PageLists>> {
    let mut pages: Vec<u32> = (0..u32::try_from(cell.pool_pages())?).collect();
    pages.shuffle(&mut StdRng::seed_from_u64(seed));
    pages.truncate(cell.count);
    Ok(Arc::new(PageLists { groups: vec![pages] }))
}

impl Pool {
    pub(crate) const SOURCE: u64 = 1;
    pub(crate) const TARGET: u64 = 2;

    /// A pool filled with a pattern that `seed` and the page decide; every page of it is touched.
    pub(crate) fn new(cell: Cell, seed: u64) -> anyhow::Result<Pool> {
        let fd = memfd_create("kvferry-bench", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        let len = cell.pool_pages() * cell.page;
        ftruncate(&fd, u64::try_from(len)?)?;
        fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW)?;
        let file = File::from(fd);
        let map = MmapOptions::new().len(len).map_raw(&file)?;
        let pool = Pool {
            file,
            map,
            cell,
            pages: scattered(cell, seed)?,
        };
        pool.fill(seed);
        Ok(pool)
    }

    /// A mapping of its own for whoever asks: nobody profits from another's page tables.
    pub(crate) fn remap(&self) -> anyhow::Result<Pool> {
        let map = MmapOptions::new().len(self.map.len()).map_raw(&self.file)?;
        Ok(Pool {
            file: self.file.try_clone()?,
            map,
            cell: self.cell,
            pages: Arc::clone(&self.pages),
        })
    }

    pub(crate) fn fd(&self) -> anyhow::Result<OwnedFd> {
        Ok(self.file.try_clone()?.into())
    }

    pub(crate) fn len(&self) -> u64 {
        u64::try_from(self.map.len()).unwrap_or(u64::MAX)
    }

    /// Where the n-th moved page is.
    pub(crate) fn moved(&self, n: usize) -> *mut u8 {
        self.at(self.pages.groups[0][n])
    }

    fn at(&self, page: u32) -> *mut u8 {
        let offset = usize::try_from(page).unwrap_or(usize::MAX) * self.cell.page;
        assert!(offset + self.cell.page <= self.map.len());
        self.map.as_mut_ptr().wrapping_add(offset)
    }

    /// Writes the pattern of `seed` to every page.
    pub(crate) fn fill(&self, seed: u64) {
        let mut bytes = vec![0; self.cell.page];
        for page in 0..u32::try_from(self.cell.pool_pages()).unwrap_or(0) {
            pattern(seed, page, &mut bytes);
            // SAFETY: `at` gives a page inside the mapping, which is `cell.page` bytes long, as `bytes` is.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.at(page), bytes.len()) };
        }
    }

    /// Checks that the moved pages hold the source's pattern, and the others their own of `seed`.
    pub(crate) fn check(&self, seed: u64, source: &PageLists) -> anyhow::Result<()> {
        let mut due: Vec<(u64, u32)> = (0..u32::try_from(self.cell.pool_pages())?)
            .map(|page| (seed, page))
            .collect();
        for (from, to) in source.groups[0].iter().zip(&self.pages.groups[0]) {
            due[usize::try_from(*to)?] = (Pool::SOURCE, *from);
        }
        let (mut bytes, mut is) = (vec![0; self.cell.page], vec![0; self.cell.page]);
        for (page, (seed, of)) in (0u32..).zip(due) {
            pattern(seed, of, &mut bytes);
            // SAFETY: as in `fill`.
            unsafe { std::ptr::copy_nonoverlapping(self.at(page), is.as_mut_ptr(), is.len()) };
            ensure!(is == bytes, "page {page} is not what it must be");
        }
        Ok(())
    }
}

/// A page's bytes: a random word, and its multiples.
fn pattern(seed: u64, page: u32, bytes: &mut [u8]) {
    let mut word: u64 = StdRng::seed_from_u64(seed << 32 | u64::from(page)).random();
    for chunk in bytes.chunks_mut(8) {
        chunk.copy_from_slice(&word.to_le_bytes()[..chunk.len()]);
        word = word.wrapping_add(0x9e37_79b9_7f4a_7c15);
    }
}
