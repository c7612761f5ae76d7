//! A stream: the rows that one prefill rank sends to one decode rank and that lie alike in all its layers.

use kvferry_handshake::{Dcp, HeadSpan, Strides, Unit};

use crate::tokens::{Runs, TokenSet};

/// Both sides' value of something: the source's, then the target's.
pub(crate) type Both<T> = [T; 2];

/// Index of the source in [`Both`].
pub(crate) const SOURCE: usize = 0;
/// Index of the target in [`Both`].
pub(crate) const TARGET: usize = 1;

/// See the module.
#[derive(Clone, Debug)]
pub(crate) struct Stream {
    pub(crate) prefill_rank: u32,
    pub(crate) decode_rank: u32,
    /// Position in the decode envelope's components.
    pub(crate) component: u16,
    /// Positions in the decode envelope's parts, in order of target address.
    pub(crate) parts: Vec<u16>,
    pub(crate) heads: HeadSpan,
    pub(crate) unit: Unit,
    pub(crate) window: Option<u64>,
    pub(crate) tokens: TokenSet,
    /// Page group on each side.
    pub(crate) groups: Both<u16>,
    /// Bytes of one row.
    pub(crate) row: u64,
    pub(crate) page_step: Both<u64>,
    pub(crate) token_step: Both<u64>,
    pub(crate) head_step: Both<u64>,
    pub(crate) part_step: Both<u64>,
    /// Distance of neighbouring layers, where it is one for all of them on both sides.
    pub(crate) layer_step: Option<Both<u64>>,
    /// Ascending by layer id.
    pub(crate) layers: Vec<LayerBase>,
    /// The loops from the outermost to the innermost.
    pub(crate) order: [Axis; 5],
}

/// Where a layer's first row lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LayerBase {
    pub(crate) layer: u32,
    pub(crate) region: Both<u16>,
    /// Offset of page 0, token 0, the stream's first head and first part.
    pub(crate) offset: Both<u64>,
}

/// A loop over a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Axis {
    Layer,
    Part,
    /// A run of tokens in one page.
    Run,
    /// A token in its run.
    Token,
    Head,
}

/// Which rows of each head, part and layer: tokens of the prompt, or whole pages or slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Span {
    /// Tokens `[from, to)`.
    Tokens { from: u64, to: u64 },
    /// Entries `[from, to)` of both page lists.
    Entries { from: u64, to: u64 },
}

impl Stream {
    /// Settles, once the layers are known, their common distance and the order of the loops.
    ///
    /// Bytes travel in the order of the target's addresses, as far as loops can give it, so that the
    /// target is written in the longest runs, and the source is read so too where the sides agree.
    pub(crate) fn settle(&mut self) {
        self.layer_step = common_step(&self.layers);
        let mut loops = [
            (Axis::Layer, self.layer_step.map_or(u64::MAX, |step| step[TARGET])),
            (
                Axis::Part,
                if self.parts.len() > 1 {
                    self.part_step[TARGET]
                } else {
                    0
                },
            ),
            (Axis::Run, self.page_step[TARGET]),
            (Axis::Token, self.token_step[TARGET]),
            (
                Axis::Head,
                if self.heads.count > 1 {
                    self.head_step[TARGET]
                } else {
                    0
                },
            ),
        ];
        if self.unit != Unit::Token {
            loops[3].1 = 0;
        }
        if self.layers.len() == 1 {
            loops[0].1 = u64::MAX;
        }
        loops.sort_by_key(|(_, step)| std::cmp::Reverse(*step));
        self.order = loops.map(|(axis, _)| axis);
        let run = self.place_of(Axis::Run);
        let token = self.place_of(Axis::Token);
        if token < run {
            // Runs are found token by token, so a token's loop lies inside its run's.
            self.order[token..=run].rotate_left(1);
        }
    }

    /// The place of `axis` in the order.
    pub(crate) fn place_of(&self, axis: Axis) -> usize {
        self.order.iter().position(|at| *at == axis).unwrap_or(0)
    }

    /// Whether neighbouring layers lie inside one page on both sides.
    pub(crate) fn layers_in_page(&self) -> bool {
        self.layer_step
            .is_some_and(|step| (0..2).all(|side| step[side] < self.page_step[side]))
    }

    /// Bytes of one layer's rows of one token (or page, or slot).
    pub(crate) fn layer_row(&self) -> u64 {
        self.row * u64::from(self.heads.count) * self.parts.len() as u64
    }

    /// The rows of tokens `[from, to)`, as far as a window ending at `end` keeps them.
    pub(crate) fn span(&self, from: u64, to: u64, end: u64) -> Span {
        let kept = self.window.map_or(0, |window| end.saturating_sub(window));
        let (from, to) = (from.max(kept), to.min(end));
        if self.unit == Unit::Token {
            return Span::Tokens { from, to };
        }
        // Whole pages, of which the sides have equal sizes and splits.
        let (page, share) = (self.tokens.pages[TARGET], &self.tokens.target);
        let (from, to) = (share.count_below(from), share.count_below(to.max(from)));
        Span::Entries {
            from: from / page,
            to: if from < to { to.div_ceil(page) } else { from / page },
        }
    }

    /// Number of tokens, pages or slots of a span, were none absent.
    pub(crate) fn count(&self, span: Span) -> u64 {
        match span {
            Span::Tokens { from, to } => self.tokens.count(from, to),
            Span::Entries { from, to } => to.saturating_sub(from),
        }
    }

    /// The entries of the target's page list that a span may touch.
    pub(crate) fn entries(&self, span: Span) -> (u64, u64) {
        match span {
            Span::Tokens { from, to } => {
                let (share, page) = (&self.tokens.target, self.tokens.pages[TARGET]);
                let (from, to) = (share.count_below(from), share.count_below(to.max(from)));
                (from / page, to.div_ceil(page))
            }
            Span::Entries { from, to } => (from, to.max(from)),
        }
    }

    /// The part of a span that lies in entries `[first, last)` of the target's page list.
    pub(crate) fn within(&self, span: Span, first: u64, last: u64) -> Span {
        match span {
            Span::Tokens { from, to } => {
                let (low, high) = self.tokens.tokens_of_entries(first, last);
                Span::Tokens {
                    from: from.max(low),
                    to: to.min(high),
                }
            }
            Span::Entries { from, to } => Span::Entries {
                from: from.max(first),
                to: to.min(last),
            },
        }
    }

    /// The runs of a span.
    pub(crate) fn runs(&self, span: Span) -> Runs {
        match span {
            Span::Tokens { from, to } if from < to => self.tokens.runs(from, to),
            Span::Tokens { .. } => Runs::alike(0, 0, [1; 2]),
            Span::Entries { from, to } => Runs::alike(from, to, [1; 2]),
        }
    }

    /// Whether the two streams' rows of a span are the same tokens in the same entries of the same lists.
    pub(crate) fn same_rows(&self, other: &Stream) -> bool {
        self.unit == other.unit
            && self.window == other.window
            && self.tokens == other.tokens
            && self.groups == other.groups
    }

    /// Feeds everything that decides which byte goes where.
    pub(crate) fn digest(&self, hasher: &mut blake3::Hasher, bytes: &mut Vec<u8>) {
        bytes.clear();
        let mut put = |value: u64| bytes.extend_from_slice(&value.to_le_bytes());
        put(u64::from(self.prefill_rank));
        put(u64::from(self.decode_rank));
        put(u64::from(self.component));
        put(self.parts.len() as u64);
        self.parts.iter().for_each(|part| put(u64::from(*part)));
        put(u64::from(self.heads.first));
        put(u64::from(self.heads.count));
        put(match self.unit {
            Unit::Token => 0,
            Unit::Page => 1,
            Unit::Slot => 2,
        });
        put(self.window.unwrap_or(u64::MAX));
        for share in [&self.tokens.source, &self.tokens.target] {
            let Dcp { size, interleave } = share.dcp;
            put(u64::from(size));
            put(u64::from(interleave));
            put(u64::from(share.rank));
        }
        put(self.tokens.grid);
        put(self.row);
        for side in 0..2 {
            put(self.tokens.pages[side]);
            put(u64::from(self.groups[side]));
            put(self.page_step[side]);
            put(self.token_step[side]);
            put(self.head_step[side]);
            put(self.part_step[side]);
        }
        put(self.layers.len() as u64);
        for base in &self.layers {
            put(u64::from(base.layer));
            for side in 0..2 {
                put(u64::from(base.region[side]));
                put(base.offset[side]);
            }
        }
        for axis in self.order {
            put(match axis {
                Axis::Layer => 0,
                Axis::Part => 1,
                Axis::Run => 2,
                Axis::Token => 3,
                Axis::Head => 4,
            });
        }
        hasher.update(bytes);
    }
}

/// The distance of neighbouring layers on both sides, where it is one.
fn common_step(layers: &[LayerBase]) -> Option<Both<u64>> {
    let (first, second) = (layers.first()?, layers.get(1)?);
    let step_of = |a: &LayerBase, b: &LayerBase| -> Option<Both<u64>> {
        if a.region != b.region {
            return None;
        }
        let steps = [SOURCE, TARGET].map(|side| b.offset[side].checked_sub(a.offset[side]));
        Some([steps[0]?, steps[1]?])
    };
    let step = step_of(first, second)?;
    let even = layers
        .windows(2)
        .all(|pair| step_of(&pair[0], &pair[1]) == Some(step));
    even.then_some(step)
}

/// The strides that all rows of a stream share, on one side.
pub(crate) fn inner_steps(strides: &Strides) -> [u64; 3] {
    [strides.page, strides.token, strides.head]
}
