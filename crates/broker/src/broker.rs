//! The machine's parts, and how what happens reaches them.

use std::collections::{BTreeMap, VecDeque};

use kvferry_control::{Answer, EngineStatus, Event, Fault};

use crate::announced::Announced;
use crate::config::Config;
use crate::fetches::Fetches;
use crate::io::{DataCommand, Input, Micros, Output, PeerAddress, SessionId};
use crate::jobs::Jobs;
use crate::judged::Judgements;
use crate::leases::Forgone;
use crate::links::Links;
use crate::pages::PageBudget;
use crate::peer::{Body, PeerMessage};
use crate::publishes::Publishes;
use crate::ranks::Ranks;
use crate::seats::Directory;
use crate::siblings::EngineEnds;
use crate::standing::Troubles;
use crate::timers::{Timer, Timers};

/// The state machine.
#[derive(Debug)]
pub struct Broker {
    pub(crate) config: Config,
    pub(crate) now: Micros,
    /// Numbers for ranks' lives, generations, jobs and fetches; none is used twice.
    next_number: u64,
    pub(crate) shutting_down: bool,
    outputs: VecDeque<Output>,
    pub(crate) timers: Timers,
    /// A peer that is being given up: nothing is said to it, for that would call it back.
    pub(crate) given_up: Option<PeerAddress>,
    /// Lives of the peers that are up.
    pub(crate) peers: BTreeMap<PeerAddress, u64>,
    pub(crate) pages: PageBudget,
    pub(crate) ranks: Ranks,
    pub(crate) directory: Directory,
    pub(crate) links: Links,
    pub(crate) judgements: Judgements,
    pub(crate) fetches: Fetches,
    pub(crate) publishes: Publishes,
    pub(crate) announced: Announced,
    pub(crate) jobs: Jobs,
    pub(crate) forgone: Forgone,
    pub(crate) engine_ends: EngineEnds,
    pub(crate) troubles: Troubles,
}

impl Broker {
    /// A broker with nothing attached.
    pub fn new(config: Config) -> Broker {
        let limits = config.limits.clone();
        Broker {
            now: 0,
            // What is left on the way for an earlier life of this daemon must not meet a number of this one.
            next_number: (config.incarnation & 0x7fff_ffff) << 32,
            shutting_down: false,
            outputs: VecDeque::new(),
            timers: Timers::default(),
            given_up: None,
            peers: BTreeMap::new(),
            pages: PageBudget::new(limits.pages, limits.pages_per_transfer),
            ranks: Ranks::default(),
            directory: Directory::default(),
            links: Links::default(),
            judgements: Judgements::new(limits.links),
            fetches: Fetches::new(limits.ended),
            publishes: Publishes::new(limits.ended),
            announced: Announced::new(limits.ended),
            jobs: Jobs::default(),
            forgone: Forgone::new(limits.declines),
            engine_ends: EngineEnds::new(limits.ended),
            troubles: Troubles::default(),
            config,
        }
    }

    /// Takes what happened at `now`.
    pub fn handle(&mut self, now: Micros, input: Input) {
        self.now = self.now.max(now);
        match input {
            Input::Call {
                session,
                number,
                call,
            } => self.call(session, number, call),
            Input::Attach {
                session,
                number,
                envelope,
                rank,
                home,
            } => self.attach(session, number, envelope, rank, home),
            Input::Registered {
                session,
                number,
                region,
                key,
                len,
                paths,
            } => self.registered(session, number, region, key, len, paths),
            Input::Disconnected { session } => self.disconnected(session),
            Input::PeerUp { peer, incarnation } => self.peer_up(peer, incarnation),
            Input::Peer {
                peer,
                incarnation,
                message,
            } => self.peer_said(peer, incarnation, message),
            Input::PeerDown { peer, cause } => self.peer_down(&peer, cause),
            Input::Data(event) => self.data_event(event),
            Input::Shutdown => self.shut_down(),
        }
        self.watch_memories();
    }

    /// Lets time pass.
    pub fn tick(&mut self, now: Micros) {
        self.now = self.now.max(now);
        while let Some(timer) = self.timers.pop(self.now) {
            match timer {
                Timer::Rank(life) => self.rank_due(life),
                Timer::Seats(name) => self.seats_due(&name),
                Timer::Link(key) => self.link_due(&key),
                Timer::Fetch(number) => self.fetch_due(number),
                Timer::FetchNews(number) => self.tell_fetch_progress(number),
                Timer::Publish(key) => self.publish_due(&key),
                Timer::PublishNews(key) => self.tell_publish_progress(&key),
                Timer::Part(key) => self.part_due(&key),
                Timer::Memories => self.forget(),
            }
        }
        self.watch_memories();
    }

    /// The next thing to do, until `None`.
    pub fn poll(&mut self) -> Option<Output> {
        self.outputs.pop_front()
    }

    /// When [`Broker::tick`] is due next.
    pub fn next_deadline(&self) -> Option<Micros> {
        self.timers.next()
    }

    /// Whether nothing is under way: after [`Input::Shutdown`], when the daemon may end.
    pub fn is_idle(&self) -> bool {
        self.outputs.is_empty()
            && self.fetches.is_empty()
            && self.publishes.is_empty()
            && self.announced.is_empty()
            && self.jobs.is_empty()
    }

    /// Everything that must return to where it was: (name, count).
    pub fn counts(&self) -> Vec<(String, u64)> {
        crate::status::counts(self)
    }

    /// Memories of what ended, so that repeats are refused and late questions answered: (name, count). They
    /// are bounded ([`crate::Limits`]) and go with time.
    pub fn remembered(&self) -> Vec<(String, u64)> {
        crate::status::remembered(self)
    }

    /// The engines attached here.
    pub fn engines(&self) -> Vec<EngineStatus> {
        crate::status::engines(self)
    }

    pub(crate) fn number(&mut self) -> u64 {
        self.next_number += 1;
        self.next_number
    }

    pub(crate) fn emit(&mut self, output: Output) {
        self.outputs.push_back(output);
    }

    pub(crate) fn data(&mut self, command: DataCommand) {
        self.emit(Output::Data(command));
    }

    pub(crate) fn answer(&mut self, session: SessionId, number: u64, answer: Result<Answer, Fault>) {
        self.emit(Output::Answer {
            session,
            number,
            answer,
        });
    }

    pub(crate) fn event(&mut self, session: SessionId, event: Event) {
        self.emit(Output::Event { session, event });
    }

    /// Says something about life `to` of the peer; 0 for any.
    pub(crate) fn say(&mut self, peer: &PeerAddress, to: u64, mut body: Body) {
        if self.given_up.as_ref() == Some(peer) {
            return;
        }
        body.clamp();
        self.emit(Output::Send {
            peer: peer.clone(),
            message: PeerMessage { to, body },
        });
    }

    pub(crate) fn own(&self) -> &PeerAddress {
        &self.config.address
    }

    pub(crate) fn is_own(&self, peer: &PeerAddress) -> bool {
        *peer == self.config.address
    }

    /// How long to wait before asking again: several times within a deadline.
    pub(crate) fn interval(&self) -> Micros {
        (self.config.deadline_us / 8).max(1)
    }

    /// How long ended transfers are remembered: longer than anyone asks about them.
    pub(crate) fn remember_until(&self) -> Micros {
        self.now + self.config.deadline_us * 4
    }

    fn watch_memories(&mut self) {
        let due = [
            self.fetches.next_expiry(),
            self.publishes.next_expiry(),
            self.announced.next_expiry(),
            self.forgone.next_expiry(),
            self.engine_ends.next_expiry(),
            self.judgements.next_expiry(),
        ];
        if let Some(at) = due.into_iter().flatten().min() {
            self.timers.hasten(Timer::Memories, at);
        }
    }

    fn forget(&mut self) {
        let now = self.now;
        self.fetches.expire(now);
        self.publishes.expire(now);
        self.announced.expire(now);
        self.forgone.expire(now);
        self.engine_ends.expire(now);
        self.judgements.expire(now);
    }

    fn shut_down(&mut self) {
        self.shutting_down = true;
        self.refuse_joins();
        self.end_all_fetches();
        self.end_all_publishes();
        self.end_all_announced();
    }
}
