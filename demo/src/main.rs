//! The demo: two daemons as two nodes on loopback, a prefill engine of Llama-3.1-8B at TP4 and a decode engine at TP2,
//! each rank its own process with its own sealed memfd. `./scripts/demo` builds and runs it.

#![forbid(unsafe_code)]

mod burst;
mod certificates;
mod fleet;
mod node;
mod process;
mod requests;
mod table;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::Context as _;
use clap::Parser;

use crate::burst::{Ledger, carry};
use crate::certificates::Authority;
use crate::fleet::{EngineStart, Fleet, Side};
use crate::node::Node;
use crate::process::Programs;
use crate::requests::{Burst, PAGE_SIZE, memory_available};

const PREFILL_TP: u32 = 4;
const DECODE_TP: u32 = 2;
const PREFILL: &str = "llama-prefill";
const DECODE: &str = "llama-decode";

/// Carries KV pages between two engines on this machine and verifies every byte.
#[derive(Parser, Debug)]
struct Demo {
    /// The model's config.json
    #[arg(long, value_name = "FILE")]
    model_config: PathBuf,
    /// Directory for sockets, certificates, envelopes and logs; whoever made it removes it
    #[arg(long, value_name = "DIR")]
    dir: PathBuf,
    /// Two requests only
    #[arg(long)]
    small: bool,
}

fn main() -> ExitCode {
    match run(&Demo::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("demo: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(demo: &Demo) -> anyhow::Result<()> {
    let programs = Programs::beside_this()?;
    let available = memory_available()?;
    let burst = Burst::fitting(available, demo.small)?;
    println!(
        "Kvferry: Llama-3.1-8B, prefill TP{PREFILL_TP} -> decode TP{DECODE_TP}, page {PAGE_SIZE}, bf16, NHD; each rank a process."
    );
    println!(
        "{} requests; pools of {:.1} GiB in all ({:.1} GiB of memory available).\n",
        burst.tokens.len(),
        gib(burst.memory()),
        gib(available)
    );
    let scene = Scene {
        demo,
        programs: &programs,
        burst: &burst,
    };
    let prefill = scene.envelope(
        PREFILL,
        "prefill",
        PREFILL_TP,
        PAGE_SIZE,
        "bfloat16",
        burst.pool_pages,
    )?;
    let decode = scene.envelope(
        DECODE,
        "decode",
        DECODE_TP,
        PAGE_SIZE,
        "bfloat16",
        burst.pool_pages,
    )?;

    let authority = Authority::new(&demo.dir)?;
    let node_a = Node::start(&programs, &authority, &demo.dir, "node-a", "127.0.0.1")?;
    let node_b = Node::start(&programs, &authority, &demo.dir, "node-b", "127.0.0.2")?;
    println!(
        "1. Two nodes: daemons at {} and {}, TLS between them.",
        node_a.address, node_b.address
    );
    let mut fleet = Fleet::new();
    let over_tcp = scene.carry(&mut fleet, (&node_a, &prefill), (&node_b, &decode), "tcp", 1)?;
    scene.end(&mut fleet, &over_tcp)?;
    fleet.finish(Side::Prefill)?;

    println!("2. One node: both engines at {}.", node_a.address);
    let local = scene.carry(&mut fleet, (&node_a, &prefill), (&node_a, &decode), "local", 2)?;
    scene.end(&mut fleet, &local)?;

    println!(
        "3. A decode engine with page size 1 and fp8_e5m2 at {} asks the same prefill engine:\n",
        node_b.address
    );
    let odd = scene.envelope("llama-odd", "decode", DECODE_TP, 1, "fp8_e5m2", 2048)?;
    scene.refusal((&node_a, &node_b), &odd)?;
    fleet.collect("refused", 1, |_, _, _| {})?;
    println!("\n  The prefill engine was told the same; both daemons and the prefill engine go on.");
    fleet.finish(Side::Prefill)?;
    drop((node_a, node_b));
    println!("\nDone. Nothing is left running.");
    Ok(())
}

struct Scene<'a> {
    demo: &'a Demo,
    programs: &'a Programs,
    burst: &'a Burst,
}

impl Scene<'_> {
    /// Has `kvferry envelope` make an envelope file, as an operator would.
    fn envelope(
        &self,
        engine: &str,
        role: &str,
        tp: u32,
        page_size: u64,
        element: &str,
        pool_pages: u64,
    ) -> anyhow::Result<PathBuf> {
        let file = self.demo.dir.join(format!("{engine}.toml"));
        let output = Command::new(&self.programs.kvferry)
            .args(["envelope", "--engine", engine, "--role", role])
            .args(["--pool-pages", &pool_pages.to_string(), "--config"])
            .arg(&self.demo.model_config)
            .arg("--output")
            .arg(&file)
            .args([
                "--",
                "VLLM_KV_CACHE_LAYOUT=NHD",
                "vllm",
                "serve",
                "meta-llama/Llama-3.1-8B",
            ])
            .args([
                "--tensor-parallel-size",
                &tp.to_string(),
                "--block-size",
                &page_size.to_string(),
            ])
            .args(["--kv-cache-dtype", element])
            .output()
            .context("starting kvferry envelope")?;
        let said = String::from_utf8_lossy(&output.stderr);
        anyhow::ensure!(output.status.success(), "kvferry envelope failed:\n{said}");
        Ok(file)
    }

    /// Starts both engines and carries the burst.
    fn carry(
        &self,
        fleet: &mut Fleet,
        (prefill_node, prefill): (&Node, &Path),
        (decode_node, decode): (&Node, &Path),
        path: &str,
        incarnation: u64,
    ) -> anyhow::Result<Ledger> {
        let engine = |side, node, envelope: &Path, ranks| EngineStart {
            side,
            node,
            envelope: envelope.to_owned(),
            ranks,
            incarnation,
        };
        let dir = &self.demo.dir;
        fleet.start(
            self.programs,
            dir,
            &engine(Side::Prefill, prefill_node, prefill, PREFILL_TP),
        )?;
        fleet.start(
            self.programs,
            dir,
            &engine(Side::Decode, decode_node, decode, DECODE_TP),
        )?;
        let source = format!("kvferry://{}/{PREFILL}", prefill_node.address);
        carry(fleet, self.burst, &source, path, &format!("req{incarnation}"))
    }

    /// Ends the decode engine, whose audit must find nothing wrong, and prints the table.
    fn end(&self, fleet: &mut Fleet, ledger: &Ledger) -> anyhow::Result<()> {
        fleet.finish(Side::Decode)?;
        table::print(ledger);
        let verified: u64 = ledger.values().map(|carried| carried.verified).sum();
        let untouched: u64 = ledger.values().map(|carried| carried.untouched).sum();
        println!(
            "  verified: all {verified} bytes are as published; {untouched} bytes of the same pages, and all other pages, untouched.\n"
        );
        Ok(())
    }

    /// Has the odd engine fetch, and shows what it is told.
    fn refusal(&self, (prefill_node, node): (&Node, &Node), envelope: &Path) -> anyhow::Result<()> {
        let source = format!("kvferry://{}/{PREFILL}", prefill_node.address);
        // One after the other: the first asks, the second meets a refusal that is remembered.
        for rank in 0..DECODE_TP {
            let mut command = Command::new(&self.programs.kvferry);
            command
                .arg("engine")
                .arg("--socket")
                .arg(&node.socket)
                .arg("--envelope")
                .arg(envelope);
            command.args([
                "--rank",
                &rank.to_string(),
                "--incarnation",
                "3",
                "fetch",
                "--source",
                &source,
            ]);
            command.args(["--transfer", "odd-1", "--tokens", "0..964"]);
            let output = command.output().context("starting kvferry engine")?;
            let code = output.status.code();
            anyhow::ensure!(
                code == Some(3),
                "rank {rank} of the odd engine was not refused: exit code {code:?}\n{}{}",
                String::from_utf8_lossy(&output.stdout),
                String::from_utf8_lossy(&output.stderr)
            );
            if rank == 0 {
                for line in String::from_utf8_lossy(&output.stdout).lines() {
                    println!("  | {line}");
                }
            }
        }
        Ok(())
    }
}

#[expect(clippy::cast_precision_loss, reason = "for reading")]
fn gib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1u32 << 30)
}
