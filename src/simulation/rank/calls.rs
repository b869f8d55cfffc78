//! How a simulated rank begins the calls of its program.

use std::sync::Arc;
use std::time::Duration;

use super::{BlockingCall, DirectMessage, OPERATION_TIMEOUT, SimulatedRank};
use crate::codec::error_feedback::CompressorCall;
use crate::codec::{Codec, DecodeError, RandomKeys};
use crate::engine::{OpId, OperationRequest, Pattern, Timestamp};
use crate::reduce::Kernels;
use crate::runtime::buffer::BufferAccess;
use crate::runtime::driver::{BegunShort, DrivenCore as _, Submission, send_wake_frames};
use crate::runtime::encoding::Encoding;
use crate::runtime::host_rounds::Patience;
use crate::runtime::host_rounds::short::ShortResult;
use crate::runtime::link_driver::direct::DirectReceive;
use crate::runtime::memory::Memory;
use crate::schedule::hierarchy::{Block, CollectiveStage};
use crate::schedule::topology::{Medium, Topology};
use crate::simulation::hosts::SimMedium;
use crate::simulation::program::SimCall;
use crate::types::{HOSTS_GROUP_BIT, Operation, RESULTS_GROUP_BIT};
use crate::{Rank, WorldSize};
use rand::RngExt as _;

impl SimulatedRank {
    /// Begins a collective in shared memory that the rank executes itself, unless operations in the core use the rounds of its
    /// group.
    fn begin_blocking_call(
        &mut self,
        now: Timestamp,
        (call, request): (SimCall, OperationRequest),
        (world, rank): (WorldSize, Rank),
    ) -> bool {
        let is_shared = matches!(self.groups[call.group].medium, SimMedium::SharedMemory);
        let Some(spec) = call.spec(world, rank).filter(|_| is_shared && self.random.random_bool(0.5)) else {
            return false;
        };
        let taken = self.rounds.remove(&request.group);
        let Some(mut host_rounds) = taken.or_else(|| self.core.take_rounds(request.group)) else {
            return false;
        };
        let mut buffer = call.initial_buffer(world, rank);
        let mut begun = BegunShort::default();
        let short_call = host_rounds.short_call(&spec, request.contract, call.kernels(world));
        if let Some(short_call) = short_call.filter(|_| self.random.random_bool(0.7)) {
            let mut memory = BufferAccess::from(bytemuck::cast_slice_mut::<_, u8>(&mut buffer));
            let wake = |peer| begun.sleeping_peers.push(peer);
            let patience = Patience { looks: 0, yields: false };
            match host_rounds.run_short(&short_call, request.site, &mut memory, (patience, wake)) {
                ShortResult::Complete => {
                    let rounds = (request.group, &mut *host_rounds);
                    send_wake_frames(&mut self.core, rounds, begun.sleeping_peers);
                    self.core.poll(now);
                    self.rounds.insert(request.group, host_rounds);
                    self.check_result(call, Memory::owned(buffer));
                    self.counts.short += 1;
                    return true;
                }
                ShortResult::NotBegun => {}
                ShortResult::Posted => begun.has_posted = true,
            }
        }
        let BegunShort { has_posted, sleeping_peers } = begun;
        let shm_operation =
            host_rounds.add_operation((&request, None), &spec, (call.kernels(world), has_posted));
        let (call, has_failed) = (self.next_call, false);
        self.blocking =
            Some(BlockingCall { call, host_rounds, shm_operation, sleeping_peers, buffer, has_failed });
        self.counts.blocking += 1;
        true
    }

    /// Hands the rounds of a group over to the core.
    fn hand_over_rounds(&mut self, group: usize) {
        if let Some(host_rounds) = self.rounds.remove(&(group as u32)) {
            self.core.rounds.insert((group as u32, 0), host_rounds);
        }
    }

    /// Drops some of the groups that no further call uses.
    pub(super) fn drop_unused_groups(&mut self) {
        for group in 1..self.groups.len() {
            let number = group as u32;
            let is_unused = self.program[self.next_call..].iter().all(|call| call.group != group);
            if is_unused && self.random.random_bool(0.5) && self.retired.insert(number) {
                self.rounds.remove(&number);
                for bits in [0, HOSTS_GROUP_BIT, HOSTS_GROUP_BIT | RESULTS_GROUP_BIT] {
                    self.core.retire_group(number | bits);
                }
            }
        }
    }

    /// Sends or receives a message without an operation if that is possible.
    fn try_directly(
        &mut self,
        now: Timestamp,
        call: SimCall,
        (world, rank): (WorldSize, Rank),
    ) -> DirectMessage {
        let to = world.rank_after(call.root, 1);
        if call.operation != Operation::Message
            || world == WorldSize::ONE
            || ![call.root, to].contains(&rank)
            || !self.core.may_be_direct()
        {
            return DirectMessage::NeedsOperation;
        }
        let request = call.to_begin(OPERATION_TIMEOUT);
        let [from, to] = [call.root, to].map(|rank| self.groups[call.group].members[rank.index()]);
        let link_driver = &mut self.core.link_driver;
        if rank == call.root {
            let own = call.initial_buffer(world, rank);
            let is_sent = link_driver.try_send_directly(&request, to, bytemuck::cast_slice(&own));
            return if is_sent { DirectMessage::Ended } else { DirectMessage::NeedsOperation };
        }
        let pattern = Pattern { group: call.group as u32, source: Some(from), tag: Some(0) };
        let mut received = vec![0.0; call.count];
        // Without looks, a part of a message of several entries comes later.
        let looks = self.random.random_range(0..3);
        let known_time = Some(now).filter(|_| self.random.random());
        let mut receive = |has_begun: bool| {
            let target = (bytemuck::cast_slice_mut(&mut received), looks, has_begun);
            self.core.link_driver.receive_directly(&request, (pattern, from), target, known_time)
        };
        let mut result = receive(false);
        self.counts.divided_messages += u64::from(matches!(result, DirectReceive::Begun));
        while matches!(result, DirectReceive::Begun) && self.random.random_bool(0.9) {
            result = receive(true);
        }
        match result {
            DirectReceive::Received(envelope) => {
                assert_eq!((envelope.source, envelope.contract.count), (from, call.count as u64));
                self.counts.direct_receives += 1;
                self.check_result(call, Memory::owned(received));
                DirectMessage::Ended
            }
            DirectReceive::Begun => {
                self.core.link_driver.interrupt_receive(from, bytemuck::cast_slice(&received));
                DirectMessage::NeedsOperation
            }
            DirectReceive::NotYet => DirectMessage::NotYet,
            DirectReceive::NeedsOperation => DirectMessage::NeedsOperation,
        }
    }

    /// Begins the next call, if this rank is a member of the call's group. Returns false if the call fails at once, or waits for
    /// a message without an operation.
    pub(super) fn begin_next_call(&mut self, now: Timestamp) -> bool {
        let call = self.program[self.next_call];
        let Some((world, rank)) = self.rank_in_group(call) else { return true };
        if self.random.random_bool(0.9) {
            match self.try_directly(now, call, (world, rank)) {
                DirectMessage::Ended => {
                    self.counts.direct_messages += 1;
                    return true;
                }
                // The rank looks again a little later, and reads no link meanwhile.
                DirectMessage::NotYet if self.random.random_bool(0.9) => {
                    self.busy_until = now + Duration::from_micros(self.random.random_range(1..500));
                    return false;
                }
                DirectMessage::NotYet | DirectMessage::NeedsOperation => {}
            }
        }
        let request = call.to_begin(OPERATION_TIMEOUT);
        if self.begin_blocking_call(now, (call, request), (world, rank)) {
            return true;
        }
        self.hand_over_rounds(call.group);
        let Some(submission) = self.submission(call, (world, rank)) else { return true };
        let is_receive = matches!(submission, Submission::Receive(..));
        let Some(mut id) = self.core.begin(now, request, submission, true) else { return false };
        // A receive that is cancelled and begins again is still the last one.
        if is_receive && self.random.random_bool(0.2) && self.core.cancel(id, now) {
            let Some(again) = self.begin_again(now, request, call, (world, rank)) else { return false };
            id = again;
        }
        if !is_receive && self.random.random_bool(0.1) {
            self.core.discard_result(id, now);
            self.dropped.insert(id, self.next_call);
        } else {
            self.running.insert(id, self.next_call);
        }
        true
    }

    fn begin_again(
        &mut self,
        now: Timestamp,
        request: OperationRequest,
        call: SimCall,
        world_and_rank: (WorldSize, Rank),
    ) -> Option<OpId> {
        let submission = self.submission(call, world_and_rank)?;
        self.core.begin(now, request, submission, true)
    }

    /// Returns what this rank submits for a call; `None` if the rank takes no part in the call.
    fn submission(&mut self, call: SimCall, (world, rank): (WorldSize, Rank)) -> Option<Submission> {
        let group = &self.groups[call.group];
        let member = |rank: Rank| group.members[rank.index()];
        let memory = || {
            let elements = call.initial_buffer(world, rank);
            if call.is_compressed {
                Memory::owned(elements.into_iter().map(|element| element as f32).collect::<Vec<f32>>())
            } else {
                Memory::owned(elements)
            }
        };
        if call.operation == Operation::Message {
            let to = world.rank_after(call.root, 1);
            return match rank {
                _ if world == WorldSize::ONE => None,
                rank if rank == call.root => Some(Submission::Send(member(to), memory())),
                rank if rank == to => {
                    let source = Some(member(call.root));
                    let pattern = Pattern { group: call.group as u32, source, tag: Some(0) };
                    Some(Submission::Receive(
                        pattern,
                        Memory::owned(Vec::<f64>::new()).or_allocated_for::<f64>(usize::MAX),
                    ))
                }
                _ => None,
            };
        }
        let mut encoding = None;
        let blocks = if let (Some(medium), Some(spec)) = (group.medium_of(call), call.spec(world, rank)) {
            let counts = &mut self.counts;
            match medium {
                Medium::Hosts(_) => counts.hierarchical += 1,
                Medium::SharedMemory => counts.in_shared_memory += 1,
                Medium::Links => {}
            }
            let chunk_bytes = if call.is_compressed { 40 } else { 8 };
            let topology = Topology { world, rank, members: &group.members, medium, chunk_bytes };
            if call.is_compressed {
                counts.compressed += 1;
                encoding = call.kernels(world).map(|kernels| exact_encoding(kernels, self.rank));
                topology.plan_encoded(&spec, &|count| ExactCodec.encoded_words(count))
            } else {
                topology.plan(&spec, call.algorithm, false, size_of::<f64>())
            }
        } else {
            let mut schedule = call.schedule(world, rank);
            schedule.rename_peers(member);
            vec![Block { elements: 0..call.count, stages: vec![CollectiveStage::OverLinks(schedule)] }]
        };
        Some(Submission::Collective(blocks, (memory(), call.kernels(world)), encoding))
    }
}

/// Encodes each element as its bits, and ends each chunk with a word that depends on its length.
#[derive(Debug)]
struct ExactCodec;

impl ExactCodec {
    const LAST_WORD: u32 = 0x5eed_0000;
}

impl Codec for ExactCodec {
    fn encoded_words(&self, count: usize) -> usize {
        count + 1
    }

    fn encode(&self, values: &[f32], _: RandomKeys, words: &mut [u32]) {
        words[..values.len()].copy_from_slice(bytemuck::cast_slice(values));
        words[values.len()] = Self::LAST_WORD + values.len() as u32;
    }

    fn decode(&self, words: &[u32], _: RandomKeys, values: &mut [f32]) -> Result<(), DecodeError> {
        let count = values.len();
        if words.len() != count + 1 || words[count] != Self::LAST_WORD + count as u32 {
            return Err(DecodeError("the last word is wrong"));
        }
        values.copy_from_slice(bytemuck::cast_slice(&words[..count]));
        Ok(())
    }
}

fn exact_encoding(kernels: Kernels, rank: Rank) -> Encoding {
    let call = Arc::new(CompressorCall::without_memory(0));
    Encoding { codec: Arc::new(ExactCodec), call, kernels, divisor: 1, rank }
}
