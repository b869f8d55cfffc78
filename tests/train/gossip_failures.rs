//! Ranks that are killed or stopped during a run with `--strategy gossip`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{exit, id};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use ringtrain::train::{CompletedStep, Config, EpochRecord, Observer, Report, run};
use ringtrain::{Group, Rank};
use rustix::process::{Signal, getpid, kill_process};

use super::gossip::short_config;
use super::strategies::parse_strategy;
use super::util::{
    FinishedProgram, finish, if_long_tests_else, read_pid, ringrun, runs_long_tests, send_signal, wait_until,
    wait_until_gone,
};

/// The variables that [`run_job`] passes to [`program_of_a_rank`].
const FOLDER_VARIABLE: &str = "GOSSIP_FOLDER";
const SIGNAL_VARIABLE: &str = "GOSSIP_SIGNAL";
const VICTIMS_VARIABLE: &str = "GOSSIP_VICTIMS";

/// The deadline of the ranks if some ranks are stopped.
const SHORT_TIMEOUT: Duration = Duration::from_secs(3);

/// Sends a signal to the process of each victim: to rank 0 in the fourth of 10 epochs, and to another rank before its first
/// step. The other ranks wait before their first step until all victims have reached this point.
struct SignalSender {
    rank: Rank,
    folder: PathBuf,
    victims: Vec<u32>,
    signal: Signal,
}

impl Observer for SignalSender {
    fn notice(&mut self, line: &str) {
        println!("{line}");
    }
    fn epoch_started(&mut self, _: u64, _: u64, _: u64, _: u64) {}
    fn batch_started(&mut self, epoch: u64, _: u64, _: &[u32]) {
        let marker = |rank: u32| self.folder.join(format!("signal.{rank}"));
        let own = self.rank.get();
        if !self.victims.contains(&own) {
            wait_until("all victims send the signal", || {
                self.victims.iter().all(|&rank| marker(rank).exists())
            });
        } else if (own != 0 || epoch >= 3) && !marker(own).exists() {
            fs::write(marker(own), "").unwrap();
            kill_process(getpid(), self.signal).unwrap();
        }
    }
    fn step_taken(&mut self, _: &CompletedStep) {}
    fn epoch_ended(&mut self, _: u64, _: Option<&EpochRecord>) {}
}

/// The program that ringrun starts for each rank. If the test program runs without ringrun, this test does nothing.
#[test]
fn program_of_a_rank() {
    let variable = |name: &str| std::env::var(name).unwrap_or_default();
    let (folder, name) = (variable(FOLDER_VARIABLE), variable(SIGNAL_VARIABLE));
    if folder.is_empty() {
        return;
    }
    let mut group = Group::from_environment().unwrap();
    if name == "STOP" {
        group.set_timeout(SHORT_TIMEOUT);
    }
    let rank = group.rank();
    let write = |file: &str, text: &str| {
        let path = Path::new(&folder).join(format!("{file}.{rank}"));
        let part = path.with_file_name(format!("part.{rank}"));
        fs::write(&part, text).unwrap();
        fs::rename(part, path).unwrap();
    };
    write("pid", &id().to_string());
    let victims = variable(VICTIMS_VARIABLE).split(' ').map(|rank| rank.parse().unwrap()).collect();
    let signal = if name == "STOP" { Signal::STOP } else { Signal::KILL };
    let mut observer = SignalSender { rank, folder: PathBuf::from(&folder), victims, signal };
    let config = Config { strategy: parse_strategy("gossip:2"), ..short_config() };
    match run(&mut group, &config, &AtomicBool::new(false), &mut observer) {
        Ok(summary) => write("report", &serde_json::to_string(&summary.report).unwrap()),
        Err(error) => {
            eprintln!("rank {rank} failed: {error}");
            exit(6);
        }
    }
    group.close();
}

/// Runs a job of 4 ranks, in which each of the victims sends a signal to itself. If the signal is `STOP`, continues the
/// victims when the other ranks have ended. Returns the reports of the ranks that completed the run.
fn run_job(name: &str, victims: &[u32]) -> (FinishedProgram, Vec<(u32, Report)>) {
    let folder = tempfile::tempdir().unwrap();
    let path = |file: &str, rank: u32| folder.path().join(format!("{file}.{rank}"));
    let program = std::env::current_exe().unwrap();
    let texts: Vec<String> = victims.iter().map(u32::to_string).collect();
    let child = ringrun(&["-n", "4", "--tolerate-failures", "--", program.to_str().unwrap()])
        .args(["--exact", "gossip_failures::program_of_a_rank", "--nocapture"])
        .env(FOLDER_VARIABLE, folder.path())
        .env(SIGNAL_VARIABLE, name)
        .env(VICTIMS_VARIABLE, texts.join(" "))
        .spawn()
        .unwrap();
    if name == "STOP" {
        let pids = [0, 1, 2, 3].map(|rank| read_pid(&path("pid", rank)));
        let others = (0..4).filter(|rank| !victims.contains(rank)).map(|rank| pids[rank as usize]);
        wait_until_gone(&others.collect::<Vec<_>>());
        for &rank in victims {
            send_signal("CONT", pids[rank as usize]);
        }
    }
    let done = finish(child);
    let report = |rank| {
        let text = fs::read_to_string(path("report", rank)).ok()?;
        Some((rank, serde_json::from_str(&text).unwrap()))
    };
    (done, (0..4).filter_map(report).collect())
}

/// Runs a job in which ranks are lost. The ranks in `completing` complete the run with the same parameters, and the other
/// ranks end with an error that contains `error`.
fn check_job(name: &str, victims: &[u32], completing: &[u32], error: &str) {
    let (done, reports) = run_job(name, victims);
    let text = format!("{name} {victims:?}: {}{}", done.stdout(), done.stderr());
    assert_eq!(done.code() == Some(0), !completing.is_empty(), "{text}");
    let ranks: Vec<u32> = reports.iter().map(|(rank, _)| *rank).collect();
    assert_eq!(ranks, completing, "{text}");
    assert!(done.stderr().contains(error), "{text}");
    for (_, report) in &reports {
        let gossip = report.gossip.as_ref().unwrap();
        assert_eq!(report.parameters_hash, reports[0].1.parameters_hash, "{text}");
        assert_eq!((gossip.coordinator, &gossip.lost_ranks[..]), (completing[0], victims), "{text}");
        assert_eq!((report.epochs, report.steps), (10, 120), "{text}");
        assert!(report.test_accuracy.unwrap() > 0.85, "{:?}, {text}", report.test_accuracy);
    }
}

/// Rank 0 hands out the batches. If rank 0 is lost, rank 1 continues, and the ranks compute the batches again that only rank 0
/// had done.
#[test]
fn the_other_ranks_complete_the_run_if_a_rank_is_killed() {
    let all: &[(&[u32], &[u32])] = &[(&[0], &[1, 2, 3]), (&[2], &[0, 1, 3]), (&[2, 3], &[0, 1])];
    for (victims, completing) in if_long_tests_else(all, &[(&[0], &[1, 2, 3])]) {
        check_job("KILL", victims, completing, "");
    }
    if runs_long_tests() {
        check_job("KILL", &[0, 1], &[], "rank 2 can only reach 2 of the 4 ranks");
    }
}

/// A stopped rank 0 misses its deadline, and rank 1 takes over. Without a quorum, rank 0 would complete the run a second
/// time when it continues, with other parameters.
#[test]
fn a_stopped_rank_does_not_complete_the_run_with_other_parameters() {
    if !runs_long_tests() {
        return;
    }
    check_job("STOP", &[0], &[1, 2, 3], "rank 0 failed: ");
    check_job("STOP", &[1], &[0, 2, 3], "rank 1 failed: ");
    // Ranks 0 and 1 continue at the same time. Both fail, unless they still reach each other.
    let (done, reports) = run_job("STOP", &[0, 1]);
    let text = done.stdout() + &done.stderr();
    assert!(text.contains("rank 2 can only reach 2 of the 4 ranks"), "{text}");
    assert!(reports.iter().all(|(rank, _)| *rank < 2), "{text}");
    assert!(reports.iter().all(|(_, report)| report.parameters_hash == reports[0].1.parameters_hash));
}
