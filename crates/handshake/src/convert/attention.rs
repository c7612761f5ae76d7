//! What attention layers cache: keys and values, sliding windows, MLA latents and indexer keys.

use super::config::{Config, wrong};
use super::{ConvertError, Framework, Notes};
use crate::element::Element;
use crate::envelope::{Kind, Scales};
use crate::shape::Cached;

/// Models of plain attention: keys and values per head on every layer, some of them with a sliding window.
const PLAIN: &[&str] = &[
    "cohere",
    "cohere2",
    "ernie4_5",
    "ernie4_5_moe",
    "exaone4",
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3_text",
    "glm4",
    "glm4_moe",
    "gpt_oss",
    "granite",
    "granitemoe",
    "llama",
    "minimax_m2",
    "mistral",
    "mistral3",
    "mixtral",
    "olmo2",
    "olmo3",
    "phi3",
    "phimoe",
    "qwen2",
    "qwen2_5_vl",
    "qwen2_moe",
    "qwen2_vl",
    "qwen3",
    "qwen3_moe",
    "qwen3_vl",
    "qwen3_vl_moe",
    "seed_oss",
    "smollm3",
    "starcoder2",
];

/// Models with multi-head latent attention (MLA).
const LATENT: &[&str] = &[
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "kimi_k2",
    "kimi_k25",
];

/// Keys of features whose caches the converter does not know, with what they mean. A value of 0 or false is none.
const NOT_UNDERSTOOD: &[(&str, &str)] = &[
    ("attention_chunk_size", "chunked attention"),
    ("block_configs", "layers of unequal shape"),
    ("compress_ratios", "compressed attention"),
    ("cross_attention_layers", "cross attention"),
    ("global_head_dim", "layers of unequal head_dim"),
    ("is_encoder_decoder", "an encoder's keys and values"),
    ("num_global_key_value_heads", "layers of unequal numbers of heads"),
    (
        "num_kv_shared_layers",
        "layers that share another layer's keys and values",
    ),
    ("swa_head_dim", "layers of unequal head_dim"),
    ("swa_num_key_value_heads", "layers of unequal numbers of heads"),
];

/// What a Gemma 3 configuration may leave out, with the defaults of its class: transformers,
/// models/gemma3/configuration_gemma3.py. Published files do.
const CLASS_DEFAULTS: &[(&str, u32)] = &[
    ("head_dim", 256),
    ("num_attention_heads", 8),
    ("num_key_value_heads", 4),
];

/// The windows that models have which leave theirs out, with the defaults of their classes: transformers,
/// models/*/configuration_*.py.
const CLASS_WINDOWS: &[(&str, u32)] = &[
    ("cohere2", 4096),
    ("gemma2", 4096),
    ("gemma3", 4096),
    ("gemma3_text", 4096),
    ("gpt_oss", 128),
];

/// Beginnings of keys of recurrent state.
const RECURRENT: &[&str] = &["attn_layer_", "linear_num_", "mamba_", "ssm_"];

/// The model types that are known here, plain or with latents.
pub(super) fn known() -> impl Iterator<Item = &'static str> {
    PLAIN.iter().chain(LATENT).copied()
}

pub(super) fn is_plain(config: &Config) -> bool {
    PLAIN.contains(&config.model_type())
}

pub(super) fn is_latent(config: &Config) -> bool {
    LATENT.contains(&config.model_type())
}

/// Refuses what the converter would get wrong without knowing it.
pub(super) fn refuse_unknown_features(config: &Config) -> Result<(), ConvertError> {
    for (key, why) in NOT_UNDERSTOOD {
        let none = config
            .get(key)
            .is_none_or(|value| value.as_u64() == Some(0) || value.as_bool() == Some(false));
        if !none {
            return Err(config.feature(key, why));
        }
    }
    if (is_plain(config) || is_latent(config))
        && let Some(key) = config.key_beginning(RECURRENT)
    {
        return Err(config.feature(
            key,
            "recurrent state, in a model type that is not known to keep one",
        ));
    }
    if !is_latent(config) && config.get("kv_lora_rank").is_some() {
        return Err(config.feature(
            "kv_lora_rank",
            "a latent, in a model that is not known to cache one",
        ));
    }
    Ok(())
}

/// Heads and widths of keys and values.
pub(super) struct Heads {
    heads: u32,
    k: u32,
    v: u32,
}

impl Heads {
    pub(super) fn of(config: &Config, notes: &mut Notes) -> Result<Heads, ConvertError> {
        let usual = |key: &str| {
            CLASS_DEFAULTS
                .iter()
                .find(|(name, _)| *name == key)
                .map(|(_, value)| *value)
        };
        let gemma3 = matches!(config.model_type(), "gemma3" | "gemma3_text");
        let mut class_default = |key: &str| {
            let value = usual(key).filter(|_| gemma3 && config.get(key).is_none())?;
            notes.add(
                "component.kv.parts",
                format!(
                    "{key} is not given; assumed: {value}, the default of transformers' Gemma3TextConfig"
                ),
            );
            Some(value)
        };
        let attention = match class_default("num_attention_heads") {
            Some(heads) => heads,
            None => config.count("num_attention_heads", "gives the number of heads")?,
        };
        let of_class = [class_default("num_key_value_heads"), class_default("head_dim")];
        let heads = match config.number("num_key_value_heads")?.or(of_class[0]) {
            Some(0) => return Err(wrong("num_key_value_heads", &0.into(), "at least 1")),
            Some(heads) if heads > attention => {
                let expected = format!("at most num_attention_heads, {attention}");
                return Err(wrong("num_key_value_heads", &heads.into(), expected));
            }
            Some(heads) => heads,
            None => {
                notes.add(
                    "component.kv.parts",
                    "num_key_value_heads is not given; as many as num_attention_heads",
                );
                attention
            }
        };
        let k = match config
            .number("head_dim")?
            .or(config.number("attention_head_dim")?)
            .or(of_class[1])
        {
            Some(width) => width,
            None => {
                let hidden = config.count("hidden_size", "gives head_dim, which is not given")?;
                if hidden % attention != 0 {
                    let expected = "a multiple of num_attention_heads, since head_dim is not given";
                    return Err(wrong("hidden_size", &hidden.into(), expected));
                }
                let width = hidden / attention;
                notes.add(
                    "component.kv.parts",
                    format!("head_dim is not given; assumed: hidden_size / num_attention_heads, {width}"),
                );
                width
            }
        };
        let v = config.number("v_head_dim")?.unwrap_or(k);
        Ok(Heads { heads, k, v })
    }

    pub(super) fn cached(&self, name: &str, kind: Kind, layers: Vec<u32>) -> Cached {
        Cached::new(
            name,
            kind,
            layers,
            &[("k", self.heads, self.k), ("v", self.heads, self.v)],
        )
    }
}

/// Which layers attend to a window only, and its length.
pub(super) struct Windows {
    pub(super) layers: Vec<u32>,
    pub(super) window: u32,
}

/// The sliding-window layers of a plain model, by the rules of its family in `transformers`.
pub(super) fn windows(config: &Config, layers: u32, notes: &mut Notes) -> Result<Windows, ConvertError> {
    let none = Windows {
        layers: Vec::new(),
        window: 0,
    };
    let class = CLASS_WINDOWS
        .iter()
        .find(|(name, _)| *name == config.model_type());
    let window = match (config.number("sliding_window")?, class) {
        (Some(window), _) => window,
        // Null says that there is none; a key that is left out does not.
        (None, Some((name, window))) if !config.states("sliding_window") => {
            notes.add(
                "component.window.window",
                format!("sliding_window is not given; assumed: {window}, the default of transformers' class for {name}"),
            );
            *window
        }
        (None, _) => 0,
    };
    if let Some(types) = config.per_layer("layer_types", layers)? {
        let mut sliding = Vec::new();
        for (layer, name) in (0u32..).zip(&types) {
            match name.as_str() {
                "full_attention" | "attention" => {}
                "sliding_attention" => sliding.push(layer),
                _ => return Err(config.feature("layer_types", "a kind of layer that is not known here")),
            }
        }
        if !sliding.is_empty() && window == 0 {
            return Err(ConvertError::Missing {
                key: "sliding_window".to_owned(),
                wanted: "layer_types makes necessary",
            });
        }
        return Ok(Windows {
            layers: sliding,
            window,
        });
    }
    if window == 0 || config.flag("use_sliding_window")? == Some(false) {
        return Ok(none);
    }
    let every = |is_full: &dyn Fn(u32) -> bool| (0..layers).filter(|layer| !is_full(*layer)).collect();
    let sliding = match config.model_type() {
        "mistral" | "mistral3" | "mixtral" | "phi3" | "phimoe" | "starcoder2" => (0..layers).collect(),
        "gemma2" | "gpt_oss" => every(&|layer| layer % 2 == 1),
        "gemma3" | "gemma3_text" | "cohere2" => {
            let usual = if config.model_type() == "cohere2" { 4 } else { 6 };
            let pattern = match config.number("sliding_window_pattern")? {
                Some(0) => return Err(wrong("sliding_window_pattern", &0.into(), "at least 1")),
                Some(pattern) => pattern,
                None => {
                    notes.add(
                        "component.window.layers",
                        format!(
                            "sliding_window_pattern is not given; assumed: every layer but each {usual}th"
                        ),
                    );
                    usual
                }
            };
            every(&|layer| (layer + 1) % pattern == 0)
        }
        "qwen2" | "qwen2_moe" | "qwen2_vl" | "qwen2_5_vl" | "qwen3" | "qwen3_moe" => {
            if config.flag("use_sliding_window")? != Some(true) {
                return Ok(none);
            }
            let full = config
                .number("max_window_layers")?
                .ok_or_else(|| ConvertError::Missing {
                    key: "max_window_layers".to_owned(),
                    wanted: "says from which layer on use_sliding_window holds",
                })?;
            every(&|layer| layer < full)
        }
        _ => {
            return Err(config.feature(
                "sliding_window",
                "a window, and no layer_types that say which layers have it",
            ));
        }
    };
    Ok(Windows {
        layers: sliding,
        window,
    })
}

/// An MLA latent, and the indexer's keys where the model has them. `element` is the KV cache dtype.
pub(super) fn latents(
    config: &Config,
    framework: Framework,
    layers: u32,
    element: Element,
    notes: &mut Notes,
) -> Result<Vec<Cached>, ConvertError> {
    let rank = config.count("kv_lora_rank", "gives the latent's width")?;
    let rope = config.count("qk_rope_head_dim", "gives the latent's width")?;
    let sparse = config.number("index_head_dim")?.filter(|width| *width > 0);
    let width = rank.saturating_add(rope);
    let mut latent = Cached::new("latent", Kind::Latent, 0..layers, &[("latent", 1, width)]);
    let Some(index) = sparse else {
        return Ok(vec![latent]);
    };
    if element.bits() == 8 {
        // Both frameworks: quantised elements, one fp32 scale for 128 of them, and the RoPE part in bf16.
        let bytes = rank
            .saturating_add(rank.div_ceil(128).saturating_mul(4))
            .saturating_add(rope.saturating_mul(2));
        latent.parts[0].width = bytes;
        latent = latent.element(Element::Uint8);
        latent.scales = Scales::Inline;
        notes.add(
            "component.latent",
            format!("sparse attention with an fp8 cache keeps rows of {bytes} bytes, their scales inside"),
        );
    }
    let parts = [
        ("key", 1, index),
        ("scale", 1, index.div_ceil(128).saturating_mul(4)),
    ];
    let mut indexer = Cached::new("indexer", Kind::Indexer, 0..layers, &parts).element(Element::Uint8);
    indexer.scales = Scales::Inline;
    let who = match framework {
        Framework::Vllm => "vLLM",
        Framework::Sglang => "SGLang",
    };
    notes.add(
        "component.indexer",
        format!("{who} keeps its keys as fp8 with an fp32 scale for 128 of them; releases may differ"),
    );
    Ok(vec![latent, indexer])
}
