//! A connection before it attaches.

use std::path::Path;
use std::time::{Duration, Instant};

use kvferry_control::{Answer, Call, Status, Welcome};
use kvferry_handshake::Envelope;
use tokio::sync::{broadcast, mpsc, oneshot, watch};

use crate::backoff::Backoff;
use crate::calls::{Attachment, Command, Reply};
use crate::link::{COMMANDS, Link, NOTICES, Presence};
use crate::socket::Socket;
use crate::{ClientError, Fault, Notice, Notices, Rank};

/// A connection to the daemon that has not attached.
#[derive(Debug)]
pub struct Client {
    handle: Handle,
}

/// The way to the task that keeps the connection. The task ends when the last is dropped.
#[derive(Clone, Debug)]
pub(crate) struct Handle {
    commands: mpsc::Sender<Command>,
    pub(crate) notices: broadcast::WeakSender<Notice>,
    pub(crate) presence: watch::Receiver<Presence>,
}

impl Client {
    /// Connects; while no daemon answers, tries again with back-off, without end.
    pub async fn connect(socket: impl AsRef<Path>) -> Result<Client, ClientError> {
        Client::connect_until(socket.as_ref(), None).await
    }

    /// Connects; gives up when no daemon has answered for `patience`. Zero tries once.
    pub async fn connect_within(socket: impl AsRef<Path>, patience: Duration) -> Result<Client, ClientError> {
        Client::connect_until(socket.as_ref(), Some(Instant::now() + patience)).await
    }

    async fn connect_until(socket: &Path, until: Option<Instant>) -> Result<Client, ClientError> {
        let mut backoff = Backoff::new();
        loop {
            let error = match Socket::open(socket).await {
                Ok((open, welcome)) => return Ok(Client::over(socket, open, welcome)),
                Err(error) => error,
            };
            // A socket that we may not open stays so.
            let denied = matches!(&error, ClientError::DaemonAway { cause, .. }
                if cause.kind() == std::io::ErrorKind::PermissionDenied);
            let pause = backoff.pause();
            if denied || !error.can_retry() || until.is_some_and(|until| Instant::now() + pause > until) {
                return Err(error);
            }
            tracing::debug!(%error, "trying again");
            tokio::time::sleep(pause).await;
        }
    }

    fn over(path: &Path, socket: Socket, welcome: Welcome) -> Client {
        let (commands, received) = mpsc::channel(COMMANDS);
        let (notices, _) = broadcast::channel(NOTICES);
        let (presence, seen) = watch::channel(Presence { welcome, up: true });
        let handle = Handle {
            commands,
            notices: notices.downgrade(),
            presence: seen,
        };
        tokio::spawn(Link::new(path.to_owned(), received, notices, presence).run(socket));
        Client { handle }
    }

    /// What the daemon says of itself.
    pub fn welcome(&self) -> Welcome {
        self.handle.presence.borrow().welcome.clone()
    }

    /// What the daemon is doing.
    pub async fn status(&self) -> Result<Status, ClientError> {
        self.handle.status().await
    }

    /// What happens from now on. Taken before [`Client::attach`], it misses nothing: a refusal may come right
    /// behind the attachment.
    pub fn notices(&self) -> Notices {
        self.handle.notices()
    }

    /// Attaches as rank `rank` of the engine that `envelope` describes. `home` is the address of rank 0's
    /// daemon, `None` when it is this one.
    pub async fn attach(
        self,
        envelope: Envelope,
        rank: u32,
        home: Option<String>,
    ) -> Result<Rank, ClientError> {
        let attachment = Attachment { envelope, rank, home };
        self.handle
            .ask(|reply| Command::Attach { attachment, reply })
            .await?;
        Ok(Rank::new(self.handle))
    }
}

impl Handle {
    /// Gives the task a command and waits for its answer.
    pub(crate) async fn ask<T>(&self, command: impl FnOnce(Reply<T>) -> Command) -> Result<T, ClientError> {
        let (reply, answer) = oneshot::channel();
        let sent = self.commands.send(command(reply)).await;
        sent.map_err(|_| ClientError::Closed)?;
        answer.await.map_err(|_| ClientError::Closed)?
    }

    pub(crate) fn notices(&self) -> Notices {
        Notices::new(self.notices.upgrade().map(|notices| notices.subscribe()))
    }

    pub(crate) async fn call(&self, call: Call) -> Result<Answer, ClientError> {
        self.ask(|reply| Command::Call { call, reply }).await
    }

    pub(crate) async fn status(&self) -> Result<Status, ClientError> {
        match self.call(Call::Status).await? {
            Answer::Status(status) => Ok(*status),
            _ => Err(ClientError::Refused(Fault::new(
                kvferry_handshake::Code::ProtocolViolation,
                "the daemon answered status with something else",
            ))),
        }
    }
}
