//! A transfer of one rank to one rank, as simple as can be: so many tokens of rows of one size.

use std::sync::Arc;

use kvferry_dataplane::{JobId, RegionKey};
use kvferry_handshake::{Allocation, Launch, ModelShape, Ready, TokenRange};
use kvferry_plan::{ChunkMap, Side};

use super::{Engine, Node, Pair, engine::Bytes, expected, next_job, transfers};

/// Engines with one rank each, their memory registered, and the plan of one fetch.
pub(crate) struct Flow {
    pub(crate) prefill: Engine,
    pub(crate) decode: Engine,
    pub(crate) map: ChunkMap,
    pub(crate) source: Arc<[(u16, RegionKey)]>,
    pub(crate) target: Arc<[(u16, RegionKey)]>,
    pub(crate) tokens: u64,
}

/// Sizes of a [`Flow`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Size {
    pub(crate) layers: u32,
    pub(crate) tokens: u64,
    pub(crate) page_size: u32,
    /// Elements of two bytes of a row.
    pub(crate) width: u32,
}

/// Some 16 MiB in pages of 64 KiB.
pub(crate) const LARGE: Size = Size {
    layers: 4,
    tokens: 1000,
    page_size: 16,
    width: 2048,
};

impl Flow {
    pub(crate) fn engines(size: Size, seed: u64) -> (Engine, Engine) {
        let model = ModelShape::new("flow", size.layers).latent(0..size.layers, size.width);
        let launch = Launch {
            page_size: size.page_size,
            pool_pages: size.tokens.div_ceil(size.page_size.into()) as u32 + 9,
            allocation: Allocation::OneRegion,
            ..Launch::default()
        };
        let envelope = launch.envelope(&model).unwrap();
        let prefill = Engine::new(envelope.clone(), size.tokens, seed);
        let decode = Engine::new(envelope, size.tokens, seed ^ 7);
        prefill.fill(seed ^ 1);
        decode.fill(seed ^ 2);
        (prefill, decode)
    }

    /// From node `from` to node `to`, which may be one.
    pub(crate) fn new(from: &Node, to: &Node, size: Size, seed: u64) -> Flow {
        let (prefill, decode) = Flow::engines(size, seed);
        let source = prefill.ranks[0].register(&from.plane, seed * 2);
        let target = decode.ranks[0].register(&to.plane, seed * 2 + 1);
        let range = TokenRange {
            from: 0,
            to: size.tokens,
        };
        let map = transfers(&prefill, &decode, range).remove(&(0, 0)).unwrap();
        Flow {
            prefill,
            decode,
            map,
            source,
            target,
            tokens: size.tokens,
        }
    }

    pub(crate) fn receive(&self, node: &Node, from: &str) -> JobId {
        let job = next_job();
        node.plane
            .receive(job, from, self.map.clone(), Arc::clone(&self.target));
        job
    }

    pub(crate) fn send(&self, node: &Node, to: &str, slot: JobId) -> JobId {
        let job = next_job();
        let pages = Arc::clone(&self.prefill.ranks[0].pages);
        node.plane
            .send(job, to, slot.0, self.map.clone(), pages, Arc::clone(&self.source));
        job
    }

    pub(crate) fn copy(&self, node: &Node) -> JobId {
        let job = next_job();
        node.plane.copy(
            job,
            self.map.clone(),
            Arc::clone(&self.prefill.ranks[0].pages),
            Arc::clone(&self.source),
            Arc::clone(&self.target),
        );
        job
    }

    pub(crate) fn ready(&self, node: &Node, job: JobId) {
        node.plane.ready(job, Ready::complete(self.tokens), None);
    }

    /// Starts the transfer from `a` to `b` whole: (send, receive).
    pub(crate) fn start(&self, pair: &Pair) -> (JobId, JobId) {
        let receive = self.receive(&pair.b, "a");
        let send = self.send(&pair.a, "b", receive);
        self.ready(&pair.a, send);
        pair.b.plane.end(receive, self.tokens);
        (send, receive)
    }

    /// Carries everything from `a` to `b`, and checks it: each byte is there, and was counted once on either side.
    pub(crate) fn carry(&self, pair: &Pair) {
        let before = self.decode.ranks[0].bytes();
        let (send, receive) = self.start(pair);
        pair.a.log.complete(send);
        pair.b.log.complete(receive);
        close(pair, send, receive);
        for (node, job) in [(&pair.a, send), (&pair.b, receive)] {
            let tally = node.log.seen(job).closed[0];
            assert_eq!(tally.bytes, self.map.total_bytes(), "{tally:?}");
        }
        self.check(&before);
    }

    /// Checks that nothing but the plan's pages of the decode side was written.
    pub(crate) fn check_outside(&self, before: &Bytes) {
        let mut due = self.decode.ranks[0].bytes();
        for chunk in 0..self.map.chunks() {
            let pages = &self.decode.ranks[0].pages;
            for extent in self.map.extents(chunk, Side::Decode, pages) {
                let range = extent.offset as usize..(extent.offset + extent.len) as usize;
                let planned = before[&extent.region][range.clone()].to_vec();
                due.get_mut(&extent.region).unwrap()[range].copy_from_slice(&planned);
            }
        }
        assert!(due == *before, "written outside of the plan's pages");
    }

    pub(crate) fn check(&self, before: &Bytes) {
        let maps = [((0, 0), self.map.clone())].into();
        let due = expected(before, &self.prefill, 0, &maps);
        for (region, bytes) in self.decode.ranks[0].bytes() {
            let wrong = bytes.iter().zip(&due[&region]).position(|(is, due)| is != due);
            assert_eq!(wrong, None, "first wrong byte");
        }
    }
}

/// Closes both jobs and waits for it.
pub(crate) fn close(pair: &Pair, send: JobId, receive: JobId) {
    pair.a.plane.close(send);
    pair.b.plane.close(receive);
    pair.a.log.closed(send);
    pair.b.log.closed(receive);
}
