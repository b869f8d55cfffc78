//! Benchmarks of whole jobs: every operation, element type and reduction is right, and what is not is counted.

mod util;

use clap::Parser as _;
use ringtrain::cli::bench::args::BenchArgs;
use ringtrain::cli::bench::plan::Plan;
use ringtrain::cli::bench::report::Report;
use ringtrain::cli::bench::{BenchError, bench};
use ringtrain::cli::exit::Exit;
use ringtrain::{Group, Rank};

use self::util::ranks;

const SEGMENT_BYTES: usize = 1024;

fn plan(flags: &str) -> Plan {
    let words = ["ringbench"].into_iter().chain(flags.split_whitespace());
    Plan::new(&BenchArgs::try_parse_from(words).expect("flags")).expect("a plan")
}

fn measure(mut group: Group, flags: &str) -> (Report, String) {
    let mut table = Vec::new();
    let report = bench(&mut group, &plan(flags), SEGMENT_BYTES, &mut table).expect("a report");
    (report, String::from_utf8(table).expect("text"))
}

fn run(n: u32, flags: &'static str) -> Vec<(Report, String)> {
    ranks::run_with(n, |options| options.segment_bytes = SEGMENT_BYTES, move |group| measure(group, flags))
}

#[test]
fn every_type_and_reduction_is_right_in_worlds_of_any_size() {
    for n in [1, 2, 3, 4, 5, 8] {
        for flags in [
            "all_reduce -b 1 -e 20001 -f 141 -t all -o all -n 1 -w 0",
            "reduce_scatter -b 1 -e 20001 -f 141 -t all -o all -n 1 -w 0",
        ] {
            for (report, _) in run(n, flags) {
                assert_eq!(report.wrong(), Some(0), "{flags} in a world of {n}");
                assert!(report.results.iter().all(|row| row.world_size == n && row.iterations == 1));
            }
        }
    }
}

#[test]
fn what_is_only_moved_arrives() {
    for n in [1, 2, 3, 4, 5, 8] {
        for (report, _) in run(n, "all_gather -b 1 -e 20001 -f 141 -t all -n 2 -w 1") {
            assert_eq!(report.wrong(), Some(0), "all_gather in a world of {n}");
        }
    }
    for (report, _) in run(3, "broadcast -b 1 -e 20001 -f 141 -t all -n 2 -w 1 --root 2 -c 3") {
        assert_eq!(report.wrong(), Some(0));
        assert!(report.results.iter().all(|row| row.root == Some(2) && row.reduction.is_none()));
    }
}

#[test]
fn rank_0_alone_prints_and_all_know_the_figures() {
    let results = run(2, "all_reduce -b 64 -e 64 -n 4");
    let row = |rank: usize| &results[rank].0.results[0];
    assert_eq!(row(0).time_us, row(1).time_us, "the slowest rank's time is everybody's");
    assert_eq!((row(0).transport, row(0).algorithm), ("tcp", "ring"));
    assert!(row(0).time_us_min <= row(0).time_us && row(0).time_us <= row(0).time_us_p99);
    assert_eq!(row(0).busbw_gb_per_s, row(0).algbw_gb_per_s, "2(n-1)/n is 1 for n = 2");
    assert!(results[1].1.is_empty());
    let header = &results[0].1;
    for line in ["2 rank(s)", "transport tcp  algorithm ring", "#  Rank  1 Pid", "iters: 4 validation: 1"] {
        assert!(header.contains(line), "{line} in\n{header}");
    }
}

#[test]
fn a_root_that_does_not_exist_is_everybodys_usage_error() {
    let errors = ranks::run(2, |mut group| {
        let plan = plan("broadcast -e 4 --root 2");
        bench(&mut group, &plan, SEGMENT_BYTES, &mut std::io::sink()).err()
    });
    for error in errors {
        let error = error.expect("an error");
        assert!(matches!(error, BenchError::Plan(_)), "{error}");
        assert_eq!(error.exit(), Exit::Usage);
    }
}

#[test]
fn different_flags_are_a_mismatch() {
    let errors = ranks::run(2, |mut group| {
        let mine = if group.rank() == Rank::ZERO { "all_reduce -e 4" } else { "all_reduce -e 4 -o max" };
        bench(&mut group, &plan(mine), SEGMENT_BYTES, &mut std::io::sink()).err()
    });
    for error in errors {
        let error = error.expect("an error");
        assert_eq!(error.exit(), Exit::Mismatch, "{error}");
    }
}

#[test]
fn wrong_results_have_an_exit_code_of_their_own() {
    assert_eq!(BenchError::Wrong(3).exit() as u8, 15);
    assert_eq!(BenchError::Wrong(3).to_string(), "3 elements of results are wrong");
}
