//! How a stream is cut into chunks: blocks of layers times blocks of tokens, on absolute token positions.

use kvferry_handshake::{TokenRange, Unit};

use crate::stream::{Span, Stream, TARGET};

/// At least so many blocks of layers, where there are so many layers and they lie apart: layers that are
/// ready move while others are computed.
const LAYER_BLOCKS: u64 = 4;

/// How one stream is cut.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grid {
    /// Number of its first chunk.
    pub(crate) first: u32,
    /// Layers a block.
    pub(crate) layers: u64,
    /// Tokens (or slots) a block.
    pub(crate) step: u64,
    /// Blocks `[from, to)` of tokens.
    pub(crate) blocks: (u64, u64),
}

impl Grid {
    /// Cuts a stream. Depends on the range asked for, never on where a cut ends.
    pub(crate) fn new(stream: &Stream, range: TokenRange, slots: u64, chunk_bytes: u64) -> Grid {
        let layers = stream.layers.len() as u64;
        let (rows, range, align, rows_of_align) = if stream.unit == Unit::Slot {
            (slots, (0, slots), 1, 1)
        } else {
            let span = stream.span(range.from, range.to, range.to);
            let align = stream.tokens.grid;
            let each = stream.count(Span::Tokens { from: 0, to: align });
            let each = match stream.unit {
                Unit::Page => each.div_ceil(stream.tokens.pages[TARGET]),
                _ => each,
            };
            (stream.count(span), (range.from, range.to), align, each.max(1))
        };
        let unit = stream.layer_row().saturating_mul(rows_of_align);
        let one_layer = stream.layer_row().saturating_mul(rows).max(1);
        let most = if stream.layers_in_page() {
            // A page holds all layers: the longest moves run through them.
            chunk_bytes / unit
        } else {
            // Few tokens: several layers, but not all of them.
            (chunk_bytes / one_layer).min(layers.div_ceil(LAYER_BLOCKS))
        };
        let layer_blocks = layers.div_ceil(most.clamp(1, layers.max(1)));
        let layers = layers.div_ceil(layer_blocks.max(1)).max(1);
        let units =
            (chunk_bytes / unit.saturating_mul(if stream.layers_in_page() { layers } else { 1 })).max(1);
        let step = align.saturating_mul(units).max(1);
        let blocks = if range.0 < range.1 {
            (range.0 / step, range.1.div_ceil(step))
        } else {
            (0, 0)
        };
        Grid {
            first: 0,
            layers,
            step,
            blocks,
        }
    }

    pub(crate) fn chunks(&self, stream: &Stream) -> u64 {
        let layer_blocks = (stream.layers.len() as u64).div_ceil(self.layers);
        layer_blocks * (self.blocks.1 - self.blocks.0)
    }
}
