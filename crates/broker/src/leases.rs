//! What decode engines say ahead of a fetch: `expect` renews a publish's lease, `decline` ends it.
//!
//! Both go to the prefill engine's home, which passes them on to its ranks' daemons. A publish begins with a
//! whole lease, so an `expect` that comes before it has nothing to renew; a `decline` is remembered.

use std::collections::BTreeMap;

use kvferry_control::{Fault, TransferId};

use crate::Broker;
use crate::ended::Memory;
use crate::fetches::check_id;
use crate::io::{Micros, PeerAddress, SessionId};
use crate::peer::{Body, EngineId};
use crate::publishes::PublishKey;
use crate::source::parse_source;

/// Most engines that are remembered for one transfer.
const MOST_ENGINES: usize = 64;

/// Engines that will not fetch a publish that has not come yet: `None`, because they declined, or because
/// their fetch failed.
#[derive(Debug)]
pub(crate) struct Forgone {
    by: Memory<PublishKey, BTreeMap<EngineId, Option<Fault>>>,
}

impl Forgone {
    pub(crate) fn new(most: usize) -> Forgone {
        Forgone {
            by: Memory::new(most),
        }
    }

    pub(crate) fn take(&mut self, key: &PublishKey) -> BTreeMap<EngineId, Option<Fault>> {
        self.by.remove(key).unwrap_or_default()
    }

    pub(crate) fn put(&mut self, key: &PublishKey, engine: EngineId, why: Option<Fault>, until: Micros) {
        match self.by.get_mut(key) {
            Some(engines) if engines.len() < MOST_ENGINES => {
                engines.entry(engine).or_insert(why);
            }
            Some(_) => {}
            None => self.by.put(key.clone(), BTreeMap::from([(engine, why)]), until),
        }
    }

    /// The engine will fetch after all.
    fn retract(&mut self, key: &PublishKey, engine: &EngineId) {
        if let Some(engines) = self.by.get_mut(key) {
            if engines.get(engine) == Some(&None) {
                engines.remove(engine);
            }
            if engines.is_empty() {
                self.by.remove(key);
            }
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.by.len()
    }

    pub(crate) fn expire(&mut self, now: Micros) {
        self.by.expire(now);
    }

    pub(crate) fn next_expiry(&self) -> Option<Micros> {
        self.by.next_expiry()
    }
}

impl Broker {
    pub(crate) fn expect(
        &mut self,
        session: SessionId,
        source: &str,
        transfer: TransferId,
        declined: bool,
    ) -> Result<(), Fault> {
        check_id(&transfer)?;
        let source = parse_source(source)?;
        let (_, rank) = self.attached(session)?;
        if let Some(by) = rank.engine.clone() {
            let body = Body::Expect {
                name: source.engine,
                transfer,
                by,
                declined,
            };
            self.say(&source.home, 0, body);
        }
        Ok(())
    }

    /// As the home: passes it on to the engine's ranks.
    pub(crate) fn on_expect(&mut self, name: &str, transfer: TransferId, by: EngineId, declined: bool) {
        let Some(engine) = self.directory.get(name).map(|engine| engine.id.clone()) else {
            return;
        };
        let body = Body::Expected {
            engine: engine.clone(),
            transfer,
            by,
            declined,
        };
        self.tell_ranks(&engine, None, body);
    }

    pub(crate) fn on_expected(
        &mut self,
        peer: &PeerAddress,
        engine: &EngineId,
        transfer: &TransferId,
        by: &EngineId,
        declined: bool,
    ) {
        if *engine.home != *peer.0 {
            return;
        }
        let until = self.forgone_until();
        for life in self.ranks.of_engine(engine) {
            let key = (life, transfer.clone());
            if self.publishes.get(&key).is_some() {
                if declined {
                    self.decline_publish(&key, by);
                } else {
                    self.renew_lease(&key);
                }
            } else if declined {
                self.forgone.put(&key, by.clone(), None, until);
            } else {
                self.forgone.retract(&key, by);
            }
        }
    }

    /// How long it is remembered that an engine will not fetch.
    pub(crate) fn forgone_until(&self) -> Micros {
        self.now + self.config.lease_us + self.config.deadline_us
    }
}
