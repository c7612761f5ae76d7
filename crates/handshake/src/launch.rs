//! How an engine was started: with a [`ModelShape`] it makes an [`Envelope`] of all ranks.

mod allocate;

pub use allocate::{Allocation, Order, Padding};

use crate::element::Element;
use crate::envelope::{
    Component, Dcp, Envelope, HeadSpan, Identity, Kind, PageGroup, Part, Rank, Role, Unit,
};
use crate::limits::{MAX_COMPONENTS, MAX_LAYERS, MAX_PARTS, MAX_PLACED, MAX_RANKS};
use crate::shape::ModelShape;
use crate::validate::InvalidEnvelope;

/// An engine's launch, as far as it decides the geometry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Launch {
    /// Engine name.
    pub engine: String,
    /// What the engine does.
    pub role: Role,
    /// Framework.
    pub framework: String,
    /// Framework version.
    pub framework_version: String,
    /// Tensor-parallel size.
    pub tp: u32,
    /// Pipeline stages. Rank numbers run over TP ranks first: `stage * tp + tp_rank`.
    pub pp: Stages,
    /// Decode context parallelism, of everything but recurrent state. A rank's DCP rank is
    /// `tp_rank % dcp.size`, and the ranks of one DCP group own the same heads.
    pub dcp: Dcp,
    /// Prefill context-parallel size.
    pub prefill_cp: u32,
    /// Tokens a page holds.
    pub page_size: u32,
    /// Pages of each page group's pool.
    pub pool_pages: u32,
    /// Slots of recurrent state.
    pub slots: u32,
    /// Element type of what has no type of its own.
    pub element: Element,
    /// Order of tokens and heads inside a page.
    pub order: Order,
    /// What is allocated together.
    pub allocation: Allocation,
    /// Bytes left free.
    pub padding: Padding,
    /// Whether all page groups draw from one pool of pages, the n-th layers of all groups sharing a
    /// region (vLLM's hybrid allocator). For [`Allocation::LayerPages`] and [`Allocation::PackedRows`].
    pub shared_pool: bool,
}

/// How layers are split over pipeline stages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Stages {
    /// Evenly; the first stages take one layer more where the number does not divide.
    Even(u32),
    /// The number of layers of each stage.
    Layers(Vec<u32>),
}

/// Why a model cannot be launched like this.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LaunchError {
    /// Heads and ranks neither divide nor are divided.
    #[error(
        "part {part:?} of component {component:?} has {heads} heads, which {ranks} ranks cannot share evenly"
    )]
    Heads {
        /// Component.
        component: String,
        /// Part.
        part: String,
        /// Its heads.
        heads: u32,
        /// TP ranks that heads are split over (TP size divided by DCP size).
        ranks: u32,
    },
    /// The stages' layers are not the model's.
    #[error("the pipeline stages hold {stages} layers; the model has {layers}")]
    Layers {
        /// Sum over the stages.
        stages: u64,
        /// The model's.
        layers: u32,
    },
    /// DCP groups do not fill the TP ranks.
    #[error("a DCP size of {dcp} does not divide the TP size {tp}")]
    Dcp {
        /// DCP size.
        dcp: u32,
        /// TP size.
        tp: u32,
    },
    /// A number is zero or too large.
    #[error("{what} is {value}; 1 to {most} are allowed")]
    Bounds {
        /// Which number.
        what: &'static str,
        /// Its value.
        value: u64,
        /// The largest allowed.
        most: u64,
    },
    /// A shared pool with an allocation that has no common pages.
    #[error("a shared pool needs an allocation by layer with whole pages: layer_pages or packed_rows")]
    SharedPool,
    /// A region would be larger than 2^63 bytes.
    #[error("the pool is larger than 2^63 bytes")]
    TooLarge,
    /// The envelope that came out is not valid.
    #[error(transparent)]
    Invalid(#[from] InvalidEnvelope),
}

impl Default for Launch {
    fn default() -> Self {
        Launch {
            engine: "engine".to_owned(),
            role: Role::Both,
            framework: "kvferry".to_owned(),
            framework_version: String::new(),
            tp: 1,
            pp: Stages::Even(1),
            dcp: Dcp::NONE,
            prefill_cp: 1,
            page_size: 16,
            pool_pages: 1024,
            slots: 64,
            element: Element::Bf16,
            order: Order::Nhd,
            allocation: Allocation::LayerPart,
            padding: Padding::default(),
            shared_pool: false,
        }
    }
}

impl Stages {
    /// The first layer of each stage, and the end of the last.
    fn bounds(&self, layers: u32) -> Result<Vec<u32>, LaunchError> {
        let counts = match self {
            Stages::Even(stages) => {
                bounded("pipeline stages", (*stages).into(), MAX_RANKS)?;
                (0..*stages)
                    .map(|stage| layers / stages + u32::from(stage < layers % stages))
                    .collect()
            }
            Stages::Layers(counts) => counts.clone(),
        };
        bounded("pipeline stages", counts.len() as u64, MAX_RANKS)?;
        let sum: u64 = counts.iter().map(|count| u64::from(*count)).sum();
        if sum != u64::from(layers) {
            return Err(LaunchError::Layers { stages: sum, layers });
        }
        let mut bounds = vec![0];
        let mut end = 0;
        for count in counts {
            end += count;
            bounds.push(end);
        }
        Ok(bounds)
    }
}

fn bounded(what: &'static str, value: u64, most: usize) -> Result<(), LaunchError> {
    let most = most as u64;
    if (1..=most).contains(&value) {
        Ok(())
    } else {
        Err(LaunchError::Bounds { what, value, most })
    }
}

impl Launch {
    /// The envelope of an engine that was started like this. It is valid.
    pub fn envelope(&self, model: &ModelShape) -> Result<Envelope, LaunchError> {
        bounded("the number of layers", model.layers.into(), MAX_LAYERS)?;
        bounded("the TP size", self.tp.into(), MAX_RANKS)?;
        bounded("the DCP size", self.dcp.size.into(), MAX_RANKS)?;
        if !self.tp.is_multiple_of(self.dcp.size) {
            return Err(LaunchError::Dcp {
                dcp: self.dcp.size,
                tp: self.tp,
            });
        }
        let packs = matches!(self.allocation, Allocation::LayerPages | Allocation::PackedRows);
        if self.shared_pool && !packs {
            return Err(LaunchError::SharedPool);
        }
        let stages = self.pp.bounds(model.layers)?;
        let count = (stages.len() as u64 - 1) * u64::from(self.tp);
        bounded("the number of ranks", count, MAX_RANKS)?;

        bounded(
            "the number of components",
            model.cached.len() as u64,
            MAX_COMPONENTS,
        )?;
        let mut pieces = 0usize;
        for cached in &model.cached {
            bounded("the number of parts", cached.parts.len() as u64, MAX_PARTS)?;
            bounded(
                "the number of layers of a component",
                cached.layers.len() as u64,
                MAX_LAYERS,
            )?;
            pieces += cached.parts.len() * cached.layers.len();
        }
        bounded(
            "the number of layers and parts, times TP ranks",
            pieces as u64 * u64::from(self.tp),
            MAX_PLACED,
        )?;

        let (page_groups, components) = self.declare(model);
        let mut ranks = Vec::new();
        for stage in stages.windows(2) {
            let last = stage[1] == model.layers;
            let layers = stage[0]..if last { u32::MAX } else { stage[1] };
            for tp_rank in 0..self.tp {
                let mut held = Vec::new();
                for component in &components {
                    let layers: Vec<u32> = component
                        .layers
                        .iter()
                        .copied()
                        .filter(|layer| layers.contains(layer))
                        .collect();
                    let heads: Result<Vec<HeadSpan>, LaunchError> = component
                        .parts
                        .iter()
                        .map(|part| self.heads(component, part, tp_rank))
                        .collect();
                    held.push((layers, heads?));
                }
                let split = components.iter().any(|component| component.dcp.size > 1);
                ranks.push(Rank {
                    rank: u32::try_from(ranks.len()).unwrap_or(u32::MAX),
                    dcp_rank: if split { tp_rank % self.dcp.size } else { 0 },
                    placements: self
                        .place(&page_groups, &components, &held)
                        .ok_or(LaunchError::TooLarge)?,
                });
            }
        }
        let envelope = Envelope {
            identity: self.identity(model),
            page_groups,
            components,
            ranks,
        };
        envelope.validate()?;
        Ok(envelope)
    }

    fn identity(&self, model: &ModelShape) -> Identity {
        Identity {
            engine: self.engine.clone(),
            role: self.role,
            incarnation: 0,
            model: model.model.clone(),
            revision: None,
            weights_digest: None,
            config_digest: None,
            framework: self.framework.clone(),
            framework_version: self.framework_version.clone(),
            prefill_context_parallel: self.prefill_cp,
        }
    }

    fn declare(&self, model: &ModelShape) -> (Vec<PageGroup>, Vec<Component>) {
        let mut groups: Vec<PageGroup> = Vec::new();
        let mut components = Vec::new();
        for cached in &model.cached {
            let slots = cached.kind == Kind::State;
            let at = groups
                .iter()
                .position(|group| group.name == cached.group)
                .unwrap_or_else(|| {
                    groups.push(PageGroup {
                        name: cached.group.clone(),
                        page_size: if slots { 1 } else { self.page_size },
                        pool_pages: if slots && !self.shared_pool {
                            self.slots
                        } else {
                            self.pool_pages
                        },
                        pool: if self.shared_pool {
                            0
                        } else {
                            u16::try_from(groups.len()).unwrap_or(u16::MAX)
                        },
                    });
                    groups.len() - 1
                });
            components.push(Component {
                name: cached.name.clone(),
                kind: cached.kind,
                page_group: u16::try_from(at).unwrap_or(u16::MAX),
                layers: cached.layers.clone(),
                parts: cached.parts.clone(),
                element: cached.element.unwrap_or(self.element),
                scales: cached.scales.clone(),
                unit: cached.unit,
                opaque: cached.opaque.clone(),
                window: cached.window,
                dcp: if slots { Dcp::NONE } else { self.dcp },
            });
        }
        (groups, components)
    }

    /// The heads of a part that a TP rank owns: an even share, or one head where ranks outnumber heads.
    fn heads(&self, component: &Component, part: &Part, tp_rank: u32) -> Result<HeadSpan, LaunchError> {
        let within = if component.unit == Unit::Slot {
            1
        } else {
            self.dcp.size
        };
        let (ranks, at) = (self.tp / within, tp_rank / within);
        if part.heads >= ranks && part.heads.is_multiple_of(ranks) {
            let count = part.heads / ranks;
            Ok(HeadSpan {
                first: at * count,
                count,
            })
        } else if part.heads > 0 && ranks.is_multiple_of(part.heads) {
            Ok(HeadSpan {
                first: at / (ranks / part.heads),
                count: 1,
            })
        } else {
            Err(LaunchError::Heads {
                component: component.name.clone(),
                part: part.name.clone(),
                heads: part.heads,
                ranks,
            })
        }
    }
}
