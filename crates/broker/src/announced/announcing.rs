//! Announcements of fetches, at the prefill side: what can wait here for its publish is taken in.

use std::sync::Arc;

use kvferry_control::{Fault, Side, TransferId};
use kvferry_handshake::{Code, PageLists};
use kvferry_plan::{ChunkMap, check_pages};

use crate::Broker;
use crate::announced::{Part, PartKey, Stage};
use crate::cause::Cause;
use crate::faults;
use crate::fetches::check_id;
use crate::io::PeerAddress;
use crate::judged::Judgement;
use crate::pages::Held;
use crate::peer::{Announce, Body, Offer, PartState};
use crate::publishes::PublishKey;
use crate::ranks::RankLife;
use crate::timers::Timer;

/// An announcement's page lists, which its prefill ranks share.
enum Lists {
    Unchecked(Arc<PageLists>),
    Held(Held),
    Refused(Fault),
}

impl Broker {
    pub(crate) fn on_announce(&mut self, peer: &PeerAddress, incarnation: u64, announce: Announce) {
        let mut announce = announce;
        let offers = std::mem::take(&mut announce.offers);
        let mut pages = Lists::Unchecked(std::mem::take(&mut announce.pages));
        for offer in offers {
            let key = PartKey {
                peer: peer.clone(),
                incarnation,
                fetch: announce.fetch,
                life: RankLife(offer.life),
            };
            if let Some(part) = self.announced.get_mut(&key) {
                part.heard = self.now;
                self.tell_part_state(&key, 0);
                continue;
            }
            let state = match self.consider(&key, &announce, offer, &mut pages) {
                Ok(part) => {
                    self.accept_part(key, part);
                    continue;
                }
                Err(state) => state,
            };
            self.say(
                peer,
                incarnation,
                Body::PartState {
                    fetch: announce.fetch,
                    rank: offer.rank,
                    serial: 0,
                    moving: false,
                    state,
                },
            );
        }
    }

    /// Whether an announced fetch can wait here for its publish.
    fn consider(
        &mut self,
        key: &PartKey,
        announce: &Announce,
        offer: Offer,
        pages: &mut Lists,
    ) -> Result<Part, PartState> {
        if let Some(cause) = self.announced.ended.get(key) {
            return Err(PartState::Failed(cause.clone()));
        }
        let rank = self.ranks.live(key.life).filter(|rank| rank.rank == offer.rank);
        if rank.is_none_or(|rank| rank.engine.as_ref() != Some(&announce.engine)) {
            return Err(PartState::Stale);
        }
        let Some(judged) = self.judgements.get(&announce.engine, &announce.decode) else {
            return Err(PartState::NeedsLink);
        };
        self.consider_fetch(key, announce, offer, &judged, pages)
            .map_err(PartState::Failed)
    }

    fn consider_fetch(
        &mut self,
        key: &PartKey,
        announce: &Announce,
        offer: Offer,
        judged: &Judgement,
        pages: &mut Lists,
    ) -> Result<Part, Cause> {
        if self.shutting_down {
            return Err(faults::shutting_down().into());
        }
        let Some((plan, digest)) = &judged.plan else {
            return Err(Fault {
                mismatches: judged.verdict.mismatches.clone(),
                ..Fault::new(Code::LinkRefused, "this daemon refuses the pair of engines")
            }
            .into());
        };
        if *digest != announce.digest {
            return Err(Fault::new(Code::VerdictsDiffer, "this daemon has another plan for the pair").into());
        }
        let most = self.config.limits.announced_per_peer;
        if self
            .announced
            .per_peer
            .get(&key.peer)
            .is_some_and(|count| *count >= most)
        {
            return Err(Fault::new(
                Code::OverLimit,
                format!("{most} fetches of ranks at {} wait or move here", key.peer.0),
            )
            .into());
        }
        check_id(&announce.transfer)?;
        let (tokens, least) = (announce.tokens, announce.least);
        if tokens.from > least || least > tokens.to {
            return Err(Fault::new(
                Code::TokensInvalid,
                format!(
                    "tokens from {} to {}, at least to {least}",
                    tokens.from, tokens.to
                ),
            )
            .into());
        }
        if let Lists::Unchecked(lists) = pages {
            let lists = std::mem::take(lists);
            *pages = match self.take_lists(announce, judged, lists) {
                Ok(held) => Lists::Held(held),
                Err(cause) => Lists::Refused(cause),
            };
        }
        let held = match pages {
            Lists::Held(held) => held.clone(),
            Lists::Refused(cause) => return Err(cause.clone().into()),
            Lists::Unchecked(_) => {
                return Err(Fault::new(Code::Internal, "page lists were not checked").into());
            }
        };
        let map = if plan.targets(offer.rank).contains(&announce.decode_rank) {
            let lists = held.lists.clone();
            let map = ChunkMap::new(plan, offer.rank, announce.decode_rank, tokens, lists);
            Some(map.map_err(faults::from_plan)?)
        } else {
            None
        };
        let total = map.as_ref().map_or(0, ChunkMap::total_bytes);
        self.check_path(&key.peer, total)?;
        if total > 0 && offer.slot.is_none() && !self.is_own(&key.peer) {
            return Err(Fault::new(
                Code::ProtocolViolation,
                format!("{total} bytes are to be sent, but no slot is named"),
            )
            .into());
        }
        let publish_key = (key.life, announce.transfer.clone());
        self.check_attempt(&publish_key)?;
        Ok(Part {
            transfer: announce.transfer.clone(),
            rank: offer.rank,
            decode: announce.decode.clone(),
            decode_rank: announce.decode_rank,
            decode_ranks: u32::try_from(judged.envelope.ranks.len()).unwrap_or(u32::MAX),
            decode_envelope: judged.envelope.clone(),
            tokens,
            least,
            pages: held,
            slot: offer.slot,
            map,
            total,
            bytes: 0,
            alive: None,
            job: None,
            stage: Stage::Waiting,
            delivered: false,
            heard: self.now,
            moved: self.now,
            landed: 0,
        })
    }

    /// Checks the lists as far as this side uses them: the fetching daemon sees to it that no page is named twice.
    fn take_lists(
        &mut self,
        announce: &Announce,
        judged: &Judgement,
        lists: Arc<PageLists>,
    ) -> Result<Held, Fault> {
        self.pages.check(&lists)?;
        check_pages(
            &judged.envelope,
            announce.decode_rank,
            &lists,
            announce.tokens.to,
            false,
        )
        .map_err(faults::from_plan)?;
        self.pages.take(lists)
    }

    /// Fetches of attempts that are over come too late.
    fn check_attempt(&self, key: &PublishKey) -> Result<(), Cause> {
        match self.publishes.ended(key) {
            Some(Some(cause)) => return Err(cause.clone()),
            Some(None) => {
                return Err(Fault::new(
                    Code::TransferExists,
                    "the publish was delivered to all that it serves",
                )
                .into());
            }
            None => {}
        }
        if self.publishes.get(key).is_some() {
            return Ok(());
        }
        let (life, transfer) = key;
        let open = self.publishes.attempts_of(*life, &transfer.id);
        let waiting = self.announced.attempts_of(*life, &transfer.id);
        // Several engines may wait for one attempt.
        let above = open.chain(waiting).filter(|attempt| *attempt > transfer.attempt);
        self.publishes.attempts.check(*life, transfer, above)?;
        self.check_siblings(*life, Side::Publish, transfer)
    }

    fn accept_part(&mut self, key: PartKey, part: Part) {
        let publish_key = part.publish_key(&key);
        self.announced.insert(key.clone(), part);
        self.timers
            .set(Timer::Part(key.clone()), self.now + self.interval());
        self.supersede_publishes(&publish_key);
        if self.publishes.get(&publish_key).is_some() {
            self.bind_part(&key);
        } else {
            self.tell_part_state(&key, 0);
        }
    }

    /// Whether the part's publish is final; true of what is not under way.
    pub(crate) fn part_knows_end(&self, key: &PartKey) -> bool {
        let Some(part) = self.announced.get(key).filter(|part| part.stage == Stage::Bound) else {
            return true;
        };
        let publish = self.publishes.get(&part.publish_key(key));
        publish.is_none_or(|publish| publish.end().is_some())
    }

    pub(crate) fn bind_waiting(&mut self, key: &PublishKey) {
        let waiting = self.announced.waiting.get(key).cloned().unwrap_or_default();
        for part in waiting {
            self.bind_part(&part);
        }
    }

    /// Fetches that wait for a lower attempt.
    pub(crate) fn supersede_waiting(&mut self, life: RankLife, transfer: &TransferId, cause: &Cause) {
        let lower: Vec<PartKey> = crate::siblings::of_id(&self.announced.waiting, life, &transfer.id)
            .filter(|(other, _)| other.attempt < transfer.attempt)
            .flat_map(|(_, keys)| keys.iter().cloned())
            .collect();
        for key in lower {
            self.part_failed_here(&key, cause);
        }
    }
}
