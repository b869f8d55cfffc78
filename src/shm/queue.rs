//! A queue of entries from one rank of a host to another, in shared memory.
//!
//! Each entry has a cell of 64 bytes. A cell is one cache line. The bytes of an entry are in the arena, a ring of memory,
//! or in a passed buffer. The words of a cell are:
//!
//! | word | content |
//! |---|---|
//! | 0 | the stamp: the number of the entry plus 1. The sender writes the stamp last |
//! | 1 | the kind of the entry in the lower half, the number of its bytes in the upper half |
//! | 2 | for bytes: where they begin, and whether the buffer is passed on. For a beginning: how many bytes went over the socket |
//! | 3, 4 | for a message: its label |
//! | 5 to 7 | the bytes of a message of at most 24 bytes, which are not in the arena |
//! | 5 | the length of a longer message |
//!
//! A message may be longer than its entry. The next entries then have kind "bytes", and contain the rest of the message. So the
//! receiver can copy the first bytes while the sender still writes the next ones.
//!
//! The sender reuses a cell and its part of the arena when the receiver has counted the entry as read.
//!
//! The two ranks also have two passed buffers (ADR 99). Each belongs to one of them, at first one to each. A rank writes a
//! message that is neither too short nor too long into a buffer of its own, if it has one. Then the buffer belongs to the
//! receiver. The place of bytes in a passed buffer counts from the start of the arena, as if both buffers were behind it.
//!
//! Each word of a peer is read once and then checked. A wrong word gives a [`QueueError`], and nothing is read or written
//! outside the queue and the two passed buffers. A rank that stops in the middle of an entry, or passes a buffer that it does
//! not own, harms only its own messages. But every rank of the host can write to the whole memory, so a rank that writes outside
//! its queues can harm all messages of the host, and can make ranks wait until their deadlines.

mod entry;
mod receiver;
mod sender;
#[cfg(test)]
mod tests;

pub use entry::{NextEntry, QueueError, QueueMessage};
pub use receiver::QueueReceiver;
pub use sender::QueueSender;
