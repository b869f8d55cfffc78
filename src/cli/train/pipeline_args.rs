//! The options of strategies with pipelines.

use std::num::NonZeroU32;

use clap::Args;

#[derive(Args, Clone, Debug)]
pub(super) struct PipelineArgs {
    /// With pipeline and hybrid, the number of micro-batches into which a pipeline divides its part of a batch. With
    /// more micro-batches, ranks wait less for other stages, but send more messages [default: 4 for each stage]
    #[arg(long, value_name = "COUNT", help_heading = "Training")]
    micro_batches: Option<NonZeroU32>,
}

impl PipelineArgs {
    /// Returns the value of `--micro-batches`, or `None` without this option.
    pub(super) fn micro_batches(&self) -> Option<NonZeroU32> {
        self.micro_batches
    }
}
