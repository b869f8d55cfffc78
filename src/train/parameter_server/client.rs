//! The client of the servers: pushes gradients to all servers, and pulls parameters from all servers.

use std::ops::Range;
use std::sync::MutexGuard;

use super::encoding::{MessageCodecs, PushEncoder};
use super::error::ParameterServerError;
use super::links::ShardLayout;
use super::message::{HEADER_WORDS, ReplyHeader, ReplyStatus, RequestKind, StrategyNote, payload_words_max};
use super::server_link::{ServerLink, shard_parts_of_ranges, wrong_length_error};
use super::shard::PushOutcome;
use crate::codec::Compression;
use crate::group::{HandoverBuffer, Messenger};
use crate::train::peer_link::PeerLink;
use crate::types::Rank;

/// The connections of a client with its servers.
pub(crate) struct ServerClient {
    links: Vec<ServerLink>,
    is_synchronous: bool,
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
            ServerLink::new(link, range)
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

fn outcome_of_push(header: &ReplyHeader) -> PushOutcome {
    let staleness = header.staleness;
    match header.status {
        ReplyStatus::Stale => PushOutcome::Stale { staleness },
        ReplyStatus::Unwanted => PushOutcome::Unwanted,
        _ => PushOutcome::Applied { staleness },
    }
}
