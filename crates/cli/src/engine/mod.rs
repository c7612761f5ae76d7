//! `kvferry engine`: one rank of a small engine, for trying things by hand and for tests.
//!
//! It attaches an envelope file as one rank, allocates the pool, fills pages with a pattern and publishes them, or poisons
//! pages, fetches into them and verifies every byte of them and of the rest of the pool.

mod content;
mod fetch;
mod memory;
pub mod pattern;
mod pool;
mod publish;
mod report;
mod rows;
mod run;
mod scatter;
mod script;
mod worker;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use clap::{Args, Subcommand};
use kvferry_client::Client;
use kvferry_handshake::{Envelope, Role};
use tokio::sync::mpsc;

use self::memory::MemoryKind;
use self::pool::Pool;
use self::report::{Teller, Told};
use self::script::{Fetch, Growth, Order, Publish, When};
use self::worker::Worker;
use crate::envelope_file::read_envelope;
use crate::exit::{Exit, bad_input};
use crate::plan::Tokens;
use crate::status::Socket;

/// Attaches one rank of a small engine: fills and publishes pages, or fetches and verifies them.
///
/// Each byte of a page is a function of transfer, attempt, filling, component, layer, part, token and head, so that
/// two engines of different geometry agree on it. Pages are poisoned before they are fetched into; after it, every byte
/// asked for is verified, and every other byte of the pool must be untouched.
///
/// Try it: start `kvferryd` on this machine, then in one terminal `kvferry engine --envelope prefill.toml --rank 0 publish
/// --transfer t1 --tokens 964`, and in another `kvferry engine --envelope decode.toml --rank 0 fetch --source
/// kvferry://HOST:PORT/ENGINE --transfer t1 --tokens 0..964`. Every rank of both engines needs its own process.
///
/// Exit code 0: all delivered and verified; 1: a transfer failed, or a byte was wrong; 2: bad input; 3: refused.
#[derive(Args, Debug)]
pub struct Engine {
    #[command(flatten)]
    socket: Socket,
    /// Envelope file of the whole engine
    #[arg(long, value_name = "FILE")]
    envelope: PathBuf,
    /// Which rank this process is
    #[arg(long, value_name = "RANK")]
    rank: u32,
    /// Engine name, in place of the envelope file's
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// One life of the engine, equal on all its ranks; in place of the envelope file's
    #[arg(long, value_name = "N")]
    incarnation: Option<u64>,
    /// HOST:PORT of the daemon of rank 0, when that is not this rank's daemon
    #[arg(long, value_name = "HOST:PORT")]
    home: Option<String>,
    /// Where the pool lies
    #[arg(long, value_enum, default_value = "memfd")]
    memory: MemoryKind,
    /// Print JSON lines for programs instead of sentences
    #[arg(long)]
    json: bool,
    /// Overwrite pages as soon as their transfer is settled, as an engine that needs them does
    #[arg(long)]
    overwrite_settled: bool,
    /// Do not compare the whole pool at the end
    #[arg(long)]
    no_audit: bool,
    #[command(subcommand)]
    work: Work,
}

#[derive(Subcommand, Debug)]
enum Work {
    /// Fill pages with the pattern of a transfer and publish them; ends when they were fetched
    Publish(PublishArgs),
    /// Fetch pages of a transfer and verify them
    Fetch(FetchArgs),
    /// Carry out orders from standard input, one JSON object a line; docs/engine.md lists them
    Script,
}

#[derive(Args, Debug)]
struct PublishArgs {
    /// Transfer id
    #[arg(long, value_name = "ID")]
    transfer: String,
    /// Attempt
    #[arg(long, default_value_t = 0, value_name = "N")]
    attempt: u32,
    /// Number of the filling, where pages are filled anew within an attempt (not a region's generation); publish and
    /// fetch must say the same
    #[arg(long, default_value_t = 0, value_name = "N")]
    generation: u64,
    /// The prompt's length
    #[arg(long, value_name = "N")]
    tokens: u64,
    /// `seed:N` for scattered free pages, or the pages themselves: `pages=3,7,9-20`
    #[arg(long, value_name = "PAGES")]
    pages: Option<String>,
    /// Publish in so many steps, each filled just before
    #[arg(long, default_value_t = 1, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=i64::from(script::MAX_STEPS)))]
    steps: u32,
    /// What grows from step to step
    #[arg(long, value_enum, default_value = "tokens")]
    by: Growth,
    /// Pause between steps
    #[arg(long, default_value_t = 0, value_name = "MS")]
    pause_ms: u64,
    /// How many decode engines will fetch it
    #[arg(long, default_value_t = 1, value_name = "N")]
    serves: u32,
    /// Small metadata that the decode engine is given
    #[arg(long, value_name = "TEXT")]
    metadata: Option<String>,
}

#[derive(Args, Debug)]
struct FetchArgs {
    /// kvferry://HOST:PORT/ENGINE of the prefill engine
    #[arg(long, value_name = "ADDRESS")]
    source: String,
    /// Transfer id
    #[arg(long, value_name = "ID")]
    transfer: String,
    /// Attempt
    #[arg(long, default_value_t = 0, value_name = "N")]
    attempt: u32,
    /// Number of the filling, where pages are filled anew within an attempt (not a region's generation); publish and
    /// fetch must say the same
    #[arg(long, default_value_t = 0, value_name = "N")]
    generation: u64,
    /// Tokens wanted: those below FROM are held already
    #[arg(long, value_name = "FROM..TO")]
    tokens: Tokens,
    /// The least end that will do; TO unless given
    #[arg(long, value_name = "N")]
    least: Option<u64>,
    /// `seed:N` for scattered free pages, or the pages themselves: `pages=3,7,9-20`
    #[arg(long, value_name = "PAGES")]
    pages: Option<String>,
}

impl Engine {
    pub(crate) fn run(&self) -> anyhow::Result<Exit> {
        let envelope = self.envelope()?;
        // One worker beside this thread: the client's connection goes on while this one fills and verifies.
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .context("starting the runtime")?;
        let exit = runtime.block_on(self.attached(envelope))?;
        runtime.shutdown_timeout(Duration::from_secs(2));
        Ok(exit)
    }

    fn envelope(&self) -> anyhow::Result<Envelope> {
        let mut envelope = read_envelope(&self.envelope)?;
        let ranks = envelope.ranks.len();
        if usize::try_from(self.rank).map_or(true, |rank| rank >= ranks) {
            let file = self.envelope.display();
            return Err(bad_input(format!(
                "--rank {}: {file} has {ranks} ranks, counted from 0",
                self.rank
            )));
        }
        if let Some(name) = &self.name {
            envelope.identity.engine.clone_from(name);
        }
        if let Some(incarnation) = self.incarnation {
            envelope.identity.incarnation = incarnation;
        }
        Ok(envelope)
    }

    async fn attached(&self, envelope: Envelope) -> anyhow::Result<Exit> {
        let teller = Teller { json: self.json };
        let mut pool = Pool::allocate(envelope.clone(), self.rank, self.memory)?;
        if envelope.identity.role != Role::Prefill {
            pool.poison()?;
        }
        let client =
            Client::connect_within(&self.socket.socket, Duration::from_secs(self.socket.wait)).await?;
        let welcome = client.welcome();
        let engine = envelope.identity.engine.clone();
        let notices = client.notices();
        let rank = client.attach(envelope, self.rank, self.home.clone()).await?;
        teller.tell(&Told::Attached {
            engine,
            rank: self.rank,
            daemon: welcome.address,
            release: welcome.release,
            pool_bytes: pool.bytes(),
        })?;
        let (mut worker, ended) = Worker::new(rank, self.rank, pool, teller, self.overwrite_settled);
        match worker.register_all().await? {
            Exit::Done => worker.work(self.orders(), ended, notices, !self.no_audit).await,
            failed => Ok(failed),
        }
    }

    fn orders(&self) -> mpsc::Receiver<Result<Order, String>> {
        let (orders, receiver) = mpsc::channel(16);
        let one = match &self.work {
            Work::Publish(args) => Order::Publish(args.into()),
            Work::Fetch(args) => Order::Fetch(args.into()),
            Work::Script => {
                // A thread of its own: reading standard input cannot be interrupted.
                std::thread::spawn(move || {
                    script::read(std::io::stdin().lock(), |order| {
                        orders.blocking_send(order).is_ok()
                    });
                });
                return receiver;
            }
        };
        // The channel has room, and its receiver is at hand.
        let _ = orders.try_send(Ok(one));
        receiver
    }
}

impl From<&PublishArgs> for Publish {
    fn from(args: &PublishArgs) -> Publish {
        Publish {
            transfer: args.transfer.clone(),
            attempt: args.attempt,
            generation: args.generation,
            tokens: args.tokens,
            pages: args.pages.clone(),
            upto: None,
            steps: args.steps,
            by: args.by,
            pause_ms: args.pause_ms,
            serves: args.serves,
            metadata: args.metadata.clone(),
        }
    }
}

impl From<&FetchArgs> for Fetch {
    fn from(args: &FetchArgs) -> Fetch {
        Fetch {
            source: args.source.clone(),
            transfer: args.transfer.clone(),
            attempt: args.attempt,
            generation: args.generation,
            from: args.tokens.0.from,
            to: args.tokens.0.to,
            least: args.least,
            pages: args.pages.clone(),
            verify: When::Now,
        }
    }
}
