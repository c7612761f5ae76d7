//! The processes of the demo: they end when it does.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::Sender;
use std::thread::JoinHandle;

use anyhow::Context as _;
use serde_json::Value;

/// The programs, built beside this one.
#[derive(Clone, Debug)]
pub(crate) struct Programs {
    /// `kvferry`.
    pub(crate) kvferry: PathBuf,
    /// `kvferryd`.
    pub(crate) kvferryd: PathBuf,
}

impl Programs {
    /// Finds them beside the running program.
    pub(crate) fn beside_this() -> anyhow::Result<Programs> {
        let this = std::env::current_exe().context("finding this program")?;
        let find = |name: &str| {
            let path = this.with_file_name(name);
            anyhow::ensure!(
                path.exists(),
                "{} is not there; run ./scripts/demo, which builds it",
                path.display()
            );
            Ok(path)
        };
        Ok(Programs {
            kvferry: find("kvferry")?,
            kvferryd: find("kvferryd")?,
        })
    }
}

/// A process that is killed when it is dropped.
#[derive(Debug)]
pub(crate) struct Process {
    name: String,
    child: Child,
    log: PathBuf,
}

impl Process {
    /// Starts a program; its standard error goes to a log file in `dir`.
    pub(crate) fn start(name: &str, command: &mut Command, dir: &Path) -> anyhow::Result<Process> {
        let log = dir.join(format!("{name}.log"));
        command.stderr(File::create(&log).context("making a log file")?);
        let child = command.spawn().with_context(|| format!("starting {name}"))?;
        Ok(Process {
            name: name.to_owned(),
            child,
            log,
        })
    }

    /// An error that tells how the process ended and what it said last.
    pub(crate) fn ended_early(&mut self) -> anyhow::Error {
        let status = match self.child.wait() {
            Ok(status) => status.to_string(),
            Err(error) => error.to_string(),
        };
        anyhow::anyhow!("{} ended early ({status}):\n{}", self.name, self.last_words())
    }

    fn last_words(&self) -> String {
        let text = std::fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(20)..].join("\n")
    }

    /// Whether it has ended.
    pub(crate) fn has_ended(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(Some(_)) | Err(_))
    }

    /// Waits for its end; an error unless it succeeded.
    pub(crate) fn finish(mut self) -> anyhow::Result<()> {
        let status = self
            .child
            .wait()
            .with_context(|| format!("waiting for {}", self.name))?;
        anyhow::ensure!(
            status.success(),
            "{} failed ({status}):\n{}",
            self.name,
            self.last_words()
        );
        Ok(())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It may have ended already, which is as good.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// One rank of an engine: `kvferry engine ... script`, driven by JSON lines.
#[derive(Debug)]
pub(crate) struct EngineRank {
    process: Process,
    orders: Option<ChildStdin>,
    reader: Option<JoinHandle<()>>,
}

/// Something that a rank told.
#[derive(Debug)]
pub(crate) struct Told {
    /// Which rank, as numbered by whoever started it.
    pub(crate) from: usize,
    /// The event; `None` once the rank's output has ended.
    pub(crate) event: Option<Value>,
}

impl EngineRank {
    /// Starts `command`, and sends what it tells to `told` as number `from`.
    pub(crate) fn start(
        name: &str,
        command: &mut Command,
        dir: &Path,
        from: usize,
        told: Sender<Told>,
    ) -> anyhow::Result<EngineRank> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = Process::start(name, command, dir)?;
        let orders = process.child.stdin.take();
        let output = process.child.stdout.take().context("the rank has no output")?;
        let reader = std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                let event = serde_json::from_str(&line).unwrap_or(Value::String(line));
                if told
                    .send(Told {
                        from,
                        event: Some(event),
                    })
                    .is_err()
                {
                    return;
                }
            }
            // The receiver may be gone: then nobody waits for this.
            let _ = told.send(Told { from, event: None });
        });
        Ok(EngineRank {
            process,
            orders,
            reader: Some(reader),
        })
    }

    /// Gives an order.
    pub(crate) fn order(&mut self, order: &Value) -> anyhow::Result<()> {
        let Some(orders) = &mut self.orders else {
            anyhow::bail!("{} takes no orders any more", self.process.name);
        };
        writeln!(orders, "{order}").or_else(|_| Err(self.process.ended_early()))
    }

    /// Ends it: no more orders, then its audit of the whole pool, then its exit code.
    pub(crate) fn finish(mut self) -> anyhow::Result<()> {
        self.orders = None;
        if let Some(reader) = self.reader.take() {
            // A reader that panicked has told so itself.
            let _ = reader.join();
        }
        self.process.finish()
    }

    /// An error that tells how it ended.
    pub(crate) fn ended_early(&mut self) -> anyhow::Error {
        self.process.ended_early()
    }
}
