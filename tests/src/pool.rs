//! A rank's pool: its memory, and beside it the bytes that it must hold, kept by the test alone.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvferry_handshake::{ABSENT, Envelope, PageLists, Ready, TokenRange, Unit};
use rand::SeedableRng as _;
use rand::rngs::StdRng;

use crate::memory::{Kind, Memory};
use crate::pages::FreePages;
use crate::pattern::{Coordinates, Stamp, poison};
use crate::rows::{RankRows, Row};

/// One rank's pool.
#[derive(Debug)]
pub struct Pool {
    rows: RankRows,
    regions: BTreeMap<u16, Region>,
    free: FreePages,
    random: StdRng,
    nonce: u64,
}

#[derive(Debug)]
struct Region {
    memory: Memory,
    /// What `memory` must hold.
    should: Vec<u8>,
}

/// Rows of one region that lie behind one another: written and read at once.
#[derive(Default)]
struct Run {
    region: u16,
    start: u64,
    end: u64,
}

impl Pool {
    /// Allocates what the rank's placements name, and fills all of it with poison, padding too.
    pub fn new(envelope: Arc<Envelope>, rank: u32, kind: Kind, seed: u64) -> Pool {
        let rows = RankRows::new(envelope, rank);
        let name = format!("{}-{rank}", rows.envelope.identity.engine);
        let mut regions = BTreeMap::new();
        for (number, len) in &rows.regions {
            let mut should = vec![0; usize::try_from(*len).unwrap()];
            poison(seed, *number, u64::MAX, &mut should);
            let memory = Memory::allocate(kind, &name, *len);
            memory.write(0, &should);
            regions.insert(*number, Region { memory, should });
        }
        let free = FreePages::new(&rows);
        Pool {
            rows,
            regions,
            free,
            random: StdRng::seed_from_u64(seed),
            nonce: seed,
        }
    }

    /// Where its rows lie.
    pub fn rows(&self) -> &RankRows {
        &self.rows
    }

    /// Each region's number and memory.
    pub fn regions(&self) -> impl Iterator<Item = (u16, &Memory)> {
        self.regions
            .iter()
            .map(|(number, region)| (*number, &region.memory))
    }

    /// Free pages for a prompt; see [`FreePages::draw`]. They are poisoned.
    pub fn draw(&mut self, tokens: u64, sparse: bool) -> PageLists {
        let lists = self.free.draw(&self.rows, tokens, sparse, &mut self.random);
        self.poison(&lists);
        lists
    }

    /// The pages are free again.
    pub fn give_back(&mut self, lists: &PageLists) {
        self.free.give_back(&self.rows, lists);
    }

    /// Overwrites the pages with what nobody can know: a byte that lands later, or was read too late, shows.
    pub fn poison(&mut self, lists: &PageLists) {
        self.nonce = self.nonce.wrapping_add(0x1_0000_0001);
        let nonce = self.nonce;
        self.write(lists, |_, _, _, row, page, out| {
            poison(nonce, row.region, row.offset(page), out);
            true
        });
    }

    /// Writes what a source has computed once `ready` is ready: the rows of these tokens, and no others.
    pub fn fill(&mut self, lists: &PageLists, stamp: &Stamp, ready: &Ready) {
        self.write(lists, |rows, group, entry, row, _, out| {
            let holds = is_ready(rows, row, entry, group, ready);
            if holds {
                stamp.write(coordinates(rows, row, entry), out);
            }
            holds
        });
    }

    /// From now on the pages must hold what a fetch of `range` delivered, and else what they held before.
    pub fn expect(&mut self, lists: &PageLists, stamp: &Stamp, range: TokenRange) {
        let rows = &self.rows;
        each_row(rows, lists, |group, entry, row, page| {
            if is_wanted(rows, row, entry, group, range) {
                let region = self.regions.get_mut(&row.region).unwrap();
                stamp.write(
                    coordinates(rows, row, entry),
                    place(&mut region.should, row, page),
                );
            }
        });
    }

    /// Compares every row of these pages with what it must hold.
    ///
    /// # Panics
    ///
    /// When one differs, with its place, its meaning, and both values.
    pub fn check(&self, lists: &PageLists, what: &str) {
        let mut run = Run::default();
        let same = |run: &Run| {
            let mut found = vec![0; usize::try_from(run.end - run.start).unwrap()];
            if found.is_empty() {
                return true;
            }
            let region = &self.regions[&run.region];
            region.memory.read(run.start, &mut found);
            found == region.should[usize::try_from(run.start).unwrap()..][..found.len()]
        };
        let mut right = true;
        each_row(&self.rows, lists, |_, _, row, page| {
            if !run.continues(row, page) {
                right &= same(&run);
                run = Run::at(row, page);
            }
            run.end += row.len as u64;
        });
        if right && same(&run) {
            return;
        }
        each_row(&self.rows, lists, |_, entry, row, page| {
            let region = &self.regions[&row.region];
            let mut found = vec![0; row.len];
            region.memory.read(row.offset(page), &mut found);
            let should = &region.should[usize::try_from(row.offset(page)).unwrap()..][..row.len];
            if found != should {
                self.wrong(what, row, entry, page, &found, should);
            }
        });
        panic!(
            "{what}: a page of {} held something else a moment ago",
            self.rows.envelope.identity.engine
        );
    }

    /// Compares the whole pool, padding too.
    ///
    /// # Panics
    ///
    /// When one byte differs.
    pub fn check_all(&self, what: &str) {
        for (number, region) in &self.regions {
            let mut found = vec![0; region.should.len()];
            region.memory.read(0, &mut found);
            if found != region.should {
                let at = found
                    .iter()
                    .zip(&region.should)
                    .position(|(a, b)| a != b)
                    .unwrap();
                self.name_place(what, *number, at as u64, &found, &region.should);
            }
        }
    }

    /// Bytes that a fetch of `range` must bring to this rank.
    pub fn wanted_bytes(&self, lists: &PageLists, range: TokenRange) -> u64 {
        let mut bytes = 0;
        each_row(&self.rows, lists, |group, entry, row, _| {
            if is_wanted(&self.rows, row, entry, group, range) {
                bytes += row.len as u64;
            }
        });
        bytes
    }

    fn write(
        &mut self,
        lists: &PageLists,
        mut row_bytes: impl FnMut(&RankRows, usize, u64, &Row, u32, &mut [u8]) -> bool,
    ) {
        let (rows, regions) = (&self.rows, &mut self.regions);
        let mut run = Run::default();
        each_row(rows, lists, |group, entry, row, page| {
            let region = regions.get_mut(&row.region).unwrap();
            if !row_bytes(
                rows,
                group,
                entry,
                row,
                page,
                place(&mut region.should, row, page),
            ) {
                return;
            }
            if !run.continues(row, page) {
                run.flush(regions);
                run = Run::at(row, page);
            }
            run.end += row.len as u64;
        });
        run.flush(regions);
    }

    fn wrong(&self, what: &str, row: &Row, entry: u64, page: u32, found: &[u8], should: &[u8]) -> ! {
        let component = self.rows.component(row);
        let at = found.iter().zip(should).position(|(a, b)| a != b).unwrap_or(0);
        let told = |bytes: &[u8]| {
            bytes[at..]
                .iter()
                .take(8)
                .map(|byte| format!("{byte:02x}"))
                .collect::<String>()
        };
        panic!(
            "{what}: {} rank {}: {} layer {} part {} head {}, page {page} (entry {entry}, token {}), region {} \
             offset {}: {} instead of {}",
            self.rows.envelope.identity.engine,
            self.rows.rank,
            component.name,
            row.layer,
            component.parts[row.part].name,
            row.head,
            self.rows.token(row, entry),
            row.region,
            row.offset(page) + at as u64,
            told(found),
            told(should),
        )
    }

    /// A byte of the whole pool differs: names the row that it belongs to, if any.
    fn name_place(&self, what: &str, region: u16, at: u64, found: &[u8], should: &[u8]) -> ! {
        for (group, rows) in self.rows.envelope.page_groups.iter().zip(&self.rows.groups) {
            for row in rows.iter().filter(|row| row.region == region && row.page0 <= at) {
                let page = (at - row.page0).checked_div(row.page_stride).unwrap_or(0);
                let inside = (at - row.page0) - page * row.page_stride;
                if page < group.pool_pages.into() && inside < row.len as u64 {
                    let page = u32::try_from(page).unwrap();
                    let start = usize::try_from(row.offset(page)).unwrap();
                    let (found, should) = (&found[start..start + row.len], &should[start..start + row.len]);
                    self.wrong(
                        &format!("{what} (group {}, entry not known)", group.name),
                        row,
                        0,
                        page,
                        found,
                        should,
                    );
                }
            }
        }
        let engine = &self.rows.envelope.identity.engine;
        panic!(
            "{what}: {engine} rank {}: padding of region {region} at offset {at} was written",
            self.rows.rank
        )
    }
}

impl Run {
    fn at(row: &Row, page: u32) -> Run {
        Run {
            region: row.region,
            start: row.offset(page),
            end: row.offset(page),
        }
    }

    fn continues(&self, row: &Row, page: u32) -> bool {
        self.region == row.region && self.end == row.offset(page)
    }

    fn flush(&self, regions: &BTreeMap<u16, Region>) {
        if self.start < self.end {
            let region = &regions[&self.region];
            let [start, end] = [self.start, self.end].map(|at| usize::try_from(at).unwrap());
            region.memory.write(self.start, &region.should[start..end]);
        }
    }
}

fn place<'a>(bytes: &'a mut [u8], row: &Row, page: u32) -> &'a mut [u8] {
    let start = usize::try_from(row.offset(page)).unwrap();
    &mut bytes[start..start + row.len]
}

/// Every row of the pages that are there: group, entry, row, page.
fn each_row(rows: &RankRows, lists: &PageLists, mut each: impl FnMut(usize, u64, &Row, u32)) {
    for (group, list) in lists.groups.iter().enumerate() {
        for (entry, page) in (0u64..).zip(list).filter(|(_, page)| **page != ABSENT) {
            for row in &rows.groups[group] {
                each(group, entry, row, *page);
            }
        }
    }
}

fn coordinates<'a>(rows: &'a RankRows, row: &Row, entry: u64) -> Coordinates<'a> {
    let component = rows.component(row);
    Coordinates {
        component: &component.name,
        layer: row.layer,
        part: &component.parts[row.part].name,
        token: match component.unit {
            Unit::Token => rows.token(row, entry),
            Unit::Page | Unit::Slot => entry,
        },
        head: row.head,
    }
}

/// The last token that a row needs: of a whole page, the page's last.
fn last_token(rows: &RankRows, row: &Row, entry: u64, group: usize) -> u64 {
    match rows.component(row).unit {
        Unit::Token | Unit::Slot => rows.token(row, entry),
        Unit::Page => {
            let size = u64::from(rows.envelope.page_groups[group].page_size);
            rows.token(
                &Row {
                    position: size - 1,
                    ..row.clone()
                },
                entry,
            )
        }
    }
}

fn is_ready(rows: &RankRows, row: &Row, entry: u64, group: usize, ready: &Ready) -> bool {
    let component = rows.component(row);
    let last = last_token(rows, row, entry, group);
    let covered = last < ready.tokens || (last < ready.front_tokens && row.layer < ready.front_layers);
    match (component.unit, ready.end) {
        (Unit::Slot, end) => end.is_some(),
        (Unit::Token, Some(end)) => rows.token(row, entry) < end,
        (Unit::Page, Some(end)) => rows.token(row, entry) < end,
        (_, None) => covered && component.window.is_none(),
    }
}

fn is_wanted(rows: &RankRows, row: &Row, entry: u64, group: usize, range: TokenRange) -> bool {
    let component = rows.component(row);
    let from = match component.window {
        Some(window) => range.from.max(range.to.saturating_sub(window.into())),
        None => range.from,
    };
    let first = rows.token(row, entry);
    let some = range.from < range.to;
    match component.unit {
        Unit::Slot => true,
        Unit::Token => from <= first && first < range.to,
        Unit::Page => some && first < range.to && from <= last_token(rows, row, entry, group),
    }
}

#[cfg(test)]
mod tests {
    use kvferry_handshake::{Allocation, Launch, Padding};

    use super::*;
    use crate::geometry;

    /// Two engines' pools, and a prompt of 40 tokens copied from one to the other by hand.
    struct Copied {
        decode: Pool,
        lists: PageLists,
        stamp: Stamp,
    }

    fn pool(tp: u32, allocation: Allocation) -> Pool {
        let padding = Padding {
            row: 16,
            ..Padding::default()
        };
        let launch = Launch {
            tp,
            allocation,
            padding,
            pool_pages: 20,
            ..Launch::default()
        };
        let envelope = launch.envelope(&geometry::hybrid()).unwrap();
        Pool::new(Arc::new(envelope), 0, Kind::Memfd, 1)
    }

    /// What a correct transfer of tokens `[from, 40)` does, element by element.
    fn copied(from: u64) -> Copied {
        let (mut prefill, mut decode) = (pool(1, Allocation::LayerPages), pool(2, Allocation::PageMajor));
        let stamp = Stamp::of("copied");
        let source = prefill.draw(40, false);
        prefill.fill(&source, &stamp, &Ready::complete(40));
        let lists = decode.draw(40, true);
        let range = TokenRange { from, to: 40 };
        let mut copies = Vec::new();
        each_row(&decode.rows, &lists, |group, entry, row, page| {
            if is_wanted(&decode.rows, row, entry, group, range) {
                let held = prefill.rows.groups[group].iter().find(|held| {
                    (held.component, held.layer, held.part, held.head, held.position)
                        == (row.component, row.layer, row.part, row.head, row.position)
                });
                let held = held.unwrap();
                let mut bytes = vec![0; row.len];
                let at = held.offset(source.groups[group][usize::try_from(entry).unwrap()]);
                prefill.regions[&held.region].memory.read(at, &mut bytes);
                copies.push((row.region, row.offset(page), bytes));
            }
        });
        for (region, offset, bytes) in &copies {
            decode.regions[region].memory.write(*offset, bytes);
        }
        assert_eq!(
            copies.iter().map(|(_, _, bytes)| bytes.len() as u64).sum::<u64>(),
            decode.wanted_bytes(&lists, range)
        );
        decode.expect(&lists, &stamp, range);
        Copied { decode, lists, stamp }
    }

    fn corrupt(pool: &Pool, region: u16, offset: u64) {
        let memory = &pool.regions[&region].memory;
        let mut byte = [0];
        memory.read(offset, &mut byte);
        memory.write(offset, &[!byte[0]]);
    }

    fn panics(act: impl FnOnce()) -> String {
        let panic =
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(act)).expect_err("nothing was found");
        panic.downcast_ref::<String>().cloned().unwrap_or_default()
    }

    #[test]
    fn a_correct_copy_is_found_right() {
        for from in [0, 16, 17, 40] {
            let copied = copied(from);
            copied.decode.check(&copied.lists, "right");
            copied.decode.check_all("right");
        }
    }

    #[test]
    fn another_transfer_attempt_or_range_is_found_wrong() {
        for other in [
            Stamp::of("other"),
            Stamp {
                attempt: 1,
                ..Stamp::of("copied")
            },
            Stamp {
                generation: 1,
                ..Stamp::of("copied")
            },
        ] {
            let mut copied = copied(16);
            copied
                .decode
                .expect(&copied.lists, &other, TokenRange { from: 16, to: 40 });
            panics(|| copied.decode.check(&copied.lists, "other"));
        }
        let mut copied = copied(17);
        copied
            .decode
            .expect(&copied.lists, &copied.stamp, TokenRange { from: 16, to: 40 });
        let told = panics(|| copied.decode.check(&copied.lists, "one token missing"));
        assert!(told.contains("token 16"), "{told}");
    }

    #[test]
    fn one_wrong_byte_is_found_wherever_it_is() {
        let copied = copied(0);
        for region in copied.decode.regions.keys().copied() {
            let len = copied.decode.rows.regions[&region];
            for offset in (0..len).step_by(997).chain([len - 1]) {
                corrupt(&copied.decode, region, offset);
                panics(|| copied.decode.check_all("one byte"));
                corrupt(&copied.decode, region, offset);
            }
        }
        copied.decode.check_all("as it was");
    }

    #[test]
    fn pages_are_scattered_and_windows_leave_pages_out() {
        let mut pool = pool(1, Allocation::Layer);
        let lists = pool.draw(200, true);
        let window = &lists.groups[1];
        let absent = window.iter().filter(|page| **page == ABSENT).count();
        assert_eq!((window.len(), absent), (13, 8), "{window:?}");
        assert!(
            lists.groups[0].windows(2).any(|pair| pair[0] + 1 != pair[1]),
            "{lists:?}"
        );
        assert_eq!(lists.groups[2].len(), 1);
    }
}
