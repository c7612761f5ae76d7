//! kvferryd: the daemon of one node.
#![forbid(unsafe_code)]

pub mod config;
