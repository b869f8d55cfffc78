//! A table of options of mpirun, horovodrun, torchrun and srun, and their translation to options of ringrun.

use std::ffi::{OsStr, OsString};
use std::iter;
use std::os::unix::ffi::OsStrExt as _;

use clap::{Arg, Command};

/// What ringrun does with an option of another launcher.
#[derive(Clone, Copy, Debug)]
enum Translation {
    /// ringrun replaces the other launcher's option by this option of ringrun, and keeps the value.
    SameAs(&'static str),
    /// ringrun drops the option, because ringrun always behaves as the option asks.
    Dropped,
    /// ringrun drops the option if its value is in this list, because ringrun always behaves as these values ask.
    /// With any other value, ringrun refuses the option with this error message.
    DroppedFor(&'static [&'static str], &'static str),
    /// ringrun replaces the option and its values `NAME VALUE` by `-x NAME=VALUE`.
    Variable,
    /// ringrun replaces the option and its value `A,B` by `-x A -x B`.
    Variables,
    /// ringrun refuses the option with this error message, which says what to use instead.
    Refused(&'static str),
}

use Translation::{Dropped, DroppedFor, Refused, SameAs, Variable, Variables};

/// The names of an option of another launcher, the number of its values, and its translation. A name that does not
/// begin with a dash is a long option: users may type it after one dash or two, and may write `_` for each `-` in it.
type OptionRow = (&'static [&'static str], usize, Translation);

const SEVERAL_HOSTS_HINT: &str = "name the hosts instead: ringrun -H HOST:N,HOST:N, or --hostfile FILE";
const NOT_ELASTIC_HINT: &str = "ringrun starts a fixed number of ranks and does not restart them; give -n N, and after a \
    failure start the job again with `ringtrain --resume`";
const TOLERATE_FAILURES_HINT: &str =
    "use --tolerate-failures, so that the other ranks continue when a rank fails";
const NETWORK_HINT: &str = "use --interface, which names interfaces or networks of all hosts";
const AGENT_HINT: &str =
    "ringrun starts the ranks of other hosts through ssh; use --ssh-options and --remote-prefix";
const PLACEMENT_HINT: &str = "ringrun spreads ranks evenly over the processors; leave this option out, or use --bind-to core, \
    numa or none";
const SHOW_PLACEMENT_HINT: &str = "use --report-bindings, which prints the processors of each rank";
const CHOOSE_PROCESSORS_HINT: &str =
    "start ringrun under `taskset -c LIST`; ringrun uses only the processors that it may run on";
const THREADS_HINT: &str = "each rank gets an even share of the processors; to change the number of threads, use -x \
    OMP_NUM_THREADS=N";
const MCA_HINT: &str = "ringrun has no MCA parameters; leave this option out (ringtrain and ringbench have \
    --transport and --algorithm)";
const MASTER_ADDRESS_HINT: &str = "use --rdzv-endpoint HOST:PORT for several nodes; for one, ringrun finds a free port (to \
    choose it, use -x MASTER_PORT=P and -x MASTER_ADDR=A)";
const RENDEZVOUS_HINT: &str =
    "leave this option out: ringrun itself is the rendezvous server of its job (see --rdzv-endpoint)";
const TUNING_HINT: &str = "ringrun has no tuning options of Horovod; leave this option out (ringtrain has --bucket-bytes and \
    --compression)";
const LOGGING_HINT: &str = "use -x RUST_LOG=debug, which makes the ranks print what they do";
const SAVE_OUTPUT_HINT: &str = "use --output-dir DIR, which saves and prints the output of each rank";
const MERGE_STREAMS_HINT: &str = "redirect in the command: `ringrun -n N -- sh -c 'COMMAND 2>&1'`";
const MODULE_HINT: &str = "begin the command with the interpreter: ringrun -n N python -m MODULE";
const ONE_PROGRAM_HINT: &str =
    "write the programs on the command line, separated by `:`, for example ringrun -n 1 a : -n 2 b";
const DEBUGGER_HINT: &str =
    "start the debugger as the command, for example: ringrun -n N gdb --batch -ex run --args COMMAND";
const ENVIRONMENT_HINT: &str =
    "every rank inherits ringrun's environment; for an empty environment, run `env -i ringrun ...`";
const NO_SUCH_OPTION_HINT: &str = "ringrun has no such option; leave this option out";

const VALUES_FOR_ONE_HOST: &[&str] = &["1", "1:1"];

/// The options of other launchers for which ringrun has a translation or an error message. The table does not contain
/// options that ringrun has under the same name.
const OPTIONS_OF_OTHER_LAUNCHERS: &[OptionRow] = &[
    // Options for the number of ranks.
    (&["-c", "n", "proc", "ntasks"], 1, SameAs("--np")),
    (
        &["-N", "npernode", "ppn", "perhost", "nproc-per-node", "ntasks-per-node"],
        1,
        SameAs("--ranks-per-host"),
    ),
    (&["pernode"], 0, SameAs("--ranks-per-host=1")),
    (&["oversubscribe", "overcommit", "use-hwthread-cpus", "allow-run-as-root"], 0, Dropped),
    (
        &["nooversubscribe", "nolocal"],
        0,
        Refused("ringrun starts as many ranks as -n says, on the hosts of --host; leave this option out"),
    ),
    (&["npersocket"], 1, Refused(PLACEMENT_HINT)),
    (&["min-np", "max-np", "min-num-proc", "max-num-proc"], 1, Refused(NOT_ELASTIC_HINT)),
    (
        &["host-discovery-script", "slots", "slots-per-host", "reset-limit", "cooldown-range"],
        1,
        Refused(NOT_ELASTIC_HINT),
    ),
    (&["elastic-timeout", "blacklist-cooldown-range"], 1, Refused(NOT_ELASTIC_HINT)),
    // Options for hosts.
    (&["hosts"], 1, SameAs("--host")),
    (&["-f", "machinefile", "default-hostfile"], 1, SameAs("--hostfile")),
    (&["nodelist", "add-host", "add-hostfile"], 1, Refused(SEVERAL_HOSTS_HINT)),
    (&["nodes"], 1, DroppedFor(VALUES_FOR_ONE_HOST, SEVERAL_HOSTS_HINT)),
    (&["-p"], 1, SameAs("--ssh-port")),
    (&["-i"], 1, SameAs("--ssh-identity")),
    (&["launch-agent", "launcher", "launcher-exec"], 1, Refused(AGENT_HINT)),
    (&["iface", "network-interface", "network-interfaces", "nics", "nic"], 1, SameAs("--interface")),
    (&["local-addr"], 1, Refused(NETWORK_HINT)),
    (&["gloo", "mpi", "jsrun"], 0, Refused("ringrun has its own runtime; leave this option out")),
    (&["tcp"], 0, Refused("leave this option out, or pass --transport tcp to ringtrain or ringbench")),
    // Options for processors.
    (&["rank-by", "distribution"], 1, Refused(PLACEMENT_HINT)),
    (&["byslot"], 0, SameAs("--map-by=slot")),
    (&["bynode"], 0, SameAs("--map-by=node")),
    (&["bycore", "bysocket"], 0, Refused(PLACEMENT_HINT)),
    (&["bind-to-core"], 0, SameAs("--bind-to=core")),
    (&["bind-to-none"], 0, SameAs("--bind-to=none")),
    (&["bind-to-socket"], 0, Refused("use --bind-to numa")),
    (&["cpu-bind", "binding-args", "rankfile"], 1, Refused(PLACEMENT_HINT)),
    (&["cpu-set", "cpu-list"], 1, Refused(CHOOSE_PROCESSORS_HINT)),
    (&["cpus-per-rank", "cpus-per-proc", "cpus-per-task"], 1, Refused(THREADS_HINT)),
    (
        &["display-map", "display-allocation", "display-devel-map", "display-topo"],
        0,
        Refused(SHOW_PLACEMENT_HINT),
    ),
    (&["display"], 1, Refused(SHOW_PLACEMENT_HINT)),
    // Options for the rendezvous and for restarts.
    (&["standalone"], 0, Dropped),
    (&["rdzv-backend"], 1, DroppedFor(&["c10d", "static"], RENDEZVOUS_HINT)),
    (&["rdzv-conf"], 1, Refused(RENDEZVOUS_HINT)),
    (&["master-addr", "master-port"], 1, Refused(MASTER_ADDRESS_HINT)),
    (&["max-restarts"], 1, DroppedFor(&["0"], NOT_ELASTIC_HINT)),
    (
        &["monitor-interval", "start-method", "role", "event-log-handler", "signals-to-handle"],
        1,
        Refused(NO_SUCH_OPTION_HINT),
    ),
    (&["enable-recovery", "continuous"], 0, Refused(TOLERATE_FAILURES_HINT)),
    (&["disable-recovery"], 0, Dropped),
    (&["timeout"], 1, SameAs("--job-timeout")),
    // Options for the command.
    (&["no-python"], 0, Dropped),
    (&["-m", "module", "run-path"], 0, Refused(MODULE_HINT)),
    (&["app", "configfile", "multi-prog"], 1, Refused(ONE_PROGRAM_HINT)),
    (&["preload-binary", "debug", "debugger", "tv"], 0, Refused(DEBUGGER_HINT)),
    (&["xterm"], 1, Refused(DEBUGGER_HINT)),
    (&["chdir"], 1, SameAs("--wdir")),
    (&["path", "prefix", "personality", "tmpdir", "tune", "am", "rmk"], 1, Refused(NO_SUCH_OPTION_HINT)),
    (&["mca", "gmca", "pmixmca", "prtemca"], 2, Refused(MCA_HINT)),
    (&["mpi-args", "mpi-threads-disable"], 1, Refused(MCA_HINT)),
    // Options for the environment of the ranks.
    (&["-env", "genv"], 2, Variable),
    (&["genvlist", "envlist"], 1, Variables),
    (&["genvall", "envall"], 0, Dropped),
    (&["genvnone", "envnone"], 0, Refused(ENVIRONMENT_HINT)),
    (&["export"], 1, DroppedFor(&["ALL"], ENVIRONMENT_HINT)),
    // Options for the output of the ranks.
    (&["-l", "label", "prepend-rank"], 0, SameAs("--tag-output")),
    (&["prefix-timestamp", "prefix-output-with-timestamp"], 0, SameAs("--timestamp-output")),
    (&["merge-stderr-to-stdout", "stream-output"], 0, Refused(MERGE_STREAMS_HINT)),
    (&["output"], 1, Refused("use --tag-output or --output-dir DIR")),
    (&["outfile-pattern", "errfile-pattern"], 1, SameAs("--output-dir")),
    (&["log-dir"], 1, SameAs("--output-dir")),
    (&["-r", "redirects", "-t", "tee", "local-ranks-filter", "logs-specs"], 1, Refused(SAVE_OUTPUT_HINT)),
    (&["input"], 1, SameAs("--stdin")),
    (&["log-level"], 1, Refused(LOGGING_HINT)),
    (&["report-pid", "report-uri"], 1, Refused("use --verbose; each rank also finds its number in $RANK")),
    (&["print-all-exitcodes"], 0, SameAs("--verbose")),
    // Options for the runtime of Horovod.
    (&["fusion-threshold-mb", "cycle-time-ms", "cache-capacity", "config-file"], 1, Refused(TUNING_HINT)),
    (
        &["timeline-filename"],
        1,
        Refused("set RING_TIMELINE=FILE for your own program, or use `ringtrain --timeline FILE`"),
    ),
    (&["stall-check-warning-time-seconds", "stall-check-shutdown-time-seconds"], 1, Refused(TUNING_HINT)),
    (
        &["autotune", "no-stall-check", "disable-cache", "hierarchical-allreduce", "hierarchical-allgather"],
        0,
        Refused(TUNING_HINT),
    ),
    (&["check-build"], 0, Refused("use --version, and `ringrun doctor` to check the hosts")),
];

/// Replaces the options of other launchers by options of ringrun. Does not change COMMAND and its arguments. If a `:` ends the
/// arguments of COMMAND, also returns the arguments after the `:`. An error is one sentence.
pub(super) fn translate_options_of_other_launchers(
    ringrun_options: &Command,
    arguments: Vec<OsString>,
) -> Result<(Vec<OsString>, Option<Vec<OsString>>), String> {
    let mut translated = Vec::with_capacity(arguments.len());
    let mut rest = arguments.into_iter();
    while let Some(argument) = rest.next() {
        let bytes = argument.as_bytes();
        if bytes == b"--" {
            translated.push(argument);
            break;
        }
        if !bytes.starts_with(b"-") || bytes == b"-" {
            let mut command: Vec<OsString> = iter::once(argument).chain(rest).collect();
            let end = command.iter().position(|word| word == ":");
            let next_part = end.map(|end| command.split_off(end).split_off(1));
            translated.extend(command);
            return Ok((translated, next_part));
        }
        // Pass an argument that is not UTF-8 to clap. clap accepts such an argument only as the value of an option such
        // as `-x`.
        let Some(text) = argument.to_str() else {
            translated.push(argument);
            continue;
        };
        let (typed_name, value) =
            text.split_once('=').map_or((text, None), |(typed_name, value)| (typed_name, Some(value)));
        let mut next_value = |name: &str| rest.next().ok_or_else(|| format!("{name} needs a value"));
        if let Some(&(_, count, translation)) = find_row(typed_name) {
            let mut values: Vec<OsString> = value.into_iter().map(OsString::from).collect();
            while values.len() < count {
                values.push(next_value(typed_name)?);
            }
            if values.len() > count {
                return Err(format!("{typed_name} takes no value"));
            }
            translate_option(typed_name, translation, values, &mut translated)?;
        } else {
            let (rewritten, needs_value) = rewrite_for_clap(ringrun_options, typed_name, value)?;
            translated.push(rewritten.into());
            if needs_value {
                translated.extend(rest.next());
            }
        }
    }
    translated.extend(rest);
    Ok((translated, None))
}

/// Returns the row of an option, or `None` if no row has this option. `typed_name` is the option as the user typed it,
/// without a value.
fn find_row(typed_name: &str) -> Option<&'static OptionRow> {
    let long =
        typed_name.strip_prefix("--").or_else(|| typed_name.strip_prefix('-').filter(|name| name.len() > 1));
    let long = long.map(|name| name.replace('_', "-"));
    OPTIONS_OF_OTHER_LAUNCHERS.iter().find(|(names, ..)| {
        names
            .iter()
            .any(|&name| name == typed_name || (!name.starts_with('-') && Some(name) == long.as_deref()))
    })
}

/// Appends the options of ringrun that replace one option of another launcher. `typed_name` is the option as the user
/// typed it.
fn translate_option(
    typed_name: &str,
    translation: Translation,
    values: Vec<OsString>,
    translated: &mut Vec<OsString>,
) -> Result<(), String> {
    match translation {
        SameAs(option) => {
            translated.push(option.into());
            translated.extend(values);
        }
        Dropped => {}
        DroppedFor(accepted, _) if values.iter().all(|value| accepted.iter().any(|known| value == known)) => {
        }
        Variable => {
            let mut assignment = OsString::new();
            for (index, value) in values.iter().enumerate() {
                assignment.push(if index == 0 { "" } else { "=" });
                assignment.push(value);
            }
            translated.extend(["-x".into(), assignment]);
        }
        Variables => {
            let names = values.iter().flat_map(|value| value.as_bytes().split(|&byte| byte == b','));
            translated.extend(names.flat_map(|name| ["-x".into(), OsStr::from_bytes(name).to_owned()]));
        }
        DroppedFor(_, sentence) | Refused(sentence) => return Err(format!("{typed_name}: {sentence}")),
    }
    Ok(())
}

/// Returns an option of ringrun in the form that clap expects, and whether its value is the next argument.
///
/// Returns an error for an unknown argument with one dash: clap would read `-hfoo` as `-h`, print the help and exit
/// with 0.
fn rewrite_for_clap(
    ringrun_options: &Command,
    typed_name: &str,
    value: Option<&str>,
) -> Result<(String, bool), String> {
    let unknown = || format!("unknown option {typed_name}; `ringrun --help` lists the options");
    let with_value = |name: &str| value.map_or_else(|| name.to_owned(), |value| format!("{name}={value}"));
    let takes_value = |arg: &&Arg| arg.get_action().takes_values() && !arg.is_require_equals_set();
    let find_short =
        |letter: char| ringrun_options.get_arguments().find(|arg| arg.get_short() == Some(letter));
    let name = typed_name.trim_start_matches('-').replace('_', "-");
    let long_option = ringrun_options.get_arguments().find(|arg| has_long_option(arg, &name));
    let has_two_dashes = typed_name.starts_with("--");
    if has_two_dashes
        || name.len() > 1 && (long_option.is_some() || ["help", "version"].contains(&name.as_str()))
    {
        // Also pass an unknown long option to clap, because clap's error message suggests similar names.
        return Ok((
            with_value(&format!("--{name}")),
            value.is_none() && long_option.as_ref().is_some_and(takes_value),
        ));
    }
    let mut letters = typed_name[1..].chars();
    let first_letter = letters.next().ok_or_else(unknown)?;
    let other_letters = letters.as_str();
    let first_takes_value = find_short(first_letter).as_ref().is_some_and(takes_value);
    if other_letters.is_empty() {
        return Ok((with_value(typed_name), first_takes_value && value.is_none()));
    }
    let value_follows =
        first_takes_value && (first_letter != 'n' || other_letters.bytes().all(|byte| byte.is_ascii_digit()));
    let is_flag = |letter: char| find_short(letter).is_some_and(|arg| !takes_value(&arg));
    if value_follows || typed_name[1..].chars().all(is_flag) {
        Ok((with_value(typed_name), false))
    } else {
        Err(unknown())
    }
}

fn has_long_option(arg: &Arg, name: &str) -> bool {
    arg.get_long().into_iter().chain(arg.get_all_aliases().into_iter().flatten()).any(|long| long == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ringrun_command() -> Command {
        <super::super::RunArgs as clap::CommandFactory>::command()
    }

    fn translate_line(line: &str) -> Result<String, String> {
        let separator = OsString::from("|");
        let (words, next_part) = translate_options_of_other_launchers(
            &ringrun_command(),
            line.split_whitespace().map(OsString::from).collect(),
        )?;
        let words = words.iter().chain(next_part.iter().flat_map(|part| iter::once(&separator).chain(part)));
        Ok(words.map(|word| word.to_str().expect("text")).collect::<Vec<_>>().join(" "))
    }

    /// For every option of the table and every spelling of the option, `translate_options_of_other_launchers` returns
    /// either a command line that clap accepts, or an error of one sentence.
    #[test]
    fn every_option_of_the_table_is_translated_or_refused_with_a_sentence() {
        for &(names, count, translation) in OPTIONS_OF_OTHER_LAUNCHERS {
            for &name in names {
                let spellings = match name.strip_prefix('-') {
                    Some(_) => vec![name.to_owned()],
                    None => {
                        vec![format!("--{name}"), format!("-{name}"), format!("--{}", name.replace('-', "_"))]
                    }
                };
                for typed_name in
                    spellings.into_iter().filter(|typed_name| typed_name.len() > 1 && typed_name != "-n")
                {
                    let values = ["3", "4"][..count].join(" ");
                    let found = translate_line(&format!("{typed_name} {values} prog"));
                    match translation {
                        SameAs(_) | Dropped | Variable | Variables => {
                            let line = found.unwrap_or_else(|error| panic!("{typed_name}: {error}"));
                            assert!(
                                line.ends_with("prog") && line.split(' ').all(|word| word != typed_name),
                                "{typed_name}: {line}"
                            );
                            let words = line.split_whitespace().filter(|word| word.starts_with("--"));
                            let known = |word: &str| {
                                ringrun_command().get_arguments().any(|arg| {
                                    has_long_option(
                                        arg,
                                        word.trim_start_matches("--").split('=').next().unwrap(),
                                    )
                                })
                            };
                            assert!(words.into_iter().all(known), "{typed_name}: {line}");
                        }
                        DroppedFor(accepted, sentence) => {
                            assert_eq!(found, Err(format!("{typed_name}: {sentence}")));
                            for value in accepted {
                                assert_eq!(
                                    translate_line(&format!("{typed_name}={value} prog")).as_deref(),
                                    Ok("prog")
                                );
                            }
                        }
                        Refused(sentence) => {
                            assert_eq!(found, Err(format!("{typed_name}: {sentence}")));
                            assert!(!sentence.ends_with('.') && !sentence.contains("  "), "{sentence}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn every_name_is_in_the_table_once_and_is_no_option_of_ringrun() {
        let mut names: Vec<&str> =
            OPTIONS_OF_OTHER_LAUNCHERS.iter().flat_map(|(names, ..)| *names).copied().collect();
        for name in &names {
            let ringrun_options = ringrun_command();
            let is_short = |arg: &Arg| arg.get_short().is_some_and(|short| *name == format!("-{short}"));
            assert!(
                !ringrun_options.get_arguments().any(|arg| has_long_option(arg, name) || is_short(arg)),
                "{name}"
            );
        }
        names.sort_unstable();
        let count = names.len();
        names.dedup();
        assert_eq!(names.len(), count);
    }

    #[test]
    fn command_lines_for_other_launchers_are_translated() {
        for (line, expected) in [
            ("-np 2 a -np 3", "--np 2 a -np 3"),
            ("-np=2 a", "--np=2 a"),
            ("-n2 -vq a", "-n2 -vq a"),
            ("-n=2 a", "-n=2 a"),
            ("-c 2 a", "--np 2 a"),
            ("-hostfile f -np 2 a", "--hostfile f --np 2 a"),
            ("--hostfile=f a", "--hostfile=f a"),
            ("-H localhost:2 a", "-H localhost:2 a"),
            ("-Hlocalhost:2 a", "-Hlocalhost:2 a"),
            ("-host localhost -wdir / a", "--host localhost --wdir / a"),
            ("--nproc_per_node=4 --nnodes=1 --standalone a", "--ranks-per-host 4 --nnodes=1 a"),
            ("-ppn 2 a", "--ranks-per-host 2 a"),
            ("-xA=1 -x B a", "-xA=1 -x B a"),
            ("-genv A 1 -genvlist B,C -env D 4 a", "-x A=1 -x B -x C -x D=4 a"),
            (
                "--tag_output --output-filename d --no-tag-output a",
                "--tag-output --output-filename d --no-tag-output a",
            ),
            ("-v -help", "-v --help"),
            ("--oversubscribe --allow-run-as-root -n 2 -- a : b", "-n 2 -- a : b"),
            ("--bind-to core --report-bindings a", "--bind-to core --report-bindings a"),
            ("--bogus a", "--bogus a"),
            ("-c 1 a x : -c 2 b", "--np 1 a x | -c 2 b"),
            ("-n 1 a :", "-n 1 a |"),
        ] {
            assert_eq!(translate_line(line).as_deref(), Ok(expected), "{line}");
        }
        for (line, part) in [
            ("--mca btl ^openib a", "no MCA parameters"),
            ("--rank-by socket a", "--bind-to core, numa or none"),
            ("--nodes 2 a", "-H HOST:N"),
            ("--max-restarts=3 a", "--resume"),
            ("-hfoo a", "unknown option -hfoo"),
            ("-np4 a", "unknown option -np4"),
            ("--mca btl", "--mca needs a value"),
            ("--gloo=1 a", "takes no value"),
        ] {
            let error = translate_line(line).expect_err(line);
            assert!(error.contains(part) && !error.contains('\n'), "{line}: {error}");
        }
    }
}
