//! The prefill side of announced fetches: each waits for its publish, is bound to it, and ends.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kvferry_control::{Fault, TransferId};
use kvferry_handshake::{Code, Envelope, TokenRange};
use kvferry_plan::{ChunkMap, check_pages};

use crate::Broker;
use crate::ended::Memory;
use crate::faults;
use crate::io::{JobId, Micros, PeerAddress, Tally};
use crate::jobs::Job;
use crate::judged::Judgement;
use crate::pages::Held;
use crate::peer::{Announce, Body, EngineId, FetchState, Offer, PartState};
use crate::publishes::PublishKey;
use crate::ranks::RankLife;
use crate::timers::Timer;

/// How long a send job whose fetch was delivered waits for its last acknowledgements.
const ACKNOWLEDGED_WITHIN: Micros = 1_000_000;

/// One decode rank's fetch at one prefill rank here.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PartKey {
    pub(crate) peer: PeerAddress,
    pub(crate) incarnation: u64,
    pub(crate) fetch: u64,
    pub(crate) life: RankLife,
}

#[derive(Debug)]
pub(crate) struct Part {
    transfer: TransferId,
    pub(crate) rank: u32,
    pub(crate) decode: EngineId,
    pub(crate) decode_rank: u32,
    pub(crate) decode_ranks: u32,
    pub(crate) decode_envelope: Arc<Envelope>,
    pub(crate) tokens: TokenRange,
    pub(crate) least: u64,
    pub(crate) pages: Held,
    pub(crate) slot: Option<u64>,
    /// `None`: this rank has nothing for that one.
    pub(crate) map: Option<ChunkMap>,
    pub(crate) total: u64,
    pub(crate) bytes: u64,
    pub(crate) job: Option<JobId>,
    pub(crate) stage: Stage,
    /// The decode rank said that it has everything.
    delivered: bool,
    /// When the fetch's daemon last spoke of it.
    heard: Micros,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// For the publish.
    Waiting,
    /// To the publish.
    Bound,
    /// Its job is being closed.
    Ended,
}

impl Part {
    pub(crate) fn publish_key(&self, key: &PartKey) -> PublishKey {
        (key.life, self.transfer.clone())
    }
}

#[derive(Debug)]
pub(crate) struct Announced {
    parts: BTreeMap<PartKey, Part>,
    waiting: BTreeMap<PublishKey, BTreeSet<PartKey>>,
    per_peer: BTreeMap<PeerAddress, usize>,
    /// Why parts failed, for daemons that ask or announce again.
    ended: Memory<PartKey, Fault>,
}

impl Announced {
    pub(crate) fn new(most: usize) -> Announced {
        Announced {
            parts: BTreeMap::new(),
            waiting: BTreeMap::new(),
            per_peer: BTreeMap::new(),
            ended: Memory::new(most),
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.parts.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.parts.len()
    }

    pub(crate) fn remembered(&self) -> usize {
        self.ended.len()
    }

    pub(crate) fn get(&self, key: &PartKey) -> Option<&Part> {
        self.parts.get(key)
    }

    pub(crate) fn get_mut(&mut self, key: &PartKey) -> Option<&mut Part> {
        self.parts.get_mut(key)
    }

    /// Attempts of an id that fetches wait for.
    pub(crate) fn attempts_of<'a>(&'a self, life: RankLife, id: &'a str) -> impl Iterator<Item = u32> + 'a {
        crate::siblings::of_id(&self.waiting, life, id).map(|(transfer, _)| transfer.attempt)
    }

    /// The parts of one fetch.
    fn of_fetch(&self, peer: &PeerAddress, incarnation: u64, fetch: u64) -> Vec<PartKey> {
        let first = PartKey {
            peer: peer.clone(),
            incarnation,
            fetch,
            life: RankLife(0),
        };
        let range = self.parts.range(first..).map(|(key, _)| key);
        range
            .take_while(|key| key.peer == *peer && key.incarnation == incarnation && key.fetch == fetch)
            .cloned()
            .collect()
    }

    fn keys(&self, wanted: impl Fn(&PartKey, &Part) -> bool) -> Vec<PartKey> {
        self.parts
            .iter()
            .filter(|(key, part)| wanted(key, part))
            .map(|(key, _)| key.clone())
            .collect()
    }

    pub(crate) fn bind(&mut self, key: &PartKey) {
        if let Some(part) = self.parts.get_mut(key) {
            part.stage = Stage::Bound;
            self.stop_waiting(key);
        }
    }

    fn stop_waiting(&mut self, key: &PartKey) {
        let Some(part) = self.parts.get(key) else {
            return;
        };
        let publish = part.publish_key(key);
        if let Some(waiting) = self.waiting.get_mut(&publish) {
            waiting.remove(key);
            if waiting.is_empty() {
                self.waiting.remove(&publish);
            }
        }
    }

    fn insert(&mut self, key: PartKey, part: Part) {
        self.waiting
            .entry(part.publish_key(&key))
            .or_default()
            .insert(key.clone());
        *self.per_peer.entry(key.peer.clone()).or_default() += 1;
        self.parts.insert(key, part);
    }

    fn remove(&mut self, key: &PartKey) -> Option<Part> {
        self.stop_waiting(key);
        let part = self.parts.remove(key)?;
        if let Some(count) = self.per_peer.get_mut(&key.peer) {
            *count -= 1;
            if *count == 0 {
                self.per_peer.remove(&key.peer);
            }
        }
        Some(part)
    }

    pub(crate) fn expire(&mut self, now: Micros) {
        self.ended.expire(now);
    }

    pub(crate) fn next_expiry(&self) -> Option<Micros> {
        self.ended.next_expiry()
    }
}

impl Broker {
    pub(crate) fn on_announce(&mut self, peer: &PeerAddress, incarnation: u64, announce: Announce) {
        let mut announce = announce;
        let offers = std::mem::take(&mut announce.offers);
        let mut pages = None;
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
        pages: &mut Option<Held>,
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
        pages: &mut Option<Held>,
    ) -> Result<Part, Fault> {
        if self.shutting_down {
            return Err(faults::shutting_down());
        }
        let Some((plan, digest)) = &judged.plan else {
            return Err(Fault {
                mismatches: judged.verdict.mismatches.clone(),
                ..Fault::new(Code::LinkRefused, "this daemon refuses the pair of engines")
            });
        };
        if *digest != announce.digest {
            return Err(Fault::new(
                Code::VerdictsDiffer,
                "this daemon has another plan for the pair",
            ));
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
            ));
        }
        crate::fetches::check_id(&announce.transfer)?;
        let (tokens, least) = (announce.tokens, announce.least);
        if tokens.from > least || least > tokens.to {
            return Err(Fault::new(
                Code::TokensInvalid,
                format!("{tokens:?}, at least to {least}"),
            ));
        }
        let held = match pages {
            Some(held) => held.clone(),
            None => {
                // Once an announcement: its ranks share the lists.
                self.pages.check(&announce.pages)?;
                check_pages(
                    &judged.envelope,
                    announce.decode_rank,
                    &announce.pages,
                    tokens.to,
                    true,
                )
                .map_err(faults::from_plan)?;
                pages.insert(self.pages.take(announce.pages.clone())?).clone()
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
            ));
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
            job: None,
            stage: Stage::Waiting,
            delivered: false,
            heard: self.now,
        })
    }

    /// Fetches of attempts that are over come too late.
    fn check_attempt(&self, key: &PublishKey) -> Result<(), Fault> {
        match self.publishes.ended(key) {
            Some(Some(cause)) => return Err(cause.clone()),
            Some(None) => {
                return Err(Fault::new(
                    Code::TransferExists,
                    "the publish was delivered to all that it serves",
                ));
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
        self.check_siblings(*life, crate::peer::Side::Publish, transfer)
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

    pub(crate) fn bind_waiting(&mut self, key: &PublishKey) {
        let waiting = self.announced.waiting.get(key).cloned().unwrap_or_default();
        for part in waiting {
            self.bind_part(&part);
        }
    }

    /// Fetches that wait for a lower attempt.
    pub(crate) fn supersede_waiting(&mut self, life: RankLife, transfer: &TransferId, cause: &Fault) {
        let lower: Vec<PartKey> = crate::siblings::of_id(&self.announced.waiting, life, &transfer.id)
            .filter(|(other, _)| other.attempt < transfer.attempt)
            .flat_map(|(_, keys)| keys.iter().cloned())
            .collect();
        for key in lower {
            self.part_failed_here(&key, cause);
        }
    }

    fn part_state(&self, key: &PartKey) -> PartState {
        let Some(part) = self.announced.get(key) else {
            let cause = self.announced.ended.get(key);
            return cause.map_or(PartState::Unknown, |cause| PartState::Failed(cause.clone()));
        };
        let publish = self.publishes.get(&part.publish_key(key));
        match (part.stage, publish) {
            (Stage::Waiting, _) => PartState::Waiting,
            (Stage::Bound, Some(publish)) => match publish.end() {
                Some(end) => PartState::Final {
                    end,
                    metadata: publish.metadata.clone(),
                },
                None => PartState::Ready(publish.ready),
            },
            (Stage::Bound, None) | (Stage::Ended, _) => {
                let cause = self.announced.ended.get(key);
                cause.map_or(PartState::Unknown, |cause| PartState::Failed(cause.clone()))
            }
        }
    }

    pub(crate) fn tell_part_state(&mut self, key: &PartKey, serial: u64) {
        let Some(rank) = self.announced.get(key).map(|part| part.rank) else {
            return;
        };
        let body = Body::PartState {
            fetch: key.fetch,
            rank,
            serial,
            state: self.part_state(key),
        };
        self.say(&key.peer, key.incarnation, body);
    }

    pub(crate) fn on_ask(
        &mut self,
        peer: &PeerAddress,
        incarnation: u64,
        fetch: u64,
        ranks: &[(u32, u64)],
        serial: u64,
    ) {
        for (rank, life) in ranks {
            let key = PartKey {
                peer: peer.clone(),
                incarnation,
                fetch,
                life: RankLife(*life),
            };
            if let Some(part) = self.announced.get_mut(&key) {
                part.heard = self.now;
            }
            let body = Body::PartState {
                fetch,
                rank: *rank,
                serial,
                state: self.part_state(&key),
            };
            self.say(peer, incarnation, body);
        }
    }

    /// Asks where the fetch stands, unless its daemon spoke of it lately.
    pub(crate) fn part_due(&mut self, key: &PartKey) {
        let (now, interval, deadline) = (self.now, self.interval(), self.config.deadline_us);
        let Some(part) = self.announced.get(key) else {
            return;
        };
        match part.stage {
            Stage::Ended => {
                // Its last acknowledgements did not come.
                if let Some(job) = part.job {
                    self.close_job(job);
                }
                return;
            }
            Stage::Waiting if part.heard + deadline <= now => {
                let cause = Fault::new(
                    Code::Deadline,
                    format!("{} no longer speaks of the fetch", key.peer.0),
                );
                return self.part_failed_here(key, &cause);
            }
            Stage::Waiting | Stage::Bound => {}
        }
        if part.heard + interval <= now {
            self.say(&key.peer, key.incarnation, Body::AskFetch { fetch: key.fetch });
        }
        self.timers.set(Timer::Part(key.clone()), now + interval);
    }

    pub(crate) fn on_ask_fetch(&mut self, peer: &PeerAddress, incarnation: u64, fetch: u64) {
        let state = self.fetches.state(fetch);
        self.say(peer, incarnation, Body::FetchState { fetch, state });
    }

    pub(crate) fn on_fetch_state(
        &mut self,
        peer: &PeerAddress,
        incarnation: u64,
        fetch: u64,
        state: &FetchState,
    ) {
        for key in self.announced.of_fetch(peer, incarnation, fetch) {
            match state {
                FetchState::Open => {
                    if let Some(part) = self.announced.get_mut(&key) {
                        part.heard = self.now;
                    }
                }
                FetchState::Delivered => self.part_delivered(&key),
                FetchState::Withdrawn => self.withdraw_part(&key),
                FetchState::Failed(cause) => {
                    let cause = faults::from_peer(cause.clone(), &peer.0);
                    self.fetch_failed_there(&key, &cause);
                }
                FetchState::Unknown => {
                    let cause = Fault::new(Code::TransferUnknown, format!("{} forgot the fetch", peer.0));
                    self.fetch_failed_there(&key, &cause);
                }
            }
        }
    }

    /// The decode rank has everything. It can say so only of a final publish.
    fn part_delivered(&mut self, key: &PartKey) {
        let Some(part) = self.announced.get(key) else {
            return;
        };
        let (publish_key, decode, rank) = (part.publish_key(key), part.decode.clone(), part.decode_rank);
        let publish = self.publishes.get(&publish_key);
        let is_final = publish.is_some_and(|publish| publish.end().is_some());
        match part.stage {
            Stage::Bound if is_final => {
                if let Some(part) = self.announced.get_mut(key) {
                    part.delivered = true;
                }
                self.end_part(key, None);
                self.serve_rank(&publish_key, &decode, rank);
            }
            Stage::Ended => {}
            Stage::Bound | Stage::Waiting => {
                let cause = Fault::new(
                    Code::ProtocolViolation,
                    format!(
                        "{} calls a fetch delivered whose publish is not final",
                        key.peer.0
                    ),
                );
                self.fail_part(key, cause);
            }
        }
    }

    /// The fetch will be announced anew.
    pub(crate) fn withdraw_part(&mut self, key: &PartKey) {
        let Some(part) = self.announced.get(key) else {
            return;
        };
        let (publish_key, decode, rank) = (part.publish_key(key), part.decode.clone(), part.decode_rank);
        if part.stage == Stage::Ended {
            return;
        }
        if let Some(publish) = self.publishes.get_mut(&publish_key)
            && let Some(serving) = publish.servings.get_mut(&decode)
        {
            serving.untake(rank, key);
        }
        let cause = Fault::new(
            Code::StaleIncarnation,
            "the fetch was withdrawn to be announced anew",
        );
        self.end_part(key, Some(&cause));
    }

    /// The decode side failed; it knows.
    fn fetch_failed_there(&mut self, key: &PartKey, cause: &Fault) {
        let Some(part) = self.announced.get(key) else {
            return;
        };
        let (publish_key, decode) = (part.publish_key(key), part.decode.clone());
        match part.stage {
            Stage::Ended => {}
            Stage::Waiting => {
                self.end_part(key, Some(cause));
                let until = self.forgone_until();
                self.forgone.put(&publish_key, decode, Some(cause.clone()), until);
            }
            Stage::Bound => {
                self.end_part(key, Some(cause));
                self.fail_serving(&publish_key, &decode, cause, Some(key));
            }
        }
    }

    /// It fails on this side: tells the decode side.
    pub(crate) fn part_failed_here(&mut self, key: &PartKey, cause: &Fault) {
        let Some(part) = self.announced.get(key) else {
            return;
        };
        if part.stage == Stage::Ended {
            return;
        }
        let body = Body::PartState {
            fetch: key.fetch,
            rank: part.rank,
            serial: 0,
            state: PartState::Failed(cause.clone()),
        };
        self.say(&key.peer, key.incarnation, body);
        self.end_part(key, Some(cause));
    }

    /// Ends a part: at once, or when its job is closed.
    fn end_part(&mut self, key: &PartKey, cause: Option<&Fault>) {
        let until = self.remember_until();
        self.announced.stop_waiting(key);
        let Some(part) = self.announced.get_mut(key) else {
            return;
        };
        part.stage = Stage::Ended;
        let job = part.job;
        if let Some(cause) = cause {
            self.announced.ended.put(key.clone(), cause.clone(), until);
        }
        self.timers.cancel(&Timer::Part(key.clone()));
        match job {
            // All has landed, and the acknowledgements are on their way: the report shall count them.
            Some(job) if cause.is_none() && !self.is_own(&key.peer) && self.job_takes_orders(job) => {
                self.timers
                    .set(Timer::Part(key.clone()), self.now + ACKNOWLEDGED_WITHIN);
            }
            Some(job) => self.close_job(job),
            None => self.remove_part(key),
        }
    }

    fn remove_part(&mut self, key: &PartKey) {
        let Some(part) = self.announced.remove(key) else {
            return;
        };
        let publish_key = part.publish_key(key);
        if let Some(publish) = self.publishes.even_ending(&publish_key) {
            publish.parts.remove(key);
        }
        self.settle_publish(&publish_key);
    }

    pub(crate) fn part_job_closed(&mut self, key: &PartKey, job: &Job, tally: &Tally) {
        let now = self.now;
        let Some(part) = self.announced.get_mut(key) else {
            return;
        };
        part.job = None;
        let ended = part.stage == Stage::Ended;
        let (publish_key, decode) = (part.publish_key(key), part.decode.clone());
        let delivered = part.map.clone().filter(|_| part.delivered);
        let mut tally = *tally;
        if let Some(publish) = self.publishes.even_ending(&publish_key) {
            // The decode side's word overtakes the lanes' last acknowledgements.
            if let (Some(map), Some(end)) = (delivered, publish.end()) {
                tally.bytes = tally.bytes.max(map.cut(end).total_bytes());
            }
            publish.tallies.add(&job.peer, job.path, &tally);
            if let Some(serving) = publish.servings.get_mut(&decode) {
                serving.progress = now;
            }
        }
        if let Some(part) = self.announced.get_mut(key) {
            part.bytes = part.bytes.max(tally.bytes);
        }
        if ended {
            self.remove_part(key);
        }
    }

    /// A rank here is gone: nothing of it will be published.
    pub(crate) fn end_announced_to(&mut self, life: RankLife, cause: &Fault) {
        for key in self.announced.keys(|key, _| key.life == life) {
            self.part_failed_here(&key, cause);
        }
    }

    pub(crate) fn end_all_announced(&mut self) {
        for key in self.announced.keys(|_, _| true) {
            self.part_failed_here(&key, &faults::shutting_down());
        }
    }

    /// A daemon whose ranks fetch is gone, and its fetches with it.
    pub(crate) fn lose_fetchers(&mut self, peer: &PeerAddress, cause: &Fault) {
        let cause = faults::from_peer(cause.clone(), &peer.0);
        for key in self
            .announced
            .keys(|key, part| key.peer == *peer && part.stage != Stage::Ended)
        {
            let Some(part) = self.announced.get(&key) else {
                continue;
            };
            let (publish_key, decode, stage) = (part.publish_key(&key), part.decode.clone(), part.stage);
            self.end_part(&key, Some(&cause));
            if stage == Stage::Bound {
                self.fail_serving(&publish_key, &decode, &cause, Some(&key));
            } else {
                let until = self.forgone_until();
                self.forgone.put(&publish_key, decode, Some(cause.clone()), until);
            }
        }
    }
}
