//! The fence of a job: who is touching its pages now, and that nobody does any more.
//!
//! A thread enters before each system call or copy that touches the job's pages and leaves right after,
//! never waiting in between. Closing turns newcomers away; whoever makes the count reach zero then
//! knows that the pages are at rest.

use std::sync::atomic::{AtomicU32, Ordering};

const CLOSED: u32 = 1 << 31;

/// Counts the threads inside, and whether more may enter.
#[derive(Debug, Default)]
pub(crate) struct Fence {
    users: AtomicU32,
}

impl Fence {
    /// Enters, unless closed.
    #[must_use]
    pub(crate) fn enter(&self) -> bool {
        self.users.fetch_add(1, Ordering::Acquire) & CLOSED == 0
    }

    /// Leaves; to be called also after an [`Fence::enter`] that was turned away. Tells whether the fence is
    /// closed and nobody is inside: true at least once after a close, maybe more often.
    #[must_use]
    pub(crate) fn leave(&self) -> bool {
        self.users.fetch_sub(1, Ordering::AcqRel) == CLOSED | 1
    }

    /// Closes; nobody enters any more. Tells whether nobody is inside.
    #[must_use]
    pub(crate) fn close(&self) -> bool {
        self.users.fetch_or(CLOSED, Ordering::AcqRel) & !CLOSED == 0
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.users.load(Ordering::Acquire) & CLOSED != 0
    }
}

#[cfg(test)]
mod tests {
    use super::Fence;

    #[test]
    fn the_last_to_leave_a_closed_fence_learns_it() {
        let fence = Fence::default();
        assert!(fence.enter());
        assert!(fence.enter());
        assert!(!fence.close());
        assert!(!fence.enter(), "entered a closed fence");
        assert!(
            !fence.leave(),
            "the newcomer that was turned away is not the last"
        );
        assert!(!fence.leave());
        assert!(fence.leave());
        assert!(fence.is_closed());
    }

    #[test]
    fn an_empty_fence_is_at_rest_when_closed() {
        let fence = Fence::default();
        assert!(fence.enter());
        assert!(!fence.leave());
        assert!(fence.close());
    }
}
