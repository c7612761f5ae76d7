//! The Unix-socket protocol between an engine and its daemon: both ends' types.
#![forbid(unsafe_code)]

mod message;

pub use message::{
    Answer, Call, EngineStatus, Event, Fault, Fetch, MAX_METADATA, MAX_TRANSFER_ID, Memory, Path, PeerStatus,
    Publish, Report, Request, Response, Status, TransferId, Welcome,
};
