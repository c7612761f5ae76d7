//! The prefill side's half of a link: verdicts, remembered for a pair of engine lives.

use std::sync::Arc;

use kvferry_control::{Event, Fault};
use kvferry_handshake::{Code, Envelope, Outcome, Policy, Verdict};
use kvferry_plan::{LinkPlan, judge};

use crate::Broker;
use crate::ended::Memory;
use crate::io::{Micros, Output, PeerAddress};
use crate::peer::{Body, EngineId, LinkAnswer};
use crate::stated::Stated;

/// For how many deadlines a verdict is remembered; then it is made again.
const REMEMBERED: Micros = 32;

/// What this daemon makes of a pair of engines.
#[derive(Debug)]
pub(crate) struct Judgement {
    /// The decode engine's.
    pub(crate) envelope: Arc<Envelope>,
    pub(crate) policy: Policy,
    pub(crate) verdict: Box<Verdict>,
    pub(crate) plan: Option<(Arc<LinkPlan>, [u8; 32])>,
}

/// By (prefill engine, decode engine).
#[derive(Debug)]
pub(crate) struct Judgements {
    known: Memory<(EngineId, EngineId), Arc<Judgement>>,
    /// Pairs of whose refusal the prefill engine was told: once, however often peers have it judged or say that it failed.
    told: Memory<(EngineId, EngineId), ()>,
}

impl Judgement {
    pub(crate) fn new(prefill: &Envelope, decode: Arc<Envelope>, policy: Policy) -> Judgement {
        let (verdict, plan) = judge(prefill, &decode, policy);
        let plan = plan.filter(|_| verdict.allows()).map(|plan| {
            let digest = plan.digest();
            (Arc::new(plan), digest)
        });
        Judgement {
            envelope: decode,
            policy,
            verdict: Box::new(verdict),
            plan,
        }
    }

    pub(crate) fn digest(&self) -> Option<[u8; 32]> {
        self.plan.as_ref().map(|(_, digest)| *digest)
    }

    /// Whether another daemon came to the same: the outcome, every code and field, and the plan.
    /// Wording may differ from release to release.
    pub(crate) fn agrees(&self, verdict: &Verdict, digest: Option<[u8; 32]>) -> bool {
        outline(&self.verdict) == outline(verdict) && self.digest() == digest
    }
}

fn outline(verdict: &Verdict) -> (Outcome, Policy, Vec<(Code, &str)>) {
    let named = verdict.mismatches.iter().chain(&verdict.bridged);
    let named = named.map(|mismatch| (mismatch.code, mismatch.field.as_str()));
    (verdict.outcome, verdict.policy, named.collect())
}

impl Judgements {
    pub(crate) fn new(most: usize) -> Judgements {
        Judgements {
            known: Memory::new(most),
            told: Memory::new(most),
        }
    }

    pub(crate) fn get(&self, engine: &EngineId, decode: &EngineId) -> Option<Arc<Judgement>> {
        self.known.get(&(engine.clone(), decode.clone())).cloned()
    }

    pub(crate) fn len(&self) -> usize {
        self.known.len() + self.told.len()
    }

    pub(crate) fn expire(&mut self, now: Micros) {
        self.known.expire(now);
        self.told.expire(now);
    }

    pub(crate) fn next_expiry(&self) -> Option<Micros> {
        let due = [self.known.next_expiry(), self.told.next_expiry()];
        due.into_iter().flatten().min()
    }

    pub(crate) fn of_engine(&self, engine: &EngineId) -> Vec<(String, Outcome)> {
        let of = |((prefill, _), _): &(&(EngineId, EngineId), &Arc<Judgement>)| prefill == engine;
        self.known
            .iter()
            .filter(of)
            .map(|((_, decode), judged)| (decode.name.clone(), judged.verdict.outcome))
            .collect()
    }
}

impl Broker {
    #[expect(clippy::too_many_arguments, reason = "one field of the message each")]
    pub(crate) fn on_link_open(
        &mut self,
        peer: &PeerAddress,
        incarnation: u64,
        name: String,
        decode: EngineId,
        policy: Policy,
        envelope: Option<Stated>,
        known: Option<&EngineId>,
    ) {
        let refuse = |cause: Fault| Body::NoLink {
            name: name.clone(),
            decode: decode.clone(),
            cause,
        };
        let body = if self.shutting_down {
            refuse(crate::faults::shutting_down())
        } else if let Some(engine) = self.directory.get(&name) {
            let (id, ours, seats) = (engine.id.clone(), engine.envelope.clone(), engine.seats());
            let policy = self.config.policy.stricter(policy);
            match self.judgement(&id, &ours, &decode, policy, envelope) {
                Err(cause) => refuse(cause),
                Ok(None) => Body::LinkNeedsEnvelope { name, decode },
                Ok(Some(judged)) => Body::LinkAnswer(LinkAnswer {
                    decode,
                    policy: judged.policy,
                    envelope: (known != Some(&id)).then(|| Stated::sound(&ours)),
                    engine: id,
                    verdict: judged.verdict.clone(),
                    digest: judged.digest(),
                    seats,
                }),
            }
        } else {
            refuse(Fault::new(
                Code::EngineUnknown,
                format!("no engine {name} is attached at {}", self.own().0),
            ))
        };
        self.say(peer, incarnation, body);
    }

    /// The verdict on a pair, remembered or new; `None` without the decode engine's envelope.
    fn judgement(
        &mut self,
        engine: &EngineId,
        ours: &Envelope,
        decode: &EngineId,
        policy: Policy,
        envelope: Option<Stated>,
    ) -> Result<Option<Arc<Judgement>>, Fault> {
        let known = self.judgements.get(engine, decode);
        let theirs: Arc<Envelope> = match (known, envelope) {
            (Some(known), None) if known.policy == policy => return Ok(Some(known)),
            (Some(known), None) => known.envelope.clone(),
            (Some(known), Some(envelope)) if *known.envelope == *envelope => {
                if known.policy == policy {
                    return Ok(Some(known));
                }
                known.envelope.clone()
            }
            (_, Some(envelope)) => envelope.valid()?.clone(),
            (None, None) => return Ok(None),
        };
        let judged = Arc::new(Judgement::new(ours, theirs, policy));
        if !judged.verdict.allows() {
            self.tell_refused(engine, decode, judged.verdict.clone());
        }
        let until = self.now + self.config.deadline_us * REMEMBERED;
        let key = (engine.clone(), decode.clone());
        self.judgements.known.put(key, judged.clone(), until);
        Ok(Some(judged))
    }

    /// Tells rank 0 of the prefill engine, which is attached at its home, unless it was told of this pair.
    fn tell_refused(&mut self, engine: &EngineId, decode: &EngineId, verdict: Box<Verdict>) {
        let pair = (engine.clone(), decode.clone());
        if self.judgements.told.get(&pair).is_some() {
            return;
        }
        let until = self.now + self.config.deadline_us * REMEMBERED;
        self.judgements.told.put(pair, (), until);
        for life in self.ranks.of_engine(engine) {
            let Some(rank) = self.ranks.live(life).filter(|rank| rank.rank == 0) else {
                continue;
            };
            if let Some(session) = rank.session {
                self.event(
                    session,
                    Event::Refused {
                        engine: decode.name.clone(),
                        verdict: verdict.clone(),
                    },
                );
            }
        }
    }

    /// As the daemon of another rank: the pair is judged here too. The sender learns it when it announces.
    pub(crate) fn on_link_offer(
        &mut self,
        peer: &PeerAddress,
        engine: &EngineId,
        decode: EngineId,
        policy: Policy,
        envelope: Stated,
    ) {
        let lives = self.ranks.of_engine(engine);
        let Some(ours) = lives.first().and_then(|life| self.ranks.get(*life)) else {
            return;
        };
        let ours = ours.envelope.clone();
        let policy = self.config.policy.stricter(policy);
        if let Err(cause) = self.judgement(engine, &ours, &decode, policy, Some(envelope)) {
            self.emit(Output::Violation {
                peer: peer.clone(),
                kind: "a peer offered an envelope that is not used",
                what: cause.to_string(),
            });
        }
    }

    /// As the home: the decode side, or another rank's daemon, refuses the pair.
    pub(crate) fn on_link_failed(
        &mut self,
        peer: PeerAddress,
        engine: &EngineId,
        decode: &EngineId,
        verdict: Box<Verdict>,
    ) {
        // An honest daemon has a reason, and an engine that is told of a refusal is to learn it.
        if verdict.allows() || verdict.mismatches.is_empty() {
            let word = crate::links::outcome_word(verdict.outcome);
            let what = format!("a link is said to have failed with a verdict that names no reason ({word})");
            return self.emit(Output::Violation {
                peer,
                kind: "a peer broke the daemons' protocol; the message was dropped",
                what,
            });
        }
        // Only what was asked for: nobody can flood an engine with refusals of strangers.
        if self.judgements.get(engine, decode).is_some() {
            self.tell_refused(engine, decode, verdict);
        }
    }
}
