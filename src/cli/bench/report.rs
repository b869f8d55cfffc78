//! The table on standard output, and the JSON file.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;

use serde::Serialize;

use super::measure::BenchRow;
use super::plan::{BenchPlan, IterationCount};
use super::time_breakdown;
use crate::group::Group;
use crate::train::atomic_file;
use crate::types::WorldSize;

/// What a report takes at most, unless it has very many rows.
const TRIAL_BYTES: usize = 64 << 10;
/// The most ranks that the header lists.
const LISTED_RANKS_MAX: usize = 64;
/// Where the kernel names the congestion control that a socket gets by default.
const HOST_CONGESTION: &str = "/proc/sys/net/ipv4/tcp_congestion_control";

/// Where and under what the figures were measured.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct BenchEnvironment {
    /// Versions of what took part.
    pub versions: Versions,
    /// Rank 0's host.
    pub host: String,
    /// Every rank's host, in rank order.
    pub hosts: Vec<String>,
    /// The processor's name.
    pub cpu: String,
    /// Logical processors that this process may use.
    pub cpu_count: usize,
    /// The kernel's name, release and architecture.
    pub kernel: String,
    /// The congestion control of the links.
    pub congestion_control: String,
    /// The host's default congestion control.
    pub congestion_control_host: String,
    /// Of how many connections a link consists.
    pub streams: u8,
    /// Bytes of a segment on this rank.
    pub segment_bytes: usize,
    /// Iterations before the timed ones.
    pub warm_up: u32,
    /// Whether the buffers were the group's (`--alloc`).
    pub alloc: bool,
}

/// Versions of what took part.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct Versions {
    /// This package's.
    pub ringtrain: &'static str,
    /// Whether it was compiled with optimisation alone (`release`) or with debug assertions (`debug`).
    pub profile: &'static str,
}

/// Everything that was measured.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct BenchReport {
    /// Where and under what.
    pub environment: BenchEnvironment,
    /// A row for each size, type and reduction.
    pub results: Vec<BenchRow>,
}

impl BenchEnvironment {
    /// This host's, with every rank's host and process id as they were gathered.
    pub fn new(group: &Group, plan: &BenchPlan, ranks: &[(String, u32)], segment_bytes: usize) -> Self {
        let host_default = read_line(HOST_CONGESTION);
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
            hosts: ranks.iter().map(|(host, _)| host.clone()).collect(),
            cpu: cpu(),
            cpu_count: std::thread::available_parallelism().map_or(1, usize::from),
            kernel: words.map(|word| word.to_string_lossy()).join(" "),
            congestion_control: congestion,
            congestion_control_host: host_default,
            streams: group.streams(),
            segment_bytes,
            warm_up: plan.warm_up,
            alloc: plan.allocates,
        }
    }

    /// The lines above the table.
    pub(super) fn write_header(
        &self,
        out: &mut dyn Write,
        group: &Group,
        plan: &BenchPlan,
        ranks: &[(String, u32)],
    ) -> io::Result<()> {
        let Versions { ringtrain, profile } = self.versions;
        let iterations = match plan.iterations {
            IterationCount::Fixed(count) => count.to_string(),
            IterationCount::Adaptive => "adaptive".to_owned(),
        };
        let place = if plan.operation.is_in_place() { "in place" } else { "out of place" };
        let whose = if self.alloc { ", in buffers of the group (--alloc)" } else { "" };
        writeln!(
            out,
            "# ringbench {ringtrain} {}: {} rank(s), {place}{whose}",
            plan.operation,
            group.size()
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
        writeln!(out, "# {}, {} processor(s), {}", self.cpu, self.cpu_count, self.kernel)?;
        if profile == "debug" {
            writeln!(
                out,
                "# NOTE: built with debug assertions; build with --release before quoting a figure"
            )?;
        }
        for (rank, (host, process)) in ranks.iter().take(LISTED_RANKS_MAX).enumerate() {
            writeln!(out, "#  Rank {rank:2} Pid {process:6} on {host}")?;
        }
        if ranks.len() > LISTED_RANKS_MAX {
            writeln!(out, "#  ... and {} more", ranks.len() - LISTED_RANKS_MAX)?;
        }
        if plan.profiles {
            time_breakdown::write_legend(out)?;
        }
        writeln!(out, "#")?;
        write_titles(out)
    }
}

fn write_titles(out: &mut dyn Write) -> io::Result<()> {
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
    pub(super) fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        let wrong = self.wrong.map_or_else(|| "N/A".to_owned(), |wrong| wrong.to_string());
        // As in nccl-tests: -1 where there is no root.
        let root = self.root.map_or(-1, i64::from);
        writeln!(
            out,
            " {:>12} {:>12} {:>7} {:>9} {root:>5} {:>10} {:>10} {:>10} {:>7.2} {:>7.2} {wrong:>7} {:>6} {:>13}",
            self.bytes,
            self.count,
            self.dtype,
            self.reduction.unwrap_or("none"),
            short(self.time_us_min),
            short(self.time_us),
            short(self.time_us_p99),
            self.algbw_gb_per_s,
            self.busbw_gb_per_s,
            self.iterations,
            self.algorithm
        )?;
        if let Some(ranks) = &self.profile {
            time_breakdown::write(out, ranks)?;
        }
        out.flush()
    }
}

impl BenchReport {
    /// Wrong elements in all rows; `None` if no row was checked.
    pub fn wrong(&self) -> Option<u64> {
        self.results.iter().filter_map(|row| row.wrong).reduce(|a, b| a + b)
    }

    /// The mean of all rows' bus bandwidths.
    pub fn average_busbw_gb_per_s(&self) -> f64 {
        let sum: f64 = self.results.iter().map(|row| row.busbw_gb_per_s).sum();
        sum / self.results.len().max(1) as f64
    }

    /// The lines below the table.
    pub(super) fn write_footer(&self, out: &mut dyn Write) -> io::Result<()> {
        match self.wrong() {
            None => writeln!(out, "# Out of bounds values : N/A (not checked)")?,
            Some(0) => writeln!(out, "# Out of bounds values : 0 OK")?,
            Some(wrong) => writeln!(out, "# Out of bounds values : {wrong} FAILED")?,
        }
        writeln!(out, "# Avg bus bandwidth    : {:.6}\n#", self.average_busbw_gb_per_s())?;
        out.flush()
    }

    /// Writes the report as JSON: beside the file first, then in its place, so that no reader sees half of it. What is no regular
    /// file is written to as it is.
    ///
    /// # Errors
    ///
    /// What the file system says.
    pub fn save(&self, path: &Path) -> io::Result<()> {
        let mut text = serde_json::to_vec_pretty(self).map_err(io::Error::from)?;
        text.push(b'\n');
        atomic_file::write(path, &text)
    }
}

/// Whether a report can be written to `path`, as far as that can be known beforehand: what is there stays as it is.
///
/// # Errors
///
/// What the file system says.
pub(super) fn check_place(path: &Path) -> io::Result<()> {
    // Through a symbolic link, as the report itself goes.
    let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    match fs::metadata(&target).map(|metadata| metadata.file_type()) {
        Ok(kind) if kind.is_dir() => Err(io::ErrorKind::IsADirectory.into()),
        // White space before the report, which JSON allows, tells whether the device takes anything.
        Ok(kind) if kind.is_char_device() => {
            fs::OpenOptions::new().write(true).open(&target)?.write_all(b"\n")
        }
        // To open a pipe would be to wait for its reader.
        Ok(kind) if !kind.is_file() => Ok(()),
        // A report is written beside the file first: this tries both the directory and the room in it.
        _ => {
            let mut name = target.file_name().ok_or(io::ErrorKind::InvalidFilename)?.to_owned();
            name.push(format!(".{}.trial", std::process::id()));
            let trial = target.with_file_name(name);
            let written = fs::write(&trial, vec![b' '; TRIAL_BYTES]);
            // The first error is the one to tell; there may be nothing to remove.
            let _ = fs::remove_file(&trial);
            written
        }
    }
}

/// Microseconds in four or five figures, as nccl-tests prints them.
fn short(time_us: f64) -> String {
    if time_us < 1000.0 { format!("{time_us:.2}") } else { format!("{time_us:.1}") }
}

fn cpu() -> String {
    let text = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = text.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    name.map_or_else(|| "unknown processor".to_owned(), |(_, name)| name.trim().to_owned())
}

fn read_line(path: &str) -> String {
    fs::read_to_string(path).map_or_else(|_| "unknown".to_owned(), |text| text.trim().to_owned())
}
