//! The state of a run, and the properties of a run that do not change.

use crate::train::compression_memory::CompressionMemory;
use crate::train::data::Standardizer;
use crate::train::early_stopping::BestParameters;
use crate::train::model::TargetScale;
use crate::train::report::EpochRecord;

/// The position of a run: its next step, and the losses of the steps that it has taken in the current epoch.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(crate) struct Position {
    /// The current epoch, counted from 0.
    pub epoch: u64,
    /// The next step of this epoch, counted from 0.
    pub step: u64,
    /// The number of steps since the run began.
    pub steps_total: u64,
    /// The value of `steps_total` when the momentum of the accelerated rule was last reset to 0.
    pub momentum_start: u64,
    /// The sum of the losses of the samples that the run has used in this epoch.
    pub loss_sum: f64,
    /// The number of samples that the run has used in this epoch.
    pub samples: u64,
}

impl Position {
    /// Returns the position as numbers that can be broadcast.
    pub(crate) fn to_words(self) -> [u64; 6] {
        let Self { epoch, step, steps_total, momentum_start, loss_sum, samples } = self;
        [epoch, step, steps_total, momentum_start, loss_sum.to_bits(), samples]
    }

    /// Returns the position that [`to_words`](Self::to_words) converted to `words`.
    pub(crate) fn from_words(words: [u64; 6]) -> Self {
        let [epoch, step, steps_total, momentum_start, loss_sum, samples] = words;
        Self { epoch, step, steps_total, momentum_start, loss_sum: f64::from_bits(loss_sum), samples }
    }
}

/// All values that change during a run.
#[derive(Clone, PartialEq, Debug, Default)]
pub(crate) struct TrainingState {
    pub(crate) position: Position,
    /// `None` before the run has chosen a rate, and in checkpoints of earlier versions.
    pub(crate) learning_rate: Option<f32>,
    pub(crate) parameters: Vec<f32>,
    /// The state vectors of the optimizer.
    pub(crate) optimizer: Vec<Vec<f32>>,
    /// The parameters with the lowest validation loss. `None` before training starts, or if the run does not
    /// stop early.
    pub(crate) best: Option<BestParameters>,
    /// The state vectors of the strategy.
    pub(crate) strategy: Vec<Vec<f32>>,
    /// What the ranks remember of compressed gradients. While a rank trains, the field is empty: the sums of the strategy hold
    /// the memory.
    pub(crate) compression: CompressionMemory,
    /// The numbers of the batches after `position` that are already done. Only `ps-async` does batches out of order.
    pub(crate) done_ahead: Vec<u64>,
    /// The results of the epochs that have a record, in the order of the epochs.
    pub(crate) history: Vec<EpochRecord>,
}

impl TrainingState {
    /// Copies `other` to this state, and reuses the memory of this state.
    pub(crate) fn copy_from(&mut self, other: &Self) {
        let Self {
            position,
            learning_rate,
            parameters,
            optimizer,
            best,
            strategy,
            compression,
            done_ahead,
            history,
        } = other;
        (self.position, self.learning_rate) = (*position, *learning_rate);
        self.parameters.clone_from(parameters);
        self.optimizer.clone_from(optimizer);
        match (&mut self.best, best) {
            (Some(own), Some(best)) => {
                own.record = best.record;
                own.parameters.clone_from(&best.parameters);
            }
            (own, best) => own.clone_from(best),
        }
        self.strategy.clone_from(strategy);
        self.compression.clone_from(compression);
        self.done_ahead.clone_from(done_ahead);
        self.history.clone_from(history);
    }
}

/// The properties of a run that stay the same from its beginning to its end. A run can resume from a checkpoint if
/// `entries` and `data_hash` are the same in the run and in the checkpoint.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct RunIdentity {
    /// The options and the sizes of the data, in the order in which a resumed run compares them.
    pub(crate) entries: Vec<IdentityEntry>,
    /// The name of the data, for messages. A resumed run may read the same data from a file with another name.
    pub(crate) data_name: String,
    /// A hash of the content of the data.
    pub(crate) data_hash: String,
    /// The number of steps of an epoch.
    pub(crate) steps_per_epoch: u64,
    /// Whether the run keeps its best parameters.
    pub(crate) keeps_best: bool,
    /// The names of the optimizer's state vectors.
    pub(crate) optimizer_names: &'static [&'static str],
    /// The names of the strategy's state vectors.
    pub(crate) strategy_names: &'static [&'static str],
    /// The number of vectors of [`CompressionMemory`], each as long as the parameters, that the run saves.
    pub(crate) compression_vectors: usize,
    /// The means and deviations that standardize the features. Stored for programs that use the model.
    pub(crate) standardizer: Option<Standardizer>,
    /// The mean and deviation that convert outputs to the unit of the target. Stored for programs that use the model.
    pub(crate) scale: TargetScale,
    /// The names of the classes.
    pub(crate) classes: Vec<String>,
    /// How the columns of a table become features, as JSON ([`TableEncoding`](crate::train::data::TableEncoding)).
    /// Stored for programs that use the model. `None` if the data is not a table.
    pub(crate) encoding: Option<String>,
    /// The text that the caller stores in each checkpoint:
    /// [`CheckpointSettings::options`](super::CheckpointSettings::options).
    pub(crate) options: Option<String>,
}

/// An option of a run, for example the batch size, or a size of the data, for example the number of features.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct IdentityEntry {
    /// The key in the checkpoint's metadata.
    pub(crate) key: &'static str,
    /// The name of the option or of the size in error messages, for example `--batch-size`.
    pub(crate) option: &'static str,
    pub(crate) value: String,
}
