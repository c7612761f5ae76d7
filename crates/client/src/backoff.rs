//! Pauses between tries.

use std::time::Duration;

use rand::Rng;

const FIRST: Duration = Duration::from_millis(50);
const LONGEST: Duration = Duration::from_secs(2);

/// Doubling pauses with some chance in them, so that a node's ranks do not all come at once.
#[derive(Debug)]
pub(crate) struct Backoff {
    next: Duration,
}

impl Backoff {
    pub(crate) fn new() -> Backoff {
        Backoff { next: FIRST }
    }

    pub(crate) fn pause(&mut self) -> Duration {
        let pause = self.next.mul_f64(rand::rng().random_range(0.75..1.25));
        self.next = (self.next * 2).min(LONGEST);
        pause
    }
}
