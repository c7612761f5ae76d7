//! Where what is said cannot be written, or nobody reads it.

use std::process::Command;

use crate::program::{ONE_PAGE, Programs, code, example, mha, text};

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
    let of =
        |command: &'static str, prefill: &'static str| [command, "--prefill", prefill, "--decode"].to_vec();
    assert_eq!(
        run(&["check", "--prefill", "/nonexistent", "--decode", &decode]),
        2
    );
    assert_eq!(
        run(&[
            &["plan", "--prefill", &prefill, "--decode", &decode][..],
            &ONE_PAGE
        ]
        .concat()),
        0
    );
    assert_eq!(
        run(&[of("plan", mla), vec![&decode], ONE_PAGE.to_vec()].concat()),
        3
    );
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

/// What a script asked for and did not get is no success.
#[test]
fn output_that_cannot_be_written_is_a_failure_that_names_it() {
    let pair = mha();
    let [prefill, decode] = ["prefill.toml", "decode.toml"].map(|name| pair.file(name).display().to_string());
    let of = ["--prefill", prefill.as_str(), "--decode", decode.as_str()];
    let config = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../docs/examples/llama-3.1-8b/config.json"
    );
    let commands = [
        vec!["--version"],
        vec!["--help"],
        vec!["plan", "--help"],
        vec!["explain", "over_limit"],
        vec!["explain"],
        [&["check"][..], &of].concat(),
        [&["check", "--json"][..], &of].concat(),
        [&["plan"][..], &of, &ONE_PAGE].concat(),
        vec!["envelope", "--config", config, "--", "vllm", "serve", "m"],
    ];
    for arguments in commands {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").unwrap();
        let output = Command::new(env!("CARGO_BIN_EXE_kvferry"))
            .args(&arguments)
            .stdout(full)
            .output()
            .unwrap();
        let told = text(&output.stderr);
        assert_eq!(code(&output), 1, "{arguments:?}: {told}");
        assert!(
            told.contains("standard output: No space left"),
            "{arguments:?}: {told}"
        );
    }
}
