//! The requests and replies between two ranks.
//!
//! Every message is a vector of 32-bit words: a code, four numbers of 64 bits, and a payload.

use crate::train::batch_queue::Assignment;

/// The number of words before the payload.
pub(super) const HEADER_WORDS: usize = 9;

/// A request or a reply.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Message<'a> {
    /// The [`GossipRequestKind`] of a request or the [`GossipReplyStatus`] of a reply.
    pub(super) code: u32,
    pub(super) numbers: [u64; 4],
    pub(super) payload: &'a [u32],
}

impl<'a> Message<'a> {
    pub(super) fn new(code: u32, numbers: [u64; 4], payload: &'a [u32]) -> Self {
        Self { code, numbers, payload }
    }

    pub(super) fn encode(&self) -> Vec<u32> {
        let mut words = Vec::with_capacity(HEADER_WORDS + self.payload.len());
        words.push(self.code);
        words.extend(self.numbers.iter().flat_map(|&number| [number as u32, (number >> 32) as u32]));
        words.extend_from_slice(self.payload);
        words
    }

    /// Returns `None` if there are fewer than [`HEADER_WORDS`] words.
    pub(super) fn decode(words: &'a [u32]) -> Option<Self> {
        let (header, payload) = words.split_at_checked(HEADER_WORDS)?;
        let number = |index: usize| u64::from(header[1 + 2 * index]) | u64::from(header[2 + 2 * index]) << 32;
        Some(Self { code: header[0], numbers: std::array::from_fn(number), payload })
    }
}

/// The kind of a request from one rank (the sender) to another rank (the receiver).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub(super) enum GossipRequestKind {
    /// Average the parameters in the payload with the parameters of the receiver. The payload of the reply holds the
    /// differences that the sender must subtract.
    Average = 1,
    /// Assign a part of a batch to the sender: see [`PartRequest`]. Only the coordinator answers.
    Part = 2,
    /// Return the parts of batches that the receiver has done. A new coordinator sends this request.
    DoneParts = 3,
    /// Add the parameters in the payload to the final average. Only the coordinator answers.
    FinalParameters = 4,
    /// Return the results of the run. Only the coordinator answers.
    Results = 5,
    /// Close the connection: the sender has the results and sends no more requests.
    Close = 6,
    /// End the run, because the loss of the sender is not finite. The payload is an error message. `numbers[0]` is the
    /// length of the error message in bytes.
    Diverged = 7,
}

impl GossipRequestKind {
    const ALL: [Self; 7] = [
        Self::Average,
        Self::Part,
        Self::DoneParts,
        Self::FinalParameters,
        Self::Results,
        Self::Close,
        Self::Diverged,
    ];

    pub(super) fn decode(code: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|&kind| kind as u32 == code)
    }
}

/// The largest number of 32-bit words of a text in a payload.
pub(super) const TEXT_WORDS_MAX: usize = 1 << 12;

/// How a rank answered a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub(super) enum GossipReplyStatus {
    /// The request is done.
    Done = 1,
    /// The request is not done. The sender may ask again.
    Wait = 2,
    /// The run has failed. The payload is the reason as text. `numbers[0]` is the kind of failure. `numbers[1]` is the
    /// length of the text in bytes.
    Failed = 3,
}

impl GossipReplyStatus {
    pub(super) fn decode(code: u32) -> Option<Self> {
        [Self::Done, Self::Wait, Self::Failed].into_iter().find(|&status| status as u32 == code)
    }
}

/// A request for a part of a batch. It is encoded in the four numbers of a message.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(super) struct PartRequest {
    /// The part whose gradient the sender has computed.
    pub(super) done: Option<DonePart>,
    /// Whether the sender has received a stop signal.
    pub(super) is_stopping: bool,
}

/// A part of a batch whose gradient a rank has computed.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(super) struct DonePart {
    /// The number of the part.
    pub(super) number: u64,
    /// The sum of the losses of the samples.
    pub(super) loss: f64,
    /// The number of samples.
    pub(super) samples: u64,
}

/// The bits of the first number of an encoded [`PartRequest`].
const IS_STOPPING_FLAG: u64 = 1;
const HAS_DONE_PART_FLAG: u64 = 2;

impl PartRequest {
    pub(super) fn encode(self) -> [u64; 4] {
        let DonePart { number, loss, samples } = self.done.unwrap_or_default();
        let done = if self.done.is_some() { HAS_DONE_PART_FLAG } else { 0 };
        let stopping = if self.is_stopping { IS_STOPPING_FLAG } else { 0 };
        [done | stopping, number, loss.to_bits(), samples]
    }

    pub(super) fn decode([flags, number, loss, samples]: [u64; 4]) -> Self {
        let done = DonePart { number, loss: f64::from_bits(loss), samples };
        Self {
            done: (flags & HAS_DONE_PART_FLAG != 0).then_some(done),
            is_stopping: flags & IS_STOPPING_FLAG != 0,
        }
    }
}

/// A reply to a request for a part. It is encoded in the four numbers of a message.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct PartReply {
    /// Whether the sender of the request applies its gradient. False if the request has no done part, or if another rank
    /// has already done the same part.
    pub(super) is_accepted: bool,
    /// What the sender of the request does next. [`Assignment::Batch`] holds the number of a part.
    pub(super) assignment: Assignment,
    /// All parts below this number are done.
    pub(super) done_before: u64,
}

/// The codes of [`Assignment`] in an encoded [`PartReply`].
const PART_CODE: u64 = 1;
const WAIT_CODE: u64 = 2;
const FINISHED_CODE: u64 = 3;

impl PartReply {
    pub(super) fn encode(self) -> [u64; 4] {
        let (code, number) = match self.assignment {
            Assignment::Batch(number) => (PART_CODE, number),
            Assignment::Wait => (WAIT_CODE, 0),
            Assignment::Finished => (FINISHED_CODE, 0),
        };
        [code, number, self.done_before, u64::from(self.is_accepted)]
    }

    /// Decodes the numbers of a reply. An unknown code becomes [`Assignment::Wait`], so the rank asks again.
    pub(super) fn decode([code, number, done_before, is_accepted]: [u64; 4]) -> Self {
        let assignment = match code {
            PART_CODE => Assignment::Batch(number),
            FINISHED_CODE => Assignment::Finished,
            _ => Assignment::Wait,
        };
        Self { is_accepted: is_accepted == 1, assignment, done_before }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decoded_messages_equal_the_encoded_messages() {
        for kind in GossipRequestKind::ALL {
            let message = Message::new(kind as u32, [0, u64::MAX, 1 << 40, 7], &[1, 2, 3]);
            assert_eq!(Message::decode(&message.encode()), Some(message));
            assert_eq!(GossipRequestKind::decode(message.code), Some(kind));
        }
        let part = DonePart { number: 1 << 50, loss: -0.25, samples: 9 };
        for (done, is_stopping) in [(None, true), (Some(part), false), (Some(part), true)] {
            let request = PartRequest { done, is_stopping };
            assert_eq!(PartRequest::decode(request.encode()), request);
        }
        for assignment in [Assignment::Batch(3), Assignment::Wait, Assignment::Finished] {
            let reply = PartReply { is_accepted: true, assignment, done_before: 1 << 33 };
            assert_eq!(PartReply::decode(reply.encode()), reply);
        }
    }

    #[test]
    fn short_and_unknown_messages_are_refused() {
        assert_eq!(Message::decode(&[1; HEADER_WORDS - 1]), None);
        for code in [0, 8, u32::MAX] {
            assert_eq!(GossipRequestKind::decode(code), None);
            assert_eq!(GossipReplyStatus::decode(code), None);
        }
    }
}
