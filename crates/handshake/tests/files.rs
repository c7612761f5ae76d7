//! Envelope files: what is written is read again, and what is wrong is told with its line.

#![allow(clippy::unwrap_used)] // a panic here is a failed test

use std::fs;
use std::path::{Path, PathBuf};

use kvferry_handshake::{
    Allocation, Cached, Code, Dcp, Element, Envelope, Kind, Launch, ModelShape, Order, Padding, Policy,
    Scales, Stages, compare,
};

fn model() -> ModelShape {
    let mut model = ModelShape::new("a \"quoted\" \\ model", 6)
        .kv_widths([0, 3], 4, 192, 128)
        .window([1, 4], 4, 64, 128)
        .state(
            "state",
            [2, 5],
            &[("x", 4, 64), ("b", 2, 16), ("c", 2, 16)],
            Element::Fp32,
        )
        .with(Cached::new("scales", Kind::Scales, [0, 3], &[("k", 4, 1), ("v", 4, 1)]).element(Element::Fp32))
        .with(
            Cached::new("packed", Kind::Kv, [0], &[("kv", 4, 4096)])
                .opaque("fp4.tiles")
                .group("packed"),
        )
        .draft(2, 4, 64);
    model.cached[0] = model.cached[0].clone().scaled_by("scales");
    model
}

const ARRANGEMENTS: [(Allocation, bool); 8] = [
    (Allocation::LayerPart, false),
    (Allocation::Layer, false),
    (Allocation::LayerPages, false),
    (Allocation::LayerPages, true),
    (Allocation::PackedRows, false),
    (Allocation::PackedRows, true),
    (Allocation::OneRegion, false),
    (Allocation::PageMajor, false),
];

#[test]
fn what_is_written_is_read_again_in_both_forms() {
    for (allocation, shared_pool) in ARRANGEMENTS {
        for order in [Order::Nhd, Order::Hnd] {
            for padding in [
                Padding::default(),
                Padding {
                    row: 64,
                    page: 4096,
                    start: 128,
                },
            ] {
                let launch = Launch {
                    tp: 4,
                    pp: Stages::Layers(vec![4, 2]),
                    dcp: Dcp {
                        size: 2,
                        interleave: 8,
                    },
                    element: Element::Fp8E4m3,
                    allocation,
                    order,
                    padding,
                    shared_pool,
                    ..Launch::default()
                };
                let mut envelope = launch.envelope(&model()).unwrap();
                envelope.identity.incarnation = u64::MAX;
                envelope.identity.revision = Some("r \u{e9}".to_owned());
                envelope.identity.config_digest = Some("c".to_owned());
                let explicit = envelope.to_toml();
                assert_eq!(
                    Envelope::from_toml(&explicit).as_ref(),
                    Ok(&envelope),
                    "{explicit}"
                );
                let arrangement = launch.arrangement(&model()).unwrap();
                let notes = ["first".to_owned(), "second\nthird".to_owned()];
                let short = envelope.to_toml_arranged(&arrangement, &notes);
                assert!(short.starts_with("# first\n# second\n# third\n\n"));
                assert_eq!(Envelope::from_toml(&short).as_ref(), Ok(&envelope), "{short}");
            }
        }
    }
}

const SOUND: &str = r#"
engine = "e"
role = "prefill"
model = "m"
framework = "vllm"
framework_version = "0.11"
prefill_context_parallel = 1

[[page_group]]
name = "pages"
page_size = 16
pool_pages = 100

[[component]]
name = "kv"
kind = "kv"
page_group = "pages"
layers = "0-1"
parts = [{ name = "k", heads = 2, width = 128 }, { name = "v", heads = 2, width = 128 }]
element = "bf16"

[[rank]]
rank = 0
[[rank.placement]]
component = "kv"
layers = [0, 1]
parts = ["k", "v"]
heads = "0-1"
region = 0
strides = { page = 8192, token = 512, head = 256, part = 819200, layer = 1638400 }
"#;

#[test]
fn a_short_hand_written_file_is_enough() {
    let envelope = Envelope::from_toml(SOUND).unwrap();
    assert_eq!(envelope.region_bytes(0)[&0], 2 * 2 * 100 * 8192);
    assert_eq!(envelope.ranks[0].dcp_rank, 0);
    let one = SOUND.replace(
        "layers = [0, 1]\nparts = [\"k\", \"v\"]",
        "layers = 1\nparts = \"k\"",
    );
    assert_eq!(
        Envelope::from_toml(&one).unwrap().ranks[0].placements[0].parts,
        [0]
    );
}

/// Each change of a sound file, with the line that must be named, the code, and words of the message.
#[test]
fn what_is_wrong_is_told_with_line_key_and_fix() {
    let cases: &[(&str, &str, Option<usize>, &[&str])] = &[
        (
            "page_size = 16",
            "pagesize = 16",
            Some(11),
            &["pagesize", "page_size"],
        ),
        (
            "page_size = 16\n",
            "",
            Some(9),
            &["page_group: ", "missing field", "page_size"],
        ),
        (
            "heads = 2, width = 128 }, {",
            "heads = 2, width = true }, {",
            Some(19),
            &["component.parts.width", "true"],
        ),
        (
            "page_size = 16",
            "page_size = \"16\"",
            Some(11),
            &["page_group.page_size", "\"16\"", "u32"],
        ),
        (
            "page_size = 16",
            "page_size = -1",
            Some(11),
            &["page_group.page_size", "-1"],
        ),
        ("page_size = 16", "page_size = 16 16", Some(11), &[]),
        (
            "page_size = 16",
            "page_size = 0",
            Some(9),
            &["page_group.pages.page_size", "0 is not in 1..=65536"],
        ),
        ("model = \"m\"\n", "", Some(1), &["missing field", "model"]),
        (
            "role = \"prefill\"",
            "role = \"prefil\"",
            Some(3),
            &["prefil", "prefill", "decode", "both"],
        ),
        (
            "kind = \"kv\"",
            "kind = \"mha\"",
            Some(16),
            &["mha", "latent", "window"],
        ),
        (
            "page_group = \"pages\"",
            "page_group = \"page\"",
            Some(17),
            &["component.kv.page_group", "page", "pages"],
        ),
        (
            "layers = \"0-1\"",
            "layers = \"0-\"",
            Some(18),
            &["0-", "0-31,40"],
        ),
        ("layers = \"0-1\"", "layers = \"0-5000\"", Some(18), &["0-31,40"]),
        ("layers = \"0-1\"", "layers = 1.5", Some(18), &["0-31,40"]),
        (
            "layers = \"0-1\"",
            "layers = \"1,0\"",
            Some(14),
            &["component.kv.layers", "ascend"],
        ),
        (
            "element = \"bf16\"",
            "element = \"bf17\"",
            Some(20),
            &["bf17", "fp8_e4m3"],
        ),
        (
            "element = \"bf16\"",
            "element = \"fp8_e4m3\"",
            Some(14),
            &["component.kv.scales", "model", "inline"],
        ),
        (
            "heads = 2, width = 128 }, {",
            "heads = 2, widht = 128 }, {",
            Some(19),
            &["component.parts", "widht", "width"],
        ),
        (
            "component = \"kv\"",
            "component = \"kvs\"",
            Some(25),
            &["rank.0.placement.0.component", "kvs", "kv"],
        ),
        (
            "parts = [\"k\", \"v\"]",
            "parts = [\"k\", \"w\"]",
            Some(27),
            &["rank.0.placement.0.parts", "w", "k, v"],
        ),
        ("heads = \"0-1\"", "heads = \"1-0\"", Some(28), &["1-0", "0-3"]),
        (
            "heads = \"0-1\"",
            "heads = \"0-2\"",
            Some(24),
            &["rank.0.placement.0.heads", "0-2"],
        ),
        (
            "region = 0",
            "region = 65536",
            Some(29),
            &["rank.placement.region", "65536"],
        ),
        ("rank = 0\n", "rank = 1\n", Some(22), &["rank.0.rank", "in order"]),
        (
            "token = 512",
            "token = 511",
            Some(24),
            &["rank.0.placement.0.strides.token"],
        ),
        ("token = 512", "tokens = 512", Some(30), &["tokens", "token"]),
        (
            "[[rank]]",
            "[arrangement]\ntp = 1\nallocation = \"layer\"\n[[rank]]",
            Some(22),
            &["arrangement", "[[rank]]"],
        ),
        (
            "\nengine",
            "\nincarnation = \"xyz\"\nengine",
            Some(2),
            &["xyz", "hexadecimal"],
        ),
    ];
    for (from, to, line, words) in cases {
        assert!(SOUND.contains(from), "{from}");
        let text = SOUND.replacen(from, to, 1);
        let error = Envelope::from_toml(&text).expect_err(to);
        let first = &error.problems[0];
        assert_eq!(first.line, *line, "{to}: {error}");
        let code = format!(": {}: ", first.code);
        assert!(error.to_string().contains(&code), "{to}: {error}");
        for word in *words {
            assert!(
                error.to_string().contains(word),
                "{to}: {word:?} is not in {error}"
            );
        }
    }
}

#[test]
fn every_problem_is_told_at_once() {
    let text = SOUND
        .replace("page_group = \"pages\"", "page_group = \"x\"")
        .replace("parts = [\"k\", \"v\"]", "parts = [\"y\", \"z\"]");
    let error = Envelope::from_toml(&text).unwrap_err();
    assert_eq!(error.problems.len(), 3, "{error}");
    assert_eq!(error.code(), Code::FileInvalid);

    let text = SOUND
        .replace("engine = \"e\"", "engine = \"e e\"")
        .replace("token = 512", "token = 1");
    let error = Envelope::from_toml(&text).unwrap_err();
    assert_eq!(error.code(), Code::EnvelopeInvalid);

    let without = SOUND.split("[[rank]]").next().unwrap();
    let error = Envelope::from_toml(without).unwrap_err().to_string();
    assert!(
        error.contains("[[rank]]") && error.contains("[arrangement]"),
        "{error}"
    );

    let uneven = format!("{without}[arrangement]\ntp = 3\nallocation = \"layer\"\n");
    let error = Envelope::from_toml(&uneven).unwrap_err();
    assert_eq!(error.problems[0].line, Some(22));
    assert!(error.to_string().contains("3 ranks cannot share"), "{error}");

    let twice = format!("{without}[arrangement]\ntp = 1\ncp = 2\nallocation = \"layer\"\n");
    let error = Envelope::from_toml(&twice).unwrap_err();
    assert_eq!(error.problems[0].key, "arrangement.cp");
    assert!(
        error
            .to_string()
            .contains("is 2, but prefill_context_parallel is 1"),
        "{error}"
    );
    let both = twice.replace("prefill_context_parallel = 1", "prefill_context_parallel = 2");
    assert_eq!(Envelope::from_toml(&both).unwrap().ranks.len(), 2);

    for (stages, words) in [
        ("[2, 2]", ["hold 4 layers", "stage 1 of them nothing"]),
        ("[0, 2]", ["hold 2 layers", "stage 0 of them nothing"]),
    ] {
        let file = format!("{without}[arrangement]\ntp = 1\nstages = {stages}\nallocation = \"layer\"\n");
        let error = Envelope::from_toml(&file).unwrap_err().to_string();
        for word in words.into_iter().chain(["highest layer id is 1"]) {
            assert!(error.contains(word), "{stages}: {error}");
        }
    }
}

#[test]
fn scales_are_stated_in_words() {
    for (text, scales) in [
        ("\"none\"", Scales::None),
        ("\"model\"", Scales::Model),
        ("\"inline\"", Scales::Inline),
    ] {
        let file = SOUND.replace(
            "element = \"bf16\"",
            &format!("element = \"fp8_e4m3\"\nscales = {text}"),
        );
        let file = file.replace("parts = [\"k\", \"v\"]", "parts = [\"k\"]");
        assert_eq!(Envelope::from_toml(&file).unwrap().components[0].scales, scales);
    }
}

fn docs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs")
}

fn example(name: &str) -> Envelope {
    let path = docs().join("examples").join(name);
    let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    Envelope::from_toml(&text).unwrap_or_else(|error| panic!("{name}: {error}"))
}

#[test]
fn the_documented_pairs_are_compatible() {
    for (prefill, decode) in [
        ("mha-prefill.toml", "mha-decode.toml"),
        ("mla-prefill.toml", "mla-dcp-decode.toml"),
        ("hybrid-window.toml", "hybrid-window.toml"),
        ("hybrid-state.toml", "hybrid-state.toml"),
    ] {
        let verdict = compare(&example(prefill), &example(decode), Policy::Strict);
        assert!(verdict.allows(), "{prefill}, {decode}:\n{verdict}");
    }
    let verdict = compare(
        &example("mha-prefill.toml"),
        &example("mla-prefill.toml"),
        Policy::Bridge,
    );
    assert!(!verdict.allows());
}

/// Every example file is read here, and what the page shows of them is what they hold.
#[test]
fn the_page_and_its_examples_are_current() {
    let page = fs::read_to_string(docs().join("envelope.md")).unwrap();
    let mut shown = 0;
    for entry in fs::read_dir(docs().join("examples")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        // Folders hold what the converter reads.
        if !name.ends_with(".toml") {
            continue;
        }
        example(&name);
        assert!(
            page.contains(&format!("examples/{name}")),
            "{name} is not on the page"
        );
        let text = fs::read_to_string(docs().join("examples").join(&name)).unwrap();
        shown += u32::from(page.contains(&format!("```toml\n{text}```\n")));
    }
    assert_eq!(page.matches("```toml\n").count(), 5);
    assert_eq!(shown, 5, "every block of the page is an example file");
}
