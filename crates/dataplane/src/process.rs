//! An engine's process, as the kernel vouches for it.

use std::os::fd::AsFd;

/// The process at the other end of a Unix socket.
#[derive(Debug)]
pub struct EngineProcess {}

/// Why the peer's process could not be told.
#[derive(Debug, thiserror::Error)]
#[error("the engine's process cannot be told from its socket ({what}): {source}")]
pub struct ProcessError {
    /// Which step.
    pub what: &'static str,
    /// Why.
    pub source: std::io::Error,
}

impl EngineProcess {
    /// The process that connected `socket`, by the socket's credentials and a pidfd.
    pub fn of(socket: &impl AsFd) -> Result<EngineProcess, ProcessError> {
        let _ = socket;
        todo!()
    }

    /// Its pid as we see it; 0 when it lives in a PID namespace that we cannot see.
    pub fn pid(&self) -> i32 {
        todo!()
    }

    /// The user id that it connected with.
    pub fn uid(&self) -> u32 {
        todo!()
    }
}
