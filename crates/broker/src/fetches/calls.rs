//! The fetch call: what is checked before a fetch is accepted.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvferry_control::{Answer, Fault, Fetch as FetchCall, MAX_TRANSFER_ID, Side, TransferId};
use kvferry_handshake::{Code, TokenRange};

use crate::Broker;
use crate::faults;
use crate::fetches::{Fetch, Stage};
use crate::io::SessionId;
use crate::links::LinkKey;
use crate::ranks::RankLife;
use crate::reports::Tallies;
use crate::siblings::of_id;
use crate::source::parse_source;

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
                self.start_fetch(number);
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
        self.check_siblings(life, Side::Fetch, &call.transfer)
            .map_err(|cause| cause.told())?;
        self.check_room(life)?;
        let written = kvferry_plan::written_pages(&rank.envelope, rank.rank, call.tokens);
        let envelope = Arc::clone(&rank.envelope);
        self.fetches
            .written
            .check(life, &envelope, &call.transfer, &call.pages, &written)?;
        let pages = self.pages.take(call.pages)?;
        let writes = self
            .fetches
            .written
            .take(life, &envelope, &call.transfer, &pages.lists, written);
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
            writes,
            regions,
            tokens: call.tokens,
            least: call.least,
            stage: Stage::Behind,
            terms: None,
            parts: BTreeMap::new(),
            end: None,
            serial: 0,
            met: None,
            progress: self.now,
            alive: 0,
            most: 0,
            anew: false,
            called: self.now,
            told: self.now,
            waits: None,
            tallies: Tallies::default(),
            stood: None,
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
                format!("this rank has {open} open transfers; limits.transfers_per_rank is {most}"),
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

    /// Looks for the link, once no lower attempt writes any more.
    pub(super) fn start_fetch(&mut self, number: u64) {
        let Some(fetch) = self.fetches.get(number) else {
            return;
        };
        if !matches!(fetch.stage, Stage::Behind) || self.fetches.is_behind(fetch) {
            return;
        }
        if let Some(fetch) = self.fetches.get_mut(number) {
            fetch.stage = Stage::Linking;
        }
        self.find_link(number);
    }

    pub(super) fn find_link(&mut self, number: u64) {
        let Some(fetch) = self.fetches.get(number) else {
            return;
        };
        let (key, anew) = (fetch.link.clone(), fetch.anew);
        if let Some(rank) = self.ranks.get(fetch.rank) {
            let envelope = rank.envelope.clone();
            self.want_link(number, &key, &envelope, anew);
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
}
