//! A worker: computes the gradients of batches, pushes the gradients and pulls the parameters.

use std::time::Instant;

use super::work_messages::{WorkReply, WorkRequest};
use super::{RunContext, WorkerPlace};
use crate::train::TrainError;
use crate::train::assigned_batches::AssignedBatches;
use crate::train::batch_queue::Assignment;
use crate::train::batches::range_of_rank;
use crate::train::clipping;
use crate::train::gradient_work::{GradientWork, micro_batch_rows};
use crate::train::model::{OneRank, StepSeed};
use crate::train::parameter_server::{ServerClient, StrategyNote};
use crate::train::step_times::PartTimer;
use crate::types::{Rank, WorldSize};

/// The amount of work that a worker has done.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(super) struct WorkerTotals {
    /// The number of samples whose gradients this worker has computed.
    pub(super) samples: u64,
    /// The duration in seconds of all steps of this worker.
    pub(super) seconds: f64,
}

/// Computes gradients until the first server replies that the run has ended. `parameters` are the initial parameters.
pub(super) fn run_worker(
    context: &RunContext<'_>,
    place: &WorkerPlace,
    client: &mut ServerClient,
    parameters: &mut [f32],
) -> Result<WorkerTotals, TrainError> {
    let (setup, micro_batches) = (context.setup, context.config.micro_batches);
    let (train, batch_size) = (&setup.dataset.train, setup.settings.batch_size);
    let batches_per_epoch = train.len().div_ceil(batch_size) as u64;
    let mut workspace =
        setup.network.allocate_workspace(micro_batch_rows(batch_size.min(train.len()), micro_batches));
    let mut own_gradient = Vec::new();
    let mut batches = AssignedBatches::new(context.config.seed, setup);
    let mut totals = WorkerTotals::default();
    client.pull(parameters)?;
    let mut reply = client.exchange_note(WorkRequest::default().encode())?;
    let (started, mut timer) = (Instant::now(), PartTimer::start());
    while let Some(number) = wait_for_batch(context, client, reply, (parameters, &mut timer))? {
        let data_start = Instant::now();
        let batch = batches.batch(number / batches_per_epoch, number % batches_per_epoch);
        let indices = if context.is_synchronous { own_part_of_batch(batch, place) } else { batch };
        let (samples, positions) = train.held.load_batch(indices)?;
        let mut data_time = data_start.elapsed();
        let mut memory = client.gradient_memory();
        let gradient: &mut [f32] = if let Some(memory) = &mut memory {
            bytemuck::cast_slice_mut(memory.words())
        } else {
            own_gradient.resize(parameters.len(), 0.0);
            &mut own_gradient
        };
        let work = GradientWork {
            network: &setup.network,
            parameters,
            first_moment: &[],
            gradients: gradient,
            workspace: &mut workspace,
            samples: &samples,
            standardizer: setup.standardizer.as_ref(),
            indices: &positions,
            batch_len: batch.len(),
            micro_batches,
            step: StepSeed { seed: context.config.seed, step: number },
            data_time: &mut data_time,
        };
        // A synchronous server sums the gradients of all workers, so each worker divides by the size of the whole
        // batch.
        let sums =
            work.differentiate(1.0 / batch.len() as f32, &OneRank, (usize::MAX, |_, _: &mut [f32]| {}))?;
        let has_diverged = !sums.loss.is_finite();
        if let (Some(norm_max), false) =
            (context.config.recipe.clip_norm, context.is_synchronous || has_diverged)
        {
            clipping::clip_to_norm(gradient, norm_max);
        }
        timer.end_computation(data_time);
        let is_in_memory = memory.is_some();
        drop(memory);
        let request = WorkRequest {
            is_stopping: context.is_stopping(),
            has_diverged,
            awaits_end: false,
            loss: sums.loss,
            samples: indices.len() as u64,
            batch: number,
            times: timer.take_times(),
        };
        if has_diverged {
            reply = client.exchange_note(request.encode())?;
        } else {
            let gradient = (!is_in_memory).then_some(&own_gradient[..]);
            reply = client.push(gradient, request.encode(), Some(parameters))?.note;
            totals.samples += indices.len() as u64;
        }
        timer.end_wait();
    }
    totals.seconds = started.elapsed().as_secs_f64();
    Ok(totals)
}

/// Returns the number of the batch that the first server has assigned to this worker with the note `reply`, or later if no
/// batch was free. Returns `None` if the run has ended.
fn wait_for_batch(
    context: &RunContext<'_>,
    client: &mut ServerClient,
    mut reply: StrategyNote,
    (parameters, timer): (&mut [f32], &mut PartTimer),
) -> Result<Option<u64>, TrainError> {
    loop {
        match WorkReply::decode(&reply) {
            WorkReply::Work(Assignment::Batch(number)) => return Ok(Some(number)),
            WorkReply::Work(Assignment::Finished) | WorkReply::Published(_) => return Ok(None),
            WorkReply::Work(Assignment::Wait) => {}
        }
        let request = WorkRequest { is_stopping: context.is_stopping(), ..WorkRequest::default() };
        reply = client.exchange_note(request.encode())?;
        // The servers may have updated the parameters during the wait.
        client.pull(parameters)?;
        timer.end_wait();
    }
}

/// Returns this worker's part of a batch.
fn own_part_of_batch<'a>(batch: &'a [u32], place: &WorkerPlace) -> &'a [u32] {
    let workers = WorldSize::new(place.workers).unwrap_or(WorldSize::ONE);
    &batch[range_of_rank(batch.len(), Rank::new(place.index), workers)]
}
