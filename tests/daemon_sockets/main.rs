//! `kvferryd` as engines, peers and scrapers meet it at its sockets: what it carries, whom it refuses, and what it survives.
#![allow(clippy::unwrap_used, missing_docs)] // a panic here is a failed test

mod abuse;
mod channel;
mod endpoint;
mod engines;
mod limits;
mod process;
mod rig;
mod storm;
mod transfers;
