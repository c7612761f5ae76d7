//! What daemons say to each other.
use serde::{Deserialize, Serialize};

/// A message from broker to broker.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum PeerMessage {}
