//! Whether the ranks of a run can compress what they send to each other.

use crate::codec::Compression;
use crate::group::Group;
use crate::types::WorldSize;

/// Whether the ranks of a run could compress what they send to each other.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum CompressionReach {
    /// They could.
    #[default]
    Full,
    /// There is only one rank.
    OneRank,
    /// All ranks share memory, in which they exchange exact elements.
    SharedMemory,
    /// All ranks are on one host, within which `auto` sends exact elements, and no tensor has another compression.
    OneHost,
}

impl CompressionReach {
    /// Returns whether the ranks of `group` can compress anything, if their tensors have these compressions. Returns the same on
    /// all ranks.
    pub(crate) fn new(group: &Group, mut codecs: impl Iterator<Item = Compression>) -> Self {
        let is_exact = |codec| matches!(codec, Compression::Auto(_) | Compression::None);
        if group.size() == WorldSize::ONE {
            Self::OneRank
        } else if group.shares_memory() {
            Self::SharedMemory
        } else if group.local_size() == group.size() && codecs.all(is_exact) {
            Self::OneHost
        } else {
            Self::Full
        }
    }
}
