//! A prefill and a decode engine that carry prompts all the time, and watch every byte.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_client::{ClientError, Fault, FetchRequest, Publication, PublishRequest};
use kvferry_handshake::{Envelope, PageLists, Ready, Role};
use kvferry_tests::engine::{End, Engine, fetch_request, named, tokens};
use kvferry_tests::memory::Kind;
use kvferry_tests::node::Place;
use kvferry_tests::pattern::Stamp;
use kvferry_tests::wait::within;
use kvferry_tests::width::by_width;
use rand::rngs::StdRng;
use rand::{Rng as _, SeedableRng as _};

use crate::LONGEST;

/// Prompts of one pair under way at a time.
const AT_ONCE: usize = 3;
/// For so long nobody may touch the pages of a transfer that ended.
const QUARANTINE: Duration = Duration::from_millis(400);

/// How transfers ended, by rank.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tally {
    /// By side and outcome.
    pub(crate) ends: BTreeMap<String, u64>,
    /// One cause of each.
    pub(crate) causes: BTreeMap<String, String>,
    /// Bytes that were verified.
    pub(crate) bytes: u64,
    /// Lives of engines.
    pub(crate) engines: u64,
    /// The longest wait for an end.
    pub(crate) slowest: Duration,
}

impl Tally {
    pub(crate) fn add(&mut self, other: &Tally) {
        for (end, count) in &other.ends {
            *self.ends.entry(end.clone()).or_default() += count;
        }
        for (end, cause) in &other.causes {
            self.causes.entry(end.clone()).or_insert_with(|| cause.clone());
        }
        self.bytes += other.bytes;
        self.engines += other.engines;
        self.slowest = self.slowest.max(other.slowest);
    }

    pub(crate) fn count(&mut self, side: &str, outcome: &str) {
        *self.ends.entry(format!("{side}: {outcome}")).or_default() += 1;
    }

    pub(crate) fn count_cause(&mut self, side: &str, cause: &Fault) {
        let code = cause.code.name();
        self.count(side, code);
        self.causes
            .entry(format!("{side}: {code}"))
            .or_insert_with(|| cause.message.clone());
    }

    /// Much was delivered, and much was not.
    pub(crate) fn assert_it_was_a_storm(&self) {
        let delivered = self.ends.get("fetch: delivered").copied().unwrap_or(0);
        let failed = self
            .ends
            .keys()
            .filter(|end| end.starts_with("fetch: ") && !end.ends_with("delivered"));
        assert!(
            delivered >= by_width(10, 50, 500),
            "only {delivered} fetches were delivered: {self:#?}"
        );
        // All certificates are good: what broke is told as what it is.
        let of_tls = self.ends.keys().find(|end| end.ends_with("peer_tls"));
        assert_eq!(of_tls, None, "{self:#?}");
        assert!(
            failed.count() >= by_width(1, 3, 5),
            "fetches failed in hardly any way: {self:#?}"
        );
    }
}

/// A pair of engines.
pub(crate) struct Load {
    number: usize,
    prefill: (Envelope, Vec<Place>),
    decode: (Envelope, Vec<Place>),
    memory: Kind,
}

/// One life of a pair.
struct Life {
    name: String,
    prefill: Engine,
    decode: Engine,
}

impl Load {
    pub(crate) fn new(
        number: usize,
        prefill: Envelope,
        prefill_places: Vec<Place>,
        decode: Envelope,
        decode_places: Vec<Place>,
        memory: Kind,
    ) -> Load {
        Load {
            number,
            prefill: (prefill, prefill_places),
            decode: (decode, decode_places),
            memory,
        }
    }

    /// Carries prompts until then. Each life of the engines ends after some of them, with transfers open.
    pub(crate) async fn run(self, seed: u64, end: Instant) -> Tally {
        let mut random = StdRng::seed_from_u64(seed);
        let mut total = Tally::default();
        let mut lives = 0;
        while Instant::now() < end {
            let Some(life) = self.attach(lives).await else {
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            };
            lives += 1;
            total.engines += 2;
            let prompts = random.random_range(5..40);
            let life = Arc::new(life);
            let mut workers = Vec::new();
            for worker in 0..AT_ONCE {
                let (life, seed) = (Arc::clone(&life), random.random());
                workers.push(tokio::spawn(async move {
                    life.carry(worker, prompts, seed, end).await
                }));
            }
            // Sometimes the engines go while the workers are at it. Memory of this process cannot go like that.
            let early = random.random_bool(0.3) && self.memory == Kind::Memfd;
            let early = early.then(|| random.random_range(0..3_000));
            if let Some(after) = early {
                tokio::time::sleep(Duration::from_millis(after)).await;
                for worker in &workers {
                    worker.abort();
                }
            }
            for worker in workers {
                match worker.await {
                    Ok(tally) => total.add(&tally),
                    Err(error) if error.is_cancelled() => {}
                    Err(error) => std::panic::resume_unwind(error.into_panic()),
                }
            }
            if self.memory == Kind::Process {
                life.unregister().await;
            }
        }
        total
    }

    /// `None`: a daemon is away, or the last life's ranks are still known.
    async fn attach(&self, life: usize) -> Option<Life> {
        let name = format!("load{}-{life}", self.number);
        // The name of the prefill engine stays: its next life takes the place of the last.
        let (envelope, places) = &self.prefill;
        let prefill = named(envelope, &format!("prefill{}", self.number), Role::Prefill);
        let prefill = retriable(Engine::attach_at(prefill, places, self.memory).await)?;
        let (envelope, places) = &self.decode;
        let decode = named(envelope, &format!("decode-{name}"), Role::Decode);
        let decode = retriable(Engine::attach_at(decode, places, self.memory).await)?;
        Some(Life {
            name,
            prefill,
            decode,
        })
    }
}

/// What a daemon says that is away or shutting down; anything else is a defect.
fn retriable<T>(result: Result<T, ClientError>) -> Option<T> {
    match result {
        Ok(value) => Some(value),
        Err(error) if error.can_retry() => None,
        Err(error) => panic!("{error}"),
    }
}

impl Life {
    /// Before memory of this process is freed, no daemon may reach it any more.
    async fn unregister(&self) {
        for rank in self.prefill.ranks.iter().chain(&self.decode.ranks) {
            let regions: Vec<u16> = rank.pool().regions().map(|(region, _)| region).collect();
            for region in regions {
                // A daemon that is away reaches nothing.
                let _ = within(LONGEST, "unregister", rank.rank.unregister(region)).await;
            }
        }
    }

    async fn carry(&self, worker: usize, prompts: u32, seed: u64, end: Instant) -> Tally {
        let mut random = StdRng::seed_from_u64(seed);
        let mut tally = Tally::default();
        for prompt in 0..prompts {
            if Instant::now() >= end {
                break;
            }
            let stamp = Stamp::of(&format!("{} {worker} {prompt}", self.name));
            self.prompt(&stamp, &mut random, &mut tally).await;
        }
        tally
    }

    /// One prompt, published in steps and fetched at some time; aborted at times.
    async fn prompt(&self, stamp: &Stamp, random: &mut StdRng, tally: &mut Tally) {
        let length = random.random_range(1..700);
        let held = if random.random_bool(0.3) {
            random.random_range(0..=length)
        } else {
            0
        };
        let steps = random.random_range(1..4);
        let fetch_at = random.random_range(0..=steps);
        let fault = random.random_range(0..20);
        let source = self.prefill.draw(length, false);
        let target = self.decode.draw(length, false);
        let mut publishing = vec![None; source.len()];
        let mut fetching = Vec::new();
        for step in 0..=steps {
            if step == fetch_at {
                fetching = self.fetch(stamp, &target, held, length).await;
            }
            // One prompt in twenty is never finished.
            if step < steps && !(fault == 0 && step + 1 == steps) {
                let ready = match step + 1 == steps {
                    true => Ready::complete(length),
                    false => so_far(length * (step + 1) / steps),
                };
                self.publish(stamp, &source, ready, &mut publishing).await;
            }
            let pause = random.random_range(0..30);
            tokio::time::sleep(Duration::from_millis(pause)).await;
        }
        match fault {
            1 => drop(self.prefill.ranks[0].rank.abort(&stamp.transfer()).await),
            2 => drop(self.decode.ranks[0].rank.abort(&stamp.transfer()).await),
            _ => {}
        }
        let waiting = Instant::now();
        let ends = self.fetch_ends(stamp, &target, held, fetching, tally).await;
        self.publish_ends(stamp, &source, publishing, tally).await;
        tally.slowest = tally.slowest.max(waiting.elapsed());
        self.quarantine(stamp, &source, &target, &ends).await;
    }

    /// Each rank publishes; a rank whose call fails is done.
    async fn publish(
        &self,
        stamp: &Stamp,
        source: &[PageLists],
        ready: Ready,
        publishing: &mut [Option<Result<Publication, ()>>],
    ) {
        for ((rank, lists), publishing) in self.prefill.ranks.iter().zip(source).zip(publishing) {
            if matches!(publishing, Some(Err(()))) {
                continue;
            }
            rank.pool().fill(lists, stamp, &ready);
            let request = PublishRequest {
                transfer: stamp.transfer(),
                pages: Some(lists.clone()),
                ready,
                metadata: None,
                serves: 1,
            };
            match rank.publish(request).await {
                Ok(publication) => *publishing = Some(Ok(publication)),
                // The first one is followed to its end.
                Err(_) if publishing.is_some() => {}
                Err(_) => *publishing = Some(Err(())),
            }
        }
    }

    async fn fetch(
        &self,
        stamp: &Stamp,
        target: &[PageLists],
        held: u64,
        length: u64,
    ) -> Vec<Result<kvferry_client::Fetching, ClientError>> {
        let mut fetching = Vec::new();
        for (rank, lists) in self.decode.ranks.iter().zip(target) {
            let request: FetchRequest = fetch_request(
                &self.prefill.address(),
                stamp,
                lists,
                tokens(held, length),
                length,
            );
            fetching.push(rank.fetch(request).await);
        }
        fetching
    }

    /// Waits for every rank's fetch; verifies what was delivered at once. From each rank's end on its pages are the
    /// engine's.
    async fn fetch_ends(
        &self,
        stamp: &Stamp,
        target: &[PageLists],
        held: u64,
        fetching: Vec<Result<kvferry_client::Fetching, ClientError>>,
        tally: &mut Tally,
    ) -> Vec<Option<End>> {
        let mut ends = Vec::new();
        for ((rank, lists), fetching) in self.decode.ranks.iter().zip(target).zip(fetching) {
            let end = match fetching {
                Ok(fetching) => {
                    let what = format!("the end of the fetch of {stamp:?}");
                    Some(within(LONGEST, what, fetching.ended()).await)
                }
                Err(_) => None,
            };
            let mut pool = rank.pool();
            match &end {
                Some(Ok(delivered)) => {
                    let range = tokens(held, delivered.tokens);
                    tally.bytes += pool.wanted_bytes(lists, range);
                    pool.expect(lists, stamp, range);
                    pool.check(lists, &format!("delivered: {stamp:?}"));
                    tally.count("fetch", "delivered");
                }
                Some(Err(failed)) => tally.count_cause("fetch", &failed.cause),
                None => tally.count("fetch", "refused"),
            }
            pool.poison(lists);
            drop(pool);
            ends.push(end);
        }
        ends
    }

    /// Waits for every rank's publish. From each rank's end on its pages are the engine's.
    async fn publish_ends(
        &self,
        stamp: &Stamp,
        source: &[PageLists],
        publishing: Vec<Option<Result<Publication, ()>>>,
        tally: &mut Tally,
    ) {
        for ((rank, lists), publishing) in self.prefill.ranks.iter().zip(source).zip(publishing) {
            match publishing {
                Some(Ok(publication)) => {
                    let what = format!("the end of the publish of {stamp:?}");
                    match within(LONGEST, what, publication.ended()).await {
                        Ok(_) => tally.count("publish", "delivered"),
                        Err(failed) => tally.count_cause("publish", &failed.cause),
                    }
                }
                Some(Err(())) => tally.count("publish", "refused"),
                None => tally.count("publish", "never"),
            }
            let mut pool = rank.pool();
            pool.check(lists, &format!("source pages of {stamp:?}"));
            pool.poison(lists);
        }
    }

    /// After a while nothing has landed in the pages; then they are free.
    async fn quarantine(
        &self,
        stamp: &Stamp,
        source: &[PageLists],
        target: &[PageLists],
        ends: &[Option<End>],
    ) {
        tokio::time::sleep(QUARANTINE).await;
        for ((rank, lists), end) in self.decode.ranks.iter().zip(target).zip(ends) {
            rank.pool()
                .check(lists, &format!("after the end {end:?} of {stamp:?}"));
        }
        self.decode.give_back(target);
        self.prefill.give_back(source);
    }
}

fn so_far(tokens: u64) -> Ready {
    Ready {
        tokens,
        front_tokens: tokens,
        ..Ready::default()
    }
}
