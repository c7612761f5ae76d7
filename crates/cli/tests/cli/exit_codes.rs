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

/// Nothing can be told, and what was done is done: the exit code is what it would be.
#[test]
fn standard_error_that_cannot_be_written_is_no_panic() {
    let pair = mha();
    let run = |arguments: &[&str]| {
        let full = || std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        Command::new(env!("CARGO_BIN_EXE_kvferry"))
            .args(arguments)
            .stdout(std::process::Stdio::null())
            .stderr(full())
            .status()
            .unwrap()
            .code()
            .unwrap()
    };
    let [prefill, decode] = ["prefill.toml", "decode.toml"].map(|name| pair.file(name).display().to_string());
    let mla = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../docs/examples/mla-prefill.toml"
    );
    let plan = [
        "--rank",
        "0",
        "--tokens",
        "0..4",
        "--prefill-pages",
        "1",
        "--decode-pages",
        "1",
    ];
    let of =
        |command: &'static str, prefill: &'static str| [command, "--prefill", prefill, "--decode"].to_vec();
    assert_eq!(
        run(&["check", "--prefill", "/nonexistent", "--decode", &decode]),
        2
    );
    assert_eq!(
        run(&[&["plan", "--prefill", &prefill, "--decode", &decode][..], &plan].concat()),
        0
    );
    assert_eq!(run(&[of("plan", mla), vec![&decode], plan.to_vec()].concat()), 3);
    assert_eq!(run(&["explain", "no_such_code"]), 2);
    let config = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../docs/examples/llama-3.1-8b/config.json"
    );
    assert_eq!(
        run(&["envelope", "--config", config, "--", "vllm", "serve", "m"]),
        0
    );
    assert_eq!(run(&["envelope", "--config", config, "--", "x"]), 2);
    assert_eq!(
        run(&["status", "--wait", "0", "--socket", "/nonexistent/kvferryd.sock"]),
        1
    );
}

/// `kvferry check ... | head -1` in a script that looks at the exit code.
#[test]
fn a_refusal_that_nobody_reads_is_one_all_the_same() {
    let pair = Programs::with_files(&example("mha-prefill.toml"), &example("mla-dcp-decode.toml"));
    let run = |decode: &str, json: &[&str]| {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut kvferry = Command::new(env!("CARGO_BIN_EXE_kvferry"));
        kvferry.arg("check").args(json);
        kvferry
            .arg("--prefill")
            .arg(pair.file("prefill.toml"))
            .arg("--decode")
            .arg(pair.file(decode));
        kvferry.stdout(writer).stderr(std::process::Stdio::null());
        kvferry.status().unwrap().code().unwrap()
    };
    for json in [&[][..], &["--json"]] {
        assert_eq!([run("decode.toml", json), run("none.toml", json)], [3, 2]);
        assert_eq!(run("prefill.toml", json), 3, "two prefill engines");
    }
}

#[test]
fn lists_may_begin_with_an_absent_page_and_what_does_not_move_is_told() {
    let pair = mha();
    let plan = |arguments: &[&str]| pair.run("plan", [&["--rank", "0"], arguments].concat());
    let output = plan(&[
        "--tokens",
        "0..32",
        "--prefill-pages",
        "1,2",
        "--decode-pages",
        "-,4",
    ]);
    assert_eq!(code(&output), 0, "{}", text(&output.stderr));
    // A page of 16 tokens, 32 layers, keys and values, 2 heads of 128 elements of 2 bytes.
    let told = text(&output.stderr);
    assert!(
        told.contains("524288 bytes") && told.contains("not moved"),
        "{told}"
    );
    let output = plan(&[
        "--tokens",
        "0..32",
        "--prefill-pages",
        "1,2",
        "--decode-pages",
        "3,4",
    ]);
    assert!(
        !text(&output.stderr).contains("not moved"),
        "{}",
        text(&output.stderr)
    );

    for (arguments, said) in [
        (
            [
                "--tokens",
                "0..9223372036854775808",
                "--prefill-pages",
                "1",
                "--decode-pages",
                "2",
            ],
            "--tokens 0..",
        ),
        (
            [
                "--tokens",
                "0..32",
                "--prefill-pages",
                "1,1",
                "--decode-pages",
                "3,4",
            ],
            "--prefill-pages, rank 0",
        ),
        (
            [
                "--tokens",
                "-1..32",
                "--prefill-pages",
                "1,2",
                "--decode-pages",
                "3,4",
            ],
            "FROM \"-1\"",
        ),
    ] {
        let output = plan(&arguments);
        assert_eq!(code(&output), 2);
        assert!(
            text(&output.stderr).contains(said),
            "{said}: {}",
            text(&output.stderr)
        );
    }
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
