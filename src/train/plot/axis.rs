//! The axes of a chart: the range of values, the positions of values and the labelled ticks.

/// An axis of a chart.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Axis {
    scale: AxisScale,
    /// The value at the beginning of the axis.
    low: f64,
    /// The value at the end of the axis.
    high: f64,
    /// The values at which the axis has a tick and a label.
    ticks: Vec<f64>,
    /// The distance between ticks, which determines the number of decimals of the labels. `None` on a logarithmic
    /// axis.
    tick_step: Option<f64>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum AxisScale {
    Linear,
    Logarithmic,
    /// Logarithmic, with labels such as `64K` at powers of 2.
    Bytes,
}

/// The axis is logarithmic if all values are positive and the largest value is more than this many times the
/// smallest.
const LOGARITHMIC_VALUE_RATIO_MIN: f64 = 30.0;

/// If the range of the values is less than this fraction of the largest value, the curve is drawn as a horizontal line. Rounding
/// errors cause such ranges.
const RANGE_FRACTION_MIN: f64 = 1e-5;

/// The maximum number of digits behind the point of a label. Very small numbers would otherwise need many digits.
const DIGITS_MAX: f64 = 8.0;

/// A logarithmic axis that begins below 1 / this number of its end has at least one tick. The range of close values is
/// made wider.
const LOGARITHMIC_AXIS_RATIO_MIN: f64 = 4.0;

/// An axis for sizes has at most this number of ticks.
const SIZE_TICKS_MAX: usize = 8;

/// A linear axis has about this number of ticks.
const TICK_COUNT: f64 = 7.0;

impl Axis {
    /// Returns an axis for finite values. The margin of a linear axis does not extend beyond `margin_limit`.
    pub(super) fn for_values(values: impl Iterator<Item = f64>, margin_limit: f64) -> Self {
        let (low, high) = values
            .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| (low.min(value), high.max(value)));
        if low > 0.0 && high / low > LOGARITHMIC_VALUE_RATIO_MIN {
            return Self::logarithmic(low, high);
        }
        let (low, high) = if low <= high { (low, high) } else { (0.0, 1.0) };
        let (range, largest) = (high - low, low.abs().max(high.abs()));
        let margin = match largest {
            0.0 => 1.0,
            _ if range < RANGE_FRACTION_MIN * largest => largest * 0.1,
            _ => range * 0.05,
        };
        Self::linear(low - margin, (high + margin).min(margin_limit.max(high)), 0.0)
    }

    /// Returns a logarithmic axis for finite values above zero.
    pub(super) fn for_positive_values(values: impl Iterator<Item = f64>) -> Self {
        let (low, high) = values
            .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| (low.min(value), high.max(value)));
        let (low, high) = if low <= high { (low, high) } else { (1.0, 1.0) };
        let (low, high) = widen_logarithmic_range(low, high);
        Self::logarithmic(low, high)
    }

    /// Returns a logarithmic axis for sizes in bytes. Its ticks are powers of 2.
    pub(super) fn for_sizes(smallest: u64, largest: u64) -> Self {
        let (low, high) = widen_logarithmic_range(smallest.max(1) as f64, largest.max(1) as f64);
        let powers = (low.log2().ceil() as i32)..=(high.log2().floor() as i32);
        let powers_per_tick = powers.clone().count().div_ceil(SIZE_TICKS_MAX).max(1);
        let ticks = powers.step_by(powers_per_tick).map(|power| 2_f64.powi(power)).collect();
        Self { scale: AxisScale::Bytes, low, high, ticks, tick_step: None }
    }

    /// Returns a linear axis whose ticks are whole numbers. If there is only one number, it is in the middle of the axis.
    pub(super) fn for_counts(first: u64, last: u64) -> Self {
        let margin = if first == last { 0.5 } else { 0.0 };
        Self::linear(first as f64 - margin, last as f64 + margin, 1.0)
    }

    /// Returns a linear axis from `low` to `high`. The distance between ticks is at least `step_min`.
    fn linear(low: f64, high: f64, step_min: f64) -> Self {
        let step = round_up_tick_step((high - low) / TICK_COUNT).max(step_min);
        let (first, last) = ((low / step).ceil(), (high / step).floor());
        // Each tick is computed as a multiple of `step`. Adding `step` repeatedly would add up rounding errors.
        let count = (last - first).clamp(0.0, 4.0 * TICK_COUNT) as u32;
        let ticks = (0..=count).map(|index| (first + f64::from(index)) * step).collect();
        Self { scale: AxisScale::Linear, low, high, ticks, tick_step: Some(step) }
    }

    /// Returns a logarithmic axis for values from `low` to `high`, with a small margin.
    fn logarithmic(low: f64, high: f64) -> Self {
        let (low, high) = (low / 1.2, high * 1.2);
        let decades = (low.log10().floor() as i32)..=(high.log10().ceil() as i32);
        let multiples: &[f64] = if high / low > 1e3 { &[1.0] } else { &[1.0, 2.0, 5.0] };
        let decades_per_tick = (decades.clone().count() / 8).max(1);
        let ticks = decades
            .step_by(decades_per_tick)
            .flat_map(|power| multiples.iter().map(move |multiple| multiple * 10_f64.powi(power)))
            .filter(|tick| (low..=high).contains(tick))
            .collect();
        Self { scale: AxisScale::Logarithmic, low, high, ticks, tick_step: None }
    }

    /// Returns the position of a value: 0 at the beginning of the axis, 1 at its end.
    pub(super) fn position(&self, value: f64) -> f64 {
        match self.scale {
            AxisScale::Linear => (value - self.low) / (self.high - self.low),
            AxisScale::Logarithmic | AxisScale::Bytes => {
                (value / self.low).ln() / (self.high / self.low).ln()
            }
        }
    }

    /// Returns whether the axis is logarithmic: equal distances on the axis stand for equal ratios of values.
    pub(super) fn is_logarithmic(&self) -> bool {
        self.scale != AxisScale::Linear
    }

    /// Returns the positions and the labels of the ticks.
    pub(super) fn labels(&self) -> impl Iterator<Item = (f64, String)> {
        self.ticks.iter().map(|&tick| (self.position(tick), self.label(tick)))
    }

    /// Returns the text of the label at the value `tick`.
    fn label(&self, tick: f64) -> String {
        if self.scale == AxisScale::Bytes {
            return format_power_of_two_bytes(tick);
        }
        let largest = self.low.abs().max(self.high.abs());
        let step = self.tick_step.unwrap_or(tick);
        let is_small = self.tick_step.map_or(self.low < 1e-4, |step| step < 1e-5 && largest < 1e-2);
        // The factor prevents that a rounding error adds a digit.
        let magnitude = (step * 1.000_001).log10().floor();
        if largest >= 1e6 || is_small {
            let digits = (largest.log10().floor() - magnitude).clamp(0.0, DIGITS_MAX) as usize;
            return if tick == 0.0 { "0".into() } else { shorten_exponent(&format!("{tick:.digits$e}")) };
        }
        let decimals = (-magnitude).clamp(0.0, DIGITS_MAX) as usize;
        format!("{tick:.decimals$}")
    }
}

/// Returns a range around the values of a logarithmic axis that is wide enough for a tick.
fn widen_logarithmic_range(low: f64, high: f64) -> (f64, f64) {
    if high / low < LOGARITHMIC_AXIS_RATIO_MIN { (low / 2.0, high * 2.0) } else { (low, high) }
}

/// Formats a power of 2 with the suffixes of the sizes of `ringbench`: `65536` as `64K`.
fn format_power_of_two_bytes(bytes: f64) -> String {
    let suffixes = ["", "K", "M", "G", "T"];
    let index = ((bytes.log2() / 10.0).floor().max(0.0) as usize).min(suffixes.len() - 1);
    format!("{}{}", bytes / 1024_f64.powi(index as i32), suffixes[index])
}

/// Removes zeros at the end of the mantissa: `1.20e-6` becomes `1.2e-6`.
fn shorten_exponent(text: &str) -> String {
    let (mantissa, exponent) = text.split_once('e').unwrap_or((text, "0"));
    if !mantissa.contains('.') {
        return text.into();
    }
    format!("{}e{exponent}", mantissa.trim_end_matches('0').trim_end_matches('.'))
}

/// Returns the smallest number that is at least `step` and is 1, 2 or 5 times a power of 10.
fn round_up_tick_step(step: f64) -> f64 {
    if !(step.is_finite() && step > 0.0) {
        return 1.0;
    }
    let power = 10_f64.powf(step.log10().floor());
    let multiple = [1.0, 2.0, 5.0].into_iter().find(|multiple| multiple * power >= step * 0.999_999);
    multiple.unwrap_or(10.0) * power
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(axis: &Axis) -> Vec<String> {
        axis.labels().map(|(_, label)| label).collect()
    }

    #[test]
    fn ticks_are_round_numbers_inside_the_range() {
        for (values, limit, expected) in [
            (&[0.0, 1.0][..], f64::INFINITY, "0.0 0.2 0.4 0.6 0.8 1.0"),
            (&[0.91, 0.98], 1.0, "0.92 0.94 0.96 0.98"),
            (&[0.5, 1.0], 1.0, "0.5 0.6 0.7 0.8 0.9 1.0"),
            (&[-3.0, 12.0], f64::INFINITY, "0 5 10"),
            (&[0.02, 2.5], f64::INFINITY, "0.02 0.05 0.1 0.2 0.5 1 2"),
            (&[1e-6, 3.0], f64::INFINITY, "1e-6 1e-5 1e-4 1e-3 1e-2 1e-1 1e0"),
            (&[2e6, 5e6], f64::INFINITY, "2e6 2.5e6 3e6 3.5e6 4e6 4.5e6 5e6"),
            (&[7.0], f64::INFINITY, "6.4 6.6 6.8 7.0 7.2 7.4 7.6"),
            // Regression test: before the fix, all labels of such a range were equal.
            (&[418.95, 418.9501], f64::INFINITY, "380 400 420 440 460"),
            (
                &[1.2345e8, 1.2346e8],
                f64::INFINITY,
                "1.2345e8 1.23452e8 1.23454e8 1.23456e8 1.23458e8 1.2346e8",
            ),
            (&[0.5, 0.5001], f64::INFINITY, "0.50000 0.50002 0.50004 0.50006 0.50008 0.50010"),
            (&[3.8e-9, 6.4e-9], f64::INFINITY, "4e-9 4.5e-9 5e-9 5.5e-9 6e-9 6.5e-9"),
            (&[0.0], f64::INFINITY, "-1.0 -0.5 0.0 0.5 1.0"),
            (&[], f64::INFINITY, "0.0 0.2 0.4 0.6 0.8 1.0"),
        ] {
            let axis = Axis::for_values(values.iter().copied(), limit);
            assert_eq!(labels(&axis).join(" "), expected, "{values:?}");
            for (position, label) in axis.labels() {
                assert!((0.0..=1.0).contains(&position), "{values:?}: {label} is at {position}");
            }
            assert!(values.iter().all(|&value| (0.0..=1.0).contains(&axis.position(value))), "{values:?}");
        }
    }

    #[test]
    fn ticks_of_counts_are_whole_numbers() {
        for (first, last, expected) in
            [(1, 1, "1"), (1, 3, "1 2 3"), (1, 40, "10 20 30 40"), (0, 5000, "0 1000 2000 3000 4000 5000")]
        {
            assert_eq!(labels(&Axis::for_counts(first, last)).join(" "), expected);
        }
    }

    #[test]
    fn ticks_of_sizes_are_powers_of_two() {
        for (smallest, largest, expected) in [
            (4, 64 << 20, "4 64 1K 16K 256K 4M 64M"),
            (1000, 1000, "512 1K"),
            (1 << 20, 1 << 20, "512K 1M 2M"),
            (0, 8, "1 2 4 8"),
            (3, 3 << 40, "4 128 4K 128K 4M 128M 4G 128G"),
        ] {
            let axis = Axis::for_sizes(smallest, largest);
            assert_eq!(labels(&axis).join(" "), expected, "{smallest} {largest}");
            assert!(
                [smallest.max(1), largest]
                    .iter()
                    .all(|&size| (0.0..=1.0).contains(&axis.position(size as f64)))
            );
        }
    }

    #[test]
    fn positive_values_have_a_logarithmic_axis_with_a_tick() {
        for (values, expected) in
            [(&[7.0, 8.0][..], "5 10"), (&[1.3], "1 2"), (&[0.5, 4000.0], "1 10 100 1000"), (&[], "0.5 1 2")]
        {
            let axis = Axis::for_positive_values(values.iter().copied());
            assert_eq!(labels(&axis).join(" "), expected, "{values:?}");
            assert!(axis.is_logarithmic(), "{values:?}");
        }
    }

    #[test]
    fn extreme_values_do_not_give_too_many_ticks() {
        for (low, high) in [(1e-300, 1e300), (1.0, 1.0 + 1e-15), (-1e308, 1e308), (5e-324, 1e-323)] {
            let axis = Axis::for_values([low, high].into_iter(), f64::INFINITY);
            assert!(labels(&axis).len() < 40, "{low} {high}");
        }
    }
}
