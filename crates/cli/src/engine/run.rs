//! Writing and comparing rows in long runs: neighbours in memory are one system call.

use anyhow::Context as _;

use super::content::Expected;
use super::memory::PoolMemory;
use super::rows::{RankRows, Row};

/// Longest run.
const RUN: usize = 1 << 20;
/// Wrong rows that are told in full.
const TOLD: usize = 8;

/// The memory of a region.
pub(crate) fn region(memory: &[(u16, PoolMemory)], region: u16) -> anyhow::Result<&PoolMemory> {
    let found = memory.iter().find(|(number, _)| *number == region);
    found
        .map(|(_, memory)| memory)
        .with_context(|| format!("the rank has no region {region}"))
}

/// Bytes expected at consecutive offsets of one region.
#[derive(Debug, Default)]
struct Run {
    region: u16,
    start: u64,
    bytes: Vec<u8>,
}

impl Run {
    fn continues(&self, row: &Row) -> bool {
        self.region == row.region
            && self.start + self.bytes.len() as u64 == row.offset
            && self.bytes.len() + row.len <= RUN
    }

    fn begin(&mut self, row: &Row) {
        self.region = row.region;
        self.start = row.offset;
        self.bytes.clear();
    }

    fn push(&mut self, row: &Row, expected: Expected) {
        let at = self.bytes.len();
        self.bytes.resize(at + row.len, 0);
        expected.fill(&mut self.bytes[at..]);
    }
}

/// Writes rows.
#[derive(Debug)]
pub(crate) struct Writer<'a> {
    memory: &'a [(u16, PoolMemory)],
    run: Run,
    written: u64,
}

impl<'a> Writer<'a> {
    pub(crate) fn new(memory: &'a [(u16, PoolMemory)]) -> Writer<'a> {
        Writer {
            memory,
            run: Run::default(),
            written: 0,
        }
    }

    pub(crate) fn write(&mut self, row: &Row, expected: Expected) -> anyhow::Result<()> {
        if !self.run.continues(row) {
            self.flush()?;
            self.run.begin(row);
        }
        self.run.push(row, expected);
        Ok(())
    }

    fn flush(&mut self) -> anyhow::Result<()> {
        if !self.run.bytes.is_empty() {
            region(self.memory, self.run.region)?.write(self.run.start, &self.run.bytes)?;
            self.written += self.run.bytes.len() as u64;
            self.run.bytes.clear();
        }
        Ok(())
    }

    /// Writes what is left; gives the bytes written in all.
    pub(crate) fn finish(mut self) -> anyhow::Result<u64> {
        self.flush()?;
        Ok(self.written)
    }
}

/// What a comparison found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Checked {
    /// Bytes that had to hold a pattern.
    pub(crate) pattern: u64,
    /// Bytes that nobody was to touch.
    pub(crate) untouched: u64,
    /// Rows (and pieces of padding) that hold something else.
    pub(crate) wrong: u64,
    /// The first of them, in words.
    pub(crate) told: Vec<String>,
}

impl Checked {
    pub(crate) fn is_right(&self) -> bool {
        self.wrong == 0
    }

    fn tell(&mut self, what: impl FnOnce() -> String) {
        self.wrong += 1;
        if self.told.len() < TOLD {
            self.told.push(what());
        }
    }

    /// Compares a piece of padding.
    pub(crate) fn padding(&mut self, region: u16, offset: u64, expected: &[u8], found: &[u8]) {
        self.untouched += expected.len() as u64;
        if expected != found {
            let at = expected.iter().zip(found).position(|(a, b)| a != b).unwrap_or(0);
            self.tell(|| {
                format!(
                    "padding was written at region {region}, offset {}",
                    offset + at as u64
                )
            });
        }
    }
}

/// Compares rows.
#[derive(Debug)]
pub(crate) struct Checker<'a> {
    rows: &'a RankRows,
    memory: &'a [(u16, PoolMemory)],
    run: Run,
    in_run: Vec<(Row, u32, Expected)>,
    found: Vec<u8>,
    checked: Checked,
}

impl<'a> Checker<'a> {
    pub(crate) fn new(rows: &'a RankRows, memory: &'a [(u16, PoolMemory)]) -> Checker<'a> {
        Checker {
            rows,
            memory,
            run: Run::default(),
            in_run: Vec::new(),
            found: Vec::new(),
            checked: Checked::default(),
        }
    }

    pub(crate) fn check(&mut self, row: &Row, page: u32, expected: Expected) -> anyhow::Result<()> {
        if !self.run.continues(row) {
            self.flush()?;
            self.run.begin(row);
        }
        self.run.push(row, expected);
        self.in_run.push((*row, page, expected));
        match expected {
            Expected::Pattern(_) => self.checked.pattern += row.len as u64,
            Expected::Poison(_) | Expected::Zero => self.checked.untouched += row.len as u64,
        }
        Ok(())
    }

    fn flush(&mut self) -> anyhow::Result<()> {
        self.found.resize(self.run.bytes.len(), 0);
        if !self.found.is_empty() {
            region(self.memory, self.run.region)?.read(self.run.start, &mut self.found)?;
        }
        if self.found != self.run.bytes {
            let mut at = 0;
            for (row, page, expected) in &self.in_run {
                let (want, have) = (&self.run.bytes[at..][..row.len], &self.found[at..][..row.len]);
                at += row.len;
                if want != have {
                    self.checked
                        .tell(|| wrong_row(self.rows, row, *page, *expected, want, have));
                }
            }
        }
        self.run.bytes.clear();
        self.in_run.clear();
        Ok(())
    }

    pub(crate) fn finish(mut self) -> anyhow::Result<Checked> {
        self.flush()?;
        Ok(self.checked)
    }
}

fn wrong_row(rows: &RankRows, row: &Row, page: u32, expected: Expected, want: &[u8], have: &[u8]) -> String {
    let component = rows.component(row);
    let at = want.iter().zip(have).position(|(a, b)| a != b).unwrap_or(0);
    let what = match expected {
        Expected::Pattern(_) => "was asked for and holds something else",
        Expected::Poison(_) | Expected::Zero => "was not asked for and was written",
    };
    let hex = |bytes: &[u8]| {
        bytes
            .iter()
            .skip(at)
            .take(8)
            .map(|byte| format!("{byte:02x}"))
            .collect::<String>()
    };
    format!(
        "{} layer {} {}, page {page}, token {} of it, head {} {what}: region {}, offset {}: {} instead of {}",
        component.name,
        row.layer,
        component.parts[row.part].name,
        row.position,
        row.head,
        row.region,
        row.offset + at as u64,
        hex(have),
        hex(want),
    )
}
