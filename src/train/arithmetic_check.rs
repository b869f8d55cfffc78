//! Checks that matrix products have the bits that `--reproducible` promises.
//!
//! Each element of a matrix product is a sum of terms. A sum of at most [`CHAIN_LENGTH`] terms is a chain of fused
//! multiply-adds, in the order of the terms. A longer sum adds several such chains, also in order. The kernels of
//! `matrixmultiply` for AVX2 with FMA and for AVX-512 compute these chains. A processor without FMA rounds each term
//! before the addition, so its results differ.

use ndarray::linalg::general_mat_mul;
use ndarray::{Array2, ArrayView2};

use super::logical_shards::LogicalShards;
use super::random;
use super::rank_checks::check_all_succeeded;
use super::{RunPhase, TrainError};
use crate::group::Group;

/// The maximum number of terms in a chain. A kernel adds each complete chain to the result.
pub(crate) const CHAIN_LENGTH: usize = 256;

/// Returns an error if there are more ranks than logical shards, or if a rank's matrix products do not have the bits
/// of [`reference_product`]. Does nothing without logical shards. All ranks must call this function.
pub(crate) fn check_reproducible_run(
    group: &mut Group,
    shards: Option<LogicalShards>,
) -> Result<(), TrainError> {
    let Some(shards) = shards else { return Ok(()) };
    shards.check_world_size(group.size()).map_err(TrainError::Options)?;
    check_all_succeeded(group, RunPhase::Training, check_arithmetic().map_err(TrainError::Options))
}

/// Returns an error if matrix products on this machine do not have the bits of [`reference_product`].
fn check_arithmetic() -> Result<(), String> {
    // The first product has complete and partial tiles of the kernels. The sums of the second product have two chains.
    if [(17, 21, 17), (3, 300, 2)].map(count_differing_elements) == [0, 0] {
        return Ok(());
    }
    Err("--reproducible needs a processor with fused multiply-add (AVX2 with FMA, AVX-512 or NEON), but this machine rounds \
         matrix products differently; leave out --reproducible, or use another machine"
        .into())
}

/// Multiplies random matrices in two memory layouts, with and without initial values of the result. Returns the
/// number of elements that differ from [`reference_product`]. Each of the `rows` x `columns` elements is a sum of
/// `terms` terms.
fn count_differing_elements((rows, terms, columns): (usize, usize, usize)) -> usize {
    let mut stream = random::random_stream("arithmetic check", terms as u64, (rows * columns) as u64);
    let mut random_matrix =
        |shape| Array2::from_shape_simple_fn(shape, || random::symmetric_uniform(&mut stream, 1.0));
    let (left, right) = (random_matrix((rows, terms)), random_matrix((terms, columns)));
    let (left_columns, right_columns) = (left.t().to_owned(), right.t().to_owned());
    let initial = random_matrix((rows, columns));
    let mut differing = 0;
    for factor in [0.0, 1.0] {
        let expected = reference_product(&left.view(), &right.view(), factor, &initial);
        for (left, right) in [(left.view(), right.view()), (left_columns.t(), right_columns.t())] {
            let mut found = initial.clone();
            general_mat_mul(1.0, &left, &right, factor, &mut found);
            differing += found.iter().zip(&expected).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
        }
    }
    differing
}

/// Returns `left * right + factor * initial`, computed with one fused multiply-add at a time.
fn reference_product(
    left: &ArrayView2<'_, f32>,
    right: &ArrayView2<'_, f32>,
    factor: f32,
    initial: &Array2<f32>,
) -> Array2<f32> {
    let terms = left.ncols();
    Array2::from_shape_fn(initial.dim(), |(row, column)| {
        let mut sum = factor * initial[(row, column)];
        for start in (0..terms).step_by(CHAIN_LENGTH) {
            let indices = start..terms.min(start + CHAIN_LENGTH);
            sum +=
                indices.fold(0.0, |chain, index| left[(row, index)].mul_add(right[(index, column)], chain));
        }
        sum
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// If this test fails on a machine with FMA, matrix products of machines with different instruction sets may differ.
    #[test]
    fn products_have_the_bits_of_chains_of_fused_multiply_adds() {
        if !cfg!(target_arch = "x86_64") || !std::arch::is_x86_feature_detected!("fma") {
            return;
        }
        for shape in
            [(1, 1, 1), (1, 300, 1), (3, 5, 17), (16, 16, 16), (40, 16, 33), (17, 300, 18), (70, 8, 20)]
        {
            assert_eq!(count_differing_elements(shape), 0, "{shape:?}");
        }
        assert_eq!(check_arithmetic(), Ok(()));
    }
}
