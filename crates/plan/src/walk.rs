//! From a chunk and page lists to byte ranges: the hot loop.
//!
//! A chunk is a nest of loops (layer, part, run, token, head) in an order fixed at link time. Loops outside
//! the runs are walked one by one; those inside are collapsed as long as they are contiguous, and the rest is an
//! N-dimensional strided copy. Neighbours that touch across loops, pages or layers are merged. The same code walks
//! one side ([`Walk`] with N = 1) or both in step (N = 2), so that both give the same order.

use std::ops::Range;

use kvferry_handshake::ABSENT;

use crate::stream::{Axis, LayerBase, Span, Stream, TARGET};
use crate::tokens::{Run, Runs};

/// Loops inside a run: layer, part, head, block, token.
const INNER: usize = 5;
/// Loops outside runs: layer, part, head.
const OUTER: usize = 3;

/// A byte range on each of N sides.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece<const N: usize> {
    pub(crate) region: [u16; N],
    pub(crate) offset: [u64; N],
    pub(crate) len: u64,
}

/// A loop: how often, and how far it goes each time.
#[derive(Clone, Copy, Debug)]
struct Loop<const N: usize> {
    count: u64,
    step: [u64; N],
    done: u64,
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Walk<'a, const N: usize> {
    /// `None`: nothing, or ended.
    chunk: Option<Chunk<'a, N>>,
    runs: Runs,
    outer: [Loop<N>; OUTER],
    outer_depth: usize,
    /// Where the outer loops are: the run's page 0.
    base: [u64; N],
    region: [u16; N],
    /// Innermost first.
    inner: [Loop<N>; INNER],
    inner_depth: usize,
    /// Bytes of a contiguous piece, of the current run.
    len: u64,
    /// The shape for which `inner` was made.
    shape: (u64, u64, [u64; 2]),
    /// Start of the piece that was found last.
    at: [u64; N],
    /// Times that the innermost loop still goes on from there.
    left: u64,
    /// The piece to give next, unless what follows touches it; of no length where there is none.
    pending: Piece<N>,
}

/// What stays the same during a walk.
#[derive(Debug)]
struct Chunk<'a, const N: usize> {
    stream: &'a Stream,
    layers: &'a [LayerBase],
    span: Span,
    /// The decode side's list: absent entries are skipped on both sides.
    wanted: &'a [u32],
    sides: [usize; N],
    lists: [&'a [u32]; N],
    pools: [u32; N],
    page_step: [u64; N],
    token_step: [u64; N],
}

impl<'a, const N: usize> Walk<'a, N> {
    pub(crate) fn empty() -> Walk<'a, N> {
        Walk {
            chunk: None,
            runs: Runs::alike(0, 0, [1; 2]),
            outer: [Loop::ONCE; OUTER],
            outer_depth: 0,
            base: [0; N],
            region: [0; N],
            inner: [Loop::ONCE; INNER],
            inner_depth: 0,
            len: 0,
            shape: (0, 0, [0; 2]),
            at: [0; N],
            left: 0,
            pending: Piece::NONE,
        }
    }

    pub(crate) fn new(
        stream: &'a Stream,
        layers: Range<usize>,
        span: Span,
        wanted: &'a [u32],
        sides: [usize; N],
        lists: [&'a [u32]; N],
        pools: [u32; N],
    ) -> Walk<'a, N> {
        let mut walk = Walk::empty();
        let layers = stream.layers.get(layers).unwrap_or_default();
        let Some(first) = layers.first() else {
            return walk;
        };
        let chunk = Chunk {
            stream,
            layers,
            span,
            wanted,
            sides,
            lists,
            pools,
            page_step: sides.map(|side| stream.page_step[side]),
            token_step: sides.map(|side| stream.token_step[side]),
        };
        for axis in &stream.order[..stream.place_of(Axis::Run)] {
            let (count, step) = chunk.axis(*axis);
            if count > 1 {
                walk.outer[walk.outer_depth] = Loop { count, step, done: 0 };
                walk.outer_depth += 1;
            }
        }
        walk.base = sides.map(|side| first.offset[side]);
        walk.region = sides.map(|side| first.region[side]);
        walk.runs = stream.runs(span);
        walk.chunk = Some(chunk);
        walk
    }

    /// Goes to the next piece that the innermost loop does not reach.
    fn advance(&mut self) -> bool {
        for depth in 1..self.inner_depth {
            let inner = &mut self.inner[depth];
            if inner.done + 1 < inner.count {
                inner.done += 1;
                // Back to the start of the loops below, then one step.
                for side in 0..N {
                    let mut at = self.at[side];
                    for below in &self.inner[..depth] {
                        at -= below.step[side] * (below.count - 1);
                    }
                    self.at[side] = at + self.inner[depth].step[side];
                }
                for below in &mut self.inner[1..depth] {
                    below.done = 0;
                }
                self.left = self.inner[0].count - 1;
                return true;
            }
        }
        self.next_run()
    }

    /// Goes to the first piece of the next run that is wanted.
    fn next_run(&mut self) -> bool {
        let mut run = Run::NONE;
        loop {
            let Some(chunk) = &self.chunk else {
                return false;
            };
            if !self.runs.go_on(&mut run) {
                if !self.next_outer() {
                    self.chunk = None;
                    return false;
                }
                continue;
            }
            let index = |entry: u64| usize::try_from(entry).unwrap_or(usize::MAX);
            if chunk
                .wanted
                .get(index(run.entry[TARGET]))
                .is_none_or(|id| *id == ABSENT)
            {
                continue;
            }
            let mut starts = [0; N];
            for (at, start) in starts.iter_mut().enumerate() {
                let side = chunk.sides[at];
                match chunk.lists[at].get(index(run.entry[side])) {
                    Some(id) if *id < chunk.pools[at] => {
                        *start = self.base[at]
                            + u64::from(*id) * chunk.page_step[at]
                            + run.token[side] * chunk.token_step[at];
                    }
                    // A list that does not fit ends the walk: better too few bytes than wrong ones.
                    _ => {
                        self.chunk = None;
                        return false;
                    }
                }
            }
            self.at = starts;
            self.enter(&run);
            return true;
        }
    }

    /// Makes the loops inside a run, innermost first, as few as possible.
    fn enter(&mut self, run: &Run) {
        let shape = (run.tokens, run.blocks, run.steps);
        if shape != self.shape
            && let Some(chunk) = &self.chunk
        {
            self.shape = shape;
            let stream = chunk.stream;
            self.len = stream.row;
            self.inner_depth = 0;
            let mut push = |count: u64, step: [u64; N]| {
                if count == 1 {
                    return;
                }
                if self.inner_depth == 0 && step == [self.len; N] {
                    self.len *= count;
                    return;
                }
                if let Some(below) = self.inner_depth.checked_sub(1) {
                    let below = &mut self.inner[below];
                    if (0..N).all(|side| step[side] == below.step[side] * below.count) {
                        below.count *= count;
                        return;
                    }
                }
                self.inner[self.inner_depth] = Loop { count, step, done: 0 };
                self.inner_depth += 1;
            };
            for axis in stream.order[stream.place_of(Axis::Run) + 1..].iter().rev() {
                if *axis == Axis::Token {
                    push(run.tokens, chunk.token_step);
                    let steps = std::array::from_fn(|at| run.steps[chunk.sides[at]] * chunk.token_step[at]);
                    push(run.blocks, steps);
                } else {
                    let (count, step) = chunk.axis(*axis);
                    push(count, step);
                }
            }
        }
        for inner in &mut self.inner[..self.inner_depth] {
            inner.done = 0;
        }
        self.left = if self.inner_depth > 0 {
            self.inner[0].count - 1
        } else {
            0
        };
    }

    /// Goes on with the loops outside the runs, and starts the runs again.
    fn next_outer(&mut self) -> bool {
        let Some(chunk) = &self.chunk else {
            return false;
        };
        for depth in (0..self.outer_depth).rev() {
            if self.outer[depth].done + 1 == self.outer[depth].count {
                self.outer[depth].done = 0;
                continue;
            }
            self.outer[depth].done += 1;
            // Layers need not lie evenly, so the base is made anew.
            let mut base: Option<&LayerBase> = chunk.layers.first();
            let mut ahead = [0u64; N];
            let outer = chunk.stream.order[..chunk.stream.place_of(Axis::Run)]
                .iter()
                .filter(|axis| chunk.axis(**axis).0 > 1);
            for (axis, outer) in outer.zip(&self.outer[..self.outer_depth]) {
                if *axis == Axis::Layer {
                    base = usize::try_from(outer.done)
                        .ok()
                        .and_then(|at| chunk.layers.get(at));
                } else {
                    for (ahead, step) in ahead.iter_mut().zip(outer.step) {
                        *ahead += step * outer.done;
                    }
                }
            }
            let Some(base) = base else {
                return false;
            };
            self.base = std::array::from_fn(|at| base.offset[chunk.sides[at]] + ahead[at]);
            self.region = chunk.sides.map(|side| base.region[side]);
            self.runs = chunk.stream.runs(chunk.span);
            return true;
        }
        false
    }

    /// Goes on where the innermost loop ended, until there is a piece that nothing more is added to.
    #[inline(never)]
    fn turn(&mut self) -> Option<Piece<N>> {
        loop {
            if !self.advance() {
                let last = std::mem::replace(&mut self.pending, Piece::NONE);
                return (last.len > 0).then_some(last);
            }
            let found = Piece {
                region: self.region,
                offset: self.at,
                len: self.len,
            };
            if self.pending.touches(&found) {
                self.pending.len += found.len;
                if self.left > 0 {
                    return Some(self.step());
                }
                continue;
            }
            let before = std::mem::replace(&mut self.pending, found);
            if before.len > 0 {
                return Some(before);
            }
            if self.left > 0 {
                return Some(self.step());
            }
        }
    }

    /// One step of the innermost loop. Its steps are not contiguous, or it would have been collapsed: so
    /// what was found before is to be given.
    #[inline(always)]
    fn step(&mut self) -> Piece<N> {
        self.left -= 1;
        let before = self.pending;
        for side in 0..N {
            self.at[side] += self.inner[0].step[side];
        }
        self.pending.offset = self.at;
        self.pending.len = self.len;
        before
    }
}

impl<const N: usize> Chunk<'_, N> {
    /// How often an axis other than runs and tokens is walked, and how far it goes each time.
    fn axis(&self, axis: Axis) -> (u64, [u64; N]) {
        let stream = self.stream;
        let (count, step) = match axis {
            Axis::Layer => (self.layers.len() as u64, stream.layer_step.unwrap_or_default()),
            Axis::Part => (stream.parts.len() as u64, stream.part_step),
            Axis::Head => (u64::from(stream.heads.count), stream.head_step),
            Axis::Run | Axis::Token => (1, [0; 2]),
        };
        (count, self.sides.map(|side| step[side]))
    }
}

impl<const N: usize> Loop<N> {
    const ONCE: Loop<N> = Loop {
        count: 1,
        step: [0; N],
        done: 0,
    };
}

impl<const N: usize> Piece<N> {
    const NONE: Piece<N> = Piece {
        region: [0; N],
        offset: [0; N],
        len: 0,
    };

    /// Whether `next` begins where this one ends, on all sides.
    fn touches(&self, next: &Piece<N>) -> bool {
        self.len > 0
            && self.region == next.region
            && (0..N).all(|side| self.offset[side] + self.len == next.offset[side])
    }
}

impl<const N: usize> Iterator for Walk<'_, N> {
    type Item = Piece<N>;

    #[inline]
    fn next(&mut self) -> Option<Piece<N>> {
        if self.left > 0 {
            return Some(self.step());
        }
        self.turn()
    }
}
