//! What is not understood, not looked at, or unreadable.

use kvferry_handshake::Framework::{Sglang, Vllm};
use serde_json::{Value, json};

use crate::models::{llama_8b, qwen3_next};
use crate::{component, converted, noted, refused};

#[test]
fn what_is_not_understood_is_refused_by_name() {
    let with = |key: &str, value: Value| {
        let mut config = llama_8b();
        config[key] = value;
        config
    };
    for (key, value) in [
        ("num_kv_shared_layers", json!(10)),
        ("block_configs", json!([])),
        ("is_encoder_decoder", json!(true)),
        ("attention_chunk_size", json!(8192)),
        ("kv_lora_rank", json!(256)),
        ("num_hidden_layers", json!("32")),
        ("num_hidden_layers", json!(0)),
        ("num_hidden_layers", json!(5000)),
        ("num_key_value_heads", json!([8, 4])),
        ("num_key_value_heads", json!(0)),
    ] {
        let error = refused(&with(key, value), Vllm, "--model m");
        assert!(error.contains(key), "{error}");
    }
    assert!(
        converted(&with("num_kv_shared_layers", json!(0)), Vllm, "--model m")
            .envelope
            .component("kv")
            .is_some()
    );
    let mut without = llama_8b();
    without.as_object_mut().unwrap().remove("num_attention_heads");
    assert!(refused(&without, Vllm, "--model m").contains("num_attention_heads"));
    assert!(refused(&json!({}), Vllm, "--model m").contains("model_type"));
    assert!(refused(&json!([]), Vllm, "--model m").contains("object"));

    for (command, word) in [
        ("", "--model"),
        ("--model m --block-size 0", "--block-size"),
        ("--model m --block-size", "--block-size"),
        ("--model m -tp x", "--tensor-parallel-size"),
        ("--model m -tp 3", "3 ranks"),
        (
            "--model m -tp 8 -dcp 2",
            "here TP is 8 and there are 8 KV heads. Leave it out, or set --tensor-parallel-size to 16",
        ),
        (
            "--model m -tp 16 -dcp 4",
            "here TP is 16 and there are 8 KV heads",
        ),
        ("--model m -dcp 2", "--decode-context-parallel-size"),
        ("--model m --hf-overrides {}", "--hf-overrides"),
        ("VLLM_KV_CACHE_LAYOUT=HNN --model m", "VLLM_KV_CACHE_LAYOUT"),
        ("VLLM_MLA_DISABLE=1 --model m", "VLLM_MLA_DISABLE"),
        ("--model m --speculative-config x", "--speculative-config"),
        (
            "--model m --kv-cache-dtype fp9",
            "\"fp9\" is no element type; known: auto, fp32",
        ),
        ("--model m --kv-cache-dtype int8", "scales of int8"),
        ("--model m --kv-cache-dtype fp8_ds_mla", "scales of fp8_ds_mla"),
        ("--model m -tp 1024 -pp 32", "ranks"),
    ] {
        let error = refused(&llama_8b(), Vllm, command);
        assert!(error.contains(word), "{command}: {error}");
    }
}

#[test]
fn what_is_not_looked_at_is_listed() {
    let command = "VLLM_USE_V1=1 NCCL_P2P_DISABLE=1 SGLANG_PP_LAYER_PARTITION=16,16 python -m vllm.server --model m -q x \
                   --seed 3";
    let found = converted(&llama_8b(), Vllm, command);
    let listed = "not looked at: VLLM_USE_V1 NCCL_P2P_DISABLE SGLANG_PP_LAYER_PARTITION -q --seed";
    assert!(noted(&found, listed), "{:?}", found.notes);
    // The backend, as a variable and as a flag, is looked at.
    let flag = converted(&llama_8b(), Vllm, "--model m --attention-backend FLASHINFER");
    let variable = converted(&llama_8b(), Vllm, "VLLM_ATTENTION_BACKEND=FLASHINFER --model m");
    assert_eq!(variable.arrangement, flag.arrangement);
    assert_ne!(
        variable.arrangement,
        converted(&llama_8b(), Vllm, "--model m").arrangement
    );
    assert!(!noted(&variable, "not looked at"));
}

/// A value that cannot be read is no reason to take a default in its place.
#[test]
fn unreadable_settings_are_refused_with_key_and_value() {
    let with = |base: Value, key: &str, value: Value| {
        let mut config = base;
        config[key] = value;
        config
    };
    let config = with(qwen3_next(), "mamba_ssm_dtype", json!("float23"));
    for framework in [Vllm, Sglang] {
        let error = refused(&config, framework, "--model m");
        assert!(
            error.contains("mamba_ssm_dtype") && error.contains("float23"),
            "{error}"
        );
    }
    for name in ["SGLANG_MAMBA_CONV_DTYPE", "SGLANG_MAMBA_SSM_DTYPE"] {
        let error = refused(&qwen3_next(), Sglang, &format!("{name}=float23 --model m"));
        assert!(error.contains(name) && error.contains("float23"), "{error}");
        let found = converted(&qwen3_next(), Sglang, &format!("{name}=float16 --model m"));
        assert!(noted(&found, "fp16"), "{:?}", found.notes);
    }
    let error = refused(
        &with(qwen3_next(), "linear_conv_kernel_dim", json!(40)),
        Vllm,
        "--model m",
    );
    assert!(
        error.contains("linear_conv_kernel_dim") && error.contains("40"),
        "{error}"
    );

    let mut qwen = llama_8b();
    qwen["model_type"] = json!("qwen2");
    qwen["sliding_window"] = json!(4096);
    qwen["use_sliding_window"] = json!(true);
    assert!(refused(&qwen, Vllm, "--model m").contains("max_window_layers"));
    qwen["max_window_layers"] = json!(16);
    assert_eq!(
        component(&converted(&qwen, Vllm, "--model m"), "kv").layers.len(),
        16
    );
}
