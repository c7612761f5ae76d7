//! What comes in on the Unix socket, on both ends: a stream of frames, read as it is cut by the socket, then decoded.

#![no_main]

use kvferry_control::{FrameReader, MAX_UNATTACHED_FRAME, Request, Response};
use kvferry_handshake::{decode, encode};
use libfuzzer_sys::fuzz_target;
use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, send, socketpair};

fuzz_target!(|data: &[u8]| {
    message(data);
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (ours, theirs) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).expect("a socket pair");
    let mut reader = FrameReader::new(MAX_UNATTACHED_FRAME);
    // In two writes, so that frames are cut anywhere.
    let (first, second) = data.split_at(data.len() / 3);
    for part in [first, second] {
        if part.is_empty() || send(&theirs, part, SendFlags::NOSIGNAL) != Ok(part.len()) {
            return;
        }
        loop {
            match reader.read(&ours) {
                Ok(Ok(Some(frame))) => message(&frame.payload),
                Ok(Ok(None)) | Err(_) => break,
                Ok(Err(error)) => {
                    assert!(!error.to_string().is_empty());
                    return;
                }
            }
        }
    }
});

/// What was decoded is written and read again as it is. (Not always the same bytes: a code that this release does not
/// know becomes `unknown`.)
fn message(bytes: &[u8]) {
    if let Ok(request) = decode::<Request>(bytes) {
        let again = encode(&request).expect("was decoded");
        assert_eq!(decode::<Request>(&again).expect("was encoded"), request);
    }
    if let Ok(response) = decode::<Response>(bytes) {
        let again = encode(&response).expect("was decoded");
        assert_eq!(decode::<Response>(&again).expect("was encoded"), response);
    }
}
