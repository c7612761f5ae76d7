//! What the system withholds while the daemon runs, and when it starts: threads, memory, room in a file.

use std::fs;
use std::io::Read;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use kvferry_client::{Client, ClientError};
use kvferry_handshake::Code;
use kvferry_tests::node::{free_port, get};
use kvferry_tests::programs::kvferryd;
use rustix::process::{Resource, Rlimit, Signal, prlimit};

use crate::process::Program;
use crate::rig::{Authority, Engine, PATIENCE, envelope, soon, tls_flags};

/// A daemon whose ended threads leave no stacks behind that a new one could have.
fn without_spare_stacks(socket: &std::path::Path, flags: &[String]) -> Program {
    let mut command = Command::new(kvferryd());
    command
        .arg("--socket")
        .arg(socket)
        .args([
            "--peer-listen=127.0.0.1:0",
            "--metrics-listen=off",
            "--log-format=json",
        ])
        .args(flags)
        .env("GLIBC_TUNABLES", "glibc.pthread.stack_cache_size=0");
    Program::run(command)
}

/// From now on the daemon may have no more memory than a MiB, half a thread's stack, or as much as it likes.
fn give_threads(program: &Program, give: bool) {
    let status = fs::read_to_string(format!("/proc/{}/status", program.pid())).unwrap();
    let size = status.lines().find_map(|line| line.strip_prefix("VmSize:"));
    let size: u64 = size.unwrap().trim().trim_end_matches(" kB").parse().unwrap();
    let current = (!give).then_some((size << 10) + (1 << 20));
    let limit = Rlimit {
        current,
        maximum: None,
    };
    prlimit(Some(program.pid()), Resource::As, limit).unwrap();
}

fn fds(program: &Program) -> usize {
    fs::read_dir(format!("/proc/{}/fd", program.pid()))
        .unwrap()
        .count()
}

fn lacks_threads(what: &str, error: ClientError) {
    match error {
        ClientError::Refused(fault) => {
            assert_eq!(fault.code, Code::OverLimit, "{what}: {fault}");
            assert!(
                fault.message.contains("RLIMIT_NPROC") && fault.code.can_retry(),
                "{what}: {fault}"
            );
        }
        other => panic!("{what}: {other}"),
    }
}

/// No thread of such a daemon has ended before, whose stack a new one could have.
#[tokio::test]
async fn a_daemon_without_a_thread_to_spare_says_so_and_loses_nothing() {
    for heals in [true, false] {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("kvferryd.sock");
        let daemon = without_spare_stacks(&socket, &[]);
        let before = fds(&daemon);
        give_threads(&daemon, false);
        for n in 0..10 {
            let client = soon("connecting", Client::connect(&socket)).await.unwrap();
            let attach = client.attach(envelope(&format!("e{n}")), 0, None);
            lacks_threads("attach", soon("an answer", attach).await.unwrap_err());
        }
        let gone = async {
            while fds(&daemon) > before {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        soon("the end of connections", gone).await;
        if heals {
            give_threads(&daemon, true);
            Engine::attach(&socket, "after").await;
        }
        daemon.signal(Signal::TERM);
        assert_eq!(daemon.exit_code().await, Some(0), "an end in order");
    }
}

#[tokio::test]
async fn certificates_are_renewed_after_a_time_without_threads() {
    let authority = Authority::new();
    let files = authority.issue("node", &["127.0.0.1"]);
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("kvferryd.sock");
    let flags = tls_flags(&files);
    let daemon = without_spare_stacks(&socket, &flags);
    give_threads(&daemon, false);
    // Two looks long: at least one fell into it, which the log tells.
    tokio::time::sleep(Duration::from_secs(4)).await;
    give_threads(&daemon, true);
    let renewed = authority.issue("renewed", &["127.0.0.1"]);
    for (from, to) in [(&renewed.cert, &files.cert), (&renewed.key, &files.key)] {
        fs::copy(from, to).unwrap();
    }
    // It is seen at the second look after that.
    tokio::time::sleep(Duration::from_secs(8)).await;
    daemon.signal(Signal::TERM);
    let log = daemon.log().await.join("\n");
    let skipped = log.find("certificates are not looked at now");
    let used = log.find("new connections use the renewed certificates");
    assert!(skipped.is_some() && skipped < used, "{log}");
}

/// Ends, whatever it lacks, and does not hang; where it can, it says what it lacks.
#[test]
fn too_little_memory_to_start_with_is_an_end_and_not_a_hang() {
    let directory = tempfile::tempdir().unwrap();
    let mut named = 0;
    for kib in (1..=8).map(|n| n * 1000) {
        let mut child = Command::new("sh")
            .args(["-c", "ulimit -d \"$1\" && shift && exec \"$@\"", "sh"])
            .arg(kib.to_string())
            .arg(kvferryd())
            .arg("--socket")
            .arg(directory.path().join("socket"))
            .args(["--peer-listen=127.0.0.1:0", "--metrics-listen=off"])
            .env("RUST_BACKTRACE", "1")
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let began = Instant::now();
        let status = loop {
            if let Some(status) = child.try_wait().unwrap() {
                break Some(status);
            }
            if began.elapsed() > PATIENCE {
                break None;
            }
            std::thread::sleep(Duration::from_millis(20));
        };
        if status.is_none() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        let mut told = String::new();
        child.stderr.take().unwrap().read_to_string(&mut told).unwrap();
        let Some(status) = status else {
            // Enough to start with.
            assert!(told.contains("kvferryd is ready"), "{kib} KiB: it hangs: {told}");
            break;
        };
        assert!(
            !status.success() && !told.contains("panicked"),
            "{kib} KiB: {told}"
        );
        named += u32::from(told.contains("ulimit"));
    }
    assert!(named > 0, "nothing is named");
}

#[tokio::test]
async fn a_log_file_that_is_as_long_as_it_may_be_does_not_end_the_daemon() {
    let directory = tempfile::tempdir().unwrap();
    let (socket, log) = (directory.path().join("socket"), directory.path().join("log"));
    let metrics = free_port();
    let mut child = Command::new("sh")
        .args([
            "-c",
            "ulimit -f 8 && log=$1 && shift && exec \"$@\" 2>\"$log\"",
            "sh",
        ])
        .arg(&log)
        .arg(kvferryd())
        .arg("--socket")
        .arg(&socket)
        .args(["--peer-listen=127.0.0.1:0", "--log-level=trace"])
        .arg(format!("--metrics-listen=127.0.0.1:{metrics}"))
        .spawn()
        .unwrap();
    let lost = async {
        loop {
            // Each leaves some lines.
            Client::connect(&socket).await.unwrap().status().await.unwrap();
            let page = get(metrics, "/metrics");
            let lost = page
                .lines()
                .find_map(|line| line.strip_prefix("kvferry_log_lines_dropped_total{why=\"failed\"} "));
            if lost.is_some_and(|lost| lost != "0") {
                break;
            }
        }
    };
    let lost = tokio::time::timeout(PATIENCE, lost).await;
    let running = child.try_wait().unwrap().is_none();
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(running && lost.is_ok(), "it ended, or lost nothing");
}
