//! Writes the results: as a table for standard output, and as a report in a JSON file.

use std::fs;
use std::io::{self, Write};
use std::path::Path;

use serde::Serialize;

use super::measure::BenchRow;
use super::plan::{BenchPlan, IterationCount};
use super::time_breakdown;
use crate::group::Group;
use crate::train::atomic_file;
use crate::types::{WorldSize, counted};

/// The maximal number of ranks that the header lists.
const LISTED_RANKS_MAX: usize = 64;
/// The file in which the kernel names the default congestion control of sockets.
const HOST_CONGESTION_PATH: &str = "/proc/sys/net/ipv4/tcp_congestion_control";

/// The machine and the settings of a measurement.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct BenchEnvironment {
    /// The version of this program, and how it was compiled.
    pub versions: Versions,
    /// The name of rank 0's host.
    pub host: String,
    /// The name of every rank's host, in rank order.
    pub hosts: Vec<String>,
    /// The name of the processor.
    pub cpu: String,
    /// The number of logical processors that this process may use.
    pub cpu_count: usize,
    /// The kernel's name, release and architecture.
    pub kernel: String,
    /// The TCP congestion control of the links (the connections between ranks).
    pub congestion_control: String,
    /// The host's default congestion control.
    pub congestion_control_host: String,
    /// The number of connections of each link.
    pub streams: u8,
    /// The size in bytes of the segments into which this rank divides long messages.
    pub segment_bytes: usize,
    /// The number of iterations before the timed iterations.
    pub warm_up: u32,
    /// Whether the buffers were allocated with [`Group::alloc`] (`--alloc`).
    pub alloc: bool,
    /// Whether each rank wrote to its input before each iteration (`--rewrite-input`).
    pub rewrite_input: bool,
}

/// The version of this program, and how it was compiled.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Versions {
    /// The version of the package.
    pub ringtrain: &'static str,
    /// `debug` if this program was compiled with debug assertions, otherwise `release`.
    pub profile: &'static str,
}

/// The results of all rows, with the machine and the settings.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct BenchReport {
    /// The machine and the settings.
    pub environment: BenchEnvironment,
    /// One row for each combination of a size, an element type and a reduction.
    pub results: Vec<BenchRow>,
}

impl BenchEnvironment {
    /// Describes this host and the settings. `hosts_and_pids` holds the host name and the process id of every rank.
    pub fn new(
        group: &Group,
        plan: &BenchPlan,
        hosts_and_pids: &[(String, u32)],
        segment_bytes: usize,
    ) -> Self {
        let host_default = read_trimmed_file(HOST_CONGESTION_PATH);
        let congestion = match (group.size(), group.congestion_control()) {
            (WorldSize::ONE, _) => "none".to_owned(),
            (_, Some(name)) => name.to_owned(),
            (_, None) => host_default.clone(),
        };
        let kernel = rustix::system::uname();
        let words = [kernel.sysname(), kernel.release(), kernel.machine()];
        Self {
            versions: Versions {
                ringtrain: env!("CARGO_PKG_VERSION"),
                profile: if cfg!(debug_assertions) { "debug" } else { "release" },
            },
            host: crate::rendezvous::host_name(),
            hosts: hosts_and_pids.iter().map(|(host, _)| host.clone()).collect(),
            cpu: cpu_name(),
            cpu_count: std::thread::available_parallelism().map_or(1, usize::from),
            kernel: words.map(|word| word.to_string_lossy()).join(" "),
            congestion_control: congestion,
            congestion_control_host: host_default,
            streams: group.streams(),
            segment_bytes,
            warm_up: plan.warm_up,
            alloc: plan.allocates,
            rewrite_input: plan.rewrites_input,
        }
    }

    /// Writes the lines above the table.
    pub(super) fn write_header(
        &self,
        out: &mut dyn Write,
        group: &Group,
        plan: &BenchPlan,
        hosts_and_pids: &[(String, u32)],
    ) -> io::Result<()> {
        let Versions { ringtrain, profile } = self.versions;
        let iterations = match plan.iterations {
            IterationCount::Fixed(count) => count.to_string(),
            IterationCount::Adaptive => "adaptive".to_owned(),
        };
        let in_place = if plan.operation.is_in_place() { "in place" } else { "out of place" };
        let alloc = if self.alloc { ", in buffers from Group::alloc (--alloc)" } else { "" };
        let rewritten = if self.rewrite_input { ", of rewritten inputs (--rewrite-input)" } else { "" };
        writeln!(
            out,
            "# ringbench {ringtrain} {}: {}, {in_place}{alloc}{rewritten}",
            plan.operation,
            counted(group.size(), "rank")
        )?;
        writeln!(
            out,
            "# minBytes {} maxBytes {} step: {} warmup iters: {} iters: {iterations} validation: {}",
            plan.bytes_min, plan.bytes_max, plan.step, plan.warm_up, plan.checks
        )?;
        writeln!(
            out,
            "# transport {}  congestion control {}  streams {}  segment {} bytes",
            group.transport(),
            self.congestion_control,
            self.streams,
            self.segment_bytes
        )?;
        let processors = counted(self.cpu_count, "processor");
        writeln!(out, "# {}, rank 0 may use {processors}, {}", self.cpu, self.kernel)?;
        if profile == "debug" {
            writeln!(
                out,
                "# NOTE: built with debug assertions; build with --release before you publish results"
            )?;
        }
        for (rank, (host, pid)) in hosts_and_pids.iter().take(LISTED_RANKS_MAX).enumerate() {
            writeln!(out, "#  Rank {rank:2} Pid {pid:6} on {host}")?;
        }
        if hosts_and_pids.len() > LISTED_RANKS_MAX {
            writeln!(out, "#  ... and {} more", hosts_and_pids.len() - LISTED_RANKS_MAX)?;
        }
        if plan.profiles {
            time_breakdown::write_legend(out)?;
        }
        writeln!(out, "#")?;
        write_column_titles(out)
    }
}

fn write_column_titles(out: &mut dyn Write) -> io::Result<()> {
    let title = |titles: [&str; 13]| {
        let [size, count, dtype, redop, root, min, median, p99, algbw, busbw, wrong, iters, algorithm] =
            titles;
        format!(
            "#{size:>12} {count:>12} {dtype:>7} {redop:>9} {root:>5} {min:>10} {median:>10} {p99:>10} {algbw:>7} \
             {busbw:>7} {wrong:>7} {iters:>6} {algorithm:>13}"
        )
    };
    let names = [
        "size",
        "count",
        "type",
        "redop",
        "root",
        "time min",
        "median",
        "p99",
        "algbw",
        "busbw",
        "#wrong",
        "iters",
        "algorithm",
    ];
    let units = ["(B)", "(elements)", "", "", "", "(us)", "(us)", "(us)", "(GB/s)", "(GB/s)", "", "", ""];
    writeln!(out, "{}\n{}", title(names), title(units))
}

impl BenchRow {
    /// Writes the line of this row, and below it the time breakdown if there is one.
    pub(super) fn write_row(&self, out: &mut dyn Write) -> io::Result<()> {
        let wrong = self.wrong.map_or_else(|| "N/A".to_owned(), |wrong| wrong.to_string());
        // Like nccl-tests, print -1 if there is no root.
        let root = self.root.map_or(-1, i64::from);
        writeln!(
            out,
            " {:>12} {:>12} {:>7} {:>9} {root:>5} {:>10} {:>10} {:>10} {:>7.2} {:>7.2} {wrong:>7} {:>6} {:>13}",
            self.bytes,
            self.count,
            self.dtype,
            self.reduction.unwrap_or("none"),
            format_time(self.time_us_min),
            format_time(self.time_us),
            format_time(self.time_us_p99),
            self.algbw_gb_per_s,
            self.busbw_gb_per_s,
            self.iterations,
            self.algorithm
        )?;
        if let Some(result) = &self.compression {
            result.write(out)?;
        }
        if let Some(ranks) = &self.profile {
            time_breakdown::write_time_breakdown(out, ranks)?;
        }
        out.flush()
    }
}

impl BenchReport {
    /// Returns the number of wrong elements in all rows, or `None` if no row was checked.
    pub fn wrong_elements(&self) -> Option<u64> {
        self.results.iter().filter_map(|row| row.wrong).reduce(|a, b| a + b)
    }

    /// Returns the mean bus bandwidth of all rows.
    pub fn average_busbw_gb_per_s(&self) -> f64 {
        let sum: f64 = self.results.iter().map(|row| row.busbw_gb_per_s).sum();
        sum / self.results.len().max(1) as f64
    }

    /// Writes the lines below the table.
    pub(super) fn write_footer(&self, out: &mut dyn Write) -> io::Result<()> {
        match self.wrong_elements() {
            None => writeln!(out, "# Out of bounds values : N/A (not checked)")?,
            Some(0) => writeln!(out, "# Out of bounds values : 0 OK")?,
            Some(wrong) => writeln!(out, "# Out of bounds values : {wrong} FAILED")?,
        }
        writeln!(out, "# Avg bus bandwidth    : {:.6}\n#", self.average_busbw_gb_per_s())?;
        out.flush()
    }

    /// Writes the report in JSON. Writes a new file and renames this file to `path`, so that no reader sees half a
    /// report. If `path` is not a regular file but, for example, a pipe, writes directly to `path`.
    ///
    /// # Errors
    ///
    /// Errors of the file system.
    pub fn save(&self, path: &Path) -> io::Result<()> {
        let mut text = serde_json::to_vec_pretty(self).map_err(io::Error::from)?;
        text.push(b'\n');
        atomic_file::replace_file(path, &text)
    }
}

/// Formats microseconds as nccl-tests does: with two decimals below 1000, and otherwise with one decimal.
fn format_time(time_us: f64) -> String {
    if time_us < 1000.0 { format!("{time_us:.2}") } else { format!("{time_us:.1}") }
}

/// Returns the name of the processor.
fn cpu_name() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = text.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    name.map_or_else(|| "unknown processor".to_owned(), |(_, name)| name.trim().to_owned())
}

fn read_trimmed_file(path: &str) -> String {
    fs::read_to_string(path).map_or_else(|_| "unknown".to_owned(), |text| text.trim().to_owned())
}
