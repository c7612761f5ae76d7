//! What a model caches under a framework: its components, and the page groups that they are in.

use super::arguments::argument;
use super::engine::Engine;
use super::state::Recurrent;
use super::{ConvertError, Framework, attention, state};
use crate::element::Element;
use crate::envelope::Kind;
use crate::shape::Cached;

impl Engine<'_> {
    pub(super) fn cached(&mut self, layers: u32, element: Element) -> Result<Vec<Cached>, ConvertError> {
        if attention::is_latent(self.config) {
            return attention::latents(self.config, self.framework, layers, element, &mut self.notes);
        }
        if state::is_hybrid(self.config) {
            let recurrent = Recurrent::of(self.config, layers)?;
            let heads = attention::Heads::of(self.config, &mut self.notes)?;
            let (conv, state) = self.state_elements()?;
            let mut cached = Vec::new();
            if !recurrent.layers.attention.is_empty() {
                cached.push(heads.cached("kv", Kind::Kv, recurrent.layers.attention.clone()));
            }
            if !recurrent.layers.state.is_empty() {
                cached.extend(recurrent.cached(self.framework, conv, state));
            }
            return Ok(cached);
        }
        if !attention::is_plain(self.config) {
            return Err(ConvertError::ModelType {
                name: self.config.model_type().to_owned(),
            });
        }
        let heads = attention::Heads::of(self.config, &mut self.notes)?;
        let windows = attention::windows(self.config, layers, &mut self.notes)?;
        if windows.layers.is_empty() || !self.frees_windows() {
            return Ok(vec![heads.cached("kv", Kind::Kv, (0..layers).collect())]);
        }
        let full: Vec<u32> = (0..layers)
            .filter(|layer| !windows.layers.contains(layer))
            .collect();
        let mut cached = Vec::new();
        if !full.is_empty() {
            cached.push(heads.cached("kv", Kind::Kv, full));
        }
        let mut window = heads.cached("window", Kind::Window, windows.layers);
        window.window = Some(windows.window);
        cached.push(window);
        Ok(cached)
    }

    /// Whether the framework gives pages back that a sliding window has left behind. Where it does not, such layers
    /// are cached like all others.
    pub(super) fn frees_windows(&mut self) -> bool {
        match self.framework {
            Framework::Vllm => {
                let off = ["--disable-hybrid-kv-cache-manager", "--disable-sliding-window"];
                let off = off.into_iter().find(|flag| self.given.switch(flag));
                if let Some(flag) = off {
                    self.notes.add(
                        "component.kv",
                        format!("{flag}: sliding-window layers are cached in full"),
                    );
                    return false;
                }
                if !self.given.switch("--no-disable-hybrid-kv-cache-manager") {
                    self.notes.add(
                        "component.window",
                        "assumed: the hybrid KV cache manager is on; vLLM turns it off for KV connectors that do not \
                         support it (see its log), and then these layers belong to kv",
                    );
                }
                true
            }
            Framework::Sglang => {
                let frees = self.config.model_type() == "gpt_oss"
                    && !self.given.switch("--disable-hybrid-swa-memory");
                if !frees {
                    self.notes.add(
                        "component.kv",
                        "assumed: sliding-window layers are cached in full, in the one pool; see hybrid SWA memory in \
                         SGLang's log",
                    );
                }
                frees
            }
        }
    }

    /// The cache of a draft model, where it follows from this configuration.
    pub(super) fn draft(&mut self, layers: u32, cached: &[Cached]) -> Result<Option<Cached>, ConvertError> {
        let method = match self.framework {
            Framework::Vllm => match self.given.value("--speculative-config") {
                None => return Ok(None),
                Some(text) => {
                    let config: Option<serde_json::Value> = serde_json::from_str(text).ok();
                    let config = config.ok_or_else(|| argument("--speculative-config", "is no JSON"))?;
                    config
                        .get("method")
                        .and_then(|method| method.as_str())
                        .unwrap_or("draft")
                        .to_owned()
                }
            },
            Framework::Sglang => match self.given.value("--speculative-algorithm") {
                None => return Ok(None),
                Some(algorithm) => algorithm.to_ascii_lowercase(),
            },
        };
        if matches!(method.as_str(), "ngram" | "suffix" | "none") {
            return Ok(None);
        }
        // vLLM's eagle is always another model's checkpoint; SGLang's is the model's own layers until a path names one.
        let own = match self.framework {
            Framework::Vllm => matches!(method.as_str(), "mtp" | "deepseek_mtp"),
            Framework::Sglang => {
                matches!(method.as_str(), "nextn" | "eagle")
                    && self.given.value("--speculative-draft-model-path").is_none()
            }
        };
        let count = self.config.number("num_nextn_predict_layers")?.unwrap_or(0);
        let latent = cached.iter().find(|one| one.kind == Kind::Latent);
        let sparse = cached.iter().any(|one| one.kind == Kind::Indexer);
        match latent.filter(|_| own && !sparse && count > 0) {
            Some(latent) => {
                let mut draft = latent.clone();
                draft.name = "draft".to_owned();
                draft.layers = (layers..layers.saturating_add(count)).collect();
                self.notes.add(
                    "component.draft",
                    format!("assumed: the model's own {count} prediction layers draft, on the last stage"),
                );
                Ok(Some(draft))
            }
            None => {
                self.notes.add(
                    "component.draft",
                    format!(
                        "speculative decoding ({method}) is on, and what its draft model caches is not known: add it \
                         as component draft, on both sides"
                    ),
                );
                Ok(None)
            }
        }
    }

    /// Page groups. vLLM's hybrid allocator makes groups of equal numbers of layers that draw from one pool
    /// (vllm/v1/core/kv_cache_utils.py); SGLang keeps a pool for each kind.
    pub(super) fn group(&mut self, cached: Vec<Cached>) -> (Vec<Cached>, bool) {
        let mut sizes: Vec<(Kind, usize)> = Vec::new();
        for one in &cached {
            let class = class(one.kind);
            if !sizes.iter().any(|(kind, _)| *kind == class) {
                sizes.push((class, one.layers.len()));
            }
        }
        if self.framework == Framework::Sglang || sizes.len() < 2 {
            return (cached, false);
        }
        let least = sizes.iter().map(|(_, len)| *len).min().unwrap_or(1).max(1);
        let most = sizes.iter().map(|(_, len)| *len).max().unwrap_or(1);
        let size = if most * 4 < least * 5 { most } else { least };
        let mut grouped = Vec::new();
        for one in cached {
            let groups = one.layers.len().div_ceil(size);
            for group in 0..groups {
                let mut piece = one.clone();
                piece.layers = one.layers.iter().copied().skip(group).step_by(groups).collect();
                if groups > 1 {
                    piece.name = format!("{}-{group}", one.name);
                    piece.group = format!("{}-{group}", one.group);
                }
                grouped.push(piece);
            }
        }
        self.notes.add(
            "page_group",
            format!("assumed: vLLM's hybrid allocator, in groups of {size} layers that share one pool"),
        );
        if sizes.iter().any(|(kind, _)| *kind == Kind::State) {
            self.notes.add(
                "page_group.pages.page_size",
                "vLLM raises the block size until a page of attention is as long as a state; see its log, and state \
                 that as --block-size",
            );
        }
        (grouped, true)
    }
}

/// Kinds that one group of layers holds together.
fn class(kind: Kind) -> Kind {
    match kind {
        Kind::Window | Kind::State => kind,
        Kind::Kv | Kind::Latent | Kind::Indexer | Kind::Scales => Kind::Kv,
    }
}
