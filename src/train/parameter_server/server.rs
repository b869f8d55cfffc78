//! The server: holds a shard of the parameters, and answers the requests of its clients.

use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::encoding::MessageCodecs;
use super::error::RefusalReason;
use super::handler::{LinkOutcome, PushOrNote, RequestHandler};
use super::message::{
    HEADER_WORDS, JOINED_PAYLOAD_WORDS_MAX, REFUSAL_TEXT_WORDS_MAX, ReplyHeader, ReplyStatus, RequestHeader,
    RequestKind, StrategyNote, payload_words_max, receive_header, send_with_payload, send_words,
};
use super::shard::{PushOutcome, Shard, StalenessRule};
use crate::train::peer_link::{LinkFailure, MessageChannel, PeerLink};
use crate::train::text_words::encode_text;

/// If a server cannot complete a request within this time, the server replies with [`ReplyStatus::Waiting`]. A client
/// that gets no reply for longer can treat the server as lost.
const REPLY_DELAY_MAX: Duration = Duration::from_millis(500);

/// When a server applies gradients.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum UpdateMode {
    /// In each step, the server waits for the gradients of all workers, and applies their sum. The server adds the
    /// gradients in the order of the workers' ranks, so the sum does not depend on the order in which the gradients
    /// arrive.
    Synchronous {
        /// The number of workers.
        workers: usize,
        /// The server multiplies the sum by this factor.
        factor: f32,
    },
    /// The server applies each gradient as soon as it arrives.
    Asynchronous(StalenessRule),
}

/// Where the payload of a reply is.
enum ReplyPayload {
    /// After the header of the reply.
    InReply,
    /// In the memory of the payload of the request.
    InRequest,
}

/// A server of one shard. A separate thread serves each client.
pub(crate) struct ShardServer<'a> {
    state: Mutex<ServerState<'a>>,
    /// Notified when a synchronous step ends, and when the server fails.
    changed: Condvar,
    update_mode: UpdateMode,
    handler: Arc<dyn RequestHandler + 'a>,
    /// The codecs of the clients that send encoded gradients.
    codecs: Option<MessageCodecs>,
    /// Memory for long payloads that no thread uses. There are at most as many buffers as threads that used one at the same time.
    /// The last used buffer is used again first, because it may still be in a cache.
    payload_buffers: Mutex<Vec<Vec<u32>>>,
}

struct ServerState<'a> {
    shard: Shard<'a>,
    /// The gradient and the note of each client in the current synchronous step.
    gradients: Vec<Option<(Vec<f32>, StrategyNote)>>,
    /// If `Some`, the server refuses all requests for this reason.
    failure: Option<(RefusalReason, String)>,
    /// A text that names the first lost client. A synchronous server refuses pushes that would wait for the gradient of
    /// this client.
    lost_client: Option<String>,
}

impl<'a> ShardServer<'a> {
    pub(crate) fn new(
        shard: Shard<'a>,
        update_mode: UpdateMode,
        handler: Arc<dyn RequestHandler + 'a>,
    ) -> Self {
        let state = ServerState { shard, gradients: Vec::new(), failure: None, lost_client: None };
        Self {
            state: Mutex::new(state),
            changed: Condvar::new(),
            update_mode,
            handler,
            codecs: None,
            payload_buffers: Mutex::default(),
        }
    }

    /// Lets clients send encoded gradients.
    pub(crate) fn with_codecs(self, codecs: Option<MessageCodecs>) -> Self {
        Self { codecs, ..self }
    }

    /// Calls `use_shard` with the shard locked.
    pub(crate) fn with_shard<R>(&self, use_shard: impl FnOnce(&mut Shard<'a>) -> R) -> R {
        use_shard(&mut self.lock().shard)
    }

    /// Makes the server refuse all further requests, with `message` as the reason. Later calls have no effect.
    pub(crate) fn refuse_further_requests(&self, reason: RefusalReason, message: &str) {
        self.lock().failure.get_or_insert_with(|| (reason, message.to_owned()));
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, ServerState<'a>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Answers the requests of the client with the index `client` until the client closes its link or is lost.
    pub(crate) fn serve(&self, client: usize, link: &PeerLink) -> LinkOutcome {
        let outcome = self.serve_until_end(client, link);
        // Tell the handler before the other clients, because other clients may end as a result of this loss.
        self.handler.record_link_end(client, &outcome);
        if let (LinkOutcome::Lost(problem), UpdateMode::Synchronous { .. }) = (&outcome, self.update_mode) {
            let lost_client = format!("rank {} is lost: {problem}", link.peer);
            self.lock().lost_client.get_or_insert(lost_client);
            self.changed.notify_all();
        }
        outcome
    }

    fn serve_until_end(&self, client: usize, link: &PeerLink) -> LinkOutcome {
        let len = self.lock().shard.parameters.len();
        let encoded_words = self.codecs.as_ref().map_or(0, |codecs| codecs.push_words(len));
        let words_max = payload_words_max(len).max(encoded_words);
        let mut request = vec![0_u32; HEADER_WORDS + words_max.min(JOINED_PAYLOAD_WORDS_MAX)];
        let (mut reply, mut gradients) = (Vec::new(), Vec::new());
        let lost = |failure: LinkFailure| LinkOutcome::Lost(failure.problem().to_owned());
        loop {
            let (received, is_long) = match receive_header(link, &mut request, MessageChannel::Request) {
                Ok(received) => received,
                Err(failure) => return lost(failure),
            };
            let Some((header, _)) = RequestHeader::decode(&request[..received]) else {
                return abort_link(link, "the request is too short or of an unknown kind");
            };
            let mut memory = if header.is_in_memory { link.memory() } else { None };
            if header.is_in_memory && link.has_failed() {
                return LinkOutcome::Lost("the connection has failed".to_owned());
            }
            let has_other_payload = received > HEADER_WORDS || is_long || header.is_encoded;
            if header.is_in_memory && (memory.is_none() || has_other_payload) {
                return abort_link(link, "its payload is said to be in memory that the ranks do not share");
            }
            let mut long_payload = is_long.then(|| self.take_payload_buffer(words_max));
            let mut payload = match (&mut memory, &mut long_payload) {
                (Some(memory), _) => memory.words(),
                (None, None) => &mut request[HEADER_WORDS..received],
                (None, Some(buffer)) => match link.receive(buffer, MessageChannel::Request) {
                    Ok(count) => &mut buffer[..count],
                    Err(failure) => return lost(failure),
                },
            };
            if header.is_encoded && header.kind == RequestKind::Push {
                gradients.resize(len, 0);
                let decoded = self.codecs.as_ref().map(|codecs| {
                    codecs.decode_push(payload, bytemuck::cast_slice_mut(&mut gradients)).is_ok()
                });
                if decoded != Some(true) {
                    return abort_link(link, "the encoded gradient is invalid");
                }
                payload = &mut gradients;
            }
            let sent = match self.answer(client, header, payload, &mut reply) {
                Ok(ReplyPayload::InReply) => send_words(link, &mut reply, MessageChannel::Reply),
                Ok(ReplyPayload::InRequest) if header.is_in_memory => {
                    send_words(link, &mut reply, MessageChannel::Reply)
                }
                Ok(ReplyPayload::InRequest) => {
                    send_with_payload(link, &mut reply, payload, MessageChannel::Reply)
                }
                Err(problem) => return abort_link(link, &problem),
            };
            if let Err(failure) = sent {
                return lost(failure);
            }
            if header.kind == RequestKind::Close {
                return LinkOutcome::Closed;
            }
            if let Some(buffer) = long_payload {
                self.lock_payload_buffers().push(buffer);
            }
        }
    }

    /// Returns memory for a payload of at most `words_max` words.
    fn take_payload_buffer(&self, words_max: usize) -> Vec<u32> {
        let buffer = self.lock_payload_buffers().pop();
        buffer.unwrap_or_else(|| vec![0; words_max])
    }

    fn lock_payload_buffers(&self) -> MutexGuard<'_, Vec<Vec<u32>>> {
        self.payload_buffers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Performs a request and writes the reply to `reply`. May replace the payload of the request by the payload of the reply.
    /// Returns which of the two has it, or an error if the request is invalid.
    fn answer(
        &self,
        client: usize,
        header: RequestHeader,
        payload: &mut [u32],
        reply: &mut Vec<u32>,
    ) -> Result<ReplyPayload, String> {
        let mut state = self.lock();
        reply.clear();
        reply.resize(HEADER_WORDS, 0);
        let parameter_count = state.shard.parameters.len();
        check_payload(&header, payload.len(), parameter_count)?;
        let (mut status, mut staleness, mut is_in_request) = (ReplyStatus::Done, 0, false);
        match header.kind {
            RequestKind::Push | RequestKind::Await => {
                let gradient = (header.kind == RequestKind::Push).then(|| bytemuck::cast_slice_mut(payload));
                (state, status, staleness, is_in_request) = self.push(state, client, &header, gradient)?;
            }
            RequestKind::PushRanges => {
                (status, staleness) = self.push_ranges(&mut state.shard, client, &header, payload)?;
            }
            RequestKind::PullRanges => {
                for range in decode_ranges(&header, payload, parameter_count)? {
                    reply.extend_from_slice(bytemuck::cast_slice(&state.shard.parameters[range]));
                }
            }
            RequestKind::State => {
                for vector in &state.shard.optimizer.state {
                    reply.extend_from_slice(bytemuck::cast_slice(vector));
                }
            }
            RequestKind::Publication => match self.handler.published_results() {
                Some(words) => reply.extend_from_slice(&words),
                None => status = ReplyStatus::Waiting,
            },
            RequestKind::Pull | RequestKind::Note | RequestKind::Close => {}
        }
        if header.gets_parameters() && status != ReplyStatus::Waiting && !is_in_request {
            let parameters = bytemuck::cast_slice(&state.shard.parameters);
            is_in_request = header.is_in_memory;
            if is_in_request {
                payload.copy_from_slice(parameters);
            } else {
                reply.extend_from_slice(parameters);
            }
        }
        let version = state.shard.version();
        let refusal = state.refusal(header.kind, status);
        drop(state);
        let is_short = header.is_encoded || payload.len() <= JOINED_PAYLOAD_WORDS_MAX;
        if is_in_request && !header.is_in_memory && is_short {
            reply.extend_from_slice(payload);
            is_in_request = false;
        }
        self.encode_parameters(&header, reply);
        let (mut text_bytes, mut refusal_note) = (0, StrategyNote::default());
        if let Some((reason, message)) = refusal {
            (status, is_in_request) = (ReplyStatus::Refused, false);
            refusal_note[0] = reason.to_code();
            text_bytes = set_reply_text(reply, &message);
        }
        let note = match (status, header.kind) {
            (ReplyStatus::Waiting | ReplyStatus::Refused, _) => refusal_note,
            (_, RequestKind::Push | RequestKind::Await | RequestKind::PushRanges) => {
                self.handler.reply_note(client, PushOrNote::Push, &header.note)
            }
            (_, RequestKind::Note) => self.handler.reply_note(client, PushOrNote::Note, &header.note),
            _ => StrategyNote::default(),
        };
        ReplyHeader { status, text_bytes, version, staleness, note }.encode(reply);
        Ok(if is_in_request { ReplyPayload::InRequest } else { ReplyPayload::InReply })
    }

    /// Encodes the parameters in a reply, if the client wants that.
    fn encode_parameters(&self, header: &RequestHeader, reply: &mut Vec<u32>) {
        let has_parameters =
            matches!(header.kind, RequestKind::Pull | RequestKind::Push | RequestKind::Await)
                && reply.len() > HEADER_WORDS;
        if let (Some(codecs), true, true) = (&self.codecs, header.is_encoded, has_parameters) {
            let words = codecs.encode_pull(bytemuck::cast_slice(&reply[HEADER_WORDS..]));
            reply.truncate(HEADER_WORDS);
            reply.extend(words);
        }
    }

    /// Applies the gradients of some ranges of the shard. Returns the status of the reply and the staleness of the
    /// gradients.
    fn push_ranges(
        &self,
        shard: &mut Shard<'a>,
        client: usize,
        header: &RequestHeader,
        payload: &mut [u32],
    ) -> Result<(ReplyStatus, u64), String> {
        let ranges = decode_ranges(header, payload, shard.parameters.len())?;
        let gradients: &mut [f32] = bytemuck::cast_slice_mut(&mut payload[2 * ranges.len()..]);
        if gradients.len() != ranges.iter().map(Range::len).sum::<usize>() {
            return Err("the ranges and the gradients have different lengths".into());
        }
        let UpdateMode::Asynchronous(rule) = self.update_mode else {
            return Err(
                "a synchronous server needs the gradients of all parameters, not of some ranges".into()
            );
        };
        let outcome = if self.handler.wants_gradient(client, &header.note) {
            shard.push_ranges(&ranges, gradients, header.version, rule)
        } else {
            PushOutcome::Unwanted
        };
        self.handler.record_push_outcome(client, &header.note, outcome);
        Ok(status_and_staleness(outcome))
    }

    /// Performs a push, or a [`RequestKind::Await`] if `gradient` is `None`. An asynchronous server applies the
    /// gradient, and replaces it by the new parameters if the client wants them. A synchronous server stores the gradient, and
    /// waits up to [`REPLY_DELAY_MAX`] until the step is complete. Returns the status of the reply, the staleness of the
    /// gradient, and whether the parameters have replaced the gradient.
    fn push<'s>(
        &'s self,
        mut state: MutexGuard<'s, ServerState<'a>>,
        client: usize,
        header: &RequestHeader,
        gradient: Option<&mut [f32]>,
    ) -> Result<(MutexGuard<'s, ServerState<'a>>, ReplyStatus, u64, bool), String> {
        if state.failure.is_some() || state.lost_client.is_some() {
            return Ok((state, ReplyStatus::Waiting, 0, false));
        }
        let (workers, factor) = match (self.update_mode, gradient) {
            (UpdateMode::Asynchronous(rule), Some(gradient)) => {
                let outcome = if !self.handler.wants_gradient(client, &header.note) {
                    PushOutcome::Unwanted
                } else if header.wants_parameters {
                    state.shard.push_and_replace(gradient, header.version, rule)
                } else {
                    state.shard.push(gradient, header.version, rule)
                };
                self.handler.record_push_outcome(client, &header.note, outcome);
                let (status, staleness) = status_and_staleness(outcome);
                let is_replaced = header.wants_parameters && matches!(outcome, PushOutcome::Applied { .. });
                return Ok((state, status, staleness, is_replaced));
            }
            (UpdateMode::Asynchronous(_), None) => {
                return Err("this server is asynchronous, so no push waits for a step".into());
            }
            (UpdateMode::Synchronous { workers, factor }, gradient) => {
                if let Some(gradient) = gradient {
                    state.store_gradient(client, gradient, header)?;
                }
                (workers, factor)
            }
        };
        if state.gradients.iter().flatten().count() == workers {
            let ServerState { shard, gradients, .. } = &mut *state;
            let mut pushed = gradients.iter_mut().enumerate().filter_map(|(i, slot)| Some((i, slot.take()?)));
            let Some((first, (mut sum, note))) = pushed.next() else {
                return Err("the step has no gradients".into());
            };
            let mut notes = vec![(first, note)];
            for (client, (gradient, note)) in pushed {
                sum.iter_mut().zip(&gradient).for_each(|(sum, value)| *sum += value);
                notes.push((client, note));
            }
            if factor != 1.0 {
                for value in &mut sum {
                    *value *= factor;
                }
            }
            let version = shard.version();
            let outcome = shard.push(&mut sum, version, StalenessRule { max: 0, scales_rate: false });
            for (client, note) in notes {
                self.handler.record_push_outcome(client, &note, outcome);
            }
            self.changed.notify_all();
        }
        let is_pending = |state: &mut ServerState<'_>| {
            state.shard.version() <= header.version && state.failure.is_none() && state.lost_client.is_none()
        };
        let (state, timeout) = self
            .changed
            .wait_timeout_while(state, REPLY_DELAY_MAX, is_pending)
            .unwrap_or_else(PoisonError::into_inner);
        let is_waiting = timeout.timed_out() || state.shard.version() <= header.version;
        let status = if is_waiting { ReplyStatus::Waiting } else { ReplyStatus::Done };
        Ok((state, status, 0, false))
    }
}

impl ServerState<'_> {
    /// If the server refuses a request of the kind `kind`, returns the reason. `status` is the status of the reply if
    /// the server does not refuse the request.
    fn refusal(&self, kind: RequestKind, status: ReplyStatus) -> Option<(RefusalReason, String)> {
        if kind == RequestKind::Close {
            return None;
        }
        let is_stuck =
            status == ReplyStatus::Waiting && matches!(kind, RequestKind::Push | RequestKind::Await);
        let lost_client = self.lost_client.as_ref().filter(|_| is_stuck);
        let lost_client = lost_client.map(|problem| (RefusalReason::RankLost, problem.clone()));
        self.failure.clone().or(lost_client)
    }

    /// Stores the gradient of a client until the synchronous step is complete.
    fn store_gradient(
        &mut self,
        client: usize,
        gradient: &[f32],
        header: &RequestHeader,
    ) -> Result<(), String> {
        let version = self.shard.version();
        if header.version != version {
            return Err(format!(
                "the gradient is for parameters of version {}, but this server has version {version}",
                header.version
            ));
        }
        if self.gradients.len() <= client {
            self.gradients.resize_with(client + 1, || None);
        }
        match &mut self.gradients[client] {
            Some(_) => Err("this is the second gradient in one step".into()),
            slot => {
                *slot = Some((gradient.to_vec(), header.note));
                Ok(())
            }
        }
    }
}

/// Returns an error if a request for a shard of `parameter_count` parameters cannot have a payload of `words` words.
fn check_payload(header: &RequestHeader, words: usize, parameter_count: usize) -> Result<(), String> {
    let expected = match header.kind {
        RequestKind::Push => parameter_count,
        RequestKind::Pull | RequestKind::Await if header.is_in_memory => parameter_count,
        RequestKind::PushRanges | RequestKind::PullRanges => words,
        _ => 0,
    };
    if words == expected {
        Ok(())
    } else {
        Err(format!("the payload has {words} words instead of {expected}"))
    }
}

/// Aborts the link with a client that sent an invalid request.
fn abort_link(link: &PeerLink, problem: &str) -> LinkOutcome {
    let problem = format!("the request of rank {} to its parameter server is invalid: {problem}", link.peer);
    link.abort(&problem);
    LinkOutcome::Lost(problem)
}

/// Replaces the payload of a reply by a text. Cuts the text off after [`REFUSAL_TEXT_WORDS_MAX`] words. Returns the
/// length of the remaining text in bytes.
fn set_reply_text(reply: &mut Vec<u32>, text: &str) -> u32 {
    reply.truncate(HEADER_WORDS);
    reply.extend(encode_text(text, REFUSAL_TEXT_WORDS_MAX));
    text.len().min(4 * REFUSAL_TEXT_WORDS_MAX) as u32
}

fn status_and_staleness(outcome: PushOutcome) -> (ReplyStatus, u64) {
    match outcome {
        PushOutcome::Applied { staleness } => (ReplyStatus::Done, staleness),
        PushOutcome::Stale { staleness } => (ReplyStatus::Stale, staleness),
        PushOutcome::Unwanted => (ReplyStatus::Unwanted, 0),
    }
}

/// Reads the ranges at the start of a payload. Refuses ranges that are empty, overlap, are not ascending or exceed
/// the `len` parameters.
fn decode_ranges(header: &RequestHeader, payload: &[u32], len: usize) -> Result<Vec<Range<usize>>, String> {
    let count = header.ranges as usize;
    let words = payload.get(..2 * count).ok_or("the payload has fewer ranges than the header says")?;
    let mut ranges = Vec::with_capacity(count);
    let mut previous = 0;
    for pair in words.chunks_exact(2) {
        let (start, end) = (pair[0] as usize, pair[0] as usize + pair[1] as usize);
        if start < previous || end <= start || end > len {
            return Err(format!(
                "the range {start}..{end} is empty, is out of order or exceeds the {len} parameters"
            ));
        }
        ranges.push(start..end);
        previous = end;
    }
    Ok(ranges)
}
