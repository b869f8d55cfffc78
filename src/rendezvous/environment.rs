//! Reads the environment variables with which a launcher describes the job.

use std::env;
use std::net::{IpAddr, SocketAddr};
use std::num::NonZero;
use std::path::PathBuf;
use std::thread::available_parallelism;
use std::time::Duration;

use super::environment_error::EnvironmentError;
use super::exit_report::{EXIT_PIPE_VARIABLE, take_exit_pipe};
use super::other_launcher::{DiscoveredRank, INDEX_VARIABLE, discover, hydra_proxy};
use super::peers_file::PeersFile;
use crate::types::{Rank, WorldSize};
use crate::wire::{Secret, SecretError};

/// The environment variable with the job's secret.
pub const SECRET_VARIABLE: &str = "RING_SECRET";
/// The environment variable with the directory of the flight recorder.
pub const FLIGHT_RECORDER_VARIABLE: &str = "RING_FLIGHT_RECORDER";
/// The environment variable with the file of the timeline.
pub const TIMELINE_VARIABLE: &str = "RING_TIMELINE";
const RANK_VARIABLE: &str = "RING_RANK";
const WORLD_SIZE_VARIABLE: &str = "RING_WORLD_SIZE";
const RENDEZVOUS_VARIABLE: &str = "RING_RENDEZVOUS";
/// The number of the job, in hexadecimal. It is the same on all ranks.
pub const JOB_ID_VARIABLE: &str = "RING_JOB_ID";
const LISTEN_ADDRESS_VARIABLE: &str = "RING_LISTEN_ADDRESS";
const START_TIMEOUT_MS_VARIABLE: &str = "RING_START_TIMEOUT_MS";
const LOCAL_PROCESSORS_VARIABLE: &str = "RING_LOCAL_PROCESSORS";

/// The launchers whose jobs ringtrain cannot join: the environment variable with the number of ranks, and the launcher's name.
const UNKNOWN_LAUNCHERS: [(&str, &str); 1] = [("HOROVOD_SIZE", "horovodrun")];

/// How the ranks of a job find each other.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum JoinMethod {
    /// The job has one rank.
    Alone,
    /// A file contains the address of every rank.
    Peers {
        /// The file.
        file: PeersFile,
        /// This process's rank.
        rank: Rank,
        /// The IP address to listen on, instead of the address in the file. The port is the one in the file.
        bind: Option<IpAddr>,
    },
    /// `ringrun` started this process. The rendezvous of the launcher sends the addresses of all ranks.
    Launched(LaunchedRank),
    /// Another launcher started this process, and rank 0 serves the rendezvous. If `JoinOptions::secret` is [`Secret::none`], the
    /// ranks use the secret of their user: the file `.ringtrain-secret` in the user's home directory.
    Discovered(DiscoveredRank),
}

impl JoinMethod {
    /// Returns the rank of this process, and the number of ranks.
    pub fn rank_and_world(&self) -> (Rank, WorldSize) {
        match self {
            Self::Alone => (Rank::ZERO, WorldSize::ONE),
            Self::Peers { file, rank, .. } => (*rank, file.world()),
            Self::Launched(launched) => (launched.rank, launched.world),
            Self::Discovered(discovered) => (discovered.rank, discovered.world),
        }
    }

    /// Returns the number of processors of the ranks of this host. A launcher that binds ranks to processors sets the number.
    pub(crate) fn local_processors(&self) -> u32 {
        let from_launcher = match self {
            Self::Launched(launched) => launched.local_processors,
            _ => None,
        };
        from_launcher.unwrap_or_else(|| available_parallelism().map_or(1, NonZero::get) as u32)
    }

    /// Returns the start timeout that the environment sets.
    pub(crate) fn start_timeout(&self) -> Option<Duration> {
        match self {
            Self::Launched(launched) => launched.start_timeout,
            Self::Discovered(discovered) => discovered.start_timeout,
            Self::Alone | Self::Peers { .. } => None,
        }
    }
}

/// This rank and its job, as `ringrun` describes them in environment variables.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LaunchedRank {
    /// This process's rank.
    pub rank: Rank,
    /// The world size.
    pub world: WorldSize,
    /// The address of the launcher's rendezvous.
    pub rendezvous: SocketAddr,
    /// The address on which this rank listens; `None` for the address from which it reaches the rendezvous.
    pub listen: Option<IpAddr>,
    /// The job's id.
    pub job_id: [u8; 16],
    /// The start timeout, if the launcher sets one.
    pub start_timeout: Option<Duration>,
    /// The number of processors of this host that the job may use, if the launcher has set it. A rank that is bound
    /// to one processor cannot count the job's processors itself.
    pub local_processors: Option<u32>,
}

/// Reads the variables of `ringrun` or, without `ringrun`, those of the launcher that started this process. Without a launcher,
/// returns [`JoinMethod::Alone`]. Also takes over the
/// pipe to `ringrun` that this process has inherited, so that the programs that this process executes do not inherit it.
///
/// # Errors
///
/// [`EnvironmentError`] if variables are missing, invalid or contradict each other, or if a launcher that ringtrain does not
/// know started several ranks: without this error, each of these ranks would train alone.
pub fn from_environment() -> Result<JoinMethod, EnvironmentError> {
    let get = |name: &str| env::var_os(name).map(|value| value.to_string_lossy().into_owned());
    let method = parse_environment(&get, &hydra_proxy)?;
    if let JoinMethod::Launched(_) = method {
        take_exit_pipe(get(EXIT_PIPE_VARIABLE).as_deref());
    }
    Ok(method)
}

/// Reads the job's secret from the environment. Returns `None` if the variable is not set.
///
/// # Errors
///
/// [`SecretError`] if the secret is too short or too long.
pub fn secret_from_environment() -> Result<Option<Secret>, SecretError> {
    env::var_os(SECRET_VARIABLE).map(|value| Secret::new(value.as_encoded_bytes())).transpose()
}

/// Returns the path in an environment variable; `None` if the variable is not set or empty.
pub fn path_from_environment(name: &str) -> Option<PathBuf> {
    env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

/// Like [`from_environment`], but calls `get(name)` for the value of a variable.
fn parse_environment(
    get: &dyn Fn(&str) -> Option<String>,
    hydra_proxy: &dyn Fn() -> Option<String>,
) -> Result<JoinMethod, EnvironmentError> {
    if let Some(rendezvous) = get(RENDEZVOUS_VARIABLE) {
        return parse_ringrun(&rendezvous, get).map(JoinMethod::Launched);
    }
    // In an indexed Job of Kubernetes, RING_WORLD_SIZE has the number of pods.
    let is_indexed_job = get(INDEX_VARIABLE).is_some();
    let of_ringrun = [(RANK_VARIABLE, true), (WORLD_SIZE_VARIABLE, !is_indexed_job)];
    if let Some((present, _)) =
        of_ringrun.into_iter().find(|&(name, is_of_ringrun)| is_of_ringrun && get(name).is_some())
    {
        return Err(EnvironmentError::Incomplete { present, missing: RENDEZVOUS_VARIABLE });
    }
    let get_set = |name: &str| get(name).filter(|value| !value.is_empty());
    if let Some(discovered) = discover(&get_set, hydra_proxy)? {
        let start_timeout = parse_start_timeout(get)?;
        return Ok(JoinMethod::Discovered(DiscoveredRank { start_timeout, ..discovered }));
    }
    let unknown = UNKNOWN_LAUNCHERS.iter().find_map(|&(variable, launcher)| {
        let ranks = get(variable)?.parse::<u32>().ok().filter(|&ranks| ranks > 1)?;
        Some(EnvironmentError::UnknownLauncher { variable, launcher, ranks })
    });
    unknown.map_or(Ok(JoinMethod::Alone), Err)
}

/// Reads the variables of `ringrun`; `rendezvous` is the value of [`RENDEZVOUS_VARIABLE`].
fn parse_ringrun(
    rendezvous: &str,
    get: &dyn Fn(&str) -> Option<String>,
) -> Result<LaunchedRank, EnvironmentError> {
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
    Ok(LaunchedRank {
        rank,
        world,
        rendezvous: rendezvous
            .parse()
            .map_err(|_| invalid(RENDEZVOUS_VARIABLE, rendezvous, "an address, ip:port"))?,
        job_id: parse_16_hex_bytes(&id)
            .ok_or_else(|| invalid(JOB_ID_VARIABLE, &id, "32 hexadecimal digits"))?,
        listen: get(LISTEN_ADDRESS_VARIABLE)
            .map(|ip| ip.parse().map_err(|_| invalid(LISTEN_ADDRESS_VARIABLE, &ip, "an IP address")))
            .transpose()?,
        start_timeout: parse_start_timeout(get)?,
        local_processors: get(LOCAL_PROCESSORS_VARIABLE)
            .map(|count| {
                count
                    .parse()
                    .map_err(|_| invalid(LOCAL_PROCESSORS_VARIABLE, &count, "a number of processors"))
            })
            .transpose()?,
    })
}

fn parse_start_timeout(get: &dyn Fn(&str) -> Option<String>) -> Result<Option<Duration>, EnvironmentError> {
    let (name, expected) = (START_TIMEOUT_MS_VARIABLE, "a number of milliseconds");
    let parse =
        |value: String| value.parse().map_err(|_| EnvironmentError::Invalid { name, value, expected });
    Ok(get(name).map(parse).transpose()?.map(Duration::from_millis))
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

    fn parse(get: &dyn Fn(&str) -> Option<String>) -> Result<JoinMethod, EnvironmentError> {
        parse_environment(get, &|| None)
    }

    fn parse_with_changes(changes: VariableChanges<'_>) -> Result<JoinMethod, EnvironmentError> {
        parse(&|name| {
            let changed = changes.iter().find(|(changed, _)| *changed == name);
            let value = changed.map_or_else(
                || VALID_VARIABLES.iter().find(|(good, _)| *good == name).map(|(_, value)| *value),
                |(_, value)| *value,
            );
            value.map(str::to_owned)
        })
    }

    /// The variables of another launcher, which ringrun also sets, do not count.
    #[test]
    fn the_variables_of_ringrun_are_read() {
        let environment = parse_with_changes(&[("WORLD_SIZE", Some("7")), ("PMI_RANK", Some("1"))]);
        let Ok(JoinMethod::Launched(launched)) = environment else { panic!("{environment:?}") };
        assert_eq!((launched.rank.get(), launched.world.get(), launched.job_id[15]), (2, 4, 15));
    }

    #[test]
    fn missing_and_invalid_variables_are_errors() {
        let cases: [(VariableChanges<'_>, &str); 9] = [
            (&[("RING_LISTEN_ADDRESS", Some("eth0"))], "an IP address"),
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

    /// Four processes that ignored the launcher's variables would train four separate models.
    #[test]
    fn ranks_of_an_unknown_launcher_get_an_error() {
        let horovod = |size: &str| parse(&|name| (name == "HOROVOD_SIZE").then(|| size.to_owned()));
        let error = horovod("4").unwrap_err().to_string();
        assert!(error.starts_with("horovodrun") && error.contains("`ringrun -n 4`"), "{error}");
        assert_eq!(horovod("1"), Ok(JoinMethod::Alone));
    }
}
