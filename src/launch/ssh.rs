//! The command line of ssh, and what its failures mean. This module performs no IO.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use super::plan::SshOptions;

/// The option of ringrun that makes it an agent.
pub const AGENT_OPTION: &str = "--agent";

/// The option of ringrun that makes it a relay.
pub const RELAY_OPTION: &str = "--relay";

/// How long ssh waits for a connection, unless `--ssh-options` says otherwise.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// The exit code of ssh if ssh itself failed.
pub(super) const SSH_FAILED: i32 = 255;

/// The exit code of a shell that has not found the program.
const NOT_FOUND: i32 = 127;

/// How ringrun starts an agent or a relay on another host.
#[derive(Clone, Debug)]
pub(super) struct AgentStarter {
    pub(super) options: SshOptions,
    /// The path of this executable.
    pub(super) own_path: PathBuf,
    /// The time limit of the start of the job.
    pub(super) start_timeout: Duration,
}

impl AgentStarter {
    /// Returns the arguments with which ssh starts a program on `host`: an agent ([`AGENT_OPTION`]) or a relay
    /// ([`RELAY_OPTION`]).
    ///
    /// ssh uses the first value that it finds for an option, so `--ssh-options` come first.
    pub(super) fn arguments(&self, host: &str, program: &str) -> Vec<OsString> {
        let mut arguments: Vec<OsString> = vec!["-T".into()];
        arguments.extend(self.options.arguments.iter().map(OsString::from));
        let connect_seconds = CONNECT_TIMEOUT.min(self.start_timeout).as_secs().max(1);
        for option in [
            "BatchMode=yes".to_owned(),
            format!("ConnectTimeout={connect_seconds}"),
            "ServerAliveInterval=10".to_owned(),
            "ServerAliveCountMax=3".to_owned(),
        ] {
            arguments.extend(["-o".into(), option.into()]);
        }
        if let Some(port) = self.options.port {
            arguments.extend(["-p".into(), port.to_string().into()]);
        }
        if let Some(identity) = &self.options.identity {
            arguments.extend(["-i".into(), identity.into()]);
        }
        arguments.extend(["--".into(), host.into(), self.remote_command(program).into()]);
        arguments
    }

    /// Returns the line that the login shell of the other host executes. The line works in every common shell.
    fn remote_command(&self, program: &str) -> String {
        match &self.options.remote_prefix {
            Some(prefix) => {
                format!("exec {} {program}", quote(&prefix.join("bin/ringrun").to_string_lossy()))
            }
            None => format!(
                "exec sh -c 'p=$1; [ -x \"$p\" ] || p=ringrun; exec \"$p\" {program}' sh {}",
                quote(&self.own_path.to_string_lossy())
            ),
        }
    }

    /// Says why ssh, or the agent that ssh has started, ended with `code` (`None`: a signal killed ssh) before the agent said
    /// hello, and what the user can do. `via` is the host that has run ssh, if this is not the host of ringrun. `printed` is the
    /// text that ssh and the other host have printed.
    pub(super) fn describe_failed_start(
        &self,
        (host, via): (&str, Option<&str>),
        code: Option<i32>,
        printed: &str,
    ) -> String {
        let printed_part = if printed.is_empty() { String::new() } else { format!(": {printed}") };
        match (code, via) {
            (Some(SSH_FAILED), Some(via)) => {
                format!("ssh failed{printed_part}; {}", advise_to_allow(host, via))
            }
            (Some(SSH_FAILED), None) => format!("ssh failed{printed_part}; {}", advise(host, printed)),
            (Some(NOT_FOUND), _) => {
                let place = match &self.options.remote_prefix {
                    Some(prefix) => format!("{} (see --remote-prefix)", prefix.join("bin/ringrun").display()),
                    None => format!("{}, and not in PATH; see --remote-prefix", self.own_path.display()),
                };
                format!("there is no ringrun at {place}{printed_part}")
            }
            (Some(code), _) => format!(
                "ringrun did not start there as an agent (exit code {code}){printed_part}; if it is another version, install \
                 the version {}",
                env!("CARGO_PKG_VERSION")
            ),
            (None, _) => format!("a signal killed ssh{printed_part}"),
        }
    }
}

/// Returns the command that runs ssh with these arguments and three pipes.
pub(super) fn ssh_command(arguments: &[OsString]) -> Command {
    let mut command = Command::new("ssh");
    command.args(arguments).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Quotes a word for a shell.
fn quote(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

/// Says what the user can do about a failure of an ssh that another host has run.
fn advise_to_allow(host: &str, via: &str) -> String {
    format!(
        "allow ssh from {via} to {host}, or use --ssh-fanout 0, with which this host runs ssh to all hosts; try \
         `ssh {via} ssh -o BatchMode=yes {host} true`"
    )
}

/// Says what the user can do about a failure of ssh.
fn advise(host: &str, printed: &str) -> String {
    let try_ssh = format!("try `ssh -o BatchMode=yes {host} true`");
    let is_about = |part: &str| printed.contains(part);
    if is_about("Permission denied") || is_about("Too many authentication failures") {
        format!("install your key there with `ssh-copy-id {host}`, or pass --ssh-identity FILE; {try_ssh}")
    } else if is_about("Host key verification failed") {
        format!("accept its host key once with `ssh {host} true`; {try_ssh}")
    } else if is_about("resolve hostname") {
        "correct the name in --host or --hostfile".to_owned()
    } else if is_about("onnection refused") || is_about("onnection timed out") || is_about("route to host") {
        format!("check that the host is up and runs sshd on this port (--ssh-port); {try_ssh}")
    } else {
        try_ssh
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn make_starter(options: SshOptions, own_path: &str) -> AgentStarter {
        AgentStarter { options, own_path: own_path.into(), start_timeout: Duration::from_secs(30) }
    }

    fn words(arguments: &[OsString]) -> Vec<String> {
        arguments.iter().map(|word| word.to_string_lossy().into_owned()).collect()
    }

    #[test]
    fn the_options_of_the_user_come_first_and_the_host_is_no_option() {
        let options = SshOptions {
            port: Some(2200),
            identity: Some("/k".into()),
            arguments: vec!["-o".into(), "ConnectTimeout=3".into()],
            remote_prefix: Some("/opt/it's".into()),
            fanout: 0,
        };
        let arguments = make_starter(options, "/x/ringrun").arguments("u@b", AGENT_OPTION);
        let expected = "-T -o ConnectTimeout=3 -o BatchMode=yes -o ConnectTimeout=10 -o ServerAliveInterval=10 -o \
            ServerAliveCountMax=3 -p 2200 -i /k -- u@b exec '/opt/it'\\''s/bin/ringrun' --agent";
        assert_eq!(words(&arguments).join(" "), expected);
    }

    #[test]
    fn without_a_prefix_the_agent_has_the_same_path_or_is_in_path() {
        let arguments = make_starter(SshOptions::default(), "/x y/ringrun").arguments("b", AGENT_OPTION);
        let line = words(&arguments).pop().unwrap();
        // The line runs here, with a script in the place of ringrun.
        let directory = tempfile::tempdir().unwrap();
        let script = directory.path().join("ringrun");
        std::fs::write(&script, "#!/bin/sh\necho in PATH $1\n").unwrap();
        std::fs::set_permissions(&script, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        let path = format!("{}:/usr/bin:/bin", directory.path().display());
        let run = |line: &str| {
            let output = Command::new("sh").args(["-c", line]).env("PATH", &path).output().unwrap();
            String::from_utf8(output.stdout).unwrap()
        };
        assert_eq!(run(&line), "in PATH --agent\n");
        assert_eq!(run(&line.replace("/x y/ringrun", "/bin/echo")), "--agent\n");
    }

    #[test]
    fn each_failure_says_what_to_do() {
        let starter = make_starter(SshOptions::default(), "/x/ringrun");
        for (code, via, printed, part) in [
            (Some(255), None, "a@b: Permission denied (publickey).", "ssh-copy-id b"),
            (Some(255), None, "Host key verification failed.", "`ssh b true`"),
            (Some(255), None, "ssh: Could not resolve hostname b", "--hostfile"),
            (Some(255), None, "connect to host b port 22: Connection refused", "--ssh-port"),
            (Some(255), None, "", "ssh -o BatchMode=yes b true"),
            (Some(127), None, "sh: 1: exec: ringrun: not found", "no ringrun at /x/ringrun, and not in PATH"),
            (Some(2), None, "unexpected argument", "another version"),
            (None, None, "", "a signal killed ssh"),
            (Some(255), Some("a"), "Permission denied", "allow ssh from a to b, or use --ssh-fanout 0"),
            (Some(127), Some("a"), "", "no ringrun at /x/ringrun, and not in PATH"),
        ] {
            let text = starter.describe_failed_start(("b", via), code, printed);
            assert!(text.contains(part) && text.contains(printed), "{text}");
        }
    }
}
