//! kvferryd: carries KV cache pages between the inference engines of this node and those of others.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use anyhow::Context;
use kvferry_daemon::Daemon;
use kvferry_daemon::config::{self, Config, Invocation};
use kvferry_daemon::fds;
use kvferry_daemon::log::{self, Log};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::oneshot;

/// Where to look when the system withholds what every start needs.
const LIMITS: &str = "see the limits of threads (ulimit -u; pids.max of the cgroup, TasksMax= of the service), memory \
                      (ulimit -v and -d) and files (ulimit -n)";
/// The configuration is not good.
const BAD_CONFIG: u8 = 2;

fn main() -> ExitCode {
    let config = match config::parse(std::env::args_os()) {
        Ok(Invocation::Run(config)) => config,
        Ok(Invocation::Check(config)) => {
            if let Err(error) = Daemon::check(&config) {
                log::complain(&error.to_string());
                return ExitCode::from(BAD_CONFIG);
            }
            return print(&config::effective(&config));
        }
        Ok(Invocation::Print(text)) => {
            return print(&text);
        }
        Err(error) => {
            log::complain(&error.to_string());
            return ExitCode::from(BAD_CONFIG);
        }
    };
    let _log = match Log::start(&config) {
        Ok(log) => log,
        Err(error) => {
            log::complain(&format!("no thread for the log: {error}; {LIMITS}"));
            return ExitCode::FAILURE;
        }
    };
    let ended = fds::raise(&config)
        .map_err(anyhow::Error::from)
        .and_then(|()| runtime())
        .and_then(|runtime| runtime.block_on(run(*config)));
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn print(text: &str) -> ExitCode {
    match log::print(text) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            log::complain(&format!("standard output: {error}"));
            ExitCode::FAILURE
        }
    }
}

/// The runtime. Where it gets no thread it panics, and then waits for its other threads, which nobody has told: so a
/// panic in it is the end.
fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    let logged = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {
        log::complain(&format!("no thread to begin with; {LIMITS}"));
        std::process::exit(1);
    }));
    let built = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    std::panic::set_hook(logged);
    built.with_context(|| format!("no fds to begin with; {LIMITS}"))
}

async fn run(config: Config) -> anyhow::Result<()> {
    let grace = config.grace;
    if config.insecure_peers_without_tls && config.tls.is_none() {
        tracing::warn!(
            "insecure_peers_without_tls: anyone who reaches the peer port can read and write KV caches"
        );
    }
    let mut signals = Signals::listen()?;

    let mut daemon = Daemon::start(config).await?;
    let addresses = daemon.addresses();
    tracing::info!(
        socket = %addresses.socket.display(),
        peers = %addresses.peers,
        advertised = %addresses.advertised,
        data = %addresses.data,
        metrics = %addresses.metrics.map_or_else(|| "off".to_owned(), |address| address.to_string()),
        incarnation = addresses.incarnation,
        release = env!("CARGO_PKG_VERSION"),
        "kvferryd is ready"
    );

    tokio::select! {
        signal = signals.next() => tracing::info!(grace_ms = grace.as_millis(), "{signal}: draining"),
        () = daemon.failed() => anyhow::bail!("the driver ended; this is a defect, please report it"),
    }
    let (hurry, hurried) = oneshot::channel();
    let ended = daemon.shutdown(grace, async {
        if hurried.await.is_err() {
            std::future::pending::<()>().await;
        }
    });
    tokio::pin!(ended);
    let mut hurry = Some(hurry);
    loop {
        tokio::select! {
            () = &mut ended => break,
            signal = signals.next() => match hurry.take() {
                Some(hurry) => {
                    tracing::warn!("{signal} again: what is open is ended now");
                    let _ = hurry.send(());
                }
                None => anyhow::bail!("ended by a third signal, before all was fenced"),
            },
        }
    }
    tracing::info!("kvferryd has ended");
    Ok(())
}

/// What asks for the end.
struct Signals {
    terminated: Signal,
    interrupted: Signal,
    /// Its terminal is gone. Not told, it would end at once, with transfers open.
    hung_up: Signal,
    /// A file is as long as it may be (RLIMIT_FSIZE): nothing asks for the end. Not taken, it would end the daemon; so
    /// the write fails, and what the log loses is counted.
    _file_full: Signal,
}

/// SIGXFSZ.
const FILE_FULL: SignalKind = SignalKind::from_raw(25);

impl Signals {
    fn listen() -> anyhow::Result<Signals> {
        Ok(Signals {
            terminated: signal(SignalKind::terminate()).context("SIGTERM")?,
            interrupted: signal(SignalKind::interrupt()).context("SIGINT")?,
            hung_up: signal(SignalKind::hangup()).context("SIGHUP")?,
            _file_full: signal(FILE_FULL).context("SIGXFSZ")?,
        })
    }

    /// The next one's name.
    async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminated.recv() => "SIGTERM",
            _ = self.interrupted.recv() => "SIGINT",
            _ = self.hung_up.recv() => "SIGHUP",
        }
    }
}
