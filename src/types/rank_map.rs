//! A map whose keys are ranks.

use super::rank::Rank;

/// A map from ranks to values, which iterates in rank order. A lookup is one access by index, because links are looked up several
/// times for each message. An empty place takes one pointer, so a map with few ranks stays small even in a large world.
#[derive(Debug)]
pub(crate) struct RankMap<T> {
    values: Vec<Option<Box<T>>>,
    /// The ranks with values, in ascending order.
    ranks: Vec<Rank>,
}

impl<T> Default for RankMap<T> {
    fn default() -> Self {
        Self { values: Vec::new(), ranks: Vec::new() }
    }
}

impl<T> RankMap<T> {
    /// Inserts a value. Returns the previous value of the rank.
    pub(crate) fn insert(&mut self, rank: Rank, value: T) -> Option<T> {
        self.add(rank);
        self.values[rank.index()].replace(Box::new(value)).map(|previous| *previous)
    }

    pub(crate) fn get(&self, rank: Rank) -> Option<&T> {
        self.values.get(rank.index())?.as_deref()
    }

    pub(crate) fn get_mut(&mut self, rank: Rank) -> Option<&mut T> {
        self.values.get_mut(rank.index())?.as_deref_mut()
    }

    /// Returns the value of a rank. If the rank has none, inserts the default value.
    pub(crate) fn get_or_default(&mut self, rank: Rank) -> &mut T
    where
        T: Default,
    {
        if !self.contains(rank) {
            self.add(rank);
        }
        self.values[rank.index()].get_or_insert_default()
    }

    pub(crate) fn contains(&self, rank: Rank) -> bool {
        self.get(rank).is_some()
    }

    /// Returns the ranks and their values in rank order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (Rank, &T)> {
        self.ranks.iter().filter_map(|&rank| Some((rank, self.get(rank)?)))
    }

    /// Returns the values in rank order.
    pub(crate) fn values_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.values.iter_mut().filter_map(Option::as_deref_mut)
    }

    /// Adds a rank that may not be in the map. The caller then sets its value.
    fn add(&mut self, rank: Rank) {
        if let Err(place) = self.ranks.binary_search(&rank) {
            self.ranks.insert(place, rank);
            self.values.resize_with(self.values.len().max(rank.index() + 1), || None);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_map_has_the_values_of_ranks_in_their_order() {
        let mut map = RankMap::default();
        assert_eq!(map.insert(Rank::new(5), 50), None);
        assert_eq!(map.insert(Rank::new(5), 51), Some(50));
        *map.get_or_default(Rank::new(2)) += 20;
        *map.get_or_default(Rank::new(5)) += 1;
        map.values_mut().for_each(|value| *value += 1);
        assert_eq!(map.iter().collect::<Vec<_>>(), [(Rank::new(2), &21), (Rank::new(5), &53)]);
        for rank in 0..8 {
            let (rank, expected) = (
                Rank::new(rank),
                match rank {
                    2 => Some(21),
                    5 => Some(53),
                    _ => None,
                },
            );
            assert_eq!((map.get(rank).copied(), map.get_mut(rank).copied()), (expected, expected));
            assert_eq!(map.contains(rank), expected.is_some());
        }
    }
}
