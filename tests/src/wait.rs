//! Bounded waits: a test that hangs says what it was waiting for.

use std::fmt::Display;
use std::future::Future;
use std::time::{Duration, Instant};

/// Longest wait for anything that is no transfer: far beyond what a loaded machine needs.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// What `future` gives, within `bound`.
///
/// # Panics
///
/// When the time is over; the message says `what` was waited for.
pub async fn within<T>(bound: Duration, what: impl Display, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(bound, future).await {
        Ok(value) => value,
        Err(_) => panic!("waited {bound:?} in vain: {what}"),
    }
}

/// Asks again and again until `probe` gives something.
///
/// # Panics
///
/// When the time is over; the message says `what` was waited for and what the last try found.
pub async fn until<T, E, F>(bound: Duration, what: impl Display, mut probe: impl FnMut() -> F) -> T
where
    E: Display,
    F: Future<Output = Result<T, E>>,
{
    let end = Instant::now() + bound;
    let mut pause = Duration::from_millis(5);
    let mut found = "nothing".to_owned();
    loop {
        match tokio::time::timeout_at(end.into(), probe()).await {
            Ok(Ok(value)) => return value,
            Ok(Err(other)) => found = other.to_string(),
            Err(_) => found.push_str(", then a try that did not end"),
        }
        assert!(
            Instant::now() < end,
            "waited {bound:?} in vain: {what}; found {found}"
        );
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(Duration::from_millis(200));
    }
}
