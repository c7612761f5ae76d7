//! The local path against one thread's memcpy between two memfds, and the TCP path between two processes against two raw
//! connections between the same: the same scattered pages, in turn, round after round.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::Args;
use crossbeam_channel::{Receiver, unbounded};
use kvferry_dataplane::{Config, DataPlane, Event, JobId, RegionKey};
use kvferry_handshake::Ready;

use crate::peer::{Ask, HOST, RECEIVER, Say};
use crate::pool::{Cell, Pool};
use crate::report::{Line, Round, table};
use crate::{cpu, reference};

/// Nothing here takes so long.
const LIMIT: Duration = Duration::from_secs(120);

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Page sizes in bytes.
    #[arg(long, value_delimiter = ',', default_values_t = [576, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 64 << 20])]
    pages: Vec<usize>,
    /// Rounds that are measured.
    #[arg(long, default_value_t = 9)]
    rounds: usize,
    /// Bytes moved in a round, at most, in MiB.
    #[arg(long, default_value_t = 256)]
    mib: usize,
    /// Lanes of the TCP path.
    #[arg(long, default_value_t = Config::default().lanes_per_peer)]
    lanes: usize,
    /// Threads of the local path, which is measured with one too.
    #[arg(long, default_value_t = Config::default().copy_threads)]
    copy_threads: usize,
    /// Only this path: local or tcp.
    #[arg(long)]
    only: Option<String>,
    /// Checksums on the TCP path.
    #[arg(long)]
    checksum: bool,
}

pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    let mut lines = Vec::new();
    for page in &options.pages {
        let most = (options.mib << 20) / page;
        let cell = Cell {
            page: *page,
            count: most.clamp(4, 1 << 16),
        };
        let wanted = |path| options.only.as_deref().is_none_or(|only| only == path);
        let mut measured = Vec::new();
        if wanted("local") {
            // The reference has one thread: what of the ratio is due to more of them shows.
            measured.push(local(options, cell, 1));
            if options.copy_threads > 1 {
                measured.push(local(options, cell, options.copy_threads));
            }
        }
        if wanted("tcp") {
            measured.push(tcp(options, cell));
        }
        for line in measured {
            let line = line.with_context(|| format!("pages of {page} bytes"))?;
            println!("{}", serde_json::to_string(&line)?);
            lines.push(line);
        }
    }
    println!("\n{}", table(&lines));
    Ok(())
}

/// Runs both ways in turn; the first round is not measured.
fn rounds(
    options: &Options,
    mut reference: impl FnMut() -> anyhow::Result<Round>,
    mut kvferry: impl FnMut() -> anyhow::Result<Round>,
) -> anyhow::Result<(Vec<Round>, Vec<Round>)> {
    let (mut references, mut ours) = (Vec::new(), Vec::new());
    for round in 0..=options.rounds {
        // Whoever goes second may find caches warm: they take turns.
        let pair = if round % 2 == 0 {
            let reference = reference()?;
            (reference, kvferry()?)
        } else {
            let ours = kvferry()?;
            (reference()?, ours)
        };
        if round > 0 {
            references.push(pair.0);
            ours.push(pair.1);
        }
    }
    Ok((references, ours))
}

/// Job numbers.
fn next_job() -> JobId {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    JobId(NEXT.fetch_add(1, Ordering::Relaxed))
}

/// Waits for a job's completion or closing.
fn until(events: &Receiver<Event>, job: JobId, closed: bool) -> anyhow::Result<()> {
    let deadline = Instant::now() + LIMIT;
    loop {
        match events.recv_deadline(deadline)? {
            Event::Complete { job: of } if of == job && !closed => return Ok(()),
            Event::Closed { job: of, .. } if of == job && closed => return Ok(()),
            Event::Failed { message, .. } => bail!(message),
            _ => {}
        }
    }
}

fn local(options: &Options, cell: Cell, threads: usize) -> anyhow::Result<Line> {
    let (source, target) = (Pool::new(cell, Pool::SOURCE)?, Pool::new(cell, Pool::TARGET)?);
    let (from, to) = (source.remap()?, target.remap()?);
    let (sender, events) = unbounded();
    let config = Config {
        copy_threads: threads,
        ..Config::default()
    };
    let plane = DataPlane::start(config, Arc::new(move |event| drop(sender.send(event))))?;
    let region = |pool: &Pool, owner| -> anyhow::Result<Arc<[(u16, RegionKey)]>> {
        Ok(Arc::new([(
            0,
            plane.map_memfd(owner, pool.fd()?, 0, pool.len())?,
        )]))
    };
    let (source_regions, target_regions) = (region(&source, 1)?, region(&target, 2)?);
    let map = cell.map(&target.pages)?;

    let reference = || {
        let (start, used) = (Instant::now(), cpu::seconds());
        reference::memcpy(cell, &from, &to);
        Ok(Round {
            seconds: start.elapsed().as_secs_f64(),
            cpu_seconds: cpu::seconds() - used,
        })
    };
    let kvferry = || {
        let job = next_job();
        let (start, used) = (Instant::now(), cpu::seconds());
        plane.copy(
            job,
            map.clone(),
            Arc::clone(&source.pages),
            Arc::clone(&source_regions),
            Arc::clone(&target_regions),
        );
        plane.ready(job, Ready::complete(map.end()), None);
        until(&events, job, false)?;
        let round = Round {
            seconds: start.elapsed().as_secs_f64(),
            cpu_seconds: cpu::seconds() - used,
        };
        plane.close(job);
        until(&events, job, true)?;
        Ok(round)
    };
    let (references, ours) = rounds(options, reference, kvferry)?;
    target.check(Pool::TARGET, &source.pages)?;
    target.fill(Pool::TARGET);
    kvferry()?;
    target.check(Pool::TARGET, &source.pages)?;
    let path = match threads {
        1 => "local, 1 thread".to_owned(),
        threads => format!("local, {threads} threads"),
    };
    Ok(Line::new(path, cell.page, cell.count, &references, &ours))
}

/// The receiving process.
struct Peer {
    child: Child,
    asks: Arc<Mutex<ChildStdin>>,
    says: Receiver<Say>,
}

impl Peer {
    fn start(options: &Options, cell: Cell) -> anyhow::Result<(Peer, Receiver<Say>)> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args([
            "peer",
            "--page",
            &cell.page.to_string(),
            "--count",
            &cell.count.to_string(),
        ]);
        if options.checksum {
            command.arg("--checksum");
        }
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let stdin = child.stdin.take().context("no pipe to the receiving process")?;
        let stdout = child
            .stdout
            .take()
            .context("no pipe from the receiving process")?;
        let (to_says, says) = unbounded();
        let (to_lanes, lanes) = unbounded();
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                let _ = match serde_json::from_str(&line) {
                    Ok(say @ Say::Lane(_)) => to_lanes.send(say),
                    Ok(say) => to_says.send(say),
                    Err(error) => to_says.send(Say::Failed(format!("{error}: {line}"))),
                };
            }
        });
        let peer = Peer {
            child,
            asks: Arc::new(Mutex::new(stdin)),
            says,
        };
        Ok((peer, lanes))
    }

    fn tell(asks: &Mutex<ChildStdin>, ask: &Ask) -> anyhow::Result<()> {
        let line = serde_json::to_string(ask)?;
        let mut asks = asks.lock().map_err(|_| anyhow::anyhow!("a thread panicked"))?;
        Ok(writeln!(asks, "{line}")?)
    }

    fn ask(&self, ask: &Ask) -> anyhow::Result<Say> {
        Peer::tell(&self.asks, ask)?;
        match self.says.recv_timeout(LIMIT)? {
            Say::Failed(message) => bail!("{ask:?}: {message}"),
            say => Ok(say),
        }
    }

    fn cpu(&self) -> anyhow::Result<f64> {
        match self.ask(&Ask::Cpu)? {
            Say::Cpu(seconds) => Ok(seconds),
            other => bail!("{other:?} in place of CPU time"),
        }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn tcp(options: &Options, cell: Cell) -> anyhow::Result<Line> {
    let source = Arc::new(Pool::new(cell, Pool::SOURCE)?);
    let target_pages = crate::pool::scattered(cell, Pool::TARGET)?;
    let (peer, lanes) = Peer::start(options, cell)?;
    let port = match peer.says.recv_timeout(LIMIT)? {
        Say::Ready(port) => port,
        other => bail!("{other:?} in place of readiness"),
    };
    let stream = reference::Stream::connect(cell, Arc::new(source.remap()?), port)?;
    let (sender, events) = unbounded();
    let asks = Arc::clone(&peer.asks);
    let sink = move |event: Event| match event {
        Event::ToPeer { message, .. } => drop(Peer::tell(&asks, &Ask::Lane(message))),
        event => drop(sender.send(event)),
    };
    let config = Config {
        lanes_per_peer: options.lanes,
        checksum: options.checksum,
        ..Config::default()
    };
    let plane = DataPlane::start(config, Arc::new(sink))?;
    plane.peer_up(RECEIVER, HOST);
    let heard = plane.clone();
    std::thread::spawn(move || {
        while let Ok(Say::Lane(message)) = lanes.recv() {
            heard.peer_message(RECEIVER, message);
        }
    });
    let regions: Arc<[(u16, RegionKey)]> =
        Arc::new([(0, plane.map_memfd(1, source.fd()?, 0, source.len())?)]);
    let map = cell.map(&target_pages)?;

    let measured = |work: &mut dyn FnMut() -> anyhow::Result<()>| {
        let used = cpu::seconds() + peer.cpu()?;
        let start = Instant::now();
        work()?;
        let seconds = start.elapsed().as_secs_f64();
        Ok(Round {
            seconds,
            cpu_seconds: cpu::seconds() + peer.cpu()? - used,
        })
    };
    let reference = || measured(&mut || Ok(stream.send()?));
    let kvferry = || {
        let (job, slot) = (next_job(), next_job());
        peer.ask(&Ask::Receive(slot.0))?;
        let round = measured(&mut || {
            let pages = Arc::clone(&source.pages);
            plane.send(job, RECEIVER, slot.0, map.clone(), pages, Arc::clone(&regions));
            plane.ready(job, Ready::complete(map.end()), None);
            until(&events, job, false)
        })?;
        plane.close(job);
        until(&events, job, true)?;
        peer.ask(&Ask::Close(slot.0))?;
        Ok(round)
    };
    let (references, ours) = rounds(options, reference, kvferry)?;
    peer.ask(&Ask::Check)?;
    peer.ask(&Ask::Poison)?;
    kvferry()?;
    peer.ask(&Ask::Check)?;
    plane.shutdown();
    Ok(Line::new(
        "tcp".to_owned(),
        cell.page,
        cell.count,
        &references,
        &ours,
    ))
}
