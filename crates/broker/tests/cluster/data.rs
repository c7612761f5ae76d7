//! A data plane that really writes: each node's regions are byte vectors, chunks travel with a delay, may
//! be lost and sent again, and land until the job is closed, however late that is.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kvferry_broker::{DataCommand, DataEvent, JobId, PeerAddress, RegionKey, Tally};
use kvferry_control::Fault;
use kvferry_handshake::{Code, PageLists, Ready};
use kvferry_plan::{ChunkMap, Move};
use rand::Rng;
use rand::rngs::SmallRng;

type Regions = Arc<[(u16, RegionKey)]>;

/// A region's bytes, and the job that last wrote each since its page was taken; 0 for none.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    pub(crate) bytes: Vec<u8>,
    pub(crate) writers: Vec<u64>,
}

/// What goes wrong.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Troubles {
    /// Chunks, and acknowledgements, of a hundred that get lost; the chunk is sent again.
    pub(crate) lost: u32,
    /// Jobs of a hundred that fail.
    pub(crate) failing: u32,
    /// Jobs of a hundred whose chunks never move.
    pub(crate) stalled: u32,
    /// Longest delay of a chunk, an acknowledgement or a fence.
    pub(crate) delay: u64,
}

#[derive(Debug)]
struct Receive {
    map: ChunkMap,
    regions: Regions,
    landed: BTreeSet<u32>,
    end: Option<u64>,
    told: bool,
    closing: bool,
    tally: Tally,
}

#[derive(Debug)]
struct Send {
    /// `None`: a copy within the node.
    to: Option<(PeerAddress, u64)>,
    map: ChunkMap,
    pages: Arc<PageLists>,
    regions: Regions,
    /// Of a copy.
    target: Regions,
    ready: Ready,
    started: BTreeSet<u32>,
    done: BTreeSet<u32>,
    told: bool,
    closing: bool,
    stalled: bool,
    tally: Tally,
}

/// Something that happens later.
#[derive(Clone, Debug)]
pub(crate) enum Later {
    /// A chunk is (re)sent.
    Start { job: JobId, chunk: u32 },
    /// A chunk of a copy lands.
    Copy { job: JobId, chunk: u32 },
    /// A chunk from a peer arrives.
    Arrive {
        from: PeerAddress,
        incarnation: u64,
        sender: JobId,
        slot: u64,
        chunk: u32,
        moves: Vec<(Move, Vec<u8>)>,
    },
    /// An acknowledgement arrives.
    Acknowledged { job: JobId, chunk: u32 },
    /// A job breaks.
    Break { job: JobId },
    /// A job is fenced.
    Fence { job: JobId },
}

/// What the data plane wants done.
#[derive(Debug)]
pub(crate) enum Act {
    /// After so many microseconds here.
    Later(u64, Later),
    /// After so many microseconds at a peer; only if it is in that life, `None`: any.
    At(PeerAddress, Option<u64>, u64, Later),
    /// Tell the broker.
    Report(DataEvent),
}

/// One node's data plane.
#[derive(Debug, Default)]
pub(crate) struct DataPlane {
    pub(crate) memory: BTreeMap<RegionKey, Memory>,
    receives: BTreeMap<JobId, Receive>,
    sends: BTreeMap<JobId, Send>,
    closed: BTreeSet<JobId>,
    pub(crate) troubles: Troubles,
    /// For the invariants: bytes that moved, as (job, region, range); of reads and writes.
    pub(crate) touched: Vec<Touch>,
    /// Copies that were ever opened.
    pub(crate) copies: u64,
    /// Bytes that were written.
    pub(crate) landed: u64,
}

/// Bytes that a job read or wrote.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Touch {
    pub(crate) job: JobId,
    pub(crate) region: RegionKey,
    pub(crate) offset: u64,
    pub(crate) write: bool,
}

fn key(regions: &Regions, number: u16) -> RegionKey {
    regions
        .iter()
        .find(|(region, _)| *region == number)
        .expect("a region of the plan")
        .1
}

fn range(offset: u64, len: u64) -> std::ops::Range<usize> {
    usize::try_from(offset).unwrap()..usize::try_from(offset + len).unwrap()
}

impl DataPlane {
    pub(crate) fn is_idle(&self) -> bool {
        self.receives.is_empty() && self.sends.is_empty()
    }

    pub(crate) fn open_jobs(&self) -> Vec<JobId> {
        self.receives.keys().chain(self.sends.keys()).copied().collect()
    }

    /// Loses a job, as a data plane must not.
    pub(crate) fn forget(&mut self, job: JobId) {
        self.receives.remove(&job);
        self.sends.remove(&job);
    }

    fn delay(&self, rng: &mut SmallRng) -> u64 {
        rng.random_range(1..=self.troubles.delay.max(1))
    }

    pub(crate) fn command(&mut self, command: DataCommand, rng: &mut SmallRng) -> Vec<Act> {
        let mut acts = Vec::new();
        match command {
            DataCommand::Receive {
                job, map, regions, ..
            } => {
                self.fresh(job);
                self.receives.insert(
                    job,
                    Receive {
                        map,
                        regions,
                        landed: BTreeSet::new(),
                        end: None,
                        told: false,
                        closing: false,
                        tally: Tally::default(),
                    },
                );
                self.maybe_break(job, rng, &mut acts);
            }
            DataCommand::Send {
                job,
                peer,
                slot,
                map,
                pages,
                regions,
            } => {
                self.fresh(job);
                let to = Some((peer, slot));
                self.insert_send(job, to, map, pages, regions, Arc::from([]), rng);
                self.maybe_break(job, rng, &mut acts);
            }
            DataCommand::Copy {
                job,
                map,
                source_pages,
                source_regions,
                regions,
                ..
            } => {
                self.fresh(job);
                self.copies += 1;
                self.insert_send(job, None, map, source_pages, source_regions, regions, rng);
                self.maybe_break(job, rng, &mut acts);
            }
            DataCommand::Ready {
                job,
                ready,
                source_pages,
            } => {
                let send = self.sends.get_mut(&job).expect("Ready names an open job");
                assert!(!send.closing, "Ready after Close");
                if let Some(pages) = source_pages {
                    send.pages = pages;
                }
                send.ready = ready;
                if let Some(end) = ready.end {
                    send.map = send.map.cut(end);
                }
                for chunk in 0..send.map.chunks() {
                    let ready = send.map.is_ready(chunk, &ready) && send.map.chunk_bytes(chunk) > 0;
                    if ready && send.started.insert(chunk) {
                        let delay = rng.random_range(1..=self.troubles.delay.max(1));
                        acts.push(Act::Later(delay, Later::Start { job, chunk }));
                    }
                }
                self.check_sent(job, &mut acts);
            }
            DataCommand::End { job, end } => {
                let receive = self.receives.get_mut(&job).expect("End names an open job");
                assert!(!receive.closing, "End after Close");
                receive.end = Some(end);
                receive.map = receive.map.cut(end);
                self.check_received(job, &mut acts);
            }
            DataCommand::Close { job } => {
                let closing = match (self.receives.get_mut(&job), self.sends.get_mut(&job)) {
                    (Some(receive), _) => &mut receive.closing,
                    (_, Some(send)) => &mut send.closing,
                    _ => panic!("Close names no open job: {job:?}"),
                };
                assert!(!std::mem::replace(closing, true), "a job is closed once");
                acts.push(Act::Later(self.delay(rng), Later::Fence { job }));
            }
        }
        acts
    }

    fn fresh(&self, job: JobId) {
        let used = self.receives.contains_key(&job) || self.sends.contains_key(&job);
        assert!(!used && !self.closed.contains(&job), "{job:?} is used twice");
    }

    #[expect(clippy::too_many_arguments, reason = "the fields of the command")]
    fn insert_send(
        &mut self,
        job: JobId,
        to: Option<(PeerAddress, u64)>,
        map: ChunkMap,
        pages: Arc<PageLists>,
        regions: Regions,
        target: Regions,
        rng: &mut SmallRng,
    ) {
        let stalled = rng.random_range(0..100) < self.troubles.stalled;
        self.sends.insert(
            job,
            Send {
                to,
                map,
                pages,
                regions,
                target,
                ready: Ready::default(),
                started: BTreeSet::new(),
                done: BTreeSet::new(),
                told: false,
                closing: false,
                stalled,
                tally: Tally::default(),
            },
        );
    }

    fn maybe_break(&self, job: JobId, rng: &mut SmallRng, acts: &mut Vec<Act>) {
        if rng.random_range(0..100) < self.troubles.failing {
            acts.push(Act::Later(self.delay(rng) * 4, Later::Break { job }));
        }
    }

    pub(crate) fn later(&mut self, own: (&PeerAddress, u64), later: Later, rng: &mut SmallRng) -> Vec<Act> {
        let mut acts = Vec::new();
        match later {
            Later::Start { job, chunk } => self.start(own, job, chunk, rng, &mut acts),
            Later::Copy { job, chunk } => {
                let Some(send) = self.sends.get(&job) else {
                    return acts;
                };
                let moves: Vec<Move> = send.map.moves(chunk, &send.pages).collect();
                let (source, target) = (send.regions.clone(), send.target.clone());
                let moves: Vec<(Move, Vec<u8>)> = moves
                    .into_iter()
                    .map(|one| (one, self.read(job, &source, &one)))
                    .collect();
                let bytes = self.write(job, &target, &moves);
                self.sent(job, chunk, bytes, moves.len() as u64, &mut acts);
            }
            Later::Arrive {
                from,
                incarnation,
                sender,
                slot,
                chunk,
                moves,
            } => {
                let job = JobId(slot);
                if let Some(receive) = self.receives.get_mut(&job) {
                    if receive.landed.insert(chunk) {
                        let regions = receive.regions.clone();
                        let bytes = self.write(job, &regions, &moves);
                        let receive = self.receives.get_mut(&job).expect("it is there");
                        receive.tally.bytes += bytes;
                        receive.tally.moves += moves.len() as u64;
                        let bytes = receive.tally.bytes;
                        acts.push(Act::Report(DataEvent::Progress { job, bytes }));
                    }
                    let acknowledged = Later::Acknowledged { job: sender, chunk };
                    let arrives = rng.random_range(0..100) >= self.troubles.lost;
                    let delay = self.delay(rng);
                    if arrives {
                        acts.push(Act::At(from, Some(incarnation), delay, acknowledged));
                    }
                    self.check_received(job, &mut acts);
                }
            }
            Later::Acknowledged { job, chunk } => {
                if let Some(send) = self.sends.get(&job).filter(|send| !send.done.contains(&chunk)) {
                    let bytes = send.map.chunk_bytes(chunk);
                    self.sent(job, chunk, bytes, 1, &mut acts);
                }
            }
            Later::Break { job } => {
                let open = |closing: bool, told: bool| !closing && !told;
                let receive = self
                    .receives
                    .get(&job)
                    .is_some_and(|job| open(job.closing, job.told));
                let send = self
                    .sends
                    .get(&job)
                    .is_some_and(|job| open(job.closing, job.told));
                if receive || send {
                    let code = [Code::MemoryFault, Code::Checksum][usize::from(rng.random_bool(0.5))];
                    let cause = Fault::new(code, "simulated");
                    acts.push(Act::Report(DataEvent::Failed { job, cause }));
                }
            }
            Later::Fence { job } => {
                let receive = self.receives.remove(&job).map(|receive| receive.tally);
                let send = self.sends.remove(&job).map(|send| send.tally);
                if let Some(tally) = receive.or(send) {
                    self.closed.insert(job);
                    acts.push(Act::Report(DataEvent::Closed { job, tally }));
                }
            }
        }
        acts
    }

    fn start(
        &mut self,
        own: (&PeerAddress, u64),
        job: JobId,
        chunk: u32,
        rng: &mut SmallRng,
        acts: &mut Vec<Act>,
    ) {
        let Some(send) = self.sends.get_mut(&job).filter(|send| !send.stalled) else {
            return;
        };
        if send.done.contains(&chunk) {
            return;
        }
        let Some((peer, slot)) = send.to.clone() else {
            acts.push(Act::Later(self.delay(rng), Later::Copy { job, chunk }));
            return;
        };
        let moves: Vec<Move> = send.map.moves(chunk, &send.pages).collect();
        let regions = send.regions.clone();
        let moves = moves
            .into_iter()
            .map(|one| (one, self.read(job, &regions, &one)))
            .collect();
        // What is not acknowledged in time is sent again.
        let again = self.troubles.delay.max(1) * 4;
        acts.push(Act::Later(again, Later::Start { job, chunk }));
        if rng.random_range(0..100) < self.troubles.lost {
            let send = self.sends.get_mut(&job).expect("it is there");
            send.tally.resent += 1;
            return;
        }
        let arrive = Later::Arrive {
            from: own.0.clone(),
            incarnation: own.1,
            sender: job,
            slot,
            chunk,
            moves,
        };
        acts.push(Act::At(peer, None, self.delay(rng), arrive));
    }

    fn read(&mut self, job: JobId, regions: &Regions, one: &Move) -> Vec<u8> {
        let region = key(regions, one.source_region);
        self.touched.push(Touch {
            job,
            region,
            offset: one.source_offset,
            write: false,
        });
        let memory = self.memory.get(&region).expect("a released region is read");
        memory.bytes[range(one.source_offset, one.len)].to_vec()
    }

    fn write(&mut self, job: JobId, regions: &Regions, moves: &[(Move, Vec<u8>)]) -> u64 {
        for (one, bytes) in moves {
            let region = key(regions, one.region);
            self.touched.push(Touch {
                job,
                region,
                offset: one.offset,
                write: true,
            });
            let memory = self
                .memory
                .get_mut(&region)
                .expect("a released region is written");
            memory.bytes[range(one.offset, one.len)].copy_from_slice(bytes);
            for writer in &mut memory.writers[range(one.offset, one.len)] {
                assert_ne!(*writer, job.0, "{job:?} writes a byte twice: {one:?}");
                *writer = job.0;
            }
        }
        let bytes = moves.iter().map(|(one, _)| one.len).sum();
        self.landed += bytes;
        bytes
    }

    fn sent(&mut self, job: JobId, chunk: u32, bytes: u64, moves: u64, acts: &mut Vec<Act>) {
        let Some(send) = self.sends.get_mut(&job) else {
            return;
        };
        if send.done.insert(chunk) {
            send.tally.bytes += bytes;
            send.tally.moves += moves;
            let bytes = send.tally.bytes;
            acts.push(Act::Report(DataEvent::Progress { job, bytes }));
        }
        self.check_sent(job, acts);
    }

    fn check_sent(&mut self, job: JobId, acts: &mut Vec<Act>) {
        let Some(send) = self.sends.get_mut(&job) else {
            return;
        };
        let all = |send: &Send| {
            (0..send.map.chunks()).all(|c| send.map.chunk_bytes(c) == 0 || send.done.contains(&c))
        };
        if send.ready.end.is_some() && !send.told && !send.closing && all(send) {
            send.told = true;
            acts.push(Act::Report(DataEvent::Complete { job }));
        }
    }

    fn check_received(&mut self, job: JobId, acts: &mut Vec<Act>) {
        let Some(receive) = self.receives.get_mut(&job) else {
            return;
        };
        let landed = |receive: &Receive| {
            let mut chunks = 0..receive.map.chunks();
            chunks.all(|chunk| receive.map.chunk_bytes(chunk) == 0 || receive.landed.contains(&chunk))
        };
        if receive.end.is_some() && !receive.told && !receive.closing && landed(receive) {
            receive.told = true;
            acts.push(Act::Report(DataEvent::Complete { job }));
        }
    }
}
