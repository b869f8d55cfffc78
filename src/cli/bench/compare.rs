//! The command `ringbench compare`: compares the times of two reports.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Parser;
use serde::Deserialize;

use crate::cli::print_error::print_error;
use crate::cli::version::LONG_VERSION;
use crate::exit::Exit;
use crate::types::{counted, plural};

/// The largest report that is read: more than a run with the maximal number of rows writes without `--profile`.
const REPORT_BYTES_MAX: u64 = 256 << 20;
/// How the values of the environment appear in the message that shows differences: at most this number of characters.
const VALUE_CHARACTERS_MAX: usize = 60;

const AFTER_HELP: &str = "\
Examples:
  ringrun -n 4 ringbench all_reduce --json before.json
  ringrun -n 4 ringbench all_reduce --json after.json
  ringbench compare before.json after.json --threshold 1.1

Rows belong together if they have the same size, element type, reduction and root. The ratio of a row is
its median time in AFTER divided by its median time in BEFORE.

Exit codes:
  0   no row is slower than the threshold allows
  2   wrong arguments, or the reports measure different operations or numbers of ranks
  4   a file cannot be read, or is not a report of ringbench
  15  a report has wrong results
  17  a row is slower than the threshold allows";

/// Compare the times of two reports, which ringbench --json has written.
#[derive(Parser, Debug)]
#[command(name = "ringbench compare", version, long_version = LONG_VERSION, after_help = AFTER_HELP)]
pub(super) struct CompareArgs {
    /// The report of the earlier run
    #[arg(value_name = "BEFORE.json")]
    before: PathBuf,

    /// The report of the later run
    #[arg(value_name = "AFTER.json")]
    after: PathBuf,

    /// A row is slower if its ratio is more than this number. A row is faster if its ratio is less than 1 divided by
    /// this number
    #[arg(long, value_name = "RATIO", default_value = "1.05", value_parser = parse_threshold)]
    threshold: f64,
}

/// Why two reports cannot be compared.
#[derive(Debug, thiserror::Error)]
enum CompareError {
    #[error("{}: {problem}", path.display())]
    Unreadable { path: PathBuf, problem: String },
    #[error(
        "the reports cannot be compared: {} measures {before}, and {} measures {after}",
        before_path.display(),
        after_path.display()
    )]
    DifferentRuns { before_path: PathBuf, before: String, after_path: PathBuf, after: String },
    #[error("the reports have no row with the same size, element type, reduction and root")]
    NoCommonRow,
    #[error("{}: {} of the results {} wrong, so its times mean nothing",
        path.display(), counted(wrong, "element"), plural(wrong, "is", "are"))]
    WrongResults { path: PathBuf, wrong: u64 },
    #[error("the comparison cannot be printed: {0}")]
    NotPrinted(io::Error),
}

impl CompareError {
    fn exit_code(&self) -> Exit {
        match self {
            Self::Unreadable { .. } => Exit::Data,
            Self::DifferentRuns { .. } | Self::NoCommonRow => Exit::Usage,
            Self::WrongResults { .. } => Exit::WrongResult,
            Self::NotPrinted(_) => Exit::Failure,
        }
    }
}

/// The parts of a report that are compared.
#[derive(Deserialize)]
struct StoredReport {
    #[serde(default)]
    environment: BTreeMap<String, serde_json::Value>,
    results: Vec<StoredRow>,
}

#[derive(Deserialize)]
struct StoredRow {
    operation: String,
    dtype: String,
    reduction: Option<String>,
    algorithm: String,
    transport: String,
    world_size: u32,
    root: Option<u32>,
    bytes: u64,
    time_us: f64,
    busbw_gb_per_s: f64,
    wrong: Option<u64>,
}

/// What identifies a row in a report: element type, reduction, root, size.
type RowKey<'a> = (&'a str, Option<&'a str>, Option<u32>, u64);

impl StoredRow {
    fn key(&self) -> RowKey<'_> {
        (&self.dtype, self.reduction.as_deref(), self.root, self.bytes)
    }

    /// Describes what both reports must have in common.
    fn describe_run(&self) -> String {
        format!("`{}` with {}", self.operation.escape_debug(), counted(self.world_size, "rank"))
    }
}

/// Returns whether the first argument after the program's name is `compare`.
pub(super) fn is_compare(args: &[OsString]) -> bool {
    args.get(1).is_some_and(|name| name == "compare")
}

/// Prints the error for a comparison that `ringrun` started on several ranks, or the text of `--help`.
pub(super) fn refuse_several_ranks(args: &[OsString]) -> ExitCode {
    if let Err(code) = parse_compare_args(args) {
        return code;
    }
    print_error("ringbench", "`ringbench compare` runs in one process; start it without ringrun");
    Exit::Usage.into()
}

/// Runs `ringbench compare` and returns the exit code.
pub(super) fn run_compare(args: &[OsString]) -> ExitCode {
    let args = match parse_compare_args(args) {
        Ok(args) => args,
        Err(code) => return code,
    };
    match compare(&args) {
        Ok(0) => Exit::Success.into(),
        Ok(_) => Exit::Slower.into(),
        Err(error) => {
            print_error("ringbench", &error);
            error.exit_code().into()
        }
    }
}

/// Parses the arguments. On `--help` or wrong arguments, prints the text and returns the exit code.
fn parse_compare_args(args: &[OsString]) -> Result<CompareArgs, ExitCode> {
    CompareArgs::try_parse_from(args.iter().skip(1)).map_err(|error| {
        let _ = error.print();
        if error.use_stderr() { Exit::Usage.into() } else { Exit::Success.into() }
    })
}

fn parse_threshold(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(ratio) if ratio >= 1.0 && ratio.is_finite() => Ok(ratio),
        _ => Err(format!("`{text}` is not a ratio of at least 1, for example 1.05 for 5% slower")),
    }
}

/// Prints the comparison. Returns the number of rows that are slower than the threshold allows.
fn compare(args: &CompareArgs) -> Result<usize, CompareError> {
    let (before, after) = (read_report(&args.before)?, read_report(&args.after)?);
    let runs = (before.results[0].describe_run(), after.results[0].describe_run());
    if runs.0 != runs.1 {
        return Err(CompareError::DifferentRuns {
            before_path: args.before.clone(),
            before: runs.0,
            after_path: args.after.clone(),
            after: runs.1,
        });
    }
    let (text, slower) = make_table(&before, &after, args.threshold)?;
    let header = format!("# {}: {} -> {}\n", runs.0, args.before.display(), args.after.display());
    match io::stdout().write_all((header + &text).as_bytes()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(CompareError::NotPrinted(error)),
        _ => Ok(slower),
    }
}

/// Reads a report, and checks that it has rows, all of one operation and world, with times above zero.
fn read_report(path: &Path) -> Result<StoredReport, CompareError> {
    let unreadable = |problem: String| CompareError::Unreadable { path: path.to_owned(), problem };
    let file = File::open(path).map_err(|error| unreadable(error.to_string()))?;
    let mut bytes = Vec::new();
    file.take(REPORT_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(|error| unreadable(error.to_string()))?;
    if bytes.len() as u64 > REPORT_BYTES_MAX {
        return Err(unreadable(format!("more than {REPORT_BYTES_MAX} bytes, too many for a report")));
    }
    let report: StoredReport = serde_json::from_slice(&bytes)
        .map_err(|error| unreadable(format!("not a report of `ringbench --json`: {error}")))?;
    let Some(first) = report.results.first() else {
        return Err(unreadable("the report has no rows".to_owned()));
    };
    if let Some(other) = report.results.iter().find(|row| row.describe_run() != first.describe_run()) {
        let (one, other) = (first.describe_run(), other.describe_run());
        return Err(unreadable(format!("the report measures both {one} and {other}")));
    }
    if let Some(row) = report.results.iter().find(|row| !(row.time_us.is_finite() && row.time_us > 0.0)) {
        return Err(unreadable(format!("the time of {} bytes is not a number above 0", row.bytes)));
    }
    match report.results.iter().filter_map(|row| row.wrong).fold(0, u64::saturating_add) {
        0 => Ok(report),
        wrong => Err(CompareError::WrongResults { path: path.to_owned(), wrong }),
    }
}

/// Returns the table, and the number of rows that are slower than the threshold allows.
fn make_table(
    before: &StoredReport,
    after: &StoredReport,
    threshold: f64,
) -> Result<(String, usize), CompareError> {
    let mut table = describe_differences(before, after);
    let _ = writeln!(
        table,
        "#{:>12} {:>7} {:>9} {:>5} {:>11} {:>11} {:>7} {:>8} {:>8}\n#{:>12} {:>7} {:>9} {:>5} {:>11} {:>11} {:>7} {:>8} {:>8}",
        "size",
        "type",
        "redop",
        "root",
        "before",
        "after",
        "ratio",
        "busbw",
        "busbw",
        "(B)",
        "",
        "",
        "",
        "(us)",
        "(us)",
        "",
        "(GB/s)",
        "(GB/s)"
    );
    let rows_after: BTreeMap<RowKey<'_>, &StoredRow> =
        after.results.iter().map(|row| (row.key(), row)).collect();
    let pairs: Vec<(&StoredRow, &StoredRow)> =
        before.results.iter().filter_map(|row| Some((row, *rows_after.get(&row.key())?))).collect();
    let (mut slower, mut sum_of_logarithms) = (0, 0.0);
    for (old, new) in &pairs {
        let ratio = new.time_us / old.time_us;
        sum_of_logarithms += ratio.ln();
        slower += usize::from(ratio > threshold);
        write_row(&mut table, old, new, threshold);
    }
    if pairs.is_empty() {
        return Err(CompareError::NoCommonRow);
    }
    let (only_before, only_after) = (before.results.len() - pairs.len(), after.results.len() - pairs.len());
    if only_before + only_after > 0 {
        let _ = writeln!(
            table,
            "# not compared: {} only in the first report, {only_after} only in the second",
            counted(only_before, "row")
        );
    }
    let mean = (sum_of_logarithms / pairs.len() as f64).exp();
    let _ = writeln!(
        table,
        "# geometric mean of the ratios of {}: {mean:.3}; slower by more than {threshold}: {}",
        counted(pairs.len(), "row"),
        counted(slower, "row")
    );
    Ok((table, slower))
}

fn write_row(table: &mut String, old: &StoredRow, new: &StoredRow, threshold: f64) {
    let ratio = new.time_us / old.time_us;
    let verdict = match ratio {
        ratio if ratio > threshold => " slower",
        ratio if ratio < 1.0 / threshold => " faster",
        _ => "",
    };
    let change = |name: &str, old: &str, new: &str| {
        if old == new {
            return String::new();
        }
        format!(" {name} {} -> {}", old.escape_debug(), new.escape_debug())
    };
    let _ = writeln!(
        table,
        " {:>12} {:>7} {:>9} {:>5} {:>11.2} {:>11.2} {ratio:>7.3} {:>8.2} {:>8.2}{verdict}{}{}",
        old.bytes,
        old.dtype.escape_debug().to_string(),
        old.reduction.as_deref().unwrap_or("none").escape_debug().to_string(),
        old.root.map_or(-1, i64::from),
        old.time_us,
        new.time_us,
        old.busbw_gb_per_s,
        new.busbw_gb_per_s,
        change("algorithm", &old.algorithm, &new.algorithm),
        change("transport", &old.transport, &new.transport),
    );
}

/// Returns a line for each setting and property of the machines that differs between the reports.
fn describe_differences(before: &StoredReport, after: &StoredReport) -> String {
    let shorten = |value: Option<&serde_json::Value>| {
        let text = value.map_or_else(|| "nothing".to_owned(), ToString::to_string);
        text.chars().take(VALUE_CHARACTERS_MAX).collect::<String>()
    };
    let mut text = String::new();
    let mut names: Vec<&String> = before.environment.keys().chain(after.environment.keys()).collect();
    names.sort();
    names.dedup();
    for name in names {
        let (old, new) = (before.environment.get(name), after.environment.get(name));
        if old != new {
            let _ = writeln!(
                text,
                "# NOTE: {} differs: {} -> {}",
                name.escape_debug(),
                shorten(old),
                shorten(new)
            );
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    /// Returns a report with a row for each size and time.
    fn make_report(rows: &[(u64, f64)]) -> StoredReport {
        let row = |&(bytes, time_us): &(u64, f64)| StoredRow {
            operation: "all_reduce".into(),
            dtype: "f32".into(),
            reduction: Some("sum".into()),
            algorithm: "ring".into(),
            transport: "shm".into(),
            world_size: 2,
            root: None,
            bytes,
            time_us,
            busbw_gb_per_s: 1.0,
            wrong: Some(0),
        };
        StoredReport { environment: BTreeMap::new(), results: rows.iter().map(row).collect() }
    }

    #[test]
    fn clap_accepts_the_definition_of_the_options() {
        CompareArgs::command().debug_assert();
    }

    #[test]
    fn rows_above_the_threshold_are_slower() {
        let before = make_report(&[(4, 100.0), (8, 100.0), (16, 100.0), (32, 1.0)]);
        let after = make_report(&[(16, 94.0), (8, 105.0), (4, 106.0), (64, 1.0)]);
        let (table, slower) = make_table(&before, &after, 1.05).unwrap();
        assert_eq!(slower, 1, "{table}");
        let verdict_of = |size: &str| {
            let row = table.lines().find(|line| line.split_whitespace().next() == Some(size)).unwrap();
            row.split_whitespace().last().unwrap().to_owned()
        };
        assert_eq!(
            (verdict_of("4"), verdict_of("8"), verdict_of("16")),
            ("slower".into(), "1.00".into(), "faster".into())
        );
        assert!(table.contains("1 row only in the first report, 1 only in the second"), "{table}");
        assert!(table.contains("ratios of 3 rows: 1.015; slower by more than 1.05: 1 row"), "{table}");
        assert!(matches!(
            make_table(&before, &make_report(&[(5, 1.0)]), 1.05),
            Err(CompareError::NoCommonRow)
        ));
    }
}
