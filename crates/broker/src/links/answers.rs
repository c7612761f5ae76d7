//! What a home answers to a decode side that asks for a link.

use std::collections::BTreeSet;
use std::sync::Arc;

use kvferry_control::{Event, Fault};
use kvferry_handshake::{Code, Mismatch, Outcome, Verdict};

use crate::Broker;
use crate::cause::Cause;
use crate::io::PeerAddress;
use crate::judged::Judgement;
use crate::links::{LinkKey, Pair, SeatAt, Terms, outcome_word};
use crate::peer::{Body, EngineId, LinkAnswer, Seat};
use crate::source::parse_address;

impl Broker {
    pub(crate) fn on_link_answer(&mut self, peer: &PeerAddress, incarnation: u64, answer: LinkAnswer) {
        if *answer.engine.home != *peer.0 || answer.engine.home_incarnation != incarnation {
            return;
        }
        let key = LinkKey {
            decode: answer.decode.clone(),
            home: peer.clone(),
            name: answer.engine.name.clone(),
        };
        let Some(link) = self.links.known.get_mut(&key).filter(|link| link.asking) else {
            return;
        };
        link.send_envelope = false;
        if let Err(cause) = self.learn_pair(&key, &answer) {
            let Some(cause) = cause else {
                return self.hasten_link(&key);
            };
            return self.refuse_link(&key, &answer.engine, &cause);
        }
        let Some(link) = self.links.known.get_mut(&key) else {
            return;
        };
        let Some(pair) = &link.pair else {
            return;
        };
        if pair.judged.verdict.allows() {
            return self.learn_seats(&key, answer.seats);
        }
        let verdict = pair.judged.verdict.clone();
        let cause = Fault {
            mismatches: verdict.mismatches.clone(),
            ..Fault::new(
                Code::LinkRefused,
                format!(
                    "engines {} and {} do not fit: {}",
                    key.name,
                    key.decode.name,
                    summary(&verdict.mismatches)
                ),
            )
        };
        for number in self.rest_link(&key) {
            self.refuse_fetch(number, &verdict, cause.clone());
        }
    }

    /// Tells a fetching rank the verdict, and fails its fetch.
    fn refuse_fetch(&mut self, number: u64, verdict: &Verdict, cause: impl Into<Cause>) {
        let name = self.fetches.get(number).map(|fetch| fetch.link.name.clone());
        if let (Some(session), Some(engine)) = (self.fetch_session(number), name) {
            let event = Event::Refused {
                engine,
                verdict: Box::new(verdict.clone()),
            };
            self.event(session, event);
        }
        self.fail_fetch(number, cause);
    }

    /// Judges the pair here too, unless that was done. `Err(None)`: the envelope is needed first.
    fn learn_pair(&mut self, key: &LinkKey, answer: &LinkAnswer) -> Result<(), Option<Fault>> {
        let policy = self.config.policy.stricter(answer.policy);
        let Some(link) = self.links.known.get_mut(key) else {
            return Ok(());
        };
        let known = link.pair.as_ref().filter(|pair| pair.engine == answer.engine);
        if known.is_none_or(|pair| pair.judged.policy != policy) {
            let envelope = match (&answer.envelope, known) {
                (Some(envelope), _) => {
                    let valid = envelope.valid().map_err(|invalid| {
                        let home = &key.home.0;
                        let what = format!("{home} sent an invalid envelope: {}", invalid.message);
                        Some(Fault::new(Code::ProtocolViolation, what))
                    });
                    valid?.clone()
                }
                (None, Some(pair)) => pair.envelope.clone(),
                (None, None) => {
                    link.pair = None;
                    return Err(None);
                }
            };
            let judged = Judgement::new(&envelope, link.envelope.clone(), policy);
            link.pair = Some(Pair {
                engine: answer.engine.clone(),
                envelope,
                judged,
            });
        }
        match &link.pair {
            Some(pair) if !pair.judged.agrees(&answer.verdict, answer.digest) => Err(Some(Fault::new(
                Code::VerdictsDiffer,
                format!(
                    "{} finds engines {} and {} {}, this daemon {}{}",
                    key.home.0,
                    key.name,
                    key.decode.name,
                    outcome_word(answer.verdict.outcome),
                    outcome_word(pair.judged.verdict.outcome),
                    if pair.judged.digest() == answer.digest {
                        ""
                    } else {
                        ", with another plan"
                    }
                ),
            ))),
            _ => Ok(()),
        }
    }

    /// The daemons disagree: whoever waits fails, and the home is told.
    fn refuse_link(&mut self, key: &LinkKey, engine: &EngineId, cause: &Fault) {
        let verdict = self.tell_link_failed(key, engine, cause);
        for number in self.rest_link(key) {
            self.refuse_fetch(number, &verdict, cause.clone());
        }
    }

    /// The daemon of another prefill rank refuses the pair, or has another plan for it.
    pub(crate) fn link_refused_there(&mut self, number: u64, cause: Cause) {
        let Some(fetch) = self.fetches.get(number) else {
            return;
        };
        if let Some(terms) = fetch.terms.clone() {
            let key = fetch.link.clone();
            let verdict = self.tell_link_failed(&key, &terms.engine, &cause.told());
            self.refuse_fetch(number, &verdict, cause);
        }
    }

    /// Tells the home, once, that this side or the daemon of another rank refuses the pair.
    fn tell_link_failed(&mut self, key: &LinkKey, engine: &EngineId, cause: &Fault) -> Verdict {
        let mut mismatches = cause.mismatches.clone();
        if mismatches.is_empty() {
            mismatches.push(Mismatch {
                code: cause.code,
                field: "verdict".to_owned(),
                prefill: key.home.0.to_string(),
                decode: self.own().0.to_string(),
                why: cause.message.clone(),
                fix: cause.code.entry().fix.to_owned(),
            });
        }
        let verdict = Verdict {
            outcome: Outcome::Refused,
            policy: self.config.policy,
            mismatches,
            bridged: Vec::new(),
            warnings: Vec::new(),
        };
        if let Some(link) = self.links.known.get_mut(key)
            && link.told.as_ref() != Some(engine)
        {
            link.told = Some(engine.clone());
            let body = Body::LinkFailed {
                engine: engine.clone(),
                decode: key.decode.clone(),
                verdict: Box::new(verdict.clone()),
            };
            self.say(&key.home, engine.home_incarnation, body);
        }
        verdict
    }

    fn learn_seats(&mut self, key: &LinkKey, seats: Vec<Option<Seat>>) {
        let seats: Result<Vec<Option<SeatAt>>, &str> = seats.into_iter().map(seat_at).collect();
        let Some(link) = self.links.known.get_mut(key) else {
            return;
        };
        let Some(Pair {
            engine,
            envelope,
            judged,
        }) = &link.pair
        else {
            return;
        };
        let seats = match seats {
            Ok(seats) if seats.len() == envelope.ranks.len() => seats,
            _ => {
                let cause = Fault::new(
                    Code::ProtocolViolation,
                    format!("{} names its ranks' daemons wrongly", key.home.0),
                );
                for number in self.rest_link(key) {
                    self.fail_fetch(number, cause.clone());
                }
                return;
            }
        };
        if link.over.0.as_ref() != Some(engine) {
            link.over = (Some(engine.clone()), BTreeSet::new());
        }
        let over = &mut link.over.1;
        over.retain(|over| seats.iter().flatten().any(|seat| seat == over));
        let missing: Vec<String> = seats
            .iter()
            .enumerate()
            .filter(|(_, seat)| seat.as_ref().is_none_or(|seat| over.contains(seat)))
            .map(|(rank, _)| rank.to_string())
            .collect();
        if !missing.is_empty() {
            let cause = Fault::new(
                Code::RankMissing,
                format!(
                    "of engine {} at {}, rank {} is not attached",
                    key.name,
                    key.home.0,
                    missing.join(", ")
                ),
            );
            for number in link.waiters.clone() {
                self.fetch_waits_because(number, &cause);
            }
            return;
        }
        let Some((plan, digest)) = &judged.plan else {
            return;
        };
        let terms = Arc::new(Terms {
            engine: engine.clone(),
            decode: key.decode.clone(),
            plan: plan.clone(),
            digest: *digest,
            seats: seats.into_iter().flatten().collect(),
        });
        link.terms = Some(terms.clone());
        let (policy, ours) = (self.config.policy, link.envelope.clone());
        self.offer_link(key, &terms, policy, &ours);
        for number in self.rest_link(key) {
            self.bind_fetch(number, terms.clone());
        }
    }
}

fn summary(mismatches: &[Mismatch]) -> String {
    let one = |mismatch: &Mismatch| {
        format!(
            "{} ({}: {} against {})",
            mismatch.code, mismatch.field, mismatch.prefill, mismatch.decode
        )
    };
    mismatches.iter().map(one).collect::<Vec<_>>().join("; ")
}

fn seat_at(seat: Option<Seat>) -> Result<Option<SeatAt>, &'static str> {
    let Some(seat) = seat else {
        return Ok(None);
    };
    Ok(Some(SeatAt {
        peer: parse_address(&seat.address)?,
        incarnation: seat.incarnation,
        life: seat.life,
    }))
}
