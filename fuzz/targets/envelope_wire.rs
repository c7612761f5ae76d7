//! An envelope as it arrives from an engine or a peer: decoded, validated, then compared and planned.

#![no_main]

use kvferry_handshake::{Element, Envelope, Launch, ModelShape, Policy};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Ok(envelope) = Envelope::from_bytes(data) else { return };
    // What was accepted is one value in one form.
    assert_eq!(envelope.to_bytes().expect("was decoded"), data);
    // With itself, and with an engine that was there before, both ways.
    let fixed = fixed();
    for policy in [Policy::Strict, Policy::Bridge] {
        for (prefill, decode) in [(&envelope, &envelope), (&envelope, &fixed), (&fixed, &envelope)] {
            let (verdict, link) = kvferry_plan::judge(prefill, decode, policy);
            assert_eq!(verdict.allows(), link.is_some(), "{verdict}");
        }
    }
});

/// Two ranks with heads, a window and a state.
fn fixed() -> Envelope {
    let shape = ModelShape::new("m", 3).kv([0], 2, 8).window([1], 2, 8, 10).state(
        "state",
        [2],
        &[("x", 2, 4)],
        Element::Fp32,
    );
    let launch = Launch {
        tp: 2,
        page_size: 4,
        pool_pages: 8,
        ..Launch::default()
    };
    launch.envelope(&shape).expect("is sound")
}
