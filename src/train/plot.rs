//! Draws the curves of a run as a picture in SVG.

mod axis;
mod chart;

use std::fmt::Write as _;

use self::chart::{Chart, Curve, PlotArea, write_text};
use super::model::Loss;
use super::report::{EpochRecord, Report};

/// The width of a chart and the height of the picture, in pixels.
const CHART_WIDTH: f64 = 520.0;
const PICTURE_HEIGHT: f64 = 420.0;
/// The height in pixels of the title line above the charts.
const TITLE_HEIGHT: f64 = 34.0;
/// A picture with n charts has a title of at most n times this number of characters.
const TITLE_CHARACTERS_PER_CHART: usize = 64;

/// Colors that people with color blindness can distinguish (Okabe and Ito 2008).
const BLUE: &str = "#0072b2";
const ORANGE: &str = "#d55e00";
const GREEN: &str = "#009e73";

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

fn loss_chart(report: &Report, loss: &Loss) -> Chart {
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
        y_label: y_label.into(),
        y_margin_limit: f64::INFINITY,
        curves: curves
            .into_iter()
            .filter_map(|(name, color, get)| make_curve(report, name, color, get))
            .collect(),
        best_epoch: report.best_epoch,
    }
}

fn metric_chart(report: &Report) -> Chart {
    let accuracy = make_curve(report, "test", ORANGE, |record| record.test_accuracy);
    let r2 = make_curve(report, "test", ORANGE, |record| record.test_r2);
    let (title, y_label) = if accuracy.is_some() {
        ("Accuracy", "fraction of correct predictions")
    } else {
        ("Coefficient of determination", "R²")
    };
    Chart {
        title: title.into(),
        y_label: y_label.into(),
        y_margin_limit: 1.0,
        curves: accuracy.or(r2).into_iter().collect(),
        best_epoch: report.best_epoch,
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
    (!points.is_empty()).then_some(Curve { name, color, points })
}

#[cfg(test)]
mod tests {
    use super::*;
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
