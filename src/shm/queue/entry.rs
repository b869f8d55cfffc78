//! The entries of a queue, and what may be wrong with them.

use crate::shm::memory::WORD_BYTES;

/// The kind of an entry with bytes.
pub(super) const KIND_BYTES: u64 = 1;
/// The kind of the first entry of a queue.
pub(super) const KIND_BEGIN: u64 = 2;
/// The kind of an entry that begins a message.
pub(super) const KIND_MESSAGE: u64 = 3;
/// The most bytes of a message that are in its cell.
pub(super) const BYTES_IN_CELL_MAX: usize = 3 * WORD_BYTES;
/// The bit of word 2 which says that the passed buffer with the bytes belongs to the receiver after the entry.
pub(super) const PASSES_BUFFER: u64 = 1 << 63;
/// The half of a word that contains the kind.
pub(super) const KIND_MASK: u64 = (1 << 32) - 1;

/// What is wrong with the words that a peer has written. The text continues a sentence about the peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QueueError {
    /// The stamp of a cell is neither the stamp of the next entry nor an earlier one.
    #[error("it wrote the invalid entry number {0} to shared memory")]
    Stamp(u64),
    /// The kind of an entry is unknown, or the entry may not be at this place.
    #[error("it wrote an entry of the invalid kind {0} to shared memory")]
    Kind(u64),
    /// The bytes of an entry are neither inside the arena nor inside a passed buffer of the sender.
    #[error("it wrote an entry of {bytes} bytes at offset {start} of shared memory, where it may not write")]
    Bytes {
        /// Where the bytes begin, from the start of the arena.
        start: u64,
        /// The number of bytes.
        bytes: u64,
    },
    /// The receiver has counted fewer entries than before, or more entries than there are.
    #[error("it claims to have read {0} entries of shared memory, which is impossible")]
    ReadCount(u64),
    /// The label of a message is wrong.
    #[error("it wrote a message with the invalid label {0:#x} to shared memory")]
    Label(u64),
}

/// A message that begins with the next entry of a queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct QueueMessage {
    /// What the sender says about the message.
    pub label: [u64; 2],
    /// The number of bytes of the message. Those that are not in this entry are in the entries after it.
    pub bytes: usize,
    pub(super) first: EntryBytes,
}

/// The bytes of an entry, or those that have not been read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct EntryBytes {
    /// Where they begin in the memory.
    pub(super) start: usize,
    pub(super) count: u32,
    /// The passed buffer that belongs to the receiver after the entry.
    pub(super) passed: Option<u8>,
}

impl EntryBytes {
    pub(super) const NONE: Self = Self { start: 0, count: 0, passed: None };
}

/// What the next entry of a queue is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NextEntry {
    /// There is no entry.
    Nothing,
    /// Bytes of the link.
    Bytes,
    /// A message, of which nothing has been read.
    Message(QueueMessage),
}
