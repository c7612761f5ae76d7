//! The keys of an envelope file, as serde reads them. docs/envelope.md describes each.

use serde::Deserialize;
use serde::de::{self, Deserializer};
use toml::Spanned;

use crate::element::Element;
use crate::envelope::{Dcp, Kind, Role, Scales, Unit};
use crate::launch::{Allocation, Order, Padding};
use crate::limits::MAX_LAYERS;
use crate::spans::parse_spans;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Document {
    pub(super) engine: String,
    pub(super) role: Role,
    #[serde(default, deserialize_with = "incarnation")]
    pub(super) incarnation: u64,
    pub(super) model: String,
    pub(super) revision: Option<String>,
    pub(super) weights_digest: Option<String>,
    pub(super) config_digest: Option<String>,
    pub(super) framework: String,
    pub(super) framework_version: String,
    pub(super) prefill_context_parallel: u32,
    pub(super) page_group: Vec<Spanned<GroupEntry>>,
    pub(super) component: Vec<Spanned<ComponentEntry>>,
    pub(super) arrangement: Option<Spanned<ArrangementEntry>>,
    #[serde(default)]
    pub(super) rank: Vec<Spanned<RankEntry>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct GroupEntry {
    pub(super) name: String,
    pub(super) page_size: u32,
    pub(super) pool_pages: u32,
    pub(super) pool: Option<Spanned<String>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ComponentEntry {
    pub(super) name: String,
    pub(super) kind: Kind,
    pub(super) page_group: Spanned<String>,
    pub(super) layers: LayerSpans,
    pub(super) parts: Vec<PartEntry>,
    #[serde(deserialize_with = "element")]
    pub(super) element: Element,
    pub(super) scales: Option<ScalesEntry>,
    pub(super) unit: Option<Unit>,
    pub(super) opaque: Option<String>,
    pub(super) window: Option<u32>,
    pub(super) dcp: Option<DcpEntry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PartEntry {
    pub(super) name: String,
    pub(super) heads: u32,
    pub(super) width: u32,
}

#[derive(Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum ScalesEntry {
    None,
    Model,
    Inline,
    Component(String),
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct DcpEntry {
    pub(super) size: u32,
    #[serde(default = "one")]
    pub(super) interleave: u32,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ArrangementEntry {
    pub(super) tp: u32,
    #[serde(default = "one")]
    pub(super) cp: u32,
    pub(super) stages: Option<Vec<u32>>,
    #[serde(default = "nhd")]
    pub(super) order: OrderEntry,
    pub(super) allocation: AllocationEntry,
    #[serde(default)]
    pub(super) padding: PaddingEntry,
}

#[derive(Clone, Copy, Deserialize)]
pub(super) enum OrderEntry {
    #[serde(rename = "NHD")]
    Nhd,
    #[serde(rename = "HND")]
    Hnd,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum AllocationEntry {
    LayerPart,
    Layer,
    LayerPages,
    PackedRows,
    OneRegion,
    PageMajor,
}

#[derive(Clone, Copy, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct PaddingEntry {
    row: u64,
    page: u64,
    start: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RankEntry {
    pub(super) rank: u32,
    #[serde(default)]
    pub(super) dcp_rank: u32,
    #[serde(default)]
    pub(super) placement: Vec<Spanned<PlacementEntry>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct PlacementEntry {
    pub(super) component: Spanned<String>,
    pub(super) layers: LayerSpans,
    pub(super) parts: Spanned<Names>,
    pub(super) heads: Spanned<String>,
    pub(super) region: u16,
    #[serde(default)]
    pub(super) offset: u64,
    #[serde(default)]
    pub(super) strides: StridesEntry,
}

#[derive(Clone, Copy, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(super) struct StridesEntry {
    pub(super) page: u64,
    pub(super) token: u64,
    pub(super) head: u64,
    pub(super) part: u64,
    pub(super) layer: u64,
}

/// One name, or a list of them.
#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a name or a list of names")]
pub(super) enum Names {
    One(String),
    Many(Vec<String>),
}

/// Layer ids: a number, spans (`"0-31,40"`), or a list of numbers.
pub(super) struct LayerSpans(pub(super) Vec<u32>);

impl<'de> Deserialize<'de> for LayerSpans {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(
            untagged,
            expecting = "expected layer ids such as 3, \"0-31,40\" or [0, 2, 4]"
        )]
        enum Form {
            One(u32),
            Spans(String),
            List(Vec<u32>),
        }
        match Form::deserialize(deserializer)? {
            Form::One(layer) => Ok(LayerSpans(vec![layer])),
            Form::List(layers) => Ok(LayerSpans(layers)),
            Form::Spans(text) => parse_spans(&text, MAX_LAYERS).map(LayerSpans).map_err(|cause| {
                de::Error::custom(format!(
                    "{text:?} are no layer ids ({cause}); write them as \"0-31,40\""
                ))
            }),
        }
    }
}

impl DcpEntry {
    pub(super) fn dcp(&self) -> Dcp {
        Dcp {
            size: self.size,
            interleave: self.interleave,
        }
    }
}

impl ScalesEntry {
    pub(super) fn scales(&self) -> Scales {
        match self {
            ScalesEntry::None => Scales::None,
            ScalesEntry::Model => Scales::Model,
            ScalesEntry::Inline => Scales::Inline,
            ScalesEntry::Component(name) => Scales::Component(name.clone()),
        }
    }
}

impl From<OrderEntry> for Order {
    fn from(entry: OrderEntry) -> Order {
        match entry {
            OrderEntry::Nhd => Order::Nhd,
            OrderEntry::Hnd => Order::Hnd,
        }
    }
}

impl From<AllocationEntry> for Allocation {
    fn from(entry: AllocationEntry) -> Allocation {
        match entry {
            AllocationEntry::LayerPart => Allocation::LayerPart,
            AllocationEntry::Layer => Allocation::Layer,
            AllocationEntry::LayerPages => Allocation::LayerPages,
            AllocationEntry::PackedRows => Allocation::PackedRows,
            AllocationEntry::OneRegion => Allocation::OneRegion,
            AllocationEntry::PageMajor => Allocation::PageMajor,
        }
    }
}

impl From<PaddingEntry> for Padding {
    fn from(entry: PaddingEntry) -> Padding {
        Padding {
            row: entry.row,
            page: entry.page,
            start: entry.start,
        }
    }
}

fn one() -> u32 {
    1
}

fn nhd() -> OrderEntry {
    OrderEntry::Nhd
}

fn element<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Element, D::Error> {
    let name = String::deserialize(deserializer)?;
    name.parse().map_err(de::Error::custom)
}

/// Sixteen hexadecimal digits: TOML's numbers are signed.
fn incarnation<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    let digits = String::deserialize(deserializer)?;
    let found = u64::from_str_radix(&digits, 16)
        .ok()
        .filter(|_| !digits.starts_with('+'));
    found.ok_or_else(|| de::Error::custom(format!("{digits:?} is no number of up to 16 hexadecimal digits")))
}
