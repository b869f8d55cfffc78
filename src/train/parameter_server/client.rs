//! The client of the servers: pushes gradients to all servers, and pulls parameters from all servers.

use std::ops::Range;
use std::sync::MutexGuard;

use super::encoding::{MessageCodecs, PushEncoder};
use super::error::{ParameterServerError, RefusalReason};
use super::links::ShardLayout;
use super::message::{
    HEADER_WORDS, ReplyHeader, ReplyStatus, RequestHeader, RequestKind, StrategyNote, payload_words_max,
    receive_header, receive_words, send_with_payload, send_words,
};
use super::shard::PushOutcome;
use crate::codec::Compression;
use crate::group::Messenger;
use crate::shm::HandoverBuffer;
use crate::train::peer_link::{LinkFailure, MessageChannel, PeerLink};
use crate::train::text_words::decode_text;
use crate::types::Rank;

/// The connections of a client with its servers.
pub(crate) struct ServerClient {
    links: Vec<ServerLink>,
    is_synchronous: bool,
}

/// The connection with one server, and the memory for its messages.
struct ServerLink {
    link: PeerLink,
    /// The parameters that the server holds.
    range: Range<usize>,
    /// The version of the parameters that the server sent last.
    version: u64,
    /// Whether the reply to the current push contains parameters.
    wants_parameters: bool,
    /// Whether the gradient of the current request, and the parameters of its reply, are in the memory that the link shares.
    is_in_memory: bool,
    /// Encodes gradients. `None` if the client sends and receives `f32`.
    encoder: Option<PushEncoder>,
    /// The request that this client sends next, or the reply that it received last.
    buffer: Vec<u32>,
}

/// The result of a push.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct PushReply {
    /// What each server did with its part of the gradient.
    pub(crate) outcomes: Vec<PushOutcome>,
    /// The note in the reply of the first server.
    pub(crate) note: StrategyNote,
}

impl ServerClient {
    /// Creates a client. `links` are the connections with its servers.
    pub(crate) fn new(links: Vec<PeerLink>, layout: &ShardLayout, is_synchronous: bool) -> Self {
        let server_link = |link: PeerLink| {
            let range = layout.range(link.peer);
            ServerLink {
                link,
                version: 0,
                wants_parameters: false,
                is_in_memory: false,
                encoder: None,
                buffer: vec![0; HEADER_WORDS + payload_words_max(range.len())],
                range,
            }
        };
        Self { links: links.into_iter().map(server_link).collect(), is_synchronous }
    }

    /// Makes the worker `rank` push encoded gradients, and receive encoded parameters, if `compression` is not none.
    pub(crate) fn compressed(mut self, compression: Compression, rank: Rank) -> Self {
        for server in &mut self.links {
            let len = server.range.len();
            if let Some(codecs) = MessageCodecs::new(compression) {
                let words = codecs.push_words(len).max(payload_words_max(len));
                server.buffer.resize(HEADER_WORDS + words, 0);
                server.encoder = Some(PushEncoder::new(codecs, len, rank.get()));
            }
        }
        self
    }

    /// Receives the current parameters from each server to which this rank is connected. Parameters of other servers
    /// stay unchanged.
    pub(crate) fn pull(&mut self, parameters: &mut [f32]) -> Result<(), ParameterServerError> {
        for server in &mut self.links {
            server.start_pull()?;
        }
        for server in &mut self.links {
            server.receive_parameters(StrategyNote::default(), Some(&mut *parameters))?;
        }
        Ok(())
    }

    /// Returns memory for a gradient that [`push`](Self::push) need not copy. Returns `None` if there are several servers, or if
    /// this rank and its server share no memory.
    pub(crate) fn gradient_memory(&self) -> Option<MutexGuard<'_, HandoverBuffer>> {
        match &self.links[..] {
            [server] if server.encoder.is_none() => server.link.memory(),
            _ => None,
        }
    }

    /// Sends a gradient to all servers. Compute the gradient with the parameters that this client received last. `gradient` is
    /// `None` if it is in [`gradient_memory`](Self::gradient_memory). If the first server drops the gradient, the client does not
    /// send it to the other servers. If `parameters` is `Some`, also receives the new parameters.
    pub(crate) fn push(
        &mut self,
        gradient: Option<&[f32]>,
        note: StrategyNote,
        mut parameters: Option<&mut [f32]>,
    ) -> Result<PushReply, ParameterServerError> {
        let mut pushed = PushReply { outcomes: Vec::with_capacity(self.links.len()), note };
        let (first, others) = self.links.split_first_mut().expect("a client has a server");
        first.start_push(gradient, note, parameters.is_some())?;
        if self.is_synchronous {
            // A synchronous server drops no gradient, so the client pushes to all servers before it waits for a
            // reply.
            for server in &mut *others {
                server.start_push(gradient, note, parameters.is_some())?;
            }
        }
        let header = first.receive_parameters(note, parameters.as_deref_mut())?;
        pushed.outcomes.push(outcome_of_push(&header));
        pushed.note = header.note;
        let is_applied = header.status == ReplyStatus::Done;
        if !self.is_synchronous {
            for server in &mut *others {
                match (is_applied, parameters.is_some()) {
                    (true, wants_parameters) => server.start_push(gradient, note, wants_parameters)?,
                    (false, true) => server.start_pull()?,
                    (false, false) => {}
                }
            }
        }
        for server in others {
            if !is_applied && parameters.is_none() {
                pushed.outcomes.push(pushed.outcomes[0]);
                continue;
            }
            let header = server.receive_parameters(note, parameters.as_deref_mut())?;
            pushed.outcomes.push(if is_applied { outcome_of_push(&header) } else { pushed.outcomes[0] });
        }
        Ok(pushed)
    }

    /// Sends the gradients of some ranges of the parameters. The ranges must be ascending and must not overlap.
    /// `gradients` holds the gradients of all ranges, in the order of `ranges`.
    pub(crate) fn push_ranges(
        &mut self,
        ranges: &[Range<usize>],
        gradients: &[f32],
        note: StrategyNote,
    ) -> Result<PushReply, ParameterServerError> {
        let mut pushed = PushReply { outcomes: Vec::with_capacity(self.links.len()), note };
        for (index, server) in self.links.iter_mut().enumerate() {
            if index > 0 && !matches!(pushed.outcomes[0], PushOutcome::Applied { .. }) {
                pushed.outcomes.push(pushed.outcomes[0]);
                continue;
            }
            server.start_push_of_ranges(ranges, gradients, note)?;
            let header = server.receive_parameters(note, None)?;
            pushed.outcomes.push(outcome_of_push(&header));
            if index == 0 {
                pushed.note = header.note;
            }
        }
        Ok(pushed)
    }

    /// Receives the current parameters of some ranges, and writes them to `values` in the order of `ranges`. The
    /// ranges must be ascending and must not overlap.
    pub(crate) fn pull_ranges(
        &mut self,
        ranges: &[Range<usize>],
        values: &mut [f32],
    ) -> Result<(), ParameterServerError> {
        let mut wanted = Vec::with_capacity(self.links.len());
        for server in &mut self.links {
            let parts = shard_parts_of_ranges(ranges, &server.range);
            // The list of ranges has two words for each range. If the list would be longer than all parameters, request
            // all parameters.
            if 2 * parts.len() > server.range.len() {
                server.send_request(RequestKind::Pull, StrategyNote::default(), 0)?;
                wanted.push((true, parts));
            } else {
                let words = server.write_ranges(&parts) - HEADER_WORDS;
                server.send_request_with_ranges(
                    RequestKind::PullRanges,
                    StrategyNote::default(),
                    parts.len(),
                    words,
                )?;
                wanted.push((false, parts));
            }
        }
        for (server, (is_dense, parts)) in self.links.iter_mut().zip(wanted) {
            let rank = server.link.peer;
            let (header, payload) = server.receive_reply()?;
            let payload: &[f32] = bytemuck::cast_slice(payload);
            let mut at = 0;
            for part in parts {
                let len = part.values.len();
                let position = if is_dense { part.range.clone() } else { at..at + len };
                let source = payload.get(position).ok_or_else(|| wrong_length_error(rank))?;
                values[part.values.clone()].copy_from_slice(source);
                at += len;
            }
            // The next push sends this version to the server.
            server.version = header.version;
        }
        Ok(())
    }

    /// Sends a note to the first server, and returns the note in the reply.
    pub(crate) fn exchange_note(&mut self, note: StrategyNote) -> Result<StrategyNote, ParameterServerError> {
        let server = &mut self.links[0];
        server.send_request(RequestKind::Note, note, 0)?;
        Ok(server.receive_reply()?.0.note)
    }

    /// Sends a note to all servers, and waits for their replies.
    pub(crate) fn send_note_to_all(&mut self, note: StrategyNote) -> Result<(), ParameterServerError> {
        for server in &mut self.links {
            server.send_request(RequestKind::Note, note, 0)?;
        }
        for server in &mut self.links {
            server.receive_reply()?;
        }
        Ok(())
    }

    /// Receives the words that the first server publishes at the end of the run. Repeats the request until the server
    /// has published the words.
    pub(crate) fn receive_results(&mut self, words_max: usize) -> Result<Vec<u32>, ParameterServerError> {
        let server = &mut self.links[0];
        let words = words_max.max(payload_words_max(server.range.len()));
        server.buffer.resize(HEADER_WORDS + words, 0);
        loop {
            server.send_request(RequestKind::Publication, StrategyNote::default(), 0)?;
            let (header, payload) = server.receive_reply()?;
            if header.status == ReplyStatus::Done {
                return Ok(payload.to_vec());
            }
        }
    }

    /// Receives the optimizer state from each server to which this rank is connected. Each vector of `state` has one
    /// value for each parameter of the model.
    pub(crate) fn pull_optimizer_state(
        &mut self,
        state: &mut [Vec<f32>],
    ) -> Result<(), ParameterServerError> {
        for server in &mut self.links {
            let len = server.range.len();
            server.buffer.resize(HEADER_WORDS + payload_words_max(len).max(len * state.len()), 0);
            server.send_request(RequestKind::State, StrategyNote::default(), 0)?;
            let (range, rank) = (server.range.clone(), server.link.peer);
            let (_, payload) = server.receive_reply()?;
            let payload: &[f32] = bytemuck::cast_slice(payload);
            if payload.len() != len * state.len() {
                return Err(wrong_length_error(rank));
            }
            for (vector, part) in state.iter_mut().zip(payload.chunks_exact(len)) {
                vector[range.clone()].copy_from_slice(part);
            }
            server.buffer.truncate(HEADER_WORDS + payload_words_max(len));
        }
        Ok(())
    }

    /// Tells all servers that this client sends no more requests. Ignores errors, because the client no longer needs
    /// the servers.
    pub(crate) fn close(&mut self) {
        for server in &mut self.links {
            if server.send_request(RequestKind::Close, StrategyNote::default(), 0).is_ok() {
                let _ = server.receive_reply();
            }
        }
    }

    /// Ends the links to all servers because this client has failed.
    pub(crate) fn abort(&self, message: &str) {
        for server in &self.links {
            server.link.abort(message);
        }
    }

    /// Returns a messenger for the connection with each server.
    pub(crate) fn messengers(&self) -> Vec<Messenger> {
        self.links.iter().map(|server| server.link.messenger()).collect()
    }
}

impl ServerLink {
    /// Sends the part of the gradient that belongs to this server's parameters. `gradient` is `None` if this part is in the memory
    /// that the link shares.
    fn start_push(
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
    fn start_pull(&mut self) -> Result<(), ParameterServerError> {
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
    fn start_push_of_ranges(
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
    fn send_request(
        &mut self,
        kind: RequestKind,
        note: StrategyNote,
        words: usize,
    ) -> Result<(), ParameterServerError> {
        self.send_request_with_ranges(kind, note, 0, words)
    }

    /// Sends a request. The payload is the `words` words after the header in `buffer`, and begins with `ranges`
    /// ranges.
    fn send_request_with_ranges(
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
    fn write_ranges(&mut self, parts: &[RangeInShard]) -> usize {
        let mut at = HEADER_WORDS;
        for part in parts {
            self.buffer[at] = part.range.start as u32;
            self.buffer[at + 1] = part.range.len() as u32;
            at += 2;
        }
        at
    }

    /// Receives a reply, and returns its header and its payload. Returns an error if the server refused the request.
    fn receive_reply(&mut self) -> Result<(ReplyHeader, &[u32]), ParameterServerError> {
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
    fn receive_parameters(
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

fn wrong_length_error(server: Rank) -> ParameterServerError {
    let problem = "its reply does not have the expected length".to_owned();
    ParameterServerError::ServerLost { server, problem }
}

fn outcome_of_push(header: &ReplyHeader) -> PushOutcome {
    let staleness = header.staleness;
    match header.status {
        ReplyStatus::Stale => PushOutcome::Stale { staleness },
        ReplyStatus::Unwanted => PushOutcome::Unwanted,
        _ => PushOutcome::Applied { staleness },
    }
}

/// The part of a range that one server holds.
struct RangeInShard {
    /// The range of the parameters, counted from the server's first parameter.
    range: Range<usize>,
    /// The indices of this part's values in the caller's `gradients` or `values`.
    values: Range<usize>,
}

/// Returns the parts of `ranges` that lie in `shard`. Merges a part with the next part if there is no gap between
/// them.
fn shard_parts_of_ranges(ranges: &[Range<usize>], shard: &Range<usize>) -> Vec<RangeInShard> {
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
