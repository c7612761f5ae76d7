//! `kvferry engine` and `kvferry status` against a real daemon: what a person tries by hand must tell the truth.

#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, missing_docs)] // a panic here is a failed test

use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use kvferry_handshake::{Launch, ModelShape, Role};
use kvferry_tests::node::{Cluster, Node, Options};
use kvferry_tests::programs::kvferry;
use serde_json::{Value, json};

fn envelope(folder: &Path, engine: &str, role: Role, page_size: u32) -> PathBuf {
    let shape = ModelShape::new("m", 3).kv(0..2, 2, 32).window([2], 2, 32, 50);
    let launch = Launch {
        engine: engine.to_owned(),
        role,
        page_size,
        pool_pages: 64,
        ..Launch::default()
    };
    let file = folder.join(format!("{engine}.toml"));
    std::fs::write(&file, launch.envelope(&shape).unwrap().to_toml()).unwrap();
    file
}

fn start(node: &Node, envelope: &Path, arguments: &[&str]) -> Child {
    engine(node, envelope, arguments)
        .stdin(Stdio::null())
        .spawn()
        .unwrap()
}

/// An engine that is given orders.
fn script(node: &Node, envelope: &Path) -> Child {
    engine(node, envelope, &["script"])
        .stdin(Stdio::piped())
        .spawn()
        .unwrap()
}

fn engine(node: &Node, envelope: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(kvferry());
    command
        .arg("engine")
        .arg("--socket")
        .arg(node.socket())
        .arg("--envelope")
        .arg(envelope);
    command
        .args(["--rank", "0", "--json", "--overwrite-settled"])
        .args(arguments);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

struct Told {
    code: Option<i32>,
    events: Vec<Value>,
}

impl Told {
    fn of(output: &Output) -> Told {
        let lines = String::from_utf8(output.stdout.clone()).unwrap();
        let events = lines
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        assert_eq!(String::from_utf8_lossy(&output.stderr), "");
        Told {
            code: output.status.code(),
            events,
        }
    }

    /// The only event of this name.
    fn one(&self, name: &str) -> &Value {
        let mut found = self.events.iter().filter(|event| event["event"] == name);
        let one = found
            .next()
            .unwrap_or_else(|| panic!("no {name} in {:#?}", self.events));
        assert!(found.next().is_none(), "several {name} in {:#?}", self.events);
        one
    }
}

/// Publishes with some arguments and fetches with others; gives what both told.
async fn meet(publish: &[&str], fetch: &[&str], page_size: u32, memory: &str) -> (Told, Told) {
    let cluster = Cluster::new();
    let [a, b] = cluster.start_two(Options::default()).await;
    let prefill = envelope(cluster.folder(), "p", Role::Prefill, 16);
    let decode = envelope(cluster.folder(), "d", Role::Decode, page_size);
    let source = format!("kvferry://{}/p", a.address());
    let publish = [&["--memory", memory, "publish", "--transfer", "t"], publish].concat();
    let fetch = [
        &[
            "--memory",
            memory,
            "fetch",
            "--source",
            &source,
            "--transfer",
            "t",
        ],
        fetch,
    ]
    .concat();
    let publisher = start(&a, &prefill, &publish);
    let fetcher = start(&b, &decode, &fetch);
    let fetched = Told::of(&fetcher.wait_with_output().unwrap());
    let published = if fetched.code == Some(3) {
        until_refused(publisher)
    } else {
        Told::of(&publisher.wait_with_output().unwrap())
    };
    (published, fetched)
}

/// What a publisher tells until it hears of the refusal: nobody will fetch from it.
fn until_refused(mut publisher: Child) -> Told {
    let mut events = Vec::new();
    for line in BufReader::new(publisher.stdout.take().unwrap()).lines() {
        let event: Value = serde_json::from_str(&line.unwrap()).unwrap();
        let refused = event["event"] == "refused";
        events.push(event);
        if refused {
            break;
        }
    }
    publisher.kill().unwrap();
    let code = publisher.wait().unwrap().code();
    Told { code, events }
}

/// Bytes of a token of the two full layers: 2 layers, K and V, 2 heads, 32 elements of 2 bytes.
const FULL: u64 = 2 * 2 * 2 * 32 * 2;
/// And of the window's layer.
const WINDOW: u64 = FULL / 2;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_published_in_steps_arrives_and_is_verified() {
    for (by, memory) in [("tokens", "memfd"), ("layers", "process")] {
        let publish = [
            "--tokens",
            "205",
            "--steps",
            "5",
            "--by",
            by,
            "--pause-ms",
            "20",
            "--metadata",
            "first token",
        ];
        let (published, fetched) = meet(&publish, &["--tokens", "30..205"], 16, memory).await;
        let verified = fetched.one("verified");
        assert_eq!(
            (&verified["wrong"], fetched.code),
            (&Value::from(0), Some(0)),
            "{by}: {:#?}",
            fetched.events
        );
        assert_eq!(verified["bytes"], 175 * FULL + 50 * WINDOW, "{by}");
        assert_eq!(fetched.one("audited")["wrong"], 0);
        let delivered = fetched.one("delivered");
        assert_eq!(
            (&delivered["tokens"], &delivered["metadata"]),
            (&205.into(), &"first token".into())
        );
        assert_eq!(delivered["paths"][0][0], "tcp");
        assert_eq!(published.code, Some(0), "{by}: {:#?}", published.events);
        assert_eq!(
            published
                .events
                .iter()
                .filter(|event| event["event"] == "published")
                .count(),
            5
        );
    }
}

/// The verification bites: a decode side that expects another filling of the pages finds every row wrong.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_of_another_generation_are_wrong() {
    let (_, fetched) = meet(
        &["--tokens", "40", "--generation", "1"],
        &["--tokens", "0..40", "--generation", "2"],
        16,
        "memfd",
    )
    .await;
    let verified = fetched.one("verified");
    // A row is one head: 2 layers and a window's layer, K and V, 2 heads, 40 tokens.
    assert_eq!(
        (verified["wrong"].as_u64(), fetched.code),
        (Some(40 * 3 * 2 * 2), Some(1))
    );
    let told = verified["wrong_rows"][0].as_str().unwrap();
    assert!(told.contains("layer") && told.contains("instead of"), "{told}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_pair_is_told_on_both_sides_and_touches_nothing() {
    let (published, fetched) = meet(&["--tokens", "40"], &["--tokens", "0..40"], 8, "memfd").await;
    assert_eq!(fetched.code, Some(3), "{:#?}", fetched.events);
    let verified = fetched.one("verified");
    assert_eq!((&verified["bytes"], &verified["wrong"]), (&0.into(), &0.into()));
    assert!(verified["untouched_bytes"].as_u64().unwrap() > 0);
    for told in [&published, &fetched] {
        let verdict = &told.one("refused")["verdict"];
        assert_eq!(verdict["mismatches"][0]["code"], "page_size", "{verdict:#}");
    }
}

/// Orders that cannot be carried out are told, and the next ones are carried out: nothing of them is kept.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bad_page_ids_are_errors_of_their_order_and_the_script_goes_on() {
    let cluster = Cluster::new();
    let node = cluster.start("a", Options::default()).await;
    let both = envelope(cluster.folder(), "b", Role::Both, 16);
    let source = format!("kvferry://{}/b", node.address());
    // Two groups; the pools have 64 pages.
    let pages = "pages=1;window=64";
    let orders = [
        json!({"do": "publish", "transfer": "p", "tokens": 16, "pages": pages}),
        json!({"do": "fill", "transfer": "p", "tokens": 16, "pages": pages}),
        json!({"do": "fetch", "source": source, "transfer": "f", "to": 16, "pages": pages}),
        // All pages there are: none was lost, and none was won.
        json!({"do": "fill", "transfer": "all", "tokens": 64 * 16, "pages": "seed:1"}),
    ];
    let mut engine = script(&node, &both);
    let mut input = engine.stdin.take().unwrap();
    for order in &orders {
        writeln!(input, "{order}").unwrap();
    }
    drop(input);
    let told = Told::of(&engine.wait_with_output().unwrap());
    let errors: Vec<(&str, &str)> = told
        .events
        .iter()
        .filter(|event| event["event"] == "error")
        .map(|event| {
            (
                event["order"].as_str().unwrap(),
                event["message"].as_str().unwrap(),
            )
        })
        .collect();
    let wrong = "page group window, entry 0: there is no page 64; the pool has 64, from 0 to 63";
    assert_eq!(
        errors,
        [("publish", wrong), ("fill", wrong), ("fetch", wrong)],
        "{:#?}",
        told.events
    );
    assert_eq!(told.one("filled")["transfer"], "all");
    assert_eq!(told.one("audited")["wrong"], 0);
    assert_eq!(told.code, Some(1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn status_shows_the_engine_while_it_is_there() {
    let cluster = Cluster::new();
    let node = cluster.start("a", Options::default()).await;
    let prefill = envelope(cluster.folder(), "p", Role::Prefill, 16);
    let status = |json: bool| {
        let mut command = Command::new(kvferry());
        command.arg("status").arg("--socket").arg(node.socket());
        let output = command.args(json.then_some("--json")).output().unwrap();
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        String::from_utf8(output.stdout).unwrap()
    };
    let mut publisher = start(&node, &prefill, &["publish", "--transfer", "t", "--tokens", "40"]);
    // Bounded by the test's own patience: it shows as soon as the engine attached.
    let shown = (0..500).any(|_| {
        std::thread::sleep(std::time::Duration::from_millis(20));
        let status: Value = serde_json::from_str(&status(true)).unwrap();
        status["engines"][0]["publishes"] == 1
    });
    let table = status(false);
    publisher.kill().unwrap();
    publisher.wait().unwrap();
    assert!(shown, "{table}");
    assert!(
        table.contains("ENGINE") && table.contains("0 of 1") && table.contains(node.address()),
        "{table}"
    );
}
