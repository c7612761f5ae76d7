//! One "node": a daemon with its own socket, ports and certificate.

use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::Context as _;

use crate::certificates::Authority;
use crate::process::{Process, Programs};

/// A running daemon.
#[derive(Debug)]
pub(crate) struct Node {
    /// `host:port` that peers and fetches name it by.
    pub(crate) address: String,
    /// Its Unix socket.
    pub(crate) socket: PathBuf,
    _process: Process,
}

impl Node {
    /// Starts the daemon of node `name` at loopback address `host`.
    pub(crate) fn start(
        programs: &Programs,
        authority: &Authority,
        dir: &Path,
        name: &str,
        host: &str,
    ) -> anyhow::Result<Node> {
        let certificate = authority.certify(dir, name, host)?;
        let socket = dir.join(format!("{name}.sock"));
        let port = free_port(host)?;
        let address = format!("{host}:{port}");
        let config = dir.join(format!("{name}.toml"));
        let text = format!(
            "socket = {socket:?}\npeer_listen = {address:?}\nmetrics_listen = \"off\"\n\n\
             [tls]\nca = {:?}\ncert = {:?}\nkey = {:?}\n",
            certificate.ca, certificate.cert, certificate.key
        );
        std::fs::write(&config, text).context("writing a daemon's configuration")?;
        let mut command = Command::new(&programs.kvferryd);
        command.arg("--config").arg(&config);
        let mut process = Process::start(name, &mut command, dir)?;
        wait_until_up(&mut process, &socket, &address)?;
        Ok(Node {
            address,
            socket,
            _process: process,
        })
    }
}

/// A port that nobody listens on now. Someone else may take it before the daemon does, who then says so.
fn free_port(host: &str) -> anyhow::Result<u16> {
    let listener = TcpListener::bind((host, 0)).with_context(|| format!("no free port at {host}"))?;
    Ok(listener.local_addr()?.port())
}

fn wait_until_up(process: &mut Process, socket: &Path, address: &str) -> anyhow::Result<()> {
    let patience = Instant::now() + Duration::from_secs(20);
    loop {
        if process.has_ended() {
            return Err(process.ended_early());
        }
        if socket.exists() && TcpStream::connect(address).is_ok() {
            return Ok(());
        }
        anyhow::ensure!(
            Instant::now() < patience,
            "the daemon at {address} did not come up in 20 s"
        );
        std::thread::sleep(Duration::from_millis(20));
    }
}
