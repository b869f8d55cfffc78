//! The evaluation of some samples on one rank.

use std::ops::Range;

use ndarray::s;

use super::data::{Samples, Standardizer};
use super::model::{LossSums, Network, Workspace};

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
}

impl EvaluationWork<'_> {
    /// Evaluates the samples with the whole model.
    pub(crate) fn evaluate(self) -> LossSums {
        let Self { network, parameters, workspace, samples, standardizer, rows } = self;
        let input = workspace.input.slice_mut(s![..rows.len(), ..]);
        samples.features.write_rows(rows.clone(), standardizer, input);
        network.evaluate(parameters, workspace, &samples.targets, rows)
    }
}
