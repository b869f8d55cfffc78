//! Writes the results of a run as one page in HTML. The page needs no other file and runs no script.

use std::fmt::Write as _;

use super::chart::{AXIS_COLOR, BLUE, Chart, GREEN, GRID_COLOR, MARK_COLOR, ORANGE, PlotArea, escape};
use super::run_charts::{loss_chart, metric_chart, speed_chart, step_chart};
use crate::train::compression_report::CompressionReport;
use crate::train::model::Loss;
use crate::train::report::{EpochRecord, RankResults, Report};
use crate::train::step_times::StepTimes;
use crate::types::counted;

/// The size of a chart in pixels, before the browser scales it.
const CHART_WIDTH: f64 = 520.0;
const CHART_HEIGHT: f64 = 340.0;
/// The maximum numbers of rows of the tables of ranks and links, and of the table of epochs. The page says how many are missing.
const ROWS_MAX: usize = 256;
/// A rank is marked as the slowest if its time without waiting is this many times the mean of all ranks.
const SLOWNESS_RATIO_MIN: f64 = 1.05;

/// The style of the page, before the rules for the colors of charts.
const STYLE: &str = include_str!("page.css");

/// Returns a complete HTML document with the results of a run. `loss` is the loss of the model.
pub(in crate::train) fn make_page(report: &Report, loss: &Loss) -> String {
    let title = escape(&format!("{} on {}", report.model, report.dataset));
    let mut html = String::from("<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n");
    // The policy forbids the browser to load anything, even if a name in the report contained a link.
    let _ = writeln!(
        html,
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n<meta name=\"color-scheme\" content=\"light dark\">\n\
         <title>{title}</title>\n<style>\n{STYLE}{}</style>\n</head>\n<body>\n<main>\n<h1>{title}</h1>",
        chart_color_rules()
    );
    let ranks = counted(report.world_size, "rank");
    let stopped = if report.stopped { " A signal stopped the run." } else { "" };
    let _ = writeln!(
        html,
        "<p class=\"summary\">{ranks}, {}, {}, {} with testing and saving.{stopped}</p>",
        counted(report.epochs, "epoch"),
        counted(report.steps, "step"),
        format_seconds(report.seconds)
    );
    write_results(&mut html, report);
    write_charts(&mut html, report, loss);
    write_ranks(&mut html, report);
    write_links(&mut html, report);
    write_configuration(&mut html, report);
    write_epochs(&mut html, report);
    html.push_str("</main>\n</body>\n</html>\n");
    html
}

/// Returns the rules that give the parts of a chart the colors of the page, which depend on the color scheme.
fn chart_color_rules() -> String {
    let mut rules = String::new();
    for (color, name) in [
        (GRID_COLOR, "grid"),
        (AXIS_COLOR, "axis"),
        (MARK_COLOR, "muted"),
        (BLUE, "compute"),
        (ORANGE, "communication"),
        (GREEN, "data"),
    ] {
        let _ = writeln!(rules, "svg [stroke=\"{color}\"] {{ stroke: var(--{name}); }}");
        let _ = writeln!(rules, "svg [fill=\"{color}\"] {{ fill: var(--{name}); }}");
    }
    rules
}

/// Writes the final metrics, as large numbers. If a signal stopped the run before it tested the final parameters, writes the
/// metrics of the last epoch.
fn write_results(html: &mut String, report: &Report) {
    html.push_str("<section class=\"results\">\n");
    let mut write = |name: &str, value: String| {
        let _ = writeln!(html, "<div><span>{name}</span><strong>{value}</strong></div>");
    };
    let last = report.history.last().filter(|_| report.stopped);
    for (name, value, value_of_last) in [
        ("test accuracy", report.test_accuracy, last.and_then(|record| record.test_accuracy)),
        ("test R²", report.test_r2, last.and_then(|record| record.test_r2)),
        ("test perplexity", report.test_perplexity, last.and_then(|record| record.test_perplexity)),
        ("test loss", report.test_loss, last.and_then(|record| record.test_loss)),
        ("train loss", Some(report.train_loss), None),
        ("validation loss", report.validation_loss, last.and_then(|record| record.validation_loss)),
    ] {
        match (value, value_of_last, last) {
            (Some(value), _, _) => write(name, format!("{value:.4}")),
            (None, Some(value), Some(record)) => {
                write(&format!("{name}, epoch {}", record.epoch), format!("{value:.4}"));
            }
            _ => {}
        }
    }
    write("samples per second", format!("{:.0}", report.samples_per_second));
    html.push_str("</section>\n");
}

fn write_charts(html: &mut String, report: &Report, loss: &Loss) {
    let charts = [loss_chart(report, loss), metric_chart(report), step_chart(report), speed_chart(report)];
    let charts: Vec<Chart> = charts.into_iter().filter(|chart| !chart.curves.is_empty()).collect();
    html.push_str("<section class=\"charts\">\n");
    if charts.is_empty() {
        html.push_str("<p>The run ended before an epoch was complete.</p>\n");
    }
    for chart in charts {
        let _ = writeln!(
            html,
            "<svg viewBox=\"0 0 {CHART_WIDTH} {CHART_HEIGHT}\" role=\"img\" aria-label=\"{}\" font-size=\"12\">",
            escape(&chart.title)
        );
        let area =
            PlotArea { left: -14.0, top: -10.0, width: CHART_WIDTH + 14.0, height: CHART_HEIGHT + 10.0 };
        chart.draw(html, area);
        html.push_str("</svg>\n");
    }
    html.push_str("</section>\n");
}

/// Writes how long the parts of each rank's steps took.
fn write_ranks(html: &mut String, report: &Report) {
    if report.ranks.is_empty() {
        return;
    }
    html.push_str(
        "<section>\n<h2>Ranks</h2>\n<p class=\"legend\"><span><i class=\"compute\"></i>compute</span>\
         <span><i class=\"communication\"></i>communication: only waits for other ranks</span>\
         <span><i class=\"data\"></i>data</span></p>\n\
         <div class=\"scroll\"><table>\n<tr><th>rank<th>host<th class=\"wide\">time of a step<th class=\"n\">total\
         <th class=\"n\">compute<th class=\"n\">communication<th class=\"n\">data<th class=\"n\">sent<th class=\"n\">received</tr>\n",
    );
    let slowest = slowest_rank(&report.ranks);
    for (rank, measured) in report.ranks.iter().enumerate().take(ROWS_MAX) {
        let mark = if slowest == Some(rank) { " <em>slowest</em>" } else { "" };
        let _ = writeln!(
            html,
            "<tr><td>{rank}{mark}<td>{}<td>{}{}<td class=\"n\">{}<td class=\"n\">{}</tr>",
            escape(&measured.host),
            time_bar(&measured.step_times),
            time_cells(&measured.step_times),
            format_bytes(measured.bytes_sent),
            format_bytes(measured.bytes_received)
        );
    }
    html.push_str("</table></div>\n");
    write_missing_rows(html, report.ranks.len(), "ranks");
    html.push_str("</section>\n");
}

/// Returns the rank that waits least, if it is clearly slower than the mean of all ranks.
fn slowest_rank(ranks: &[RankResults]) -> Option<usize> {
    let busy: Vec<f64> = ranks.iter().map(|rank| rank.step_times.busy_seconds()).collect();
    let mean = busy.iter().sum::<f64>() / busy.len().max(1) as f64;
    let (rank, &longest) = busy.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1))?;
    (longest > SLOWNESS_RATIO_MIN * mean).then_some(rank)
}

/// Returns the shares of the three parts of a step as colored bars.
fn time_bar(times: &StepTimes) -> String {
    let total = times.seconds().max(f64::MIN_POSITIVE);
    let mut bar = String::from("<div class=\"bar\">");
    for (name, seconds) in [
        ("compute", times.compute_seconds),
        ("communication", times.exposed_communication_seconds),
        ("data", times.data_seconds),
    ] {
        let _ = write!(bar, "<i class=\"{name}\" style=\"width:{:.2}%\"></i>", 100.0 * seconds / total);
    }
    bar + "</div>"
}

/// Returns cells with the mean time of a step and of its parts.
fn time_cells(times: &StepTimes) -> String {
    let steps = times.steps.max(1) as f64;
    let parts =
        [times.seconds(), times.compute_seconds, times.exposed_communication_seconds, times.data_seconds];
    parts.map(|seconds| format!("<td class=\"n\">{}", format_seconds(seconds / steps))).concat()
}

/// Writes the bytes that each link carried.
fn write_links(html: &mut String, report: &Report) {
    if report.ranks.len() < 2 {
        return;
    }
    let mut links: Vec<(usize, u32, u64)> = Vec::new();
    for (rank, measured) in report.ranks.iter().enumerate() {
        links.extend(measured.links.iter().map(|link| (rank, link.peer.get(), link.bytes_sent)));
    }
    html.push_str("<section>\n<h2>Links</h2>\n");
    if links.is_empty() {
        html.push_str("<p>The ranks share memory and used no links.</p>\n</section>\n");
        return;
    }
    // If there are too many links for the page, it shows the busiest.
    if links.len() > ROWS_MAX {
        links.sort_by_key(|&(from, to, bytes)| (std::cmp::Reverse(bytes), from, to));
    }
    let most = links.iter().map(|link| link.2).max().unwrap_or_default().max(1);
    html.push_str(
        "<p>The bytes that each rank sent to each other rank since the start of the job, with frame headers. \
         Collectives in shared memory use no links.</p>\n\
         <div class=\"scroll\"><table>\n<tr><th>from<th>to<th class=\"wide\">bytes<th></tr>\n",
    );
    for (from, to, bytes) in links.iter().take(ROWS_MAX) {
        let _ = writeln!(
            html,
            "<tr><td>{from}<td>{to}<td><div class=\"bar\"><i class=\"compute\" style=\"width:{:.2}%\"></i></div>\
             <td class=\"n\">{}</tr>",
            100.0 * *bytes as f64 / most as f64,
            format_bytes(*bytes)
        );
    }
    html.push_str("</table></div>\n");
    write_missing_rows(html, links.len(), "links");
    html.push_str("</section>\n");
}

fn write_missing_rows(html: &mut String, rows: usize, what: &str) {
    if let Some(missing @ 1..) = rows.checked_sub(ROWS_MAX) {
        let _ = writeln!(html, "<p>{missing} more {what} are not shown.</p>");
    }
}

/// Writes the options of the run and the numbers that follow from them.
fn write_configuration(html: &mut String, report: &Report) {
    html.push_str("<section>\n<h2>Configuration</h2>\n<div class=\"scroll\"><table class=\"pairs\">\n");
    let buckets = report.bucket_bytes.map_or_else(|| "none".into(), |bytes| format_bytes(bytes as u64));
    let mut rows = vec![
        ("model", report.model.clone()),
        ("parameters", report.parameters.to_string()),
        ("data", report.dataset.clone()),
        ("training samples", report.train_samples.to_string()),
        ("test samples", report.test_samples.to_string()),
        ("validation samples", report.validation_samples.to_string()),
        ("ranks", report.world_size.to_string()),
        ("strategy", report.strategy.clone()),
        ("compression", report.compression.clone()),
        ("optimizer", report.optimizer.clone()),
        ("learning rate", report.lr.to_string()),
        ("weight decay", report.weight_decay.to_string()),
        ("batch size", report.batch_size.to_string()),
        ("micro-batches of a rank", report.micro_batches.to_string()),
        ("seed", report.seed.to_string()),
        ("size of a bucket of gradients", buckets),
        ("optimizer state of rank 0", format_bytes(report.optimizer_state_bytes as u64)),
        ("hash of the parameters", report.parameters_hash.clone()),
    ];
    if let Some(text) = report.compressed.as_ref().and_then(CompressionReport::describe) {
        rows.push(("compressed bytes", text));
    }
    if let Some(server) = &report.parameter_server {
        rows.push(("parameter server", server.describe_staleness()));
    }
    for (name, value) in rows {
        let _ = writeln!(html, "<tr><th>{name}<td>{}</tr>", escape(&value));
    }
    html.push_str("</table></div>\n</section>\n");
}

/// Writes the results of the last epochs.
fn write_epochs(html: &mut String, report: &Report) {
    type EpochColumn = (&'static str, fn(&EpochRecord) -> Option<f64>);
    if report.history.is_empty() {
        return;
    }
    let columns: [EpochColumn; 8] = [
        ("train loss", |record| Some(record.train_loss)),
        ("test loss", |record| record.test_loss),
        ("test accuracy", |record| record.test_accuracy),
        ("test R²", |record| record.test_r2),
        ("test RMSE", |record| record.test_rmse),
        ("test perplexity", |record| record.test_perplexity),
        ("validation loss", |record| record.validation_loss),
        ("samples/s", |record| Some(record.samples_per_second.round())),
    ];
    let columns: Vec<EpochColumn> = columns
        .into_iter()
        .filter(|(_, get)| report.history.iter().any(|record| get(record).is_some()))
        .collect();
    html.push_str("<section>\n<details><summary>Results of each epoch</summary>\n<div class=\"scroll\"><table>\n<tr><th>epoch");
    for (name, _) in &columns {
        let _ = write!(html, "<th class=\"n\">{name}");
    }
    html.push_str("</tr>\n");
    let first = report.history.len().saturating_sub(ROWS_MAX);
    for record in &report.history[first..] {
        let _ = write!(html, "<tr><td>{}", record.epoch);
        for (name, get) in &columns {
            let digits = if *name == "samples/s" { 0 } else { 4 };
            let text = get(record).map_or_else(String::new, |value| format!("{value:.digits$}"));
            let _ = write!(html, "<td class=\"n\">{text}");
        }
        html.push_str("</tr>\n");
    }
    html.push_str("</table></div></details>\n");
    write_missing_rows(html, report.history.len(), "epochs, the first ones,");
    html.push_str("</section>\n");
}

fn format_bytes(bytes: u64) -> String {
    let mut value = bytes as f64;
    for unit in ["B", "KiB", "MiB", "GiB"] {
        if value < 1024.0 {
            return if unit == "B" { format!("{bytes} B") } else { format!("{value:.1} {unit}") };
        }
        value /= 1024.0;
    }
    format!("{value:.1} TiB")
}

fn format_seconds(seconds: f64) -> String {
    match seconds {
        60.0.. => format!("{:.0} min {:02.0} s", (seconds / 60.0).floor(), (seconds % 60.0).floor()),
        1.0.. => format!("{seconds:.2} s"),
        1e-3.. => format!("{:.2} ms", seconds * 1e3),
        _ => format!("{:.0} µs", seconds * 1e6),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::group::LinkBytes;
    use crate::types::Rank;

    fn report_of(ranks: usize, links: &[u32]) -> Report {
        let result = |rank| RankResults {
            host: "a<b>\"".into(),
            step_times: StepTimes {
                steps: 10,
                compute_seconds: f64::from(rank) + 1.0,
                exposed_communication_seconds: 1.0,
                data_seconds: 0.0,
            },
            bytes_sent: 2048,
            bytes_received: 100,
            links: links
                .iter()
                .map(|&peer| LinkBytes { peer: Rank::new(peer), bytes_sent: 3 << 20, bytes_received: 1 })
                .collect(),
        };
        let record = EpochRecord { epoch: 4, test_accuracy: Some(0.875), ..EpochRecord::default() };
        Report {
            world_size: ranks as u32,
            ranks: (0..ranks as u32).map(result).collect(),
            history: vec![record],
            ..Report::default()
        }
    }

    #[test]
    fn a_page_shows_ranks_links_and_results() {
        for (report, expected, absent) in [
            (
                report_of(2, &[1]),
                &["a&lt;b&gt;&quot;", "<td>1 <em>slowest</em>", "width:50.00%", "3.0 MiB"][..],
                "test accuracy,",
            ),
            (report_of(2, &[]), &["share memory and used no links"], "<td>0<td>1"),
            (report_of(1, &[]), &["1 rank,", "<h2>Ranks</h2>"], "<h2>Links</h2>"),
            (report_of(0, &[]), &["<h2>Configuration</h2>"], "<h2>Ranks</h2>"),
            (report_of(300, &[1, 2]), &["44 more ranks are not shown", "344 more links"], "<td>299"),
            (
                Report { stopped: true, ..report_of(1, &[]) },
                &["A signal stopped the run", "test accuracy, epoch 4</span><strong>0.8750"],
                "NaN",
            ),
            (Report::default(), &["before an epoch was complete"], "<svg"),
        ] {
            let html = make_page(&report, &Loss::CrossEntropy);
            assert!(html.starts_with("<!doctype html>") && html.ends_with("</html>\n"));
            for text in expected {
                assert!(html.contains(text), "{text}: {html}");
            }
            assert!(!html.contains(absent), "{absent}: {html}");
        }
    }
}
