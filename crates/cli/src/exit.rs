//! Exit codes, and the errors that lead to them.

use std::fmt;
use std::io::{self, Write as _};
use std::process::ExitCode;

/// How a command ended. The numbers are part of the interface: scripts rely on them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// It did what was asked.
    Done,
    /// Something failed while it ran: a transfer, a connection, a byte that differs.
    Failed,
    /// Unreadable or incomplete input.
    Input,
    /// The pair of engines is refused.
    Refused,
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> ExitCode {
        ExitCode::from(match exit {
            Exit::Done => 0u8,
            Exit::Failed => 1,
            Exit::Input => 2,
            Exit::Refused => 3,
        })
    }
}

/// Marks an error as one of the input: it ends in exit code 2 where others end in 1.
#[derive(Debug)]
pub struct BadInput(pub String);

impl fmt::Display for BadInput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for BadInput {}

/// An error of the input.
pub fn bad_input(message: impl Into<String>) -> anyhow::Error {
    anyhow::Error::new(BadInput(message.into()))
}

/// The exit code that an error leads to. A reader that closed the pipe (`kvferry plan | head`) has what it wanted.
pub fn of_error(error: &anyhow::Error) -> Exit {
    if error.downcast_ref::<BadInput>().is_some() {
        return Exit::Input;
    }
    if reader_left(error) {
        Exit::Done
    } else {
        Exit::Failed
    }
}

fn reader_left(error: &anyhow::Error) -> bool {
    error
        .chain()
        .filter_map(|cause| cause.downcast_ref::<std::io::Error>())
        .any(|io| io.kind() == std::io::ErrorKind::BrokenPipe)
}

/// The result of printing, where that the reader left early (`kvferry check | head`) must not change the exit code.
pub(crate) fn printed(result: anyhow::Result<()>) -> anyhow::Result<()> {
    match result {
        Err(error) if reader_left(&error) => Ok(()),
        result => result,
    }
}

/// Standard output. Errors say that it is this that cannot be written to.
#[derive(Debug)]
pub(crate) struct Output<W>(pub(crate) W);

impl<W: io::Write> io::Write for Output<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes).map_err(of_output)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush().map_err(of_output)
    }
}

fn of_output(error: io::Error) -> io::Error {
    match error.kind() {
        // Not the caller's to see.
        io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock => error,
        kind => io::Error::new(kind, format!("standard output: {error}")),
    }
}

/// Prints what was asked for, or what is wrong with the arguments.
pub fn usage(asked: &clap::Error) -> Exit {
    let wanted = if asked.use_stderr() {
        Exit::Input
    } else {
        Exit::Done
    };
    let printed = asked.print().and_then(|()| io::stdout().flush());
    let printed = printed.map_err(|error| anyhow::Error::new(of_output(error)));
    match printed {
        Err(error) if wanted == Exit::Done && !reader_left(&error) => {
            tell(format_args!("kvferry: {error:#}\n"));
            Exit::Failed
        }
        _ => wanted,
    }
}

/// Writes to standard error. That it cannot be written to (closed, or on a full disk) changes nothing of what the
/// command did: `eprintln!` would panic.
pub fn tell(text: impl fmt::Display) {
    let _ = write!(std::io::stderr().lock(), "{text}");
}
