//! Engines' memory: sealed memfds filled with a pattern, and what must be in them after a transfer.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use kvferry_dataplane::{DataPlane, EngineProcess, RegionKey};
use kvferry_handshake::{
    Allocation, Envelope, Launch, ModelShape, Order, PageLists, Policy, Stages, TokenRange,
};
use kvferry_plan::{ChunkMap, LinkPlan, judge};
use memmap2::MmapMut;
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

/// One engine's ranks and their memory.
pub(crate) struct Engine {
    pub(crate) envelope: Envelope,
    pub(crate) ranks: Vec<Rank>,
}

pub(crate) struct Rank {
    pub(crate) rank: u32,
    pub(crate) pages: Arc<PageLists>,
    regions: BTreeMap<u16, File>,
}

/// A region's bytes, by its number.
pub(crate) type Bytes = BTreeMap<u16, Vec<u8>>;

pub(crate) fn sealed(len: u64) -> OwnedFd {
    let fd = memfd_create("kvferry-test", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&fd, len).unwrap();
    fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW).unwrap();
    fd
}

impl Engine {
    /// Memory for all ranks, and for each page group scattered pages for so many tokens.
    pub(crate) fn new(envelope: Envelope, tokens: u64, seed: u64) -> Engine {
        let mut random = StdRng::seed_from_u64(seed);
        let ranks = (0..envelope.ranks.len() as u32).map(|rank| {
            let regions = envelope.region_bytes(rank).into_iter();
            let regions = regions
                .map(|(region, len)| (region, File::from(sealed(len))))
                .collect();
            let groups = envelope.page_groups.iter().enumerate().map(|(at, group)| {
                let component = envelope
                    .components
                    .iter()
                    .find(|c| usize::from(c.page_group) == at)
                    .unwrap();
                let dcp_rank = envelope.ranks[rank as usize].dcp_rank;
                let local = match component.unit {
                    kvferry_handshake::Unit::Slot => 1,
                    _ => component
                        .dcp
                        .count_below(dcp_rank, tokens)
                        .div_ceil(group.page_size.into()),
                };
                let mut ids: Vec<u32> = (0..group.pool_pages).collect();
                ids.shuffle(&mut random);
                ids.truncate(local as usize);
                assert_eq!(ids.len() as u64, local, "the pool is too small");
                ids
            });
            Rank {
                rank,
                pages: Arc::new(PageLists {
                    groups: groups.collect(),
                }),
                regions,
            }
        });
        let ranks = ranks.collect();
        Engine { envelope, ranks }
    }

    pub(crate) fn fill(&self, seed: u64) {
        for rank in &self.ranks {
            rank.fill(seed);
        }
    }
}

impl Rank {
    /// A region's memfd.
    pub(crate) fn file(&self, region: u16) -> &File {
        &self.regions[&region]
    }

    /// Writes a pattern that depends on rank, region and place.
    pub(crate) fn fill(&self, seed: u64) {
        for (region, file) in &self.regions {
            let bytes = self.pattern(*region, file.metadata().unwrap().len(), seed);
            file.write_all_at(&bytes, 0).unwrap();
        }
    }

    /// What [`Rank::fill`] writes, made beforehand, to write at once.
    pub(crate) fn patterns(&self, seed: u64) -> Bytes {
        let len = |file: &File| file.metadata().unwrap().len();
        self.regions
            .iter()
            .map(|(region, file)| (*region, self.pattern(*region, len(file), seed)))
            .collect()
    }

    pub(crate) fn write(&self, bytes: &Bytes) {
        for (region, file) in &self.regions {
            file.write_all_at(&bytes[region], 0).unwrap();
        }
    }

    /// Whether the memory is as [`Rank::fill`] left it.
    pub(crate) fn is_filled(&self, seed: u64) -> bool {
        self.bytes()
            .iter()
            .all(|(region, bytes)| *bytes == self.pattern(*region, bytes.len() as u64, seed))
    }

    /// splitmix64 over the places.
    fn pattern(&self, region: u16, len: u64, seed: u64) -> Vec<u8> {
        let salt = (seed << 40) ^ (u64::from(self.rank) << 32) ^ (u64::from(region) << 48);
        let words = (0..len.div_ceil(8)).flat_map(|word| {
            let z = (word ^ salt).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            (z ^ (z >> 27)).to_le_bytes()
        });
        let mut bytes: Vec<u8> = words.collect();
        bytes.truncate(len as usize);
        bytes
    }

    /// Fills everything with one byte.
    pub(crate) fn fill_with(&self, byte: u8) {
        for file in self.regions.values() {
            let len = file.metadata().unwrap().len() as usize;
            file.write_all_at(&vec![byte; len], 0).unwrap();
        }
    }

    pub(crate) fn bytes(&self) -> Bytes {
        let read = |file: &File| {
            let mut bytes = vec![0; file.metadata().unwrap().len() as usize];
            file.read_exact_at(&mut bytes, 0).unwrap();
            bytes
        };
        self.regions
            .iter()
            .map(|(region, file)| (*region, read(file)))
            .collect()
    }

    /// Has a data plane reach the memory as that of this process, for as long as what is given back lives.
    pub(crate) fn register_process(
        &self,
        plane: &DataPlane,
        owner: u64,
    ) -> (Arc<[(u16, RegionKey)]>, Vec<MmapMut>) {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let process = Arc::new(EngineProcess::of(&ours).unwrap());
        let mapped = self.regions.iter().map(|(region, file)| {
            // SAFETY: the memfd is sealed, and nobody makes references into the mapping.
            let map = unsafe { MmapMut::map_mut(file) }.unwrap();
            let (address, len) = (map.as_ptr().addr() as u64, map.len() as u64);
            (
                (
                    *region,
                    plane
                        .map_process(owner, Arc::clone(&process), address, len)
                        .unwrap(),
                ),
                map,
            )
        });
        let (keys, maps): (Vec<_>, Vec<_>) = mapped.unzip();
        (keys.into(), maps)
    }

    /// Has a data plane map the memory.
    pub(crate) fn register(&self, plane: &DataPlane, owner: u64) -> Arc<[(u16, RegionKey)]> {
        let keys = self.regions.iter().map(|(region, file)| {
            let fd = file.try_clone().unwrap().into();
            let len = file.metadata().unwrap().len();
            (*region, plane.map_memfd(owner, fd, 0, len).unwrap())
        });
        keys.collect()
    }
}

/// A pair of engines, drawn at random: (prefill, decode, tokens).
pub(crate) fn geometry(seed: u64) -> (Engine, Engine, u64) {
    let mut random = StdRng::seed_from_u64(seed);
    let layers = random.random_range(1..6);
    let tokens = random.random_range(1..700);
    let model = ModelShape::new("test", layers);
    let model = match random.random_range(0..5) {
        0 => model.latent(0..layers, 576),
        1 => model.kv_widths(0..layers, 4, 192, 128),
        2 => model.kv(0..layers, 8, 64).window(0..layers, 4, 32, 100),
        3 => model.kv(0..layers, 4, 128).state(
            "state",
            0..layers,
            &[("x", 8, 96), ("b", 4, 64)],
            kvferry_handshake::Element::Bf16,
        ),
        _ => model.kv(0..layers, 8, 128),
    };
    let one_of = |random: &mut StdRng, of: &[u32]| *of.choose(random).unwrap();
    use rand::seq::IndexedRandom;
    let mut launch = || {
        let page_size = one_of(&mut random, &[1, 4, 16, 64]);
        Launch {
            tp: one_of(&mut random, &[1, 2, 4]),
            pp: Stages::Even(random.random_range(1..=layers.min(2))),
            page_size,
            pool_pages: 800u32.div_ceil(page_size) + 7,
            slots: 5,
            order: if random.random_bool(0.3) {
                Order::Hnd
            } else {
                Order::Nhd
            },
            allocation: *[
                Allocation::LayerPart,
                Allocation::Layer,
                Allocation::LayerPages,
                Allocation::OneRegion,
                Allocation::PageMajor,
            ]
            .choose(&mut random)
            .unwrap(),
            ..Launch::default()
        }
    };
    let (prefill, decode) = (
        launch().envelope(&model).unwrap(),
        launch().envelope(&model).unwrap(),
    );
    (
        Engine::new(prefill, tokens, seed ^ 1),
        Engine::new(decode, tokens, seed ^ 2),
        tokens,
    )
}

/// The chunk maps of a fetch of `range`, by (prefill rank, decode rank).
pub(crate) fn transfers(
    prefill: &Engine,
    decode: &Engine,
    range: TokenRange,
) -> BTreeMap<(u32, u32), ChunkMap> {
    let (verdict, plan) = judge(&prefill.envelope, &decode.envelope, Policy::Bridge);
    let plan: Arc<LinkPlan> = Arc::new(plan.unwrap_or_else(|| panic!("{verdict:?}")));
    let mut maps = BTreeMap::new();
    for target in &decode.ranks {
        for source in plan.sources(target.rank) {
            let map = ChunkMap::new(&plan, source, target.rank, range, Arc::clone(&target.pages)).unwrap();
            map.check_source(&prefill.ranks[source as usize].pages).unwrap();
            maps.insert((source, target.rank), map);
        }
    }
    maps
}

/// What a decode rank's memory must be after the fetch: what it was, with every move of the plan done.
pub(crate) fn expected(
    before: &Bytes,
    prefill: &Engine,
    decode_rank: u32,
    maps: &BTreeMap<(u32, u32), ChunkMap>,
) -> Bytes {
    let mut after = before.clone();
    for ((source, target), map) in maps {
        if *target != decode_rank {
            continue;
        }
        let rank = &prefill.ranks[*source as usize];
        let bytes = rank.bytes();
        for chunk in 0..map.chunks() {
            for step in map.moves(chunk, &rank.pages) {
                let from = step.source_offset as usize..(step.source_offset + step.len) as usize;
                let to = step.offset as usize..(step.offset + step.len) as usize;
                after.get_mut(&step.region).unwrap()[to].copy_from_slice(&bytes[&step.source_region][from]);
            }
        }
    }
    after
}
