//! Max pooling: each output is the largest value of a square window of an image. The windows do not overlap. Rows and
//! columns that do not fill a window are ignored, as in `PyTorch`.

use ndarray::{ArrayView2, ArrayViewMut2};

use super::layer::{BackwardPass, CONTIGUITY_MESSAGE, ForwardMode, GradientSink, Layer, SavedForBackward};
use crate::train::data::ImageShape;

/// The maximum height and width of a window.
pub(super) const WINDOW_MAX: usize = 8;

/// A layer of max pooling.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct MaxPooling {
    /// The shape of the input.
    pub(crate) input: ImageShape,
    /// The height and the width of a window: from 1 to [`WINDOW_MAX`], and not larger than the image.
    pub(crate) window: usize,
}

impl MaxPooling {
    /// Returns the shape of the output.
    pub(crate) fn output_shape(&self) -> ImageShape {
        let ImageShape { channels, height, width } = self.input;
        ImageShape { channels, height: height / self.window, width: width / self.window }
    }

    /// Divides each channel of an image into bands of rows. A band has the height of a window and gives one row of
    /// outputs. Rows at the bottom of the image that do not fill a band are ignored.
    fn bands<'a>(&self, image: &'a [f32]) -> impl Iterator<Item = &'a [f32]> {
        let ImageShape { height, width, .. } = self.input;
        let band = self.window * width;
        image.chunks_exact(height * width).flat_map(move |plane| plane.chunks_exact(band))
    }
}

/// Computes a row of outputs from a band of `WINDOW` input rows with `width` values each. Writes the index of the
/// largest value within each window to `indices`. Compares the integers of [`sort_key`], because the compiler turns
/// integer comparisons into vector instructions.
fn pool_row<const WINDOW: usize>(band: &[f32], width: usize, output: &mut [f32], indices: &mut [u32]) {
    output.fill(f32::from_bits(i32::MIN.cast_unsigned()));
    for (y, row) in band.chunks_exact(width).enumerate() {
        let windows = row.as_chunks::<WINDOW>().0;
        for ((best, best_index), window) in output.iter_mut().zip(&mut *indices).zip(windows) {
            // During the loop, `output` holds the keys of [`sort_key`] in place of values.
            let (mut key, mut index) = (best.to_bits().cast_signed(), *best_index);
            for (x, &value) in window.iter().enumerate() {
                let candidate = sort_key(value);
                let is_better = candidate > key;
                key = if is_better { candidate } else { key };
                index = if is_better { (y * WINDOW + x) as u32 } else { index };
            }
            (*best, *best_index) = (f32::from_bits(key.cast_unsigned()), index);
        }
    }
    for value in output {
        *value = f32::from_bits(flip_negative(value.to_bits().cast_signed()).cast_unsigned());
    }
}

/// Returns an integer that is larger for a larger value. NaN gives the largest integer, so that pooling does not hide
/// a NaN of an earlier layer.
fn sort_key(value: f32) -> i32 {
    let bits = value.to_bits().cast_signed();
    let is_nan = bits & i32::MAX > f32::INFINITY.to_bits().cast_signed();
    if is_nan { i32::MAX } else { flip_negative(bits) }
}

/// If the sign bit is set, flips all other bits. Without the flip, the bits of negative floating-point numbers would
/// sort in reverse order as integers.
fn flip_negative(bits: i32) -> i32 {
    bits ^ (bits >> 31) & i32::MAX
}

/// For one row of outputs, writes the derivative of each output to the input that was the largest of its window. `band`
/// holds the inputs of these windows. Writes 0 to all other inputs of `band`.
fn unpool_row<const WINDOW: usize>(delta: &[f32], indices: &[u32], width: usize, band: &mut [f32]) {
    for (y, row) in band.chunks_exact_mut(width).enumerate() {
        let (windows, rest) = row.as_chunks_mut::<WINDOW>();
        for ((window, &delta), &index) in windows.iter_mut().zip(delta).zip(indices) {
            for (x, target) in window.iter_mut().enumerate() {
                *target = if index == (y * WINDOW + x) as u32 { delta } else { 0.0 };
            }
        }
        rest.fill(0.0);
    }
}

/// Calls `$function` with the window size as a constant, so that the compiler can unroll the loops.
macro_rules! with_window {
    ($window:expr, $function:ident($($argument:expr),*)) => {
        match $window {
            1 => $function::<1>($($argument),*),
            2 => $function::<2>($($argument),*),
            3 => $function::<3>($($argument),*),
            4 => $function::<4>($($argument),*),
            5 => $function::<5>($($argument),*),
            6 => $function::<6>($($argument),*),
            7 => $function::<7>($($argument),*),
            _ => $function::<WINDOW_MAX>($($argument),*),
        }
    };
}

impl Layer for MaxPooling {
    fn inputs(&self) -> usize {
        self.input.value_count()
    }

    fn outputs(&self) -> usize {
        self.output_shape().value_count()
    }

    fn allocate_saved(&self, rows: usize) -> SavedForBackward {
        SavedForBackward { indices: vec![0; rows * self.outputs()], ..SavedForBackward::default() }
    }

    fn forward(
        &self,
        _: &[f32],
        input: ArrayView2<'_, f32>,
        mut output: ArrayViewMut2<'_, f32>,
        saved: &mut SavedForBackward,
        _: ForwardMode<'_>,
    ) -> Result<(), String> {
        let columns = self.output_shape().width;
        let indices = saved.indices.chunks_exact_mut(self.outputs());
        for ((input, mut output), indices) in input.rows().into_iter().zip(output.rows_mut()).zip(indices) {
            let outputs = output.as_slice_mut().expect(CONTIGUITY_MESSAGE).chunks_exact_mut(columns);
            let rows = outputs.zip(indices.chunks_exact_mut(columns));
            for (band, (output, indices)) in self.bands(input.to_slice().expect(CONTIGUITY_MESSAGE)).zip(rows)
            {
                with_window!(self.window, pool_row(band, self.input.width, output, indices));
            }
        }
        Ok(())
    }

    fn backward(&self, _: &[f32], pass: BackwardPass<'_>, _: &mut GradientSink<'_>) -> Result<(), String> {
        let BackwardPass { delta, input_delta, saved, .. } = pass;
        let Some(mut input_delta) = input_delta else { return Ok(()) };
        let ImageShape { height, width, .. } = self.input;
        let (columns, band) = (self.output_shape().width, self.window * width);
        let indices = saved.indices.chunks_exact(self.outputs());
        for ((mut target, delta), indices) in
            input_delta.rows_mut().into_iter().zip(delta.rows()).zip(indices)
        {
            let deltas = delta.to_slice().expect(CONTIGUITY_MESSAGE).chunks_exact(columns);
            let mut rows = deltas.zip(indices.chunks_exact(columns));
            for plane in target.as_slice_mut().expect(CONTIGUITY_MESSAGE).chunks_exact_mut(height * width) {
                let mut bands = plane.chunks_exact_mut(band);
                for (band, (delta, indices)) in bands.by_ref().zip(rows.by_ref()) {
                    with_window!(self.window, unpool_row(delta, indices, width, band));
                }
                bands.into_remainder().fill(0.0);
            }
        }
        Ok(())
    }
}
