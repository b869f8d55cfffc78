//! How the call of a collective becomes an operation.

use std::time::Duration;

use half::{bf16, f16};

use super::handle::Handle;
use super::parts::layout_digest;
use super::selection::AlgorithmSelection;
use super::{Error, Group, OwnedBuffer};
use crate::codec::{CompressedElement, Compression};
use crate::engine::{OperationRequest, SendMode};
use crate::reduce::{self, Kernels};
use crate::runtime::driver::{OperationOutput, Submission};
use crate::runtime::link_driver::BufferAndReduction;
use crate::runtime::memory::{BufferAccess, Memory};
use crate::schedule::CollectiveSpec;
use crate::schedule::topology::{Medium, Topology};
use crate::types::{
    Algorithm, Contract, Element, HOSTS_GROUP_BIT, Operation, Rank, ReduceOp, Site, WorldSize,
};

/// The number of elements that a compressed all-reduce converts at a time. The converted elements take 2 MiB of memory and 2 MiB
/// on the wire.
const COMPRESSED_BLOCK_ELEMENTS: usize = 1 << 20;

/// A collective that a caller requests, and the algorithm that was chosen for it.
pub struct Call {
    spec: CollectiveSpec,
    /// The arguments with which the engine begins the operation. They include the algorithm.
    pub(super) request: OperationRequest,
    /// The reduction functions; `None` without a reduction.
    kernels: Option<Kernels>,
    /// Whether the whole collective runs in shared memory.
    uses_shared_memory: bool,
    /// For an all-reduce of `f32`: the type that the ranks send.
    pub(super) compression: Compression,
    /// Whether the reduction must be applied in rank order, because it may not commute.
    in_rank_order: bool,
    world: WorldSize,
}

impl Call {
    /// Sets a built-in reduction. Returns an error if the reduction is not defined.
    pub(super) fn set_built_in(&mut self, op: ReduceOp) -> Result<(), Error> {
        let Contract { operation, dtype, .. } = self.request.contract;
        let is_scan = matches!(operation, Operation::Scan | Operation::Exscan);
        let kernels = reduce::kernels(dtype, op).filter(|_| !is_scan || op != ReduceOp::Average);
        let kernels = kernels.ok_or(Error::Unsupported { op, dtype })?.of_contributions(self.world.get());
        self.request.contract.reduction = Some(op);
        self.kernels = Some(kernels);
        Ok(())
    }

    /// Sets a reduction with a function of the caller.
    pub(super) fn set_function(&mut self, kernels: Kernels) {
        let contract = &mut self.request.contract;
        contract.reduction = Some(ReduceOp::Custom);
        self.kernels = Some(kernels);
        // Scans always reduce in rank order. A reduce-scatter cannot.
        self.in_rank_order = matches!(contract.operation, Operation::AllReduce | Operation::Reduce);
        if self.in_rank_order && !self.uses_shared_memory {
            contract.algorithm = Algorithm::Chain;
        }
    }

    /// Makes the ranks compare the lengths of uneven parts.
    pub(super) fn set_counts(&mut self, counts: Option<&[usize]>) {
        self.request.contract.layout = counts.map_or(0, |counts| layout_digest(counts.iter().copied()));
    }
}

impl Group {
    /// Returns the algorithm of `operation` on a buffer of `bytes` bytes. A reduction with a function of the
    /// caller may use another algorithm.
    pub fn algorithm(&self, operation: Operation, bytes: usize) -> Algorithm {
        let medium = match &self.hierarchical_data {
            _ if self.shares_memory => Medium::SharedMemory,
            Some(hierarchical_data) => Medium::Hosts(&hierarchical_data.layout),
            None => Medium::Links,
        };
        match &self.job {
            Some(job) => job.selection.choose(operation, self.world, bytes as u64, medium),
            None => AlgorithmSelection::default().choose(operation, self.world, bytes as u64, medium),
        }
    }

    /// Returns a call without a reduction and with even parts, on elements of type `T`.
    pub(super) fn new_call<T: Element>(&self, spec: CollectiveSpec, site: Site) -> Call {
        let mut request = self.new_request::<T>(spec.operation(), spec.count(), site);
        request.contract.root = spec.root();
        let uses_shared_memory = self.shares_memory && spec.has_known_part_lengths();
        let (kernels, compression, in_rank_order) = (None, Compression::None, false);
        Call { spec, request, kernels, uses_shared_memory, compression, in_rank_order, world: self.world }
    }

    /// Returns the arguments with which the engine begins an operation on `count` elements of type `T`.
    pub(super) fn new_request<T: Element>(
        &self,
        operation: Operation,
        count: usize,
        site: Site,
    ) -> OperationRequest {
        let contract = Contract {
            operation,
            dtype: T::DTYPE,
            reduction: None,
            algorithm: self.algorithm(operation, count.saturating_mul(size_of::<T>())),
            root: Rank::ZERO,
            count: count as u64,
            layout: 0,
        };
        let (timeout, spent, mode) = (self.timeout, Duration::ZERO, SendMode::Standard);
        OperationRequest { group: self.id, contract, timeout, spent, site, mode }
    }

    /// Runs a collective that works on `elements` in place, and waits until the collective is complete.
    pub(super) fn run<T: Element>(&mut self, call: &mut Call, elements: &mut [T]) -> Result<(), Error> {
        match call.compression {
            Compression::None => {}
            Compression::Fp16 => {
                return self.run_half_precision::<f16>(call, bytemuck::cast_slice_mut(elements));
            }
            Compression::Bf16 => {
                return self.run_half_precision::<bf16>(call, bytemuck::cast_slice_mut(elements));
            }
            _ => return Err(Error::InvalidCounts("WIP")),
        }
        self.check_abort()?;
        let bytes = bytemuck::cast_slice_mut::<T, u8>(elements);
        self.reduce_single_contribution(&call.request.contract, bytes);
        self.run_on_bytes(call, bytes.into())
    }

    /// Runs a collective on the bytes of its buffer, and waits until the collective is complete. The rank only sends the input of
    /// the buffer. In a world of one rank, does nothing.
    pub(super) fn run_on_bytes(&mut self, call: &mut Call, bytes: BufferAccess<'_>) -> Result<(), Error> {
        let Some(job) = &self.job else { return self.check_abort() };
        if call.uses_shared_memory {
            if self.host_rounds.is_none() {
                self.host_rounds = job.driver.core().take_rounds(self.id);
            }
            // If asynchronous operations use the rounds, this operation has to queue behind them.
            if let Some(host_rounds) = &mut self.host_rounds {
                let spec_and_kernels = (&call.spec, call.kernels.take());
                return job.driver.run_in_shared_memory(host_rounds, &call.request, spec_and_kernels, bytes);
            }
        }
        self.hand_over_rounds(call);
        let Some(job) = &self.job else { return Ok(()) };
        job.driver.run(call.request, bytes, |memory| self.submission(call, memory)).map(|_| ())
    }

    /// Begins a collective that works on `buffer` in place. The handle returns the buffer.
    pub(super) fn start_in_place<B: OwnedBuffer>(
        &mut self,
        mut call: Call,
        mut buffer: B,
    ) -> Result<Handle<B>, Error> {
        match call.compression {
            Compression::None => {}
            Compression::Fp16 => return self.start_half_precision::<f16, B>(&call, buffer),
            Compression::Bf16 => return self.start_half_precision::<bf16, B>(&call, buffer),
            _ => return Err(Error::InvalidCounts("WIP")),
        }
        self.check_abort()?;
        self.reduce_single_contribution(&call.request.contract, bytemuck::cast_slice_mut(buffer.as_mut()));
        let Some(job) = self.job.clone() else { return Ok(Handle::ready(Ok(buffer))) };
        self.hand_over_rounds(&mut call);
        let id = job.driver.submit(call.request, self.submission(&mut call, Memory::owned(buffer)))?;
        let make_result = |output: OperationOutput| output.memory.into_owned().ok_or(Error::Taken);
        Ok(Handle::pending(job, id, make_result))
    }

    /// Reduces the elements if no other rank contributes to the result: in a world of one rank, and on rank 0 of a scan or
    /// exscan. For example, a logical reduction converts each element to 0 or 1.
    fn reduce_single_contribution(&self, contract: &Contract, bytes: &mut [u8]) {
        let is_scan = matches!(contract.operation, Operation::Scan | Operation::Exscan);
        if let Some(op) = contract.reduction
            && (self.world == WorldSize::ONE || (is_scan && self.rank == Rank::ZERO))
        {
            reduce::reduce_single_contribution(contract.dtype, op, bytes);
        }
    }

    /// Returns the error after [`Group::abort`] in a world of one rank. In other worlds, the driver returns the error.
    pub(super) fn check_abort(&self) -> Result<(), Error> {
        match (&self.job, self.abort_error.get()) {
            (None, Some(error)) => Err(error.clone()),
            _ => Ok(()),
        }
    }

    /// Returns the operation that the driver has to begin for a call.
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
        let blocks = topology.plan(&call.spec, algorithm, call.in_rank_order, dtype.size_bytes());
        Submission::Collective(blocks, BufferAndReduction { memory, kernels: call.kernels.take() })
    }

    /// Hands the rounds that the operation of a call uses over to the core, unless the core already has them. The stages of a
    /// hierarchical collective have a group number of their own.
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

    /// Runs an all-reduce of `elements`, which are `f32`, and sends elements of type `H`, one block after the other.
    fn run_half_precision<H: CompressedElement>(
        &mut self,
        call: &Call,
        elements: &mut [f32],
    ) -> Result<(), Error> {
        let mut narrow = vec![H::ZERO; elements.len().min(COMPRESSED_BLOCK_ELEMENTS)];
        // An empty buffer still takes part, so that the ranks can detect different lengths.
        for start in (0..elements.len().max(1)).step_by(COMPRESSED_BLOCK_ELEMENTS) {
            let end = elements.len().min(start + COMPRESSED_BLOCK_ELEMENTS);
            let block = &mut elements[start..end];
            let narrow = &mut narrow[..block.len()];
            H::encode(block, narrow);
            self.run(&mut self.half_precision_call::<H>(call, narrow.len())?, narrow)?;
            H::decode(narrow, block);
        }
        Ok(())
    }

    /// Begins an all-reduce of `buffer`, which has elements of `f32`, and sends elements of type `H`. All blocks are active at
    /// the same time.
    fn start_half_precision<H: CompressedElement, B: OwnedBuffer>(
        &mut self,
        call: &Call,
        mut buffer: B,
    ) -> Result<Handle<B>, Error> {
        let elements: &[f32] = bytemuck::cast_slice::<B::Element, f32>(buffer.as_ref());
        let mut blocks = Vec::new();
        for start in (0..elements.len().max(1)).step_by(COMPRESSED_BLOCK_ELEMENTS) {
            let end = elements.len().min(start + COMPRESSED_BLOCK_ELEMENTS);
            let mut narrow = vec![H::ZERO; end - start];
            H::encode(&elements[start..end], &mut narrow);
            let block_call = self.half_precision_call::<H>(call, narrow.len())?;
            blocks.push(self.start_in_place(block_call, narrow)?);
        }
        Ok(Handle::joined(blocks, move |blocks: Vec<Vec<H>>| {
            let elements: &mut [f32] = bytemuck::cast_slice_mut::<B::Element, f32>(buffer.as_mut());
            for (elements, block) in elements.chunks_mut(COMPRESSED_BLOCK_ELEMENTS).zip(&blocks) {
                H::decode(block, elements);
            }
            Ok(buffer)
        }))
    }

    /// Returns the call of one block of a compressed all-reduce.
    fn half_precision_call<H: Element>(&self, call: &Call, count: usize) -> Result<Call, Error> {
        let mut block_call = self.new_call::<H>(CollectiveSpec::AllReduce { count }, call.request.site);
        if let Some(op) = call.request.contract.reduction {
            block_call.set_built_in(op)?;
        }
        Ok(block_call)
    }
}
