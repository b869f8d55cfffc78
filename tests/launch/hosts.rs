//! Runs jobs on several hosts through real programs sshd and ssh. `tools/ssh-lab` makes the hosts: network namespaces of this
//! machine.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use ringtrain::exit::Exit;

use crate::ports::{hold_ports, listening_ports};
use crate::util::{
    FinishedProgram, finish, processes_with_environment, ringrun, run, runs_long_tests, send_signal,
    wait_until,
};

/// The exit code of `tools/ssh-lab` if this machine cannot have hosts with sshd.
const NO_LAB: i32 = 77;

/// Hosts with sshd. Dropping this value removes them.
pub(crate) struct Lab {
    keeper: Child,
    hosts: usize,
    variables: BTreeMap<String, String>,
}

impl Lab {
    /// Makes hosts. If this machine cannot have them, says that the test is skipped, and returns `None`.
    pub(crate) fn start(hosts: usize) -> Option<Self> {
        let mut keeper = Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tools/ssh-lab"))
            .args(["-n", &hosts.to_string(), "--", "sh", "-c", "env; echo; exec cat"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()
            .expect("tools/ssh-lab starts");
        let lines = BufReader::new(keeper.stdout.take().expect("a pipe")).lines();
        let lines: Vec<String> = lines.map_while(Result::ok).take_while(|line| !line.is_empty()).collect();
        if lines.is_empty() {
            let mut message = String::new();
            keeper.stderr.take().expect("a pipe").read_to_string(&mut message).expect("text");
            let code = keeper.wait().expect("tools/ssh-lab ends").code();
            assert_eq!(code, Some(NO_LAB), "{message}");
            // The test harness captures what `eprintln` prints, but not this.
            let text = format!("the test of jobs on several hosts is SKIPPED: {message}");
            io::stderr().write_all(text.as_bytes()).expect("standard error is open");
            return None;
        }
        let variables = lines.iter().filter_map(|line| line.split_once('='));
        let variables = variables.map(|(name, value)| (name.to_owned(), value.to_owned())).collect();
        Some(Self { keeper, hosts, variables })
    }

    pub(crate) fn get(&self, name: &str) -> &str {
        &self.variables[&format!("LAB_{name}")]
    }

    /// Returns a command that runs ringrun with the private key `key` and the hosts `hosts`, in which `@0` stands for the address
    /// of host 0, and so on.
    pub(crate) fn ringrun_with_key(&self, key: &str, hosts: &str, arguments: &[&str]) -> Command {
        let mut command = ringrun(&["--ssh-identity", key, "--ssh-options", self.get("OPTIONS")]);
        let hosts = (0..self.hosts).fold(hosts.to_owned(), |hosts, number| {
            hosts.replace(&format!("@{number}"), self.get(&format!("HOST_{number}")))
        });
        command.args(["-H", &hosts, "-x"]).arg(self.mark()).args(arguments);
        command
    }

    pub(crate) fn ringrun(&self, hosts: &str, arguments: &[&str]) -> Command {
        self.ringrun_with_key(self.get("KEY"), hosts, arguments)
    }

    fn run_script(&self, hosts: &str, script: &str) -> FinishedProgram {
        run(&mut self.ringrun(hosts, &["--grace", "0", "--", "sh", "-c", script]))
    }

    /// The entry of the environment that marks the ranks of this lab.
    fn mark(&self) -> String {
        format!("LAB_MARK={}", self.get("NAME"))
    }

    /// Returns the processes of a host whose names begin with `name`, without those of sshd if the name is `ssh`.
    pub(crate) fn processes(&self, host: usize, name: &str) -> Vec<u32> {
        let namespace = format!("{}-{host}", self.get("NAME"));
        let found = Command::new("ip").args(["netns", "pids", &namespace]).output().expect("ip runs");
        let text = String::from_utf8(found.stdout).expect("numbers");
        let is_named = |pid: &u32| {
            fs::read_to_string(format!("/proc/{pid}/comm"))
                .is_ok_and(|found| found.starts_with(name) && (name != "ssh" || found.trim() == name))
        };
        text.lines().filter_map(|pid| pid.parse().ok()).filter(is_named).collect()
    }

    /// Kills the processes of a host with this name. One of them may end because another is killed.
    pub(crate) fn kill(&self, host: usize, name: &str) {
        let pids = self.processes(host, name);
        assert!(!pids.is_empty(), "no {name} runs on host {host}");
        for pid in pids {
            let _ =
                Command::new("kill").args(["-s", "KILL", &pid.to_string()]).stderr(Stdio::null()).status();
        }
    }

    /// Waits until no rank, no agent and no relay is left on any host.
    pub(crate) fn wait_until_nothing_is_left(&self) {
        wait_until("no rank is left", || processes_with_environment(&self.mark()).is_empty());
        for host in 0..self.hosts {
            for name in ["ring-agent", "ring-relay", "ring-watchdog", "ssh"] {
                wait_until("no agent is left", || self.processes(host, name).is_empty());
            }
        }
    }

    /// Makes a directory that host `host` sees as an empty one.
    pub(crate) fn hide_directory(&self, host: usize, name: &str) -> String {
        let directory = format!("{}/{name}", self.get("DIRECTORY"));
        fs::create_dir_all(&directory).expect("a directory");
        let sshd = self.get(&format!("SSHD_{host}"));
        let hide = ["-t", sshd, "-m", "mount", "-t", "tmpfs", "none", &directory];
        assert!(Command::new("nsenter").args(hide).status().expect("nsenter runs").success());
        directory
    }

    /// Starts ranks that sleep, and waits until all of them run. Returns ringrun.
    pub(crate) fn start_sleeping_ranks(&self, hosts: &str, arguments: &[&str], ranks: usize) -> Child {
        let arguments = [arguments, &["--", "sh", "-c", "exec sleep 300"]].concat();
        let job = self.ringrun(hosts, &arguments).spawn().expect("ringrun starts");
        wait_until("all ranks sleep", || {
            let pids = processes_with_environment(&self.mark());
            let sleeps = |pid: &&u32| {
                fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim() == "sleep")
            };
            pids.iter().filter(sleeps).count() == ranks
        });
        job
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        // `cat` ends at the end of its input, and the script then removes the hosts.
        drop(self.keeper.stdin.take());
        let _ = self.keeper.wait();
    }
}

/// Checks that a job failed with this code and printed all of these parts, and that nothing of it is left.
pub(crate) fn assert_failed(lab: &Lab, job: &FinishedProgram, code: i32, parts: &[&str]) {
    let text = job.stderr();
    assert_eq!(job.code(), Some(code), "{text}");
    for part in parts {
        assert!(text.contains(part), "`{part}` is missing in:\n{text}");
    }
    lab.wait_until_nothing_is_left();
}

#[test]
fn ranks_run_on_several_hosts() {
    let Some(lab) = Lab::start(2) else { return };
    let (first, second) = (lab.get("HOST_0").to_owned(), lab.get("HOST_1").to_owned());
    let long = format!("{}/input", lab.get("DIRECTORY"));
    fs::write(&long, "x".repeat(2_400_000)).expect("a file");
    let script = "echo $RANK $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK/$GROUP_WORLD_SIZE $MASTER_ADDR $(pwd)";
    let job = lab.run_script("@0:2,@1", script);
    assert_eq!(job.code(), Some(0), "{}", job.stderr());
    let place = fs::canonicalize(".").expect("a working directory").display().to_string();
    let expected: Vec<String> = [(0, 0, 2, 0), (1, 1, 2, 0), (2, 0, 1, 1)]
        .map(|(rank, local, size, host)| {
            format!("[{rank}]<stdout>:{rank} {local}/{size} {host}/2 {first} {place}")
        })
        .into();
    assert_eq!(job.sorted_lines(), expected);
    // Host 0 reaches host 1.
    let job = run(&mut lab.ringrun("@0:2,@1", &["--ssh-fanout", "1", "--", "sh", "-c", script]));
    assert_eq!(job.sorted_lines(), expected, "{}", job.stderr());
    // Several programs.
    let programs =
        ["-n", "1", "sh", "-c", "echo $RANK a", ":", "-n", "2", "--wdir", "/", "-x", "X=7", "sh", "-c"];
    let job = run(lab.ringrun("@0:2,@1", &programs).arg("echo $RANK b $X $(pwd)"));
    let expected = ["[0]<stdout>:0 a", "[1]<stdout>:1 b 7 /", "[2]<stdout>:2 b 7 /"];
    assert_eq!(job.sorted_lines(), expected, "{}", job.stderr());
    // The standard input reaches ranks on other hosts.
    for (arguments, expected) in [
        (&["--map-by", "node"][..], ["[0]<stdout>:0 2400000", "[1]<stdout>:1 0", "[2]<stdout>:2 0"]),
        (&["--stdin", "all"], ["[0]<stdout>:0 2400000", "[1]<stdout>:1 2400000", "[2]<stdout>:2 2400000"]),
    ] {
        let arguments = [arguments, &["sh", "-c", "echo $RANK $(wc -c)"]].concat();
        let input = fs::File::open(&long).expect("a file");
        let job = run(lab.ringrun("@0:2,@1", &arguments).stdin(input));
        assert_eq!(job.sorted_lines(), expected, "{}", job.stderr());
    }
    // The ranks find each other, also with ranks on this host.
    let (held, port) = hold_ports(3);
    drop(held);
    let ports = format!("{port}-{}", port + 2);
    let training = run(&mut lab.ringrun(
        "localhost,@0,@1:2",
        &[
            "--port",
            &ports,
            "--interface",
            "10.0.0.0/8,^lo",
            "ringtrain",
            "--epochs",
            "1",
            "--data",
            "synthetic:256x4",
        ],
    ));
    assert_eq!(training.code(), Some(0), "{}", training.stderr());
    refuse_ports_in_use(&lab, port, &ports);
    // The rank that fails is named with its host.
    let job = lab.run_script("@0:2,@1", "[ $RANK = 2 ] && exit 3; exec sleep 300");
    assert_failed(
        &lab,
        &job,
        3,
        &["rank 2 (pid ", &format!(" on {second}) exited with code 3"), "ranks 0-1 were killed"],
    );
    let job = run(&mut lab.ringrun_with_key(lab.get("WRONG_KEY"), "@0,@1", &["true"]));
    let advice = format!("`ssh-copy-id {second}`");
    assert_failed(&lab, &job, 5, &[&format!("host {first}: ssh failed"), "Permission denied", &advice]);
}

/// Starts another job that uses 2 of the 3 ports `ports` of host 1, and checks that the error names the host and the ports.
fn refuse_ports_in_use(lab: &Lab, port: u16, ports: &str) {
    let second = lab.get("HOST_1");
    let train = ["--port", ports, "ringtrain", "--epochs", "1000000", "--data", "synthetic:64x4"];
    let other = lab.ringrun("@1:2", &train).spawn().expect("ringrun starts");
    let namespace = format!("{}-1", lab.get("NAME"));
    wait_until("the ranks of the other job listen", || {
        let table = Command::new("ip").args(["netns", "exec", &namespace, "cat", "/proc/net/tcp"]).output();
        let table = table.expect("ip runs").stdout;
        let listening = listening_ports(&String::from_utf8_lossy(&table));
        listening.into_iter().filter(|found| (port..port + 3).contains(found)).count() == 2
    });
    let job = run(&mut lab.ringrun("@1:2", &["--port", ports, "true"]));
    assert_eq!(job.code(), Some(Exit::PortInUse as i32), "{}", job.stderr());
    let wanted =
        [format!("host {second}: --port {ports}: "), format!("need 2 free ports on {second}, and 1 is free")];
    assert!(wanted.iter().all(|part| job.stderr().contains(part)), "{}", job.stderr());
    send_signal("INT", other.id());
    finish(other);
}

#[test]
fn every_failure_of_a_host_ends_the_job_everywhere() {
    if !runs_long_tests() {
        return;
    }
    let Some(lab) = Lab::start(2) else { return };
    let second = lab.get("HOST_1").to_owned();
    // sshd is killed while the job runs, with all its connections.
    let job = lab.start_sleeping_ranks("@0:2,@1:2", &["--grace", "0"], 4);
    lab.kill(1, "sshd");
    let job = finish(job);
    let lost = format!("on {second}) was lost with its host");
    assert_failed(&lab, &job, 6, &[&format!("host {second}: the connection broke"), &lost]);
    // Host 1 has no sshd now.
    let job = run(&mut lab.ringrun("@0:2,@1:2", &["true"]));
    assert_failed(&lab, &job, 5, &["Connection refused", "--ssh-port", &second]);
    drop(lab);

    let Some(lab) = Lab::start(2) else { return };
    let second = lab.get("HOST_1").to_owned();
    // ringrun is killed, and then ringrun gets signals.
    let job = lab.start_sleeping_ranks("@0:2,@1:2", &[], 4);
    send_signal("KILL", job.id());
    finish(job);
    lab.wait_until_nothing_is_left();
    for (signal, code) in [("INT", 130), ("TERM", 143)] {
        let job = lab.start_sleeping_ranks("localhost,@1:2", &[], 3);
        send_signal(signal, job.id());
        assert_failed(&lab, &finish(job), code, &[&format!("SIG{signal}")]);
    }
    // An agent is killed.
    let job = lab.start_sleeping_ranks("@0:2,@1:2", &["--grace", "0"], 4);
    lab.kill(1, "ring-agent");
    assert_failed(&lab, &finish(job), 6, &[&format!("host {second}: the connection broke")]);
    // Something is missing on host 1 only.
    let folder = lab.hide_directory(1, "only-0");
    fs::create_dir(format!("{folder}/bin")).expect("a directory");
    fs::copy("/bin/true", format!("{folder}/program")).expect("a program");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_ringrun"), format!("{folder}/bin/ringrun"))
        .expect("a link");
    let program = format!("{folder}/program");
    let (wanted, bin) = (format!("host {second}: "), format!("{folder}/bin"));
    let cases: [(&[&str], i32, &str); 3] = [
        (&[&program], 127, "command not found"),
        (&["--remote-prefix", &folder, "true"], 5, "there is no ringrun at"),
        (&["--wdir", &bin, "true"], 3, "cannot run in the directory"),
    ];
    for (arguments, code, part) in cases {
        let job = run(&mut lab.ringrun("@0:2,@1:2", arguments));
        assert_failed(&lab, &job, code, &[&wanted, part]);
        assert!(!job.stderr().contains(&format!("host {}", lab.get("HOST_0"))), "{}", job.stderr());
    }
    let job = run(&mut lab.ringrun("no-such-host.invalid,@0", &["true"]));
    assert_failed(&lab, &job, 5, &["host no-such-host.invalid: ssh failed"]);
    let job = run(&mut lab.ringrun("@0", &["--interface", "no-such*", "true"]));
    assert_failed(&lab, &job, 5, &["--interface no-such*: no interface has such an address", "10."]);
    let job = run(&mut lab.ringrun("@0,@1", &["--log-format", "json", "--wdir", &bin, "true"]));
    let host = format!("\"host\":\"{second}\"");
    assert_failed(&lab, &job, 3, &["\"level\":\"ERROR\"", &host, "cannot run in the directory"]);
    let job = run(lab.ringrun("@0", &["true"]).env("PATH", "/no/such/directory"));
    assert_failed(&lab, &job, 5, &["cannot start ssh"]);
}

/// A pager that does not read must not hide that a rank has failed, and ranks that print without end must not fill the memory.
#[test]
fn output_of_other_hosts_waits_for_its_reader() {
    if !runs_long_tests() {
        return;
    }
    let Some(lab) = Lab::start(2) else { return };
    let script = "[ $RANK = 1 ] && sleep 2 && exit 3; exec yes";
    let mut job = lab
        .ringrun("@0,@1", &["--grace", "0", "--kill-after", "1", "--", "sh", "-c", script])
        .spawn()
        .unwrap();
    let start = Instant::now();
    // Nothing reads the output. The ranks end nevertheless.
    wait_until("the ranks end", || {
        start.elapsed().as_secs() >= 2 && processes_with_environment(&lab.mark()).is_empty()
    });
    let status =
        fs::read_to_string(format!("/proc/{}/status", job.id())).expect("ringrun waits for its reader");
    let kib =
        status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix(" kB")?.parse().ok());
    assert!(kib.is_some_and(|kib: u64| kib < 100 << 10), "{status}");
    let mut lines = BufReader::new(job.stdout.take().expect("a pipe")).lines().map_while(Result::ok);
    assert!(lines.all(|line| line == "[0]<stdout>:y" || line == "[0]<stdout>:"), "another line");
    assert_failed(&lab, &finish(job), 3, &["exited with code 3"]);
}
