//! Events that whoever reaches a port can cause as often as they like: the first of a kind is logged, and how
//! many more there were only every few seconds.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kvferry_handshake::Code;

/// How often a kind may be spoken of.
const EVERY: Duration = Duration::from_secs(5);

/// What happens, and why.
type Kind = (&'static str, Option<Code>);

/// The kinds of which one was logged not long ago, and how many were not since.
#[derive(Clone, Debug, Default)]
pub(crate) struct Floods {
    unsaid: Arc<Mutex<HashMap<Kind, u64>>>,
}

impl Floods {
    /// Whether to log what happened. Where not, it is counted, and the count is logged as `what`. Needs a tokio
    /// runtime.
    pub(crate) fn admit(&self, what: &'static str, code: Option<Code>) -> bool {
        let kind = (what, code);
        let mut unsaid = self.unsaid.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = unsaid.get_mut(&kind) {
            *count += 1;
            return false;
        }
        unsaid.insert(kind, 0);
        drop(unsaid);
        tokio::spawn(self.clone().follow(kind));
        true
    }

    /// Says how many more there were, until there were none.
    async fn follow(self, kind: Kind) {
        loop {
            tokio::time::sleep(EVERY).await;
            let more = self.more(kind);
            if more == 0 {
                return;
            }
            let (what, code) = kind;
            let code = code.map(tracing::field::display);
            tracing::warn!(more, code, "more of the same in {} s: {what}", EVERY.as_secs());
        }
    }

    /// How many more there were; where none, the next is logged again.
    fn more(&self, kind: Kind) -> u64 {
        let mut unsaid = self.unsaid.lock().unwrap_or_else(PoisonError::into_inner);
        let more = unsaid.get_mut(&kind).map_or(0, std::mem::take);
        if more == 0 {
            unsaid.remove(&kind);
        }
        more
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn the_first_is_logged_then_a_count_then_the_first_again() {
        let floods = Floods::default();
        let kind = ("connections", Some(Code::OverLimit));
        assert!(floods.admit(kind.0, kind.1));
        for _ in 0..1000 {
            assert!(!floods.admit(kind.0, kind.1));
        }
        assert!(floods.admit("connections", None), "another kind");
        assert_eq!(floods.more(kind), 1000);
        assert!(!floods.admit(kind.0, kind.1), "spoken of not long ago");
        tokio::time::sleep(EVERY * 3).await;
        assert!(floods.admit(kind.0, kind.1));
        assert_eq!(
            floods.unsaid.lock().unwrap().len(),
            1,
            "nothing is kept of what is over"
        );
    }
}
