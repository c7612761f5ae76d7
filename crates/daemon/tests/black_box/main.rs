//! Daemons as engines and peers see them: real sockets in temporary directories.
#![allow(clippy::unwrap_used)] // a panic here is a failed test

mod abuse;
mod channel;
mod documents;
mod endpoint;
mod engines;
mod process;
mod rig;
mod storm;
mod transfers;
