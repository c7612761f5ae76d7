//! The log, which never keeps the daemon waiting, and never ends it.
//!
//! Whoever reads standard error may be slow, stopped or gone. Lines wait in a bounded queue for a thread that
//! writes them; what finds no room is dropped, counted, and spoken of once there is room again.

mod flood;
mod lines;

use std::io::{self, Write};
use std::sync::Arc;
use std::time::Duration;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;

pub(crate) use flood::Floods;
use lines::Lines;
pub(crate) use lines::lost;

use crate::config::{Config, LogFormat};

/// How long the end of the process waits for lines to be read.
const PARTING: Duration = Duration::from_secs(1);

/// The process's log. What waits when it is dropped is written, if that takes no longer than a second.
#[derive(Debug)]
pub struct Log {
    lines: Arc<Lines>,
}

impl Log {
    /// Starts it, on standard error. Panics are logged, too, from then on.
    pub fn start(config: &Config) -> io::Result<Log> {
        let lines = Lines::start(io::stderr())?;
        let filter = EnvFilter::try_new(&config.log_level).unwrap_or_else(|_| EnvFilter::new("info"));
        let log = tracing_subscriber::fmt()
            .with_env_filter(filter)
            // Those would be printed past the queue.
            .log_internal_errors(false)
            .with_writer(Writer(Arc::clone(&lines)));
        match config.log_format {
            LogFormat::Text => log.with_ansi(false).init(),
            LogFormat::Json => log.json().flatten_event(true).init(),
        }
        // Without a backtrace: naming its frames takes memory, and the lock that the end of a process without memory
        // waits for.
        std::panic::set_hook(Box::new(|panic| tracing::error!("{panic}")));
        Ok(Log { lines })
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        self.lines.finish(PARTING);
    }
}

/// Where events are formatted to: each is one write.
struct Writer(Arc<Lines>);

impl<'a> MakeWriter<'a> for Writer {
    type Writer = Line<'a>;

    fn make_writer(&'a self) -> Line<'a> {
        Line(&self.0)
    }
}

/// A line that is put into the queue.
struct Line<'a>(&'a Lines);

impl Write for Line<'_> {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.0.push(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Prints on standard output. That its reader has gone is no error: it has what it wanted.
pub fn print(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    match out.write_all(text.as_bytes()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        printed => printed,
    }
}

/// The same on standard error, before there is a log.
pub fn complain(text: &str) {
    let _ = writeln!(io::stderr(), "{text}");
}
