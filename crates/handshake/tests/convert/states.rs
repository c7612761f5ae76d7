//! Recurrent layers.

use kvferry_handshake::Element;
use kvferry_handshake::Framework::{Sglang, Vllm};
use serde_json::json;

use crate::models::qwen3_next;
use crate::{component, converted, noted, parts, refused};

#[test]
fn recurrent_layers_keep_states() {
    let sglang = converted(&qwen3_next(), Sglang, "--model-path q --tp 2");
    assert_eq!(component(&sglang, "kv").layers.len(), 12);
    assert_eq!(
        parts(component(&sglang, "conv_state")),
        [("q", 16, 384), ("k", 16, 384), ("v", 32, 384)]
    );
    assert_eq!(
        parts(component(&sglang, "recurrent_state")),
        [("state", 32, 16384)]
    );
    assert_eq!(component(&sglang, "recurrent_state").element, Element::Fp32);
    assert_eq!(component(&sglang, "conv_state").layers.len(), 36);

    let vllm = converted(
        &qwen3_next(),
        Vllm,
        "--model q -tp 2 --mamba-ssm-cache-dtype float32",
    );
    assert_eq!(
        vllm.envelope.components.len(),
        7,
        "kv, and three groups of two states"
    );
    let conv = component(&vllm, "conv_state-0");
    assert_eq!(conv.parts.len(), 9);
    assert_eq!(
        parts(conv)[..4],
        [
            ("q.0", 16, 128),
            ("k.0", 16, 128),
            ("v.0", 32, 128),
            ("q.1", 16, 128)
        ]
    );
    assert!(noted(&vllm, "block size"));

    let nemotron = json!({
        "model_type": "nemotron_h", "num_hidden_layers": 8, "hidden_size": 4096, "num_attention_heads": 32,
        "num_key_value_heads": 8, "attention_head_dim": 128, "hybrid_override_pattern": "M-M-M*-E",
        "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4,
        "torch_dtype": "bfloat16"
    });
    let found = converted(&nemotron, Sglang, "--model-path n --tp 4");
    assert_eq!(component(&found, "kv").layers, [5]);
    assert_eq!(component(&found, "conv_state").layers, [0, 2, 4]);
    assert_eq!(
        parts(component(&found, "conv_state")),
        [("x", 128, 192), ("b", 8, 384), ("c", 8, 384)]
    );
    assert_eq!(
        parts(component(&found, "recurrent_state")),
        [("state", 128, 8192)]
    );

    let bamba = json!({
        "model_type": "bamba", "num_hidden_layers": 4, "hidden_size": 4096, "num_attention_heads": 32,
        "num_key_value_heads": 8, "attn_layer_indices": [2], "mamba_n_heads": 128, "mamba_d_head": "auto",
        "mamba_n_groups": 1, "mamba_d_state": 128, "mamba_d_conv": 4, "mamba_expand": 2, "torch_dtype": "bfloat16"
    });
    let found = converted(&bamba, Sglang, "--model-path b --tp 8");
    assert_eq!(component(&found, "conv_state").layers, [0, 1, 3]);
    assert_eq!(parts(component(&found, "conv_state"))[0], ("x", 128, 192));
    let mut stated = bamba.clone();
    stated["mamba_d_head"] = json!("64 or so");
    assert!(refused(&stated, Sglang, "--model-path b").contains("mamba_d_head"));
    let mut falcon = bamba;
    falcon["model_type"] = json!("falcon_h1");
    falcon["mamba_d_ssm"] = json!(4096);
    let found = converted(&falcon, Sglang, "--model-path f");
    assert_eq!(
        component(&found, "kv").layers,
        component(&found, "conv_state").layers
    );
    assert_eq!(parts(component(&found, "conv_state"))[0], ("x", 128, 96));
}
