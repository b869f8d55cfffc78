//! Batch normalization: y = f(w (x - m) / sqrt(v + e) + b) with the mean m and the variance v of each channel, the
//! constant e, and the activation f. In a training step, m and v are the mean and the variance of the whole batch, over
//! all ranks that compute the batch together. With several micro-batches, each micro-batch has its own m and v. In an
//! evaluation, m and v are the running statistics. Each training step moves the running statistics a tenth of the way to
//! the statistics of its batch.
//!
//! The running statistics are the last parameters of the layer, so checkpoints, averages of parameters and comparisons
//! between ranks include them. Instead of a gradient of these statistics, the backward pass writes
//! `MOMENTUM * (running - batch) * share`, where the share is this rank's part of the samples. The optimizer subtracts the
//! sum of these numbers over all ranks from the running statistics, without a learning rate.
//!
//! Sources: Ioffe and Szegedy, "Batch normalization: accelerating deep network training by reducing internal covariate
//! shift", ICML 2015. Momentum, e and the unbiased running variance are the same as in `PyTorch`.

use ndarray::{ArrayView2, ArrayViewMut2};

use super::layer::{
    Activation, BackwardPass, CONTIGUITY_MESSAGE, ForwardMode, GradientSink, Layer, SavedForBackward,
    TrainingPass,
};

/// The constant e. It is added to the variance, so that a channel with equal values causes no division by zero.
const EPSILON: f32 = 1e-5;
/// The name of the tensor of the running variances.
pub(crate) const RUNNING_VARIANCE: &str = "running_var";
/// The weight of a new batch in the running statistics.
const MOMENTUM: f64 = 0.1;
/// The number of partial sums in [`sum_pairs`].
const PARTIAL_SUMS: usize = 8;

/// A layer of batch normalization. The parameters are the weights, the biases, the running means and the running
/// variances, with one value for each channel.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct BatchNorm {
    /// The number of channels. Each output of a fully connected layer is a channel.
    pub(crate) channels: usize,
    /// The number of values of a channel in each sample.
    pub(crate) pixels: usize,
    pub(crate) activation: Activation,
}

/// The four tensors of a layer: views of its parameters or of its gradients.
struct BatchNormTensors<T> {
    weights: T,
    biases: T,
    means: T,
    variances: T,
}

/// The statistics of a batch, which the forward pass saves for the backward pass.
struct BatchStatistics<'a> {
    means: &'a mut [f32],
    /// 1 / sqrt(variance + [`EPSILON`]).
    inverse_deviations: &'a mut [f32],
    /// The variances with the divisor n - 1, where n is the number of values of a channel in the whole batch.
    unbiased_variances: &'a mut [f32],
    /// 1 / (the number of values of a channel in the whole batch). 0 if the batch has no values.
    inverse_count: &'a mut f32,
    /// This rank's part of the samples, from 0 to 1.
    share: &'a mut f32,
}

impl BatchNorm {
    /// Divides the parameters of the layer into its four tensors.
    fn tensors<'a>(&self, parameters: &'a [f32]) -> BatchNormTensors<&'a [f32]> {
        let mut parts = parameters.chunks_exact(self.channels);
        let mut next = || parts.next().expect("the layer has four parameters for each channel");
        BatchNormTensors { weights: next(), biases: next(), means: next(), variances: next() }
    }

    /// Divides the parameters or the gradients of the layer into its four tensors.
    fn tensors_mut<'a>(&self, parameters: &'a mut [f32]) -> BatchNormTensors<&'a mut [f32]> {
        let mut parts = parameters.chunks_exact_mut(self.channels);
        let mut next = || parts.next().expect("the layer has four parameters for each channel");
        BatchNormTensors { weights: next(), biases: next(), means: next(), variances: next() }
    }

    /// Returns views of the saved batch statistics.
    fn statistics<'a>(&self, saved: &'a mut SavedForBackward) -> BatchStatistics<'a> {
        let (means, rest) = saved.values.split_at_mut(self.channels);
        let (inverse_deviations, rest) = rest.split_at_mut(self.channels);
        let (unbiased_variances, rest) = rest.split_at_mut(self.channels);
        let [inverse_count, share] = rest else { unreachable!("`allocate_saved` allocates two more values") };
        BatchStatistics { means, inverse_deviations, unbiased_variances, inverse_count, share }
    }

    /// Computes the statistics of the batch from the differences between its values and the running means. All ranks
    /// have the same running means, so one all-reduce is enough. The running means are near the means of the
    /// batch, so cancellation loses little precision.
    fn measure_batch(
        &self,
        running_means: &[f32],
        input: &ArrayView2<'_, f32>,
        pass: TrainingPass<'_>,
        statistics: BatchStatistics<'_>,
    ) {
        let BatchStatistics { means, inverse_deviations, unbiased_variances, inverse_count, share } =
            statistics;
        let mut sums = vec![0.0; 2 * self.channels + 1];
        let (differences, rest) = sums.split_at_mut(self.channels);
        let (squares, count) = rest.split_at_mut(self.channels);
        count[0] = (input.nrows() * self.pixels) as f64;
        for row in input.rows() {
            let planes = row.to_slice().expect(CONTIGUITY_MESSAGE).chunks_exact(self.pixels);
            for (channel, plane) in planes.enumerate() {
                let centre = f64::from(running_means[channel]);
                let [difference, square] = sum_pairs(plane, plane, |value, _| {
                    let difference = f64::from(value) - centre;
                    [difference, difference * difference]
                });
                differences[channel] += difference;
                squares[channel] += square;
            }
        }
        pass.ranks.sum_over_ranks(&mut sums);
        let count = sums[2 * self.channels];
        *inverse_count = if count > 0.0 { (1.0 / count) as f32 } else { 0.0 };
        *share = input.nrows() as f32 * pass.weight;
        for channel in 0..self.channels {
            let difference = sums[channel] / count.max(1.0);
            let square = sums[self.channels + channel] / count.max(1.0);
            let variance = square - difference * difference;
            // `max` would turn NaN into 0 and hide that a layer has diverged.
            let variance = if variance < 0.0 { 0.0 } else { variance };
            means[channel] = (f64::from(running_means[channel]) + difference) as f32;
            inverse_deviations[channel] = (1.0 / (variance + f64::from(EPSILON)).sqrt()) as f32;
            unbiased_variances[channel] = (variance * count / (count - 1.0).max(1.0)) as f32;
        }
    }

    /// Returns two sums over this rank's samples for each channel: first the sums of `delta` for all channels, and then
    /// the sums of `delta` times the normalized input for all channels.
    fn gradient_sums(
        &self,
        statistics: &BatchStatistics<'_>,
        input: &ArrayView2<'_, f32>,
        delta: &ArrayView2<'_, f32>,
    ) -> Vec<f64> {
        let mut sums = vec![0.0; 2 * self.channels];
        for (input, delta) in input.rows().into_iter().zip(delta.rows()) {
            let inputs = input.to_slice().expect(CONTIGUITY_MESSAGE).chunks_exact(self.pixels);
            let deltas = delta.to_slice().expect(CONTIGUITY_MESSAGE).chunks_exact(self.pixels);
            for (channel, (inputs, deltas)) in inputs.zip(deltas).enumerate() {
                let mean = statistics.means[channel];
                let [sum, product] = sum_pairs(inputs, deltas, |input, delta| {
                    [f64::from(delta), f64::from(delta) * f64::from(input - mean)]
                });
                sums[channel] += sum;
                sums[self.channels + channel] += product * f64::from(statistics.inverse_deviations[channel]);
            }
        }
        sums
    }

    /// Writes the gradient of the weights and biases, and the changes of the running statistics.
    fn write_gradients(
        &self,
        parameters: &[f32],
        statistics: &BatchStatistics<'_>,
        sums: &[f64],
        gradients: &mut GradientSink<'_>,
        row_count: usize,
    ) {
        let running = self.tensors(parameters);
        gradients.add_gradients(row_count, |_, gradients| {
            let BatchNormTensors { weights, biases, means, variances } = self.tensors_mut(gradients);
            let change = |running: f32, batch: f32| {
                let difference = f64::from(running) - f64::from(batch);
                (MOMENTUM * difference * f64::from(*statistics.share)) as f32
            };
            // A batch with a single value says nothing about the variance, so the running variance does not change.
            let has_variance = *statistics.inverse_count < 1.0;
            for channel in 0..self.channels {
                biases[channel] += sums[channel] as f32;
                weights[channel] += sums[self.channels + channel] as f32;
                means[channel] += change(running.means[channel], statistics.means[channel]);
                if has_variance {
                    variances[channel] +=
                        change(running.variances[channel], statistics.unbiased_variances[channel]);
                }
            }
        });
    }
}

impl Layer for BatchNorm {
    fn inputs(&self) -> usize {
        self.channels * self.pixels
    }

    fn outputs(&self) -> usize {
        self.channels * self.pixels
    }

    fn tensor_names_and_shapes(&self) -> Vec<(String, Vec<usize>)> {
        let names = ["weight", "bias", "running_mean", RUNNING_VARIANCE];
        names.map(|name| (name.to_owned(), vec![self.channels])).to_vec()
    }

    fn statistic_count(&self) -> usize {
        2 * self.channels
    }

    fn uses_sums_over_ranks(&self) -> bool {
        true
    }

    fn initialize(&self, parameters: &mut [f32], _: &mut dyn FnMut() -> f32) {
        let BatchNormTensors { weights, biases, means, variances } = self.tensors_mut(parameters);
        weights.fill(1.0);
        biases.fill(0.0);
        means.fill(0.0);
        variances.fill(1.0);
    }

    fn allocate_saved(&self, _: usize) -> SavedForBackward {
        SavedForBackward { values: vec![0.0; 3 * self.channels + 2], ..SavedForBackward::default() }
    }

    fn forward(
        &self,
        parameters: &[f32],
        input: ArrayView2<'_, f32>,
        mut output: ArrayViewMut2<'_, f32>,
        saved: &mut SavedForBackward,
        mode: ForwardMode<'_>,
    ) -> Result<(), String> {
        let BatchNormTensors { weights, biases, means, variances } = self.tensors(parameters);
        let statistics = self.statistics(saved);
        match mode {
            ForwardMode::Training(pass) => self.measure_batch(means, &input, pass, statistics),
            ForwardMode::Evaluation => {
                statistics.means.copy_from_slice(means);
                for (inverse, variance) in statistics.inverse_deviations.iter_mut().zip(variances) {
                    *inverse = 1.0 / (variance + EPSILON).sqrt();
                }
            }
        }
        let BatchStatistics { means, inverse_deviations, .. } = self.statistics(saved);
        for (input, mut output) in input.rows().into_iter().zip(output.rows_mut()) {
            let inputs = input.to_slice().expect(CONTIGUITY_MESSAGE).chunks_exact(self.pixels);
            let outputs = output.as_slice_mut().expect(CONTIGUITY_MESSAGE).chunks_exact_mut(self.pixels);
            for (channel, (inputs, outputs)) in inputs.zip(outputs).enumerate() {
                let (mean, bias) = (means[channel], biases[channel]);
                let factor = weights[channel] * inverse_deviations[channel];
                outputs.iter_mut().zip(inputs).for_each(|(y, x)| *y = (x - mean) * factor + bias);
            }
        }
        self.activation.apply(output.as_slice_mut().expect(CONTIGUITY_MESSAGE));
        Ok(())
    }

    fn backward(
        &self,
        parameters: &[f32],
        pass: BackwardPass<'_>,
        gradients: &mut GradientSink<'_>,
    ) -> Result<(), String> {
        let BackwardPass { input, output, mut delta, input_delta, saved, ranks } = pass;
        self.activation.differentiate(
            delta.as_slice_mut().expect(CONTIGUITY_MESSAGE),
            output.as_slice().expect(CONTIGUITY_MESSAGE),
        );
        let statistics = self.statistics(saved);
        let mut sums = self.gradient_sums(&statistics, &input, &delta.view());
        self.write_gradients(parameters, &statistics, &sums, gradients, input.nrows());
        let Some(mut input_delta) = input_delta else { return Ok(()) };
        ranks.sum_over_ranks(&mut sums);
        let weights = self.tensors(parameters).weights;
        let inverse_count = f64::from(*statistics.inverse_count);
        for ((input, delta), mut target) in
            input.rows().into_iter().zip(delta.rows()).zip(input_delta.rows_mut())
        {
            let inputs = input.to_slice().expect(CONTIGUITY_MESSAGE).chunks_exact(self.pixels);
            let deltas = delta.to_slice().expect(CONTIGUITY_MESSAGE).chunks_exact(self.pixels);
            let targets = target.as_slice_mut().expect(CONTIGUITY_MESSAGE).chunks_exact_mut(self.pixels);
            for (channel, ((inputs, deltas), targets)) in inputs.zip(deltas).zip(targets).enumerate() {
                let (mean, inverse) = (statistics.means[channel], statistics.inverse_deviations[channel]);
                let factor = weights[channel] * inverse;
                let mean_delta = (sums[channel] * inverse_count) as f32;
                let mean_product = (sums[self.channels + channel] * inverse_count) as f32 * inverse;
                for ((target, x), d) in targets.iter_mut().zip(inputs).zip(deltas) {
                    *target = (d - mean_delta - (x - mean) * mean_product) * factor;
                }
            }
        }
        Ok(())
    }
}

/// Calls `terms` with each pair of values. Returns the sum of the first results and the sum of the second results.
/// Several partial sums let the compiler use vector instructions.
fn sum_pairs(first: &[f32], second: &[f32], terms: impl Fn(f32, f32) -> [f64; 2]) -> [f64; 2] {
    let (first_blocks, first_rest) = first.as_chunks::<PARTIAL_SUMS>();
    let (second_blocks, second_rest) = second.as_chunks::<PARTIAL_SUMS>();
    let mut sums = [[0.0; PARTIAL_SUMS]; 2];
    for (first, second) in first_blocks.iter().zip(second_blocks) {
        for index in 0..PARTIAL_SUMS {
            let [one, two] = terms(first[index], second[index]);
            sums[0][index] += one;
            sums[1][index] += two;
        }
    }
    let mut totals = sums.map(|sums| sums.iter().sum::<f64>());
    for (&first, &second) in first_rest.iter().zip(second_rest) {
        let [one, two] = terms(first, second);
        totals[0] += one;
        totals[1] += two;
    }
    totals
}

#[cfg(test)]
mod tests;
