//! The strategies that `--strategy` can name.

use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;

/// A value of `--strategy`: how the ranks divide the work, and when they exchange gradients or parameters.
/// `docs/strategies.md` has the mathematics and the source of each strategy.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum StrategySpec {
    /// Synchronous data parallelism: in each step, the ranks sum their gradients. The parameters agree on all ranks
    /// after each step.
    #[default]
    AllReduce,
    /// Each rank trains alone. The ranks average their parameters after every `epochs` epochs, or only at the end of
    /// the run. The parameters agree on all ranks after each average.
    ModelAverage {
        /// The number of epochs between two averages. If `None`, the ranks average only at the end of the run.
        epochs: Option<NonZeroU32>,
    },
    /// Each rank takes `steps` steps alone, then the ranks average their parameters. The ranks also average at the
    /// end of each epoch. The parameters agree on all ranks after each average.
    LocalSgd {
        /// The number of steps between two averages.
        steps: NonZeroU32,
    },
    /// Each rank takes `steps` steps alone. Then the ranks average the changes of their parameters while they take
    /// `delay` more steps, and an outer optimizer with Nesterov momentum applies the average. The outer optimizer also
    /// takes a step at the end of each epoch. The parameters agree on all ranks at the end of each epoch.
    DiLoCo {
        /// The number of steps between two steps of the outer optimizer.
        steps: NonZeroU32,
        /// The number of steps that the ranks take while they average the changes. If 0, the ranks wait for the
        /// average. A number above `steps` has the same effect as `steps`.
        delay: u32,
    },
    /// A parameter server: the first ranks hold the parameters, and the other ranks compute gradients. In each step,
    /// a server applies the sum of the gradients of all workers. The parameters agree on all ranks at the end of the
    /// run.
    PsSync,
    /// A parameter server that applies each gradient as soon as it arrives, so no worker waits for another worker. The
    /// parameters agree on all ranks at the end of the run.
    PsAsync {
        /// The largest number of updates between the pull of the parameters and the push of the gradient. A server
        /// drops a gradient with a larger staleness. `None` selects 16 times the number of workers.
        staleness: Option<u64>,
    },
    /// Each layer of the model is divided over all ranks, and the ranks compute each batch together. Each rank holds
    /// only its part of the parameters of each layer.
    Tensor,
    /// The layers of the model are divided into stages, and each rank holds one stage. A batch passes through the
    /// stages in micro-batches. Each rank holds only the parameters of its stage.
    Pipeline {
        /// The number of stages, which is the number of ranks.
        stages: NonZeroU32,
    },
    /// Several pipelines side by side, each with its part of every batch. The ranks that hold the same stage sum
    /// their gradients, and their parameters agree after each step. There must be `pipelines` times `stages` ranks.
    Hybrid {
        /// The number of pipelines.
        pipelines: NonZeroU32,
        /// The number of stages of each pipeline.
        stages: NonZeroU32,
    },
    /// Each rank takes steps alone, and averages its parameters with a random rank after every `steps` steps. No rank
    /// waits for another rank, and a lost rank does not end the run. The parameters agree on all ranks at the end of
    /// the run.
    Gossip {
        /// The number of steps of a rank between two averages.
        steps: NonZeroU32,
    },
}

impl StrategySpec {
    /// Returns the names of the state vectors that the strategy keeps between epochs.
    pub(crate) fn state_names(self) -> &'static [&'static str] {
        match self {
            Self::DiLoCo { .. } => &["strategy.outer_velocity"],
            _ => &[],
        }
    }

    /// Returns whether each rank holds only a part of the model.
    pub(crate) fn divides_model(self) -> bool {
        self == Self::Tensor || self.pipeline_shape().is_some()
    }

    /// Returns the number of pipelines and the number of stages of each pipeline. Returns `None` for other strategies.
    pub(crate) fn pipeline_shape(self) -> Option<(u32, u32)> {
        match self {
            Self::Pipeline { stages } => Some((1, stages.get())),
            Self::Hybrid { pipelines, stages } => Some((pipelines.get(), stages.get())),
            _ => None,
        }
    }

    /// Returns the strategy that a checkpoint records. `tensor`, `pipeline` and `hybrid` take the same steps as
    /// `allreduce`, so a run can resume with any of these four strategies.
    pub(crate) fn strategy_in_checkpoint(self) -> Self {
        if self.divides_model() { Self::AllReduce } else { self }
    }

    /// Returns whether each rank processes its own part of every batch. If so, a rank holds only a part of the
    /// samples. If not, each rank holds all samples.
    pub(crate) fn divides_batches(self) -> bool {
        match self {
            Self::AllReduce | Self::ModelAverage { .. } | Self::LocalSgd { .. } | Self::DiLoCo { .. } => true,
            Self::Tensor
            | Self::Pipeline { .. }
            | Self::Hybrid { .. }
            | Self::Gossip { .. }
            | Self::PsSync
            | Self::PsAsync { .. } => false,
        }
    }

    /// Returns whether some ranks are parameter servers.
    pub(crate) fn uses_parameter_server(self) -> bool {
        matches!(self, Self::PsSync | Self::PsAsync { .. })
    }

    /// Returns whether there is a model to save before the end of the run.
    pub(crate) fn has_model_during_run(self) -> bool {
        self != Self::ModelAverage { epochs: None }
    }

    /// Returns the number of epochs between two records of a run of `run_epochs` epochs. This is `usual_epochs` if all ranks
    /// have the same parameters after that number of epochs. If not, `usual_epochs` is rounded up. For example, with
    /// `model-average:3`, 5 becomes 6, because the ranks average their parameters after every third epoch.
    pub(crate) fn epochs_between_records(self, usual_epochs: u64, run_epochs: u64) -> u64 {
        match self {
            Self::AllReduce
            | Self::LocalSgd { .. }
            | Self::DiLoCo { .. }
            | Self::PsSync
            | Self::PsAsync { .. }
            | Self::Tensor
            | Self::Pipeline { .. }
            | Self::Hybrid { .. }
            | Self::Gossip { .. } => usual_epochs,
            Self::ModelAverage { epochs: Some(between) } => {
                usual_epochs.checked_next_multiple_of(between.get().into()).unwrap_or(run_epochs)
            }
            Self::ModelAverage { epochs: None } => run_epochs,
        }
    }
}

/// The error message for a name that no strategy has.
const UNKNOWN_STRATEGY_MESSAGE: &str = "it is not one of allreduce, model-average, model-average:EPOCHS, local-sgd:STEPS, \
     diloco:STEPS, diloco:STEPS,DELAY, ps-sync, ps-async, ps-async:STALENESS, gossip, gossip:STEPS, tensor, pipeline:STAGES, \
     hybrid:PIPELINESxSTAGES";

impl FromStr for StrategySpec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, count) = match text.split_once(':') {
            Some((name, count)) => (name, Some(count)),
            None => (text, None),
        };
        let needed_steps =
            |example: &str| count.ok_or(format!("it needs a number of steps, such as {example}"));
        match name {
            "allreduce" if count.is_none() => Ok(Self::AllReduce),
            "ps-sync" if count.is_none() => Ok(Self::PsSync),
            "tensor" if count.is_none() => Ok(Self::Tensor),
            "allreduce" | "ps-sync" | "tensor" => Err(format!("{name} takes no number")),
            "ps-async" => {
                let parse = |text: &str| {
                    text.parse().map_err(|_| format!("`{text}` is not a number from 0 to {}", u64::MAX))
                };
                Ok(Self::PsAsync { staleness: count.map(parse).transpose()? })
            }
            "gossip" => Ok(Self::Gossip { steps: count.map_or(Ok(NonZeroU32::MIN), parse_count)? }),
            "model-average" => Ok(Self::ModelAverage { epochs: count.map(parse_count).transpose()? }),
            "local-sgd" => Ok(Self::LocalSgd { steps: parse_count(needed_steps("local-sgd:8")?)? }),
            "diloco" => parse_diloco(needed_steps("diloco:50")?),
            "pipeline" => {
                let stages = count.ok_or("it needs a number of stages, such as pipeline:4")?;
                Ok(Self::Pipeline { stages: parse_count(stages)? })
            }
            "hybrid" => {
                let shape = count.and_then(|shape| shape.split_once('x'));
                let (pipelines, stages) =
                    shape.ok_or("it needs the numbers of pipelines and stages, such as hybrid:2x3")?;
                Ok(Self::Hybrid { pipelines: parse_count(pipelines)?, stages: parse_count(stages)? })
            }
            _ => Err(UNKNOWN_STRATEGY_MESSAGE.into()),
        }
    }
}

/// Parses `STEPS` or `STEPS,DELAY`.
fn parse_diloco(text: &str) -> Result<StrategySpec, String> {
    let Some((steps, delay)) = text.split_once(',') else {
        let steps = parse_count(text)?;
        return Ok(StrategySpec::DiLoCo { steps, delay: default_delay(steps) });
    };
    let steps = parse_count(steps)?;
    let delay = delay.parse().ok().filter(|delay| *delay <= steps.get());
    let delay =
        delay.ok_or_else(|| format!("its DELAY is not a number from 0 to STEPS, which is {steps}"))?;
    Ok(StrategySpec::DiLoCo { steps, delay })
}

/// Returns the DELAY of `diloco:STEPS`. With a longer delay, models learned less in our measurements (ADR 53).
fn default_delay(steps: NonZeroU32) -> u32 {
    steps.get().div_ceil(2)
}

/// Parses a number of steps, epochs or stages.
fn parse_count(text: &str) -> Result<NonZeroU32, String> {
    text.parse().map_err(|_| format!("`{text}` is not a number from 1 to {}", u32::MAX))
}

impl fmt::Display for StrategySpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AllReduce => f.write_str("allreduce"),
            Self::ModelAverage { epochs: None } => f.write_str("model-average"),
            Self::ModelAverage { epochs: Some(epochs) } => write!(f, "model-average:{epochs}"),
            Self::LocalSgd { steps } => write!(f, "local-sgd:{steps}"),
            Self::DiLoCo { steps, delay } if *delay == default_delay(*steps) => write!(f, "diloco:{steps}"),
            Self::DiLoCo { steps, delay } => write!(f, "diloco:{steps},{delay}"),
            Self::PsSync => f.write_str("ps-sync"),
            Self::PsAsync { staleness: None } => f.write_str("ps-async"),
            Self::PsAsync { staleness: Some(max) } => write!(f, "ps-async:{max}"),
            Self::Tensor => f.write_str("tensor"),
            Self::Pipeline { stages } => write!(f, "pipeline:{stages}"),
            Self::Hybrid { pipelines, stages } => write!(f, "hybrid:{pipelines}x{stages}"),
            Self::Gossip { steps: NonZeroU32::MIN } => f.write_str("gossip"),
            Self::Gossip { steps } => write!(f, "gossip:{steps}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_parsed_and_printed() {
        for text in [
            "allreduce",
            "model-average",
            "model-average:3",
            "local-sgd:8",
            "diloco:50",
            "diloco:50,0",
            "diloco:50,50",
            "ps-sync",
            "ps-async",
            "ps-async:0",
            "tensor",
            "pipeline:3",
            "hybrid:2x3",
            "gossip",
            "gossip:4",
        ] {
            assert_eq!(text.parse::<StrategySpec>().unwrap().to_string(), text);
        }
        for (text, expected) in [
            ("", "one of allreduce"),
            ("ring", "one of allreduce"),
            ("allreduce:2", "takes no number"),
            ("ps-sync:2", "takes no number"),
            ("ps-async:-1", "`-1` is not a number from 0"),
            ("gossip:0", "`0` is not a number from 1"),
            ("local-sgd", "such as local-sgd:8"),
            ("diloco", "such as diloco:50"),
            ("diloco:0", "`0` is not a number from 1"),
            ("diloco:8,9", "DELAY is not a number from 0 to STEPS, which is 8"),
            ("diloco:8,", "DELAY is not a number"),
            ("diloco:8,-1", "DELAY is not a number"),
            ("local-sgd:0", "`0` is not a number from 1"),
            ("local-sgd:-1", "`-1` is not a number"),
            ("model-average:", "`` is not a number"),
            ("tensor:2", "tensor takes no number"),
            ("pipeline", "such as pipeline:4"),
            ("pipeline:0", "`0` is not a number from 1"),
            ("hybrid", "such as hybrid:2x3"),
            ("hybrid:4", "such as hybrid:2x3"),
            ("hybrid:2x0", "`0` is not a number from 1"),
            ("hybrid:x2", "`` is not a number from 1"),
            ("model-average:99999999999", "from 1 to 4294967295"),
        ] {
            let error = text.parse::<StrategySpec>().unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }

    #[test]
    fn each_record_follows_an_epoch_after_which_all_ranks_have_the_same_parameters() {
        for (text, usual, expected) in [
            ("allreduce", 3, 3),
            ("local-sgd:100", 3, 3),
            ("model-average", 3, 100),
            ("model-average:4", 3, 4),
            ("model-average:2", 3, 4),
        ] {
            let spec: StrategySpec = text.parse().unwrap();
            assert_eq!(spec.epochs_between_records(usual, 100), expected, "{text}");
        }
        let longest = StrategySpec::ModelAverage { epochs: Some(NonZeroU32::MAX) };
        assert_eq!(longest.epochs_between_records(u64::MAX, u64::MAX), u64::MAX);
    }
}
