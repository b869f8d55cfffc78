//! `PowerSGD`: approximates the sum of a matrix over all ranks by the product of two narrow matrices.
//!
//! With `M_i` the matrix of rank i and Q from the previous call, the ranks compute
//!
//! `P = orthonormalize(M_1 Q + ... + M_n Q)`, `Q = M_1' P + ... + M_n' P`, result `P Q'`
//!
//! with two exact all-reduces of r (rows + columns) elements together, in place of rows x columns elements. The result is the
//! projection of the sum onto the columns of P. Each rank adds what it lost, `M_i - P (M_i' P)'`, to its matrix of the next call
//! (error feedback): the result and the losses of all ranks add up to the exact sum. Q approaches the r main directions of the
//! gradient, because each call is a step of the subspace iteration.
//!
//! P and the result have the same bits on all ranks, because their arithmetic here does not depend on the processor.
//!
//! Source: Vogels et al., "`PowerSGD`: practical low-rank gradient compression for distributed optimization", `NeurIPS` 2019.

use std::ops::Range;

use super::low_rank_products;
use super::random::{self, RandomStream};
use super::runtime::{PendingSum, Runtime, SumBuffer, SumTarget};
use crate::codec::Compression;
use crate::group::{Compressor, Error};

/// A column of P that keeps less than this fraction of its norm when the earlier columns are subtracted is rounding noise.
const INDEPENDENT_NORM_MIN: f64 = 1e-5;

/// Sums some matrices over all ranks, again and again. All ranks have the same matrices.
#[derive(Default)]
pub(crate) struct LowRankSum {
    matrices: Vec<Matrix>,
    seed: u64,
    /// The all-reduce in progress, of all P or of all Q.
    pending: Option<PendingSum>,
    /// The buffers for all P and for all Q.
    free_buffers: [Option<SumBuffer>; 2],
}

struct Matrix {
    /// The range of the matrix in the vector of parameters. Rows are contiguous.
    range: Range<usize>,
    rows: usize,
    columns: usize,
    /// P', one row of `rows` elements for each column of P.
    left: Vec<f32>,
    /// Q', one row of `columns` elements for each column of Q.
    right: Vec<f32>,
    /// During a call: the matrix of this rank. Before a call: the matrix of this rank in the previous call. `sent` is what this
    /// rank sent of it, so the difference is the residual. The next call subtracts `sent` while it reads the matrix anyway.
    elements: Vec<f32>,
    /// P' and Q' of this rank in the previous call.
    sent: (Vec<f32>, Vec<f32>),
}

impl LowRankSum {
    pub(crate) fn new(seed: u64) -> Self {
        Self { seed, ..Self::default() }
    }

    /// Adds a matrix of `rows` rows, which has the elements `range` of the vector. Its sums have the rank `rank`.
    pub(crate) fn add_matrix(&mut self, range: Range<usize>, (rows, columns): (usize, usize), rank: u8) {
        let rank = usize::from(rank);
        self.matrices.push(Matrix {
            rows,
            columns,
            left: vec![0.0; rank * rows],
            right: vec![0.0; rank * columns],
            elements: vec![0.0; range.len()],
            sent: (vec![0.0; rank * rows], vec![0.0; rank * columns]),
            range,
        });
    }

    /// Starts a sum of the matrices in `vector`: the all-reduce of P. `call` is the number of the sum.
    pub(crate) fn start(
        &mut self,
        runtime: &mut dyn Runtime,
        vector: &[f32],
        call: u64,
    ) -> Result<(), Error> {
        for (index, matrix) in self.matrices.iter_mut().enumerate() {
            matrix.fill_unusable_columns(|| {
                // Each start of the stream depends on the tensor and on the call.
                random::random_stream("PowerSGD", self.seed, (call << 20) + index as u64)
            });
            matrix.update_and_multiply(vector);
        }
        self.all_reduce(runtime, 0, |matrix| &matrix.left)
    }

    /// Waits for the all-reduce of P, and starts the all-reduce of Q. All ranks must call this function in the same order.
    pub(crate) fn advance(&mut self, runtime: &mut dyn Runtime) -> Result<(), Error> {
        self.wait(0, |matrix| &mut matrix.left)?;
        for matrix in &mut self.matrices {
            orthonormalize(&mut matrix.left, matrix.rows);
            matrix.multiply_by_left();
        }
        self.all_reduce(runtime, 1, |matrix| &matrix.right)
    }

    /// Waits for the all-reduce of Q, and writes the sums to `vector`. Calls `on_summed` with each part of the ranges of the
    /// matrices and its sums.
    pub(crate) fn finish(
        &mut self,
        vector: &mut [f32],
        mut on_summed: impl FnMut(Range<usize>, &mut [f32]),
    ) -> Result<(), Error> {
        self.wait(1, |matrix| &mut matrix.right)?;
        for matrix in &self.matrices {
            let sums = &mut vector[matrix.range.clone()];
            let factors = (matrix.left.as_slice(), matrix.right.as_slice());
            low_rank_products::set_product((sums, matrix.columns), factors, |start, block| {
                let start = matrix.range.start + start;
                on_summed(start..start + block.len(), block);
            });
        }
        Ok(())
    }

    /// Copies what this rank has not sent to a vector with an element for each parameter.
    pub(crate) fn copy_residuals_to(&self, residual: &mut [f32]) {
        for matrix in &self.matrices {
            let residual = &mut residual[matrix.range.clone()];
            residual.copy_from_slice(&matrix.elements);
            let sent = (matrix.sent.0.as_slice(), matrix.sent.1.as_slice());
            low_rank_products::subtract_product((residual, matrix.columns), sent);
        }
    }

    /// Copies each matrix Q to the start of the range of its matrix, which is longer, in a vector with an element for each
    /// parameter.
    pub(crate) fn copy_factors_to(&self, factors: &mut [f32]) {
        for matrix in &self.matrices {
            factors[matrix.range.clone()][..matrix.right.len()].copy_from_slice(&matrix.right);
        }
    }

    /// Replaces what this rank has not sent by the sum of `residual` and `addition`, which may be empty. Replaces each matrix Q
    /// unless `factors` is empty.
    pub(crate) fn set_memory(&mut self, residual: Option<&Vec<f32>>, addition: &[f32], factors: &[f32]) {
        for matrix in &mut self.matrices {
            if let Some(residual) = residual {
                matrix.elements.copy_from_slice(&residual[matrix.range.clone()]);
                for (element, value) in
                    matrix.elements.iter_mut().zip(addition.iter().skip(matrix.range.start))
                {
                    *element += value;
                }
                matrix.sent.0.fill(0.0);
                matrix.sent.1.fill(0.0);
            }
            if !factors.is_empty() {
                let len = matrix.right.len();
                matrix.right.copy_from_slice(&factors[matrix.range.clone()][..len]);
            }
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.matrices.is_empty()
    }

    fn all_reduce(
        &mut self,
        runtime: &mut dyn Runtime,
        step: usize,
        factor: impl Fn(&Matrix) -> &[f32],
    ) -> Result<(), Error> {
        let factors: Vec<&[f32]> = self.matrices.iter().map(factor).collect();
        let exact = Compressor::from(Compression::None);
        let reuse = self.free_buffers[step].take();
        self.pending = Some(runtime.start_sum(&factors, (SumTarget::Everything, &exact), reuse)?);
        Ok(())
    }

    fn wait(&mut self, step: usize, factor: impl Fn(&mut Matrix) -> &mut [f32]) -> Result<(), Error> {
        let Some(pending) = self.pending.take() else { return Ok(()) };
        let matrices = &mut self.matrices;
        let buffer = pending.wait(|sums| {
            let mut rest = &*sums;
            for matrix in matrices {
                let factor = factor(matrix);
                let (start, end) = rest.split_at(factor.len());
                factor.copy_from_slice(start);
                rest = end;
            }
        })?;
        self.free_buffers[step] = Some(buffer);
        Ok(())
    }
}

impl Matrix {
    /// Fills columns of Q with random numbers: all columns before the first call, and later those that are 0 because the gradient
    /// had too few independent columns, and those that are not finite. All ranks fill the same columns with the same numbers.
    fn fill_unusable_columns(&mut self, stream: impl FnOnce() -> RandomStream) {
        let is_unusable = |column: &&mut [f32]| {
            column.iter().all(|value| *value == 0.0) || column.iter().any(|value| !value.is_finite())
        };
        let mut columns = self.right.chunks_mut(self.columns).filter(is_unusable).peekable();
        if columns.peek().is_some() {
            let mut stream = stream();
            columns.flatten().for_each(|value| *value = random::symmetric_uniform(&mut stream, 1.0));
        }
    }

    /// Sets the matrix M to the sum of the residual and the matrix in `vector`, and computes P' = Q' M'. The rounding may
    /// differ between ranks. An element of the residual that is not finite becomes 0, because it would make all later results
    /// infinite or NaN.
    fn update_and_multiply(&mut self, vector: &[f32]) {
        let Self { elements, columns, sent, left, right, range, .. } = self;
        let sent = (sent.0.as_slice(), sent.1.as_slice());
        low_rank_products::update_and_multiply(
            (elements, *columns),
            sent,
            &vector[range.clone()],
            right,
            left,
        );
    }

    /// Computes Q' = P' M, and keeps P and Q as what this rank sends.
    fn multiply_by_left(&mut self) {
        let Self { elements, columns, sent, left, right, .. } = self;
        low_rank_products::multiply_transposed((elements, *columns), left, right);
        sent.0.copy_from_slice(left);
        sent.1.copy_from_slice(right);
    }
}

/// Makes the vectors in `vectors`, which have `len` elements each, orthonormal (Gram-Schmidt, with the second pass that Kahan's
/// "twice is enough" demands). A vector that depends on the earlier ones becomes 0. The result has the same bits on every
/// processor, because sums are in a fixed order.
fn orthonormalize(vectors: &mut [f32], len: usize) {
    for index in 0..vectors.len() / len {
        let (earlier, rest) = vectors.split_at_mut(index * len);
        let vector = &mut rest[..len];
        let norm_before = dot(vector, vector).sqrt();
        for _ in 0..2 {
            for earlier in earlier.chunks(len) {
                let projection = dot(vector, earlier) as f32;
                vector.iter_mut().zip(earlier).for_each(|(value, earlier)| *value -= projection * earlier);
            }
        }
        let norm = dot(vector, vector).sqrt();
        if norm <= INDEPENDENT_NORM_MIN * norm_before {
            vector.fill(0.0);
        } else {
            // NaN stays NaN, so that a gradient that is not finite is not hidden.
            for value in vector {
                *value = (f64::from(*value) / norm) as f32;
            }
        }
    }
}

/// Returns the dot product. The order of the additions is fixed, and allows vector instructions.
fn dot(a: &[f32], b: &[f32]) -> f64 {
    const LANES: usize = 8;
    let mut sums = [0.0f64; LANES];
    let (a_blocks, a_rest) = a.as_chunks::<LANES>();
    let (b_blocks, b_rest) = b.as_chunks::<LANES>();
    for (a, b) in a_blocks.iter().zip(b_blocks) {
        for (sum, (a, b)) in sums.iter_mut().zip(a.iter().zip(b)) {
            *sum += f64::from(*a) * f64::from(*b);
        }
    }
    let rest: f64 = a_rest.iter().zip(b_rest).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
    sums.iter().sum::<f64>() + rest
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Barrier, Mutex};
    use std::thread;

    use super::*;
    use crate::group::Group;
    use crate::train::runtime::{PendingReceive, PendingSend, PendingTotals, Values};
    use crate::types::{Rank, WorldSize};

    /// The number of ranks.
    const RANKS: usize = 3;

    /// The runtime of a rank that is a thread of the test.
    struct ThreadRank {
        rank: usize,
        /// The vector of each rank for the current sum.
        vectors: Arc<Mutex<Vec<Vec<f32>>>>,
        barrier: Arc<Barrier>,
        alone: Group,
    }

    impl Runtime for ThreadRank {
        fn rank_and_size(&self) -> (Rank, WorldSize) {
            (Rank::new(self.rank as u32), WorldSize::new(RANKS as u32).unwrap())
        }

        fn start_sum(
            &mut self,
            values: &[&[f32]],
            target_and_compressor: (SumTarget, &Compressor),
            reuse: Option<SumBuffer>,
        ) -> Result<PendingSum, Error> {
            self.vectors.lock().unwrap()[self.rank] = values.concat();
            self.barrier.wait();
            let sum = {
                let vectors = self.vectors.lock().unwrap();
                let sum = |index: usize| vectors.iter().map(|vector| vector[index]).sum();
                (0..vectors[0].len()).map(sum).collect::<Vec<f32>>()
            };
            self.barrier.wait();
            self.alone.start_sum(&[&sum], target_and_compressor, reuse)
        }

        fn combine(&mut self, _: Values<'_>) -> Result<(), Error> {
            unreachable!("the sum starts all-reduces only")
        }

        fn start_sum_of_totals(&mut self, _: Vec<f64>) -> Result<PendingTotals, Error> {
            unreachable!("the sum starts all-reduces only")
        }

        fn start_send(&mut self, _: Vec<f32>, _: Rank, _: u32) -> Result<PendingSend, Error> {
            unreachable!("the sum sends no messages")
        }

        fn start_receive(&mut self, _: Vec<f32>, _: Rank, _: u32) -> Result<PendingReceive, Error> {
            unreachable!("the sum sends no messages")
        }
    }

    /// Calls `work` on each rank, and returns the results in the order of the ranks.
    fn on_each_rank<R: Send + 'static>(work: impl Fn(ThreadRank) -> R + Send + Copy + 'static) -> Vec<R> {
        let (vectors, barrier) =
            (Arc::new(Mutex::new(vec![Vec::new(); RANKS])), Arc::new(Barrier::new(RANKS)));
        let rank = |rank| ThreadRank {
            rank,
            vectors: Arc::clone(&vectors),
            barrier: Arc::clone(&barrier),
            alone: Group::solo(),
        };
        let threads: Vec<_> = (0..RANKS).map(rank).map(|rank| thread::spawn(move || work(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    }

    const ROWS: usize = 12;
    const COLUMNS: usize = 9;

    /// Returns the matrix of a rank in a call: the sum of `terms` products of a column and a row.
    fn matrix(rank: usize, call: u64, terms: u64) -> Vec<f32> {
        let mut sum = vec![0.0; ROWS * COLUMNS];
        for term in 0..terms {
            // The columns are the same on all ranks and in all calls, so that the sum also has `terms` columns.
            let mut columns = random::random_stream("columns", term, 0);
            let column: Vec<f32> = (0..ROWS).map(|_| random::symmetric_uniform(&mut columns, 1.0)).collect();
            let mut rows = random::random_stream("rows", term, call * 100 + rank as u64);
            let row: Vec<f32> = (0..COLUMNS).map(|_| random::symmetric_uniform(&mut rows, 1.0)).collect();
            for (index, value) in sum.iter_mut().enumerate() {
                *value += column[index / COLUMNS] * row[index % COLUMNS];
            }
        }
        sum
    }

    /// Returns the sums of `terms` terms in some calls, with the compression to `rank` columns, and what a rank has not sent at
    /// the end.
    fn sums_and_residual(
        mut ranks: ThreadRank,
        terms: u64,
        rank: u8,
        calls: u64,
    ) -> (Vec<Vec<f32>>, Vec<f32>) {
        let mut sum = LowRankSum::new(7);
        // The matrix is in the middle of the vector.
        sum.add_matrix(5..5 + ROWS * COLUMNS, (ROWS, COLUMNS), rank);
        let mut sums = Vec::new();
        for call in 1..=calls {
            let mut vector = vec![9.0; 5];
            vector.extend(matrix(ranks.rank, call, terms));
            sum.start(&mut ranks, &vector, call).unwrap();
            sum.advance(&mut ranks).unwrap();
            let mut found = Vec::new();
            sum.finish(&mut vector, |range, sums| {
                assert_eq!(range, 5..5 + ROWS * COLUMNS);
                found = sums.to_vec();
            })
            .unwrap();
            assert_eq!(vector[5..], found);
            sums.push(found);
        }
        let mut residual = vec![0.0; 5 + ROWS * COLUMNS];
        sum.copy_residuals_to(&mut residual);
        (sums, residual.split_off(5))
    }

    fn exact_sum(call: u64, terms: u64) -> Vec<f32> {
        let matrices: Vec<Vec<f32>> = (0..RANKS).map(|rank| matrix(rank, call, terms)).collect();
        (0..ROWS * COLUMNS).map(|index| matrices.iter().map(|matrix| matrix[index]).sum()).collect()
    }

    fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
        a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
    }

    #[test]
    fn the_sum_is_exact_if_it_has_at_most_as_many_independent_columns_as_the_factors() {
        for terms in [0, 1, 3] {
            for (sums, _) in on_each_rank(move |rank| sums_and_residual(rank, terms, 3, 3)) {
                for (sum, call) in sums.iter().zip(1..) {
                    let difference = largest_difference(sum, &exact_sum(call, terms));
                    assert!(difference < 1e-5, "{terms} terms, call {call}: {difference}");
                }
            }
        }
    }

    /// All results and what the ranks have not sent must add up to the exact sums, and all ranks must have the same bits.
    #[test]
    fn nothing_is_lost_and_all_ranks_have_the_same_bits() {
        const CALLS: u64 = 6;
        let found = on_each_rank(|rank| sums_and_residual(rank, 8, 2, CALLS));
        assert!(found.iter().all(|(sums, _)| *sums == found[0].0));
        let mut total = vec![0.0; ROWS * COLUMNS];
        let mut expected = total.clone();
        let add = |total: &mut Vec<f32>, values: &[f32]| {
            total.iter_mut().zip(values).for_each(|(total, value)| *total += value);
        };
        found[0].0.iter().for_each(|sum| add(&mut total, sum));
        let sent = total.clone();
        for (_, residual) in &found {
            add(&mut total, residual);
        }
        (1..=CALLS).for_each(|call| add(&mut expected, &exact_sum(call, 8)));
        let difference = largest_difference(&total, &expected);
        assert!(difference < 1e-4, "{difference}");
        assert!(largest_difference(&sent, &expected) > 0.1, "a rank of 2 cannot hold 8 columns");
    }

    /// The subspace iteration must find the main directions of a matrix that stays the same, so the results must approach it.
    #[test]
    fn repeated_sums_of_a_constant_matrix_converge_on_average() {
        const CALLS: u64 = 40;
        let mean_error = |(sums, _): &(Vec<Vec<f32>>, Vec<f32>), calls: usize| {
            let mean =
                |index: usize| sums.iter().take(calls).map(|sum| sum[index]).sum::<f32>() / calls as f32;
            let means: Vec<f32> = (0..ROWS * COLUMNS).map(mean).collect();
            largest_difference(&means, &exact_sum(1, 6))
        };
        let found = on_each_rank(|mut ranks| {
            let mut sum = LowRankSum::new(1);
            sum.add_matrix(0..ROWS * COLUMNS, (ROWS, COLUMNS), 1);
            let mut sums = Vec::new();
            for call in 1..=CALLS {
                let mut vector = matrix(ranks.rank, 1, 6);
                sum.start(&mut ranks, &vector, call).unwrap();
                sum.advance(&mut ranks).unwrap();
                sum.finish(&mut vector, |_, sums| sums.iter().for_each(|v| assert!(v.is_finite()))).unwrap();
                sums.push(vector);
            }
            (sums, Vec::new())
        });
        let (early, late) = (mean_error(&found[0], 2), mean_error(&found[0], CALLS as usize));
        assert!(late < early / 4.0, "{early} {late}");
    }

    #[test]
    fn vectors_become_orthonormal_and_dependent_vectors_become_zero() {
        let mut vectors = [3.0, 0.0, 4.0, 6.0, 0.0, 8.0, 1.0, 1.0, 0.0];
        orthonormalize(&mut vectors, 3);
        let expected = [0.6, 0.0, 0.8, 0.0, 0.0, 0.0];
        assert!(largest_difference(&vectors[..6], &expected) < 1e-6, "{vectors:?}");
        assert!(dot(&vectors[6..], &vectors[..3]).abs() < 1e-6, "{vectors:?}");
        assert!((dot(&vectors[6..], &vectors[6..]) - 1.0).abs() < 1e-6, "{vectors:?}");
        let mut invalid = [f32::NAN, 1.0, 2.0, 3.0];
        orthonormalize(&mut invalid, 2);
        assert!(invalid.iter().all(|value| value.is_nan()), "{invalid:?}");
        let numbers: Vec<f32> = (0..19).map(|value| value as f32).collect();
        assert_eq!(dot(&numbers, &numbers), 2109.0);
    }
}
