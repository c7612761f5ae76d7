//! Engines inside the test: each rank attached through the client, with a pool of which every byte is watched.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use kvferry_client::{
    Client, ClientError, Delivered, Failed, Fault, FetchRequest, Fetching, Notice, Path, Publication,
    PublishRequest, Rank, TransferId,
};
use kvferry_handshake::{Envelope, PageLists, Ready, Role, TokenRange};

use crate::memory::Kind;
use crate::node::{Node, Place};
use crate::pattern::Stamp;
use crate::pool::Pool;
use crate::wait::{PATIENCE, until, within};

/// An attached engine.
#[derive(Debug)]
pub struct Engine {
    /// Its envelope.
    pub envelope: Arc<Envelope>,
    /// Its ranks.
    pub ranks: Vec<EngineRank>,
    home: String,
}

/// One rank of it.
#[derive(Debug)]
pub struct EngineRank {
    /// Its attachment.
    pub rank: Rank,
    pool: Mutex<Pool>,
    notices: Arc<Mutex<Vec<Notice>>>,
}

/// A publish of all ranks.
#[derive(Debug)]
pub struct Published {
    /// Its filling.
    pub stamp: Stamp,
    /// Each rank's page lists.
    pub lists: Vec<PageLists>,
    /// Each rank's publish.
    pub publications: Vec<Publication>,
}

/// A fetch of all ranks.
#[derive(Debug)]
pub struct Fetched {
    /// The filling that it must bring.
    pub stamp: Stamp,
    /// Each rank's page lists.
    pub lists: Vec<PageLists>,
    /// Each rank's fetch.
    pub fetchings: Vec<Fetching>,
    /// First token wanted.
    pub from: u64,
}

/// How a transfer ended for one rank.
pub type End = Result<Delivered, Failed>;

/// A number for one life of an engine.
pub fn incarnation() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// The same envelope under this name, in this role, for one life.
pub fn named(envelope: &Envelope, name: &str, role: Role) -> Envelope {
    let mut envelope = envelope.clone();
    envelope.identity.engine = name.to_owned();
    envelope.identity.role = role;
    envelope.identity.incarnation = incarnation();
    envelope
}

impl Stamp {
    /// The id and attempt that it belongs to.
    pub fn transfer(&self) -> TransferId {
        TransferId {
            id: self.transfer.clone(),
            attempt: self.attempt,
        }
    }
}

impl Engine {
    /// Attaches every rank: rank `r` at node `nodes[r % nodes.len()]`; rank 0's is the home. Where an engine of
    /// its name is still known for a moment, it tries again.
    pub async fn attach(envelope: Envelope, nodes: &[&Node], kind: Kind) -> Engine {
        let places: Vec<Place> = nodes.iter().map(|node| node.place()).collect();
        let probe = || async {
            match Engine::attach_at(envelope.clone(), &places, kind).await {
                Err(error) if !error.can_retry() => panic!("{}: {error}", envelope.identity.engine),
                attached => attached,
            }
        };
        until(PATIENCE, "the engine is attached", probe).await
    }

    /// The same, where the daemons may be away.
    pub async fn attach_at(envelope: Envelope, places: &[Place], kind: Kind) -> Result<Engine, ClientError> {
        let envelope = Arc::new(envelope);
        let mut engine = Engine {
            home: places[0].address.clone(),
            envelope: Arc::clone(&envelope),
            ranks: Vec::new(),
        };
        for (number, place) in (0..).zip(places.iter().cycle()).take(envelope.ranks.len()) {
            let pool = Pool::new(Arc::clone(&envelope), number, kind, incarnation());
            let rank = attach_at(&envelope, number, place, &engine.home).await?;
            for (region, memory) in pool.regions() {
                within(PATIENCE, "register", rank.register(region, memory.region())).await?;
            }
            engine.ranks.push(EngineRank {
                notices: collect(&rank),
                rank,
                pool: Mutex::new(pool),
            });
        }
        Ok(engine)
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.envelope.identity.engine
    }

    /// By which a fetch names it.
    pub fn address(&self) -> String {
        format!("kvferry://{}/{}", self.home, self.name())
    }

    /// Pages of every rank for a prompt, poisoned.
    pub fn draw(&self, tokens: u64, sparse: bool) -> Vec<PageLists> {
        self.ranks
            .iter()
            .map(|rank| rank.pool().draw(tokens, sparse))
            .collect()
    }

    /// The pages are free again.
    pub fn give_back(&self, lists: &[PageLists]) {
        for (rank, lists) in self.ranks.iter().zip(lists) {
            rank.pool().give_back(lists);
        }
    }

    /// Draws pages, fills them with a prompt and publishes it, complete.
    pub async fn publish(&self, stamp: &Stamp, tokens: u64, sparse: bool) -> Published {
        self.publish_with(stamp, tokens, sparse, 1, None).await
    }

    /// The same for several decode engines, with metadata from every rank.
    pub async fn publish_with(
        &self,
        stamp: &Stamp,
        tokens: u64,
        sparse: bool,
        serves: u32,
        metadata: Option<Vec<u8>>,
    ) -> Published {
        let lists = self.draw(tokens, sparse);
        let ready = Ready::complete(tokens);
        let mut publications = Vec::new();
        for (rank, lists) in self.ranks.iter().zip(&lists) {
            rank.pool().fill(lists, stamp, &ready);
            let request = PublishRequest {
                transfer: stamp.transfer(),
                pages: Some(lists.clone()),
                ready,
                metadata: metadata.clone(),
                serves,
            };
            publications.push(rank.publish(request).await.unwrap());
        }
        Published {
            stamp: stamp.clone(),
            lists,
            publications,
        }
    }

    /// Draws pages and fetches tokens `[from, to)` of a prompt into them, of which `least` will do.
    pub async fn fetch(
        &self,
        source: &str,
        stamp: &Stamp,
        range: TokenRange,
        least: u64,
        sparse: bool,
    ) -> Fetched {
        let lists = self.draw(range.to, sparse);
        let mut fetchings = Vec::new();
        for (rank, lists) in self.ranks.iter().zip(&lists) {
            let request = fetch_request(source, stamp, lists, range, least);
            fetchings.push(rank.fetch(request).await.unwrap());
        }
        Fetched {
            stamp: stamp.clone(),
            lists,
            fetchings,
            from: range.from,
        }
    }

    /// Verifies a settled publish: nothing wrote to its pages. Then they are poisoned and free.
    pub fn settle_publish(&self, published: &Published, what: &str) {
        for (rank, lists) in self.ranks.iter().zip(&published.lists) {
            rank.pool().check(lists, &format!("{what}: source pages"));
            rank.pool().poison(lists);
        }
        self.give_back(&published.lists);
    }

    /// Verifies a settled fetch, byte by byte where it was delivered. Then its pages are poisoned and free.
    pub fn settle_fetch(&self, fetched: &Fetched, ends: &[End], what: &str) {
        for ((rank, lists), end) in self.ranks.iter().zip(&fetched.lists).zip(ends) {
            let mut pool = rank.pool();
            if let Ok(delivered) = end {
                let range = TokenRange {
                    from: fetched.from,
                    to: delivered.tokens,
                };
                pool.expect(lists, &fetched.stamp, range);
                pool.check(lists, what);
            }
            pool.poison(lists);
        }
        self.give_back(&fetched.lists);
    }

    /// Compares every pool, padding and pages that nobody asked for too. Nothing may be under way.
    pub fn check_all(&self, what: &str) {
        for rank in &self.ranks {
            rank.pool().check_all(what);
        }
    }
}

impl EngineRank {
    /// The pool.
    pub fn pool(&self) -> MutexGuard<'_, Pool> {
        // A test that failed while it held the pool has failed.
        self.pool.lock().unwrap()
    }

    /// Publishes, with a bound on the call.
    pub async fn publish(&self, request: PublishRequest) -> Result<Publication, ClientError> {
        within(PATIENCE, "the answer to publish", self.rank.publish(request)).await
    }

    /// Fetches, with a bound on the call.
    pub async fn fetch(&self, request: FetchRequest) -> Result<Fetching, ClientError> {
        within(PATIENCE, "the answer to fetch", self.rank.fetch(request)).await
    }

    /// What has happened to the attachment so far.
    pub fn notices(&self) -> Vec<Notice> {
        self.notices.lock().unwrap().clone()
    }

    /// Waits for a notice that `pick` knows.
    pub async fn notice<T>(&self, what: &str, pick: impl Fn(&Notice) -> Option<T>) -> T {
        let probe = || async {
            let notices = self.notices();
            notices
                .iter()
                .find_map(&pick)
                .ok_or_else(|| format!("{notices:?}"))
        };
        until(PATIENCE, what, probe).await
    }
}

/// Attaches one rank of an engine whose home is at `home`.
pub async fn attach_rank(
    envelope: &Envelope,
    number: u32,
    node: &Node,
    home: &str,
) -> Result<Rank, ClientError> {
    attach_at(envelope, number, &node.place(), home).await
}

async fn attach_at(envelope: &Envelope, number: u32, place: &Place, home: &str) -> Result<Rank, ClientError> {
    let client = within(
        PATIENCE,
        "connecting",
        Client::connect_within(&place.socket, PATIENCE / 2),
    )
    .await?;
    let home = (home != place.address).then(|| home.to_owned());
    let attached = client.attach(envelope.clone(), number, home);
    within(PATIENCE, "the answer to attach", attached).await
}

/// A fetch of one rank.
pub fn fetch_request(
    source: &str,
    stamp: &Stamp,
    lists: &PageLists,
    tokens: TokenRange,
    least: u64,
) -> FetchRequest {
    FetchRequest {
        source: source.to_owned(),
        transfer: stamp.transfer(),
        pages: lists.clone(),
        tokens,
        least,
    }
}

/// The first tokens are ready on every layer, and more will come.
pub fn of_tokens(tokens: u64) -> Ready {
    Ready {
        tokens,
        front_tokens: tokens,
        ..Ready::default()
    }
}

/// Why a call was refused.
///
/// # Panics
///
/// When it was not.
pub fn refused<T: std::fmt::Debug>(answer: Result<T, ClientError>, what: &str) -> Fault {
    match answer {
        Err(ClientError::Refused(fault)) => fault,
        other => panic!("{what}: not refused: {other:?}"),
    }
}

/// Tokens `[from, to)`.
pub fn tokens(from: u64, to: u64) -> TokenRange {
    TokenRange { from, to }
}

fn collect(rank: &Rank) -> Arc<Mutex<Vec<Notice>>> {
    let (mut notices, collected) = (rank.notices(), Arc::new(Mutex::new(Vec::new())));
    let sink = Arc::clone(&collected);
    tokio::spawn(async move {
        while let Some(notice) = notices.next().await {
            sink.lock().unwrap().push(notice);
        }
    });
    collected
}

impl Published {
    /// Waits until every rank's publish ended.
    pub async fn ended(&self, bound: Duration) -> Vec<End> {
        let mut ends = Vec::new();
        for (rank, publication) in self.publications.iter().enumerate() {
            let what = format!("the end of publish {:?} on rank {rank}", self.stamp);
            ends.push(within(bound, what, publication.ended()).await);
        }
        ends
    }
}

impl Fetched {
    /// Waits until every rank's fetch ended.
    pub async fn ended(&self, bound: Duration) -> Vec<End> {
        let mut ends = Vec::new();
        for (rank, fetching) in self.fetchings.iter().enumerate() {
            let what = format!("the end of fetch {:?} on rank {rank}", self.stamp);
            ends.push(within(bound, what, fetching.ended()).await);
        }
        ends
    }
}

/// How a transfer went, by rank.
#[derive(Clone, Debug)]
pub struct Carried {
    /// On the decode side.
    pub fetches: Vec<Delivered>,
    /// On the prefill side.
    pub publishes: Vec<Delivered>,
}

/// One transfer from publish to delivered, verified on both sides.
#[derive(Clone, Copy, Debug)]
pub struct Carry<'a> {
    /// Transfer id.
    pub transfer: &'a str,
    /// The prompt's length.
    pub tokens: u64,
    /// Tokens that the decode side holds already.
    pub held: u64,
    /// Whether pages before a sliding window are absent.
    pub sparse: bool,
    /// Whether the fetch comes before the publish.
    pub fetch_first: bool,
    /// How the bytes must travel, where there are any; `None`: by any path.
    pub path: Option<Path>,
}

impl Carry<'_> {
    /// Carries a prompt from one engine to another.
    ///
    /// # Panics
    ///
    /// When it is not delivered, or one byte is wrong.
    pub async fn run(&self, prefill: &Engine, decode: &Engine) -> Carried {
        let stamp = Stamp::of(self.transfer);
        let range = tokens(self.held, self.tokens);
        let source = prefill.address();
        let fetch = || decode.fetch(&source, &stamp, range, self.tokens, self.sparse);
        let publish = || prefill.publish(&stamp, self.tokens, self.sparse);
        let (published, fetched) = if self.fetch_first {
            let fetched = fetch().await;
            (publish().await, fetched)
        } else {
            (publish().await, fetch().await)
        };
        let what = format!("{self:?}");
        let ends = fetched.ended(PATIENCE).await;
        let mut carried = Carried {
            fetches: all_delivered(&ends, &what),
            publishes: Vec::new(),
        };
        for ((rank, lists), delivered) in decode.ranks.iter().zip(&fetched.lists).zip(&carried.fetches) {
            assert_eq!(delivered.tokens, self.tokens, "{what}: tokens delivered");
            let wanted = rank.pool().wanted_bytes(lists, range);
            assert_eq!(
                bytes(delivered),
                wanted,
                "{what}: bytes of rank {}",
                rank.pool().rows().rank
            );
            let mut others = delivered.report.paths.clone();
            others.retain(|(path, bytes)| *bytes > 0 && self.path.is_some_and(|only| only != *path));
            assert_eq!(others, [], "{what}: a path that it should not take");
        }
        decode.settle_fetch(&fetched, &ends, &what);
        carried.publishes = all_delivered(&published.ended(PATIENCE).await, &what);
        let sent: u64 = carried.publishes.iter().map(bytes).sum();
        let received: u64 = carried.fetches.iter().map(bytes).sum();
        assert_eq!(
            sent, received,
            "{what}: bytes that both sides report: {:#?}",
            carried.publishes
        );
        prefill.settle_publish(&published, &what);
        carried
    }
}

/// Bytes that a report names, by whatever path.
pub fn bytes(delivered: &Delivered) -> u64 {
    delivered.report.paths.iter().map(|(_, bytes)| bytes).sum()
}

fn all_delivered(ends: &[End], what: &str) -> Vec<Delivered> {
    let delivered = ends.iter().enumerate().map(|(rank, end)| match end {
        Ok(delivered) => delivered.clone(),
        Err(failed) => panic!("{what}: rank {rank} is not delivered: {failed}"),
    });
    delivered.collect()
}
