//! Executes a training run, from its configuration to its report.

use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use super::checkpoint::{self, CheckpointError, CheckpointFiles, ExistingCheckpoint, TrainingState};
use super::compression_reach::CompressionReach;
use super::compression_report::CompressionReport;
use super::config::{Config, default_learning_rate};
use super::curve_files::CurveFiles;
use super::data::SharedSamples;
use super::optimizer::Rule;
use super::partition::ModelPartition;
use super::plot::{draw_curves, make_page};
use super::progress::Observer;
use super::rank_checks::{check_all_succeeded, check_same_data, find_first_differing_rank, short_digest};
use super::report::{RankResults, Report, f64_with_same_digits, parameters_hash};
use super::run_messages::{end_message, nothing_to_train_message, start_message};
use super::setup::{Setup, TrainingSettings};
use super::state_distribution::broadcast_state;
use super::strategies::StrategySpec;
use super::tensorboard::{EventRecorder, TensorBoard};
use super::trainer::{Metrics, Trainer};
use super::{RunPhase, TrainError, atomic_file, curvature, gossip, model_file, server_run, tensorboard};
use crate::group::{Group, Statistics};
use crate::observe::training_thread::activate;
use crate::types::{Rank, counted};

/// The result of a run.
#[derive(Clone, PartialEq, Debug)]
pub struct Summary {
    /// The results of the run. The times and the numbers of bytes were measured on this rank.
    pub report: Report,
    /// The final parameters, the same on all ranks. If the strategy divides the model, rank 0 has all parameters, and
    /// each other rank has only its own part.
    pub parameters: Vec<f32>,
}

/// Trains the model that `config` describes. [`run`](super::run()) describes the arguments and the errors.
pub(super) fn run_on_this_rank(
    group: &mut Group,
    config: &Config,
    stop: &AtomicBool,
    observer: &mut dyn Observer,
) -> Result<Summary, TrainError> {
    let _training_thread = activate(group.recorder());
    check_same_arguments(group, config)?;
    // The options are the same on all ranks, so all ranks return this error.
    config.check().map_err(TrainError::Options)?;
    super::arithmetic_check::check_reproducible_run(group, config.recipe.logical_shards())?;
    let setup = Setup::new(config, group);
    let setup = check_all_succeeded(group, RunPhase::Data, setup)?;
    check_same_class_weights(group, &setup)?;
    setup.dataset.notes.iter().for_each(|note| observer.notice(note));
    // The model and the number of ranks are the same on all ranks, so all ranks return this error.
    let partition = ModelPartition::of_run(config, &setup.network, group).map_err(TrainError::Options)?;
    let state = starting_state(group, config, (&setup, &partition), observer)?;
    let mut recorder;
    let observer: &mut dyn Observer = match &config.curves.tensorboard {
        Some(options) if group.rank() == Rank::ZERO => {
            recorder = EventRecorder::new(observer, (config, options), state.position.steps_total);
            &mut recorder
        }
        _ => observer,
    };
    observer.notice(&start_message(group, config, &setup, state.learning_rate));
    partition.describe_part_sizes().iter().for_each(|line| observer.notice(line));
    if config.strategy.uses_parameter_server() {
        return server_run::train_with_servers(group, (config, &setup), state, stop, observer);
    }
    if let StrategySpec::Gossip { .. } = config.strategy {
        return gossip::run(group, (config, &setup), state, stop, observer);
    }
    let started = Instant::now();
    let start_statistics = group.statistics();
    let mut trainer = Trainer::new(config, &setup, state, (group, partition), stop)?;
    trainer.train(group, observer)?;
    let ranks = gather_rank_results(group, &trainer, &start_statistics)?;
    let start = (started, start_statistics);
    conclude_run(group, (config, &setup, &mut trainer), start, observer, |report| report.ranks = ranks)
}

/// Returns what each rank has measured, in rank order. All ranks call this function.
fn gather_rank_results(
    group: &mut Group,
    trainer: &Trainer<'_>,
    start: &Statistics,
) -> Result<Vec<RankResults>, TrainError> {
    let statistics = group.statistics();
    let own = RankResults {
        host: group.host(group.rank()),
        step_times: trainer.step_times,
        bytes_sent: statistics.bytes_sent - start.bytes_sent,
        bytes_received: statistics.bytes_received - start.bytes_received,
        links: group.link_bytes(),
    };
    Ok(group.all_gather_object(&own)?)
}

/// Evaluates the model, and writes the report and the model file. `started` and `start_statistics` are the time and the
/// group's statistics at the start of the run. `add_strategy_results` sets the fields of the report that only some
/// strategies have.
pub(super) fn conclude_run(
    group: &mut Group,
    (config, setup, trainer): (&Config, &Setup, &mut Trainer<'_>),
    (started, start_statistics): (Instant, Statistics),
    observer: &mut dyn Observer,
    add_strategy_results: impl FnOnce(&mut Report),
) -> Result<Summary, TrainError> {
    let train_metrics = trainer.evaluate(group, &setup.dataset.train, None)?;
    let (test_metrics, test_evaluation) = trainer.evaluate_test_set(group)?;
    if let Some(metrics) = train_metrics {
        check_loss_against_constant_prediction(setup, trainer, metrics, observer)?;
    }
    let checkpoint_result = match trainer.finish_saving(group, observer) {
        Err(error @ TrainError::Group(_)) => return Err(error),
        // The report and the model file are written even if the last checkpoint could not be written.
        result => result,
    };
    observer.notice(&end_message(config, setup, trainer, checkpoint_result.is_ok()));
    let parameters = trainer.take_parameters(group)?;
    let mut hash = parameters_hash(&parameters);
    if config.strategy.divides_model() {
        // Only rank 0 has all parameters.
        hash = group.broadcast_object(&hash, Rank::ZERO)?;
    }
    let (metrics, start) = ((train_metrics, test_metrics), (started, start_statistics));
    let mut report = create_report(group, (config, setup), (trainer, hash), metrics, start);
    report.test_metrics = test_evaluation;
    if config.compresses() {
        let reach = CompressionReach::new(group, config.compression_rules.codecs(config.compression));
        let statistics = (&start_statistics, &group.statistics());
        report.compressed = Some(CompressionReport::new(statistics, trainer.codec_choices(), reach));
    }
    add_strategy_results(&mut report);
    let written = if group.rank() == Rank::ZERO { write_results(config, setup, &report) } else { Ok(()) };
    let report_result = check_all_succeeded(group, RunPhase::Storage, written.map_err(TrainError::from));
    let mut model_result = Ok(());
    if let (Some(path), Ok(()) | Err(TrainError::Checkpoint(_) | TrainError::OtherRankFailed { .. })) =
        (&config.model_file, &report_result)
    {
        model_result = save_model(group, (path, config), setup, &report, &parameters);
        if model_result.is_ok() {
            observer.notice(&format!("saved the model to {}", path.display()));
        }
    }
    first_error([checkpoint_result, report_result, model_result], observer)?;
    Ok(Summary { report, parameters })
}

/// Returns the first error, and shows further errors to the user as warnings.
fn first_error(results: [Result<(), TrainError>; 3], observer: &mut dyn Observer) -> Result<(), TrainError> {
    let mut errors = results.into_iter().filter_map(Result::err);
    let Some(first) = errors.next() else { return Ok(()) };
    errors.for_each(|error| observer.warning(&error.to_string()));
    Err(first)
}

/// At the start of a run, rank 0 checks that the disk has this number of bytes for the report, and the same number for
/// the picture of the curves.
const RESULT_FILE_BYTES_ASSUMED: u64 = 1 << 16;
/// A run fails if its training loss exceeds ten times the loss of the best constant prediction.
const DIVERGED_LOSS_RATIO: f64 = 10.0;

/// Compares the training loss with `constant`, the loss of the best constant prediction. Warns the user if the
/// training loss is larger. Returns an error if the training loss is more than [`DIVERGED_LOSS_RATIO`] times
/// `constant`.
fn check_loss_against_constant_prediction(
    setup: &Setup,
    trainer: &Trainer<'_>,
    train_metrics: Metrics,
    observer: &mut dyn Observer,
) -> Result<(), TrainError> {
    let constant = setup.constant_prediction_loss();
    if constant == 0.0 || train_metrics.loss <= constant {
        return Ok(());
    }
    let has_diverged = train_metrics.loss > DIVERGED_LOSS_RATIO * constant;
    let message = format!(
        "the training loss is {:.4} after {}, but a model that always predicts {} has a loss of only {constant:.4}; {}{}",
        train_metrics.loss,
        counted(trainer.state.position.steps_total, "step"),
        setup.dataset.task().describe_constant_prediction(),
        // A run that has diverged does not improve with more epochs.
        if has_diverged { "" } else { "raise --epochs, or " },
        trainer.advise_after_divergence(),
    );
    if has_diverged {
        return Err(TrainError::Diverged(message));
    }
    observer.warning(&message);
    Ok(())
}

/// Returns the report of a run. `started` and `start_statistics` are the time and the group's statistics at the start
/// of the run.
fn create_report(
    group: &Group,
    (config, setup): (&Config, &Setup),
    (trainer, parameters_hash): (&Trainer<'_>, String),
    (train_metrics, test_metrics): (Option<Metrics>, Option<Metrics>),
    (started, start_statistics): (Instant, Statistics),
) -> Report {
    let statistics = group.statistics();
    let communication = statistics.communication.saturating_sub(start_statistics.communication);
    // `exposed` also includes the time to begin and to end operations, so `exposed` can exceed `communication`.
    let exposed = statistics.exposed.saturating_sub(start_statistics.exposed).min(communication);
    let metric = |metrics: Option<Metrics>, get: fn(Metrics) -> Option<f64>| metrics.and_then(get);
    let state = &trainer.state;
    let best = state.best.as_ref().map(|best| best.record).filter(|record| record.selected);
    Report {
        world_size: group.size().get(),
        model: setup.model.to_string(),
        dataset: setup.dataset.name.clone(),
        train_samples: setup.dataset.train.len(),
        test_samples: setup.dataset.test.len(),
        validation_samples: setup.validation.as_ref().map_or(0, SharedSamples::len),
        parameters: setup.network.parameter_count(),
        optimizer: setup.settings.rule.name().into(),
        optimizer_state_bytes: trainer.optimizer_state_bytes(),
        lr: f64_with_same_digits(trainer.learning_rate()),
        weight_decay: f64_with_same_digits(config.weight_decay),
        batch_size: setup.settings.batch_size,
        micro_batches: config.micro_batches_per_step().get(),
        seed: config.seed,
        strategy: config.strategy.to_string(),
        compression: config.compression.to_string(),
        bucket_bytes: trainer.bucket_bytes(),
        bucket_trial: trainer.bucket_report(),
        epochs: state.position.epoch,
        steps: state.position.steps_total,
        stopped: trainer.stopped,
        train_loss: train_metrics.map_or_else(|| trainer.running_loss(), |metrics| metrics.loss),
        test_loss: test_metrics.map(|metrics| metrics.loss),
        best_epoch: best.map(|record| record.epoch),
        validation_loss: trainer.final_validation_loss(),
        test_accuracy: metric(test_metrics, |metrics| metrics.accuracy),
        train_accuracy: metric(train_metrics, |metrics| metrics.accuracy),
        test_r2: metric(test_metrics, |metrics| metrics.r2),
        train_r2: metric(train_metrics, |metrics| metrics.r2),
        test_metrics: None,
        test_perplexity: metric(test_metrics, |metrics| metrics.perplexity),
        train_perplexity: metric(train_metrics, |metrics| metrics.perplexity),
        samples_per_second: trainer.step_samples as f64 / trainer.step_seconds.max(1e-9),
        seconds: started.elapsed().as_secs_f64(),
        communication_seconds: communication.as_secs_f64(),
        exposed_communication_seconds: exposed.as_secs_f64(),
        step_times: Some(trainer.step_times),
        bytes_sent: statistics.bytes_sent - start_statistics.bytes_sent,
        compressed: None,
        parameters_hash,
        history: state.history.clone(),
        ranks: Vec::new(),
        parameter_server: None,
        gossip: None,
    }
}

/// Returns an error if a rank has other options than rank 0.
fn check_same_arguments(group: &mut Group, config: &Config) -> Result<(), TrainError> {
    let options = config.options_equal_on_all_ranks();
    let digests: Vec<u64> = options.iter().map(|(_, value)| short_digest(value.as_bytes())).collect();
    let Some((rank, different)) = find_first_differing_rank(group, &digests)? else { return Ok(()) };
    let names: Vec<&str> = different.iter().map(|&index| options[index].0).collect();
    Err(TrainError::ArgumentsDiffer { rank, options: names.join(", ") })
}

/// Checks that the class weights, which may come from a file, are the same on all ranks.
fn check_same_class_weights(group: &mut Group, setup: &Setup) -> Result<(), TrainError> {
    let loss = format!("{:?}", setup.network.loss());
    check_same_data(group, &[short_digest(loss.as_bytes())], |_| "the file of --class-weights".into())
}

/// Returns the state from which the run starts: the checkpoint that rank 0 read, or initial parameters. All ranks
/// return the same state, except that each vector has values only for the part that this rank holds.
fn starting_state(
    group: &mut Group,
    config: &Config,
    (setup, partition): (&Setup, &ModelPartition),
    observer: &mut dyn Observer,
) -> Result<TrainingState, TrainError> {
    let found = if group.rank() == Rank::ZERO {
        let is_encoded = CompressionReach::new(group, config.compression_rules.codecs(config.compression))
            == CompressionReach::Full;
        let replicas = partition.place().replicas.as_usize();
        check_files_and_load_state(config, setup, (is_encoded, replicas))
    } else {
        Ok(None)
    };
    let found = check_all_succeeded(group, RunPhase::Storage, found)?;
    let resuming =
        config.checkpoint.as_ref().is_some_and(|target| target.existing == ExistingCheckpoint::Resume);
    match &found {
        Some(TrainingState { position, .. }) => {
            observer.notice(&format!(
                "resuming from the checkpoint at step {} (epoch {}, step {} of this epoch)",
                position.steps_total,
                position.epoch + 1,
                position.step,
            ));
            if let Some(line) = nothing_to_train_message(config, setup, *position) {
                observer.notice(&line);
            }
        }
        None if resuming => observer.notice("there is no checkpoint yet: starting from the beginning"),
        None => {}
    }
    // Count the ranks that compute gradients of different samples. Servers compute no gradients, and the ranks of a
    // pipeline compute the gradient of the same samples together.
    let servers = if config.strategy.uses_parameter_server() { config.server_count().get() } else { 0 };
    let ranks = partition.place().replicas.get().saturating_sub(servers).max(1);
    let rate_factor = if config.recipe.scale_learning_rate { ranks as f32 } else { 1.0 };
    let given = config.learning_rate.map(|rate| rate * rate_factor);
    if let (Some(TrainingState { learning_rate: Some(saved), .. }), Some(given)) = (&found, given)
        && *saved != given
    {
        observer.notice(&format!("--lr changes from {saved} to {given}"));
    }
    let count = partition.own_parameter_count();
    let state_count = partition.optimizer_partition().own_parameter_count();
    let resumes = found.is_some();
    let mut state = found.unwrap_or_else(|| TrainingState {
        parameters: partition.initial_parameters(&setup.network, config.seed),
        optimizer: vec![vec![0.0; state_count]; setup.optimizer_state_names().len()],
        strategy: vec![vec![0.0; count]; config.strategy.state_names().len()],
        ..TrainingState::default()
    });
    broadcast_state(group, (partition, resumes), &mut state)?;
    // With --patience, the last checkpoint of a completed run has the best parameters in `parameters`. Training
    // continues with the parameters of the last step.
    if let Some(best) = &mut state.best
        && best.record.selected
    {
        best.swap_parameters(&mut state.parameters);
    }
    state.learning_rate = Some(match (given.or(state.learning_rate), setup.settings.rule) {
        (Some(rate), _) => rate,
        (None, Rule::Accelerated) if setup.model.is_convex() => {
            curvature::safe_learning_rate(group, setup, config)?
        }
        (None, rule) => {
            let TrainingSettings { batch_size, epochs, .. } = setup.settings;
            let steps = epochs.saturating_mul(setup.dataset.train.len().div_ceil(batch_size) as u64);
            default_learning_rate(rule, &setup.model, steps) * rate_factor
        }
    });
    Ok(state)
}

/// Checks that the report, the curves, the model file and checkpoints can be written, so that a run does not fail at
/// the end of its first epoch. Returns the state of the checkpoint from which the run resumes, if any. `compressing_ranks` is the
/// number of ranks of which the run saves memory of compressed sums, and says whether they encode anything.
fn check_files_and_load_state(
    config: &Config,
    setup: &Setup,
    (is_encoded, compressing_ranks): (bool, usize),
) -> Result<Option<TrainingState>, TrainError> {
    config.check_paths().map_err(TrainError::Options)?;
    let result_files = [
        (&config.report, WRITE_REPORT_ACTION),
        (&config.curves.plot, WRITE_PLOT_ACTION),
        (&config.curves.html, WRITE_HTML_ACTION),
    ];
    for (path, what) in result_files {
        if let Some(path) = path {
            atomic_file::check_disk_space(path, RESULT_FILE_BYTES_ASSUMED)
                .map_err(|error| CheckpointError::io(what, path, error))?;
        }
    }
    if let Some(TensorBoard { directory, .. }) = &config.curves.tensorboard {
        tensorboard::check_event_directory(directory).map_err(|error| {
            CheckpointError::io("write to the directory of --tensorboard", directory, error)
        })?;
    }
    if let Some(path) = &config.model_file {
        model_file::check_model_can_be_saved(path, config, setup)?;
    }
    let Some(target) = &config.checkpoint else { return Ok(None) };
    let mut identity = setup.identity(config);
    let ranks = (config.strategy, if is_encoded { compressing_ranks } else { 0 });
    let velocities = if setup.compression_schedule.has_velocities() { compressing_ranks } else { 0 };
    identity.compression_vectors =
        config.compression_rules.saved_vectors(config.compression, ranks) + velocities;
    let found = match target.existing {
        ExistingCheckpoint::Resume => {
            checkpoint::load_checkpoint(&target.directory, &setup.network, &identity)?
        }
        ExistingCheckpoint::Refuse => None,
    };
    match (target.existing, CheckpointFiles::new(target).find_any_checkpoint()?) {
        (ExistingCheckpoint::Refuse, Some(path)) => return Err(CheckpointError::Exists { path }.into()),
        (ExistingCheckpoint::Resume, Some(path)) if found.is_none() => {
            return Err(CheckpointError::NoLatest { path }.into());
        }
        _ => {}
    }
    checkpoint::check_disk_space(target, &setup.network, &identity)?;
    // A run that trains nothing does not replace the options of the run that trained the model.
    let is_complete = found.as_ref().is_some_and(|state| state.position.epoch >= setup.settings.epochs);
    if let Some(options) = target.options.as_ref().filter(|_| !is_complete) {
        checkpoint::write_options(&target.directory, options, config, setup)?;
    }
    Ok(found)
}

/// Writes the model file on rank 0. All ranks return the same result.
fn save_model(
    group: &mut Group,
    (path, config): (&Path, &Config),
    setup: &Setup,
    report: &Report,
    parameters: &[f32],
) -> Result<(), TrainError> {
    let mut saved = Ok(());
    if group.rank() == Rank::ZERO {
        saved = model_file::make_saved_model(path, config, setup, report, parameters)
            .and_then(|model| model_file::save_model(path, &model));
    }
    check_all_succeeded(group, RunPhase::Storage, saved.map_err(TrainError::from))
}

/// Names of actions that can fail, for the messages of [`CheckpointError`].
const WRITE_REPORT_ACTION: &str = "write the report";
const WRITE_PLOT_ACTION: &str = "write the picture of --plot";
const WRITE_HTML_ACTION: &str = "write the page of --html";

/// Writes the report, the picture of the curves and the page. Writes the other files even if one of them cannot be written.
fn write_results(config: &Config, setup: &Setup, report: &Report) -> Result<(), CheckpointError> {
    let write = |what, path: &Path, text: String| {
        atomic_file::replace_file(path, text.as_bytes())
            .map_err(|error| CheckpointError::io(what, path, error))
    };
    let report_written = config.report.as_ref().map_or(Ok(()), |path| {
        let text = serde_json::to_string_pretty(report).expect("strings and numbers are valid JSON");
        write(WRITE_REPORT_ACTION, path, text + "\n")
    });
    let loss = setup.network.loss();
    let CurveFiles { plot, html, .. } = &config.curves;
    let plot_written =
        plot.as_ref().map_or(Ok(()), |path| write(WRITE_PLOT_ACTION, path, draw_curves(report, loss)));
    let html_written =
        html.as_ref().map_or(Ok(()), |path| write(WRITE_HTML_ACTION, path, make_page(report, loss)));
    report_written.and(plot_written).and(html_written)
}
