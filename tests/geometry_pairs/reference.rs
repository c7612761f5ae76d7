//! What an envelope file says, carried out element by element: the independent program that verifies what
//! `kvferry plan` prints. It knows only the file and the formulas of docs/envelope.md.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use toml::{Table, Value};

/// An engine's file.
pub(crate) struct Reference {
    page_size: u64,
    pool_pages: u64,
    /// DCP size and interleave.
    split: (u64, u64),
    ranks: Vec<Rank>,
}

struct Rank {
    dcp_rank: u64,
    placements: Vec<Placement>,
}

struct Placement {
    /// First letters of component and part, which tell them apart here.
    what: [u8; 2],
    /// Bytes.
    row: u64,
    layers: Vec<u64>,
    heads: RangeInclusive<u64>,
    region: u64,
    offset: u64,
    strides: Table,
}

/// One rank's memory, by region.
pub(crate) type Memory = BTreeMap<u64, Vec<u8>>;

/// What lies in memory that nobody wrote.
const POISON: u8 = 0xa5;

/// A move as `kvferry plan` prints it.
pub(crate) struct Move {
    pub(crate) source_rank: u64,
    pub(crate) source_region: u64,
    pub(crate) source_offset: u64,
    pub(crate) region: u64,
    pub(crate) offset: u64,
    pub(crate) length: u64,
}

impl Reference {
    pub(crate) fn new(text: &str) -> Reference {
        let file: Table = text.parse().unwrap();
        let group = &list(&file, "page_group")[0];
        let components = list(&file, "component");
        let dcp = components[0]["dcp"].as_table().unwrap();
        let ranks = list(&file, "rank").into_iter().map(|rank| Rank {
            dcp_rank: number(rank, "dcp_rank"),
            placements: list(rank, "placement")
                .into_iter()
                .map(|placement| Placement::new(placement, &components))
                .collect(),
        });
        Reference {
            page_size: number(group, "page_size"),
            pool_pages: number(group, "pool_pages"),
            split: (number(dcp, "size"), number(dcp, "interleave")),
            ranks: ranks.collect(),
        }
    }

    pub(crate) fn ranks(&self) -> u64 {
        self.ranks.len() as u64
    }

    pub(crate) fn page_size(&self) -> u64 {
        self.page_size
    }

    /// Tokens of the first `tokens` that the rank holds.
    fn held(&self, rank: u64, tokens: u64) -> impl Iterator<Item = u64> {
        let (size, interleave) = self.split;
        let dcp_rank = self.ranks[at(rank)].dcp_rank;
        (0..tokens).filter(move |token| token / interleave % size == dcp_rank)
    }

    /// A page list for `tokens` tokens: scattered pages, other ones on every rank.
    pub(crate) fn pages(&self, rank: u64, tokens: u64) -> Vec<u64> {
        let steps = [7, 5, 3, 11].into_iter();
        let step = steps
            .rev()
            .find(|step| !self.pool_pages.is_multiple_of(*step))
            .unwrap();
        let entries = (self.held(rank, tokens).count() as u64).div_ceil(self.page_size);
        (0..entries)
            .map(|entry| (entry * step + rank + 2) % self.pool_pages)
            .collect()
    }

    /// The rank's memory with tokens `[from, to)` in these pages, each byte by what it stands for, and poison
    /// everywhere else; and how many bytes that is.
    pub(crate) fn memory(&self, rank: u64, pages: &[u64], from: u64, to: u64) -> (Memory, u64) {
        let mut memory = Memory::new();
        let mut written = 0;
        for placement in &self.ranks[at(rank)].placements {
            let stride = |axis: &str| number(&placement.strides, axis);
            let [page, token_stride, head_stride, layer_stride] =
                ["page", "token", "head", "layer"].map(stride);
            let region = memory.entry(placement.region).or_default();
            let layers = placement.layers.len() as u64;
            let end = placement.offset + layers * self.pool_pages * page;
            if region.len() < at(end) {
                region.resize(at(end), POISON);
            }
            for (l, layer) in (0u64..).zip(&placement.layers) {
                for (local, token) in (0u64..).zip(self.held(rank, to)) {
                    if token < from {
                        continue;
                    }
                    for head in placement.heads.clone() {
                        let offset = placement.offset
                            + pages[at(local / self.page_size)] * page
                            + local % self.page_size * token_stride
                            + (head - placement.heads.start()) * head_stride
                            + l * layer_stride;
                        let [component, part] = placement.what.map(u64::from);
                        fill(
                            &mut region[at(offset)..at(offset + placement.row)],
                            [component, part, *layer, head, token],
                        );
                        written += placement.row;
                    }
                }
            }
        }
        (memory, written)
    }

    /// Memory in which nothing was written.
    pub(crate) fn untouched(&self, rank: u64) -> Memory {
        self.memory(rank, &[], 0, 0).0
    }
}

impl Placement {
    fn new(placement: &Table, components: &[&Table]) -> Placement {
        let component = named(components, text(placement, "component"));
        let part_name = placement["parts"][0].as_str().unwrap();
        let part = named(&list(component, "parts"), part_name);
        let (first, last) = text(placement, "heads").split_once('-').unwrap();
        let layers = placement["layers"].as_array().unwrap().iter();
        Placement {
            what: [text(component, "name"), part_name].map(|name| name.as_bytes()[0]),
            row: number(part, "width") * bytes_of(text(component, "element")),
            layers: layers
                .map(|layer| u64::try_from(layer.as_integer().unwrap()).unwrap())
                .collect(),
            heads: first.parse().unwrap()..=last.parse().unwrap(),
            region: number(placement, "region"),
            offset: number(placement, "offset"),
            strides: placement["strides"].as_table().unwrap().clone(),
        }
    }
}

/// Applies moves one after the other; gives the bytes moved.
pub(crate) fn apply(moves: &[Move], sources: &[Memory], target: &mut Memory) -> u64 {
    let mut moved = 0;
    for step in moves {
        assert!(step.length > 0);
        let from = &sources[at(step.source_rank)][&step.source_region];
        let from = &from[at(step.source_offset)..at(step.source_offset + step.length)];
        let to = target.get_mut(&step.region).unwrap();
        to[at(step.offset)..at(step.offset + step.length)].copy_from_slice(from);
        moved += step.length;
    }
    moved
}

/// Bytes that depend on component, part, layer, head, token and place in the row.
fn fill(row: &mut [u8], what: [u64; 5]) {
    let mut state = what.iter().fold(0x243f_6a88_85a3_08d3u64, |state, value| {
        (state ^ value)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .rotate_left(29)
    });
    for piece in row.chunks_mut(8) {
        state = state.wrapping_mul(0xd120_2f6b_f3c4_55d5).rotate_left(31) ^ 0x1319_8a2e_0370_7344;
        piece.copy_from_slice(&state.to_le_bytes()[..piece.len()]);
    }
}

fn bytes_of(element: &str) -> u64 {
    match element {
        "bf16" | "bfloat16" => 2,
        "fp8_e4m3" | "fp8_e5m2" => 1,
        other => panic!("{other}"),
    }
}

fn list<'a>(table: &'a Table, key: &str) -> Vec<&'a Table> {
    let list = table[key].as_array().unwrap().iter();
    list.map(|entry| entry.as_table().unwrap()).collect()
}

fn named<'a>(tables: &[&'a Table], name: &str) -> &'a Table {
    tables.iter().find(|table| text(table, "name") == name).unwrap()
}

fn text<'a>(table: &'a Table, key: &str) -> &'a str {
    table[key].as_str().unwrap()
}

fn number(table: &Table, key: &str) -> u64 {
    let Value::Integer(value) = table[key] else {
        panic!("{key} is no number");
    };
    u64::try_from(value).unwrap()
}

fn at(position: u64) -> usize {
    usize::try_from(position).unwrap()
}
