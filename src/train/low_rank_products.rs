//! The products of a large matrix and a few vectors that `PowerSGD` computes. Each function reads the matrix once, because the
//! time for its memory is longer than the time for the arithmetic.
//!
//! The rows of matrices are contiguous. The vectors that a function multiplies by a matrix are one after another in a slice.

#![expect(
    clippy::inline_always,
    reason = "a loop is compiled for a vector unit only if all functions that it calls are inlined"
)]

use crate::codec::finite_or_zero;
use crate::simd::{VectorLoop, VectorWidth};

/// The number of sums that a loop adds at the same time, and the number of elements of a row that it keeps in registers.
const LANES: usize = 32;

/// The number of rows that [`multiply_transposed`] adds at the same time.
const ROWS: usize = 4;

/// The largest number of vectors.
const VECTORS_MAX: usize = u8::MAX as usize;

/// The approximate number of elements in a block of [`set_product`], which the level 2 cache holds.
const BLOCK_ELEMENTS: usize = 32 << 10;

/// Subtracts the product `sent` of two factors from `matrix` as [`subtract_product`] does, and then adds `values`. Sets
/// `products` to the products of the matrix and each vector of `vectors`, which has as many elements as the matrix has columns.
pub(super) fn update_and_multiply(
    (matrix, columns): (&mut [f32], usize),
    sent: (&[f32], &[f32]),
    values: &[f32],
    vectors: &[f32],
    products: &mut [f32],
) {
    VectorWidth::detect().run(UpdateAndMultiply { matrix, columns, sent, values, vectors, products });
}

/// Sets `products` to the products of the transposed matrix and each vector of `vectors`, which has as many elements as the
/// matrix has rows.
pub(super) fn multiply_transposed((matrix, columns): (&[f32], usize), vectors: &[f32], products: &mut [f32]) {
    VectorWidth::detect().run(MultiplyTransposed { matrix, columns, vectors, products });
}

/// Sets `target` to the sum of the products of each vector of `left` (a column) and the vector with the same index of `right` (a
/// row of `columns` elements). The result has the same bits on every processor. Calls `on_block` with each block of some rows and
/// the index of its first element, while the block is still in a cache.
pub(super) fn set_product(
    (target, columns): (&mut [f32], usize),
    (left, right): (&[f32], &[f32]),
    mut on_block: impl FnMut(usize, &mut [f32]),
) {
    let rows = target.len() / columns;
    let block_rows = (BLOCK_ELEMENTS / columns).max(1);
    for (block, target) in target.chunks_mut(block_rows * columns).enumerate() {
        let first_row = block * block_rows;
        let factors = Factors { left, right, rows };
        VectorWidth::detect().run(Product { target, columns, factors, first_row, update: Update::Set });
        on_block(first_row * columns, target);
    }
}

/// Subtracts the sum of [`set_product`] from `target`, and replaces differences that are not finite by 0.
pub(super) fn subtract_product((target, columns): (&mut [f32], usize), (left, right): (&[f32], &[f32])) {
    let factors = Factors { left, right, rows: target.len() / columns };
    VectorWidth::detect().run(Product {
        target,
        columns,
        factors,
        first_row: 0,
        update: Update::SubtractFinite,
    });
}

struct UpdateAndMultiply<'a> {
    matrix: &'a mut [f32],
    columns: usize,
    sent: (&'a [f32], &'a [f32]),
    values: &'a [f32],
    vectors: &'a [f32],
    products: &'a mut [f32],
}

impl VectorLoop for UpdateAndMultiply<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self { matrix, columns, sent: (left, right), values, vectors, products } = self;
        let rows = matrix.len() / columns;
        let factors = Factors { left, right, rows };
        let lines = matrix.chunks_exact_mut(columns).zip(values.chunks_exact(columns));
        for (row, (line, values)) in lines.enumerate() {
            factors.update_line(row, line, Update::SubtractFinite);
            line.iter_mut().zip(values).for_each(|(element, value)| *element += value);
            for (products, vector) in products.chunks_exact_mut(rows).zip(vectors.chunks_exact(columns)) {
                products[row] = dot(line, vector);
            }
        }
    }
}

#[inline(always)]
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0; LANES];
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    for (a, b) in a.iter().zip(b) {
        for (sum, (a, b)) in sums.iter_mut().zip(a.iter().zip(b)) {
            *sum += a * b;
        }
    }
    let rest: f32 = a_rest.iter().zip(b_rest).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f32>() + rest
}

struct MultiplyTransposed<'a> {
    matrix: &'a [f32],
    columns: usize,
    vectors: &'a [f32],
    products: &'a mut [f32],
}

impl VectorLoop for MultiplyTransposed<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self { matrix, columns, vectors, products } = self;
        let rows = matrix.len() / columns;
        products.fill(0.0);
        for (block, lines) in matrix.chunks(ROWS * columns).enumerate() {
            let first = block * ROWS;
            for (vector, products) in vectors.chunks_exact(rows).zip(products.chunks_exact_mut(columns)) {
                let weights = &vector[first..rows.min(first + ROWS)];
                add_lines(lines, weights, products);
            }
        }
    }
}

/// Adds the products of each line and its weight to `sums`.
#[inline(always)]
fn add_lines(lines: &[f32], weights: &[f32], sums: &mut [f32]) {
    let columns = sums.len();
    if let &[w0, w1, w2, w3] = weights {
        let (first, second) = lines.split_at(2 * columns);
        let ((a, b), (c, d)) = (first.split_at(columns), second.split_at(columns));
        for ((((sum, a), b), c), d) in sums.iter_mut().zip(a).zip(b).zip(c).zip(d) {
            *sum += (w0 * a + w1 * b) + (w2 * c + w3 * d);
        }
        return;
    }
    for (line, weight) in lines.chunks_exact(columns).zip(weights) {
        sums.iter_mut().zip(line).for_each(|(sum, element)| *sum += weight * element);
    }
}

/// What [`Product`] does with the target.
#[derive(Clone, Copy)]
enum Update {
    Set,
    SubtractFinite,
}

/// The factors of a matrix of `rows` rows.
#[derive(Clone, Copy)]
struct Factors<'a> {
    left: &'a [f32],
    right: &'a [f32],
    rows: usize,
}

impl Factors<'_> {
    /// Updates a line with the row `row` of the product.
    #[inline(always)]
    fn update_line(self, row: usize, line: &mut [f32], update: Update) {
        let mut weights = [0.0; VECTORS_MAX];
        let weights = &mut weights[..self.left.len() / self.rows];
        let factor = match update {
            Update::Set => 1.0,
            Update::SubtractFinite => -1.0,
        };
        for (weight, left) in weights.iter_mut().zip(self.left.chunks_exact(self.rows)) {
            *weight = factor * left[row];
        }
        match update {
            Update::Set => combine(line, weights, self.right, |_| 0.0, |sum| sum),
            Update::SubtractFinite => combine(line, weights, self.right, |element| element, finite_or_zero),
        }
    }
}

struct Product<'a> {
    target: &'a mut [f32],
    columns: usize,
    factors: Factors<'a>,
    first_row: usize,
    update: Update,
}

impl VectorLoop for Product<'_> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let Self { target, columns, factors, first_row, update } = self;
        for (row, line) in target.chunks_exact_mut(columns).enumerate() {
            factors.update_line(first_row + row, line, update);
        }
    }
}

/// Replaces each element of a line: starts with the `first` of the element, adds the product of each weight and the element of
/// its vector, and stores the `last` of the result. Multiplications and additions are separate and in a fixed order.
#[inline(always)]
fn combine(
    line: &mut [f32],
    weights: &[f32],
    vectors: &[f32],
    first: impl Fn(f32) -> f32,
    last: impl Fn(f32) -> f32,
) {
    let columns = line.len();
    let (blocks, rest) = line.as_chunks_mut::<LANES>();
    for (index, block) in blocks.iter_mut().enumerate() {
        // `map` of arrays may not be inlined, and would then not run on the vector unit.
        let mut sums = [0.0; LANES];
        sums.iter_mut().zip(&*block).for_each(|(sum, &element)| *sum = first(element));
        for (&weight, vector) in weights.iter().zip(vectors.chunks_exact(columns)) {
            let elements = &vector[index * LANES..(index + 1) * LANES];
            for (sum, element) in sums.iter_mut().zip(elements) {
                *sum += weight * element;
            }
        }
        block.iter_mut().zip(sums).for_each(|(element, sum)| *element = last(sum));
    }
    let start = columns - rest.len();
    for (index, element) in rest.iter_mut().enumerate() {
        let products = weights.iter().zip(vectors.chunks_exact(columns));
        let products = products.map(|(weight, vector)| weight * vector[start + index]);
        *element = last(products.fold(first(*element), |sum, product| sum + product));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns numbers between -1 and 1.
    fn numbers(count: usize, seed: u32) -> Vec<f32> {
        let number = |index: usize| (index as u32 + seed).wrapping_mul(0x9e37_79b9) as i32 as f32;
        (0..count).map(|index| number(index) / 2f32.powi(31)).collect()
    }

    fn assert_close(found: &[f32], expected: impl Fn(usize) -> f64) {
        for (index, &found) in found.iter().enumerate() {
            let expected = expected(index);
            assert!(
                (f64::from(found) - expected).abs() < 1e-5 * expected.abs().max(10.0),
                "element {index}: {found}, expected {expected}"
            );
        }
    }

    #[test]
    fn products_are_those_of_their_definitions() {
        // The last matrix has several blocks.
        for (rows, columns, count) in
            [(1, 1, 1), (4, 32, 1), (7, 33, 2), (13, 100, 4), (70, 5, 3), (7, 12_000, 2)]
        {
            let (mut matrix, values) = (numbers(rows * columns, 1), numbers(rows * columns, 2));
            let (right, mut left) = (numbers(count * columns, 3), vec![f32::NAN; count * rows]);
            let (sent_left, sent_right) = (numbers(count * rows, 7), numbers(count * columns, 8));
            let mut sum = matrix.clone();
            subtract_product((&mut sum, columns), (&sent_left, &sent_right));
            sum.iter_mut().zip(&values).for_each(|(element, value)| *element += value);
            let product = |a: f32, b: f32| f64::from(a) * f64::from(b);
            let sent = (sent_left.as_slice(), sent_right.as_slice());
            update_and_multiply((&mut matrix, columns), sent, &values, &right, &mut left);
            assert_eq!(matrix, sum);
            assert_close(&left, |index| {
                let (vector, row) = (index / rows, index % rows);
                (0..columns).map(|i| product(sum[row * columns + i], right[vector * columns + i])).sum()
            });
            let (left, mut right) = (numbers(count * rows, 4), vec![f32::NAN; count * columns]);
            multiply_transposed((&matrix, columns), &left, &mut right);
            assert_close(&right, |index| {
                let (vector, column) = (index / columns, index % columns);
                (0..rows).map(|i| product(sum[i * columns + column], left[vector * rows + i])).sum()
            });
            let expected = |index: usize| {
                let (row, column) = (index / columns, index % columns);
                (0..count).map(|i| product(left[i * rows + row], right[i * columns + column])).sum::<f64>()
            };
            subtract_product((&mut matrix, columns), (&left, &right));
            assert_close(&matrix, |index| f64::from(sum[index]) - expected(index));
            let mut blocks = Vec::new();
            set_product((&mut matrix, columns), (&left, &right), |start, block| {
                assert_eq!(start, blocks.len());
                blocks.extend_from_slice(block);
            });
            assert_close(&matrix, expected);
            assert_eq!(matrix, blocks);
        }
    }

    /// The sums that ranks write must not depend on their processors.
    #[test]
    fn the_product_has_the_same_bits_on_all_vector_units() {
        let (left, right) = (numbers(3 * 9, 5), numbers(3 * 77, 6));
        let results = VectorWidth::all_supported().into_iter().map(|width| {
            let mut target = vec![f32::NAN; 9 * 77];
            width.run(Product {
                target: &mut target,
                columns: 77,
                factors: Factors { left: &left, right: &right, rows: 9 },
                first_row: 0,
                update: Update::Set,
            });
            target.iter().map(|element| element.to_bits()).collect::<Vec<_>>()
        });
        let results: Vec<_> = results.collect();
        assert!(results.iter().all(|result| *result == results[0]));
    }

    #[test]
    fn differences_that_are_not_finite_become_zero() {
        let mut target = [f32::NAN, f32::INFINITY, 1.0];
        subtract_product((&mut target, 3), (&[1.0], &[0.5; 3]));
        assert_eq!(target, [0.0, 0.0, 0.5]);
    }
}
