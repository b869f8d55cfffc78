//! Whether the loss still falls: when to end a run, and when to advise a longer one.

use super::report::EpochRecord;

/// A loss that changes by less than this part of the constant prediction's from one record to the next has converged.
const CONVERGED: f64 = 1e-6;
/// The part of its whole fall by which a loss falls in the last tenth of a run that should have been longer. The loss of a convex
/// model has an optimum that the run should reach; that of a network may fall for ever while the test loss rises.
const STILL_FALLING_CONVEX: f64 = 0.001;
const STILL_FALLING: f64 = 0.01;

/// Whether the training loss has stopped to change. `constant_loss` is the mean loss of the best constant prediction.
pub(crate) fn has_converged(history: &[EpochRecord], constant_loss: f64) -> bool {
    let [.., before, last] = history else { return false };
    (before.train_loss - last.train_loss).abs() < CONVERGED * constant_loss
}

/// Whether the training loss still fell noticeably in the last tenth of the run.
pub(crate) fn is_still_improving(history: &[EpochRecord], constant_loss: f64, convex: bool) -> bool {
    let [first, .., last] = history else { return false };
    let tenth = (history.len() / 10).max(1);
    let fall = history[history.len() - 1 - tenth].train_loss - last.train_loss;
    let whole = first.train_loss.max(constant_loss) - last.train_loss;
    fall > if convex { STILL_FALLING_CONVEX } else { STILL_FALLING } * whole
        && fall > CONVERGED * constant_loss
}

#[cfg(test)]
mod tests {
    use super::*;

    fn history(loss: impl Fn(f64) -> f64) -> Vec<EpochRecord> {
        let record = |epoch: u64| EpochRecord {
            epoch,
            train_loss: loss(epoch as f64),
            test_loss: None,
            test_accuracy: None,
            test_r2: None,
            test_rmse: None,
            samples_per_second: 1.0,
            seconds: 1.0,
        };
        (1..=40).map(record).collect()
    }

    #[test]
    fn a_loss_that_still_falls_is_told_from_one_that_has_converged() {
        let slow = history(|epoch| 1.0 - 0.0001 * epoch);
        let half = history(|epoch| 0.5 + 0.5 * (-epoch / 20.0).exp());
        let done = history(|epoch| 0.5 + 0.5 * (-epoch).exp());
        let noise = history(|epoch| 0.5 + 1e-4 * (epoch * 7.0).sin());
        let at_once = history(|epoch| 0.5 - 1e-9 * epoch);
        for (records, improving, converged) in [
            (slow, true, false),
            (half, true, false),
            (done, false, true),
            (noise, false, false),
            (at_once, false, true),
        ] {
            assert_eq!(is_still_improving(&records, 1.0, true), improving, "{records:?}");
            assert_eq!(has_converged(&records, 1.0), converged, "{records:?}");
        }
        assert!(!is_still_improving(&history(|_| 1.0)[..1], 1.0, true));
    }
}
