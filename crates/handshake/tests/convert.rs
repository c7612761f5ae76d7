//! The converter: what known models cache under known launches, what is noted, and what is refused by name.

#![allow(clippy::unwrap_used)] // a panic here is a failed test

use kvferry_handshake::{
    Code, Component, ConvertOptions, Converted, Dcp, Element, Envelope, Framework, Kind, Outcome, Policy,
    Role, Scales, compare, convert,
};
use proptest::prelude::*;
use serde_json::{Value, json};

use Framework::{Sglang, Vllm};

fn words(command: &str) -> Vec<String> {
    command.split_whitespace().map(str::to_owned).collect()
}

fn converted(config: &Value, framework: Framework, command: &str) -> Converted {
    let converted = convert(
        &config.to_string(),
        framework,
        &words(command),
        &ConvertOptions::default(),
    );
    let converted = converted.unwrap_or_else(|error| panic!("{command}: {error}"));
    assert_eq!(
        Envelope::from_toml(&converted.to_toml()).as_ref(),
        Ok(&converted.envelope),
        "{command}"
    );
    converted
}

fn refused(config: &Value, framework: Framework, command: &str) -> String {
    let converted = convert(
        &config.to_string(),
        framework,
        &words(command),
        &ConvertOptions::default(),
    );
    let error = converted.map(|_| ()).expect_err(command);
    assert_eq!(error.code(), Code::FileInvalid);
    error.to_string()
}

fn component<'a>(converted: &'a Converted, name: &str) -> &'a Component {
    let found = converted.envelope.component(name);
    found.unwrap_or_else(|| panic!("{name} is not there")).1
}

/// Parts as (name, heads, width).
fn parts(component: &Component) -> Vec<(&str, u32, u32)> {
    component
        .parts
        .iter()
        .map(|part| (part.name.as_str(), part.heads, part.width))
        .collect()
}

fn noted(converted: &Converted, words: &str) -> bool {
    converted
        .notes
        .iter()
        .any(|note| note.text.contains(words) || note.field.contains(words))
}

fn llama_8b() -> Value {
    json!({
        "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
        "num_key_value_heads": 8, "torch_dtype": "bfloat16", "rope_theta": 500000.0, "transformers_version": "4.43.0"
    })
}

fn deepseek_v3() -> Value {
    json!({
        "model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168, "num_attention_heads": 128,
        "num_key_value_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "num_nextn_predict_layers": 1, "torch_dtype": "bfloat16"
    })
}

fn gpt_oss() -> Value {
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

fn qwen3_next() -> Value {
    json!({
        "model_type": "qwen3_next", "num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 16,
        "num_key_value_heads": 2, "head_dim": 256, "full_attention_interval": 4, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4, "dtype": "bfloat16"
    })
}

#[test]
fn llama_is_alike_under_both_frameworks() {
    let vllm = converted(
        &llama_8b(),
        Vllm,
        "vllm serve meta-llama/Llama-3.1-8B --tensor-parallel-size=4 --block_size 16 --max-model-len 8192",
    );
    let kv = component(&vllm, "kv");
    assert_eq!(parts(kv), [("k", 8, 128), ("v", 8, 128)]);
    assert_eq!(kv.layers, (0..32).collect::<Vec<u32>>());
    assert_eq!(
        (kv.element, kv.scales.clone(), kv.dcp),
        (Element::Bf16, Scales::None, Dcp::NONE)
    );
    assert_eq!(vllm.envelope.page_groups[0].page_size, 16);
    assert_eq!(vllm.envelope.ranks.len(), 4);
    assert_eq!(vllm.envelope.identity.model, "meta-llama/Llama-3.1-8B");
    assert!(noted(
        &vllm,
        "--kv-cache-dtype is auto, which is the model's dtype: bf16"
    ));
    assert!(noted(&vllm, "--max-model-len"));
    assert!(vllm.to_toml().contains("# - page_group.pool_pages: not known"));

    let sglang = converted(
        &llama_8b(),
        Sglang,
        "python3 -m sglang.launch_server --model-path meta-llama/Llama-3.1-8B --tp 2 --page-size 16 \
         --disaggregation-mode decode",
    );
    assert_eq!(sglang.envelope.ranks.len(), 2);
    assert_eq!(sglang.envelope.identity.role, Role::Decode);
    assert_eq!(sglang.envelope.identity.engine, "decode");
    let verdict = compare(&vllm.envelope, &sglang.envelope, Policy::Strict);
    assert_eq!(verdict.outcome, Outcome::Compatible, "{verdict}");
}

#[test]
fn element_types_are_resolved_or_said_to_be_unknown() {
    let element = |config: &Value, framework, command: &str| {
        let converted = converted(config, framework, &format!("--model-path m --model m {command}"));
        let kv = component(&converted, "kv");
        (kv.element, kv.scales.clone())
    };
    let llama = llama_8b();
    assert_eq!(
        element(&llama, Vllm, "--kv-cache-dtype fp8"),
        (Element::Fp8E4m3, Scales::Model)
    );
    assert_eq!(
        element(&llama, Sglang, "--kv-cache-dtype fp8_e5m2"),
        (Element::Fp8E5m2, Scales::Model)
    );
    assert_eq!(
        element(&llama, Sglang, "--kv-cache-dtype bf16"),
        (Element::Bf16, Scales::None)
    );
    assert_eq!(
        element(&llama, Vllm, "--dtype half"),
        (Element::Fp16, Scales::None)
    );

    let mut fp32 = llama.clone();
    fp32["torch_dtype"] = json!("float32");
    assert_eq!(element(&fp32, Vllm, ""), (Element::Auto, Scales::None));
    assert_eq!(
        element(&fp32, Vllm, "--dtype bfloat16"),
        (Element::Bf16, Scales::None)
    );
    assert!(noted(&converted(&fp32, Vllm, "--model m"), "float32"));
    let mut quantised = llama.clone();
    quantised["quantization_config"] = json!({ "kv_cache_scheme": { "num_bits": 8 } });
    assert_eq!(element(&quantised, Vllm, ""), (Element::Auto, Scales::None));
    assert_eq!(
        element(&quantised, Vllm, "--kv-cache-dtype fp8_e4m3").0,
        Element::Fp8E4m3
    );

    for name in ["fp8_inc", "nvfp4", "fp4_e2m1", "fp9", "fp8_ds_mla"] {
        let error = refused(&llama, Vllm, &format!("--model m --kv-cache-dtype {name}"));
        assert!(
            error.contains("--kv-cache-dtype") && error.contains(name),
            "{error}"
        );
    }
    let error = refused(&llama, Vllm, "--model m --dtype bf17");
    assert!(error.contains("--dtype") && error.contains("bf17"), "{error}");
}

#[test]
fn head_dim_and_heads_have_defaults() {
    let mut config = llama_8b();
    config["head_dim"] = json!(80);
    config.as_object_mut().unwrap().remove("num_key_value_heads");
    let found = converted(&config, Vllm, "--model m");
    assert_eq!(parts(component(&found, "kv")), [("k", 32, 80), ("v", 32, 80)]);
    assert!(noted(&found, "num_key_value_heads"));

    config["head_dim"] = Value::Null;
    config["num_attention_heads"] = json!(33);
    assert!(refused(&config, Vllm, "--model m").contains("hidden_size"));

    let nested = json!({
        "model_type": "qwen2_5_vl", "torch_dtype": "bfloat16",
        "text_config": {
            "model_type": "qwen2", "num_hidden_layers": 2, "hidden_size": 512, "num_attention_heads": 4,
            "num_key_value_heads": 2
        }
    });
    let found = converted(&nested, Vllm, "--model m");
    assert_eq!(parts(component(&found, "kv")), [("k", 2, 128), ("v", 2, 128)]);
}

#[test]
fn sliding_windows_follow_each_familys_rule() {
    let windows = |config: Value, framework| -> Vec<u32> {
        let found = converted(&config, framework, "--model m --model-path m");
        let window = |c: &&Component| c.kind == Kind::Window;
        let mut layers: Vec<u32> = found
            .envelope
            .components
            .iter()
            .filter(window)
            .flat_map(|c| c.layers.clone())
            .collect();
        layers.sort_unstable();
        layers
    };
    let with = |model_type: &str, extra: Value| {
        let mut config = llama_8b();
        config["model_type"] = json!(model_type);
        config["num_hidden_layers"] = json!(12);
        config["sliding_window"] = json!(4096);
        config
            .as_object_mut()
            .unwrap()
            .extend(extra.as_object().unwrap().clone());
        config
    };
    assert_eq!(
        windows(with("mistral", json!({})), Vllm),
        (0..12).collect::<Vec<u32>>()
    );
    assert_eq!(
        windows(with("mistral", json!({ "sliding_window": null })), Vllm),
        [] as [u32; 0]
    );
    assert_eq!(
        windows(with("qwen2", json!({ "use_sliding_window": false })), Vllm),
        [] as [u32; 0]
    );
    let some = json!({ "use_sliding_window": true, "max_window_layers": 9 });
    assert_eq!(windows(with("qwen2", some), Vllm), [9, 10, 11]);
    assert_eq!(windows(with("gemma2", json!({})), Vllm), [0, 2, 4, 6, 8, 10]);
    assert_eq!(
        windows(with("gemma3_text", json!({})), Vllm),
        [0, 1, 2, 3, 4, 6, 7, 8, 9, 10]
    );
    assert_eq!(
        windows(with("cohere2", json!({})), Vllm),
        [0, 1, 2, 4, 5, 6, 8, 9, 10]
    );
    assert_eq!(windows(with("gemma2", json!({})), Sglang), [] as [u32; 0]);
    assert_eq!(windows(gpt_oss(), Sglang).len(), 12);
    let error = refused(&with("glm4", json!({})), Vllm, "--model m");
    assert!(
        error.contains("sliding_window") && error.contains("layer_types"),
        "{error}"
    );
    let chunked = with("qwen3", json!({ "layer_types": vec!["chunked_attention"; 12] }));
    assert!(refused(&chunked, Vllm, "--model m").contains("layer_types"));
}

#[test]
fn vllms_hybrid_groups_share_a_pool() {
    let found = converted(&gpt_oss(), Vllm, "vllm serve openai/gpt-oss-20b -tp 2");
    assert_eq!(component(&found, "window").window, Some(128));
    assert_eq!(
        component(&found, "kv").layers,
        (1..24).step_by(2).collect::<Vec<u32>>()
    );
    let pools: Vec<u16> = found
        .envelope
        .page_groups
        .iter()
        .map(|group| group.pool)
        .collect();
    assert_eq!(pools, [0, 0]);
    assert!(noted(&found, "hybrid"));
    assert_eq!(found.envelope.region_bytes(0).len(), 12);

    let off = converted(&gpt_oss(), Vllm, "vllm serve m --disable-hybrid-kv-cache-manager");
    assert_eq!(off.envelope.components.len(), 1);

    // 10 layers of full attention and 52 with a window: 1 and 6 groups.
    let mut gemma = llama_8b();
    gemma["model_type"] = json!("gemma3");
    gemma["num_hidden_layers"] = json!(62);
    gemma["sliding_window"] = json!(1024);
    let found = converted(&gemma, Vllm, "--model m");
    let names: Vec<&str> = found
        .envelope
        .components
        .iter()
        .map(|c| c.name.as_str())
        .collect();
    assert_eq!(
        names,
        [
            "kv", "window-0", "window-1", "window-2", "window-3", "window-4", "window-5"
        ]
    );
    assert_eq!(component(&found, "window-0").layers.len(), 9);
}

#[test]
fn latents_their_indexer_and_their_draft() {
    let plain = converted(&deepseek_v3(), Sglang, "--model-path d --tp 8 --page-size 64");
    assert_eq!(parts(component(&plain, "latent")), [("latent", 1, 576)]);
    let split = converted(
        &deepseek_v3(),
        Sglang,
        "--model-path d --tp 8 --page-size 64 --dcp-size 8",
    );
    assert_eq!(
        component(&split, "latent").dcp,
        Dcp {
            size: 8,
            interleave: 1
        }
    );
    let dcp_ranks: Vec<u32> = split.envelope.ranks.iter().map(|rank| rank.dcp_rank).collect();
    assert_eq!(dcp_ranks, [0, 1, 2, 3, 4, 5, 6, 7]);
    assert!(compare(&plain.envelope, &split.envelope, Policy::Strict).allows());

    let draft = converted(
        &deepseek_v3(),
        Vllm,
        r#"--model d --speculative-config {"method":"mtp"}"#,
    );
    assert_eq!(component(&draft, "draft").layers, [61]);
    let other = converted(
        &deepseek_v3(),
        Vllm,
        r#"--model d --speculative-config {"model":"x"}"#,
    );
    assert!(other.envelope.component("draft").is_none() && noted(&other, "component.draft"));

    let mut sparse = deepseek_v3();
    sparse["model_type"] = json!("deepseek_v32");
    sparse["index_head_dim"] = json!(128);
    sparse["index_topk"] = json!(2048);
    let bf16 = converted(&sparse, Vllm, "--model d");
    assert_eq!(
        parts(component(&bf16, "indexer")),
        [("key", 1, 128), ("scale", 1, 4)]
    );
    assert_eq!(component(&bf16, "latent").element, Element::Bf16);
    let fp8 = converted(&sparse, Vllm, "--model d --kv-cache-dtype fp8_ds_mla");
    assert_eq!(parts(component(&fp8, "latent")), [("latent", 1, 656)]);
    assert_eq!(component(&fp8, "latent").scales, Scales::Inline);
}

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

#[test]
fn pipeline_stages_are_split_as_each_framework_does() {
    let stages = |framework, command: &str| converted(&deepseek_v3(), framework, command).arrangement.stages;
    assert_eq!(stages(Vllm, "--model d -pp 4"), [15, 15, 16, 15]);
    assert_eq!(stages(Vllm, "--model d --pipeline-parallel-size 3"), [20, 21, 20]);
    assert_eq!(stages(Vllm, "--model d -pp 8"), [7, 7, 8, 8, 8, 8, 8, 7]);
    assert_eq!(stages(Sglang, "--model-path d --pp-size 4"), [15, 15, 15, 16]);
    assert_eq!(
        stages(Sglang, "SGLANG_PP_LAYER_PARTITION=30,31 --model-path d --pp 2"),
        [30, 31]
    );
    assert!(
        refused(
            &deepseek_v3(),
            Vllm,
            "VLLM_PP_LAYER_PARTITION=30,30 --model d -pp 2"
        )
        .contains("60 layers")
    );
    assert!(
        refused(&deepseek_v3(), Vllm, "VLLM_PP_LAYER_PARTITION=61 --model d -pp 2").contains("PARTITION")
    );
    assert!(refused(&deepseek_v3(), Vllm, "--model d -pp 62").contains("62 stages"));
}

#[test]
fn replicas_are_engines_and_context_parallel_ranks_hold_the_same() {
    let dp = converted(
        &deepseek_v3(),
        Sglang,
        "--model-path d --tp 16 --dp 8 --enable-dp-attention",
    );
    assert_eq!(dp.envelope.ranks.len(), 2);
    assert!(noted(&dp, "replica"));
    let cp = converted(&deepseek_v3(), Sglang, "--model-path d --tp 8 --attn-cp-size 4");
    assert_eq!(
        (cp.arrangement.tp, cp.arrangement.cp, cp.envelope.ranks.len()),
        (2, 4, 8)
    );
    assert_eq!(cp.envelope.identity.prefill_context_parallel, 4);
    let cp = converted(
        &deepseek_v3(),
        Vllm,
        "--model d -tp 2 --prefill-context-parallel-size 2",
    );
    assert_eq!(cp.envelope.ranks.len(), 4);
    let error = refused(&deepseek_v3(), Sglang, "--model-path d --tp 8 --attn-cp-size 3");
    assert!(error.contains("--tp-size"), "{error}");
}

#[test]
fn options_fill_in_what_nobody_says() {
    let options = ConvertOptions {
        engine: Some("p0".to_owned()),
        role: Some(Role::Prefill),
        framework_version: Some("0.11.0".to_owned()),
        pool_pages: Some(77),
        model_type: Some("llama".to_owned()),
    };
    let mut config = llama_8b();
    config["model_type"] = json!("of_tomorrow");
    let found = convert(
        &config.to_string(),
        Vllm,
        &words("--model m --revision r --block-size 16"),
        &options,
    )
    .unwrap();
    let identity = &found.envelope.identity;
    assert_eq!((identity.engine.as_str(), identity.role), ("p0", Role::Prefill));
    assert_eq!(
        (identity.framework_version.as_str(), identity.revision.as_deref()),
        ("0.11.0", Some("r"))
    );
    assert_eq!(found.envelope.page_groups[0].pool_pages, 77);
    assert!(!noted(&found, "pool_pages") && !noted(&found, "framework_version"));

    let error = refused(&config, Vllm, "--model m");
    assert!(
        error.contains("of_tomorrow") && error.contains("docs/envelope.md"),
        "{error}"
    );
    let role = r#"--model m --kv-transfer-config {"kv_role":"kv_producer"}"#;
    assert_eq!(
        converted(&llama_8b(), Vllm, role).envelope.identity.role,
        Role::Prefill
    );
}

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

#[test]
fn only_a_models_own_layers_draft_by_its_configuration() {
    let own = |framework, command: &str| {
        let found = converted(&deepseek_v3(), framework, command);
        assert!(noted(&found, "component.draft"), "{command}");
        found.envelope.component("draft").is_some()
    };
    let vllm = |method: &str| {
        let command = format!("--model m --speculative-config {{\"method\":\"{method}\"}}");
        own(Vllm, &command)
    };
    assert!(vllm("mtp") && vllm("deepseek_mtp"));
    assert!(!vllm("eagle") && !vllm("nextn"));
    assert!(own(Sglang, "--model m --speculative-algorithm EAGLE"));
    assert!(own(Sglang, "--model m --speculative-algorithm NEXTN"));
    assert!(!own(
        Sglang,
        "--model m --speculative-algorithm EAGLE --speculative-draft-model-path other"
    ));
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

#[test]
fn the_digest_follows_what_is_computed() {
    let digest = |config: &Value| {
        converted(config, Vllm, "--model m")
            .envelope
            .identity
            .config_digest
            .unwrap()
    };
    let mut other = llama_8b();
    other["transformers_version"] = json!("5.0.0");
    other["torch_dtype"] = json!("float16");
    assert_eq!(digest(&llama_8b()), digest(&other));
    other["rope_theta"] = json!(10000.0);
    assert_ne!(digest(&llama_8b()), digest(&other));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    /// Any number, null or text in place of any value, and any words: an answer, never a panic.
    #[test]
    fn odd_configurations_are_answered(
        which in 0usize..4,
        key in any::<prop::sample::Index>(),
        value in prop_oneof![
            Just(Value::Null), Just(json!(0)), Just(json!(1)), Just(json!(u32::MAX)), Just(json!(-1)), Just(json!(1.5)),
            Just(json!("auto")), Just(json!([])), Just(json!({})), Just(json!(true)), Just(json!(4096)),
        ],
        command in "(--(tp|pp|dcp-size|page-size|model-path|dp)( |=)?[0-9a-z=,]{0,10} ){0,4}",
    ) {
        let mut config = [llama_8b(), deepseek_v3(), gpt_oss(), qwen3_next()][which].clone();
        let keys: Vec<String> = config.as_object().unwrap().keys().cloned().collect();
        config[key.get(&keys)] = value;
        for framework in [Vllm, Sglang] {
            let found = convert(&config.to_string(), framework, &words(&command), &ConvertOptions::default());
            if let Ok(found) = found {
                prop_assert_eq!(found.envelope.validate(), Ok(()));
            }
        }
    }
}
