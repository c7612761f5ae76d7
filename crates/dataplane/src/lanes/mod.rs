//! The lanes to and from one peer: which are open, asked for, granted or in doubt. No threads and no clock inside.
//!
//! What must never happen is that a chunk comes through two lanes at once, the old one being only *believed*
//! dead. So what a broken lane had not been acknowledged is in doubt until the receiver says that its end is gone.
//! Messages may be lost, doubled, late: asks and epochs only grow, each side acts on the newest, and what is
//! due is asked for again.

mod incoming;
mod outgoing;

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use crate::line::Taken;
use crate::wake::Wake;
use crate::{Config, LaneMessage, Token};

/// Lanes that a peer may ask for, whatever its settings.
pub(crate) const MAX_LANES: u16 = 64;

/// The lanes to and from one peer.
#[derive(Debug, Default)]
pub(crate) struct Lanes {
    /// Where the peer is, while its channel is up.
    host: Option<IpAddr>,
    /// Since when it is known that the channel is not up.
    down_since: Option<Instant>,
    /// Counts the channel's lives.
    life: u64,
    outgoing: outgoing::Outgoing,
    incoming: incoming::Incoming,
    /// Since when, and why, no lane to the peer could be opened.
    pub(crate) failing: Option<(Instant, String)>,
}

/// A lane to open.
#[derive(Debug)]
pub(crate) struct Opening {
    pub(crate) life: u64,
    pub(crate) host: IpAddr,
}

/// How a sending end ended.
#[derive(Debug)]
pub(crate) struct SenderEnd {
    pub(crate) lane: u16,
    pub(crate) epoch: u64,
    pub(crate) unacked: Vec<Taken>,
    /// It was closed in order, with nothing unacknowledged.
    pub(crate) orderly: bool,
    /// At least one chunk landed through it.
    pub(crate) carried: bool,
}

/// What has to be done after something happened.
#[derive(Debug, Default)]
pub(crate) struct Due {
    pub(crate) messages: Vec<LaneMessage>,
    /// Chunks that nothing can land any more through the lane they were sent on: they are sent again.
    pub(crate) put_back: Vec<Taken>,
    /// A lane broke: it did not end in order, nor with the channel.
    pub(crate) broke: bool,
}

impl Due {
    fn tell(message: LaneMessage) -> Due {
        Due {
            messages: vec![message],
            ..Due::default()
        }
    }
}

impl Lanes {
    /// The channel is up. Gives the number of its life.
    pub(crate) fn up(&mut self, host: IpAddr) -> u64 {
        if self.host.is_none() {
            self.life += 1;
        }
        self.down_since = None;
        self.host = Some(host);
        self.life
    }

    /// The channel broke: all lanes end, and what is in doubt stays so.
    pub(crate) fn down(&mut self) {
        self.host = None;
        self.failing = None;
        self.outgoing.down();
        self.incoming.down();
    }

    /// Asks for lanes until `demand` of them are open or asked for.
    pub(crate) fn open(
        &mut self,
        now: Instant,
        config: &Config,
        demand: usize,
        fresh: impl FnMut() -> u64,
    ) -> Vec<LaneMessage> {
        match self.host {
            Some(_) => self.outgoing.open(now, config, demand, fresh),
            None => Vec::new(),
        }
    }

    /// Wakes the sending ends, so that they let go of what was closed.
    pub(crate) fn nudge_senders(&self) {
        self.outgoing.nudge();
    }

    /// Wakes the receiving ends, for the same.
    pub(crate) fn nudge_receivers(&self) {
        self.incoming.nudge();
    }

    /// A grant came. If it is the one that is awaited, the lane is to be connected.
    pub(crate) fn granted(&mut self, lane: u16, ask: u64, epoch: u64, wake: &Arc<Wake>) -> Option<Opening> {
        let (host, life) = (self.host?, self.life);
        self.outgoing
            .granted(lane, ask, epoch, wake)
            .then_some(Opening { life, host })
    }

    /// The peer's data port took the token of a lane: it can be reached.
    pub(crate) fn sender_proven(&mut self, epoch: u64) {
        self.outgoing.proven(epoch);
        self.failing = None;
    }

    /// A lane could not be opened. As long as others carry, that costs no more than this lane.
    pub(crate) fn opening_failed(&mut self, now: Instant, why: impl FnOnce() -> String) {
        if !self.outgoing.is_carrying() {
            self.failing.get_or_insert_with(|| (now, why()));
        }
    }

    /// A sending end ended.
    pub(crate) fn sender_ended(&mut self, now: Instant, config: &Config, end: SenderEnd) -> Due {
        self.outgoing.ended(now, config, end)
    }

    /// The receiver's end of a lane is gone.
    pub(crate) fn gone(&mut self, now: Instant, lane: u16, epoch: u64) -> Due {
        self.outgoing.gone(now, lane, epoch)
    }

    /// The peer asks for a lane. `fresh` makes an epoch and a token.
    pub(crate) fn wanted(
        &mut self,
        now: Instant,
        config: &Config,
        lane: u16,
        ask: u64,
        port: u16,
        fresh: impl FnOnce() -> Option<(u64, Token)>,
    ) -> Due {
        match self.host {
            Some(_) => self.incoming.wanted(now, config, lane, ask, port, fresh),
            None => Due::default(),
        }
    }

    /// The peer's end of a lane broke.
    pub(crate) fn lost(&mut self, lane: u16, epoch: u64) -> Due {
        self.incoming.lost(lane, epoch)
    }

    /// Whether this life of a lane is granted, and its token was not shown.
    pub(crate) fn has_granted(&self, epoch: u64) -> bool {
        self.incoming.has_granted(epoch)
    }

    /// A connection showed a token: if it was granted, its lane opens, and the token is used up.
    pub(crate) fn proven(
        &mut self,
        now: Instant,
        epoch: u64,
        token: &Token,
        wake: &Arc<Wake>,
    ) -> Option<u16> {
        self.incoming.proven(now, epoch, token, wake)
    }

    /// A receiving end is gone: nothing lands through it any more.
    pub(crate) fn receiver_ended(
        &mut self,
        now: Instant,
        config: &Config,
        lane: u16,
        epoch: u64,
        port: u16,
        fresh: impl FnOnce() -> Option<(u64, Token)>,
    ) -> Due {
        // A new life of the channel has not been asked anything by this end.
        let mut due = self.incoming.ended(now, config, lane, epoch, port, fresh);
        if self.host.is_none() {
            due.messages.clear();
        }
        due
    }

    /// Since when it is known that the channel is not up.
    pub(crate) fn down_since(&self) -> Option<Instant> {
        self.down_since
    }

    /// Time passed: repeats what was not answered, forgets grants that nobody used. Gives when to come again.
    pub(crate) fn tick(&mut self, now: Instant, config: &Config) -> (Vec<LaneMessage>, Option<Instant>) {
        if self.host.is_none() {
            self.down_since.get_or_insert(now);
        }
        let mut next: Option<Instant> = None;
        let mut at = |when: Instant| next = Some(next.map_or(when, |next| next.min(when)));
        let messages = self.outgoing.tick(now, config, &mut at);
        self.incoming.tick(now, &mut at);
        (messages, next)
    }

    /// Open lanes out and in, grants not used, and chunks in doubt.
    pub(crate) fn count(&self) -> [usize; 4] {
        let ((out, in_doubt), (incoming, granted)) = (self.outgoing.count(), self.incoming.count());
        [out, incoming, granted, in_doubt]
    }
}

#[cfg(test)]
mod tests;
