//! The figures of a run, for the console and as JSON.

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

/// The figures of an epoch. Metrics that do not apply are `None` (`null` in JSON). If the whole training set is a batch, only
/// every N-th epoch has a record.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct EpochRecord {
    /// The epoch, counted from 1.
    pub epoch: u64,
    /// Mean loss over the epoch's samples, each measured before the step that used it.
    pub train_loss: f64,
    /// Mean loss over the test set after the epoch.
    pub test_loss: Option<f64>,
    /// Share of correct predictions over the test set, 0 to 1.
    pub test_accuracy: Option<f64>,
    /// Coefficient of determination over the test set.
    pub test_r2: Option<f64>,
    /// Root of the mean squared error over the test set, in the target's unit.
    pub test_rmse: Option<f64>,
    /// Samples of all ranks per second of the steps since the last record.
    pub samples_per_second: f64,
    /// Seconds of the steps since the last record, without testing and saving.
    pub seconds: f64,
}

/// The figures of a run, as `--report` writes them. Metrics that do not apply are `None` (`null` in JSON).
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Report {
    /// Number of ranks.
    pub world_size: u32,
    /// The model's name.
    pub model: String,
    /// The data's name.
    pub dataset: String,
    /// Samples in the training set.
    pub train_samples: usize,
    /// Samples in the test set.
    pub test_samples: usize,
    /// Parameters of the model.
    pub parameters: usize,
    /// The optimiser's name.
    pub optimizer: String,
    /// The learning rate.
    pub lr: f64,
    /// The weight decay.
    pub weight_decay: f64,
    /// Samples of a batch, of all ranks together.
    pub batch_size: usize,
    /// The seed.
    pub seed: u64,
    /// How gradients were sent.
    pub compression: String,
    /// Epochs completed, including those before a resumption.
    pub epochs: u64,
    /// Steps taken, including those before a resumption.
    pub steps: u64,
    /// Whether a signal ended the run. Such a run evaluates nothing: the metrics below are `None`.
    pub stopped: bool,
    /// Mean loss over the whole training set with the final parameters: squared error (in the target's unit) for
    /// regression, cross-entropy in nats otherwise. After a signal, the mean over the samples of the current epoch so far.
    pub train_loss: f64,
    /// The same over the test set.
    pub test_loss: Option<f64>,
    /// Share of correct predictions over the test set, 0 to 1.
    pub test_accuracy: Option<f64>,
    /// Share of correct predictions over the training set, 0 to 1.
    pub train_accuracy: Option<f64>,
    /// Coefficient of determination over the test set.
    pub test_r2: Option<f64>,
    /// The same over the training set.
    pub train_r2: Option<f64>,
    /// Training samples that all ranks together processed per second of the steps of this process.
    pub samples_per_second: f64,
    /// Seconds from the first step to the end, testing and saving included.
    pub seconds: f64,
    /// Bytes of a bucket of gradients; `None` if they are reduced after the backward pass.
    pub bucket_bytes: Option<usize>,
    /// Seconds in which rank 0 had a collective in flight, including the wait for slower ranks.
    pub communication_seconds: f64,
    /// The part of them in which rank 0 waited: communication that did not overlap with the backward pass.
    pub exposed_communication_seconds: f64,
    /// Bytes that rank 0 sent.
    pub bytes_sent: u64,
    /// [`parameters_hash`] of the final parameters.
    pub parameters_hash: String,
    /// The recorded epochs, including those before a resumption.
    pub history: Vec<EpochRecord>,
}

/// The first 16 bytes, in hexadecimal, of the SHA-256 of the parameters as little-endian f32.
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

#[cfg(test)]
mod tests {
    #[test]
    fn the_hash_is_sha256_of_the_little_endian_bytes() {
        // python3 -c "import hashlib,struct; print(hashlib.sha256(struct.pack('<2f',1,-2)).hexdigest()[:32])"
        assert_eq!(super::parameters_hash(&[1.0, -2.0]), HASH);
    }

    const HASH: &str = "ee4ac73c2bd27756ab82780f27c73a7b";
}
