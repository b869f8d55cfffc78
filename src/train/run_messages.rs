//! The lines that tell the user what a run does and how it ended.

use super::checkpoint::Position;
use super::config::Config;
use super::convergence;
use super::early_stopping::BestRecord;
use super::setup::{Setup, TrainingSettings};
use super::strategies::StrategySpec;
use super::trainer::Trainer;
use crate::group::Group;
use crate::types::counted;

/// Returns a line for the user that describes the data, the model and the settings of the run.
pub(super) fn start_message(
    group: &Group,
    config: &Config,
    setup: &Setup,
    learning_rate: Option<f32>,
) -> String {
    let (target, input) = setup.dataset.describe_target_and_inputs();
    let TrainingSettings { rule, batch_size, epochs, stops_when_converged, .. } = &setup.settings;
    format!(
        "{} on {} ({target}): {} training and {} of {}, {}; {} lr {}{}, batch {batch_size}, {}{}, seed {}, {}{}",
        setup.model,
        setup.dataset.name,
        setup.dataset.train.len(),
        counted(setup.dataset.test.len(), "test sample"),
        counted(setup.dataset.train.columns(), input),
        counted(setup.network.parameter_count(), "parameter"),
        rule.name(),
        learning_rate.unwrap_or_default(),
        config.recipe,
        if *stops_when_converged { "at most " } else { "" },
        counted(epochs, "epoch"),
        config.seed,
        counted(group.size(), "rank"),
        if config.strategy == StrategySpec::AllReduce {
            String::new()
        } else {
            format!(", strategy {}", config.strategy)
        },
    )
}

/// Returns a line that says that there is nothing to train, if a run resumes from a checkpoint after its last epoch.
/// `position` is the position of the checkpoint.
pub(super) fn nothing_to_train_message(config: &Config, setup: &Setup, position: Position) -> Option<String> {
    let (epochs, epoch) = (setup.settings.epochs, position.epoch);
    let target = config.checkpoint.as_ref().filter(|_| epoch >= epochs)?;
    let default = if config.epochs.is_none() { " by default" } else { "" };
    Some(format!(
        "the checkpoint in {} is at epoch {epoch}, and --epochs is {epochs}{default}, so there is nothing to train; pass a larger \
         --epochs to train on",
        target.directory.display()
    ))
}

/// Returns a line that says why training ended and what to do next. `is_saved` is false if the last checkpoint was
/// not written.
pub(super) fn end_message(config: &Config, setup: &Setup, trainer: &Trainer<'_>, is_saved: bool) -> String {
    let position = trainer.state.position;
    let (convex, constant_loss) = (setup.model.is_convex(), setup.constant_prediction_loss());
    if trainer.stopped {
        let saved = match &config.checkpoint {
            Some(_) if !is_saved => "the checkpoint could not be saved".into(),
            Some(target) => format!("saved to {}; pass --resume to continue", target.directory.display()),
            None => "no checkpoint was saved, because --checkpoint was not given".into(),
        };
        format!("stopped by a signal after step {}: {saved}", position.steps_total)
    } else if let Some(best) = &trainer.state.best {
        let BestRecord { epoch, loss, records_since, .. } = best.record;
        let why = if trainer.is_out_of_patience() {
            format!(
                "stopped early after epoch {}: {} without a lower validation loss",
                position.epoch,
                counted(records_since, "record")
            )
        } else {
            format!("done: {}", counted(position.epoch, "epoch"))
        };
        let loss = loss.unwrap_or_default();
        format!(
            "{why}; the result has the parameters after epoch {epoch}, whose validation loss of {loss:.4} is the lowest"
        )
    } else if trainer.has_converged() {
        format!("converged: the loss no longer falls after epoch {}", position.epoch)
    } else if convergence::is_still_improving(&trainer.state.history, constant_loss, convex) {
        "still improving: raise --epochs or --lr".into()
    } else {
        format!("done: {}", counted(position.epoch, "epoch"))
    }
}
