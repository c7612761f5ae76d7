//! The end of a daemon, in order: transfers may finish, then are ended, then connections are.

use std::time::{Duration, Instant};

use kvferry_broker::Input;
use kvferry_control::Fault;
use kvferry_handshake::Code;
use tokio::sync::oneshot;

use crate::driver::Driver;

/// How long ending what is left may take: fences wait for peers' acknowledgements.
const ENDING: Duration = Duration::from_secs(5);
/// How long connections may take to be written out and closed.
const CLOSING: Duration = Duration::from_secs(2);
/// How often it is looked whether the next stage can begin.
const LOOK: Duration = Duration::from_millis(20);

/// A drain under way.
#[derive(Debug)]
pub(crate) struct Drain {
    stage: Stage,
    until: Instant,
    /// Dropped when all is done.
    _done: oneshot::Sender<()>,
}

/// What everyone is told who comes, or is still there.
pub(crate) fn shutting_down() -> Fault {
    Fault::new(
        Code::Shutdown,
        "this daemon is shutting down; try again when it is back",
    )
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Nothing new; what is under way goes on.
    Finishing,
    /// What is left is ended with `shutdown`.
    Ending,
    /// Connections of engines are closed.
    Dismissing,
    /// Channels to peers are closed.
    Parting,
}

impl Stage {
    /// What is waited for in it.
    fn wanted(self) -> &'static str {
        match self {
            Stage::Finishing => "the end of open transfers",
            Stage::Ending => "the fences of transfers that were ended",
            Stage::Dismissing => "the close of engines' connections",
            Stage::Parting => "the close of peers' channels",
        }
    }
}

impl Drain {
    /// A drain that lets transfers go on for `grace`; the receiver learns of its end.
    pub(crate) fn new(grace: Duration) -> (Drain, oneshot::Receiver<()>) {
        let (done, wait) = oneshot::channel();
        let drain = Drain {
            stage: Stage::Finishing,
            until: Instant::now() + grace,
            _done: done,
        };
        (drain, wait)
    }

    /// Open transfers have had their time: what is left is ended now.
    pub(crate) fn hurry(&mut self) {
        if self.stage == Stage::Finishing {
            self.until = Instant::now();
        }
    }

    /// When to call [`Drain::advance`] at the latest.
    pub(crate) fn look_again(&self) -> Instant {
        Instant::now() + LOOK
    }

    /// Goes on to the next stage where this one is done. `None`: all is done.
    pub(crate) fn advance(mut self, driver: &mut Driver) -> Option<Drain> {
        let late = Instant::now() >= self.until;
        let done = match self.stage {
            Stage::Finishing | Stage::Ending => driver.open_transfers() == 0,
            Stage::Dismissing => driver.seats.is_empty(),
            Stage::Parting => driver.peers.open_channels() == 0,
        };
        if !done && !late {
            return Some(self);
        }
        if !done {
            tracing::warn!("not done in time: {}; going on", self.stage.wanted());
        }
        let (stage, patience) = match self.stage {
            Stage::Finishing => {
                driver.handle(Input::Shutdown);
                (Stage::Ending, ENDING)
            }
            Stage::Ending => {
                driver.reception.admission.close();
                for seated in driver.seats.values() {
                    seated.seat.outbox.finish(shutting_down());
                }
                (Stage::Dismissing, CLOSING)
            }
            Stage::Dismissing => {
                driver.peers.finish(&shutting_down());
                (Stage::Parting, CLOSING)
            }
            Stage::Parting => return None,
        };
        self.stage = stage;
        self.until = Instant::now() + patience;
        Some(self)
    }
}
