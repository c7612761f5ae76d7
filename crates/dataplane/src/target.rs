//! Which chunks of a receive job landed: the bookkeeping, without locks or threads.

use std::sync::Arc;

use kvferry_handshake::Ready;
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
    /// Where the sender's chunks say that the prompt ends, or the broker did, if that is not the end of the whole map.
    cut: Option<(u64, Arc<View>)>,
    /// The final end, once the broker said it.
    end: Option<u64>,
    chunks: Vec<Chunk>,
    /// Chunks that hold something and have not landed; exact once the end is known.
    left: usize,
}

impl Target {
    pub(crate) fn new(map: ChunkMap) -> Target {
        let pages = Arc::clone(map.decode_pages());
        let chunks = usize::try_from(map.chunks()).unwrap_or(0);
        Target {
            whole: Arc::new(View { map, pages }),
            cut: None,
            end: None,
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
        if let Some(last) = self.end
            && end != last
        {
            return Err(contradicts(end, last));
        }
        match &self.cut {
            Some((cut, view)) if *cut == end => Ok(Arc::clone(view)),
            Some((cut, _)) => Err(contradicts(end, *cut)),
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
        // Chunks that came of the whole map before its end was known are still good where the cut one has the same.
        if let Some(last) = self.end
            && end != last
            && !self
                .cut
                .as_ref()
                .is_some_and(|(_, cut)| self.same_in_both(chunk, cut))
        {
            return Arrival::Differs(contradicts(end, last));
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
        // The end may lie beyond what was asked for.
        let end = end.min(self.whole.map.end());
        if let Some(last) = self.end {
            return if end == last {
                Ok(self.is_complete())
            } else {
                Err(format!("the prompt ends at token {last}, and then at {end}"))
            };
        }
        if let Some((cut, _)) = &self.cut
            && *cut != end
        {
            return Err(format!(
                "chunks came that end at token {cut}, and the prompt ends at {end}"
            ));
        }
        let view = self.view_at(end)?;
        self.end = Some(end);
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
        self.end.is_some() && self.left == 0
    }

    fn index(&self, chunk: u32) -> Option<usize> {
        usize::try_from(chunk).ok().filter(|at| *at < self.chunks.len())
    }
}

/// What is wrong with a chunk of a map that ends elsewhere.
fn contradicts(end: u64, prompt: u64) -> String {
    format!("it ends at token {end}, and the prompt ends at {prompt}")
}

#[cfg(test)]
mod tests {
    use super::{Arrival, Target};
    use crate::testing::map;

    fn target() -> Target {
        Target::new(map())
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
        for (end, why) in [(8, "whole"), (4, "shorter"), (6, "longer"), (9, "beyond")] {
            assert!(
                differs(&mut target, 1, end, end * 128),
                "{why}, with another end known"
            );
        }
        assert!(
            writes(&mut target, 1, 5, 5 * 128),
            "what differed changed nothing"
        );

        let mut cut = self::target();
        assert!(writes(&mut cut, 0, 5, 5 * 128));
        assert!(cut.ends(8).is_err(), "a chunk came that was cut shorter");

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
    fn once_the_whole_range_is_known_to_be_the_end_a_chunk_cut_shorter_is_refused() {
        for end in [8, 20] {
            let mut target = target();
            assert_eq!(
                target.ends(end),
                Ok(false),
                "beyond what was asked for is all of it"
            );
            for shorter in [1, 5, 7] {
                assert!(differs(&mut target, 0, shorter, shorter * 128), "{shorter}");
            }
            for chunk in 0..4 {
                assert!(writes(&mut target, chunk, 8, 8 * 128));
                assert_eq!(target.landed(chunk), chunk == 3);
            }
        }
        // Cut shorter as a whole, it must not complete either.
        let mut target = target();
        assert_eq!(target.ends(8), Ok(false));
        for chunk in 0..4 {
            let _ = target.arrives(chunk, 5, 5 * 128);
            assert!(!target.landed(chunk));
        }
    }

    #[test]
    fn a_final_end_is_final() {
        for (first, others) in [(8, [5, 0]), (5, [8, 4]), (0, [8, 1])] {
            let mut target = target();
            let complete = target.ends(first);
            assert_eq!(target.ends(first), complete, "said again");
            for other in others {
                assert!(target.ends(other).is_err(), "{first}, then {other}");
            }
            assert_eq!(target.ends(first), complete, "nothing has changed");
        }
    }

    #[test]
    fn sizes_and_numbers_that_are_not_planned_are_refused() {
        let mut target = target();
        assert!(differs(&mut target, 4, 8, 8 * 128));
        assert!(differs(&mut target, 0, 8, 8 * 128 - 1));
        assert!(differs(&mut target, 0, 0, 0));
    }
}
