//! The errors of environment variables that describe a job.

use crate::types::debug_as_display;

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
    /// A variable of another launcher is missing, although another of its variables is set.
    #[error(
        "{present} is set but {missing} is not, so the variables of {launcher} describe this job only in part; set {missing}, or unset {present}, or set RING_LAUNCHER=none to run alone"
    )]
    LauncherIncomplete {
        /// The name of the launcher.
        launcher: &'static str,
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
    /// The variables of two launchers describe different ranks.
    #[error(
        "the variables of two launchers contradict each other: {first}, but {second}; unset the variables of one launcher, or name the other in RING_LAUNCHER ({choices})"
    )]
    Contradiction {
        /// What the variables of the first launcher say.
        first: String,
        /// What the variables of the second launcher say.
        second: String,
        /// The two possible values of `RING_LAUNCHER`.
        choices: String,
    },
    /// The job has several hosts, and no variable names the host of rank 0.
    #[error(
        "{launcher} has started ranks on several hosts, and no variable names the host of rank 0, at which the ranks find each other; {advice}"
    )]
    NoMaster {
        /// The name of the launcher.
        launcher: &'static str,
        /// What to do.
        advice: &'static str,
    },
    /// A launcher that ringtrain does not know started this process as one of several ranks.
    #[error(
        "{launcher} started this process as one of {ranks} ranks ({variable} is set), and ringtrain cannot connect these ranks; start the ranks with `ringrun -n {ranks}`, or use --peers and --rank, or unset {variable} to run alone"
    )]
    UnknownLauncher {
        /// The variable that the launcher has set.
        variable: &'static str,
        /// The name of the launcher.
        launcher: &'static str,
        /// The number of ranks.
        ranks: u32,
    },
}

debug_as_display!(EnvironmentError);
