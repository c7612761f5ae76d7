//! What decode engines say ahead of a fetch: `expect` renews a publish's lease, `decline` ends it.
//!
//! Both go by way of the decode engine's home, which knows who has its ranks and may speak for it, to the prefill
//! engine's home, which passes them on to its ranks' daemons. A publish begins with a whole lease, so an `expect` that
//! comes before it has nothing to renew; a `decline` is remembered.

use kvferry_control::{Fault, TransferId};

use crate::Broker;
use crate::cause::Cause;
use crate::ended::Memory;
use crate::fetches::check_id;
use crate::io::{Micros, PeerAddress, SessionId};
use crate::peer::{Body, EngineId};
use crate::publishes::PublishKey;
use crate::source::{parse_address, parse_source};

/// Engines that will not fetch a publish that has not come yet: `None`, because they declined, or because
/// their fetch failed.
#[derive(Debug)]
pub(crate) struct Forgone {
    by: Memory<(PublishKey, EngineId), Option<Cause>>,
}

impl Forgone {
    pub(crate) fn new(most: usize) -> Forgone {
        Forgone {
            by: Memory::new(most),
        }
    }

    pub(crate) fn take(&mut self, key: &PublishKey) -> Vec<(EngineId, Option<Cause>)> {
        let first = (key.clone(), EngineId::default());
        let of = self.by.range(first).take_while(|((of, _), _)| of == key);
        let keys: Vec<_> = of.map(|(key, _)| key.clone()).collect();
        keys.into_iter()
            .filter_map(|key| Some((key.1.clone(), self.by.remove(&key)?)))
            .collect()
    }

    pub(crate) fn put(&mut self, key: &PublishKey, engine: EngineId, why: Option<&Cause>, until: Micros) {
        let key = (key.clone(), engine);
        if self.by.get(&key).is_none() {
            self.by.put(key, why.map(Cause::remembered), until);
        }
    }

    /// The engine will fetch after all.
    fn retract(&mut self, key: &PublishKey, engine: &EngineId) {
        let key = (key.clone(), engine.clone());
        if self.by.get(&key) == Some(&None) {
            self.by.remove(&key);
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
            let (home, to) = (rank.home.clone(), by.home_incarnation);
            let body = Body::Hint {
                home: source.home.0.to_string(),
                name: source.engine,
                transfer,
                by,
                declined,
            };
            self.say(&home, to, body);
        }
        Ok(())
    }

    /// As the decode engine's home: speaks for it, if it is one of its ranks' daemons that asks.
    pub(crate) fn on_hint(
        &mut self,
        peer: &PeerAddress,
        home: &str,
        name: String,
        transfer: TransferId,
        by: EngineId,
        declined: bool,
    ) {
        if !self.has_rank(&by, peer) {
            return;
        }
        if let Ok(home) = parse_address(home) {
            let body = Body::Expect {
                name,
                transfer,
                by,
                declined,
            };
            self.say(&home, 0, body);
        }
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
