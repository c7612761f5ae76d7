//! Measures Kvferry against what the machine itself can do, in the same run.

#![deny(unsafe_code)]

mod cpu;
mod paths;
mod peer;
mod pool;
mod reference;
mod report;

use clap::{Parser, Subcommand};

/// Measures Kvferry against what the machine itself can do.
#[derive(Debug, Parser)]
#[command(name = "kvferry-bench", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// The local path against one thread's memcpy, and the TCP path against two raw connections.
    Paths(paths::Options),
    /// The receiving process of `paths`, which starts it.
    #[command(hide = true)]
    Peer(peer::Options),
}

fn main() -> anyhow::Result<()> {
    match Arguments::parse().command {
        Command::Paths(options) => paths::run(&options),
        Command::Peer(options) => peer::run(&options),
    }
}
