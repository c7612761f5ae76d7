//! An envelope as it arrives from an engine or a peer: decoded, validated, then compared and planned.

#![no_main]

use kvferry_handshake::{Envelope, Policy};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Ok(envelope) = Envelope::from_bytes(data) else { return };
    // What was accepted is one value in one form.
    assert_eq!(envelope.to_bytes().expect("was decoded"), data);
    for policy in [Policy::Strict, Policy::Bridge] {
        let (verdict, link) = kvferry_plan::judge(&envelope, &envelope, policy);
        assert_eq!(verdict.allows(), link.is_some(), "{verdict}");
    }
});
