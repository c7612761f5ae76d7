//! What must come out: every row, computed one by one from the envelopes alone.

use kvferry_handshake::{ABSENT, Component, Envelope, PageLists, Placement, Rank, Ready, Unit};

use super::memory::Memory;

/// One row: where it lies, how long it is, and what it is.
pub(crate) struct Row {
    pub(crate) region: u16,
    pub(crate) offset: u64,
    pub(crate) len: u64,
    /// First byte of its pattern.
    pub(crate) mark: u64,
    pub(crate) layer: u32,
    /// The tokens, from the first to past the last, that it holds.
    pub(crate) tokens: (u64, u64),
    pub(crate) unit: Unit,
    pub(crate) window: Option<u32>,
}

impl Row {
    pub(crate) fn bytes(&self) -> impl Iterator<Item = u8> + '_ {
        (0..self.len).map(|at| 1 + ((self.mark ^ at.wrapping_mul(0x9e37_79b9_7f4a_7c15)) >> 13) as u8 % 255)
    }

    /// Whether the GPU has written it.
    pub(crate) fn written(&self, ready: &Ready, end: u64) -> bool {
        match (self.unit, self.window) {
            (Unit::Token | Unit::Page, None) => {
                ready.end.is_some() || ready.covers(self.layer, self.tokens.1.min(end))
            }
            _ => ready.end.is_some(),
        }
    }
}

/// Every row of tokens below `end` that a rank holds.
pub(crate) fn rows(envelope: &Envelope, rank: &Rank, lists: &PageLists, end: u64, row: &mut dyn FnMut(Row)) {
    for placement in &rank.placements {
        let component = &envelope.components[usize::from(placement.component)];
        let list = &lists.groups[usize::from(component.page_group)];
        let page_size = u64::from(envelope.page_groups[usize::from(component.page_group)].page_size);
        let dcp = component.dcp;
        let dcp_rank = if dcp.size > 1 { rank.dcp_rank } else { 0 };
        for (entry, page) in (0u64..).zip(list).filter(|(_, page)| **page != ABSENT) {
            let locals = match component.unit {
                Unit::Token => page_size,
                Unit::Page | Unit::Slot => 1,
            };
            for local in 0..locals {
                let tokens = match component.unit {
                    Unit::Token => {
                        let token = dcp.global(dcp_rank, entry * page_size + local);
                        (token, token + 1)
                    }
                    Unit::Page => {
                        let first = dcp.global(dcp_rank, entry * page_size);
                        let last = (0..page_size)
                            .map(|at| dcp.global(dcp_rank, entry * page_size + at))
                            .rfind(|token| *token < end);
                        (first, last.map_or(first, |last| last + 1))
                    }
                    Unit::Slot => (0, 0),
                };
                if tokens.0 < end || component.unit == Unit::Slot {
                    let unit = match component.unit {
                        Unit::Token => tokens.0,
                        Unit::Page | Unit::Slot => entry,
                    };
                    rows_of(component, placement, (u64::from(*page), local), unit, tokens, row);
                }
            }
        }
    }
}

/// The rows of one token (or page, or slot) in one placement.
fn rows_of(
    component: &Component,
    placement: &Placement,
    (page, token): (u64, u64),
    unit: u64,
    tokens: (u64, u64),
    row: &mut dyn FnMut(Row),
) {
    let strides = &placement.strides;
    for (l, layer) in (0u64..).zip(&placement.layers) {
        for (p, part) in (0u64..).zip(&placement.parts) {
            for h in 0..u64::from(placement.heads.count) {
                let head = u64::from(placement.heads.first) + h;
                let offset = page * strides.page + token * strides.token + h * strides.head;
                row(Row {
                    region: placement.region,
                    offset: placement.offset + offset + p * strides.part + l * strides.layer,
                    len: component.row_bytes(*part),
                    mark: mark(component, *layer, *part, head, unit),
                    layer: *layer,
                    tokens,
                    unit: component.unit,
                    window: component.window,
                });
            }
        }
    }
}

fn mark(component: &Component, layer: u32, part: u16, head: u64, unit: u64) -> u64 {
    let mut mark = 0u64;
    let part = &component.parts[usize::from(part)].name;
    let name = component.name.bytes().chain(part.bytes()).map(u64::from);
    for value in name.chain([u64::from(layer), head, unit]) {
        mark = (mark ^ value).wrapping_mul(0xff51_afd7_ed55_8ccd);
        mark ^= mark >> 31;
    }
    mark
}

/// Whether the decode side asked for a row: tokens `[from, end)`, or what a window keeps of them.
pub(crate) fn wanted(row: &Row, from: u64, end: u64) -> bool {
    let kept = row
        .window
        .map_or(0, |window| end.saturating_sub(u64::from(window)));
    row.unit == Unit::Slot || (row.tokens.0 < end && row.tokens.1 > from.max(kept))
}

/// Writes the rows that the GPU has finished and that are not there yet.
pub(crate) fn fill(
    envelope: &Envelope,
    rank: &Rank,
    lists: &PageLists,
    prompt: u64,
    end: u64,
    ready: &Ready,
    memory: &mut Memory,
) {
    let mut bytes = Vec::new();
    rows(envelope, rank, lists, prompt, &mut |row| {
        if row.written(ready, end) && memory.read(row.region, row.offset) == 0 {
            bytes.clear();
            bytes.extend(row.bytes());
            assert!(
                memory.write(row.region, row.offset, &bytes),
                "rows of the source overlap"
            );
        }
    });
}
