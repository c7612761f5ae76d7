//! Publishes of the prefill ranks attached here: from the first call to the end.
//!
//! A publish waits under a lease for decode engines, serves each of them with all its ranks, and ends when
//! all that it serves have ended. It is reported once all its jobs are closed: from then on no byte leaves
//! its pages.

mod checks;

use std::collections::{BTreeMap, BTreeSet};

use kvferry_control::{Answer, Event, Fault, Publish as PublishCall, Side, TransferId};
use kvferry_handshake::{Code, Ready};

use crate::Broker;
use crate::announced::PartKey;
use crate::cause::{Cause, Standing};
use crate::ended::Memory;
use crate::faults;
use crate::fetches::check_id;
use crate::io::{Micros, Output, Record, SessionId};
use crate::pages::Held;
use crate::peer::EngineId;
use crate::ranks::RankLife;
use crate::regions::Regions;
use crate::reports::Tallies;
use crate::servings::Serving;
use crate::siblings::{Attempts, of_id};
use crate::timers::Timer;

use checks::{check_extends, check_growth, check_lists, check_small, normal};

/// A rank's publish of one attempt.
pub(crate) type PublishKey = (RankLife, TransferId);

#[derive(Debug)]
pub(crate) struct Publish {
    pub(crate) pages: Held,
    pub(crate) regions: Regions,
    pub(crate) ready: Ready,
    pub(crate) metadata: Option<Vec<u8>>,
    pub(crate) serves: u32,
    /// By decode engine.
    pub(crate) servings: BTreeMap<EngineId, Serving>,
    /// Fetches bound to it whose jobs are not closed yet.
    pub(crate) parts: BTreeSet<PartKey>,
    pub(crate) met: Option<Micros>,
    /// When the rank last published.
    pub(crate) stepped: Micros,
    pub(crate) told: Micros,
    pub(crate) tallies: Tallies,
    called: Micros,
    pub(crate) lease_until: Micros,
    /// Set when nothing more begins; `Some(None)`: it ends well.
    ending: Option<Option<Cause>>,
    /// Where it stood when the first that it served failed; then when it ended, if it fails.
    pub(crate) stood: Option<Standing>,
}

#[derive(Debug)]
pub(crate) struct Publishes {
    open: BTreeMap<PublishKey, Publish>,
    pub(crate) attempts: Attempts,
    /// How they ended, for fetches that come late.
    ended: Memory<PublishKey, Option<Cause>>,
}

impl Publishes {
    pub(crate) fn new(most: usize) -> Publishes {
        Publishes {
            open: BTreeMap::new(),
            attempts: Attempts::new(most),
            ended: Memory::new(most),
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.open.len()
    }

    pub(crate) fn remembered(&self) -> usize {
        self.ended.len() + self.attempts.len()
    }

    /// The publish, unless it is ending.
    pub(crate) fn get(&self, key: &PublishKey) -> Option<&Publish> {
        self.open.get(key).filter(|publish| publish.ending.is_none())
    }

    pub(crate) fn get_mut(&mut self, key: &PublishKey) -> Option<&mut Publish> {
        self.open.get_mut(key).filter(|publish| publish.ending.is_none())
    }

    pub(crate) fn even_ending(&mut self, key: &PublishKey) -> Option<&mut Publish> {
        self.open.get_mut(key)
    }

    pub(crate) fn ended(&self, key: &PublishKey) -> Option<&Option<Cause>> {
        match self.open.get(key) {
            Some(publish) => publish.ending.as_ref(),
            None => self.ended.get(key),
        }
    }

    fn keys_of(&self, life: RankLife) -> impl Iterator<Item = &PublishKey> {
        let first = TransferId {
            id: String::new(),
            attempt: 0,
        };
        let range = self.open.range((life, first)..);
        range
            .map(|(key, _)| key)
            .take_while(move |(other, _)| *other == life)
    }

    pub(crate) fn any_of(&self, life: RankLife) -> bool {
        self.keys_of(life).next().is_some()
    }

    pub(crate) fn count_of(&self, life: RankLife) -> usize {
        self.keys_of(life).count()
    }

    /// Attempts of an id that are open or ending.
    pub(crate) fn attempts_of<'a>(&'a self, life: RankLife, id: &'a str) -> impl Iterator<Item = u32> + 'a {
        of_id(&self.open, life, id).map(|(transfer, _)| transfer.attempt)
    }

    pub(crate) fn expire(&mut self, now: Micros) {
        self.attempts.expire(now);
        self.ended.expire(now);
    }

    pub(crate) fn next_expiry(&self) -> Option<Micros> {
        [self.attempts.next_expiry(), self.ended.next_expiry()]
            .into_iter()
            .flatten()
            .min()
    }
}

impl Publish {
    /// The prompt's length, once it is final.
    pub(crate) fn end(&self) -> Option<u64> {
        self.ready.end
    }
}

impl Broker {
    pub(crate) fn publish(&mut self, session: SessionId, call: u64, publish: PublishCall) {
        match self.accept_publish(session, publish) {
            Ok((key, pages_changed)) => {
                self.answer(session, call, Ok(Answer::Done));
                self.supersede_publishes(&key);
                self.advance_publish(&key, pages_changed);
                self.bind_waiting(&key);
                self.check_served(&key);
                self.watch_publish(&key);
            }
            Err(fault) => self.answer(session, call, Err(fault)),
        }
    }

    /// Returns whether an earlier publish's page lists changed.
    fn accept_publish(&mut self, session: SessionId, call: PublishCall) -> Result<(PublishKey, bool), Fault> {
        check_id(&call.transfer)?;
        check_small(&call)?;
        let (life, rank) = self.attached(session)?;
        let ready = normal(call.ready)?;
        let key = (life, call.transfer.clone());
        let Some(open) = self.publishes.get(&key) else {
            return self.begin_publish(life, call, ready).map(|key| (key, false));
        };
        if open.end().is_some() {
            return Err(Fault::new(
                Code::TransferExists,
                format!("the final publish of {} has been made", call.transfer.id),
            ));
        }
        if open.serves != call.serves {
            return Err(Fault::new(
                Code::ProtocolViolation,
                format!("serves {} after {}: it must stay", call.serves, open.serves),
            ));
        }
        check_growth(&open.ready, &ready)?;
        if let Some(pages) = &call.pages {
            self.pages.check(pages)?;
            check_extends(&rank.envelope, &open.pages.lists, pages)?;
        }
        let lists = call.pages.as_ref().unwrap_or(&open.pages.lists);
        check_lists(rank, lists, &ready)?;
        let regions = rank.check_generations(&call.generations)?;
        if regions != open.regions {
            return Err(Fault::new(
                Code::StaleGeneration,
                "the regions were registered anew since the first publish",
            ));
        }
        let pages = call.pages.filter(|pages| *pages != *open.pages.lists);
        let changed = pages.is_some();
        let pages = pages.map(|pages| self.pages.take(pages)).transpose()?;
        let (now, lease) = (self.now, self.config.lease_us);
        if let Some(open) = self.publishes.get_mut(&key) {
            if let Some(pages) = pages {
                open.pages = pages;
            }
            open.ready = ready;
            open.metadata = call.metadata.or(open.metadata.take());
            open.stepped = now;
            open.lease_until = open.lease_until.max(now + lease);
        }
        Ok((key, changed))
    }

    fn begin_publish(
        &mut self,
        life: RankLife,
        call: PublishCall,
        ready: Ready,
    ) -> Result<PublishKey, Fault> {
        let Some(rank) = self.ranks.get(life) else {
            return Err(Fault::new(Code::NotAttached, "attach first"));
        };
        let Some(pages) = call.pages else {
            // The next step of one that has just ended: the event is on its way.
            let key = (life, call.transfer.clone());
            if let Some(ended) = self.publishes.ended(&key) {
                return Err(match ended {
                    Some(cause) => cause.told(),
                    None => Fault::new(
                        Code::TransferExists,
                        format!(
                            "the publish of {} has ended: everything it served was delivered",
                            key.1.id
                        ),
                    ),
                });
            }
            self.check_siblings(life, Side::Publish, &call.transfer)
                .map_err(|cause| cause.told())?;
            return Err(Fault::new(
                Code::PagesInvalid,
                "the first publish of a transfer must give the page lists",
            ));
        };
        self.pages.check(&pages)?;
        check_lists(rank, &pages, &ready)?;
        let regions = rank.check_generations(&call.generations)?;
        let id = &call.transfer.id;
        let open = self.publishes.attempts_of(life, id);
        let announced = self.announced.attempts_of(life, id);
        // A fetch of a higher attempt that waits makes this one stale; one of the same attempt waits for it.
        let above = announced.filter(|attempt| *attempt > call.transfer.attempt);
        self.publishes
            .attempts
            .check(life, &call.transfer, open.chain(above))?;
        self.check_siblings(life, Side::Publish, &call.transfer)
            .map_err(|cause| cause.told())?;
        self.check_room(life)?;
        let pages = self.pages.take(pages)?;
        let now = self.now;
        let key = (life, call.transfer);
        let mut publish = Publish {
            pages,
            regions,
            ready,
            metadata: call.metadata,
            serves: call.serves,
            servings: BTreeMap::new(),
            parts: BTreeSet::new(),
            met: None,
            stepped: now,
            told: now,
            tallies: Tallies::default(),
            called: now,
            lease_until: now + self.config.lease_us,
            ending: None,
            stood: None,
        };
        for (engine, why) in self.forgone.take(&key) {
            if publish.servings.len() < usize::try_from(publish.serves).unwrap_or(usize::MAX) {
                publish.servings.insert(engine, Serving::forgone(why, now));
            }
        }
        self.publishes.open.insert(key.clone(), publish);
        Ok(key)
    }

    /// A higher attempt ends the lower ones, and the fetches that wait for them.
    pub(crate) fn supersede_publishes(&mut self, (life, transfer): &PublishKey) {
        let older: Vec<TransferId> = of_id(&self.publishes.open, *life, &transfer.id)
            .filter(|(other, _)| other.attempt < transfer.attempt)
            .map(|(other, _)| other.clone())
            .collect();
        let cause = Fault::new(
            Code::Superseded,
            format!("attempt {} took its place", transfer.attempt),
        );
        let cause = Cause::from(cause);
        for transfer in older {
            self.fail_publish(&(*life, transfer), &cause, true);
        }
        self.supersede_waiting(*life, transfer, &cause);
    }

    pub(crate) fn renew_lease(&mut self, key: &PublishKey) {
        let until = self.now + self.config.lease_us;
        if let Some(publish) = self.publishes.get_mut(key) {
            publish.lease_until = publish.lease_until.max(until);
            self.watch_publish(key);
        }
    }

    /// Sets the timer: while it serves somebody, for lack of progress; else for its lease.
    pub(crate) fn watch_publish(&mut self, key: &PublishKey) {
        let deadline = self.config.deadline_us;
        let Some(publish) = self.publishes.get(key) else {
            return self.timers.cancel(&Timer::Publish(key.clone()));
        };
        let due = publish.next_deadline(deadline).unwrap_or(publish.lease_until);
        self.timers.set(Timer::Publish(key.clone()), due);
    }

    pub(crate) fn publish_due(&mut self, key: &PublishKey) {
        let (now, deadline) = (self.now, self.config.deadline_us);
        let Some(publish) = self.publishes.get(key) else {
            return;
        };
        if publish.next_deadline(deadline).is_some() {
            for engine in publish.stalled(now, deadline) {
                let cause = self.stuck().into();
                let stands = self.publish_at(key);
                self.fail_serving(key, &engine, &cause, None, stands);
            }
        } else if publish.lease_until <= now {
            let served = publish.servings.len();
            let cause = Fault::new(
                Code::LeaseExpired,
                format!("{served} of {} decode engines came in time", publish.serves),
            );
            self.fail_publish(key, &cause.into(), true);
        }
        self.watch_publish(key);
    }

    pub(crate) fn abort_publish(&mut self, life: RankLife, transfer: &TransferId, cause: &Cause) -> bool {
        let key = (life, transfer.clone());
        if self.publishes.get(&key).is_none() {
            return false;
        }
        self.fail_publish(&key, cause, true);
        true
    }

    /// Another rank of the engine failed.
    pub(crate) fn publish_failed_elsewhere(&mut self, life: RankLife, transfer: &TransferId, cause: &Cause) {
        self.fail_publish(&(life, transfer.clone()), cause, false);
    }

    pub(crate) fn end_publishes_of(&mut self, life: RankLife, cause: &Fault) {
        let cause = Cause::from(cause.clone());
        let keys: Vec<PublishKey> = self.publishes.keys_of(life).cloned().collect();
        for key in keys {
            self.fail_publish(&key, &cause, true);
        }
    }

    pub(crate) fn end_all_publishes(&mut self) {
        let keys: Vec<PublishKey> = self.publishes.open.keys().cloned().collect();
        for key in keys {
            self.fail_publish(&key, &faults::shutting_down().into(), true);
        }
    }

    /// Fails a publish with all that it serves. `spread`: the engine's other ranks are to be told.
    pub(crate) fn fail_publish(&mut self, key: &PublishKey, cause: &Cause, spread: bool) {
        if let Some(publish) = self.publishes.get_mut(key) {
            publish.stood = None;
        }
        self.end_publish(key, Some(cause.clone()), spread);
    }

    /// Ends a publish, well or with a cause.
    pub(crate) fn end_publish(&mut self, key: &PublishKey, cause: Option<Cause>, spread: bool) {
        let Some((place, stood)) = self.publish_at(key) else {
            return;
        };
        let Some(publish) = self.publishes.get_mut(key) else {
            return;
        };
        // If it fails because of one that it served, as it was then.
        let stood = publish.stood.take().unwrap_or(stood);
        let cause = cause.map(|cause| cause.at(&place, Some(&stood)));
        let stood = cause.is_some().then_some(stood);
        publish.ending = Some(cause.clone());
        publish.stood = stood;
        let parts = publish.parts.clone();
        self.timers.cancel(&Timer::Publish(key.clone()));
        if let Some(cause) = cause {
            // First, for the rank may go with the last that ends.
            if spread {
                self.fail_siblings(key.0, Side::Publish, &key.1, &cause);
            }
            for part in parts {
                self.part_failed_here(&part, &cause);
            }
        }
        self.settle_publish(key);
    }

    /// Reports a publish that is ending once nothing of it is open any more.
    pub(crate) fn settle_publish(&mut self, key: &PublishKey) {
        let done = |publish: &Publish| publish.ending.is_some() && publish.parts.is_empty();
        if !self.publishes.open.get(key).is_some_and(done) {
            return;
        }
        let Some(publish) = self.publishes.open.remove(key) else {
            return;
        };
        let (life, transfer) = key.clone();
        let cause = publish.ending.flatten();
        let until = self.remember_until();
        let kept = cause.as_ref().map(Cause::remembered);
        self.publishes.ended.put(key.clone(), kept, until);
        self.publishes.attempts.put(life, &transfer, until);
        let report = publish.tallies.report(publish.called, publish.met, self.now);
        let place = self.place(life, Side::Publish);
        let cause = cause.map(|cause| {
            let stood = Standing {
                bytes: publish.tallies.bytes(),
                ..publish.stood.unwrap_or_default()
            };
            cause.told_to(&place, &stood)
        });
        let tokens = publish.ready.end.unwrap_or(publish.ready.tokens);
        let event = match &cause {
            None => Event::Delivered {
                side: Side::Publish,
                transfer: transfer.clone(),
                tokens,
                metadata: Vec::new(),
                report: report.clone(),
            },
            Some(cause) => Event::Failed {
                side: Side::Publish,
                transfer: transfer.clone(),
                cause: cause.clone(),
                report: report.clone(),
            },
        };
        if let Some(session) = self.ranks.session(life) {
            self.event(session, event);
        }
        let (rank, engine) = self
            .ranks
            .get(life)
            .map(|rank| (rank.rank, rank.envelope.identity.engine.clone()))
            .unwrap_or_default();
        let peers: Vec<&str> = publish
            .servings
            .keys()
            .map(|engine| engine.name.as_str())
            .collect();
        self.emit(Output::Record(Record {
            transfer,
            engine,
            rank,
            side: Side::Publish,
            peer_engine: peers.join(","),
            tokens,
            report,
            cause,
        }));
        self.settle_rank(life);
    }
}
