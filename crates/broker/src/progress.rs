//! Bytes that moved: they keep transfers alive, and ranks are told a few times a second.

use kvferry_control::{Event, Side};

use crate::Broker;
use crate::announced::PartKey;
use crate::fetches::Stage;
use crate::io::{JobId, Micros, PeerAddress};
use crate::publishes::PublishKey;
use crate::timers::Timer;
use crate::wanted::Wanted;

/// Least time between two progress events of one transfer.
const PROGRESS_EVERY: Micros = 250_000;

/// What the data plane said to be alive is so for some while.
pub(crate) const ALIVE_FOR: Micros = 500_000;

/// What only moves inside its chunks, or waits its turn, is taken for alive for so many deadlines at most after the last
/// whole chunk: lanes that break again and again before a chunk is through must not keep a transfer for ever.
pub(crate) const DEADLINES_ALIVE: Micros = 32;

/// When something is stuck that last went forward at `progress` and was last known to be alive at `alive`.
pub(crate) fn stuck_at(progress: Micros, alive: Micros, deadline: Micros) -> Micros {
    let most = progress + deadline * DEADLINES_ALIVE;
    (progress.max(alive) + deadline).min(most)
}

impl Broker {
    /// Bytes of a fetch are under way, or it waits its turn.
    pub(crate) fn fetch_lives(&mut self, number: u64) {
        let now = self.now;
        if let Some(fetch) = self.fetches.get_mut(number) {
            fetch.alive = now;
        }
    }

    /// The prefill rank's daemon says that its part is alive: only it sees whether chunks are ready and wait their turn.
    pub(crate) fn part_moves_there(&mut self, peer: &PeerAddress, incarnation: u64, number: u64, rank: u32) {
        let part = self.fetches.get(number).and_then(|fetch| fetch.parts.get(&rank));
        let of = |part: &&Wanted| part.seat.peer == *peer && part.seat.incarnation == incarnation;
        if part.filter(of).is_some_and(|part| part.job.is_some()) {
            self.fetch_lives(number);
        }
    }

    /// The same of a part here.
    pub(crate) fn part_lives(&mut self, key: &PartKey) {
        let now = self.now;
        let Some(part) = self.announced.get_mut(key) else {
            return;
        };
        part.alive = Some(now);
        let (publish_key, decode) = (part.publish_key(key), part.decode.clone());
        if let Some(publish) = self.publishes.get_mut(&publish_key)
            && let Some(serving) = publish.servings.get_mut(&decode)
        {
            serving.alive = now;
        }
    }

    /// The decode side's daemon says how far the fetch is: bytes of other prefill ranks keep it going, too.
    pub(crate) fn fetch_moves_there(&mut self, key: &PartKey, landed: u64, moving: bool) {
        let now = self.now;
        let Some(part) = self.announced.get_mut(key) else {
            return;
        };
        part.heard = now;
        let more = landed > part.landed;
        part.landed = part.landed.max(landed);
        let (publish_key, decode) = (part.publish_key(key), part.decode.clone());
        let Some(publish) = self.publishes.get_mut(&publish_key) else {
            return;
        };
        if let Some(serving) = publish
            .servings
            .get_mut(&decode)
            .filter(|serving| serving.takes(key))
        {
            if more {
                serving.progress = now;
            }
            if moving {
                serving.alive = now;
            }
        }
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
        if bytes > part.bytes {
            part.moved = now;
        }
        part.bytes = bytes;
        let landed = fetch.parts.values().map(|part| part.bytes).sum();
        if bytes == 0 {
            // It began.
            fetch.went_on(now);
        } else if landed > fetch.most {
            fetch.most = landed;
            fetch.progress = now;
        }
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
            side: Side::Fetch,
            transfer: fetch.transfer.clone(),
            bytes: fetch.parts.values().map(|part| part.bytes).sum(),
            total: fetch.parts.values().map(|part| part.total).sum(),
        };
        if let Some(session) = self.fetch_session(number) {
            self.event(session, event);
        }
    }

    /// Bytes of one part left.
    pub(crate) fn part_moved(&mut self, key: &PartKey, job: JobId, bytes: u64) {
        let now = self.now;
        let Some(part) = self.announced.get_mut(key).filter(|part| part.job == Some(job)) else {
            return;
        };
        part.bytes = bytes;
        part.moved = now;
        let (publish_key, decode) = (part.publish_key(key), part.decode.clone());
        let Some(publish) = self.publishes.get_mut(&publish_key) else {
            return;
        };
        if let Some(serving) = publish.servings.get_mut(&decode) {
            serving.progress = now;
        }
        let due = publish.told + PROGRESS_EVERY;
        if now < due {
            // Held back, not dropped: nothing more may come for long.
            return self.timers.hasten(Timer::PublishNews(publish_key), due);
        }
        self.tell_publish_progress(&publish_key);
    }

    pub(crate) fn tell_publish_progress(&mut self, key: &PublishKey) {
        let now = self.now;
        let Some(publish) = self.publishes.get_mut(key) else {
            return;
        };
        publish.told = now;
        let mut event = (publish.tallies.bytes(), publish.tallies.bytes());
        for part in publish.parts.iter().filter_map(|key| self.announced.get(key)) {
            // Of closed jobs, the tallies know.
            if part.job.is_some() {
                event = (event.0 + part.bytes, event.1 + part.total);
            }
        }
        if let Some(session) = self.ranks.session(key.0) {
            self.event(
                session,
                Event::Progress {
                    side: Side::Publish,
                    transfer: key.1.clone(),
                    bytes: event.0,
                    total: event.1,
                },
            );
        }
    }
}
