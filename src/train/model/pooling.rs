//! Max pooling: each output is the largest value of a square window of an image. The windows do not overlap. Rows and
//! columns that do not fill a window are left out, as in `PyTorch`.

use ndarray::{ArrayView2, ArrayViewMut2};

use super::layer::{BackwardPass, CONTIGUOUS, GradientSink, Layer, LayerMemory, Mode};
use crate::train::data::ImageShape;

/// The maximum height and width of a window. The index of a value in the window then fits a byte.
pub(super) const WINDOW_MAX: usize = 16;

/// A layer of max pooling.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct MaxPooling {
    pub(crate) input: ImageShape,
    /// The height and the width of a window, from 1 to [`WINDOW_MAX`] and at most those of the image.
    pub(crate) window: usize,
}

impl MaxPooling {
    /// Returns the shape of the output.
    pub(crate) fn output_shape(&self) -> ImageShape {
        let ImageShape { channels, height, width } = self.input;
        ImageShape { channels, height: height / self.window, width: width / self.window }
    }

    /// Calls `each` for each output with its index, and with the index of the first input of its window.
    fn for_each_window(&self, mut each: impl FnMut(usize, usize)) {
        let ImageShape { channels, height, width } = self.output_shape();
        let mut index = 0;
        for channel in 0..channels {
            for y in 0..height {
                let row = (channel * self.input.height + y * self.window) * self.input.width;
                for x in 0..width {
                    each(index, row + x * self.window);
                    index += 1;
                }
            }
        }
    }

    fn offset(&self, index: u8) -> usize {
        let (y, x) = (usize::from(index) / self.window, usize::from(index) % self.window);
        y * self.input.width + x
    }
}

impl Layer for MaxPooling {
    fn inputs(&self) -> usize {
        self.input.values()
    }

    fn outputs(&self) -> usize {
        self.output_shape().values()
    }

    fn memory(&self, rows: usize) -> LayerMemory {
        LayerMemory { values: Vec::new(), indices: vec![0; rows * self.outputs()] }
    }

    fn forward(
        &self,
        _: &[f32],
        input: ArrayView2<'_, f32>,
        mut output: ArrayViewMut2<'_, f32>,
        memory: &mut LayerMemory,
        _: Mode<'_>,
    ) {
        let indices = memory.indices.chunks_exact_mut(self.outputs());
        for ((input, mut output), indices) in input.rows().into_iter().zip(output.rows_mut()).zip(indices) {
            let input = input.to_slice().expect(CONTIGUOUS);
            let output = output.as_slice_mut().expect(CONTIGUOUS);
            self.for_each_window(|index, start| {
                let (mut best, mut best_index, mut position) = (input[start], 0_u8, 0_u8);
                for y in 0..self.window {
                    let start = start + y * self.input.width;
                    for &value in &input[start..start + self.window] {
                        // A NaN is kept, so that pooling does not hide that a layer has diverged.
                        let is_better = value > best || value.is_nan();
                        best = if is_better { value } else { best };
                        best_index = if is_better { position } else { best_index };
                        position = position.wrapping_add(1);
                    }
                }
                (output[index], indices[index]) = (best, best_index);
            });
        }
    }

    fn backward(&self, _: &[f32], pass: BackwardPass<'_>, _: &mut GradientSink<'_>) {
        let BackwardPass { delta, input_delta, memory, .. } = pass;
        let Some(mut input_delta) = input_delta else { return };
        let indices = memory.indices.chunks_exact(self.outputs());
        for ((mut target, delta), indices) in
            input_delta.rows_mut().into_iter().zip(delta.rows()).zip(indices)
        {
            let target = target.as_slice_mut().expect(CONTIGUOUS);
            target.fill(0.0);
            self.for_each_window(|index, start| target[start + self.offset(indices[index])] = delta[index]);
        }
    }
}
