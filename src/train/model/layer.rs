//! The trait that each kind of layer implements, and the arguments of its forward and backward passes.

use std::any::Any;
use std::fmt::{self, Debug};
use std::ops::Range;

use ndarray::{ArrayView2, ArrayViewMut2};

use crate::train::summation_tree::{sum_in_tree_order, tree_depth};

/// With [`SumOrder::RowGroups`], a fully connected layer computes its gradients in blocks of about this many
/// elements. The gradients of a block for several row groups then fit the second-level cache of a processor.
const GRADIENT_BLOCK_ELEMENTS: usize = 1 << 17;
/// The number of rows that a kernel of a matrix product computes at once.
const TILE_ROWS: usize = 16;

/// A layer of a network: computes outputs from a batch of samples and from parameters. Implement this trait for a layer of
/// your own, and pass it to the trainer with [`OwnModel`](super::OwnModel).
///
/// Arrays of samples are contiguous (`as_slice` returns `Some`) and have one row for each sample. The parameters of a
/// layer are one flat slice. The output for a sample must not depend on the other samples of the batch, because they
/// may be on other ranks. Only a layer that uses [`SumOverRanks`] may depend on the whole batch.
pub trait Layer: Any + Debug + Send + Sync {
    /// Returns the number of inputs for each sample.
    fn inputs(&self) -> usize;

    /// Returns the number of outputs for each sample.
    fn outputs(&self) -> usize;

    /// Returns the name and the shape of each tensor of parameters, in the order of the parameters.
    fn tensor_names_and_shapes(&self) -> Vec<(String, Vec<usize>)> {
        Vec::new()
    }

    /// Returns the number of running statistics, which are the last parameters of the layer. A statistic has no
    /// gradient. In its place, the backward pass writes the number that the optimizer subtracts from the statistic: see
    /// [`Optimizer::statistics`](crate::train::optimizer::Optimizer::statistics).
    fn statistic_count(&self) -> usize {
        0
    }

    /// Returns whether the passes of the layer call [`SumOverRanks`]. If they do, a rank without samples also runs
    /// the passes of this layer, with arrays that have no rows.
    fn uses_sums_over_ranks(&self) -> bool {
        false
    }

    /// Returns whether the bits of the outputs and gradients of a sample do not depend on the number of samples in the pass.
    /// Runs with [`Recipe::reproducible_shards`](crate::train::Recipe::reproducible_shards) refuse all other layers.
    fn is_reproducible(&self) -> bool {
        true
    }

    /// Returns the number of parameters, or `usize::MAX` if the number does not fit `usize`.
    fn parameter_count(&self) -> usize {
        let tensors = self.tensor_names_and_shapes();
        let lengths = tensors.iter().map(|(_, shape)| shape.iter().copied().fold(1, usize::saturating_mul));
        lengths.fold(0, usize::saturating_add)
    }

    /// Returns the approximate number of multiplications of a forward pass, for each sample.
    fn multiplications(&self) -> u64 {
        self.outputs() as u64
    }

    /// Returns the approximate number of values that a forward pass computes for each sample.
    fn values_per_sample(&self) -> usize {
        self.inputs() + self.outputs()
    }

    /// Sets the initial parameters. `uniform` returns random numbers from -1 up to, but not including, 1.
    fn initialize(&self, _parameters: &mut [f32], _uniform: &mut dyn FnMut() -> f32) {}

    /// Allocates the data that the layer stores between a forward and a backward pass of up to `rows` samples.
    fn allocate_saved(&self, _rows: usize) -> SavedForBackward {
        SavedForBackward::default()
    }

    /// Writes the outputs for each row of `input` to the rows of `output`, whose earlier content is unspecified.
    ///
    /// # Errors
    ///
    /// A text that says why the layer cannot compute its outputs. The run then ends on all ranks with a [`LayerError`].
    fn forward(
        &self,
        parameters: &[f32],
        input: ArrayView2<'_, f32>,
        output: ArrayViewMut2<'_, f32>,
        saved: &mut SavedForBackward,
        mode: ForwardMode<'_>,
    ) -> Result<(), String>;

    /// Computes the gradient of the parameters with [`GradientSink::add_gradients`], and the derivative of the loss with
    /// respect to the layer's inputs. The caller must have called [`forward`](Self::forward) with the same batch.
    ///
    /// # Errors
    ///
    /// A text that says why the layer cannot compute the derivatives. The run then ends on all ranks with a [`LayerError`].
    fn backward(
        &self,
        parameters: &[f32],
        pass: BackwardPass<'_>,
        gradients: &mut GradientSink<'_>,
    ) -> Result<(), String>;
}

/// The error of a layer that could not compute its outputs or derivatives.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the layer {layer} failed: {problem}")]
pub struct LayerError {
    /// The layer, as its implementation of [`Debug`] prints it.
    pub layer: String,
    /// The text that the layer returned.
    pub problem: String,
}

impl LayerError {
    pub(crate) fn new(layer: &dyn Layer, problem: String) -> Self {
        Self { layer: format!("{layer:?}"), problem }
    }
}

/// The data that a layer stores between a forward and a backward pass.
#[derive(Debug, Default)]
pub struct SavedForBackward {
    /// Numbers.
    pub values: Vec<f32>,
    /// Indices, for example the indices of the largest inputs.
    pub indices: Vec<u32>,
    /// Other data, for example the operations that another library recorded for automatic differentiation.
    pub other: Option<Box<dyn Any + Send + Sync>>,
}

/// Whether a forward pass is part of a training step.
#[derive(Clone, Copy, Debug)]
pub enum ForwardMode<'a> {
    /// The pass computes predictions.
    Evaluation,
    /// The pass is part of a training step.
    Training(TrainingPass<'a>),
}

/// The properties of a training step that the forward pass of the step may use.
#[derive(Clone, Copy, Debug)]
pub struct TrainingPass<'a> {
    /// The seed of the run and the number of the step.
    pub step: StepSeed,
    /// The index of the sample in each row.
    pub indices: &'a [u32],
    /// The sum of the losses is multiplied by this factor.
    pub weight: f32,
    /// The ranks that compute the batch together.
    pub ranks: &'a dyn SumOverRanks,
}

/// Adds numbers over all ranks that compute a batch together, so that a layer can use statistics of the whole batch.
pub trait SumOverRanks: Debug {
    /// Replaces each value by the sum of the values of all ranks. The result has the same bits on all ranks. All ranks
    /// must call this function equally often and with equally many values.
    ///
    /// If the sum fails, the values are unspecified. The implementation stores the error until the end of the forward and
    /// backward pass. Then the step returns the error.
    fn sum_over_ranks(&self, values: &mut [f64]);
}

/// The implementation of [`SumOverRanks`] for a batch whose samples are all on one rank. The values do not change.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct OneRank;

impl SumOverRanks for OneRank {
    fn sum_over_ranks(&self, _: &mut [f64]) {}
}

/// The seed of a run and the number of a training step. The random numbers for a sample depend only on the seed, the step and
/// the index of the sample, not on the number of ranks.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct StepSeed {
    /// The seed of the run.
    pub seed: u64,
    /// The number of the step in the run.
    pub step: u64,
}

/// The arrays of a backward pass.
#[derive(Debug)]
pub struct BackwardPass<'a> {
    /// The inputs of the forward pass.
    pub input: ArrayView2<'a, f32>,
    /// The outputs of the forward pass.
    pub output: ArrayView2<'a, f32>,
    /// The derivative of the loss with respect to the outputs. The layer may overwrite this array.
    pub delta: ArrayViewMut2<'a, f32>,
    /// The layer writes the derivative of the loss with respect to its inputs here. `None` if no layer needs this
    /// derivative.
    pub input_delta: Option<ArrayViewMut2<'a, f32>>,
    /// The data that the forward pass stored.
    pub saved: &'a mut SavedForBackward,
    /// The ranks that compute the batch together. They are the same ranks as in the forward pass.
    pub ranks: &'a dyn SumOverRanks,
}

/// What a backward pass does with the gradients that are already in memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum GradientUpdate {
    /// The new gradients replace the earlier gradients.
    Replace,
    /// The new gradients are added to the earlier gradients.
    Add,
}

/// Where a backward pass writes the gradient of a layer's parameters.
pub struct GradientSink<'a> {
    /// The gradients of all layers.
    gradients: &'a mut [f32],
    /// What to do with the gradients that are already in `gradients`.
    update: GradientUpdate,
    /// The range of this layer's parameters.
    range: Range<usize>,
    /// A layer should report final gradients in ranges of about this many elements.
    elements_per_report: usize,
    /// This function is called with each range of gradients as soon as the range is final, and with the gradients of all
    /// layers.
    on_gradient_ready: &'a mut dyn FnMut(Range<usize>, &mut [f32]),
    /// How the gradients of the samples are added.
    order: SumOrder<'a>,
    /// Memory for the gradients of row groups.
    scratch: &'a mut Vec<f32>,
    /// Whether the layer has computed gradients.
    is_used: bool,
}

/// The order in which a backward pass adds the gradients of the samples.
#[derive(Clone, Copy, Debug)]
pub(crate) enum SumOrder<'a> {
    /// Each layer chooses its own order.
    Any,
    /// The layer computes a gradient for each row group, and [`sum_in_tree_order`] adds these gradients. The row
    /// groups follow each other and cover all rows. Some row groups may be empty. There is at least one row group.
    RowGroups(&'a [Range<usize>]),
}

impl<'a> GradientSink<'a> {
    /// Creates the sink of one layer. Each argument becomes the field with the same name.
    pub(crate) fn new(
        (gradients, update): (&'a mut [f32], GradientUpdate),
        range: Range<usize>,
        elements_per_report: usize,
        on_gradient_ready: &'a mut dyn FnMut(Range<usize>, &mut [f32]),
        (order, scratch): (SumOrder<'a>, &'a mut Vec<f32>),
    ) -> Self {
        let is_used = false;
        Self { gradients, update, range, elements_per_report, on_gradient_ready, order, scratch, is_used }
    }

    /// Sets the gradient to 0 if the layer has computed none: the memory may have other values.
    pub(crate) fn finish(self) {
        if !self.is_used && self.update == GradientUpdate::Replace {
            self.gradients[self.range].fill(0.0);
        }
    }

    /// Computes the gradients of all parameters of the layer, and reports them as final. A layer without parameters need not
    /// call this function. Every other layer calls it once in each backward pass.
    ///
    /// `add(rows, gradients)` adds the gradient of the samples in `rows` to `gradients`, which has one value for each
    /// parameter of the layer. `row_count` is the number of samples of the pass. This function may call `add` several
    /// times, each time with different rows and different memory. Each row is in exactly one call.
    pub fn add_gradients(&mut self, row_count: usize, mut add: impl FnMut(Range<usize>, &mut [f32])) {
        let count = self.range.len();
        self.compute_gradients(0..count, (row_count, 0), |rows, gradients, earlier_factor| {
            if earlier_factor == 0.0 {
                gradients.fill(0.0);
            }
            add(rows, gradients);
        });
        self.report_final_range(0..count);
    }

    /// Computes the gradients of the parameters `range` of the layer. Indices count from the layer's first parameter.
    ///
    /// `compute(rows, gradients, factor)` writes the gradient of the samples in `rows` plus `factor` times the earlier
    /// content of `gradients`. The factor is 0 or 1. With [`SumOrder::RowGroups`], this function calls `compute` for
    /// each row group. Otherwise it calls `compute` once, with all of the batch's `row_count` rows.
    ///
    /// If `factor` is 1 and `rows` has at most `chain_rows` rows, the result must have the same bits as if `compute`
    /// first computed the gradient and then added it to `gradients`.
    pub(crate) fn compute_gradients(
        &mut self,
        range: Range<usize>,
        (row_count, chain_rows): (usize, usize),
        mut compute: impl FnMut(Range<usize>, &mut [f32], f32),
    ) {
        self.is_used = true;
        let target = &mut self.gradients[self.range.clone()][range];
        match (self.order, self.update) {
            (SumOrder::RowGroups(groups), _) => {
                let len = target.len() * tree_depth(groups.len());
                if self.scratch.len() < len {
                    self.scratch.resize(len, 0.0);
                }
                let can_add = |rows: &Range<usize>| (1..=chain_rows).contains(&rows.len());
                sum_in_tree_order(groups, target, self.scratch, (&mut compute, &can_add));
            }
            (SumOrder::Any, GradientUpdate::Replace) => compute(0..row_count, target, 0.0),
            (SumOrder::Any, GradientUpdate::Add) => compute(0..row_count, target, 1.0),
        }
    }

    /// Returns for how many rows of its weights a layer should compute and report gradients at once. The weights have
    /// `outputs` rows and `inputs` columns.
    pub(crate) fn rows_per_report(&self, inputs: usize, outputs: usize) -> usize {
        match self.order {
            SumOrder::Any => (self.elements_per_report / inputs.max(1)).clamp(1, outputs.max(1)),
            SumOrder::RowGroups(_) => {
                let block_count = (inputs * outputs).div_ceil(GRADIENT_BLOCK_ELEMENTS).max(1);
                outputs.div_ceil(block_count).next_multiple_of(TILE_ROWS)
            }
        }
    }

    /// Reports that the gradients of the parameters `range` of the layer are final. A layer reports ranges from its
    /// last parameter to its first.
    pub(crate) fn report_final_range(&mut self, range: Range<usize>) {
        if !range.is_empty() {
            (self.on_gradient_ready)(
                self.range.start + range.start..self.range.start + range.end,
                self.gradients,
            );
        }
    }

    /// Replaces the backward pass of a layer if the batch has no samples. For [`GradientUpdate::Replace`], first sets the
    /// gradients of the layer to 0. Then reports all gradients of the layer as final.
    pub(crate) fn report_without_samples(&mut self) {
        if self.update == GradientUpdate::Replace {
            self.gradients[self.range.clone()].fill(0.0);
        }
        self.report_final_range(0..self.range.len());
    }
}

impl Debug for GradientSink<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GradientSink").field("range", &self.range).finish_non_exhaustive()
    }
}

/// The activation function of a layer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Activation {
    /// The output is the result of the linear function.
    Identity,
    /// Negative results become 0 (`ReLU`).
    Rectifier,
}

impl Activation {
    /// Replaces the results of the linear function by the outputs of the layer.
    pub(crate) fn apply(self, values: &mut [f32]) {
        if self == Self::Rectifier {
            // `max` would turn NaN into 0 and hide that a layer has diverged.
            for value in values {
                *value = if *value < 0.0 { 0.0 } else { *value };
            }
        }
    }

    /// Converts `delta` from the derivative with respect to the layer's outputs to the derivative with respect to the
    /// results of the linear function.
    pub(crate) fn differentiate(self, delta: &mut [f32], output: &[f32]) {
        if self == Self::Rectifier {
            for (delta, output) in delta.iter_mut().zip(output) {
                *delta = if *output > 0.0 { *delta } else { 0.0 };
            }
        }
    }
}

/// The message of `expect` when an array of samples is converted to a slice.
pub(crate) const CONTIGUITY_MESSAGE: &str = "arrays of samples are contiguous";
