//! Walks a plan some steps ahead of the copying.
//!
//! Walking in turn with copying makes each step wait for the copy's stores to leave the processor's store buffer
//! (measured: as long as the copy itself, for pages of 4 KiB and less). In batches it waits once for many.

/// Steps taken at once: their list stays in the first-level cache.
pub(crate) const BATCH: usize = 256;

/// The same items, drawn many at a time.
pub(crate) fn in_batches<I: Iterator>(items: I) -> InBatches<I> {
    InBatches {
        items,
        batch: Vec::new(),
        next: 0,
    }
}

/// See [`in_batches`].
pub(crate) struct InBatches<I: Iterator> {
    items: I,
    batch: Vec<I::Item>,
    next: usize,
}

impl<I: Iterator> Iterator for InBatches<I>
where
    I::Item: Copy,
{
    type Item = I::Item;

    #[inline]
    fn next(&mut self) -> Option<I::Item> {
        if self.next == self.batch.len() {
            self.next = 0;
            self.batch.clear();
            self.batch.extend(self.items.by_ref().take(BATCH));
        }
        let item = self.batch.get(self.next).copied();
        self.next += 1;
        item
    }
}

#[cfg(test)]
mod tests {
    use super::{BATCH, in_batches};

    #[test]
    fn nothing_is_lost_or_doubled() {
        for len in [0, 1, BATCH - 1, BATCH, BATCH + 1, 3 * BATCH] {
            assert_eq!(
                in_batches(0..len).collect::<Vec<_>>(),
                (0..len).collect::<Vec<_>>()
            );
        }
    }
}
