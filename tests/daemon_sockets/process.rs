//! The program itself: its exit codes, its restart, and its end.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;
use std::time::Duration;

use kvferry_client::{Client, ClientError, Notice, Progress};
use kvferry_handshake::Code;
use kvferry_tests::certificates::NodeFiles;
use kvferry_tests::programs::kvferryd;
use rustix::process::{Pid, Signal, kill_process};

use crate::rig::{Authority, Engine, envelope, soon, tls_flags};

/// A running kvferryd. Killed when it is dropped.
pub(crate) struct Program {
    child: Child,
    log: Option<JoinHandle<Vec<String>>>,
    pub(crate) advertised: String,
    /// `host:port` of its metrics, if it has them.
    pub(crate) metrics: String,
    /// `host:port` of its data port.
    data: String,
}

impl Program {
    pub(crate) fn start(socket: &Path, more: &[&str]) -> Program {
        Program::start_at(socket, "127.0.0.1:0", more)
    }

    pub(crate) fn start_at(socket: &Path, peers: &str, more: &[&str]) -> Program {
        let mut command = Command::new(kvferryd());
        command
            .arg("--socket")
            .arg(socket)
            .args(["--peer-listen", peers, "--log-format=json"])
            .args(more)
            .args(
                (!more.iter().any(|flag| flag.starts_with("--metrics-listen")))
                    .then_some("--metrics-listen=off"),
            );
        Program::run(command)
    }

    /// Starts a command that is a kvferryd with JSON for a log.
    pub(crate) fn run(mut command: Command) -> Program {
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let ready = lines.find_map(|line| {
            let line: serde_json::Value = serde_json::from_str(&line.unwrap()).unwrap();
            let told = |key: &str| line[key].as_str().unwrap().to_owned();
            (line["message"] == "kvferryd is ready")
                .then(|| (told("advertised"), told("metrics"), told("data")))
        });
        let (advertised, metrics, data) = ready.expect("it ended before it was ready");
        let log = std::thread::spawn(move || lines.map_while(Result::ok).collect());
        Program {
            child,
            log: Some(log),
            advertised,
            metrics,
            data,
        }
    }

    /// Of its peer channel.
    pub(crate) fn port(&self) -> u16 {
        self.advertised.rsplit(':').next().unwrap().parse().unwrap()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).unwrap();
    }

    pub(crate) fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Its log from when it was ready until it ended, which it does by itself.
    pub(crate) async fn log(mut self) -> Vec<String> {
        let log = self.log.take().unwrap();
        let read = tokio::task::spawn_blocking(move || log.join().unwrap());
        soon("the log's end", read).await.unwrap()
    }

    pub(crate) async fn exit_code(mut self) -> Option<i32> {
        let wait = tokio::task::spawn_blocking(move || self.child.wait().unwrap().code());
        soon("its end", wait).await.unwrap()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Too few to start with, told as such, and no panic.
#[test]
fn a_limit_of_open_files_that_is_too_low_is_named() {
    let directory = tempfile::tempdir().unwrap();
    for limit in [40, 63] {
        let output = Command::new("sh")
            .args(["-c", "ulimit -n \"$1\" && shift && exec \"$@\"", "sh"])
            .arg(limit.to_string())
            .arg(kvferryd())
            .arg("--socket")
            .arg(directory.path().join("socket"))
            .args(["--peer-listen=127.0.0.1:0", "--metrics-listen=off"])
            .output()
            .unwrap();
        let told = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{told}");
        assert!(
            told.contains(&format!("at most {limit} files")) && told.contains("ulimit -n"),
            "{told}"
        );
        assert!(!told.contains("panicked"), "{told}");
    }
}

/// Attaches, moves pages and asks for the status, at a daemon whose log nobody reads.
async fn serves(socket: &Path, advertised: &str) {
    let (prefill, decode) = (
        Engine::attach(socket, "p").await,
        Engine::attach(socket, "d").await,
    );
    let source = format!("kvferry://{advertised}/p");
    // Each transfer leaves two lines of a few hundred bytes.
    for n in 0..40 {
        let id = format!("t{n}");
        let publish = prefill.publish_of(&id, &[1], 4);
        soon("the publish", prefill.rank.publish(publish)).await.unwrap();
        let fetch = decode.fetch_of(&source, &id, &[2], 4);
        let fetching = soon("the fetch", decode.rank.fetch(fetch)).await.unwrap();
        soon("delivery", fetching.ended()).await.unwrap();
    }
    soon("the status", prefill.rank.status()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_log_that_nobody_reads_any_more_neither_ends_nor_stops_the_daemon() {
    for gone in [true, false] {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("kvferryd.sock");
        let (reading, writing) = std::io::pipe().unwrap();
        rustix::pipe::fcntl_setpipe_size(&writing, 4096).unwrap();
        let mut child = Command::new(kvferryd())
            .arg("--socket")
            .arg(&socket)
            .args(["--peer-listen=127.0.0.1:0", "--metrics-listen=off"])
            .stderr(writing)
            .spawn()
            .unwrap();
        let advertised = soon("the daemon", Client::connect(&socket)).await.unwrap();
        let advertised = advertised.welcome().address;
        let reading = (!gone).then_some(reading);
        serves(&socket, &advertised).await;
        kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
        let wait = tokio::task::spawn_blocking(move || child.wait().unwrap().code());
        assert_eq!(soon("its end", wait).await.unwrap(), Some(0), "{gone}");
        drop(reading);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_anyone_can_cause_as_often_as_they_like_is_logged_once() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("kvferryd.sock");
    let program = Program::start(&socket, &[]);
    for _ in 0..300 {
        let mut peer = std::net::TcpStream::connect(&program.advertised).unwrap();
        peer.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        // Its end: the daemon has refused it.
        let _ = peer.read_to_end(&mut Vec::new());
        let mut engine = std::os::unix::net::UnixStream::connect(&socket).unwrap();
        engine.write_all(&[4, 0, 0, 0, 9, 9, 9, 9]).unwrap();
        let _ = engine.read_to_end(&mut Vec::new());
        let mut lane = std::net::TcpStream::connect(&program.data).unwrap();
        lane.write_all(b"KVFLANE1").unwrap();
        lane.write_all(&[7; 40]).unwrap();
        let _ = lane.read_to_end(&mut Vec::new());
    }
    program.signal(Signal::TERM);
    let log = program.log().await;
    let lines = |what: &str| log.iter().filter(|line| line.contains(what)).count();
    for what in [
        "a peer's connection is refused",
        "a connection ended before it greeted",
        "a token at the data port was not good",
    ] {
        // The first, and counts of the others, which come seldom.
        assert!((1..=10).contains(&lines(what)), "{what}: {} lines", lines(what));
    }
}

fn run(arguments: &[&str]) -> (Option<i32>, String, String) {
    let output = Command::new(kvferryd()).args(arguments).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

#[test]
fn check_config_prints_what_would_be_used_and_names_what_is_wrong() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("kvferryd.toml");
    let path = file.to_str().unwrap();
    std::fs::write(&file, "lanes_per_peer = 7\n").unwrap();
    let (code, printed, _) = run(&["--check-config", "-c", path, "--lease-ms", "1234"]);
    assert_eq!(code, Some(0));
    assert!(
        printed.contains("lanes_per_peer = 7\n") && printed.contains("lease_ms = 1234\n"),
        "{printed}"
    );
    // What it prints is a file that says the same.
    std::fs::write(&file, &printed).unwrap();
    assert_eq!(run(&["--check-config", "-c", path]).1, printed);

    std::fs::write(&file, "\nlane_per_peer = 7\n").unwrap();
    let (code, _, error) = run(&["--check-config", "-c", path]);
    assert_eq!(code, Some(2));
    assert!(
        error.contains(":2: ") && error.contains("\"lanes_per_peer\""),
        "{error}"
    );
    // Without the flag, too, nothing starts.
    assert_eq!(run(&["-c", path]).0, Some(2));
    assert_eq!(run(&["--peer-listen=0.0.0.0:7460"]).0, Some(2));
    assert_eq!(run(&["--version"]).0, Some(0));
}

#[test]
fn check_config_reads_the_certificates_and_names_the_key_that_is_wrong() {
    let (ours, theirs) = (Authority::new(), Authority::new());
    let check = |files: &NodeFiles| {
        let flags = tls_flags(files);
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        let (code, _, error) = run(&[&["--check-config"], &flags[..]].concat());
        (code, error)
    };
    let good = ours.issue("a", &["127.0.0.1"]);
    assert_eq!(check(&good), (Some(0), String::new()));
    let other = ours.issue("b", &["127.0.0.1"]);
    let empty = good.ca.with_file_name("empty.pem");
    std::fs::write(&empty, "nothing\n").unwrap();
    let with = |change: fn(&mut NodeFiles, &Path), file: &Path| {
        let mut files = good.clone();
        change(&mut files, file);
        files
    };
    for (files, key, says) in [
        (
            with(|files, file| files.ca = file.into(), &empty),
            "tls.ca",
            "no certificate",
        ),
        (
            with(|files, file| files.cert = file.into(), Path::new("/nonexistent")),
            "tls.cert",
            "No such file",
        ),
        (
            with(|files, file| files.key = file.into(), &empty),
            "tls.key",
            "empty.pem",
        ),
        (
            with(|files, file| files.key = file.into(), &other.key),
            "tls.key",
            "not the key of the certificate",
        ),
        (
            with(|files, file| files.ca = file.into(), &theirs.issue("c", &[]).ca),
            "tls.cert",
            "peers will refuse",
        ),
        (ours.issue("d", &["elsewhere"]), "tls.cert", "\"127.0.0.1\""),
    ] {
        let (code, error) = check(&files);
        assert_eq!(code, Some(2), "{error}");
        assert!(
            error.starts_with(key) && error.contains(says),
            "{key}: {says}: {error}"
        );
    }
}

#[test]
fn what_cannot_start_says_why() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("kvferryd.sock");
    let first = Program::start(&socket, &[]);
    let socket = format!("--socket={}", socket.display());
    let (code, _, error) = run(&[&socket, "--peer-listen=127.0.0.1:0", "--metrics-listen=off"]);
    assert_eq!(code, Some(1));
    assert!(error.contains("another kvferryd serves"), "{error}");
    let other = format!("--socket={}", directory.path().join("other.sock").display());
    let taken = format!("--peer-listen={}", first.advertised);
    let (code, _, error) = run(&[&other, &taken, "--metrics-listen=off"]);
    assert_eq!(code, Some(1));
    assert!(
        error.contains("peer_listen: ") && error.contains("choose a free port"),
        "{error}"
    );
    let missing = [
        "--tls-ca=/nonexistent/ca.pem",
        "--tls-cert=/nonexistent/c",
        "--tls-key=/nonexistent/k",
    ];
    let (code, _, error) = run(&[&[other.as_str(), "--peer-listen=127.0.0.1:0"], &missing[..]].concat());
    assert_eq!(code, Some(1));
    assert!(error.contains("tls.ca: /nonexistent/ca.pem"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn signals_drain_and_end_with_0() {
    for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("kvferryd.sock");
        let program = Program::start(&socket, &["--grace-ms=200"]);
        let engine = Engine::attach(&socket, "e").await;
        let publication = engine
            .rank
            .publish(engine.publish_of("t", &[1], 4))
            .await
            .unwrap();
        program.signal(signal);
        let failed = soon("the publish's end", publication.ended()).await.unwrap_err();
        assert_eq!(failed.cause.code, Code::Shutdown, "{failed}");
        assert_eq!(program.exit_code().await, Some(0));
        assert!(!socket.exists());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_second_signal_ends_the_grace() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("kvferryd.sock");
    let program = Program::start(&socket, &["--grace-ms=3600000"]);
    let engine = Engine::attach(&socket, "e").await;
    let publication = engine
        .rank
        .publish(engine.publish_of("t", &[1], 4))
        .await
        .unwrap();
    program.signal(Signal::TERM);
    // Two signals may count as one until the first is taken: then new work is refused.
    let refused = async {
        loop {
            let fetch = engine.fetch_of("kvferry://127.0.0.1:1/x", "late", &[3], 4);
            match engine.rank.fetch(fetch).await {
                Err(ClientError::Refused(fault)) if fault.code == Code::Shutdown => return,
                _ => tokio::time::sleep(Duration::from_millis(5)).await,
            }
        }
    };
    soon("the refusal of new work", refused).await;
    // Whoever comes meanwhile is told, and told that it may try again.
    let client = soon("connecting", Client::connect(&socket)).await.unwrap();
    let refused = soon("the answer", client.attach(envelope("late"), 0, None)).await;
    let ClientError::Refused(fault) = refused.unwrap_err() else {
        panic!("the daemon is there");
    };
    assert!(fault.code == Code::Shutdown && fault.code.can_retry(), "{fault}");

    program.signal(Signal::INT);
    // In order: ended by the daemon, fenced, and nothing is left behind.
    let failed = soon("the publish's end", publication.ended()).await.unwrap_err();
    assert_eq!(failed.cause.code, Code::Shutdown, "{failed}");
    assert_eq!(program.exit_code().await, Some(0));
    assert!(!socket.exists());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_transfer_under_way_may_finish_in_the_grace() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("kvferryd.sock");
    let program = Program::start(&socket, &["--grace-ms=10000"]);
    let (prefill, decode) = (
        Engine::attach(&socket, "p").await,
        Engine::attach(&socket, "d").await,
    );
    let source = format!("kvferry://{}/p", program.advertised);
    let mut publish = prefill.publish_of("t", &[1], 4);
    publish.ready.end = None;
    let publication = prefill.rank.publish(publish).await.unwrap();
    let fetching = decode
        .rank
        .fetch(decode.fetch_of(&source, "t", &[2], 4))
        .await
        .unwrap();
    program.signal(Signal::TERM);
    // New work is refused meanwhile.
    let refused = async {
        loop {
            match decode.rank.fetch(decode.fetch_of(&source, "late", &[3], 4)).await {
                Err(ClientError::Refused(fault)) if fault.code == Code::Shutdown => return,
                _ => tokio::time::sleep(Duration::from_millis(5)).await,
            }
        }
    };
    soon("the refusal of new work", refused).await;
    decode.rank.abort(&"late".into()).await.ok();
    publication
        .update(kvferry_handshake::Ready::complete(4), None, None)
        .await
        .unwrap();
    soon("delivery", fetching.ended()).await.unwrap();
    assert_eq!(program.exit_code().await, Some(0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_comes_back_by_itself_when_the_daemon_was_killed() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("kvferryd.sock");
    let first = Program::start(&socket, &[]);
    let (prefill, decode) = (
        Engine::attach(&socket, "p").await,
        Engine::attach(&socket, "d").await,
    );
    let before = prefill.rank.welcome();
    let mut notices = prefill.rank.notices();
    let publication = prefill
        .rank
        .publish(prefill.publish_of("t", &[1, 2], 8))
        .await
        .unwrap();

    first.signal(Signal::KILL);
    let failed = soon("the publish's local end", publication.ended())
        .await
        .unwrap_err();
    assert_eq!(failed.cause.code, Code::DaemonRestarted);
    assert!(failed.cause.code.can_retry());
    assert_eq!(soon("the notice", notices.next()).await, Some(Notice::DaemonLost));
    let away = prefill
        .rank
        .publish(prefill.publish_of("t", &[1, 2], 8))
        .await
        .unwrap_err();
    assert!(
        matches!(away, ClientError::DaemonAway { .. }) && away.can_retry(),
        "{away}"
    );

    drop(first);
    let second = Program::start(&socket, &[]);
    soon("re-attachment", async {
        tokio::join!(prefill.rank.ready(), decode.rank.ready())
    })
    .await
    .0
    .unwrap();
    assert_ne!(prefill.rank.welcome().incarnation, before.incarnation);

    // Attached and registered as before, without the engine's doing.
    prefill.fill(&[1, 2], 8, 5);
    decode.poison();
    let source = format!("kvferry://{}/p", second.advertised);
    let mut publish = prefill.publish_of("t", &[1, 2], 8);
    publish.transfer.attempt = 1;
    let mut fetch = decode.fetch_of(&source, "t", &[3, 4], 8);
    fetch.transfer.attempt = 1;
    prefill.rank.publish(publish).await.unwrap();
    let fetching = decode.rank.fetch(fetch).await.unwrap();
    soon("delivery", fetching.ended()).await.unwrap();
    decode.verify(&[3, 4], 0, 8, 5);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_that_is_killed_or_stopped_fails_what_it_did_and_serves_again_when_it_is_back() {
    for signal in [Signal::KILL, Signal::STOP] {
        let directory = tempfile::tempdir().unwrap();
        let (at_a, at_b) = (directory.path().join("a.sock"), directory.path().join("b.sock"));
        let a = Program::start(&at_a, &[]);
        let b = Program::start(&at_b, &["--peer-timeout-ms=2000"]);
        let (prefill, decode) = (Engine::attach(&at_a, "p").await, Engine::attach(&at_b, "d").await);
        let source = format!("kvferry://{}/p", a.advertised);
        let mut publish = prefill.publish_of("t", &[1, 2], 8);
        publish.ready.end = None;
        publish.ready.tokens = 4;
        let publication = prefill.rank.publish(publish).await.unwrap();
        let fetching = decode
            .rank
            .fetch(decode.fetch_of(&source, "t", &[1, 2], 8))
            .await
            .unwrap();
        soon("meeting", publication.moved_on(&Progress::default())).await;
        a.signal(signal);
        let failed = soon("the fetch's failure", fetching.ended()).await.unwrap_err();
        assert_eq!(failed.cause.code, Code::PeerLost, "{failed}");
        assert!(failed.cause.message.contains(&a.advertised), "{failed}");

        // Its next life has the same address.
        let address = a.advertised.clone();
        drop(a);
        let _a = Program::start_at(&at_a, &address, &[]);
        soon("re-attachment", prefill.rank.ready()).await.unwrap();
        prefill.fill(&[1, 2], 8, 4);
        decode.poison();
        let mut publish = prefill.publish_of("t", &[1, 2], 8);
        publish.transfer.attempt = 1;
        prefill.rank.publish(publish).await.unwrap();
        let mut fetch = decode.fetch_of(&source, "t", &[5, 6], 8);
        fetch.transfer.attempt = 1;
        let fetching = decode.rank.fetch(fetch).await.unwrap();
        soon("delivery", fetching.ended()).await.unwrap();
        decode.verify(&[5, 6], 0, 8, 4);
        drop(b);
    }
}
