//! Brokers joined in memory: simulated time, network, data planes and engines.

#![expect(clippy::unwrap_used, reason = "a panic here is a failed test")]

mod attaching;
mod bounds;
mod coverage;
mod data;
mod ending;
mod engines;
mod geometry;
mod hostile;
mod ledger;
mod linking;
mod meeting;
mod reporting;
mod scene;
mod serving;
mod sim;
mod storm;
mod waiting;
mod wire;
