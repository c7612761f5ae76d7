//! The decode side's half of a link: it asks the prefill engine's home for the engine's envelope, its
//! verdict and where its ranks are, and comes to a verdict of its own.
//!
//! A link is asked for until it is there or nobody waits for it any more: an engine that is not attached
//! yet, or lacks a rank, is waited for as long as the fetch's deadline allows. A refusal is remembered;
//! asking again costs one small message, for only the home knows whether its engine has a new life.

mod answers;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kvferry_control::Fault;
use kvferry_handshake::{Code, Envelope, Outcome, Policy};
use kvferry_plan::LinkPlan;

use crate::Broker;
use crate::faults::from_peer;
use crate::io::{Micros, PeerAddress};
use crate::judged::Judgement;
use crate::peer::{Body, EngineId};
use crate::stated::Stated;
use crate::timers::Timer;

/// First pause before asking again; it doubles up to an eighth of the deadline.
const FIRST_PAUSE: Micros = 20_000;
/// After so many deadlines without use a link is forgotten.
const IDLE: Micros = 8;

/// An engine here, and an engine that it fetches from.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct LinkKey {
    pub(crate) decode: EngineId,
    pub(crate) home: PeerAddress,
    pub(crate) name: String,
}

/// Where a prefill rank is.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct SeatAt {
    pub(crate) peer: PeerAddress,
    pub(crate) incarnation: u64,
    pub(crate) life: u64,
}

/// What a fetch needs of its link.
#[derive(Debug)]
pub(crate) struct Terms {
    pub(crate) engine: EngineId,
    pub(crate) decode: EngineId,
    pub(crate) plan: Arc<LinkPlan>,
    pub(crate) digest: [u8; 32],
    /// By prefill rank.
    pub(crate) seats: Vec<SeatAt>,
}

/// What both daemons made of the pair.
#[derive(Debug)]
struct Pair {
    engine: EngineId,
    envelope: Arc<Envelope>,
    judged: Judgement,
}

#[derive(Debug)]
pub(crate) struct Link {
    /// The decode engine's.
    envelope: Arc<Envelope>,
    waiters: BTreeSet<u64>,
    pair: Option<Pair>,
    /// Set while every rank is known to be attached.
    terms: Option<Arc<Terms>>,
    /// A question is out, or due soon.
    asking: bool,
    /// When the last question went out.
    asked: Micros,
    /// It was asked again at once, because of an answer: the next time, the timer asks.
    hastened: bool,
    /// The home will need our envelope.
    send_envelope: bool,
    pause: Micros,
    /// Ranks' lives that turned out to be over, of one life of the engine: the home may learn it later than we.
    over: (Option<EngineId>, BTreeSet<SeatAt>),
    /// The life of the prefill engine whose home knows that the pair is refused from here.
    told: Option<EngineId>,
    used: Micros,
}

#[derive(Debug, Default)]
pub(crate) struct Links {
    known: BTreeMap<LinkKey, Link>,
}

impl Links {
    pub(crate) fn len(&self) -> usize {
        self.known.len()
    }

    pub(crate) fn of_engine(&self, decode: &EngineId) -> Vec<(String, Outcome)> {
        let of = self.known.iter().filter(|(key, _)| key.decode == *decode);
        of.filter_map(|(key, link)| {
            let pair = link.pair.as_ref()?;
            Some((key.name.clone(), pair.judged.verdict.outcome))
        })
        .collect()
    }
}

impl Broker {
    /// Brings a fetch onto its link, now or once the link is there. `anew`: it found the ranks before, and has to
    /// find them again.
    pub(crate) fn want_link(&mut self, number: u64, key: &LinkKey, envelope: &Arc<Envelope>, anew: bool) {
        let now = self.now;
        if !self.links.known.contains_key(key) {
            if self.links.known.len() >= self.config.limits.links && !self.forget_idle_link() {
                let most = self.config.limits.links;
                let cause = Fault::new(
                    Code::OverLimit,
                    format!("{most} links are in use; raise the limit on links if this is normal load"),
                );
                return self.fail_fetch(number, cause);
            }
            let link = Link {
                envelope: envelope.clone(),
                waiters: BTreeSet::new(),
                pair: None,
                terms: None,
                asking: false,
                asked: 0,
                hastened: false,
                send_envelope: true,
                pause: FIRST_PAUSE,
                over: (None, BTreeSet::new()),
                told: None,
                used: now,
            };
            self.links.known.insert(key.clone(), link);
        }
        let Some(link) = self.links.known.get_mut(key) else {
            return;
        };
        link.used = now;
        if let Some(terms) = link.terms.clone() {
            return self.bind_fetch(number, terms);
        }
        link.waiters.insert(number);
        if link.asking {
            return;
        }
        let due = link.asked + link.pause;
        if anew && now < due {
            // Ranks that are never where their home says must not keep both of us busy.
            link.asking = true;
            return self.timers.set(Timer::Link(key.clone()), due);
        }
        if !anew {
            link.pause = FIRST_PAUSE.min((self.config.deadline_us / 8).max(1));
        }
        link.hastened = false;
        self.ask_link(key);
    }

    /// Makes room by dropping the link that was unused for the longest.
    fn forget_idle_link(&mut self) -> bool {
        let idle = self
            .links
            .known
            .iter()
            .filter(|(_, link)| link.waiters.is_empty());
        let Some(key) = idle.min_by_key(|(_, link)| link.used).map(|(key, _)| key.clone()) else {
            return false;
        };
        self.drop_link(&key);
        true
    }

    fn drop_link(&mut self, key: &LinkKey) -> Option<Link> {
        self.timers.cancel(&Timer::Link(key.clone()));
        self.links.known.remove(key)
    }

    /// A fetch that waited ends.
    pub(crate) fn unwant_link(&mut self, number: u64, key: &LinkKey) {
        if let Some(link) = self.links.known.get_mut(key) {
            link.waiters.remove(&number);
        }
    }

    fn ask_link(&mut self, key: &LinkKey) {
        let (now, most) = (self.now, self.interval());
        let Some(link) = self.links.known.get_mut(key) else {
            return;
        };
        link.asking = true;
        link.asked = now;
        let body = Body::LinkOpen {
            name: key.name.clone(),
            decode: key.decode.clone(),
            policy: self.config.policy,
            envelope: link.send_envelope.then(|| Stated::sound(&link.envelope)),
            known: link.pair.as_ref().map(|pair| pair.engine.clone()),
        };
        let again = now + link.pause;
        link.pause = (link.pause * 2).min(most);
        self.say(&key.home, 0, body);
        self.timers.set(Timer::Link(key.clone()), again);
    }

    pub(crate) fn link_due(&mut self, key: &LinkKey) {
        let now = self.now;
        let Some(link) = self.links.known.get_mut(key) else {
            return;
        };
        if !link.waiters.is_empty() {
            link.hastened = false;
            return self.ask_link(key);
        }
        link.asking = false;
        let until = link.used + self.config.deadline_us * IDLE;
        if until <= now {
            self.drop_link(key);
        } else {
            self.timers.set(Timer::Link(key.clone()), until);
        }
    }

    /// The question is answered for good; nobody waits any more.
    fn rest_link(&mut self, key: &LinkKey) -> BTreeSet<u64> {
        let until = self.now + self.config.deadline_us * IDLE;
        let Some(link) = self.links.known.get_mut(key) else {
            return BTreeSet::new();
        };
        link.asking = false;
        let waiters = std::mem::take(&mut link.waiters);
        self.timers.set(Timer::Link(key.clone()), until);
        waiters
    }

    pub(crate) fn on_no_link(&mut self, peer: &PeerAddress, name: String, decode: EngineId, cause: Fault) {
        let key = LinkKey {
            decode,
            home: peer.clone(),
            name,
        };
        let Some(link) = self.links.known.get_mut(&key).filter(|link| link.asking) else {
            return;
        };
        let cause = from_peer(cause, &peer.0);
        if cause.code == Code::EngineUnknown {
            // It may attach yet; the home has kept nothing, but will say when it needs our envelope.
            link.send_envelope = false;
            link.terms = None;
            for number in link.waiters.clone() {
                self.fetch_waits_because(number, &cause);
            }
            return;
        }
        for number in self.rest_link(&key) {
            self.fail_fetch(number, cause.clone());
        }
    }

    pub(crate) fn on_link_needs_envelope(&mut self, peer: &PeerAddress, name: String, decode: EngineId) {
        let key = LinkKey {
            decode,
            home: peer.clone(),
            name,
        };
        let link = self.links.known.get_mut(&key);
        if let Some(link) = link.filter(|link| link.asking && !link.send_envelope) {
            link.send_envelope = true;
            self.hasten_link(&key);
        }
    }

    /// Asks again because of an answer: at once, but only once until the timer asks.
    fn hasten_link(&mut self, key: &LinkKey) {
        let link = self.links.known.get_mut(key);
        if let Some(link) = link.filter(|link| !link.hastened) {
            link.hastened = true;
            self.ask_link(key);
        }
    }

    /// The other ranks' daemons judge as well.
    fn offer_link(&mut self, key: &LinkKey, terms: &Terms, policy: Policy, ours: &Arc<Envelope>) {
        let daemons: BTreeSet<(PeerAddress, u64)> = terms
            .seats
            .iter()
            .filter(|seat| seat.peer != key.home)
            .map(|seat| (seat.peer.clone(), seat.incarnation))
            .collect();
        for (peer, incarnation) in daemons {
            self.offer_link_to(&peer, incarnation, terms, policy, ours);
        }
    }

    pub(crate) fn offer_link_to(
        &mut self,
        peer: &PeerAddress,
        incarnation: u64,
        terms: &Terms,
        policy: Policy,
        ours: &Arc<Envelope>,
    ) {
        let body = Body::LinkOffer {
            engine: terms.engine.clone(),
            decode: terms.decode.clone(),
            policy,
            envelope: Stated::sound(ours),
        };
        self.say(peer, incarnation, body);
    }

    /// No rank of the engine is left here: nobody will use its links.
    pub(crate) fn drop_links_of(&mut self, decode: &EngineId) {
        let of = |key: &&LinkKey| key.decode == *decode;
        let keys: Vec<LinkKey> = self.links.known.keys().filter(of).cloned().collect();
        for key in keys {
            self.drop_link(&key);
        }
    }

    /// A rank's life turned out to be over: the next fetch asks the home where the rank is now.
    pub(crate) fn seat_is_over(&mut self, key: &LinkKey, terms: &Terms, seat: SeatAt) {
        let Some(link) = self.links.known.get_mut(key) else {
            return;
        };
        if link
            .terms
            .as_ref()
            .is_some_and(|newer| newer.engine != terms.engine)
        {
            return;
        }
        link.terms = None;
        if link.over.0.as_ref() == Some(&terms.engine) {
            link.over.1.insert(seat);
        }
    }

    /// The peer is gone: links with engines whose home it is, or that have ranks there.
    pub(crate) fn lose_links(&mut self, peer: &PeerAddress, cause: &Fault) {
        let keys: Vec<LinkKey> = self.links.known.keys().cloned().collect();
        for key in keys {
            if key.home == *peer {
                if let Some(link) = self.drop_link(&key) {
                    for number in link.waiters {
                        self.fail_fetch(number, cause.clone());
                    }
                }
            } else if let Some(link) = self.links.known.get_mut(&key) {
                let there = |terms: &Arc<Terms>| terms.seats.iter().any(|seat| seat.peer == *peer);
                if link.terms.as_ref().is_some_and(there) {
                    link.terms = None;
                }
            }
        }
    }
}

pub(crate) fn outcome_word(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::Compatible => "compatible",
        Outcome::Bridgeable => "bridgeable",
        Outcome::Refused => "refused",
    }
}
