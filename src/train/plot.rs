//! Draws the curves of a run as a picture in SVG, and as a page in HTML.

mod axis;
mod chart;
mod page;
mod run_charts;

use std::fmt::Write as _;

use self::chart::{Chart, PlotArea, write_text};
pub(super) use self::page::make_page;
use self::run_charts::{loss_chart, metric_chart};
use super::model::Loss;
use super::report::Report;

/// The width of a chart and the height of the picture, in pixels.
const CHART_WIDTH: f64 = 520.0;
const PICTURE_HEIGHT: f64 = 420.0;
/// The height in pixels of the title line above the charts.
const TITLE_HEIGHT: f64 = 34.0;
/// A picture with n charts has a title of at most n times this number of characters.
const TITLE_CHARACTERS_PER_CHART: usize = 64;

/// Draws the losses of all epochs, and the accuracy or R² of the test set if there is a test set. Returns a complete
/// SVG document.
pub(super) fn draw_curves(report: &Report, loss: &Loss) -> String {
    let charts: Vec<Chart> = [loss_chart(report, loss), metric_chart(report)]
        .into_iter()
        .filter(|chart| !chart.curves.is_empty())
        .collect();
    let width = CHART_WIDTH * charts.len().max(1) as f64;
    let mut svg = String::new();
    let _ = writeln!(
        svg,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{PICTURE_HEIGHT}\" viewBox=\"0 0 {width} {PICTURE_HEIGHT}\" \
         font-family=\"sans-serif\" font-size=\"12\" fill=\"#222\">"
    );
    let _ = writeln!(svg, "<rect width=\"100%\" height=\"100%\" fill=\"white\"/>");
    write_text(
        &mut svg,
        (20.0, 24.0),
        "font-size=\"13\"",
        &make_title(report, TITLE_CHARACTERS_PER_CHART * charts.len().max(1)),
    );
    if charts.is_empty() {
        write_text(&mut svg, (20.0, 60.0), "", "The run ended before an epoch was complete.");
    }
    for (index, chart) in charts.iter().enumerate() {
        let left = CHART_WIDTH * index as f64;
        chart.draw(
            &mut svg,
            PlotArea { left, top: TITLE_HEIGHT, width: CHART_WIDTH, height: PICTURE_HEIGHT - TITLE_HEIGHT },
        );
    }
    svg.push_str("</svg>\n");
    svg
}

/// Describes the run in at most `characters_max` characters.
fn make_title(report: &Report, characters_max: usize) -> String {
    let ranks =
        if report.world_size == 1 { "1 rank".to_owned() } else { format!("{} ranks", report.world_size) };
    let text = format!(
        "{} on {}: {ranks}, {}, {}, lr {}, batch {}",
        report.model, report.dataset, report.strategy, report.optimizer, report.lr, report.batch_size
    );
    if text.chars().count() <= characters_max {
        return text;
    }
    text.chars().take(characters_max - 3).chain("...".chars()).collect()
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
