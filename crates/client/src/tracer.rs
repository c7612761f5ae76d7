//! Names daemons as those that may reach this process's memory, where the system asks.
//!
//! With Yama's kernel.yama.ptrace_scope = 1, as Ubuntu has it, a daemon of the same user may copy memory of a process that
//! names it (PR_SET_PTRACER, prctl(2)), and of no other.

use std::io;
use std::sync::{Mutex, MutexGuard};

use rustix::process::{PTracer, Pid, set_ptracer};
use tokio::net::UnixStream;

/// Daemons that connections of this process have memory of it registered with; one for each connection.
static DAEMONS: Mutex<Vec<Pid>> = Mutex::new(Vec::new());

/// The daemon at the other end of a connection is named for as long as this lives.
#[derive(Debug)]
pub(crate) struct Named(Pid);

impl Named {
    /// `None` where the daemon's process cannot be seen: in another PID namespace, it cannot see ours either.
    pub(crate) fn new(stream: &UnixStream) -> Option<Named> {
        let daemon = Pid::from_raw(stream.peer_cred().ok()?.pid()?)?;
        let mut daemons = daemons();
        daemons.push(daemon);
        name(&daemons);
        Some(Named(daemon))
    }
}

impl Drop for Named {
    fn drop(&mut self) {
        let mut daemons = daemons();
        if let Some(at) = daemons.iter().position(|daemon| *daemon == self.0) {
            daemons.swap_remove(at);
        }
        name(&daemons);
    }
}

fn daemons() -> MutexGuard<'static, Vec<Pid>> {
    DAEMONS.lock().unwrap_or_else(|e| e.into_inner())
}

fn name(daemons: &[Pid]) {
    match set_ptracer(choice(daemons)) {
        Ok(()) => {}
        Err(error) if io::Error::from(error).kind() == io::ErrorKind::InvalidInput => {
            // A kernel without Yama asks nobody.
        }
        Err(error) => tracing::debug!(%error, "PR_SET_PTRACER"),
    }
}

/// A process can name one other, or any: the kernel still checks that its user is the same.
fn choice(daemons: &[Pid]) -> PTracer {
    match daemons {
        [] => PTracer::None,
        [first, rest @ ..] if rest.iter().all(|daemon| daemon == first) => PTracer::ProcessID(*first),
        _ => PTracer::Any,
    }
}

/// How many connections name this daemon.
#[cfg(test)]
pub(crate) fn naming(daemon: Pid) -> usize {
    daemons().iter().filter(|named| **named == daemon).count()
}

#[cfg(test)]
mod tests {
    use super::choice;
    use rustix::process::{PTracer, Pid};

    #[test]
    fn one_daemon_is_named_and_several_are_any() {
        let [a, b] = [7, 8].map(|pid| Pid::from_raw(pid).unwrap());
        assert_eq!(choice(&[]), PTracer::None);
        assert_eq!(choice(&[a]), PTracer::ProcessID(a));
        assert_eq!(choice(&[a, a]), PTracer::ProcessID(a));
        assert_eq!(choice(&[a, b]), PTracer::Any);
        assert_eq!(choice(&[a, a, b, a]), PTracer::Any);
    }
}
