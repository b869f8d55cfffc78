//! The connection of a client with one server: sends requests, and receives replies.

use std::ops::Range;

use super::encoding::PushEncoder;
use super::error::{ParameterServerError, RefusalReason};
use super::message::{
    HEADER_WORDS, ReplyHeader, ReplyStatus, RequestHeader, RequestKind, StrategyNote, payload_words_max,
    receive_header, receive_words, send_with_payload, send_words,
};
use crate::train::peer_link::{LinkFailure, MessageChannel, PeerLink};
use crate::train::text_words::decode_text;
use crate::types::Rank;

/// The connection with one server, and the memory for its messages.
pub(super) struct ServerLink {
    pub(super) link: PeerLink,
    /// The parameters that the server holds.
    pub(super) range: Range<usize>,
    /// The version of the parameters that the server sent last.
    pub(super) version: u64,
    /// Whether the reply to the current push contains parameters.
    wants_parameters: bool,
    /// Whether the gradient of the current request, and the parameters of its reply, are in the memory that the link shares.
    is_in_memory: bool,
    /// Encodes gradients. `None` if the client sends and receives `f32`.
    pub(super) encoder: Option<PushEncoder>,
    /// The request that this client sends next, or the reply that it received last.
    pub(super) buffer: Vec<u32>,
}

impl ServerLink {
    /// Creates the client's side of a connection with the server of these parameters.
    pub(super) fn new(link: PeerLink, range: Range<usize>) -> Self {
        let buffer = vec![0; HEADER_WORDS + payload_words_max(range.len())];
        Self { link, range, version: 0, wants_parameters: false, is_in_memory: false, encoder: None, buffer }
    }

    /// Sends the part of the gradient that belongs to this server's parameters. `gradient` is `None` if this part is already in
    /// the memory that the link shares.
    pub(super) fn start_push(
        &mut self,
        gradient: Option<&[f32]>,
        note: StrategyNote,
        wants_parameters: bool,
    ) -> Result<(), ParameterServerError> {
        self.wants_parameters = wants_parameters;
        let Some(gradient) = gradient else { return self.send_header_of_memory(RequestKind::Push, note) };
        if let Some(encoder) = &mut self.encoder {
            let words = encoder.codecs.push_words(self.range.len());
            let payload = &mut self.buffer[HEADER_WORDS..HEADER_WORDS + words];
            encoder.encode(&gradient[self.range.clone()], payload);
            return self.send_request(RequestKind::Push, note, words);
        }
        self.send_gradient(&gradient[self.range.clone()], note)
    }

    /// Sends the gradient of all of this server's parameters, without encoding it.
    fn send_gradient(&mut self, gradient: &[f32], note: StrategyNote) -> Result<(), ParameterServerError> {
        let payload: &[u32] = bytemuck::cast_slice(gradient);
        let copied = self.link.memory().map(|mut memory| memory.words().copy_from_slice(payload));
        if copied.is_some() {
            return self.send_header_of_memory(RequestKind::Push, note);
        }
        self.is_in_memory = false;
        self.encode_header(RequestKind::Push, note, 0);
        let sent = send_with_payload(&self.link, &mut self.buffer, payload, MessageChannel::Request);
        sent.map_err(|failure| self.server_lost_error(&failure))
    }

    /// Asks for all of this server's parameters.
    pub(super) fn start_pull(&mut self) -> Result<(), ParameterServerError> {
        if self.encoder.is_none() && self.link.memory().is_some() {
            return self.send_header_of_memory(RequestKind::Pull, StrategyNote::default());
        }
        self.send_request(RequestKind::Pull, StrategyNote::default(), 0)
    }

    /// Sends a request that gives the memory that the link shares to the server, until its reply.
    fn send_header_of_memory(
        &mut self,
        kind: RequestKind,
        note: StrategyNote,
    ) -> Result<(), ParameterServerError> {
        self.is_in_memory = true;
        self.encode_header(kind, note, 0);
        let sent = send_words(&self.link, &mut self.buffer[..HEADER_WORDS], MessageChannel::Request);
        sent.map_err(|failure| self.server_lost_error(&failure))
    }

    /// Sends the gradients of the parameters that are in `ranges` and on this server.
    pub(super) fn start_push_of_ranges(
        &mut self,
        ranges: &[Range<usize>],
        gradients: &[f32],
        note: StrategyNote,
    ) -> Result<(), ParameterServerError> {
        let parts = shard_parts_of_ranges(ranges, &self.range);
        self.wants_parameters = false;
        if let [RangeInShard { range, values }] = &parts[..]
            && range.len() == self.range.len()
        {
            // One range covers all parameters of the server. A push without ranges needs fewer words.
            return self.send_gradient(&gradients[values.clone()], note);
        }
        let mut at = self.write_ranges(&parts);
        for part in &parts {
            let values: &[u32] = bytemuck::cast_slice(&gradients[part.values.clone()]);
            self.buffer[at..at + values.len()].copy_from_slice(values);
            at += values.len();
        }
        self.send_request_with_ranges(RequestKind::PushRanges, note, parts.len(), at - HEADER_WORDS)
    }

    /// Sends a request without ranges. The payload is the `words` words after the header in `buffer`.
    pub(super) fn send_request(
        &mut self,
        kind: RequestKind,
        note: StrategyNote,
        words: usize,
    ) -> Result<(), ParameterServerError> {
        self.send_request_with_ranges(kind, note, 0, words)
    }

    /// Sends a request. The payload is the `words` words after the header in `buffer`, and begins with `ranges`
    /// ranges.
    pub(super) fn send_request_with_ranges(
        &mut self,
        kind: RequestKind,
        note: StrategyNote,
        ranges: usize,
        words: usize,
    ) -> Result<(), ParameterServerError> {
        self.is_in_memory &= kind == RequestKind::Await;
        self.encode_header(kind, note, ranges);
        let sent = send_words(&self.link, &mut self.buffer[..HEADER_WORDS + words], MessageChannel::Request);
        sent.map_err(|failure| self.server_lost_error(&failure))
    }

    fn encode_header(&mut self, kind: RequestKind, note: StrategyNote, ranges: usize) {
        let (version, wants_parameters) = (self.version, self.wants_parameters);
        let (ranges, is_encoded, is_in_memory) = (ranges as u32, self.encoder.is_some(), self.is_in_memory);
        let header =
            RequestHeader { kind, ranges, wants_parameters, is_encoded, is_in_memory, version, note };
        header.encode(&mut self.buffer);
    }

    /// Writes the ranges to `buffer` after the header. Returns the index of the word after the ranges.
    pub(super) fn write_ranges(&mut self, parts: &[RangeInShard]) -> usize {
        let mut at = HEADER_WORDS;
        for part in parts {
            self.buffer[at] = part.range.start as u32;
            self.buffer[at + 1] = part.range.len() as u32;
            at += 2;
        }
        at
    }

    /// Receives a reply, and returns its header and its payload. Returns an error if the server refused the request.
    pub(super) fn receive_reply(&mut self) -> Result<(ReplyHeader, &[u32]), ParameterServerError> {
        let received = receive_words(&self.link, &mut self.buffer, MessageChannel::Reply);
        let count = received.map_err(|failure| self.server_lost_error(&failure))?;
        self.decode_reply(count)
    }

    /// Decodes the first `count` words of `buffer`, which are a reply. Returns an error if the server refused the request.
    fn decode_reply(&self, count: usize) -> Result<(ReplyHeader, &[u32]), ParameterServerError> {
        let server = self.link.peer;
        let Some((header, payload)) = ReplyHeader::decode(&self.buffer[..count]) else {
            return Err(wrong_length_error(server));
        };
        if header.status == ReplyStatus::Refused {
            let problem = decode_text(payload, header.text_bytes.into());
            let reason = RefusalReason::from_code(header.note[0]);
            return Err(ParameterServerError::Refused { server, reason, problem });
        }
        Ok((header, payload))
    }

    /// Receives the reply to a push or a pull. While the server waits for other workers, repeats the request.
    pub(super) fn receive_parameters(
        &mut self,
        note: StrategyNote,
        mut parameters: Option<&mut [f32]>,
    ) -> Result<ReplyHeader, ParameterServerError> {
        loop {
            let header = match parameters.as_deref_mut() {
                Some(parameters) => {
                    let own = bytemuck::cast_slice_mut(&mut parameters[self.range.clone()]);
                    self.receive_reply_into(own)?
                }
                None => self.receive_reply()?.0,
            };
            if header.status == ReplyStatus::Waiting {
                self.send_request(RequestKind::Await, note, 0)?;
                continue;
            }
            if parameters.is_some() {
                self.version = header.version;
            }
            return Ok(header);
        }
    }

    /// Receives a reply, and its parameters into `target` unless the status is [`ReplyStatus::Waiting`].
    fn receive_reply_into(&mut self, target: &mut [u32]) -> Result<ReplyHeader, ParameterServerError> {
        if let Some(encoder) = self.encoder.take() {
            let reply = self.receive_reply();
            let parameters = bytemuck::cast_slice_mut(target);
            let decoded = reply.map(|(header, payload)| {
                let is_complete = header.status != ReplyStatus::Waiting;
                (header, if is_complete { encoder.codecs.decode_pull(payload, parameters) } else { Ok(()) })
            });
            self.encoder = Some(encoder);
            return match decoded? {
                (header, Ok(())) => Ok(header),
                (_, Err(_)) => Err(wrong_length_error(self.link.peer)),
            };
        }
        let received = receive_header(&self.link, &mut self.buffer, MessageChannel::Reply);
        let (count, is_long) = received.map_err(|failure| self.server_lost_error(&failure))?;
        let (header, payload) = self.decode_reply(count)?;
        if is_long {
            let received = self.link.receive(target, MessageChannel::Reply);
            let words = received.map_err(|failure| self.server_lost_error(&failure))?;
            return if words == target.len() { Ok(header) } else { Err(wrong_length_error(self.link.peer)) };
        }
        if header.status != ReplyStatus::Waiting {
            let mut memory = if self.is_in_memory { self.link.memory() } else { None };
            let payload = memory.as_mut().map_or(payload, |memory| memory.words());
            if payload.len() != target.len() {
                return Err(wrong_length_error(self.link.peer));
            }
            target.copy_from_slice(payload);
        }
        Ok(header)
    }

    fn server_lost_error(&self, failure: &LinkFailure) -> ParameterServerError {
        ParameterServerError::ServerLost { server: self.link.peer, problem: failure.problem().to_owned() }
    }
}

pub(super) fn wrong_length_error(server: Rank) -> ParameterServerError {
    let problem = "its reply does not have the expected length".to_owned();
    ParameterServerError::ServerLost { server, problem }
}

/// The part of a range that one server holds.
pub(super) struct RangeInShard {
    /// The range of the parameters, counted from the server's first parameter.
    pub(super) range: Range<usize>,
    /// The indices of this part's values in the caller's `gradients` or `values`.
    pub(super) values: Range<usize>,
}

/// Returns the parts of `ranges` that lie in `shard`. Merges a part with the next part if there is no gap between
/// them.
pub(super) fn shard_parts_of_ranges(ranges: &[Range<usize>], shard: &Range<usize>) -> Vec<RangeInShard> {
    let mut at = 0;
    let mut parts: Vec<RangeInShard> = Vec::new();
    for range in ranges {
        let (start, end) = (range.start.max(shard.start), range.end.min(shard.end));
        if start < end {
            let first = at + start - range.start;
            let (range, values) = (start - shard.start..end - shard.start, first..first + end - start);
            match parts.last_mut() {
                Some(last) if last.range.end == range.start => {
                    last.range.end = range.end;
                    last.values.end = values.end;
                }
                _ => parts.push(RangeInShard { range, values }),
            }
        }
        at += range.len();
    }
    parts
}
