//! The receiving process: a data plane and the raw reference's receiver over one pool, told what to do on its standard
//! input, line by line.

use std::io::{BufRead, Write};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Arc, Mutex};

use anyhow::Context;
use clap::Args;
use kvferry_dataplane::{Config, DataPlane, Event, JobId, LaneMessage, RegionKey};
use serde::{Deserialize, Serialize};

use crate::pool::{Cell, Pool, scattered};
use crate::{cpu, reference};

#[derive(Debug, Args)]
pub(crate) struct Options {
    #[arg(long)]
    page: usize,
    #[arg(long)]
    count: usize,
    #[arg(long)]
    checksum: bool,
}

/// From the sending process.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Ask {
    Lane(LaneMessage),
    /// Get ready to receive once by this job.
    Receive(u64),
    /// The job is done: close it.
    Close(u64),
    Cpu,
    /// Fill the pool with its own pattern again.
    Poison,
    Check,
}

/// To the sending process.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum Say {
    /// Port of the raw reference.
    Ready(u16),
    Lane(LaneMessage),
    Done,
    Cpu(f64),
    Failed(String),
}

/// Peers' names of each other.
pub(crate) const SENDER: &str = "sender";
pub(crate) const RECEIVER: &str = "receiver";
pub(crate) const HOST: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

fn say(out: &Mutex<std::io::Stdout>, what: &Say) {
    let line = serde_json::to_string(what).unwrap_or_default();
    if let Ok(mut out) = out.lock() {
        // The other process is gone: then our input ends too.
        let _ = writeln!(out, "{line}").and_then(|()| out.flush());
    }
}

pub(crate) fn run(options: &Options) -> anyhow::Result<()> {
    let cell = Cell {
        page: options.page,
        count: options.count,
    };
    let out = Arc::new(Mutex::new(std::io::stdout()));
    let pool = Arc::new(Pool::new(cell, Pool::TARGET)?);
    let source_pages = scattered(cell, Pool::SOURCE)?;
    let port = reference::serve(cell, Arc::new(pool.remap()?))?;
    let said = Arc::clone(&out);
    let sink = move |event: Event| match event {
        Event::ToPeer { message, .. } => say(&said, &Say::Lane(message)),
        Event::Failed { message, .. } => say(&said, &Say::Failed(message)),
        Event::Closed { .. } => say(&said, &Say::Done),
        Event::Progress { .. } | Event::Alive { .. } | Event::Complete { .. } | Event::Trouble { .. } => {}
    };
    let config = Config {
        checksum: options.checksum,
        ..Config::default()
    };
    let plane = DataPlane::start(config, Arc::new(sink))?;
    plane.peer_up(SENDER, HOST);
    let key = plane.map_memfd(0, pool.fd()?, 0, pool.len())?;
    let regions: Arc<[(u16, RegionKey)]> = Arc::new([(0, key)]);
    let map = cell.map(&pool.pages)?;
    say(&out, &Say::Ready(port));
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let ask: Ask = serde_json::from_str(&line).with_context(|| line.clone())?;
        match ask {
            Ask::Lane(message) => plane.peer_message(SENDER, message),
            Ask::Receive(job) => {
                plane.receive(JobId(job), SENDER, map.clone(), Arc::clone(&regions));
                plane.end(JobId(job), map.end());
                say(&out, &Say::Done);
            }
            Ask::Close(job) => plane.close(JobId(job)),
            Ask::Cpu => say(&out, &Say::Cpu(cpu::seconds())),
            Ask::Poison => {
                pool.fill(Pool::TARGET);
                say(&out, &Say::Done);
            }
            Ask::Check => match pool.check(Pool::TARGET, &source_pages) {
                Ok(()) => say(&out, &Say::Done),
                Err(error) => say(&out, &Say::Failed(error.to_string())),
            },
        }
    }
    Ok(())
}
