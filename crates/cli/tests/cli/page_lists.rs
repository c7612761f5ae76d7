//! The page lists and tokens that `plan` is given.

use crate::program::{ONE_PAGE, Programs, code, example, mha, text};

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
    let output = pair.run("plan", ONE_PAGE);
    assert_eq!(code(&output), 3);
    assert!(output.stdout.is_empty() && text(&output.stderr).contains("REFUSED"));
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
