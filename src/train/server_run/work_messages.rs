//! The notes that workers and the first server attach to the requests and replies of the parameter server. The notes
//! assign batches and announce the end of the run.

use crate::train::batch_queue::Assignment;
use crate::train::parameter_server::StrategyNote;
use crate::train::step_times::StepTimes;

/// The bits of the first number of an encoded [`WorkRequest`].
const IS_STOPPING_FLAG: u64 = 1;
const HAS_DIVERGED_FLAG: u64 = 2;
const AWAITS_RUN_END_FLAG: u64 = 4;

/// The note of a request.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(super) struct WorkRequest {
    /// Whether this rank has received a stop signal.
    pub(super) is_stopping: bool,
    /// Whether the loss of the batch is not finite.
    pub(super) has_diverged: bool,
    /// Whether the client has no more work, and waits for the end of the run.
    pub(super) awaits_end: bool,
    /// The sum of the losses of the samples that the worker has processed in the batch.
    pub(super) loss: f64,
    /// The number of these samples.
    pub(super) samples: u64,
    /// The number of the batch.
    pub(super) batch: u64,
    /// The times of this worker since its previous request with times. They include the wait for the reply to that request.
    pub(super) times: StepTimes,
}

impl WorkRequest {
    pub(super) fn encode(self) -> StrategyNote {
        let flag = |is_set: bool, bit: u64| if is_set { bit } else { 0 };
        let flags = flag(self.is_stopping, IS_STOPPING_FLAG)
            | flag(self.has_diverged, HAS_DIVERGED_FLAG)
            | flag(self.awaits_end, AWAITS_RUN_END_FLAG);
        let StepTimes { compute_seconds, exposed_communication_seconds, data_seconds, .. } = self.times;
        let times = [compute_seconds, exposed_communication_seconds, data_seconds].map(f64::to_bits);
        [flags, self.loss.to_bits(), self.samples, self.batch, times[0], times[1], times[2]]
    }

    pub(super) fn decode(&[flags, loss, samples, batch, compute, exposed, data]: &StrategyNote) -> Self {
        // A report cannot hold NaN or infinity.
        let seconds =
            |bits| Some(f64::from_bits(bits)).filter(|seconds| seconds.is_finite()).unwrap_or(0.0).max(0.0);
        let times = StepTimes {
            steps: u64::from(samples > 0),
            compute_seconds: seconds(compute),
            exposed_communication_seconds: seconds(exposed),
            data_seconds: seconds(data),
        };
        Self {
            times,
            is_stopping: flags & IS_STOPPING_FLAG != 0,
            has_diverged: flags & HAS_DIVERGED_FLAG != 0,
            awaits_end: flags & AWAITS_RUN_END_FLAG != 0,
            loss: f64::from_bits(loss),
            samples,
            batch,
        }
    }
}

/// The codes of the variants of [`WorkReply`].
const BATCH_REPLY_CODE: u64 = 1;
const WAIT_REPLY_CODE: u64 = 2;
const FINISHED_REPLY_CODE: u64 = 3;
const PUBLISHED_REPLY_CODE: u64 = 4;

/// The note of a reply.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum WorkReply {
    /// What the worker does next.
    Work(Assignment),
    /// The client can fetch the results of the run, which have this number of 4-byte words.
    Published(usize),
}

impl WorkReply {
    pub(super) fn encode(self) -> StrategyNote {
        let [code, number] = match self {
            Self::Work(Assignment::Batch(batch)) => [BATCH_REPLY_CODE, batch],
            Self::Work(Assignment::Wait) => [WAIT_REPLY_CODE, 0],
            Self::Work(Assignment::Finished) => [FINISHED_REPLY_CODE, 0],
            Self::Published(words) => [PUBLISHED_REPLY_CODE, words as u64],
        };
        let mut note = StrategyNote::default();
        note[..2].copy_from_slice(&[code, number]);
        note
    }

    /// Decodes a note. An unknown code becomes [`Assignment::Wait`], so the worker asks again.
    pub(super) fn decode(&[code, number, ..]: &StrategyNote) -> Self {
        match code {
            BATCH_REPLY_CODE => Self::Work(Assignment::Batch(number)),
            FINISHED_REPLY_CODE => Self::Work(Assignment::Finished),
            PUBLISHED_REPLY_CODE => Self::Published(number as usize),
            _ => Self::Work(Assignment::Wait),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decoded_notes_equal_the_encoded_notes() {
        for bits in 0..8 {
            let request = WorkRequest {
                is_stopping: bits & 1 > 0,
                has_diverged: bits & 2 > 0,
                awaits_end: bits & 4 > 0,
                loss: -0.25,
                samples: 1 << 40,
                batch: u64::MAX,
                times: StepTimes {
                    steps: 1,
                    compute_seconds: 1.5,
                    exposed_communication_seconds: 0.25,
                    data_seconds: 1e-6,
                },
            };
            assert_eq!(WorkRequest::decode(&request.encode()), request);
        }
        for reply in [
            WorkReply::Work(Assignment::Batch(1 << 50)),
            WorkReply::Work(Assignment::Wait),
            WorkReply::Work(Assignment::Finished),
            WorkReply::Published(5),
        ] {
            assert_eq!(WorkReply::decode(&reply.encode()), reply);
        }
    }
}
