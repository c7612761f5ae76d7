//! One rank's memory as rows: what lies where, by the envelope alone.
//!
//! This is on purpose not the planner: it walks the placements of one rank element by element, so that what an engine
//! fills and verifies shares no code with what moved it.

use kvferry_handshake::{Component, Envelope, Placement, Unit};

use super::pattern::name_hash;

/// One row: one head of one token (or page, or slot) of one part of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Row {
    /// Position of the component in the envelope.
    pub(crate) component: usize,
    /// Global layer id.
    pub(crate) layer: u32,
    /// Position of the part in the component.
    pub(crate) part: usize,
    /// Token's position in its page; 0 where a page or slot holds one row per head.
    pub(crate) position: u32,
    /// Global head.
    pub(crate) head: u32,
    /// Region.
    pub(crate) region: u16,
    /// Byte offset in it.
    pub(crate) offset: u64,
    /// Bytes.
    pub(crate) len: usize,
}

/// One rank's rows.
#[derive(Debug)]
pub(crate) struct RankRows {
    envelope: Envelope,
    rank: usize,
    names: Vec<(u64, Vec<u64>)>,
}

impl RankRows {
    /// The rows of rank `rank`, which the envelope must have.
    pub(crate) fn new(envelope: Envelope, rank: u32) -> RankRows {
        let names = envelope
            .components
            .iter()
            .map(|component| {
                let parts = component.parts.iter().map(|part| name_hash(&part.name)).collect();
                (name_hash(&component.name), parts)
            })
            .collect();
        RankRows {
            envelope,
            rank: rank as usize,
            names,
        }
    }

    pub(crate) fn envelope(&self) -> &Envelope {
        &self.envelope
    }

    /// One past the highest global layer id.
    pub(crate) fn layers(&self) -> u32 {
        let ids = self
            .envelope
            .components
            .iter()
            .flat_map(|component| &component.layers);
        ids.max().map_or(0, |last| last + 1)
    }

    pub(crate) fn dcp_rank(&self) -> u32 {
        self.envelope.ranks[self.rank].dcp_rank
    }

    pub(crate) fn component(&self, row: &Row) -> &Component {
        &self.envelope.components[row.component]
    }

    /// Hashes of the names of a row's component and part.
    pub(crate) fn names(&self, row: &Row) -> (u64, u64) {
        let (component, parts) = &self.names[row.component];
        (*component, parts[row.part])
    }

    fn placements(&self) -> impl Iterator<Item = &Placement> {
        self.envelope.ranks[self.rank].placements.iter()
    }

    fn component_of(&self, placement: &Placement) -> &Component {
        &self.envelope.components[usize::from(placement.component)]
    }

    fn rows_per_page(&self, component: &Component) -> u32 {
        match component.unit {
            Unit::Token => self.envelope.page_groups[usize::from(component.page_group)].page_size,
            Unit::Page | Unit::Slot => 1,
        }
    }

    /// Calls `each` with every row of one page of a page group, neighbours in memory one after the other.
    pub(crate) fn of_page(
        &self,
        group: usize,
        page: u32,
        each: &mut impl FnMut(&Row) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        for placement in self.placements() {
            let component = self.component_of(placement);
            if usize::from(component.page_group) != group {
                continue;
            }
            let strides = &placement.strides;
            let positions = self.rows_per_page(component);
            let base = placement.offset + u64::from(page) * strides.page;
            for (layer_at, layer) in (0u64..).zip(&placement.layers) {
                for (part_at, part) in (0u64..).zip(&placement.parts) {
                    let begin = base + layer_at * strides.layer + part_at * strides.part;
                    let len = usize::try_from(component.row_bytes(*part))?;
                    let mut at = |position: u32, head: u32| {
                        each(&Row {
                            component: usize::from(placement.component),
                            layer: *layer,
                            part: usize::from(*part),
                            position,
                            head: placement.heads.first + head,
                            region: placement.region,
                            offset: begin
                                + u64::from(position) * strides.token
                                + u64::from(head) * strides.head,
                            len,
                        })
                    };
                    // The larger stride goes outside, so that rows come in the order in which they lie.
                    if strides.token >= strides.head || placement.heads.count == 1 {
                        for position in 0..positions {
                            for head in 0..placement.heads.count {
                                at(position, head)?;
                            }
                        }
                    } else {
                        for head in 0..placement.heads.count {
                            for position in 0..positions {
                                at(position, head)?;
                            }
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// Region numbers and the bytes that each needs: up to the end of the last row of the last page.
    pub(crate) fn regions(&self) -> Vec<(u16, u64)> {
        let mut regions: Vec<(u16, u64)> = Vec::new();
        for placement in self.placements() {
            let component = self.component_of(placement);
            let group = &self.envelope.page_groups[usize::from(component.page_group)];
            let strides = &placement.strides;
            let steps = |count: u64, stride: u64| count.saturating_sub(1) * stride;
            let widest = |(at, part): (u64, &u16)| at * strides.part + component.row_bytes(*part);
            let end = placement.offset
                + steps(u64::from(group.pool_pages), strides.page)
                + steps(u64::from(self.rows_per_page(component)), strides.token)
                + steps(u64::from(placement.heads.count), strides.head)
                + steps(placement.layers.len() as u64, strides.layer)
                + (0u64..).zip(&placement.parts).map(widest).max().unwrap_or(0);
            match regions.iter_mut().find(|(region, _)| *region == placement.region) {
                Some((_, len)) => *len = end.max(*len),
                None => regions.push((placement.region, end)),
            }
        }
        regions.sort_unstable();
        regions
    }

    /// Bytes of all rows of all pages in one region.
    fn row_bytes(&self, region: u16) -> u64 {
        let of = |placement: &Placement| {
            let component = self.component_of(placement);
            let group = &self.envelope.page_groups[usize::from(component.page_group)];
            let row: u64 = placement
                .parts
                .iter()
                .map(|part| component.row_bytes(*part))
                .sum();
            let rows = u64::from(self.rows_per_page(component)) * u64::from(placement.heads.count);
            row * rows * placement.layers.len() as u64 * u64::from(group.pool_pages)
        };
        self.placements()
            .filter(|placement| placement.region == region)
            .map(of)
            .sum()
    }

    /// The byte ranges of a region of `len` bytes that belong to no row: padding, which nobody may write.
    pub(crate) fn gaps(&self, region: u16, len: u64) -> anyhow::Result<Vec<(u64, u64)>> {
        if self.row_bytes(region) == len {
            return Ok(Vec::new());
        }
        let mut runs: Vec<(u64, u64)> = Vec::new();
        for (at, group) in self.envelope.page_groups.iter().enumerate() {
            for page in 0..group.pool_pages {
                self.of_page(at, page, &mut |row| {
                    let end = row.offset + row.len as u64;
                    match runs.last_mut() {
                        _ if row.region != region => {}
                        Some((_, last)) if *last == row.offset => *last = end,
                        _ => runs.push((row.offset, end)),
                    }
                    Ok(())
                })?;
            }
        }
        runs.sort_unstable();
        let mut gaps = Vec::new();
        let mut covered = 0;
        for (first, end) in runs {
            if first > covered {
                gaps.push((covered, first - covered));
            }
            covered = covered.max(end);
        }
        if covered < len {
            gaps.push((covered, len - covered));
        }
        Ok(gaps)
    }
}
