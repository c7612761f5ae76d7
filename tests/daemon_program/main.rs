//! `kvferryd` as operators meet it: its configuration, its socket, its ports, its end.

#![allow(clippy::unwrap_used, missing_docs)] // a panic here is a failed test

mod certificates;
mod configuration;
mod life;

use kvferry_tests::engine::{Carry, Engine};
use kvferry_tests::process::{Ran, run};
use kvferry_tests::programs::kvferryd;
use kvferry_tests::wait::PATIENCE;

fn daemon(arguments: &[&str]) -> Ran {
    run(&kvferryd(), arguments, PATIENCE)
}

async fn carry(transfer: &str, prefill: &Engine, decode: &Engine) {
    let carry = Carry {
        transfer,
        tokens: 100,
        held: 0,
        sparse: false,
        fetch_first: false,
        path: None,
    };
    carry.run(prefill, decode).await;
}
