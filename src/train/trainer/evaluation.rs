//! Evaluates the model on all ranks.

use super::Trainer;
use crate::group::Group;
use crate::observe::training_thread::{SpanKind, span};
use crate::train::TrainError;
use crate::train::data::{ExactSum, SharedSamples, Targets, add_sums_of_ranks};
use crate::train::evaluation_work::EvaluationWork;
use crate::train::metrics::{Evaluation, MetricSums};
use crate::train::model::Loss;
use crate::train::portable_math::exp;
use crate::train::rank_checks::abort_if_failed;
use crate::types::ReduceOp;

/// With more test samples than this, the report has no area under the ROC curve. To compute this area, each rank holds
/// 16 bytes for each test sample.
const SCORED_SAMPLES_MAX: usize = 1 << 24;

/// The results of an evaluation.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Metrics {
    /// The mean loss.
    pub(crate) loss: f64,
    /// The fraction of correct predictions, from 0 to 1. `None` if the targets are not classes.
    pub(crate) accuracy: Option<f64>,
    /// e to the power of the loss. `None` if the data is not text.
    pub(crate) perplexity: Option<f64>,
    /// The coefficient of determination (R²). `None` if all targets are the same, or if the loss is not the squared error.
    pub(crate) r2: Option<f64>,
}

impl Trainer<'_> {
    /// Evaluates the model on `samples`, block by block. Each replica of the model evaluates a part of the samples.
    /// Returns `None` if there are no samples. If a rank receives a stop signal, the evaluation ends after the current
    /// block and returns `None`. Also adds the results of the samples whose outputs this rank has to `metric_sums`.
    pub(crate) fn evaluate(
        &mut self,
        group: &mut Group,
        samples: &SharedSamples,
        mut metric_sums: Option<&mut MetricSums>,
    ) -> Result<Option<Metrics>, TrainError> {
        let _span = span(SpanKind::Evaluation);
        let place = self.partition.place();
        let local_rows = samples.own_part(place.replica, place.replicas);
        // All ranks evaluate the same number of blocks, because each block ends with an all-reduce. If this rank's part
        // is shorter than the longest part, its last blocks may be empty.
        let longest = samples.longest_part(place.replicas);
        let block = self.evaluation_rows;
        let mut sums = [0.0; 3];
        let mut exact_losses = self.config.recipe.logical_shards().map(|_| [ExactSum::ZERO]);
        for index in 0..longest.div_ceil(block) {
            if self.stopped {
                return Ok(None);
            }
            let start = local_rows.end.min(local_rows.start + index * block);
            let rows = start..local_rows.end.min(start + block);
            let (block_samples, rows) = abort_if_failed(group, samples.held.load_range(rows))?;
            let work = EvaluationWork {
                network: &self.setup.network,
                parameters: &self.state.parameters,
                workspace: &mut self.workspace,
                samples: &block_samples,
                standardizer: self.setup.standardizer.as_ref(),
                rows,
                metrics: metric_sums.as_deref_mut(),
            };
            let outcome = match &mut exact_losses {
                Some([sum]) => work.evaluate_and_add_losses(sum).map_err(TrainError::from),
                None => self.strategy.evaluate(group, work),
            };
            let outcome = abort_if_failed(group, outcome)?;
            let mut block_sums = [outcome.loss, outcome.correct as f64, self.stop_flag()];
            group.all_reduce(&mut block_sums, ReduceOp::Sum)?;
            sums.iter_mut().zip(block_sums).for_each(|(sum, value)| *sum += value);
            self.stopped = sums[2] > 0.0;
        }
        if self.stopped || samples.is_empty() {
            return Ok(None);
        }
        let [mut loss, correct, _] = sums;
        if !loss.is_finite() {
            // All ranks hold the same sum, so all ranks return this error.
            let steps = self.state.position.steps_total;
            let advice = self.advise_after_divergence();
            let message = format!("the loss is {loss} after step {steps} on all ranks; {advice}");
            return Err(TrainError::Diverged(message));
        }
        if let Some(sum) = &mut exact_losses {
            add_sums_of_ranks(group, sum)?;
            loss = sum[0].value();
        }
        let count = samples.len() as f64;
        let total = samples.statistics.sum_of_squares;
        let has_squared_error = matches!(self.setup.network.loss(), Loss::SquaredError(_));
        let is_text = matches!(samples.held.targets(), Targets::NextTokens(_));
        Ok(Some(Metrics {
            loss: loss / count,
            perplexity: is_text.then(|| exp(loss / count)),
            accuracy: matches!(samples.held.targets(), Targets::Classes(_)).then_some(correct / count),
            r2: (has_squared_error && total > 0.0).then(|| 1.0 - loss / total),
        }))
    }

    /// Returns the validation loss of the final parameters: with `--patience`, those of the best record, and otherwise those of
    /// the last record. Returns `None` if a signal stopped the run, or if the run holds out no samples.
    pub(crate) fn final_validation_loss(&self) -> Option<f64> {
        match &self.state.best {
            _ if self.stopped => None,
            Some(best) => best.record.loss,
            None => self.state.history.last()?.validation_loss,
        }
    }

    /// Evaluates the model on the test set. Both results are `None` if there is no test set or if a rank received a
    /// stop signal.
    pub(crate) fn evaluate_test_set(
        &mut self,
        group: &mut Group,
    ) -> Result<(Option<Metrics>, Option<Evaluation>), TrainError> {
        let dataset = &self.setup.dataset;
        if let Some(text) = &dataset.text {
            let metrics = self.evaluate(group, &dataset.test, None)?;
            let tokens = (dataset.test.len() * text.context) as u64;
            let evaluation =
                metrics.map(|Metrics { loss, .. }| Evaluation::Text { tokens, loss, perplexity: exp(loss) });
            return Ok((metrics, evaluation));
        }
        let mut sums = MetricSums::new(dataset.classes.len(), None);
        if dataset.test.len() > SCORED_SAMPLES_MAX {
            sums = sums.without_scores();
        }
        let test = self.evaluate(group, &dataset.test, Some(&mut sums))?;
        if test.is_none() {
            return Ok((None, None));
        }
        sums.merge_over_ranks(dataset.classes.len(), group)?;
        Ok((test, Some(sums.into_evaluation(0, &dataset.classes))))
    }
}
