//! How the call of a collective becomes an operation.

use std::time::Duration;

use half::{bf16, f16};

use super::handle::Handle;
use super::{Error, Group, OwnedBuffer};
use crate::codec::{CompressedElement, Compression};
use crate::engine::{OperationRequest, SendMode};
use crate::reduce::{self, Kernels};
use crate::runtime::driver::{OperationOutput, Submission};
use crate::runtime::host_rounds::ShmRequest;
use crate::runtime::link_driver::BufferAndReduction;
use crate::runtime::memory::{BufferAccess, Memory};
use crate::schedule::CollectiveSpec;
use crate::schedule::topology::{Medium, Topology};
use crate::types::{
    Algorithm, Contract, DType, Element, HOSTS_GROUP_BIT, Operation, Rank, ReduceOp, Site, WorldSize,
};

/// The number of elements that a compressed all-reduce converts at a time. The converted elements take 2 MiB of memory and 2 MiB
/// on the wire.
const COMPRESSED_BLOCK_ELEMENTS: usize = 1 << 20;

/// A collective that a caller requests, and the algorithm that was chosen for it.
pub struct Call {
    pub(super) spec: CollectiveSpec,
    pub(super) reduction: Option<Reduction>,
    pub(super) algorithm: Algorithm,
    /// Whether the whole collective runs in shared memory.
    pub(super) uses_shared_memory: bool,
    /// For an all-reduce of `f32`: the type that the ranks send.
    compression: Compression,
    /// Whether the reduction must be applied in rank order, because it may not commute.
    in_rank_order: bool,
    /// A digest of the lengths of uneven parts; 0 for even parts.
    layout: u32,
    pub(super) site: Site,
}

/// The reduction of the elements at the same index of all ranks' buffers.
#[derive(Clone)]
pub(super) struct Reduction {
    pub(super) op: ReduceOp,
    pub(super) kernels: Kernels,
}

impl Reduction {
    /// Returns a built-in reduction.
    pub(super) fn built_in<T: Element>(op: ReduceOp) -> Result<Self, Error> {
        let kernels = reduce::kernels(T::DTYPE, op).ok_or(Error::Unsupported { op, dtype: T::DTYPE })?;
        Ok(Self { op, kernels })
    }

    /// Returns a reduction with a function of the user.
    pub(super) fn custom<T: Element>(function: impl Fn(&T, &T) -> T + Send + Sync + 'static) -> Self {
        Self { op: ReduceOp::Custom, kernels: Kernels::custom(function) }
    }
}

impl Call {
    /// Sets the reduction.
    pub(super) fn with_reduction(mut self, reduction: Reduction) -> Self {
        self.reduction = Some(reduction);
        self
    }

    /// Makes an all-reduce of `f32` send compressed elements.
    pub(super) fn with_compression(mut self, compression: Compression) -> Self {
        self.compression = compression;
        self
    }

    /// Makes the reduction run in rank order.
    pub(super) fn in_rank_order(mut self) -> Self {
        self.in_rank_order = true;
        if !self.uses_shared_memory {
            self.algorithm = Algorithm::Chain;
        }
        self
    }

    /// Sets the direct algorithm: every rank sends to every other rank.
    pub(super) fn with_direct_algorithm(mut self) -> Self {
        self.algorithm = Algorithm::Direct;
        self
    }

    /// Returns the request to run the call in the shared memory of `world` ranks.
    fn into_shm_request(self, world: WorldSize) -> ShmRequest {
        let kernels = self.reduction.map(|reduction| reduction.kernels);
        ShmRequest { spec: self.spec, kernels, divisor: world.get() }
    }

    /// Sets the digest of the lengths of uneven parts.
    pub(super) fn with_layout(mut self, layout: u32) -> Self {
        self.layout = layout;
        self
    }
}

impl Group {
    /// Returns a call without a reduction and with even parts, on elements of type `T`.
    pub(super) fn new_call<T: Element>(&self, spec: CollectiveSpec, site: Site) -> Call {
        let uses_shared_memory = self.host_rounds.is_some() && spec.has_known_part_lengths();
        let algorithm = self.algorithm_of::<T>(spec.operation(), spec.count());
        let compression = Compression::None;
        let (reduction, in_rank_order, layout) = (None, false, 0);
        Call { spec, reduction, algorithm, uses_shared_memory, compression, in_rank_order, layout, site }
    }

    /// Runs a collective that works on `elements` in place, and waits until the collective is complete.
    pub(super) fn run<T: Element>(&mut self, call: Call, elements: &mut [T]) -> Result<(), Error> {
        match call.compression {
            Compression::None => {}
            Compression::Fp16 => {
                return self.run_half_precision::<f16>(&call, bytemuck::cast_slice_mut(elements));
            }
            Compression::Bf16 => {
                return self.run_half_precision::<bf16>(&call, bytemuck::cast_slice_mut(elements));
            }
        }
        self.check_abort()?;
        self.reduce_single_contribution(&call, elements);
        self.run_on_bytes::<T>(call, bytemuck::cast_slice_mut::<T, u8>(elements).into())
    }

    /// Runs a collective in which this rank only sends `elements`, and waits until the collective is complete.
    pub(super) fn run_sending<T: Element>(&mut self, call: Call, elements: &[T]) -> Result<(), Error> {
        self.run_on_bytes::<T>(call, bytemuck::cast_slice::<T, u8>(elements).into())
    }

    /// Runs a collective that reads `input` and writes `output`, and waits until the collective is complete. The collective sees
    /// one buffer: the input followed by the output.
    pub(super) fn run_with_output<T: Element>(
        &mut self,
        call: Call,
        input: &[T],
        output: &mut [T],
    ) -> Result<(), Error> {
        let (input, output) = (bytemuck::cast_slice::<T, u8>(input), bytemuck::cast_slice_mut(output));
        self.run_on_bytes::<T>(call, (input, output).into())
    }

    /// Runs a collective on the bytes of its buffer, in shared memory or by the driver. In a world of one rank, does nothing.
    fn run_on_bytes<T: Element>(&mut self, call: Call, bytes: BufferAccess<'_>) -> Result<(), Error> {
        let request = self.operation_request::<T>(&call);
        let Some(job) = &self.job else { return self.check_abort() };
        // If asynchronous operations use the rounds, this operation has to queue behind them.
        if let Some(home) = self.host_rounds.as_mut().filter(|_| call.uses_shared_memory)
            && let Some(host_rounds) = home.take_back(&job.driver, self.id)
        {
            let shm_request = call.into_shm_request(self.world);
            return job.driver.run_in_shared_memory(host_rounds, &self.members, request, shm_request, bytes);
        }
        self.hand_over_rounds(&call);
        let Some(job) = &self.job else { return Ok(()) };
        job.driver.run(request, bytes, |memory| self.submission::<T>(call, memory)).map(|_| ())
    }

    /// Begins a collective that works on `buffer` in place. The handle returns the buffer.
    pub(super) fn start_in_place<B: OwnedBuffer>(
        &mut self,
        call: Call,
        mut buffer: B,
    ) -> Result<Handle<B>, Error> {
        match call.compression {
            Compression::None => {}
            Compression::Fp16 => return self.start_half_precision::<f16, B>(&call, buffer),
            Compression::Bf16 => return self.start_half_precision::<bf16, B>(&call, buffer),
        }
        self.check_abort()?;
        self.reduce_single_contribution(&call, buffer.as_mut());
        let Some(job) = self.job.clone() else { return Ok(Handle::ready(Ok(buffer))) };
        let request = self.operation_request::<B::Element>(&call);
        self.hand_over_rounds(&call);
        let id = job.driver.submit(request, self.submission::<B::Element>(call, Memory::owned(buffer)))?;
        let make_result = |output: OperationOutput| output.memory.into_owned().ok_or(Error::Taken);
        Ok(Handle::pending(job, id, make_result))
    }

    /// Reduces the elements if no other rank contributes to the result: in a world of one rank, and on rank 0 of a scan or
    /// exscan. For example, a logical reduction converts each element to 0 or 1.
    fn reduce_single_contribution<T: Element>(&self, call: &Call, elements: &mut [T]) {
        let is_scan = matches!(call.spec, CollectiveSpec::Scan { .. } | CollectiveSpec::Exscan { .. });
        let is_only_contribution = self.world == WorldSize::ONE || (is_scan && self.rank == Rank::ZERO);
        if let Some(reduction) = call.reduction.as_ref().filter(|_| is_only_contribution) {
            reduce::reduce_single_contribution(T::DTYPE, reduction.op, bytemuck::cast_slice_mut(elements));
        }
    }

    /// Returns the error after [`Group::abort`] in a world of one rank. In other worlds, the driver returns the error.
    pub(super) fn check_abort(&self) -> Result<(), Error> {
        match (&self.job, self.abort_error.get()) {
            (None, Some(error)) => Err(error.clone()),
            _ => Ok(()),
        }
    }

    /// Returns the arguments with which the engine begins the operation of a call.
    pub(super) fn operation_request<T: Element>(&self, call: &Call) -> OperationRequest {
        let operation = call.spec.operation();
        let contract = Contract {
            operation,
            dtype: if operation == Operation::Barrier { DType::U8 } else { T::DTYPE },
            reduction: call.reduction.as_ref().map(|reduction| reduction.op),
            algorithm: call.algorithm,
            root: call.spec.root(),
            count: call.spec.count() as u64,
            layout: call.layout,
        };
        let group_bit = if call.algorithm == Algorithm::Hierarchy { HOSTS_GROUP_BIT } else { 0 };
        OperationRequest {
            group: self.id | group_bit,
            contract,
            timeout: self.timeout,
            spent: Duration::ZERO,
            site: call.site,
            mode: SendMode::Standard,
        }
    }

    /// Returns the operation that the driver has to begin for a call.
    fn submission<T: Element>(&self, call: Call, memory: Memory) -> Submission {
        let medium = match &self.hierarchical_data {
            _ if call.uses_shared_memory => Medium::SharedMemory,
            Some(hierarchical_data) if call.algorithm == Algorithm::Hierarchy => {
                Medium::Hosts(&hierarchical_data.layout)
            }
            _ => Medium::Links,
        };
        let chunk_bytes = self.job.as_ref().map_or(1 << 20, |job| job.chunk_bytes);
        let (world, rank, members) = (self.world, self.rank, &self.members);
        let topology = Topology { world, rank, members, medium, chunk_bytes };
        let blocks = topology.plan(&call.spec, call.algorithm, call.in_rank_order, size_of::<T>());
        let kernels = call.reduction.map(|reduction| reduction.kernels);
        Submission::Collective(blocks, BufferAndReduction { memory, kernels, divisor: world.get() })
    }

    /// Hands the rounds that the operation of a call uses over to the core.
    fn hand_over_rounds(&mut self, call: &Call) {
        let Some(job) = &self.job else { return };
        if let Some(home) = self.host_rounds.as_mut().filter(|_| call.uses_shared_memory) {
            home.hand_over(&job.driver, (self.id, 0), &self.members);
        }
        if call.algorithm == Algorithm::Hierarchy
            && let Some(hierarchical) = &mut self.hierarchical_data
        {
            for (stage, home) in hierarchical.stage_rounds.iter_mut().flatten().enumerate() {
                home.hand_over(&job.driver, (self.id | HOSTS_GROUP_BIT, stage), &hierarchical.local_members);
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
            self.run(self.half_precision_call::<H>(call, narrow.len())?, narrow)?;
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
        let block_call = self.new_call::<H>(CollectiveSpec::AllReduce { count }, call.site);
        match &call.reduction {
            Some(reduction) => Ok(block_call.with_reduction(Reduction::built_in::<H>(reduction.op)?)),
            None => Ok(block_call),
        }
    }
}
