//! The home's directory: which daemon has which rank of the engines whose home this is.
//!
//! It is soft: daemons refresh their ranks' places, and what is not refreshed is dropped.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kvferry_control::Fault;
use kvferry_handshake::{Code, Envelope};

use crate::Broker;
use crate::disagreement::first_difference;
use crate::io::{Micros, PeerAddress};
use crate::peer::{Body, EngineId, Seat};
use crate::stated::Stated;
use crate::timers::Timer;

#[derive(Debug)]
pub(crate) struct HomeEngine {
    pub(crate) id: EngineId,
    pub(crate) envelope: Arc<Envelope>,
    seats: BTreeMap<u32, Place>,
}

#[derive(Debug)]
struct Place {
    peer: PeerAddress,
    incarnation: u64,
    life: u64,
    heard: Micros,
}

#[derive(Debug, Default)]
pub(crate) struct Directory {
    engines: BTreeMap<String, HomeEngine>,
}

impl HomeEngine {
    /// Where each rank is, in rank order.
    pub(crate) fn seats(&self) -> Vec<Option<Seat>> {
        let seat = |rank: &u32| {
            self.seats.get(rank).map(|place| Seat {
                address: place.peer.0.to_string(),
                incarnation: place.incarnation,
                life: place.life,
            })
        };
        self.envelope.ranks.iter().map(|rank| seat(&rank.rank)).collect()
    }

    /// The daemons that have ranks, with their lives.
    fn daemons(&self) -> BTreeSet<(PeerAddress, u64)> {
        self.seats
            .values()
            .map(|place| (place.peer.clone(), place.incarnation))
            .collect()
    }
}

impl Directory {
    pub(crate) fn get(&self, name: &str) -> Option<&HomeEngine> {
        self.engines.get(name)
    }

    pub(crate) fn seats(&self) -> usize {
        self.engines.values().map(|engine| engine.seats.len()).sum()
    }

    fn seats_of(&self, peer: &PeerAddress) -> usize {
        let places = self.engines.values().flat_map(|engine| engine.seats.values());
        places.filter(|place| place.peer == *peer).count()
    }

    fn of_id(&self, id: &EngineId) -> Option<&HomeEngine> {
        self.engines.get(&id.name).filter(|engine| engine.id == *id)
    }
}

impl Broker {
    pub(crate) fn on_join(
        &mut self,
        peer: PeerAddress,
        incarnation: u64,
        envelope: Stated,
        rank: u32,
        life: u64,
    ) {
        let body = match self.seat(&peer, incarnation, envelope, rank, life) {
            Ok(engine) => Body::Joined { engine, rank, life },
            Err(cause) => Body::JoinRefused { life, cause },
        };
        self.say(&peer, incarnation, body);
    }

    fn seat(
        &mut self,
        peer: &PeerAddress,
        incarnation: u64,
        envelope: Stated,
        rank: u32,
        life: u64,
    ) -> Result<EngineId, Fault> {
        if self.shutting_down {
            return Err(crate::faults::shutting_down());
        }
        let name = envelope.identity.engine.clone();
        match self.directory.engines.get(&name) {
            Some(engine) if *engine.envelope == *envelope => {}
            Some(engine) => return Err(self.disagree(&name, rank, &envelope, engine.envelope.clone())),
            None => {
                envelope.valid()?;
            }
        }
        if !envelope.ranks.iter().any(|known| known.rank == rank) {
            return Err(Fault::new(
                Code::RankUnknown,
                format!("engine {name} has no rank {rank}"),
            ));
        }
        let taken = self
            .directory
            .get(&name)
            .and_then(|engine| engine.seats.get(&rank));
        if let Some(place) = taken {
            // A daemon has one life of a rank at a time, and numbers them upwards; a restarted daemon has none.
            let replaces = place.peer == *peer && (place.incarnation != incarnation || place.life <= life);
            if !replaces {
                return Err(Fault::new(
                    Code::RankAttached,
                    format!("rank {rank} of engine {name} is attached at {}", place.peer.0),
                ));
            }
        } else if self.directory.seats_of(peer) >= self.config.max_ranks {
            let most = self.config.max_ranks;
            return Err(Fault::new(
                Code::OverLimit,
                format!(
                    "{most} ranks at {} have their home here; limits.ranks is {most}",
                    peer.0
                ),
            ));
        }
        let envelope = Arc::clone(envelope.valid()?);
        let fresh = self.number();
        let id = EngineId {
            home: self.own().0.to_string(),
            home_incarnation: self.config.incarnation,
            name: name.clone(),
            life: fresh,
        };
        let engine = self
            .directory
            .engines
            .entry(name.clone())
            .or_insert_with(|| HomeEngine {
                id,
                envelope,
                seats: BTreeMap::new(),
            });
        engine.seats.insert(
            rank,
            Place {
                peer: peer.clone(),
                incarnation,
                life,
                heard: self.now,
            },
        );
        let id = engine.id.clone();
        self.timers
            .hasten(Timer::Seats(name), self.now + self.config.deadline_us);
        Ok(id)
    }

    /// The ranks' envelopes differ. Another life of the engine waits its turn; within one life all
    /// ranks are refused, for nobody can say which of them is right.
    fn disagree(&mut self, name: &str, rank: u32, theirs: &Envelope, ours: Arc<Envelope>) -> Fault {
        let lives = (ours.identity.incarnation, theirs.identity.incarnation);
        if lives.0 != 0 && lives.1 != 0 && lives.0 != lives.1 {
            return Fault::new(
                Code::EngineNameTaken,
                format!(
                    "engine {name} is attached in its life {}; rank {rank} came with {}",
                    lives.0, lives.1
                ),
            );
        }
        let cause = Fault::new(
            Code::RanksDisagree,
            format!(
                "rank {rank} of engine {name} came with another envelope than the ranks before it: {}",
                first_difference(&ours, theirs)
            ),
        );
        if let Some(engine) = self.directory.engines.remove(name) {
            self.timers.cancel(&Timer::Seats(name.to_owned()));
            for (peer, incarnation) in engine.daemons() {
                let body = Body::Detach {
                    engine: engine.id.clone(),
                    cause: cause.clone(),
                };
                self.say(&peer, incarnation, body);
            }
        }
        cause
    }

    pub(crate) fn on_keep(
        &mut self,
        peer: &PeerAddress,
        incarnation: u64,
        id: EngineId,
        rank: u32,
        life: u64,
    ) {
        let now = self.now;
        let engine = self
            .directory
            .engines
            .get_mut(&id.name)
            .filter(|engine| engine.id == id);
        let place = engine.and_then(|engine| engine.seats.get_mut(&rank));
        match place {
            Some(place) if place.peer == *peer && place.incarnation == incarnation && place.life == life => {
                place.heard = now;
            }
            _ => self.say(peer, incarnation, Body::SeatLost { engine: id, life }),
        }
    }

    pub(crate) fn on_leave(
        &mut self,
        peer: &PeerAddress,
        incarnation: u64,
        name: &str,
        rank: u32,
        life: u64,
    ) {
        self.drop_seats(Some(name), |number, place| {
            *number == rank && place.peer == *peer && place.incarnation == incarnation && place.life == life
        });
    }

    pub(crate) fn lose_seats(&mut self, peer: &PeerAddress) {
        self.drop_seats(None, |_, place| place.peer == *peer);
    }

    pub(crate) fn seats_due(&mut self, name: &str) {
        let (now, deadline) = (self.now, self.config.deadline_us);
        self.drop_seats(Some(name), |_, place| place.heard + deadline <= now);
        let next = self
            .directory
            .get(name)
            .and_then(|engine| engine.seats.values().map(|place| place.heard).min());
        if let Some(heard) = next {
            self.timers.set(Timer::Seats(name.to_owned()), heard + deadline);
        }
    }

    fn drop_seats(&mut self, name: Option<&str>, gone: impl Fn(&u32, &Place) -> bool) {
        let mut empty = Vec::new();
        for (engine_name, engine) in &mut self.directory.engines {
            if name.is_none_or(|name| name == engine_name) {
                engine.seats.retain(|rank, place| !gone(rank, place));
                if engine.seats.is_empty() {
                    empty.push(engine_name.clone());
                }
            }
        }
        for name in empty {
            self.directory.engines.remove(&name);
            self.timers.cancel(&Timer::Seats(name));
        }
    }

    /// Whether the daemon has a rank of this life of an engine.
    pub(crate) fn has_rank(&self, id: &EngineId, peer: &PeerAddress) -> bool {
        let engine = self.directory.of_id(id);
        engine.is_some_and(|engine| engine.seats.values().any(|place| place.peer == *peer))
    }

    /// Passes something on to the daemons of an engine's ranks, but for one of them.
    pub(crate) fn tell_ranks(&mut self, id: &EngineId, but: Option<&PeerAddress>, body: Body) {
        let daemons = self
            .directory
            .of_id(id)
            .map(HomeEngine::daemons)
            .unwrap_or_default();
        for (peer, incarnation) in daemons {
            if Some(&peer) != but {
                self.say(&peer, incarnation, body.clone());
            }
        }
    }
}
