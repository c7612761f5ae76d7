//! Heads, element types, sliding windows and latents.

use kvferry_handshake::Framework::{Sglang, Vllm};
use kvferry_handshake::{Component, Dcp, Element, Kind, Outcome, Policy, Role, Scales, compare};
use serde_json::{Value, json};

use crate::models::{deepseek_v3, gpt_oss, llama_8b};
use crate::{component, converted, noted, parts, refused};

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
