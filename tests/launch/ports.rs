//! Jobs whose processes listen on the ports of `--port`.

use std::fs;
use std::net::TcpListener;

use ringtrain::exit::Exit;

use crate::util::{finish, ringrun, run, send_signal, wait_until};

/// Returns listeners on `count` consecutive ports, and the first of these ports.
pub(crate) fn hold_ports(count: u16) -> (Vec<TcpListener>, u16) {
    loop {
        let first = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let start = first.local_addr().expect("an address").port();
        let rest = (1..count).map(|index| TcpListener::bind(("127.0.0.1", start.checked_add(index)?)).ok());
        if let Some(mut held) = rest.collect::<Option<Vec<_>>>() {
            held.insert(0, first);
            return (held, start);
        }
    }
}

/// Returns which of the ports a program listens on.
pub(crate) fn listening_ports(table: &str) -> Vec<u16> {
    let ports = table.lines().skip(1).filter_map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        // The state 0A is LISTEN.
        (*words.get(3)? == "0A").then(|| u16::from_str_radix(words[1].rsplit(':').next()?, 16).ok())?
    });
    ports.collect()
}

/// Regression test: before the fix, each pair of ranks of these jobs needed a further port.
#[test]
fn connections_between_pairs_of_ranks_arrive_on_the_port_of_each_rank() {
    for (strategy, ranks) in [("gossip", 3), ("ps-async", 3)] {
        // One port for each rank, and one for the rendezvous.
        let (held, first) = hold_ports(ranks + 1);
        drop(held);
        let range = format!("{first}-{}", first + ranks);
        let mut command = ringrun(&["-n", &ranks.to_string(), "--port", &range, "ringtrain"]);
        let arguments = ["--strategy", strategy, "--epochs", "2", "--data", "synthetic:64x4"];
        let finished = run(command.args(arguments));
        assert_eq!(finished.code(), Some(0), "{strategy}: {}", finished.stderr());
    }
}

#[test]
fn all_processes_of_a_job_listen_in_the_range() {
    let (held, first) = hold_ports(6);
    // One port stays in use. The others are enough for 3 ranks and the rendezvous.
    let [_, used, ..] = &held[..] else { panic!("6 ports") };
    let used = used.try_clone().expect("a copy");
    drop(held);
    let range = format!("{first}-{}", first + 4);
    let arguments =
        ["-n", "3", "--port", &range, "ringtrain", "--epochs", "1000000", "--data", "synthetic:64x4"];
    let job = ringrun(&arguments).spawn().expect("ringrun starts");
    let is_in_range = |port: &u16| (first..first + 5).contains(port);
    // When the job has started, the rendezvous no longer listens. It has used the last port.
    wait_until("the ranks listen", || {
        let table = fs::read_to_string("/proc/net/tcp").expect("the table of sockets");
        let mut listening: Vec<u16> = listening_ports(&table).into_iter().filter(is_in_range).collect();
        listening.sort_unstable();
        listening == [first, first + 1, first + 2, first + 3]
    });
    let refuse = |part: &str| {
        let refused = run(&mut ringrun(&["-n", "3", "--port", &range, "true"]));
        let text = refused.stderr();
        assert!(refused.code() == Some(Exit::PortInUse as i32) && text.contains(part), "{part}: {text}");
    };
    // Another job has one port for its rendezvous, and none for its ranks.
    refuse("need 3 free ports on 127.0.0.1, and 0 are free");
    let holders: Vec<_> =
        (first..first + 5).filter_map(|port| TcpListener::bind(("127.0.0.1", port)).ok()).collect();
    assert_eq!(holders.len(), 1);
    refuse(&format!("all of the ports {range} are in use on 127.0.0.1"));
    send_signal("INT", job.id());
    finish(job);
    drop((used, holders));
}
