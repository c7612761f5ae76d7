//! A small random source, and the counts of what it drew.

use std::collections::BTreeMap;
use std::fmt::Display;

/// How often each axis had each value.
pub(crate) type Seen = BTreeMap<(&'static str, String), u64>;

/// Draws from a seed (splitmix64).
pub(crate) struct Draw {
    state: u64,
    pub(crate) seen: Seen,
}

impl Draw {
    pub(crate) fn new(seed: u64) -> Draw {
        Draw {
            state: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x5851_f42d_4c95_7f2d,
            seen: BTreeMap::new(),
        }
    }

    fn next(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `n`.
    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    /// A number from `low` to `high`, both included.
    pub(crate) fn between(&mut self, low: u32, high: u32) -> u32 {
        low + self.below(u64::from(high - low) + 1) as u32
    }

    /// True once in `n` times.
    pub(crate) fn once_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    pub(crate) fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }

    pub(crate) fn shuffle<T>(&mut self, list: &mut [T]) {
        for at in (1..list.len()).rev() {
            let other = self.below(at as u64 + 1) as usize;
            list.swap(at, other);
        }
    }

    /// Counts that an axis had a value.
    pub(crate) fn saw(&mut self, axis: &'static str, value: impl Display) {
        *self.seen.entry((axis, value.to_string())).or_default() += 1;
    }
}
