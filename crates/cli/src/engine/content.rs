//! What a page should hold, byte for byte: the pattern of a transfer, poison, or what it held from the start.

use std::sync::Arc;

use kvferry_handshake::{Component, Kind, Ready, TokenRange, Unit};

use super::pattern::{Filling, fill, poison_seed};
use super::rows::{RankRows, Row};

/// What the pages of one list were given.
#[derive(Clone, Debug)]
pub(crate) struct Content {
    /// Which poison lies in the rows that hold no pattern.
    pub(crate) nonce: u64,
    /// The pattern's filling.
    pub(crate) filling: Filling,
    /// Which rows hold the pattern.
    pub(crate) extent: Extent,
}

/// Which rows of a transfer's pages hold its pattern.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Extent {
    /// None: all is poison.
    Nothing,
    /// What a source has filled so far.
    Ready(Ready),
    /// What a fetch of these tokens must have delivered.
    Fetched(TokenRange),
}

/// A page's content, and which entry of its list the page is.
#[derive(Clone, Debug)]
pub(crate) enum Stamp {
    /// As it was allocated.
    Fresh,
    /// Entry of a list that was given this content.
    Entry(Arc<Content>, u32),
    /// Under way: nobody can say.
    InFlight,
}

/// What a row should hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Expected {
    /// The pattern with this seed.
    Pattern(u64),
    /// Poison with this seed: nobody may have written here.
    Poison(u64),
    /// Zeros: the pool was never written here.
    Zero,
}

impl Expected {
    /// Writes the bytes expected.
    pub(crate) fn fill(self, out: &mut [u8]) {
        match self {
            Expected::Pattern(seed) | Expected::Poison(seed) => fill(seed, out),
            Expected::Zero => out.fill(0),
        }
    }
}

impl Content {
    /// What a row holds whose page is entry `entry` of the list.
    pub(crate) fn expected(&self, rows: &RankRows, row: &Row, entry: u32) -> Expected {
        let component = rows.component(row);
        let token = first_token(rows, component, row, entry);
        if self.extent.holds(rows, component, row.layer, token, entry) {
            let (name, part) = rows.names(row);
            Expected::Pattern(self.filling.of_part(name, row.layer, part).row(token, row.head))
        } else {
            Expected::Poison(poison_seed(self.nonce, row.region, row.offset))
        }
    }
}

/// The token that a row belongs to: of a page that holds one row, its first token; of a slot, the entry.
fn first_token(rows: &RankRows, component: &Component, row: &Row, entry: u32) -> u64 {
    let entry = u64::from(entry);
    match component.unit {
        Unit::Slot => entry,
        Unit::Token | Unit::Page => {
            let local = entry * page_size(rows, component) + u64::from(row.position);
            component.dcp.global(dcp_rank(rows, component), local)
        }
    }
}

fn page_size(rows: &RankRows, component: &Component) -> u64 {
    u64::from(rows.envelope().page_groups[usize::from(component.page_group)].page_size)
}

fn dcp_rank(rows: &RankRows, component: &Component) -> u32 {
    if component.dcp.size > 1 {
        rows.dcp_rank()
    } else {
        0
    }
}

impl Extent {
    fn holds(&self, rows: &RankRows, component: &Component, layer: u32, token: u64, entry: u32) -> bool {
        match self {
            Extent::Nothing => false,
            Extent::Ready(ready) => is_filled(ready, rows, component, layer, token, entry),
            Extent::Fetched(range) => is_fetched(*range, rows, component, token, entry),
        }
    }

    /// Whether this extent holds a row of an entry that `earlier` did not.
    pub(crate) fn adds(&self, earlier: &Extent, rows: &RankRows, row: &Row, entry: u32) -> bool {
        let component = rows.component(row);
        let token = first_token(rows, component, row, entry);
        let holds = |extent: &Extent| extent.holds(rows, component, row.layer, token, entry);
        holds(self) && !holds(earlier)
    }
}

/// What a source must have written before it publishes `ready`. Windows and state count only once the end is known.
fn is_filled(
    ready: &Ready,
    rows: &RankRows,
    component: &Component,
    layer: u32,
    token: u64,
    entry: u32,
) -> bool {
    let at_end = component.kind == Kind::Window || component.unit == Unit::Slot;
    match (component.unit, ready.end) {
        (Unit::Slot, end) => end.is_some(),
        (_, Some(end)) => token < end,
        (_, None) if at_end => false,
        (Unit::Token, None) => ready.covers(layer, token + 1),
        (Unit::Page, None) => {
            // One row for the whole page: it is finished with the page's last token.
            let last = (u64::from(entry) + 1) * page_size(rows, component) - 1;
            ready.covers(layer, component.dcp.global(dcp_rank(rows, component), last) + 1)
        }
    }
}

/// What a fetch of `range` must bring: a window keeps only its newest tokens, opaque pages come whole, every listed slot comes.
fn is_fetched(range: TokenRange, rows: &RankRows, component: &Component, token: u64, entry: u32) -> bool {
    let window = component.window.filter(|_| component.kind == Kind::Window);
    let from = window.map_or(range.from, |window| {
        range.from.max(range.to.saturating_sub(u64::from(window)))
    });
    match component.unit {
        Unit::Slot => true,
        Unit::Token => from <= token && token < range.to,
        Unit::Page => {
            let rank = dcp_rank(rows, component);
            let page = page_size(rows, component);
            let first = u64::from(entry) * page;
            let (below_from, below_to) = (
                component.dcp.count_below(rank, from),
                component.dcp.count_below(rank, range.to),
            );
            first + page > below_from && first < below_to && below_from < below_to
        }
    }
}
