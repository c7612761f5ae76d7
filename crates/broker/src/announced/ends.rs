//! How announced fetches end, at the prefill side.

use kvferry_control::Fault;
use kvferry_handshake::Code;

use crate::Broker;
use crate::announced::{PartKey, Stage};
use crate::cause::Cause;
use crate::faults;
use crate::io::{Micros, PeerAddress, Tally};
use crate::jobs::Job;
use crate::peer::{Body, PartState};
use crate::ranks::RankLife;
use crate::timers::Timer;

/// How long a send job whose fetch was delivered waits for its last acknowledgements.
const ACKNOWLEDGED_WITHIN: Micros = 1_000_000;

impl Broker {
    /// The decode rank has everything. It can say so only of a final publish.
    pub(super) fn part_delivered(&mut self, key: &PartKey) {
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
                self.fail_part(key, cause.into());
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
        self.end_part(key, Some(&cause.into()));
    }

    /// The decode side failed; it knows.
    pub(super) fn fetch_failed_there(&mut self, key: &PartKey, cause: &Cause) {
        let Some(part) = self.announced.get(key) else {
            return;
        };
        let (publish_key, decode) = (part.publish_key(key), part.decode.clone());
        match part.stage {
            Stage::Ended => {}
            Stage::Waiting => {
                self.end_part(key, Some(cause));
                let until = self.forgone_until();
                self.forgone.put(&publish_key, decode, Some(cause), until);
            }
            Stage::Bound => {
                let stands = self.publish_at(&publish_key);
                self.end_part(key, Some(cause));
                self.fail_serving(&publish_key, &decode, cause, Some(key), stands);
            }
        }
    }

    /// It fails on this side: tells the decode side.
    pub(crate) fn part_failed_here(&mut self, key: &PartKey, cause: &Cause) {
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
            moving: false,
            state: PartState::Failed(cause.clone()),
        };
        self.say(&key.peer, key.incarnation, body);
        self.end_part(key, Some(cause));
    }

    /// Ends a part: at once, or when its job is closed.
    fn end_part(&mut self, key: &PartKey, cause: Option<&Cause>) {
        let until = self.remember_until();
        self.announced.stop_waiting(key);
        let Some(part) = self.announced.get_mut(key) else {
            return;
        };
        part.stage = Stage::Ended;
        let job = part.job;
        if let Some(cause) = cause {
            self.announced.ended.put(key.clone(), cause.remembered(), until);
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
    pub(crate) fn end_announced_to(&mut self, life: RankLife, cause: &Cause) {
        for key in self.announced.keys(|key, _| key.life == life) {
            self.part_failed_here(&key, cause);
        }
    }

    pub(crate) fn end_all_announced(&mut self) {
        for key in self.announced.keys(|_, _| true) {
            self.part_failed_here(&key, &faults::shutting_down().into());
        }
    }

    /// A daemon whose ranks fetch is gone, and its fetches with it.
    pub(crate) fn lose_fetchers(&mut self, peer: &PeerAddress, cause: &Fault) {
        let cause = Cause::from(faults::from_peer(cause.clone(), &peer.0));
        for key in self
            .announced
            .keys(|key, part| key.peer == *peer && part.stage != Stage::Ended)
        {
            let Some(part) = self.announced.get(&key) else {
                continue;
            };
            let (publish_key, decode, stage) = (part.publish_key(&key), part.decode.clone(), part.stage);
            let stands = self.publish_at(&publish_key);
            self.end_part(&key, Some(&cause));
            if stage == Stage::Bound {
                self.fail_serving(&publish_key, &decode, &cause, Some(&key), stands);
            } else {
                let until = self.forgone_until();
                self.forgone.put(&publish_key, decode, Some(&cause), until);
            }
        }
    }
}
