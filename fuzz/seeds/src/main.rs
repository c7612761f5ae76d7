//! Writes the inputs that the fuzz targets start from: `kvferry-fuzz-seeds DIR` fills DIR/TARGET for each target.
//!
//! They are valid, so that mutations begin deep inside the parsers. Made by the code, they follow the formats.

#![forbid(unsafe_code)]

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use kvferry_control::{
    Answer, Call, Event, Fault, Fetch, Memory, Publish, Report, Request, Response, Side, Status, TransferId,
};
use kvferry_handshake::{
    ABSENT, Code, Dcp, Element, Envelope, Launch, ModelShape, Order, PageLists, Ready, TokenRange, compare,
    encode,
};

fn main() -> anyhow::Result<()> {
    let dir = PathBuf::from(
        std::env::args_os()
            .nth(1)
            .context("usage: kvferry-fuzz-seeds DIR")?,
    );
    let envelopes = envelopes()?;
    for (number, envelope) in envelopes.iter().enumerate() {
        write(&dir, "envelope_wire", number, &envelope.to_bytes()?)?;
        write(&dir, "envelope_file", number, envelope.to_toml().as_bytes())?;
    }
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/examples");
    let mut number = envelopes.len();
    for file in fs::read_dir(&examples).with_context(|| format!("reading {}", examples.display()))? {
        let path = file?.path();
        if path.extension().is_some_and(|extension| extension == "toml") {
            write(&dir, "envelope_file", number, &fs::read(&path)?)?;
            number += 1;
        }
    }
    let envelope = &envelopes[0];
    let requests = requests(envelope).into_iter().map(|request| encode(&request));
    let responses = responses(envelope).into_iter().map(|response| encode(&response));
    let mut stream = Vec::new();
    for (number, message) in requests.chain(responses).enumerate() {
        let message = message?;
        write(&dir, "control_frames", number, &message)?;
        stream.extend_from_slice(&u32::try_from(message.len())?.to_le_bytes());
        stream.extend_from_slice(&message);
    }
    write(&dir, "control_frames", 1000, &stream)?;
    for (number, talk) in kvferry_fuzz_seeds::talks()?.iter().enumerate() {
        write(&dir, "peer_frames", number, talk)?;
    }
    Ok(())
}

fn write(dir: &Path, target: &str, number: usize, bytes: &[u8]) -> anyhow::Result<()> {
    let dir = dir.join(target);
    fs::create_dir_all(&dir)?;
    fs::write(dir.join(format!("seed-{number:03}")), bytes)?;
    Ok(())
}

/// Small envelopes that use everything an envelope can say.
fn envelopes() -> anyhow::Result<Vec<Envelope>> {
    let small = Launch {
        page_size: 4,
        pool_pages: 3,
        slots: 2,
        ..Launch::default()
    };
    let llama = ModelShape::new("llama", 2).kv(0..2, 2, 4);
    let hybrid = ModelShape::new("hybrid", 3)
        .kv([0], 2, 4)
        .window([1], 2, 4, 6)
        .state("state", [2], &[("x", 4, 2), ("b", 2, 3)], Element::Fp32);
    let latent = ModelShape::new("latent", 2)
        .latent(0..2, 9)
        .indexer(0..2, 4, Element::Fp8E4m3);
    let dcp = Dcp {
        size: 2,
        interleave: 2,
    };
    Ok(vec![
        Launch {
            tp: 2,
            ..small.clone()
        }
        .envelope(&llama)?,
        Launch {
            order: Order::Hnd,
            ..small.clone()
        }
        .envelope(&llama.clone().draft(1, 2, 4))?,
        small.envelope(&hybrid)?,
        Launch { tp: 2, dcp, ..small }.envelope(&latent)?,
    ])
}

fn transfer() -> TransferId {
    TransferId {
        id: "req-1".into(),
        attempt: 1,
    }
}

fn requests(envelope: &Envelope) -> Vec<Request> {
    let pages = PageLists {
        groups: vec![vec![2, ABSENT, 0]],
    };
    let source = "kvferry://127.0.0.1:7460/llama".to_owned();
    let calls = vec![
        Call::Attach {
            envelope: Box::new(envelope.clone()),
            rank: 1,
            home: Some("127.0.0.1:7460".into()),
        },
        Call::Register {
            region: 0,
            memory: Memory::Memfd {
                offset: 4096,
                len: 8192,
            },
        },
        Call::Register {
            region: 1,
            memory: Memory::Process {
                address: 1 << 40,
                len: 8192,
            },
        },
        Call::Publish(Publish {
            transfer: transfer(),
            pages: Some(pages.clone()),
            generations: vec![(0, 7)],
            ready: Ready::complete(9),
            metadata: Some(b"first token".to_vec()),
            serves: 1,
        }),
        Call::Fetch(Fetch {
            source: source.clone(),
            transfer: transfer(),
            pages,
            generations: vec![(0, 3)],
            tokens: TokenRange { from: 4, to: 9 },
            least: 9,
        }),
        Call::Expect {
            source: source.clone(),
            transfer: transfer(),
        },
        Call::Decline {
            source,
            transfer: transfer(),
        },
        Call::Abort { transfer: transfer() },
        Call::Unregister { region: 0 },
        Call::Status,
    ];
    let mut requests = vec![Request::Hello(kvferry_control::VERSIONS)];
    requests.extend(
        (1..)
            .zip(calls)
            .map(|(number, call)| Request::Call { number, call }),
    );
    requests
}

fn responses(envelope: &Envelope) -> Vec<Response> {
    let fault = Fault::new(Code::Deadline, "nothing moved for 30 s");
    let verdict = compare(envelope, envelope, kvferry_handshake::Policy::Strict);
    let report = Report {
        peers: vec!["127.0.0.1:7460".into()],
        moves: 3,
        ..Report::default()
    };
    let events = vec![
        Event::Matched {
            transfer: transfer(),
            engine: "llama".into(),
            held: 4,
        },
        Event::Progress {
            side: Side::Publish,
            transfer: transfer(),
            bytes: 1,
            total: 2,
        },
        Event::Delivered {
            side: Side::Fetch,
            transfer: transfer(),
            tokens: 9,
            metadata: vec![1],
            report: report.clone(),
        },
        Event::Failed {
            side: Side::Publish,
            transfer: transfer(),
            cause: fault.clone(),
            report,
        },
        Event::Refused {
            engine: "llama".into(),
            verdict: Box::new(verdict),
        },
        Event::Detached { cause: fault.clone() },
    ];
    let answers = vec![
        Ok(Answer::Done),
        Ok(Answer::Status(Box::new(Status {
            counts: vec![("regions".into(), 1)],
            ..Status::default()
        }))),
        Err(fault),
    ];
    let events = events.into_iter().map(Response::Event);
    events
        .chain(
            (1..)
                .zip(answers)
                .map(|(number, answer)| Response::Answer { number, answer }),
        )
        .collect()
}
