//! What a transfer names: page lists, tokens and readiness.

use std::fmt;

use serde::de::{self, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// In a page list: no page here. The tokens it would hold are neither sent nor written.
pub const ABSENT: u32 = u32::MAX;

/// Page lists of one rank, one per page group of its envelope, in envelope order.
///
/// Entry `k` of a list is the page id that holds the rank's local tokens `k*P .. (k+1)*P` (counted from
/// token 0 of the prompt, held prefixes included), or the k-th slot of a group of slots; [`ABSENT`] where
/// there is none. A list travels as the bytes of its entries: lists are long, and serde writes numbers one by one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PageLists {
    /// One list per page group.
    pub groups: Vec<Vec<u32>>,
}

impl Serialize for PageLists {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.groups.iter().map(|list| ListOut(list)))
    }
}

impl<'de> Deserialize<'de> for PageLists {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let groups = Vec::<ListIn>::deserialize(deserializer)?;
        Ok(PageLists {
            groups: groups.into_iter().map(|list| list.0).collect(),
        })
    }
}

/// Entries on their way out, little-endian.
struct ListOut<'a>(&'a [u32]);

impl Serialize for ListOut<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut bytes = vec![0; self.0.len() * ENTRY];
        for (to, id) in bytes.as_chunks_mut::<ENTRY>().0.iter_mut().zip(self.0) {
            *to = id.to_le_bytes();
        }
        serializer.serialize_bytes(&bytes)
    }
}

/// Entries as they come in.
struct ListIn(Vec<u32>);

/// Bytes of an entry.
const ENTRY: usize = size_of::<u32>();

impl<'de> Deserialize<'de> for ListIn {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;

        impl Visitor<'_> for Entries {
            type Value = ListIn;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("the bytes of a page list, four an entry")
            }

            fn visit_bytes<E: de::Error>(self, bytes: &[u8]) -> Result<ListIn, E> {
                let (entries, rest) = bytes.as_chunks::<ENTRY>();
                if !rest.is_empty() {
                    return Err(E::invalid_length(bytes.len(), &self));
                }
                Ok(ListIn(
                    entries.iter().map(|entry| u32::from_le_bytes(*entry)).collect(),
                ))
            }
        }

        deserializer.deserialize_bytes(Entries)
    }
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
