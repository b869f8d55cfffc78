//! The evaluation of some samples on one rank.

use std::ops::Range;

use ndarray::{Axis, s};

use super::data::{ExactSum, Samples, Standardizer};
use super::metrics::MetricSums;
use super::model::{LayerError, LossSums, Network, Workspace};

/// The inputs and the memory that a rank needs to evaluate samples.
pub(crate) struct EvaluationWork<'a> {
    pub(crate) network: &'a Network,
    /// This rank's parameters: all parameters, or a part of them if the strategy divides the model.
    pub(crate) parameters: &'a [f32],
    /// Memory for an evaluation with the whole model. Empty if the strategy divides the model.
    pub(crate) workspace: &'a mut Workspace,
    pub(crate) samples: &'a Samples,
    pub(crate) standardizer: Option<&'a Standardizer>,
    /// The indices of the samples to evaluate.
    pub(crate) rows: Range<usize>,
    /// The rank that has the outputs of the model also adds the results of the samples to these sums.
    pub(crate) metrics: Option<&'a mut MetricSums>,
}

impl EvaluationWork<'_> {
    /// Evaluates the samples with the whole model.
    pub(crate) fn evaluate(self) -> Result<LossSums, LayerError> {
        let Self { network, parameters, workspace, samples, standardizer, rows, metrics } = self;
        if rows.is_empty() {
            return Ok(LossSums::default());
        }
        let input = workspace.input.slice_mut(s![..rows.len(), ..]);
        samples.features.write_rows(rows.clone(), standardizer, input);
        let outputs = network.compute_outputs(parameters, workspace, rows.len())?;
        if let Some(metrics) = metrics {
            metrics.add_outputs(&outputs, (network.loss(), &samples.targets), rows.clone());
        }
        Ok(network.loss().evaluate(&outputs, &samples.targets, rows))
    }

    /// Does the same as [`evaluate`](Self::evaluate), and adds each finite loss of a sample to `sum`. The value of
    /// `sum` does not depend on which rank evaluates which samples.
    pub(crate) fn evaluate_and_add_losses(self, sum: &mut ExactSum) -> Result<LossSums, LayerError> {
        let Self { network, parameters, workspace, samples, standardizer, rows, metrics } = self;
        let mut total = LossSums::default();
        if rows.is_empty() {
            return Ok(total);
        }
        let input = workspace.input.slice_mut(s![..rows.len(), ..]);
        samples.features.write_rows(rows.clone(), standardizer, input);
        let outputs = network.compute_outputs(parameters, workspace, rows.len())?;
        if let Some(metrics) = metrics {
            metrics.add_outputs(&outputs, (network.loss(), &samples.targets), rows.clone());
        }
        for (output, row) in outputs.axis_chunks_iter(Axis(0), 1).zip(rows) {
            let sums = network.loss().evaluate(&output, &samples.targets, std::iter::once(row));
            if sums.loss.is_finite() {
                sum.add(sums.loss);
            }
            total.add(sums);
        }
        Ok(total)
    }
}
