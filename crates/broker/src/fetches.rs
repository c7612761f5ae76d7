//! Fetches of the decode ranks attached here: from the call to the end.
//!
//! A fetch waits for its link, announces itself to every prefill rank, hears from each how far its publish
//! is, and ends when every rank's part is final and landed, or anything failed. It is reported once all
//! its jobs are closed: from then on no byte lands in its pages.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvferry_control::{Answer, Event, Fault, Fetch as FetchCall, MAX_TRANSFER_ID, TransferId};
use kvferry_handshake::{Code, PageLists, TokenRange};

use crate::Broker;
use crate::ended::Memory;
use crate::faults;
use crate::io::{JobId, Micros, Output, Record, SessionId};
use crate::links::{LinkKey, Terms};
use crate::pages::Held;
use crate::peer::{Body, FetchState, Side};
use crate::ranks::RankLife;
use crate::regions::Regions;
use crate::reports::{PROGRESS_EVERY, Tallies};
use crate::siblings::{Attempts, of_id};
use crate::source::parse_source;
use crate::timers::Timer;
use crate::wanted::{Heard, Wanted};

#[derive(Debug)]
pub(crate) struct Fetch {
    pub(crate) rank: RankLife,
    pub(crate) transfer: TransferId,
    pub(crate) link: LinkKey,
    pub(crate) pages: Held,
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
    /// Announced anew: what it went through before is no progress any more.
    anew: bool,
    called: Micros,
    told: Micros,
    /// Why the link is not there yet.
    waits: Option<Fault>,
    tallies: Tallies,
}

#[derive(Debug)]
pub(crate) enum Stage {
    /// Waits for its link.
    Linking,
    /// Announced.
    Moving,
    /// Its jobs are being closed.
    Ending(Goal),
}

#[derive(Debug)]
pub(crate) enum Goal {
    Fail(Fault),
    /// A prefill rank has another life: find it again.
    Relink,
}

/// Fetches by their number, which changes when one is announced anew.
#[derive(Debug)]
pub(crate) struct Fetches {
    open: BTreeMap<u64, Fetch>,
    by_transfer: BTreeMap<(RankLife, TransferId), u64>,
    attempts: Attempts,
    /// How they ended, for daemons that ask.
    ended: Memory<u64, FetchState>,
}

impl Fetches {
    pub(crate) fn new(most: usize) -> Fetches {
        Fetches {
            open: BTreeMap::new(),
            by_transfer: BTreeMap::new(),
            attempts: Attempts::new(most),
            ended: Memory::new(most),
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.open.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.open.len()
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
    pub(crate) fn state(&self, number: u64) -> FetchState {
        match self.open.get(&number) {
            Some(fetch) => match &fetch.stage {
                Stage::Linking | Stage::Moving => FetchState::Open,
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

/// Bounds on a transfer id.
pub(crate) fn check_id(transfer: &TransferId) -> Result<(), Fault> {
    let len = transfer.id.len();
    if len == 0 || len > MAX_TRANSFER_ID {
        return Err(Fault::new(
            Code::ProtocolViolation,
            format!("a transfer id of {len} bytes; it has 1 to {MAX_TRANSFER_ID}"),
        ));
    }
    Ok(())
}

impl Broker {
    pub(crate) fn fetch(&mut self, session: SessionId, call: u64, fetch: FetchCall) {
        match self.accept_fetch(session, fetch) {
            Ok(number) => {
                self.answer(session, call, Ok(Answer::Done));
                self.supersede_fetches(number);
                self.find_link(number);
            }
            Err(fault) => self.answer(session, call, Err(fault)),
        }
    }

    fn accept_fetch(&mut self, session: SessionId, call: FetchCall) -> Result<u64, Fault> {
        check_id(&call.transfer)?;
        let source = parse_source(&call.source)?;
        let (life, rank) = self.attached(session)?;
        let TokenRange { from, to } = call.tokens;
        if from > to || call.least < from || call.least > to {
            return Err(Fault::new(
                Code::TokensInvalid,
                format!(
                    "tokens from {from} to {to}, at least to {}: they must not descend",
                    call.least
                ),
            ));
        }
        self.pages.check(&call.pages)?;
        kvferry_plan::check_pages(&rank.envelope, rank.rank, &call.pages, to, true)
            .map_err(faults::from_plan)?;
        let regions = rank.check_generations(&call.generations)?;
        let Some(decode) = rank.engine.clone() else {
            return Err(Fault::new(Code::NotAttached, "attach first"));
        };
        let id = &call.transfer.id;
        let open = of_id(&self.fetches.by_transfer, life, id).map(|(transfer, _)| transfer.attempt);
        self.fetches.attempts.check(life, &call.transfer, open)?;
        self.check_siblings(life, Side::Fetch, &call.transfer)?;
        self.check_room(life)?;
        let pages = self.pages.take(call.pages)?;
        let number = self.number();
        self.fetches
            .by_transfer
            .insert((life, call.transfer.clone()), number);
        let fetch = Fetch {
            rank: life,
            transfer: call.transfer,
            link: LinkKey {
                decode,
                home: source.home,
                name: source.engine,
            },
            pages,
            regions,
            tokens: call.tokens,
            least: call.least,
            stage: Stage::Linking,
            terms: None,
            parts: BTreeMap::new(),
            end: None,
            serial: 0,
            met: None,
            progress: self.now,
            anew: false,
            called: self.now,
            told: self.now,
            waits: None,
            tallies: Tallies::default(),
        };
        self.fetches.open.insert(number, fetch);
        self.watch_fetch(number);
        Ok(number)
    }

    /// Bounds what one rank has open.
    pub(crate) fn check_room(&self, life: RankLife) -> Result<(), Fault> {
        let open = self.fetches.count_of(life) + self.publishes.count_of(life);
        let most = self.config.max_transfers_per_rank;
        if open >= most {
            return Err(Fault::new(
                Code::OverLimit,
                format!("this rank has {open} open transfers; max_transfers_per_rank is {most}"),
            ));
        }
        Ok(())
    }

    fn supersede_fetches(&mut self, number: u64) {
        let Some(fetch) = self.fetches.get(number) else {
            return;
        };
        let attempt = fetch.transfer.attempt;
        let older: Vec<u64> = of_id(&self.fetches.by_transfer, fetch.rank, &fetch.transfer.id)
            .filter(|(transfer, _)| transfer.attempt < attempt)
            .map(|(_, number)| *number)
            .collect();
        for number in older {
            let cause = Fault::new(Code::Superseded, format!("attempt {attempt} was fetched"));
            self.fail_fetch(number, cause);
        }
    }

    fn find_link(&mut self, number: u64) {
        let Some(fetch) = self.fetches.get(number) else {
            return;
        };
        let key = fetch.link.clone();
        if let Some(rank) = self.ranks.get(fetch.rank) {
            let envelope = rank.envelope.clone();
            self.want_link(number, &key, &envelope);
        }
    }

    /// Why a fetch still waits for its link; told when its deadline comes.
    pub(crate) fn fetch_waits_because(&mut self, number: u64, cause: &Fault) {
        if let Some(fetch) = self.fetches.get_mut(number) {
            fetch.waits = Some(cause.clone());
        }
    }

    pub(crate) fn fetch_session(&self, number: u64) -> Option<SessionId> {
        self.ranks.session(self.fetches.get(number)?.rank)
    }

    /// Sets the timer: the deadline, or the next question before it.
    pub(crate) fn watch_fetch(&mut self, number: u64) {
        let (now, interval, deadline) = (self.now, self.interval(), self.config.deadline_us);
        let Some(fetch) = self.fetches.get(number) else {
            return;
        };
        let due = fetch.progress + deadline;
        let due = match fetch.stage {
            Stage::Linking => due,
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
        if fetch.progress + deadline > now {
            self.ask_parts(number);
            return self.watch_fetch(number);
        }
        let seconds = deadline / 1_000_000;
        let cause = match &fetch.waits {
            Some(cause) if matches!(fetch.stage, Stage::Linking) => cause.clone(),
            _ => Fault::new(Code::Deadline, format!("nothing went forward for {seconds} s")),
        };
        self.fail_fetch(number, cause);
    }

    /// Bytes of one part landed.
    pub(crate) fn fetch_moved(&mut self, number: u64, rank: u32, bytes: u64) {
        let now = self.now;
        let Some(fetch) = self.fetches.get_mut(number) else {
            return;
        };
        let Some(part) = fetch.parts.get_mut(&rank) else {
            return;
        };
        part.bytes = bytes;
        fetch.progress = now;
        let due = fetch.told + PROGRESS_EVERY;
        if now < due {
            // Held back, not dropped: nothing more may come for long.
            return self.timers.hasten(Timer::FetchNews(number), due);
        }
        self.tell_fetch_progress(number);
    }

    pub(crate) fn tell_fetch_progress(&mut self, number: u64) {
        let now = self.now;
        let Some(fetch) = self.fetches.get_mut(number) else {
            return;
        };
        if matches!(fetch.stage, Stage::Ending(_)) {
            return;
        }
        fetch.told = now;
        let event = Event::Progress {
            transfer: fetch.transfer.clone(),
            bytes: fetch.parts.values().map(|part| part.bytes).sum(),
            total: fetch.parts.values().map(|part| part.total).sum(),
        };
        if let Some(session) = self.fetch_session(number) {
            self.event(session, event);
        }
    }

    pub(crate) fn fail_fetch(&mut self, number: u64, cause: Fault) {
        let Some(fetch) = self.fetches.get_mut(number) else {
            return;
        };
        let cause = match &fetch.stage {
            Stage::Ending(Goal::Fail(_)) => return,
            // Its daemons were told that it is withdrawn.
            Stage::Ending(Goal::Relink) => {
                fetch.stage = Stage::Ending(Goal::Fail(cause.clone()));
                let (life, transfer) = (fetch.rank, fetch.transfer.clone());
                return self.fail_siblings(life, Side::Fetch, &transfer, &cause);
            }
            Stage::Linking | Stage::Moving => faults::with(&cause, &fetch.standing()),
        };
        let (life, transfer) = (fetch.rank, fetch.transfer.clone());
        // First, for the rank may go with the last that ends.
        self.fail_siblings(life, Side::Fetch, &transfer, &cause);
        self.end_fetch(number, Goal::Fail(cause));
    }

    /// Tells the prefill ranks' daemons, and closes the jobs.
    pub(crate) fn end_fetch(&mut self, number: u64, goal: Goal) {
        let Some(fetch) = self.fetches.get_mut(number) else {
            return;
        };
        fetch.stage = Stage::Ending(goal);
        let (link, daemons) = (fetch.link.clone(), fetch.daemons());
        let jobs: Vec<_> = fetch.parts.values().filter_map(|part| part.job).collect();
        let state = self.fetches.state(number);
        for (peer, incarnation) in daemons {
            let body = Body::FetchState {
                fetch: number,
                state: state.clone(),
            };
            self.say(&peer, incarnation, body);
        }
        self.unwant_link(number, &link);
        self.timers.cancel(&Timer::Fetch(number));
        for job in jobs {
            self.close_job(job);
        }
        self.settle_fetch(number);
    }

    /// Ends the fetch if nothing of it is open any more.
    pub(crate) fn settle_fetch(&mut self, number: u64) {
        let Some(fetch) = self.fetches.get(number) else {
            return;
        };
        if fetch.parts.values().any(|part| part.job.is_some()) {
            return;
        }
        match &fetch.stage {
            Stage::Linking => {}
            Stage::Moving if fetch.parts.values().all(Wanted::is_done) => self.finish_fetch(number),
            Stage::Moving => {}
            Stage::Ending(_) => self.finish_fetch(number),
        }
    }

    fn finish_fetch(&mut self, number: u64) {
        let until = self.remember_until();
        let Some(mut fetch) = self.fetches.open.remove(&number) else {
            return;
        };
        self.timers.cancel(&Timer::Fetch(number));
        let cause = match std::mem::replace(&mut fetch.stage, Stage::Linking) {
            Stage::Ending(Goal::Relink) => {
                self.fetches.ended.put(number, FetchState::Withdrawn, until);
                return self.announce_anew(fetch);
            }
            Stage::Ending(Goal::Fail(cause)) => Some(cause),
            Stage::Linking | Stage::Moving => None,
        };
        let state = cause.clone().map_or(FetchState::Delivered, FetchState::Failed);
        self.fetches.ended.put(number, state.clone(), until);
        self.fetches
            .by_transfer
            .remove(&(fetch.rank, fetch.transfer.clone()));
        self.fetches.attempts.put(fetch.rank, &fetch.transfer, until);
        if cause.is_none() {
            for (peer, incarnation) in fetch.daemons() {
                let body = Body::FetchState {
                    fetch: number,
                    state: state.clone(),
                };
                self.say(&peer, incarnation, body);
            }
        }
        self.report_fetch(fetch, cause);
    }

    /// Starts over under another number, for the prefill side may still speak of the old one.
    fn announce_anew(&mut self, mut fetch: Fetch) {
        let number = self.number();
        fetch.anew = true;
        fetch.parts.clear();
        fetch.terms = None;
        fetch.end = None;
        self.fetches
            .by_transfer
            .insert((fetch.rank, fetch.transfer.clone()), number);
        self.fetches.open.insert(number, fetch);
        self.watch_fetch(number);
        self.find_link(number);
    }

    fn report_fetch(&mut self, fetch: Fetch, cause: Option<Fault>) {
        let report = fetch.tallies.report(fetch.called, fetch.met, self.now);
        let tokens = fetch.end.map_or(fetch.tokens.to, |end| end.min(fetch.tokens.to));
        let event = match &cause {
            None => Event::Delivered {
                transfer: fetch.transfer.clone(),
                tokens,
                metadata: fetch.metadata(),
                report: report.clone(),
            },
            Some(cause) => Event::Failed {
                transfer: fetch.transfer.clone(),
                cause: cause.clone(),
                report: report.clone(),
            },
        };
        if let Some(session) = self.ranks.session(fetch.rank) {
            self.event(session, event);
        }
        let rank = self.ranks.get(fetch.rank).map_or(0, |rank| rank.rank);
        self.emit(Output::Record(Record {
            transfer: fetch.transfer,
            engine: fetch.link.decode.name,
            rank,
            side: "fetch",
            peer_engine: fetch.link.name,
            tokens,
            report,
            cause,
        }));
        self.settle_rank(fetch.rank);
    }

    pub(crate) fn fetch_job_closed(
        &mut self,
        number: u64,
        rank: u32,
        job: &crate::jobs::Job,
        tally: &crate::io::Tally,
        complete: bool,
    ) {
        let now = self.now;
        let Some(fetch) = self.fetches.get_mut(number) else {
            return;
        };
        fetch.tallies.add(&job.peer, job.path, tally);
        fetch.progress = now;
        if let Some(part) = fetch.parts.get_mut(&rank) {
            part.job = None;
            part.landed = complete;
            part.bytes = part.bytes.max(tally.bytes);
        }
        self.settle_fetch(number);
    }

    pub(crate) fn abort_fetch(&mut self, life: RankLife, transfer: &TransferId, cause: &Fault) -> bool {
        let Some(number) = self.fetches.by_transfer.get(&(life, transfer.clone())).copied() else {
            return false;
        };
        self.fail_fetch(number, cause.clone());
        true
    }

    /// Another rank of the engine failed; it tells the daemons it knows, this one those that it knows.
    pub(crate) fn fetch_failed_elsewhere(&mut self, life: RankLife, transfer: &TransferId, cause: &Fault) {
        let Some(number) = self.fetches.by_transfer.get(&(life, transfer.clone())).copied() else {
            return;
        };
        let Some(fetch) = self.fetches.get(number) else {
            return;
        };
        match fetch.stage {
            Stage::Linking | Stage::Moving => {
                self.end_fetch(number, Goal::Fail(cause.clone()));
            }
            Stage::Ending(_) => self.fail_fetch(number, cause.clone()),
        }
    }

    pub(crate) fn end_fetches_of(&mut self, life: RankLife, cause: &Fault) {
        let numbers: Vec<u64> = self.fetches.numbers_of(life).collect();
        for number in numbers {
            self.fail_fetch(number, cause.clone());
        }
    }

    pub(crate) fn end_all_fetches(&mut self) {
        let numbers: Vec<u64> = self.fetches.open.keys().copied().collect();
        for number in numbers {
            self.fail_fetch(number, faults::shutting_down());
        }
    }
}

impl Fetch {
    /// A step before the publish is met. Finding the ranks again and again must not go on for ever.
    pub(crate) fn went_on(&mut self, now: Micros) {
        if !self.anew {
            self.progress = now;
        }
    }

    /// Phase, peer and bytes done, for causes.
    pub(crate) fn standing(&self) -> String {
        let at = |ranks: &[(u32, &Wanted)]| {
            let names: Vec<String> = ranks
                .iter()
                .take(8)
                .map(|(rank, part)| format!("{rank} at {}", part.seat.peer.0))
                .collect();
            let more = if ranks.len() > 8 { ", ..." } else { "" };
            format!("{}{more}", names.join(", "))
        };
        let parts = |heard: fn(&Heard) -> bool| -> Vec<(u32, &Wanted)> {
            let parts = self.parts.iter().filter(|(_, part)| heard(&part.heard));
            parts.map(|(rank, part)| (*rank, part)).collect()
        };
        let (silent, unpublished, unfinished) = (
            parts(|heard| matches!(heard, Heard::Nothing)),
            parts(|heard| matches!(heard, Heard::Waiting)),
            parts(|heard| matches!(heard, Heard::Ready(_))),
        );
        let phase = if matches!(self.stage, Stage::Linking) {
            format!(
                "waiting for the link with {} at {}",
                self.link.name, self.link.home.0
            )
        } else if !silent.is_empty() {
            format!("waiting for an answer of prefill rank {}", at(&silent))
        } else if !unpublished.is_empty() {
            format!("waiting for the publish of prefill rank {}", at(&unpublished))
        } else if !unfinished.is_empty() {
            format!(
                "waiting for the final publish of prefill rank {}",
                at(&unfinished)
            )
        } else {
            let moving: Vec<_> = self.parts.iter().filter(|(_, part)| !part.is_done()).collect();
            let moving: Vec<_> = moving.into_iter().map(|(rank, part)| (*rank, part)).collect();
            format!("moving from prefill rank {}", at(&moving))
        };
        let done: u64 = self.parts.values().map(|part| part.bytes).sum();
        let total: u64 = self.parts.values().map(|part| part.total).sum();
        format!("fetch, {phase}; {done} of {total} bytes done")
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
