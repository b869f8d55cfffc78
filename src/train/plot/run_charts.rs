//! The charts of a run.

use super::chart::{BLUE, Chart, Curve, GREEN, HorizontalAxis, ORANGE, VerticalScale};
use crate::train::model::Loss;
use crate::train::report::{EpochRecord, Report};
use crate::train::step_times::StepTimes;

/// Returns the chart of the losses.
pub(super) fn loss_chart(report: &Report, loss: &Loss) -> Chart {
    let y_label = match loss {
        Loss::CrossEntropy | Loss::WeightedCrossEntropy(_) => "cross-entropy in nats",
        Loss::SquaredError(_) => "squared error in (unit of the target)²",
        Loss::NextToken => "nats for each token",
        Loss::Own(_) => "loss",
    };
    let curves = [
        ("training", BLUE, (|record| Some(record.train_loss)) as fn(&EpochRecord) -> Option<f64>),
        ("test", ORANGE, |record| record.test_loss),
        ("validation", GREEN, |record| record.validation_loss),
    ];
    Chart {
        title: "Mean loss".into(),
        x_axis: HorizontalAxis::Epochs,
        y_label: y_label.into(),
        y_scale: VerticalScale::Automatic { margin_limit: f64::INFINITY },
        curves: curves
            .into_iter()
            .filter_map(|(name, color, get)| make_curve(report, name, color, get))
            .collect(),
        best_epoch: report.best_epoch,
    }
}

/// Returns the chart of the accuracy or R² of the test set. It has no curve if there is neither.
pub(super) fn metric_chart(report: &Report) -> Chart {
    let accuracy = make_curve(report, "test", ORANGE, |record| record.test_accuracy);
    let r2 = make_curve(report, "test", ORANGE, |record| record.test_r2);
    let (title, y_label) = if accuracy.is_some() {
        ("Accuracy", "fraction of correct predictions")
    } else {
        ("Coefficient of determination", "R²")
    };
    Chart {
        title: title.into(),
        x_axis: HorizontalAxis::Epochs,
        y_label: y_label.into(),
        y_scale: VerticalScale::Automatic { margin_limit: 1.0 },
        curves: accuracy.or(r2).into_iter().collect(),
        best_epoch: report.best_epoch,
    }
}

/// Returns the chart of the mean duration of rank 0's steps, and of its parts. It has no curve if the steps were not timed.
pub(super) fn step_chart(report: &Report) -> Chart {
    let parts = [
        ("compute", BLUE, (|times| times.compute_seconds) as fn(&StepTimes) -> f64),
        ("communication", ORANGE, |times| times.exposed_communication_seconds),
        ("data", GREEN, |times| times.data_seconds),
    ];
    let curve = |(name, color, get): (_, _, fn(&StepTimes) -> f64)| {
        make_curve(report, name, color, |record| {
            let times = record.step_times.filter(|times| times.steps > 0)?;
            Some(1e3 * get(&times) / times.steps as f64)
        })
    };
    Chart {
        title: "Mean time of a step".into(),
        x_axis: HorizontalAxis::Epochs,
        y_label: "ms".into(),
        y_scale: VerticalScale::Automatic { margin_limit: f64::INFINITY },
        curves: parts.into_iter().filter_map(curve).collect(),
        best_epoch: None,
    }
}

/// Returns the chart of the speed.
pub(super) fn speed_chart(report: &Report) -> Chart {
    Chart {
        title: "Speed".into(),
        x_axis: HorizontalAxis::Epochs,
        y_label: "samples/s".into(),
        y_scale: VerticalScale::Automatic { margin_limit: f64::INFINITY },
        curves: make_curve(report, "all ranks", BLUE, |record| Some(record.samples_per_second))
            .into_iter()
            .collect(),
        best_epoch: None,
    }
}

/// Returns the curve of the metric that `get` returns. Returns `None` if no epoch has a finite value of the metric.
fn make_curve(
    report: &Report,
    name: &'static str,
    color: &'static str,
    get: impl Fn(&EpochRecord) -> Option<f64>,
) -> Option<Curve> {
    let value = |record: &EpochRecord| {
        get(record).filter(|value| value.is_finite()).map(|value| (record.epoch, value))
    };
    let points: Vec<(u64, f64)> = report.history.iter().filter_map(value).collect();
    (!points.is_empty()).then(|| Curve { name: name.into(), color, points })
}
