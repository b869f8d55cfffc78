//! A convolution of images: y = f(W * x + b), where * is the cross-correlation and f is the activation. The
//! stride is one pixel. Zeros pad the image, so that the output has the height and the width of the input. W has the shape
//! (output channels, input channels, kernel, kernel), as in `PyTorch`.
//!
//! For each sample, the layer copies the pixels under each position of the kernel to a matrix of patches, and multiplies
//! W by this matrix. Source: Chellapilla, Puri and Simard, "High performance convolutional neural networks for document
//! processing" (2006).

use ndarray::linalg::general_mat_mul;
use ndarray::{ArrayView2, ArrayViewMut2};

use super::layer::{
    Activation, BackwardPass, CONTIGUITY_MESSAGE, ForwardMode, GradientSink, Layer, SavedForBackward,
};
use crate::train::data::ImageShape;

/// A convolution. The biases follow the weights in the parameters.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Convolution {
    /// The shape of the input.
    pub(crate) input: ImageShape,
    /// The number of channels of the output.
    pub(crate) channels: usize,
    /// The height and the width of the kernel: an odd number.
    pub(crate) kernel: usize,
    pub(crate) activation: Activation,
    /// The initial weights are uniform random numbers from `-weight_bound` to `weight_bound`.
    pub(crate) weight_bound: f32,
    /// Whether the layer adds biases.
    pub(crate) has_biases: bool,
}

impl Convolution {
    /// Returns the number of input values that the kernel covers at one position, in all channels.
    fn patch_len(&self) -> usize {
        self.input.channels * self.kernel * self.kernel
    }

    /// Returns the number of pixels of an image in one channel.
    fn pixels(&self) -> usize {
        self.input.height * self.input.width
    }

    /// Returns the number of weights.
    fn weight_count(&self) -> usize {
        self.channels * self.patch_len()
    }

    /// Returns the weights as a matrix (channels x `patch_len`).
    fn weight_matrix<'a>(&self, parameters: &'a [f32]) -> ArrayView2<'a, f32> {
        ArrayView2::from_shape((self.channels, self.patch_len()), &parameters[..self.weight_count()])
            .expect("the range has channels x patch_len elements")
    }

    /// Returns the height and the width of a padded image.
    fn padded_size(&self) -> (usize, usize) {
        (self.input.height + self.kernel - 1, self.input.width + self.kernel - 1)
    }

    /// Returns the number of values of a padded image, in all channels.
    fn padded_len(&self) -> usize {
        let (height, width) = self.padded_size();
        self.input.channels * height * width
    }

    /// Divides the saved values into a padded image and a matrix of patches (`patch_len` x pixels).
    fn split_saved_values<'a>(&self, saved: &'a mut SavedForBackward) -> (&'a mut [f32], &'a mut [f32]) {
        saved.values.split_at_mut(self.padded_len())
    }

    /// Returns the index in a padded image of the value of `channel` that the element (`ky`, `kx`) of the kernel multiplies
    /// for the first output pixel of row `y`.
    fn padded_index(&self, channel: usize, y: usize, (ky, kx): (usize, usize)) -> usize {
        let (height, width) = self.padded_size();
        (channel * height + y + ky) * width + kx
    }

    /// For each row of the matrix of patches, calls `each` with the input channel and the element (ky, kx) of the
    /// kernel.
    fn for_each_patch_row(&self, mut each: impl FnMut(usize, (usize, usize))) {
        for channel in 0..self.input.channels {
            for ky in 0..self.kernel {
                (0..self.kernel).for_each(|kx| each(channel, (ky, kx)));
            }
        }
    }

    /// Copies an image into the padded image.
    fn pad(&self, image: &[f32], padded: &mut [f32]) {
        let (border, width) = (self.kernel / 2, self.input.width);
        for (index, row) in image.chunks_exact(width).enumerate() {
            let (channel, y) = (index / self.input.height, index % self.input.height);
            let start = self.padded_index(channel, y, (border, border));
            padded[start..start + width].copy_from_slice(row);
        }
    }

    /// Copies the pixels under each position of the kernel to the matrix of patches.
    fn copy_patches(&self, padded: &[f32], patches: &mut [f32]) {
        let width = self.input.width;
        let mut rows = patches.chunks_exact_mut(width);
        self.for_each_patch_row(|channel, element| {
            for (y, row) in rows.by_ref().take(self.input.height).enumerate() {
                let start = self.padded_index(channel, y, element);
                row.copy_from_slice(&padded[start..start + width]);
            }
        });
    }

    /// Reverses [`copy_patches`](Self::copy_patches) for derivatives: adds each element of `patches` to its pixel of
    /// `padded`. Then copies `padded` to `image` without the padding.
    fn add_patches(&self, patches: &[f32], padded: &mut [f32], image: &mut [f32]) {
        let (border, width) = (self.kernel / 2, self.input.width);
        padded.fill(0.0);
        let mut rows = patches.chunks_exact(width);
        self.for_each_patch_row(|channel, element| {
            for (y, row) in rows.by_ref().take(self.input.height).enumerate() {
                let start = self.padded_index(channel, y, element);
                padded[start..start + width].iter_mut().zip(row).for_each(|(sum, value)| *sum += value);
            }
        });
        for (index, row) in image.chunks_exact_mut(width).enumerate() {
            let (channel, y) = (index / self.input.height, index % self.input.height);
            let start = self.padded_index(channel, y, (border, border));
            row.copy_from_slice(&padded[start..start + width]);
        }
    }
}

impl Layer for Convolution {
    fn inputs(&self) -> usize {
        self.input.value_count()
    }

    fn outputs(&self) -> usize {
        self.channels * self.pixels()
    }

    fn tensor_names_and_shapes(&self) -> Vec<(String, Vec<usize>)> {
        let mut tensors =
            vec![("weight".into(), vec![self.channels, self.input.channels, self.kernel, self.kernel])];
        if self.has_biases {
            tensors.push(("bias".into(), vec![self.channels]));
        }
        tensors
    }

    fn multiplications(&self) -> u64 {
        self.weight_count() as u64 * self.pixels() as u64
    }

    fn initialize(&self, parameters: &mut [f32], uniform: &mut dyn FnMut() -> f32) {
        let (weights, biases) = parameters.split_at_mut(self.weight_count());
        weights.fill_with(|| uniform() * self.weight_bound);
        biases.fill(0.0);
    }

    fn allocate_saved(&self, _: usize) -> SavedForBackward {
        let len = self.padded_len() + self.patch_len() * self.pixels();
        SavedForBackward { values: vec![0.0; len], ..SavedForBackward::default() }
    }

    fn forward(
        &self,
        parameters: &[f32],
        input: ArrayView2<'_, f32>,
        mut output: ArrayViewMut2<'_, f32>,
        saved: &mut SavedForBackward,
        _: ForwardMode<'_>,
    ) -> Result<(), String> {
        let (weight, biases) = (self.weight_matrix(parameters), &parameters[self.weight_count()..]);
        let (padded, patches) = self.split_saved_values(saved);
        padded.fill(0.0);
        for (input, mut output) in input.rows().into_iter().zip(output.rows_mut()) {
            self.pad(input.to_slice().expect(CONTIGUITY_MESSAGE), padded);
            self.copy_patches(padded, patches);
            let output = output.as_slice_mut().expect(CONTIGUITY_MESSAGE);
            for (plane, bias) in output.chunks_exact_mut(self.pixels()).zip(biases) {
                plane.fill(*bias);
            }
            let patches = self.patch_matrix(patches);
            let earlier_factor = if self.has_biases { 1.0 } else { 0.0 };
            general_mat_mul(1.0, &weight, &patches, earlier_factor, &mut self.output_matrix_mut(output));
            self.activation.apply(output);
        }
        Ok(())
    }

    fn backward(
        &self,
        parameters: &[f32],
        pass: BackwardPass<'_>,
        gradients: &mut GradientSink<'_>,
    ) -> Result<(), String> {
        let BackwardPass { input, output, mut delta, mut input_delta, saved, .. } = pass;
        let (padded, patches) = self.split_saved_values(saved);
        let weight = self.weight_matrix(parameters);
        gradients.add_gradients(input.nrows(), |rows, gradients| {
            let (weights, biases) = gradients.split_at_mut(self.weight_count());
            let mut weights = ArrayViewMut2::from_shape((self.channels, self.patch_len()), weights)
                .expect("the range has channels x patch_len elements");
            for index in rows {
                let (input, output) = (input.row(index), output.row(index));
                let mut delta = delta.row_mut(index);
                let delta = delta.as_slice_mut().expect(CONTIGUITY_MESSAGE);
                self.activation.differentiate(delta, output.to_slice().expect(CONTIGUITY_MESSAGE));
                // The padding must be 0, but the backward pass of the previous sample wrote derivatives to the padding.
                padded.fill(0.0);
                self.pad(input.to_slice().expect(CONTIGUITY_MESSAGE), padded);
                self.copy_patches(padded, patches);
                for (bias, plane) in biases.iter_mut().zip(delta.chunks_exact(self.pixels())) {
                    *bias += sum_values(plane);
                }
                let delta = self.output_matrix(delta);
                general_mat_mul(1.0, &delta, &self.patch_matrix(patches).t(), 1.0, &mut weights);
                if let Some(input_delta) = &mut input_delta {
                    let mut products =
                        ArrayViewMut2::from_shape((self.patch_len(), self.pixels()), &mut *patches)
                            .expect("the matrix has patch_len x pixels elements");
                    general_mat_mul(1.0, &weight.t(), &delta, 0.0, &mut products);
                    let mut row = input_delta.row_mut(index);
                    self.add_patches(patches, padded, row.as_slice_mut().expect(CONTIGUITY_MESSAGE));
                }
            }
        });
        Ok(())
    }
}

/// Returns the sum of the values. Several partial sums let the compiler use vector instructions.
fn sum_values(values: &[f32]) -> f32 {
    let (chunks, rest) = values.as_chunks::<16>();
    let mut sums = [0.0; 16];
    for chunk in chunks {
        sums.iter_mut().zip(chunk).for_each(|(sum, value)| *sum += value);
    }
    sums.iter().chain(rest).sum()
}

/// Views of slices as matrices.
impl Convolution {
    fn patch_matrix<'a>(&self, patches: &'a [f32]) -> ArrayView2<'a, f32> {
        ArrayView2::from_shape((self.patch_len(), self.pixels()), patches)
            .expect("the matrix has patch_len x pixels elements")
    }

    fn output_matrix<'a>(&self, output: &'a [f32]) -> ArrayView2<'a, f32> {
        ArrayView2::from_shape((self.channels, self.pixels()), output)
            .expect("an output has channels x pixels elements")
    }

    fn output_matrix_mut<'a>(&self, output: &'a mut [f32]) -> ArrayViewMut2<'a, f32> {
        ArrayViewMut2::from_shape((self.channels, self.pixels()), output)
            .expect("an output has channels x pixels elements")
    }
}
