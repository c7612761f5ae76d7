//! Registered regions of a rank, and their generations.

use std::sync::Arc;

use kvferry_control::{Answer, Fault, Path};
use kvferry_handshake::{Code, Element};

use crate::Broker;
use crate::io::{Output, RegionKey, SessionId};
use crate::ranks::{Rank, RankLife};

/// Engines round their pools up, to a huge page at the most.
const ROUNDED_TO: u64 = 2 << 20;

/// A region's number and its key in the data plane.
pub(crate) type Regions = Arc<[(u16, RegionKey)]>;

#[derive(Debug)]
pub(crate) struct Region {
    pub(crate) key: RegionKey,
    pub(crate) len: u64,
    generation: u64,
    /// The call that waits until nothing uses it any more.
    unregistering: Option<u64>,
}

impl Rank {
    /// Whether a region has rows whose length the envelope leaves open. No pair with such rows is carried.
    fn holds_auto(&self, region: u16) -> bool {
        let components = &self.envelope.components;
        let auto = |component: u16| {
            let component = components.get(usize::from(component));
            component.is_some_and(|component| component.element == Element::Auto)
        };
        let ranks = self.envelope.ranks.iter().filter(|rank| rank.rank == self.rank);
        ranks
            .flat_map(|rank| &rank.placements)
            .any(|placement| placement.region == region && auto(placement.component))
    }

    /// The regions to move bytes with. Every region of the envelope must be registered, and `generations`
    /// must name each in its present registration.
    pub(crate) fn check_generations(&self, generations: &[(u16, u64)]) -> Result<Regions, Fault> {
        let needed = self.envelope.region_bytes(self.rank);
        for (region, generation) in generations {
            let current = self.regions.get(region).filter(|r| r.unregistering.is_none());
            let Some(current) = current.filter(|_| needed.contains_key(region)) else {
                return Err(Fault::new(
                    Code::RegionUnknown,
                    format!("region {region} is not registered"),
                ));
            };
            if current.generation != *generation {
                return Err(Fault::new(
                    Code::StaleGeneration,
                    format!(
                        "region {region}: generation {generation} was given, {} is registered",
                        current.generation
                    ),
                ));
            }
        }
        for region in needed.keys() {
            if !self.regions.contains_key(region) {
                return Err(Fault::new(
                    Code::RegionUnknown,
                    format!("region {region} of the envelope is not registered"),
                ));
            }
            if !generations.iter().any(|(named, _)| named == region) {
                return Err(Fault::new(
                    Code::StaleGeneration,
                    format!("no generation is given for region {region}"),
                ));
            }
        }
        Ok(self
            .regions
            .iter()
            .map(|(number, region)| (*number, region.key))
            .collect())
    }
}

impl Broker {
    pub(crate) fn registered(
        &mut self,
        session: SessionId,
        number: u64,
        region: u16,
        key: RegionKey,
        len: u64,
        paths: Vec<Path>,
    ) {
        match self.may_register(session, region, len) {
            Ok(life) => {
                let generation = self.number();
                if let Some(rank) = self.ranks.get_mut(life) {
                    let entry = Region {
                        key,
                        len,
                        generation,
                        unregistering: None,
                    };
                    rank.regions.insert(region, entry);
                }
                self.answer(session, number, Ok(Answer::Registered { generation, paths }));
            }
            Err(fault) => {
                self.release(key);
                self.answer(session, number, Err(fault));
            }
        }
    }

    /// Whether a region fits the rank's envelope: asked before its memory is mapped too.
    pub fn check_region(&self, session: SessionId, region: u16, len: u64) -> Result<(), Fault> {
        self.may_register(session, region, len).map(drop)
    }

    fn may_register(&self, session: SessionId, region: u16, len: u64) -> Result<RankLife, Fault> {
        if self.shutting_down {
            return Err(crate::faults::shutting_down());
        }
        let (life, rank) = self.attached(session)?;
        let needed = rank.envelope.region_bytes(rank.rank);
        let Some(least) = needed.get(&region) else {
            let known: Vec<String> = needed.keys().map(u16::to_string).collect();
            return Err(Fault::new(
                Code::RegionUnknown,
                format!(
                    "region {region} is none of rank {}'s in the envelope; it has {}",
                    rank.rank,
                    known.join(", ")
                ),
            ));
        };
        if rank.regions.contains_key(&region) {
            return Err(Fault::new(
                Code::RegionRegistered,
                format!("region {region} is registered already; unregister it first"),
            ));
        }
        if len < *least {
            return Err(Fault::new(
                Code::RegionTooSmall,
                format!("region {region} has {len} bytes; the envelope's last row ends at {least}"),
            ));
        }
        // Nobody needs more, and what is mapped is bounded by it. Where rows of `auto` elements end is not known.
        let most = least.checked_next_multiple_of(ROUNDED_TO).unwrap_or(*least);
        if len > most && !rank.holds_auto(region) {
            return Err(Fault::new(
                Code::RegionTooLarge,
                format!(
                    "region {region} has {len} bytes; the envelope's last row ends at {least}, so that it may have {most} at \
                     most"
                ),
            ));
        }
        Ok(life)
    }

    /// The rank of a session, attached and joined.
    pub(crate) fn attached(&self, session: SessionId) -> Result<(RankLife, &Rank), Fault> {
        let found = self
            .ranks
            .of_session(session)
            .and_then(|life| Some((life, self.ranks.live(life)?)));
        match found {
            Some((life, rank)) if rank.engine.is_some() => Ok((life, rank)),
            _ => Err(Fault::new(
                Code::NotAttached,
                "attach first, and wait for the answer",
            )),
        }
    }

    pub(crate) fn unregister(&mut self, session: SessionId, number: u64, region: u16) {
        let life = match self.attached(session) {
            Ok((life, _)) => life,
            Err(fault) => return self.answer(session, number, Err(fault)),
        };
        let entry = self
            .ranks
            .get_mut(life)
            .and_then(|rank| rank.regions.get_mut(&region));
        match entry {
            Some(entry) if entry.unregistering.is_none() => {
                entry.unregistering = Some(number);
                let cause = Fault::new(Code::Unregistered, format!("region {region} was unregistered"));
                // Page lists do not say which regions they use, and every rank's plan uses all of them.
                self.end_fetches_of(life, &cause);
                self.end_publishes_of(life, &cause);
                self.settle_rank(life);
            }
            _ => {
                let fault = Fault::new(Code::RegionUnknown, format!("region {region} is not registered"));
                self.answer(session, number, Err(fault));
            }
        }
    }

    /// Releases the regions that wait for it; nothing of the rank is under way.
    pub(crate) fn settle_regions(&mut self, life: RankLife) {
        let Some(rank) = self.ranks.get_mut(life) else {
            return;
        };
        let session = rank.session;
        let done: Vec<(u16, RegionKey, u64)> = rank
            .regions
            .iter()
            .filter_map(|(number, region)| Some((*number, region.key, region.unregistering?)))
            .collect();
        for (number, _, _) in &done {
            rank.regions.remove(number);
        }
        for (_, key, call) in done {
            self.release(key);
            if let Some(session) = session {
                self.answer(session, call, Ok(Answer::Done));
            }
        }
    }

    pub(crate) fn release(&mut self, key: RegionKey) {
        self.emit(Output::Release { key });
    }
}
