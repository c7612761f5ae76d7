//! A connection before it attaches.

use std::path::Path;
use std::time::Duration;

use kvferry_control::{Status, Welcome};
use kvferry_handshake::Envelope;

use crate::{ClientError, Rank};

/// A connection to the daemon that has not attached.
#[derive(Debug)]
pub struct Client {}

impl Client {
    /// Connects; while no daemon answers, tries again with back-off, without end.
    pub async fn connect(socket: impl AsRef<Path>) -> Result<Client, ClientError> {
        let _ = socket;
        todo!()
    }

    /// Connects; gives up when no daemon has answered for `patience`. Zero tries once.
    pub async fn connect_within(socket: impl AsRef<Path>, patience: Duration) -> Result<Client, ClientError> {
        let _ = (socket, patience);
        todo!()
    }

    /// What the daemon says of itself.
    pub fn welcome(&self) -> Welcome {
        todo!()
    }

    /// What the daemon is doing.
    pub async fn status(&self) -> Result<Status, ClientError> {
        todo!()
    }

    /// Attaches as rank `rank` of the engine that `envelope` describes. `home` is the address of rank 0's
    /// daemon, `None` when it is this one.
    pub async fn attach(
        self,
        envelope: Envelope,
        rank: u32,
        home: Option<String>,
    ) -> Result<Rank, ClientError> {
        let _ = (envelope, rank, home);
        todo!()
    }
}
