//! What the black-box tests are made of: daemons and engines as real processes, engines inside the test
//! that speak to them through the client, and memory of which every byte is watched.
//!
//! The tests know the programs by what they do, never by what is inside: a pool is filled and verified by
//! the envelope's own formula, row by row, without the planner ([`rows`], [`pool`]), and with a pattern of
//! its own ([`pattern`]). Every wait has a bound ([`wait`]), and every process that is started ends with the
//! test, also when the test panics ([`process`]).
//!
//! `KVFERRY_TESTS=quick|ci|full` says how much is run (`ci` unless given); `KVFERRY_SEED=N` repeats a run that drew seed N;
//! `KVFERRY_STORM_SECONDS=N` is how long the storm of `chaos` lasts.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used)] // a panic here is a failed test

pub mod bystanders;
pub mod certificates;
pub mod engine;
pub mod engine_process;
pub mod geometry;
pub mod memory;
pub mod node;
pub mod pages;
pub mod pattern;
pub mod pool;
pub mod process;
pub mod programs;
pub mod proxy;
pub mod raw;
pub mod rows;
pub mod wait;
pub mod width;
