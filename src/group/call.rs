//! The call of a collective.

use super::compressor::{CallTimer, Compressor};
use crate::codec::Compression;
use crate::codec::error_feedback::ResultAddition;
use crate::engine::OperationRequest;
use crate::reduce::{self, Kernels};
use crate::runtime::encoding::Encoding;
use crate::runtime::error::Error;
use crate::runtime::host_rounds::short::ShortCall;
use crate::schedule::CollectiveSpec;
use crate::types::{
    Algorithm, COMPRESSED_LAYOUT, Contract, LAST_RESULT_LAYOUT, Operation, ReduceOp, WorldSize,
};

/// A collective that a caller requests, and the algorithm that was chosen for it.
pub struct Call {
    pub(super) spec: CollectiveSpec,
    /// The arguments with which the engine begins the operation. They include the algorithm.
    pub(super) request: OperationRequest,
    pub(super) kernels: Option<Kernels>,
    pub(super) uses_shared_memory: bool,
    /// For compressed `f32`: the compressor until [`Group::begin_encoding`](super::Group), and then the encoding.
    pub(super) compressor: Option<Compressor>,
    pub(super) encoding: Option<Box<Encoding>>,
    /// Measures the time of a call whose compressor chooses the codec.
    pub(super) timer: Option<CallTimer>,
    /// What remains to be done with the result of a call with EF21.
    pub(super) addition: Option<ResultAddition>,
    /// Whether the reduction must be applied in rank order, because it may not commute.
    pub(super) in_rank_order: bool,
    pub(super) world: WorldSize,
    /// The same call, if it is so short that it is not an operation.
    pub(super) short: Option<ShortCall>,
}

impl Call {
    pub(super) fn set_built_in(&mut self, op: ReduceOp) -> Result<(), Error> {
        let Contract { operation, dtype, .. } = self.request.contract;
        let is_scan = matches!(operation, Operation::Scan | Operation::Exscan);
        let kernels = reduce::kernels(dtype, op).filter(|_| !is_scan || op != ReduceOp::Average);
        let kernels = kernels.ok_or(Error::Unsupported { op, dtype })?.of_contributions(self.world.get());
        self.request.contract.reduction = Some(op);
        self.kernels = Some(kernels);
        Ok(())
    }

    /// Sets the compression; the built-in reduction is set before. Returns [`Error::Compression`] if it does not fit the call.
    pub(super) fn set_compressor(&mut self, compressor: &Compressor) -> Result<(), Error> {
        let compression = compressor.compression();
        if compression == Compression::None {
            return Ok(());
        }
        let is_automatic = matches!(compression, Compression::Auto(_));
        if is_automatic && compressor.auto.is_none() {
            let text = "auto compares the codecs over several calls, so pass a Compressor that all calls with this buffer share";
            return Err(Error::Compression(text.into()));
        }
        if matches!(compression, Compression::PowerSgd(_)) {
            let text = "is for the gradients of a model, not for a single buffer; use it in `ringtrain --compression` or in a \
                        communication hook of `ringtrain.torch.hooks`";
            return Err(Error::Compression(format!("{compression} {text}")));
        }
        let contract = &self.request.contract;
        let sums = matches!(contract.reduction, Some(ReduceOp::Sum | ReduceOp::Average));
        if !sums && !matches!(compression, Compression::Fp16 | Compression::Bf16) {
            let op = contract.reduction.map_or_else(String::new, |op| op.to_string());
            return Err(Error::Compression(format!(
                "{compression} compresses sums and averages, not {op}; use another compression, such as bf16"
            )));
        }
        if compression.adds_last_result() && contract.operation != Operation::AllReduce {
            return Err(Error::Compression(format!(
                "{compression} is for all-reduces, because every rank keeps all results, not for {}",
                contract.operation
            )));
        }
        if contract.layout != 0 {
            let text = "has even parts; leave out the counts or the compression";
            return Err(Error::Compression(format!("a compressed {} {text}", contract.operation)));
        }
        self.compressor = Some(compressor.clone());
        Ok(())
    }

    /// Sets the codec of a compressed call. `has_result` says whether the call adds an earlier result.
    pub(super) fn set_codec(&mut self, compression: Compression, has_result: bool) {
        if compression == Compression::None {
            return;
        }
        let contract = &mut self.request.contract;
        contract.layout = COMPRESSED_LAYOUT | compression.to_code();
        if has_result {
            contract.layout |= LAST_RESULT_LAYOUT;
        }
        if !self.uses_shared_memory && contract.algorithm != Algorithm::Hierarchy {
            contract.algorithm = Algorithm::Direct;
        }
    }
}

/// Returns a digest with which the ranks compare the lengths of uneven parts. It is never 0, which stands for even parts.
pub(super) fn layout_digest(counts: impl IntoIterator<Item = usize>) -> u32 {
    let bytes: Vec<u8> = counts.into_iter().flat_map(|count| (count as u64).to_le_bytes()).collect();
    (crate::wire::crc32c(&bytes) & !COMPRESSED_LAYOUT).max(1)
}
