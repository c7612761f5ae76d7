//! Daemons as engines and peers see them: real sockets in temporary directories.

mod abuse;
mod channel;
mod documents;
mod endpoint;
mod engines;
mod process;
mod rig;
mod transfers;
