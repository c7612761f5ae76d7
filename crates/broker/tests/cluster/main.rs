//! Brokers joined in memory: simulated time, network, data planes and engines.

mod data;
mod engines;
mod geometry;
mod ledger;
mod meeting;
mod sim;
mod storm;
mod wire;
