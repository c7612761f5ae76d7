//! The lanes to and from one peer: which are open, asked for, granted or in doubt. No threads and no clock inside.
//!
//! What must never happen is that a chunk comes through two lanes at once, the old one being only *believed*
//! dead. So what a broken lane had not been acknowledged is in doubt until the receiver says that its end is gone.
//! Messages may be lost, doubled, late: asks and epochs only grow, each side acts on the newest, and what is
//! due is asked for again.

use std::collections::HashMap;
use std::hint::black_box;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::line::Taken;
use crate::wake::Wake;
use crate::{Config, LaneMessage, Token};

/// Lanes that a peer may ask for, whatever its settings.
pub(crate) const MAX_LANES: u16 = 64;
const FIRST_BACKOFF: Duration = Duration::from_millis(20);
const LAST_BACKOFF: Duration = Duration::from_secs(2);
/// A question is repeated more rarely with time, up to so many times the first pause.
const MAX_PATIENCE: u32 = 8;

/// The lanes to and from one peer.
#[derive(Debug, Default)]
pub(crate) struct Lanes {
    /// Where the peer is, while its channel is up.
    host: Option<IpAddr>,
    /// Counts the channel's lives.
    life: u64,
    outgoing: Vec<Outgoing>,
    incoming: HashMap<u16, Incoming>,
    /// Since when, and why, no lane to the peer could be opened.
    pub(crate) failing: Option<(Instant, String)>,
}

#[derive(Debug)]
struct Outgoing {
    state: OutgoingState,
    backoff: Duration,
}

#[derive(Debug)]
enum OutgoingState {
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
        gone: bool,
    },
    Lost {
        epoch: u64,
        in_doubt: Vec<Taken>,
        again: Instant,
        pause: u32,
    },
}

#[derive(Debug)]
struct Incoming {
    /// The newest question.
    ask: u64,
    state: IncomingState,
}

#[derive(Debug)]
enum IncomingState {
    Closed {
        answered: bool,
    },
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

/// A lane to open.
#[derive(Debug)]
pub(crate) struct Opening {
    pub(crate) life: u64,
    pub(crate) host: IpAddr,
}

/// How a sending end ended.
#[derive(Debug)]
pub(crate) struct SenderEnd {
    pub(crate) lane: u16,
    pub(crate) epoch: u64,
    pub(crate) unacked: Vec<Taken>,
    /// It was closed in order, with nothing unacknowledged.
    pub(crate) orderly: bool,
    /// At least one chunk landed through it.
    pub(crate) carried: bool,
}

/// What has to be done after something happened.
#[derive(Debug, Default)]
pub(crate) struct Due {
    pub(crate) messages: Vec<LaneMessage>,
    /// Chunks that nothing can land any more through the lane they were sent on: they are sent again.
    pub(crate) put_back: Vec<Taken>,
}

impl Due {
    fn tell(message: LaneMessage) -> Due {
        Due {
            messages: vec![message],
            put_back: Vec::new(),
        }
    }
}

impl Lanes {
    /// The channel is up. Gives the number of its life.
    pub(crate) fn up(&mut self, host: IpAddr) -> u64 {
        if self.host.is_none() {
            self.life += 1;
        }
        self.host = Some(host);
        self.life
    }

    /// The channel broke: all lanes end, and what is in doubt stays so.
    pub(crate) fn down(&mut self) {
        self.host = None;
        self.failing = None;
        for lane in &self.outgoing {
            if let OutgoingState::Open { wake, .. } = &lane.state {
                wake.end();
            }
        }
        self.outgoing.clear();
        for lane in self.incoming.values_mut() {
            // The next life's questions may begin anywhere.
            lane.ask = 0;
            match &mut lane.state {
                IncomingState::Open { wake, again, .. } => {
                    *again = false;
                    wake.end();
                }
                state => *state = IncomingState::Closed { answered: false },
            }
        }
    }

    /// Asks for lanes until `demand` of them are open or asked for.
    pub(crate) fn open(
        &mut self,
        now: Instant,
        config: &Config,
        demand: usize,
        mut fresh: impl FnMut() -> u64,
    ) -> Vec<LaneMessage> {
        if self.host.is_none() || demand == 0 {
            return Vec::new();
        }
        let most = config.lanes_per_peer.clamp(1, usize::from(MAX_LANES));
        while self.outgoing.len() < most {
            self.outgoing.push(Outgoing {
                state: OutgoingState::Closed { not_before: None },
                backoff: FIRST_BACKOFF,
            });
        }
        let live = |lane: &Outgoing| {
            matches!(
                lane.state,
                OutgoingState::Asking { .. } | OutgoingState::Open { .. }
            )
        };
        let mut short = demand.saturating_sub(self.outgoing.iter().filter(|lane| live(lane)).count());
        let mut messages = Vec::new();
        for (lane, outgoing) in (0u16..).zip(&mut self.outgoing) {
            let due = match outgoing.state {
                OutgoingState::Closed { not_before } => not_before.is_none_or(|at| at <= now),
                _ => false,
            };
            if due && short > 0 {
                short -= 1;
                let ask = fresh();
                outgoing.state = OutgoingState::Asking {
                    ask,
                    again: now + config.answer,
                    pause: 1,
                };
                messages.push(LaneMessage::Want { lane, ask });
            }
        }
        messages
    }

    /// A grant came. If it is the one that is awaited, the lane is to be connected.
    pub(crate) fn granted(&mut self, lane: u16, ask: u64, epoch: u64, wake: &Arc<Wake>) -> Option<Opening> {
        let host = self.host?;
        let outgoing = self.outgoing.get_mut(usize::from(lane))?;
        match outgoing.state {
            OutgoingState::Asking { ask: asked, .. } if asked == ask => {}
            _ => return None,
        }
        outgoing.state = OutgoingState::Open {
            epoch,
            wake: Arc::clone(wake),
            gone: false,
        };
        Some(Opening {
            life: self.life,
            host,
        })
    }

    /// A sending end ended.
    pub(crate) fn sender_ended(&mut self, now: Instant, config: &Config, end: SenderEnd) -> Due {
        let Some(outgoing) = self.outgoing.get_mut(usize::from(end.lane)) else {
            return Due::default();
        };
        let gone = match outgoing.state {
            OutgoingState::Open { epoch, gone, .. } if epoch == end.epoch => gone,
            // The channel broke meanwhile.
            _ => return Due::default(),
        };
        if end.orderly {
            outgoing.backoff = FIRST_BACKOFF;
            outgoing.state = OutgoingState::Closed { not_before: None };
            return Due::default();
        }
        let pause = outgoing.backoff;
        outgoing.backoff = if end.carried {
            FIRST_BACKOFF
        } else {
            (pause * 2).min(LAST_BACKOFF)
        };
        if gone || end.unacked.is_empty() {
            outgoing.state = OutgoingState::Closed {
                not_before: Some(now + pause),
            };
            return Due {
                messages: Vec::new(),
                put_back: end.unacked,
            };
        }
        outgoing.state = OutgoingState::Lost {
            epoch: end.epoch,
            in_doubt: end.unacked,
            again: now + config.answer,
            pause: 1,
        };
        Due::tell(LaneMessage::Lost {
            lane: end.lane,
            epoch: end.epoch,
        })
    }

    /// The receiver's end of a lane is gone.
    pub(crate) fn gone(&mut self, now: Instant, lane: u16, epoch: u64) -> Due {
        let Some(outgoing) = self.outgoing.get_mut(usize::from(lane)) else {
            return Due::default();
        };
        match &mut outgoing.state {
            OutgoingState::Open {
                epoch: open,
                wake,
                gone,
            } if *open == epoch => {
                *gone = true;
                wake.end();
            }
            OutgoingState::Lost {
                epoch: lost,
                in_doubt,
                ..
            } if *lost == epoch => {
                let put_back = std::mem::take(in_doubt);
                outgoing.state = OutgoingState::Closed {
                    not_before: Some(now + outgoing.backoff),
                };
                return Due {
                    messages: Vec::new(),
                    put_back,
                };
            }
            _ => {}
        }
        Due::default()
    }

    /// The peer asks for a lane. `fresh` makes an epoch and a token.
    pub(crate) fn wanted(
        &mut self,
        now: Instant,
        config: &Config,
        lane: u16,
        ask: u64,
        port: u16,
        fresh: impl FnOnce() -> Option<(u64, Token)>,
    ) -> Due {
        if self.host.is_none() || lane >= MAX_LANES {
            return Due::default();
        }
        let incoming = self.incoming.entry(lane).or_insert(Incoming {
            ask: 0,
            state: IncomingState::Closed { answered: false },
        });
        if ask < incoming.ask {
            return Due::default();
        }
        let newer = ask > incoming.ask;
        incoming.ask = ask;
        match &mut incoming.state {
            // The grant was lost, or the question came twice.
            IncomingState::Granted { epoch, token, until } if !newer && *until > now => {
                Due::tell(LaneMessage::Grant {
                    lane,
                    ask,
                    epoch: *epoch,
                    token: *token,
                    port,
                })
            }
            IncomingState::Open { wake, again, .. } => {
                if newer {
                    *again = true;
                    wake.end();
                }
                Due::default()
            }
            IncomingState::Closed { answered: true } if !newer => Due::default(),
            _ => match incoming.grant(now, config, lane, port, fresh) {
                Some(grant) => Due::tell(grant),
                None => Due::default(),
            },
        }
    }

    /// The peer's end of a lane broke.
    pub(crate) fn lost(&mut self, lane: u16, epoch: u64) -> Due {
        let gone = Due::tell(LaneMessage::Gone { lane, epoch });
        let Some(incoming) = self.incoming.get_mut(&lane) else {
            return gone;
        };
        match &incoming.state {
            // Its thread says so when it is gone.
            IncomingState::Open {
                epoch: open, wake, ..
            } if *open == epoch => {
                wake.end();
                Due::default()
            }
            IncomingState::Granted { epoch: granted, .. } if *granted == epoch => {
                incoming.state = IncomingState::Closed { answered: true };
                gone
            }
            _ => gone,
        }
    }

    /// A connection showed a token: if it was granted, its lane opens, and the token is used up.
    pub(crate) fn proven(
        &mut self,
        now: Instant,
        epoch: u64,
        token: &Token,
        wake: &Arc<Wake>,
    ) -> Option<u16> {
        for (lane, incoming) in &mut self.incoming {
            match &incoming.state {
                IncomingState::Granted {
                    epoch: granted,
                    token: granted_token,
                    until,
                } if *granted == epoch => {
                    if *until <= now || !same(granted_token, token) {
                        return None;
                    }
                    incoming.state = IncomingState::Open {
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
    pub(crate) fn receiver_ended(
        &mut self,
        now: Instant,
        config: &Config,
        lane: u16,
        epoch: u64,
        port: u16,
        fresh: impl FnOnce() -> Option<(u64, Token)>,
    ) -> Due {
        let up = self.host.is_some();
        let mut due = Due::tell(LaneMessage::Gone { lane, epoch });
        if let Some(incoming) = self.incoming.get_mut(&lane)
            && let IncomingState::Open {
                epoch: open, again, ..
            } = incoming.state
            && open == epoch
        {
            incoming.state = IncomingState::Closed { answered: !again };
            if again && up {
                due.messages
                    .extend(incoming.grant(now, config, lane, port, fresh));
            }
        }
        if !up {
            due.messages.clear();
        }
        due
    }

    /// Time passed: repeats what was not answered, forgets grants that nobody used. Gives when to come again.
    pub(crate) fn tick(&mut self, now: Instant, config: &Config) -> (Vec<LaneMessage>, Option<Instant>) {
        let mut messages = Vec::new();
        let mut next: Option<Instant> = None;
        let mut at = |when: Instant| next = Some(next.map_or(when, |next| next.min(when)));
        for (lane, outgoing) in (0u16..).zip(&mut self.outgoing) {
            let (message, again, pause) = match &mut outgoing.state {
                OutgoingState::Asking { ask, again, pause } => {
                    (LaneMessage::Want { lane, ask: *ask }, again, pause)
                }
                OutgoingState::Lost {
                    epoch, again, pause, ..
                } => (LaneMessage::Lost { lane, epoch: *epoch }, again, pause),
                OutgoingState::Closed {
                    not_before: Some(when),
                } => {
                    if *when > now {
                        at(*when);
                    } else {
                        outgoing.state = OutgoingState::Closed { not_before: None };
                    }
                    continue;
                }
                _ => continue,
            };
            if *again <= now {
                *pause = (*pause * 2).min(MAX_PATIENCE);
                *again = now + config.answer * *pause;
                messages.push(message);
            }
            at(*again);
        }
        for incoming in self.incoming.values_mut() {
            if let IncomingState::Granted { until, .. } = incoming.state {
                if until <= now {
                    incoming.state = IncomingState::Closed { answered: false };
                } else {
                    at(until);
                }
            }
        }
        (messages, next)
    }

    /// Ends every lane's thread.
    pub(crate) fn end(&mut self) {
        self.down();
    }

    /// Open lanes out and in, grants not used, and chunks in doubt.
    pub(crate) fn count(&self) -> [usize; 4] {
        let out = self.outgoing.iter();
        let incoming = self.incoming.values();
        [
            out.clone()
                .filter(|lane| matches!(lane.state, OutgoingState::Open { .. }))
                .count(),
            incoming
                .clone()
                .filter(|lane| matches!(lane.state, IncomingState::Open { .. }))
                .count(),
            incoming
                .filter(|lane| matches!(lane.state, IncomingState::Granted { .. }))
                .count(),
            out.map(|lane| match &lane.state {
                OutgoingState::Lost { in_doubt, .. } => in_doubt.len(),
                _ => 0,
            })
            .sum(),
        ]
    }
}

impl Incoming {
    fn grant(
        &mut self,
        now: Instant,
        config: &Config,
        lane: u16,
        port: u16,
        fresh: impl FnOnce() -> Option<(u64, Token)>,
    ) -> Option<LaneMessage> {
        let (epoch, token) = fresh()?;
        self.state = IncomingState::Granted {
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
