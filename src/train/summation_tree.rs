//! Sums of several terms in an order that does not depend on which rank computes which partial sum.
//!
//! The terms are the leaves of a binary tree. Let a node have k > 1 leaves, and let p be the largest power of two
//! below k. The left child has the first p leaves, and the right child has the others. The sum of a node is the sum
//! of its left child plus the sum of its right child. 7 terms have the sum `((0 + 1) + (2 + 3)) + ((4 + 5) + 6)`.
//!
//! So a sum has fixed bits, although floating-point addition is not associative. Each rank holds consecutive terms,
//! and computes the sums of the largest nodes that have only these terms as leaves ([`largest_nodes_within`]). Then the
//! ranks add these sums ([`SiblingStack`]).
//!
//! With n terms, each term is in at most ceil(log2 n) additions. So the error is at most about ceil(log2 n) u times the
//! sum of the absolute values, where u = 2^-24 for `f32` (Higham, "The accuracy of floating point summation", SIAM J.
//! Sci. Comput. 14, 1993).

use std::ops::Range;

/// Returns the number of leaves of the left child of a node with `leaf_count` leaves, which must be at least 2.
fn left_leaf_count(leaf_count: usize) -> usize {
    leaf_count.next_power_of_two() / 2
}

/// Returns the depth of a tree with `leaf_count` leaves.
pub(crate) fn tree_depth(leaf_count: usize) -> usize {
    leaf_count.next_power_of_two().ilog2() as usize
}

/// Writes the sum of all leaves to `target`. `compute(leaf, vector, 0.0)` writes the values of a leaf to `vector`. If
/// `can_add(leaf)` is true, `compute(leaf, vector, 1.0)` must add the values of the leaf to `vector`, with the same
/// bits as [`add_elements`]. `scratch` needs [`tree_depth`] times as many elements as `target`. There must be at least one leaf.
pub(crate) fn sum_in_tree_order<L: Clone>(
    leaves: &[L],
    target: &mut [f32],
    scratch: &mut [f32],
    (compute, can_add): (&mut impl FnMut(L, &mut [f32], f32), &impl Fn(&L) -> bool),
) {
    match leaves {
        [leaf] => return compute(leaf.clone(), target, 0.0),
        [left, right] if can_add(right) => {
            compute(left.clone(), target, 0.0);
            return compute(right.clone(), target, 1.0);
        }
        _ => {}
    }
    let (left, right) = leaves.split_at(left_leaf_count(leaves.len()));
    sum_in_tree_order(left, target, scratch, (&mut *compute, can_add));
    let (right_sum, scratch) = scratch.split_at_mut(target.len());
    sum_in_tree_order(right, right_sum, scratch, (compute, can_add));
    add_elements(target, right_sum);
}

/// Returns the sum of `terms` in tree order, or 0 if there are no terms.
pub(crate) fn sum_numbers_in_tree_order(terms: &[f64]) -> f64 {
    match terms {
        [] => 0.0,
        [term] => *term,
        _ => {
            let (left, right) = terms.split_at(left_leaf_count(terms.len()));
            sum_numbers_in_tree_order(left) + sum_numbers_in_tree_order(right)
        }
    }
}

/// Adds `right` to `left`, element by element.
pub(crate) fn add_elements(left: &mut [f32], right: &[f32]) {
    left.iter_mut().zip(right).for_each(|(left, right)| *left += right);
}

/// Returns the largest nodes whose leaves are all in `range`, from left to right. The tree has `leaf_count` leaves.
pub(crate) fn largest_nodes_within(range: Range<usize>, leaf_count: usize) -> Vec<Range<usize>> {
    let mut nodes = Vec::new();
    let mut start = range.start;
    while start < range.end {
        let end_of = |width: usize| leaf_count.min(start + width);
        let mut width = 1;
        while start.is_multiple_of(2 * width) && end_of(2 * width) <= range.end && end_of(width) < range.end {
            width *= 2;
        }
        nodes.push(start..end_of(width));
        start = end_of(width);
    }
    nodes
}

/// Replaces the node with the most leaves by its two children, again and again, until there are at least `count`
/// nodes or each node is a leaf.
pub(crate) fn split_nodes(mut nodes: Vec<Range<usize>>, count: usize) -> Vec<Range<usize>> {
    while nodes.len() < count {
        let Some(index) = (0..nodes.len()).rev().max_by_key(|&index| nodes[index].len()) else { break };
        let Range { start, end } = nodes[index];
        if end - start < 2 {
            break;
        }
        let middle = start + left_leaf_count(end - start);
        nodes.splice(index..=index, [start..middle, middle..end]);
    }
    nodes
}

/// A stack of nodes that arrive in the order of their leaves. As soon as both children of a node are on the stack,
/// the node replaces them.
pub(crate) struct SiblingStack {
    leaf_count: usize,
    nodes: Vec<Range<usize>>,
}

impl SiblingStack {
    /// Creates an empty stack for a tree with `leaf_count` leaves.
    pub(crate) fn new(leaf_count: usize) -> Self {
        Self { leaf_count, nodes: Vec::new() }
    }

    /// Returns the number of nodes, which is also the index that the next node will have.
    pub(crate) fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Pushes a node, whose first leaf must follow the last leaf of the previous node. For each pair of siblings (nodes i
    /// and i + 1), calls `add_next(i)`, which must add the vector of node i + 1 to the vector of node i, and drop the
    /// vector of node i + 1.
    pub(crate) fn push(&mut self, node: Range<usize>, mut add_next: impl FnMut(usize)) {
        self.nodes.push(node);
        while let [.., left, right] = self.nodes.as_slice() {
            let width = left.len();
            let are_siblings = width.is_power_of_two()
                && left.start.is_multiple_of(2 * width)
                && right.end == self.leaf_count.min(left.start + 2 * width);
            if !are_siblings {
                break;
            }
            let parent = left.start..right.end;
            self.nodes.truncate(self.nodes.len() - 2);
            add_next(self.nodes.len());
            self.nodes.push(parent);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Returns f32 numbers of every kind: huge, tiny, subnormal, infinite, NaN and zeros.
    fn any_number() -> impl Strategy<Value = f32> {
        let ordinary = (-1.0_f32..1.0).boxed();
        prop_oneof![
            4 => ordinary,
            4 => proptest::num::f32::NORMAL | proptest::num::f32::SUBNORMAL | proptest::num::f32::ZERO,
            1 => proptest::sample::select(vec![f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, -f32::MAX]),
        ]
    }

    /// Returns the bits of a number, with the same bits for all NaNs.
    fn bits(value: f32) -> u32 {
        if value.is_nan() { f32::NAN.to_bits() } else { value.to_bits() }
    }

    fn tree_sum(terms: &[f32]) -> f32 {
        let (mut target, mut scratch) = ([0.0], vec![0.0; tree_depth(terms.len())]);
        sum_in_tree_order(
            terms,
            &mut target,
            &mut scratch,
            (&mut |term, target: &mut [f32], _| target[0] = term, &|_| false),
        );
        target[0]
    }

    proptest! {
        /// Each rank holds a random number of terms, and splits its nodes until it has at least `passes` nodes.
        #[test]
        fn every_division_of_the_terms_gives_the_same_bits(
            terms in proptest::collection::vec(any_number(), 1..40),
            mut ends in proptest::collection::vec(0_usize..40, 0..8),
            passes in 1_usize..9,
        ) {
            let expected = tree_sum(&terms);
            for end in &mut ends {
                *end = (*end).min(terms.len());
            }
            ends.push(terms.len());
            ends.sort_unstable();
            let mut start = 0;
            let mut all = SiblingStack::new(terms.len());
            let mut sums: Vec<f32> = Vec::new();
            for end in ends {
                // Each rank computes the sums of its own nodes. A rank that has both children of a node adds their sums.
                let mut own = SiblingStack::new(terms.len());
                let mut own_sums: Vec<f32> = Vec::new();
                for node in split_nodes(largest_nodes_within(start..end, terms.len()), passes) {
                    own_sums.push(tree_sum(&terms[node.clone()]));
                    own.push(node, |index| {
                        let right = own_sums.remove(index + 1);
                        own_sums[index] += right;
                    });
                }
                prop_assert_eq!(&own.nodes, &largest_nodes_within(start..end, terms.len()));
                for (node, sum) in own.nodes.into_iter().zip(own_sums) {
                    sums.push(sum);
                    all.push(node, |index| {
                        let right = sums.remove(index + 1);
                        sums[index] += right;
                    });
                }
                start = end;
            }
            prop_assert_eq!(all.len(), 1);
            prop_assert_eq!(bits(sums[0]), bits(expected), "{:?}", terms);
        }

        #[test]
        fn the_error_is_at_most_the_depth_of_the_tree_times_the_sum_of_the_absolute_values(
            terms in proptest::collection::vec(-1e30_f32..1e30, 1..200)
        ) {
            let exact: f64 = terms.iter().map(|&term| f64::from(term)).sum();
            let magnitude: f64 = terms.iter().map(|&term| f64::from(term.abs())).sum();
            let bound = 1.01 * tree_depth(terms.len()) as f64 * 2.0_f64.powi(-24) * magnitude;
            let error = (f64::from(tree_sum(&terms)) - exact).abs();
            prop_assert!(error <= bound + 1e-15 * magnitude, "error {error}, bound {bound}");
        }
    }

    #[test]
    fn sums_follow_ieee_754_for_special_values() {
        let tiny = f32::from_bits(1);
        for (terms, expected) in [
            (vec![1.0, f32::NAN, 2.0], f32::NAN),
            (vec![f32::INFINITY, 1.0, 2.0], f32::INFINITY),
            (vec![f32::INFINITY, 1.0, f32::NEG_INFINITY], f32::NAN),
            (vec![f32::MAX, f32::MAX, -f32::MAX, -f32::MAX], f32::NAN),
            (vec![tiny, tiny, tiny], f32::from_bits(3)),
            (vec![1e30, 1e-30, -1e30, 1e-30], 0.0),
            (vec![-0.0, -0.0], -0.0),
            (vec![-0.0, 0.0], 0.0),
        ] {
            assert_eq!(bits(tree_sum(&terms)), bits(expected), "{terms:?}");
        }
    }

    #[test]
    fn numbers_are_added_in_the_order_of_the_tree() {
        let terms: Vec<f64> = (0..7).map(|index| 0.1 * f64::from(index) - 0.3).collect();
        let [a, b, c, d, e, f, g] = terms[..] else { unreachable!() };
        assert_eq!(sum_numbers_in_tree_order(&terms), ((a + b) + (c + d)) + ((e + f) + g));
        assert_eq!(sum_numbers_in_tree_order(&[]), 0.0);
    }

    #[test]
    fn ranges_have_the_largest_nodes_and_nodes_are_split_into_their_children() {
        let bounds = |nodes: Vec<Range<usize>>| nodes.iter().map(|node| (node.start, node.end)).collect();
        for (leaves, leaf_count, expected) in [
            (0..8, 8, vec![(0, 8)]),
            (3..8, 8, vec![(3, 4), (4, 8)]),
            (1..7, 8, vec![(1, 2), (2, 4), (4, 6), (6, 7)]),
            (4..7, 7, vec![(4, 7)]),
            (5..5, 8, vec![]),
        ] {
            let found: Vec<(usize, usize)> = bounds(largest_nodes_within(leaves.clone(), leaf_count));
            assert_eq!(found, expected, "{leaves:?}");
        }
        for (node, count, expected) in
            [(0..8, 3, vec![(0, 2), (2, 4), (4, 8)]), (0..3, 9, vec![(0, 1), (1, 2), (2, 3)])]
        {
            let found: Vec<(usize, usize)> = bounds(split_nodes(vec![node.clone()], count));
            assert_eq!(found, expected, "{node:?}");
        }
        assert!(split_nodes(vec![], 2).is_empty());
    }
}
