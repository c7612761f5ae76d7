//! Handles of transfers under way. Dropping one does not end its transfer.

use kvferry_control::{Fault, Report, Side, TransferId};
use kvferry_handshake::{Code, PageLists, Ready};
use tokio::sync::watch;

use crate::{ClientError, PublishRequest, Rank};

/// A publish under way.
#[derive(Clone, Debug)]
pub struct Publication {
    /// Keeps the attachment, without which the transfer would end.
    rank: Rank,
    transfer: TransferId,
    serves: u32,
    state: watch::Receiver<TransferState>,
}

/// A fetch under way.
#[derive(Clone, Debug)]
pub struct Fetching {
    /// Keeps the attachment, without which the transfer would end.
    _rank: Rank,
    transfer: TransferId,
    state: watch::Receiver<TransferState>,
}

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

/// What is known of a transfer.
#[derive(Debug, Default)]
pub(crate) struct TransferState {
    /// The daemon took the first call.
    pub(crate) accepted: bool,
    /// Of a fetch: the source, as it was called.
    pub(crate) source: Option<String>,
    pub(crate) progress: Progress,
    pub(crate) end: Option<Result<Delivered, Failed>>,
}

impl TransferState {
    /// Where it stood when its daemon was lost: peer, phase and bytes, as far as was told.
    pub(crate) fn standing(&self, side: Side) -> String {
        let Progress { engine, bytes, total } = &self.progress;
        let phase = match (side, &self.source, engine) {
            (Side::Fetch, Some(source), _) => format!("fetch from {source}"),
            (Side::Fetch, None, _) => "fetch".to_owned(),
            (Side::Publish, _, Some(engine)) => format!("publish, moving to engine {engine}"),
            (Side::Publish, _, None) => "publish, waiting for a decode engine".to_owned(),
        };
        match total {
            0 => format!("{phase}; no bytes done as far as was told"),
            total => format!("{phase}; {bytes} of {total} bytes done as far as was told"),
        }
    }
}

impl Publication {
    pub(crate) fn new(
        rank: Rank,
        transfer: TransferId,
        serves: u32,
        state: watch::Receiver<TransferState>,
    ) -> Publication {
        Publication {
            rank,
            transfer,
            serves,
            state,
        }
    }

    /// The transfer.
    pub fn transfer(&self) -> &TransferId {
        &self.transfer
    }

    /// States that more is ready; with longer page lists or metadata where they are new.
    pub async fn update(
        &self,
        ready: Ready,
        pages: Option<PageLists>,
        metadata: Option<Vec<u8>>,
    ) -> Result<(), ClientError> {
        let publish = PublishRequest {
            transfer: self.transfer.clone(),
            pages,
            ready,
            metadata,
            serves: self.serves,
        };
        self.rank.publish(publish).await.map(drop)
    }

    /// How far it is.
    pub fn progress(&self) -> Progress {
        self.state.borrow().progress.clone()
    }

    /// Waits until more is done than `seen`, or the transfer ended.
    pub async fn moved_on(&self, seen: &Progress) -> Progress {
        moved_on(self.state.clone(), seen).await
    }

    /// Waits for the end: after it no byte leaves the pages.
    pub async fn ended(&self) -> Result<Delivered, Failed> {
        ended(self.state.clone()).await
    }
}

impl Fetching {
    pub(crate) fn new(rank: Rank, transfer: TransferId, state: watch::Receiver<TransferState>) -> Fetching {
        Fetching {
            _rank: rank,
            transfer,
            state,
        }
    }

    /// The transfer.
    pub fn transfer(&self) -> &TransferId {
        &self.transfer
    }

    /// How far it is.
    pub fn progress(&self) -> Progress {
        self.state.borrow().progress.clone()
    }

    /// Waits until more is done than `seen`, or the transfer ended.
    pub async fn moved_on(&self, seen: &Progress) -> Progress {
        moved_on(self.state.clone(), seen).await
    }

    /// Waits for the end: after `Ok` every byte may be read, after either no byte lands any more.
    pub async fn ended(&self) -> Result<Delivered, Failed> {
        ended(self.state.clone()).await
    }
}

async fn moved_on(mut state: watch::Receiver<TransferState>, seen: &Progress) -> Progress {
    // An error means that the state changes no more.
    let _ = state
        .wait_for(|state| state.end.is_some() || state.progress != *seen)
        .await;
    state.borrow_and_update().progress.clone()
}

async fn ended(mut state: watch::Receiver<TransferState>) -> Result<Delivered, Failed> {
    if let Ok(state) = state.wait_for(|state| state.end.is_some()).await
        && let Some(end) = &state.end
    {
        return end.clone();
    }
    Err(Failed {
        cause: Fault::new(
            Code::DaemonRestarted,
            "the client was closed before the transfer ended",
        ),
        report: Report::default(),
    })
}
