//! Parses the values of options.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::time::Duration;

use super::hosts::RankOrder;
use crate::cli::observe_args::is_variable_of_users;
use crate::launch::{Binding, Mpi4py, RINGRUN_VARIABLE_PREFIX, StdinReader};

/// The longest time that an option accepts, in seconds: a year.
const DURATION_SECONDS_MAX: f64 = 365.0 * 24.0 * 3600.0;

/// Parses a value of `--bind-to`. mpirun and mpiexec allow a qualifier after a colon, which ringrun ignores. For a
/// value that only mpirun or mpiexec accepts, the error says what to use instead.
pub(super) fn parse_binding(text: &str) -> Result<Binding, String> {
    let instead = match text.split_once(':').map_or(text, |(value, _)| value) {
        "none" => return Ok(Binding::None),
        "core" => return Ok(Binding::Core),
        "numa" => return Ok(Binding::Numa),
        "socket" | "package" | "numanode" | "l3cache" | "l4cache" | "l5cache" => {
            "use --bind-to numa, which binds each rank to the NUMA nodes of its share of the processors"
        }
        "hwthread" | "hwt" | "thread" | "pu" | "slot" | "rr" | "l1cache" | "l2cache" | "l1dcache" => {
            "use --bind-to core, which gives each rank an even share of the processors"
        }
        "board" | "machine" | "node" | "host" | "system" => {
            "use --bind-to none, because all ranks are on this host"
        }
        "user" => {
            "start ringrun under `taskset -c LIST`; ringrun uses only the processors that it may run on"
        }
        _ => "ringrun binds ranks to core, numa or none",
    };
    Err(format!("--bind-to {text}: {instead}"))
}

/// Parses the value of `--stdin`. mpirun also accepts other ranks.
pub(super) fn parse_stdin_reader(text: &str) -> Result<StdinReader, String> {
    match text {
        "0" => Ok(StdinReader::RankZero),
        "none" => Ok(StdinReader::NoRank),
        "all" => Ok(StdinReader::AllRanks),
        _ => Err("pass 0, all or none; for other ranks, use a file".to_owned()),
    }
}

/// Parses the value of `--map-by`. mpirun also accepts parts of a host.
pub(super) fn parse_rank_order(text: &str) -> Result<RankOrder, String> {
    match text {
        "slot" => Ok(RankOrder::Slot),
        "node" => Ok(RankOrder::Node),
        _ if text.starts_with("ppr:") => Err("use -N N, which starts N ranks on each host".to_owned()),
        _ => Err("ringrun places ranks by slot or node, and spreads the ranks of a host evenly over its processors (see \
            --bind-to)"
            .to_owned()),
    }
}

pub(super) fn parse_mpi4py(text: &str) -> Result<Mpi4py, String> {
    match text {
        "ringtrain" => Ok(Mpi4py::Ringtrain),
        "installed" => Ok(Mpi4py::Installed),
        _ => Err("neither ringtrain nor installed".to_owned()),
    }
}

pub(super) fn parse_seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "not a number of seconds".to_owned())?;
    if !(0.0..=DURATION_SECONDS_MAX).contains(&seconds) {
        return Err(format!("not between 0 and {DURATION_SECONDS_MAX} seconds"));
    }
    Ok(Duration::from_secs_f64(seconds))
}

pub(super) fn parse_positive_seconds(text: &str) -> Result<Duration, String> {
    match parse_seconds(text)? {
        time if time.is_zero() => Err("must be more than 0".to_owned()),
        // The ranks receive the time in whole milliseconds, so a time below one millisecond would become 0.
        time if time < Duration::from_millis(1) => Err("must be at least 0.001".to_owned()),
        time => Ok(time),
    }
}

/// Parses `NAME=VALUE`, or `NAME` with the value `None`. The value may be any bytes.
pub(super) fn parse_environment_variable(argument: OsString) -> Result<(OsString, Option<OsString>), String> {
    let argument_text = argument.to_string_lossy().into_owned();
    let bytes = argument.into_vec();
    let (name, value) = match bytes.iter().position(|&byte| byte == b'=') {
        Some(separator) => (&bytes[..separator], Some(OsStr::from_bytes(&bytes[separator + 1..]).to_owned())),
        None => (&bytes[..], None),
    };
    if name.is_empty() {
        return Err(format!("-x {argument_text}: a variable needs a name"));
    }
    if name.starts_with(RINGRUN_VARIABLE_PREFIX.as_bytes()) && !is_variable_of_users(name) {
        // Error messages contain only the name, because the value may be a secret.
        let name = String::from_utf8_lossy(name);
        return Err(format!(
            "-x {name}: only ringrun sets variables whose names begin with {RINGRUN_VARIABLE_PREFIX}"
        ));
    }
    Ok((OsStr::from_bytes(name).to_owned(), value))
}
