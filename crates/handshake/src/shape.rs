//! What a model caches, whatever the launch: the input, with [`crate::Launch`], from which envelopes are made.

use crate::element::Element;
use crate::envelope::{Kind, Part, Scales, Unit};

/// What a model caches per token, window or sequence.
///
/// ```
/// use kvferry_handshake::{Launch, ModelShape};
///
/// let llama = ModelShape::new("meta-llama/Llama-3.1-8B", 32).kv(0..32, 8, 128);
/// let envelope = Launch { tp: 4, page_size: 16, ..Launch::default() }.envelope(&llama)?;
/// assert_eq!(envelope.ranks.len(), 4);
/// # Ok::<(), kvferry_handshake::LaunchError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelShape {
    /// Model name.
    pub model: String,
    /// Layers that pipeline stages are cut from. Higher ids (a draft model's) lie on the last stage.
    pub layers: u32,
    /// What is cached; each becomes one component.
    pub cached: Vec<Cached>,
}

/// One kind of cached data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cached {
    /// Component name.
    pub name: String,
    /// What it is.
    pub kind: Kind,
    /// Name of its page group.
    pub group: String,
    /// Global layer ids, ascending.
    pub layers: Vec<u32>,
    /// Parts with their total heads and widths.
    pub parts: Vec<Part>,
    /// Element type; `None`: the launch's KV cache dtype.
    pub element: Option<Element>,
    /// Where its scales live.
    pub scales: Scales,
    /// What one row belongs to.
    pub unit: Unit,
    /// Tag of an opaque page interior.
    pub opaque: Option<String>,
    /// Tokens of its sliding window.
    pub window: Option<u32>,
}

impl Cached {
    /// Something cached in page group `pages`, a row a token, of the launch's element type; state goes to
    /// group `slots`, a row a slot, and windows to group `window`. `parts`: name, total heads, width.
    pub fn new(
        name: &str,
        kind: Kind,
        layers: impl IntoIterator<Item = u32>,
        parts: &[(&str, u32, u32)],
    ) -> Cached {
        let group = match kind {
            Kind::State => "slots",
            Kind::Window => "window",
            Kind::Kv | Kind::Latent | Kind::Indexer | Kind::Scales => "pages",
        };
        Cached {
            name: name.to_owned(),
            kind,
            group: group.to_owned(),
            layers: layers.into_iter().collect(),
            parts: parts
                .iter()
                .map(|(name, heads, width)| Part {
                    name: (*name).to_owned(),
                    heads: *heads,
                    width: *width,
                })
                .collect(),
            element: None,
            scales: Scales::None,
            unit: if kind == Kind::State {
                Unit::Slot
            } else {
                Unit::Token
            },
            opaque: None,
            window: None,
        }
    }

    /// The same with its own element type.
    pub fn element(mut self, element: Element) -> Cached {
        self.element = Some(element);
        self
    }

    /// The same in another page group.
    pub fn group(mut self, group: &str) -> Cached {
        self.group = group.to_owned();
        self
    }

    /// The same with opaque pages of this tag: one row a page.
    pub fn opaque(mut self, tag: &str) -> Cached {
        self.opaque = Some(tag.to_owned());
        self.unit = Unit::Page;
        self
    }

    /// The same with one row a page.
    pub fn per_page(mut self) -> Cached {
        self.unit = Unit::Page;
        self
    }

    /// The same with scales in the component of this name.
    pub fn scaled_by(mut self, component: &str) -> Cached {
        self.scales = Scales::Component(component.to_owned());
        self
    }
}

impl ModelShape {
    /// A model of `layers` layers that caches nothing yet.
    pub fn new(model: &str, layers: u32) -> ModelShape {
        ModelShape {
            model: model.to_owned(),
            layers,
            cached: Vec::new(),
        }
    }

    /// Adds something cached.
    pub fn with(mut self, cached: Cached) -> ModelShape {
        self.cached.push(cached);
        self
    }

    /// Adds component `kv`: keys and values of `heads` heads of `width` elements.
    pub fn kv(self, layers: impl IntoIterator<Item = u32>, heads: u32, width: u32) -> ModelShape {
        self.kv_widths(layers, heads, width, width)
    }

    /// Adds component `kv` with keys and values of unequal widths.
    pub fn kv_widths(self, layers: impl IntoIterator<Item = u32>, heads: u32, k: u32, v: u32) -> ModelShape {
        self.with(Cached::new(
            "kv",
            Kind::Kv,
            layers,
            &[("k", heads, k), ("v", heads, v)],
        ))
    }

    /// Adds component `latent`: an MLA latent of `width` elements, RoPE part included (DeepSeek: 512 + 64).
    pub fn latent(self, layers: impl IntoIterator<Item = u32>, width: u32) -> ModelShape {
        self.with(Cached::new(
            "latent",
            Kind::Latent,
            layers,
            &[("latent", 1, width)],
        ))
    }

    /// Adds component `indexer`: keys of sparse attention, one row for all heads.
    pub fn indexer(self, layers: impl IntoIterator<Item = u32>, width: u32, element: Element) -> ModelShape {
        self.with(Cached::new("indexer", Kind::Indexer, layers, &[("key", 1, width)]).element(element))
    }

    /// Adds component `window` in its own page group: keys and values of the last `window` tokens.
    pub fn window(
        self,
        layers: impl IntoIterator<Item = u32>,
        heads: u32,
        width: u32,
        window: u32,
    ) -> ModelShape {
        let mut cached = Cached::new(
            "window",
            Kind::Window,
            layers,
            &[("k", heads, width), ("v", heads, width)],
        );
        cached.window = Some(window);
        self.with(cached)
    }

    /// Adds a component of recurrent state. `parts` are its separately sharded sub-ranges (x, B, C):
    /// name, sharded rows over all ranks, elements a row.
    pub fn state(
        self,
        name: &str,
        layers: impl IntoIterator<Item = u32>,
        parts: &[(&str, u32, u32)],
        element: Element,
    ) -> ModelShape {
        self.with(Cached::new(name, Kind::State, layers, parts).element(element))
    }

    /// Adds component `draft`: keys and values of a draft model's `count` layers, numbered after the model's.
    pub fn draft(self, count: u32, heads: u32, width: u32) -> ModelShape {
        let layers = self.layers..self.layers.saturating_add(count);
        self.with(Cached::new(
            "draft",
            Kind::Kv,
            layers,
            &[("k", heads, width), ("v", heads, width)],
        ))
    }
}
