//! What the launch says: stages, replicas, drafts, options; and who the engine is.

use kvferry_handshake::Framework::{Sglang, Vllm};
use kvferry_handshake::{ConvertOptions, Role, convert};
use serde_json::{Value, json};

use crate::models::{deepseek_v3, llama_8b};
use crate::{converted, noted, refused, words};

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
