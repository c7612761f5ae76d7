//! A sending end against a receiver that is this test: what is acknowledged, and what is sent again when a lane breaks.

use std::collections::BTreeSet;
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use kvferry_dataplane::{Config, DataPlane, Event, JobId, LaneMessage, Token};

use crate::pair::{Flow, HOST, LIMIT, Log, Node, Size, config};

/// 16 chunks of 64 KiB.
const MANY: Size = Size {
    layers: 4,
    tokens: 64,
    page_size: 16,
    width: 2048,
};

/// 2 chunks of 8 MiB, a page each: more than the kernels hold between two ends.
const LONG: Size = Size {
    layers: 1,
    tokens: 4096,
    page_size: 2048,
    ..MANY
};

/// What the kernel keeps for a receiver that does not read.
const BUFFER: usize = 64 << 10;

/// One data plane, and a peer of it named "raw" that is this test and receives.
struct Raw {
    node: Node,
    letters: Receiver<LaneMessage>,
    listener: TcpListener,
    epoch: u64,
}

/// A lane of it.
struct Lane {
    stream: TcpStream,
    epoch: u64,
}

impl Raw {
    fn new() -> Raw {
        let log = Arc::new(Log::default());
        let (noted, (letter, letters)) = (Arc::clone(&log), channel());
        let sink = move |event: Event| {
            noted.note(&event);
            if let Event::ToPeer { message, .. } = event {
                let _ = letter.send(message);
            }
        };
        let one_lane = Config {
            lanes_per_peer: 1,
            stall: Duration::from_secs(10),
            ..config()
        };
        let plane = DataPlane::start(one_lane, Arc::new(sink)).unwrap();
        plane.peer_up("raw", HOST);
        let listener = TcpListener::bind((HOST, 0)).unwrap();
        listener.set_nonblocking(true).unwrap();
        // What is accepted has the same.
        rustix::net::sockopt::set_socket_recv_buffer_size(&listener, BUFFER).unwrap();
        Raw {
            node: Node { plane, log },
            letters,
            listener,
            epoch: 0,
        }
    }

    /// A send of everything to this test.
    fn send(&self, flow: &Flow) -> JobId {
        let send = flow.send(&self.node, "raw", JobId(77));
        flow.ready(&self.node, send);
        send
    }

    /// Opens the lane that is asked for.
    fn lane(&mut self) -> Lane {
        let deadline = Instant::now() + LIMIT;
        loop {
            assert!(Instant::now() < deadline, "no lane");
            let letter = self.letters.recv_timeout(Duration::from_millis(20));
            if let Ok(LaneMessage::Want { lane, ask }) = letter {
                self.epoch += 1;
                let grant = LaneMessage::Grant {
                    lane,
                    ask,
                    epoch: self.epoch,
                    token: Token([5; 32]),
                    port: self.listener.local_addr().unwrap().port(),
                };
                self.node.plane.peer_message("raw", grant);
            }
            let mut stream = match self.listener.accept() {
                Ok((stream, _)) => stream,
                Err(error) if error.kind() == ErrorKind::WouldBlock => continue,
                Err(error) => panic!("{error}"),
            };
            stream.set_nonblocking(false).unwrap();
            stream.set_read_timeout(Some(LIMIT)).unwrap();
            let mut hello = [0; 48];
            stream.read_exact(&mut hello).unwrap();
            assert_eq!((&hello[..8], &hello[16..]), (&b"KVFLANE1"[..], &[5; 32][..]));
            stream.write_all(b"KVFLANE1").unwrap();
            let epoch = u64::from_le_bytes(hello[8..16].try_into().unwrap());
            return Lane { stream, epoch };
        }
    }

    /// Waits until the sender says that a lane broke, and says that our end is gone.
    fn lost(&self, epoch: u64) {
        let deadline = Instant::now() + LIMIT;
        loop {
            // It asks for a lane again and again meanwhile.
            let left = deadline.saturating_duration_since(Instant::now());
            assert!(!left.is_zero(), "it is not said to be lost");
            let letter = self.letters.recv_timeout(left).unwrap();
            if let LaneMessage::Lost { lane, epoch: lost } = letter
                && lost == epoch
            {
                let gone = LaneMessage::Gone { lane, epoch };
                self.node.plane.peer_message("raw", gone);
                return;
            }
        }
    }

    /// Takes so many chunks of the lane and acknowledges them. Gives their numbers.
    fn take(&self, lane: &mut Lane, count: u32) -> BTreeSet<u32> {
        let mut taken = BTreeSet::new();
        for _ in 0..count {
            let (chunk, payload) = lane.header();
            lane.rest(payload);
            lane.acknowledge(chunk);
            assert!(taken.insert(chunk), "chunk {chunk} came twice");
        }
        taken
    }

    /// Waits until so many bytes were acknowledged.
    fn until_sent(&self, bytes: u64) {
        let deadline = Instant::now() + LIMIT;
        while self.node.plane.traffic()[0].sent_bytes < bytes {
            assert!(Instant::now() < deadline, "{:?}", self.node.plane.traffic());
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// What the send did, and nothing more comes on the lane.
    fn ends(&self, send: JobId, mut lane: Lane) -> kvferry_dataplane::Tally {
        self.node.log.complete(send);
        self.node.plane.close(send);
        let tally = self.node.log.closed(send).closed[0];
        self.node.plane.shutdown();
        assert_eq!(lane.stream.read(&mut [0]).unwrap(), 0, "more than was due");
        tally
    }
}

impl Lane {
    /// The next chunk's number, and how long its payload is.
    fn header(&mut self) -> (u32, u64) {
        let mut header = [0; 40];
        self.stream.read_exact(&mut header).unwrap();
        let u64_at = |at: usize| u64::from_le_bytes(header[at..at + 8].try_into().unwrap());
        assert_eq!(header[..4], 0x4b56_4348u32.to_le_bytes());
        assert_eq!(u64_at(8), 77);
        let chunk = u32::from_le_bytes(header[32..36].try_into().unwrap());
        (chunk, u64_at(24))
    }

    /// Takes a payload and its trailer.
    fn rest(&mut self, payload: u64) {
        let mut rest = (&mut self.stream).take(payload + 8);
        let got = std::io::copy(&mut rest, &mut std::io::sink()).unwrap();
        assert_eq!(got, payload + 8);
    }

    fn acknowledge(&mut self, chunk: u32) {
        let landed = 0u32;
        let mut out = Vec::new();
        out.extend(0x4b56_4341u32.to_le_bytes());
        out.extend(landed.to_le_bytes());
        out.extend(77u64.to_le_bytes());
        out.extend(chunk.to_le_bytes());
        out.extend(crc32c::crc32c(&out).to_le_bytes());
        self.stream.write_all(&out).unwrap();
    }
}

#[test]
fn an_acknowledgement_of_what_was_not_sent_ends_the_lane_and_counts_nothing() {
    let mut raw = Raw::new();
    let flow = Flow::new(&raw.node, &raw.node, LONG, 1);
    let chunks = flow.map.chunks();
    assert_eq!(flow.map.chunk_bytes(0), 8 << 20);
    let send = raw.send(&flow);
    let mut lane = raw.lane();
    let (chunk, _) = lane.header();
    // The rest of it is on the other side yet.
    lane.acknowledge(chunk);
    // It is the sender who ends it.
    raw.lost(lane.epoch);
    drop(lane);
    assert_eq!(raw.node.log.seen(send).progress, 0);
    assert_eq!(raw.node.plane.traffic()[0].sent_bytes, 0);
    // All of them come by the next lane, that one too.
    let mut lane = raw.lane();
    assert_eq!(raw.take(&mut lane, chunks), (0..chunks).collect());
    assert_eq!(raw.ends(send, lane).bytes, flow.map.total_bytes());
}

#[test]
fn only_what_was_not_acknowledged_is_sent_again() {
    let mut raw = Raw::new();
    let flow = Flow::new(&raw.node, &raw.node, MANY, 1);
    let chunks = flow.map.chunks();
    assert_eq!(chunks, 16);
    let send = raw.send(&flow);
    let (mut due, mut in_doubt) = ((0..chunks).collect::<BTreeSet<_>>(), 0);
    for acknowledged in [4, 0, 5] {
        let mut lane = raw.lane();
        let landed = raw.take(&mut lane, acknowledged);
        assert!(landed.is_subset(&due), "{landed:?} of {due:?}");
        due = &due - &landed;
        raw.until_sent((u64::from(chunks) - due.len() as u64) * flow.map.chunk_bytes(0));
        // Came whole, but the sender cannot know.
        for _ in 0..3 {
            let (chunk, payload) = lane.header();
            assert!(due.contains(&chunk));
            lane.rest(payload);
        }
        in_doubt += 3;
        let epoch = lane.epoch;
        drop(lane);
        raw.lost(epoch);
    }
    let mut lane = raw.lane();
    let rest = u32::try_from(due.len()).unwrap();
    assert_eq!(raw.take(&mut lane, rest), due);
    let tally = raw.ends(send, lane);
    assert_eq!(tally.bytes, flow.map.total_bytes());
    // Of each lane what was sent or begun and not acknowledged, which is at most what was due then.
    assert!((in_doubt..=12 + 12 + 7).contains(&tally.resent), "{tally:?}");
}
