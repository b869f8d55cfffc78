//! The program `ringbench`: measures collectives and checks their results.

pub mod args;
mod compare;
pub mod compression;
mod flag_check;
pub mod measure;
pub mod operation;
mod output_files;
pub mod pattern;
pub mod plan;
mod plan_error;
mod plot;
pub mod report;
mod statistics;
pub mod test_values;
pub mod time_breakdown;

use std::ffi::OsString;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{CommandFactory as _, Parser as _};
use half::{bf16, f16};

use self::args::BenchArgs;
use self::compare::CompareArgs;
use self::measure::{BenchRow, MeasureOptions, measure};
use self::plan::{BenchCase, BenchPlan, BenchPlanError};
use self::report::{BenchEnvironment, BenchReport};
use super::exit::Exit;
use super::group_args::{JoinError, exit_code_of_group_error};
use super::log_format::LogLevel;
use super::observe_args::{AfterSignal, write_record_on_signals};
use super::print_error::print_error;
use crate::group::{Error, Group};
use crate::types::{DType, F32Loc, F64Loc, I32Loc, I64Loc, Rank, WorldSize, counted, plural};

/// Without `-n`, the iterations of one row together take about this time in microseconds.
const ROW_DURATION_US: f64 = 500_000.0;
/// Without `-n`, the iterations of all rows together take about this time in microseconds.
const ALL_ROWS_DURATION_US: f64 = 30_000_000.0;
/// The size in bytes of the record in which a rank sends its process id and its host name.
const HOST_AND_PID_BYTES: usize = 128;

/// Why a benchmark failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BenchError {
    /// The flags contradict each other, or do not fit the job or the machine.
    #[error(transparent)]
    Plan(#[from] BenchPlanError),
    /// The job did not start.
    #[error(transparent)]
    Join(#[from] JoinError),
    /// An operation failed.
    #[error(transparent)]
    Operation(#[from] Error),
    /// The table could not be printed.
    #[error("the results cannot be printed: {0}")]
    TableNotPrinted(io::Error),
    /// The report or the plot could not be saved.
    #[error("{} cannot be written: {source}", path.display())]
    FileNotSaved {
        /// The path of the file.
        path: PathBuf,
        /// The error of the file system.
        source: io::Error,
    },
    /// Ranks were started with different flags.
    #[error(
        "rank {rank} and rank 0 were started with different flags ({flags}); start all ranks with the same flags"
    )]
    FlagsDiffer {
        /// The lowest rank whose flags differ from the flags of rank 0.
        rank: Rank,
        /// The names of the flags that differ.
        flags: String,
    },
    /// The process cannot listen for signals.
    #[error("cannot listen for signals: {0}")]
    Signals(io::Error),
    /// Elements of the results are wrong.
    #[error("{} of the results {} wrong", counted(.0, "element"), plural(.0, "is", "are"))]
    WrongElements(u64),
}

impl BenchError {
    /// Returns the exit code of a program that fails with this error.
    pub fn exit_code(&self) -> Exit {
        match self {
            Self::Plan(_) => Exit::Usage,
            Self::Join(error) => error.exit_code(),
            Self::Operation(error) => exit_code_of_group_error(error),
            Self::FlagsDiffer { .. } => Exit::Mismatch,
            Self::TableNotPrinted(_) | Self::FileNotSaved { .. } | Self::Signals(_) => Exit::Failure,
            Self::WrongElements(_) => Exit::WrongResult,
        }
    }
}

/// Returns the definition of the options and of the command `compare`.
pub(super) fn command() -> clap::Command {
    BenchArgs::command().subcommand(CompareArgs::command().name("compare"))
}

/// Runs `ringbench` and returns the exit code. The first of `args` is the program's name.
pub fn run_ringbench(args: impl Iterator<Item = OsString>) -> ExitCode {
    let args: Vec<OsString> = args.collect();
    if compare::is_compare(&args) {
        return compare::run_compare(&args);
    }
    let args = match parse_bench_args(args.into_iter()) {
        Ok(args) => args,
        Err(code) => return code,
    };
    if let Err(problem) = args.group.start_log("ringbench", LogLevel::FromEnvironment("warn")) {
        print_error("ringbench", problem);
        return Exit::Usage.into();
    }
    match join_and_bench(&args) {
        Ok(()) => Exit::Success.into(),
        Err(error) => {
            print_error("ringbench", &error);
            error.exit_code().into()
        }
    }
}

/// Parses the options. For `--help`, `--version` or wrong arguments, prints the help, the version or the error, and
/// returns the exit code as `Err`.
fn parse_bench_args(args: impl Iterator<Item = OsString>) -> Result<BenchArgs, ExitCode> {
    BenchArgs::try_parse_from(args).map_err(|error| {
        // Help goes to standard output, errors to standard error. A closed pipe is not an error.
        let _ = error.print();
        if error.use_stderr() { Exit::Usage.into() } else { Exit::Success.into() }
    })
}

/// Checks the arguments for a job of `world` ranks without joining the job, so that ringrun prints an error once and
/// not for every rank. Does not check file paths. The ranks check the paths, because the working directory of a rank
/// may differ from that of ringrun.
pub(super) fn check_arguments(
    args: impl Iterator<Item = OsString>,
    world: WorldSize,
) -> Result<(), ExitCode> {
    let args: Vec<OsString> = args.collect();
    if compare::is_compare(&args) {
        return Err(compare::refuse_several_ranks(&args));
    }
    let args = parse_bench_args(args.into_iter())?;
    let checked = BenchPlan::new(&args).and_then(|plan| plan.fit_to_world(world));
    checked.map(drop).map_err(|error| {
        print_error("ringbench", &error);
        Exit::Usage.into()
    })
}

/// Joins the job, measures all rows, and saves the report. Returns an error if elements of the results are wrong.
fn join_and_bench(args: &BenchArgs) -> Result<(), BenchError> {
    let plan = BenchPlan::new(args)?;
    plan.check_memory(WorldSize::ONE, available_memory_bytes())?;
    // Check the paths before the measurements, so that an unusable path is reported at once.
    output_files::check_files(&plan)?;
    let mut group = args.group.join()?;
    write_record_on_signals(&group, AfterSignal::End).map_err(BenchError::Signals)?;
    let mut stdout = BrokenPipeIgnorer(io::stdout().lock());
    let report = bench(&mut group, &plan, args.group.segment_bytes, &mut stdout)?;
    if group.rank().get() == 0 {
        output_files::save_files(&plan, &report)
            .map_err(|(path, source)| BenchError::FileNotSaved { path, source })?;
    }
    if let Some(timeline) = group.write_timeline()? {
        writeln!(stdout, "# {timeline}").map_err(BenchError::TableNotPrinted)?;
    }
    group.close();
    match report.wrong_elements() {
        None | Some(0) => Ok(()),
        Some(wrong) => Err(BenchError::WrongElements(wrong)),
    }
}

/// Measures every row of the plan. All ranks must call this function together. Rank 0 writes each row to `out` as
/// soon as the row is measured.
///
/// # Errors
///
/// [`BenchError`]. Wrong results are not an error of this function: the report counts the wrong elements.
pub fn bench(
    group: &mut Group,
    plan: &BenchPlan,
    segment_bytes: usize,
    out: &mut dyn Write,
) -> Result<BenchReport, BenchError> {
    flag_check::check_flags_agree(group, plan)?;
    let fitted = plan
        .fit_to_world(group.size())
        .and_then(|plan| plan.check_memory(group.local_size(), available_memory_bytes()).map(|()| plan));
    let plan = &fitted.inspect_err(|error| {
        // If a host has too little memory, only the ranks of this host see the error. Abort the job to stop all ranks.
        let _ = group.abort(&error.to_string());
    })?;
    let hosts_and_pids = gather_host_names_and_pids(group)?;
    let environment = BenchEnvironment::new(group, plan, &hosts_and_pids, segment_bytes);
    let mut sink = io::sink();
    let out: &mut dyn Write = if group.rank().get() == 0 { out } else { &mut sink };
    environment.write_header(out, group, plan, &hosts_and_pids).map_err(BenchError::TableNotPrinted)?;
    let options = MeasureOptions {
        iterations: plan.iterations,
        warm_up: plan.warm_up,
        checks: plan.checks,
        profiles: plan.profiles,
        allocates: plan.allocates,
        rewrites_input: plan.rewrites_input,
        compression: plan.compression,
        budget_us: ROW_DURATION_US.min(ALL_ROWS_DURATION_US / plan.cases.len().max(1) as f64),
    };
    group.set_profiling(plan.profiles);
    let mut results = Vec::with_capacity(plan.cases.len());
    for &case in &plan.cases {
        let row = measure_with_dtype(group, case, options)?;
        row.write_row(out).map_err(BenchError::TableNotPrinted)?;
        results.push(row);
    }
    group.set_profiling(false);
    let report = BenchReport { environment, results };
    report.write_footer(out).map_err(BenchError::TableNotPrinted)?;
    Ok(report)
}

/// Calls [`measure()`] for the element type of the case.
fn measure_with_dtype(
    group: &mut Group,
    case: BenchCase,
    options: MeasureOptions,
) -> Result<BenchRow, Error> {
    match case.dtype {
        DType::F16 => measure::<f16>(group, case, options),
        DType::Bf16 => measure::<bf16>(group, case, options),
        DType::F32 => measure::<f32>(group, case, options),
        DType::F64 => measure::<f64>(group, case, options),
        DType::I8 => measure::<i8>(group, case, options),
        DType::U8 => measure::<u8>(group, case, options),
        DType::I16 => measure::<i16>(group, case, options),
        DType::U16 => measure::<u16>(group, case, options),
        DType::I32 => measure::<i32>(group, case, options),
        DType::U32 => measure::<u32>(group, case, options),
        DType::I64 => measure::<i64>(group, case, options),
        DType::U64 => measure::<u64>(group, case, options),
        DType::F32Loc => measure::<F32Loc>(group, case, options),
        DType::F64Loc => measure::<F64Loc>(group, case, options),
        DType::I32Loc => measure::<I32Loc>(group, case, options),
        DType::I64Loc => measure::<I64Loc>(group, case, options),
    }
}

/// Gathers the host name and the process id of every rank, in rank order.
fn gather_host_names_and_pids(group: &mut Group) -> Result<Vec<(String, u32)>, Error> {
    let host = crate::rendezvous::host_name();
    let mut records = vec![0u8; HOST_AND_PID_BYTES * group.size().as_usize()];
    let own_record = &mut records[group.rank().index() * HOST_AND_PID_BYTES..][..HOST_AND_PID_BYTES];
    let (pid_bytes, name) = own_record.split_at_mut(size_of::<u32>());
    pid_bytes.copy_from_slice(&std::process::id().to_le_bytes());
    let length = host.floor_char_boundary(host.len().min(name.len()));
    name[..length].copy_from_slice(&host.as_bytes()[..length]);
    group.all_gather(&mut records)?;
    let parse_record = |record: &[u8]| {
        let (pid_bytes, name) = record.split_at(size_of::<u32>());
        let name = String::from_utf8_lossy(name);
        let host = name.trim_end_matches('\0').chars().filter(|c| !c.is_control()).collect();
        (host, pid_bytes.try_into().map_or(0, u32::from_le_bytes))
    };
    Ok(records.chunks_exact(HOST_AND_PID_BYTES).map(parse_record).collect())
}

/// Returns the number of bytes that processes can allocate without swapping, or `None` if the kernel does not report
/// this number.
fn available_memory_bytes() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.split_whitespace().next()?.parse::<u64>().ok().map(|kib| kib << 10)
}

/// A writer that ignores a closed pipe. If the pipe is closed, the job continues, because the other ranks and the
/// JSON report still need this rank.
struct BrokenPipeIgnorer<W>(W);

impl<W: Write> Write for BrokenPipeIgnorer<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self.0.write(bytes) {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(bytes.len()),
            result => result,
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self.0.flush() {
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
            result => result,
        }
    }
}
