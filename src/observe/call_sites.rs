//! A table of the lines that call operations. A log stores the index of a line, because an index fits into a part of a word.

use std::sync::OnceLock;

use crate::types::Site;

/// The number of different lines that a table can hold. A program has far fewer lines that call operations.
const SITES_MAX: usize = 1 << 10;

/// The lines that have called operations. Threads use the table without locks, except while one of them adds a line.
pub(super) struct CallSites(Box<[OnceLock<Site>]>);

impl CallSites {
    pub(super) fn new() -> Self {
        Self((0..SITES_MAX).map(|_| OnceLock::new()).collect())
    }

    /// Returns the index of a line, from 1 on. Adds the line if it is new. Returns 0 if the table is full.
    pub(super) fn index_of(&self, site: Site) -> u16 {
        let start = site.place_hash() % SITES_MAX;
        for index in (start..SITES_MAX).chain(0..start) {
            if self.0[index].get_or_init(|| site).is_same_place(site) {
                return index as u16 + 1;
            }
        }
        0
    }

    /// Returns the line with this index.
    pub(super) fn get(&self, index: u16) -> Option<Site> {
        self.0.get(usize::from(index).checked_sub(1)?)?.get().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_line_has_one_index_until_the_table_is_full() {
        let sites = CallSites::new();
        let line = |line| Site::new("train.py", line);
        let indices: Vec<u16> = (0..SITES_MAX as u32).map(|number| sites.index_of(line(number))).collect();
        for (number, &index) in indices.iter().enumerate() {
            assert_eq!(sites.get(index), Some(line(number as u32)));
            assert_eq!(sites.index_of(line(number as u32)), index);
        }
        assert_eq!(sites.index_of(line(SITES_MAX as u32)), 0);
        assert_eq!(sites.get(0), None);
    }
}
