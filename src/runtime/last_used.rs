//! A list of the values that were used last.

/// The most values that a list has.
const VALUES_MAX: usize = 32;

/// Values that were used, the last one at the end.
pub(crate) struct LastUsed<T>(Vec<T>);

impl<T> LastUsed<T> {
    pub(crate) fn new() -> Self {
        Self(Vec::new())
    }

    /// Removes and returns the last value for which `is_wanted` returns true.
    #[inline]
    pub(crate) fn take(&mut self, is_wanted: impl Fn(&T) -> bool) -> Option<T> {
        let index = self.0.iter().rposition(is_wanted)?;
        Some(self.0.remove(index))
    }

    /// Adds a value. If there are too many, removes the oldest.
    #[inline]
    pub(crate) fn keep(&mut self, value: T) {
        if self.0.len() == VALUES_MAX {
            self.0.remove(0);
        }
        self.0.push(value);
    }
}
