//! Several programs in one command line, separated by `:`, as mpirun starts them.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::ArgMatches;
use clap::parser::ValueSource;

use super::rank_count::RankCount;
use super::values::parse_environment_variable;
use crate::launch::RankProgram;
use crate::types::WorldSize;

/// The options that each program has for itself. All others apply to the whole job.
const OPTIONS_OF_A_PROGRAM: [&str; 4] = ["ranks", "variables", "wdir", "command"];

/// The options and the command of one program.
pub(super) struct ProgramArgs {
    pub(super) ranks: Option<RankCount>,
    pub(super) variables: Vec<OsString>,
    pub(super) directory: Option<PathBuf>,
    /// The program and its arguments.
    pub(super) command: Vec<OsString>,
}

/// Refuses options of the whole job before a program that is not the first.
pub(super) fn refuse_job_options(command: &clap::Command, matches: &ArgMatches) -> Result<(), String> {
    let is_given = |arg: &&clap::Arg| {
        matches.value_source(arg.get_id().as_str()) == Some(ValueSource::CommandLine)
            && !OPTIONS_OF_A_PROGRAM.contains(&arg.get_id().as_str())
    };
    let Some(arg) = command.get_arguments().find(is_given) else { return Ok(()) };
    Err(format!(
        "--{}: this option applies to the whole job, so it may stand only before the first program; after a `:`, each program \
         has only -n, -x and --wdir",
        arg.get_long().unwrap_or_default()
    ))
}

/// Returns the number of ranks of all programs together. If there are several, each needs its own number.
pub(super) fn total_ranks(programs: &[ProgramArgs]) -> Result<Option<RankCount>, String> {
    if let [only] = programs {
        return Ok(only.ranks);
    }
    let mut total = 0_i64;
    for program in programs {
        let name = program.command.first().map(|name| name.display().to_string()).unwrap_or_default();
        match program.ranks {
            Some(RankCount::Number(number @ 1..)) => total = total.saturating_add(number),
            Some(RankCount::Number(number)) => {
                return Err(format!("-n {number}: the program `{name}` needs at least 1 rank"));
            }
            Some(RankCount::Auto) | None => {
                return Err(format!(
                    "`:` separates several programs, and each of them needs the number of its ranks: `-n N {name}`; if `:` is an \
                     argument of one program, put -- before this program"
                ));
            }
        }
    }
    Ok(Some(RankCount::Number(total)))
}

/// Converts the programs of a job of `world` ranks.
pub(super) fn into_rank_programs(
    programs: Vec<ProgramArgs>,
    world: WorldSize,
) -> Result<Vec<RankProgram>, String> {
    let convert = |args: ProgramArgs| {
        let mut command = args.command.into_iter();
        Ok(RankProgram {
            // Several programs have numbers that are at most the world size. One program may have no number.
            ranks: match args.ranks {
                Some(RankCount::Number(number)) => number as u32,
                Some(RankCount::Auto) | None => world.get(),
            },
            program: command.next().ok_or("there is no COMMAND to run")?,
            arguments: command.collect(),
            variables: args
                .variables
                .into_iter()
                .map(parse_environment_variable)
                .collect::<Result<_, _>>()?,
            directory: args.directory.map(PathBuf::into_os_string),
        })
    };
    programs.into_iter().map(convert).collect()
}
