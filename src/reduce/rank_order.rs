//! The reduction of the contributions of several ranks, in rank order.

use std::ops::Deref;

use super::Kernels;

/// Reduces the contributions of the first `count` of `ranks` ranks, in rank order. `own` receives the result. It holds the
/// contribution of `rank` if `rank` is one of the first ranks. `lower` is scratch memory, at least as long as `own`.
/// `contribution_of` returns the contribution of another rank; after `None`, the result is unspecified. Without kernels, only the
/// contribution of a single rank can be reduced.
pub fn reduce_in_rank_order<B: Deref<Target = [u8]>>(
    kernels: Option<&Kernels>,
    ((rank, ranks), count): ((usize, usize), usize),
    own: &mut [u8],
    lower: &mut [u64],
    contribution_of: impl Fn(usize) -> Option<B>,
) {
    // The last reduction may also divide, for an average.
    let kernel_of = |from: usize| {
        kernels.map(|kernels| if from + 1 == ranks { &kernels.reduce_last } else { &kernels.reduce })
    };
    let contributes = rank < count;
    if contributes
        && rank > 0
        && let Some(rank_0) = contribution_of(0)
    {
        let lower = &mut bytemuck::cast_slice_mut(lower)[..own.len()];
        if rank > 1 {
            lower.copy_from_slice(&rank_0);
        }
        for arrived in (1..rank).filter_map(&contribution_of) {
            kernels.inspect(|kernels| kernels.reduce.apply_as_right_operand(lower, &arrived));
        }
        kernel_of(rank).inspect(|kernel| kernel.apply(own, if rank > 1 { lower } else { &rank_0 }));
    }
    for from in if contributes { rank + 1..count } else { 0..count } {
        let Some(arrived) = contribution_of(from) else { return };
        match kernel_of(from).filter(|_| from > 0) {
            Some(kernel) => kernel.apply_as_right_operand(own, &arrived),
            None => own.copy_from_slice(&arrived),
        }
    }
}
