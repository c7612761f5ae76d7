//! The command line: what `kvferry` does, as a library, so that its parts can be tested and shared.
//!
//! - [`check`], [`plan`], [`explain`] and [`envelope`] work on files alone, before anything is deployed;
//! - [`status`] and [`engine`] talk to a running `kvferryd`.
//!
//! Exit codes are in [`exit`].

#![forbid(unsafe_code)]

mod bounded;
pub mod check;
pub mod engine;
pub mod envelope;
mod envelope_file;
pub mod exit;
pub mod explain;
mod page_lists;
pub mod plan;
pub mod status;
mod text;

use std::io::Write as _;

use clap::{Parser, Subcommand};

/// Moves KV caches between inference engines: check pairs of engines, plan transfers, look at the daemon.
#[derive(Parser, Debug)]
#[command(name = "kvferry", version, propagate_version = true)]
#[command(
    after_help = "Exit codes: 0 done; 1 failed while running; 2 unreadable or incomplete input; 3 the pair is refused."
)]
pub struct Kvferry {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    Check(check::Check),
    Plan(plan::Plan),
    Explain(explain::Explain),
    Envelope(envelope::EnvelopeOf),
    Status(status::StatusOf),
    Engine(Box<engine::Engine>),
}

impl Kvferry {
    /// Runs the command.
    ///
    /// # Errors
    ///
    /// [`exit::of_error`] tells which exit code an error leads to.
    pub fn run(&self) -> anyhow::Result<exit::Exit> {
        let mut out = exit::Output(std::io::stdout());
        let exit = match &self.command {
            Command::Check(check) => check.run(&mut out)?,
            Command::Plan(plan) => plan.run(&mut out)?,
            Command::Explain(explain) => explain.run(&mut out)?,
            Command::Envelope(envelope) => envelope.run(&mut out)?,
            Command::Status(status) => status.run(&mut out)?,
            Command::Engine(engine) => engine.run()?,
        };
        exit::printed(out.flush().map_err(Into::into))?;
        Ok(exit)
    }
}
