//! What two data planes say about lanes, inside the daemons' channel.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A message from data plane to data plane. Each has a fixed size. Any of them may be lost, doubled or
/// reordered: what is due is asked for again, and nothing is written twice.
///
/// A lane carries payload one way. Its sending end asks for it by number (below the sender's lanes per
/// peer); the receiving end grants each life of it an *epoch*, which is never used again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum LaneMessage {
    /// Sender: open this lane.
    Want {
        /// Lane number.
        lane: u16,
        /// Number of the question; a later one is higher.
        ask: u64,
    },
    /// Receiver: connect to `port` and show the token.
    Grant {
        /// Lane number.
        lane: u16,
        /// The question that this answers.
        ask: u64,
        /// The lane's new life.
        epoch: u64,
        /// Good for one connection.
        token: Token,
        /// Data port.
        port: u16,
    },
    /// Sender: this life of the lane broke here; destroy your end of it and say so.
    Lost {
        /// Lane number.
        lane: u16,
        /// Which life.
        epoch: u64,
    },
    /// Receiver: my end of this life of the lane is destroyed, and nothing that came through it can land
    /// any more.
    Gone {
        /// Lane number.
        lane: u16,
        /// Which life.
        epoch: u64,
    },
}

/// Proves that a connection to the data port is the one that was granted.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Token(pub [u8; 32]);

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}
