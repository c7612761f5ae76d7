//! Ranks of one engine end together: what fails on one of them, by itself, fails on all.

use std::collections::BTreeMap;

use kvferry_control::{Fault, Side, TransferId};
use kvferry_handshake::Code;

use crate::Broker;
use crate::cause::{Cause, Place};
use crate::ended::Memory;
use crate::io::{Micros, PeerAddress};
use crate::peer::{Body, EngineId, SiblingFailure};
use crate::ranks::RankLife;

/// Transfers that failed on some rank: other ranks need not begin them.
#[derive(Debug)]
pub(crate) struct EngineEnds {
    failed: Memory<(EngineId, Side, String), (u32, Cause)>,
}

impl EngineEnds {
    pub(crate) fn new(most: usize) -> EngineEnds {
        EngineEnds {
            failed: Memory::new(most),
        }
    }

    pub(crate) fn expire(&mut self, now: Micros) {
        self.failed.expire(now);
    }

    pub(crate) fn next_expiry(&self) -> Option<Micros> {
        self.failed.next_expiry()
    }

    pub(crate) fn len(&self) -> usize {
        self.failed.len()
    }
}

impl Broker {
    /// Refuses what another rank has failed with already.
    pub(crate) fn check_siblings(
        &self,
        life: RankLife,
        side: Side,
        transfer: &TransferId,
    ) -> Result<(), Cause> {
        let Some(engine) = self.ranks.get(life).and_then(|rank| rank.engine.clone()) else {
            return Ok(());
        };
        match self.engine_ends.failed.get(&(engine, side, transfer.id.clone())) {
            Some((attempt, cause)) if *attempt == transfer.attempt => Err(cause.clone()),
            Some((attempt, _)) if *attempt > transfer.attempt => Err(Fault::new(
                Code::StaleAttempt,
                format!(
                    "attempt {} of {}: attempt {attempt} has ended",
                    transfer.attempt, transfer.id
                ),
            )
            .into()),
            _ => Ok(()),
        }
    }

    /// Tells the other ranks of this one's engine, here and elsewhere, that its side of a transfer failed.
    pub(crate) fn fail_siblings(&mut self, life: RankLife, side: Side, transfer: &TransferId, cause: &Cause) {
        let Some(rank) = self.ranks.get(life) else {
            return;
        };
        let Some(engine) = rank.engine.clone() else {
            return;
        };
        if rank.envelope.ranks.len() < 2 {
            return;
        }
        let (home, number) = (rank.home.clone(), rank.rank);
        let failure = SiblingFailure {
            engine: engine.clone(),
            side,
            transfer: transfer.clone(),
            rank: number,
            cause: cause.for_sibling(),
        };
        let to = engine.home_incarnation;
        self.siblings_failed(&failure, Some(life));
        self.say(&home, to, Body::Failed(failure));
    }

    /// As the home: passes it on.
    pub(crate) fn on_failed(&mut self, peer: &PeerAddress, failure: SiblingFailure) {
        let engine = failure.engine.clone();
        if !self.has_rank(&engine, peer) {
            return;
        }
        self.tell_ranks(&engine, Some(peer), Body::SiblingFailed(failure));
    }

    pub(crate) fn on_sibling_failed(&mut self, peer: &PeerAddress, mut failure: SiblingFailure) {
        if *failure.engine.home == *peer.0 {
            failure.cause = failure.cause.of(|| Place {
                side: failure.side,
                rank: failure.rank,
                engine: failure.engine.name.clone(),
                daemon: peer.0.to_string(),
            });
            self.siblings_failed(&failure, None);
        }
    }

    fn siblings_failed(&mut self, failure: &SiblingFailure, but: Option<RankLife>) {
        let mut lives = self.ranks.of_engine(&failure.engine);
        lives.retain(|life| Some(*life) != but);
        if lives.is_empty() {
            return;
        }
        let key = (failure.engine.clone(), failure.side, failure.transfer.id.clone());
        let attempt = failure.transfer.attempt;
        // A fetch over a refused link is refused by what is remembered of the link, which has every mismatch.
        let of_link = failure.side == Side::Fetch && failure.cause.code == Code::LinkRefused;
        let newer = |known: &(u32, Cause)| known.0 < attempt;
        if !of_link && self.engine_ends.failed.get(&key).is_none_or(newer) {
            let until = self.remember_until();
            self.engine_ends
                .failed
                .put(key, (attempt, failure.cause.remembered()), until);
        }
        for life in lives {
            match failure.side {
                Side::Publish => self.publish_failed_elsewhere(life, &failure.transfer, &failure.cause),
                Side::Fetch => self.fetch_failed_elsewhere(life, &failure.transfer, &failure.cause),
            }
        }
    }
}

/// Attempts of a transfer id that one rank has ended, on one side: the highest.
#[derive(Debug)]
pub(crate) struct Attempts {
    highest: Memory<(RankLife, String), u32>,
}

impl Attempts {
    pub(crate) fn new(most: usize) -> Attempts {
        Attempts {
            highest: Memory::new(most),
        }
    }

    pub(crate) fn put(&mut self, life: RankLife, transfer: &TransferId, until: Micros) {
        let key = (life, transfer.id.clone());
        if self
            .highest
            .get(&key)
            .is_none_or(|known| *known <= transfer.attempt)
        {
            self.highest.put(key, transfer.attempt, until);
        }
    }

    /// Refuses what was used before, or is older than what is open (`open`: attempt by attempt).
    pub(crate) fn check(
        &self,
        life: RankLife,
        transfer: &TransferId,
        open: impl Iterator<Item = u32>,
    ) -> Result<(), Fault> {
        let ended = self.highest.get(&(life, transfer.id.clone())).copied();
        let Some(highest) = open.chain(ended).max() else {
            return Ok(());
        };
        let (id, attempt) = (&transfer.id, transfer.attempt);
        match attempt.cmp(&highest) {
            std::cmp::Ordering::Greater => Ok(()),
            std::cmp::Ordering::Equal => Err(Fault::new(
                Code::TransferExists,
                format!("attempt {attempt} of {id} was used before by this rank"),
            )),
            std::cmp::Ordering::Less => Err(Fault::new(
                Code::StaleAttempt,
                format!("attempt {attempt} of {id} comes after attempt {highest}"),
            )),
        }
    }

    pub(crate) fn expire(&mut self, now: Micros) {
        self.highest.expire(now);
    }

    pub(crate) fn next_expiry(&self) -> Option<Micros> {
        self.highest.next_expiry()
    }

    pub(crate) fn len(&self) -> usize {
        self.highest.len()
    }
}

/// Open transfers of one rank with this id, by attempt.
pub(crate) fn of_id<'a, V>(
    map: &'a BTreeMap<(RankLife, TransferId), V>,
    life: RankLife,
    id: &'a str,
) -> impl Iterator<Item = (&'a TransferId, &'a V)> {
    let first = TransferId {
        id: id.to_owned(),
        attempt: 0,
    };
    map.range((life, first)..)
        .take_while(move |((other, transfer), _)| *other == life && transfer.id == id)
        .map(|((_, transfer), value)| (transfer, value))
}
