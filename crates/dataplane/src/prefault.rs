//! Enters the pages of new regions into the page table, in the background: an engine that registers its pool does not
//! wait for it, and its first transfers do not fault page by page.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use crossbeam_channel::{Receiver, Sender, unbounded};

use crate::region::Region;

/// Bytes at once: a step holds the address space's lock and the region for a millisecond or two.
const STEP: usize = 16 << 20;
/// Nice value: whatever moves bytes goes first.
const NICE: i32 = 10;

/// Regions whose pages are to be entered. As many wait as were registered and not released.
#[derive(Debug)]
pub(crate) struct Prefault {
    queue: Sender<Option<Weak<Region>>>,
    waiting: Receiver<Option<Weak<Region>>>,
    ending: AtomicBool,
}

impl Default for Prefault {
    fn default() -> Prefault {
        let (queue, waiting) = unbounded();
        Prefault {
            queue,
            waiting,
            ending: AtomicBool::new(false),
        }
    }
}

impl Prefault {
    /// A region was registered.
    pub(crate) fn add(&self, region: &Arc<Region>) {
        // The receiver is ours, so this cannot fail.
        let _ = self.queue.send(Some(Arc::downgrade(region)));
    }

    /// Ends the thread.
    pub(crate) fn end(&self) {
        self.ending.store(true, Ordering::Relaxed);
        let _ = self.queue.send(None);
    }

    /// The thread's life.
    pub(crate) fn work(&self) {
        // Of this thread alone (setpriority(2), "C library/kernel differences").
        let _ = rustix::process::setpriority_process(None, NICE);
        while let Ok(Some(region)) = self.waiting.recv() {
            let mut at = 0;
            // The region may be released at any time; then it is not held longer than a step.
            while !self.ending.load(Ordering::Relaxed)
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
