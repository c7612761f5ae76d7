//! Transfers from publish to their end, between two nodes and on one: every way in which they can go.

#![allow(clippy::unwrap_used, missing_docs)] // a panic here is a failed test

mod ending;
mod lanes;
mod process_memory;
mod streams;
mod waiting;

use std::time::Duration;

use kvferry_client::{Fault, Path, Publication, PublishRequest};
use kvferry_handshake::{Code, Envelope, Launch, ModelShape, PageLists, Ready, Role};
use kvferry_tests::engine::{Carry, End, Engine, Fetched, named, tokens};
use kvferry_tests::geometry::launch;
use kvferry_tests::memory::Kind;
use kvferry_tests::node::{Cluster, Node, Options};
use kvferry_tests::pattern::Stamp;

/// Long enough for anything that must not happen to show.
const A_WHILE: Duration = Duration::from_millis(300);

/// Two nodes; a prefill engine on the first, and a decode engine on each.
struct Setting {
    prefill: Engine,
    far: Engine,
    near: Engine,
    a: Node,
    b: Node,
    _cluster: Cluster,
}

fn model() -> ModelShape {
    ModelShape::new("four-layers", 4).kv(0..4, 8, 128)
}

fn envelope(tp: u32) -> Envelope {
    launch(tp, 16).envelope(&model()).unwrap()
}

/// With pools for long prompts.
fn long(tp: u32) -> Envelope {
    let launch = Launch {
        pool_pages: 600,
        ..launch(tp, 16)
    };
    launch.envelope(&model()).unwrap()
}

impl Setting {
    async fn new(options: Options) -> Setting {
        Setting::with(options, &envelope(2), &envelope(1), Kind::Memfd, Kind::Memfd).await
    }

    async fn with(
        options: Options,
        prefill: &Envelope,
        decode: &Envelope,
        prefill_memory: Kind,
        decode_memory: Kind,
    ) -> Setting {
        let cluster = Cluster::new();
        let [a, b] = cluster.start_two(options).await;
        Setting {
            prefill: Engine::attach(named(prefill, "prefill", Role::Prefill), &[&a], prefill_memory).await,
            far: Engine::attach(named(decode, "far", Role::Decode), &[&b], decode_memory).await,
            near: Engine::attach(named(decode, "near", Role::Decode), &[&a], decode_memory).await,
            a,
            b,
            _cluster: cluster,
        }
    }

    /// The decode engines, each with its name for transfer ids.
    fn decodes(&self) -> [(&'static str, &Engine); 2] {
        [("far", &self.far), ("near", &self.near)]
    }

    /// Engines and daemons go on as if nothing had been.
    async fn goes_on(&self, what: &str) {
        for (path, decode) in [(Path::Tcp, &self.far), (Path::Local, &self.near)] {
            let carry = Carry {
                transfer: &format!("{what}, afterwards, {path:?}"),
                tokens: 130,
                held: 0,
                sparse: false,
                fetch_first: false,
                path: Some(path),
            };
            carry.run(&self.prefill, decode).await;
        }
        for engine in [&self.prefill, &self.far, &self.near] {
            engine.check_all(what);
        }
    }

    async fn fetch(&self, decode: &Engine, stamp: &Stamp, count: u64) -> Fetched {
        decode
            .fetch(&self.prefill.address(), stamp, tokens(0, count), count, false)
            .await
    }
}

fn cause(end: &End) -> &Fault {
    match end {
        Ok(delivered) => panic!("delivered: {delivered:?}"),
        Err(failed) => &failed.cause,
    }
}

/// Every rank's end has this code.
fn all_ended(ends: &[End], code: Code, what: &str) {
    for end in ends {
        let cause = cause(end);
        // Another rank's failure names the cause.
        let of_sibling = cause.code == Code::SiblingFailed && cause.message.contains(code.name());
        assert!(
            cause.code == code || of_sibling,
            "{what}: {code} expected: {cause}"
        );
    }
}

/// One rank's publish of what is ready, filled just before.
async fn publish(
    engine: &Engine,
    rank: usize,
    stamp: &Stamp,
    lists: &PageLists,
    ready: Ready,
    metadata: Option<Vec<u8>>,
) -> Publication {
    engine.ranks[rank].pool().fill(lists, stamp, &ready);
    let request = PublishRequest {
        transfer: stamp.transfer(),
        pages: Some(lists.clone()),
        ready,
        metadata,
        serves: 1,
    };
    engine.ranks[rank].publish(request).await.unwrap()
}
