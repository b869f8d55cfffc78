//! `ringrun doctor` on this host, and on hosts with planted faults.

use std::process::{Command, Stdio};

use crate::hosts::Lab;
use crate::util::{ringrun, run};

#[test]
fn this_host_alone_is_checked_without_ssh() {
    let done = run(ringrun(&["doctor", "--json"]).stdin(Stdio::null()));
    let report: serde_json::Value = serde_json::from_str(&done.stdout()).expect("the report is JSON");
    assert_eq!(
        (report["hosts"].as_array().map(Vec::len), report["ring_order"][0].as_u64()),
        (Some(1), Some(0))
    );
    let facts = &report["reports"][0]["facts"];
    assert_eq!(facts["version"], env!("CARGO_PKG_VERSION"));
    assert!(facts["processors"].as_u64().is_some_and(|processors| processors > 0), "{facts}");
    for (arguments, part) in
        [(&["doctor", "--bogus"][..], "--bogus"), (&["doctor", "-H", "a:x"], "not a number of ranks")]
    {
        let done = run(ringrun(arguments).stdin(Stdio::null()));
        assert_eq!(done.code(), Some(2), "{arguments:?}");
        assert!(done.stderr().contains(part), "{}", done.stderr());
    }
}

/// A host whose line is limited must be found. The other direction has no limit.
#[test]
fn a_slow_line_is_found() {
    let Some(lab) = Lab::start(2) else { return };
    let slow = [
        "netns",
        "exec",
        &format!("{}-1", lab.get("NAME")),
        "tc",
        "qdisc",
        "add",
        "dev",
        "eth0",
        "root",
        "tbf",
    ];
    let slow =
        Command::new("ip").args(slow).args(["rate", "50mbit", "burst", "64kb", "latency", "100ms"]).status();
    assert!(slow.expect("ip runs").success());
    let (first, second) = (lab.get("HOST_0"), lab.get("HOST_1"));
    let hosts = format!("{first}:2,{second}");
    let keys = ["--ssh-identity", lab.get("KEY"), "--ssh-options", lab.get("OPTIONS")];
    let done = run(ringrun(&["doctor", "-H", &hosts]).args(keys).stdin(Stdio::null()));
    let text = done.stdout();
    let expected = format!("PROBLEM: {second} sends to {first} at ");
    assert!(
        text.contains(&expected) && text.contains("the hosts are not fit for a job: 1 problem"),
        "{text}{}",
        done.stderr()
    );
    assert_eq!(done.code(), Some(1), "{text}");
}
