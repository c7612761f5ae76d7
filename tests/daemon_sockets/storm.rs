//! A load of transfers between two daemons that are killed at random: every transfer ends, what is delivered
//! is right, and nothing lands after an end.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kvferry_client::{Client, ClientError, Status, TransferId};
use kvferry_handshake::Ready;
use rustix::process::Signal;

use crate::process::Program;
use crate::rig::{Engine, count, soon};

/// Numbers that look random, and are the same in each run.
struct Dice(u64);

impl Dice {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}

#[derive(Default)]
struct Tally {
    delivered: AtomicU64,
    failed: AtomicU64,
}

/// One prefill and one decode engine, and transfers between them until told to stop.
async fn pair(
    prefill: Engine,
    decode: Engine,
    source: String,
    number: u64,
    stop: Arc<AtomicBool>,
    tally: Arc<Tally>,
) {
    let mut dice = Dice(0x9e37_79b9_7f4a_7c15 ^ (number + 1));
    for round in 0.. {
        if stop.load(Ordering::Relaxed) {
            return;
        }
        let tokens = 1 + dice.below(100);
        let pages: Vec<u32> = (0..25).collect();
        let pages = &pages[..usize::try_from(tokens.div_ceil(4)).unwrap()];
        let id = format!("pair-{number}-{round}");
        prefill.fill(pages, tokens, round);
        decode.poison();
        let published = prefill.rank.publish(prefill.publish_of(&id, pages, tokens));
        let fetched = decode.rank.fetch(decode.fetch_of(&source, &id, pages, tokens));
        let (published, fetched) = tokio::join!(soon("publishing", published), soon("fetching", fetched));
        if dice.below(8) == 0 {
            let _ = soon("aborting", decode.rank.abort(&TransferId::from(id.as_str()))).await;
        }
        let mut delivered = false;
        if let Ok(fetching) = &fetched {
            delivered = soon("the fetch's end", fetching.ended()).await.is_ok();
        }
        if delivered {
            decode.verify(pages, 0, tokens, round);
            tally.delivered.fetch_add(1, Ordering::Relaxed);
        } else {
            // It has ended: nothing lands any more.
            decode.poison();
            tokio::time::sleep(Duration::from_millis(20)).await;
            decode.verify(pages, 0, 0, round);
            tally.failed.fetch_add(1, Ordering::Relaxed);
        }
        if let Ok(publication) = published {
            // Where the fetch never came, the publish waits for its lease.
            if !delivered {
                let _ = soon("aborting", prefill.rank.abort(publication.transfer())).await;
            }
            let _ = soon("the publish's end", publication.ended()).await;
        }
        for rank in [&prefill.rank, &decode.rank] {
            soon("being attached", rank.ready()).await.unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn daemons_killed_at_random_under_load() {
    let seconds = match std::env::var("KVFERRY_TESTS").as_deref() {
        Ok("quick") => 2,
        Ok("full") => 60,
        _ => 5,
    };
    let directory = tempfile::tempdir().unwrap();
    let sockets = [directory.path().join("a.sock"), directory.path().join("b.sock")];
    let more = [
        "--peer-timeout-ms=2000",
        "--deadline-ms=4000",
        "--log-level=warn,kvferryd=info",
    ];
    let mut daemons: Vec<Program> = sockets
        .iter()
        .map(|socket| Program::start(socket, &more))
        .collect();
    let addresses: Vec<String> = daemons.iter().map(|daemon| daemon.advertised.clone()).collect();
    let (stop, tally) = (Arc::new(AtomicBool::new(false)), Arc::new(Tally::default()));
    let mut pairs = Vec::new();
    for number in 0..3 {
        // The last pair is on one daemon.
        let prefill = Engine::attach(&sockets[0], &format!("p{number}")).await;
        let decode = Engine::attach(&sockets[if number == 2 { 0 } else { 1 }], &format!("d{number}")).await;
        let source = format!("kvferry://{}/p{number}", addresses[0]);
        pairs.push(tokio::spawn(pair(
            prefill,
            decode,
            source,
            number,
            Arc::clone(&stop),
            Arc::clone(&tally),
        )));
    }

    let mut dice = Dice(88_172_645_463_325_252);
    let until = Instant::now() + Duration::from_secs(seconds);
    while Instant::now() < until {
        tokio::time::sleep(Duration::from_millis(200 + dice.below(500))).await;
        let at = usize::try_from(dice.below(2)).unwrap();
        daemons[at].signal(Signal::KILL);
        let killed = daemons.remove(at);
        let started = tokio::task::spawn_blocking({
            let (socket, address) = (sockets[at].clone(), addresses[at].clone());
            move || {
                drop(killed);
                Program::start_at(&socket, &address, &more)
            }
        });
        daemons.insert(at, started.await.unwrap());
    }
    // Once it is quiet, transfers go through again.
    let before = tally.delivered.load(Ordering::Relaxed);
    let recovered = async {
        while tally.delivered.load(Ordering::Relaxed) < before + 6 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    soon("recovery", recovered).await;
    stop.store(true, Ordering::Relaxed);
    for pair in pairs {
        soon("a pair's end", pair).await.unwrap();
    }
    println!(
        "{} delivered, {} failed",
        tally.delivered.load(Ordering::Relaxed),
        tally.failed.load(Ordering::Relaxed)
    );
    for socket in &sockets {
        soon("an empty daemon", is_empty(socket)).await;
    }
}

/// Waits until nothing of any engine is left; the status that says so.
async fn is_empty(socket: &Path) -> Status {
    let client = Client::connect(socket).await.unwrap();
    loop {
        let status = client.status().await.unwrap();
        let left = [
            "ranks",
            "regions",
            "publishes",
            "fetches",
            "announced",
            "jobs",
            "page_entries",
            "data_jobs",
            "data_regions",
            "data_mapped_bytes",
        ];
        if left.iter().all(|name| count(&status, name) == 0) && count(&status, "connections") == 1 {
            return status;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Engines that end at random, in the middle of what they do.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engines_that_end_at_random_leave_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let sockets = [directory.path().join("a.sock"), directory.path().join("b.sock")];
    let daemons = [Program::start(&sockets[0], &[]), Program::start(&sockets[1], &[])];
    let mut dice = Dice(1_234_567);
    let pages: Vec<u32> = (0..25).collect();
    let mut fds = Vec::new();
    for round in 0..40 {
        if round == 10 || round == 39 {
            for socket in &sockets {
                fds.push(count(&soon("an empty daemon", is_empty(socket)).await, "fds"));
            }
        }
        let prefill = Engine::attach(&sockets[0], &format!("p{round}")).await;
        let decode = Engine::attach(&sockets[1], &format!("d{round}")).await;
        let source = format!("kvferry://{}/p{round}", daemons[0].advertised);
        prefill.fill(&pages, 100, round);
        decode.poison();
        let mut publish = prefill.publish_of("t", &pages, 100);
        if dice.below(2) == 0 {
            publish.ready = Ready {
                tokens: 50,
                front_tokens: 50,
                ..Ready::default()
            };
        }
        let publication = prefill.rank.publish(publish).await.unwrap();
        let fetching = decode
            .rank
            .fetch(decode.fetch_of(&source, "t", &pages, 100))
            .await
            .unwrap();
        tokio::time::sleep(Duration::from_micros(dice.below(6_000))).await;
        // One side ends; the other learns of it, or had its end before.
        if dice.below(2) == 0 {
            drop((prefill, publication));
            match soon("the fetch's end", decode_end(&decode, &fetching)).await {
                true => decode.verify(&pages, 0, 100, round),
                false => {
                    decode.poison();
                    tokio::time::sleep(Duration::from_millis(5)).await;
                    decode.verify(&pages, 0, 0, round);
                }
            }
        } else {
            drop((decode, fetching));
            let _ = prefill.rank.abort(publication.transfer()).await;
            let _ = soon("the publish's end", publication.ended()).await;
        }
    }
    // Another lane or two may have been opened; one fd an engine would be more.
    assert!(fds[2] <= fds[0] + 16 && fds[3] <= fds[1] + 16, "{fds:?}");
}

/// Whether it was delivered. A prefill engine that is gone before they met is waited for; nobody waits here.
async fn decode_end(decode: &Engine, fetching: &kvferry_client::Fetching) -> bool {
    let patience = Duration::from_millis(200);
    if let Ok(end) = tokio::time::timeout(patience, fetching.ended()).await {
        return end.is_ok();
    }
    match decode.rank.abort(fetching.transfer()).await {
        Ok(()) | Err(ClientError::Refused(_)) => fetching.ended().await.is_ok(),
        Err(error) => panic!("{error}"),
    }
}
