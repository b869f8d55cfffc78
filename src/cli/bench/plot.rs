//! Draws the times and the bus bandwidths of a run over the size (`--plot`).

use super::measure::BenchRow;
use super::report::BenchReport;
use crate::train::plot::{CURVE_COLORS, Chart, Curve, HorizontalAxis, VerticalScale, draw_picture};
use crate::types::counted;

/// An element type and a reduction, whose rows are one curve.
type CurveKey = (&'static str, Option<&'static str>);

/// Draws the median time and the bus bandwidth of each row over its size, both on logarithmic scales. Each element type
/// and reduction is a curve. Leaves out values of zero: in a job of one rank, all bus bandwidths are zero. Returns an
/// SVG document.
pub(super) fn draw_rows(report: &BenchReport) -> String {
    let rows = &report.results;
    let charts = [
        make_chart("Median time", "time in us", rows, |row| row.time_us),
        make_chart("Bus bandwidth", "bus bandwidth in GB/s", rows, |row| row.busbw_gb_per_s),
    ];
    let charts: Vec<Chart> = charts.into_iter().filter(|chart| !chart.curves.is_empty()).collect();
    draw_picture(&make_title(report), &charts, "All values are zero.")
}

fn make_title(report: &BenchReport) -> String {
    let Some(row) = report.results.first() else { return "no rows".to_owned() };
    let ranks = counted(row.world_size, "rank");
    let kind = curve_keys(&report.results)
        .first()
        .filter(|_| curve_keys(&report.results).len() == 1)
        .map_or_else(String::new, |(dtype, reduction)| {
            format!(", {dtype} {}", reduction.unwrap_or_default()).trim_end().to_owned()
        });
    format!(
        "{}: {ranks}, transport {}{kind}, on {} ({})",
        row.operation, row.transport, report.environment.host, report.environment.cpu
    )
}

fn make_chart(title: &str, y_label: &str, rows: &[BenchRow], get: impl Fn(&BenchRow) -> f64) -> Chart {
    let keys = curve_keys(rows);
    let has_one = |values: Vec<Option<&str>>| distinct(values.into_iter()).len() == 1;
    let one_dtype = has_one(keys.iter().map(|key| Some(key.0)).collect());
    let one_reduction = has_one(keys.iter().map(|key| key.1).collect());
    let curves = keys.iter().zip(CURVE_COLORS).map(|(&(dtype, reduction), color)| {
        // The legend shows only what differs between the curves.
        let name = match reduction {
            Some(reduction) if one_dtype && !one_reduction => reduction.to_owned(),
            Some(reduction) if !one_reduction => format!("{dtype} {reduction}"),
            _ => dtype.to_owned(),
        };
        let points = rows
            .iter()
            .filter(|row| (row.dtype, row.reduction) == (dtype, reduction))
            .map(|row| (row.bytes, get(row)))
            .filter(|(_, value)| value.is_finite() && *value > 0.0)
            .collect();
        Curve { name, color, points }
    });
    Chart {
        title: title.to_owned(),
        x_axis: HorizontalAxis::Bytes,
        y_label: y_label.to_owned(),
        y_scale: VerticalScale::Logarithmic,
        curves: curves.filter(|curve| !curve.points.is_empty()).collect(),
        best_epoch: None,
    }
}

/// Returns the element types and reductions of the rows, each pair once.
fn curve_keys(rows: &[BenchRow]) -> Vec<CurveKey> {
    distinct(rows.iter().map(|row| (row.dtype, row.reduction)))
}

/// Returns each item once, in the order of its first occurrence.
fn distinct<T: PartialEq>(items: impl Iterator<Item = T>) -> Vec<T> {
    let mut found = Vec::new();
    for item in items {
        if !found.contains(&item) {
            found.push(item);
        }
    }
    found
}
