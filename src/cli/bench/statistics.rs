//! The median and the percentiles of measured times.

/// Returns the median of sorted numbers, or 0 if there are no numbers.
pub(super) fn median(sorted: &[f64]) -> f64 {
    let (half, length) = (sorted.len() / 2, sorted.len());
    match length {
        0 => 0.0,
        _ if length.is_multiple_of(2) => f64::midpoint(sorted[half - 1], sorted[half]),
        _ => sorted[half],
    }
}

/// Returns a percentile of the numbers `sorted` by the nearest-rank method: for the fraction 0.99, the smallest element
/// that is not less than 99% of the elements.
pub(super) fn percentile(sorted: &[f64], fraction: f64) -> f64 {
    let position = (sorted.len() as f64 * fraction).ceil() as usize;
    sorted.get(position.saturating_sub(1)).copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_and_percentile_of_known_values_are_correct() {
        assert_eq!(median(&[1.0, 2.0, 9.0]), 2.0);
        assert_eq!(median(&[1.0, 2.0, 4.0, 9.0]), 3.0);
        let hundred: Vec<f64> = (1..=100).map(f64::from).collect();
        assert_eq!(percentile(&hundred, 0.99), 99.0);
        assert_eq!(percentile(&[5.0], 0.99), 5.0);
        assert_eq!((median(&[]), percentile(&[], 0.99)), (0.0, 0.0));
    }
}
