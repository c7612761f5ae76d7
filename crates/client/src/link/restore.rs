//! Gives a daemon again what it had: the attachment, then each region. Other calls are refused meanwhile, not
//! kept waiting.

use std::collections::VecDeque;
use std::time::Duration;

use kvferry_control::{Answer, Welcome};
use tokio::time::Instant;

use super::{Link, Stop, told};
use crate::calls::{Command, Pending, Reply};
use crate::socket::Socket;
use crate::{ClientError, Notice};

/// A daemon that takes longer to take all regions back counts as away.
const PATIENCE: Duration = Duration::from_secs(60);

/// Why it is given again what it had.
#[derive(Debug)]
pub(super) enum Why {
    /// The daemon is back.
    Returned(Welcome),
    /// It took the attachment back, and the engine asks.
    Asked(Reply<()>),
}

/// What is under way of it.
#[derive(Debug)]
pub(super) struct Restore {
    why: Why,
    /// What it was not given yet: the attachment (`None`) first, then regions.
    left: VecDeque<Option<u16>>,
    /// It has not answered the last of what it was given.
    asked: bool,
    failed: Option<ClientError>,
    until: Instant,
}

impl Restore {
    pub(super) fn why(self) -> Why {
        self.why
    }

    /// When to give up. Not where the engine asks: only the daemon may end a connection on which transfers were.
    pub(super) fn late(&self) -> Option<Instant> {
        matches!(self.why, Why::Returned(_)).then_some(self.until)
    }
}

impl Link {
    pub(super) fn begin_restore(&mut self, why: Why) {
        let attachment = self.attachment.iter().filter(|_| !self.attached).map(|_| None);
        let regions = self.regions.iter().filter(|(_, region)| !region.held);
        self.restore = Some(Restore {
            why,
            left: attachment
                .chain(regions.map(|(number, _)| Some(*number)))
                .collect(),
            asked: false,
            failed: None,
            until: Instant::now() + PATIENCE,
        });
    }

    /// Gives the daemon what comes next, or ends it.
    pub(super) fn restore_on(&mut self, socket: &mut Socket) -> Option<Stop> {
        while let Some(restore) = self.restore.as_mut().filter(|restore| !restore.asked) {
            let next = restore.left.pop_front();
            if let Some(Restore { why, failed, .. }) = self
                .restore
                .take_if(|restore| next.is_none() || restore.failed.is_some())
            {
                return self.restored(why, failed.map_or(Ok(()), Err));
            }
            if let Some(step) = next {
                self.give(socket, step);
            }
        }
        None
    }

    fn give(&mut self, socket: &mut Socket, step: Option<u16>) {
        let call = match step {
            None => self
                .attachment
                .as_ref()
                .map(|attachment| Ok((attachment.call(), None))),
            Some(number) => self.regions.get(&number).map(|region| region.memory.call(number)),
        };
        let Some(restore) = &mut self.restore else { return };
        match call {
            Some(Ok((call, fd))) => {
                restore.asked = true;
                self.send(socket, call, fd, Pending::Restore { region: step });
            }
            Some(Err(error)) => restore.failed = Some(error),
            None => {}
        }
    }

    pub(super) fn restore_answered(&mut self, region: Option<u16>, answer: Result<Answer, ClientError>) {
        let Some(restore) = &mut self.restore else { return };
        restore.asked = false;
        match (region, answer) {
            (None, Ok(_)) => self.attached = true,
            (Some(region), Ok(Answer::Registered { generation, .. })) => {
                if let Some(region) = self.regions.get_mut(&region) {
                    region.generation = generation;
                    region.held = true;
                }
            }
            (Some(_), Ok(_)) => restore.failed = Some(told::wrong_answer("register")),
            (_, Err(error)) => restore.failed = Some(error),
        }
    }

    fn restored(&mut self, why: Why, result: Result<(), ClientError>) -> Option<Stop> {
        match (why, result) {
            (Why::Returned(welcome), Ok(())) => {
                tracing::info!(socket = %self.path.display(), incarnation = welcome.incarnation, "the daemon is back");
                self.backoff = crate::backoff::Backoff::new();
                self.presence.send_replace(super::Presence {
                    welcome: welcome.clone(),
                    up: true,
                });
                let _ = self.notices.send(Notice::DaemonBack { welcome });
                None
            }
            (Why::Returned(_), Err(error)) => Some(Stop::Refused(error)),
            (Why::Asked(reply), result) => {
                if result.is_ok() {
                    self.presence.send_modify(|presence| presence.up = true);
                }
                let _ = reply.send(result);
                None
            }
        }
    }

    /// A call that comes meanwhile.
    pub(super) fn not_yet(&mut self, socket: &mut Socket, command: Command) {
        let Some(restore) = &mut self.restore else { return };
        match command {
            Command::Unregister { region, reply } => {
                let before = restore.left.len();
                restore.left.retain(|step| *step != Some(region));
                if restore.left.len() < before {
                    // It does not have this one, and will not be given it.
                    self.regions.remove(&region);
                    let _ = reply.send(Ok(()));
                } else {
                    self.command(socket, Command::Unregister { region, reply });
                }
            }
            command => command.refuse(ClientError::Resuming {
                socket: self.path.clone(),
            }),
        }
    }
}

pub(super) async fn until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}
