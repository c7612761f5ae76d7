//! What a transfer names: page lists, tokens and readiness.

use serde::{Deserialize, Serialize};

/// In a page list: no page here. The tokens it would hold are neither sent nor written.
pub const ABSENT: u32 = u32::MAX;

/// Page lists of one rank, one per page group of its envelope, in envelope order.
///
/// Entry `k` of a list is the page id that holds the rank's local tokens `k*P .. (k+1)*P` (counted from
/// token 0 of the prompt, held prefixes included), or the k-th slot of a group of slots; [`ABSENT`] where
/// there is none.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PageLists {
    /// One list per page group.
    pub groups: Vec<Vec<u32>>,
}

/// Tokens `[from, to)` of the prompt.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenRange {
    /// First token.
    pub from: u64,
    /// One past the last token.
    pub to: u64,
}

/// How much of a prompt the GPU finished writing. Grows from publish to publish.
///
/// Recurrent state and sliding windows are ready only when `end` is set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ready {
    /// Tokens below this are ready in all of the rank's layers.
    pub tokens: u64,
    /// Tokens below this (at or above `tokens`) are ready in the layers below `front_layers`.
    pub front_tokens: u64,
    /// Global layer ids below this are ready up to `front_tokens`.
    pub front_layers: u32,
    /// The prompt's length, once it is final: everything below it is ready.
    pub end: Option<u64>,
}

impl TokenRange {
    /// Number of tokens.
    pub fn count(&self) -> u64 {
        self.to.saturating_sub(self.from)
    }
}

impl Ready {
    /// Everything of a prompt of `end` tokens.
    pub fn complete(end: u64) -> Ready {
        Ready {
            tokens: end,
            front_tokens: end,
            front_layers: 0,
            end: Some(end),
        }
    }

    /// Whether all layers' tokens below `to`, or layer `layer`'s tokens below `to`, are ready.
    pub fn covers(&self, layer: u32, to: u64) -> bool {
        to <= self.tokens || (layer < self.front_layers && to <= self.front_tokens)
    }
}
