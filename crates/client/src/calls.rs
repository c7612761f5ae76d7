//! What handles ask of the client's task, and what waits for the daemon's answer.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use kvferry_control::{Answer, Call, Memory, Side, TransferId};
use kvferry_handshake::Envelope;
use tokio::sync::{oneshot, watch};

use crate::transfer::TransferState;
use crate::{ClientError, Fault, RegionMemory, Registered};

pub(crate) type Reply<T> = oneshot::Sender<Result<T, ClientError>>;

/// One rank may be on both sides of a transfer, and each ends by itself.
pub(crate) type TransferKey = (Side, TransferId);

/// What a handle asks of the task.
#[derive(Debug)]
pub(crate) enum Command {
    Attach {
        attachment: Attachment,
        reply: Reply<()>,
    },
    /// Attach again, with all regions, after the attachment was taken back.
    Reattach {
        reply: Reply<()>,
    },
    Register {
        region: u16,
        memory: RegionMemory,
        reply: Reply<Registered>,
    },
    Unregister {
        region: u16,
        reply: Reply<()>,
    },
    /// A publish or fetch; its generations are filled in.
    Transfer {
        call: Call,
        transfer: TransferKey,
        reply: Reply<watch::Receiver<TransferState>>,
    },
    /// Any other call.
    Call {
        call: Call,
        reply: Reply<Answer>,
    },
}

/// What the rank attached with.
#[derive(Clone, Debug)]
pub(crate) struct Attachment {
    pub(crate) envelope: Envelope,
    pub(crate) rank: u32,
    pub(crate) home: Option<String>,
}

/// A region that the daemon has, and will be given again after a restart.
#[derive(Debug)]
pub(crate) struct Region {
    pub(crate) memory: Arc<RegionMemory>,
    pub(crate) generation: u64,
    /// The daemon has it now.
    pub(crate) held: bool,
}

/// A call that is not answered yet.
#[derive(Debug)]
pub(crate) enum Pending {
    Attach {
        attachment: Box<Attachment>,
        reply: Reply<()>,
    },
    Register {
        region: u16,
        memory: Arc<RegionMemory>,
        reply: Reply<Registered>,
    },
    Unregister {
        region: u16,
        reply: Reply<()>,
    },
    Transfer {
        transfer: TransferKey,
        state: Arc<watch::Sender<TransferState>>,
        reply: Reply<watch::Receiver<TransferState>>,
    },
    Call {
        reply: Reply<Answer>,
    },
    /// Part of giving a daemon again what it had: the attachment (`None`), or a region.
    Restore {
        region: Option<u16>,
    },
}

impl Command {
    /// The call that it makes, by name.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Command::Attach { .. } => "attach",
            Command::Reattach { .. } => "reattach",
            Command::Register { .. } => "register",
            Command::Unregister { .. } => "unregister",
            Command::Transfer { call, .. } | Command::Call { call, .. } => call.name(),
        }
    }

    /// Answers it without having done anything.
    pub(crate) fn refuse(self, why: ClientError) {
        // Whoever asked may have gone; then nobody needs the answer.
        match self {
            Command::Attach { reply, .. }
            | Command::Reattach { reply }
            | Command::Unregister { reply, .. } => {
                drop(reply.send(Err(why)));
            }
            Command::Register { reply, .. } => drop(reply.send(Err(why))),
            Command::Transfer { reply, .. } => drop(reply.send(Err(why))),
            Command::Call { reply, .. } => drop(reply.send(Err(why))),
        }
    }
}

impl Pending {
    /// The connection was lost before the answer came.
    pub(crate) fn lose(self, cause: &Fault, regions: &mut BTreeMap<u16, Region>) {
        let refused = || ClientError::Refused(cause.clone());
        match self {
            Pending::Attach { reply, .. } => drop(reply.send(Err(refused()))),
            Pending::Register { reply, .. } => drop(reply.send(Err(refused()))),
            Pending::Transfer { reply, .. } => drop(reply.send(Err(refused()))),
            Pending::Call { reply } => drop(reply.send(Err(refused()))),
            Pending::Restore { .. } => {}
            Pending::Unregister { region, reply } => {
                regions.remove(&region);
                let _ = reply.send(Ok(()));
            }
        }
    }
}

impl Attachment {
    pub(crate) fn call(&self) -> Call {
        Call::Attach {
            envelope: Box::new(self.envelope.clone()),
            rank: self.rank,
            home: self.home.clone(),
        }
    }
}

impl RegionMemory {
    /// The call that registers it, and the fd that goes with it: a copy, since ours is kept.
    pub(crate) fn call(&self, region: u16) -> Result<(Call, Option<OwnedFd>), ClientError> {
        let (memory, fd) = match self {
            RegionMemory::Memfd { fd, offset, len } => {
                let fd = fd.try_clone().map_err(|cause| ClientError::Memory {
                    what: "duplicating a memfd",
                    cause,
                })?;
                let (offset, len) = (*offset, *len);
                (Memory::Memfd { offset, len }, Some(fd))
            }
            RegionMemory::Process { address, len } => {
                let (address, len) = (*address, *len);
                (Memory::Process { address, len }, None)
            }
        };
        Ok((Call::Register { region, memory }, fd))
    }
}
