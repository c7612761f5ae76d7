//! The envelope: an engine's geometry, stated so that two of them decide everything.
//!
//! An envelope says *what is stored where*: for each rank it is a map from
//! (component, layer, part, token, head) to a row of bytes. Strides are the truth; a layout name
//! such as NHD is a label that [`crate::layout`] makes from them.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::element::Element;

/// An engine's whole geometry: every rank attaches with the same one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Envelope {
    /// Who the engine is and which model it serves.
    pub identity: Identity,
    /// The page groups; a component names its group by position in this list.
    pub page_groups: Vec<PageGroup>,
    /// The kinds of cached data; a placement names its component by position in this list.
    pub components: Vec<Component>,
    /// One entry a rank, in rank order: `ranks[i].rank == i`.
    pub ranks: Vec<Rank>,
}

/// Which engine this is, and which model it serves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// The engine's name, unique on its home daemon: the last part of `kvferry://node:port/engine`.
    pub engine: String,
    /// What the engine does.
    pub role: Role,
    /// One life of the engine: drawn anew at each start, equal on all ranks. 0 means not stated.
    pub incarnation: u64,
    /// Model name as the engine was started with.
    pub model: String,
    /// Model revision, when known.
    pub revision: Option<String>,
    /// Digest of the weights, when known; equal digests override names and revisions.
    pub weights_digest: Option<String>,
    /// Digest of the model's configuration (RoPE and the like), when known.
    pub config_digest: Option<String>,
    /// Framework: `vllm`, `sglang`, or another name.
    pub framework: String,
    /// Framework version.
    pub framework_version: String,
    /// Prefill context-parallel size; 1 when the prompt is not split over ranks.
    pub prefill_context_parallel: u32,
}

/// What an engine does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Computes prompts and publishes pages.
    Prefill,
    /// Fetches pages and generates.
    Decode,
    /// Does both.
    Both,
}

/// The components that share one page list.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PageGroup {
    /// Name, unique in the envelope; groups of a pair are matched by their components.
    pub name: String,
    /// Tokens a page holds (vLLM: block size). 1 for a group of slots.
    pub page_size: u32,
    /// Pages (or slots) in the pool of each rank; page ids are below it.
    pub pool_pages: u32,
    /// Position of the page group whose pool this group draws its page ids from: its own position,
    /// unless groups share a pool (vLLM's hybrid allocator). A page id of a shared pool belongs to one
    /// group at a time, so the rows of the groups that share it may lie over each other.
    pub pool: u16,
}

/// One kind of cached data. Components of a pair are matched by name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Component {
    /// Name, unique in the envelope (`kv`, `latent`, `window`, `indexer`, `scales`, `state`, `draft`).
    pub name: String,
    /// What is cached.
    pub kind: Kind,
    /// Position of its page group in [`Envelope::page_groups`].
    pub page_group: u16,
    /// Global layer ids, ascending.
    pub layers: Vec<u32>,
    /// The parts a layer's data consists of (k and v; latent; x, B and C).
    pub parts: Vec<Part>,
    /// Element type, resolved.
    pub element: Element,
    /// Where the quantisation scales of this component live.
    pub scales: Scales,
    /// What one row belongs to.
    pub unit: Unit,
    /// Tag of a page interior that no stride describes; such pages move whole. Requires [`Unit::Page`].
    pub opaque: Option<String>,
    /// Tokens of a sliding window: older ones are not kept. Only for [`Kind::Window`].
    pub window: Option<u32>,
    /// How tokens are split over decode context-parallel ranks.
    pub dcp: Dcp,
}

/// What a component caches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// Keys and values, per head.
    Kv,
    /// An MLA latent (and its RoPE part), one for all heads.
    Latent,
    /// Keys and values of a sliding window.
    Window,
    /// Indexer keys of sparse attention.
    Indexer,
    /// Quantisation scales of another component.
    Scales,
    /// Recurrent state: slots instead of tokens, ready only at the end.
    State,
}

/// What one row of a component belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Unit {
    /// One token: a page holds `page_size` rows per head.
    Token,
    /// One page: a page holds one row per head (opaque tiles, per-page scales).
    Page,
    /// One slot of recurrent state: a "page" is a slot and holds one row per head.
    Slot,
}

/// A part of a layer's data, with its own width.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Part {
    /// Name, unique in the component (`k`, `v`, `latent`, `x`, ...).
    pub name: String,
    /// Total heads over all ranks (1 for a latent; sharded rows for a state's sub-range).
    pub heads: u32,
    /// Elements of one row: one head of one token (or page, or slot; see [`Unit`]).
    pub width: u32,
}

/// Where quantisation scales live.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Scales {
    /// The element type needs none.
    None,
    /// Constants of the model: both sides load them with the weights.
    Model,
    /// In the component of this name.
    Component(String),
    /// Inside each row, behind the elements (counted in the part's width).
    Inline,
}

/// Decode context parallelism: token `t` belongs to DCP rank `r` iff `floor(t/g) mod N = r`, at local
/// index `floor(t/(gN))*g + t mod g`, with N = `size` and g = `interleave`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Dcp {
    /// Ranks that tokens are split over; 1 when each rank holds all tokens.
    pub size: u32,
    /// Consecutive tokens on one rank; divides the page size.
    pub interleave: u32,
}

/// One worker of an engine and where its memory holds what.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rank {
    /// Rank number.
    pub rank: u32,
    /// DCP rank for components whose [`Dcp::size`] exceeds 1; 0 otherwise.
    pub dcp_rank: u32,
    /// Where the rank's rows lie.
    pub placements: Vec<Placement>,
}

/// An affine piece of a rank's map. With `l`, `p`, `h` the positions of layer, part and head *in this
/// placement* and `k` the page id, `t` the token's position in its page:
///
/// `address = offset + k*page + t*token + (h - heads.first)*head + p*part + l*layer`
///
/// in region `region`; one row of `part.width` elements is contiguous there. Several placements may
/// serve one component where layers, parts or heads are allocated apart; no row is placed twice.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placement {
    /// Position of the component in [`Envelope::components`].
    pub component: u16,
    /// Global layer ids, in the order of their layer stride.
    pub layers: Vec<u32>,
    /// Positions of the parts in [`Component::parts`], in the order of their part stride.
    pub parts: Vec<u16>,
    /// Global heads, in the order of their head stride.
    pub heads: HeadSpan,
    /// Region number, as the rank will register it.
    pub region: u16,
    /// Byte offset in the region of the first row of page 0.
    pub offset: u64,
    /// Byte strides.
    pub strides: Strides,
}

/// Consecutive global heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct HeadSpan {
    /// First head.
    pub first: u32,
    /// Number of heads.
    pub count: u32,
}

/// Byte strides of a placement. A stride along an axis with one element is not used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Strides {
    /// From a page to the next page id.
    pub page: u64,
    /// From a token to the next in its page.
    pub token: u64,
    /// From a head to the next.
    pub head: u64,
    /// From a part to the next in [`Placement::parts`].
    pub part: u64,
    /// From a layer to the next in [`Placement::layers`].
    pub layer: u64,
}

impl Envelope {
    /// The component of this name.
    pub fn component(&self, name: &str) -> Option<(u16, &Component)> {
        let at = self.components.iter().position(|c| c.name == name)?;
        Some((u16::try_from(at).ok()?, &self.components[at]))
    }
}

impl Component {
    /// Bytes of one row of part `part`; exact by validation.
    pub fn row_bytes(&self, part: u16) -> u64 {
        u64::from(self.parts[usize::from(part)].width) * u64::from(self.element.bits()) / 8
    }
}

impl HeadSpan {
    /// One past the last head.
    pub fn end(&self) -> u32 {
        self.first + self.count
    }
}

impl Dcp {
    /// Every rank holds all tokens.
    pub const NONE: Dcp = Dcp {
        size: 1,
        interleave: 1,
    };

    /// Whether both split tokens alike; the interleave of a split over one rank means nothing.
    pub fn same(&self, other: Dcp) -> bool {
        *self == other || (self.size == 1 && other.size == 1)
    }

    /// The DCP rank that holds `token`.
    pub fn owner(&self, token: u64) -> u32 {
        let block = token / u64::from(self.interleave);
        u32::try_from(block % u64::from(self.size)).unwrap_or(0)
    }

    /// The position of `token` among the tokens of its owner.
    pub fn local(&self, token: u64) -> u64 {
        let (g, n) = (u64::from(self.interleave), u64::from(self.size));
        token / (g * n) * g + token % g
    }

    /// How many tokens below `token` the DCP rank `rank` holds.
    pub fn count_below(&self, rank: u32, token: u64) -> u64 {
        let (g, n) = (u64::from(self.interleave), u64::from(self.size));
        let period = g * n;
        let rest = token % period;
        token / period * g + rest.saturating_sub(u64::from(rank) * g).min(g)
    }

    /// The token at local index `local` of DCP rank `rank`.
    pub fn global(&self, rank: u32, local: u64) -> u64 {
        let (g, n) = (u64::from(self.interleave), u64::from(self.size));
        local / g * (g * n) + u64::from(rank) * g + local % g
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Role::Prefill => "prefill",
            Role::Decode => "decode",
            Role::Both => "both",
        })
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kind::Kv => "kv",
            Kind::Latent => "latent",
            Kind::Window => "window",
            Kind::Indexer => "indexer",
            Kind::Scales => "scales",
            Kind::State => "state",
        })
    }
}

impl fmt::Display for Unit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Unit::Token => "token",
            Unit::Page => "page",
            Unit::Slot => "slot",
        })
    }
}

impl fmt::Display for Scales {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Scales::None => f.write_str("none"),
            Scales::Model => f.write_str("model"),
            Scales::Component(name) => write!(f, "component {name}"),
            Scales::Inline => f.write_str("inline"),
        }
    }
}

impl fmt::Display for Dcp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.size {
            1 => f.write_str("1"),
            size => write!(f, "{size} (interleave {})", self.interleave),
        }
    }
}

impl fmt::Display for HeadSpan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.count {
            1 => write!(f, "{}", self.first),
            _ => write!(
                f,
                "{}-{}",
                self.first,
                (u64::from(self.first) + u64::from(self.count)).saturating_sub(1)
            ),
        }
    }
}
