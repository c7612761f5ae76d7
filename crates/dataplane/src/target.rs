//! Which chunks of a receive job landed: the bookkeeping, without locks or threads.

use std::sync::Arc;

use kvferry_handshake::{PageLists, Ready};
use kvferry_plan::ChunkMap;

use crate::source::View;

/// What is to be done with a chunk that begins to arrive.
#[derive(Debug)]
pub(crate) enum Arrival {
    /// Write it to where this view says; [`Target::landed`] or [`Target::broke_off`] follows.
    Write(Arc<View>),
    /// It landed before: drop it, and say that it landed.
    Repeat,
    /// It is arriving on another lane too, which an honest sender does not do.
    Doubled,
    /// It is not what our plan has there: what differs.
    Differs(String),
}

/// A chunk's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Chunk {
    Missing,
    /// Arriving, as the whole map or the map cut at the final end has it.
    Arriving {
        whole: bool,
    },
    /// Landed as the whole map has it.
    Whole,
    /// Landed as the map cut at the final end has it.
    Cut,
}

/// The chunks of a target.
#[derive(Debug)]
pub(crate) struct Target {
    whole: Arc<View>,
    /// Where the sender said that the prompt ends, or the broker did.
    cut: Option<(u64, Arc<View>)>,
    end_known: bool,
    chunks: Vec<Chunk>,
    /// Chunks that hold something and have not landed; exact once the end is known.
    left: usize,
}

impl Target {
    pub(crate) fn new(map: ChunkMap, pages: Arc<PageLists>) -> Target {
        let chunks = usize::try_from(map.chunks()).unwrap_or(0);
        Target {
            whole: Arc::new(View { map, pages }),
            cut: None,
            end_known: false,
            chunks: vec![Chunk::Missing; chunks],
            left: chunks,
        }
    }

    fn view_at(&mut self, end: u64) -> Result<Arc<View>, String> {
        let whole = self.whole.map.end();
        if end == whole {
            return Ok(Arc::clone(&self.whole));
        }
        if end > whole {
            return Err(format!("it ends at token {end}, and only {whole} were asked for"));
        }
        match &self.cut {
            Some((cut, view)) if *cut == end => Ok(Arc::clone(view)),
            Some((cut, _)) => Err(format!("it ends at token {end}, and the prompt ends at {cut}")),
            None => {
                let view = Arc::new(View {
                    map: self.whole.map.cut(end),
                    pages: Arc::clone(&self.whole.pages),
                });
                self.cut = Some((end, Arc::clone(&view)));
                Ok(view)
            }
        }
    }

    /// Whether a chunk is the same in the whole map and in the cut one. Those that are ready before the end is known are, if
    /// they have as many bytes; the others (windows, states) may hold other tokens.
    fn same_in_both(&self, chunk: u32, cut: &View) -> bool {
        let all_but_end = Ready {
            tokens: u64::MAX,
            front_tokens: u64::MAX,
            front_layers: u32::MAX,
            end: None,
        };
        let whole = &self.whole.map;
        whole.chunk_bytes(chunk) == cut.map.chunk_bytes(chunk) && whole.is_ready(chunk, &all_but_end)
    }

    /// A chunk begins to arrive: so many bytes, made from a map that ends at `end`.
    pub(crate) fn arrives(&mut self, chunk: u32, end: u64, bytes: u64) -> Arrival {
        let Some(at) = self.index(chunk) else {
            return Arrival::Differs(format!("there are {} chunks", self.chunks.len()));
        };
        let view = match self.view_at(end) {
            Ok(view) => view,
            Err(differs) => return Arrival::Differs(differs),
        };
        let ours = view.map.chunk_bytes(chunk);
        if ours != bytes || bytes == 0 {
            return Arrival::Differs(format!("it has {bytes} bytes, and by our plan {ours}"));
        }
        if self.end_known
            && end == self.whole.map.end()
            && let Some((cut, cut_view)) = &self.cut
            && !self.same_in_both(chunk, cut_view)
        {
            return Arrival::Differs(format!("it ends at token {end}, and the prompt ends at {cut}"));
        }
        match self.chunks[at] {
            Chunk::Missing => {
                self.chunks[at] = Chunk::Arriving {
                    whole: end == self.whole.map.end(),
                };
                Arrival::Write(view)
            }
            Chunk::Arriving { .. } => Arrival::Doubled,
            Chunk::Whole | Chunk::Cut => Arrival::Repeat,
        }
    }

    /// The chunk that was arriving is there, complete and visible. Tells whether all are, up to the final end.
    pub(crate) fn landed(&mut self, chunk: u32) -> bool {
        if let Some(at) = self.index(chunk)
            && let Chunk::Arriving { whole } = self.chunks[at]
        {
            self.chunks[at] = if whole { Chunk::Whole } else { Chunk::Cut };
            self.left = self.left.saturating_sub(1);
        }
        self.is_complete()
    }

    /// The chunk that was arriving did not: it is missing again.
    pub(crate) fn broke_off(&mut self, chunk: u32) {
        if let Some(at) = self.index(chunk)
            && matches!(self.chunks[at], Chunk::Arriving { .. })
        {
            self.chunks[at] = Chunk::Missing;
        }
    }

    /// The final end is known. Fails when a chunk that landed is not what it is up to there.
    pub(crate) fn ends(&mut self, end: u64) -> Result<bool, String> {
        if self.end_known {
            return Ok(self.is_complete());
        }
        // The end may lie beyond what was asked for.
        let end = end.min(self.whole.map.end());
        if let Some((cut, _)) = &self.cut
            && *cut != end
        {
            return Err(format!(
                "chunks came that end at token {cut}, and the prompt ends at {end}"
            ));
        }
        let view = self.view_at(end)?;
        self.end_known = true;
        let is_cut = end != self.whole.map.end();
        let mut left = 0;
        for (chunk, state) in (0u32..).zip(&self.chunks) {
            let came_whole = matches!(state, Chunk::Whole | Chunk::Arriving { whole: true });
            if came_whole && is_cut && !self.same_in_both(chunk, &view) {
                return Err(format!(
                    "chunk {chunk} came whole, and the prompt ends at token {end} inside it"
                ));
            }
            if matches!(state, Chunk::Missing | Chunk::Arriving { .. }) {
                left += usize::from(view.map.chunk_bytes(chunk) > 0);
            }
        }
        self.left = left;
        Ok(self.is_complete())
    }

    fn is_complete(&self) -> bool {
        self.end_known && self.left == 0
    }

    fn index(&self, chunk: u32) -> Option<usize> {
        usize::try_from(chunk).ok().filter(|at| *at < self.chunks.len())
    }
}

#[cfg(test)]
mod tests {
    use super::{Arrival, Target};
    use crate::testing::{map, pages};

    fn target() -> Target {
        Target::new(map(), pages())
    }

    fn writes(target: &mut Target, chunk: u32, end: u64, bytes: u64) -> bool {
        matches!(target.arrives(chunk, end, bytes), Arrival::Write(_))
    }

    fn differs(target: &mut Target, chunk: u32, end: u64, bytes: u64) -> bool {
        matches!(target.arrives(chunk, end, bytes), Arrival::Differs(_))
    }

    #[test]
    fn a_chunk_lands_once() {
        let mut target = target();
        assert!(writes(&mut target, 0, 8, 8 * 128));
        assert!(matches!(target.arrives(0, 8, 8 * 128), Arrival::Doubled));
        target.broke_off(0);
        assert!(writes(&mut target, 0, 8, 8 * 128));
        assert!(!target.landed(0));
        assert!(matches!(target.arrives(0, 8, 8 * 128), Arrival::Repeat));
        target.broke_off(0);
        assert!(
            matches!(target.arrives(0, 8, 8 * 128), Arrival::Repeat),
            "what landed stays"
        );
    }

    #[test]
    fn it_is_complete_when_the_end_is_known_and_all_landed() {
        let mut target = target();
        assert_eq!(target.ends(8), Ok(false));
        for chunk in 0..4 {
            assert!(writes(&mut target, chunk, 8, 8 * 128));
            assert_eq!(target.landed(chunk), chunk == 3);
        }
        let mut target = self::target();
        for chunk in 0..4 {
            assert!(writes(&mut target, chunk, 5, 5 * 128));
            assert!(!target.landed(chunk), "the end is not known");
        }
        assert_eq!(target.ends(5), Ok(true));
        assert_eq!(self::target().ends(0), Ok(true));
    }

    #[test]
    fn ends_that_contradict_each_other_are_refused() {
        let mut target = target();
        assert!(differs(&mut target, 0, 9, 9 * 128), "beyond what was asked for");
        assert!(writes(&mut target, 0, 5, 5 * 128));
        assert!(
            differs(&mut target, 1, 4, 4 * 128),
            "another end than the chunk before"
        );
        assert!(target.ends(6).is_err());
        assert_eq!(target.ends(5), Ok(false));
        assert!(
            differs(&mut target, 1, 8, 8 * 128),
            "whole, with another end known"
        );

        let mut whole = self::target();
        writes(&mut whole, 0, 8, 8 * 128);
        whole.landed(0);
        assert!(
            whole.ends(5).is_err(),
            "it landed whole, with tokens beyond the end"
        );
        let mut whole = self::target();
        writes(&mut whole, 0, 8, 8 * 128);
        assert!(
            whole.ends(5).is_err(),
            "it is arriving whole, with tokens beyond the end: it must not be counted in place of another"
        );
    }

    #[test]
    fn sizes_and_numbers_that_are_not_planned_are_refused() {
        let mut target = target();
        assert!(differs(&mut target, 4, 8, 8 * 128));
        assert!(differs(&mut target, 0, 8, 8 * 128 - 1));
        assert!(differs(&mut target, 0, 0, 0));
    }
}
