//! Geometry pairs that people run, with fewer layers and smaller pools than theirs.

use kvferry_handshake::{
    Allocation, Cached, Code, Dcp, Element, Envelope, Kind, Launch, ModelShape, Order, Padding, Stages,
};

/// What must come out of a pair under one policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expected {
    /// Linked, and every byte is the reference's.
    Exact,
    /// Refused with these codes.
    Refused(&'static [Code]),
}

/// One pair.
#[derive(Clone, Debug)]
pub struct Pair {
    /// Name for messages.
    pub name: &'static str,
    /// The prefill engine.
    pub prefill: Envelope,
    /// The decode engine.
    pub decode: Envelope,
    /// Under the default policy.
    pub strict: Expected,
    /// Where the operator allows bridging.
    pub bridge: Expected,
}

/// Longest prompt that the pools have room for, twice.
pub const LONGEST: u64 = 1_000;

/// Llama-3.1-70B's heads on two layers.
pub fn llama_70b() -> ModelShape {
    ModelShape::new("meta-llama/Llama-3.1-70B", 2).kv(0..2, 8, 128)
}

/// Llama-3.1-8B's heads on two layers.
pub fn llama_8b() -> ModelShape {
    ModelShape::new("meta-llama/Llama-3.1-8B", 2).kv(0..2, 8, 128)
}

/// DeepSeek-V3's latent on two layers.
pub fn deepseek_v3() -> ModelShape {
    ModelShape::new("deepseek-ai/DeepSeek-V3", 2).latent(0..2, 576)
}

/// A launch with a pool that holds two prompts and some pages.
pub fn launch(tp: u32, page_size: u32) -> Launch {
    let longest = LONGEST.max(4 * 128 + 3);
    let pages = (2 * longest).div_ceil(page_size.into()) + 13;
    Launch {
        tp,
        page_size,
        pool_pages: u32::try_from(pages).unwrap(),
        allocation: Allocation::OneRegion,
        ..Launch::default()
    }
}

/// DCP of this size with interleave 1.
pub fn dcp(size: u32) -> Dcp {
    Dcp { size, interleave: 1 }
}

fn make(launch: &Launch, model: &ModelShape) -> Envelope {
    launch.envelope(model).unwrap()
}

fn pair(name: &'static str, prefill: Envelope, decode: Envelope, strict: Expected, bridge: Expected) -> Pair {
    Pair {
        name,
        prefill,
        decode,
        strict,
        bridge,
    }
}

use Expected::{Exact, Refused};

/// Pairs of plain attention.
pub fn plain_pairs() -> Vec<Pair> {
    let page_64 = make(&launch(8, 64), &llama_70b());
    let element = |element| {
        let launch = Launch {
            element,
            ..launch(2, 64)
        };
        make(&launch, &llama_70b())
    };
    let tp = |tp| make(&launch(tp, 16), &llama_8b());
    let arranged = |tp, allocation, padding| {
        let launch = Launch {
            allocation,
            padding,
            ..launch(tp, 16)
        };
        make(&launch, &llama_8b())
    };
    let order = |order| {
        let launch = Launch {
            order,
            ..launch(2, 16)
        };
        make(&launch, &llama_8b())
    };
    let pool = |pool_pages| {
        let launch = Launch {
            pool_pages,
            ..launch(2, 16)
        };
        make(&launch, &llama_8b())
    };
    let gaps = Padding {
        row: 32,
        page: 96,
        start: 4_096,
    };
    let unequal = ModelShape::new("unequal", 2).kv_widths(0..2, 4, 192, 128);
    let other_widths = |tp| make(&launch(tp, 16), &unequal);
    const PAGE_SIZE: Expected = Refused(&[Code::PageSize]);
    const ELEMENT: Expected = Refused(&[Code::ElementType]);
    const UNRESOLVED: Expected = Refused(&[Code::ElementUnresolved]);
    const LAYOUT: Expected = Refused(&[Code::Layout]);
    vec![
        pair(
            "1: equal engines, TP8",
            page_64.clone(),
            page_64.clone(),
            Exact,
            Exact,
        ),
        pair(
            "2: page 64 to page 1",
            page_64,
            make(&launch(8, 1), &llama_70b()),
            PAGE_SIZE,
            Exact,
        ),
        pair(
            "3: bf16 to fp8_e5m2",
            element(Element::Bf16),
            element(Element::Fp8E5m2),
            ELEMENT,
            ELEMENT,
        ),
        pair(
            "4: unresolved, to bf16",
            element(Element::Auto),
            element(Element::Bf16),
            UNRESOLVED,
            UNRESOLVED,
        ),
        pair(
            "4: bf16 to unresolved",
            element(Element::Bf16),
            element(Element::Auto),
            UNRESOLVED,
            UNRESOLVED,
        ),
        pair(
            "5: bfloat16 and bf16",
            element("bfloat16".parse().unwrap()),
            element("bf16".parse().unwrap()),
            Exact,
            Exact,
        ),
        pair("6: TP4 to TP2", tp(4), tp(2), Exact, Exact),
        pair("7: TP2 to TP4", tp(2), tp(4), Exact, Exact),
        pair(
            "7: TP2 to TP4, arranged differently, with gaps",
            arranged(2, Allocation::LayerPages, gaps),
            arranged(4, Allocation::PageMajor, Padding::default()),
            Exact,
            Exact,
        ),
        pair("8: TP8 to TP16", tp(8), tp(16), Exact, Exact),
        pair(
            "9: NHD to HND",
            order(Order::Nhd),
            order(Order::Hnd),
            LAYOUT,
            Exact,
        ),
        pair(
            "17: a pool of 139 pages to one of 211",
            pool(139),
            pool(211),
            Exact,
            Exact,
        ),
        pair(
            "21: K 192 wide, V 128",
            other_widths(2),
            other_widths(4),
            Exact,
            Exact,
        ),
    ]
}

/// Pairs with context parallelism.
pub fn context_pairs() -> Vec<Pair> {
    let deepseek = |dcp| {
        let launch = Launch { dcp, ..launch(8, 64) };
        make(&launch, &deepseek_v3())
    };
    let llama = |dcp| {
        let launch = Launch { dcp, ..launch(4, 16) };
        make(&launch, &llama_8b())
    };
    let mut prefill_cp = deepseek(dcp(1));
    prefill_cp.identity.prefill_context_parallel = 2;
    const LATENT: Expected = Refused(&[Code::DcpNeedsLatent]);
    const TOPOLOGY: Expected = Refused(&[Code::DcpTopology]);
    const PREFILL_CP: Expected = Refused(&[Code::PrefillContextParallel]);
    vec![
        pair(
            "10: DCP1 to DCP8, latent",
            deepseek(dcp(1)),
            deepseek(dcp(8)),
            Exact,
            Exact,
        ),
        pair(
            "11: DCP1 to DCP2, per head",
            llama(dcp(1)),
            llama(dcp(2)),
            LATENT,
            Exact,
        ),
        pair(
            "12: DCP4 to DCP2",
            deepseek(dcp(4)),
            deepseek(dcp(2)),
            TOPOLOGY,
            Exact,
        ),
        pair(
            "13: DCP8 to DCP8",
            deepseek(dcp(8)),
            deepseek(dcp(8)),
            Exact,
            Exact,
        ),
        pair(
            "14: prefill CP2 to DCP2",
            prefill_cp,
            deepseek(dcp(2)),
            PREFILL_CP,
            PREFILL_CP,
        ),
    ]
}

/// Pairs that differ in layers, components or model.
pub fn model_pairs() -> Vec<Pair> {
    let four = ModelShape::new("four-layers", 4).kv(0..4, 2, 16);
    let stages = |pp| {
        let launch = Launch { pp, ..launch(1, 16) };
        make(&launch, &four)
    };
    let plain = make(&launch(2, 16), &llama_8b());
    let draft = make(&launch(2, 16), &llama_8b().draft(1, 8, 128));
    let fp8 = Launch {
        element: Element::Fp8E4m3,
        ..launch(2, 16)
    };
    let scales = Cached::new("scales", Kind::Scales, 0..2, &[("k", 8, 1), ("v", 8, 1)]);
    let scaled = llama_8b().with(scales.element(Element::Fp32).per_page());
    let opaque = |page| {
        let kv = Cached::new("kv", Kind::Kv, 0..2, &[("kv", 2, 512)]).opaque("amx");
        make(&launch(1, page), &ModelShape::new("tiled", 2).with(kv))
    };
    let revision = |revision: &str| {
        let mut envelope = plain.clone();
        envelope.identity.revision = Some(revision.to_owned());
        envelope
    };
    const COMPONENTS: Expected = Refused(&[Code::Components]);
    const PAGE_SIZE: Expected = Refused(&[Code::PageSize]);
    const REVISION: Expected = Refused(&[Code::Revision]);
    vec![
        pair(
            "15: PP2 as 2+2 to PP1",
            stages(Stages::Layers(vec![2, 2])),
            stages(Stages::Even(1)),
            Exact,
            Exact,
        ),
        pair(
            "15: PP2 as 3+1 to PP1",
            stages(Stages::Layers(vec![3, 1])),
            stages(Stages::Even(1)),
            Exact,
            Exact,
        ),
        pair(
            "16: a draft layer on one side",
            plain.clone(),
            draft,
            COMPONENTS,
            COMPONENTS,
        ),
        pair(
            "18: per-page scales on one side",
            make(&fp8, &scaled),
            make(&fp8, &llama_8b()),
            COMPONENTS,
            COMPONENTS,
        ),
        pair(
            "18: per-page scales on both",
            make(&fp8, &scaled),
            make(&fp8, &scaled),
            Exact,
            Exact,
        ),
        pair(
            "19: opaque pages of 32 and 128",
            opaque(32),
            opaque(128),
            PAGE_SIZE,
            PAGE_SIZE,
        ),
        pair("19: opaque pages alike", opaque(32), opaque(32), Exact, Exact),
        pair(
            "20: revision A to revision B",
            revision("A"),
            revision("B"),
            REVISION,
            REVISION,
        ),
    ]
}

/// A hybrid model: attention, a sliding window in its own page group, and recurrent state.
pub fn hybrid() -> ModelShape {
    ModelShape::new("hybrid", 6)
        .kv([0, 3], 4, 16)
        .window([1, 4], 4, 16, 64)
        .state(
            "state",
            [2, 5],
            &[("x", 4, 64), ("b", 2, 16), ("c", 2, 16)],
            Element::Fp32,
        )
}

/// One region of exactly two pages of memory, 8 KiB.
pub fn small() -> Envelope {
    let launch = Launch {
        pool_pages: 2,
        ..launch(1, 16)
    };
    launch
        .envelope(&ModelShape::new("small", 1).kv(0..1, 1, 64))
        .unwrap()
}
