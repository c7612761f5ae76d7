//! Exit codes and messages of `check`, `plan` and `explain`: scripts and people rely on them.

use std::process::{Command, Output};

use crate::program::{Programs, example};

fn code(output: &Output) -> i32 {
    output.status.code().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn mha() -> Programs {
    Programs::with_files(&example("mha-prefill.toml"), &example("mha-decode.toml"))
}

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
fn plan_names_the_list_that_is_wrong() {
    let pair = mha();
    let plan = |tokens: &str, prefill: &str, decode: &str| {
        let output = pair.run(
            "plan",
            [
                "--rank",
                "1",
                "--tokens",
                tokens,
                "--prefill-pages",
                prefill,
                "--decode-pages",
                decode,
            ],
        );
        (
            code(&output),
            text(&output.stderr),
            text(&output.stdout).lines().count(),
        )
    };
    let (ok, said, moves) = plan("0..40", "3,7,9", "pages=5,1,2");
    assert_eq!(ok, 0, "{said}");
    assert!(moves > 0 && said.contains(&format!("{moves} moves")), "{said}");
    for (tokens, prefill, decode, words) in [
        ("0..40", "3,7", "5,1,2", vec!["--prefill-pages"]),
        ("0..40", "3,7,9", "5,1", vec!["--decode-pages"]),
        ("0..40", "3,7,9", "5,1,5", vec!["--decode-pages", "5"]),
        ("0..40", "3,7,4096", "5,1,2", vec!["--prefill-pages", "4096"]),
        ("0..40", "3,-,9", "5,1,2", vec!["--prefill-pages"]),
        (
            "0..40",
            "3,x,9",
            "5,1,2",
            vec!["--prefill-pages", "entry 1", "9-20"],
        ),
        (
            "0..40",
            "kv=3,7,9",
            "5,1,2",
            vec!["--prefill-pages", "\"kv\"", "pages"],
        ),
        ("40..0", "3,7,9", "5,1,2", vec!["--tokens", "swap"]),
    ] {
        let (code, said, moves) = plan(tokens, prefill, decode);
        assert_eq!((code, moves), (2, 0), "{tokens} {prefill} {decode}: {said}");
        for word in words {
            assert!(
                said.contains(word),
                "{tokens} {prefill} {decode}: {word} is missing in {said}"
            );
        }
    }
    let output = pair.run(
        "plan",
        [
            "--rank",
            "4",
            "--tokens",
            "0..4",
            "--prefill-pages",
            "1",
            "--decode-pages",
            "1",
        ],
    );
    assert_eq!(code(&output), 2);
    assert!(
        text(&output.stderr).contains("4 ranks"),
        "{}",
        text(&output.stderr)
    );
}

#[test]
fn plan_of_a_refused_pair_is_3() {
    let pair = Programs::with_files(&example("mha-prefill.toml"), &example("mla-dcp-decode.toml"));
    let output = pair.run(
        "plan",
        [
            "--rank",
            "0",
            "--tokens",
            "0..4",
            "--prefill-pages",
            "1",
            "--decode-pages",
            "1",
        ],
    );
    assert_eq!(code(&output), 3);
    assert!(output.stdout.is_empty() && text(&output.stderr).contains("REFUSED"));
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
fn a_closed_pipe_is_no_error() {
    let pair = mha();
    let mut kvferry = Command::new(env!("CARGO_BIN_EXE_kvferry"));
    kvferry
        .arg("plan")
        .arg("--prefill")
        .arg(pair.file("prefill.toml"))
        .arg("--decode")
        .arg(pair.file("decode.toml"));
    kvferry.args([
        "--rank",
        "0",
        "--tokens",
        "0..60000",
        "--prefill-pages",
        "0-3749",
        "--decode-pages",
        "0-3749",
    ]);
    let mut child = kvferry
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!((code(&output), text(&output.stderr)), (0, String::new()));
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
