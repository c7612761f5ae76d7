//! How an engine was started: with a [`ModelShape`] it makes an [`Envelope`] of all ranks.

mod allocate;

pub use allocate::{Allocation, Order, Padding};

use crate::element::Element;
use crate::envelope::{Component, Dcp, Envelope, HeadSpan, Identity, Kind, PageGroup, Part, Rank, Role};
use crate::limits::{
    MAX_COMPONENTS, MAX_LAYERS, MAX_PAGE_GROUPS, MAX_PARTS, MAX_PLACED, MAX_RANKS, MAX_REGION_BYTES,
};
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
    /// Pipeline stages. Rank numbers run over TP ranks, then prefill context-parallel ranks, then stages.
    pub pp: Stages,
    /// Decode context parallelism, of everything but recurrent state. A rank's DCP rank is
    /// `tp_rank % dcp.size`, and the ranks of one DCP group own the same heads.
    pub dcp: Dcp,
    /// Prefill context-parallel size: this many ranks hold the same.
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

/// Where all ranks' rows lie, in a few words: what [`Launch`] and the short form of an envelope file use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Arrangement {
    /// Tensor-parallel size.
    pub tp: u32,
    /// Prefill context-parallel size: this many ranks hold the same. Rank numbers run over TP ranks, then over
    /// these, then over stages.
    pub cp: u32,
    /// Layers of each pipeline stage; higher ids than their sum lie on the last stage.
    pub stages: Vec<u32>,
    /// Order of tokens and heads inside a page.
    pub order: Order,
    /// What is allocated together. Groups that share a pool share their n-th layers' regions.
    pub allocation: Allocation,
    /// Bytes left free.
    pub padding: Padding,
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
    /// More layers are given to stages than there are.
    #[error(
        "the pipeline stages hold {stages} layers, and stage {stage} of them nothing: the highest layer id is \
         {last}; give each stage its number of layers, in all those of the model"
    )]
    EmptyStage {
        /// Sum over the stages.
        stages: u64,
        /// The stage that holds nothing, from 0.
        stage: usize,
        /// The highest layer id of any component.
        last: u32,
    },
    /// A shared pool with an allocation that has no common pages.
    #[error(
        "the allocation is {allocation}, but a shared pool needs one by layer with whole pages: layer_pages or \
         packed_rows"
    )]
    SharedPool {
        /// The allocation, as an envelope file names it.
        allocation: &'static str,
    },
    /// A region would be larger than 2^63 bytes.
    #[error(
        "rank {rank} would need a region of more than {MAX_REGION_BYTES} bytes for {pool_pages} pages; lower \
         pool_pages, or what the pages hold"
    )]
    TooLarge {
        /// The rank.
        rank: usize,
        /// Pages of the largest pool.
        pool_pages: u32,
    },
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
    /// The number of layers of each stage.
    fn counts(&self, layers: u32) -> Result<Vec<u32>, LaunchError> {
        let counts = match self {
            Stages::Even(stages) => {
                bounded("pipeline stages", (*stages).into(), MAX_RANKS)?;
                (0..*stages)
                    .map(|stage| layers / stages + u32::from(stage < layers % stages))
                    .collect()
            }
            Stages::Layers(counts) => counts.clone(),
        };
        let sum = counts.iter().map(|count| u64::from(*count)).sum();
        if sum != u64::from(layers) {
            return Err(LaunchError::Layers { stages: sum, layers });
        }
        Ok(counts)
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
        let (page_groups, components) = self.declare(model);
        let ranks = self.arrangement(model)?.ranks(&page_groups, &components)?;
        let envelope = Envelope {
            identity: self.identity(model),
            page_groups,
            components,
            ranks,
        };
        envelope.validate()?;
        Ok(envelope)
    }

    /// Where this launch puts a model's rows.
    pub fn arrangement(&self, model: &ModelShape) -> Result<Arrangement, LaunchError> {
        Ok(Arrangement {
            tp: self.tp,
            cp: self.prefill_cp,
            stages: self.pp.counts(model.layers)?,
            order: self.order,
            allocation: self.allocation,
            padding: self.padding,
        })
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
}

impl Arrangement {
    /// The ranks of an engine with these page groups and components. What comes out is bounded, but
    /// whether the envelope is valid is for [`Envelope::validate`] to say.
    pub fn ranks(&self, groups: &[PageGroup], components: &[Component]) -> Result<Vec<Rank>, LaunchError> {
        self.check_bounds(groups, components)?;
        let dcp = components
            .iter()
            .map(|component| component.dcp.size)
            .max()
            .unwrap_or(1);
        let mut ranks = Vec::new();
        let mut first = 0u32;
        for (stage, count) in self.stages.iter().enumerate() {
            let end = first.saturating_add(*count);
            let layers = first..if stage + 1 == self.stages.len() {
                u32::MAX
            } else {
                end
            };
            first = end;
            for tp_rank in (0..self.cp).flat_map(|_| 0..self.tp) {
                let mut held = Vec::new();
                for component in components {
                    let of_stage = component
                        .layers
                        .iter()
                        .copied()
                        .filter(|layer| layers.contains(layer));
                    let heads = component
                        .parts
                        .iter()
                        .map(|part| self.heads(component, part, tp_rank));
                    held.push((of_stage.collect(), heads.collect::<Result<_, LaunchError>>()?));
                }
                ranks.push(Rank {
                    rank: u32::try_from(ranks.len()).unwrap_or(u32::MAX),
                    dcp_rank: tp_rank % dcp,
                    placements: self.place(groups, components, &held).ok_or_else(|| {
                        LaunchError::TooLarge {
                            rank: ranks.len(),
                            pool_pages: groups.iter().map(|group| group.pool_pages).max().unwrap_or(0),
                        }
                    })?,
                });
            }
        }
        Ok(ranks)
    }

    fn check_bounds(&self, groups: &[PageGroup], components: &[Component]) -> Result<(), LaunchError> {
        bounded("the TP size", self.tp.into(), MAX_RANKS)?;
        bounded(
            "the number of pipeline stages",
            self.stages.len() as u64,
            MAX_RANKS,
        )?;
        self.every_stage_holds_layers(components)?;
        bounded("the prefill context-parallel size", self.cp.into(), MAX_RANKS)?;
        let ranks = self.stages.len() as u64 * u64::from(self.tp) * u64::from(self.cp);
        bounded("the number of ranks", ranks, MAX_RANKS)?;
        bounded(
            "the number of components",
            components.len() as u64,
            MAX_COMPONENTS,
        )?;
        bounded("the number of page groups", groups.len() as u64, MAX_PAGE_GROUPS)?;
        let packs = matches!(self.allocation, Allocation::LayerPages | Allocation::PackedRows);
        if !packs
            && (0..u16::MAX)
                .zip(groups)
                .any(|(at, _)| allocate::shared(groups, at))
        {
            return Err(LaunchError::SharedPool {
                allocation: self.allocation.name(),
            });
        }
        let mut pieces = 0;
        for component in components {
            bounded(
                "a component's page group",
                u64::from(component.page_group) + 1,
                groups.len(),
            )?;
            bounded("the number of parts", component.parts.len() as u64, MAX_PARTS)?;
            bounded(
                "the number of layers of a component",
                component.layers.len() as u64,
                MAX_LAYERS,
            )?;
            bounded("the DCP size", component.dcp.size.into(), MAX_RANKS)?;
            if !self.tp.is_multiple_of(component.dcp.size) {
                return Err(LaunchError::Dcp {
                    dcp: component.dcp.size,
                    tp: self.tp,
                });
            }
            pieces += component.parts.len() * component.layers.len();
        }
        let ranks = u64::from(self.tp) * u64::from(self.cp);
        bounded(
            "layers times parts times ranks",
            pieces as u64 * ranks,
            MAX_PLACED,
        )
    }

    /// Ids from the sum of the stages on lie on the last stage, so a sum below the highest id is a draft model's; a
    /// sum beyond it is a mistake where it leaves a stage with nothing.
    fn every_stage_holds_layers(&self, components: &[Component]) -> Result<(), LaunchError> {
        let Some(last) = components.iter().flat_map(|component| &component.layers).max() else {
            return Ok(());
        };
        let stages = self.stages.iter().map(|count| u64::from(*count)).sum();
        let mut first = 0u64;
        for (stage, count) in self.stages.iter().enumerate() {
            if *count == 0 || first > u64::from(*last) {
                return Err(LaunchError::EmptyStage {
                    stages,
                    stage,
                    last: *last,
                });
            }
            first += u64::from(*count);
        }
        Ok(())
    }

    /// The heads of a part that a TP rank owns: an even share, or one head where ranks outnumber heads.
    fn heads(&self, component: &Component, part: &Part, tp_rank: u32) -> Result<HeadSpan, LaunchError> {
        let within = component.dcp.size;
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
