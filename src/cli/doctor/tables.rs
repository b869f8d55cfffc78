//! The tables that `ringrun doctor` prints.

use std::fmt::Write as _;

use super::facts::{HostFacts, InterfaceFacts};
use super::findings::{Finding, HostChecks, Severity, format_rate};
use super::ring_order::suggest_order;
use crate::types::counted;

/// With more hosts than this, a table of all pairs is too wide for a terminal.
const MATRIX_HOSTS_MAX: usize = 12;

/// Returns the report as text: the hosts, the connections, the findings and the order of the ring.
pub(super) fn format_report(reports: &HostChecks<'_>, findings: &[Finding]) -> String {
    let (count, reported) = (reports.names.len(), reports.reports.iter().flatten().count());
    // If no host has reported, tables would be empty.
    let mut text = if reported > 0 { format_hosts(reports) } else { String::new() };
    if reported > 1 && count <= MATRIX_HOSTS_MAX {
        let round_trip = |from, to| {
            let link = reports.link(from, to)?;
            Some(link.as_ref().map_or("failed".into(), |link| format!("{:.0}", link.round_trip_s * 1e6)))
        };
        let rate = |from, to| reports.rate(from, to).map(|rate| format!("{:.0}", rate * 8e-6));
        text +=
            &format_matrix("round-trip time in us, from the row to the column", reports.names, round_trip);
        text += &format_matrix("rate in Mbit/s, from the row to the column", reports.names, rate);
    }
    text += "\n";
    for finding in findings {
        let label = match finding.severity {
            Severity::Problem => "PROBLEM",
            Severity::Warning => "warning",
        };
        let _ = writeln!(text, "{label}: {}", finding.text);
    }
    if let Some(line) = format_order(reports) {
        let _ = writeln!(text, "{line}");
    }
    let problems = findings.iter().filter(|finding| finding.severity == Severity::Problem).count();
    let verdict = match (problems, findings.len()) {
        (0, 0) => "the hosts are fit for a job".into(),
        (0, warnings) => format!("the hosts are fit for a job, with {}", counted(warnings, "warning")),
        (problems, _) => format!("the hosts are not fit for a job: {}", counted(problems, "problem")),
    };
    let _ = writeln!(text, "{verdict}");
    text
}

fn format_hosts(reports: &HostChecks<'_>) -> String {
    let header = ["host", "address", "interface", "line rate", "MTU", "processors", "memory", "version"];
    let mut rows = vec![header.map(str::to_owned).to_vec()];
    for (name, report) in reports.names.iter().zip(reports.reports) {
        let cells = report.as_ref().map_or_else(Vec::new, |report| host_cells(&report.facts));
        rows.push(std::iter::once(name.clone()).chain(cells).collect());
    }
    format_rows(&rows)
}

fn host_cells(facts: &HostFacts) -> Vec<String> {
    let unknown = || "unknown".to_owned();
    let interface = facts.interface.as_ref();
    let rate = interface.and_then(|interface| interface.bits_per_second);
    vec![
        facts.address.to_string(),
        interface.map_or_else(unknown, |interface: &InterfaceFacts| interface.name.clone()),
        rate.map_or_else(unknown, |bits| format_rate(bits as f64 / 8.0)),
        interface.and_then(|interface| interface.mtu).map_or_else(unknown, |mtu| mtu.to_string()),
        facts.processors.to_string(),
        format!("{:.1} GiB", facts.memory_bytes as f64 / (1u64 << 30) as f64),
        facts.version.clone(),
    ]
}

/// Formats a table of a value of each pair of hosts. The value of a host with itself is `-`.
fn format_matrix(title: &str, names: &[String], cell: impl Fn(usize, usize) -> Option<String>) -> String {
    let mut rows = vec![std::iter::once(String::new()).chain(names.iter().cloned()).collect::<Vec<_>>()];
    for (from, name) in names.iter().enumerate() {
        let cells = (0..names.len())
            .map(|to| if from == to { "-".into() } else { cell(from, to).unwrap_or("?".into()) });
        rows.push(std::iter::once(name.clone()).chain(cells).collect());
    }
    format!("\n{title}\n{}", format_rows(&rows))
}

/// Aligns the columns of a table.
fn format_rows(rows: &[Vec<String>]) -> String {
    let columns = rows.iter().map(Vec::len).max().unwrap_or(0);
    let width =
        |column: usize| rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max();
    let mut text = String::new();
    for row in rows {
        let mut line = String::new();
        for (column, cell) in row.iter().enumerate().take(columns) {
            let _ = write!(line, "{cell:<width$}  ", width = width(column).unwrap_or(0));
        }
        let _ = writeln!(text, "{}", line.trim_end());
    }
    text
}

/// Returns a sentence about a better order of the hosts; `None` if the given order is as good.
fn format_order(reports: &HostChecks<'_>) -> Option<String> {
    let count = reports.names.len();
    let (order, slowest) = suggest_order(&reports.rates());
    if count < 4 || order.is_sorted() {
        return None;
    }
    let names: Vec<&str> = order.iter().map(|&host| reports.names[host].as_str()).collect();
    Some(format!(
        "better order of the hosts: -H {} (the slowest link of the ring then has {})",
        names.join(","),
        format_rate(slowest)
    ))
}
