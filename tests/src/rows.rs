//! Where a rank's rows lie, by the envelope's formula alone: one row at a time, nothing merged or clever.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvferry_handshake::{Component, Dcp, Envelope, Unit};

/// One row of a page: a head of a token of a part of a layer.
#[derive(Clone, Debug)]
pub struct Row {
    /// Position of the component in the envelope.
    pub component: usize,
    /// Global layer id.
    pub layer: u32,
    /// Position of the part in the component.
    pub part: usize,
    /// Global head.
    pub head: u32,
    /// Position of the token in its page; 0 where a page holds one row.
    pub position: u64,
    /// Region.
    pub region: u16,
    /// Byte offset for page 0.
    pub page0: u64,
    /// Bytes from a page to the next page id.
    pub page_stride: u64,
    /// Bytes.
    pub len: usize,
}

/// All rows of one rank.
#[derive(Clone, Debug)]
pub struct RankRows {
    /// The engine's envelope.
    pub envelope: Arc<Envelope>,
    /// The rank.
    pub rank: u32,
    /// Of each page group, the rows of a page, by region and offset.
    pub groups: Vec<Vec<Row>>,
    /// Bytes of each region.
    pub regions: BTreeMap<u16, u64>,
}

impl Row {
    /// Byte offset in page `page`.
    pub fn offset(&self, page: u32) -> u64 {
        self.page0 + u64::from(page) * self.page_stride
    }
}

impl RankRows {
    /// The rows of rank `rank`.
    pub fn new(envelope: Arc<Envelope>, rank: u32) -> RankRows {
        let mut groups = vec![Vec::new(); envelope.page_groups.len()];
        for placement in &envelope.ranks[rank as usize].placements {
            let component = &envelope.components[usize::from(placement.component)];
            let group = usize::from(component.page_group);
            let tokens = match component.unit {
                Unit::Token => u64::from(envelope.page_groups[group].page_size),
                Unit::Page | Unit::Slot => 1,
            };
            for (l, layer) in (0u64..).zip(&placement.layers) {
                for (p, part) in (0u64..).zip(&placement.parts) {
                    for h in 0..placement.heads.count {
                        for position in 0..tokens {
                            let strides = placement.strides;
                            groups[group].push(Row {
                                component: placement.component.into(),
                                layer: *layer,
                                part: usize::from(*part),
                                head: placement.heads.first + h,
                                position,
                                region: placement.region,
                                page0: placement.offset
                                    + position * strides.token
                                    + u64::from(h) * strides.head
                                    + p * strides.part
                                    + l * strides.layer,
                                page_stride: strides.page,
                                len: row_bytes(component, usize::from(*part)),
                            });
                        }
                    }
                }
            }
        }
        let mut regions = BTreeMap::new();
        for (group, rows) in envelope.page_groups.iter().zip(&mut groups) {
            rows.sort_by_key(|row: &Row| (row.region, row.page0));
            for row in rows {
                let end = row.offset(group.pool_pages - 1) + row.len as u64;
                let len = regions.entry(row.region).or_insert(0);
                *len = end.max(*len);
            }
        }
        RankRows {
            envelope,
            rank,
            groups,
            regions,
        }
    }

    /// The component of a row.
    pub fn component(&self, row: &Row) -> &Component {
        &self.envelope.components[row.component]
    }

    /// The DCP rank of this rank for a component.
    pub fn dcp_rank(&self, component: &Component) -> u32 {
        match component.dcp.size {
            1 => 0,
            _ => self.envelope.ranks[self.rank as usize].dcp_rank,
        }
    }

    /// How many of the first `tokens` tokens the rank holds, of the component of the group that has most.
    pub fn local_tokens(&self, group: usize, tokens: u64) -> u64 {
        let components = self.groups[group].iter().map(|row| row.component);
        let mut seen: Vec<usize> = components.collect();
        seen.sort_unstable();
        seen.dedup();
        let counts = seen.into_iter().map(|at| {
            let component = &self.envelope.components[at];
            let rank = self.dcp_rank(component);
            (0..tokens)
                .filter(|token| owner(component.dcp, *token) == rank)
                .count() as u64
        });
        counts.max().unwrap_or(0)
    }

    /// The token of a row whose page is entry `entry` of its page list; of a whole page, its first.
    pub fn token(&self, row: &Row, entry: u64) -> u64 {
        let component = self.component(row);
        let group = &self.envelope.page_groups[usize::from(component.page_group)];
        let local = entry * u64::from(group.page_size) + row.position;
        global(component.dcp, self.dcp_rank(component), local)
    }
}

fn row_bytes(component: &Component, part: usize) -> usize {
    let bits = u64::from(component.parts[part].width) * u64::from(component.element.bits());
    assert_eq!(bits % 8, 0, "a row of {bits} bits");
    usize::try_from(bits / 8).unwrap()
}

/// The DCP rank that holds a token.
fn owner(dcp: Dcp, token: u64) -> u32 {
    u32::try_from((token / u64::from(dcp.interleave)) % u64::from(dcp.size)).unwrap()
}

/// The token that is a DCP rank's `local`-th.
fn global(dcp: Dcp, rank: u32, local: u64) -> u64 {
    let (g, n) = (u64::from(dcp.interleave), u64::from(dcp.size));
    (local / g * n + u64::from(rank)) * g + local % g
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ranks_tokens_in_order_are_its_local_tokens() {
        for (size, interleave) in [(1, 1), (2, 1), (3, 4), (8, 16)] {
            let dcp = Dcp { size, interleave };
            for rank in 0..size {
                let owned: Vec<u64> = (0..500).filter(|token| owner(dcp, *token) == rank).collect();
                let counted: Vec<u64> = (0..owned.len() as u64)
                    .map(|local| global(dcp, rank, local))
                    .collect();
                assert_eq!(
                    owned, counted,
                    "size {size}, interleave {interleave}, rank {rank}"
                );
            }
        }
    }
}
