//! Configurations of models that are known.

use serde_json::{Value, json};

pub(crate) fn llama_8b() -> Value {
    json!({
        "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
        "num_key_value_heads": 8, "torch_dtype": "bfloat16", "rope_theta": 500000.0, "transformers_version": "4.43.0"
    })
}

pub(crate) fn deepseek_v3() -> Value {
    json!({
        "model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128,
        "num_key_value_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "num_nextn_predict_layers": 1, "torch_dtype": "bfloat16"
    })
}

pub(crate) fn gpt_oss() -> Value {
    let kinds: Vec<&str> = (0..24)
        .map(|layer| {
            if layer % 2 == 0 {
                "sliding_attention"
            } else {
                "full_attention"
            }
        })
        .collect();
    json!({
        "model_type": "gpt_oss", "num_hidden_layers": 24, "hidden_size": 2880, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128, "layer_types": kinds, "torch_dtype": "bfloat16"
    })
}

pub(crate) fn qwen3_next() -> Value {
    json!({
        "model_type": "qwen3_next", "num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 16,
        "num_key_value_heads": 2, "head_dim": 256, "full_attention_interval": 4, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4, "dtype": "bfloat16"
    })
}
