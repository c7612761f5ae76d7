//! What the tests work with: nodes, certificates, and engines of a tiny model.

use std::fs::File;
use std::future::Future;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kvferry_client::{Client, FetchRequest, PublishRequest, Rank, SealedMemory, Status, TransferId};
use kvferry_handshake::{
    Component, Dcp, Element, Envelope, HeadSpan, Identity, Kind, PageGroup, PageLists, Part, Placement,
    Ready, Role, Scales, Strides, TokenRange, Unit,
};
use kvferry_tests::certificates::{self, NodeFiles};
use tempfile::TempDir;

use crate::process::Program;

/// Nothing here takes so long; a test that waits longer has failed.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

pub(crate) async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, future)
        .await
        .unwrap_or_else(|_| panic!("{what} did not happen"))
}

/// A daemon and its directory.
pub(crate) struct Node {
    pub(crate) program: Program,
    // Last, so that the daemon ends before its directory is removed.
    directory: TempDir,
}

impl Node {
    /// Starts a daemon with these flags, on loopback with any free ports.
    pub(crate) fn start(flags: &[&str]) -> Node {
        let directory = tempfile::tempdir().unwrap();
        Node {
            program: Program::start(&socket(&directory), flags),
            directory,
        }
    }

    /// The same with certificates.
    pub(crate) fn with_tls(files: &NodeFiles, more: &[&str]) -> Node {
        let flags = tls_flags(files);
        let flags: Vec<&str> = flags
            .iter()
            .map(String::as_str)
            .chain(more.iter().copied())
            .collect();
        Node::start(&flags)
    }

    pub(crate) fn socket(&self) -> PathBuf {
        socket(&self.directory)
    }

    /// `kvferry://HOST:PORT/ENGINE`
    pub(crate) fn source(&self, engine: &str) -> String {
        format!("kvferry://{}/{engine}", self.program.advertised)
    }

    pub(crate) async fn status(&self) -> Status {
        let client = soon("connecting", Client::connect(self.socket())).await.unwrap();
        soon("status", client.status()).await.unwrap()
    }

    pub(crate) async fn count(&self, name: &str) -> u64 {
        count(&self.status().await, name)
    }

    /// Waits until a count is as expected.
    pub(crate) async fn settles(&self, name: &str, expected: u64) {
        let settled = tokio::time::timeout(PATIENCE, async {
            while self.count(name).await != expected {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        });
        if settled.await.is_err() {
            panic!("{name} is {}, not {expected}", self.count(name).await);
        }
    }
}

pub(crate) fn count(status: &Status, name: &str) -> u64 {
    let found = status.counts.iter().find(|(count, _)| count == name);
    found
        .unwrap_or_else(|| panic!("no count {name} in {:?}", status.counts))
        .1
}

fn socket(directory: &TempDir) -> PathBuf {
    directory.path().join("kvferryd.sock")
}

/// The flags that name certificates.
pub(crate) fn tls_flags(files: &NodeFiles) -> [String; 3] {
    [("ca", &files.ca), ("cert", &files.cert), ("key", &files.key)]
        .map(|(name, file)| format!("--tls-{name}={}", file.display()))
}

/// A certificate authority with a directory of its own.
pub(crate) struct Authority {
    authority: certificates::Authority,
    _directory: TempDir,
}

impl Authority {
    pub(crate) fn new() -> Authority {
        let directory = tempfile::tempdir().unwrap();
        Authority {
            authority: certificates::Authority::new(directory.path(), "authority"),
            _directory: directory,
        }
    }

    /// The files of a daemon whose certificate is for `hosts`.
    pub(crate) fn issue(&self, file: &str, hosts: &[&str]) -> NodeFiles {
        self.authority.node_at(file, hosts)
    }
}

pub(crate) const PAGE_SIZE: u32 = 4;
pub(crate) const POOL: u32 = 64;
const LAYERS: u32 = 3;
const HEADS: u32 = 2;
const WIDTH: u32 = 512;
/// Bytes of one token in one part of one layer.
const ROW: u64 = (HEADS * WIDTH * 2) as u64;
/// Bytes of one page in one part of one layer.
const PAGE: u64 = ROW * PAGE_SIZE as u64;
pub(crate) const MEMORY: u64 = PAGE * POOL as u64 * (LAYERS * 2) as u64;

/// An engine with one rank: K and V of three layers, fp16, in one region.
pub(crate) fn envelope(engine: &str) -> Envelope {
    let part = |name: &str| Part {
        name: name.into(),
        heads: HEADS,
        width: WIDTH,
    };
    Envelope {
        identity: Identity {
            engine: engine.into(),
            role: Role::Both,
            incarnation: 1,
            model: "tiny".into(),
            revision: None,
            weights_digest: None,
            config_digest: None,
            framework: "test".into(),
            framework_version: "1".into(),
            prefill_context_parallel: 1,
        },
        page_groups: vec![PageGroup {
            name: "kv".into(),
            page_size: PAGE_SIZE,
            pool_pages: POOL,
            pool: 0,
        }],
        components: vec![Component {
            name: "kv".into(),
            kind: Kind::Kv,
            page_group: 0,
            layers: (0..LAYERS).collect(),
            parts: vec![part("k"), part("v")],
            element: Element::Fp16,
            scales: Scales::None,
            unit: Unit::Token,
            opaque: None,
            window: None,
            dcp: Dcp::NONE,
        }],
        ranks: vec![kvferry_handshake::Rank {
            rank: 0,
            dcp_rank: 0,
            placements: vec![Placement {
                component: 0,
                layers: (0..LAYERS).collect(),
                parts: vec![0, 1],
                heads: HeadSpan {
                    first: 0,
                    count: HEADS,
                },
                region: 0,
                offset: 0,
                strides: Strides {
                    page: PAGE,
                    token: ROW,
                    head: ROW / u64::from(HEADS),
                    part: PAGE * u64::from(POOL),
                    layer: PAGE * u64::from(POOL) * 2,
                },
            }],
        }],
    }
}

/// The same engine with its layers split over two ranks.
pub(crate) fn split(engine: &str) -> Envelope {
    let mut envelope = envelope(engine);
    let mut second = envelope.ranks[0].clone();
    second.rank = 1;
    second.placements[0].layers = vec![2];
    second.placements[0].offset = PAGE * u64::from(POOL) * 4;
    envelope.ranks[0].placements[0].layers = vec![0, 1];
    envelope.ranks.push(second);
    envelope
}

/// An attached engine's rank and its memory.
pub(crate) struct Engine {
    pub(crate) rank: Rank,
    pub(crate) memory: SealedMemory,
}

impl Engine {
    pub(crate) async fn attach(socket: impl AsRef<Path>, name: &str) -> Engine {
        Engine::attach_as(socket, envelope(name)).await
    }

    pub(crate) async fn attach_as(socket: impl AsRef<Path>, envelope: Envelope) -> Engine {
        Engine::attach_rank(socket, envelope, 0, None).await
    }

    pub(crate) async fn attach_rank(
        socket: impl AsRef<Path>,
        envelope: Envelope,
        rank: u32,
        home: Option<String>,
    ) -> Engine {
        let client = soon("connecting", Client::connect(socket.as_ref()))
            .await
            .unwrap();
        let end = envelope.region_bytes(rank)[&0];
        let rank = soon("attaching", client.attach(envelope, rank, home))
            .await
            .unwrap();
        let memory = SealedMemory::create("pool", MEMORY).unwrap();
        let region = memory.region_of(0, end).unwrap();
        soon("registering", rank.register(0, region)).await.unwrap();
        Engine { rank, memory }
    }

    fn file(&self) -> File {
        File::from(self.memory.as_fd().try_clone_to_owned().unwrap())
    }

    /// Fills the rows of `tokens` tokens with what `seed` says.
    pub(crate) fn fill(&self, pages: &[u32], tokens: u64, seed: u64) {
        for (offset, token, place) in rows(pages, 0, tokens) {
            self.file()
                .write_all_at(&row(seed, token, place), offset)
                .unwrap();
        }
    }

    /// Fills everything with what no row holds.
    pub(crate) fn poison(&self) {
        self.file()
            .write_all_at(&vec![0xee; usize::try_from(MEMORY).unwrap()], 0)
            .unwrap();
    }

    /// Whether tokens `[from, to)` hold what `seed` says, and nothing else was written over the poison.
    pub(crate) fn verify(&self, pages: &[u32], from: u64, to: u64, seed: u64) {
        let mut expected = vec![0xee; usize::try_from(MEMORY).unwrap()];
        for (offset, token, place) in rows(pages, from, to) {
            let offset = usize::try_from(offset).unwrap();
            let row = row(seed, token, place);
            expected[offset..offset + row.len()].copy_from_slice(&row);
        }
        let mut found = vec![0; expected.len()];
        self.file().read_exact_at(&mut found, 0).unwrap();
        let wrong = expected
            .iter()
            .zip(&found)
            .position(|(expected, found)| expected != found);
        assert_eq!(wrong, None, "a byte differs");
    }

    pub(crate) fn publish_of(&self, id: &str, pages: &[u32], tokens: u64) -> PublishRequest {
        PublishRequest {
            transfer: TransferId::from(id),
            pages: Some(lists(pages)),
            ready: Ready::complete(tokens),
            metadata: Some(id.as_bytes().to_vec()),
            serves: 1,
        }
    }

    pub(crate) fn fetch_of(&self, source: &str, id: &str, pages: &[u32], tokens: u64) -> FetchRequest {
        FetchRequest {
            source: source.to_owned(),
            transfer: TransferId::from(id),
            pages: lists(pages),
            tokens: TokenRange { from: 0, to: tokens },
            least: tokens,
        }
    }
}

pub(crate) fn lists(pages: &[u32]) -> PageLists {
    PageLists {
        groups: vec![pages.to_vec()],
    }
}

/// Offset, token and place (part of a layer) of each row.
fn rows(pages: &[u32], from: u64, to: u64) -> impl Iterator<Item = (u64, u64, u64)> + '_ {
    (from..to).flat_map(move |token| {
        let page = pages[usize::try_from(token / u64::from(PAGE_SIZE)).unwrap()];
        let within = token % u64::from(PAGE_SIZE);
        (0..u64::from(LAYERS) * 2).map(move |place| {
            let offset = place * PAGE * u64::from(POOL) + u64::from(page) * PAGE + within * ROW;
            (offset, token, place)
        })
    })
}

fn row(seed: u64, token: u64, place: u64) -> Vec<u8> {
    let mut state = seed
        .wrapping_mul(31)
        .wrapping_add(token)
        .wrapping_mul(1009)
        .wrapping_add(place);
    (0..ROW)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            state.to_be_bytes()[0]
        })
        .collect()
}
