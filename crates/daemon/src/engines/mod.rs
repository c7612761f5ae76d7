//! Engines: the Unix socket, who may connect, and one session for each connection.

mod admission;
mod listener;
mod seat;
mod session;

pub(crate) use admission::Admission;
pub use listener::ListenError;
pub(crate) use listener::{EngineListener, accept};
pub(crate) use seat::Seat;
pub(crate) use session::{Reception, SessionEvent};
