//! Divides each fully connected layer of a model over ranks.
//!
//! Layers are divided alternately by their outputs and by their inputs. If a layer is divided by its outputs, each rank
//! has some rows of the weights, reads all inputs, and computes a part of the outputs. If a layer is divided by its
//! inputs, each rank has some columns of the weights and reads a part of the inputs. The output of this layer is the sum of the
//! results of all ranks. A layer that is divided by its outputs passes the outputs to the next layer without
//! communication. The last layer is divided by its inputs.
//!
//! Source: Shoeybi et al., "Megatron-LM: training multi-billion parameter language models using model parallelism",
//! 2019.

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

use super::dense::Dense;
use super::layer::{Activation, Layer};
use super::stage::{PlacedLayer, Stage};
use crate::train::batches::range_of_rank;
use crate::types::{Rank, WorldSize};

/// One rank's part of one or two layers of the model. The output of these layers is the sum of the outputs of all ranks,
/// after `activation` is applied to the sum.
pub(crate) struct TensorSegment {
    /// This rank's parts of the layers.
    pub(crate) stage: Stage,
    /// The range of the segment's parameters in this rank's vector of parameters.
    pub(crate) parameters: Range<usize>,
    /// The inputs that this rank reads.
    pub(crate) inputs: Range<usize>,
    /// The activation that is applied to the sum of the outputs of all ranks.
    pub(crate) activation: Activation,
}

/// The part of a layer on one rank.
enum LayerPart {
    /// These rows of the weights, and the biases of the same outputs.
    Outputs(Range<usize>),
    /// These columns of the weights. Rank 0 also has all biases.
    Inputs(Range<usize>),
}

impl LayerPart {
    /// Returns the part of a layer that a rank has.
    fn new(layer: &DividedLayer<'_>, (rank, size): (Rank, WorldSize)) -> Self {
        if layer.is_divided_by_inputs {
            Self::Inputs(range_of_rank(layer.dense.inputs, rank, size))
        } else {
            Self::Outputs(range_of_rank(layer.dense.outputs, rank, size))
        }
    }
}

/// A fully connected layer of the whole model, and how the layer is divided.
struct DividedLayer<'a> {
    dense: &'a Dense,
    /// The index of the layer's first parameter.
    first_parameter: usize,
    /// Whether the layer is divided by its inputs, and not by its outputs.
    is_divided_by_inputs: bool,
}

/// Returns the fully connected layers of the model. Counted from the last layer, the first, third, fifth and so on
/// are divided by their inputs, and all others by their outputs.
fn divided_layers(stage: &Stage) -> impl Iterator<Item = DividedLayer<'_>> {
    let count = stage.layers().len();
    stage.layers().iter().enumerate().filter_map(move |(index, PlacedLayer { layer, range })| {
        let is_divided_by_inputs = (count - index) % 2 == 1;
        let layer: &dyn Any = layer.as_ref();
        Some(DividedLayer {
            dense: layer.downcast_ref()?,
            first_parameter: range.start,
            is_divided_by_inputs,
        })
    })
}

/// Checks that all layers are fully connected, and wide enough to be divided over all ranks.
///
/// # Errors
///
/// Returns a sentence that names the layer and says what to do.
pub(crate) fn check_tensor_split(stage: &Stage, size: WorldSize) -> Result<(), String> {
    if divided_layers(stage).count() < stage.layers().len() {
        return Err("--strategy tensor divides fully connected layers only, but the model has layers of another kind; pass \
                    --strategy pipeline, or use a model mlp:WIDTH,WIDTH,..."
            .into());
    }
    for (index, layer) in divided_layers(stage).enumerate() {
        let DividedLayer { dense, is_divided_by_inputs, .. } = layer;
        let (width, what) =
            if is_divided_by_inputs { (dense.inputs, "inputs") } else { (dense.outputs, "outputs") };
        if width < size.as_usize() {
            return Err(format!(
                "--strategy tensor divides the {what} of layer {} over the {size} ranks of this job, but this layer has only \
                 {width}; start fewer ranks, or use a model with wider layers",
                index + 1
            ));
        }
    }
    Ok(())
}

/// Returns the ranges of the model's parameters that a rank holds, in increasing order.
pub(crate) fn parameter_ranges_of_rank(stage: &Stage, (rank, size): (Rank, WorldSize)) -> Vec<Range<usize>> {
    let mut ranges: Vec<Range<usize>> = Vec::new();
    let mut push = |range: Range<usize>| match ranges.last_mut() {
        Some(last) if last.end == range.start => last.end = range.end,
        _ => ranges.push(range),
    };
    for layer in divided_layers(stage) {
        let DividedLayer { dense, first_parameter, .. } = layer;
        let biases = first_parameter + dense.weight_count();
        match LayerPart::new(&layer, (rank, size)) {
            LayerPart::Outputs(rows) => {
                let [start, end] = [rows.start, rows.end].map(|row| first_parameter + row * dense.inputs);
                push(start..end);
                push(biases + rows.start..biases + rows.end);
            }
            LayerPart::Inputs(columns) => {
                for row in (0..dense.outputs).map(|row| first_parameter + row * dense.inputs) {
                    push(row + columns.start..row + columns.end);
                }
                if rank == Rank::ZERO {
                    push(biases..biases + dense.outputs);
                }
            }
        }
    }
    ranges
}

/// Returns the segments that a rank computes, from the first to the last.
pub(crate) fn tensor_segments(stage: &Stage, (rank, size): (Rank, WorldSize)) -> Vec<TensorSegment> {
    let mut segments: Vec<TensorSegment> = Vec::new();
    let mut layers: Vec<Arc<dyn Layer>> = Vec::new();
    let mut inputs = 0..0;
    let mut start = 0;
    for layer in divided_layers(stage) {
        let Dense { activation, weight_bound, .. } = *layer.dense;
        match LayerPart::new(&layer, (rank, size)) {
            LayerPart::Outputs(rows) => {
                inputs = 0..layer.dense.inputs;
                layers.push(Arc::new(Dense { outputs: rows.len(), ..layer.dense.clone() }));
            }
            LayerPart::Inputs(columns) => {
                if layers.is_empty() {
                    inputs = columns.clone();
                }
                layers.push(Arc::new(Dense {
                    inputs: columns.len(),
                    outputs: layer.dense.outputs,
                    activation: Activation::Identity,
                    weight_bound,
                    has_biases: rank == Rank::ZERO,
                }));
                let part = Stage::new(std::mem::take(&mut layers));
                let parameters = start..start + part.parameter_count();
                start = parameters.end;
                let stage = if segments.is_empty() { part } else { part.with_input_derivative() };
                segments.push(TensorSegment { stage, parameters, inputs: inputs.clone(), activation });
            }
        }
    }
    segments
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::model::{Loss, Network};

    fn stage(spec: &str) -> Stage {
        Network::new(&spec.parse().unwrap(), 7, 3, Loss::CrossEntropy).unwrap().stage().clone()
    }

    /// Each parameter must belong to exactly one rank, and a rank's segments must have exactly the rank's parameters.
    #[test]
    fn the_parts_of_all_ranks_are_the_whole_model() {
        for spec in ["softmax", "mlp:6", "mlp:6,5", "mlp:9,4,8"] {
            let stage = stage(spec);
            for size in (1..=4).filter_map(WorldSize::new) {
                let mut holders = vec![0; stage.parameter_count()];
                for rank in size.ranks() {
                    let ranges = parameter_ranges_of_rank(&stage, (rank, size));
                    assert!(ranges.is_sorted_by(|first, second| first.end < second.start));
                    ranges.iter().cloned().flatten().for_each(|index| holders[index] += 1);
                    let held: usize = ranges.iter().map(Range::len).sum();
                    let segments = tensor_segments(&stage, (rank, size));
                    assert_eq!(segments.last().unwrap().parameters.end, held, "{spec} {rank} of {size}");
                    assert_eq!(segments.len(), stage.layers().len().div_ceil(2));
                }
                assert!(holders.iter().all(|&count| count == 1), "{spec} on {size} ranks");
            }
        }
    }

    #[test]
    fn layers_that_are_too_narrow_are_refused() {
        for (spec, ranks, expected) in [
            ("mlp:8", 8, None),
            ("softmax", 8, Some("the inputs of layer 1 over the 8 ranks")),
            ("mlp:4", 5, Some("the outputs of layer 1")),
            ("mlp:8,4", 5, Some("the outputs of layer 2")),
        ] {
            let found = check_tensor_split(&stage(spec), WorldSize::new(ranks).unwrap());
            match expected {
                Some(expected) => assert!(found.unwrap_err().contains(expected), "{spec}"),
                None => assert_eq!(found, Ok(())),
            }
        }
    }
}
