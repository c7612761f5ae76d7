//! Golden frames: what each message is on the wire, in each version of the protocol that is spoken.
//!
//! The files of a version that was released are never changed: a release speaks its predecessor's version,
//! and this is what proves it. `KVFERRY_WRITE_GOLDEN=1` writes those of a version that is being made.

#![allow(clippy::unwrap_used)] // a panic here is a failed test

use std::fmt::Debug;
use std::fmt::Write;
use std::path::Path;

use kvferry_control::{
    Answer, Call, EngineStatus, Event, Fault, Fetch, Memory, PeerStatus, Publish, Report, Request, Response,
    Side, Status, TransferId, Welcome,
};
use kvferry_handshake::{
    ABSENT, Code, Component, Dcp, Element, Envelope, HeadSpan, Identity, Kind, Mismatch, Outcome, PageGroup,
    PageLists, Part, Placement, Policy, Rank, Ready, Role, Scales, Strides, TokenRange, Unit, Verdict,
    Versions, decode, encode,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

fn golden<T: Serialize + DeserializeOwned + PartialEq + Debug>(name: &str, message: &T) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/golden/v1/{name}.hex"));
    let bytes = encode(message).unwrap();
    let mut hex = String::new();
    for line in bytes.chunks(32) {
        for byte in line {
            write!(hex, "{byte:02x}").unwrap();
        }
        hex.push('\n');
    }
    if std::env::var_os("KVFERRY_WRITE_GOLDEN").is_some() {
        std::fs::write(&path, &hex).unwrap();
    }
    let kept = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    assert_eq!(kept, hex, "{name} is written differently");
    let digits: String = kept.split_whitespace().collect();
    let kept: Vec<u8> = (0..digits.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&digits[at..at + 2], 16).unwrap())
        .collect();
    assert_eq!(
        &decode::<T>(&kept).unwrap(),
        message,
        "{name} is read differently"
    );
}

fn call(name: &str, call: Call) {
    golden(name, &Request::Call { number: 7, call });
}

fn transfer() -> TransferId {
    TransferId {
        id: "req-é".into(),
        attempt: 2,
    }
}

fn source() -> String {
    "kvferry://node-1:7460/llama".into()
}

fn pages() -> PageLists {
    PageLists {
        groups: vec![vec![3, ABSENT, 5], vec![]],
    }
}

fn report() -> Report {
    Report {
        peers: vec!["node-2:7460".into()],
        paths: vec![(kvferry_control::Path::Local, 5), (kvferry_control::Path::Tcp, 6)],
        bounced: 1,
        moves: 2,
        resent: 3,
        met_us: 4,
        moved_us: 5,
    }
}

fn fault() -> Fault {
    Fault {
        code: Code::LinkRefused,
        message: "no".into(),
        mismatches: vec![mismatch()],
    }
}

fn mismatch() -> Mismatch {
    Mismatch {
        code: Code::PageSize,
        field: "page_group.kv.page_size".into(),
        prefill: "16".into(),
        decode: "1".into(),
        why: "why".into(),
        fix: "fix".into(),
    }
}

fn envelope() -> Envelope {
    Envelope {
        identity: Identity {
            engine: "llama".into(),
            role: Role::Both,
            incarnation: 9,
            model: "m".into(),
            revision: None,
            weights_digest: Some("w".into()),
            config_digest: None,
            framework: "vllm".into(),
            framework_version: "1".into(),
            prefill_context_parallel: 1,
        },
        page_groups: vec![PageGroup {
            name: "kv".into(),
            page_size: 16,
            pool_pages: 100,
            pool: 0,
        }],
        components: vec![Component {
            name: "kv".into(),
            kind: Kind::Window,
            page_group: 0,
            layers: vec![0, 1],
            parts: vec![Part {
                name: "k".into(),
                heads: 8,
                width: 128,
            }],
            element: Element::Bf16,
            scales: Scales::Component("s".into()),
            unit: Unit::Token,
            opaque: Some("tile".into()),
            window: Some(1024),
            dcp: Dcp {
                size: 2,
                interleave: 1,
            },
        }],
        ranks: vec![Rank {
            rank: 0,
            dcp_rank: 1,
            placements: vec![Placement {
                component: 0,
                layers: vec![0, 1],
                parts: vec![0],
                heads: HeadSpan { first: 2, count: 4 },
                region: 3,
                offset: 1 << 33,
                strides: Strides {
                    page: 1,
                    token: 2,
                    head: 3,
                    part: 4,
                    layer: 5,
                },
            }],
        }],
    }
}

#[test]
fn requests() {
    let versions = Versions {
        lowest: 1,
        highest: 1,
    };
    golden("hello", &Request::Hello(versions));
    call(
        "attach",
        Call::Attach {
            envelope: Box::new(envelope()),
            rank: 3,
            home: Some("node-1:7460".into()),
        },
    );
    let memory = Memory::Memfd {
        offset: 4096,
        len: 8192,
    };
    call("register_memfd", Call::Register { region: 3, memory });
    let memory = Memory::Process {
        address: 4096,
        len: 8192,
    };
    call("register_process", Call::Register { region: 3, memory });
    call("unregister", Call::Unregister { region: 3 });
    call(
        "publish",
        Call::Publish(Publish {
            transfer: transfer(),
            pages: Some(pages()),
            generations: vec![(3, 11)],
            ready: Ready {
                tokens: 1,
                front_tokens: 2,
                front_layers: 3,
                end: Some(4),
            },
            metadata: Some(vec![1, 2]),
            serves: 1,
        }),
    );
    call(
        "fetch",
        Call::Fetch(Fetch {
            source: source(),
            transfer: transfer(),
            pages: pages(),
            generations: vec![(3, 11)],
            tokens: TokenRange { from: 5, to: 40 },
            least: 30,
        }),
    );
    let transfer = transfer();
    call(
        "abort",
        Call::Abort {
            transfer: transfer.clone(),
        },
    );
    let source = source();
    call(
        "expect",
        Call::Expect {
            source: source.clone(),
            transfer: transfer.clone(),
        },
    );
    call("decline", Call::Decline { source, transfer });
    call("status", Call::Status);
}

#[test]
fn responses() {
    golden(
        "welcome",
        &Response::Hello(Ok(Welcome {
            version: 1,
            incarnation: 5,
            address: "node-1:7460".into(),
            release: "0.1.0".into(),
        })),
    );
    golden("refusal", &Response::Hello(Err(fault())));
    let answer = |name: &str, answer| golden(name, &Response::Answer { number: 7, answer });
    answer("answer_done", Ok(Answer::Done));
    answer("answer_fault", Err(fault()));
    answer(
        "answer_registered",
        Ok(Answer::Registered {
            generation: 11,
            paths: vec![kvferry_control::Path::Local, kvferry_control::Path::Tcp],
        }),
    );
    answer(
        "answer_status",
        Ok(Answer::Status(Box::new(Status {
            address: "node-1:7460".into(),
            release: "0.1.0".into(),
            incarnation: 5,
            uptime_s: 6,
            engines: vec![EngineStatus {
                engine: "llama".into(),
                model: "m".into(),
                ranks: vec![0, 1],
                of: 4,
                registered_bytes: 7,
                publishes: 8,
                fetches: 9,
                links: vec![("other".into(), "compatible".into())],
            }],
            peers: vec![PeerStatus {
                address: "node-2:7460".into(),
                state: "connected".into(),
                lanes: 1,
                sent_bytes: 2,
                received_bytes: 3,
                send_calls: 4,
            }],
            counts: vec![("regions".into(), 4)],
        }))),
    );
}

#[test]
fn events() {
    let event = |name: &str, event| golden(name, &Response::Event(event));
    let transfer = transfer();
    event(
        "matched",
        Event::Matched {
            transfer: transfer.clone(),
            engine: "decode".into(),
            held: 5,
        },
    );
    event(
        "progress",
        Event::Progress {
            side: Side::Publish,
            transfer: transfer.clone(),
            bytes: 5,
            total: 6,
        },
    );
    event(
        "delivered",
        Event::Delivered {
            side: Side::Fetch,
            transfer: transfer.clone(),
            tokens: 5,
            metadata: vec![1],
            report: report(),
        },
    );
    event(
        "failed",
        Event::Failed {
            side: Side::Publish,
            transfer,
            cause: fault(),
            report: report(),
        },
    );
    let verdict = Verdict {
        outcome: Outcome::Refused,
        policy: Policy::Strict,
        mismatches: vec![mismatch()],
        bridged: vec![],
        warnings: vec![mismatch()],
    };
    event(
        "refused",
        Event::Refused {
            engine: "decode".into(),
            verdict: Box::new(verdict),
        },
    );
    event("detached", Event::Detached { cause: fault() });
}
