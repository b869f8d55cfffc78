//! Maps and sets for the operations in progress. Usually there are few of them, but there may be very many.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

/// The most entries in [`SortedMap::few`]. Searching more entries takes longer than in a [`BTreeMap`].
const FEW_MAX: usize = 16;

/// A map that iterates in the order of its keys, and is faster than [`BTreeMap`] while it has few entries.
///
/// A `BTreeMap` allocates memory for its first entry and frees the memory with its last entry. This costs more time than all else
/// in a map of operations, because this map is empty before and after most operations. `SortedMap` holds few entries in a sorted
/// `Vec`, which keeps its memory.
#[derive(Debug)]
pub(crate) struct SortedMap<K, V> {
    /// All entries in the order of their keys; empty if `many` has entries.
    few: Vec<(K, V)>,
    /// All entries, if there have been more than [`FEW_MAX`] since the map was empty.
    many: BTreeMap<K, V>,
}

impl<K, V> Default for SortedMap<K, V> {
    fn default() -> Self {
        Self { few: Vec::new(), many: BTreeMap::new() }
    }
}

impl<K: Ord, V> SortedMap<K, V> {
    /// Inserts an entry. Returns the previous value of the key.
    pub(crate) fn insert(&mut self, key: K, value: V) -> Option<V> {
        if !self.many.is_empty() {
            return self.many.insert(key, value);
        }
        match self.find(&key) {
            Ok(index) => Some(std::mem::replace(&mut self.few[index].1, value)),
            Err(_) if self.few.len() == FEW_MAX => {
                self.many.extend(self.few.drain(..));
                self.many.insert(key, value)
            }
            Err(index) => {
                self.few.insert(index, (key, value));
                None
            }
        }
    }

    /// Removes an entry. Returns its value.
    pub(crate) fn remove(&mut self, key: &K) -> Option<V> {
        if !self.many.is_empty() {
            return self.many.remove(key);
        }
        self.find(key).ok().map(|index| self.few.remove(index).1)
    }

    pub(crate) fn get(&self, key: &K) -> Option<&V> {
        if !self.many.is_empty() {
            return self.many.get(key);
        }
        self.find(key).ok().map(|index| &self.few[index].1)
    }

    pub(crate) fn get_mut(&mut self, key: &K) -> Option<&mut V> {
        if !self.many.is_empty() {
            return self.many.get_mut(key);
        }
        self.find(key).ok().map(|index| &mut self.few[index].1)
    }

    pub(crate) fn contains_key(&self, key: &K) -> bool {
        self.get(key).is_some()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(crate) fn len(&self) -> usize {
        self.few.len() + self.many.len()
    }

    /// Returns the entry with the smallest key.
    pub(crate) fn first(&self) -> Option<(&K, &V)> {
        self.iter().next()
    }

    /// Returns the entries in the order of their keys.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (&K, &V)> {
        self.few.iter().map(|(key, value)| (key, value)).chain(&self.many)
    }

    /// Returns the values in the order of their keys.
    pub(crate) fn values(&self) -> impl Iterator<Item = &V> {
        self.iter().map(|(_, value)| value)
    }

    fn first_key_in(&self, range: &RangeInclusive<K>) -> Option<&K> {
        if !self.many.is_empty() {
            return self.many.range(range.start()..=range.end()).next().map(|(key, _)| key);
        }
        let index = self.find(range.start()).unwrap_or_else(|index| index);
        self.few.get(index).map(|(key, _)| key).filter(|key| *key <= range.end())
    }

    /// Returns the index of a key in `few`, or `Err` with the index at which to insert the key.
    fn find(&self, key: &K) -> Result<usize, usize> {
        self.few.binary_search_by(|(found, _)| found.cmp(key))
    }
}

/// A set that iterates in ascending order, and is faster than a `BTreeSet` while it has few values. See [`SortedMap`].
#[derive(Debug)]
pub(crate) struct SortedSet<T> {
    values: SortedMap<T, ()>,
}

impl<T> Default for SortedSet<T> {
    fn default() -> Self {
        Self { values: SortedMap::default() }
    }
}

impl<T: Ord> SortedSet<T> {
    /// Inserts a value. Returns whether the set did not contain the value before.
    pub(crate) fn insert(&mut self, value: T) -> bool {
        self.values.insert(value, ()).is_none()
    }

    /// Removes a value. Returns whether the set contained the value.
    pub(crate) fn remove(&mut self, value: &T) -> bool {
        self.values.remove(value).is_some()
    }

    pub(crate) fn contains(&self, value: &T) -> bool {
        self.values.contains_key(value)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.values.len()
    }

    /// Returns the smallest value.
    pub(crate) fn first(&self) -> Option<&T> {
        self.iter().next()
    }

    /// Returns the smallest value in `range`.
    pub(crate) fn first_in(&self, range: &RangeInclusive<T>) -> Option<&T> {
        self.values.first_key_in(range)
    }

    /// Returns the values in ascending order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &T> {
        self.values.iter().map(|(value, ())| value)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use rand::rngs::StdRng;
    use rand::{RngExt, SeedableRng};

    use super::{FEW_MAX, SortedMap, SortedSet};

    #[test]
    fn a_sorted_map_does_what_a_b_tree_map_does() {
        let mut random = StdRng::seed_from_u64(1);
        // With few keys the entries stay in the `Vec`; with many keys they move to the tree.
        for keys in [3, FEW_MAX as u32, 5 * FEW_MAX as u32] {
            let (mut map, mut set, mut expected) =
                (SortedMap::default(), SortedSet::default(), BTreeMap::new());
            for step in 0..2_000_u32 {
                // The map fills in the first half of each 500 steps, and becomes empty in the second half.
                let is_filling = step % 500 < 250;
                let key = random.random_range(0..keys);
                if random.random_bool(if is_filling { 0.8 } else { 0.05 }) {
                    assert_eq!(set.insert(key), !expected.contains_key(&key));
                    assert_eq!(map.insert(key, step), expected.insert(key, step));
                } else {
                    assert_eq!(set.remove(&key), expected.contains_key(&key));
                    assert_eq!(map.remove(&key), expected.remove(&key));
                }
                let other = random.random_range(0..keys);
                if let Some(value) = map.get_mut(&other) {
                    *value += 1;
                    expected.entry(other).and_modify(|value| *value += 1);
                }
                assert_eq!(map.get(&other), expected.get(&other));
                assert_eq!(set.contains(&other), expected.contains_key(&other));
                assert_eq!(map.iter().collect::<Vec<_>>(), expected.iter().collect::<Vec<_>>());
                assert_eq!(map.values().collect::<Vec<_>>(), expected.values().collect::<Vec<_>>());
                assert_eq!(map.first(), expected.first_key_value());
                assert_eq!((map.len(), map.is_empty()), (expected.len(), expected.is_empty()));
                assert_eq!((set.len(), set.is_empty()), (expected.len(), expected.is_empty()));
                assert_eq!(set.first(), expected.keys().next());
                let range = key.min(other)..=key.max(other);
                assert_eq!(set.first_in(&range), expected.range(range.clone()).next().map(|(key, _)| key));
            }
            assert!(map.values().eq(expected.values()));
        }
    }
}
