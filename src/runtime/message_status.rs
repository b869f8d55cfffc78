//! The status of a message.

use crate::types::{DType, Rank};

/// The sender, tag, type and length of a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Status {
    /// The sender.
    pub source: Rank,
    /// The tag.
    pub tag: u32,
    /// The type of the elements.
    pub dtype: DType,
    /// The number of elements.
    pub count: usize,
}
