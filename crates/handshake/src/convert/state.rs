//! What recurrent layers keep: the last inputs of a convolution, and the state itself.

use super::config::{Config, wrong};
use super::{ConvertError, Framework};
use crate::element::Element;
use crate::envelope::Kind;
use crate::shape::Cached;

/// Which layers are of which kind.
pub(super) struct HybridLayers {
    pub(super) attention: Vec<u32>,
    pub(super) state: Vec<u32>,
}

/// The recurrent part of a hybrid model.
pub(super) struct Recurrent {
    pub(super) layers: HybridLayers,
    /// Channels that the convolution sees, by separately sharded sub-range: name, heads, channels a head.
    channels: Vec<(&'static str, u32, u32)>,
    /// Inputs that the convolution remembers.
    taps: u32,
    /// The state: heads, elements a head.
    state: (u32, u32),
}

/// Models with recurrent layers.
const HYBRID: &[&str] = &[
    "bamba",
    "falcon_h1",
    "granitemoehybrid",
    "nemotron_h",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
];

/// The model types that are known here.
pub(super) fn known() -> impl Iterator<Item = &'static str> {
    HYBRID.iter().copied()
}

pub(super) fn is_hybrid(config: &Config) -> bool {
    HYBRID.contains(&config.model_type())
}

/// Most inputs that a convolution remembers.
const MAX_TAPS: u32 = 16;

const GIVES: &str = "gives the shape of the recurrent state";

impl Recurrent {
    pub(super) fn of(config: &Config, layers: u32) -> Result<Recurrent, ConvertError> {
        match config.model_type() {
            "nemotron_h" => {
                let sizes = [
                    config.count("mamba_num_heads", GIVES)?,
                    config.count("mamba_head_dim", GIVES)?,
                    config.count("n_groups", GIVES)?,
                    config.count("ssm_state_size", GIVES)?,
                    taps(config, "conv_kernel")?,
                ];
                mamba2(pattern(config, layers)?, sizes)
            }
            "bamba" | "granitemoehybrid" | "falcon_h1" => {
                let sizes = [
                    config.count("mamba_n_heads", GIVES)?,
                    mamba_head_dim(config)?,
                    config.count("mamba_n_groups", GIVES)?,
                    config.count("mamba_d_state", GIVES)?,
                    taps(config, "mamba_d_conv")?,
                ];
                mamba2(mamba_layers(config, layers)?, sizes)
            }
            _ => gated_delta_net(config, layers),
        }
    }

    /// The components. vLLM keeps the convolution's inputs tap by tap, SGLang channel by channel.
    pub(super) fn cached(&self, framework: Framework, conv: Element, state: Element) -> Vec<Cached> {
        let layers = || self.layers.state.iter().copied();
        let mut parts: Vec<(String, u32, u32)> = Vec::new();
        match framework {
            Framework::Vllm => {
                for tap in 0..self.taps {
                    parts.extend(
                        self.channels
                            .iter()
                            .map(|(name, heads, width)| (format!("{name}.{tap}"), *heads, *width)),
                    );
                }
            }
            Framework::Sglang => {
                parts.extend(self.channels.iter().map(|(name, heads, width)| {
                    ((*name).to_owned(), *heads, width.saturating_mul(self.taps))
                }))
            }
        }
        let parts: Vec<(&str, u32, u32)> = parts
            .iter()
            .map(|(name, heads, width)| (name.as_str(), *heads, *width))
            .collect();
        let (heads, width) = self.state;
        vec![
            Cached::new("conv_state", Kind::State, layers(), &parts).element(conv),
            Cached::new(
                "recurrent_state",
                Kind::State,
                layers(),
                &[("state", heads, width)],
            )
            .element(state),
        ]
    }
}

/// The inputs that a convolution remembers: all of its kernel but the newest.
fn taps(config: &Config, key: &str) -> Result<u32, ConvertError> {
    let kernel = config.count(key, GIVES)?;
    let taps = kernel - 1;
    if !(1..=MAX_TAPS).contains(&taps) {
        let expected = format!("2 to {} inputs of the convolution", MAX_TAPS + 1);
        return Err(wrong(key, &kernel.into(), expected));
    }
    Ok(taps)
}

/// Mamba 2, from [heads, width of a head, groups, state size, taps of the convolution].
fn mamba2(layers: HybridLayers, sizes: [u32; 5]) -> Result<Recurrent, ConvertError> {
    let [heads, head, groups, state, taps] = sizes;
    Ok(Recurrent {
        layers,
        channels: vec![("x", heads, head), ("b", groups, state), ("c", groups, state)],
        taps,
        state: (heads, head.saturating_mul(state)),
    })
}

/// The width of a Mamba head, which some configurations leave to be computed.
fn mamba_head_dim(config: &Config) -> Result<u32, ConvertError> {
    let stated = config
        .get("mamba_d_head")
        .filter(|value| value.as_str() != Some("auto"));
    if stated.is_some() {
        return config.count("mamba_d_head", GIVES);
    }
    let heads = config.count("mamba_n_heads", GIVES)?;
    let channels = match config.number("mamba_d_ssm")? {
        Some(channels) => channels,
        None => config
            .count("mamba_expand", GIVES)?
            .saturating_mul(config.count("hidden_size", GIVES)?),
    };
    if channels == 0 || channels % heads != 0 {
        return Err(wrong(
            "mamba_n_heads",
            &heads.into(),
            "a divisor of the number of channels",
        ));
    }
    Ok(channels / heads)
}

/// `hybrid_override_pattern`: M is Mamba, * attention, - and E keep nothing.
fn pattern(config: &Config, layers: u32) -> Result<HybridLayers, ConvertError> {
    let key = "hybrid_override_pattern";
    let pattern = config.text(key)?.ok_or(ConvertError::Missing {
        key: key.to_owned(),
        wanted: "says which layers are of which kind",
    })?;
    let mut found = HybridLayers {
        attention: Vec::new(),
        state: Vec::new(),
    };
    for (layer, kind) in (0u32..).zip(pattern.chars()) {
        match kind {
            'M' => found.state.push(layer),
            '*' => found.attention.push(layer),
            '-' | 'E' => {}
            _ => return Err(config.feature(key, "a kind of layer that is not known here")),
        }
    }
    if pattern.chars().count() != layers as usize {
        return Err(config.feature(key, "not one letter for each of num_hidden_layers"));
    }
    Ok(found)
}

fn mamba_layers(config: &Config, layers: u32) -> Result<HybridLayers, ConvertError> {
    if config.model_type() == "falcon_h1" {
        // Every layer has both, side by side.
        return Ok(HybridLayers {
            attention: (0..layers).collect(),
            state: (0..layers).collect(),
        });
    }
    let types = config
        .per_layer("layer_types", layers)?
        .or(config.per_layer("layers_block_type", layers)?);
    if let Some(types) = types {
        return split(config, &types, "mamba");
    }
    let attention = config
        .layer_list("attn_layer_indices", layers)?
        .ok_or(ConvertError::Missing {
            key: "layer_types".to_owned(),
            wanted: "says which layers are of which kind",
        })?;
    let state = (0..layers).filter(|layer| !attention.contains(layer)).collect();
    let attention = (0..layers).filter(|layer| attention.contains(layer)).collect();
    Ok(HybridLayers { attention, state })
}

fn split(config: &Config, types: &[String], recurrent: &str) -> Result<HybridLayers, ConvertError> {
    let mut found = HybridLayers {
        attention: Vec::new(),
        state: Vec::new(),
    };
    for (layer, name) in (0u32..).zip(types) {
        match name.as_str() {
            "attention" | "full_attention" => found.attention.push(layer),
            name if name == recurrent => found.state.push(layer),
            _ => return Err(config.feature("layer_types", "a kind of layer that is not known here")),
        }
    }
    Ok(found)
}

/// Qwen3-Next and its successors.
fn gated_delta_net(config: &Config, layers: u32) -> Result<Recurrent, ConvertError> {
    let kinds = match config.per_layer("layer_types", layers)? {
        Some(types) => split(config, &types, "linear_attention")?,
        None => {
            let interval = config.number("full_attention_interval")?.unwrap_or(4);
            if interval == 0 {
                return Err(wrong("full_attention_interval", &0.into(), "at least 1"));
            }
            let full = |layer: &u32| (layer + 1).is_multiple_of(interval);
            HybridLayers {
                attention: (0..layers).filter(full).collect(),
                state: (0..layers).filter(|layer| !full(layer)).collect(),
            }
        }
    };
    let k_heads = config.count("linear_num_key_heads", GIVES)?;
    let v_heads = config.count("linear_num_value_heads", GIVES)?;
    let k = config.count("linear_key_head_dim", GIVES)?;
    let v = config.count("linear_value_head_dim", GIVES)?;
    let taps = taps(config, "linear_conv_kernel_dim")?;
    Ok(Recurrent {
        layers: kinds,
        channels: vec![("q", k_heads, k), ("k", k_heads, k), ("v", v_heads, v)],
        taps,
        state: (v_heads, k.saturating_mul(v)),
    })
}
