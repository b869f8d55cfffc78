//! Functions for runs in which workers take the steps, and this rank only tests and saves the model.

use super::Trainer;
use crate::group::Group;
use crate::train::TrainError;
use crate::train::optimizer::Optimizer;
use crate::train::progress::Observer;
use crate::train::step_times::StepTimes;

impl Trainer<'_> {
    /// Returns the parameters and the optimizer. The caller writes the current parameters and the current optimizer state of
    /// the run to these values.
    pub(crate) fn parameters_and_optimizer(&mut self) -> (&mut [f32], &mut Optimizer) {
        (&mut self.state.parameters, &mut self.optimizer)
    }

    /// Saves a checkpoint. `is_complete` says whether the workers have completed an epoch. If so, first tests the model
    /// and adds a record to the history. `loss` is the mean loss of the last epoch. The other numbers are totals of the steps
    /// since the last record: `step_times` has the times of the ranks that took the steps, and `seconds` is the time that passed.
    pub(crate) fn record_worker_steps(
        &mut self,
        group: &mut Group,
        (loss, samples): (f64, u64),
        (seconds, step_times): (f64, StepTimes),
        (is_complete, observer): (bool, &mut dyn Observer),
    ) -> Result<(), TrainError> {
        self.step_times.add(&step_times);
        self.step_seconds += seconds;
        self.step_samples += samples;
        self.epoch_loss = loss;
        if is_complete {
            let record = self.test_and_make_record(group, samples, (seconds, step_times))?;
            self.state.history.push(record);
            self.compute_missing_validation_loss(group)?;
        }
        let record = self.state.history.last().filter(|_| is_complete);
        observer.epoch_ended(self.setup.settings.epochs, record);
        self.save(group, is_complete, observer)
    }

    /// At the end of a run with `--patience`, replaces the parameters by the best parameters and saves a checkpoint. Does
    /// nothing if a signal stopped the run.
    pub(crate) fn restore_and_save_best_parameters(
        &mut self,
        group: &mut Group,
        observer: &mut dyn Observer,
    ) -> Result<(), TrainError> {
        if let (Some(best), false) = (&mut self.state.best, self.stopped) {
            best.swap_parameters(&mut self.state.parameters);
            self.save(group, false, observer)?;
        }
        Ok(())
    }
}
