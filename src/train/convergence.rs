//! Decides from the history of the loss when to end a run, and when to advise a longer run.

use super::report::EpochRecord;

/// The loss has converged if the losses of the last two records differ by less than this fraction of the constant loss.
/// The constant loss is the loss of the best model that ignores its inputs.
const CONVERGED_LOSS_FRACTION: f64 = 1e-6;
/// Advise a longer run of a convex model if the last tenth of the run caused more than 0.1 % of the total decrease of
/// the loss. The fraction is low, because a run of a convex model should reach the optimum of the loss.
const STILL_FALLING_FRACTION_CONVEX: f64 = 0.001;
/// Advise a longer run of other models if the last tenth of the run caused more than 1 % of the total decrease of the
/// loss. The fraction is higher than for convex models, because the training loss may fall even when the test loss
/// rises.
const STILL_FALLING_FRACTION: f64 = 0.01;

/// Returns whether the training loss has stopped changing: the losses of the last two records are almost equal.
/// `constant_loss` is the mean loss of the best constant prediction.
pub(crate) fn has_converged(history: &[EpochRecord], constant_loss: f64) -> bool {
    let [.., previous, last] = history else { return false };
    (previous.train_loss - last.train_loss).abs() < CONVERGED_LOSS_FRACTION * constant_loss
}

/// Returns whether a longer run is advised, because the training loss still decreased in the last tenth of the run.
pub(crate) fn is_still_improving(history: &[EpochRecord], constant_loss: f64, convex: bool) -> bool {
    let [first, .., last] = history else { return false };
    let tenth = (history.len() / 10).max(1);
    let recent_fall = history[history.len() - 1 - tenth].train_loss - last.train_loss;
    let total_fall = first.train_loss.max(constant_loss) - last.train_loss;
    let fraction = if convex { STILL_FALLING_FRACTION_CONVEX } else { STILL_FALLING_FRACTION };
    recent_fall > fraction * total_fall && recent_fall > CONVERGED_LOSS_FRACTION * constant_loss
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the records of 40 epochs with the losses `loss(1.0)`, `loss(2.0)` and so on.
    fn make_history(loss: impl Fn(f64) -> f64) -> Vec<EpochRecord> {
        let record =
            |epoch: u64| EpochRecord { epoch, train_loss: loss(epoch as f64), ..EpochRecord::default() };
        (1..=40).map(record).collect()
    }

    #[test]
    fn a_falling_loss_is_improving_and_a_constant_loss_has_converged() {
        let slow = make_history(|epoch| 1.0 - 0.0001 * epoch);
        let unfinished = make_history(|epoch| 0.5 + 0.5 * (-epoch / 20.0).exp());
        let finished = make_history(|epoch| 0.5 + 0.5 * (-epoch).exp());
        let noise = make_history(|epoch| 0.5 + 1e-4 * (epoch * 7.0).sin());
        let almost_constant = make_history(|epoch| 0.5 - 1e-9 * epoch);
        for (records, improving, converged) in [
            (slow, true, false),
            (unfinished, true, false),
            (finished, false, true),
            (noise, false, false),
            (almost_constant, false, true),
        ] {
            assert_eq!(is_still_improving(&records, 1.0, true), improving, "{records:?}");
            assert_eq!(has_converged(&records, 1.0), converged, "{records:?}");
        }
        assert!(!is_still_improving(&make_history(|_| 1.0)[..1], 1.0, true));
    }
}
