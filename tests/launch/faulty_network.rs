//! Tests of jobs of two ranks on two hosts, while the network between the hosts stops delivering packets. The hosts
//! are network namespaces, so these tests need root's rights and iproute2. Without root's rights or iproute2, the
//! tests print that they are skipped. Each test takes about 3 s, so the tests run only with `tools/test --full`.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::util::{finish, runs_long_tests, wait_until};
use ringtrain::exit::Exit;

/// The addresses of the two hosts.
const ADDRESSES: [&str; 2] = ["10.213.7.1", "10.213.7.2"];

/// Two hosts and a switch between them. Dropping this value removes the hosts and the switch.
struct SimulatedHosts {
    /// The names of the network namespaces of the two hosts and of the switch.
    names: [String; 3],
}

/// The index of the switch in [`SimulatedHosts::names`].
const SWITCH_INDEX: usize = 2;

impl SimulatedHosts {
    /// Creates the hosts. Returns `None` if this process may not create network namespaces, or if the tests run
    /// without the option `--full` of `tools/test`.
    fn new() -> Option<Self> {
        if !runs_long_tests() {
            println!("skipped: the test is too long");
            return None;
        }
        let number: u32 = rand::random();
        let hosts = Self { names: ["a", "b", "s"].map(|name| format!("rt{number:x}{name}")) };
        if !hosts.names.iter().all(|name| run_ip_command(&format!("netns add {name}"))) {
            println!("skipped: this process may not create network namespaces");
            return None;
        }
        hosts.run_ip_command_on(SWITCH_INDEX, "link add br0 type bridge");
        hosts.run_ip_command_on(SWITCH_INDEX, "link set br0 up");
        for (host, address) in ADDRESSES.into_iter().enumerate() {
            let switch = &hosts.names[SWITCH_INDEX];
            hosts.run_ip_command_on(
                host,
                &format!("link add eth0 type veth peer name port{host} netns {switch}"),
            );
            hosts.run_ip_command_on(SWITCH_INDEX, &format!("link set port{host} master br0 up"));
            hosts.run_ip_command_on(host, &format!("address add {address}/24 dev eth0"));
            hosts.run_ip_command_on(host, "link set lo up");
            hosts.run_ip_command_on(host, "link set eth0 up");
        }
        Some(hosts)
    }

    /// Runs `ip` in the network namespace of a host or of the switch.
    fn run_ip_command_on(&self, host: usize, arguments: &str) {
        assert!(run_ip_command(&format!("-n {} {arguments}", self.names[host])), "ip {arguments}");
    }

    /// Makes the switch drop every packet of more than 700 bytes from this host.
    fn drop_large_packets_from(&self, host: usize) {
        let (switch, port) = (&self.names[SWITCH_INDEX], 1 - host);
        let qdisc = format!("-n {switch} qdisc add dev port{port} root tbf rate 1gbit burst 700 limit 1mb");
        assert!(run_silently("tc", &qdisc), "tc {qdisc}");
    }

    /// Starts a rank on each host, with the option `--timeout` set to `timeout`, in seconds.
    fn start_ranks(&self, folder: &Path, timeout: &str) -> [Child; 2] {
        fs::write(folder.join("hosts.txt"), ADDRESSES.map(|address| format!("{address}:7000\n")).concat())
            .unwrap();
        fs::write(folder.join("secret"), "a secret for this test").unwrap();
        [0, 1].map(|rank| {
            let mut command = Command::new("ip");
            command.args(["netns", "exec", &self.names[rank], env!("CARGO_BIN_EXE_ringtrain")]);
            command.args(["--peers", "hosts.txt", "--rank", &rank.to_string(), "--secret-file", "secret"]);
            command
                .args(["--epochs", "1000000", "--timeout", timeout])
                .current_dir(folder)
                .stdin(Stdio::null());
            command.stdout(fs::File::create(folder.join(format!("{rank}.out"))).unwrap());
            command.stderr(Stdio::piped()).spawn().unwrap()
        })
    }
}

impl Drop for SimulatedHosts {
    fn drop(&mut self) {
        for name in &self.names {
            run_ip_command(&format!("netns del {name}"));
        }
    }
}

/// Runs `ip` and returns whether it succeeds.
fn run_ip_command(arguments: &str) -> bool {
    run_silently("ip", arguments)
}

fn run_silently(program: &str, arguments: &str) -> bool {
    let mut command = Command::new(program);
    let status = command.args(arguments.split(' ')).stdout(Stdio::null()).stderr(Stdio::null()).status();
    status.is_ok_and(|status| status.success())
}

/// Trains on two hosts, breaks the network with `fault`, and returns the errors of both ranks. Checks that both ranks
/// end with the exit code `exit`.
fn errors_after_fault(fault: impl Fn(&SimulatedHosts), timeout: &str, exit: Exit) -> Option<[String; 2]> {
    let hosts = SimulatedHosts::new()?;
    let folder = tempfile::tempdir().unwrap();
    let ranks = hosts.start_ranks(folder.path(), timeout);
    wait_until("training is under way", || {
        fs::read_to_string(folder.path().join("0.out")).unwrap().contains("epoch 2/")
    });
    fault(&hosts);
    let errors = ranks.map(|rank| {
        let done = finish(rank);
        assert_eq!(done.code(), Some(exit as i32), "{}", done.stderr());
        done.stderr()
    });
    for (rank, error) in errors.iter().enumerate() {
        println!("rank {rank}: {error}");
        let peer = 1 - rank;
        assert!(!error.contains("see the output") && !error.contains("died"), "rank {rank}: {error}");
        assert!(error.contains(&format!("rank {peer} on {}", ADDRESSES[peer])), "rank {rank}: {error}");
        assert!(error.contains(&format!("for rank {peer} ")), "rank {rank}: {error}");
        assert!(error.contains(" (which sent its last data "), "rank {rank}: {error}");
        assert!(error.contains("check addresses, MTU and firewall"), "rank {rank}: {error}");
    }
    Some(errors)
}

/// Returns whether the error blames only the network. For example, the error says "check the network between them" if
/// both ranks wait for each other.
fn blames_only_the_network(error: &str) -> bool {
    let between = |a, b| error.contains(&format!("the network between rank {a} and rank {b} on "));
    let is_named = between(0, 1) || between(1, 0) || error.contains("check the network between them");
    is_named && !error.contains("hangs")
}

/// Regression test: before the fix, each rank reported that the program on the other rank hangs, is stopped or is
/// slow.
#[test]
fn an_address_that_changes_during_a_job_is_reported_as_a_network_problem() {
    let change = |hosts: &SimulatedHosts| {
        hosts.run_ip_command_on(1, "address del 10.213.7.2/24 dev eth0");
        hosts.run_ip_command_on(1, "address add 10.213.7.3/24 dev eth0");
    };
    for error in errors_after_fault(change, "1", Exit::Timeout).into_iter().flatten() {
        assert!(blames_only_the_network(&error), "{error}");
    }
}

/// Regression test: before the fix, each rank reported that the program on the other rank hangs, is stopped or is
/// slow.
#[test]
fn lost_large_packets_are_reported_as_a_network_problem() {
    let both =
        |hosts: &SimulatedHosts| [0, 1].into_iter().for_each(|host| hosts.drop_large_packets_from(host));
    // If a host acknowledges the data of a rank, the rank cannot know whether the program on that host hangs. So only
    // one of the two errors must blame the network.
    if let Some(errors) = errors_after_fault(both, "1", Exit::Timeout) {
        assert!(errors.iter().any(|error| blames_only_the_network(error)), "{errors:?}");
    }
    errors_after_fault(|hosts| hosts.drop_large_packets_from(0), "1", Exit::Timeout);
}
