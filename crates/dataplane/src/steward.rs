//! The steward: a thread that repeats what was not answered, opens lanes again, joins threads that ended, and forgets peers
//! that are gone.

use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

use kvferry_handshake::Code;

use crate::job::Trouble;
use crate::peer::Peer;
use crate::shared::Shared;

/// Wakes the steward.
#[derive(Debug, Default)]
pub(crate) struct Bell {
    state: Mutex<State>,
    rung: Condvar,
}

#[derive(Debug, Default)]
struct State {
    rung: bool,
    ending: bool,
}

impl Bell {
    /// Something may have become due.
    pub(crate) fn ring(&self) {
        self.state.lock().unwrap_or_else(|e| e.into_inner()).rung = true;
        self.rung.notify_one();
    }

    /// Ends the steward.
    pub(crate) fn end(&self) {
        self.state.lock().unwrap_or_else(|e| e.into_inner()).ending = true;
        self.rung.notify_one();
    }

    /// Waits until it is rung or the time has come. Gives `false` at the end.
    fn wait(&self, until: Option<Instant>) -> bool {
        let mut state = self.state.lock().unwrap_or_else(|e| e.into_inner());
        while !state.rung && !state.ending {
            match until.map(|until| until.saturating_duration_since(Instant::now())) {
                None => state = self.rung.wait(state).unwrap_or_else(|e| e.into_inner()),
                Some(Duration::ZERO) => break,
                Some(left) => {
                    state = self
                        .rung
                        .wait_timeout(state, left)
                        .unwrap_or_else(|e| e.into_inner())
                        .0;
                }
            }
        }
        state.rung = false;
        !state.ending
    }
}

/// The steward's life.
pub(crate) fn run(shared: &Shared) {
    let mut next = None;
    while shared.bell.wait(next) {
        next = None;
        shared.threads.reap();
        for peer in shared.peers() {
            let now = Instant::now();
            let (messages, again) = peer.lanes().tick(now, &shared.config);
            shared.tell(&peer, messages);
            let unreachable = unreachable(shared, &peer, now);
            if peer.outbox.waiting(1) > 0 {
                shared.work(&peer);
            }
            next = [next, again, unreachable].into_iter().flatten().min();
        }
        next = [next, shared.forget_peers(Instant::now())]
            .into_iter()
            .flatten()
            .min();
    }
}

/// Fails the jobs of a peer whose data port could not be reached for long; else tells when that is due.
fn unreachable(shared: &Shared, peer: &Peer, now: Instant) -> Option<Instant> {
    let (since, why) = peer.lanes().failing.clone()?;
    let patience = shared.config.patience;
    if now < since + patience {
        return Some(since + patience);
    }
    peer.lanes().failing = None;
    let jobs = peer.outbox.jobs();
    tracing::warn!(peer = %peer.name, %why, jobs = jobs.len(), "the peer's data port cannot be reached");
    for job in jobs {
        job.fail(Trouble {
            code: Code::PeerUnreachable,
            message: format!(
                "no connection to the data port of {} could be opened for {} s: {why}; check that its data port is open \
                 to this node, and that both daemons encrypt lanes or neither does",
                peer.name,
                patience.as_secs_f64()
            ),
        });
    }
    None
}
