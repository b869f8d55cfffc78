//! The plans of collectives, and what identifies a plan that a group keeps. In shared memory, a short collective takes less time
//! than its plan, and a program repeats most of its collectives.

use std::ops::Range;

use super::call::Call;
use crate::types::{DType, Operation, Rank, ReduceOp};

/// What determines the plan of a verb with even parts and a built-in reduction or none, besides the group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct PlanKey {
    pub(super) operation: Operation,
    pub(super) reduction: Option<ReduceOp>,
    pub(super) root: Rank,
    /// The number of elements that a broadcast or scatter names; otherwise 0.
    pub(super) named_count: usize,
    pub(super) dtype: DType,
    pub(super) count: usize,
    pub(super) is_in_place: bool,
}

/// The places of the rank's input and result in the memory on which a call works.
#[derive(Clone)]
pub(super) struct Places {
    pub(super) access: MemoryAccess,
    pub(super) count: usize,
    pub(super) input: Range<usize>,
    /// The place of this rank's result. It is empty on a rank that gets no result.
    pub(super) result: Range<usize>,
    /// The required length of this rank's output; `None` if the rank's output is ignored.
    pub(super) output_count: Option<usize>,
    /// If the call works in place: the index in the buffer at which the memory of the call begins. `None` if the call needs
    /// separate memory. Then the whole buffer is the input, and the result goes to the beginning of the buffer.
    pub(super) start: Option<usize>,
}

/// Which parts of its memory a call writes.
#[derive(Clone)]
pub(super) enum MemoryAccess {
    Written,
    Sent,
    /// The call reads the input, then comes the output. The own part goes from the first range (input) to the second (output).
    InputThenOutput(Range<usize>, Range<usize>),
}

/// A call, and how it uses its memory.
pub struct Plan {
    pub(super) call: Call,
    pub(super) places: Places,
    /// What identifies a kept plan: then the call is in shared memory, without compression or a function of the caller.
    pub(super) key: Option<PlanKey>,
}
