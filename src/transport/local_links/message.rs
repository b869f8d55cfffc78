//! Messages in a queue without a frame. The first entry of a message has the fields of the frame in a shorter form, so a rank
//! that reads the link as bytes reads the frame, and a rank that waits for this message reads the message without the frame.

use crate::shm::{QueueError, QueueMessage};
use crate::types::{Contract, DType};
use crate::wire::frame::SEGMENT_BYTES_MAX;
use crate::wire::{FrameHeader, FrameKind};

/// The bits of a label's second word below the number of the message: the element type.
const DTYPE_BITS: u32 = 8;

/// A message that goes through a queue without a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LocalMessage {
    pub group: u32,
    pub tag: u32,
    /// The number of the message on its link.
    pub sequence: u64,
    pub dtype: DType,
    /// The number of bytes of all elements.
    pub bytes: usize,
}

/// What this rank receives next from a peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum NextFrame {
    Nothing,
    /// An accepted message, and the number of its first bytes, which have been copied.
    Message(LocalMessage, usize),
    /// A credit frame with this offset, which has been received.
    Credit(u64),
    /// Something else, or this rank does not know. It must be received as bytes.
    Other,
}

impl LocalMessage {
    /// Returns the words with which the sender describes the message.
    pub(super) fn label(&self) -> [u64; 2] {
        let dtype = u64::from(self.dtype.to_byte());
        [u64::from(self.group) | u64::from(self.tag) << 32, dtype | self.sequence << DTYPE_BITS]
    }

    #[inline]
    pub(super) fn from_entry(entry: &QueueMessage) -> Result<Self, QueueError> {
        let [group_and_tag, dtype_and_sequence] = entry.label;
        let dtype =
            DType::from_byte(dtype_and_sequence as u8).ok_or(QueueError::Label(dtype_and_sequence))?;
        let is_valid = entry.bytes.is_multiple_of(dtype.size_bytes()) && entry.bytes <= SEGMENT_BYTES_MAX;
        if !is_valid {
            return Err(QueueError::Label(dtype_and_sequence));
        }
        Ok(Self {
            group: group_and_tag as u32,
            tag: (group_and_tag >> 32) as u32,
            sequence: dtype_and_sequence >> DTYPE_BITS,
            dtype,
            bytes: entry.bytes,
        })
    }

    /// Returns the sender's call: all ranks compute the same contract from the fields of the message.
    pub fn contract(&self) -> Contract {
        Contract::message(self.dtype, (self.bytes / self.dtype.size_bytes()) as u64, self.tag)
    }

    /// Returns the header of the frame that the entry stands for.
    pub(crate) fn header(&self) -> FrameHeader {
        FrameHeader {
            kind: FrameKind::Data,
            group: self.group,
            sequence: self.sequence,
            contract: self.contract(),
            eager: true,
            payload_bytes: self.bytes as u32,
            ..FrameHeader::EMPTY
        }
    }
}
