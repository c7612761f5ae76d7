//! Regions: engines' memory that the data plane can reach.

use kvferry_handshake::Code;

/// A mapped region; never reused within a daemon's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RegionKey(pub u64);

/// Why memory was refused. Names the field, both values and what to do.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct RegisterError {
    code: Code,
    message: String,
}

impl RegisterError {
    pub(crate) fn new(code: Code, message: impl Into<String>) -> RegisterError {
        RegisterError {
            code,
            message: message.into(),
        }
    }

    /// `region_kind`, `region_seals`, `region_out_of_bounds`, `region_overlap`, `region_unreachable` or
    /// `over_limit`.
    pub fn code(&self) -> Code {
        self.code
    }
}
