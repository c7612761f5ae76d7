//! A running daemon: everything that is bound and started, and its end.

use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use kvferry_broker::{Broker, PeerAddress};
use kvferry_control::{Path, VERSIONS, Welcome};
use kvferry_dataplane::{DataPlane, StartError};
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use crate::aside::{Undone, aside};
use crate::config::{Advertised, Config, Require};
use crate::drain::Drain;
use crate::driver::{Driver, Question, Sources};
use crate::engines::{self, Admission, EngineListener, ListenError, Reception};
use crate::log::Floods;
use crate::metrics::Metrics;
use crate::peers::{self, Certificates, Neighbourhood, PeerSet, Tls, TlsError, check_own};
use crate::scrape;

/// Events of sessions, and of peers, that wait for the driver; further ones push back. Few, since whoever
/// comes next waits for all of them.
const WAITING: usize = 64;

/// A daemon that runs. Dropping it ends it at once; [`Daemon::shutdown`] in order.
#[derive(Debug)]
pub struct Daemon {
    addresses: Addresses,
    questions: mpsc::Sender<Question>,
    plane: DataPlane,
    /// Take what is new: connections, scrapes, certificates.
    doors: Vec<JoinHandle<()>>,
    driver: JoinHandle<()>,
}

/// Where a daemon is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Addresses {
    /// Unix socket for engines.
    pub socket: PathBuf,
    /// Where peers connect.
    pub peers: SocketAddr,
    /// How peers and routers name it.
    pub advertised: String,
    /// Where lanes connect.
    pub data: SocketAddr,
    /// The Prometheus endpoint.
    pub metrics: Option<SocketAddr>,
    /// One life of it.
    pub incarnation: u64,
}

/// Why a daemon did not start.
#[derive(Debug, thiserror::Error)]
pub enum DaemonError {
    /// The Unix socket.
    #[error("socket: {0}")]
    Socket(ListenError),
    /// A TCP port.
    #[error("{key}: {address}: {cause}; choose a free port, or an address of this node")]
    Port {
        /// Key of the configuration.
        key: &'static str,
        /// Its value.
        address: SocketAddr,
        /// What the system said.
        cause: io::Error,
    },
    /// Certificates.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The data plane.
    #[error("data plane: {0}")]
    DataPlane(StartError),
}

impl Daemon {
    /// Whether a daemon would start with what `config` names: its certificates. Starts nothing.
    pub fn check(config: &Config) -> Result<(), DaemonError> {
        if let Some(files) = &config.tls {
            Tls::load(files)?;
            check_own(files, &host(config))?;
        }
        Ok(())
    }

    /// Binds everything, then starts everything.
    pub async fn start(config: Config) -> Result<Daemon, DaemonError> {
        let host = host(&config);
        let load = |files| Certificates::load(files, &host);
        let (tls, watch) = config.tls.as_ref().map(load).transpose()?.unzip();
        let socket = EngineListener::bind(&config.socket, config.socket_mode).map_err(DaemonError::Socket)?;
        let (peer_port, peer_address) = bind("peer_listen", config.peer_listen).await?;
        let metrics_port = match config.metrics_listen {
            Some(address) => Some(bind("metrics_listen", address).await?),
            None => None,
        };
        let advertised = config
            .advertise
            .clone()
            .unwrap_or_else(|| Advertised::from(peer_address));

        let (data_events, data) = mpsc::unbounded_channel();
        let plane = DataPlane::start(
            kvferry_dataplane::Config {
                listen: config
                    .data_listen
                    .unwrap_or_else(|| SocketAddr::new(config.peer_listen.ip(), 0)),
                lanes_per_peer: config.lanes_per_peer,
                copy_threads: config.copy_threads,
                checksum: config.checksum,
                max_regions: config.limits.regions,
                max_region_bytes: config.limits.registered_bytes,
                tls: tls
                    .as_ref()
                    .filter(|_| config.encrypt_lanes)
                    .map(|tls| tls.lanes.clone()),
                ..kvferry_dataplane::Config::default()
            },
            // After the driver's end nobody listens, and nothing is started any more.
            Arc::new(move |event| drop(data_events.send(event))),
        )
        .map_err(DaemonError::DataPlane)?;
        let addresses = Addresses {
            socket: config.socket.clone(),
            peers: peer_address,
            advertised: advertised.to_string(),
            data: plane.listen_address(),
            metrics: metrics_port.as_ref().map(|(_, address)| *address),
            incarnation: rand::random_range(1..=u64::MAX),
        };

        let metrics = Arc::new(Metrics::new());
        let (session_events, sessions) = mpsc::channel(WAITING);
        let (peer_events, peers) = mpsc::channel(WAITING);
        let (questions, asked) = mpsc::channel(WAITING);
        let reception = Arc::new(reception(&config, &addresses, &plane, session_events, &metrics));
        let neighbourhood = Arc::new(Neighbourhood {
            address: advertised,
            incarnation: addresses.incarnation,
            data_host: Some(addresses.data.ip()).filter(|ip| !ip.is_unspecified()),
            tls,
            encrypts_lanes: config.encrypt_lanes,
            timeout: config.peer_timeout,
            driver: peer_events,
            floods: Floods::default(),
        });
        let own = PeerAddress(addresses.advertised.as_str().into());
        let driver = Driver::new(
            Broker::new(broker_config(&config, own.clone(), addresses.incarnation)),
            PeerSet::new(
                own,
                addresses.incarnation,
                config.limits.peers,
                config.limits.peer_queue_bytes,
            ),
            Arc::clone(&neighbourhood),
            Arc::clone(&reception),
            Arc::clone(&metrics),
        );
        let sources = Sources {
            sessions,
            peers,
            data,
            questions: asked,
        };

        let driver = tokio::spawn(driver.run(sources));
        let mut doors = vec![
            tokio::spawn(engines::accept(Arc::new(socket), reception)),
            tokio::spawn(peers::accept(peer_port, neighbourhood)),
        ];
        if let Some(watch) = watch {
            doors.push(tokio::spawn(watch.run()));
        }
        if let Some((port, _)) = metrics_port {
            doors.push(tokio::spawn(scrape::serve(port, metrics, questions.clone())));
        }
        Ok(Daemon {
            addresses,
            questions,
            plane,
            doors,
            driver,
        })
    }

    /// Where it is.
    pub fn addresses(&self) -> &Addresses {
        &self.addresses
    }

    /// Waits until it ends by itself, which it never should: a defect.
    pub async fn failed(&mut self) {
        let _ = (&mut self.driver).await;
    }

    /// Ends it: lets open transfers go on for `grace`, or until `hurry`, ends what is left, fences, closes.
    pub async fn shutdown(mut self, grace: Duration, hurry: impl Future<Output = ()>) {
        let (drain, done) = Drain::new(grace);
        if self.questions.send(Question::Drain(drain)).await.is_ok() {
            tokio::pin!(done);
            // Its end is told by dropping the other end.
            tokio::select! {
                _ = &mut done => {}
                () = hurry => {
                    // Where it cannot be told any more, it has ended.
                    let _ = self.questions.send(Question::Hurry).await;
                    let _ = done.await;
                }
            }
        }
        for door in self.doors.drain(..) {
            door.abort();
            // Aborted, so that what it held is closed.
            let _ = door.await;
        }
        let plane = self.plane.clone();
        match aside("end", move || plane.shutdown()).await {
            Ok(()) => {}
            // Then it is done here, and signals wait meanwhile.
            Err(Undone::NoThread(_)) => self.plane.shutdown(),
            Err(Undone::Defect) => tracing::error!("the data plane did not end in order"),
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        for task in self.doors.iter().chain([&self.driver]) {
            task.abort();
        }
    }
}

/// The host by which peers know this daemon.
fn host(config: &Config) -> String {
    match &config.advertise {
        Some(advertised) => advertised.host().to_owned(),
        None => config.peer_listen.ip().to_string(),
    }
}

async fn bind(key: &'static str, address: SocketAddr) -> Result<(TcpListener, SocketAddr), DaemonError> {
    let port = |cause| DaemonError::Port { key, address, cause };
    let listener = TcpListener::bind(address).await.map_err(port)?;
    let bound = listener.local_addr().map_err(port)?;
    Ok((listener, bound))
}

fn reception(
    config: &Config,
    addresses: &Addresses,
    plane: &DataPlane,
    driver: mpsc::Sender<crate::engines::SessionEvent>,
    metrics: &Arc<Metrics>,
) -> Reception {
    Reception {
        admission: Admission::new(config.allow_users.clone(), config.limits.clone()),
        welcome: Welcome {
            version: VERSIONS.highest,
            incarnation: addresses.incarnation,
            address: addresses.advertised.clone(),
            release: env!("CARGO_PKG_VERSION").to_owned(),
        },
        plane: plane.clone(),
        paths: match config.require {
            Require::Any => vec![Path::Local, Path::Tcp],
            Require::Rdma => vec![Path::Local],
        },
        queue_bytes: config.limits.engine_queue_bytes,
        driver,
        metrics: Arc::clone(metrics),
        sessions: AtomicU64::new(1),
        floods: Floods::default(),
    }
}

fn broker_config(config: &Config, address: PeerAddress, incarnation: u64) -> kvferry_broker::Config {
    let micros = |duration: Duration| u64::try_from(duration.as_micros()).unwrap_or(u64::MAX);
    kvferry_broker::Config {
        address,
        incarnation,
        policy: config.policy,
        deadline_us: micros(config.deadline),
        lease_us: micros(config.lease),
        max_transfers_per_rank: config.limits.transfers_per_rank,
        max_ranks: config.limits.ranks,
        require_rdma: config.require == Require::Rdma,
        limits: kvferry_broker::Limits {
            pages_per_transfer: config.limits.pages_per_transfer,
            pages: config.limits.pages,
            announced_per_peer: config.limits.announced_per_peer,
            links: config.limits.links,
            ..kvferry_broker::Limits::default()
        },
    }
}
