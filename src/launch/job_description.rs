//! Converts the plan of a job to the description that an agent gets, and back.

use std::env;
use std::ffi::{OsStr, OsString};
use std::io::{self, IsTerminal as _};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{self, Path, PathBuf};
use std::time::Duration;

use super::agent_messages::JobDescription;
use super::environment::{JobVariables, RINGRUN_VARIABLE_PREFIX, rank_environment};
use super::error::LaunchError;
use super::local_ranks::user_variables;
use super::message::LaunchMessage;
use super::plan::{
    FailurePolicy, LOCAL_RANKS_MAX, LaunchLimits, LaunchPlan, OutputFormat, RankProgram, SshOptions,
    StdinReader, Verbosity,
};
use super::status_line::STATUS_COLUMNS_VARIABLE;
use crate::rendezvous::{EXIT_PIPE_VARIABLE, LISTEN_PORTS_VARIABLE};
use crate::types::{Rank, WorldSize};

/// The variable that names the virtual environment of Python.
const VIRTUAL_ENVIRONMENT_VARIABLE: &str = "VIRTUAL_ENV";

/// The variable with the directories in which programs are searched.
const PATH: &str = "PATH";

/// Describes the job for the agents.
pub(super) fn describe_job(plan: &LaunchPlan, job: &JobVariables) -> Result<JobDescription, LaunchError> {
    // ringrun sets some variables itself. If it runs as a rank of another job, it has inherited them.
    let own_names: Vec<String> = rank_environment(Rank::ZERO, job)
        .into_iter()
        .map(|(name, _)| name)
        .chain([EXIT_PIPE_VARIABLE, LISTEN_PORTS_VARIABLE, STATUS_COLUMNS_VARIABLE].map(str::to_owned))
        .collect();
    let is_inherited = |name: &OsStr| {
        name.as_bytes().starts_with(RINGRUN_VARIABLE_PREFIX.as_bytes())
            && own_names.iter().all(|own| name != own.as_str())
    };
    Ok(JobDescription {
        world: plan.world.get(),
        share: plan.share.clone(),
        programs: plan.programs.iter().map(describe_program).collect::<Result<_, _>>()?,
        inherited: env::vars_os().filter(|(name, _)| is_inherited(name)).collect(),
        virtual_environment: env::var_os(VIRTUAL_ENVIRONMENT_VARIABLE),
        mpi4py: plan.mpi4py,
        stdin_reader: if io::stdin().is_terminal() { StdinReader::NoRank } else { plan.stdin_reader },
        binding: plan.binding,
        report_bindings: plan.report_bindings,
        kill_after_ms: plan.limits.kill_after.as_millis() as u64,
        start_timeout_ms: plan.limits.start_timeout.as_millis() as u64,
        interfaces: plan.interfaces.as_ref().map(|filter| filter.text().to_owned()),
        ports: plan.ports,
        rendezvous: job.rendezvous,
        secret: job.secret.clone(),
        job_id: job.job_id.clone(),
        status_columns: job.status_columns,
    })
}

/// Describes a program for the agents, which have neither the directory nor the environment of ringrun.
fn describe_program(program: &RankProgram) -> Result<RankProgram, LaunchError> {
    let chosen = Path::new(program.directory.as_deref().unwrap_or(OsStr::new(".")));
    let directory = path::absolute(chosen)
        .map_err(|source| LaunchError::Directory { path: chosen.to_owned(), source })?;
    // `absolute` keeps a dot at the end.
    let directory: PathBuf = directory.components().collect();
    let variables = user_variables(program)?.into_iter().map(|(name, value)| (name, Some(value)));
    Ok(RankProgram {
        variables: variables.collect(),
        directory: Some(directory.into_os_string()),
        ..program.clone()
    })
}

/// Returns the plan of an agent: the part of the job that runs on its host.
pub(super) fn into_plan(description: &JobDescription) -> Result<LaunchPlan, String> {
    let JobDescription { mpi4py, binding, report_bindings, .. } = *description;
    let share = description.share.clone();
    let world = WorldSize::new(description.world).filter(|world| {
        let ranks =
            description.programs.iter().try_fold(0_u32, |sum, program| sum.checked_add(program.ranks));
        let is_count_allowed = (1..=LOCAL_RANKS_MAX).contains(&share.count());
        ranks == Some(world.get()) && is_count_allowed && share.is_valid(*world)
    });
    let environment = description.virtual_environment.as_deref();
    let programs = description.programs.iter().map(|program| RankProgram {
        variables: rank_variables(&program.variables, environment),
        ..program.clone()
    });
    let kill_after = Duration::from_millis(description.kill_after_ms);
    let interfaces = description.interfaces.as_ref().map(|text| text.parse()).transpose()?;
    Ok(LaunchPlan {
        interfaces,
        ports: description.ports,
        world: world.ok_or("the numbers of ranks in the description of the job are wrong")?,
        share,
        nodes: None,
        remote_hosts: Vec::new(),
        ssh: SshOptions::default(),
        programs: programs.collect(),
        mpi4py,
        stdin_reader: description.stdin_reader,
        output_format: OutputFormat::Raw,
        // ringrun prints the messages of an agent.
        message_format: LaunchMessage::to_text,
        output_dir: None,
        limits: LaunchLimits {
            start_timeout: Duration::from_millis(description.start_timeout_ms),
            grace: kill_after,
            kill_after,
            // An agent stops its ranks as if it had got SIGTERM when its connection breaks.
            term_timeout: kill_after,
            job_timeout: None,
        },
        // Only ringrun decides what happens after a failure.
        failure_policy: FailurePolicy::Tolerate,
        binding,
        report_bindings,
        verbosity: Verbosity::Quiet,
    })
}

/// Returns the variables of `-x`. If the virtual environment of ringrun exists on this host, adds it, unless `-x` sets `PATH`.
fn rank_variables(
    variables: &[(OsString, Option<OsString>)],
    environment: Option<&OsStr>,
) -> Vec<(OsString, Option<OsString>)> {
    let mut variables = variables.to_vec();
    if let Some(environment) = environment.filter(|environment| Path::new(environment).join("bin").is_dir())
        && variables.iter().all(|(name, _)| name != PATH)
    {
        let mut path = Path::new(environment).join("bin").into_os_string();
        if let Some(own) = env::var_os(PATH) {
            path.push(":");
            path.push(own);
        }
        variables.push((PATH.into(), Some(path)));
        variables.push((VIRTUAL_ENVIRONMENT_VARIABLE.into(), Some(environment.to_owned())));
    }
    variables
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::launch::plan::{Binding, Mpi4py};
    use crate::launch::share::RankShare;

    fn make_description(world: u32, share: RankShare, environment: Option<&Path>) -> JobDescription {
        JobDescription {
            world,
            share,
            programs: vec![RankProgram {
                ranks: world,
                program: "prog".into(),
                arguments: vec![OsStr::from_bytes(b"\xff").to_owned()],
                variables: vec![("A".into(), Some("1".into()))],
                directory: Some("/".into()),
            }],
            inherited: Vec::new(),
            virtual_environment: environment.map(|path| path.as_os_str().to_owned()),
            mpi4py: Mpi4py::Refused,
            stdin_reader: StdinReader::NoRank,
            binding: Binding::Core,
            report_bindings: false,
            kill_after_ms: 5000,
            start_timeout_ms: 30_000,
            interfaces: None,
            ports: None,
            rendezvous: "10.0.0.1:4000".parse().unwrap(),
            secret: "s".into(),
            job_id: "j".into(),
            status_columns: None,
        }
    }

    #[test]
    fn an_agent_checks_the_numbers_of_ranks() {
        for (world, ranks, is_valid) in [
            (4, vec![2, 3], true),
            (4, vec![0, 1, 2, 3], true),
            (4, vec![0, 3], true),
            (4, vec![3, 4], false),
            (4, vec![3, 2], false),
            (4, vec![2, 2], false),
            (4, vec![], false),
            (0, vec![0], false),
        ] {
            let share = RankShare { ranks, host: 1, hosts: 2 };
            let text = format!("{world} {share:?}");
            assert_eq!(into_plan(&make_description(world, share, None)).is_ok(), is_valid, "{text}");
        }
    }

    #[test]
    fn words_that_are_not_utf8_reach_the_agent() {
        let share = RankShare { ranks: vec![0], host: 0, hosts: 2 };
        let text = serde_json::to_vec(&make_description(1, share, None)).unwrap();
        let description: JobDescription = serde_json::from_slice(&text).unwrap();
        assert_eq!(into_plan(&description).unwrap().programs[0].arguments, [OsStr::from_bytes(b"\xff")]);
    }

    #[test]
    fn a_virtual_environment_is_used_only_where_it_exists() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::create_dir(directory.path().join("bin")).unwrap();
        let share = RankShare { ranks: vec![0], host: 0, hosts: 2 };
        let names = |environment: &Path| -> Vec<OsString> {
            let plan = into_plan(&make_description(1, share.clone(), Some(environment))).unwrap();
            let variables = plan.programs[0].variables.clone();
            variables.into_iter().map(|(name, _)| name).collect()
        };
        assert_eq!(names(directory.path()), ["A", PATH, VIRTUAL_ENVIRONMENT_VARIABLE]);
        assert_eq!(names(Path::new("/no/such/environment")), ["A"]);
    }
}
