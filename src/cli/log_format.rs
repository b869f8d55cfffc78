//! The log of the programs on standard error, as text or as one JSON object for each line.

use std::env;
use std::io::{self, Write as _};
use std::sync::OnceLock;
use std::time::SystemTime;

use clap::ValueEnum;
use humantime::{format_rfc3339_micros, format_rfc3339_seconds};
use log::kv::{Key, Value, VisitSource};
use log::{Level, LevelFilter, Record};
use serde::Serialize;
use serde_json::{Map, json};

use super::journal::{is_stderr_journal, write_to_journal};
use crate::observe::log_line::write_log_line;
use crate::observe::step::current_step;
use crate::rendezvous::host_name;
use crate::types::Rank;

/// The environment variable with the default of `--log-format`.
pub(super) const LOG_FORMAT_VARIABLE: &str = "RING_LOG_FORMAT";

/// The format of the log.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum LogFormat {
    /// A line of text.
    Text,
    /// One JSON object for each line, with the time, level, rank, host and step.
    Json,
}

/// The context of each line of a log in JSON.
struct LogContext {
    program: &'static str,
    rank: Option<Rank>,
    host: String,
}

/// The context of this process. Set only if the log is in JSON.
static JSON_CONTEXT: OnceLock<LogContext> = OnceLock::new();

impl LogFormat {
    /// Returns the format of the environment, or text if the variable is not set.
    ///
    /// # Errors
    ///
    /// Returns a sentence if the variable has another value than `text` and `json`.
    pub(super) fn from_environment() -> Result<Self, String> {
        match env::var_os(LOG_FORMAT_VARIABLE) {
            None => Ok(Self::Text),
            Some(value) if value.is_empty() => Ok(Self::Text),
            Some(value) => Self::from_str(&value.to_string_lossy(), true).map_err(|_| {
                format!("{LOG_FORMAT_VARIABLE} is {}, and must be text or json", value.display())
            }),
        }
    }
}

/// Which messages a log has.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum LogLevel {
    /// Those that `RUST_LOG` selects, or those from this level on.
    FromEnvironment(&'static str),
    /// Those from this level on. A later call of [`log::set_max_level`] changes the level.
    Changeable(LevelFilter),
}

/// Writes the log of a program that has no option for its format: the messages that `RUST_LOG` selects, or those from `level` on.
pub(super) fn start_text_log(level: &'static str, program: &'static str) {
    start_log(LogLevel::FromEnvironment(level), LogFormat::Text, (program, None));
}

/// Writes the log of the program to standard error. Does nothing if this process has a logger already.
pub(super) fn start_log(level: LogLevel, format: LogFormat, (program, rank): (&'static str, Option<Rank>)) {
    let mut builder = match level {
        LogLevel::FromEnvironment(level) => {
            env_logger::Builder::from_env(env_logger::Env::default().default_filter_or(level))
        }
        LogLevel::Changeable(_) => {
            let mut builder = env_logger::Builder::new();
            builder.filter_level(LevelFilter::Trace);
            builder
        }
    };
    match format {
        LogFormat::Text if is_stderr_journal() => {
            builder.format(write_to_journal);
        }
        LogFormat::Text => {
            builder.format(|out, record| {
                let style = out.default_level_style(record.level());
                write_log_line(out, record, format_rfc3339_seconds(SystemTime::now()), style)
            });
        }
        LogFormat::Json => {
            let context = JSON_CONTEXT.get_or_init(|| LogContext { program, rank, host: host_name() });
            builder.format(move |out, record| {
                let time = format_rfc3339_micros(SystemTime::now()).to_string();
                writeln!(out, "{}", json_line(record, &time, context, current_step()))
            });
        }
    }
    let is_started = builder.try_init().is_ok();
    if let LogLevel::Changeable(level) = level
        && is_started
    {
        log::set_max_level(level);
    }
}

/// Returns a message as a line of a log in JSON, with a newline at the end. `rank` and `host` are what the message is about;
/// without `host`, it is about this host.
pub(super) fn message_as_json(
    (program, level): (&'static str, Level),
    (rank, host): (Option<Rank>, Option<&str>),
    message: &str,
) -> String {
    let context = LogContext { program, rank, host: host.map_or_else(host_name, str::to_owned) };
    let time = format_rfc3339_micros(SystemTime::now()).to_string();
    let mut record = Record::builder();
    let record = record.level(level).target(program);
    json_line(&record.args(format_args!("{message}")).build(), &time, &context, None) + "\n"
}

/// Logs the error with which the program ends, if the log is in JSON. Returns whether it was logged.
pub(super) fn log_error_as_json(program: &str, message: &str) -> bool {
    let is_json = JSON_CONTEXT.get().is_some() && log::max_level() >= LevelFilter::Error;
    if is_json {
        log::logger().log(
            &Record::builder().level(Level::Error).target(program).args(format_args!("{message}")).build(),
        );
    }
    is_json
}

/// A line of the log.
#[derive(Serialize)]
struct LogLine<'a> {
    time: &'a str,
    level: &'a str,
    program: &'a str,
    rank: Option<u32>,
    host: &'a str,
    step: Option<u64>,
    target: &'a str,
    message: String,
    /// The named values of the message.
    #[serde(skip_serializing_if = "Map::is_empty")]
    values: Map<String, serde_json::Value>,
}

/// Returns a record as one line of JSON.
fn json_line(record: &Record<'_>, time: &str, context: &LogContext, step: Option<u64>) -> String {
    let mut visitor = KeyVisitor(Map::new());
    // The visitor returns no error.
    let _ = record.key_values().visit(&mut visitor);
    let line = LogLine {
        time,
        level: record.level().as_str(),
        program: context.program,
        rank: context.rank.map(Rank::get),
        host: &context.host,
        step,
        target: record.target(),
        message: record.args().to_string(),
        values: visitor.0,
    };
    serde_json::to_string(&line)
        .unwrap_or_else(|error| format!("{{\"message\":\"a line was lost: {error}\"}}"))
}

/// Collects the key-value pairs of a record.
struct KeyVisitor(Map<String, serde_json::Value>);

impl<'kvs> VisitSource<'kvs> for KeyVisitor {
    fn visit_pair(&mut self, key: Key<'kvs>, value: Value<'kvs>) -> Result<(), log::kv::Error> {
        let number =
            value.to_i64().map(serde_json::Value::from).or(value.to_f64().map(serde_json::Value::from));
        self.0.insert(key.to_string(), number.unwrap_or_else(|| json!(value.to_string())));
        Ok(())
    }
}

/// Writes text to standard error with one system call, so that lines of several ranks do not mix on a terminal. If standard
/// error is closed, does nothing.
pub(super) fn write_text(text: &str) {
    let _ = io::stderr().write_all(text.as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_an_object_with_the_context_and_the_values() {
        let context =
            LogContext { program: "ringtrain", rank: Some(Rank::new(3)), host: "node \"a\"".into() };
        let values = [("bytes", Value::from(12)), ("codec", Value::from("int8"))];
        let record = Record::builder()
            .level(Level::Warn)
            .target("ringtrain::named")
            .args(format_args!("two\nlines"))
            .key_values(&values)
            .build();
        let line = json_line(&record, "2026-01-02T03:04:05.000006Z", &context, Some(7));
        assert!(!line.contains('\n'));
        let parsed: serde_json::Value = serde_json::from_str(&line).unwrap();
        let expected = json!({
            "time": "2026-01-02T03:04:05.000006Z", "level": "WARN", "program": "ringtrain", "rank": 3,
            "host": "node \"a\"", "step": 7, "target": "ringtrain::named", "message": "two\nlines",
            "values": {"bytes": 12, "codec": "int8"},
        });
        assert_eq!(parsed, expected);
    }
}
