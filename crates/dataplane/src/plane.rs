//! The data plane's handle.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::Arc;

use kvferry_handshake::{PageLists, Ready};
use kvferry_plan::ChunkMap;

use crate::{
    Config, EngineProcess, Event, JobId, LaneMessage, PeerTraffic, RegionKey, RegisterError, StartError,
};

/// The data plane. A cheap handle: the threads end when the last clone is dropped, or at
/// [`DataPlane::shutdown`]. No call blocks.
#[derive(Clone, Debug)]
pub struct DataPlane {}

impl DataPlane {
    /// Binds the data port and starts the threads. `sink` takes every [`Event`]; it must not block.
    pub fn start(config: Config, sink: Arc<dyn Fn(Event) + Send + Sync>) -> Result<DataPlane, StartError> {
        let _ = (config, sink);
        todo!()
    }

    /// Where lanes are accepted.
    pub fn listen_address(&self) -> SocketAddr {
        todo!()
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
        let _ = (owner, fd, offset, len);
        todo!()
    }

    /// Takes `[address, address + len)` of an engine's process.
    pub fn map_process(
        &self,
        owner: u64,
        process: Arc<EngineProcess>,
        address: u64,
        len: u64,
    ) -> Result<RegionKey, RegisterError> {
        let _ = (owner, process, address, len);
        todo!()
    }

    /// Forgets a region. The jobs that used it were closed before.
    pub fn release(&self, key: RegionKey) {
        let _ = key;
        todo!()
    }

    /// The channel to this peer is up; its data port is on `host`.
    pub fn peer_up(&self, peer: &str, host: IpAddr) {
        let _ = (peer, host);
        todo!()
    }

    /// The channel to this peer broke: its lanes are destroyed, and its jobs do not go on.
    pub fn peer_down(&self, peer: &str) {
        let _ = peer;
        todo!()
    }

    /// The peer's data plane said something through the channel.
    pub fn peer_message(&self, peer: &str, message: LaneMessage) {
        let _ = (peer, message);
        todo!()
    }

    /// Accepts chunks from a peer into our pages, until [`DataPlane::close`]. The job's number is the slot
    /// that the peer must name.
    pub fn receive(
        &self,
        job: JobId,
        peer: &str,
        map: ChunkMap,
        pages: Arc<PageLists>,
        regions: Arc<[(u16, RegionKey)]>,
    ) {
        let _ = (job, peer, map, pages, regions);
        todo!()
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
        let _ = (job, peer, slot, map, pages, regions);
        todo!()
    }

    /// Copies chunks within the node as [`DataPlane::ready`] says.
    pub fn copy(
        &self,
        job: JobId,
        map: ChunkMap,
        source_pages: Arc<PageLists>,
        source_regions: Arc<[(u16, RegionKey)]>,
        pages: Arc<PageLists>,
        regions: Arc<[(u16, RegionKey)]>,
    ) {
        let _ = (job, map, source_pages, source_regions, pages, regions);
        todo!()
    }

    /// More is ready at the source of a send or copy, with longer page lists where they grew. Once
    /// `ready.end` is set the map is cut there.
    pub fn ready(&self, job: JobId, ready: Ready, source_pages: Option<Arc<PageLists>>) {
        let _ = (job, ready, source_pages);
        todo!()
    }

    /// A receive learns the final end: the map is cut there.
    pub fn end(&self, job: JobId, end: u64) {
        let _ = (job, end);
        todo!()
    }

    /// Stops and fences a job, also one that is complete or failed: answered by [`Event::Closed`], once.
    pub fn close(&self, job: JobId) {
        let _ = job;
        todo!()
    }

    /// Everything that must return to where it was: (name, count).
    pub fn counts(&self) -> Vec<(String, u64)> {
        todo!()
    }

    /// Traffic per peer.
    pub fn traffic(&self) -> Vec<PeerTraffic> {
        todo!()
    }

    /// Ends all threads and waits for them. Jobs that are open are not reported any more.
    pub fn shutdown(&self) {
        todo!()
    }
}
