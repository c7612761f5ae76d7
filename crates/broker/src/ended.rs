//! What is remembered of what ended: bounded in number and in time, oldest forgotten first.

use std::collections::{BTreeMap, VecDeque};

use crate::io::Micros;

/// A map that forgets.
#[derive(Debug)]
pub(crate) struct Memory<K, V> {
    entries: BTreeMap<K, (u64, V)>,
    /// (until, entry number, key), in the order of insertion, which is that of `until`.
    order: VecDeque<(Micros, u64, K)>,
    next: u64,
    most: usize,
}

impl<K: Ord + Clone, V> Memory<K, V> {
    pub(crate) fn new(most: usize) -> Memory<K, V> {
        Memory {
            entries: BTreeMap::new(),
            order: VecDeque::new(),
            next: 0,
            most: most.max(1),
        }
    }

    /// Remembers until `until`, which must not go backwards from call to call.
    pub(crate) fn put(&mut self, key: K, value: V, until: Micros) {
        self.next += 1;
        self.entries.insert(key.clone(), (self.next, value));
        self.order.push_back((until, self.next, key));
        // Replaced entries leave their place in the order behind, so that is bounded by itself.
        while self.order.len() > self.most {
            self.forget_oldest();
        }
    }

    fn forget_oldest(&mut self) {
        if let Some((_, number, key)) = self.order.pop_front()
            && self
                .entries
                .get(&key)
                .is_some_and(|(current, _)| *current == number)
        {
            self.entries.remove(&key);
        }
    }

    pub(crate) fn get(&self, key: &K) -> Option<&V> {
        self.entries.get(key).map(|(_, value)| value)
    }

    /// What is remembered from this key on.
    pub(crate) fn range(&self, from: K) -> impl Iterator<Item = (&K, &V)> {
        self.entries.range(from..).map(|(key, (_, value))| (key, value))
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        self.entries.iter().map(|(key, (_, value))| (key, value))
    }

    pub(crate) fn remove(&mut self, key: &K) -> Option<V> {
        self.entries.remove(key).map(|(_, value)| value)
    }

    pub(crate) fn expire(&mut self, now: Micros) {
        while self.order.front().is_some_and(|(until, _, _)| *until <= now) {
            self.forget_oldest();
        }
    }

    pub(crate) fn next_expiry(&self) -> Option<Micros> {
        self.order.front().map(|(until, _, _)| *until)
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forgets_by_number_and_by_time() {
        let mut memory = Memory::new(2);
        memory.put("a", 1, 10);
        memory.put("b", 2, 11);
        memory.put("c", 3, 12);
        assert_eq!(memory.get(&"a"), None);
        assert_eq!(memory.get(&"b"), Some(&2));
        memory.expire(11);
        assert_eq!(memory.get(&"b"), None);
        assert_eq!(memory.get(&"c"), Some(&3));
        assert_eq!(memory.next_expiry(), Some(12));
    }

    #[test]
    fn a_replaced_entry_outlives_its_first_time_limit() {
        let mut memory = Memory::new(8);
        memory.put("a", 1, 10);
        memory.put("a", 2, 20);
        memory.expire(15);
        assert_eq!(memory.get(&"a"), Some(&2));
        memory.expire(20);
        assert_eq!(memory.len(), 0);
    }
}
