//! The one task that owns the broker: gives it what happens, and carries out what it wants.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use std::time::Instant;

use kvferry_broker::{
    Broker, DataEvent, Input, Micros, Output, PeerAddress, PeerMessage, RegionKey, SessionId, Stated,
};
use kvferry_control::{Answer, Call, Event, Fault, Status};
use kvferry_dataplane::{DataPlane, LaneTrouble};
use kvferry_handshake::Code;
use tokio::sync::{mpsc, oneshot};

use crate::drain::{Drain, shutting_down};
use crate::engines::{Reception, Seat, SessionEvent};
use crate::metrics::Metrics;
use crate::outbox::Parcel;
use crate::peers::{self, Change, PeerEvent, PeerFrame, PeerSet, Shared};
use crate::{jobs, record};

/// What others in the daemon want of the driver.
#[derive(Debug)]
pub(crate) enum Question {
    /// What the daemon is doing.
    Status(oneshot::Sender<Status>),
    /// Whether it takes new work.
    Working(oneshot::Sender<bool>),
    /// End in order.
    Drain(Drain),
    /// End in order, without more time for what is open.
    Hurry,
}

/// Where everything that happens comes from.
#[derive(Debug)]
pub(crate) struct Sources {
    pub(crate) sessions: mpsc::Receiver<SessionEvent>,
    pub(crate) peers: mpsc::Receiver<PeerEvent>,
    /// Unbounded, since the data plane must not wait; it reports each job a few times a second at most.
    pub(crate) data: mpsc::UnboundedReceiver<kvferry_dataplane::Event>,
    pub(crate) questions: mpsc::Receiver<Question>,
}

/// The driver's state.
#[derive(Debug)]
pub(crate) struct Driver {
    broker: Broker,
    plane: DataPlane,
    pub(crate) peers: PeerSet,
    neighbourhood: Shared,
    pub(crate) reception: Arc<Reception>,
    metrics: Arc<Metrics>,
    own: PeerAddress,
    started: Instant,
    pub(crate) seats: HashMap<SessionId, Seated>,
    /// Whose regions those are.
    owners: HashMap<RegionKey, SessionId>,
    /// What the broker said to itself.
    loopback: VecDeque<PeerMessage>,
    drain: Option<Drain>,
}

/// An attach that is not answered.
#[derive(Debug)]
struct Attaching {
    number: u64,
    /// What as, for the log.
    name: String,
    /// Dropped when it is answered.
    _answered: oneshot::Sender<()>,
}

/// A session as the driver sees it.
#[derive(Debug)]
pub(crate) struct Seated {
    pub(crate) seat: Arc<Seat>,
    /// The open call by which it attaches.
    attaching: Option<Attaching>,
    /// What it is attached as, for the log.
    attached_as: Option<String>,
    keys: HashSet<RegionKey>,
    /// The connection ended: to be told when no byte of its memory moves any more.
    fenced: Option<oneshot::Sender<()>>,
}

impl Driver {
    pub(crate) fn new(
        broker: Broker,
        peers: PeerSet,
        neighbourhood: Shared,
        reception: Arc<Reception>,
        metrics: Arc<Metrics>,
    ) -> Driver {
        Driver {
            broker,
            plane: reception.plane.clone(),
            peers,
            own: PeerAddress(neighbourhood.address.to_string().into()),
            neighbourhood,
            reception,
            metrics,
            started: Instant::now(),
            seats: HashMap::new(),
            owners: HashMap::new(),
            loopback: VecDeque::new(),
            drain: None,
        }
    }

    /// Runs until a drain is done.
    pub(crate) async fn run(mut self, mut sources: Sources) {
        loop {
            let due = self.broker.next_deadline();
            let due = due.map(|at| self.started + std::time::Duration::from_micros(at));
            let drain_due = self.drain.as_ref().map(Drain::look_again);
            tokio::select! {
                Some(event) = sources.sessions.recv() => self.session(event),
                Some(event) = sources.peers.recv() => self.peer(event),
                Some(event) = sources.data.recv() => self.data(event),
                Some(question) = sources.questions.recv() => self.question(question),
                () = until(due) => self.broker.tick(self.now()),
                () = until(drain_due) => {}
            }
            self.settle();
            if let Some(drain) = self.drain.take() {
                self.drain = drain.advance(&mut self);
                if self.drain.is_none() {
                    return;
                }
                self.settle();
            }
        }
    }

    fn now(&self) -> Micros {
        u64::try_from(self.started.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    pub(crate) fn handle(&mut self, input: Input) {
        self.broker.handle(self.now(), input);
    }

    /// Publishes and fetches that are open here.
    pub(crate) fn open_transfers(&self) -> u64 {
        self.broker
            .engines()
            .iter()
            .map(|engine| engine.publishes + engine.fetches)
            .sum()
    }

    fn session(&mut self, event: SessionEvent) {
        match event {
            SessionEvent::Opened { seat } => {
                let seated = Seated {
                    seat: Arc::clone(&seat),
                    attaching: None,
                    attached_as: None,
                    keys: HashSet::new(),
                    fenced: None,
                };
                self.seats.insert(seat.session, seated);
            }
            SessionEvent::Call {
                session,
                number,
                call,
            } => self.call(session, number, call),
            SessionEvent::Attach {
                session,
                number,
                envelope,
                rank,
                home,
                answered,
            } => self.attach(session, number, envelope, rank, home, answered),
            SessionEvent::Registering {
                session,
                region,
                len,
                answer,
            } => drop(answer.send(self.broker.check_region(session, region, len))),
            SessionEvent::Registered {
                session,
                number,
                region,
                key,
                len,
                paths,
            } => {
                if let Some(seated) = self.seats.get_mut(&session) {
                    seated.keys.insert(key);
                    self.owners.insert(key, session);
                }
                self.handle(Input::Registered {
                    session,
                    number,
                    region,
                    key,
                    len,
                    paths,
                });
            }
            SessionEvent::Ended {
                session,
                cause,
                fenced,
            } => {
                if let Some(seated) = self.seats.get_mut(&session) {
                    if let Some(name) = &seated.attached_as {
                        tracing::info!(rank = %name, %cause, "detached");
                    }
                    seated.seat.set_attached(false);
                    seated.fenced = Some(fenced);
                }
                self.handle(Input::Disconnected { session });
                self.settle();
                self.unseat(session);
            }
        }
    }

    fn call(&mut self, session: SessionId, number: u64, call: Call) {
        if !self.seats.contains_key(&session) {
            return;
        }
        match &call {
            Call::Status => {
                let status = Box::new(self.status());
                if let Some(seated) = self.seats.get(&session) {
                    seated.seat.answer(number, Ok(Answer::Status(status)));
                }
                return;
            }
            Call::Fetch(_) if self.drain.is_some() => return self.refuse_draining(session, number),
            _ => {}
        }
        self.handle(Input::Call {
            session,
            number,
            call,
        });
    }

    fn attach(
        &mut self,
        session: SessionId,
        number: u64,
        envelope: Stated,
        rank: u32,
        home: Option<String>,
        answered: oneshot::Sender<()>,
    ) {
        if self.drain.is_some() {
            return self.refuse_draining(session, number);
        }
        if let Some(seated) = self.seats.get_mut(&session) {
            let engine: String = envelope.identity.engine.chars().take(256).collect();
            let engine = record::printable(&engine);
            seated.attaching = Some(Attaching {
                number,
                name: format!("{engine}/{rank}"),
                _answered: answered,
            });
            self.handle(Input::Attach {
                session,
                number,
                envelope,
                rank,
                home,
            });
        }
    }

    fn refuse_draining(&mut self, session: SessionId, number: u64) {
        self.metrics.refused(Code::Shutdown);
        if let Some(seated) = self.seats.get(&session) {
            seated.seat.answer(number, Err(shutting_down()));
        }
    }

    fn peer(&mut self, event: PeerEvent) {
        let now = Instant::now();
        let changes = match event {
            PeerEvent::DialReady { peer, dial, go } => {
                // Nobody waits where the task was ended.
                let _ = go.send(self.peers.may_greet(&peer, dial));
                Vec::new()
            }
            PeerEvent::Dialled {
                peer,
                dial,
                arrival,
                ticket,
            } => {
                let (issued, changes) = self.peers.dialled(&peer, dial, arrival);
                let _ = ticket.send(issued);
                changes
            }
            PeerEvent::DialFailed { peer, dial, cause } => self.peers.dial_failed(now, &peer, dial, cause),
            PeerEvent::Called {
                peer,
                arrival,
                decision,
            } => {
                let (decided, changes) = self.peers.called(now, &peer, arrival);
                let _ = decision.send(decided);
                changes
            }
            PeerEvent::Frame { channel, frame } => {
                if let Some((peer, incarnation)) = self.peers.speaker(channel) {
                    match frame {
                        PeerFrame::Broker(message) => self.handle(Input::Peer {
                            peer,
                            incarnation,
                            message: *message,
                        }),
                        PeerFrame::Lane(message) => self.plane.peer_message(&peer.0, message),
                        PeerFrame::Alive => {}
                    }
                }
                Vec::new()
            }
            PeerEvent::Down { channel, cause } => self.peers.down(now, channel, cause),
        };
        self.apply(changes);
    }

    fn apply(&mut self, changes: Vec<Change>) {
        for change in changes {
            match change {
                Change::Dial { peer, dial, after } => {
                    let shared = Arc::clone(&self.neighbourhood);
                    tokio::spawn(peers::dial(shared, peer, dial, after));
                }
                Change::Up { peer, arrival } => {
                    tracing::info!(peer = %peer.0, incarnation = arrival.incarnation, data_host = %arrival.data_host, "peer up");
                    self.plane.peer_up(&peer.0, arrival.data_host);
                    let incarnation = arrival.incarnation;
                    self.handle(Input::PeerUp { peer, incarnation });
                }
                Change::Down { peer, cause } => {
                    tracing::warn!(peer = %peer.0, %cause, "peer down");
                    self.plane.peer_down(&peer.0);
                    self.handle(Input::PeerDown { peer, cause });
                }
            }
        }
    }

    fn data(&mut self, event: kvferry_dataplane::Event) {
        match jobs::report(event) {
            jobs::Report::ToBroker(event) => self.handle(Input::Data(event)),
            jobs::Report::Trouble(peer, kind, what) => {
                let named = peer.as_ref().map(|peer| tracing::field::display(&peer.0));
                // A lane that broke is opened again; causes of transfers name it where it did not help.
                if kind == LaneTrouble::Broken {
                    tracing::debug!(peer = named, %what, "lane trouble");
                } else if self.reception.floods.admit(jobs::named(kind), None) {
                    tracing::warn!(peer = named, %what, "{}", jobs::named(kind));
                }
                if let Some(peer) = peer {
                    self.handle(Input::Data(DataEvent::Trouble { peer, what }));
                }
            }
            jobs::Report::ToPeer(peer, message) => {
                let frame = PeerFrame::Lane(message);
                match peers::encode(&frame) {
                    Ok(frame) => {
                        let changes = self.peers.send_if_open(Instant::now(), &peer, frame);
                        self.apply(changes);
                    }
                    Err(error) => tracing::error!(%error, "a lane message cannot be written"),
                }
            }
        }
    }

    fn question(&mut self, question: Question) {
        match question {
            Question::Status(reply) => drop(reply.send(self.status())),
            Question::Working(reply) => drop(reply.send(self.drain.is_none())),
            Question::Drain(drain) => self.drain = Some(drain),
            Question::Hurry => {
                if let Some(drain) = &mut self.drain {
                    drain.hurry();
                }
            }
        }
    }

    /// Carries out what the broker wants, until it wants nothing more.
    fn settle(&mut self) {
        loop {
            while let Some(output) = self.broker.poll() {
                self.execute(output);
            }
            let Some(message) = self.loopback.pop_front() else {
                return;
            };
            self.handle(Input::Peer {
                peer: self.own.clone(),
                incarnation: self.neighbourhood.incarnation,
                message,
            });
        }
    }

    fn execute(&mut self, output: Output) {
        match output {
            Output::Answer {
                session,
                number,
                answer,
            } => self.answer(session, number, answer),
            Output::Event { session, event } => {
                if let Some(seated) = self.seats.get_mut(&session) {
                    if let Event::Detached { cause } = &event {
                        tracing::warn!(seat = %seated.seat, rank = seated.attached_as, %cause, "attachment taken back");
                        seated.seat.set_attached(false);
                    }
                    seated.seat.tell(event);
                }
            }
            Output::Send { peer, message } => self.send(peer, message),
            Output::Data(command) => jobs::command(&self.plane, command),
            Output::Release { key } => {
                self.plane.release(kvferry_dataplane::RegionKey(key.0));
                if let Some(session) = self.owners.remove(&key) {
                    if let Some(seated) = self.seats.get_mut(&session) {
                        seated.keys.remove(&key);
                    }
                    self.unseat(session);
                }
            }
            Output::Violation { peer, kind, what } => {
                if self.reception.floods.admit(kind, None) {
                    tracing::warn!(peer = %peer.0, what = %record::printable(&what), "{kind}");
                }
            }
            Output::Record(ended) => {
                self.metrics.ended(&ended);
                record::log(&ended);
            }
        }
    }

    fn answer(&mut self, session: SessionId, number: u64, answer: Result<Answer, Fault>) {
        if let Err(fault) = &answer {
            self.metrics.refused(fault.code);
        }
        let Some(seated) = self.seats.get_mut(&session) else {
            return;
        };
        if let Some(attaching) = seated.attaching.take_if(|attaching| attaching.number == number) {
            let name = &attaching.name;
            match &answer {
                Ok(_) => {
                    tracing::info!(seat = %seated.seat, rank = %name, "attached");
                    seated.seat.set_attached(true);
                    seated.attached_as = Some(name.clone());
                }
                Err(fault) => {
                    let what = "attach refused";
                    if self.reception.floods.admit(what, Some(fault.code)) {
                        tracing::warn!(seat = %seated.seat, rank = %name, %fault, "{what}");
                    }
                }
            }
        }
        seated.seat.answer(number, answer);
    }

    fn send(&mut self, peer: PeerAddress, message: PeerMessage) {
        if peer == self.own {
            self.loopback.push_back(message);
            return;
        }
        let long = message.long();
        let frame = PeerFrame::Broker(Box::new(message));
        let parcel = match long {
            Some(size) => Ok(Parcel::unwritten(size, move || peers::encode(&frame))),
            None => peers::encode(&frame).map(Parcel::from),
        };
        match parcel {
            Ok(frame) => {
                let changes = self.peers.send(Instant::now(), &peer, frame);
                self.apply(changes);
            }
            Err(error) => tracing::error!(peer = %peer.0, %error, "a message cannot be written"),
        }
    }

    /// Lets an ended session go once nothing of its memory is in use.
    fn unseat(&mut self, session: SessionId) {
        let ended = self
            .seats
            .get(&session)
            .is_some_and(|seated| seated.fenced.is_some() && seated.keys.is_empty());
        if ended
            && let Some(seated) = self.seats.remove(&session)
            && let Some(fenced) = seated.fenced
        {
            // Nobody waits where the session's task has ended.
            let _ = fenced.send(());
        }
    }

    /// What the daemon is doing.
    fn status(&self) -> Status {
        let mut counts = self.broker.counts();
        counts.extend(
            self.plane
                .counts()
                .into_iter()
                .map(|(name, count)| (format!("data_{name}"), count)),
        );
        let count = |count: usize| u64::try_from(count).unwrap_or(u64::MAX);
        counts.push(("connections".to_owned(), count(self.reception.admission.count())));
        counts.push(("peer_channels".to_owned(), count(self.peers.open_channels())));
        if let Ok(fds) = std::fs::read_dir("/proc/self/fd") {
            counts.push(("fds".to_owned(), count(fds.count())));
        }
        Status {
            address: self.own.0.to_string(),
            release: env!("CARGO_PKG_VERSION").to_owned(),
            incarnation: self.neighbourhood.incarnation,
            uptime_s: self.started.elapsed().as_secs(),
            engines: self.broker.engines(),
            peers: record::peers(&self.peers.states(), &self.plane.traffic()),
            counts,
        }
    }
}

async fn until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at.into()).await,
        None => std::future::pending().await,
    }
}
