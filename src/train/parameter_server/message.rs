//! The requests of clients and the replies of servers.
//!
//! A request or a reply is a vector of 32-bit words: a header of [`HEADER_WORDS`] words, and a payload. A push without ranges,
//! and the reply to a pull without ranges, have one word of payload for each parameter of the shard: the bits of an f32.
//!
//! A short payload is sent together with its header. A payload of more than [`JOINED_PAYLOAD_WORDS_MAX`] words is a message of
//! its own, so that a client need not copy its gradient behind a header, nor the parameters from behind a header. If both ranks
//! share memory, long gradients and parameters are no messages: the client writes the gradient to this memory, and the server
//! replaces it by the parameters.

use crate::train::peer_link::{LinkFailure, MessageChannel, PeerLink};

/// The number of words of a header.
pub(super) const HEADER_WORDS: usize = 21;
/// The largest number of words of a payload that is sent together with its header. Longer messages between ranks of one host
/// would not fit into an entry of a queue (32 KiB).
pub(super) const JOINED_PAYLOAD_WORDS_MAX: usize = (32 << 10) / 4 - HEADER_WORDS;
/// The number of 64-bit words of a [`StrategyNote`].
pub(crate) const NOTE_WORDS: usize = 7;

/// The maximum length, in words, of the text in a reply with [`ReplyStatus::Refused`].
pub(super) const REFUSAL_TEXT_WORDS_MAX: usize = 256;

/// Returns the maximum number of words of a payload for a shard of `shard_len` parameters. A push of k ranges needs
/// two words for each range and one word for each gradient. There is a gap of at least one parameter between two
/// ranges. This limits k to `shard_len / 2`, rounded up, and the number of gradients to `shard_len - (k - 1)`.
pub(super) const fn payload_words_max(shard_len: usize) -> usize {
    let words = shard_len + shard_len.div_ceil(2) + 1;
    if words > REFUSAL_TEXT_WORDS_MAX { words } else { REFUSAL_TEXT_WORDS_MAX }
}

/// Numbers that a training strategy attaches to a request or to a reply. The parameter server does not interpret
/// these numbers.
pub(crate) type StrategyNote = [u64; NOTE_WORDS];

/// Sends a header and its payload. `buffer` begins with the encoded header, and has space for a short payload after it.
pub(super) fn send_with_payload(
    link: &PeerLink,
    buffer: &mut [u32],
    payload: &[u32],
    channel: MessageChannel,
) -> Result<(), LinkFailure> {
    buffer[PAYLOAD_WORDS_AT] = payload.len() as u32;
    if payload.len() > JOINED_PAYLOAD_WORDS_MAX {
        link.send(&buffer[..HEADER_WORDS], channel)?;
        return link.send(payload, channel);
    }
    let words = HEADER_WORDS + payload.len();
    buffer[HEADER_WORDS..words].copy_from_slice(payload);
    link.send(&buffer[..words], channel)
}

/// Sends `words`: an encoded header and its payload.
pub(super) fn send_words(
    link: &PeerLink,
    words: &mut [u32],
    channel: MessageChannel,
) -> Result<(), LinkFailure> {
    let payload_words = words.len() - HEADER_WORDS;
    words[PAYLOAD_WORDS_AT] = payload_words as u32;
    if payload_words > JOINED_PAYLOAD_WORDS_MAX {
        let (header, payload) = words.split_at(HEADER_WORDS);
        link.send(header, channel)?;
        return link.send(payload, channel);
    }
    link.send(words, channel)
}

/// Receives a header, and its payload if it is short. Returns the number of words received, and whether the payload follows as a
/// message of its own.
pub(super) fn receive_header(
    link: &PeerLink,
    buffer: &mut [u32],
    channel: MessageChannel,
) -> Result<(usize, bool), LinkFailure> {
    let count = link.receive(buffer, channel)?;
    let is_long = count == HEADER_WORDS && buffer[PAYLOAD_WORDS_AT] as usize > JOINED_PAYLOAD_WORDS_MAX;
    Ok((count, is_long))
}

/// Receives a header and its payload. Returns the number of words.
pub(super) fn receive_words(
    link: &PeerLink,
    buffer: &mut [u32],
    channel: MessageChannel,
) -> Result<usize, LinkFailure> {
    match receive_header(link, buffer, channel)? {
        (count, false) => Ok(count),
        (count, true) => Ok(count + link.receive(&mut buffer[HEADER_WORDS..], channel)?),
    }
}

/// The kind of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub(super) enum RequestKind {
    /// Return the current parameters.
    Pull = 1,
    /// Apply the gradient in the payload. The reply may contain the new parameters.
    Push = 2,
    /// Continue to wait for the result of a push that the server answered with [`ReplyStatus::Waiting`].
    Await = 3,
    /// Apply the gradients of some ranges of the parameters. The payload holds the ranges, then their gradients.
    PushRanges = 4,
    /// Return the current parameters of some ranges. The payload holds the ranges.
    PullRanges = 5,
    /// Return a note. The reply has no payload.
    Note = 6,
    /// Return the state vectors of the optimizer, one after the other.
    State = 7,
    /// Return the words that the server's [`RequestHandler`](super::RequestHandler) has published.
    Publication = 8,
    /// Close the link. The client sends no more requests.
    Close = 9,
}

impl RequestKind {
    const ALL: [Self; 9] = [
        Self::Pull,
        Self::Push,
        Self::Await,
        Self::PushRanges,
        Self::PullRanges,
        Self::Note,
        Self::State,
        Self::Publication,
        Self::Close,
    ];
}

/// The header of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct RequestHeader {
    pub(super) kind: RequestKind,
    /// The number of ranges in the payload.
    pub(super) ranges: u32,
    /// Whether the reply to a push contains the new parameters.
    pub(super) wants_parameters: bool,
    /// Whether the gradient in the payload is encoded, and the parameters in the reply too: see
    /// [`MessageCodecs`](super::MessageCodecs).
    pub(super) is_encoded: bool,
    /// Whether the gradient of the request, and the parameters of the reply, are in the memory that the link shares.
    pub(super) is_in_memory: bool,
    /// The version of the parameters with which the client computed its gradient.
    pub(super) version: u64,
    pub(super) note: StrategyNote,
}

/// How a server answered a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub(super) enum ReplyStatus {
    /// The request is done.
    Done = 1,
    /// The server dropped the gradient because of its staleness.
    Stale = 2,
    /// The server dropped the gradient because its [`RequestHandler`](super::RequestHandler) did not want the
    /// gradient.
    Unwanted = 3,
    /// The request is not done yet. After a push, the client sends [`RequestKind::Await`] next. After
    /// [`RequestKind::Publication`], the client repeats the request.
    Waiting = 4,
    /// The server refused the request. The payload holds the reason as text.
    Refused = 5,
}

impl ReplyStatus {
    const ALL: [Self; 5] = [Self::Done, Self::Stale, Self::Unwanted, Self::Waiting, Self::Refused];
}

/// The header of a reply.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct ReplyHeader {
    pub(super) status: ReplyStatus,
    /// The length in bytes of the text in the payload of a [`ReplyStatus::Refused`]. 0 for every other status.
    pub(super) text_bytes: u32,
    /// The version of the server's parameters after the request. If the payload has parameters, this is their version.
    pub(super) version: u64,
    /// The staleness of the gradient that the client pushed. 0 for other requests.
    pub(super) staleness: u64,
    pub(super) note: StrategyNote,
}

impl RequestHeader {
    /// Writes the header to the first words of `words`.
    pub(super) fn encode(&self, words: &mut [u32]) {
        let &Self { kind, ranges, wants_parameters, is_encoded, is_in_memory, version, note } = self;
        let extra = u64::from(wants_parameters) | u64::from(is_encoded) << 1 | u64::from(is_in_memory) << 2;
        HeaderFields { code: kind as u32, count: ranges, version, note, extra }.encode(words);
    }

    /// Returns whether the reply has all parameters, unless the server refuses the request or has not performed it yet.
    pub(super) fn gets_parameters(&self) -> bool {
        match self.kind {
            RequestKind::Pull => true,
            RequestKind::Push | RequestKind::Await => self.wants_parameters,
            _ => false,
        }
    }

    /// Returns the header and the payload of a message. Returns `None` if the message is too short or has an unknown
    /// kind.
    pub(super) fn decode(words: &[u32]) -> Option<(Self, &[u32])> {
        let (HeaderFields { code, count, version, note, extra }, payload) = HeaderFields::decode(words)?;
        let kind = RequestKind::ALL.into_iter().find(|&kind| kind as u32 == code)?;
        let [wants_parameters, is_encoded, is_in_memory] = [1, 2, 4].map(|bit| extra & bit != 0);
        let header = Self { kind, ranges: count, wants_parameters, is_encoded, is_in_memory, version, note };
        Some((header, payload))
    }
}

impl ReplyHeader {
    /// Writes the header to the first words of `words`.
    pub(super) fn encode(&self, words: &mut [u32]) {
        let &Self { status, text_bytes, version, staleness, note } = self;
        HeaderFields { code: status as u32, count: text_bytes, version, note, extra: staleness }
            .encode(words);
    }

    /// Returns the header and the payload of a message. Returns `None` if the message is too short or has an unknown
    /// status.
    pub(super) fn decode(words: &[u32]) -> Option<(Self, &[u32])> {
        let (HeaderFields { code, count, version, note, extra }, payload) = HeaderFields::decode(words)?;
        let status = ReplyStatus::ALL.into_iter().find(|&status| status as u32 == code)?;
        Some((Self { status, text_bytes: count, version, staleness: extra, note }, payload))
    }
}

/// The index of the word of a header that has the number of words of the payload. The functions that send a message write it.
const PAYLOAD_WORDS_AT: usize = 2;

/// The fields of a header in the order of their words: code, count, number of words of the payload, version (2 words), note (14
/// words), extra (2 words). The low word of a 64-bit number comes first.
struct HeaderFields {
    /// The kind of a request or the status of a reply.
    code: u32,
    /// In a request, the number of ranges. In a reply, the length of the text in bytes.
    count: u32,
    version: u64,
    note: StrategyNote,
    /// In a request, 1 if the client wants parameters, plus 2 if the values are encoded, plus 4 if they are in the memory of the
    /// link. In a reply, the staleness.
    extra: u64,
}

impl HeaderFields {
    fn encode(&self, words: &mut [u32]) {
        words[0] = self.code;
        words[1] = self.count;
        let numbers = std::iter::once(self.version).chain(self.note).chain([self.extra]);
        for (pair, number) in words[3..HEADER_WORDS].chunks_exact_mut(2).zip(numbers) {
            pair.copy_from_slice(&[number as u32, (number >> 32) as u32]);
        }
    }

    fn decode(words: &[u32]) -> Option<(Self, &[u32])> {
        let (header, payload) = words.split_at_checked(HEADER_WORDS)?;
        let number = |at: usize| u64::from(header[at]) | u64::from(header[at + 1]) << 32;
        let note = std::array::from_fn(|index| number(5 + 2 * index));
        let extra = number(HEADER_WORDS - 2);
        Some((Self { code: header[0], count: header[1], version: number(3), note, extra }, payload))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decoded_headers_equal_the_encoded_headers() {
        for kind in RequestKind::ALL {
            let (wants_parameters, note) = (kind == RequestKind::Push, [1, 2 << 40, 3, 4, 5, 6, 7]);
            let (is_encoded, is_in_memory) = (kind == RequestKind::Pull, kind == RequestKind::Await);
            let version = u64::MAX - 1;
            let header =
                RequestHeader { kind, ranges: 7, wants_parameters, is_encoded, is_in_memory, version, note };
            let mut words = [u32::MAX; HEADER_WORDS + 2];
            header.encode(&mut words);
            assert_eq!(RequestHeader::decode(&words), Some((header, &[u32::MAX; 2][..])));
        }
        for status in ReplyStatus::ALL {
            let note = [9, 8, 7, 6, 5, 4, u64::MAX];
            let header = ReplyHeader { status, text_bytes: 3, version: 1 << 50, staleness: 1 << 33, note };
            let mut words = [u32::MAX; HEADER_WORDS];
            header.encode(&mut words);
            assert_eq!(ReplyHeader::decode(&words), Some((header, &[][..])));
        }
    }

    #[test]
    fn the_largest_payload_has_room_for_every_request() {
        for len in 1..1000 {
            let words = payload_words_max(len);
            assert!(words >= len && words >= REFUSAL_TEXT_WORDS_MAX, "{len}");
            for ranges in 1..=len.div_ceil(2) {
                let values = len - (ranges - 1);
                assert!(words >= 2 * ranges + values, "{len} {ranges}");
            }
        }
    }

    #[test]
    fn short_and_unknown_messages_are_refused() {
        assert_eq!(RequestHeader::decode(&[1; HEADER_WORDS - 1]), None);
        assert_eq!(ReplyHeader::decode(&[]), None);
        for code in [0, 10, u32::MAX] {
            let mut words = [0; HEADER_WORDS];
            words[0] = code;
            assert_eq!(RequestHeader::decode(&words), None);
            assert_eq!(ReplyHeader::decode(&words), None);
        }
    }
}
