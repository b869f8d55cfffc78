//! A queue of entries from one rank of a host to another, in shared memory.
//!
//! Each entry has a cell of 64 bytes. A cell is one cache line. The bytes of an entry are in the arena, a ring of memory,
//! or in a passed buffer. The words of a cell are:
//!
//! | word | content |
//! |---|---|
//! | 0 | the stamp: the number of the entry plus 1. The sender writes the stamp last |
//! | 1 | the kind of the entry in the lower half, the number of its bytes in the upper half |
//! | 2 | for bytes: where they begin, and [`PASSES_BUFFER`]. For a beginning: how many bytes the sender has sent over the socket |
//! | 3, 4 | for a message: its label |
//! | 5 to 7 | the bytes of a message of at most 24 bytes, which are not in the arena |
//! | 5 | the length of a longer message |
//!
//! A message may be longer than its entry. The next entries then have kind "bytes", and contain the rest of the message. So the
//! receiver can copy the first bytes while the sender still writes the next ones.
//!
//! The sender reuses a cell and its part of the arena when the receiver has counted the entry as read.
//!
//! The two ranks also have two passed buffers. Each belongs to one of them, at first one to each. A rank writes a message that is
//! neither too short nor too long into a buffer of its own, if it has one. Then the buffer belongs to the receiver, which sends
//! its answer in it: the memory is still in the cache of its processor (ADR 99). The place of bytes in a passed buffer counts
//! from the start of the arena, as if both buffers were behind the arena.
//!
//! Each word of a peer is read once and then checked. A wrong word gives a [`QueueError`], and nothing is read or written
//! outside the queue and the two passed buffers. A rank that stops in the middle of an entry harms only its own messages. Every rank of the host can
//! write to the whole memory, so a rank that writes outside its queues can harm all messages of the host, and can make ranks
//! wait until their deadlines.

mod receiver;
mod sender;
#[cfg(test)]
mod tests;

pub use receiver::QueueReceiver;
pub use sender::QueueSender;

use super::memory::WORD_BYTES;

/// The kind of an entry with bytes.
const KIND_BYTES: u64 = 1;
/// The kind of the first entry of a queue.
const KIND_BEGIN: u64 = 2;
/// The kind of an entry that begins a message.
const KIND_MESSAGE: u64 = 3;
/// The most bytes of a message that are in its cell.
const BYTES_IN_CELL_MAX: usize = 3 * WORD_BYTES;
/// The bit of word 2 which says that the passed buffer with the bytes belongs to the receiver after the entry.
const PASSES_BUFFER: u64 = 1 << 63;
/// The half of a word that contains the kind.
const KIND_MASK: u64 = (1 << 32) - 1;

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
    first: EntryBytes,
}

/// The bytes of an entry, or those that have not been read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct EntryBytes {
    /// Where they begin in the memory.
    start: usize,
    count: u32,
    /// The passed buffer that belongs to the receiver after the entry.
    passed: Option<u8>,
}

impl EntryBytes {
    const NONE: Self = Self { start: 0, count: 0, passed: None };
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

/// The result of [`QueueReceiver::read`].
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct QueueRead {
    /// The number of bytes that were copied.
    pub bytes: usize,
    /// Whether an entry has been read completely, so that the sender has more space.
    pub has_freed_space: bool,
}
