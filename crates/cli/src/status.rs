//! `kvferry status`: what a daemon is doing.

use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use kvferry_client::{Client, Status};
use kvferry_handshake::spans;

use crate::exit::Exit;
use crate::text::{bytes, table};

/// Where the daemon is.
#[derive(Args, Clone, Debug)]
pub(crate) struct Socket {
    /// The daemon's Unix socket
    #[arg(
        long,
        value_name = "PATH",
        env = "KVFERRY_SOCKET",
        default_value = "/run/kvferry/kvferryd.sock"
    )]
    pub(crate) socket: PathBuf,
    /// How long to try when no daemon answers, also when one accepts and stays mute; 0 tries once
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    pub(crate) wait: u64,
}

/// Shows what the node's daemon is doing: engines, links, peers, and everything it counts.
#[derive(Args, Debug)]
pub struct StatusOf {
    #[command(flatten)]
    socket: Socket,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl StatusOf {
    pub(crate) fn run(&self, out: &mut impl Write) -> anyhow::Result<Exit> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .context("starting the runtime")?;
        let patience = Duration::from_secs(self.socket.wait);
        let status = runtime.block_on(async {
            let client = Client::connect_within(&self.socket.socket, patience).await?;
            // A daemon that stops between its greeting and its answer is waited for no longer than one that is away.
            client
                .patience(patience.max(Duration::from_secs(1)))
                .status()
                .await
        })?;
        if self.json {
            serde_json::to_writer_pretty(&mut *out, &status)?;
            writeln!(out)?;
        } else {
            write_status(out, &status)?;
        }
        Ok(Exit::Done)
    }
}

fn write_status(out: &mut impl Write, status: &Status) -> std::io::Result<()> {
    writeln!(
        out,
        "kvferryd {} at {}, up {}, incarnation {:016x}",
        status.release,
        status.address,
        duration(status.uptime_s),
        status.incarnation
    )?;
    let engines = status.engines.iter().map(|engine| {
        let links: Vec<String> = engine
            .links
            .iter()
            .map(|(peer, verdict)| format!("{peer} {verdict}"))
            .collect();
        vec![
            engine.engine.clone(),
            engine.model.clone(),
            format!("{} of {}", named(&engine.ranks), engine.of),
            bytes(engine.registered_bytes),
            engine.publishes.to_string(),
            engine.fetches.to_string(),
            if links.is_empty() {
                "-".to_owned()
            } else {
                links.join(", ")
            },
        ]
    });
    let header = [
        "ENGINE",
        "MODEL",
        "RANKS",
        "REGISTERED",
        "PUBLISHES",
        "FETCHES",
        "LINKS",
    ];
    section(out, "no engine is attached", &header, engines.collect())?;
    let peers = status.peers.iter().map(|peer| {
        vec![
            peer.address.clone(),
            peer.state.clone(),
            peer.lanes.to_string(),
            bytes(peer.sent_bytes),
            bytes(peer.received_bytes),
        ]
    });
    section(
        out,
        "no peer is known",
        &["PEER", "STATE", "LANES", "SENT", "RECEIVED"],
        peers.collect(),
    )?;
    let counts = status
        .counts
        .iter()
        .map(|(name, count)| vec![name.clone(), count.to_string()]);
    section(out, "nothing is counted", &["COUNT", "NOW"], counts.collect())
}

fn section(
    out: &mut impl Write,
    empty: &str,
    header: &[&str],
    rows: Vec<Vec<String>>,
) -> std::io::Result<()> {
    writeln!(out)?;
    if rows.is_empty() {
        return writeln!(out, "{empty}");
    }
    table(out, header, &rows)
}

fn duration(seconds: u64) -> String {
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86400);
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{minutes} min {} s", seconds % 60),
        3600..86400 => format!("{hours} h {} min", minutes % 60),
        _ => format!("{days} d {} h", hours % 24),
    }
}

/// `0-3,5`.
fn named(ranks: &[u32]) -> String {
    match ranks {
        [] => "none".to_owned(),
        ranks => spans(ranks),
    }
}

#[cfg(test)]
mod tests {
    use kvferry_control::{EngineStatus, PeerStatus};

    use super::*;

    #[test]
    fn ranks_as_spans() {
        assert_eq!(named(&[0, 1, 2, 5, 7, 8]), "0-2,5,7-8");
        assert_eq!(named(&[]), "none");
    }

    #[test]
    fn durations_in_two_units() {
        assert_eq!(duration(59), "59 s");
        assert_eq!(duration(125), "2 min 5 s");
        assert_eq!(duration(90_000), "1 d 1 h");
    }

    #[test]
    fn everything_shows() {
        let status = Status {
            address: "10.0.0.1:7400".into(),
            release: "0.1.0".into(),
            incarnation: 7,
            uptime_s: 61,
            engines: vec![EngineStatus {
                engine: "llama-p".into(),
                model: "Llama".into(),
                ranks: vec![0, 1],
                of: 4,
                registered_bytes: 1 << 30,
                publishes: 3,
                fetches: 0,
                links: vec![("llama-d".into(), "compatible".into())],
            }],
            peers: vec![PeerStatus {
                address: "10.0.0.2:7400".into(),
                state: "connected".into(),
                lanes: 2,
                sent_bytes: 5 << 20,
                received_bytes: 0,
                send_calls: 0,
            }],
            counts: vec![("regions".into(), 2)],
        };
        let mut out = Vec::new();
        write_status(&mut out, &status).unwrap();
        let text = String::from_utf8(out).unwrap();
        for word in [
            "10.0.0.1:7400",
            "1 min 1 s",
            "llama-p",
            "0-1 of 4",
            "1.0 GiB",
            "llama-d compatible",
            "10.0.0.2:7400",
            "connected",
            "5.0 MiB",
            "regions",
        ] {
            assert!(text.contains(word), "{word} is missing in\n{text}");
        }
        let mut out = Vec::new();
        write_status(&mut out, &Status::default()).unwrap();
        assert!(String::from_utf8(out).unwrap().contains("no engine is attached"));
    }
}
