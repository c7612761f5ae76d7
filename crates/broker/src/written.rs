//! Pages that open fetches write: no two of one rank may write the same page at once.
//!
//! An entry a page, so that looking costs as much as the fetch's own list is long, however many others are open. What is
//! held is bounded by `limits.pages`, and goes when the fetch is settled.

use std::collections::{BTreeMap, HashMap};

use kvferry_control::{Fault, TransferId};
use kvferry_handshake::{ABSENT, Code, Envelope, PageLists};
use kvferry_plan::WrittenPages;

use crate::ranks::RankLife;

/// Pools of up to so many pages have a table of them all (4 bytes a page); larger ones a map of those that are written.
const TABLED: u32 = 1 << 20;
/// Of a page that nothing writes.
const FREE: u32 = u32::MAX;

/// Which fetch writes which page, for each rank and pool.
#[derive(Debug, Default)]
pub(crate) struct Written {
    pools: BTreeMap<(RankLife, u16), Pool>,
    /// The open fetches, by the number that stands for them in the pools.
    writers: Vec<Option<TransferId>>,
    vacant: Vec<u32>,
}

#[derive(Debug)]
struct Pool {
    writers: Writers,
    held: usize,
}

#[derive(Debug)]
enum Writers {
    Table(Vec<u32>),
    Map(HashMap<u32, u32>),
}

/// What one fetch holds of [`Written`].
#[derive(Debug)]
pub(crate) struct Writes {
    writer: u32,
    pages: Vec<WrittenPages>,
}

impl Pool {
    fn new(pages: u32) -> Pool {
        let table = usize::try_from(pages).ok().filter(|_| pages <= TABLED);
        Pool {
            writers: match table {
                Some(pages) => Writers::Table(vec![FREE; pages]),
                None => Writers::Map(HashMap::new()),
            },
            held: 0,
        }
    }

    fn writer(&self, page: u32) -> Option<u32> {
        let writer = match &self.writers {
            Writers::Table(table) => usize::try_from(page).ok().and_then(|page| table.get(page)),
            Writers::Map(map) => map.get(&page),
        };
        writer.copied().filter(|writer| *writer != FREE)
    }

    fn set(&mut self, page: u32, writer: u32) {
        let old = match &mut self.writers {
            Writers::Table(table) => {
                let entry = usize::try_from(page).ok().and_then(|page| table.get_mut(page));
                entry.map_or(FREE, |entry| std::mem::replace(entry, writer))
            }
            Writers::Map(map) if writer == FREE => map.remove(&page).unwrap_or(FREE),
            Writers::Map(map) => map.insert(page, writer).unwrap_or(FREE),
        };
        self.held += usize::from(writer != FREE);
        self.held -= usize::from(old != FREE);
    }
}

/// The pages that a fetch writes of one list.
fn ids<'a>(lists: &'a PageLists, written: &WrittenPages) -> impl Iterator<Item = u32> + 'a {
    let list = lists.groups.get(written.group).map_or(&[][..], Vec::as_slice);
    let list = list.get(written.first..).unwrap_or_default();
    list.iter().copied().filter(|id| *id != ABSENT)
}

impl Written {
    /// Pages that are held.
    pub(crate) fn len(&self) -> usize {
        self.pools.values().map(|pool| pool.held).sum()
    }

    /// Refuses pages that another open fetch of the rank writes. Those of a lower attempt of the same transfer are not
    /// refused: the higher one waits until it has settled.
    pub(crate) fn check(
        &self,
        life: RankLife,
        envelope: &Envelope,
        transfer: &TransferId,
        lists: &PageLists,
        pages: &[WrittenPages],
    ) -> Result<(), Fault> {
        for written in pages {
            let Some(pool) = self.pools.get(&(life, written.pool)) else {
                continue;
            };
            for page in ids(lists, written) {
                let other = pool.writer(page).and_then(|writer| self.transfer(writer));
                if let Some(other) = other.filter(|other| other.id != transfer.id) {
                    let group = envelope.page_groups.get(written.group);
                    let group = group.map_or("", |group| group.name.as_str());
                    return Err(Fault::new(
                        Code::PageInUse,
                        format!(
                            "transfer {} attempt {} would write page {page} of group {group:?}, which the open fetch of \
                             transfer {} attempt {} writes: name other pages, or fetch when that one has ended",
                            transfer.id, transfer.attempt, other.id, other.attempt
                        ),
                    ));
                }
            }
        }
        Ok(())
    }

    fn transfer(&self, writer: u32) -> Option<&TransferId> {
        self.writers.get(usize::try_from(writer).ok()?)?.as_ref()
    }

    /// Holds pages that were checked.
    pub(crate) fn take(
        &mut self,
        life: RankLife,
        envelope: &Envelope,
        transfer: &TransferId,
        lists: &PageLists,
        pages: Vec<WrittenPages>,
    ) -> Writes {
        let writer = self.vacant.pop().unwrap_or_else(|| {
            self.writers.push(None);
            u32::try_from(self.writers.len() - 1).unwrap_or(FREE)
        });
        if let Some(entry) = usize::try_from(writer)
            .ok()
            .and_then(|at| self.writers.get_mut(at))
        {
            *entry = Some(transfer.clone());
        }
        for written in &pages {
            let mut ids = ids(lists, written).peekable();
            if ids.peek().is_none() {
                continue;
            }
            let pool = self.pools.entry((life, written.pool)).or_insert_with(|| {
                let pool = envelope.page_groups.get(usize::from(written.pool));
                Pool::new(pool.map_or(0, |group| group.pool_pages))
            });
            for page in ids {
                pool.set(page, writer);
            }
        }
        Writes { writer, pages }
    }

    /// The fetch is settled. Pages that a higher attempt holds by now stay held.
    pub(crate) fn release(&mut self, life: RankLife, lists: &PageLists, writes: &Writes) {
        for written in &writes.pages {
            let key = (life, written.pool);
            let Some(pool) = self.pools.get_mut(&key) else {
                continue;
            };
            for page in ids(lists, written) {
                if pool.writer(page) == Some(writes.writer) {
                    pool.set(page, FREE);
                }
            }
            if pool.held == 0 {
                self.pools.remove(&key);
            }
        }
        if let Some(entry) = usize::try_from(writes.writer)
            .ok()
            .and_then(|at| self.writers.get_mut(at))
        {
            *entry = None;
            self.vacant.push(writes.writer);
        }
        if self.vacant.len() == self.writers.len() {
            // Nothing is open: what a burst took goes.
            self.vacant = Vec::new();
            self.writers = Vec::new();
        }
    }
}
