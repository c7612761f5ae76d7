//! How much a run tries, and with which draws: what the environment says.

/// How much is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Width {
    /// What takes little time.
    Quick,
    /// What CI runs.
    Ci,
    /// The widest matrices.
    Full,
}

impl Width {
    /// As `KVFERRY_TESTS` says: `quick`, `ci` or `full`.
    pub fn of_this_run() -> Width {
        match std::env::var("KVFERRY_TESTS").as_deref() {
            Ok("quick") => Width::Quick,
            Ok("ci") | Err(_) => Width::Ci,
            Ok("full") => Width::Full,
            Ok(other) => panic!("KVFERRY_TESTS is {other:?}; there are quick, ci and full"),
        }
    }
}

/// The value for the width of this run.
pub fn by_width<T>(quick: T, ci: T, full: T) -> T {
    match Width::of_this_run() {
        Width::Quick => quick,
        Width::Ci => ci,
        Width::Full => full,
    }
}

/// The seed of this run: `KVFERRY_SEED`, or `default`. Printed, so that a failure can be repeated.
pub fn seed(default: u64) -> u64 {
    let seed = match std::env::var("KVFERRY_SEED") {
        Ok(text) => text
            .parse()
            .unwrap_or_else(|_| panic!("KVFERRY_SEED is {text:?}, not a number")),
        Err(_) => default,
    };
    println!("seed {seed}: repeat with KVFERRY_SEED={seed}");
    seed
}
