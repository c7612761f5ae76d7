//! Enters the pages of new regions into the page table, in the background: an engine that registers its pool does not
//! wait for it, and its first transfers do not fault page by page.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Weak};

use crate::region::Region;

/// Bytes at once: a step holds the address space's lock and the region for a millisecond or two.
const STEP: usize = 16 << 20;
/// Nice value: whatever moves bytes goes first.
const NICE: i32 = 10;

/// Fewer are not looked through for released ones.
const FEW: usize = 64;

/// Regions whose pages are to be entered.
#[derive(Debug, Default)]
pub(crate) struct Prefault {
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    /// At most twice as many as are registered, or [`FEW`].
    waiting: VecDeque<Weak<Region>>,
    /// So long it may get before those that were released meanwhile are taken out.
    most: usize,
    ending: bool,
}

impl Prefault {
    /// A region was registered.
    pub(crate) fn add(&self, region: &Arc<Region>) {
        let mut queue = self.queue();
        if queue.waiting.len() >= queue.most.max(FEW) {
            queue.waiting.retain(|region| region.strong_count() > 0);
            // Looking through all of them costs a constant each.
            queue.most = queue.waiting.len().saturating_mul(2);
        }
        queue.waiting.push_back(Arc::downgrade(region));
        self.changed.notify_all();
    }

    /// Ends the thread.
    pub(crate) fn end(&self) {
        self.queue().ending = true;
        self.changed.notify_all();
    }

    /// The next region; `None` at the end.
    fn next(&self) -> Option<Weak<Region>> {
        let mut queue = self.queue();
        loop {
            if queue.ending {
                return None;
            }
            if let Some(region) = queue.waiting.pop_front() {
                return Some(region);
            }
            queue = self.changed.wait(queue).unwrap_or_else(|e| e.into_inner());
        }
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// The thread's life.
    pub(crate) fn work(&self) {
        // Of this thread alone (setpriority(2), "C library/kernel differences").
        let _ = rustix::process::setpriority_process(None, NICE);
        while let Some(region) = self.next() {
            let mut at = 0;
            // The region may be released at any time; then it is not held longer than a step.
            while !self.queue().ending
                && let Some(region) = region.upgrade()
                && let Some(mapping) = region.mapping()
                && at < mapping.len()
            {
                if let Err(error) = mapping.enter_pages(at, STEP) {
                    // Kernels before 5.14 cannot; and it is only faster.
                    tracing::debug!(%error, "entering a region's pages");
                    break;
                }
                at += STEP;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{FEW, Prefault};
    use crate::region::Region;
    use std::sync::Arc;

    /// Nobody takes any out: the thread is busy with a region of any size.
    #[test]
    fn regions_that_were_released_do_not_pile_up() {
        let prefault = Prefault::default();
        let kept: Vec<Arc<Region>> = (0..FEW).map(|_| Arc::new(Region::of_nothing())).collect();
        for region in &kept {
            prefault.add(region);
            for _ in 0..100 {
                prefault.add(&Arc::new(Region::of_nothing()));
            }
        }
        let waiting = prefault.queue().waiting.len();
        assert!(waiting <= 2 * kept.len() + 1, "{waiting} wait");
        let mut live = 0;
        for _ in 0..waiting {
            live += usize::from(prefault.next().unwrap().strong_count() > 0);
        }
        assert_eq!(live, kept.len(), "one that is registered was forgotten");
        prefault.end();
        assert!(prefault.next().is_none());
    }
}
