//! Which pairs of engines are linked, by real daemons: every byte of those that are, and a refusal that names
//! everything for those that are not.

#![allow(clippy::unwrap_used, missing_docs)] // a panic here is a failed test

use kvferry_client::{ClientError, Event, Fault, Notice, Path};
use kvferry_handshake::{
    Allocation, Code, Element, Envelope, Launch, ModelShape, Outcome, Padding, Policy, Role, Stages, Verdict,
};
use kvferry_tests::engine::{Carry, Engine, fetch_request, named, tokens};
use kvferry_tests::geometry::{
    Expected, Pair, context_pairs, dcp, deepseek_v3, hybrid, launch, llama_8b, model_pairs, plain_pairs,
};
use kvferry_tests::memory::Kind;
use kvferry_tests::node::{Cluster, Node, Options};
use kvferry_tests::pattern::Stamp;
use kvferry_tests::wait::{PATIENCE, within};
use kvferry_tests::width::by_width;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn plain_attention_under_the_strict_policy() {
    pairs(plain_pairs(), Policy::Strict).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn plain_attention_where_bridging_is_allowed() {
    pairs(bridged(plain_pairs()), Policy::Bridge).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn context_parallelism_under_the_strict_policy() {
    pairs(context_pairs(), Policy::Strict).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn context_parallelism_where_bridging_is_allowed() {
    pairs(bridged(context_pairs()), Policy::Bridge).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn layers_components_and_models_under_the_strict_policy() {
    pairs(model_pairs(), Policy::Strict).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn layers_components_and_models_where_bridging_is_allowed() {
    pairs(bridged(model_pairs()), Policy::Bridge).await;
}

/// Of pairs that come out alike under both policies, the other policy is left to the full matrix.
fn bridged(mut pairs: Vec<Pair>) -> Vec<Pair> {
    let all = by_width(false, false, true);
    pairs.retain(|pair| all || pair.strict != pair.bridge);
    pairs
}

async fn pairs(pairs: Vec<Pair>, policy: Policy) {
    let cluster = Cluster::new();
    let nodes = cluster.start_two(Options::default().policy(policy)).await;
    for (number, pair) in pairs.iter().enumerate() {
        let expected = match policy {
            Policy::Strict => pair.strict,
            Policy::Bridge => pair.bridge,
        };
        match expected {
            Expected::Exact => exact(pair, number, &nodes).await,
            Expected::Refused(codes) => refused(pair, codes, &nodes).await,
        }
        println!("{}: {policy:?} as expected", pair.name);
    }
}

/// Prompts at which a pair is tried: their length, and the tokens that are held already.
fn prompts(pair: &Pair, turn: usize) -> Vec<(u64, u64)> {
    let sizes = [&pair.prefill, &pair.decode].map(|envelope| envelope.page_groups[0].page_size);
    let page = u64::from(sizes[0].max(sizes[1]));
    let mut prompts = Vec::new();
    for (at, tokens) in [1, page - 1, page, page + 1, 4 * page + 3, 1_000]
        .into_iter()
        .enumerate()
    {
        if tokens == 0 {
            continue;
        }
        let mut helds = vec![0, page.min(tokens), (tokens - 1) / page * page, tokens];
        // Some of the four, and others for the next length and the next pair.
        helds.rotate_left((at + turn) % 4);
        helds.truncate(by_width(1, 4, 4));
        helds.sort_unstable();
        helds.dedup();
        prompts.extend(helds.into_iter().map(|held| (tokens, held)));
    }
    prompts
}

/// The prefill engine on one node; the decode engine on the other, and another one on the same node.
async fn exact(pair: &Pair, turn: usize, [a, b]: &[Node; 2]) {
    let prefill = Engine::attach(named(&pair.prefill, "prefill", Role::Prefill), &[a], Kind::Memfd).await;
    let far = Engine::attach(named(&pair.decode, "far", Role::Decode), &[b], Kind::Memfd).await;
    let near = Engine::attach(named(&pair.decode, "near", Role::Decode), &[a], Kind::Memfd).await;
    for (at, (tokens, held)) in prompts(pair, turn).into_iter().enumerate() {
        for (path, decode) in [(Path::Tcp, &far), (Path::Local, &near)] {
            let carry = Carry {
                transfer: &format!("{} {tokens} {held} {path:?}", pair.name),
                tokens,
                held,
                sparse: false,
                fetch_first: at % 2 == 1,
                path: Some(path),
            };
            carry.run(&prefill, decode).await;
        }
    }
    for engine in [&prefill, &far, &near] {
        engine.check_all(pair.name);
    }
}

/// Between two nodes, and on one.
async fn refused(pair: &Pair, codes: &[Code], [a, b]: &[Node; 2]) {
    for (name, node) in [("far", b), ("near", a)] {
        let prefill = named(&pair.prefill, &format!("prefill-{name}"), Role::Prefill);
        let prefill = Engine::attach(prefill, &[a], Kind::Memfd).await;
        let decode = Engine::attach(named(&pair.decode, name, Role::Decode), &[node], Kind::Memfd).await;
        refusal(pair.name, &prefill, &decode, codes).await;

        // Both go on with engines that fit; with `auto` no engine does.
        let resolved = |envelope: &Envelope| envelope.components[0].element != Element::Auto;
        if !resolved(&pair.prefill) || !resolved(&pair.decode) {
            continue;
        }
        let fits = named(&pair.prefill, &format!("fits-{name}"), Role::Decode);
        let fits = Engine::attach(fits, &[node], Kind::Memfd).await;
        after_refusal("the prefill engine goes on", &prefill, &fits).await;
        let fits = named(&pair.decode, &format!("source-{name}"), Role::Prefill);
        let fits = Engine::attach(fits, &[a], Kind::Memfd).await;
        after_refusal("the decode engine goes on", &fits, &decode).await;
    }
}

async fn after_refusal(what: &str, prefill: &Engine, decode: &Engine) {
    let carry = Carry {
        transfer: what,
        tokens: 200,
        held: 0,
        sparse: false,
        fetch_first: false,
        path: None,
    };
    carry.run(prefill, decode).await;
}

/// A fetch of every rank is refused with these codes, both engines are told, and no byte moves.
async fn refusal(what: &str, prefill: &Engine, decode: &Engine, codes: &[Code]) {
    let stamp = Stamp::of(what);
    let published = prefill.publish(&stamp, 300, false).await;
    // The second time from memory.
    for attempt in 0..2 {
        let stamp = Stamp {
            attempt,
            ..stamp.clone()
        };
        let lists = decode.draw(300, false);
        for (rank, lists) in decode.ranks.iter().zip(&lists) {
            let request = fetch_request(&prefill.address(), &stamp, lists, tokens(0, 300), 300);
            let fault = match rank.fetch(request).await {
                Ok(fetching) => {
                    let end = within(PATIENCE, "the refusal", fetching.ended()).await;
                    end.unwrap_err().cause
                }
                Err(ClientError::Refused(fault)) => fault,
                Err(other) => panic!("{what}: {other}"),
            };
            check_refusal(what, &fault, codes);
            rank.pool()
                .check(lists, &format!("{what}: pages of a refused fetch"));
        }
        decode.give_back(&lists);
    }
    let name = decode.name();
    let awaited = format!("{what}: the prefill engine is told");
    let told = prefill.ranks[0]
        .notice(&awaited, |notice| refused_by(notice, name))
        .await;
    check_verdict(what, &told, codes);
    let told = decode.ranks[0]
        .notices()
        .iter()
        .find_map(|notice| refused_by(notice, prefill.name()));
    if let Some(verdict) = told {
        check_verdict(what, &verdict, codes);
    }
    // The publish waits for engines that fit, until it is aborted.
    prefill.ranks[0].rank.abort(&stamp.transfer()).await.unwrap();
    for end in published.ended(PATIENCE).await {
        assert!(end.is_err(), "{what}: a refused publish was delivered");
    }
    prefill.settle_publish(&published, what);
    prefill.check_all(what);
    decode.check_all(what);
}

fn refused_by(notice: &Notice, by: &str) -> Option<Verdict> {
    match notice {
        Notice::Event(Event::Refused { engine, verdict }) if engine.contains(by) => Some((**verdict).clone()),
        _ => None,
    }
}

fn sorted(mut codes: Vec<Code>) -> Vec<Code> {
    codes.sort_unstable();
    codes.dedup();
    codes
}

fn check_refusal(what: &str, fault: &Fault, codes: &[Code]) {
    assert_eq!(fault.code, Code::LinkRefused, "{what}: {fault}");
    let found = fault.mismatches.iter().map(|mismatch| mismatch.code).collect();
    assert_eq!(sorted(found), sorted(codes.to_vec()), "{what}: {fault:#?}");
    for mismatch in &fault.mismatches {
        assert!(
            !mismatch.field.is_empty() && !mismatch.prefill.is_empty(),
            "{what}: {mismatch:?}"
        );
        assert!(
            !mismatch.decode.is_empty() && !mismatch.fix.is_empty(),
            "{what}: {mismatch:?}"
        );
    }
}

fn check_verdict(what: &str, verdict: &Verdict, codes: &[Code]) {
    assert_eq!(verdict.outcome, Outcome::Refused, "{what}");
    let found = verdict.mismatches.iter().map(|mismatch| mismatch.code).collect();
    assert_eq!(sorted(found), sorted(codes.to_vec()), "{what}: {verdict:#?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_mismatch_of_a_pair_is_named_at_once() {
    let cluster = Cluster::new();
    let nodes = cluster.start_two(Options::default()).await;
    let prefill = Launch {
        element: Element::Fp8E5m2,
        ..launch(2, 1)
    };
    let pair = Pair {
        name: "five differences",
        prefill: prefill
            .envelope(&ModelShape::new("other", 3).kv(0..3, 8, 128).draft(1, 8, 128))
            .unwrap(),
        decode: launch(2, 16).envelope(&llama_8b()).unwrap(),
        strict: Expected::Exact,
        bridge: Expected::Exact,
    };
    let codes = [
        Code::PageSize,
        Code::ElementType,
        Code::Model,
        Code::Layers,
        Code::Components,
    ];
    refused(&pair, &codes, &nodes).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_stricter_operator_decides() {
    let cluster = Cluster::new();
    let strict = cluster.start("strict", Options::default()).await;
    let bridge = cluster
        .start("bridge", Options::default().policy(Policy::Bridge))
        .await;
    let pair = Pair {
        name: "one operator allows bridging",
        prefill: launch(2, 64).envelope(&llama_8b()).unwrap(),
        decode: launch(2, 16).envelope(&llama_8b()).unwrap(),
        strict: Expected::Exact,
        bridge: Expected::Exact,
    };
    for (prefill_node, decode_node, name) in [(&strict, &bridge, "to"), (&bridge, &strict, "from")] {
        let prefill = named(&pair.prefill, &format!("prefill-{name}"), Role::Prefill);
        let prefill = Engine::attach(prefill, &[prefill_node], Kind::Memfd).await;
        let decode = named(&pair.decode, &format!("decode-{name}"), Role::Decode);
        let decode = Engine::attach(decode, &[decode_node], Kind::Memfd).await;
        refusal(pair.name, &prefill, &decode, &[Code::PageSize]).await;
    }
}

/// Attaches both engines with their ranks spread over nodes, and carries a few prompts, near and far.
async fn spread(prefill: &Envelope, prefill_nodes: &[&Node], decode: &Envelope, decode_nodes: &[&Node]) {
    let prefill = Engine::attach(
        named(prefill, "prefill", Role::Prefill),
        prefill_nodes,
        Kind::Memfd,
    )
    .await;
    let decode = Engine::attach(named(decode, "decode", Role::Decode), decode_nodes, Kind::Memfd).await;
    for (at, (tokens, held)) in [(1, 0), (200, 0), (333, 64), (333, 333), (1_000, 992)]
        .into_iter()
        .enumerate()
    {
        for sparse in [false, true] {
            let carry = Carry {
                transfer: &format!("spread {at} {sparse}"),
                tokens,
                held,
                sparse,
                fetch_first: at % 2 == 0,
                path: None,
            };
            carry.run(&prefill, &decode).await;
        }
    }
    prefill.check_all("the prefill pools");
    decode.check_all("the decode pools");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ranks_of_one_engine_on_several_daemons() {
    let cluster = Cluster::new();
    let [a, b] = cluster.start_two(Options::default()).await;
    let c = cluster.start("c", Options::default()).await;
    let four = ModelShape::new("four-layers", 4).kv(0..4, 4, 32);
    let stages = Launch {
        pp: Stages::Even(2),
        ..launch(1, 16)
    };
    let whole = launch(1, 16).envelope(&four).unwrap();
    // Two pipeline stages on two nodes, to a third.
    spread(&stages.envelope(&four).unwrap(), &[&a, &b], &whole, &[&c]).await;
    // Both engines on two nodes each, of which they share one.
    let (four_ranks, two_ranks) = (
        launch(4, 16).envelope(&four).unwrap(),
        launch(2, 16).envelope(&four).unwrap(),
    );
    spread(&four_ranks, &[&a, &b], &two_ranks, &[&b, &c]).await;
    // DCP over three nodes.
    let latent = Launch {
        dcp: dcp(4),
        ..launch(4, 16)
    };
    let one = launch(1, 16).envelope(&deepseek_v3()).unwrap();
    spread(
        &one,
        &[&c],
        &latent.envelope(&deepseek_v3()).unwrap(),
        &[&a, &b, &c],
    )
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_page_groups() {
    let cluster = Cluster::new();
    let [a, b] = cluster.start_two(Options::default()).await;
    let arranged = |tp, allocation, shared_pool| {
        let launch = Launch {
            allocation,
            shared_pool,
            pool_pages: 400,
            ..launch(tp, 16)
        };
        launch.envelope(&hybrid()).unwrap()
    };
    let apart = arranged(2, Allocation::LayerPart, false);
    spread(&apart, &[&a], &arranged(1, Allocation::PageMajor, false), &[&b]).await;
    spread(&arranged(1, Allocation::Layer, false), &[&a], &apart, &[&a]).await;
    let shared = Launch {
        padding: Padding {
            page: 64,
            ..Padding::default()
        },
        allocation: Allocation::LayerPages,
        shared_pool: true,
        pool_pages: 800,
        ..launch(2, 16)
    };
    spread(&shared.envelope(&hybrid()).unwrap(), &[&b], &apart, &[&a]).await;
}

/// Pair 22 of docs/geometry-pairs.md, on fewer layers: one prompt over eight ranks, interleaved token by token, so that
/// no two rows of a rank lie side by side at the source. It takes a hundredth of the system calls that it has rows, or
/// fewer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_long_prompt_over_dcp_ranks() {
    let cluster = Cluster::new();
    let [a, b] = cluster.start_two(Options::default()).await;
    let (length, layers) = by_width((6_909, 1), (6_909, 1), (56_000, 2));
    let pool_pages = u32::try_from(length / 64 + 9).unwrap();
    let latent = ModelShape::new("deepseek-ai/DeepSeek-V3", layers).latent(0..layers, 576);
    let one = Launch {
        pool_pages,
        ..launch(1, 64)
    };
    let eight = Launch {
        dcp: dcp(8),
        pool_pages,
        ..launch(8, 64)
    };
    spread_long(
        &one.envelope(&latent).unwrap(),
        &eight.envelope(&latent).unwrap(),
        [&a, &b],
        length,
        // A latent is one row a token and layer.
        length * u64::from(layers),
    )
    .await;
}

async fn spread_long(prefill: &Envelope, decode: &Envelope, [a, b]: [&Node; 2], length: u64, rows: u64) {
    let prefill = Engine::attach(named(prefill, "prefill", Role::Prefill), &[a], Kind::Memfd).await;
    let far = Engine::attach(named(decode, "far", Role::Decode), &[b], Kind::Memfd).await;
    let near = Engine::attach(named(decode, "near", Role::Decode), &[a], Kind::Memfd).await;
    for (decode, path) in [(&far, Path::Tcp), (&near, Path::Local)] {
        let carry = Carry {
            transfer: &format!("long {path:?}"),
            tokens: length,
            held: 0,
            sparse: false,
            fetch_first: false,
            path: Some(path),
        };
        let before = send_calls(a).await;
        carry.run(&prefill, decode).await;
        let calls = send_calls(a).await - before;
        match path {
            Path::Tcp => assert!(
                calls > 0 && rows / calls >= 100,
                "{calls} system calls for {rows} rows of {length} tokens"
            ),
            // Copied from mapping to mapping: no system call at all.
            Path::Local => assert_eq!(calls, 0),
        }
    }
}

/// System calls that this node sent pages with, to any peer.
async fn send_calls(node: &Node) -> u64 {
    node.status().await.peers.iter().map(|peer| peer.send_calls).sum()
}
