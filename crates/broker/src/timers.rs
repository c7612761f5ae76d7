//! When to look at what: one due time a thing.

use std::collections::{BTreeMap, BTreeSet};

use crate::announced::PartKey;
use crate::io::Micros;
use crate::links::LinkKey;
use crate::publishes::PublishKey;
use crate::ranks::RankLife;

/// What a timer belongs to.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Timer {
    /// A rank's place at its home is asked for, or refreshed.
    Rank(RankLife),
    /// An engine's places, at its home.
    Seats(String),
    /// A link is asked for again, or dropped when idle.
    Link(LinkKey),
    /// A fetch by its number.
    Fetch(u64),
    /// A fetch's progress that was held back.
    FetchNews(u64),
    /// A publish.
    Publish(PublishKey),
    /// A publish's progress that was held back.
    PublishNews(PublishKey),
    /// A fetch that was announced to a rank here.
    Part(PartKey),
    /// Memories with a time limit.
    Memories,
}

/// At most one due time a thing; equal times in the order of the things.
#[derive(Debug, Default)]
pub(crate) struct Timers {
    due: BTreeMap<Timer, Micros>,
    queue: BTreeSet<(Micros, Timer)>,
}

impl Timers {
    pub(crate) fn set(&mut self, timer: Timer, at: Micros) {
        if let Some(old) = self.due.insert(timer.clone(), at) {
            if old == at {
                return;
            }
            self.queue.remove(&(old, timer.clone()));
        }
        self.queue.insert((at, timer));
    }

    /// Sets it only where it would ring earlier than it does.
    pub(crate) fn hasten(&mut self, timer: Timer, at: Micros) {
        if self.due.get(&timer).is_none_or(|due| at < *due) {
            self.set(timer, at);
        }
    }

    pub(crate) fn cancel(&mut self, timer: &Timer) {
        if let Some(at) = self.due.remove(timer) {
            self.queue.remove(&(at, timer.clone()));
        }
    }

    pub(crate) fn next(&self) -> Option<Micros> {
        self.queue.first().map(|(at, _)| *at)
    }

    pub(crate) fn pop(&mut self, now: Micros) -> Option<Timer> {
        if self.next()? > now {
            return None;
        }
        let (_, timer) = self.queue.pop_first()?;
        self.due.remove(&timer);
        Some(timer)
    }

    pub(crate) fn len(&self) -> usize {
        self.due.len()
    }
}
