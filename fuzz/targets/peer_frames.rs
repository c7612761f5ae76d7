//! What a peer daemon sends: frames, decoded, bounded and said to a broker that has an engine and a transfer under way. It
//! must come to rest after each message, and hold nothing once engine and peer are gone.

#![no_main]

use kvferry_broker::PeerMessage;
use kvferry_dataplane::LaneMessage;
use kvferry_fuzz_seeds::{Node, Who};
use kvferry_handshake::{Frames, decode, encode};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some((who, mut stream)) = data.split_first() else { return };
    let who = if who & 1 == 0 { Who::Prefill } else { Who::Decode };
    let mut node = Node::new(who).expect("the same every time");
    let mut frames = Frames::new(1 << 20);
    while let Ok(Some(payload)) = frames.take(&mut stream) {
        if let Ok(message) = decode::<LaneMessage>(&payload) {
            assert_eq!(encode(&message).expect("was decoded"), payload);
        }
        let Ok(message) = PeerMessage::from_bytes(&payload) else { continue };
        let again = message.to_bytes().expect("was decoded");
        assert_eq!(PeerMessage::from_bytes(&again).expect("was encoded"), message);
        node.hear(message);
    }
    node.end();
});
