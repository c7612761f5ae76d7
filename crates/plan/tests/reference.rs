//! The planner against an element-by-element copy, over random pairs of engines.

#![allow(clippy::cast_possible_truncation, clippy::unwrap_used)]

mod random;

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use random::draw::{Draw, Seen};
use random::{axes, case};

const CASES: u64 = 20_000;

#[test]
fn moves_equal_the_element_by_element_copy() {
    let first: u64 = std::env::var("KVFERRY_SEED").map_or(0, |seed| seed.parse().unwrap());
    let cases: u64 = std::env::var("KVFERRY_CASES").map_or(CASES, |cases| cases.parse().unwrap());
    let next = AtomicU64::new(first);
    let carrying = AtomicU64::new(0);
    let seen = Mutex::new(Seen::new());
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                let mut mine = Seen::new();
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= first + cases {
                        break;
                    }
                    let mut draw = Draw::new(seed);
                    let run = std::panic::AssertUnwindSafe(|| case::run(&mut draw));
                    let bytes = std::panic::catch_unwind(run).unwrap_or_else(|_| {
                        panic!("seed {seed}: KVFERRY_SEED={seed} KVFERRY_CASES=1 repeats it")
                    });
                    carrying.fetch_add(u64::from(bytes > 0), Ordering::Relaxed);
                    for (value, count) in draw.seen {
                        *mine.entry(value).or_default() += count;
                    }
                }
                let mut seen = seen.lock().unwrap();
                for (value, count) in mine {
                    *seen.entry(value).or_insert(0) += count;
                }
            });
        }
    });
    let carrying = carrying.into_inner();
    eprintln!("{carrying} of {cases} cases carry bytes");
    assert!(carrying * 10 >= cases * 6, "too few cases carry bytes");
    if cases >= CASES {
        axes::check(&seen.into_inner().unwrap());
    }
}
