//! Draws line charts as a picture in SVG, for example the curves of a run, and a page about a run in HTML.

mod axis;
mod chart;
mod page;
mod picture;
mod run_charts;

pub use self::chart::{CURVE_COLORS, Chart, Curve, HorizontalAxis, VerticalScale};
pub(super) use self::page::make_page;
pub use self::picture::draw_picture;
use self::run_charts::{loss_chart, metric_chart};
use super::model::Loss;
use super::report::Report;
use crate::types::counted;

/// Draws the losses of all epochs, and the accuracy or R² of the test set if there is a test set. Returns a complete
/// SVG document.
pub(super) fn draw_curves(report: &Report, loss: &Loss) -> String {
    let charts: Vec<Chart> = [loss_chart(report, loss), metric_chart(report)]
        .into_iter()
        .filter(|chart| !chart.curves.is_empty())
        .collect();
    draw_picture(&make_title(report), &charts, "The run ended before an epoch was complete.")
}

/// Describes the run.
fn make_title(report: &Report) -> String {
    let ranks = counted(report.world_size, "rank");
    format!(
        "{} on {}: {ranks}, {}, {}, lr {}, batch {}",
        report.model, report.dataset, report.strategy, report.optimizer, report.lr, report.batch_size
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::EpochRecord;
    use crate::train::model::TargetScale;

    /// Returns a report with one epoch for each loss. Each epoch has the given accuracy.
    fn make_report(losses: &[f64], accuracy: Option<f64>) -> Report {
        let record = |(index, &loss): (usize, &f64)| EpochRecord {
            epoch: index as u64 + 1,
            train_loss: loss,
            test_loss: Some(2.0 * loss),
            test_accuracy: accuracy,
            ..EpochRecord::default()
        };
        let history = losses.iter().enumerate().map(record).collect();
        Report { model: "mlp:2".into(), history, ..Report::default() }
    }

    #[test]
    fn each_kind_of_curve_is_drawn_once() {
        for (report, polylines, texts) in [
            (
                make_report(&[3.0, 2.0, 1.0], Some(0.5)),
                3,
                &["cross-entropy in nats", "fraction of correct predictions"][..],
            ),
            (make_report(&[3.0], None), 2, &["Mean loss"]),
            (make_report(&[100.0, 0.1], None), 2, &["cross-entropy in nats, logarithmic"]),
            (make_report(&[f64::NAN, 1.0], None), 2, &["Mean loss"]),
            (make_report(&[], None), 0, &["The run ended before an epoch was complete."]),
        ] {
            let svg = draw_curves(&report, &Loss::CrossEntropy);
            assert_eq!(svg.matches("<polyline").count(), polylines, "{svg}");
            assert!(texts.iter().all(|text| svg.contains(text)), "{svg}");
            assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n") && !svg.contains("NaN"), "{svg}");
        }
    }

    #[test]
    fn a_long_title_is_cut_and_escaped() {
        let dataset = format!("<{}>", "é".repeat(300));
        let svg = draw_curves(
            &Report { dataset, ..make_report(&[1.0], None) },
            &Loss::SquaredError(TargetScale::IDENTITY),
        );
        assert!(
            svg.contains("mlp:2 on &lt;ééé") && svg.contains("é...</text>") && svg.contains("squared error"),
            "{svg}"
        );
    }
}
