//! Handles of transfers under way. Dropping one does not end its transfer.

use kvferry_control::{Fault, Report, TransferId};
use kvferry_handshake::{PageLists, Ready};

use crate::ClientError;

/// A publish under way.
#[derive(Clone, Debug)]
pub struct Publication {}

/// A fetch under way.
#[derive(Clone, Debug)]
pub struct Fetching {}

/// A transfer that ended well, and is fenced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delivered {
    /// Tokens `[0, tokens)` are now held by the decode side.
    pub tokens: u64,
    /// To the decode rank: the publisher's metadata.
    pub metadata: Vec<u8>,
    /// How it went.
    pub report: Report,
}

/// A transfer that ended with a fault, and is fenced.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{cause}")]
pub struct Failed {
    /// The cause.
    pub cause: Fault,
    /// How it went until then.
    pub report: Report,
}

/// How far a transfer is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Of a publish: the decode engine that came for it.
    pub engine: Option<String>,
    /// Bytes of this rank moved so far.
    pub bytes: u64,
    /// Bytes of this rank in all, as far as known.
    pub total: u64,
}

impl Publication {
    /// The transfer.
    pub fn transfer(&self) -> &TransferId {
        todo!()
    }

    /// States that more is ready; with longer page lists or metadata where they are new.
    pub async fn update(
        &self,
        ready: Ready,
        pages: Option<PageLists>,
        metadata: Option<Vec<u8>>,
    ) -> Result<(), ClientError> {
        let _ = (ready, pages, metadata);
        todo!()
    }

    /// How far it is.
    pub fn progress(&self) -> Progress {
        todo!()
    }

    /// Waits until more is done than `seen`, or the transfer ended.
    pub async fn moved_on(&self, seen: &Progress) -> Progress {
        let _ = seen;
        todo!()
    }

    /// Waits for the end: after it no byte leaves the pages.
    pub async fn ended(&self) -> Result<Delivered, Failed> {
        todo!()
    }
}

impl Fetching {
    /// The transfer.
    pub fn transfer(&self) -> &TransferId {
        todo!()
    }

    /// How far it is.
    pub fn progress(&self) -> Progress {
        todo!()
    }

    /// Waits until more is done than `seen`, or the transfer ended.
    pub async fn moved_on(&self, seen: &Progress) -> Progress {
        let _ = seen;
        todo!()
    }

    /// Waits for the end: after `Ok` every byte may be read, after either no byte lands any more.
    pub async fn ended(&self) -> Result<Delivered, Failed> {
        todo!()
    }
}
