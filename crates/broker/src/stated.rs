//! An envelope as calls and messages carry it: validated by whoever reads them, not by the one task that drives the
//! broker, and shared from there on.

use std::ops::Deref;
use std::sync::Arc;

use kvferry_control::Fault;
use kvferry_handshake::Envelope;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// An envelope, and what is wrong with it, if anything is. It travels as the envelope alone.
#[derive(Clone, Debug)]
pub struct Stated {
    envelope: Arc<Envelope>,
    invalid: Option<Arc<Fault>>,
}

impl Stated {
    /// Validates the envelope, which takes milliseconds where it has many ranks.
    pub fn new(envelope: impl Into<Arc<Envelope>>) -> Stated {
        let envelope = envelope.into();
        let invalid = envelope.validate().err();
        Stated {
            invalid: invalid.map(|invalid| Arc::new(Fault::new(invalid.code(), invalid.to_string()))),
            envelope,
        }
    }

    /// One that was validated before.
    pub(crate) fn sound(envelope: &Arc<Envelope>) -> Stated {
        Stated {
            envelope: Arc::clone(envelope),
            invalid: None,
        }
    }

    /// The envelope, if it is valid.
    pub(crate) fn valid(&self) -> Result<&Arc<Envelope>, Fault> {
        match &self.invalid {
            None => Ok(&self.envelope),
            Some(fault) => Err((**fault).clone()),
        }
    }
}

impl Deref for Stated {
    type Target = Envelope;

    fn deref(&self) -> &Envelope {
        &self.envelope
    }
}

impl PartialEq for Stated {
    fn eq(&self, other: &Stated) -> bool {
        self.envelope == other.envelope
    }
}

impl Serialize for Stated {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.envelope.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Stated {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Stated, D::Error> {
        Envelope::deserialize(deserializer).map(Stated::new)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvferry_handshake::{Code, Launch, ModelShape, decode, encode};

    #[test]
    fn it_is_validated_when_it_is_read() {
        let model = ModelShape::new("small", 2).kv(0..2, 4, 8);
        let good = Launch::default().envelope(&model).unwrap();
        let read: Stated = decode(&encode(&Stated::new(good.clone())).unwrap()).unwrap();
        assert_eq!(**read.valid().unwrap(), good);
        let mut bad = good;
        bad.components[0].layers.clear();
        let read: Stated = decode(&encode(&Stated::new(bad)).unwrap()).unwrap();
        assert_eq!(read.valid().unwrap_err().code, Code::EnvelopeInvalid);
    }
}
