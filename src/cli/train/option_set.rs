//! Options of `ringtrain` with the place where each was given: the command line, a configuration file, or a
//! checkpoint.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fmt::{self, Write as _};

use clap::parser::ValueSource;
use clap::{Arg, ArgAction, ArgMatches, Args as _, Command, CommandFactory as _};

use super::args::TrainArgs;
use crate::cli::group_args::GroupArgs;

/// Checkpoints store neither these options nor the options of `GroupArgs`, because all these options apply only to
/// one start of the program.
const OPTIONS_NEVER_STORED: [&str; 8] =
    ["checkpoint", "resume", "config", "metrics", "pid-file", "log-level-file", "quiet", "log-interval"];
/// The option for the learning rate. A resumed run takes the learning rate from the state of the run in the
/// checkpoint, because `--scale-lr` may have multiplied the rate by the number of ranks.
const LEARNING_RATE_OPTION: &str = "lr";

/// The place where an option was given.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum OptionOrigin {
    CommandLine,
    /// A line of a configuration file, counted from 1.
    File {
        path: String,
        line: usize,
    },
    /// The checkpoint in this directory.
    Checkpoint(String),
}

impl fmt::Display for OptionOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::CommandLine => f.write_str("the command line"),
            Self::File { path, line } => write!(f, "{path}:{line}"),
            Self::Checkpoint(directory) => write!(f, "the checkpoint in {directory}"),
        }
    }
}

/// The value of an option.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum OptionValue {
    /// For an option that takes no value: whether the option is given.
    Flag(bool),
    /// The values of any other option.
    Values(Vec<OsString>),
}

/// The value and the origin of each option. The keys are the names of the options without `--`.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct OptionSet {
    pub(super) options: BTreeMap<String, (OptionValue, OptionOrigin)>,
}

/// Returns all options of `ringtrain` with a long name, except `--help` and `--version`.
pub(super) fn known_options(command: &Command) -> impl Iterator<Item = (&str, &Arg)> {
    let is_option = |arg: &&Arg| {
        !matches!(
            arg.get_action(),
            ArgAction::Help | ArgAction::HelpShort | ArgAction::HelpLong | ArgAction::Version
        )
    };
    command.get_arguments().filter(is_option).filter_map(|arg| Some((arg.get_long()?, arg)))
}

/// Returns the command with all options of `ringtrain`.
pub(super) fn command() -> Command {
    let mut command = TrainArgs::command();
    command.build();
    command
}

/// Returns whether the option takes no value.
pub(super) fn is_flag(arg: &Arg) -> bool {
    matches!(arg.get_action(), ArgAction::SetTrue | ArgAction::SetFalse)
}

/// Returns whether the option may have several values.
pub(super) fn is_list(arg: &Arg) -> bool {
    matches!(arg.get_action(), ArgAction::Append)
}

impl OptionSet {
    /// Returns the options that the command line contains.
    pub(super) fn from_matches(command: &Command, matches: &ArgMatches) -> Self {
        let mut options = BTreeMap::new();
        for (name, arg) in known_options(command) {
            let id = arg.get_id().as_str();
            if matches.value_source(id) != Some(ValueSource::CommandLine) {
                continue;
            }
            let value = if is_flag(arg) {
                OptionValue::Flag(matches.get_flag(id))
            } else {
                let values = matches.get_raw(id).into_iter().flatten();
                OptionValue::Values(
                    values.filter(|value| !value.is_empty()).map(OsStr::to_os_string).collect(),
                )
            };
            options.insert(name.to_owned(), (value, OptionOrigin::CommandLine));
        }
        Self { options }
    }

    /// Returns whether an option is given, and is not `false`.
    pub(super) fn contains(&self, name: &str) -> bool {
        self.options.get(name).is_some_and(|(value, _)| *value != OptionValue::Flag(false))
    }

    /// Adds the options of `other`. Skips options that this set already has, and options that conflict with an option
    /// of this set.
    pub(super) fn add_missing(&mut self, command: &Command, other: Self) {
        let args: BTreeMap<&str, &Arg> = known_options(command).collect();
        let conflicts = |a: &str, b: &str| {
            let (Some(a), Some(b)) = (args.get(a), args.get(b)) else { return false };
            let names_as_conflict = |a: &Arg, b: &Arg| {
                let found = command.get_arg_conflicts_with(a);
                found.iter().any(|other| other.get_id() == b.get_id())
            };
            names_as_conflict(a, b) || names_as_conflict(b, a)
        };
        let given: Vec<String> = self.options.keys().filter(|name| self.contains(name)).cloned().collect();
        for (name, value) in other.options {
            if !given.iter().any(|given_name| conflicts(given_name, &name)) {
                self.options.entry(name).or_insert(value);
            }
        }
    }

    /// Removes the option for the learning rate, because a resumed run takes the rate from the state of the run.
    pub(super) fn without_learning_rate(mut self) -> Self {
        self.options.remove(LEARNING_RATE_OPTION);
        self
    }

    /// Removes the options of a checkpoint that this version does not store, and earlier versions did.
    pub(super) fn without_options_of_one_start(self) -> Self {
        self.without_options(&OPTIONS_NEVER_STORED)
    }

    /// Removes the options with these names.
    pub(super) fn without_options(mut self, names: &[&str]) -> Self {
        self.options.retain(|name, _| !names.contains(&name.as_str()));
        self
    }

    /// Returns the first value of an option, if the option is given and the value is valid Unicode.
    pub(super) fn first_value(&self, name: &str) -> Option<&str> {
        match self.options.get(name) {
            Some((OptionValue::Values(values), _)) => values.first()?.to_str(),
            _ => None,
        }
    }

    /// Returns these options as the command line of `ringtrain`.
    pub(super) fn to_arguments(&self, command: &Command) -> Vec<OsString> {
        let mut arguments = vec![OsString::from("ringtrain")];
        for (name, arg) in known_options(command) {
            let Some((value, _)) = self.options.get(name) else { continue };
            let flag = |value: Option<&OsStr>| {
                let mut argument = OsString::from(format!("--{name}"));
                if let Some(value) = value {
                    argument.push("=");
                    argument.push(value);
                }
                argument
            };
            match value {
                OptionValue::Flag(false) => {}
                OptionValue::Flag(true) => arguments.push(flag(None)),
                OptionValue::Values(values) if values.is_empty() => arguments.push(flag(None)),
                OptionValue::Values(values) if arg.get_value_delimiter().is_some() => {
                    arguments.push(flag(Some(&values.join(OsStr::new(",")))));
                }
                OptionValue::Values(values) => {
                    arguments.extend(values.iter().map(|value| flag(Some(value))));
                }
            }
        }
        arguments
    }

    /// For each option that an error message names, appends where the option was given, such as ` (--lr is given in
    /// run.toml:3)`. Skips options of the command line.
    pub(super) fn append_option_origins(&self, message: &str) -> String {
        let is_named = |name: &str| {
            let flag = format!("--{name}");
            message.match_indices(&flag).any(|(start, _)| {
                let next = message[start + flag.len()..].chars().next();
                !next.is_some_and(|c| c.is_ascii_alphanumeric() || c == '-')
            })
        };
        let mut text = message.to_owned();
        for (name, (_, origin)) in &self.options {
            if *origin != OptionOrigin::CommandLine && is_named(name) {
                let _ = write!(text, " (--{name} is given in {origin})");
            }
        }
        text
    }

    /// Returns the options that a checkpoint stores, as lines of TOML. Options that are not given follow as
    /// comments with their defaults.
    ///
    /// # Errors
    ///
    /// Returns a sentence that names a value that is not valid Unicode.
    pub(super) fn to_toml(&self, command: &Command) -> Result<String, String> {
        let join_options = GroupArgs::augment_args(Command::new("ringtrain"));
        let is_stored = |name: &str| {
            !OPTIONS_NEVER_STORED.contains(&name)
                && !join_options.get_arguments().any(|arg| arg.get_long() == Some(name))
        };
        let (mut given, mut defaults) = (String::new(), String::new());
        for (name, arg) in known_options(command).filter(|(name, _)| is_stored(name)) {
            let value = self.options.get(name).map(|(value, _)| value);
            let out = if value.is_some() { &mut given } else { &mut defaults };
            let text = match value {
                Some(OptionValue::Flag(value)) => value.to_string(),
                Some(OptionValue::Values(values)) => format_toml_values(name, arg, values)?,
                None if is_flag(arg) => "false".into(),
                None => {
                    let values: Vec<OsString> =
                        arg.get_default_values().iter().map(clap::builder::OsStr::to_os_string).collect();
                    if values.is_empty() {
                        continue;
                    }
                    format_toml_values(name, arg, &values)?
                }
            };
            let comment = if value.is_some() { "" } else { "# " };
            let _ = writeln!(out, "{comment}{name} = {text}");
        }
        Ok(format!("{given}\n# Defaults:\n{defaults}"))
    }
}

/// Converts the values of an option to a TOML string or an array of strings. The value of a numeric option becomes a
/// TOML number.
fn format_toml_values(name: &str, arg: &Arg, values: &[OsString]) -> Result<String, String> {
    let is_number = super::config_file::is_number(arg);
    let quote = |value: &OsString| match value.to_str() {
        Some(text) if is_number => Ok(text.to_owned()),
        // JSON escapes are valid in TOML, but TOML also requires an escape for U+007F.
        Some(text) => Ok(serde_json::Value::from(text).to_string().replace('\u{7f}', "\\u007F")),
        None => Err(format!(
            "--{name}: {} is not valid Unicode, so a checkpoint cannot store this value; pass another value",
            value.display()
        )),
    };
    let quoted = values.iter().map(quote).collect::<Result<Vec<_>, _>>()?;
    Ok(if is_list(arg) { format!("[{}]", quoted.join(", ")) } else { quoted.join(" ") })
}
