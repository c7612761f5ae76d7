//! Exit codes and messages of `check`, `plan` and `explain`: scripts and people rely on them.

use std::process::Command;

use crate::program::{Programs, code, example, mha, text};

#[test]
fn compatible_is_0_and_the_json_is_the_verdict() {
    let pair = mha();
    let output = pair.run("check", []);
    assert_eq!(code(&output), 0, "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains("COMPATIBLE"));
    let verdict: kvferry_handshake::Verdict =
        serde_json::from_slice(&pair.run("check", ["--json"]).stdout).unwrap();
    assert!(verdict.allows() && verdict.mismatches.is_empty());
}

#[test]
fn refused_is_3_with_every_mismatch() {
    let decode = example("mha-decode.toml")
        .replace("page_size = 16", "page_size = 1")
        .replace("\"bf16\"", "\"fp8_e5m2\"\nscales = \"model\"");
    let pair = Programs::with_files(&example("mha-prefill.toml"), &decode);
    let output = pair.run("check", []);
    assert_eq!(
        code(&output),
        3,
        "{}{}",
        text(&output.stdout),
        text(&output.stderr)
    );
    let said = text(&output.stdout);
    for word in [
        "page_size",
        "element_type",
        "bf16",
        "fp8_e5m2",
        "--kv-cache-dtype",
        "--block-size",
    ] {
        assert!(said.contains(word), "{word} is missing in\n{said}");
    }
    let json = pair.run("check", ["--json"]);
    assert_eq!(code(&json), 3);
    let verdict: serde_json::Value = serde_json::from_slice(&json.stdout).unwrap();
    let codes: Vec<&str> = verdict["mismatches"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| one["code"].as_str().unwrap())
        .collect();
    assert!(
        codes.contains(&"page_size") && codes.contains(&"element_type"),
        "{codes:?}"
    );
}

#[test]
fn a_framework_of_unknown_version_is_named_without_a_gap() {
    let known = example("mha-prefill.toml");
    let version = known
        .lines()
        .find(|line| line.starts_with("framework_version"))
        .unwrap();
    let unknown = known.replace(version, "framework_version = \"\"");
    let said = text(
        &Programs::with_files(&unknown, &example("mha-decode.toml"))
            .run("check", [])
            .stdout,
    );
    assert!(said.contains(", vllm, 2 ranks,"), "{said}");
}

#[test]
fn bridging_must_be_allowed() {
    let decode = example("mha-decode.toml").replace("page_size = 16", "page_size = 1");
    let pair = Programs::with_files(&example("mha-prefill.toml"), &decode);
    assert_eq!(code(&pair.run("check", [])), 3);
    let output = pair.run("check", ["--policy", "bridge"]);
    assert_eq!(code(&output), 0, "{}", text(&output.stdout));
    assert!(text(&output.stdout).contains("BRIDGEABLE"));
}

#[test]
fn unresolved_element_types_are_refused() {
    let auto = |name| example(name).replace("\"bf16\"", "\"auto\"");
    let pair = Programs::with_files(&auto("mha-prefill.toml"), &auto("mha-decode.toml"));
    let output = pair.run("check", ["--policy", "bridge"]);
    assert_eq!(
        code(&output),
        3,
        "{}{}",
        text(&output.stdout),
        text(&output.stderr)
    );
    assert!(text(&output.stdout).contains("element_unresolved"));
}

#[test]
fn bad_files_are_2_and_both_are_told() {
    let pair = Programs::with_files(
        "engine = 3\n",
        &example("mha-decode.toml").replace("page_size", "page_siez"),
    );
    let output = pair.run("check", []);
    assert_eq!(code(&output), 2);
    let said = text(&output.stderr);
    assert!(
        said.contains("prefill.toml: line 1") && said.contains("page_siez"),
        "{said}"
    );
    assert!(output.stdout.is_empty());

    std::fs::remove_file(pair.file("decode.toml")).unwrap();
    let output = pair.run("check", []);
    assert_eq!(code(&output), 2);
    assert!(text(&output.stderr).contains("decode.toml"));
    // A flag that is not there.
    assert_eq!(code(&pair.run("check", ["--polcy", "bridge"])), 2);
}

#[test]
fn explain_knows_codes_and_names_the_nearest() {
    let explain = |name: &str| {
        Command::new(env!("CARGO_BIN_EXE_kvferry"))
            .args(["explain", name])
            .output()
            .unwrap()
    };
    let known = explain("page_size");
    assert_eq!(code(&known), 0);
    assert!(text(&known.stdout).contains("--block-size"));
    let unknown = explain("page_siez");
    assert_eq!(code(&unknown), 2);
    assert!(text(&unknown.stderr).contains("page_size"));
}

#[test]
fn what_is_wrong_with_a_file_is_json_too() {
    let pair = Programs::with_files("engine = 3", &example("mha-decode.toml"));
    let output = pair.run("check", ["--json"]);
    assert_eq!(code(&output), 2);
    let told: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let errors = told["errors"].as_array().unwrap();
    assert!(
        errors[0]
            .as_str()
            .unwrap()
            .contains("prefill.toml: line 1: file_invalid"),
        "{told}"
    );
}

/// Only the first of two ranks: heads 4 to 7 have no place.
#[test]
fn an_incomplete_file_is_refused_on_either_side() {
    let whole = example("mha-prefill.toml").replace("\"prefill\"", "\"both\"");
    let cut = whole[..whole.rfind("[[rank]]").unwrap()].to_owned();
    for (prefill, decode, side) in [(&whole, &cut, "decode"), (&cut, &whole, "prefill")] {
        let output = Programs::with_files(prefill, decode).run("check", []);
        assert_eq!(code(&output), 3);
        let said = text(&output.stdout);
        assert!(
            said.contains("head_coverage") && said.contains("heads 4-7"),
            "{side}: {said}"
        );
    }
}

#[test]
fn no_daemon_is_an_error_that_says_so() {
    let output = Command::new(env!("CARGO_BIN_EXE_kvferry"))
        .args(["status", "--wait", "0", "--socket", "/nonexistent/kvferryd.sock"])
        .output()
        .unwrap();
    assert_eq!(code(&output), 1);
    let said = text(&output.stderr);
    assert!(
        said.contains("/nonexistent/kvferryd.sock") && said.contains("kvferryd"),
        "{said}"
    );
}

/// What `kvferry envelope` makes of a config.json and a launch command is what `check` and `plan` read.
#[test]
fn an_envelope_is_made_and_says_what_it_assumed() {
    let config = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../docs/examples/llama-3.1-8b/config.json"
    );
    let dir = tempfile::tempdir().unwrap();
    let envelope = |name: &str, arguments: &[&str]| {
        let file = dir.path().join(name);
        let mut kvferry = Command::new(env!("CARGO_BIN_EXE_kvferry"));
        kvferry
            .args(["envelope", "--config", config, "--output"])
            .arg(&file)
            .args(arguments);
        (kvferry.output().unwrap(), file)
    };
    let vllm = [
        "--role",
        "prefill",
        "--",
        "vllm",
        "serve",
        "m",
        "--tensor-parallel-size",
        "4",
        "--block-size",
        "16",
    ];
    let sglang = [
        "--role",
        "decode",
        "--framework",
        "sglang",
        "--",
        "--model-path",
        "m",
        "--tp-size",
        "2",
        "--page-size",
        "16",
    ];
    let (made, prefill) = envelope("prefill.toml", &vllm);
    assert_eq!(code(&made), 0, "{}", text(&made.stderr));
    assert!(
        text(&made.stderr).contains("pool_pages"),
        "the assumed pool is not told: {}",
        text(&made.stderr)
    );
    let (made, decode) = envelope("decode.toml", &sglang);
    assert_eq!(code(&made), 0, "{}", text(&made.stderr));
    let mut check = Command::new(env!("CARGO_BIN_EXE_kvferry"));
    check
        .arg("check")
        .arg("--prefill")
        .arg(prefill)
        .arg("--decode")
        .arg(decode);
    let output = check.output().unwrap();
    assert_eq!(
        code(&output),
        0,
        "{}{}",
        text(&output.stdout),
        text(&output.stderr)
    );

    let (made, file) = envelope("none.toml", &["--", "something", "--tp", "2"]);
    assert_eq!((code(&made), file.exists()), (2, false));
    assert!(
        text(&made.stderr).contains("--framework"),
        "{}",
        text(&made.stderr)
    );
    let (made, _) = envelope(
        "none.toml",
        &["--", "vllm", "serve", "m", "--tensor-parallel-size", "x"],
    );
    assert_eq!(code(&made), 2);
    assert!(
        text(&made.stderr).contains("--tensor-parallel-size"),
        "{}",
        text(&made.stderr)
    );
}
