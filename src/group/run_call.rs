//! How the call of a collective becomes an operation.

use std::sync::Arc;

use super::call::Call;
use super::handle::Handle;
use super::selection::AlgorithmSelection;
use super::{Error, Group, OwnedBuffer};
use crate::codec::error_feedback::CompressorCall;
use crate::codec::{self, Compression};
use crate::engine::OperationRequest;
use crate::reduce;
use crate::runtime::buffer::BufferAccess;
use crate::runtime::driver::{BegunShort, OperationOutput, Submission};
use crate::runtime::encoding::Encoding;
use crate::runtime::memory::Memory;
use crate::schedule::CollectiveSpec;
use crate::schedule::topology::{Medium, Topology};
use crate::types::{
    Algorithm, Contract, Element, HOSTS_GROUP_BIT, Operation, Rank, ReduceOp, Site, WorldSize,
};

impl Group {
    /// Returns the algorithm of `operation` on a buffer of `bytes` bytes. A function of the caller may need another one.
    pub fn algorithm(&self, operation: Operation, bytes: usize) -> Algorithm {
        let medium = match &self.hierarchical_data {
            _ if self.shares_memory => Medium::SharedMemory,
            Some(hierarchical_data) => Medium::Hosts(&hierarchical_data.layout),
            None => Medium::Links,
        };
        let default = AlgorithmSelection::default();
        let selection = self.job.as_ref().map_or(&default, |job| &job.selection);
        selection.choose(operation, self.world, bytes as u64, medium)
    }

    /// Returns a call without a reduction and with even parts, on elements of type `T`.
    pub(super) fn new_call<T: Element>(&self, spec: CollectiveSpec, site: Site) -> Call {
        let (operation, count) = (spec.operation(), spec.count());
        let contract = Contract {
            operation,
            dtype: T::DTYPE,
            reduction: None,
            algorithm: self.algorithm(operation, count.saturating_mul(size_of::<T>())),
            root: spec.root(),
            count: count as u64,
            layout: 0,
        };
        let request = OperationRequest::new(self.id, contract, self.timeout, site);
        let uses_shared_memory = self.shares_memory && spec.has_known_part_lengths();
        Call {
            spec,
            request,
            kernels: None,
            uses_shared_memory,
            compressor: None,
            encoding: None,
            timer: None,
            addition: None,
            in_rank_order: false,
            world: self.world,
            short: None,
        }
    }

    /// Runs a collective that works on `elements` in place, and waits until the collective is complete.
    pub(super) fn run<T: Element>(&mut self, call: &mut Call, elements: &mut [T]) -> Result<(), Error> {
        self.prepare(call, elements)?;
        self.run_on_bytes(call, bytemuck::cast_slice_mut::<T, u8>(elements).into())?;
        if let Some(addition) = call.addition.take() {
            addition.apply(bytemuck::cast_slice_mut(elements));
        }
        Ok(())
    }

    /// Runs a collective on the bytes of its buffer, and waits until the collective is complete. The rank only sends the input of
    /// the buffer. In a world of one rank, does nothing. `begun` is what the call has done as a short call.
    pub(super) fn run_operation(
        &mut self,
        call: &mut Call,
        bytes: BufferAccess<'_>,
        begun: BegunShort,
    ) -> Result<(), Error> {
        if call.uses_shared_memory
            && self.take_back_rounds()
            && let (Some(job), Some(rounds)) = (&self.job, self.host_rounds.take())
        {
            let (request, spec_and_kernels) = (&call.request, (&call.spec, call.kernels.clone()));
            self.host_rounds =
                job.driver.run_in_shared_memory(rounds, *request, spec_and_kernels, (bytes, begun))?;
            return Ok(());
        }
        if self.job.is_none() {
            return self.check_abort();
        }
        self.hand_over_rounds(call);
        let Some(job) = &self.job else { return Ok(()) };
        job.driver.run(call.request, bytes, |memory| self.submission(call, memory))?;
        if let Some(timer) = call.timer.take() {
            timer.stop(job.driver.now());
        }
        Ok(())
    }

    /// Takes the rounds of the group back from the core, unless asynchronous operations use them: then the next operation has to
    /// queue behind these. Returns whether the group has its rounds.
    pub(super) fn take_back_rounds(&mut self) -> bool {
        if self.host_rounds.is_none()
            && let Some(job) = self.job.as_ref().filter(|_| self.shares_memory)
        {
            self.host_rounds = job.driver.core().take_rounds(self.id);
        }
        self.host_rounds.is_some()
    }

    pub(super) fn start_in_place<B: OwnedBuffer>(
        &mut self,
        mut call: Call,
        mut buffer: B,
    ) -> Result<Handle<B>, Error> {
        self.prepare(&mut call, buffer.as_mut())?;
        let addition = call.addition.take();
        let add_last_result = |mut buffer: B| {
            if let Some(addition) = addition {
                addition.apply(bytemuck::cast_slice_mut(buffer.as_mut()));
            }
            buffer
        };
        let Some(job) = self.job.clone() else { return Ok(Handle::ready(Ok(add_last_result(buffer)))) };
        self.hand_over_rounds(&mut call);
        let id = job.driver.submit(call.request, self.submission(&mut call, Memory::owned(buffer)))?;
        let timer = call.timer.take();
        let make_result = |output: OperationOutput| {
            if let Some(timer) = timer {
                timer.stop(output.ended);
            }
            output.memory.into_owned().map(add_last_result).ok_or(Error::Taken)
        };
        Ok(Handle::pending(job, id, make_result))
    }

    /// Prepares the elements of a call: begins their encoding if the call is compressed, and reduces them if no other rank
    /// contributes to the result. For example, a logical reduction converts each element to 0 or 1.
    fn prepare<T: Element>(&mut self, call: &mut Call, elements: &mut [T]) -> Result<(), Error> {
        self.check_abort()?;
        if call.compressor.is_some() {
            self.begin_encoding(call, bytemuck::cast_slice_mut(elements))?;
        }
        let Contract { operation, dtype, reduction, .. } = call.request.contract;
        let is_scan = matches!(operation, Operation::Scan | Operation::Exscan);
        if let Some(op) = reduction
            && (self.world == WorldSize::ONE || (is_scan && self.rank == Rank::ZERO))
        {
            reduce::reduce_single_contribution(dtype, op, bytemuck::cast_slice_mut(elements));
        }
        Ok(())
    }

    /// Returns the error after [`Group::abort`] in a world of one rank. In other worlds, the driver returns the error.
    pub(super) fn check_abort(&self) -> Result<(), Error> {
        match (&self.job, self.abort_error.get()) {
            (None, Some(error)) => Err(error.clone()),
            _ => Ok(()),
        }
    }

    fn submission(&self, call: &mut Call, memory: Memory) -> Submission {
        let Contract { algorithm, dtype, .. } = call.request.contract;
        let medium = match &self.hierarchical_data {
            _ if call.uses_shared_memory => Medium::SharedMemory,
            Some(hierarchical_data) if algorithm == Algorithm::Hierarchy => {
                Medium::Hosts(&hierarchical_data.layout)
            }
            _ => Medium::Links,
        };
        let chunk_bytes = self.job.as_ref().map_or(1 << 20, |job| job.chunk_bytes);
        let (world, rank, members) = (self.world, self.rank, &self.members);
        let topology = Topology { world, rank, members, medium, chunk_bytes };
        let blocks = match &call.encoding {
            Some(encoding) => topology.plan_encoded(&call.spec, &|count| encoding.codec.encoded_words(count)),
            None => topology.plan(&call.spec, algorithm, call.in_rank_order, dtype.size_bytes()),
        };
        let encoding = call.encoding.take().map(|encoding| *encoding);
        Submission::Collective(blocks, (memory, call.kernels.clone()), encoding)
    }

    /// Begins a call with a compressor: chooses the codec, and adds the errors of the last call to the elements unless the
    /// encoding does it. If the ranks will send elements over links, prepares their encoding.
    fn begin_encoding(&mut self, call: &mut Call, elements: &mut [f32]) -> Result<(), Error> {
        let Some(compressor) = call.compressor.take() else { return Ok(()) };
        let compression = match &compressor.auto {
            Some(choice) => {
                let (compression, timer) = self.choose_codec(choice, elements, call.request.site)?;
                call.timer = timer;
                compression
            }
            None => compressor.compression(),
        };
        let has_result =
            compressor.memory.as_ref().is_some_and(|memory| !memory.lock().state.result.is_empty());
        call.set_codec(compression, has_result);
        let codec =
            codec::codec(compression).filter(|_| self.world != WorldSize::ONE && !call.uses_shared_memory);
        let encoder = codec.zip(call.kernels.clone());
        // EF21 changes the bits of sums, so it applies only if something is encoded.
        let is_useless = encoder.is_none() && compression.adds_last_result();
        let compression = if is_useless { Compression::None } else { compression };
        // In a hierarchy, a rank encodes only a slice of the buffer.
        let encodes_everything = encoder.is_some() && call.request.contract.algorithm == Algorithm::Direct;
        let (compressor_call, addition) = match &compressor.memory {
            Some(memory) => {
                memory.begin_call(compression, elements, encodes_everything).map_err(Error::Compression)?
            }
            None => (CompressorCall::without_memory(self.compressed_calls), None),
        };
        call.addition = addition;
        self.compressed_calls += 1;
        if let Some((codec, kernels)) = encoder {
            call.request.group |= HOSTS_GROUP_BIT;
            let is_average = call.request.contract.reduction == Some(ReduceOp::Average);
            call.encoding = Some(Box::new(Encoding {
                codec: codec.into(),
                call: Arc::new(compressor_call),
                kernels,
                divisor: if is_average { self.world.get() } else { 1 },
                rank: self.members[self.rank.index()],
            }));
        }
        Ok(())
    }

    /// Hands the rounds that a call uses over to the core. The stages of a hierarchical collective have their own group number.
    fn hand_over_rounds(&mut self, call: &mut Call) {
        let Some(job) = &self.job else { return };
        if call.uses_shared_memory
            && let Some(host_rounds) = self.host_rounds.take()
        {
            job.driver.core().rounds.insert((self.id, 0), host_rounds);
        }
        if let Some(hierarchical_data) = &mut self.hierarchical_data
            && call.request.contract.algorithm == Algorithm::Hierarchy
        {
            call.request.group |= HOSTS_GROUP_BIT;
            for (stage, host_rounds) in hierarchical_data.stage_rounds.drain(..).enumerate() {
                job.driver.core().rounds.insert((call.request.group, stage), Box::new(host_rounds));
            }
        }
    }
}
