//! Wire form: bincode 2, fixed-width little-endian, with a decode limit, consumed to the last byte; frames
//! with a length before them.

use bincode::error::{DecodeError, EncodeError};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::catalogue::Code;
use crate::envelope::Envelope;
use crate::validate::InvalidEnvelope;

/// Most bytes of any payload: page lists of the largest transfers fit many times over.
pub const MAX_PAYLOAD: usize = 64 << 20;
/// Most bytes of an envelope.
pub const MAX_ENVELOPE: usize = 16 << 20;
/// Bytes of the length before a payload: a little-endian u32.
pub const FRAME_HEADER: usize = 4;
/// How far a frame's buffer is allocated ahead of what has arrived: a length by itself costs no more.
const READ_AHEAD: usize = 64 << 10;

/// Why bytes are no value, or a value no bytes.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// More bytes than are accepted.
    #[error("{len} bytes, where {most} are the most")]
    TooLong {
        /// Bytes announced or given.
        len: usize,
        /// Most bytes here.
        most: usize,
    },
    /// The bytes do not decode.
    #[error("{len} bytes do not decode: {cause}")]
    Malformed {
        /// Bytes given.
        len: usize,
        /// What is wrong with them.
        cause: String,
    },
    /// The value ends before the bytes do.
    #[error("the value ends after {used} of {len} bytes")]
    LeftOver {
        /// Bytes that the value took.
        used: usize,
        /// Bytes given.
        len: usize,
    },
    /// The value cannot be written.
    #[error("the value cannot be encoded: {cause}")]
    Unwritable {
        /// Why.
        cause: String,
    },
    /// The bytes are an envelope, and it is not valid.
    #[error(transparent)]
    Envelope(#[from] InvalidEnvelope),
}

impl WireError {
    /// The stable code.
    pub fn code(&self) -> Code {
        match self {
            WireError::TooLong { .. } => Code::FrameTooLong,
            WireError::Malformed { .. } | WireError::LeftOver { .. } | WireError::Unwritable { .. } => {
                Code::FrameMalformed
            }
            WireError::Envelope(invalid) => invalid.code(),
        }
    }
}

/// A value's bytes, at most [`MAX_PAYLOAD`].
pub fn encode<T: Serialize>(value: &T) -> Result<Vec<u8>, WireError> {
    let config = bincode::config::legacy().with_limit::<MAX_PAYLOAD>();
    let bytes = bincode::serde::encode_to_vec(value, config).map_err(|error| WireError::Unwritable {
        cause: match error {
            EncodeError::OtherString(cause) => cause,
            // What else there is, concerns types that no message has.
            _ => format!("it has more than {MAX_PAYLOAD} bytes, or a list without a length"),
        },
    })?;
    within(bytes.len(), MAX_PAYLOAD)?;
    Ok(bytes)
}

/// The value that `bytes` are, all of them. An envelope inside a message is not validated by this; whoever
/// takes it from the message calls [`Envelope::validate`].
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, WireError> {
    within(bytes.len(), MAX_PAYLOAD)?;
    // Without a limit, nine hostile bytes that announce a length make the decoder allocate until it aborts.
    let config = bincode::config::legacy().with_limit::<MAX_PAYLOAD>();
    let (value, used) =
        bincode::serde::decode_from_slice(bytes, config).map_err(|error| WireError::Malformed {
            len: bytes.len(),
            cause: told(&error),
        })?;
    if used != bytes.len() {
        return Err(WireError::LeftOver {
            used,
            len: bytes.len(),
        });
    }
    Ok(value)
}

/// What is wrong with the bytes, for someone who does not know the decoder.
fn told(error: &DecodeError) -> String {
    match error {
        DecodeError::UnexpectedEnd { additional } => {
            format!("they end too early; at least {additional} more would have to follow")
        }
        DecodeError::LimitExceeded => format!("a length in them exceeds {MAX_PAYLOAD} bytes"),
        DecodeError::Utf8 { inner } => format!("a text in them is not UTF-8: {inner}"),
        DecodeError::InvalidBooleanValue(value) => {
            format!("{value} stands where only 0 (no) and 1 (yes) can")
        }
        DecodeError::OutsideUsizeRange(value) => format!("a length of {value} is more than there can be"),
        DecodeError::OtherString(told) => choice(told).unwrap_or_else(|| told.clone()),
        DecodeError::Other(told) => (*told).to_owned(),
        // Of types that no message has.
        _ => "they are of another form".to_owned(),
    }
}

/// An unknown variant, which serde tells in words of Rust: "invalid value: integer `9`, expected variant index 0 <= i < 2".
fn choice(told: &str) -> Option<String> {
    let (given, there_are) = told
        .strip_prefix("invalid value: integer `")?
        .split_once("`, expected variant index 0 <= i < ")?;
    Some(format!(
        "{given} names none of the {there_are} forms that can stand there, counted from 0"
    ))
}

fn within(len: usize, most: usize) -> Result<(), WireError> {
    if len > most {
        return Err(WireError::TooLong { len, most });
    }
    Ok(())
}

impl Envelope {
    /// The envelope's bytes.
    pub fn to_bytes(&self) -> Result<Vec<u8>, WireError> {
        let bytes = encode(self)?;
        within(bytes.len(), MAX_ENVELOPE)?;
        Ok(bytes)
    }

    /// The envelope that `bytes` are, validated.
    pub fn from_bytes(bytes: &[u8]) -> Result<Envelope, WireError> {
        within(bytes.len(), MAX_ENVELOPE)?;
        let envelope: Envelope = decode(bytes)?;
        envelope.validate()?;
        Ok(envelope)
    }
}

/// A payload with its length before it.
pub fn frame(payload: &[u8]) -> Result<Vec<u8>, WireError> {
    let len = u32::try_from(payload.len())
        .ok()
        .filter(|_| payload.len() <= MAX_PAYLOAD);
    let len = len.ok_or(WireError::TooLong {
        len: payload.len(),
        most: MAX_PAYLOAD,
    })?;
    let mut bytes = Vec::with_capacity(FRAME_HEADER + payload.len());
    bytes.extend_from_slice(&len.to_le_bytes());
    bytes.extend_from_slice(payload);
    Ok(bytes)
}

/// Cuts a stream of bytes into frames, wherever the bytes come from. Memory grows with what arrives, never with
/// what is announced.
#[derive(Debug)]
pub struct Frames {
    most: usize,
    header: Vec<u8>,
    announced: Option<usize>,
    payload: Vec<u8>,
}

impl Frames {
    /// Accepts payloads of at most `most` bytes.
    pub fn new(most: usize) -> Frames {
        Frames {
            most,
            header: Vec::new(),
            announced: None,
            payload: Vec::new(),
        }
    }

    /// Changes the longest payload accepted, from the next header on.
    pub fn set_limit(&mut self, most: usize) {
        self.most = most;
    }

    /// Takes bytes off the front of `input` until a frame is whole; `None` when more is needed. After an error
    /// the stream is of no use.
    pub fn take(&mut self, input: &mut &[u8]) -> Result<Option<Vec<u8>>, WireError> {
        let announced = match self.announced {
            Some(announced) => announced,
            None => {
                let missing = FRAME_HEADER - self.header.len();
                let (head, rest) = input.split_at(missing.min(input.len()));
                self.header.extend_from_slice(head);
                *input = rest;
                let Ok(header) = <[u8; FRAME_HEADER]>::try_from(self.header.as_slice()) else {
                    return Ok(None);
                };
                self.header.clear();
                let announced = usize::try_from(u32::from_le_bytes(header)).unwrap_or(usize::MAX);
                within(announced, self.most)?;
                self.payload.reserve(announced.min(READ_AHEAD));
                self.announced = Some(announced);
                announced
            }
        };
        let missing = announced - self.payload.len();
        let (body, rest) = input.split_at(missing.min(input.len()));
        self.payload.extend_from_slice(body);
        *input = rest;
        if self.payload.len() < announced {
            return Ok(None);
        }
        self.announced = None;
        Ok(Some(std::mem::take(&mut self.payload)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_cut_at_any_byte() {
        let mut stream = Vec::new();
        for payload in [b"abc".as_slice(), b"", b"d"] {
            stream.extend(frame(payload).unwrap());
        }
        for step in 1..=stream.len() {
            let mut frames = Frames::new(3);
            let mut got = Vec::new();
            for piece in stream.chunks(step) {
                let mut piece = piece;
                while let Some(payload) = frames.take(&mut piece).unwrap() {
                    got.push(payload);
                }
                assert!(piece.is_empty());
            }
            assert_eq!(got, [b"abc".to_vec(), vec![], b"d".to_vec()], "step {step}");
        }
    }

    #[test]
    fn a_frame_that_is_not_whole_is_kept() {
        let mut frames = Frames::new(100);
        for byte in [3u8, 0, 0, 0, b'a', b'b'] {
            assert_eq!(frames.take(&mut [byte].as_slice()), Ok(None));
        }
        assert_eq!(frames.take(&mut b"c".as_slice()), Ok(Some(b"abc".to_vec())));
    }

    #[test]
    fn a_length_is_refused_beyond_the_limit_and_reserves_little_below_it() {
        let mut frames = Frames::new(100);
        let error = frames.take(&mut [101, 0, 0, 0].as_slice()).unwrap_err();
        assert_eq!(error, WireError::TooLong { len: 101, most: 100 });
        assert_eq!(error.code(), Code::FrameTooLong);

        let mut frames = Frames::new(MAX_PAYLOAD);
        let header = u32::try_from(MAX_PAYLOAD).unwrap().to_le_bytes();
        assert_eq!(frames.take(&mut header.as_slice()), Ok(None));
        assert!(frames.payload.capacity() <= READ_AHEAD);
    }

    #[test]
    fn bytes_left_over_or_missing_are_refused() {
        let bytes = encode(&7u64).unwrap();
        assert_eq!(bytes, [7, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(decode(&bytes), Ok(7u64));
        let mut longer = bytes.clone();
        longer.push(0);
        let error = decode::<u64>(&longer).unwrap_err();
        assert_eq!(error, WireError::LeftOver { used: 8, len: 9 });
        assert_eq!(error.code(), Code::FrameMalformed);
        assert!(matches!(
            decode::<u64>(&bytes[..7]),
            Err(WireError::Malformed { len: 7, .. })
        ));
    }

    #[test]
    fn what_does_not_decode_is_told_in_words() {
        #[derive(Debug, PartialEq, serde::Deserialize)]
        enum Either {
            One,
            Two(String),
        }
        let told = |bytes: &[u8]| match decode::<Option<Either>>(bytes) {
            Err(error @ WireError::Malformed { .. }) => error.to_string(),
            other => panic!("{other:?}"),
        };
        let text = |len: u64, of: &[u8]| [&[1, 1, 0, 0, 0], &len.to_le_bytes()[..], of].concat();
        let cases = [
            (vec![1, 2, 0, 0, 0], "2 names none of the 2 forms"),
            (vec![1, 0], "end too early; at least"),
            (text(3, b"ab"), "end too early; at least 1 more"),
            (text(1, b"\xff"), "is not UTF-8: invalid utf-8 sequence"),
            (text(u64::MAX / 2, b""), "exceeds 67108864 bytes"),
            (vec![7], ""),
        ];
        for (bytes, words) in cases {
            let told = told(&bytes);
            assert!(told.contains(words), "{words:?} is not in {told:?}");
            assert!(!told.contains(['{', '`', '(']), "{told:?}");
        }
        assert_eq!(decode(&text(2, b"ab")), Ok(Some(Either::Two("ab".to_owned()))));
        let told = decode::<bool>(&[2]).unwrap_err().to_string();
        assert!(
            told.contains("2 stands where only 0 (no) and 1 (yes) can"),
            "{told}"
        );
    }

    #[test]
    fn a_length_that_no_bytes_follow_is_refused() {
        let hostile = [0xff; 9];
        assert!(matches!(
            decode::<Vec<u8>>(&hostile),
            Err(WireError::Malformed { .. })
        ));
        assert!(matches!(
            decode::<String>(&hostile),
            Err(WireError::Malformed { .. })
        ));
        let mut announced = (MAX_PAYLOAD as u64 + 1).to_le_bytes().to_vec();
        announced.push(0);
        assert!(decode::<Vec<u8>>(&announced).is_err());
    }
}
