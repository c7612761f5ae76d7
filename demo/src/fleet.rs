//! The ranks of a prefill and a decode engine, each a process of its own, driven together.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use anyhow::Context as _;
use serde_json::Value;

use crate::node::Node;
use crate::process::{EngineRank, Programs, Told};

/// Which engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// The one that publishes.
    Prefill,
    /// The one that fetches.
    Decode,
}

/// All ranks of both engines.
#[derive(Debug)]
pub(crate) struct Fleet {
    /// By a number that is never used again: what an ended rank told last may still be on its way.
    ranks: BTreeMap<usize, (Side, EngineRank)>,
    next: usize,
    told: Receiver<Told>,
    teller: Sender<Told>,
}

/// How to start the ranks of one engine.
#[derive(Debug)]
pub(crate) struct EngineStart<'a> {
    /// Publishes or fetches.
    pub(crate) side: Side,
    /// Its daemon.
    pub(crate) node: &'a Node,
    /// Its envelope file.
    pub(crate) envelope: PathBuf,
    /// How many ranks.
    pub(crate) ranks: u32,
    /// Its life, equal on all ranks.
    pub(crate) incarnation: u64,
}

impl Fleet {
    /// No ranks yet.
    pub(crate) fn new() -> Fleet {
        let (teller, told) = channel();
        Fleet {
            ranks: BTreeMap::new(),
            next: 0,
            told,
            teller,
        }
    }

    /// Starts the ranks of an engine; [`Fleet::collect`] tells when they are attached.
    pub(crate) fn start(
        &mut self,
        programs: &Programs,
        dir: &Path,
        engine: &EngineStart<'_>,
    ) -> anyhow::Result<()> {
        for rank in 0..engine.ranks {
            let mut command = Command::new(&programs.kvferry);
            command.arg("engine").arg("--socket").arg(&engine.node.socket);
            command
                .arg("--envelope")
                .arg(&engine.envelope)
                .args(["--rank", &rank.to_string()]);
            command.args([
                "--incarnation",
                &engine.incarnation.to_string(),
                "--json",
                "script",
            ]);
            let name = format!("{:?}-{rank}-of-{}", engine.side, engine.incarnation).to_lowercase();
            let from = self.next;
            self.next += 1;
            let started = EngineRank::start(&name, &mut command, dir, from, self.teller.clone())?;
            self.ranks.insert(from, (engine.side, started));
        }
        Ok(())
    }

    /// Gives all ranks of one side an order.
    pub(crate) fn order(&mut self, side: Side, order: &Value) -> anyhow::Result<()> {
        for (_, rank) in self.ranks.values_mut().filter(|(of, _)| *of == side) {
            rank.order(order)?;
        }
        Ok(())
    }

    /// Ranks of one side.
    pub(crate) fn count(&self, side: Side) -> usize {
        self.ranks.values().filter(|(of, _)| *of == side).count()
    }

    /// Waits for `count` events of this name; `each` sees every event that comes meanwhile. An event that tells of a
    /// failure is an error, and so is silence.
    pub(crate) fn collect(
        &mut self,
        name: &str,
        count: usize,
        mut each: impl FnMut(Side, usize, &Value),
    ) -> anyhow::Result<()> {
        let mut seen = 0;
        while seen < count {
            let told = self
                .told
                .recv_timeout(Duration::from_secs(120))
                .with_context(|| {
                    format!(
                        "the engines have been silent for two minutes: {seen} of {count} {name} events came"
                    )
                })?;
            let Some((side, rank)) = self.ranks.get_mut(&told.from) else {
                continue;
            };
            let Some(event) = told.event else {
                return Err(rank.ended_early());
            };
            match event["event"].as_str() {
                Some(this) if this == name => seen += 1,
                Some("failed" | "error" | "refused") | None => anyhow::bail!("an engine tells: {event}"),
                Some(_) => {}
            }
            each(*side, told.from, &event);
        }
        Ok(())
    }

    /// Ends all ranks of one side: each audits its whole pool before it ends.
    pub(crate) fn finish(&mut self, side: Side) -> anyhow::Result<()> {
        let ending: Vec<usize> = self
            .ranks
            .iter()
            .filter(|(_, (of, _))| *of == side)
            .map(|(number, _)| *number)
            .collect();
        for number in ending {
            if let Some((_, rank)) = self.ranks.remove(&number) {
                rank.finish()?;
            }
        }
        Ok(())
    }
}
