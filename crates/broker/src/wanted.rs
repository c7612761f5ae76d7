//! The decode side of one fetch at one prefill rank: announced, asked about, landed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kvferry_control::{Fault, Path, Side};
use kvferry_handshake::{ABSENT, Code, Component, Envelope, PageLists, Ready, Unit};
use kvferry_plan::ChunkMap;

use crate::Broker;
use crate::cause::Place;
use crate::faults::{from_peer, from_plan};
use crate::fetches::{Fetch, Goal, Stage};
use crate::io::{DataCommand, JobId, Micros, PeerAddress};
use crate::links::{SeatAt, Terms};
use crate::peer::{Announce, Body, Offer, PartState};

/// What a fetch wants of one prefill rank.
#[derive(Debug)]
pub(crate) struct Wanted {
    pub(crate) seat: SeatAt,
    pub(crate) total: u64,
    pub(crate) bytes: u64,
    /// When bytes of it last landed, or it was announced.
    pub(crate) moved: Micros,
    /// Opened here for a peer's bytes, or by the publishing side for a copy within this daemon.
    pub(crate) job: Option<JobId>,
    /// The job completed and is closed.
    pub(crate) landed: bool,
    pub(crate) heard: Heard,
    /// Questions up to this one may have overtaken the announcement.
    known_since: u64,
    /// Questions up to this one were asked before it was last announced: who does not know it yet is told once a
    /// question, and questions come from a timer.
    announced_since: u64,
    /// When the pair of engines was last offered to that daemon.
    offered: Option<Micros>,
}

/// What the prefill rank's daemon last said; it only goes forward.
#[derive(Debug)]
pub(crate) enum Heard {
    Nothing,
    Waiting,
    Ready(Ready),
    Final { metadata: Option<Vec<u8>> },
}

impl Wanted {
    /// The publish is final, and everything it had for us is here and fenced.
    pub(crate) fn is_done(&self) -> bool {
        matches!(self.heard, Heard::Final { .. }) && (self.total == 0 || self.landed)
    }
}

impl Fetch {
    /// The daemons of the prefill ranks it is announced to, with their lives.
    pub(crate) fn daemons(&self) -> BTreeSet<(PeerAddress, u64)> {
        let seats = self.parts.values().map(|part| &part.seat);
        seats.map(|seat| (seat.peer.clone(), seat.incarnation)).collect()
    }
}

impl Broker {
    /// The link is there: makes the maps, opens receive jobs, announces.
    pub(crate) fn bind_fetch(&mut self, number: u64, terms: Arc<Terms>) {
        let Some(fetch) = self.fetches.get(number) else {
            return;
        };
        if !matches!(fetch.stage, Stage::Linking) {
            return;
        }
        let maps = match self.maps(fetch, &terms) {
            Ok(maps) => maps,
            Err(cause) => return self.fail_fetch(number, cause),
        };
        let (pages, regions) = (fetch.pages.lists.clone(), fetch.regions.clone());
        let mut parts = BTreeMap::new();
        for ((rank, seat), map) in (0u32..).zip(&terms.seats).zip(maps) {
            let total = map.as_ref().map_or(0, ChunkMap::total_bytes);
            let receives = total > 0 && !self.is_own(&seat.peer);
            let job = map.filter(|_| receives).map(|map| {
                let job = self.open_job(seat.peer.clone(), Path::Tcp, None, Some((number, rank)));
                self.data(DataCommand::Receive {
                    job,
                    peer: seat.peer.clone(),
                    map,
                    pages: pages.clone(),
                    regions: regions.clone(),
                });
                job
            });
            let part = Wanted {
                seat: seat.clone(),
                total,
                bytes: 0,
                moved: self.now,
                job,
                landed: false,
                heard: Heard::Nothing,
                known_since: 0,
                announced_since: 0,
                offered: None,
            };
            parts.insert(rank, part);
        }
        let now = self.now;
        if let Some(fetch) = self.fetches.get_mut(number) {
            fetch.stage = Stage::Moving;
            fetch.went_on(now);
            fetch.parts = parts;
            fetch.terms = Some(terms);
        }
        self.announce(number, None);
        self.watch_fetch(number);
    }

    /// One map a prefill rank; `None` for ranks that have nothing for this one.
    fn maps(&self, fetch: &Fetch, terms: &Terms) -> Result<Vec<Option<ChunkMap>>, Fault> {
        let Some(rank) = self.ranks.get(fetch.rank) else {
            return Ok(Vec::new());
        };
        let sources = terms.plan.sources(rank.rank);
        let mut maps = Vec::with_capacity(terms.seats.len());
        for (prefill, seat) in (0u32..).zip(&terms.seats) {
            if !sources.contains(&prefill) {
                maps.push(None);
                continue;
            }
            let lists = fetch.pages.lists.clone();
            let map =
                ChunkMap::new(&terms.plan, prefill, rank.rank, fetch.tokens, lists).map_err(from_plan)?;
            self.check_path(&seat.peer, map.total_bytes())?;
            maps.push(Some(map));
        }
        Ok(maps)
    }

    /// Fails where the operator requires a path that this release does not have.
    pub(crate) fn check_path(&self, peer: &PeerAddress, bytes: u64) -> Result<(), Fault> {
        if self.config.require_rdma && bytes > 0 && !self.is_own(peer) {
            return Err(Fault::new(
                Code::PathRequired,
                format!(
                    "{bytes} bytes between {} and {} would travel by tcp, but rdma is required",
                    peer.0,
                    self.own().0
                ),
            ));
        }
        Ok(())
    }

    /// Announces to the daemons of all prefill ranks, or to one, those ranks that have not answered.
    fn announce(&mut self, number: u64, only: Option<&PeerAddress>) {
        let Some(fetch) = self.fetches.get_mut(number) else {
            return;
        };
        let (Some(terms), Some(rank)) = (&fetch.terms, self.ranks.get(fetch.rank)) else {
            return;
        };
        let serial = fetch.serial;
        let mut offers: BTreeMap<(PeerAddress, u64), Vec<Offer>> = BTreeMap::new();
        for (rank, part) in &mut fetch.parts {
            let wanted = only.is_none_or(|only| part.seat.peer == *only);
            if wanted && matches!(part.heard, Heard::Nothing) {
                part.announced_since = serial;
                let daemon = (part.seat.peer.clone(), part.seat.incarnation);
                offers.entry(daemon).or_default().push(Offer {
                    rank: *rank,
                    life: part.seat.life,
                    slot: part.job.map(|job| job.0),
                });
            }
        }
        let announce = Announce {
            fetch: number,
            engine: terms.engine.clone(),
            decode: terms.decode.clone(),
            decode_rank: rank.rank,
            transfer: fetch.transfer.clone(),
            tokens: fetch.tokens,
            least: fetch.least,
            pages: fetch.pages.lists.clone(),
            digest: terms.digest,
            offers: Vec::new(),
        };
        for ((peer, incarnation), offers) in offers {
            let announce = Announce {
                offers,
                ..announce.clone()
            };
            self.say(&peer, incarnation, Body::Announce(announce));
        }
    }

    /// Asks where the parts stand that are not done yet.
    pub(crate) fn ask_parts(&mut self, number: u64) {
        let Some(fetch) = self.fetches.get_mut(number) else {
            return;
        };
        if !matches!(fetch.stage, Stage::Moving) {
            return;
        }
        fetch.serial += 1;
        let serial = fetch.serial;
        let mut questions: BTreeMap<(PeerAddress, u64), Vec<(u32, u64)>> = BTreeMap::new();
        for (rank, part) in &fetch.parts {
            if !part.is_done() {
                let daemon = (part.seat.peer.clone(), part.seat.incarnation);
                questions.entry(daemon).or_default().push((*rank, part.seat.life));
            }
        }
        for ((peer, incarnation), ranks) in questions {
            let body = Body::Ask {
                fetch: number,
                ranks,
                serial,
            };
            self.say(&peer, incarnation, body);
        }
    }

    pub(crate) fn on_part_state(
        &mut self,
        peer: &PeerAddress,
        incarnation: u64,
        number: u64,
        rank: u32,
        serial: u64,
        state: PartState,
    ) {
        let Some(fetch) = self.fetches.get_mut(number) else {
            return;
        };
        let last = fetch.serial;
        let Some(part) = fetch.parts.get_mut(&rank) else {
            return;
        };
        if part.seat.peer != *peer || part.seat.incarnation != incarnation {
            return;
        }
        if !matches!(fetch.stage, Stage::Moving) {
            return;
        }
        let known = !matches!(part.heard, Heard::Nothing);
        if !known && !matches!(state, PartState::Unknown | PartState::NeedsLink) {
            part.known_since = last;
        }
        match state {
            PartState::Unknown if !known => {
                if serial > part.announced_since && serial <= last {
                    self.announce(number, Some(peer));
                }
            }
            PartState::Unknown if serial > part.known_since => {
                let cause = Fault::new(Code::PeerLost, format!("{} forgot the transfer", peer.0));
                self.fail_fetch(number, cause);
            }
            PartState::Unknown => {}
            PartState::NeedsLink if !known => self.offer_again(number, rank),
            PartState::NeedsLink => {}
            PartState::Stale if !known => {
                let (key, seat) = (fetch.link.clone(), part.seat.clone());
                if let Some(terms) = fetch.terms.clone() {
                    self.seat_is_over(&key, &terms, seat);
                }
                self.end_fetch(number, Goal::Relink);
            }
            PartState::Stale => {}
            PartState::Waiting if !known => {
                part.heard = Heard::Waiting;
                fetch.went_on(self.now);
            }
            PartState::Waiting => {}
            PartState::Ready(ready) => self.part_ready(number, rank, ready),
            PartState::Final { end, metadata } => self.part_final(number, rank, end, metadata),
            PartState::Failed(cause) => {
                let cause = cause.of(|| Place {
                    side: Side::Publish,
                    rank,
                    engine: fetch.link.name.clone(),
                    daemon: peer.0.to_string(),
                });
                if matches!(cause.code, Code::LinkRefused | Code::VerdictsDiffer) {
                    return self.link_refused_there(number, cause);
                }
                self.fail_fetch(number, cause);
            }
        }
    }

    /// The prefill rank's daemon does not know the pair of engines (any more).
    fn offer_again(&mut self, number: u64, rank: u32) {
        let (now, interval) = (self.now, self.interval());
        let policy = self.config.policy;
        let Some(fetch) = self.fetches.get_mut(number) else {
            return;
        };
        let (Some(part), Some(terms)) = (fetch.parts.get(&rank), fetch.terms.clone()) else {
            return;
        };
        // A daemon that never takes the offer must not keep both of us busy.
        if part.offered.is_some_and(|at| now < at + interval) {
            return;
        }
        let seat = part.seat.clone();
        for part in fetch.parts.values_mut() {
            // It is the daemon that is offered the pair, for all of its ranks.
            if part.seat.peer == seat.peer {
                part.offered = Some(now);
            }
        }
        if let Some(rank) = self.ranks.get(fetch.rank) {
            let envelope = rank.envelope.clone();
            self.offer_link_to(&seat.peer, seat.incarnation, &terms, policy, &envelope);
            self.announce(number, Some(&seat.peer));
        }
    }

    fn part_ready(&mut self, number: u64, rank: u32, ready: Ready) {
        let now = self.now;
        let Some(fetch) = self.fetches.get_mut(number) else {
            return;
        };
        let Some(part) = fetch.parts.get_mut(&rank) else {
            return;
        };
        match &part.heard {
            Heard::Nothing | Heard::Waiting => fetch.went_on(now),
            Heard::Ready(known) if known.tokens < ready.tokens || known.front_tokens < ready.front_tokens => {
                fetch.progress = now;
            }
            Heard::Ready(_) | Heard::Final { .. } => return,
        }
        if let Some(part) = fetch.parts.get_mut(&rank) {
            part.heard = Heard::Ready(ready);
        }
        fetch.met.get_or_insert(now);
    }

    fn part_final(&mut self, number: u64, rank: u32, end: u64, metadata: Option<Vec<u8>>) {
        let now = self.now;
        let Some(fetch) = self.fetches.get_mut(number) else {
            return;
        };
        let Some(part) = fetch.parts.get_mut(&rank) else {
            return;
        };
        let job = part.job;
        match std::mem::replace(&mut part.heard, Heard::Final { metadata }) {
            Heard::Nothing | Heard::Waiting => fetch.went_on(now),
            Heard::Ready(_) => fetch.progress = now,
            Heard::Final { metadata } => {
                part.heard = Heard::Final { metadata };
                return;
            }
        }
        fetch.met.get_or_insert(now);
        let known = *fetch.end.get_or_insert(end);
        if known != end {
            let cause = Fault::new(
                Code::TokensInvalid,
                format!("prefill rank {rank} published {end} tokens, another one {known}"),
            );
            return self.fail_fetch(number, cause);
        }
        let decode = self.ranks.get(fetch.rank).map(|rank| rank.envelope.clone());
        let checked = check_length(end, fetch.least).and_then(|()| match &decode {
            Some(decode) => check_state(decode, &fetch.pages.lists, end, fetch.tokens.to),
            None => Ok(()),
        });
        let end = end.min(fetch.tokens.to);
        if let Err(cause) = checked {
            return self.fail_fetch(number, cause);
        }
        if let Some(job) = job.filter(|job| self.job_takes_orders(*job)) {
            // A copy within this daemon learns its end from the publishing side.
            if self.jobs.is_receive(job) {
                self.data(DataCommand::End { job, end });
            }
        }
        self.settle_fetch(number);
    }

    /// Peers that a fetch still needs are gone.
    pub(crate) fn lose_sources(&mut self, peer: &PeerAddress, cause: &Fault) {
        let needs = |fetch: &Fetch| {
            let mut parts = fetch.parts.values();
            parts.any(|part| part.seat.peer == *peer && !part.is_done())
        };
        let lost: Vec<u64> = self
            .fetches
            .iter()
            .filter(|(_, fetch)| needs(fetch))
            .map(|(number, _)| number)
            .collect();
        for number in lost {
            self.fail_fetch(number, from_peer(cause.clone(), &peer.0));
        }
    }
}

/// A final publish must have the least tokens that will do.
pub(crate) fn check_length(end: u64, least: u64) -> Result<(), Fault> {
    if end < least {
        return Err(Fault::new(
            Code::Short,
            format!("{end} tokens were published, the fetch needs at least {least}"),
        ));
    }
    Ok(())
}

/// Recurrent state is that of the whole prompt: it must not pass for the state after fewer tokens.
pub(crate) fn check_state(decode: &Envelope, pages: &PageLists, end: u64, wanted: u64) -> Result<(), Fault> {
    let fetched = |component: &&Component| {
        let list = pages.groups.get(usize::from(component.page_group));
        component.unit == Unit::Slot && list.is_some_and(|list| list.iter().any(|slot| *slot != ABSENT))
    };
    match decode.components.iter().find(fetched) {
        Some(component) if end > wanted => Err(Fault::new(
            Code::TokensInvalid,
            format!(
                "component {} is the state after {end} tokens, the fetch wants that after {wanted}",
                component.name
            ),
        )),
        _ => Ok(()),
    }
}
