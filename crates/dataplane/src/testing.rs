//! What unit tests need: a send job and a chunk taken from it.

use std::sync::{Arc, Mutex};

use kvferry_handshake::{Allocation, Launch, ModelShape, PageLists, Policy, Ready, TokenRange};
use kvferry_plan::{ChunkMap, judge};

use crate::job::{Job, RankMemory, Role};
use crate::jobs::Jobs;
use crate::line::Taken;
use crate::peer::Peer;
use crate::source::Source;
use crate::{Event, JobId};

/// A map of 4 chunks, one a layer, over 8 pages of one token.
pub(crate) fn map() -> ChunkMap {
    let model = ModelShape::new("test", 4).latent(0..4, 64);
    let launch = Launch {
        page_size: 1,
        pool_pages: 8,
        allocation: Allocation::OneRegion,
        ..Launch::default()
    };
    let envelope = launch.envelope(&model).unwrap();
    let plan = Arc::new(judge(&envelope, &envelope, Policy::Strict).1.unwrap());
    ChunkMap::new(&plan, 0, 0, TokenRange { from: 0, to: 8 }, pages()).unwrap()
}

pub(crate) fn pages() -> Arc<PageLists> {
    Arc::new(PageLists {
        groups: vec![(0..8).collect()],
    })
}

/// A send job with everything ready, and its first chunk; the others wait in its peer's outbox.
pub(crate) fn send(id: u64) -> (Arc<Peer>, Taken) {
    let peer = Arc::new(Peer::new("peer"));
    let jobs = Arc::new(Jobs::new(Arc::new(|_: Event| {})));
    let role = Role::Send {
        peer: Arc::clone(&peer),
        slot: 1,
        source: Mutex::new(Source::new(map(), pages())),
        memory: RankMemory::default().into(),
    };
    let job = Arc::new(Job::new(JobId(id), role, Arc::downgrade(&jobs)));
    let (view, chunk) = {
        let mut source = job.source().unwrap();
        source.advance(&Ready::complete(8), None);
        source.take().0.unwrap()
    };
    peer.outbox.join(&job);
    (peer, Taken { job, view, chunk })
}
