//! The sending ends of the lanes to one peer.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::lanes::{Due, MAX_LANES, SenderEnd};
use crate::line::Taken;
use crate::wake::Wake;
use crate::{Config, LaneMessage};

const FIRST_BACKOFF: Duration = Duration::from_millis(20);
const LAST_BACKOFF: Duration = Duration::from_secs(2);
/// A question is repeated more rarely with time, up to so many times the first pause.
const MAX_PATIENCE: u32 = 8;

/// The sending ends, by lane number.
#[derive(Debug, Default)]
pub(super) struct Outgoing {
    lanes: Vec<Lane>,
}

#[derive(Debug)]
struct Lane {
    state: State,
    backoff: Duration,
}

#[derive(Debug)]
enum State {
    Closed {
        not_before: Option<Instant>,
    },
    Asking {
        ask: u64,
        again: Instant,
        pause: u32,
    },
    Open {
        epoch: u64,
        wake: Arc<Wake>,
        /// The receiver's end is known to be gone.
        gone: bool,
        /// The receiver took the token.
        proven: bool,
    },
    /// What was not acknowledged is in doubt until the receiver's end is gone.
    Lost {
        epoch: u64,
        in_doubt: Vec<Taken>,
        again: Instant,
        pause: u32,
    },
}

impl Outgoing {
    /// Asks for lanes until `demand` of them are open or asked for.
    pub(super) fn open(
        &mut self,
        now: Instant,
        config: &Config,
        demand: usize,
        mut fresh: impl FnMut() -> u64,
    ) -> Vec<LaneMessage> {
        let most = config.lanes_per_peer.clamp(1, usize::from(MAX_LANES));
        while demand > 0 && self.lanes.len() < most {
            self.lanes.push(Lane {
                state: State::Closed { not_before: None },
                backoff: FIRST_BACKOFF,
            });
        }
        let live = |lane: &Lane| matches!(lane.state, State::Asking { .. } | State::Open { .. });
        let mut short = demand.saturating_sub(self.lanes.iter().filter(|lane| live(lane)).count());
        let mut messages = Vec::new();
        for (number, lane) in (0u16..).zip(&mut self.lanes) {
            let due = match lane.state {
                State::Closed { not_before } => not_before.is_none_or(|at| at <= now),
                _ => false,
            };
            if due && short > 0 {
                short -= 1;
                let ask = fresh();
                lane.state = State::Asking {
                    ask,
                    again: now + config.answer,
                    pause: 1,
                };
                messages.push(LaneMessage::Want { lane: number, ask });
            }
        }
        messages
    }

    /// A grant came. Tells whether it is the one that is awaited: then the lane is to be connected.
    pub(super) fn granted(&mut self, lane: u16, ask: u64, epoch: u64, wake: &Arc<Wake>) -> bool {
        let Some(lane) = self.lanes.get_mut(usize::from(lane)) else {
            return false;
        };
        match lane.state {
            State::Asking { ask: asked, .. } if asked == ask => {}
            _ => return false,
        }
        lane.state = State::Open {
            epoch,
            wake: Arc::clone(wake),
            gone: false,
            proven: false,
        };
        true
    }

    /// The receiver took the token of this life of a lane.
    pub(super) fn proven(&mut self, epoch: u64) {
        for lane in &mut self.lanes {
            if let State::Open {
                epoch: open, proven, ..
            } = &mut lane.state
                && *open == epoch
            {
                *proven = true;
            }
        }
    }

    /// Whether a lane carries payload, so that the peer's data port can be reached.
    pub(super) fn is_carrying(&self) -> bool {
        self.lanes
            .iter()
            .any(|lane| matches!(lane.state, State::Open { proven: true, .. }))
    }

    /// A sending end ended.
    pub(super) fn ended(&mut self, now: Instant, config: &Config, end: SenderEnd) -> Due {
        let Some(lane) = self.lanes.get_mut(usize::from(end.lane)) else {
            return Due::default();
        };
        let gone = match lane.state {
            State::Open { epoch, gone, .. } if epoch == end.epoch => gone,
            // The channel broke meanwhile.
            _ => return Due::default(),
        };
        if end.orderly {
            lane.backoff = FIRST_BACKOFF;
            lane.state = State::Closed { not_before: None };
            return Due::default();
        }
        let pause = lane.backoff;
        lane.backoff = if end.carried {
            FIRST_BACKOFF
        } else {
            (pause * 2).min(LAST_BACKOFF)
        };
        if gone || end.unacked.is_empty() {
            lane.state = State::Closed {
                not_before: Some(now + pause),
            };
            return Due {
                put_back: end.unacked,
                broke: true,
                ..Due::default()
            };
        }
        lane.state = State::Lost {
            epoch: end.epoch,
            in_doubt: end.unacked,
            again: now + config.answer,
            pause: 1,
        };
        let (lane, epoch) = (end.lane, end.epoch);
        Due {
            broke: true,
            ..Due::tell(LaneMessage::Lost { lane, epoch })
        }
    }

    /// The receiver's end of a lane is gone.
    pub(super) fn gone(&mut self, now: Instant, number: u16, epoch: u64) -> Due {
        let Some(lane) = self.lanes.get_mut(usize::from(number)) else {
            return Due::default();
        };
        match &mut lane.state {
            State::Open {
                epoch: open,
                wake,
                gone,
                ..
            } if *open == epoch => {
                *gone = true;
                wake.end();
            }
            State::Lost {
                epoch: lost,
                in_doubt,
                ..
            } if *lost == epoch => {
                let put_back = std::mem::take(in_doubt);
                lane.state = State::Closed {
                    not_before: Some(now + lane.backoff),
                };
                return Due {
                    put_back,
                    ..Due::default()
                };
            }
            _ => {}
        }
        Due::default()
    }

    /// Repeats what was not answered; tells `at` when the next thing is due.
    pub(super) fn tick(
        &mut self,
        now: Instant,
        config: &Config,
        at: &mut impl FnMut(Instant),
    ) -> Vec<LaneMessage> {
        let mut messages = Vec::new();
        for (number, lane) in (0u16..).zip(&mut self.lanes) {
            let (message, again, pause) = match &mut lane.state {
                State::Asking { ask, again, pause } => {
                    let (lane, ask) = (number, *ask);
                    (LaneMessage::Want { lane, ask }, again, pause)
                }
                State::Lost {
                    epoch, again, pause, ..
                } => {
                    let (lane, epoch) = (number, *epoch);
                    (LaneMessage::Lost { lane, epoch }, again, pause)
                }
                State::Closed {
                    not_before: Some(when),
                } if *when > now => {
                    at(*when);
                    continue;
                }
                State::Closed { .. } | State::Open { .. } => continue,
            };
            if *again <= now {
                *pause = (*pause * 2).min(MAX_PATIENCE);
                *again = now + config.answer * *pause;
                messages.push(message);
            }
            at(*again);
        }
        messages
    }

    /// Wakes all ends.
    pub(super) fn nudge(&self) {
        for lane in &self.lanes {
            if let State::Open { wake, .. } = &lane.state {
                wake.wake();
            }
        }
    }

    /// The channel broke: all ends end, and what is in doubt stays so.
    pub(super) fn down(&mut self) {
        for lane in self.lanes.drain(..) {
            if let State::Open { wake, .. } = lane.state {
                wake.end();
            }
        }
    }

    /// Open lanes, and chunks in doubt.
    pub(super) fn count(&self) -> (usize, usize) {
        let open = self
            .lanes
            .iter()
            .filter(|lane| matches!(lane.state, State::Open { .. }));
        let in_doubt = self.lanes.iter().map(|lane| match &lane.state {
            State::Lost { in_doubt, .. } => in_doubt.len(),
            _ => 0,
        });
        (open.count(), in_doubt.sum())
    }
}
