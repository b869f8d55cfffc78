//! The messages between neighbouring stages of a pipeline: activations go to the next stage, and derivatives go to
//! the previous stage.

use std::collections::VecDeque;

use ndarray::{ArrayView2, ArrayViewMut2};

use crate::group::Error;
use crate::train::runtime::{PendingReceive, PendingSend, Runtime};
use crate::types::Rank;

/// The number of messages that a stage is ready to receive at any time: one message arrives while the stage uses
/// another.
const PENDING_RECEIVES_MAX: usize = 2;

/// The buffers of messages that were sent or received. Later messages reuse these buffers.
#[derive(Default)]
pub(super) struct FreeStageBuffers(Vec<Vec<f32>>);

impl FreeStageBuffers {
    /// Returns a buffer of `len` elements with unspecified values.
    fn take_buffer(&mut self, len: usize) -> Vec<f32> {
        let mut buffer = self.0.pop().unwrap_or_default();
        buffer.resize(len, 0.0);
        buffer
    }
}

/// The messages that a stage receives from a neighbour in one step, in their order.
pub(super) struct StageInbox {
    /// The neighbour that sends the messages.
    from: Rank,
    tag: u32,
    /// The lengths of the messages that the stage is not yet ready to receive.
    lens: VecDeque<usize>,
    /// The messages that the stage is ready to receive.
    pending: VecDeque<PendingReceive>,
}

impl StageInbox {
    /// Prepares to receive messages of these lengths.
    pub(super) fn new(from: Rank, tag: u32, lens: impl Iterator<Item = usize>) -> Self {
        Self { from, tag, lens: lens.collect(), pending: VecDeque::new() }
    }

    /// Waits for the next message and copies it to `target`, which must be as long as the message.
    pub(super) fn receive(
        &mut self,
        runtime: &mut dyn Runtime,
        buffers: &mut FreeStageBuffers,
        mut target: ArrayViewMut2<'_, f32>,
    ) -> Result<(), Error> {
        while self.pending.len() < PENDING_RECEIVES_MAX
            && let Some(len) = self.lens.pop_front()
        {
            self.pending.push_back(runtime.start_receive(buffers.take_buffer(len), self.from, self.tag)?);
        }
        let next = self.pending.pop_front().expect("the stage expects one message for each of its calls");
        let values = next.wait()?;
        target.iter_mut().zip(&values).for_each(|(to, &from)| *to = from);
        buffers.0.push(values);
        Ok(())
    }
}

/// The messages that a stage has sent in one step.
#[derive(Default)]
pub(super) struct StageOutbox(Vec<PendingSend>);

impl StageOutbox {
    /// Starts to send `values`.
    pub(super) fn send(
        &mut self,
        runtime: &mut dyn Runtime,
        buffers: &mut FreeStageBuffers,
        values: &ArrayView2<'_, f32>,
        (to, tag): (Rank, u32),
    ) -> Result<(), Error> {
        let mut buffer = buffers.take_buffer(values.len());
        buffer.iter_mut().zip(values).for_each(|(to, &from)| *to = from);
        self.0.push(runtime.start_send(buffer, to, tag)?);
        Ok(())
    }

    /// Waits until all messages have left this rank, and adds their buffers to `buffers`.
    pub(super) fn wait_until_sent(self, buffers: &mut FreeStageBuffers) -> Result<(), Error> {
        for send in self.0 {
            buffers.0.push(send.wait()?);
        }
        Ok(())
    }
}
