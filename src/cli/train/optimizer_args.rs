//! The options of `ringtrain` that choose the optimizer.

use std::fmt::Display;

use clap::Args;

use crate::train::optimizer::{AdamOptions, Rule};

/// The optimizer and its constants.
#[derive(Args, Debug)]
pub(super) struct OptimizerArgs {
    /// The optimizer: auto, sgd, momentum, nesterov, accelerated, adam, adamw, lamb or lars. auto: see Defaults below.
    /// nesterov: torch.optim.SGD with nesterov=True. accelerated: Nesterov's method with restarts, for the whole
    /// training set as one batch. lamb, lars: for large batches
    #[arg(long, value_name = "NAME", default_value = "auto", help_heading = "Training")]
    optimizer: String,

    /// The learning rate [default: see Defaults below]
    #[arg(long, value_name = "RATE", allow_negative_numbers = true, help_heading = "Training")]
    lr: Option<f32>,

    /// The momentum factor of --optimizer momentum, nesterov and lars, as in torch.optim.SGD [default: 0.9]
    #[arg(long, value_name = "FACTOR", allow_negative_numbers = true, help_heading = "Training")]
    momentum: Option<f32>,

    /// The betas of --optimizer adam, adamw and lamb, as in torch.optim [default: 0.9,0.999]
    #[arg(long, value_name = "B1,B2", allow_hyphen_values = true, help_heading = "Training")]
    betas: Option<String>,

    /// The epsilon of --optimizer adam, adamw and lamb, as in torch.optim [default: 1e-8]
    #[arg(long, value_name = "NUMBER", allow_negative_numbers = true, help_heading = "Training")]
    epsilon: Option<f64>,

    /// The weight decay, as in torch.optim. In each step, adamw subtracts lr * RATE * p from each parameter p. lamb
    /// adds RATE * p to the update of p. Other optimizers add RATE * p to the gradient of p (L2 regularisation)
    /// [default: 0.01 for adamw and lamb, 0.0005 for lars, otherwise 0]
    #[arg(long, value_name = "RATE", allow_negative_numbers = true, help_heading = "Training")]
    weight_decay: Option<f32>,

    /// Divide the state of the optimizer over the ranks, so that each rank needs memory for only a part of the state
    /// (`ZeRO` stage 1). Each rank updates its part of the parameters, and then all ranks gather all parameters. Only
    /// for --strategy allreduce
    #[arg(long, conflicts_with = "no_shard_optimizer", help_heading = "Training")]
    shard_optimizer: bool,

    /// Keep the whole state of the optimizer on each rank. Pass this option with --resume to turn off the
    /// --shard-optimizer that the checkpoint stores
    #[arg(long, help_heading = "Training")]
    no_shard_optimizer: bool,
}

/// The checked values of [`OptimizerArgs`].
pub(super) struct OptimizerChoice {
    /// The update rule; `None` for `--optimizer auto`.
    pub(super) rule: Option<Rule>,
    pub(super) learning_rate: Option<f32>,
    pub(super) weight_decay: f32,
    pub(super) shard_optimizer: bool,
}

/// Returns an error if `value` is not finite, or if `is_allowed` is false. `range` describes the allowed values in
/// words.
pub(super) fn check_number<T: Display + Into<f64> + Copy>(
    flag: &str,
    value: T,
    is_allowed: bool,
    range: &str,
) -> Result<(), String> {
    if value.into().is_finite() && is_allowed {
        Ok(())
    } else {
        Err(format!("{flag} {value}: it must be {range}"))
    }
}

impl OptimizerArgs {
    /// Checks the options.
    ///
    /// # Errors
    ///
    /// Returns a sentence that says which option is wrong and what to do.
    pub(super) fn to_optimizer_choice(&self) -> Result<OptimizerChoice, String> {
        if let Some(rate) = self.lr {
            check_number("--lr", rate, rate > 0.0, "a number above 0")?;
        }
        if let Some(decay) = self.weight_decay {
            check_number("--weight-decay", decay, decay >= 0.0, "a number of at least 0")?;
        }
        let rule = self.parse_rule()?;
        self.check_rule_has_given_options(rule)?;
        let weight_decay = self.weight_decay.or(rule.map(Rule::default_weight_decay)).unwrap_or_default();
        let (learning_rate, shard_optimizer) = (self.lr, self.shard_optimizer);
        Ok(OptimizerChoice { rule, learning_rate, weight_decay, shard_optimizer })
    }

    /// Returns the update rule with its constants, or `None` for `--optimizer auto`.
    fn parse_rule(&self) -> Result<Option<Rule>, String> {
        let momentum = self.momentum.unwrap_or(0.9);
        check_number("--momentum", momentum, (0.0..1.0).contains(&momentum), "at least 0 and below 1")?;
        let options = self.parse_adam_options()?;
        Ok(Some(match self.optimizer.as_str() {
            "auto" => return Ok(None),
            "sgd" => Rule::Sgd,
            "momentum" => Rule::Momentum { momentum },
            "nesterov" => Rule::Nesterov { momentum },
            "accelerated" => Rule::Accelerated,
            "adam" => Rule::Adam(options),
            "adamw" => Rule::AdamW(options),
            "lamb" => Rule::Lamb(options),
            "lars" => Rule::Lars { momentum },
            other => {
                return Err(format!(
                    "--optimizer {other}: it must be one of auto, sgd, momentum, nesterov, accelerated, adam, adamw, lamb, lars"
                ));
            }
        }))
    }

    fn parse_adam_options(&self) -> Result<AdamOptions, String> {
        let mut options = AdamOptions::DEFAULT;
        if let Some(text) = &self.betas {
            let fail = |why: String| format!("--betas {text}: {why}");
            let (first, second) =
                text.split_once(',').ok_or_else(|| fail("pass two numbers, as in 0.9,0.999".into()))?;
            let parse = |text: &str| match text.trim().parse::<f64>() {
                Ok(beta) if (0.0..1.0).contains(&beta) => Ok(beta),
                Ok(beta) => Err(fail(format!("{beta} must be at least 0 and below 1"))),
                Err(_) => Err(fail(format!("`{text}` is not a number"))),
            };
            (options.beta_1, options.beta_2) = (parse(first)?, parse(second)?);
        }
        if let Some(epsilon) = self.epsilon {
            // If epsilon were 0 in f32, a parameter whose gradients are all 0 would become NaN.
            let is_allowed = epsilon >= f64::from(f32::MIN_POSITIVE) && epsilon <= 1.0;
            check_number("--epsilon", epsilon, is_allowed, "above 0 (at least 1.2e-38) and at most 1")?;
            options.epsilon = epsilon;
        }
        Ok(options)
    }

    /// Returns an error if `--momentum`, `--betas` or `--epsilon` does not apply to the chosen optimizer.
    fn check_rule_has_given_options(&self, rule: Option<Rule>) -> Result<(), String> {
        let has_momentum = rule.is_some_and(|rule| rule.momentum().is_some());
        let has_moments = rule.is_some_and(|rule| rule.adam_options().is_some());
        for (flag, is_given, applies, optimizers) in [
            ("--momentum", self.momentum.is_some(), has_momentum, "momentum, nesterov or lars"),
            ("--betas", self.betas.is_some(), has_moments, "adam, adamw or lamb"),
            ("--epsilon", self.epsilon.is_some(), has_moments, "adam, adamw or lamb"),
        ] {
            match rule {
                _ if !is_given || applies => {}
                None => return Err(format!("{flag} needs --optimizer {optimizers}")),
                Some(rule) => {
                    let name = rule.name();
                    return Err(format!(
                        "{flag} does not apply to --optimizer {name}; pass --optimizer {optimizers}"
                    ));
                }
            }
        }
        Ok(())
    }
}
