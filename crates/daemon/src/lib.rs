//! kvferryd: the daemon of one node.
//!
//! [`Daemon::start`] binds the engines' socket, the peers' port, the data port and the Prometheus
//! endpoint. One task, the *driver*, owns the broker: it is given what engines' sessions (`engines`),
//! peers (`peers`) and the data plane report, and carries out what the broker wants.
#![forbid(unsafe_code)]

mod aside;
pub mod config;
mod crowd;
mod daemon;
mod drain;
mod driver;
mod engines;
pub mod fds;
mod files;
mod jobs;
pub mod log;
mod metrics;
mod outbox;
mod peers;
mod record;
mod scrape;

pub use daemon::{Addresses, Daemon, DaemonError};
pub use engines::ListenError;
pub use metrics::reference_page as metrics_page;
pub use peers::TlsError;
