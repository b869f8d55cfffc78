//! Jobs in which each node runs the same command, and the ringruns meet at an endpoint.

use std::process::{Command, Stdio};

use crate::hosts::Lab;
use crate::ports::hold_ports;
use crate::util::{FinishedProgram, finish, ringrun, runs_long_tests};

const SCRIPT: &str = "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK/$GROUP_WORLD_SIZE";

/// Runs the command of each node, and waits for all.
fn run_nodes(commands: Vec<Command>) -> Vec<FinishedProgram> {
    let spawn = |mut command: Command| command.spawn().expect("ringrun starts");
    let jobs: Vec<_> = commands.into_iter().map(spawn).collect();
    jobs.into_iter().map(finish).collect()
}

/// The arguments of all nodes of a job at a free port of `host`.
fn node_arguments(host: &str, nodes: u32) -> Vec<String> {
    let (_, port) = hold_ports(1);
    ["--nnodes", &nodes.to_string(), "--nproc-per-node", "2", "--rdzv-endpoint", &format!("{host}:{port}")]
        .map(str::to_owned)
        .into()
}

#[test]
fn nodes_meet_at_the_endpoint() {
    let home = tempfile::tempdir().expect("a directory");
    let command = |arguments: &[String], more: &[&str]| {
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).chain(more.iter().copied()).collect();
        let mut command = ringrun(&arguments);
        command.env("HOME", home.path()).env_remove("RING_SECRET");
        command
    };
    // Without --node-rank, all nodes run the same command.
    let arguments = node_arguments("localhost", 3);
    let nodes = (0..3).map(|_| command(&arguments, &["--no-tag-output", "sh", "-c", SCRIPT])).collect();
    let done = run_nodes(nodes);
    let mut lines: Vec<String> = done.iter().flat_map(FinishedProgram::sorted_lines).collect();
    lines.sort();
    let expected: Vec<String> =
        (0..6).map(|rank| format!("{rank}/6 {}/2 {}/3", rank % 2, rank / 2)).collect();
    assert_eq!(lines, expected, "{:?}", done.iter().map(FinishedProgram::stderr).collect::<Vec<_>>());
    // The ranks form one job. A rank that fails ends the ranks of both nodes.
    let arguments = node_arguments("127.0.0.1", 2);
    let train = ["ringtrain", "--epochs", "1", "--data", "synthetic:64x4"];
    let node = |number: &'static str| command(&arguments, &[&["--node-rank", number][..], &train].concat());
    let done = run_nodes(vec![node("1"), node("0")]);
    assert!(done.iter().all(|node| node.code() == Some(0)), "{}{}", done[0].stderr(), done[1].stderr());
    // Nodes with different numbers of ranks do not belong together.
    let arguments = node_arguments("localhost", 2);
    let mut others = arguments.clone();
    others[3] = "3".to_owned();
    let wait = ["--start-timeout", "1", "true"];
    let done = run_nodes(vec![
        command(&arguments, &[&["--node-rank", "0"][..], &wait].concat()),
        command(&others, &[&["--node-rank", "1"][..], &wait].concat()),
    ]);
    for (node, part) in done.iter().zip(["missing node 1", "run the same command on all nodes"]) {
        assert_eq!(node.code(), Some(5), "{}", node.stderr());
        assert!(
            node.stderr().contains(part) && node.stderr().contains("--rdzv-endpoint localhost:"),
            "{}",
            node.stderr()
        );
    }
}

#[test]
fn nodes_on_several_hosts_train_together() {
    if !runs_long_tests() {
        return;
    }
    let Some(lab) = Lab::start(2) else { return };
    let arguments = node_arguments(lab.get("HOST_0"), 2);
    let node = |host: usize| {
        let mut command = Command::new("ip");
        command.args([
            "netns",
            "exec",
            &format!("{}-{host}", lab.get("NAME")),
            env!("CARGO_BIN_EXE_ringrun"),
        ]);
        command.args(&arguments).args(["ringtrain", "--epochs", "1", "--data", "synthetic:64x4"]);
        command.env("RING_SECRET", "a secret of this test");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    };
    let done = run_nodes(vec![node(1), node(0)]);
    assert!(done.iter().all(|node| node.code() == Some(0)), "{}{}", done[0].stderr(), done[1].stderr());
}
