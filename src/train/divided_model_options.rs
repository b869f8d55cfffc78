//! Checks the options of the strategies that divide the model over ranks.

use super::config::Config;
use super::optimizer::Rule;
use super::strategies::StrategySpec;

/// Returns the names (without `--`) of options that [`Config::check`] refuses with this strategy. A resumed run drops
/// these options from the options of its checkpoint, which a run with another strategy may have saved.
pub(crate) fn options_refused_by(strategy: StrategySpec) -> &'static [&'static str] {
    match strategy {
        StrategySpec::Pipeline { .. } => &[
            "accumulate",
            "compression",
            "compression-tensor",
            "compression-exclude",
            "compression-warmup",
            "scale-lr",
            "shard-optimizer",
        ],
        StrategySpec::Hybrid { .. } => &["accumulate", "shard-optimizer"],
        StrategySpec::Tensor => &[
            "micro-batches",
            "compression",
            "compression-tensor",
            "compression-exclude",
            "compression-warmup",
            "scale-lr",
            "shard-optimizer",
        ],
        StrategySpec::AllReduce => &["micro-batches"],
        _ => &["micro-batches", "shard-optimizer"],
    }
}

/// Checks that the options fit a strategy that divides the model. Refuses `--micro-batches` with every other
/// strategy.
///
/// # Errors
///
/// Returns a sentence that says which options do not fit together and what to do.
pub(super) fn check_divided_model_options(config: &Config) -> Result<(), String> {
    let strategy = config.strategy;
    if strategy.pipeline_shape().is_none() && config.pipeline_micro_batches.is_some() {
        return Err(format!(
            "--micro-batches is for --strategy pipeline and hybrid, but the strategy is {strategy}; with other strategies, pass \
             --accumulate to divide the batch"
        ));
    }
    if !strategy.divides_model() {
        return Ok(());
    }
    if config.rule == Some(Rule::Accelerated) {
        return Err(format!(
            "--optimizer accelerated needs the whole gradient on each rank, but with --strategy {strategy} a rank has only the \
             gradient of its part of the model; pass --optimizer adam, momentum or sgd"
        ));
    }
    if let (StrategySpec::Tensor, Some(rule)) =
        (strategy, config.rule.filter(|rule| rule.needs_whole_tensors()))
    {
        return Err(format!(
            "--optimizer {} needs the norm of each tensor of the model, but with --strategy tensor a rank has only a part of each \
             tensor; pass --optimizer adamw, or --strategy pipeline",
            rule.name()
        ));
    }
    if config.micro_batches.get() > 1 && strategy != StrategySpec::Tensor {
        return Err(format!(
            "--accumulate does not apply to --strategy {strategy}, which always divides the batch; pass --micro-batches {} instead",
            config.micro_batches
        ));
    }
    let sums_gradients = matches!(strategy, StrategySpec::Hybrid { .. });
    if config.compresses() && !sums_gradients {
        return Err(format!(
            "--compression {} is for gradients, but with --strategy {strategy} the ranks send no gradients of parameters; leave out \
             --compression",
            config.compression
        ));
    }
    if config.recipe.scale_learning_rate && !sums_gradients {
        return Err(format!(
            "--scale-lr multiplies the learning rate by the number of ranks that share a batch, but with --strategy {strategy} each \
             rank processes the whole batch; leave out --scale-lr"
        ));
    }
    Ok(())
}
