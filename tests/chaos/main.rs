//! Daemons and engines are killed, stopped and cut off at random while transfers go on. Whatever happens: no wrong byte, no
//! byte after the end, no transfer without an end, and nothing left behind.

#![allow(clippy::unwrap_used, missing_docs)] // a panic here is a failed test

mod harm;
mod load;
mod processes;

use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_client::PublishRequest;
use kvferry_handshake::{Envelope, Launch, ModelShape, Ready, Role, Stages};
use kvferry_tests::engine::{Carry, Engine, fetch_request, named, tokens};
use kvferry_tests::geometry::launch;
use kvferry_tests::memory::Kind;
use kvferry_tests::node::{Cluster, Footprint, Node, Options, Place, free_port};
use kvferry_tests::pattern::Stamp;
use kvferry_tests::proxy::Proxy;
use kvferry_tests::wait::{PATIENCE, within};
use kvferry_tests::width::{by_width, seed};

use crate::harm::Harm;
use crate::load::{Load, Tally};
use crate::processes::Pair;

/// How long a publish or fetch may take from its call to its end: several deadlines on a loaded machine.
const LONGEST: Duration = Duration::from_secs(60);

fn model() -> ModelShape {
    ModelShape::new("four-layers", 4).kv(0..4, 4, 64)
}

fn envelope(tp: u32, pp: u32) -> Envelope {
    let launch = Launch {
        pp: Stages::Even(pp),
        pool_pages: 300,
        ..launch(tp, 16)
    };
    launch.envelope(&model()).unwrap()
}

/// Two nodes whose channel runs through the test.
struct Nodes {
    nodes: Vec<Node>,
    proxies: Vec<Proxy>,
}

impl Nodes {
    async fn start(cluster: &Cluster, options: Options) -> Nodes {
        let mut started = Nodes {
            nodes: Vec::new(),
            proxies: Vec::new(),
        };
        for name in ["a", "b"] {
            let port = free_port();
            let proxy = Proxy::start(port);
            let options = options
                .clone()
                .set("peer_listen", format!("\"127.0.0.1:{port}\""))
                .set("advertise", format!("\"127.0.0.1:{}\"", proxy.port()));
            started.nodes.push(cluster.start(name, options).await);
            started.proxies.push(proxy);
        }
        started
    }

    fn places(&self) -> Vec<Place> {
        self.nodes.iter().map(Node::place).collect()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn a_storm() {
    let seed = seed(20_260_101);
    let cluster = Cluster::new();
    let options = Options::default()
        .set("deadline_ms", 4_000)
        .set("lease_ms", 4_000)
        .set("peer_timeout_ms", 2_000)
        .set("checksum", true)
        .set("log_level", "\"warn\"");
    let nodes = Nodes::start(&cluster, options).await;
    let mut fresh = footprints(&nodes.nodes).await;
    let places = nodes.places();
    let (a, b) = (places[0].clone(), places[1].clone());
    let lasts = Duration::from_secs(storm_seconds());
    let until = Instant::now() + lasts;

    let whole = envelope(1, 1);
    let loads = [
        // From one node to the other, back, and on one.
        Load::new(
            0,
            envelope(2, 1),
            vec![a.clone()],
            whole.clone(),
            vec![b.clone()],
            Kind::Memfd,
        ),
        Load::new(
            1,
            whole.clone(),
            vec![b.clone()],
            envelope(4, 1),
            vec![a.clone()],
            Kind::Memfd,
        ),
        Load::new(
            2,
            envelope(2, 1),
            vec![a.clone()],
            whole.clone(),
            vec![a.clone()],
            Kind::Memfd,
        ),
        // Both engines on both nodes.
        Load::new(
            3,
            envelope(1, 2),
            vec![a.clone(), b.clone()],
            envelope(2, 1),
            vec![b.clone(), a.clone()],
            Kind::Memfd,
        ),
        // Memory of the engines' process.
        Load::new(
            4,
            whole.clone(),
            vec![b.clone()],
            whole.clone(),
            vec![a.clone()],
            Kind::Process,
        ),
    ];
    let mut harm = Harm::new(nodes, seed);
    let pairs = [
        Pair::new(0, whole.clone(), a.clone(), b.clone(), cluster.folder()),
        Pair::new(1, whole.clone(), b.clone(), b.clone(), cluster.folder()),
    ];
    let mut tasks = Vec::new();
    for (number, load) in (0u64..).zip(loads) {
        tasks.push(tokio::spawn(load.run(seed ^ (number + 1), until)));
    }
    let mut processes = Vec::new();
    for (number, pair) in (0u64..).zip(pairs) {
        processes.push(tokio::spawn(pair.run(seed ^ (number + 101), until)));
    }
    // The last seconds are calm: everyone must find back.
    harm.until(until - lasts / 5).await;
    let mut total = Tally::default();
    for task in tasks {
        total.add(&task.await.unwrap());
    }
    for task in processes {
        total.add(&task.await.unwrap());
    }
    println!("{total:#?}\n{:?}", harm.done);
    let nodes = harm.nodes;
    total.assert_it_was_a_storm();

    // Engines are all gone; what links they had is remembered for a while.
    for (node, fresh) in nodes.nodes.iter().zip(&mut fresh) {
        fresh.set("links", node.footprint().await.count("links"));
        node.settles_to(fresh).await;
    }
    calm(&nodes.nodes).await;
}

/// `KVFERRY_STORM_SECONDS`, or what the run allows.
fn storm_seconds() -> u64 {
    match std::env::var("KVFERRY_STORM_SECONDS") {
        Ok(text) => text
            .parse()
            .unwrap_or_else(|_| panic!("KVFERRY_STORM_SECONDS is {text:?}, not a number")),
        Err(_) => by_width(10, 30, 600),
    }
}

async fn footprints(nodes: &[Node]) -> Vec<Footprint> {
    let mut footprints = Vec::new();
    for node in nodes {
        footprints.push(node.footprint().await);
    }
    footprints
}

/// New engines on both nodes carry pages as if nothing had been.
async fn calm(nodes: &[Node]) {
    let whole = envelope(1, 1);
    let prefill = Engine::attach(
        named(&whole, "calm-prefill", Role::Prefill),
        &[&nodes[0]],
        Kind::Memfd,
    )
    .await;
    for node in nodes {
        let decode = Engine::attach(named(&whole, "calm-decode", Role::Decode), &[node], Kind::Memfd).await;
        let carry = Carry {
            transfer: &format!("calm to {}", node.address()),
            tokens: 500,
            held: 0,
            sparse: false,
            fetch_first: false,
            path: None,
        };
        carry.run(&prefill, &decode).await;
    }
}

/// Thousands of transfers that were met and aborted leave the counters where they were.
#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn aborted_transfers_leave_nothing() {
    let cluster = Cluster::new();
    let options = Options::default().set("log_level", "\"warn\"");
    let nodes = cluster.start_two(options).await;
    let whole = envelope(1, 1);
    let prefill = Engine::attach(named(&whole, "prefill", Role::Prefill), &[&nodes[0]], Kind::Memfd).await;
    let far = Engine::attach(named(&whole, "far", Role::Decode), &[&nodes[1]], Kind::Memfd).await;
    let near = Engine::attach(named(&whole, "near", Role::Decode), &[&nodes[0]], Kind::Memfd).await;
    let (prefill, decodes) = (Arc::new(prefill), [Arc::new(far), Arc::new(near)]);
    let lists = prefill.draw(40, false);
    aborted(&prefill, &decodes, &lists[0], 0..200).await;
    let before = footprints(&nodes).await;
    aborted(&prefill, &decodes, &lists[0], 200..10_200).await;
    for (node, before) in nodes.iter().zip(&before) {
        node.settles_to(before).await;
    }
    for decode in &decodes {
        decode.check_all("after the aborts");
    }
    calm(&nodes).await;
}

/// Each is published, half of it ready, and fetched; then one side aborts it, while bytes move or after.
async fn aborted(
    prefill: &Arc<Engine>,
    decodes: &[Arc<Engine>; 2],
    source: &kvferry_handshake::PageLists,
    numbers: std::ops::Range<u64>,
) {
    const AT_ONCE: u64 = 100;
    // Two of four layers.
    let ready = Ready {
        front_tokens: 40,
        front_layers: 2,
        ..Ready::default()
    };
    let mut start = numbers.start;
    while start < numbers.end {
        let batch = start..numbers.end.min(start + AT_ONCE);
        start = batch.end;
        let mut open = Vec::new();
        for number in batch {
            let side = usize::try_from(number % 2).unwrap();
            let stamp = Stamp::of(&format!("aborted {number}"));
            let request = PublishRequest {
                transfer: stamp.transfer(),
                pages: Some(source.clone()),
                ready,
                metadata: None,
                serves: 1,
            };
            let publication = prefill.ranks[0].publish(request).await.unwrap();
            let decode = &decodes[side].ranks[0];
            let target = decode.pool().draw(40, false);
            let request = fetch_request(&prefill.address(), &stamp, &target, tokens(0, 40), 40);
            let fetching = decode.fetch(request).await.unwrap();
            open.push((number, stamp, publication, fetching, target));
        }
        for (number, stamp, ..) in &open {
            let side = usize::try_from(number % 2).unwrap();
            let rank = if number % 3 == 0 {
                &decodes[side].ranks[0]
            } else {
                &prefill.ranks[0]
            };
            within(PATIENCE, "abort", rank.rank.abort(&stamp.transfer()))
                .await
                .unwrap();
        }
        for (number, stamp, publication, fetching, target) in &open {
            let what = format!("the end of {}", stamp.transfer);
            within(PATIENCE, &what, publication.ended()).await.unwrap_err();
            within(PATIENCE, &what, fetching.ended()).await.unwrap_err();
            // Another's from now on: a byte that still came would show.
            let mut pool = decodes[usize::try_from(number % 2).unwrap()].ranks[0].pool();
            pool.poison(target);
            pool.give_back(target);
        }
    }
}
