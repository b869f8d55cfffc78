//! Configuration files: the options of `ringtrain` in TOML.

use std::any::TypeId;
use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::File;
use std::io::Read as _;
use std::num::{NonZeroU32, NonZeroU64};
use std::ops::Range;
use std::path::Path;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Arg, Command};
use toml::de::{DeTable, DeValue};

use super::option_set::{OptionOrigin, OptionSet, OptionValue, is_flag, is_list, known_options};

/// The maximum size of a configuration file in bytes.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Reads a configuration file.
///
/// # Errors
///
/// Returns a sentence that names the file and the line, and says what to do.
pub(super) fn read_config_file(command: &Command, path: &Path) -> Result<OptionSet, String> {
    let path_text = path.display().to_string();
    let file_error = |problem: String| format!("cannot read the configuration file {path_text}: {problem}");
    let mut text = String::new();
    let file = File::open(path).map_err(|error| file_error(error.to_string()))?;
    let bytes = file.take(FILE_BYTES_MAX + 1).read_to_string(&mut text);
    if bytes.map_err(|error| file_error(error.to_string()))? as u64 > FILE_BYTES_MAX {
        return Err(file_error(format!("it has more than {FILE_BYTES_MAX} bytes")));
    }
    parse_toml_options(command, &text, |line| OptionOrigin::File { path: path_text.clone(), line })
}

/// Parses options in TOML. `origin(n)` returns the origin of the options in line n, counted from 1.
///
/// # Errors
///
/// Returns a sentence that names the file and the line of the wrong option, and says what to do.
pub(super) fn parse_toml_options(
    command: &Command,
    text: &str,
    origin: impl Fn(usize) -> OptionOrigin,
) -> Result<OptionSet, String> {
    let origin_at = |span: Range<usize>| {
        let before = &text.as_bytes()[..span.start.min(text.len())];
        origin(before.split(|&byte| byte == b'\n').count())
    };
    let table = DeTable::parse(text).map_err(|error| {
        let origin = origin_at(error.span().unwrap_or_default());
        format!("{origin}: {}", error.message().replace('\n', "; "))
    })?;
    let known: BTreeMap<&str, &Arg> = known_options(command).collect();
    let mut entries: Vec<_> = table.get_ref().iter().collect();
    entries.sort_by_key(|(key, _)| key.span().start);
    let mut parsed = OptionSet::default();
    for (key, value) in entries {
        let (key_text, origin) = (key.get_ref().as_ref(), origin_at(key.span()));
        let name = key_text.replace('_', "-");
        let line_error = |problem: String| format!("{origin}: {problem}");
        let arg = known.get(name.as_str()).filter(|_| name != "config");
        let arg =
            arg.ok_or_else(|| line_error(describe_unknown_option(command, key_text, value.get_ref())))?;
        if let Some((_, first_origin)) = parsed.options.get(&name) {
            return Err(line_error(format!(
                "`{key_text}` is given twice, first in {first_origin}; remove one of the lines"
            )));
        }
        let value = convert_option_value(arg, value.get_ref())
            .map_err(|problem| line_error(format!("`{key_text}` {problem}")))?;
        parsed.options.insert(name.clone(), (value, origin.clone()));
        check_value(command, &parsed, &name).map_err(line_error)?;
    }
    Ok(parsed)
}

/// Describes a key that is not an option of `ringtrain`.
fn describe_unknown_option(command: &Command, key: &str, value: &DeValue<'_>) -> String {
    if matches!(value, DeValue::Table(_)) {
        return format!("`{key}` is a table; write all options at the top level, without [{key}]");
    }
    if key == "config" {
        return "a configuration file cannot name another one; remove `config`".into();
    }
    let flag = format!("--{}", key.replace('_', "-"));
    let suggested = command.clone().try_get_matches_from(["ringtrain", &flag]).err().and_then(|error| {
        match error.get(ContextKind::SuggestedArg) {
            Some(ContextValue::String(suggested)) => Some(suggested.trim_start_matches('-').to_owned()),
            _ => None,
        }
    });
    match suggested {
        Some(name) => format!("unknown option `{key}`; a similar option is `{name}`"),
        None => format!("unknown option `{key}`; `ringtrain --help` lists all options"),
    }
}

/// Converts a value of TOML to the value of an option. An error is the end of a sentence that begins with the name of
/// the option, such as "must be true or false".
fn convert_option_value(arg: &Arg, value: &DeValue<'_>) -> Result<OptionValue, String> {
    let value_is_optional = arg.get_num_args().is_some_and(|range| range.min_values() == 0);
    match value {
        DeValue::Boolean(value) if is_flag(arg) => Ok(OptionValue::Flag(*value)),
        _ if is_flag(arg) => Err(format!("must be true or false, not {}", describe_type(value))),
        DeValue::Boolean(true) if value_is_optional => Ok(OptionValue::Values(Vec::new())),
        DeValue::Boolean(false) if value_is_optional => Ok(OptionValue::Flag(false)),
        DeValue::Array(values) if is_list(arg) => {
            let values: Result<Vec<_>, _> =
                values.iter().map(|value| convert_single_value(arg, value.get_ref())).collect();
            match values? {
                values if values.is_empty() => Err("is an empty list; remove the line".into()),
                values => Ok(OptionValue::Values(values)),
            }
        }
        value => Ok(OptionValue::Values(vec![convert_single_value(arg, value)?])),
    }
}

fn convert_single_value(arg: &Arg, value: &DeValue<'_>) -> Result<OsString, String> {
    let wanted = if is_number(arg) { "a number" } else { "a string" };
    match value {
        DeValue::String(text) if !is_number(arg) => Ok(text.as_ref().into()),
        DeValue::Integer(number) if number.radix() == 10 => Ok(number.as_str().into()),
        DeValue::Integer(_) => Err("must be written as a decimal number".into()),
        DeValue::Float(number) => Ok(number.as_str().into()),
        other => Err(format!("must be {wanted}, not {}", describe_type(other))),
    }
}

/// Returns the type of a TOML value in words, for error messages.
fn describe_type(value: &DeValue<'_>) -> &'static str {
    match value {
        DeValue::String(_) => "a string",
        DeValue::Integer(_) | DeValue::Float(_) => "a number",
        DeValue::Boolean(_) => "true or false",
        DeValue::Datetime(_) => "a date",
        DeValue::Array(_) => "a list",
        DeValue::Table(_) => "a table",
    }
}

/// Returns whether the values of an option are numbers.
pub(super) fn is_number(arg: &Arg) -> bool {
    let found = arg.get_value_parser().type_id();
    let numbers = [
        TypeId::of::<u32>(),
        TypeId::of::<u64>(),
        TypeId::of::<usize>(),
        TypeId::of::<f32>(),
        TypeId::of::<f64>(),
        TypeId::of::<NonZeroU32>(),
        TypeId::of::<NonZeroU64>(),
    ];
    numbers.iter().any(|number| found == *number)
}

/// Checks the value of one option. Does not check which other options this option requires.
fn check_value(command: &Command, options: &OptionSet, name: &str) -> Result<(), String> {
    let single_option = options.options.get(name).map(|value| (name.to_owned(), value.clone()));
    let arguments = OptionSet { options: single_option.into_iter().collect() }.to_arguments(command);
    match command.clone().try_get_matches_from(arguments) {
        Err(error)
            if matches!(
                error.kind(),
                ErrorKind::ValueValidation
                    | ErrorKind::InvalidValue
                    | ErrorKind::TooManyValues
                    | ErrorKind::TooFewValues
                    | ErrorKind::WrongNumberOfValues
            ) =>
        {
            let text = error.to_string();
            let first_line = text.lines().next().unwrap_or_default();
            Err(first_line.trim_start_matches("error: ").to_owned())
        }
        _ => Ok(()),
    }
}
