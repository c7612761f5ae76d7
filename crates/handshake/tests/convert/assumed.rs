//! What a configuration leaves out is assumed and listed, and slips of the command are not.

use kvferry_handshake::{ConvertError, ConvertOptions, Converted, Framework, convert};
use serde_json::{Value, json};

use crate::{noted, words};

fn made(config: &Value, command: &str, model_type: Option<&str>) -> Result<Converted, ConvertError> {
    let options = ConvertOptions {
        model_type: model_type.map(str::to_owned),
        ..ConvertOptions::default()
    };
    let framework = if command.contains("vllm") {
        Framework::Vllm
    } else {
        Framework::Sglang
    };
    convert(&config.to_string(), framework, &words(command), &options)
}

fn gemma3(text: Value) -> Value {
    json!({ "model_type": "gemma3", "torch_dtype": "bfloat16", "text_config": text })
}

fn llama() -> Value {
    json!({
        "model_type": "llama", "num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8,
        "num_key_value_heads": 4, "torch_dtype": "bfloat16"
    })
}

fn shape(converted: &Converted) -> (u32, u32) {
    let part = &converted.envelope.components[0].parts[0];
    (part.heads, part.width)
}

#[test]
fn a_window_that_is_left_out_is_the_one_of_the_models_class() {
    let window = |converted: &Converted| {
        let components = &converted.envelope.components;
        components.iter().find_map(|component| component.window)
    };
    let mut text = json!({ "model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 12 });
    let converted = made(&gemma3(text.clone()), "vllm serve m", None).unwrap();
    assert_eq!(window(&converted), Some(4096));
    assert!(noted(&converted, "sliding_window is not given; assumed: 4096"));
    // Null is a statement.
    text["sliding_window"] = Value::Null;
    let converted = made(&gemma3(text), "vllm serve m", None).unwrap();
    assert_eq!(window(&converted), None);
    for (name, length) in [("gemma2", 4096), ("cohere2", 4096), ("gpt_oss", 128)] {
        let mut config = llama();
        config["model_type"] = json!(name);
        let converted = made(&config, "vllm serve m", None).unwrap();
        assert_eq!(window(&converted), Some(length), "{name}");
    }
}

#[test]
fn gemma_3_has_the_defaults_of_its_class() {
    let twelve = gemma3(json!({
        "model_type": "gemma3_text", "hidden_size": 3840, "num_attention_heads": 16, "num_hidden_layers": 48,
        "num_key_value_heads": 8, "sliding_window": 1024
    }));
    let converted = made(&twelve, "vllm serve m", None).unwrap();
    assert_eq!(
        shape(&converted),
        (8, 256),
        "not hidden_size / num_attention_heads"
    );
    assert!(noted(&converted, "head_dim is not given; assumed: 256"));
    assert!(!noted(&converted, "num_attention_heads is not given"));
    let four = gemma3(json!({
        "model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024
    }));
    let converted = made(&four, "vllm serve m", None).unwrap();
    assert_eq!(shape(&converted), (4, 256));
    for key in [
        "head_dim",
        "num_attention_heads",
        "num_key_value_heads",
        "sliding_window_pattern",
    ] {
        assert!(
            noted(&converted, &format!("{key} is not given; assumed")),
            "{key}"
        );
    }
}

#[test]
fn a_width_that_is_computed_is_listed() {
    let converted = made(&llama(), "vllm serve m", None).unwrap();
    assert_eq!(shape(&converted), (4, 64));
    assert!(noted(
        &converted,
        "head_dim is not given; assumed: hidden_size / num_attention_heads, 64"
    ));
    let mut stated = llama();
    stated["head_dim"] = json!(64);
    assert!(!noted(&made(&stated, "vllm serve m", None).unwrap(), "head_dim"));
}

#[test]
fn more_kv_heads_than_heads_are_refused() {
    let mut config = llama();
    config["num_key_value_heads"] = json!(9);
    let error = made(&config, "vllm serve m", None).unwrap_err().to_string();
    assert!(
        error.contains("num_key_value_heads") && error.contains("at most num_attention_heads, 8"),
        "{error}"
    );
}

#[test]
fn another_model_type_is_remarked_and_does_not_hide_recurrent_state() {
    let jamba = json!({
        "model_type": "jamba", "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "attn_layer_offset": 4, "attn_layer_period": 8, "mamba_d_conv": 4,
        "torch_dtype": "bfloat16"
    });
    let unknown = made(&jamba, "vllm serve m", None).unwrap_err().to_string();
    assert!(
        unknown.contains("--model-type") && unknown.contains("llama") && unknown.contains("qwen3_next"),
        "{unknown}"
    );
    let error = made(&jamba, "vllm serve m", Some("llama"))
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("attn_layer_") && error.contains("recurrent state"),
        "{error}"
    );
    let mut other = llama();
    other["model_type"] = json!("llama_of_ours");
    assert!(noted(
        &made(&other, "vllm serve m", Some("llama")).unwrap(),
        "read as llama"
    ));
}

#[test]
fn slips_of_flags_that_split_the_cache_are_refused_and_name_the_flag() {
    for (command, meant) in [
        ("vllm serve m --tensor-parallel 8", "--tensor-parallel-size"),
        ("vllm serve m --tensor_paralel_size 8", "--tensor-parallel-size"),
        ("vllm serve m --blok-size=32", "--block-size"),
        (
            "vllm serve m --decode-context-parallel 2",
            "--decode-context-parallel-size",
        ),
        (
            "vllm serve m --pipeline-parallel-sise 2",
            "--pipeline-parallel-size",
        ),
        ("--model-path m --tp-sise 2", "--tp-size"),
        ("--model-path m --page-sizes 16", "--page-size"),
    ] {
        let error = made(&llama(), command, None)
            .map(|_| ())
            .expect_err(command)
            .to_string();
        assert!(error.contains(meant), "{command}: {error}");
    }
    // Flags of their own.
    for command in [
        "--model-path m --ep-size 2 --moe-dp-size 2",
        "vllm serve m --data-parallel-size-local 1 --max-model-len 4096 --tokenizer-revision x",
    ] {
        let converted = made(&llama(), command, None).unwrap_or_else(|error| panic!("{command}: {error}"));
        assert!(noted(&converted, "not looked at"), "{command}");
    }
}
