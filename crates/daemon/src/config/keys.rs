//! Every key of the configuration: its name, what it does, how it is read and how it is shown. The file,
//! the flags, the documentation and `--check-config` are all made from this one table.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use kvferry_handshake::Policy;

use super::{Advertised, Config, LogFormat, Require, TlsFiles};

/// A value, from the file or a flag.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Setting {
    Text(String),
    Integer(i64),
    Bool(bool),
    List(Vec<Setting>),
    /// What no key takes, as it is to be shown.
    Other(String),
}

/// As the file has it.
impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Setting::Text(text) => write!(f, "{text:?}"),
            Setting::Integer(value) => write!(f, "{value}"),
            Setting::Bool(value) => write!(f, "{value}"),
            Setting::List(_) => f.write_str("a list"),
            Setting::Other(shown) => f.write_str(shown),
        }
    }
}

/// `sun_path` holds 107 bytes (unix(7)); the socket is made beside its place, with .new at its end.
const LONGEST_SOCKET: usize = 103;
const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];
/// How the names of modules begin that are linked into the daemon and log.
const TARGETS: [&str; 5] = ["kvferry", "rustls", "tokio", "hyper", "mio"];

/// What a key takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Text,
    Integer,
    Bool,
    Integers,
}

pub(super) struct Key {
    pub(super) name: &'static str,
    pub(super) kind: Kind,
    /// What it does, for operators. Wrapped by whoever prints it.
    pub(super) doc: &'static str,
    /// What to write, where the default says nothing.
    pub(super) example: &'static str,
    pub(super) set: fn(&mut Config, &Setting) -> Result<(), String>,
    /// The value as the file has it; `None` when it is not set.
    pub(super) show: fn(&Config) -> Option<String>,
}

pub(super) const KEYS: &[Key] = &[
    Key {
        name: "socket",
        kind: Kind::Text,
        doc: "Unix socket that engines connect to. A socket left by a daemon that died is replaced; the file of this \
              name with .lock at its end tells whether one is alive.",
        example: "",
        set: |config, value| {
            let path = text(value)?;
            if path.len() > LONGEST_SOCKET {
                return Err(format!(
                    "the path has {} bytes, and the system takes {LONGEST_SOCKET} at most; choose a shorter one",
                    path.len()
                ));
            }
            config.socket = PathBuf::from(path);
            Ok(())
        },
        show: |config| quoted(config.socket.display()),
    },
    Key {
        name: "socket_mode",
        kind: Kind::Text,
        doc: "Permission bits of the socket, in octal. Engines of other users need more than 0600, and an entry in \
              allow_users.",
        example: "",
        set: |config, value| {
            let text = text(value)?;
            let mode = u32::from_str_radix(&text, 8).ok().filter(|mode| *mode <= 0o777);
            config.socket_mode = mode.ok_or(format!("{text:?} is not octal from 0 to 0777"))?;
            Ok(())
        },
        show: |config| quoted(format!("{:04o}", config.socket_mode)),
    },
    Key {
        name: "allow_users",
        kind: Kind::Integers,
        doc: "User ids that may connect, besides root and the daemon's own. Whoever connects can read what is \
              published to engines that it attaches as.",
        example: "",
        set: |config, value| {
            let Setting::List(users) = value else {
                return Err(format!(
                    "{value} is no list of user ids; write it like [1000, 1001] (`id -u NAME` tells one)"
                ));
            };
            let users: Result<Vec<u32>, String> = users
                .iter()
                .map(|user| integer(user, 0, u32::MAX.into()))
                .collect();
            config.allow_users = users?;
            Ok(())
        },
        show: |config| Some(format!("{:?}", config.allow_users)),
    },
    Key {
        name: "peer_listen",
        kind: Kind::Text,
        doc: "IP address and port where peer daemons connect. Without TLS it must be a loopback address.",
        example: "",
        set: |config, value| address(value).map(|address| config.peer_listen = address),
        show: |config| quoted(config.peer_listen),
    },
    Key {
        name: "advertise",
        kind: Kind::Text,
        doc: "HOST:PORT by which peers and routers name this daemon, as in kvferry://HOST:PORT/ENGINE. With TLS, HOST \
              must be a name or IP address in its certificate. Not set: peer_listen.",
        example: "\"node-1.example:7460\"",
        set: |config, value| {
            let text = text(value)?;
            let address: Advertised = text
                .parse()
                .map_err(|error: super::AdvertisedError| error.to_string())?;
            if address.host().parse().is_ok_and(|ip: IpAddr| ip.is_unspecified()) {
                return Err(format!(
                    "{text:?} is every address of a node, and no peer can connect to it; name one of this node"
                ));
            }
            config.advertise = Some(address);
            Ok(())
        },
        show: |config| config.advertise.as_ref().and_then(quoted),
    },
    Key {
        name: "tls.ca",
        kind: Kind::Text,
        doc: "PEM file: certificates of the authority that signed all daemons' certificates. See docs/security.md. \
              The three tls keys are set together, or not at all. Files that are renewed are read again.",
        example: "\"/etc/kvferry/ca.pem\"",
        set: |config, value| text(value).map(|path| tls(config).ca = PathBuf::from(path)),
        show: |config| config.tls.as_ref().and_then(|tls| quoted(tls.ca.display())),
    },
    Key {
        name: "tls.cert",
        kind: Kind::Text,
        doc: "PEM file: this daemon's certificate, and intermediate ones. It is shown as a server and as a client.",
        example: "\"/etc/kvferry/node.pem\"",
        set: |config, value| text(value).map(|path| tls(config).cert = PathBuf::from(path)),
        show: |config| config.tls.as_ref().and_then(|tls| quoted(tls.cert.display())),
    },
    Key {
        name: "tls.key",
        kind: Kind::Text,
        doc: "PEM file: the private key of tls.cert.",
        example: "\"/etc/kvferry/node.key\"",
        set: |config, value| text(value).map(|path| tls(config).key = PathBuf::from(path)),
        show: |config| config.tls.as_ref().and_then(|tls| quoted(tls.key.display())),
    },
    Key {
        name: "insecure_peers_without_tls",
        kind: Kind::Bool,
        doc: "INSECURE. Lets peer_listen and data_listen be reachable from other nodes without TLS: anyone who reaches \
              the ports can then read and write KV caches, which hold people's prompts.",
        example: "",
        set: |config, value| boolean(value).map(|accepted| config.insecure_peers_without_tls = accepted),
        show: |config| Some(config.insecure_peers_without_tls.to_string()),
    },
    Key {
        name: "peer_timeout_ms",
        kind: Kind::Integer,
        doc: "A peer that is silent for so long counts as lost; daemons say something each second. Milliseconds.",
        example: "",
        set: |config, value| millis(value, 2_000).map(|silence| config.peer_timeout = silence),
        show: |config| Some(config.peer_timeout.as_millis().to_string()),
    },
    Key {
        name: "data_listen",
        kind: Kind::Text,
        doc: "IP address and port where peers' TCP lanes connect; port 0 takes any free one. It must be reachable at \
              the address that peers see this daemon's channel come from. Without TLS it must be a loopback address. Not \
              set: the host of peer_listen, any port.",
        example: "\"10.0.0.1:7461\"",
        set: |config, value| address(value).map(|address| config.data_listen = Some(address)),
        show: |config| config.data_listen.and_then(quoted),
    },
    Key {
        name: "lanes_per_peer",
        kind: Kind::Integer,
        doc: "Most TCP connections to one peer, in each direction.",
        example: "",
        set: |config, value| integer(value, 1, 64).map(|lanes| config.lanes_per_peer = lanes),
        show: |config| Some(config.lanes_per_peer.to_string()),
    },
    Key {
        name: "copy_threads",
        kind: Kind::Integer,
        doc: "Threads that copy pages between engines of this node.",
        example: "",
        set: |config, value| integer(value, 1, 64).map(|threads| config.copy_threads = threads),
        show: |config| Some(config.copy_threads.to_string()),
    },
    Key {
        name: "checksum",
        kind: Kind::Bool,
        doc: "Sends a CRC32C with each chunk over TCP and checks it on arrival.",
        example: "",
        set: |config, value| boolean(value).map(|checksum| config.checksum = checksum),
        show: |config| Some(config.checksum.to_string()),
    },
    Key {
        name: "encrypt_lanes",
        kind: Kind::Bool,
        doc: "Encrypts the TCP lanes, too, with the certificates of the tls keys; otherwise pages cross the network in \
              the clear. Daemons that do not have it alike refuse each other.",
        example: "",
        set: |config, value| boolean(value).map(|encrypt| config.encrypt_lanes = encrypt),
        show: |config| Some(config.encrypt_lanes.to_string()),
    },
    Key {
        name: "policy",
        kind: Kind::Text,
        doc: "\"strict\": page size, element type, layout, context parallelism, components, layers and model of two \
              engines must agree. \"bridge\": page sizes, orders and context parallelism may differ where every byte \
              can be carried exactly. Of two daemons, the stricter counts.",
        example: "",
        set: |config, value| {
            let named = [("strict", Policy::Strict), ("bridge", Policy::Bridge)];
            choice(value, &named).map(|policy| config.policy = policy)
        },
        show: |config| {
            quoted(match config.policy {
                Policy::Strict => "strict",
                Policy::Bridge => "bridge",
            })
        },
    },
    Key {
        name: "require",
        kind: Kind::Text,
        doc: "\"any\": between nodes the best path there is. \"rdma\": RDMA, or the transfer fails with path_required.",
        example: "",
        set: |config, value| {
            let named = [("any", Require::Any), ("rdma", Require::Rdma)];
            choice(value, &named).map(|require| config.require = require)
        },
        show: |config| {
            quoted(match config.require {
                Require::Any => "any",
                Require::Rdma => "rdma",
            })
        },
    },
    Key {
        name: "deadline_ms",
        kind: Kind::Integer,
        doc: "A transfer in which nothing moves for so long fails on both sides. Milliseconds.",
        example: "",
        set: |config, value| millis(value, 100).map(|deadline| config.deadline = deadline),
        show: |config| Some(config.deadline.as_millis().to_string()),
    },
    Key {
        name: "lease_ms",
        kind: Kind::Integer,
        doc: "A publish that no decode engine fetches or expects is kept for so long. Milliseconds.",
        example: "",
        set: |config, value| millis(value, 100).map(|lease| config.lease = lease),
        show: |config| Some(config.lease.as_millis().to_string()),
    },
    Key {
        name: "limits.connections",
        kind: Kind::Integer,
        doc: "Connections to the Unix socket. Past it, the oldest that has not attached gives way.",
        example: "",
        set: |config, value| integer(value, 1, 1 << 20).map(|most| config.limits.connections = most),
        show: |config| Some(config.limits.connections.to_string()),
    },
    Key {
        name: "limits.connections_per_user",
        kind: Kind::Integer,
        doc: "The same for each user.",
        example: "",
        set: |config, value| integer(value, 1, 1 << 20).map(|most| config.limits.connections_per_user = most),
        show: |config| Some(config.limits.connections_per_user.to_string()),
    },
    Key {
        name: "limits.ranks",
        kind: Kind::Integer,
        doc: "Attached ranks.",
        example: "",
        set: |config, value| integer(value, 1, 1 << 16).map(|most| config.limits.ranks = most),
        show: |config| Some(config.limits.ranks.to_string()),
    },
    Key {
        name: "limits.regions",
        kind: Kind::Integer,
        doc: "Registered regions of all engines. Each takes a mapping (the system's vm.max_map_count bounds them) and an open \
              file; one rank registers at most 4096.",
        example: "",
        set: |config, value| integer(value, 1, 1 << 20).map(|most| config.limits.regions = most),
        show: |config| Some(config.limits.regions.to_string()),
    },
    Key {
        name: "limits.registered_bytes",
        kind: Kind::Integer,
        doc: "Bytes of the registered regions of all engines. It bounds address space, not memory: that is the engines'. But \
              the system charges pages of a memfd to whoever touches them first, and where an engine did not, that is the \
              daemon: have engines touch their pools (SealedMemory::allocate does, and so does kvferry engine), or give the \
              daemon's cgroup no memory limit below this.",
        example: "",
        set: |config, value| integer(value, 1, 1 << 46).map(|most| config.limits.registered_bytes = most),
        show: |config| Some(config.limits.registered_bytes.to_string()),
    },
    Key {
        name: "limits.transfers_per_rank",
        kind: Kind::Integer,
        doc: "Open publishes and fetches of one rank.",
        example: "",
        set: |config, value| integer(value, 1, 1 << 20).map(|most| config.limits.transfers_per_rank = most),
        show: |config| Some(config.limits.transfers_per_rank.to_string()),
    },
    Key {
        name: "limits.pages_per_transfer",
        kind: Kind::Integer,
        doc: "Entries in the page lists of one publish or fetch.",
        example: "",
        set: |config, value| integer(value, 1, 1 << 24).map(|most| config.limits.pages_per_transfer = most),
        show: |config| Some(config.limits.pages_per_transfer.to_string()),
    },
    Key {
        name: "limits.pages",
        kind: Kind::Integer,
        doc: "Entries in the page lists of everything that is open; each takes 4 bytes.",
        example: "",
        set: |config, value| integer(value, 1, 1 << 32).map(|most| config.limits.pages = most),
        show: |config| Some(config.limits.pages.to_string()),
    },
    Key {
        name: "limits.announced_per_peer",
        kind: Kind::Integer,
        doc: "Fetches that one peer may have announced here, counted for each prefill rank.",
        example: "",
        set: |config, value| integer(value, 1, 1 << 24).map(|most| config.limits.announced_per_peer = most),
        show: |config| Some(config.limits.announced_per_peer.to_string()),
    },
    Key {
        name: "limits.links",
        kind: Kind::Integer,
        doc: "Links between engines, and refusals that are remembered.",
        example: "",
        set: |config, value| integer(value, 1, 1 << 20).map(|most| config.limits.links = most),
        show: |config| Some(config.limits.links.to_string()),
    },
    Key {
        name: "limits.peers",
        kind: Kind::Integer,
        doc: "Peer daemons.",
        example: "",
        set: |config, value| integer(value, 1, 1 << 16).map(|most| config.limits.peers = most),
        show: |config| Some(config.limits.peers.to_string()),
    },
    Key {
        name: "limits.engine_queue_bytes",
        kind: Kind::Integer,
        doc: "An engine that leaves so many bytes of answers and events unread is disconnected.",
        example: "",
        set: |config, value| {
            integer(value, 64 << 10, 1 << 32).map(|most| config.limits.engine_queue_bytes = most)
        },
        show: |config| Some(config.limits.engine_queue_bytes.to_string()),
    },
    Key {
        name: "limits.peer_queue_bytes",
        kind: Kind::Integer,
        doc: "The channel to a peer that leaves so many bytes unread is cut.",
        example: "",
        set: |config, value| {
            integer(value, 1 << 20, 1 << 36).map(|most| config.limits.peer_queue_bytes = most)
        },
        show: |config| Some(config.limits.peer_queue_bytes.to_string()),
    },
    Key {
        name: "metrics_listen",
        kind: Kind::Text,
        doc: "IP address and port of the Prometheus endpoint (/metrics and /healthz), or \"off\". It has no access \
              control.",
        example: "",
        set: |config, value| {
            let off = matches!(value, Setting::Text(text) if text == "off");
            config.metrics_listen = if off { None } else { Some(address(value)?) };
            Ok(())
        },
        show: |config| config.metrics_listen.map_or_else(|| quoted("off"), quoted),
    },
    Key {
        name: "log_level",
        kind: Kind::Text,
        doc: "\"off\", \"error\", \"warn\", \"info\", \"debug\" or \"trace\", or a filter like \"info,kvferry_broker=debug\".",
        example: "",
        set: |config, value| {
            let text = text(value)?;
            text.split(',').try_for_each(directive)?;
            tracing_subscriber::EnvFilter::try_new(&text).map_err(|error| format!("{text:?}: {error}"))?;
            config.log_level = text;
            Ok(())
        },
        show: |config| quoted(&config.log_level),
    },
    Key {
        name: "log_format",
        kind: Kind::Text,
        doc: "\"text\", or \"json\" for one object a line. The log goes to standard error.",
        example: "",
        set: |config, value| {
            let named = [("text", LogFormat::Text), ("json", LogFormat::Json)];
            choice(value, &named).map(|format| config.log_format = format)
        },
        show: |config| {
            quoted(match config.log_format {
                LogFormat::Text => "text",
                LogFormat::Json => "json",
            })
        },
    },
    Key {
        name: "grace_ms",
        kind: Kind::Integer,
        doc: "After SIGTERM, SIGINT or SIGHUP, open transfers may go on for so long before they are ended with shutdown; a second \
              signal ends them at once. Milliseconds.",
        example: "",
        set: |config, value| millis(value, 0).map(|grace| config.grace = grace),
        show: |config| Some(config.grace.as_millis().to_string()),
    },
];

fn text(value: &Setting) -> Result<String, String> {
    match value {
        Setting::Text(text) if text.contains('\0') => Err("must not contain a NUL byte".to_owned()),
        Setting::Text(text) if !text.is_empty() => Ok(text.clone()),
        Setting::Text(_) => Err("is empty; write a value, or leave the key out".to_owned()),
        Setting::Integer(_) | Setting::Bool(_) => {
            Err(format!("{value} is not text; write it in quotes: \"{value}\""))
        }
        Setting::List(_) | Setting::Other(_) => Err(format!("{value} is not text in quotes")),
    }
}

/// One part of a log filter. As such, a misspelt level would be the name of a target, and silence all others.
fn directive(part: &str) -> Result<(), String> {
    let (target, level) = match part.rsplit_once('=') {
        Some((target, level)) => (Some(target), level),
        None => (None, part),
    };
    if !LEVELS.iter().any(|known| level.eq_ignore_ascii_case(known)) {
        return Err(format!("{level:?} is no level; there are {}", LEVELS.join(", ")));
    }
    match target {
        Some(target) if !TARGETS.iter().any(|known| target.starts_with(known)) => Err(format!(
            "{target:?} logs nothing; what logs begins with {}",
            TARGETS.join(", ")
        )),
        _ => Ok(()),
    }
}

fn boolean(value: &Setting) -> Result<bool, String> {
    match value {
        Setting::Bool(value) => Ok(*value),
        _ => Err(format!("{value} is not true or false, written without quotes")),
    }
}

fn integer<T: TryFrom<i64>>(value: &Setting, least: i64, most: i64) -> Result<T, String> {
    let range = || format!("whole number from {least} to {most}");
    match value {
        Setting::Integer(value) if (least..=most).contains(value) => {
            T::try_from(*value).map_err(|_| format!("{value} is out of range: it must be a {}", range()))
        }
        Setting::Integer(value) => Err(format!("{value} is out of range: it must be a {}", range())),
        Setting::Text(_) => Err(format!("{value} is no {}; write it without quotes", range())),
        _ => Err(format!("{value} is no {}", range())),
    }
}

fn millis(value: &Setting, least: i64) -> Result<Duration, String> {
    integer(value, least, 24 * 3_600_000).map(Duration::from_millis)
}

fn address(value: &Setting) -> Result<SocketAddr, String> {
    let text = text(value)?;
    text.parse()
        .map_err(|_| format!("{text:?} is not an IP address and port, like 127.0.0.1:7460"))
}

fn choice<T: Copy>(value: &Setting, named: &[(&str, T)]) -> Result<T, String> {
    let names: Vec<String> = named.iter().map(|(name, _)| format!("{name:?}")).collect();
    let text = text(value)?;
    let found = named.iter().find(|(name, _)| *name == text);
    found
        .map(|(_, choice)| *choice)
        .ok_or_else(|| format!("{text:?} is not one of {}", names.join(", ")))
}

fn tls(config: &mut Config) -> &mut TlsFiles {
    config.tls.get_or_insert_with(|| TlsFiles {
        ca: PathBuf::new(),
        cert: PathBuf::new(),
        key: PathBuf::new(),
    })
}

fn quoted(value: impl std::fmt::Display) -> Option<String> {
    Some(toml::Value::String(value.to_string()).to_string())
}
