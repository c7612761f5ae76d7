//! What an operator sets: defaults, checks, and where the peer port may listen.

mod address;
mod document;
mod file;
mod flags;
mod keys;

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use kvferry_handshake::Policy;

pub use address::{Advertised, AdvertisedError};
pub use document::{effective, example_file, reference_page};
pub use file::ConfigError;
pub use flags::{Invocation, parse};

/// The whole configuration. [`parse`] makes one from a file and flags without any side effect.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Unix socket for engines.
    pub socket: PathBuf,
    /// Permission bits of the socket.
    pub socket_mode: u32,
    /// User ids that may connect besides root and the daemon's own.
    pub allow_users: Vec<u32>,
    /// Where peer daemons connect.
    pub peer_listen: SocketAddr,
    /// The address that peers and routers name this daemon by; made from `peer_listen` when not set.
    pub advertise: Option<Advertised>,
    /// Certificates for the peer channel.
    pub tls: Option<TlsFiles>,
    /// The operator accepts that anyone who reaches the peer port can read and write KV caches.
    pub insecure_peers_without_tls: bool,
    /// Silence after which a peer counts as lost.
    pub peer_timeout: Duration,
    /// Where TCP lanes connect; `None`: the host of `peer_listen`, any port.
    pub data_listen: Option<SocketAddr>,
    /// Most TCP lanes to one peer, in each direction.
    pub lanes_per_peer: usize,
    /// Threads that copy within the node.
    pub copy_threads: usize,
    /// A CRC32C with each chunk.
    pub checksum: bool,
    /// TLS on the lanes, too.
    pub encrypt_lanes: bool,
    /// Which pairs of engines may be linked.
    pub policy: Policy,
    /// Which paths between nodes are good enough.
    pub require: Require,
    /// A transfer without progress for so long fails.
    pub deadline: Duration,
    /// A publish that nobody fetches is kept for so long.
    pub lease: Duration,
    /// Bounds.
    pub limits: Limits,
    /// The Prometheus endpoint; `None`: off.
    pub metrics_listen: Option<SocketAddr>,
    /// What is logged.
    pub log_level: String,
    /// How it is logged.
    pub log_format: LogFormat,
    /// How long transfers may go on after SIGTERM.
    pub grace: Duration,
}

/// PEM files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// Certificates of the authority that signed all daemons' certificates.
    pub ca: PathBuf,
    /// This daemon's certificate, with intermediates.
    pub cert: PathBuf,
    /// Its private key.
    pub key: PathBuf,
}

/// Which paths between nodes are good enough.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Require {
    /// Any.
    #[default]
    Any,
    /// RDMA, or the transfer fails.
    Rdma,
}

/// How the log is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

/// Bounds on what engines and peers can make the daemon hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Connections of engines.
    pub connections: usize,
    /// Connections of engines of one user.
    pub connections_per_user: usize,
    /// Attached ranks.
    pub ranks: usize,
    /// Registered regions.
    pub regions: usize,
    /// Bytes of all registered regions.
    pub registered_bytes: u64,
    /// Open publishes and fetches of one rank.
    pub transfers_per_rank: usize,
    /// Page-list entries of one publish or fetch.
    pub pages_per_transfer: u64,
    /// Page-list entries of everything that is open.
    pub pages: u64,
    /// Fetches that one peer may have announced.
    pub announced_per_peer: usize,
    /// Links, and remembered refusals.
    pub links: usize,
    /// Peers.
    pub peers: usize,
    /// Bytes that wait for an engine that does not read.
    pub engine_queue_bytes: usize,
    /// Bytes that wait for a peer that does not read.
    pub peer_queue_bytes: usize,
}

impl Default for Config {
    fn default() -> Config {
        Config {
            socket: PathBuf::from("/run/kvferry/kvferryd.sock"),
            socket_mode: 0o600,
            allow_users: Vec::new(),
            peer_listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 7460)),
            advertise: None,
            tls: None,
            insecure_peers_without_tls: false,
            peer_timeout: Duration::from_secs(10),
            data_listen: None,
            lanes_per_peer: 4,
            copy_threads: 2,
            checksum: false,
            encrypt_lanes: false,
            policy: Policy::Strict,
            require: Require::Any,
            deadline: Duration::from_secs(30),
            lease: Duration::from_secs(60),
            limits: Limits::default(),
            metrics_listen: Some(SocketAddr::from((Ipv4Addr::LOCALHOST, 9460))),
            log_level: "info".to_owned(),
            log_format: LogFormat::Text,
            grace: Duration::from_secs(10),
        }
    }
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            connections: 4096,
            connections_per_user: 2048,
            ranks: 256,
            regions: 16 << 10,
            registered_bytes: 16 << 40,
            transfers_per_rank: 4096,
            pages_per_transfer: 1 << 20,
            pages: 64 << 20,
            announced_per_peer: 16 << 10,
            links: 1024,
            peers: 1024,
            engine_queue_bytes: 8 << 20,
            peer_queue_bytes: 64 << 20,
        }
    }
}

impl Config {
    /// Checks what no key can check alone.
    fn check(&self) -> Result<(), ConfigError> {
        if self.tls.is_none() {
            if !self.peer_listen.ip().is_loopback() && !self.insecure_peers_without_tls {
                return Err(ConfigError::key(
                    "peer_listen",
                    format!(
                        "{} is not a loopback address, and there is no TLS: anyone who reaches the port could read \
                         and write KV caches. Set tls.ca, tls.cert and tls.key, or listen on 127.0.0.1, or accept it \
                         with insecure_peers_without_tls = true",
                        self.peer_listen
                    ),
                ));
            }
            let exposed = self.data_listen.filter(|address| !address.ip().is_loopback());
            if let Some(address) = exposed.filter(|_| !self.insecure_peers_without_tls) {
                return Err(ConfigError::key(
                    "data_listen",
                    format!(
                        "{address} is not a loopback address, and there is no TLS: KV caches would cross the network \
                         on the word of peers that nobody vouches for. Set tls.ca, tls.cert and tls.key, or listen on \
                         127.0.0.1, or accept it with insecure_peers_without_tls = true"
                    ),
                ));
            }
            if self.encrypt_lanes {
                return Err(ConfigError::key(
                    "encrypt_lanes",
                    "lanes are encrypted with the certificates of tls.ca, tls.cert and tls.key: set them, or set \
                     encrypt_lanes = false",
                ));
            }
        }
        if self.advertise.is_none() && self.peer_listen.ip().is_unspecified() {
            return Err(ConfigError::key(
                "advertise",
                format!(
                    "peer_listen is {}, which no peer can connect to: name an address or host of this node, \
                     like advertise = \"10.0.0.1:{}\"",
                    self.peer_listen,
                    self.peer_listen.port()
                ),
            ));
        }
        Ok(())
    }
}
