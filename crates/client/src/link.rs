//! The task behind a client: one connection at a time, and what must be told a daemon that restarted.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

use kvferry_control::{Call, Memory, Request, Response, Welcome};
use kvferry_handshake::{Code, encode};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::{broadcast, mpsc, watch};

use crate::backoff::Backoff;
use crate::calls::{Attachment, Command, Pending, Region, TransferKey};
use crate::socket::{self, HELLO_PATIENCE, Socket};
use crate::tracer::Named;
use crate::transfer::{Failed, TransferState};
use crate::{ClientError, Fault, Notice};

mod restore;
mod told;

use restore::{Restore, Why};

/// Calls that wait for the task, at most; further callers wait.
pub(crate) const COMMANDS: usize = 256;
/// Notices kept for a reader that is behind.
pub(crate) const NOTICES: usize = 1024;
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
    /// The daemon has the attachment now.
    attached: bool,
    regions: BTreeMap<u16, Region>,
    transfers: HashMap<TransferKey, Arc<watch::Sender<TransferState>>>,
    pending: HashMap<u64, Pending>,
    next_number: u64,
    restore: Option<Restore>,
    backoff: Backoff,
}

/// Why serving a connection stopped.
enum Stop {
    /// Every handle is dropped.
    Dropped,
    /// The connection is of no use any more.
    Lost(Fault),
    /// The daemon is back, but does not take back what it had.
    Refused(ClientError),
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
            attached: false,
            regions: BTreeMap::new(),
            transfers: HashMap::new(),
            pending: HashMap::new(),
            next_number: 0,
            restore: None,
            backoff: Backoff::new(),
        }
    }

    /// Serves connections until every handle is dropped.
    pub(crate) async fn run(mut self, mut socket: Socket) {
        loop {
            let cause = match self.serve(&mut socket).await {
                Stop::Dropped => return,
                Stop::Lost(fault) => self.lose(fault),
                Stop::Refused(error) => self.refused_back(error),
            };
            drop(socket);
            let Some((next, welcome)) = self.reconnect(cause).await else {
                return;
            };
            socket = next;
            self.detached();
            self.begin_restore(Why::Returned(welcome));
        }
    }

    async fn serve(&mut self, socket: &mut Socket) -> Stop {
        loop {
            if let Some(stop) = self.restore_on(socket) {
                return stop;
            }
            let Socket {
                stream,
                reader,
                writer,
                ..
            } = socket;
            let queued = writer.queued();
            let late = self.restore.as_ref().and_then(Restore::late);
            tokio::select! {
                read = socket::read(stream, reader) => match read {
                    Ok(Ok(Some(Response::Hello(Err(parting))))) => return self.fenced(socket, parting).await,
                    Ok(Ok(Some(response))) => self.response(response),
                    Ok(Ok(None)) => return Stop::Lost(self.lost("it closed the connection")),
                    Ok(Err(error)) => return self.fenced(socket, error.into()).await,
                    Err(error) => return Stop::Lost(self.lost(&error.to_string())),
                },
                written = socket::write(stream, writer), if queued > 0 => if let Err(error) = written {
                    // What it said before it closed is still to be read, and ends this connection.
                    tracing::debug!(%error, "the daemon takes no more calls");
                    writer.clear();
                },
                command = self.commands.recv(), if queued < MAX_QUEUED => match command {
                    Some(command) if self.restore.is_some() => self.not_yet(socket, command),
                    Some(command) => self.command(socket, command),
                    None => return Stop::Dropped,
                },
                () = restore::until(late) => {
                    return Stop::Lost(self.lost("it takes too long to take back what it had"));
                }
            }
        }
    }

    /// Connects again with back-off; meanwhile calls are refused.
    async fn reconnect(&mut self, mut cause: io::Error) -> Option<(Socket, Welcome)> {
        loop {
            let pause = self.backoff.pause();
            let path = self.path.clone();
            let attempt = async {
                tokio::time::sleep(pause).await;
                Socket::open(&path, HELLO_PATIENCE).await
            };
            tokio::pin!(attempt);
            let opened = loop {
                tokio::select! {
                    opened = &mut attempt => break opened,
                    command = self.commands.recv() => self.refuse(command?, &cause),
                }
            };
            cause = match opened {
                Ok(opened) => return Some(opened),
                Err(ClientError::DaemonAway { cause, .. }) => cause,
                Err(other) => self.refused_back(other),
            };
        }
    }

    /// It answers, but not as it should: the engine is told, and the next try may be better.
    fn refused_back(&mut self, error: ClientError) -> io::Error {
        self.forget_calls(&self.lost("it came back, and does not take back what it had"));
        match error {
            ClientError::Refused(fault) => {
                tracing::warn!(%fault, "the daemon is back, but refuses us");
                let _ = self.notices.send(Notice::Refused { cause: fault.clone() });
                io::Error::other(fault)
            }
            other => io::Error::other(other),
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
    fn lose(&mut self, cause: Fault) -> io::Error {
        tracing::warn!(%cause, "the daemon is away");
        let restarted = match cause.code {
            Code::DaemonRestarted => cause.clone(),
            _ => self.lost(&cause.to_string()),
        };
        self.forget_calls(&restarted);
        for ((side, _), state) in self.transfers.drain() {
            state.send_modify(|state| {
                let message = format!("{} [{}]", restarted.message, state.standing(side));
                state.end = Some(Err(Failed {
                    cause: Fault::new(restarted.code, message),
                    report: Default::default(),
                }));
            });
        }
        match self.restore.take().map(Restore::why) {
            // It was away, and still is.
            Some(Why::Returned(_)) => {}
            Some(Why::Asked(reply)) => {
                let _ = reply.send(Err(ClientError::Refused(restarted)));
                self.tell_lost();
            }
            None => self.tell_lost(),
        }
        io::Error::other(cause)
    }

    /// The daemon has nothing of the rank any more, or is another.
    fn detached(&mut self) {
        self.attached = false;
        for region in self.regions.values_mut() {
            region.held = false;
        }
    }

    fn tell_lost(&mut self) {
        self.presence.send_modify(|presence| presence.up = false);
        let _ = self.notices.send(Notice::DaemonLost);
    }

    /// No answers come any more.
    fn forget_calls(&mut self, cause: &Fault) {
        for (_, pending) in self.pending.drain() {
            pending.lose(cause, &mut self.regions);
        }
    }

    /// Answers a call while no daemon is there.
    fn refuse(&mut self, command: Command, cause: &io::Error) {
        if let Command::Unregister { region, reply } = command {
            // No daemon has it mapped, and none will be given it again.
            let known = self.regions.remove(&region).is_some();
            let answer = if known {
                Ok(())
            } else {
                Err(self.away(io::ErrorKind::NotConnected.into()))
            };
            let _ = reply.send(answer);
            return;
        }
        command.refuse(self.away(io::Error::new(cause.kind(), cause.to_string())));
    }

    /// Waits until the daemon closes a connection that is of no use any more. It does so once no byte of the
    /// rank's pages moves: what was under way has not ended before.
    async fn fenced(&mut self, socket: &mut Socket, cause: Fault) -> Stop {
        // Tells a daemon that does not know yet. An error means that it has closed already.
        let _ = socket.stream.shutdown().await;
        let parting = io::Error::other(cause.clone());
        let mut unread = [0; 4096];
        loop {
            tokio::select! {
                read = socket.stream.read(&mut unread) => if !read.is_ok_and(|read| read > 0) {
                    return Stop::Lost(cause);
                },
                command = self.commands.recv() => match command {
                    // The region may still be in use; the connection's end answers it.
                    Some(Command::Unregister { region, reply }) => {
                        self.expect_answer(Pending::Unregister { region, reply });
                    }
                    Some(command) => command.refuse(self.away(io::Error::other(parting.to_string()))),
                    None => return Stop::Dropped,
                },
            }
        }
    }

    fn command(&mut self, socket: &mut Socket, command: Command) {
        match command {
            Command::Attach { attachment, reply } => {
                let call = attachment.call();
                let attachment = Box::new(attachment);
                self.send(socket, call, None, Pending::Attach { attachment, reply });
            }
            Command::Reattach { reply } => self.begin_restore(Why::Asked(reply)),
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
                    .filter(|(_, region)| region.held)
                    .map(|(number, region)| (*number, region.generation))
                    .collect();
                match &mut call {
                    Call::Publish(publish) => publish.generations = generations,
                    Call::Fetch(fetch) => fetch.generations = generations,
                    _ => {}
                }
                let state = self.transfers.entry(transfer.clone()).or_default().clone();
                if let Call::Fetch(fetch) = &call {
                    let source = Some(fetch.source.clone());
                    state.send_if_modified(|state| {
                        state.source = source;
                        false
                    });
                }
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
        let number = self.expect_answer(pending);
        let of_process = matches!(
            &call,
            Call::Register {
                memory: Memory::Process { .. },
                ..
            }
        );
        if of_process && socket.named.is_none() {
            // It probes the memory when it hears of it.
            socket.named = Named::new(&socket.stream);
        }
        let pushed = encode(&Request::Call { number, call })
            .map_err(kvferry_control::FrameError::from)
            .and_then(|payload| socket.writer.push(payload, fd));
        if let Err(error) = pushed {
            self.answer(number, Err(error.into()));
        }
    }

    /// The number of a call that is to be answered.
    fn expect_answer(&mut self, pending: Pending) -> u64 {
        let number = self.next_number;
        self.next_number += 1;
        self.pending.insert(number, pending);
        number
    }
}

#[cfg(test)]
mod tests;
