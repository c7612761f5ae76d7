//! Where a rank's rows lie: the arrangements that frameworks use, as placements.

use std::collections::BTreeMap;

use super::Arrangement;
use crate::element::Element;
use crate::envelope::{Component, HeadSpan, PageGroup, Placement, Strides, Unit};

/// Order of tokens (N), heads (H) and elements (D) inside a page of one layer and part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// Token, head, element.
    Nhd,
    /// Head, token, element.
    Hnd,
}

/// What is allocated together. `B` is the page, `L` the layer, `2` the part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Allocation {
    /// A region for each layer and part, `[B, N, H, D]`: SGLang's key and value buffers.
    LayerPart,
    /// A region for each layer, part behind part, `[2, B, N, H, D]`: vLLM with FlashAttention.
    Layer,
    /// A region for each layer, a page holding all parts, `[B, 2, N, H, D]`: vLLM with FlashInfer.
    LayerPages,
    /// A region for each layer, the parts of a row side by side, `[B, N, H, 2D]`, with HND `[B, H, N, 2D]`.
    /// What has parts of unequal heads is laid out as by `LayerPages`.
    PackedRows,
    /// One region, `[L, 2, B, N, H, D]`.
    OneRegion,
    /// A region for each page group, a page holding everything, `[B, L, 2, N, H, D]`: page-major,
    /// vLLM's cross-layer blocks.
    PageMajor,
}

impl Allocation {
    /// Its name in an envelope file.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Allocation::LayerPart => "layer_part",
            Allocation::Layer => "layer",
            Allocation::LayerPages => "layer_pages",
            Allocation::PackedRows => "packed_rows",
            Allocation::OneRegion => "one_region",
            Allocation::PageMajor => "page_major",
        }
    }
}

/// Bytes left free.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Padding {
    /// Behind each row.
    pub row: u64,
    /// Behind each page (or page of a layer and part, where those are allocated apart).
    pub page: u64,
    /// Before the first page of each region.
    pub start: u64,
}

/// The inside of one page of one layer and part (with `PackedRows`, of all parts).
#[derive(Clone, Copy)]
struct Inside {
    token: u64,
    head: u64,
    bytes: u64,
}

/// What a rank holds of a component: its layers, and its heads of each part.
type Held = (Vec<u32>, Vec<HeadSpan>);

impl Arrangement {
    /// Placements of one rank.
    pub(super) fn place(
        &self,
        groups: &[PageGroup],
        components: &[Component],
        held: &[Held],
    ) -> Option<Vec<Placement>> {
        let mut rank = RankPlacements {
            arrangement: self,
            found: Vec::new(),
            region: 0,
            cursor: self.padding.start,
            shared_regions: BTreeMap::new(),
            layer_of_group: vec![0; groups.len()],
        };
        let pages: Option<Vec<u64>> = components
            .iter()
            .zip(held)
            .map(|(component, (_, heads))| self.page_of_layer(groups, component, heads))
            .collect();
        let pages = pages?;
        for (at, (component, (layers, heads))) in components.iter().zip(held).enumerate() {
            let group = &groups[usize::from(component.page_group)];
            let piece = Piece {
                component: u16::try_from(at).ok()?,
                of: component,
                tokens: tokens(component, group),
                pool_pages: group.pool_pages.into(),
                layers,
                heads,
            };
            match self.allocation {
                Allocation::LayerPart => rank.layer_part(&piece)?,
                Allocation::Layer => rank.layer(&piece)?,
                Allocation::LayerPages | Allocation::PackedRows => {
                    // Pages of one pool are one size, whichever group a page belongs to.
                    let of_pool =
                        |other: &Component| groups[usize::from(other.page_group)].pool == group.pool;
                    let shared = shared(groups, component.page_group);
                    let page = match shared {
                        true => components
                            .iter()
                            .zip(&pages)
                            .filter(|(other, _)| of_pool(other))
                            .map(|(_, p)| *p)
                            .max(),
                        false => Some(pages[at]),
                    };
                    rank.layer_pages(&piece, page?, shared.then_some(group.pool))?;
                }
                Allocation::OneRegion => rank.one_region(&piece)?,
                Allocation::PageMajor => {
                    let mut page = self.padding.page;
                    let mut before = 0u64;
                    for (other, (of, (layers, _))) in components.iter().zip(held).enumerate() {
                        if of.page_group == component.page_group {
                            let bytes = pages[other].checked_mul(layers.len() as u64)?;
                            page = page.checked_add(bytes)?;
                            before = before.checked_add(if other < at { bytes } else { 0 })?;
                        }
                    }
                    rank.page_major(&piece, page, before, pages[at])?;
                }
            }
        }
        Some(rank.found)
    }

    fn inside(&self, component: &Component, part: usize, tokens: u64, heads: HeadSpan) -> Option<Inside> {
        self.spread(self.row(component, part)?, tokens, heads)
    }

    /// Rows of `row` bytes in the launch's order.
    fn spread(&self, row: u64, tokens: u64, heads: HeadSpan) -> Option<Inside> {
        let heads = u64::from(heads.count);
        let (token, head) = match self.order {
            Order::Nhd => (row.checked_mul(heads)?, row),
            Order::Hnd => (row, row.checked_mul(tokens)?),
        };
        Some(Inside {
            token,
            head,
            bytes: row.checked_mul(heads)?.checked_mul(tokens)?,
        })
    }

    /// Bytes from one row to the next. An unresolved element counts as two bytes: what is made of it
    /// will be refused, but it shall look like what was meant.
    fn row(&self, component: &Component, part: usize) -> Option<u64> {
        let bits = match component.element {
            Element::Auto => 16,
            element => element.bits(),
        };
        (u64::from(component.parts[part].width) * u64::from(bits))
            .div_ceil(8)
            .checked_add(self.padding.row)
    }

    /// Bytes of a page of one layer, all parts, without page padding where parts are allocated apart.
    fn page_of_layer(&self, groups: &[PageGroup], component: &Component, heads: &[HeadSpan]) -> Option<u64> {
        let tokens = tokens(component, &groups[usize::from(component.page_group)]);
        (0..component.parts.len()).try_fold(0u64, |sum, part| {
            sum.checked_add(self.inside(component, part, tokens, heads[part])?.bytes)
        })
    }
}

/// Whether a page group shares its pool with another.
pub(super) fn shared(groups: &[PageGroup], at: u16) -> bool {
    let at = usize::from(at);
    let others = groups.iter().enumerate().filter(|(other, _)| *other != at);
    groups
        .get(at)
        .is_some_and(|group| others.into_iter().any(|(_, other)| other.pool == group.pool))
}

fn tokens(component: &Component, group: &PageGroup) -> u64 {
    match component.unit {
        Unit::Token => group.page_size.into(),
        Unit::Page | Unit::Slot => 1,
    }
}

/// One component on one rank.
struct Piece<'a> {
    component: u16,
    of: &'a Component,
    tokens: u64,
    pool_pages: u64,
    layers: &'a [u32],
    heads: &'a [HeadSpan],
}

impl Piece<'_> {
    /// Whether one placement can hold all parts: they differ in nothing but their place.
    fn alike(&self) -> bool {
        let widths_alike = self
            .of
            .parts
            .windows(2)
            .all(|pair| pair[0].width == pair[1].width);
        widths_alike && self.heads_alike()
    }

    fn heads_alike(&self) -> bool {
        self.heads.windows(2).all(|pair| pair[0] == pair[1])
    }
}

struct RankPlacements<'a> {
    arrangement: &'a Arrangement,
    found: Vec<Placement>,
    /// The next free region number.
    region: u16,
    /// The next free byte, where everything lies in one region.
    cursor: u64,
    /// The region of the n-th layers of all groups of a pool, where groups share one.
    shared_regions: BTreeMap<(u16, u16), u16>,
    /// Layers placed so far of each page group.
    layer_of_group: Vec<u16>,
}

impl RankPlacements<'_> {
    fn layer_part(&mut self, piece: &Piece<'_>) -> Option<()> {
        for layer in piece.layers {
            for part in 0..piece.of.parts.len() {
                let inside = self
                    .arrangement
                    .inside(piece.of, part, piece.tokens, piece.heads[part])?;
                let region = self.next_region()?;
                let strides = Strides {
                    page: inside.bytes.checked_add(self.arrangement.padding.page)?,
                    token: inside.token,
                    head: inside.head,
                    part: 0,
                    layer: 0,
                };
                self.push(
                    piece,
                    vec![*layer],
                    part..part + 1,
                    region,
                    self.arrangement.padding.start,
                    strides,
                );
            }
        }
        Some(())
    }

    fn layer(&mut self, piece: &Piece<'_>) -> Option<()> {
        for layer in piece.layers {
            let region = self.next_region()?;
            self.part_behind_part(piece, &[*layer], region, self.arrangement.padding.start)?;
        }
        Some(())
    }

    fn one_region(&mut self, piece: &Piece<'_>) -> Option<()> {
        if !piece.layers.is_empty() {
            self.cursor = self.part_behind_part(piece, piece.layers, 0, self.cursor)?;
        }
        Some(())
    }

    /// `[layers, parts, pages, ...]` from `start` on; returns the first byte behind it.
    fn part_behind_part(
        &mut self,
        piece: &Piece<'_>,
        layers: &[u32],
        region: u16,
        start: u64,
    ) -> Option<u64> {
        let mut insides = Vec::new();
        let mut layer = 0u64;
        for part in 0..piece.of.parts.len() {
            let inside = self
                .arrangement
                .inside(piece.of, part, piece.tokens, piece.heads[part])?;
            let page = inside.bytes.checked_add(self.arrangement.padding.page)?;
            insides.push((inside, page, layer));
            layer = layer.checked_add(page.checked_mul(piece.pool_pages)?)?;
        }
        let strides = |inside: Inside, page: u64, part: u64| Strides {
            page,
            token: inside.token,
            head: inside.head,
            part,
            layer,
        };
        if piece.alike() {
            let (inside, page, _) = insides[0];
            let strides = strides(inside, page, page.checked_mul(piece.pool_pages)?);
            self.push(
                piece,
                layers.to_vec(),
                0..piece.of.parts.len(),
                region,
                start,
                strides,
            );
        } else {
            for (part, (inside, page, offset)) in insides.into_iter().enumerate() {
                let offset = start.checked_add(offset)?;
                self.push(
                    piece,
                    layers.to_vec(),
                    part..part + 1,
                    region,
                    offset,
                    strides(inside, page, 0),
                );
            }
        }
        start.checked_add(layer.checked_mul(layers.len() as u64)?)
    }

    fn layer_pages(&mut self, piece: &Piece<'_>, page_bytes: u64, pool: Option<u16>) -> Option<()> {
        let page = page_bytes.checked_add(self.arrangement.padding.page)?;
        for layer in piece.layers {
            let region = match pool {
                Some(pool) => self.shared_region(pool, piece.of.page_group)?,
                None => self.next_region()?,
            };
            let start = self.arrangement.padding.start;
            if self.arrangement.allocation == Allocation::PackedRows && piece.heads_alike() {
                self.packed_rows(piece, *layer, region, page)?;
            } else {
                self.part_beside_part(piece, &[*layer], region, start, page, 0)?;
            }
        }
        Some(())
    }

    fn page_major(&mut self, piece: &Piece<'_>, page: u64, before: u64, layer: u64) -> Option<()> {
        let start = self.arrangement.padding.start.checked_add(before)?;
        if piece.layers.is_empty() {
            return Some(());
        }
        self.part_beside_part(piece, piece.layers, piece.of.page_group, start, page, layer)
    }

    /// Each page holds the parts one behind the other.
    fn part_beside_part(
        &mut self,
        piece: &Piece<'_>,
        layers: &[u32],
        region: u16,
        start: u64,
        page: u64,
        layer: u64,
    ) -> Option<()> {
        let mut offset = start;
        let alike = piece.alike();
        for part in 0..piece.of.parts.len() {
            let inside = self
                .arrangement
                .inside(piece.of, part, piece.tokens, piece.heads[part])?;
            let strides = Strides {
                page,
                token: inside.token,
                head: inside.head,
                part: if alike { inside.bytes } else { 0 },
                layer,
            };
            if alike {
                self.push(
                    piece,
                    layers.to_vec(),
                    0..piece.of.parts.len(),
                    region,
                    offset,
                    strides,
                );
                return Some(());
            }
            self.push(piece, layers.to_vec(), part..part + 1, region, offset, strides);
            offset = offset.checked_add(inside.bytes)?;
        }
        Some(())
    }

    /// The parts' rows of a token and head lie side by side.
    fn packed_rows(&mut self, piece: &Piece<'_>, layer: u32, region: u16, page: u64) -> Option<()> {
        let rows: Option<Vec<u64>> = (0..piece.of.parts.len())
            .map(|part| self.arrangement.row(piece.of, part))
            .collect();
        let rows = rows?;
        let row = rows.iter().try_fold(0u64, |sum, row| sum.checked_add(*row))?;
        let inside = self
            .arrangement
            .spread(row, piece.tokens, *piece.heads.first()?)?;
        let strides = |part| Strides {
            page,
            token: inside.token,
            head: inside.head,
            part,
            layer: 0,
        };
        let mut offset = self.arrangement.padding.start;
        if piece.alike() {
            self.push(
                piece,
                vec![layer],
                0..rows.len(),
                region,
                offset,
                strides(rows[0]),
            );
            return Some(());
        }
        for (part, row) in rows.into_iter().enumerate() {
            self.push(piece, vec![layer], part..part + 1, region, offset, strides(0));
            offset = offset.checked_add(row)?;
        }
        Some(())
    }

    /// The region of the next layer of `group`, shared with the other groups of `pool`.
    fn shared_region(&mut self, pool: u16, group: u16) -> Option<u16> {
        let next = &mut self.layer_of_group[usize::from(group)];
        let layer = *next;
        *next = next.checked_add(1)?;
        match self.shared_regions.get(&(pool, layer)) {
            Some(region) => Some(*region),
            None => {
                let region = self.next_region()?;
                self.shared_regions.insert((pool, layer), region);
                Some(region)
            }
        }
    }

    fn next_region(&mut self) -> Option<u16> {
        let region = self.region;
        self.region = region.checked_add(1)?;
        Some(region)
    }

    fn push(
        &mut self,
        piece: &Piece<'_>,
        layers: Vec<u32>,
        parts: std::ops::Range<usize>,
        region: u16,
        offset: u64,
        strides: Strides,
    ) {
        let one = |many: bool, stride: u64| if many { stride } else { 0 };
        let heads = piece.heads[parts.start];
        self.found.push(Placement {
            component: piece.component,
            // A stride that is never stepped along is stated as 0, so that equal maps are equal values.
            strides: Strides {
                page: strides.page,
                token: one(piece.tokens > 1, strides.token),
                head: one(heads.count > 1, strides.head),
                part: one(parts.len() > 1, strides.part),
                layer: one(layers.len() > 1, strides.layer),
            },
            layers,
            parts: parts.filter_map(|part| u16::try_from(part).ok()).collect(),
            heads,
            region,
            offset,
        });
    }
}
