//! The wire form: golden frames stay what they are, and no bytes from outside do harm.

#![allow(clippy::unwrap_used)] // a panic here is a failed test

use std::fmt::Debug;
use std::fs;
use std::path::Path;

use kvferry_handshake::{
    ABSENT, Cached, Code, Dcp, Element, Envelope, Kind, Launch, Mismatch, ModelShape, Outcome, PageLists,
    Policy, Ready, Role, TokenRange, Verdict, WireError, compare, decode, encode,
};
use proptest::prelude::*;
use serde::Serialize;
use serde::de::DeserializeOwned;

/// An envelope with every kind of field in use.
fn envelope() -> Envelope {
    let model = ModelShape::new("golden/model", 4)
        .kv_widths([0, 2], 2, 24, 16)
        .latent([1], 72)
        .state("state", [3], &[("x", 2, 8), ("b", 1, 4)], Element::Fp32)
        .with(
            Cached::new("scales", Kind::Scales, [0, 2], &[("k", 2, 1), ("v", 2, 1)])
                .element(Element::Fp32)
                .per_page(),
        );
    let mut model = model;
    model.cached[0] = model.cached[0].clone().scaled_by("scales");
    let launch = Launch {
        engine: "golden".to_owned(),
        role: Role::Prefill,
        framework: "vllm".to_owned(),
        framework_version: "0.11.0".to_owned(),
        tp: 2,
        dcp: Dcp {
            size: 2,
            interleave: 4,
        },
        page_size: 8,
        pool_pages: 10,
        slots: 3,
        element: Element::Fp8E4m3,
        ..Launch::default()
    };
    let mut envelope = launch.envelope(&model).unwrap();
    envelope.identity.incarnation = 0x0123_4567_89ab_cdef;
    envelope.identity.revision = Some("r1".to_owned());
    envelope.identity.weights_digest = Some("blake3:00".to_owned());
    envelope
}

fn verdict() -> Verdict {
    let mismatch = |code| Mismatch {
        code,
        field: "page_group.pages.page_size".to_owned(),
        prefill: "8".to_owned(),
        decode: "4".to_owned(),
        why: "why".to_owned(),
        fix: "fix".to_owned(),
    };
    Verdict {
        outcome: Outcome::Refused,
        policy: Policy::Bridge,
        mismatches: vec![mismatch(Code::ElementType), mismatch(Code::Layers)],
        bridged: vec![mismatch(Code::PageSize)],
        warnings: vec![mismatch(Code::NotCompared)],
    }
}

/// The bytes of `value` are those of the golden file, and they decode to it.
fn golden<T: Serialize + DeserializeOwned + PartialEq + Debug>(name: &str, value: &T) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/golden")
        .join(format!("{name}.hex"));
    let bytes = encode(value).unwrap();
    if std::env::var_os("KVFERRY_WRITE_GOLDEN").is_some() {
        let lines: Vec<String> = bytes.chunks(32).map(hex).collect();
        fs::write(&path, lines.join("\n") + "\n").unwrap();
    }
    let text = fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let stored = unhex(&text);
    assert_eq!(
        hex(&bytes),
        hex(&stored),
        "{name}: the wire form changed; peers of the last release would not understand it"
    );
    assert_eq!(&decode::<T>(&stored).unwrap(), value, "{name}");
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.bytes().filter(u8::is_ascii_hexdigit).collect();
    digits
        .chunks(2)
        .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap())
        .collect()
}

#[test]
fn golden_frames_decode_and_encode_identically() {
    golden("envelope", &envelope());
    golden("verdict", &verdict());
    golden(
        "page_lists",
        &PageLists {
            groups: vec![vec![3, ABSENT, 1], vec![]],
        },
    );
    golden(
        "token_range",
        &TokenRange {
            from: 16,
            to: 131_072,
        },
    );
    golden(
        "ready",
        &Ready {
            tokens: 1,
            front_tokens: 2,
            front_layers: 3,
            end: Some(4),
        },
    );
    golden("policy", &[Policy::Strict, Policy::Bridge]);
    golden(
        "outcome",
        &[Outcome::Compatible, Outcome::Bridgeable, Outcome::Refused],
    );
    golden(
        "element",
        &[
            Element::Auto,
            Element::Fp32,
            Element::Fp16,
            Element::Bf16,
            Element::Fp8E4m3,
            Element::Fp8E5m2,
            Element::Fp8E4m3Fnuz,
            Element::Fp8E5m2Fnuz,
            Element::Fp4E2m1,
            Element::Int8,
            Element::Uint8,
        ],
    );
    golden(
        "kind",
        &[
            Kind::Kv,
            Kind::Latent,
            Kind::Window,
            Kind::Indexer,
            Kind::Scales,
            Kind::State,
        ],
    );
}

#[test]
fn an_envelope_from_outside_is_validated() {
    let sound = envelope();
    assert_eq!(
        Envelope::from_bytes(&sound.to_bytes().unwrap()),
        Ok(sound.clone())
    );
    let mut broken = sound;
    broken.ranks[1].rank = 7;
    let error = Envelope::from_bytes(&encode(&broken).unwrap()).unwrap_err();
    assert!(matches!(error, WireError::Envelope(_)));
    assert_eq!(error.code(), Code::EnvelopeInvalid);
}

#[test]
fn codes_travel_by_name_and_unknown_ones_arrive() {
    for code in Code::ALL {
        let bytes = encode(code).unwrap();
        assert!(bytes.ends_with(code.name().as_bytes()));
        assert_eq!(decode::<Code>(&bytes).unwrap(), *code);
        assert_eq!(serde_json::to_string(code).unwrap(), format!("{:?}", code.name()));
    }
    let newer = encode(&"a_code_of_tomorrow").unwrap();
    assert_eq!(decode::<Code>(&newer).unwrap(), Code::Unknown);
    let mut verdict = verdict();
    verdict.mismatches.push(Mismatch {
        code: Code::PageSize,
        field: "f".to_owned(),
        prefill: String::new(),
        decode: String::new(),
        why: String::new(),
        fix: String::new(),
    });
    let json = serde_json::to_string(&verdict)
        .unwrap()
        .replace("page_size", "page_sizf");
    let arrived: Verdict = serde_json::from_str(&json).unwrap();
    assert!(
        arrived
            .mismatches
            .iter()
            .any(|mismatch| mismatch.code == Code::Unknown)
    );
}

/// Changes of a byte string: some bytes overwritten, then cut or extended.
fn mutated(bytes: Vec<u8>) -> impl Strategy<Value = Vec<u8>> {
    let len = bytes.len();
    let writes = proptest::collection::vec((0..len, any::<u8>()), 0..6);
    (
        writes,
        0..=len,
        proptest::collection::vec(any::<u8>(), 0..9),
        any::<bool>(),
    )
        .prop_map(move |(writes, cut, tail, whole)| {
            let mut bytes = bytes.clone();
            for (at, byte) in writes {
                bytes[at] = byte;
            }
            if !whole {
                bytes.truncate(cut);
            }
            bytes.extend(tail);
            bytes
        })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn mutated_envelopes_decode_or_are_refused(bytes in mutated(encode(&envelope()).unwrap())) {
        if let Ok(found) = Envelope::from_bytes(&bytes) {
            prop_assert_eq!(found.validate(), Ok(()));
            prop_assert_eq!(found.to_bytes().unwrap(), bytes);
            for rank in 0..2 {
                found.region_bytes(rank);
            }
            compare(&found, &envelope(), Policy::Bridge);
        }
    }

    #[test]
    fn mutated_verdicts_and_page_lists_decode_or_are_refused(
        verdict in mutated(encode(&verdict()).unwrap()),
        lists in mutated(encode(&PageLists { groups: vec![vec![1, 2, 3], vec![4]] }).unwrap()),
    ) {
        let _ = decode::<Verdict>(&verdict);
        if let Ok(found) = decode::<PageLists>(&lists) {
            prop_assert_eq!(encode(&found).unwrap(), lists);
        }
    }
}
