//! One envelope by itself: every bound, every reference, and the proof that no two rows overlap.
//!
//! All faults are reported at once. Whoever receives an envelope validates it before using it;
//! everything else in Kvferry relies on what is checked here.

mod declared;
mod overlap;
mod placed;

use std::fmt;

use crate::catalogue::Code;
use crate::envelope::Envelope;

/// Faults listed of one envelope; the rest is counted.
const MAX_FAULTS: usize = 100;

/// One thing that is wrong with an envelope.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EnvelopeFault {
    /// [`Code::EnvelopeInvalid`] or [`Code::PlacementOverlap`].
    pub code: Code,
    /// The field, as a path into the envelope file: `rank.3.placement.0.strides.token`.
    pub field: String,
    /// What is wrong, with the value and the bound.
    pub message: String,
}

/// Everything that is wrong with an envelope.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvalidEnvelope {
    /// The faults, in envelope order; never empty.
    pub faults: Vec<EnvelopeFault>,
    /// Faults beyond those listed.
    pub more: usize,
}

impl InvalidEnvelope {
    /// The code of the first fault.
    pub fn code(&self) -> Code {
        self.faults
            .first()
            .map_or(Code::EnvelopeInvalid, |fault| fault.code)
    }
}

impl fmt::Display for EnvelopeFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}: {}", self.code, self.field, self.message)
    }
}

impl fmt::Display for InvalidEnvelope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, fault) in self.faults.iter().enumerate() {
            if at > 0 {
                f.write_str("; ")?;
            }
            fault.fmt(f)?;
        }
        if self.more > 0 {
            write!(f, "; and {} more", self.more)?;
        }
        Ok(())
    }
}

impl std::error::Error for InvalidEnvelope {}

impl Envelope {
    /// Checks the envelope by itself and reports every fault at once.
    ///
    /// An element type of `auto` passes: it is the comparison that refuses it. What depends on
    /// the size of such an element (whether rows overlap, how long a region is) is not checked.
    pub fn validate(&self) -> Result<(), InvalidEnvelope> {
        let mut faults = Faults::default();
        declared::check(self, &mut faults);
        // Placements refer to what was declared; where that is out of bounds they prove nothing.
        if faults.total() == 0 {
            placed::check(self, &mut faults);
        }
        faults.into_result()
    }
}

/// Faults as they are found.
#[derive(Default)]
struct Faults {
    found: Vec<EnvelopeFault>,
    more: usize,
}

impl Faults {
    fn total(&self) -> usize {
        self.found.len() + self.more
    }

    fn add(&mut self, code: Code, field: impl FnOnce() -> String, message: impl FnOnce() -> String) {
        if self.found.len() < MAX_FAULTS {
            self.found.push(EnvelopeFault {
                code,
                field: field(),
                message: message(),
            });
        } else {
            self.more += 1;
        }
    }

    fn invalid(&mut self, field: impl FnOnce() -> String, message: impl FnOnce() -> String) {
        self.add(Code::EnvelopeInvalid, field, message);
    }

    /// Reports a value outside `low..=high`; true when it is inside.
    fn bounded(&mut self, field: impl FnOnce() -> String, value: u64, low: u64, high: u64) -> bool {
        let inside = (low..=high).contains(&value);
        if !inside {
            self.invalid(field, || format!("{value} is not in {low}..={high}"));
        }
        inside
    }

    fn into_result(self) -> Result<(), InvalidEnvelope> {
        if self.found.is_empty() {
            Ok(())
        } else {
            Err(InvalidEnvelope {
                faults: self.found,
                more: self.more,
            })
        }
    }
}
