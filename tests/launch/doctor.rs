//! `ringrun doctor` on this host, and on hosts with planted faults.

use std::fs;
use std::net::TcpListener;
use std::os::fd::AsFd as _;
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};
use std::thread;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::hosts::Lab;
use crate::util::{ringrun, run, runs_long_tests};

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

/// Runs `ip` with these arguments, in which `@0` stands for the address of host 0, and `@name` for the namespace of host 1.
fn ip(lab: &Lab, arguments: &str) {
    let arguments =
        arguments.replace("@0", lab.get("HOST_0")).replace("@name", &format!("{}-1", lab.get("NAME")));
    assert!(
        Command::new("ip").args(arguments.split(' ')).status().expect("ip runs").success(),
        "ip {arguments}"
    );
}

/// Runs the doctor on both hosts, and checks that it finds a problem with this text.
fn assert_finds(lab: &Lab, options: &[&str], problem: &str) {
    assert_finds_on(lab, &format!("{},{}", lab.get("HOST_0"), lab.get("HOST_1")), options, problem);
}

/// Runs the doctor on these hosts, and checks that it finds a problem with this text.
fn assert_finds_on(lab: &Lab, hosts: &str, options: &[&str], problem: &str) {
    let keys = ["--ssh-identity", lab.get("KEY"), "--ssh-options", lab.get("OPTIONS")];
    let done = run(ringrun(&["doctor", "-H", hosts]).args(keys).args(options).stdin(Stdio::null()));
    let text = done.stdout();
    let is_found =
        text.contains(&format!("PROBLEM: {problem}")) && text.contains("the hosts are not fit for a job");
    assert!(is_found, "{problem}\n{text}{}", done.stderr());
    assert_eq!(done.code(), Some(1), "{text}");
}

#[test]
fn planted_faults_of_a_host_are_found() {
    let Some(lab) = Lab::start(2) else { return };
    let (first, second) = (lab.get("HOST_0"), lab.get("HOST_1"));
    // The line of host 1 is limited in one direction.
    ip(&lab, "netns exec @name tc qdisc add dev eth0 root tbf rate 50mbit burst 64kb latency 100ms");
    assert_finds(&lab, &[], &format!("{second} sends to {first} at "));
    ip(&lab, "netns exec @name tc qdisc del dev eth0 root");
    // Host 1 drops the packets of connections that host 0 opens to the ports of the job.
    ip(&lab, "-n @name rule add pref 10 lookup local");
    ip(&lab, "-n @name rule del pref 0");
    ip(&lab, "-n @name rule add pref 5 from @0 ipproto tcp dport 7400-7409 blackhole");
    let blocked = format!("{first} cannot connect to {second} ({second}): ");
    assert_finds(&lab, &["--port", "7400-7409"], &blocked);
    // Another program of host 1 listens on the only port.
    let namespace = fs::File::open(format!("/run/netns/{}-1", lab.get("NAME"))).expect("the namespace");
    let listen = move || {
        // The namespace of this thread only.
        move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))
            .expect("root may do this");
        TcpListener::bind(("0.0.0.0", 7500)).expect("a free port")
    };
    let _holder = thread::spawn(listen).join().expect("no panic");
    assert_finds(&lab, &["--port", "7500"], &format!("{second}: --port 7500: "));
}

/// Mounts a file over another one on a host only. Each host has its own mount namespace.
fn mount_on_host(lab: &Lab, host: usize, file: &str, place: &str) {
    let arguments = ["-t", lab.get(&format!("SSHD_{host}")), "-m", "mount", "--bind", file, place];
    assert!(Command::new("nsenter").args(arguments).status().expect("nsenter runs").success(), "{place}");
}

#[test]
fn a_wrong_name_in_etc_hosts_and_another_version_are_found() {
    if !runs_long_tests() {
        return;
    }
    let Some(lab) = Lab::start(2) else { return };
    let (first, second) = (lab.get("HOST_0"), lab.get("HOST_1"));
    let write = |name: &str, text: &[u8]| {
        let path = format!("{}/{name}", lab.get("DIRECTORY"));
        fs::write(&path, text).expect("a file");
        path
    };
    // Host 1 has its own name in the line that the installer of Debian writes. ssh knows the names from its configuration.
    let names = |own: &str| format!("127.0.0.1 localhost\n{first} doctor-first\n{own} doctor-second\n");
    mount_on_host(&lab, 0, &write("right", names(second).as_bytes()), "/etc/hosts");
    mount_on_host(&lab, 1, &write("wrong", names("127.0.1.1").as_bytes()), "/etc/hosts");
    let config =
        format!("Host doctor-first\n HostName {first}\nHost doctor-second\n HostName {second}\nHost *\n");
    let options = format!("-F {}", write("ssh-config", config.as_bytes()));
    let problem = format!(
        "doctor-second resolves doctor-second to 127.0.1.1, which no other host can reach; the address is \
        {second}: look at /etc/hosts"
    );
    assert_finds_on(&lab, "doctor-first,doctor-second", &["--ssh-options", &options], &problem);
    // The ringrun of host 1 greets with another version.
    let greeting = ringrun(&["--agent"]).output().expect("an agent").stdout;
    let own_version = env!("CARGO_PKG_VERSION").as_bytes();
    let place =
        greeting.windows(own_version.len()).position(|part| part == own_version).expect("the version");
    // The length of the message stays the same.
    let other_version = env!("CARGO_PKG_VERSION").replace(|c: char| c.is_ascii_digit(), "9");
    let changed =
        [&greeting[..place], other_version.as_bytes(), &greeting[place + own_version.len()..]].concat();
    let greeting = write("greeting", &changed);
    fs::create_dir(format!("{}/bin", lab.get("DIRECTORY"))).expect("a directory");
    let script = |name: &str, commands: &str| {
        let path = write(name, format!("#!/bin/sh\n{commands}\n").as_bytes());
        fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).expect("the owner may do this");
        path
    };
    let agent = script("bin/ringrun", &format!("exec '{}' \"$@\"", env!("CARGO_BIN_EXE_ringrun")));
    mount_on_host(&lab, 1, &script("other", &format!("cat '{greeting}'; exec cat >/dev/null")), &agent);
    let problem =
        format!("{second}: its ringrun has the version {other_version}, and this ringrun has the version");
    assert_finds(&lab, &["--remote-prefix", lab.get("DIRECTORY")], &problem);
}
