//! What an operator sets, and why a start can fail.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

/// Settings of a data plane.
#[derive(Clone, Debug)]
pub struct Config {
    /// Where lanes are accepted: the data port. Port 0 takes any free one.
    pub listen: SocketAddr,
    /// Most lanes to one peer, in each direction; at least 1.
    pub lanes_per_peer: usize,
    /// Threads that copy within the node; at least 1.
    pub copy_threads: usize,
    /// Send a CRC32C with each chunk.
    pub checksum: bool,
    /// A lane that was not used for so long is closed.
    pub idle: Duration,
    /// A lane on which bytes are due and nothing moves for so long is destroyed and opened again.
    pub stall: Duration,
    /// How long an answer about a lane is awaited before it is asked for again.
    pub answer: Duration,
    /// When no lane to a peer can be opened for so long, the jobs that wait for one fail.
    pub patience: Duration,
    /// A connection to the data port that has not shown its token for so long is dropped.
    pub hello: Duration,
    /// Most connections that have not shown their token; the oldest gives way.
    pub max_unproven: usize,
    /// Most regions, of all owners together.
    pub max_regions: usize,
    /// Most bytes of all regions together.
    pub max_region_bytes: u64,
    /// Encrypts lanes.
    pub tls: Option<LaneTls>,
}

/// Certificates for encrypted lanes. Clones share them, so that new ones can take their place.
#[derive(Clone, Debug)]
pub struct LaneTls {
    both: Arc<RwLock<(Arc<rustls::ClientConfig>, Arc<rustls::ServerConfig>)>>,
}

impl LaneTls {
    /// `client` is for the sending end, which connects: the other end needs a certificate for the host that its
    /// peer name (`host:port`) states, as for the channel. `server` is for the receiving end, which accepts.
    pub fn new(client: Arc<rustls::ClientConfig>, server: Arc<rustls::ServerConfig>) -> LaneTls {
        LaneTls {
            both: Arc::new(RwLock::new((client, server))),
        }
    }

    /// Lanes that open from now on use these. Those that are open are left as they are.
    pub fn renew(&self, client: Arc<rustls::ClientConfig>, server: Arc<rustls::ServerConfig>) {
        *self.both.write().unwrap_or_else(PoisonError::into_inner) = (client, server);
    }

    pub(crate) fn client(&self) -> Arc<rustls::ClientConfig> {
        Arc::clone(&self.both.read().unwrap_or_else(PoisonError::into_inner).0)
    }

    pub(crate) fn server(&self) -> Arc<rustls::ServerConfig> {
        Arc::clone(&self.both.read().unwrap_or_else(PoisonError::into_inner).1)
    }
}

/// Why a data plane did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The data port cannot be bound.
    #[error("data port {address}: {source}; choose a free port or another address")]
    Listen {
        /// Where.
        address: SocketAddr,
        /// Why.
        source: std::io::Error,
    },
    /// A thread or fd could not be had.
    #[error("{what}: {source}")]
    Resources {
        /// What was needed.
        what: &'static str,
        /// Why.
        source: std::io::Error,
    },
    /// A setting is out of its bounds.
    #[error("{field} is {value}; it must be at least {least}")]
    Setting {
        /// Field of [`Config`].
        field: &'static str,
        /// What it is.
        value: usize,
        /// What it must be.
        least: usize,
    },
}

impl Default for Config {
    fn default() -> Config {
        Config {
            listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
            lanes_per_peer: 4,
            copy_threads: 2,
            checksum: false,
            idle: Duration::from_secs(30),
            stall: Duration::from_secs(10),
            answer: Duration::from_secs(1),
            patience: Duration::from_secs(15),
            hello: Duration::from_secs(5),
            max_unproven: 256,
            max_regions: 16 << 10,
            max_region_bytes: 16 << 40,
            tls: None,
        }
    }
}
