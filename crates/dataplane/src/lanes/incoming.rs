//! The receiving ends of the lanes from one peer.

use std::collections::HashMap;
use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use crate::lanes::{Due, MAX_LANES};
use crate::wake::Wake;
use crate::{Config, LaneMessage, Token};

/// The receiving ends, by lane number.
#[derive(Debug, Default)]
pub(super) struct Incoming {
    lanes: HashMap<u16, Lane>,
}

#[derive(Debug)]
struct Lane {
    /// The newest question.
    ask: u64,
    state: State,
}

#[derive(Debug)]
enum State {
    /// `answered`: the newest question had its grant, and its lane has come and gone.
    Closed { answered: bool },
    Granted {
        epoch: u64,
        token: Token,
        until: Instant,
    },
    /// `again`: a new question came meanwhile, to be answered once this end is gone.
    Open {
        epoch: u64,
        wake: Arc<Wake>,
        again: bool,
    },
}

impl Incoming {
    /// The peer asks for a lane. `fresh` makes an epoch and a token.
    pub(super) fn wanted(
        &mut self,
        now: Instant,
        config: &Config,
        lane: u16,
        ask: u64,
        port: u16,
        fresh: impl FnOnce() -> Option<(u64, Token)>,
    ) -> Due {
        if lane >= MAX_LANES {
            return Due::default();
        }
        let known = self.lanes.entry(lane).or_insert(Lane {
            ask: 0,
            state: State::Closed { answered: false },
        });
        if ask < known.ask {
            return Due::default();
        }
        let newer = ask > known.ask;
        known.ask = ask;
        match &mut known.state {
            // The grant was lost, or the question came twice.
            State::Granted { epoch, token, until } if !newer && *until > now => {
                Due::tell(LaneMessage::Grant {
                    lane,
                    ask,
                    epoch: *epoch,
                    token: *token,
                    port,
                })
            }
            State::Open { wake, again, .. } => {
                if newer {
                    *again = true;
                    wake.end();
                }
                Due::default()
            }
            State::Closed { answered: true } if !newer => Due::default(),
            _ => match known.grant(now, config, lane, port, fresh) {
                Some(grant) => Due::tell(grant),
                None => Due::default(),
            },
        }
    }

    /// The peer's end of a lane broke.
    pub(super) fn lost(&mut self, lane: u16, epoch: u64) -> Due {
        let gone = Due::tell(LaneMessage::Gone { lane, epoch });
        let Some(known) = self.lanes.get_mut(&lane) else {
            return gone;
        };
        match &known.state {
            // Its thread says so when it is gone.
            State::Open {
                epoch: open, wake, ..
            } if *open == epoch => {
                wake.end();
                Due::default()
            }
            State::Granted { epoch: granted, .. } if *granted == epoch => {
                known.state = State::Closed { answered: true };
                gone
            }
            _ => gone,
        }
    }

    pub(super) fn has_granted(&self, epoch: u64) -> bool {
        let mut states = self.lanes.values().map(|known| &known.state);
        states.any(|state| matches!(state, State::Granted { epoch: granted, .. } if *granted == epoch))
    }

    /// A connection showed a token: if it was granted, its lane opens, and the token is used up.
    pub(super) fn proven(
        &mut self,
        now: Instant,
        epoch: u64,
        token: &Token,
        wake: &Arc<Wake>,
    ) -> Option<u16> {
        for (lane, known) in &mut self.lanes {
            match &known.state {
                State::Granted {
                    epoch: granted,
                    token: granted_token,
                    until,
                } if *granted == epoch => {
                    if *until <= now || !same(granted_token, token) {
                        return None;
                    }
                    known.state = State::Open {
                        epoch,
                        wake: Arc::clone(wake),
                        again: false,
                    };
                    return Some(*lane);
                }
                _ => {}
            }
        }
        None
    }

    /// A receiving end is gone: nothing lands through it any more.
    pub(super) fn ended(
        &mut self,
        now: Instant,
        config: &Config,
        number: u16,
        epoch: u64,
        port: u16,
        fresh: impl FnOnce() -> Option<(u64, Token)>,
    ) -> Due {
        let mut due = Due::tell(LaneMessage::Gone { lane: number, epoch });
        if let Some(known) = self.lanes.get_mut(&number)
            && let State::Open {
                epoch: open, again, ..
            } = known.state
            && open == epoch
        {
            known.state = State::Closed { answered: !again };
            if again {
                due.messages.extend(known.grant(now, config, number, port, fresh));
            }
        }
        due
    }

    /// Forgets grants that nobody used; tells `at` when the next one is due.
    pub(super) fn tick(&mut self, now: Instant, at: &mut impl FnMut(Instant)) {
        for known in self.lanes.values_mut() {
            if let State::Granted { until, .. } = known.state {
                if until <= now {
                    known.state = State::Closed { answered: false };
                } else {
                    at(until);
                }
            }
        }
    }

    /// Wakes all ends.
    pub(super) fn nudge(&self) {
        for known in self.lanes.values() {
            if let State::Open { wake, .. } = &known.state {
                wake.wake();
            }
        }
    }

    /// The channel broke: all ends end, and no grant is good any more.
    pub(super) fn down(&mut self) {
        for known in self.lanes.values_mut() {
            // The next life's questions may begin anywhere.
            known.ask = 0;
            match &mut known.state {
                State::Open { wake, again, .. } => {
                    *again = false;
                    wake.end();
                }
                state => *state = State::Closed { answered: false },
            }
        }
    }

    /// Open lanes, and grants not used.
    pub(super) fn count(&self) -> (usize, usize) {
        let open = self
            .lanes
            .values()
            .filter(|known| matches!(known.state, State::Open { .. }));
        let granted = self
            .lanes
            .values()
            .filter(|known| matches!(known.state, State::Granted { .. }));
        (open.count(), granted.count())
    }
}

impl Lane {
    fn grant(
        &mut self,
        now: Instant,
        config: &Config,
        lane: u16,
        port: u16,
        fresh: impl FnOnce() -> Option<(u64, Token)>,
    ) -> Option<LaneMessage> {
        let (epoch, token) = fresh()?;
        self.state = State::Granted {
            epoch,
            token,
            until: now + config.hello * 2,
        };
        Some(LaneMessage::Grant {
            lane,
            ask: self.ask,
            epoch,
            token,
            port,
        })
    }
}

/// Whether two tokens are equal, in a time that does not tell where they differ.
fn same(a: &Token, b: &Token) -> bool {
    let differing =
        a.0.iter()
            .zip(&b.0)
            .fold(0, |differing, (a, b)| black_box(differing | (a ^ b)));
    black_box(differing) == 0
}
