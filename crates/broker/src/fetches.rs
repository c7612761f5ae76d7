//! Fetches of the decode ranks attached here: from the call to the end.
//!
//! A fetch waits for its link, announces itself to every prefill rank, hears from each how far its publish
//! is, and ends when every rank's part is final and landed, or anything failed. It is reported once all
//! its jobs are closed: from then on no byte lands in its pages.

mod calls;
mod ends;

pub(crate) use calls::check_id;

use std::collections::BTreeMap;
use std::sync::Arc;

use kvferry_control::{Fault, TransferId};
use kvferry_handshake::{PageLists, TokenRange};

use crate::Broker;
use crate::cause::{Cause, Standing};
use crate::ended::Memory;
use crate::io::{JobId, Micros};
use crate::links::{LinkKey, Terms};
use crate::pages::Held;
use crate::peer::FetchState;
use crate::progress::{ALIVE_FOR, stuck_at};
use crate::ranks::RankLife;
use crate::regions::Regions;
use crate::reports::Tallies;
use crate::siblings::{Attempts, of_id};
use crate::timers::Timer;
use crate::wanted::{Heard, Wanted};
use crate::written::{Writes, Written};

#[derive(Debug)]
pub(crate) struct Fetch {
    pub(crate) rank: RankLife,
    pub(crate) transfer: TransferId,
    pub(crate) link: LinkKey,
    pub(crate) pages: Held,
    /// Its hold on the pages that it writes.
    writes: Writes,
    pub(crate) regions: Regions,
    pub(crate) tokens: TokenRange,
    pub(crate) least: u64,
    pub(crate) stage: Stage,
    /// Set while it is announced.
    pub(crate) terms: Option<Arc<Terms>>,
    /// By prefill rank.
    pub(crate) parts: BTreeMap<u32, Wanted>,
    /// The prompt's length, once a rank said it.
    pub(crate) end: Option<u64>,
    /// Counts the questions, so that late answers are known as such.
    pub(crate) serial: u64,
    pub(crate) met: Option<Micros>,
    /// When something last went forward.
    pub(crate) progress: Micros,
    /// When bytes of it were last known to be under way, or waiting their turn.
    pub(crate) alive: Micros,
    /// Most bytes that had landed at any time: landing them again is no progress.
    pub(crate) most: u64,
    /// Announced anew: what it went through before is no progress any more.
    anew: bool,
    called: Micros,
    pub(crate) told: Micros,
    /// Why the link is not there yet.
    waits: Option<Fault>,
    tallies: Tallies,
    /// Set when it begins to fail.
    stood: Option<Standing>,
}

#[derive(Debug)]
pub(crate) enum Stage {
    /// Waits until lower attempts are settled: their bytes may still land in its pages.
    Behind,
    /// Waits for its link.
    Linking,
    /// Announced.
    Moving,
    /// Its jobs are being closed.
    Ending(Goal),
}

#[derive(Debug)]
pub(crate) enum Goal {
    Fail(Cause),
    /// A prefill rank has another life: find it again.
    Relink,
}

/// Fetches by their number, which changes when one is announced anew.
#[derive(Debug)]
pub(crate) struct Fetches {
    open: BTreeMap<u64, Fetch>,
    by_transfer: BTreeMap<(RankLife, TransferId), u64>,
    attempts: Attempts,
    written: Written,
    /// How they ended, for daemons that ask.
    ended: Memory<u64, FetchState>,
}

impl Fetches {
    pub(crate) fn new(most: usize) -> Fetches {
        Fetches {
            open: BTreeMap::new(),
            by_transfer: BTreeMap::new(),
            attempts: Attempts::new(most),
            written: Written::default(),
            ended: Memory::new(most),
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.open.len()
    }

    /// Pages that open fetches write.
    pub(crate) fn pages_written(&self) -> usize {
        self.written.len()
    }

    /// Whether a lower attempt of the same rank's transfer is not settled yet.
    fn is_behind(&self, fetch: &Fetch) -> bool {
        let mut open = of_id(&self.by_transfer, fetch.rank, &fetch.transfer.id);
        open.any(|(other, _)| other.attempt < fetch.transfer.attempt)
    }

    pub(crate) fn remembered(&self) -> usize {
        self.ended.len() + self.attempts.len()
    }

    pub(crate) fn get(&self, number: u64) -> Option<&Fetch> {
        self.open.get(&number)
    }

    pub(crate) fn get_mut(&mut self, number: u64) -> Option<&mut Fetch> {
        self.open.get_mut(&number)
    }

    /// Whether the prefill rank's publish is final; true of what is not under way.
    pub(crate) fn knows_end(&self, number: u64, rank: u32) -> bool {
        let part = self.open.get(&number).and_then(|fetch| fetch.parts.get(&rank));
        part.is_none_or(|part| matches!(part.heard, Heard::Final { .. }))
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (u64, &Fetch)> {
        self.open.iter().map(|(number, fetch)| (*number, fetch))
    }

    pub(crate) fn count_of(&self, life: RankLife) -> usize {
        self.numbers_of(life).count()
    }

    pub(crate) fn any_of(&self, life: RankLife) -> bool {
        self.numbers_of(life).next().is_some()
    }

    fn numbers_of(&self, life: RankLife) -> impl Iterator<Item = u64> {
        let first = TransferId {
            id: String::new(),
            attempt: 0,
        };
        let range = self.by_transfer.range((life, first)..);
        range
            .take_while(move |((other, _), _)| *other == life)
            .map(|(_, number)| *number)
    }

    /// Where a copy within this daemon writes: a fetch under way that has no job yet for this rank.
    pub(crate) fn copies_to(&self, number: u64, rank: u32) -> Option<(Arc<PageLists>, Regions)> {
        let fetch = self.open.get(&number)?;
        let part = fetch.parts.get(&rank)?;
        let free = part.job.is_none() && !part.landed && matches!(fetch.stage, Stage::Moving);
        free.then(|| (fetch.pages.lists.clone(), fetch.regions.clone()))
    }

    pub(crate) fn set_job(&mut self, number: u64, rank: u32, job: JobId) {
        let part = self
            .open
            .get_mut(&number)
            .and_then(|fetch| fetch.parts.get_mut(&rank));
        if let Some(part) = part {
            part.job = Some(job);
        }
    }

    /// How a fetch stands, as its prefill ranks' daemons ask.
    pub(crate) fn state(&self, number: u64, now: Micros) -> FetchState {
        match self.open.get(&number) {
            Some(fetch) => match &fetch.stage {
                Stage::Behind | Stage::Linking | Stage::Moving => FetchState::Open {
                    landed: fetch.most,
                    moving: fetch.alive > 0 && now <= fetch.alive + ALIVE_FOR,
                },
                Stage::Ending(Goal::Fail(cause)) => FetchState::Failed(cause.clone()),
                Stage::Ending(Goal::Relink) => FetchState::Withdrawn,
            },
            None => self.ended.get(&number).cloned().unwrap_or(FetchState::Unknown),
        }
    }

    pub(crate) fn expire(&mut self, now: Micros) {
        self.attempts.expire(now);
        self.ended.expire(now);
    }

    pub(crate) fn next_expiry(&self) -> Option<Micros> {
        [self.attempts.next_expiry(), self.ended.next_expiry()]
            .into_iter()
            .flatten()
            .min()
    }
}

impl Broker {
    /// Sets the timer: the deadline, or the next question before it.
    pub(crate) fn watch_fetch(&mut self, number: u64) {
        let (now, interval, deadline) = (self.now, self.interval(), self.config.deadline_us);
        let Some(fetch) = self.fetches.get(number) else {
            return;
        };
        let due = fetch.stuck_at(deadline);
        let due = match fetch.stage {
            Stage::Behind | Stage::Linking => due,
            Stage::Moving => due.min(now + interval),
            Stage::Ending(_) => return self.timers.cancel(&Timer::Fetch(number)),
        };
        self.timers.set(Timer::Fetch(number), due);
    }

    pub(crate) fn fetch_due(&mut self, number: u64) {
        let (now, deadline) = (self.now, self.config.deadline_us);
        let Some(fetch) = self.fetches.get(number) else {
            return;
        };
        if fetch.stuck_at(deadline) > now {
            self.ask_parts(number);
            return self.watch_fetch(number);
        }
        let cause = match &fetch.waits {
            Some(cause) if matches!(fetch.stage, Stage::Linking) => cause.clone(),
            _ => self.stuck(),
        };
        self.fail_fetch(number, cause);
    }
}

impl Fetch {
    /// When its deadline comes, unless it goes on before.
    fn stuck_at(&self, deadline: Micros) -> Micros {
        stuck_at(self.progress, self.alive, deadline)
    }

    /// A step up to meeting the publish. Finding the ranks again and again must not go on for ever.
    pub(crate) fn went_on(&mut self, now: Micros) {
        if !self.anew {
            self.progress = now;
        }
    }

    /// That of the lowest rank that set any.
    fn metadata(&self) -> Vec<u8> {
        let set = self.parts.values().find_map(|part| match &part.heard {
            Heard::Final { metadata } => metadata.clone(),
            _ => None,
        });
        set.unwrap_or_default()
    }
}
