//! An envelope file, as an operator or a program wrote it.

#![no_main]

use kvferry_handshake::Envelope;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Ok(text) = std::str::from_utf8(data) else { return };
    match Envelope::from_toml(text) {
        Ok(envelope) => {
            // Written again, it says the same.
            let again = Envelope::from_toml(&envelope.to_toml()).expect("was written from an envelope");
            assert_eq!(envelope, again);
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
});
