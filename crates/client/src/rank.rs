//! An attached rank: what an engine's worker works with.

use std::time::Duration;

use kvferry_control::{Answer, Call, Event, Fault, Fetch, Path, Publish, Side, Status, TransferId, Welcome};
use kvferry_handshake::{PageLists, Ready, TokenRange};
use tokio::sync::broadcast;

use crate::calls::Command;
use crate::client::Handle;
use crate::{ClientError, Fetching, Publication, RegionMemory};

/// An attached rank. Clones share one attachment; it ends when the last is dropped.
#[derive(Clone, Debug)]
pub struct Rank {
    handle: Handle,
}

/// Answer to [`Rank::register`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Registered {
    /// The registration's generation. The client fills it into page lists by itself.
    pub generation: u64,
    /// Paths by which the memory can be reached.
    pub paths: Vec<Path>,
}

/// What is ready of a transfer; see [`kvferry_control::Publish`]. Generations are filled in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublishRequest {
    /// The transfer.
    pub transfer: TransferId,
    /// The whole page lists so far; `None`: as before.
    pub pages: Option<PageLists>,
    /// What is ready now.
    pub ready: Ready,
    /// Small metadata for the decode engine; `None`: as before.
    pub metadata: Option<Vec<u8>>,
    /// How many decode engines will fetch it; at least 1.
    pub serves: u32,
}

/// What is wanted of a transfer; see [`kvferry_control::Fetch`]. Generations are filled in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FetchRequest {
    /// `kvferry://node:port/engine` of the prefill engine.
    pub source: String,
    /// The transfer.
    pub transfer: TransferId,
    /// The rank's page lists.
    pub pages: PageLists,
    /// Tokens wanted: those below `from` are held already.
    pub tokens: TokenRange,
    /// The least end that will do.
    pub least: u64,
}

/// Something that happened to the attachment.
#[derive(Clone, Debug, PartialEq)]
pub enum Notice {
    /// The daemon tells something; transfers' handles are told too.
    Event(Event),
    /// The connection to the daemon is lost; every open transfer has ended with `daemon_restarted`.
    DaemonLost,
    /// The daemon is back, and the rank is attached with all its regions again.
    DaemonBack {
        /// What it says of itself.
        welcome: Welcome,
    },
    /// The daemon is back and refuses what it accepted before; the client tries again with back-off.
    Refused {
        /// Why.
        cause: Fault,
    },
}

/// The attachment's notices, in order. A reader that falls behind by more than 1,024 misses the oldest.
#[derive(Debug)]
pub struct Notices {
    receiver: Option<broadcast::Receiver<Notice>>,
}

impl Rank {
    pub(crate) fn new(handle: Handle) -> Rank {
        Rank { handle }
    }

    /// The same rank, whose calls wait for an answer for so long; see [`crate::Client::patience`].
    #[must_use]
    pub fn patience(mut self, patience: Duration) -> Rank {
        self.handle = self.handle.patience(patience);
        self
    }

    /// Attaches again, with all regions, after [`Event::Detached`]: ranks of one engine disagreed, all were
    /// refused, and the cause is mended now.
    pub async fn reattach(&self) -> Result<(), ClientError> {
        self.handle.ask(|reply| Command::Reattach { reply }).await
    }

    /// Hands memory over as region `region`.
    pub async fn register(&self, region: u16, memory: RegionMemory) -> Result<Registered, ClientError> {
        self.handle
            .ask(|reply| Command::Register {
                region,
                memory,
                reply,
            })
            .await
    }

    /// Takes a region back. Once it returns, no byte of it is read or written any more.
    pub async fn unregister(&self, region: u16) -> Result<(), ClientError> {
        self.handle
            .ask(|reply| Command::Unregister { region, reply })
            .await
    }

    /// States what is ready of a transfer; call it again (or [`Publication::update`]) as more becomes ready.
    pub async fn publish(&self, publish: PublishRequest) -> Result<Publication, ClientError> {
        let PublishRequest {
            transfer,
            pages,
            ready,
            metadata,
            serves,
        } = publish;
        let call = Call::Publish(Publish {
            transfer: transfer.clone(),
            pages,
            generations: Vec::new(),
            ready,
            metadata,
            serves,
        });
        let id = transfer.clone();
        let transfer = (Side::Publish, transfer);
        let state = self
            .handle
            .ask(|reply| Command::Transfer {
                call,
                transfer,
                reply,
            })
            .await?;
        Ok(Publication::new(self.clone(), id, serves, state))
    }

    /// Asks for pages of a transfer.
    pub async fn fetch(&self, fetch: FetchRequest) -> Result<Fetching, ClientError> {
        let FetchRequest {
            source,
            transfer,
            pages,
            tokens,
            least,
        } = fetch;
        let call = Call::Fetch(Fetch {
            source,
            transfer: transfer.clone(),
            pages,
            generations: Vec::new(),
            tokens,
            least,
        });
        let id = transfer.clone();
        let transfer = (Side::Fetch, transfer);
        let state = self
            .handle
            .ask(|reply| Command::Transfer {
                call,
                transfer,
                reply,
            })
            .await?;
        Ok(Fetching::new(self.clone(), id, state))
    }

    /// Ends a transfer on all ranks, on whichever sides this rank is. Its handles still report the end, once it is fenced.
    pub async fn abort(&self, transfer: &TransferId) -> Result<(), ClientError> {
        let transfer = transfer.clone();
        self.call(Call::Abort { transfer }).await.map(drop)
    }

    /// A fetch will come: renews the publish's lease.
    pub async fn expect(&self, source: &str, transfer: &TransferId) -> Result<(), ClientError> {
        let (source, transfer) = (source.to_owned(), transfer.clone());
        self.call(Call::Expect { source, transfer }).await.map(drop)
    }

    /// No fetch will come: ends the publish's lease.
    pub async fn decline(&self, source: &str, transfer: &TransferId) -> Result<(), ClientError> {
        let (source, transfer) = (source.to_owned(), transfer.clone());
        self.call(Call::Decline { source, transfer }).await.map(drop)
    }

    /// What the daemon is doing.
    pub async fn status(&self) -> Result<Status, ClientError> {
        self.handle.status().await
    }

    /// Makes a call as it stands: for tests of what a daemon refuses. Nothing is filled in or remembered.
    pub async fn call(&self, call: Call) -> Result<Answer, ClientError> {
        self.handle.call(call).await
    }

    /// What happens from now on.
    pub fn notices(&self) -> Notices {
        self.handle.notices()
    }

    /// What the daemon says of itself; of its latest life.
    pub fn welcome(&self) -> Welcome {
        self.handle.presence.borrow().welcome.clone()
    }

    /// Waits until the rank is attached with all its regions: at once unless the daemon is away, or took the
    /// attachment back.
    pub async fn ready(&self) -> Result<(), ClientError> {
        let mut presence = self.handle.presence.clone();
        let up = presence.wait_for(|presence| presence.up).await;
        up.map(drop).map_err(|_| ClientError::Closed)
    }
}

impl Notices {
    pub(crate) fn new(receiver: Option<broadcast::Receiver<Notice>>) -> Notices {
        Notices { receiver }
    }

    /// The next notice; `None` once the attachment has ended.
    pub async fn next(&mut self) -> Option<Notice> {
        let receiver = self.receiver.as_mut()?;
        loop {
            match receiver.recv().await {
                Ok(notice) => return Some(notice),
                Err(broadcast::error::RecvError::Lagged(missed)) => {
                    tracing::warn!(missed, "notices were not read in time");
                }
                Err(broadcast::error::RecvError::Closed) => return None,
            }
        }
    }
}
