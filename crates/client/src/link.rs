//! The task behind a client: one connection at a time, and what must be told a daemon that restarted.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use kvferry_control::{Answer, Call, Event, Request, Response, Side, Welcome};
use kvferry_handshake::{Code, encode};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::{broadcast, mpsc, oneshot, watch};

use crate::backoff::Backoff;
use crate::calls::{Attachment, Command, Pending, Region, TransferKey};
use crate::socket::{self, Socket};
use crate::transfer::{Delivered, Failed, TransferState};
use crate::{ClientError, Fault, Notice, Registered};

/// Calls that wait for the task, at most; further callers wait.
pub(crate) const COMMANDS: usize = 256;
/// Notices kept for a reader that is behind.
pub(crate) const NOTICES: usize = 1024;
/// A daemon that takes longer to take all regions back counts as away.
const RESUME_PATIENCE: Duration = Duration::from_secs(60);
/// While so many bytes wait to be written, no further call is taken.
const MAX_QUEUED: usize = 1 << 20;

/// Whether a daemon is there.
#[derive(Clone, Debug)]
pub(crate) struct Presence {
    pub(crate) welcome: Welcome,
    /// Connected, and all that was attached and registered is so again.
    pub(crate) up: bool,
}

/// The task's state.
#[derive(Debug)]
pub(crate) struct Link {
    pub(crate) path: PathBuf,
    pub(crate) commands: mpsc::Receiver<Command>,
    pub(crate) notices: broadcast::Sender<Notice>,
    pub(crate) presence: watch::Sender<Presence>,
    attachment: Option<Attachment>,
    regions: BTreeMap<u16, Region>,
    transfers: HashMap<TransferKey, Arc<watch::Sender<TransferState>>>,
    pending: HashMap<u64, Pending>,
    next_number: u64,
}

/// Why serving a connection stopped.
enum Stop {
    /// Every handle is dropped.
    Dropped,
    /// The connection is of no use any more.
    Lost(Fault),
}

impl Link {
    pub(crate) fn new(
        path: PathBuf,
        commands: mpsc::Receiver<Command>,
        notices: broadcast::Sender<Notice>,
        presence: watch::Sender<Presence>,
    ) -> Link {
        Link {
            path,
            commands,
            notices,
            presence,
            attachment: None,
            regions: BTreeMap::new(),
            transfers: HashMap::new(),
            pending: HashMap::new(),
            next_number: 0,
        }
    }

    /// Serves connections until every handle is dropped.
    pub(crate) async fn run(mut self, mut socket: Socket) {
        while let Stop::Lost(cause) = self.serve(&mut socket).await {
            self.lose(&cause);
            match self.reconnect(cause).await {
                Some(next) => socket = next,
                None => return,
            }
        }
    }

    async fn serve(&mut self, socket: &mut Socket) -> Stop {
        loop {
            let Socket {
                stream,
                reader,
                writer,
            } = socket;
            let queued = writer.queued();
            tokio::select! {
                read = socket::read(stream, reader) => match read {
                    Ok(Ok(Some(Response::Hello(Err(parting))))) => {
                        fenced(socket).await;
                        return Stop::Lost(parting);
                    }
                    Ok(Ok(Some(response))) => self.response(response),
                    Ok(Ok(None)) => return Stop::Lost(self.lost("it closed the connection")),
                    Ok(Err(error)) => {
                        fenced(socket).await;
                        return Stop::Lost(error.into());
                    }
                    Err(error) => return Stop::Lost(self.lost(&error.to_string())),
                },
                written = socket::write(stream, writer), if queued > 0 => if let Err(error) = written {
                    // What it said before it closed is still to be read, and ends this connection.
                    tracing::debug!(%error, "the daemon takes no more calls");
                    writer.clear();
                },
                command = self.commands.recv(), if queued < MAX_QUEUED => match command {
                    Some(command) => self.command(socket, command).await,
                    None => return Stop::Dropped,
                },
            }
        }
    }

    /// Connects again with back-off, attaches and registers again; meanwhile calls are refused.
    async fn reconnect(&mut self, cause: Fault) -> Option<Socket> {
        let mut backoff = Backoff::new();
        let mut cause = io::Error::other(cause);
        loop {
            let pause = tokio::time::sleep(backoff.pause());
            tokio::pin!(pause);
            loop {
                tokio::select! {
                    () = &mut pause => break,
                    command = self.commands.recv() => self.refuse(command?, &cause),
                }
            }
            let resumed = tokio::time::timeout(RESUME_PATIENCE, self.resume()).await;
            match resumed.unwrap_or_else(|_| Err(self.away(io::ErrorKind::TimedOut.into()))) {
                Ok((socket, welcome)) => {
                    tracing::info!(socket = %self.path.display(), incarnation = welcome.incarnation, "the daemon is back");
                    self.presence.send_replace(Presence {
                        welcome: welcome.clone(),
                        up: true,
                    });
                    let _ = self.notices.send(Notice::DaemonBack { welcome });
                    return Some(socket);
                }
                Err(ClientError::Refused(fault)) => {
                    tracing::warn!(%fault, "the daemon is back, but refuses us");
                    let _ = self.notices.send(Notice::Refused { cause: fault.clone() });
                    cause = io::Error::other(fault);
                }
                Err(ClientError::DaemonAway { cause: why, .. }) => cause = why,
                Err(other) => cause = io::Error::other(other),
            }
            self.pending.clear();
        }
    }

    async fn resume(&mut self) -> Result<(Socket, Welcome), ClientError> {
        let (mut socket, welcome) = Socket::open(&self.path).await?;
        self.restore(&mut socket).await?;
        Ok((socket, welcome))
    }

    /// Attaches and registers as before.
    async fn restore(&mut self, socket: &mut Socket) -> Result<(), ClientError> {
        let Some(attachment) = &self.attachment else {
            return Ok(());
        };
        let call = attachment.call();
        self.ask(socket, call, None).await?;
        let regions: Vec<u16> = self.regions.keys().copied().collect();
        for number in regions {
            let Some(region) = self.regions.get(&number) else {
                continue;
            };
            let (call, fd) = region.memory.call(number)?;
            if let Answer::Registered { generation, .. } = self.ask(socket, call, fd).await?
                && let Some(region) = self.regions.get_mut(&number)
            {
                region.generation = generation;
            }
        }
        Ok(())
    }

    /// One call, waited for; what else arrives is taken as usual.
    async fn ask(
        &mut self,
        socket: &mut Socket,
        call: Call,
        fd: Option<OwnedFd>,
    ) -> Result<Answer, ClientError> {
        let (reply, mut answer) = oneshot::channel();
        self.send(socket, call, fd, Pending::Call { reply });
        if let Err(cause) = socket::write(&socket.stream, &mut socket.writer).await {
            return Err(self.away(cause));
        }
        loop {
            if let Ok(answer) = answer.try_recv() {
                return answer;
            }
            match socket::read(&socket.stream, &mut socket.reader).await {
                Ok(Ok(Some(Response::Hello(Err(parting))))) => return Err(ClientError::Refused(parting)),
                Ok(Ok(Some(response))) => self.response(response),
                Ok(Ok(None)) => return Err(ClientError::Refused(self.lost("it closed the connection"))),
                Ok(Err(error)) => return Err(ClientError::Refused(error.into())),
                Err(cause) => return Err(self.away(cause)),
            }
        }
    }

    fn away(&self, cause: io::Error) -> ClientError {
        ClientError::DaemonAway {
            socket: self.path.clone(),
            cause,
        }
    }

    fn lost(&self, how: &str) -> Fault {
        Fault::new(
            Code::DaemonRestarted,
            format!(
                "the connection to the daemon at {} is lost: {how}; publish or fetch again with a higher attempt",
                self.path.display()
            ),
        )
    }

    /// Ends what was under way. The daemon keeps the connection open until all of the rank's pages are
    /// fenced, so its end is the fence.
    fn lose(&mut self, cause: &Fault) {
        tracing::warn!(%cause, "the daemon is away");
        self.presence.send_modify(|presence| presence.up = false);
        let restarted = match cause.code {
            Code::DaemonRestarted => cause.clone(),
            _ => self.lost(&cause.to_string()),
        };
        for (_, pending) in self.pending.drain() {
            pending.lose(&restarted, &mut self.regions);
        }
        for (_, state) in self.transfers.drain() {
            let failed = Failed {
                cause: restarted.clone(),
                report: Default::default(),
            };
            state.send_modify(|state| state.end = Some(Err(failed)));
        }
        let _ = self.notices.send(Notice::DaemonLost);
    }

    /// Answers a call while no daemon is there.
    fn refuse(&mut self, command: Command, cause: &io::Error) {
        let away = || self.away(io::Error::new(cause.kind(), cause.to_string()));
        // Whoever asked may have gone; then nobody needs the answer.
        match command {
            Command::Attach { reply, .. } | Command::Reattach { reply } => drop(reply.send(Err(away()))),
            Command::Register { reply, .. } => drop(reply.send(Err(away()))),
            Command::Transfer { reply, .. } => drop(reply.send(Err(away()))),
            Command::Call { reply, .. } => drop(reply.send(Err(away()))),
            Command::Unregister { region, reply } => {
                // No daemon has it mapped, and none will be given it again.
                let known = self.regions.remove(&region).is_some();
                let answer = if known {
                    Ok(())
                } else {
                    Err(self.away(io::ErrorKind::NotConnected.into()))
                };
                let _ = reply.send(answer);
            }
        }
    }

    async fn command(&mut self, socket: &mut Socket, command: Command) {
        match command {
            Command::Attach { attachment, reply } => {
                let call = attachment.call();
                let attachment = Box::new(attachment);
                self.send(socket, call, None, Pending::Attach { attachment, reply });
            }
            Command::Reattach { reply } => {
                let restored = self.restore(socket).await;
                if restored.is_ok() {
                    self.presence.send_modify(|presence| presence.up = true);
                }
                let _ = reply.send(restored);
            }
            Command::Register {
                region,
                memory,
                reply,
            } => match memory.call(region) {
                Ok((call, fd)) => {
                    let memory = Arc::new(memory);
                    self.send(
                        socket,
                        call,
                        fd,
                        Pending::Register {
                            region,
                            memory,
                            reply,
                        },
                    );
                }
                Err(error) => drop(reply.send(Err(error))),
            },
            Command::Unregister { region, reply } => {
                let call = Call::Unregister { region };
                self.send(socket, call, None, Pending::Unregister { region, reply });
            }
            Command::Transfer {
                mut call,
                transfer,
                reply,
            } => {
                let generations: Vec<(u16, u64)> = self
                    .regions
                    .iter()
                    .map(|(number, region)| (*number, region.generation))
                    .collect();
                match &mut call {
                    Call::Publish(publish) => publish.generations = generations,
                    Call::Fetch(fetch) => fetch.generations = generations,
                    _ => {}
                }
                let state = self.transfers.entry(transfer.clone()).or_default().clone();
                self.send(
                    socket,
                    call,
                    None,
                    Pending::Transfer {
                        transfer,
                        state,
                        reply,
                    },
                );
            }
            Command::Call { call, reply } => self.send(socket, call, None, Pending::Call { reply }),
        }
    }

    fn send(&mut self, socket: &mut Socket, call: Call, fd: Option<OwnedFd>, pending: Pending) {
        let number = self.next_number;
        self.next_number += 1;
        self.pending.insert(number, pending);
        let pushed = encode(&Request::Call { number, call })
            .map_err(kvferry_control::FrameError::from)
            .and_then(|payload| socket.writer.push(payload, fd));
        if let Err(error) = pushed {
            self.answer(number, Err(error.into()));
        }
    }

    fn response(&mut self, response: Response) {
        match response {
            Response::Answer { number, answer } => self.answer(number, answer),
            Response::Event(event) => self.event(event),
            Response::Hello(_) => tracing::warn!("the daemon greeted twice"),
        }
    }

    fn answer(&mut self, number: u64, answer: Result<Answer, Fault>) {
        let Some(pending) = self.pending.remove(&number) else {
            tracing::warn!(number, "the daemon answered a call that is not open");
            return;
        };
        let answer = answer.map_err(ClientError::Refused);
        // Whoever asked may have gone; what the daemon did is remembered all the same.
        match pending {
            Pending::Call { reply } => drop(reply.send(answer)),
            Pending::Attach { attachment, reply } => {
                if answer.is_ok() {
                    self.attachment = Some(*attachment);
                }
                let _ = reply.send(answer.map(drop));
            }
            Pending::Register {
                region,
                memory,
                reply,
            } => {
                let registered = answer.and_then(|answer| match answer {
                    Answer::Registered { generation, paths } => Ok(Registered { generation, paths }),
                    _ => Err(ClientError::Refused(Fault::new(
                        Code::ProtocolViolation,
                        "the daemon answered register with something else",
                    ))),
                });
                if let Ok(Registered { generation, .. }) = registered {
                    self.regions.insert(region, Region { memory, generation });
                }
                let _ = reply.send(registered);
            }
            Pending::Unregister { region, reply } => {
                if answer.is_ok() {
                    self.regions.remove(&region);
                }
                let _ = reply.send(answer.map(drop));
            }
            Pending::Transfer {
                transfer,
                state,
                reply,
            } => {
                let open = answer.is_ok() || state.borrow().accepted;
                let ended = state.borrow().end.is_some();
                if open && !ended {
                    state.send_modify(|state| state.accepted = true);
                    self.transfers.insert(transfer, Arc::clone(&state));
                } else if !open {
                    self.transfers.remove(&transfer);
                }
                let _ = reply.send(answer.map(|_| state.subscribe()));
            }
        }
    }

    fn event(&mut self, event: Event) {
        match &event {
            Event::Matched { transfer, engine, .. } => {
                if let Some(state) = self.transfers.get(&(Side::Publish, transfer.clone())) {
                    state.send_modify(|state| state.progress.engine = Some(engine.clone()));
                }
            }
            Event::Progress {
                side,
                transfer,
                bytes,
                total,
            } => {
                if let Some(state) = self.transfers.get(&(*side, transfer.clone())) {
                    state.send_modify(|state| {
                        state.progress.bytes = *bytes;
                        state.progress.total = *total;
                    });
                }
            }
            Event::Delivered {
                side,
                transfer,
                tokens,
                metadata,
                report,
            } => self.end(
                (*side, transfer.clone()),
                Ok(Delivered {
                    tokens: *tokens,
                    metadata: metadata.clone(),
                    report: report.clone(),
                }),
            ),
            Event::Failed {
                side,
                transfer,
                cause,
                report,
            } => self.end(
                (*side, transfer.clone()),
                Err(Failed {
                    cause: cause.clone(),
                    report: report.clone(),
                }),
            ),
            Event::Detached { .. } => self.presence.send_modify(|presence| presence.up = false),
            Event::Refused { .. } => {}
        }
        let _ = self.notices.send(Notice::Event(event));
    }

    fn end(&mut self, transfer: TransferKey, end: Result<Delivered, Failed>) {
        if let Some(state) = self.transfers.remove(&transfer) {
            state.send_modify(|state| state.end = Some(end));
        }
    }
}

/// Waits until the daemon closes a connection that is of no use any more. It does so once no byte of the
/// rank's pages moves: what was under way has not ended before.
async fn fenced(socket: &mut Socket) {
    // Tells a daemon that does not know yet. An error means that it has closed already.
    let _ = socket.stream.shutdown().await;
    let mut unread = [0; 4096];
    while socket.stream.read(&mut unread).await.is_ok_and(|read| read > 0) {}
}

#[cfg(test)]
mod tests;
