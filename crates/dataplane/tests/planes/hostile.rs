//! The data port against whoever connects, and a receiving end against a sender that does what it must not.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvferry_dataplane::{Config, DataPlane, Event, JobId, LaneMessage, LaneTrouble, Token};
use kvferry_handshake::Code;
use kvferry_plan::Side;

use crate::pair::{self, Flow, LARGE, Log, Node, Pair, Size, config};

/// Rows of 4 KiB in chunks that fit into a test.
const SMALL: Size = Size {
    layers: 2,
    tokens: 16,
    page_size: 16,
    width: 2048,
};

/// One data plane, and a peer of it named "raw" that is this test.
struct Raw {
    node: Node,
    grants: Arc<Mutex<Vec<LaneMessage>>>,
    lane: u16,
    ask: u64,
}

/// A verdict's number on the wire.
const LANDED: u32 = 0;
const UNKNOWN: u32 = 1;
const VOID: u32 = 2;
const DIFFERS: u32 = 3;
const DAMAGED: u32 = 4;
const FAILED: u32 = 5;

impl Raw {
    fn new(config: Config) -> Raw {
        let (log, grants) = (Arc::new(Log::default()), Arc::new(Mutex::new(Vec::new())));
        let (noted, granted) = (Arc::clone(&log), Arc::clone(&grants));
        let sink = move |event: Event| {
            noted.note(&event);
            if let Event::ToPeer { message, .. } = event {
                granted.lock().unwrap().push(message);
            }
        };
        let plane = DataPlane::start(config, Arc::new(sink)).unwrap();
        plane.peer_up("raw", pair::HOST);
        let node = Node { plane, log };
        Raw {
            node,
            grants,
            lane: 0,
            ask: 0,
        }
    }

    fn address(&self) -> SocketAddr {
        self.node.plane.listen_address()
    }

    /// Asks for a lane; gives epoch and token.
    fn grant(&mut self) -> (u64, Token) {
        self.ask += 1;
        self.node.plane.peer_message(
            "raw",
            LaneMessage::Want {
                lane: self.lane,
                ask: self.ask,
            },
        );
        self.grants
            .lock()
            .unwrap()
            .drain(..)
            .find_map(|message| match message {
                LaneMessage::Grant { epoch, token, .. } => Some((epoch, token)),
                _ => None,
            })
            .unwrap()
    }

    fn connect(&self, epoch: u64, token: &Token) -> TcpStream {
        let mut stream = TcpStream::connect(self.address()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream.write_all(b"KVFLANE1").unwrap();
        stream.write_all(&epoch.to_le_bytes()).unwrap();
        stream.write_all(&token.0).unwrap();
        stream
    }

    /// A lane that is open.
    fn lane(&mut self) -> TcpStream {
        let (epoch, token) = self.grant();
        self.lane += 1;
        let mut stream = self.connect(epoch, &token);
        assert!(answers(&mut stream));
        stream
    }
}

/// Whether the data port takes the token.
fn answers(stream: &mut TcpStream) -> bool {
    let mut answer = [0; 8];
    stream.read_exact(&mut answer).is_ok() && &answer == b"KVFLANE1"
}

/// Whether the other end has closed.
fn is_closed(stream: &mut TcpStream) -> bool {
    let mut rest = Vec::new();
    match stream.read_to_end(&mut rest) {
        Ok(_) => true,
        Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
    }
}

fn header(slot: u64, chunk: u32, end: u64, bytes: u64, checksum: bool) -> Vec<u8> {
    let mut out = Vec::new();
    out.extend(0x4b56_4348u32.to_le_bytes());
    out.extend(u32::from(checksum).to_le_bytes());
    out.extend(slot.to_le_bytes());
    out.extend(end.to_le_bytes());
    out.extend(bytes.to_le_bytes());
    out.extend(chunk.to_le_bytes());
    out.extend(crc32c::crc32c(&out).to_le_bytes());
    out
}

fn trailer(crc: u32) -> Vec<u8> {
    [0x4b56_6f6bu32.to_le_bytes(), crc.to_le_bytes()].concat()
}

fn void() -> Vec<u8> {
    [0x4b56_7664u32.to_le_bytes(), [0; 4]].concat()
}

/// Slot, chunk and verdict of the next acknowledgement.
fn ack(stream: &mut TcpStream) -> (u64, u32, u32) {
    let mut bytes = [0; 24];
    stream.read_exact(&mut bytes).unwrap();
    let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
    assert_eq!(u32_at(0), 0x4b56_4341);
    assert_eq!(u32_at(20), crc32c::crc32c(&bytes[..20]));
    (
        u64::from_le_bytes(bytes[8..16].try_into().unwrap()),
        u32_at(16),
        u32_at(4),
    )
}

/// A receive from "raw", and the payload that is due for its chunk 0.
fn receive(raw: &Raw, seed: u64) -> (Flow, JobId, Vec<u8>) {
    let flow = Flow::new(&raw.node, &raw.node, SMALL, seed);
    let job = flow.receive(&raw.node, "raw");
    let source = &flow.prefill.ranks[0];
    let bytes = source.bytes();
    let mut payload = Vec::new();
    for extent in flow.map.extents(0, Side::Prefill, &source.pages) {
        let (from, to) = (extent.offset as usize, (extent.offset + extent.len) as usize);
        payload.extend(&bytes[&extent.region][from..to]);
    }
    assert_eq!(payload.len() as u64, flow.map.chunk_bytes(0));
    (flow, job, payload)
}

#[test]
fn a_sender_written_from_the_protocol_is_understood() {
    let mut raw = Raw::new(config());
    let (flow, job, payload) = receive(&raw, 1);
    let before = flow.decode.ranks[0].bytes();
    assert_eq!(flow.map.chunks(), 2, "one chunk a layer");
    let mut lane = raw.lane();
    let (bytes, end) = (payload.len() as u64, flow.map.end());
    let head = header(job.0, 0, end, bytes, true);
    let crc = crc32c::crc32c_append(crc32c::crc32c(&head), &payload);
    for part in [&head, &payload, &trailer(crc)] {
        lane.write_all(part).unwrap();
    }
    assert_eq!(ack(&mut lane), (job.0, 0, LANDED));
    let landed = flow.decode.ranks[0].bytes();
    assert!(landed != before);
    // A repeat changes nothing, whatever it holds.
    for part in [
        &header(job.0, 0, end, bytes, false),
        &vec![1; payload.len()],
        &trailer(0),
    ] {
        lane.write_all(part).unwrap();
    }
    assert_eq!(ack(&mut lane), (job.0, 0, LANDED));
    assert!(landed == flow.decode.ranks[0].bytes());
    raw.node.plane.end(job, end);
    assert_eq!(raw.node.log.seen(job).complete, 0);
}

#[test]
fn chunks_that_do_not_fit_are_drained_and_never_written() {
    let mut raw = Raw::new(config());
    let (flow, job, payload) = receive(&raw, 1);
    let before = flow.decode.ranks[0].bytes();
    let mut lane = raw.lane();
    let (bytes, end) = (payload.len() as u64, flow.map.end());
    let other_job = {
        raw.node.plane.peer_up("other", pair::HOST);
        flow.receive(&raw.node, "other")
    };
    // A slot that nobody has, and one of another peer.
    for slot in [job.0 + 1_000_000, other_job.0] {
        for part in [&header(slot, 0, end, bytes, false), &payload, &trailer(0)] {
            lane.write_all(part).unwrap();
        }
        assert_eq!(ack(&mut lane), (slot, 0, UNKNOWN));
    }
    // Void, and damaged.
    for part in [&header(job.0, 0, end, bytes, false), &payload, &void()] {
        lane.write_all(part).unwrap();
    }
    assert_eq!(ack(&mut lane), (job.0, 0, VOID));
    for part in [&header(job.0, 0, end, bytes, true), &payload, &trailer(1)] {
        lane.write_all(part).unwrap();
    }
    assert_eq!(ack(&mut lane), (job.0, 0, DAMAGED));
    assert!(raw.node.log.seen(job).failed.is_none());
    raw.node.plane.end(job, end);
    assert_eq!(raw.node.log.seen(job).complete, 0, "neither counts as landed");

    // Another size than by our plan: named, and the lane goes on.
    flow.decode.ranks[0].write(&before);
    let wrong = [
        (0, end, bytes - 1),
        (0, end + 1, bytes),
        (9, end, bytes),
        (0, end / 2, bytes),
    ];
    for (seed, (chunk, wrong_end, wrong_bytes)) in (2..).zip(wrong) {
        let (flow, job, _) = receive(&raw, seed);
        let before = flow.decode.ranks[0].bytes();
        let payload = vec![1; wrong_bytes as usize];
        for part in [
            &header(job.0, chunk, wrong_end, wrong_bytes, false),
            &payload,
            &trailer(0),
        ] {
            lane.write_all(part).unwrap();
        }
        assert_eq!(ack(&mut lane), (job.0, chunk, DIFFERS));
        assert_eq!(raw.node.log.seen(job).failed.unwrap().0, Code::VerdictsDiffer);
        assert!(before == flow.decode.ranks[0].bytes());
        // And nothing more is written for it.
        for part in [
            &header(job.0, 0, end, bytes, false),
            &vec![1; bytes as usize],
            &trailer(0),
        ] {
            lane.write_all(part).unwrap();
        }
        assert_eq!(ack(&mut lane), (job.0, 0, FAILED));
        assert!(before == flow.decode.ranks[0].bytes());
    }
}

#[test]
fn an_end_that_contradicts_what_landed_fails_the_job() {
    let mut raw = Raw::new(config());
    let (flow, job, payload) = receive(&raw, 1);
    let mut lane = raw.lane();
    for part in [
        &header(job.0, 0, flow.map.end(), payload.len() as u64, false),
        &payload,
        &trailer(0),
    ] {
        lane.write_all(part).unwrap();
    }
    assert_eq!(ack(&mut lane).2, LANDED);
    raw.node.plane.end(job, flow.map.end() / 2);
    assert_eq!(raw.node.log.seen(job).failed.unwrap().0, Code::VerdictsDiffer);
}

#[test]
fn a_lane_that_breaks_the_protocol_is_destroyed_and_says_so() {
    let mut raw = Raw::new(config());
    let (flow, job, payload) = receive(&raw, 1);
    let end = flow.map.end();
    let bytes = payload.len() as u64;
    let mut flipped = header(job.0, 0, end, bytes, false);
    flipped[20] ^= 1;
    let rubbish: [Vec<u8>; 4] = [
        vec![0; 64],
        flipped,
        header(job.0, 0, end, u64::MAX, false),
        [header(job.0, 0, end, bytes, false), payload.clone(), vec![9; 8]].concat(),
    ];
    assert_eq!(raw.node.log.troubles(), []);
    for bytes in rubbish {
        let mut lane = raw.lane();
        lane.write_all(&bytes).unwrap();
        assert!(is_closed(&mut lane));
    }
    let kinds = [
        "a damaged header",
        "a payload beyond any limit",
        "a damaged trailer",
    ];
    for kind in kinds {
        let what = raw.node.log.trouble(LaneTrouble::Violation(kind));
        assert!(what.contains(kind), "{what}");
    }
    // Closed in order it is nothing; within a chunk it is.
    drop(raw.lane());
    let mut cut = raw.lane();
    cut.write_all(&header(job.0, 0, end, bytes, false)[..20]).unwrap();
    drop(cut);
    let what = raw.node.log.trouble(LaneTrouble::Broken);
    assert!(what.contains("within a chunk"), "{what}");
    // The chunk that the last one began is missing again, and lands by another lane.
    let mut lane = raw.lane();
    for part in [&header(job.0, 0, end, bytes, false), &payload, &trailer(0)] {
        lane.write_all(part).unwrap();
    }
    assert_eq!(ack(&mut lane), (job.0, 0, LANDED));
}

#[test]
fn a_sender_that_stalls_inside_a_frame_is_cut_off_and_an_idle_one_is_not() {
    let mut raw = Raw::new(Config {
        stall: Duration::from_millis(200),
        ..config()
    });
    let (flow, job, payload) = receive(&raw, 1);
    let frame = [
        header(job.0, 0, flow.map.end(), payload.len() as u64, false),
        payload,
        trailer(0),
    ]
    .concat();
    let mut idle = raw.lane();
    for part in [10, 40, 1000, frame.len() - 8, frame.len() - 1] {
        let mut lane = raw.lane();
        lane.write_all(&frame[..part]).unwrap();
        assert!(is_closed(&mut lane));
    }
    idle.write_all(&frame).unwrap();
    assert_eq!(ack(&mut idle), (job.0, 0, LANDED));
}

#[test]
fn a_chunk_on_two_lanes_at_once_ends_the_second() {
    let mut raw = Raw::new(config());
    let (flow, job, payload) = receive(&raw, 1);
    let head = header(job.0, 0, flow.map.end(), payload.len() as u64, false);
    let before = flow.decode.ranks[0].bytes();
    let (mut first, mut second) = (raw.lane(), raw.lane());
    first.write_all(&head).unwrap();
    first.write_all(&payload[..payload.len() / 2]).unwrap();
    // It is arriving once a part of it has landed.
    let deadline = std::time::Instant::now() + pair::LIMIT;
    while before == flow.decode.ranks[0].bytes() && std::time::Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(1));
    }
    second.write_all(&head).unwrap();
    assert!(is_closed(&mut second));
    first.write_all(&payload[payload.len() / 2..]).unwrap();
    first.write_all(&trailer(0)).unwrap();
    assert_eq!(ack(&mut first), (job.0, 0, LANDED));
}

#[test]
fn a_token_opens_one_lane_once() {
    let mut raw = Raw::new(config());
    let (epoch, token) = raw.grant();
    let mut wrong = token;
    wrong.0[31] ^= 1;
    assert!(!answers(&mut raw.connect(epoch, &wrong)));
    let what = raw.node.log.trouble(LaneTrouble::Token);
    assert!(what.contains("127.0.0.1"), "{what}");
    assert!(!answers(&mut raw.connect(epoch + 1, &token)));
    let mut first = raw.connect(epoch, &token);
    assert!(answers(&mut first));
    assert!(
        !answers(&mut raw.connect(epoch, &token)),
        "a token was good twice"
    );
    // A later question takes the lane back from whoever has it.
    let before = raw.ask;
    raw.node
        .plane
        .peer_message("raw", LaneMessage::Want { lane: 0, ask: before });
    assert!(
        raw.grants.lock().unwrap().is_empty(),
        "the same question was answered twice"
    );
    raw.node.plane.peer_message(
        "raw",
        LaneMessage::Want {
            lane: 0,
            ask: before + 1,
        },
    );
    assert!(is_closed(&mut first));
}

#[test]
fn a_grant_dies_with_the_channel() {
    let mut raw = Raw::new(config());
    let (epoch, token) = raw.grant();
    raw.node.plane.peer_down("raw");
    assert!(!answers(&mut raw.connect(epoch, &token)));
}

#[test]
fn rubbish_at_the_data_port_is_dropped() {
    let raw = Raw::new(config());
    for rubbish in [
        &b"GET / HTTP/1.1\r\n\r\n"[..],
        &[0; 200],
        b"KVFLANE2",
        &[0xff; 48],
    ] {
        let mut stream = TcpStream::connect(raw.address()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream.write_all(rubbish).unwrap();
        assert!(is_closed(&mut stream));
    }
    // One that says nothing, or half, is dropped after a while.
    let quick = Raw::new(Config {
        hello: Duration::from_millis(100),
        ..config()
    });
    for half in [&b""[..], b"KVFLANE1"] {
        let mut stream = TcpStream::connect(quick.address()).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream.write_all(half).unwrap();
        assert!(is_closed(&mut stream));
    }
}

#[test]
fn a_thousand_idle_connections_block_nobody() {
    let pair = Pair::new(Config {
        hello: Duration::from_secs(600),
        ..config()
    });
    let address = pair.b.plane.listen_address();
    let idle: Vec<_> = (0..1000).map(|_| TcpStream::connect(address).unwrap()).collect();
    let flow = Flow::new(&pair.a, &pair.b, LARGE, 1);
    flow.carry(&pair);
    let unproven = pair::count(&pair.b.plane.counts(), "unproven_connections");
    assert!(unproven <= 256, "{unproven}");
    drop(idle);
    pair.until(&pair.b, "without idle connections", |counts| {
        pair::count(counts, "unproven_connections") == 0
    });
}
