//! Clips gradients by their global norm (Pascanu et al. 2013).
//!
//! The norm is computed from the reduced gradients, which have the same bits on all ranks. Every rank computes the
//! norm in the same order of additions, so the clipped gradients are the same on all ranks too. If every rank holds all
//! gradients, clipping needs no messages between ranks. If each rank holds a part, the ranks first sum their squared norms.

/// The number of partial sums. Each partial sum is a chain of dependent additions, and a processor can work on
/// several chains at once.
const PARTIAL_SUMS: usize = 8;

/// Returns the Euclidean norm of `values`, computed in f64.
pub(crate) fn euclidean_norm(values: &[f32]) -> f64 {
    let (blocks, rest) = values.as_chunks::<PARTIAL_SUMS>();
    let mut sums = [0.0_f64; PARTIAL_SUMS];
    for block in blocks {
        for (sum, &value) in sums.iter_mut().zip(block) {
            *sum += f64::from(value) * f64::from(value);
        }
    }
    let rest: f64 = rest.iter().map(|&value| f64::from(value) * f64::from(value)).sum();
    (sums.iter().sum::<f64>() + rest).sqrt()
}

/// Scales `gradients` so that their norm is at most `norm_max`, and returns their norm before the scaling. `PyTorch`'s
/// `clip_grad_norm_` uses the same formula. If the norm is not finite, the gradients stay unchanged. The next loss is
/// then not finite either, and the run ends with an error.
pub(crate) fn clip_to_norm(gradients: &mut [f32], norm_max: f32) -> f64 {
    let norm = euclidean_norm(gradients);
    scale_to_norm(gradients, norm, norm_max);
    norm
}

/// Scales a part of the gradients like [`clip_to_norm`]. `norm` is the norm of all gradients, not only of this part.
pub(crate) fn scale_to_norm(gradients: &mut [f32], norm: f64, norm_max: f32) {
    let factor = f64::from(norm_max) / (norm + 1e-6);
    if norm.is_finite() && factor < 1.0 {
        let factor = factor as f32;
        for gradient in gradients {
            *gradient *= factor;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_gradients_with_a_norm_above_the_limit_are_scaled() {
        let long: Vec<f32> = (0..29).map(|index| if index == 28 { 4.0 } else { 0.0 }).collect();
        for (gradients, norm_max, expected_norm, expected_last) in [
            (vec![3.0, 4.0], 1.0, 5.0, 0.8),
            (vec![3.0, 4.0], 5.1, 5.0, 4.0),
            (vec![0.0, 0.0], 1.0, 0.0, 0.0),
            (vec![], 1.0, 0.0, 0.0),
            (long, 2.0, 4.0, 2.0),
            (vec![1e30, 1e30], 1.0, 1e30 * 2.0_f64.sqrt(), 0.5_f32.sqrt()),
        ] {
            let mut clipped = gradients.clone();
            let found = clip_to_norm(&mut clipped, norm_max);
            assert!((found - expected_norm).abs() <= 1e-6 * expected_norm, "{gradients:?}: {found}");
            let last = clipped.last().copied().unwrap_or_default();
            assert!((last - expected_last).abs() < 1e-5, "{gradients:?}: {last}");
            assert!(euclidean_norm(&clipped) <= f64::from(norm_max) * (1.0 + 1e-6), "{gradients:?}");
        }
    }

    #[test]
    fn a_norm_that_is_not_finite_changes_nothing() {
        let mut gradients = [f32::INFINITY, 1.0];
        assert_eq!(clip_to_norm(&mut gradients, 1.0), f64::INFINITY);
        assert_eq!(gradients, [f32::INFINITY, 1.0]);
        assert!(clip_to_norm(&mut [f32::NAN], 1.0).is_nan());
    }
}
