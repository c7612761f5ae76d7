//! A connection before it attaches.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_control::{Answer, Call, Status, Welcome};
use kvferry_handshake::Envelope;
use tokio::sync::{broadcast, mpsc, oneshot, watch};

use crate::backoff::Backoff;
use crate::calls::{Attachment, Command, Reply};
use crate::link::{COMMANDS, Link, NOTICES, Presence};
use crate::socket::{HELLO_PATIENCE, Socket};
use crate::{ClientError, Fault, Notice, Notices, Rank};

/// Calls never block in the daemon, so that one that is not answered for so long never will be; see [`Client::patience`].
const PATIENCE: Duration = Duration::from_secs(60);
/// What a single try is given at the least: even a daemon that is there needs a moment.
const ONE_TRY: Duration = Duration::from_secs(1);

/// A connection to the daemon that has not attached.
#[derive(Debug)]
pub struct Client {
    handle: Handle,
}

/// The way to the task that keeps the connection. The task ends when the last is dropped.
#[derive(Clone, Debug)]
pub(crate) struct Handle {
    commands: mpsc::Sender<Command>,
    socket: Arc<Path>,
    /// How long an answer is waited for.
    patience: Duration,
    pub(crate) notices: broadcast::WeakSender<Notice>,
    pub(crate) presence: watch::Receiver<Presence>,
}

impl Client {
    /// Connects; while no daemon answers, tries again with back-off, without end.
    pub async fn connect(socket: impl AsRef<Path>) -> Result<Client, ClientError> {
        Client::connect_until(socket.as_ref(), None).await
    }

    /// Connects; gives up when no daemon has answered for `patience`, of which connecting and greeting are part. Zero tries
    /// once, for a second at most.
    pub async fn connect_within(socket: impl AsRef<Path>, patience: Duration) -> Result<Client, ClientError> {
        Client::connect_until(socket.as_ref(), Some(patience)).await
    }

    async fn connect_until(socket: &Path, patience: Option<Duration>) -> Result<Client, ClientError> {
        let began = Instant::now();
        let mut within = patience.map_or(HELLO_PATIENCE, |patience| match patience.is_zero() {
            true => ONE_TRY,
            false => patience.min(HELLO_PATIENCE),
        });
        let mut backoff = Backoff::new();
        loop {
            let error = match Socket::open(socket, within).await {
                Ok((open, welcome)) => return Ok(Client::over(socket, open, welcome)),
                Err(error) => error,
            };
            // A socket that we may not open stays so.
            let denied = matches!(&error, ClientError::DaemonAway { cause, .. }
                if cause.kind() == std::io::ErrorKind::PermissionDenied);
            let pause = backoff.pause();
            if let Some(patience) = patience {
                let left = patience.saturating_sub(began.elapsed()).saturating_sub(pause);
                if left.is_zero() {
                    return Err(error);
                }
                within = left.min(HELLO_PATIENCE);
            }
            if denied || !error.can_retry() {
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
            socket: path.into(),
            patience: PATIENCE,
            notices: notices.downgrade(),
            presence: seen,
        };
        tokio::spawn(Link::new(path.to_owned(), received, notices, presence).run(socket));
        Client { handle }
    }

    /// Waits for the answer to a call for so long, 60 s unless given; a call that is not answered by then fails with
    /// [`ClientError::Unanswered`]. Holds for the [`Rank`] too that this client becomes. Waiting for a transfer's end, for
    /// [`Rank::ready`] and for notices has no bound but the caller's own.
    #[must_use]
    pub fn patience(mut self, patience: Duration) -> Client {
        self.handle = self.handle.patience(patience);
        self
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
    pub(crate) fn patience(self, patience: Duration) -> Handle {
        Handle { patience, ..self }
    }

    /// Gives the task a command and waits for its answer.
    pub(crate) async fn ask<T>(&self, command: impl FnOnce(Reply<T>) -> Command) -> Result<T, ClientError> {
        let (reply, answer) = oneshot::channel();
        let command = command(reply);
        let call = command.name();
        let asked = async {
            // A task that waits for a daemon which reads nothing takes no commands either.
            let sent = self.commands.send(command).await;
            sent.map_err(|_| ClientError::Closed)?;
            answer.await.map_err(|_| ClientError::Closed)?
        };
        let answered = tokio::time::timeout(self.patience, asked).await;
        answered.unwrap_or_else(|_| {
            Err(ClientError::Unanswered {
                call,
                socket: self.socket.to_path_buf(),
                waited: self.patience,
            })
        })
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
