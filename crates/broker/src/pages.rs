//! A budget for page lists: they are what is large of a transfer, and peers send them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvferry_control::Fault;
use kvferry_handshake::{Code, PageLists};

/// Page lists that the budget counts until the last clone is dropped.
#[derive(Clone, Debug)]
pub(crate) struct Held {
    pub(crate) lists: Arc<PageLists>,
    _share: Arc<Share>,
}

#[derive(Debug)]
struct Share {
    count: u64,
    held: Arc<AtomicU64>,
}

impl Drop for Share {
    fn drop(&mut self) {
        self.held.fetch_sub(self.count, Ordering::Relaxed);
    }
}

/// How many entries are held.
#[derive(Debug)]
pub(crate) struct PageBudget {
    held: Arc<AtomicU64>,
    most: u64,
    most_each: u64,
}

fn entries(lists: &PageLists) -> u64 {
    // How many lists there are, the envelope says.
    lists.groups.iter().map(|list| list.len() as u64).sum()
}

impl PageBudget {
    pub(crate) fn new(most: u64, most_each: u64) -> PageBudget {
        PageBudget {
            held: Arc::default(),
            most,
            most_each,
        }
    }

    /// Fails with `over_limit` before anything is computed from the lists.
    pub(crate) fn check(&self, lists: &PageLists) -> Result<u64, Fault> {
        let count = entries(lists);
        if count > self.most_each {
            let most = self.most_each;
            return Err(Fault::new(
                Code::OverLimit,
                format!("page lists have {count} entries; one transfer may have {most}"),
            ));
        }
        let (held, most) = (self.held(), self.most);
        if held + count > most {
            return Err(Fault::new(
                Code::OverLimit,
                format!("page lists of {count} entries come on top of {held} held; the limit is {most}"),
            ));
        }
        Ok(count)
    }

    pub(crate) fn take(&mut self, lists: impl Into<Arc<PageLists>>) -> Result<Held, Fault> {
        let lists = lists.into();
        let count = self.check(&lists)?;
        self.held.fetch_add(count, Ordering::Relaxed);
        Ok(Held {
            lists,
            _share: Arc::new(Share {
                count,
                held: self.held.clone(),
            }),
        })
    }

    pub(crate) fn held(&self) -> u64 {
        self.held.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lists(len: u32) -> PageLists {
        PageLists {
            groups: vec![(0..len).collect()],
        }
    }

    #[test]
    fn clones_are_counted_once_and_released_with_the_last() {
        let mut budget = PageBudget::new(10, 8);
        let held = budget.take(lists(4)).unwrap();
        let other = held.clone();
        assert_eq!(budget.held(), 4);
        drop(held);
        assert_eq!(budget.held(), 4);
        drop(other);
        assert_eq!(budget.held(), 0);
    }

    #[test]
    fn both_bounds_hold() {
        let mut budget = PageBudget::new(10, 8);
        let long = budget.take(lists(9)).unwrap_err();
        assert_eq!(long.code, Code::OverLimit);
        assert!(long.message.contains("have 9 entries"), "{}", long.message);
        let _held = budget.take(lists(6)).unwrap();
        let many = budget.take(lists(5)).unwrap_err();
        assert_eq!(many.code, Code::OverLimit);
        assert!(
            many.message.contains("of 5 entries come on top of 6"),
            "{}",
            many.message
        );
        assert!(budget.take(lists(4)).is_ok());
    }
}
