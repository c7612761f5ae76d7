//! The session of one connection: greets, reads calls, maps memory, writes answers and events.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kvferry_broker::{RegionKey, SessionId, Stated};
use kvferry_control::{
    Call, Fault, Fds, Frame, FrameError, FrameReader, FrameWriter, MAX_HELLO_FRAME, Memory, Path, Request,
    Response, VERSIONS, Welcome,
};
use kvferry_dataplane::{DataPlane, EngineProcess, RegisterError};
use kvferry_handshake::{Code, Versions, decode, encode};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::process::{Resource, getrlimit};
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::sync::{mpsc, oneshot};

use super::{Admission, Seat};
use crate::aside::{Undone, aside, caught};
use crate::drain::shutting_down;
use crate::log::Floods;
use crate::metrics::Metrics;

/// How long a connection may take to greet.
const HELLO_PATIENCE: Duration = Duration::from_secs(5);
/// How often it is looked whether an engine that waits for its attachment is still there.
const HANG_UP_LOOK: Duration = Duration::from_millis(200);
/// How long a connection that is ended may take to read why.
const PARTING_PATIENCE: Duration = Duration::from_secs(1);

/// What sessions tell the driver. Of one session, in order.
#[derive(Debug)]
pub(crate) enum SessionEvent {
    /// It greeted.
    Opened { seat: Arc<Seat> },
    /// It called.
    Call {
        session: SessionId,
        number: u64,
        call: Call,
    },
    /// It attaches, with an envelope that was validated.
    Attach {
        session: SessionId,
        number: u64,
        envelope: Stated,
        rank: u32,
        home: Option<String>,
        /// Dropped once it is answered: the next call counts on it.
        answered: oneshot::Sender<()>,
    },
    /// It is about to register memory. Whether that fits is answered; where it does not, nothing is mapped.
    Registering {
        session: SessionId,
        region: u16,
        len: u64,
        answer: oneshot::Sender<Result<(), Fault>>,
    },
    /// It registered memory, which is mapped.
    Registered {
        session: SessionId,
        number: u64,
        region: u16,
        key: RegionKey,
        len: u64,
        paths: Vec<Path>,
    },
    /// Its connection ended. It stays open until `fenced` is told: its closing tells the engine that no
    /// byte of its memory moves any more.
    Ended {
        session: SessionId,
        cause: Fault,
        fenced: oneshot::Sender<()>,
    },
}

/// What every session needs.
#[derive(Debug)]
pub(crate) struct Reception {
    pub(crate) admission: Admission,
    pub(crate) welcome: Welcome,
    pub(crate) plane: DataPlane,
    /// Paths by which registered memory can be reached.
    pub(crate) paths: Vec<Path>,
    pub(crate) queue_bytes: usize,
    pub(crate) driver: mpsc::Sender<SessionEvent>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) sessions: AtomicU64,
    pub(crate) floods: Floods,
}

impl Reception {
    /// Checks who connects, and takes it in.
    pub(crate) fn admit(&self, stream: &UnixStream) -> Result<Arc<Seat>, Fault> {
        let admitted = self.check(stream);
        if let Err(fault) = &admitted {
            self.metrics.refused(fault.code);
            let what = "a connection is refused";
            if self.floods.admit(what, Some(fault.code)) {
                tracing::warn!(%fault, "{what}");
            }
        }
        admitted
    }

    fn check(&self, stream: &UnixStream) -> Result<Arc<Seat>, Fault> {
        let credentials = stream.peer_cred().map_err(|error| {
            Fault::new(
                Code::PeerCredentials,
                format!("the socket's credentials cannot be read: {error}"),
            )
        })?;
        let uid = credentials.uid();
        self.admission.check_user(uid)?;
        let process = match EngineProcess::of(stream) {
            Ok(process) => Some(Arc::new(process)),
            Err(error) => {
                tracing::debug!(%error, "the engine cannot register memory of its process");
                None
            }
        };
        let session = SessionId(self.sessions.fetch_add(1, Ordering::Relaxed));
        let seat = Arc::new(Seat::new(session, uid, process, self.queue_bytes));
        self.admission.take_in(&seat)?;
        Ok(seat)
    }
}

/// Serves a connection to its end.
pub(crate) async fn run(stream: UnixStream, seat: Arc<Seat>, reception: Arc<Reception>) {
    let mut session = Session {
        stream: &stream,
        reader: FrameReader::new(MAX_HELLO_FRAME),
        writer: FrameWriter::new(),
        seat: &seat,
        reception: &reception,
        attaching: None,
    };
    let greeted = tokio::select! {
        greeted = tokio::time::timeout(HELLO_PATIENCE, caught(session.greet())) => match greeted {
            Ok(greeted) => greeted.unwrap_or_else(|| Err(Some(Undone::Defect.fault("the greeting")))),
            Err(_) => {
                let waited = HELLO_PATIENCE.as_secs();
                Err(Some(Fault::new(Code::ProtocolViolation, format!("no Hello came within {waited} seconds"))))
            }
        },
        cut = seat.outbox.take() => Err(cut.err()),
    };
    match greeted {
        Err(why) => {
            if let Some(why) = why {
                reception.metrics.refused(why.code);
                let what = "a connection ended before it greeted";
                if reception.floods.admit(what, Some(why.code)) {
                    tracing::info!(seat = %seat, %why, "{what}");
                }
                session.part(&why).await;
            }
            reception.admission.leave(seat.session);
        }
        Ok(()) => {
            // Whatever happens in it, the driver learns of its end, and the seat is given up.
            let served = caught(session.serve()).await;
            let cause = served.unwrap_or_else(|| Some(Undone::Defect.fault("this connection")));
            let closed = cause.is_none();
            let cause = cause.unwrap_or_else(|| Fault::new(Code::EngineGone, "its connection closed"));
            if closed {
                tracing::debug!(seat = %seat, "closed");
            } else {
                reception.metrics.refused(cause.code);
                let what = "disconnected";
                if reception.floods.admit(what, Some(cause.code)) {
                    tracing::warn!(seat = %seat, %cause, "{what}");
                }
                session.part(&cause).await;
            }
            let session = seat.session;
            let (fenced, wait) = oneshot::channel();
            let ended = SessionEvent::Ended {
                session,
                cause,
                fenced,
            };
            if reception.driver.send(ended).await.is_ok() {
                let _ = wait.await;
            }
            reception.admission.leave(session);
        }
    }
}

struct Session<'a> {
    stream: &'a UnixStream,
    reader: FrameReader,
    writer: FrameWriter,
    seat: &'a Arc<Seat>,
    reception: &'a Reception,
    /// An attach that is not answered yet. No further call is read before.
    attaching: Option<oneshot::Receiver<()>>,
}

impl Session<'_> {
    /// Reads `Hello` and answers it. An error of `None`: the engine closed.
    async fn greet(&mut self) -> Result<(), Option<Fault>> {
        let frame = self.read().await?;
        let theirs: Versions = match decode(&frame.payload) {
            Ok(Request::Hello(versions)) => versions,
            Ok(Request::Call { .. }) => {
                return Err(Some(Fault::new(
                    Code::ProtocolViolation,
                    "the first frame must be Hello",
                )));
            }
            Err(error) => return Err(Some(FrameError::from(error).into())),
        };
        let version = VERSIONS.common(theirs).map_err(|none| {
            let release = env!("CARGO_PKG_VERSION");
            Some(Fault::new(
                Code::ProtocolVersion,
                format!("{none} (this side: kvferryd {release})"),
            ))
        })?;
        let welcome = Welcome {
            version,
            ..self.reception.welcome.clone()
        };
        self.send(&Response::Hello(Ok(welcome))).await.map_err(|_| None)?;
        let seat = Arc::clone(self.seat);
        self.tell(SessionEvent::Opened { seat }).await.map_err(Some)
    }

    /// Serves calls until the connection is of no use; `None`: the engine closed it.
    async fn serve(&mut self) -> Option<Fault> {
        loop {
            let (stream, seat, reader, writer) = (self.stream, self.seat, &mut self.reader, &mut self.writer);
            let queued = writer.queued();
            tokio::select! {
                read = read(stream, seat, reader), if self.attaching.is_none() => match read {
                    Ok(frame) => if let Err(fault) = self.frame(frame).await {
                        return Some(fault);
                    },
                    Err(why) => return why,
                },
                () = answered(&mut self.attaching) => self.attaching = None,
                () = hung_up(stream), if self.attaching.is_some() => return None,
                taken = seat.outbox.take(), if queued == 0 => match taken {
                    Ok(frame) => if let Err(error) = writer.push(frame, None) {
                        return Some(error.into());
                    },
                    Err(cut) => return Some(cut),
                },
                // The one who reads nothing must not be kept, either.
                cut = seat.outbox.is_cut(), if queued > 0 => return Some(cut),
                written = stream.async_io(Interest::WRITABLE, || writer.write(stream)), if queued > 0 => {
                    if written.is_err() {
                        return None;
                    }
                },
            }
        }
    }

    async fn frame(&mut self, frame: Frame) -> Result<(), Fault> {
        let (number, call) = match decode(&frame.payload) {
            Ok(Request::Call { number, call }) => (number, call),
            Ok(Request::Hello(_)) => {
                return Err(Fault::new(Code::ProtocolViolation, "Hello came twice"));
            }
            Err(error) => return Err(FrameError::from(error).into()),
        };
        let session = self.seat.session;
        match call {
            Call::Register { region, memory } => {
                match self.map(region, memory, frame.fds).await {
                    Ok((key, len)) => {
                        let paths = self.reception.paths.clone();
                        let registered = SessionEvent::Registered {
                            session,
                            number,
                            region,
                            key,
                            len,
                            paths,
                        };
                        if let Err(fault) = self.tell(registered).await {
                            // Nobody else knows of it.
                            self.reception.plane.release(kvferry_dataplane::RegionKey(key.0));
                            return Err(fault);
                        }
                    }
                    Err(fault) => self.refuse(number, fault),
                }
                Ok(())
            }
            _ if !matches!(frame.fds, Fds::None) => {
                let message = "fds came with a call that takes none; only register of a memfd takes one";
                self.refuse(number, Fault::new(Code::RegionKind, message));
                Ok(())
            }
            Call::Attach { envelope, rank, home } => {
                // Takes a while where there are many ranks: others must not wait for it.
                let envelope = match aside("envelope", move || Stated::new(*envelope)).await {
                    Ok(envelope) => envelope,
                    Err(undone) => {
                        self.refuse(number, undone.fault("the envelope cannot be looked at"));
                        return Ok(());
                    }
                };
                let (answered, wait) = oneshot::channel();
                self.attaching = Some(wait);
                self.tell(SessionEvent::Attach {
                    session,
                    number,
                    envelope,
                    rank,
                    home,
                    answered,
                })
                .await
            }
            call => {
                self.tell(SessionEvent::Call {
                    session,
                    number,
                    call,
                })
                .await
            }
        }
    }

    /// Maps what is handed over.
    async fn map(&self, region: u16, memory: Memory, fds: Fds) -> Result<(RegionKey, u64), Fault> {
        if !self.seat.attached() {
            return Err(Fault::new(
                Code::NotAttached,
                format!("region {region} cannot be registered: attach first"),
            ));
        }
        self.fits(region, memory.len()).await?;
        let owner = self.seat.session.0;
        let plane = self.reception.plane.clone();
        let kind = |message: String| Err(Fault::new(Code::RegionKind, message));
        // Mapping takes the kernel a while where it fills page tables.
        let len = memory.len();
        let mapped: Result<Result<_, RegisterError>, Undone> = match (memory, fds) {
            (Memory::Memfd { offset, len }, Fds::One(fd)) => {
                aside("map", move || plane.map_memfd(owner, fd, offset, len)).await
            }
            (Memory::Memfd { .. }, Fds::None) => {
                return kind(format!(
                    "no fd came with region {region}; send exactly one memfd with register"
                ));
            }
            (Memory::Memfd { .. }, Fds::Several) => {
                return kind(format!(
                    "several fds came with region {region}; send exactly one memfd with register"
                ));
            }
            (Memory::Process { address, len }, Fds::None) => {
                let Some(process) = self.seat.process.clone() else {
                    return Err(Fault::new(
                        Code::RegionUnreachable,
                        format!(
                            "the process that registers region {region} cannot be told from its socket; hand over a memfd"
                        ),
                    ));
                };
                aside("map", move || plane.map_process(owner, process, address, len)).await
            }
            (_, Fds::Untaken) => return Err(untaken(region)),
            (Memory::Process { .. }, Fds::One(_) | Fds::Several) => {
                return kind(format!(
                    "an fd came with region {region}, which is memory of the process; send none"
                ));
            }
        };
        match mapped.map_err(|undone| undone.fault(&format!("region {region} cannot be mapped")))? {
            Ok(key) => Ok((RegionKey(key.0), len)),
            Err(error) => Err(Fault::new(error.code(), format!("region {region}: {error}"))),
        }
    }

    /// Whether a region is one of the rank's, and of a length that its envelope bears out.
    async fn fits(&self, region: u16, len: u64) -> Result<(), Fault> {
        let (answer, answered) = oneshot::channel();
        self.tell(SessionEvent::Registering {
            session: self.seat.session,
            region,
            len,
            answer,
        })
        .await?;
        answered.await.unwrap_or_else(|_| Err(shutting_down()))
    }

    fn refuse(&self, number: u64, fault: Fault) {
        self.reception.metrics.refused(fault.code);
        self.seat.answer(number, Err(fault));
    }

    async fn tell(&self, event: SessionEvent) -> Result<(), Fault> {
        let told = self.reception.driver.send(event).await;
        told.map_err(|_| shutting_down())
    }

    async fn read(&mut self) -> Result<Frame, Option<Fault>> {
        let (stream, reader) = (self.stream, &mut self.reader);
        let read = stream.async_io(Interest::READABLE, || reader.read(stream)).await;
        whole(read)
    }

    async fn send(&mut self, response: &Response) -> std::io::Result<()> {
        let frame = encode(response).map_err(std::io::Error::other)?;
        self.writer.push(frame, None).map_err(std::io::Error::other)?;
        let (stream, writer) = (self.stream, &mut self.writer);
        stream.async_io(Interest::WRITABLE, || writer.write(stream)).await
    }

    /// The last word, to a side that may not listen.
    async fn part(&mut self, why: &Fault) {
        let _ = tokio::time::timeout(PARTING_PATIENCE, self.send(&Response::Hello(Err(why.clone())))).await;
    }
}

/// Until an attach is answered; for ever where there is none.
async fn answered(attaching: &mut Option<oneshot::Receiver<()>>) {
    match attaching {
        // Its end is told by dropping the other end.
        Some(answered) => drop(answered.await),
        None => std::future::pending().await,
    }
}

/// Until the engine has closed its end, whatever it left unread.
async fn hung_up(stream: &UnixStream) {
    loop {
        tokio::time::sleep(HANG_UP_LOOK).await;
        let mut polled = [PollFd::new(stream, PollFlags::RDHUP)];
        let gone = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
        let looked = rustix::event::poll(&mut polled, Some(&Timespec::default()));
        if looked.is_ok() && polled.iter().any(|polled| polled.revents().intersects(gone)) {
            return;
        }
    }
}

fn untaken(region: u16) -> Fault {
    let most = getrlimit(Resource::Nofile).current;
    let most = most.map_or_else(|| "unlimited".to_owned(), |most| most.to_string());
    Fault::new(
        Code::OverLimit,
        format!(
            "the fd of region {region} could not be taken in: the daemon has as many files open as it may (RLIMIT_NOFILE \
             is {most}; LimitNOFILE= of its service), or a security module forbids this one"
        ),
    )
}

async fn read(stream: &UnixStream, seat: &Seat, reader: &mut FrameReader) -> Result<Frame, Option<Fault>> {
    let read = stream.async_io(Interest::READABLE, || {
        reader.set_limit(seat.frame_limit());
        reader.read(stream)
    });
    whole(read.await)
}

fn whole(read: std::io::Result<Result<Option<Frame>, FrameError>>) -> Result<Frame, Option<Fault>> {
    match read {
        Ok(Ok(Some(frame))) => Ok(frame),
        // A reset is an end, too: the engine was killed with something unread.
        Ok(Ok(None)) | Err(_) => Err(None),
        Ok(Err(error)) => Err(Some(error.into())),
    }
}
