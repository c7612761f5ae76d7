//! Ranks that are attached here, each with its own life: attached, joined at its home, gone or taken back.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvferry_control::{Answer, Event, Fault};
use kvferry_handshake::{Code, Envelope};

use crate::Broker;
use crate::io::{Micros, PeerAddress, SessionId};
use crate::peer::{Body, EngineId};
use crate::regions::Region;
use crate::source::parse_address;
use crate::stated::Stated;
use crate::timers::Timer;

/// One attachment of one rank; never reused within a daemon's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct RankLife(pub(crate) u64);

/// A rank that is attached here, or was and is not settled yet.
#[derive(Debug)]
pub(crate) struct Rank {
    /// `None` once its connection closed.
    pub(crate) session: Option<SessionId>,
    pub(crate) rank: u32,
    pub(crate) envelope: Arc<Envelope>,
    pub(crate) home: PeerAddress,
    /// Asking its home for its place.
    pub(crate) joining: Option<Joining>,
    /// The engine's life as the home last named it; `None` until the first answer.
    pub(crate) engine: Option<EngineId>,
    pub(crate) regions: BTreeMap<u16, Region>,
    /// Nothing new may begin; it goes away once everything of it has ended.
    pub(crate) leaving: Option<Leaving>,
}

#[derive(Debug)]
pub(crate) struct Joining {
    /// The attach call that waits for it; `None` where the place is asked for again.
    call: Option<u64>,
    since: Micros,
}

#[derive(Debug)]
pub(crate) enum Leaving {
    /// Its connection closed.
    Gone,
    /// Its attachment is taken back.
    Detached(Fault),
}

#[derive(Debug, Default)]
pub(crate) struct Ranks {
    lives: BTreeMap<RankLife, Rank>,
    sessions: BTreeMap<SessionId, RankLife>,
}

impl Ranks {
    pub(crate) fn get(&self, life: RankLife) -> Option<&Rank> {
        self.lives.get(&life)
    }

    pub(crate) fn get_mut(&mut self, life: RankLife) -> Option<&mut Rank> {
        self.lives.get_mut(&life)
    }

    /// The rank, unless it is on its way out.
    pub(crate) fn live(&self, life: RankLife) -> Option<&Rank> {
        self.lives.get(&life).filter(|rank| rank.leaving.is_none())
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (RankLife, &Rank)> {
        self.lives.iter().map(|(life, rank)| (*life, rank))
    }

    pub(crate) fn of_session(&self, session: SessionId) -> Option<RankLife> {
        self.sessions.get(&session).copied()
    }

    /// Live ranks of this life of an engine.
    pub(crate) fn of_engine(&self, engine: &EngineId) -> Vec<RankLife> {
        let of = |rank: &Rank| rank.leaving.is_none() && rank.engine.as_ref() == Some(engine);
        self.iter()
            .filter(|(_, rank)| of(rank))
            .map(|(life, _)| life)
            .collect()
    }

    pub(crate) fn session(&self, life: RankLife) -> Option<SessionId> {
        self.lives.get(&life)?.session
    }
}

impl Broker {
    pub(crate) fn attach(
        &mut self,
        session: SessionId,
        number: u64,
        envelope: Stated,
        rank: u32,
        home: Option<String>,
    ) {
        let (envelope, home) = match self.admit(session, &envelope, rank, home) {
            Ok(admitted) => admitted,
            Err(fault) => return self.answer(session, number, Err(fault)),
        };
        let life = RankLife(self.number());
        let joining = Joining {
            call: Some(number),
            since: self.now,
        };
        self.ranks.lives.insert(
            life,
            Rank {
                session: Some(session),
                rank,
                envelope,
                home,
                joining: Some(joining),
                engine: None,
                regions: BTreeMap::new(),
                leaving: None,
            },
        );
        self.ranks.sessions.insert(session, life);
        self.join(life);
    }

    fn admit(
        &self,
        session: SessionId,
        envelope: &Stated,
        rank: u32,
        home: Option<String>,
    ) -> Result<(Arc<Envelope>, PeerAddress), Fault> {
        if self.shutting_down {
            return Err(crate::faults::shutting_down());
        }
        if let Some(life) = self.ranks.of_session(session) {
            let leaving = self.ranks.live(life).is_none();
            return Err(if leaving {
                Fault::new(
                    Code::RanksDisagree,
                    "the attachment that was taken back still has transfers that end; attach again after `detached`",
                )
            } else {
                Fault::new(
                    Code::RankAttached,
                    "this connection is attached already; open one a rank",
                )
            });
        }
        if self.ranks.lives.len() >= self.config.max_ranks {
            let most = self.config.max_ranks;
            return Err(Fault::new(
                Code::OverLimit,
                format!("{most} ranks are attached; raise limits.ranks if this is normal load"),
            ));
        }
        let envelope = envelope.valid()?;
        let of = envelope.ranks.len();
        if usize::try_from(rank).map_or(true, |rank| rank >= of) {
            return Err(Fault::new(
                Code::RankUnknown,
                format!("rank {rank}, but the envelope lists {of} ranks"),
            ));
        }
        let home = match home {
            None => self.own().clone(),
            Some(text) => parse_address(&text).map_err(|why| {
                let shown: String = text.chars().take(100).collect();
                Fault::new(
                    Code::AddressInvalid,
                    format!("home {shown:?}: {why}; write HOST:PORT"),
                )
            })?,
        };
        let name = &envelope.identity.engine;
        let same = |other: &Rank| {
            other.leaving.is_none()
                && other.rank == rank
                && other.home == home
                && other.envelope.identity.engine == *name
        };
        if self.ranks.lives.values().any(same) {
            return Err(Fault::new(
                Code::RankAttached,
                format!("rank {rank} of engine {name} is attached to this daemon already"),
            ));
        }
        Ok((Arc::clone(envelope), home))
    }

    fn join(&mut self, life: RankLife) {
        let Some(rank) = self.ranks.live(life) else {
            return;
        };
        let body = Body::Join {
            envelope: Stated::sound(&rank.envelope),
            rank: rank.rank,
            life: life.0,
        };
        let home = rank.home.clone();
        self.say(&home, 0, body);
        self.timers.set(Timer::Rank(life), self.now + self.interval());
    }

    /// Asks its home again, or tells it that the rank is still there.
    pub(crate) fn rank_due(&mut self, life: RankLife) {
        let (now, deadline) = (self.now, self.config.deadline_us);
        let Some(rank) = self.ranks.live(life) else {
            return;
        };
        match (&rank.joining, &rank.engine) {
            (Some(joining), _) if joining.call.is_some() && joining.since + deadline <= now => {
                let cause = Fault::new(
                    Code::HomeUnreachable,
                    format!("home {} did not answer in time", rank.home.0),
                );
                self.refuse_join(life, cause);
            }
            (None, Some(engine)) => {
                let body = Body::Keep {
                    engine: engine.clone(),
                    rank: rank.rank,
                    life: life.0,
                };
                let home = rank.home.clone();
                self.say(&home, 0, body);
                self.timers.set(Timer::Rank(life), now + self.interval());
            }
            _ => self.join(life),
        }
    }

    pub(crate) fn on_joined(&mut self, peer: &PeerAddress, engine: EngineId, number: u32, life: RankLife) {
        let Some(rank) = self.ranks.get_mut(life) else {
            return;
        };
        if rank.leaving.is_some() || rank.home != *peer || rank.rank != number {
            return;
        }
        // A late answer of an earlier life of the engine is put right by the next `Keep`.
        let Some(joining) = rank.joining.take() else {
            return;
        };
        rank.engine = Some(engine);
        if let (Some(session), Some(call)) = (rank.session, joining.call) {
            self.answer(session, call, Ok(Answer::Done));
        }
    }

    pub(crate) fn on_join_refused(&mut self, peer: &PeerAddress, life: RankLife, cause: Fault) {
        let Some(rank) = self.ranks.live(life) else {
            return;
        };
        match &rank.joining {
            Some(joining) if rank.home == *peer => {
                if joining.call.is_some() {
                    self.refuse_join(life, cause);
                } else {
                    self.detach(life, cause);
                }
            }
            _ => {}
        }
    }

    /// The first join failed: the rank was never attached.
    fn refuse_join(&mut self, life: RankLife, cause: Fault) {
        let Some(rank) = self.ranks.lives.remove(&life) else {
            return;
        };
        self.timers.cancel(&Timer::Rank(life));
        self.leave_home(&rank, life);
        if let Some(session) = rank.session {
            self.ranks.sessions.remove(&session);
            if let Some(call) = rank.joining.and_then(|joining| joining.call) {
                self.answer(session, call, Err(cause));
            }
        }
    }

    /// Attaches that still wait are refused: the daemon ends.
    pub(crate) fn refuse_joins(&mut self) {
        let waits = |rank: &Rank| {
            rank.joining
                .as_ref()
                .is_some_and(|joining| joining.call.is_some())
        };
        let lives: Vec<RankLife> = self
            .ranks
            .iter()
            .filter(|(_, rank)| rank.leaving.is_none() && waits(rank))
            .map(|(life, _)| life)
            .collect();
        for life in lives {
            self.refuse_join(life, crate::faults::shutting_down());
        }
    }

    pub(crate) fn on_seat_lost(&mut self, peer: &PeerAddress, engine: &EngineId, life: RankLife) {
        let now = self.now;
        if let Some(rank) = self.ranks.get_mut(life) {
            let known = rank.leaving.is_none() && rank.joining.is_none() && rank.home == *peer;
            if known && rank.engine.as_ref() == Some(engine) {
                rank.joining = Some(Joining {
                    call: None,
                    since: now,
                });
                self.join(life);
            }
        }
    }

    /// The home of some ranks is not there: who waits to attach is refused, the others ask again.
    pub(crate) fn lose_home(&mut self, peer: &PeerAddress, cause: &Fault) {
        let now = self.now;
        let lives: Vec<RankLife> = self
            .ranks
            .iter()
            .filter(|(_, rank)| rank.leaving.is_none() && rank.home == *peer)
            .map(|(life, _)| life)
            .collect();
        for life in lives {
            let Some(rank) = self.ranks.get_mut(life) else {
                continue;
            };
            if rank
                .joining
                .as_ref()
                .is_some_and(|joining| joining.call.is_some())
            {
                let cause = Fault::new(
                    Code::HomeUnreachable,
                    format!("home {}: {}: {}", peer.0, cause.code, cause.message),
                );
                self.refuse_join(life, cause);
            } else {
                rank.joining = Some(Joining {
                    call: None,
                    since: now,
                });
                // Not at once: where nobody answers, that would turn in circles.
                self.timers.set(Timer::Rank(life), now + self.interval());
            }
        }
    }

    /// A home is there (again).
    pub(crate) fn find_home(&mut self, peer: &PeerAddress) {
        let lives: Vec<RankLife> = self
            .ranks
            .iter()
            .filter(|(_, rank)| rank.leaving.is_none() && rank.joining.is_some() && rank.home == *peer)
            .map(|(life, _)| life)
            .collect();
        for life in lives {
            self.join(life);
        }
    }

    pub(crate) fn on_detach(&mut self, peer: &PeerAddress, engine: &EngineId, cause: &Fault) {
        for life in self.ranks.of_engine(engine) {
            if self.ranks.live(life).is_some_and(|rank| rank.home == *peer) {
                self.detach(life, cause.clone());
            }
        }
    }

    /// Takes an attachment back; the rank is told once everything of it has ended.
    fn detach(&mut self, life: RankLife, cause: Fault) {
        let Some(rank) = self.ranks.get_mut(life) else {
            return;
        };
        rank.leaving = Some(Leaving::Detached(cause.clone()));
        self.timers.cancel(&Timer::Rank(life));
        self.end_transfers(life, &cause);
        self.settle_rank(life);
    }

    pub(crate) fn disconnected(&mut self, session: SessionId) {
        let Some(life) = self.ranks.sessions.remove(&session) else {
            return;
        };
        let Some(rank) = self.ranks.get_mut(life) else {
            return;
        };
        rank.session = None;
        let was_leaving = rank.leaving.replace(Leaving::Gone).is_some();
        if !was_leaving {
            self.timers.cancel(&Timer::Rank(life));
            if let Some(rank) = self.ranks.get(life) {
                let (home, body) = leave(rank, life);
                self.say(&home, 0, body);
            }
            let cause = Fault::new(Code::EngineGone, "the rank's connection closed");
            self.end_transfers(life, &cause);
        }
        self.settle_rank(life);
    }

    fn leave_home(&mut self, rank: &Rank, life: RankLife) {
        let (home, body) = leave(rank, life);
        self.say(&home, 0, body);
    }

    fn end_transfers(&mut self, life: RankLife, cause: &Fault) {
        self.end_fetches_of(life, cause);
        self.end_publishes_of(life, cause);
        self.end_announced_to(life, &cause.clone().into());
    }

    /// Lets go of what nothing uses any more: regions on their way out, then the rank itself.
    pub(crate) fn settle_rank(&mut self, life: RankLife) {
        if self.fetches.any_of(life) || self.publishes.any_of(life) {
            return;
        }
        self.settle_regions(life);
        if self.ranks.get(life).is_none_or(|rank| rank.leaving.is_none()) {
            return;
        }
        let Some(rank) = self.ranks.lives.remove(&life) else {
            return;
        };
        for region in rank.regions.values() {
            self.release(region.key);
        }
        if let Some(engine) = &rank.engine {
            let same = |(_, other): (RankLife, &Rank)| other.engine.as_ref() == Some(engine);
            if !self.ranks.iter().any(same) {
                self.drop_links_of(engine);
            }
        }
        if let (Some(session), Some(Leaving::Detached(cause))) = (rank.session, rank.leaving) {
            self.ranks.sessions.remove(&session);
            self.event(session, Event::Detached { cause });
        }
    }
}

fn leave(rank: &Rank, life: RankLife) -> (PeerAddress, Body) {
    let body = Body::Leave {
        name: rank.envelope.identity.engine.clone(),
        rank: rank.rank,
        life: life.0,
    };
    (rank.home.clone(), body)
}
