//! What travels on a lane besides payload.
//!
//! ```text
//! hello:   "KVFLANE1" | epoch u64 | token 32 bytes                      sender -> receiver, once
//! answer:  "KVFLANE1"                                                   receiver -> sender, once
//! frame:   header 40 bytes | payload | trailer 8 bytes                  sender -> receiver
//! ack:     24 bytes                                                     receiver -> sender, in the frames' order
//! ```
//!
//! Integers are little-endian. Headers and acknowledgements carry a CRC32C of themselves: a damaged one ends the
//! lane. With `tls`, everything after the hello is inside TLS.

use crate::Token;

pub(crate) const HELLO: &[u8; 8] = b"KVFLANE1";
pub(crate) const HELLO_BYTES: usize = 8 + 8 + 32;
pub(crate) const HEADER_BYTES: usize = 40;
pub(crate) const TRAILER_BYTES: usize = 8;
pub(crate) const ACK_BYTES: usize = 24;

/// Longest payload of a frame that is drained rather than ending the lane.
pub(crate) const MAX_PAYLOAD: u64 = 4 << 30;

const HEADER_MAGIC: u32 = 0x4b56_4348;
const ACK_MAGIC: u32 = 0x4b56_4341;
const STATUS_OK: u32 = 0x4b56_6f6b;
const STATUS_VOID: u32 = 0x4b56_7664;
const FLAG_CHECKSUM: u32 = 1;

/// Begins a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    /// The receive job.
    pub(crate) slot: u64,
    /// Chunk number.
    pub(crate) chunk: u32,
    /// Token end of the map that the chunk was cut from.
    pub(crate) end: u64,
    /// Payload bytes.
    pub(crate) bytes: u64,
    /// The trailer has a CRC32C of header and payload.
    pub(crate) checksum: bool,
}

/// Ends a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Trailer {
    /// The payload is what the header says; with its CRC32C if the header says so, else 0.
    Whole(u32),
    /// The job was closed underway, and the payload is worthless.
    Void,
}

/// What became of a chunk at the receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// It landed, now or before, and is visible.
    Landed,
    /// No such slot, or no longer.
    Unknown,
    /// The trailer said so.
    Void,
    /// By the receiver's plan it is another chunk.
    Differs,
    /// Its checksum did not match.
    Damaged,
    /// The receiver's job failed.
    Failed,
}

/// Acknowledges a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ack {
    pub(crate) slot: u64,
    pub(crate) chunk: u32,
    pub(crate) verdict: Verdict,
}

/// Takes integers off the front.
struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn bytes<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (head, tail) = self.0.split_first_chunk::<N>()?;
        self.0 = tail;
        Some(*head)
    }

    fn u32(&mut self) -> Option<u32> {
        self.bytes().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.bytes().map(u64::from_le_bytes)
    }
}

/// Appends the CRC32C of what was written, filling the array's last 4 bytes.
fn seal<const N: usize>(mut out: [u8; N]) -> [u8; N] {
    let crc = crc32c::crc32c(&out[..N - 4]);
    out[N - 4..].copy_from_slice(&crc.to_le_bytes());
    out
}

fn is_sealed<const N: usize>(bytes: &[u8; N]) -> bool {
    seal(*bytes) == *bytes
}

fn write(out: &mut [u8], fields: &[&[u8]]) {
    let mut at = 0;
    for field in fields {
        out[at..at + field.len()].copy_from_slice(field);
        at += field.len();
    }
}

pub(crate) fn hello(epoch: u64, token: &Token) -> [u8; HELLO_BYTES] {
    let mut out = [0; HELLO_BYTES];
    write(&mut out, &[HELLO, &epoch.to_le_bytes(), &token.0]);
    out
}

/// Epoch and token, if it is a hello.
pub(crate) fn read_hello(bytes: &[u8; HELLO_BYTES]) -> Option<(u64, Token)> {
    let mut reader = Reader(bytes);
    if reader.bytes::<8>()? != *HELLO {
        return None;
    }
    Some((reader.u64()?, Token(reader.bytes()?)))
}

impl Header {
    pub(crate) fn encode(&self) -> [u8; HEADER_BYTES] {
        let mut out = [0; HEADER_BYTES];
        let flags = if self.checksum { FLAG_CHECKSUM } else { 0 };
        write(
            &mut out,
            &[
                &HEADER_MAGIC.to_le_bytes(),
                &flags.to_le_bytes(),
                &self.slot.to_le_bytes(),
                &self.end.to_le_bytes(),
                &self.bytes.to_le_bytes(),
                &self.chunk.to_le_bytes(),
            ],
        );
        seal(out)
    }

    pub(crate) fn decode(bytes: &[u8; HEADER_BYTES]) -> Option<Header> {
        if !is_sealed(bytes) {
            return None;
        }
        let mut reader = Reader(bytes);
        let (magic, flags) = (reader.u32()?, reader.u32()?);
        if magic != HEADER_MAGIC || flags & !FLAG_CHECKSUM != 0 {
            return None;
        }
        Some(Header {
            slot: reader.u64()?,
            end: reader.u64()?,
            bytes: reader.u64()?,
            chunk: reader.u32()?,
            checksum: flags & FLAG_CHECKSUM != 0,
        })
    }
}

impl Trailer {
    pub(crate) fn encode(self) -> [u8; TRAILER_BYTES] {
        let (status, crc) = match self {
            Trailer::Whole(crc) => (STATUS_OK, crc),
            Trailer::Void => (STATUS_VOID, 0),
        };
        let mut out = [0; TRAILER_BYTES];
        write(&mut out, &[&status.to_le_bytes(), &crc.to_le_bytes()]);
        out
    }

    pub(crate) fn decode(bytes: &[u8; TRAILER_BYTES]) -> Option<Trailer> {
        let mut reader = Reader(bytes);
        match (reader.u32()?, reader.u32()?) {
            (STATUS_OK, crc) => Some(Trailer::Whole(crc)),
            (STATUS_VOID, 0) => Some(Trailer::Void),
            _ => None,
        }
    }
}

const VERDICTS: [Verdict; 6] = [
    Verdict::Landed,
    Verdict::Unknown,
    Verdict::Void,
    Verdict::Differs,
    Verdict::Damaged,
    Verdict::Failed,
];

impl Ack {
    pub(crate) fn encode(&self) -> [u8; ACK_BYTES] {
        let verdict = (0u32..)
            .zip(VERDICTS)
            .find(|(_, verdict)| *verdict == self.verdict);
        let verdict = verdict.map_or(u32::MAX, |(number, _)| number);
        let mut out = [0; ACK_BYTES];
        write(
            &mut out,
            &[
                &ACK_MAGIC.to_le_bytes(),
                &verdict.to_le_bytes(),
                &self.slot.to_le_bytes(),
                &self.chunk.to_le_bytes(),
            ],
        );
        seal(out)
    }

    pub(crate) fn decode(bytes: &[u8; ACK_BYTES]) -> Option<Ack> {
        if !is_sealed(bytes) {
            return None;
        }
        let mut reader = Reader(bytes);
        let (magic, verdict) = (reader.u32()?, reader.u32()?);
        if magic != ACK_MAGIC {
            return None;
        }
        Some(Ack {
            verdict: *VERDICTS.get(usize::try_from(verdict).ok()?)?,
            slot: reader.u64()?,
            chunk: reader.u32()?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::{Ack, HEADER_BYTES, Header, Trailer, VERDICTS, hello, read_hello};
    use crate::Token;

    fn header() -> Header {
        Header {
            slot: 0x0102_0304_0506_0708,
            chunk: 77,
            end: 27_367,
            bytes: 4 << 20,
            checksum: true,
        }
    }

    #[test]
    fn what_is_encoded_is_decoded() {
        assert_eq!(Header::decode(&header().encode()), Some(header()));
        for trailer in [Trailer::Whole(0), Trailer::Whole(0xdead_beef), Trailer::Void] {
            assert_eq!(Trailer::decode(&trailer.encode()), Some(trailer));
        }
        for verdict in VERDICTS {
            let ack = Ack {
                slot: 9,
                chunk: 3,
                verdict,
            };
            assert_eq!(Ack::decode(&ack.encode()), Some(ack));
        }
        let token = Token([7; 32]);
        assert_eq!(read_hello(&hello(5, &token)), Some((5, token)));
    }

    #[test]
    fn a_flipped_bit_is_noticed() {
        let good = header().encode();
        for bit in 0..HEADER_BYTES * 8 {
            let mut bad = good;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Header::decode(&bad), None, "bit {bit}");
        }
        let good = Ack {
            slot: 1,
            chunk: 2,
            verdict: VERDICTS[0],
        }
        .encode();
        for bit in 0..good.len() * 8 {
            let mut bad = good;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Ack::decode(&bad), None, "bit {bit}");
        }
    }

    #[test]
    fn unknown_words_are_refused() {
        assert_eq!(Trailer::decode(&[0; 8]), None);
        assert_eq!(read_hello(&[0; 48]), None);
    }
}
