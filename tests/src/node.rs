//! Nodes: `kvferryd` processes on loopback.

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::{Duration, Instant};

use kvferry_client::{Client, Status};
use kvferry_handshake::Policy;
use rustix::process::Signal;
use tempfile::TempDir;

use crate::certificates::{Authority, NodeFiles};
use crate::process::Process;
use crate::programs::kvferryd;
use crate::wait::{PATIENCE, until, within};

/// The nodes of one test, and their folder.
#[derive(Debug)]
pub struct Cluster {
    authority: Authority,
    // Last, so that the processes end before their files go.
    folder: TempDir,
}

/// How a node is started.
#[derive(Clone, Debug)]
pub struct Options {
    /// Policy of verdicts.
    pub policy: Policy,
    /// Whether it has certificates.
    pub tls: bool,
    /// Further lines of its configuration file: key and value, as TOML.
    pub lines: Vec<(String, String)>,
}

/// One node.
#[derive(Debug)]
pub struct Node {
    name: String,
    folder: PathBuf,
    address: String,
    ports: Ports,
    process: Process,
}

/// Where engines attach; it stays while the node is killed and started again.
#[derive(Clone, Debug)]
pub struct Place {
    /// `host:port` by which peers and routers name the node.
    pub address: String,
    /// Its Unix socket.
    pub socket: PathBuf,
}

/// Ports of one node.
#[derive(Clone, Copy, Debug)]
pub struct Ports {
    /// Of the peer channel.
    pub peer: u16,
    /// Of the lanes.
    pub data: u16,
    /// Of the metrics.
    pub metrics: u16,
}

/// What must be the same again when all engines are gone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Footprint {
    /// Everything that the daemon counts.
    pub counts: Vec<(String, u64)>,
    /// Open fds of the process.
    pub fds: usize,
    /// Mappings of engines' memory.
    pub memfd_maps: usize,
    /// Threads.
    pub threads: usize,
}

impl Footprint {
    /// One of the daemon's counts.
    ///
    /// # Panics
    ///
    /// When the daemon counts no such thing.
    pub fn count(&self, name: &str) -> u64 {
        let found = self.counts.iter().find(|(known, _)| known == name);
        found
            .map(|(_, count)| *count)
            .unwrap_or_else(|| panic!("{name} is not counted: {self:?}"))
    }

    /// Puts another number in the place of one of the daemon's counts.
    ///
    /// # Panics
    ///
    /// When the daemon counts no such thing.
    pub fn set(&mut self, name: &str, count: u64) {
        let found = self.counts.iter_mut().find(|(known, _)| known == name);
        found.unwrap_or_else(|| panic!("{name} is not counted")).1 = count;
    }

    /// Whether nothing is more than in the other.
    pub fn is_within(&self, other: &Footprint) -> bool {
        let counts = self
            .counts
            .iter()
            .all(|(name, count)| *count <= other.count(name));
        counts
            && self.fds <= other.fds
            && self.memfd_maps <= other.memfd_maps
            && self.threads <= other.threads
    }

    /// The same without channels to peers and lanes, which are closed when idle: a lane has a socket, something that
    /// wakes its thread, and the thread.
    pub fn without_lanes(&self) -> Footprint {
        let channels = self.count("peer_channels");
        let lanes = self.count("data_lanes_in") + self.count("data_lanes_out");
        let fds = channels + 2 * lanes;
        let mut without = self.clone();
        without.fds -= usize::try_from(fds).unwrap();
        without.threads -= usize::try_from(lanes).unwrap();
        for (name, count) in &mut without.counts {
            *count -= match name.as_str() {
                "peer_channels" | "data_lanes_in" | "data_lanes_out" => *count,
                "fds" => fds,
                "data_threads" => lanes,
                _ => 0,
            };
        }
        without
    }
}

impl Default for Options {
    fn default() -> Options {
        Options {
            policy: Policy::Strict,
            tls: true,
            lines: Vec::new(),
        }
    }
}

impl Options {
    /// The same with one more key.
    pub fn set(mut self, key: &str, value: impl ToString) -> Options {
        self.lines.push((key.to_owned(), value.to_string()));
        self
    }

    /// The same with this policy.
    pub fn policy(mut self, policy: Policy) -> Options {
        self.policy = policy;
        self
    }
}

impl Cluster {
    /// A cluster without nodes.
    #[expect(clippy::new_without_default, reason = "it writes files")]
    pub fn new() -> Cluster {
        let folder = tempfile::Builder::new()
            .prefix("kvferry-test-")
            .tempdir()
            .unwrap();
        Cluster {
            authority: Authority::new(folder.path(), "authority"),
            folder,
        }
    }

    /// Its folder.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Certificate files for a name.
    pub fn certificate(&self, name: &str) -> NodeFiles {
        self.authority.node(name)
    }

    /// Starts a node and waits until it answers.
    pub async fn start(&self, name: &str, options: Options) -> Node {
        let folder = self.folder.path().join(name);
        std::fs::create_dir_all(&folder).unwrap();
        let listen = options.lines.iter().find(|(key, _)| key == "peer_listen");
        let given = listen.and_then(|(_, value)| value.trim_matches('"').rsplit(':').next()?.parse().ok());
        let ports = Ports {
            peer: given.unwrap_or_else(free_port),
            data: free_port(),
            metrics: free_port(),
        };
        let files = options.tls.then(|| self.certificate(name));
        let file = folder.join("kvferryd.toml");
        std::fs::write(&file, configuration(&folder, ports, files.as_ref(), &options)).unwrap();
        let advertised = options.lines.iter().find(|(key, _)| key == "advertise");
        let address = match advertised {
            Some((_, value)) => value.trim_matches('"').to_owned(),
            None => format!("127.0.0.1:{}", ports.peer),
        };
        let node = Node {
            name: name.to_owned(),
            address,
            ports,
            process: run(name, &folder),
            folder,
        };
        node.ready().await;
        node
    }

    /// Starts two nodes, `a` and `b`, alike.
    pub async fn start_two(&self, options: Options) -> [Node; 2] {
        let first = self.start("a", options.clone()).await;
        [first, self.start("b", options).await]
    }
}

/// The file that a node is started with.
fn configuration(folder: &Path, ports: Ports, tls: Option<&NodeFiles>, options: &Options) -> String {
    let mut lines = vec![
        ("socket".to_owned(), format!("{:?}", folder.join("kvferryd.sock"))),
        ("peer_listen".to_owned(), format!("\"127.0.0.1:{}\"", ports.peer)),
        ("data_listen".to_owned(), format!("\"127.0.0.1:{}\"", ports.data)),
        (
            "metrics_listen".to_owned(),
            format!("\"127.0.0.1:{}\"", ports.metrics),
        ),
        (
            "policy".to_owned(),
            match options.policy {
                Policy::Strict => "\"strict\"".to_owned(),
                Policy::Bridge => "\"bridge\"".to_owned(),
            },
        ),
    ];
    if let Some(files) = tls {
        for (key, path) in [
            ("tls.ca", &files.ca),
            ("tls.cert", &files.cert),
            ("tls.key", &files.key),
        ] {
            lines.push((key.to_owned(), format!("{path:?}")));
        }
    }
    for (key, value) in &options.lines {
        lines.retain(|(known, _)| known != key);
        lines.push((key.clone(), value.clone()));
    }
    lines
        .iter()
        .map(|(key, value)| format!("{key} = {value}\n"))
        .collect()
}

fn run(name: &str, folder: &Path) -> Process {
    let arguments = [
        "--config".to_owned(),
        folder.join("kvferryd.toml").display().to_string(),
    ];
    let log = folder.join("log");
    Process::start(&format!("kvferryd {name}"), &kvferryd(), &arguments, &log, false).unwrap()
}

/// A port that nobody listens on. Below the range that connections draw their own from, so that none takes it
/// while a node is away.
pub fn free_port() -> u16 {
    static NEXT: AtomicU16 = AtomicU16::new(0);
    for _ in 0..20_000 {
        let step = NEXT.fetch_add(1, Ordering::Relaxed);
        let start = u16::try_from(std::process::id() * 97 % 20_000).unwrap();
        let port = 12_000 + (start + step % 20_000) % 20_000;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
    panic!("no free port");
}

impl Node {
    /// `host:port` by which peers and routers name it.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Its Unix socket.
    pub fn socket(&self) -> PathBuf {
        self.folder.join("kvferryd.sock")
    }

    /// Where engines attach.
    pub fn place(&self) -> Place {
        Place {
            address: self.address.clone(),
            socket: self.socket(),
        }
    }

    /// Its ports.
    pub fn ports(&self) -> Ports {
        self.ports
    }

    /// Its folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The process.
    pub fn process(&mut self) -> &mut Process {
        &mut self.process
    }

    /// Everything that it logged in all its lives.
    pub fn log(&self) -> String {
        self.process.log()
    }

    /// Waits until it answers.
    async fn ready(&self) {
        let name = &self.name;
        let probe = || async {
            let client = Client::connect_within(self.socket(), Duration::ZERO).await?;
            client.status().await
        };
        until(PATIENCE, format!("node {name} answers"), probe).await;
    }

    /// A connection that is not attached.
    pub async fn client(&self) -> Client {
        let connected = within(PATIENCE, "connecting", Client::connect(self.socket())).await;
        connected.unwrap()
    }

    /// What it is doing.
    pub async fn status(&self) -> Status {
        let client = self.client().await;
        within(PATIENCE, "status", client.status()).await.unwrap()
    }

    /// What it holds, once it holds the same for a while: what ended before is closed by then.
    pub async fn footprint(&self) -> Footprint {
        let mut last = self.look().await;
        let mut alike = 0;
        let end = Instant::now() + PATIENCE;
        while alike < 5 {
            tokio::time::sleep(Duration::from_millis(20)).await;
            let now = self.look().await;
            alike = if now == last { alike + 1 } else { 0 };
            last = now;
            assert!(
                Instant::now() < end,
                "{} does not come to rest: {last:?}",
                self.name
            );
        }
        last
    }

    /// Waits until it holds no more than before, but for lanes and channels to peers.
    pub async fn settles_to(&self, before: &Footprint) {
        let before = &before.without_lanes();
        let what = format!("node {} holds {before:?} again", self.name);
        let probe = || async {
            let now = self.look().await.without_lanes();
            if now.is_within(before) {
                Ok(())
            } else {
                Err(format!("{now:?}"))
            }
        };
        until(PATIENCE, what, probe).await;
    }

    /// What it holds now, the connection that asks included.
    async fn look(&self) -> Footprint {
        let client = self.client().await;
        let status = within(PATIENCE, "status", client.status()).await.unwrap();
        let footprint = Footprint {
            counts: status.counts,
            fds: self.process.fds(),
            memfd_maps: self.process.memfd_maps(),
            threads: self.process.threads(),
        };
        drop(client);
        footprint
    }

    /// The metrics, as Prometheus reads them.
    pub fn metrics(&self) -> String {
        get(self.ports.metrics, "/metrics")
    }

    /// SIGKILL.
    pub fn kill(&mut self) {
        self.process.kill();
    }

    /// SIGTERM, and waits for the end.
    pub fn terminate(&mut self, bound: Duration) -> ExitStatus {
        self.process.signal(Signal::TERM);
        self.process.wait(bound)
    }

    /// Starts it again, on the same ports and socket, and waits until it answers.
    pub async fn restart(&mut self) {
        self.start_again();
        self.ready().await;
    }

    /// The same without waiting.
    pub fn start_again(&mut self) {
        assert!(!self.process.is_running(), "{} still runs", self.name);
        let again = run(&self.name, &self.folder);
        self.process = again;
    }
}

/// The body of a page of the metrics port.
pub fn get(port: u16, path: &str) -> String {
    let (status, body) = answer(port, path);
    assert_eq!(status, 200, "{path}: {body}");
    body
}

/// The status code of a page of the metrics port.
pub fn get_status(port: u16, path: &str) -> u16 {
    answer(port, path).0
}

fn answer(port: u16, path: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    write!(
        stream,
        "GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    )
    .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let status = answer
        .strip_prefix("HTTP/1.1 ")
        .and_then(|rest| rest.get(..3)?.parse().ok());
    match (status, answer.split_once("\r\n\r\n")) {
        (Some(status), Some((_, body))) => (status, body.to_owned()),
        _ => panic!("no HTTP answer: {answer:?}"),
    }
}
