//! The results of a run, for the console and as JSON.

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use super::bucket_trial::BucketReport;
use super::compression_report::CompressionReport;
use super::metrics::Evaluation;
use super::step_times::StepTimes;
use crate::group::LinkBytes;
use crate::types::counted;

/// The results of an epoch. Metrics that do not apply are `None` (`null` in JSON). With a small data set, not every
/// epoch has a record.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct EpochRecord {
    /// The epoch, counted from 1.
    pub epoch: u64,
    /// The mean loss of the epoch's samples. The loss of a sample is measured before the step that uses this sample.
    pub train_loss: f64,
    /// The mean loss of the test set after the epoch.
    pub test_loss: Option<f64>,
    /// The fraction of correct predictions on the test set, from 0 to 1.
    pub test_accuracy: Option<f64>,
    /// The coefficient of determination (R²) on the test set.
    pub test_r2: Option<f64>,
    /// The square root of the mean squared error on the test set, in the unit of the target.
    pub test_rmse: Option<f64>,
    /// The perplexity of the test set: e to the power of the loss. Only for texts.
    #[serde(default)]
    pub test_perplexity: Option<f64>,
    /// The mean loss of the validation set after the epoch, if the run holds out samples for validation.
    #[serde(default)]
    pub validation_loss: Option<f64>,
    /// The number of samples per second, summed over all ranks, in the steps since the previous record.
    pub samples_per_second: f64,
    /// The duration in seconds of the steps since the previous record. Does not include testing and saving.
    pub seconds: f64,
    /// How long the parts of the steps since the previous record took: see [`Report::step_times`]. `None` if an earlier version
    /// wrote the record.
    #[serde(default)]
    pub step_times: Option<StepTimes>,
}

/// The results of a run, as `--report` writes them. Metrics that do not apply are `None` (`null` in JSON).
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Report {
    /// The number of ranks.
    pub world_size: u32,
    /// The name of the model.
    pub model: String,
    /// The name of the data.
    pub dataset: String,
    /// The number of samples in the training set.
    pub train_samples: usize,
    /// The number of samples in the test set.
    pub test_samples: usize,
    /// The number of samples that are held out of the training set for validation.
    pub validation_samples: usize,
    /// The number of parameters of the model.
    pub parameters: usize,
    /// The name of the optimizer.
    pub optimizer: String,
    /// The size in bytes of the optimizer's state on the rank that wrote the report. With `--shard-optimizer`, each rank
    /// holds a part of the state.
    pub optimizer_state_bytes: usize,
    /// The learning rate.
    pub lr: f64,
    /// The weight decay.
    pub weight_decay: f64,
    /// The number of samples that all ranks together process in a step.
    pub batch_size: usize,
    /// The number of micro-batches into which each rank divides its part of a batch.
    pub micro_batches: u32,
    /// The seed.
    pub seed: u64,
    /// The strategy.
    pub strategy: String,
    /// The format in which gradients were sent.
    pub compression: String,
    /// The number of completed epochs, including the epochs before a resumption.
    pub epochs: u64,
    /// The number of steps, including the steps before a resumption.
    pub steps: u64,
    /// Whether a signal ended the run. A run that a signal ended does not evaluate the model, so the optional metrics
    /// below are `None`.
    pub stopped: bool,
    /// The mean loss of the training set with the final parameters. Regression: squared error in the squared unit of
    /// the target. Classification: cross-entropy in nats. Text: cross-entropy in nats for each token. If a signal ended
    /// the run, this is the mean over the samples that the last epoch used before the signal.
    pub train_loss: f64,
    /// The mean loss of the test set with the final parameters.
    pub test_loss: Option<f64>,
    /// The epoch after which the validation loss was lowest. The run ends with the parameters of this epoch.
    pub best_epoch: Option<u64>,
    /// The mean loss of the validation set with the final parameters.
    pub validation_loss: Option<f64>,
    /// The fraction of correct predictions on the test set, from 0 to 1.
    pub test_accuracy: Option<f64>,
    /// The fraction of correct predictions on the training set, from 0 to 1.
    pub train_accuracy: Option<f64>,
    /// The coefficient of determination (R²) on the test set.
    pub test_r2: Option<f64>,
    /// The coefficient of determination (R²) on the training set.
    pub train_r2: Option<f64>,
    /// All metrics of the test set with the final parameters.
    #[serde(default)]
    pub test_metrics: Option<Evaluation>,
    /// The perplexity of the test set with the final parameters: e to the power of the loss. Only for texts.
    #[serde(default)]
    pub test_perplexity: Option<f64>,
    /// The perplexity of the training set with the final parameters.
    #[serde(default)]
    pub train_perplexity: Option<f64>,
    /// The number of training samples that all ranks together process per second, in the steps that this process
    /// took.
    pub samples_per_second: f64,
    /// The duration in seconds from the first step to the end, including testing and saving.
    pub seconds: f64,
    /// The size in bytes of a bucket of gradients. `None` if gradients are reduced after the backward pass.
    pub bucket_bytes: Option<usize>,
    /// What `--bucket-bytes auto` measured and chose. `None` without this option, and if there was only one size to try.
    #[serde(default)]
    pub bucket_trial: Option<BucketReport>,
    /// The time in seconds during which rank 0 had at least one collective in progress. Includes the wait for slower
    /// ranks.
    pub communication_seconds: f64,
    /// The time in seconds in which rank 0 only waited for a collective and computed nothing.
    pub exposed_communication_seconds: f64,
    /// How long the parts of rank 0's steps took. A resumed run counts only the steps since the resumption. With a parameter
    /// server, these are the sums over the steps of all workers, and with gossip the times of the coordinator. `None` in
    /// reports of earlier versions.
    pub step_times: Option<StepTimes>,
    /// The number of bytes that rank 0 sent.
    pub bytes_sent: u64,
    /// What compression saved. `None` without `--compression`.
    #[serde(default)]
    pub compressed: Option<CompressionReport>,
    /// [`parameters_hash`] of the final parameters.
    pub parameters_hash: String,
    /// The results of the recorded epochs, including the epochs before a resumption.
    pub history: Vec<EpochRecord>,
    /// What each rank measured during the steps, in rank order. Empty with a parameter server and with the strategy `gossip`.
    #[serde(default)]
    pub ranks: Vec<RankResults>,
    /// The results of the parameter server. `None` with other strategies.
    pub parameter_server: Option<ServerReport>,
    /// The results of the strategy `gossip`. `None` with other strategies.
    pub gossip: Option<GossipReport>,
}

/// What a rank measured during the steps that its process took, without the evaluation of the final parameters.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct RankResults {
    /// The name and the address of the rank's host.
    pub host: String,
    /// How long the parts of the rank's steps took.
    pub step_times: StepTimes,
    /// The bytes that the rank sent, with frame headers.
    pub bytes_sent: u64,
    /// The bytes that the rank received, with frame headers.
    pub bytes_received: u64,
    /// The bytes that each open link of the rank carried since the start of the job. Collectives in shared memory use no links.
    pub links: Vec<LinkBytes>,
}

/// The results of a run with the strategy `gossip`.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct GossipReport {
    /// The coordinator at the end of the run, which wrote the report: the lowest rank that was not lost.
    #[serde(rename = "leader")]
    pub coordinator: u32,
    /// Each rank, and the number of steps that it took. If an earlier coordinator was lost, the numbers count only the
    /// steps after that coordinator was lost.
    pub steps: Vec<(u32, u64)>,
    /// The number of completed averages that the coordinator started.
    pub averages: u64,
    /// The ranks that were lost.
    pub lost_ranks: Vec<u32>,
}

/// The results of a run with a parameter server.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ServerReport {
    /// The ranks that were servers.
    pub servers: Vec<u32>,
    /// Each worker's rank, and the number of its gradients that the first server applied.
    pub updates: Vec<(u32, u64)>,
    /// The ranks of the workers that were lost.
    pub lost_workers: Vec<u32>,
    /// The number of gradients that the first server dropped because of their staleness.
    pub dropped: u64,
    /// The mean staleness of the gradients that the first server applied: the number of updates between the pull of
    /// the parameters and the push of the gradient.
    pub staleness_mean: f64,
    /// The largest staleness of a gradient that the first server applied.
    pub staleness_max: u64,
    /// The numbers of applied gradients with a staleness of 0, 1, 2, and so on. `staleness[1023]` also counts all
    /// gradients with a larger staleness.
    pub staleness: Vec<u64>,
}

impl ServerReport {
    /// Returns a line such as `staleness of 90 updates: mean 1.20, largest 4; 0 gradients dropped`.
    pub(crate) fn describe_staleness(&self) -> String {
        let applied: u64 = self.staleness.iter().sum();
        format!(
            "staleness of {}: mean {:.2}, largest {}; {} dropped",
            counted(applied, "update"),
            self.staleness_mean,
            self.staleness_max,
            counted(self.dropped, "gradient")
        )
    }
}

/// Returns a hash of the parameters in hexadecimal: the first 16 bytes of the SHA-256 of the little-endian f32
/// values.
pub fn parameters_hash(parameters: &[f32]) -> String {
    use std::fmt::Write;

    let mut hasher = Sha256::new();
    for block in parameters.chunks(1024) {
        let bytes: Vec<[u8; 4]> = block.iter().map(|value| value.to_le_bytes()).collect();
        hasher.update(bytes.as_flattened());
    }
    let digest: [u8; 32] = hasher.finalize().into();
    digest[..16].iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").expect("writing to a string succeeds");
        text
    })
}

/// Converts an f32 to the f64 with the same decimal digits: 0.001 becomes 0.001 and not 0.0010000000474974513.
pub(crate) fn f64_with_same_digits(value: f32) -> f64 {
    value.to_string().parse().unwrap_or_else(|_| f64::from(value))
}

#[cfg(test)]
mod tests {
    #[test]
    fn parameters_hash_is_the_sha256_of_the_little_endian_bytes() {
        // This command prints the expected hash:
        // python3 -c "import hashlib,struct; print(hashlib.sha256(struct.pack('<2f',1,-2)).hexdigest()[:32])"
        assert_eq!(super::parameters_hash(&[1.0, -2.0]), EXPECTED_HASH);
    }

    const EXPECTED_HASH: &str = "ee4ac73c2bd27756ab82780f27c73a7b";
}
