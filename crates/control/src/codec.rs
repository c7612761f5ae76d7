//! Messages to bytes and back: bincode, fixed-width little-endian, consumed to the last byte.

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::MAX_FRAME;

/// Bytes that are not a message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Malformed {
    /// What is wrong with them.
    pub message: String,
}

/// A message's bytes.
pub fn encode<T: Serialize>(message: &T) -> Result<Vec<u8>, Malformed> {
    let config = bincode::config::legacy().with_limit::<MAX_FRAME>();
    bincode::serde::encode_to_vec(message, config).map_err(|error| Malformed {
        message: format!("the message cannot be written: {error}"),
    })
}

/// The message that `bytes` are, all of them.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Malformed> {
    // Without a limit a length of nine hostile bytes makes the decoder allocate until it aborts.
    let config = bincode::config::legacy().with_limit::<MAX_FRAME>();
    let (message, used) = bincode::serde::decode_from_slice(bytes, config).map_err(|error| Malformed {
        message: format!("the frame of {} bytes does not decode: {error}", bytes.len()),
    })?;
    if used != bytes.len() {
        return Err(Malformed {
            message: format!(
                "the frame has {} bytes, of which only {used} are used",
                bytes.len()
            ),
        });
    }
    Ok(message)
}
