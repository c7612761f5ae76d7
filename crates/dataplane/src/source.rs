//! What of a send or copy job is ready, and what became of it: the bookkeeping, without locks or threads.

use std::collections::VecDeque;
use std::sync::Arc;

use kvferry_handshake::{PageLists, Ready};
use kvferry_plan::ChunkMap;

/// A job's map with the page lists that go with it. Readiness replaces it; chunks that were taken before keep theirs.
#[derive(Debug)]
pub(crate) struct View {
    pub(crate) map: ChunkMap,
    pub(crate) pages: Arc<PageLists>,
}

/// The chunks of a source.
#[derive(Debug)]
pub(crate) struct Source {
    view: Arc<View>,
    /// Not ready yet, or maybe empty: which chunks are empty is known once the end is.
    pending: Vec<u32>,
    /// Ready, and nobody has taken them.
    queue: VecDeque<u32>,
    /// Taken, and neither done nor put back.
    taken: usize,
    end_known: bool,
    stopped: bool,
    /// Whether the job stands in the line of jobs that have chunks to take.
    in_line: bool,
}

impl Source {
    pub(crate) fn new(map: ChunkMap, pages: Arc<PageLists>) -> Source {
        Source {
            pending: (0..map.chunks()).collect(),
            view: Arc::new(View { map, pages }),
            queue: VecDeque::new(),
            taken: 0,
            end_known: false,
            stopped: false,
            in_line: false,
        }
    }

    /// More is ready. Tells whether the job now has to be put into the line.
    pub(crate) fn advance(&mut self, ready: &Ready, pages: Option<Arc<PageLists>>) -> bool {
        if self.stopped || self.end_known {
            return false;
        }
        let map = match ready.end {
            Some(end) => self.view.map.cut(end),
            None => self.view.map.clone(),
        };
        let pages = pages.unwrap_or_else(|| Arc::clone(&self.view.pages));
        // A chunk that is empty in the whole map may hold something once it is cut: a window moves with its end.
        if ready.end.is_some() {
            self.end_known = true;
            let pending = std::mem::take(&mut self.pending);
            self.queue
                .extend(pending.into_iter().filter(|chunk| map.chunk_bytes(*chunk) > 0));
        } else {
            let queue = &mut self.queue;
            self.pending.retain(|&chunk| {
                let ready = map.chunk_bytes(chunk) > 0 && map.is_ready(chunk, ready);
                if ready {
                    queue.push_back(chunk);
                }
                !ready
            });
        }
        self.view = Arc::new(View { map, pages });
        self.line_up()
    }

    fn line_up(&mut self) -> bool {
        let due = !self.stopped && !self.in_line && !self.queue.is_empty();
        self.in_line |= due;
        due
    }

    /// Takes the next chunk for whoever took the job out of the line. The second part tells whether the job has to be
    /// put back into the line.
    pub(crate) fn take(&mut self) -> (Option<(Arc<View>, u32)>, bool) {
        self.in_line = false;
        let chunk = self.queue.pop_front().map(|chunk| {
            self.taken += 1;
            (Arc::clone(&self.view), chunk)
        });
        (chunk, self.line_up())
    }

    /// A chunk that was taken has to be taken again, before others. Tells whether the job has to be put into the line.
    pub(crate) fn put_back(&mut self, chunk: u32) -> bool {
        if self.stopped {
            return false;
        }
        self.taken -= 1;
        self.queue.push_front(chunk);
        self.line_up()
    }

    /// A chunk that was taken is done. Tells whether all are, up to the final end.
    pub(crate) fn done(&mut self) -> bool {
        if self.stopped {
            return false;
        }
        self.taken -= 1;
        self.is_complete()
    }

    /// Whether every chunk up to the final end is done.
    pub(crate) fn is_complete(&self) -> bool {
        !self.stopped && self.end_known && self.queue.is_empty() && self.taken == 0
    }

    /// Gives nothing out any more. Tells whether the job stands in the line.
    pub(crate) fn stop(&mut self) -> bool {
        self.stopped = true;
        self.queue = VecDeque::new();
        self.pending = Vec::new();
        std::mem::take(&mut self.in_line)
    }

    /// Whether nothing is given out any more.
    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped
    }

    /// Chunks that can be taken now.
    pub(crate) fn waiting(&self) -> usize {
        self.queue.len()
    }
}

#[cfg(test)]
mod tests {
    use super::Source;
    use crate::testing::{map, pages};
    use kvferry_handshake::Ready;

    fn layers(front_layers: u32) -> Ready {
        Ready {
            front_tokens: 8,
            front_layers,
            ..Ready::default()
        }
    }

    #[test]
    fn chunks_are_given_out_once_when_they_are_ready() {
        let mut source = Source::new(map(), pages());
        assert!(!source.advance(&layers(0), None));
        assert!(source.take().0.is_none());
        assert!(source.advance(&layers(2), None), "the job joins the line");
        assert!(!source.advance(&layers(3), None), "it stands in the line already");
        let mut chunks = Vec::new();
        while let (Some((_, chunk)), _) = source.take() {
            chunks.push(chunk);
        }
        assert_eq!(chunks, [0, 1, 2]);
        assert!(source.advance(&layers(4), None));
        assert_eq!(source.take().0.unwrap().1, 3);
    }

    #[test]
    fn it_is_complete_when_the_end_is_known_and_all_is_done() {
        let mut source = Source::new(map(), pages());
        source.advance(&layers(4), None);
        while source.take().0.is_some() {}
        for _ in 0..4 {
            assert!(!source.done(), "the end is not known");
        }
        source.advance(&Ready::complete(8), None);
        assert!(source.is_complete());

        let mut source = Source::new(map(), pages());
        source.advance(&Ready::complete(8), None);
        for left in (0..4).rev() {
            assert!(source.take().0.is_some());
            source.put_back(0);
            assert!(!source.is_complete());
            source.take();
            assert_eq!(source.done(), left == 0);
        }
    }

    #[test]
    fn a_cut_leaves_out_what_is_beyond_the_end() {
        let mut source = Source::new(map(), pages());
        source.advance(&Ready::complete(3), None);
        let (view, chunk) = source.take().0.unwrap();
        assert_eq!(view.map.chunk_bytes(chunk), 3 * 128);
        let mut empty = Source::new(map(), pages());
        assert!(!empty.advance(&Ready::complete(0), None));
        assert!(empty.is_complete());
    }
}
