//! The data plane's handle.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::Mutex;
use std::time::Duration;

use kvferry_handshake::{Code, PageLists, Ready};
use kvferry_plan::ChunkMap;

use crate::job::{Job, RankMemory, Role, Trouble};
use crate::jobs::Jobs;
use crate::shared::Shared;
use crate::source::Source;
use crate::target::Target;
use crate::wake::Wake;
use crate::{
    Config, EngineProcess, Event, JobId, LaneMessage, PeerTraffic, RegionKey, RegisterError, StartError,
    listener, steward,
};

/// Threads end within milliseconds, or wait for the memory of an engine's process.
const LAST_WORD: Duration = Duration::from_secs(10);

/// The data plane. A cheap handle: the threads end when the last clone is dropped, or at
/// [`DataPlane::shutdown`]. No other call blocks.
#[derive(Clone, Debug)]
pub struct DataPlane {
    shared: Arc<Shared>,
    _last: Arc<Last>,
}

/// Shuts down when the last handle is dropped; the threads themselves hold only what is shared.
#[derive(Debug)]
struct Last(Arc<Shared>);

impl Drop for Last {
    fn drop(&mut self) {
        self.0.shutdown();
    }
}

impl Shared {
    fn shutdown(&self) {
        self.listener.end();
        self.jobs.copies.end();
        self.regions.prefault.end();
        self.bell.end();
        for peer in self.peers() {
            peer.lanes().down();
        }
        self.threads.join_all(LAST_WORD);
        self.jobs.clear();
    }
}

/// A job's regions, by their numbers.
fn memory(shared: &Shared, regions: &[(u16, RegionKey)]) -> Result<RankMemory, Trouble> {
    let found = regions.iter().map(|(number, key)| {
        let region = shared.regions.get(*key).ok_or_else(|| Trouble {
            code: Code::RegionUnknown,
            message: format!("region {number} is not registered any more"),
        })?;
        Ok((*number, region))
    });
    Ok(RankMemory::new(found.collect::<Result<Vec<_>, Trouble>>()?))
}

impl DataPlane {
    /// Binds the data port and starts the threads. `sink` takes every [`Event`]; it must not block.
    pub fn start(config: Config, sink: Arc<dyn Fn(Event) + Send + Sync>) -> Result<DataPlane, StartError> {
        for (field, value) in [
            ("lanes_per_peer", config.lanes_per_peer),
            ("copy_threads", config.copy_threads),
            ("max_unproven", config.max_unproven),
        ] {
            if value == 0 {
                return Err(StartError::Setting {
                    field,
                    value,
                    least: 1,
                });
            }
        }
        let resources = |what| move |source| StartError::Resources { what, source };
        let (socket, address) = listener::bind(config.listen)?;
        let wake = Wake::new().map_err(resources("an fd for the listener"))?;
        let copy_threads = config.copy_threads;
        let shared = Arc::new(Shared::new(config, address, Arc::new(Jobs::new(sink)), wake));
        // From here on a failure ends what was started.
        let last = Arc::new(Last(Arc::clone(&shared)));
        let spawn = |name, life: Box<dyn FnOnce() + Send>| {
            shared.threads.spawn(name, life).map_err(resources("a thread"))
        };
        let of = Arc::clone(&shared);
        spawn("kvferry-listen", Box::new(move || listener::run(&of, &socket)))?;
        let of = Arc::clone(&shared);
        spawn("kvferry-steward", Box::new(move || steward::run(&of)))?;
        let of = Arc::clone(&shared);
        spawn("kvferry-pages", Box::new(move || of.regions.prefault.work()))?;
        for _ in 0..copy_threads {
            let of = Arc::clone(&shared.jobs);
            spawn("kvferry-copy", Box::new(move || of.copies.work()))?;
        }
        Ok(DataPlane { shared, _last: last })
    }

    /// Where lanes are accepted.
    pub fn listen_address(&self) -> SocketAddr {
        self.shared.address
    }

    /// Maps `[offset, offset + len)` of a memfd. The fd is kept until [`DataPlane::release`]. Regions of one
    /// `owner` must not overlap.
    pub fn map_memfd(
        &self,
        owner: u64,
        fd: OwnedFd,
        offset: u64,
        len: u64,
    ) -> Result<RegionKey, RegisterError> {
        self.shared.regions.map_memfd(owner, fd, offset, len)
    }

    /// Takes `[address, address + len)` of an engine's process.
    pub fn map_process(
        &self,
        owner: u64,
        process: Arc<EngineProcess>,
        address: u64,
        len: u64,
    ) -> Result<RegionKey, RegisterError> {
        self.shared.regions.map_process(owner, process, address, len)
    }

    /// Forgets a region. The jobs that used it were closed before.
    pub fn release(&self, key: RegionKey) {
        self.shared.regions.release(key);
    }

    /// The channel to this peer is up; its data port is on `host`.
    pub fn peer_up(&self, peer: &str, host: IpAddr) {
        let peer = self.shared.peer(peer);
        let life = peer.lanes().up(host);
        peer.outbox.begin_life(life);
        self.shared.work(&peer);
    }

    /// The channel to this peer broke: its lanes are destroyed, and its jobs do not go on.
    pub fn peer_down(&self, peer: &str) {
        // An address that never answered leaves nothing behind.
        let Some(peer) = self.shared.known_peer(peer) else {
            return;
        };
        // No life has this number: lanes that are told to end take nothing meanwhile.
        peer.outbox.begin_life(0);
        peer.lanes().down();
        self.shared.bell.ring();
    }

    /// The peer's data plane said something through the channel.
    pub fn peer_message(&self, peer: &str, message: LaneMessage) {
        let peer = self.shared.peer(peer);
        self.shared.heard(&peer, message);
    }

    /// Accepts chunks from a peer into our pages, until [`DataPlane::close`]. The job's number is the slot
    /// that the peer must name.
    pub fn receive(&self, job: JobId, peer: &str, map: ChunkMap, regions: Arc<[(u16, RegionKey)]>) {
        let peer = self.shared.peer(peer);
        let target = Mutex::new(Target::new(map));
        self.start_job(job, &regions, |memory| Role::Receive {
            peer,
            target,
            memory: memory.into(),
        });
    }

    /// Sends chunks to a peer as [`DataPlane::ready`] says.
    pub fn send(
        &self,
        job: JobId,
        peer: &str,
        slot: u64,
        map: ChunkMap,
        pages: Arc<PageLists>,
        regions: Arc<[(u16, RegionKey)]>,
    ) {
        let peer = self.shared.peer(peer);
        let source = Mutex::new(Source::new(map, pages));
        self.start_job(job, &regions, |memory| Role::Send {
            peer,
            slot,
            source,
            memory: memory.into(),
        });
    }

    /// Copies chunks within the node as [`DataPlane::ready`] says.
    pub fn copy(
        &self,
        job: JobId,
        map: ChunkMap,
        source_pages: Arc<PageLists>,
        source_regions: Arc<[(u16, RegionKey)]>,
        regions: Arc<[(u16, RegionKey)]>,
    ) {
        let source = Mutex::new(Source::new(map, source_pages));
        let source_memory = memory(&self.shared, &source_regions);
        let (source_memory, missing) = match source_memory {
            Ok(memory) => (memory, None),
            Err(trouble) => (RankMemory::default(), Some(trouble)),
        };
        let job = self.start_job(job, &regions, |memory| Role::Copy {
            source,
            source_memory: source_memory.into(),
            memory: memory.into(),
        });
        if let (Some(job), Some(trouble)) = (job, missing) {
            job.fail(trouble);
        }
    }

    /// More is ready at the source of a send or copy, with longer page lists where they grew. Once
    /// `ready.end` is set the map is cut there.
    pub fn ready(&self, job: JobId, ready: Ready, source_pages: Option<Arc<PageLists>>) {
        let Some(job) = self.shared.jobs.get(job) else {
            return;
        };
        let Some((join, complete)) = job.source().map(|mut source| {
            let join = source.advance(&ready, source_pages);
            (join, source.is_complete())
        }) else {
            return;
        };
        match &job.role {
            Role::Send { peer, .. } => {
                if join {
                    peer.outbox.join(&job);
                }
                self.shared.work(peer);
            }
            Role::Copy { .. } if join => self.shared.jobs.copies.join(&job),
            _ => {}
        }
        if complete {
            job.complete();
        }
    }

    /// A receive learns the final end: the map is cut there.
    pub fn end(&self, job: JobId, end: u64) {
        let Some(job) = self.shared.jobs.get(job) else {
            return;
        };
        let ended = job.target().map(|mut target| target.ends(end));
        match ended {
            Some(Ok(true)) => job.complete(),
            Some(Err(message)) => job.fail(Trouble {
                code: Code::VerdictsDiffer,
                message,
            }),
            _ => {}
        }
    }

    /// Stops and fences a job, also one that is complete or failed: answered by [`Event::Closed`], once.
    pub fn close(&self, job: JobId) {
        if let Some(job) = self.shared.jobs.get(job) {
            job.close();
        }
    }

    /// Everything that must return to where it was: (name, count).
    pub fn counts(&self) -> Vec<(String, u64)> {
        let shared = &self.shared;
        let (regions, mapped) = shared.regions.count();
        let mut lanes = [0; 4];
        let mut waiting = shared.jobs.copies.waiting();
        for peer in shared.peers() {
            waiting += peer.outbox.jobs().len();
            for (sum, count) in lanes.iter_mut().zip(peer.lanes().count()) {
                *sum += count;
            }
        }
        let number = |count: usize| u64::try_from(count).unwrap_or(u64::MAX);
        [
            ("regions", regions),
            ("mapped_bytes", mapped),
            ("jobs", number(shared.jobs.count())),
            ("lanes_out", number(lanes[0])),
            ("lanes_in", number(lanes[1])),
            ("lane_grants", number(lanes[2])),
            ("chunks_in_doubt", number(lanes[3])),
            ("waiting_jobs", number(waiting)),
            (
                "unproven_connections",
                shared.unproven.load(std::sync::atomic::Ordering::Relaxed),
            ),
            ("threads", number(shared.threads.count())),
        ]
        .map(|(name, count)| (name.to_owned(), count))
        .into()
    }

    /// Traffic per peer.
    pub fn traffic(&self) -> Vec<PeerTraffic> {
        let peers = self.shared.peers().into_iter().map(|peer| {
            let [out, incoming, ..] = peer.lanes().count();
            let (sent_bytes, received_bytes, resent_chunks, lost_lanes) = peer.traffic.totals();
            PeerTraffic {
                peer: Arc::clone(&peer.name),
                lanes: u64::try_from(out + incoming).unwrap_or(u64::MAX),
                sent_bytes,
                received_bytes,
                resent_chunks,
                lost_lanes,
                send_calls: peer.traffic.sends(),
            }
        });
        peers.collect()
    }

    /// Ends all threads and waits for them. Jobs that are open are not reported any more.
    pub fn shutdown(&self) {
        self.shared.shutdown();
    }

    fn start_job(
        &self,
        id: JobId,
        regions: &[(u16, RegionKey)],
        role: impl FnOnce(RankMemory) -> Role,
    ) -> Option<Arc<Job>> {
        let (memory, missing) = match memory(&self.shared, regions) {
            Ok(memory) => (memory, None),
            Err(trouble) => (RankMemory::default(), Some(trouble)),
        };
        let Some(job) = self.shared.jobs.add(id, role(memory)) else {
            tracing::error!(job = id.0, "a job's number was used twice");
            return None;
        };
        if let Some(trouble) = missing {
            job.fail(trouble);
        }
        Some(job)
    }
}
