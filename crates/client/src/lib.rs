//! The client of an inference engine: attaches to the node's `kvferryd`, hands over memory, publishes
//! and fetches pages.
//!
//! ```no_run
//! # async fn example(envelope: kvferry_handshake::Envelope) -> Result<(), kvferry_client::ClientError> {
//! use kvferry_client::{Client, PublishRequest, SealedMemory};
//! use kvferry_handshake::{PageLists, Ready};
//!
//! let client = Client::connect("/run/kvferry/kvferryd.sock").await?;
//! let rank = client.attach(envelope, 0, None).await?;
//! let memory = SealedMemory::create("pool", 1 << 30)?;
//! rank.register(0, memory.region()?).await?;
//! let publication = rank
//!     .publish(PublishRequest {
//!         transfer: "req-1".into(),
//!         pages: Some(PageLists { groups: vec![vec![3, 9, 4]] }),
//!         ready: Ready::complete(40),
//!         metadata: None,
//!         serves: 1,
//!     })
//!     .await?;
//! match publication.ended().await {
//!     Ok(delivered) => println!("{} tokens, {:?}", delivered.tokens, delivered.report.paths),
//!     Err(failed) => println!("{}", failed.cause),
//! }
//! # Ok(())
//! # }
//! ```
//!
//! When the daemon goes away, every open transfer ends with `daemon_restarted`, and the client connects
//! again with back-off, attaches and registers again by itself: it keeps the envelope and the memory. Until then calls
//! are refused with errors for which [`ClientError::can_retry`] holds; [`Rank::ready`] waits.
#![forbid(unsafe_code)]

mod backoff;
mod calls;
mod client;
mod error;
mod link;
mod memory;
mod rank;
mod socket;
mod tracer;
mod transfer;

pub use client::Client;
pub use error::ClientError;
pub use kvferry_control::{Event, Fault, Path, Report, Side, Status, TransferId, Welcome};
pub use memory::{RegionMemory, SealedMemory};
pub use rank::{FetchRequest, Notice, Notices, PublishRequest, Rank, Registered};
pub use transfer::{Delivered, Failed, Fetching, Progress, Publication};
