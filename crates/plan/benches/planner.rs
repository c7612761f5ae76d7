//! What planning costs: `cargo bench -p kvferry-plan`.

#![allow(missing_docs, clippy::unwrap_used)]

use std::hint::black_box;
use std::sync::Arc;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kvferry_handshake::{Allocation, Dcp, Envelope, Launch, ModelShape, Order, PageLists, TokenRange, Unit};
use kvferry_plan::{ChunkMap, LinkPlan, Side};

const TOKENS: u64 = 128 * 1024;

fn llama_70b() -> ModelShape {
    ModelShape::new("meta-llama/Llama-3.1-70B", 80).kv(0..80, 8, 128)
}

fn deepseek_v3() -> ModelShape {
    ModelShape::new("deepseek-ai/DeepSeek-V3", 61).latent(0..61, 576)
}

fn engine(
    model: &ModelShape,
    tp: u32,
    dcp: u32,
    order: Order,
    allocation: Allocation,
    page: u32,
) -> Envelope {
    Launch {
        tp,
        dcp: Dcp {
            size: dcp,
            interleave: 1,
        },
        order,
        allocation,
        page_size: page,
        pool_pages: 2 * u32::try_from(TOKENS).unwrap() / page,
        ..Launch::default()
    }
    .envelope(model)
    .unwrap()
}

/// One rank's lists, with pages scattered over the pool.
fn lists(envelope: &Envelope, rank: usize) -> PageLists {
    let dcp_rank = envelope.ranks[rank].dcp_rank;
    let groups = envelope.page_groups.iter().zip(&envelope.components);
    let groups = groups.map(|(group, component)| {
        assert_eq!(component.unit, Unit::Token);
        let local = component.dcp.count_below(dcp_rank, TOKENS);
        let pages = local.div_ceil(u64::from(group.page_size));
        (0..u32::try_from(pages).unwrap())
            .map(|k| (k * 7919) % group.pool_pages)
            .collect()
    });
    PageLists {
        groups: groups.collect(),
    }
}

const WHOLE: TokenRange = TokenRange { from: 0, to: TOKENS };

fn link(c: &mut Criterion) {
    let mut group = c.benchmark_group("link");
    for (name, model) in [("llama 70B", llama_70b()), ("deepseek v3", deepseek_v3())] {
        for (from, to) in [(8, 8), (4, 8), (64, 64)] {
            let prefill = engine(&model, from, 1, Order::Nhd, Allocation::LayerPart, 64);
            let decode = engine(&model, to, 1, Order::Nhd, Allocation::LayerPart, 64);
            group.bench_function(BenchmarkId::new(name, format!("TP{from} to TP{to}")), |b| {
                b.iter(|| LinkPlan::new(black_box(&prefill), black_box(&decode)).unwrap());
            });
        }
    }
}

/// Planning a request of 128k tokens: every pair's chunk map, and its size.
fn request(c: &mut Criterion) {
    let mut group = c.benchmark_group("request of 128k tokens, all ranks");
    for (name, allocation) in [
        ("LayerPart", Allocation::LayerPart),
        ("PageMajor", Allocation::PageMajor),
    ] {
        let envelope = engine(&llama_70b(), 8, 1, Order::Nhd, allocation, 64);
        let link = Arc::new(LinkPlan::new(&envelope, &envelope).unwrap());
        let pages: Vec<Arc<PageLists>> = (0..8).map(|rank| Arc::new(lists(&envelope, rank))).collect();
        group.bench_function(BenchmarkId::new("llama 70B TP8 page 64", name), |b| {
            b.iter(|| {
                let mut bytes = 0;
                for (rank, pages) in (0u32..).zip(&pages) {
                    for source in link.sources(rank) {
                        let map = ChunkMap::new(&link, source, rank, WHOLE, Arc::clone(pages)).unwrap();
                        bytes += map.total_bytes();
                    }
                }
                bytes
            });
        });
    }
}

/// Moves and byte ranges of one pair of ranks, walked chunk by chunk.
fn walk(c: &mut Criterion) {
    use Allocation::{Layer, LayerPart, PageMajor};
    use Order::{Hnd, Nhd};
    type SideOf = (u32, u32, Order, Allocation, u32);
    let llama = llama_70b();
    let deepseek = deepseek_v3();
    let cases: [(&str, &ModelShape, SideOf, SideOf); 6] = [
        (
            "llama TP8 same, whole pages",
            &llama,
            (8, 1, Nhd, LayerPart, 64),
            (8, 1, Nhd, LayerPart, 64),
        ),
        (
            "llama TP8 page-major same",
            &llama,
            (8, 1, Nhd, PageMajor, 64),
            (8, 1, Nhd, PageMajor, 64),
        ),
        (
            "llama TP4 to TP2, 512-byte slices",
            &llama,
            (4, 1, Nhd, LayerPart, 16),
            (2, 1, Nhd, LayerPart, 16),
        ),
        (
            "llama NHD to HND, 256-byte rows",
            &llama,
            (2, 1, Nhd, LayerPart, 16),
            (2, 1, Hnd, Layer, 16),
        ),
        (
            "deepseek DCP1 to DCP8, 1152-byte rows",
            &deepseek,
            (8, 1, Nhd, LayerPart, 64),
            (8, 8, Nhd, LayerPart, 64),
        ),
        (
            "deepseek page 64 to page 1",
            &deepseek,
            (8, 1, Nhd, LayerPart, 64),
            (8, 1, Nhd, LayerPart, 1),
        ),
    ];
    for (name, model, from, to) in cases {
        let prefill = engine(model, from.0, from.1, from.2, from.3, from.4);
        let decode = engine(model, to.0, to.1, to.2, to.3, to.4);
        let link = Arc::new(LinkPlan::new(&prefill, &decode).unwrap());
        let source = link.sources(0)[0];
        let source_pages = lists(&prefill, usize::try_from(source).unwrap());
        let pages = Arc::new(lists(&decode, 0));
        let map = ChunkMap::new(&link, source, 0, WHOLE, Arc::clone(&pages)).unwrap();
        let chunks = map.chunks().min(40);
        let mut group = c.benchmark_group(format!("walk {name}"));
        let count: u64 = (0..chunks)
            .map(|chunk| map.moves(chunk, &source_pages).count() as u64)
            .sum();
        group.throughput(Throughput::Elements(count));
        group.bench_function("moves", |b| {
            b.iter(|| {
                let moves = (0..chunks).flat_map(|chunk| map.moves(chunk, &source_pages));
                moves
                    .map(|step| step.offset ^ step.source_offset ^ step.len)
                    .sum::<u64>()
            });
        });
        for (side, pages) in [(Side::Prefill, &source_pages), (Side::Decode, &*pages)] {
            let count: u64 = (0..chunks)
                .map(|chunk| map.extents(chunk, side, pages).count() as u64)
                .sum();
            group.throughput(Throughput::Elements(count));
            group.bench_function(format!("extents {side:?}"), |b| {
                b.iter(|| {
                    let mut sum = 0u64;
                    for chunk in 0..chunks {
                        for extent in map.extents(chunk, side, pages) {
                            sum = sum.wrapping_add(extent.offset ^ extent.len);
                        }
                    }
                    sum
                });
            });
        }
    }
}

criterion_group!(benches, link, request, walk);
criterion_main!(benches);
