//! Reads the environment variables with which a launcher describes the job.

use std::env;
use std::net::SocketAddr;
use std::time::Duration;

use super::exit_report::{EXIT_PIPE_VARIABLE, take_exit_pipe};
use crate::types::{Rank, WorldSize, debug_as_display};
use crate::wire::{Secret, SecretError};

/// The environment variable with the job's secret.
pub const SECRET_VARIABLE: &str = "RING_SECRET";
const RANK_VARIABLE: &str = "RING_RANK";
const WORLD_SIZE_VARIABLE: &str = "RING_WORLD_SIZE";
const RENDEZVOUS_VARIABLE: &str = "RING_RENDEZVOUS";
/// The number of the job, in hexadecimal. It is the same on all ranks.
pub const JOB_ID_VARIABLE: &str = "RING_JOB_ID";
const START_TIMEOUT_MS_VARIABLE: &str = "RING_START_TIMEOUT_MS";
const LOCAL_PROCESSORS_VARIABLE: &str = "RING_LOCAL_PROCESSORS";

/// The environment variables in which other launchers set the number of ranks, each with the name of its launcher.
const OTHER_LAUNCHERS: [(&str, &str); 5] = [
    ("WORLD_SIZE", "torchrun"),
    ("OMPI_COMM_WORLD_SIZE", "Open MPI's mpirun"),
    ("PMI_SIZE", "MPICH's mpiexec"),
    ("HOROVOD_SIZE", "horovodrun"),
    ("SLURM_STEP_NUM_TASKS", "srun"),
];

/// This rank and its job, as `ringrun` describes them in environment variables.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LaunchedRank {
    /// This process's rank.
    pub rank: Rank,
    /// The world size.
    pub world: WorldSize,
    /// The address of the launcher's rendezvous.
    pub rendezvous: SocketAddr,
    /// The job's id.
    pub job_id: [u8; 16],
    /// The start timeout, if the launcher sets one.
    pub start_timeout: Option<Duration>,
    /// The number of processors of this host that the job may use, if the launcher has set it. A rank that is bound
    /// to one processor cannot count the job's processors itself.
    pub local_processors: Option<u32>,
}

/// Why the environment is invalid.
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EnvironmentError {
    /// A variable of `ringrun` is missing, although another variable of `ringrun` is set.
    #[error("{present} is set but {missing} is not; start the ranks with ringrun, or unset {present}")]
    Incomplete {
        /// A variable that is set.
        present: &'static str,
        /// The variable that is missing.
        missing: &'static str,
    },
    /// A variable has an invalid value.
    #[error("the environment variable {name} is `{value}`, which is not {expected}")]
    Invalid {
        /// The name of the variable.
        name: &'static str,
        /// The value of the variable.
        value: String,
        /// A description of valid values.
        expected: &'static str,
    },
    /// A launcher that is not ringrun started this process as one of several ranks.
    #[error(
        "{launcher} started this process as one of {ranks} ranks ({variable} is set), and ringtrain cannot connect these ranks; start the ranks with `ringrun -n {ranks}`, or use --peers and --rank, or unset {variable} to run alone"
    )]
    OtherLauncher {
        /// The variable that the launcher has set.
        variable: &'static str,
        /// The name of the launcher.
        launcher: &'static str,
        /// The number of ranks.
        ranks: u32,
    },
}

debug_as_display!(EnvironmentError);

/// Reads the variables of `ringrun`. Returns `None` if `ringrun` did not start this process. Also takes over the pipe to
/// `ringrun` that this process has inherited, so that the programs that this process executes do not inherit it.
///
/// # Errors
///
/// [`EnvironmentError`] if variables are missing or invalid, or if another launcher, such as mpirun, started several
/// ranks: without this error, each of these ranks would train alone.
pub fn from_environment() -> Result<Option<LaunchedRank>, EnvironmentError> {
    let get = |name: &str| env::var_os(name).map(|value| value.to_string_lossy().into_owned());
    let launched = parse_environment(get)?;
    if launched.is_some() {
        take_exit_pipe(get(EXIT_PIPE_VARIABLE).as_deref());
    }
    Ok(launched)
}

/// Reads the job's secret from the environment. Returns `None` if the variable is not set.
///
/// # Errors
///
/// [`SecretError`] if the secret is too short or too long.
pub fn secret_from_environment() -> Result<Option<Secret>, SecretError> {
    env::var_os(SECRET_VARIABLE).map(|value| Secret::new(value.as_encoded_bytes())).transpose()
}

/// Like [`from_environment`], but calls `get(name)` for the value of a variable.
fn parse_environment(get: impl Fn(&str) -> Option<String>) -> Result<Option<LaunchedRank>, EnvironmentError> {
    let Some(rendezvous) = get(RENDEZVOUS_VARIABLE) else {
        if let Some(present) =
            [RANK_VARIABLE, WORLD_SIZE_VARIABLE].into_iter().find(|name| get(name).is_some())
        {
            return Err(EnvironmentError::Incomplete { present, missing: RENDEZVOUS_VARIABLE });
        }
        let other = OTHER_LAUNCHERS.iter().find_map(|&(variable, launcher)| {
            let ranks = get(variable)?.parse::<u32>().ok().filter(|&ranks| ranks > 1)?;
            Some(EnvironmentError::OtherLauncher { variable, launcher, ranks })
        });
        return other.map_or(Ok(None), Err);
    };
    let require =
        |missing| get(missing).ok_or(EnvironmentError::Incomplete { present: RENDEZVOUS_VARIABLE, missing });
    let invalid =
        |name, value: &str, expected| EnvironmentError::Invalid { name, value: value.into(), expected };
    let world = require(WORLD_SIZE_VARIABLE)?;
    let world = world
        .parse()
        .ok()
        .and_then(WorldSize::new)
        .ok_or_else(|| invalid(WORLD_SIZE_VARIABLE, &world, "a number of ranks"))?;
    let rank = require(RANK_VARIABLE)?;
    let rank = rank
        .parse()
        .ok()
        .map(Rank::new)
        .filter(|&rank| world.contains(rank))
        .ok_or_else(|| invalid(RANK_VARIABLE, &rank, "a rank below RING_WORLD_SIZE"))?;
    let id = require(JOB_ID_VARIABLE)?;
    Ok(Some(LaunchedRank {
        rank,
        world,
        rendezvous: rendezvous
            .parse()
            .map_err(|_| invalid(RENDEZVOUS_VARIABLE, &rendezvous, "an address, ip:port"))?,
        job_id: parse_16_hex_bytes(&id)
            .ok_or_else(|| invalid(JOB_ID_VARIABLE, &id, "32 hexadecimal digits"))?,
        start_timeout: get(START_TIMEOUT_MS_VARIABLE)
            .map(|ms| {
                ms.parse().map_err(|_| invalid(START_TIMEOUT_MS_VARIABLE, &ms, "a number of milliseconds"))
            })
            .transpose()?
            .map(Duration::from_millis),
        local_processors: get(LOCAL_PROCESSORS_VARIABLE)
            .map(|count| {
                count
                    .parse()
                    .map_err(|_| invalid(LOCAL_PROCESSORS_VARIABLE, &count, "a number of processors"))
            })
            .transpose()?,
    }))
}

fn parse_16_hex_bytes(text: &str) -> Option<[u8; 16]> {
    let number = u128::from_str_radix(text, 16).ok().filter(|_| text.len() == 32)?;
    Some(number.to_be_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    const VALID_VARIABLES: [(&str, &str); 4] = [
        ("RING_RENDEZVOUS", "127.0.0.1:4000"),
        ("RING_RANK", "2"),
        ("RING_WORLD_SIZE", "4"),
        ("RING_JOB_ID", "000102030405060708090a0b0c0d0e0f"),
    ];

    /// Changes to the variables in `VALID_VARIABLES`: each has the name of a variable and its new value, or `None` to
    /// unset the variable.
    type VariableChanges<'a> = &'a [(&'a str, Option<&'a str>)];

    fn parse_with_changes(changes: VariableChanges<'_>) -> Result<Option<LaunchedRank>, EnvironmentError> {
        parse_environment(|name| {
            let changed = changes.iter().find(|(changed, _)| *changed == name);
            let value = changed.map_or_else(
                || VALID_VARIABLES.iter().find(|(good, _)| *good == name).map(|(_, value)| *value),
                |(_, value)| *value,
            );
            value.map(str::to_owned)
        })
    }

    #[test]
    fn the_launchers_variables_are_read() {
        let launched = parse_with_changes(&[]).unwrap().unwrap();
        assert_eq!((launched.rank.get(), launched.world.get(), launched.job_id[15]), (2, 4, 15));
    }

    #[test]
    fn missing_and_invalid_variables_are_errors() {
        let cases: [(VariableChanges<'_>, &str); 8] = [
            (&[("RING_RENDEZVOUS", None)], "RING_RANK is set but RING_RENDEZVOUS is not"),
            (&[("RING_RANK", None)], "RING_RANK is not"),
            (&[("RING_RANK", Some("4"))], "a rank below"),
            (&[("RING_RANK", Some("x"))], "`x`"),
            (&[("RING_WORLD_SIZE", Some("0"))], "a number of ranks"),
            (&[("RING_RENDEZVOUS", Some("here"))], "ip:port"),
            (&[("RING_JOB_ID", Some("12"))], "hexadecimal"),
            (&[("RING_START_TIMEOUT_MS", Some("soon"))], "milliseconds"),
        ];
        for (changes, expected) in cases {
            let error = parse_with_changes(changes).unwrap_err().to_string();
            assert!(error.contains(expected), "{changes:?}: {error}");
        }
    }

    /// Four processes that ignored another launcher's variables would train four separate models.
    #[test]
    fn ranks_of_another_launcher_get_an_error() {
        for (variable, launcher) in [
            ("WORLD_SIZE", "torchrun"),
            ("OMPI_COMM_WORLD_SIZE", "Open MPI's mpirun"),
            ("PMI_SIZE", "MPICH's mpiexec"),
            ("HOROVOD_SIZE", "horovodrun"),
            ("SLURM_STEP_NUM_TASKS", "srun"),
        ] {
            let others = |size: &str| parse_environment(|name| (name == variable).then(|| size.to_owned()));
            let error = others("4").unwrap_err().to_string();
            assert!(error.starts_with(launcher) && error.contains("`ringrun -n 4`"), "{error}");
            assert_eq!(others("1"), Ok(None));
        }
    }
}
