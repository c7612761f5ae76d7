//! How fetches end: the prefill side is told, jobs are closed, and then the rank is.

use kvferry_control::{Event, Fault, Side, TransferId};

use crate::Broker;
use crate::cause::{Cause, Standing};
use crate::faults;
use crate::fetches::{Fetch, Goal, Stage};
use crate::io::{Output, Record, Tally};
use crate::jobs::Job;
use crate::peer::{Body, FetchState};
use crate::ranks::RankLife;
use crate::siblings::of_id;
use crate::timers::Timer;
use crate::wanted::Wanted;

impl Broker {
    pub(crate) fn fail_fetch(&mut self, number: u64, cause: impl Into<Cause>) {
        let Some((place, standing)) = self.fetch_at(number) else {
            return;
        };
        let Some(fetch) = self.fetches.get_mut(number) else {
            return;
        };
        let cause = cause.into().at(&place, Some(&standing));
        match &fetch.stage {
            Stage::Ending(Goal::Fail(_)) => return,
            // Its daemons were told that it is withdrawn.
            Stage::Ending(Goal::Relink) => {
                fetch.stood = Some(standing);
                fetch.stage = Stage::Ending(Goal::Fail(cause.clone()));
                let (life, transfer) = (fetch.rank, fetch.transfer.clone());
                return self.fail_siblings(life, Side::Fetch, &transfer, &cause);
            }
            Stage::Behind | Stage::Linking | Stage::Moving => {}
        }
        let (life, transfer) = (fetch.rank, fetch.transfer.clone());
        // First, for the rank may go with the last that ends.
        self.fail_siblings(life, Side::Fetch, &transfer, &cause);
        self.end_fetch(number, Goal::Fail(cause));
    }

    /// Tells the prefill ranks' daemons, and closes the jobs.
    pub(crate) fn end_fetch(&mut self, number: u64, goal: Goal) {
        let stood = self.fetch_at(number).map(|(_, standing)| standing);
        let Some(fetch) = self.fetches.get_mut(number) else {
            return;
        };
        if matches!(goal, Goal::Fail(_)) {
            fetch.stood = stood;
        }
        fetch.stage = Stage::Ending(goal);
        let (link, daemons) = (fetch.link.clone(), fetch.daemons());
        let jobs: Vec<_> = fetch.parts.values().filter_map(|part| part.job).collect();
        let state = self.fetches.state(number, self.now);
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
            Stage::Behind | Stage::Linking => {}
            Stage::Moving if fetch.parts.values().all(Wanted::is_done) => self.finish_fetch(number),
            Stage::Moving => {}
            // Its hold on pages covers those of lower attempts, which are not settled yet.
            Stage::Ending(_) if self.fetches.is_behind(fetch) => {}
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
            Stage::Behind | Stage::Linking | Stage::Moving => None,
        };
        let kept = cause.as_ref().map(Cause::remembered);
        let kept = kept.map_or(FetchState::Delivered, FetchState::Failed);
        self.fetches.ended.put(number, kept, until);
        self.fetches
            .by_transfer
            .remove(&(fetch.rank, fetch.transfer.clone()));
        self.fetches
            .written
            .release(fetch.rank, &fetch.pages.lists, &fetch.writes);
        self.fetches.attempts.put(fetch.rank, &fetch.transfer, until);
        if cause.is_none() {
            for (peer, incarnation) in fetch.daemons() {
                let body = Body::FetchState {
                    fetch: number,
                    state: FetchState::Delivered,
                };
                self.say(&peer, incarnation, body);
            }
        }
        let higher: Vec<u64> = of_id(&self.fetches.by_transfer, fetch.rank, &fetch.transfer.id)
            .map(|(_, number)| *number)
            .collect();
        self.report_fetch(fetch, cause);
        for number in higher {
            self.start_fetch(number);
            self.settle_fetch(number);
        }
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

    fn report_fetch(&mut self, fetch: Fetch, cause: Option<Cause>) {
        let report = fetch.tallies.report(fetch.called, fetch.met, self.now);
        let place = self.place(fetch.rank, Side::Fetch);
        let cause = cause.map(|cause| {
            let stood = Standing {
                bytes: fetch.tallies.bytes(),
                total: Some(fetch.total()),
                ..fetch.stood.clone().unwrap_or_default()
            };
            cause.told_to(&place, &stood)
        });
        let tokens = fetch.end.map_or(fetch.tokens.to, |end| end.min(fetch.tokens.to));
        let event = match &cause {
            None => Event::Delivered {
                side: Side::Fetch,
                transfer: fetch.transfer.clone(),
                tokens,
                metadata: fetch.metadata(),
                report: report.clone(),
            },
            Some(cause) => Event::Failed {
                side: Side::Fetch,
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
            side: Side::Fetch,
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
        job: &Job,
        tally: &Tally,
        complete: bool,
    ) {
        let Some(fetch) = self.fetches.get_mut(number) else {
            return;
        };
        fetch.tallies.add(&job.peer, job.path, tally);
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
    pub(crate) fn fetch_failed_elsewhere(&mut self, life: RankLife, transfer: &TransferId, cause: &Cause) {
        let Some(number) = self.fetches.by_transfer.get(&(life, transfer.clone())).copied() else {
            return;
        };
        let Some(fetch) = self.fetches.get(number) else {
            return;
        };
        match fetch.stage {
            Stage::Behind | Stage::Linking | Stage::Moving => {
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
