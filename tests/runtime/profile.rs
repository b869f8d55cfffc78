//! Tests of profiles, which divide the time of calls into parts (send, receive, reduce, wait, other). The tests
//! check the times that the library counts, and the output of `ringbench --profile`.

use std::fs;
use std::time::{Duration, Instant};

use clap::Parser as _;
use ringtrain::cli::bench::args::BenchArgs;
use ringtrain::cli::bench::bench;
use ringtrain::cli::bench::operation::BenchOperation;
use ringtrain::cli::bench::plan::BenchPlan;
use ringtrain::cli::bench::time_breakdown::TimeBreakdown;
use ringtrain::cli::exit::Exit;
use ringtrain::group::LocalTransport;
use ringtrain::{Group, Profile, Rank, ReduceOp, Spent};
use serde_json::Value;

use crate::util::{ranks, ringrun, ringrun_script, run};

const TRANSPORTS: [LocalTransport; 2] = [LocalTransport::Tcp, LocalTransport::Shm];
const TIME_PARTS: [&str; 5] = ["send", "receive", "reduce", "wait", "other"];

/// The largest allowed difference between the wall time and the sum of its parts, in microseconds. The difference is
/// due to rounding.
const ROUNDING_US: f64 = 1e-3;

/// Returns the number that a JSON value contains.
fn json_number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("{value} is not a number"))
}

/// Runs `work` with profiling on each of `n` ranks. Returns the profile and the wall-clock time of each rank.
fn run_profiled(n: u32, transport: LocalTransport, work: fn(&mut Group)) -> Vec<(Profile, Duration)> {
    let work = move |mut group: Group| {
        assert_eq!(group.profile(), Profile::default(), "profiling must be off");
        group.set_profiling(true);
        let started = Instant::now();
        work(&mut group);
        let wall = started.elapsed();
        group.set_profiling(false);
        let profile = group.profile();
        group.barrier().expect("all ranks call it");
        assert_eq!(group.profile().calls, profile.calls, "profiling must be off again");
        (profile, wall)
    };
    ranks::run_with(n, |options| options.transport = transport, work)
}

#[test]
fn blocking_calls_count_the_time_to_send_receive_reduce_and_wait() {
    for transport in TRANSPORTS {
        let results = run_profiled(3, transport, |group| {
            let mut buffer = vec![1f32; 1 << 18];
            for count in [16, 1 << 18] {
                group.all_reduce(&mut buffer[..count], ReduceOp::Sum).expect("all ranks call it");
            }
        });
        for (profile, wall) in results {
            let calls = profile.calls;
            for part in [calls.send, calls.receive, calls.reduce, calls.wait] {
                assert!(part > Duration::ZERO, "{transport:?}: {profile:?}");
            }
            assert!(calls.total() <= wall, "{transport:?}: {profile:?} in {wall:?}");
            assert_eq!(profile.background.total(), Duration::ZERO, "{transport:?}");
        }
    }
}

#[test]
fn the_time_of_asynchronous_operations_counts_as_calls_or_as_background() {
    for transport in TRANSPORTS {
        let results = run_profiled(2, transport, |group| {
            let handle =
                group.all_reduce_async(vec![1f32; 1 << 18], ReduceOp::Sum).expect("all ranks call it");
            // Call `test` repeatedly, so that either this thread or the background thread executes the all-reduce.
            while !handle.test() {
                std::thread::yield_now();
            }
            handle.wait().expect("all ranks call it");
        });
        for (Profile { calls, background }, _) in results {
            let parts = |spent: Spent| [spent.send, spent.receive, spent.reduce];
            for (in_calls, in_background) in parts(calls).into_iter().zip(parts(background)) {
                assert!(in_calls + in_background > Duration::ZERO, "{transport:?}: {calls:?} {background:?}");
            }
        }
    }
}

#[test]
fn a_rank_that_others_wait_for_waits_less() {
    const LATE_RANK_DELAY: Duration = Duration::from_millis(5);
    for transport in TRANSPORTS {
        let results = run_profiled(2, transport, |group| {
            for _ in 0..10 {
                let started = Instant::now();
                while group.rank() == Rank::ZERO && started.elapsed() < LATE_RANK_DELAY {
                    std::hint::spin_loop();
                }
                group.barrier().expect("all ranks call it");
            }
        });
        let waits: Vec<Duration> = results.iter().map(|(profile, _)| profile.calls.wait).collect();
        assert!(waits[0] < waits[1], "{transport:?}: {waits:?}");
    }
}

#[test]
fn the_parts_of_every_operation_add_up_to_its_wall_time() {
    for transport in TRANSPORTS {
        let measure = |mut group: Group| {
            let bench_operation = |operation: &BenchOperation| {
                let flags = format!("ringbench {operation} -b 64 -e 16K -f 256 -n 2 -w 1 --profile");
                let args = BenchArgs::try_parse_from(flags.split_whitespace()).expect("the flags are valid");
                let plan = BenchPlan::new(&args).expect("the plan is valid");
                bench(&mut group, &plan, 1024, &mut std::io::sink()).expect("the benchmark completes")
            };
            BenchOperation::ALL.iter().map(bench_operation).collect::<Vec<_>>()
        };
        for reports in ranks::run_with(3, |options| options.transport = transport, measure) {
            for (report, &operation) in reports.into_iter().zip(BenchOperation::ALL) {
                for row in report.results {
                    let ranks = row.profile.expect("--profile was given");
                    let involved: Vec<u32> = (0..3).filter(|&r| operation.involves(Rank::new(r))).collect();
                    assert_eq!(ranks.iter().map(|one| one.rank).collect::<Vec<_>>(), involved, "{operation}");
                    for rank_profile in ranks {
                        let TimeBreakdown { wall_us, send_us, receive_us, reduce_us, wait_us, other_us } =
                            rank_profile.breakdown;
                        let parts = [send_us, receive_us, reduce_us, wait_us, other_us];
                        let adds_up = (parts.iter().sum::<f64>() - wall_us).abs() < ROUNDING_US;
                        assert!(adds_up, "{operation}, {transport:?}: {:?}", rank_profile.breakdown);
                        assert!(
                            parts.iter().all(|&part| part >= 0.0),
                            "{operation}, {transport:?}: {parts:?}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn ringbench_reports_the_profile_in_its_table_and_json() {
    for transport in ["tcp", "shm"] {
        let directory = tempfile::tempdir().expect("the directory can be created");
        let path = directory.path().join("out.json");
        let flags = format!(
            "-n 3 --no-tag-output ringbench all_reduce -b 64 -e 1M -f 16384 -n 10 --transport {transport} --profile"
        );
        let mut command = ringrun(&flags.split_whitespace().collect::<Vec<_>>());
        let done = run(command.arg("--json").arg(&path));
        assert_eq!(done.code(), Some(0), "{}", done.stderr());

        let table = done.stdout();
        let lines: Vec<&str> = table.lines().filter(|line| line.contains(" send ")).collect();
        assert_eq!(lines.len(), 6, "three lines for each of two rows:\n{table}");
        for (line, name) in lines.iter().zip(["mean of 3", "waits least", "waits most"].into_iter().cycle()) {
            assert!(line.starts_with('#') && line.contains(name), "{name}:\n{table}");
            assert!(TIME_PARTS.iter().all(|part| line.contains(&format!(" {part} "))), "{line}");
        }

        let report: Value =
            serde_json::from_slice(&fs::read(&path).expect("the file exists")).expect("the file is JSON");
        for row in report["results"].as_array().expect("the report has rows") {
            assert_eq!(row["transport"], transport);
            let ranks = row["profile"].as_array().expect("the row has a profile");
            assert_eq!(ranks.iter().map(|one| one["rank"].as_u64()).collect::<Vec<_>>(), [0, 1, 2].map(Some));
            for rank_profile in ranks {
                let parts = TIME_PARTS.map(|part| json_number(&rank_profile[format!("{part}_us")]));
                assert!(parts.iter().all(|&part| part >= 0.0), "{rank_profile}");
                // For 64 bytes, a part may have taken no time: in shared memory the buffer is reduced in place,
                // without a copy.
                let are_parts_plausible = row["bytes"] == 64 || parts[..4].iter().all(|&part| part > 0.0);
                assert!(are_parts_plausible, "a part took no time: {rank_profile}");
                assert!(
                    (parts.iter().sum::<f64>() - json_number(&rank_profile["wall_us"])).abs() < ROUNDING_US,
                    "{rank_profile}"
                );
            }
        }
    }
}

#[test]
fn ringbench_without_the_flag_reports_no_profile() {
    let flags = ["-n", "2", "--no-tag-output", "ringbench", "all_reduce", "-e", "64", "-n", "2", "--json"];
    let directory = tempfile::tempdir().expect("the directory can be created");
    let path = directory.path().join("out.json");
    let done = run(ringrun(&flags).arg(&path));
    assert_eq!(done.code(), Some(0), "{}", done.stderr());
    assert!(!done.stdout().contains("wait"), "{}", done.stdout());
    let report: Value =
        serde_json::from_slice(&fs::read(&path).expect("the file exists")).expect("the file is JSON");
    let row = report["results"][0].as_object().expect("the report has a row");
    assert!(!row.contains_key("profile"), "{row:?}");
}

#[test]
fn ringbench_fails_if_only_one_rank_has_the_flag() {
    let script = format!(
        "[ $RANK = 1 ] && flag=--profile; exec {} all_reduce -e 64 -n 2 $flag",
        env!("CARGO_BIN_EXE_ringbench")
    );
    let done = run(&mut ringrun_script(&["-n", "2"], &script));
    assert_eq!(done.code(), Some(Exit::Mismatch as i32), "{}", done.stderr());
    assert!(
        done.stderr().contains("rank 1 and rank 0 were started with different flags (--profile)"),
        "{}",
        done.stderr()
    );
}
