//! How a stream is cut into chunks: blocks of layers times blocks of tokens, on absolute token positions.

use kvferry_handshake::{TokenRange, Unit};

use crate::stream::{Span, Stream, TARGET};

/// At least so many blocks of layers, where there are so many layers and they lie apart: layers that are
/// ready move while others are computed.
const LAYER_BLOCKS: u64 = 4;

/// At least about so many blocks of tokens, where more than the end of a prompt can be ready: tokens that are ready move
/// while others are computed.
const TOKEN_BLOCKS: u64 = 4;

/// Chunks are not made smaller than this for the sake of moving early.
const LEAST_BYTES: u64 = 64 << 10;

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
        let fitting = |layers: u64| (chunk_bytes / unit.saturating_mul(layers)).max(1);
        // A page that holds all layers moves whole: the longest moves run through them.
        let units = if stream.layers_in_page() {
            fitting((chunk_bytes / unit).clamp(1, layers.max(1)))
        } else {
            fitting(1)
        };
        // Windows and states move at the end only.
        let units = if stream.unit == Unit::Slot || stream.window.is_some() {
            units
        } else {
            let part = (range.1 - range.0).div_ceil(align.saturating_mul(TOKEN_BLOCKS));
            let least = LEAST_BYTES.div_ceil(unit.saturating_mul(layers.div_ceil(LAYER_BLOCKS).max(1)));
            units.min(part.max(least).max(1))
        };
        let most = if stream.layers_in_page() {
            chunk_bytes / unit
        } else {
            // Few tokens: several layers, but not all of them.
            let block = one_layer.min(unit.saturating_mul(units));
            (chunk_bytes / block).min(layers.div_ceil(LAYER_BLOCKS))
        };
        let layer_blocks = layers.div_ceil(most.clamp(1, layers.max(1)));
        let layers = layers.div_ceil(layer_blocks.max(1)).max(1);
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
