//! Ranks that a launcher other than `ringrun` starts. These tests set the launcher's variables themselves; `tools/engines/run`
//! starts ranks with real launchers.

use std::fs;
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::util::{FinishedProgram, finish};
use ringtrain::exit::Exit;

/// Starts `ringbench` as a rank of mpirun. `RING_MASTER_ADDR` is `host`, unless `host` is empty.
fn spawn_rank(rank: u32, home: &Path, host: &str, port: u16) -> Child {
    Command::new(env!("CARGO_BIN_EXE_ringbench"))
        .args(["all_reduce", "-b", "1K", "-e", "1K", "-n", "2", "--start-timeout", "20"])
        .env_clear()
        .env("HOME", home)
        .env("OMPI_COMM_WORLD_RANK", rank.to_string())
        .env("OMPI_COMM_WORLD_SIZE", "2")
        .env("OMPI_COMM_WORLD_LOCAL_SIZE", if host.is_empty() { "2" } else { "1" })
        .env("PMIX_NAMESPACE", "343932929")
        .env("RING_MASTER_ADDR", host)
        .env("RING_PORT", port.to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

fn run_job(homes: [&Path; 2], host: &str) -> [FinishedProgram; 2] {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let ranks = [0, 1].map(|rank| spawn_rank(rank, homes[rank as usize], host, port));
    ranks.map(finish)
}

/// The name `127.1` has the address 127.0.0.1. It stands for a host whose own name has a loopback address, so the ranks use the
/// rules for several hosts.
#[test]
fn ranks_find_each_other_with_the_secret_of_their_user() {
    let home = tempfile::tempdir().unwrap();
    for host in ["", "127.1"] {
        for (rank, done) in run_job([home.path(); 2], host).iter().enumerate() {
            assert_eq!(done.code(), Some(0), "rank {rank}, host `{host}`: {}", done.stderr());
            assert_eq!(done.stdout().contains("2 ranks"), rank == 0, "{}", done.stdout());
        }
    }
    assert!(home.path().join(".ringtrain-secret").exists());
}

#[test]
fn ranks_with_separate_homes_and_unusable_secrets_are_told_to_set_a_secret() {
    let homes = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let done = finish({
        fs::create_dir(homes[0].path().join(".ringtrain-secret")).unwrap();
        spawn_rank(0, homes[0].path(), "", 1)
    });
    assert_eq!(done.code(), Some(Exit::Configuration as i32), "{}", done.stderr());
    assert!(done.stderr().contains("set RING_SECRET"), "{}", done.stderr());

    fs::remove_dir(homes[0].path().join(".ringtrain-secret")).unwrap();
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let mut rank_0 = spawn_rank(0, homes[0].path(), "", port);
    let done = finish(spawn_rank(1, homes[1].path(), "", port));
    rank_0.kill().unwrap();
    rank_0.wait().unwrap();
    assert_eq!(done.code(), Some(Exit::Secret as i32), "{}", done.stderr());
    assert!(done.stderr().contains("separate home directories"), "{}", done.stderr());
}

#[test]
fn a_rendezvous_port_in_use_is_an_error() {
    let home = tempfile::tempdir().unwrap();
    let holder = TcpListener::bind("127.0.0.1:0").unwrap();
    let done = finish(spawn_rank(0, home.path(), "", holder.local_addr().unwrap().port()));
    assert_eq!(done.code(), Some(Exit::PortInUse as i32), "{}", done.stderr());
    assert!(done.stderr().contains("set RING_PORT to a free port on every rank"), "{}", done.stderr());
}
