//! Tests that run benchmarks on all ranks of a job. The tests check that the results of every operation, element type
//! and reduction are right, and that the reports are complete.

use clap::Parser as _;
use ringtrain::cli::bench::args::BenchArgs;
use ringtrain::cli::bench::measure::BenchRow;
use ringtrain::cli::bench::operation::BenchOperation;
use ringtrain::cli::bench::plan::BenchPlan;
use ringtrain::cli::bench::report::{BenchEnvironment, BenchReport};
use ringtrain::cli::bench::{BenchError, bench};
use ringtrain::cli::exit::Exit;
use ringtrain::group::LocalTransport;
use ringtrain::{Group, JoinOptions, Rank};

use crate::util::{if_long_tests_else, ranks, runs_long_tests};

const SEGMENT_BYTES: usize = 1024;

fn make_plan(flags: &str) -> BenchPlan {
    let words = ["ringbench"].into_iter().chain(flags.split_whitespace());
    BenchPlan::new(&BenchArgs::try_parse_from(words).expect("the flags are valid"))
        .expect("the plan is valid")
}

fn run_benchmark(group: &mut Group, flags: &str) -> (BenchReport, String) {
    let mut table = Vec::new();
    let report = bench(group, &make_plan(flags), SEGMENT_BYTES, &mut table).expect("the benchmark completes");
    (report, String::from_utf8(table).expect("the table is UTF-8"))
}

fn measure_on_ranks(n: u32, flags: impl Into<String>) -> Vec<(BenchReport, String)> {
    measure_all_on_ranks(n, &[flags.into()]).into_iter().map(|mut results| results.remove(0)).collect()
}

/// Runs a benchmark for each element of `flags`, one after the other in one job. Returns the results of each rank.
fn measure_all_on_ranks(n: u32, flags: &[String]) -> Vec<Vec<(BenchReport, String)>> {
    let flags = flags.to_owned();
    ranks::run_with(
        n,
        |options| options.segment_bytes = SEGMENT_BYTES,
        move |mut group| flags.iter().map(|flags| run_benchmark(&mut group, flags)).collect(),
    )
}

/// Returns the operations that can run in a world of `n` ranks.
fn operations_for(n: u32) -> impl Iterator<Item = BenchOperation> {
    BenchOperation::ALL.iter().copied().filter(move |operation| n >= operation.ranks_min())
}

#[test]
fn every_operation_type_and_reduction_is_right_at_every_world_size() {
    // Without `--full`, run every type with all_reduce and a sum, and every operation with few types and every reduction. The
    // tests of the kernels check every reduction of every type.
    let types_of = |operation| match operation {
        _ if runs_long_tests() => &["-t all -o all"][..],
        BenchOperation::AllReduce => &["-t all -o sum", "-t bf16 -o all"],
        _ => &["-t i8,bf16 -o all"],
    };
    for &n in if_long_tests_else(&[1, 2, 3, 4, 5][..], &[3]) {
        let root = n / 2;
        let flags: Vec<String> = operations_for(n)
            .flat_map(|operation| types_of(operation).iter().map(move |types| (operation, types)))
            .map(|(operation, types)| {
                format!("{operation} -b 1 -e 2001 -f 2000 {types} -n 1 -w 0 --root {root}")
            })
            .collect();
        for results in measure_all_on_ranks(n, &flags) {
            for ((report, _), flags) in results.iter().zip(&flags) {
                assert_eq!(report.wrong_elements(), Some(0), "{flags} in a world of {n}");
                let has_flags = |row: &BenchRow| row.world_size == n && row.iterations == 1;
                assert!(report.results.iter().all(has_flags), "{flags} in a world of {n}");
            }
        }
    }
}

#[test]
fn all_iterations_of_a_benchmark_give_right_results() {
    let last_bytes = if runs_long_tests() { "100K" } else { "20K" };
    let flags: Vec<String> = operations_for(3)
        .map(|operation| format!("{operation} -b 1 -e {last_bytes} -f 800 -t f64 -n 3 -w 2 -c 3 --root 2"))
        .collect();
    for results in measure_all_on_ranks(3, &flags) {
        for ((operation, flags), (report, _)) in operations_for(3).zip(&flags).zip(results) {
            assert_eq!(report.wrong_elements(), Some(0), "{flags}");
            let root = operation.group_operation().has_root().then_some(2);
            assert!(report.results.iter().all(|row| row.root == root), "{flags}");
            let reduction = operation.reduces().then_some("sum");
            assert!(report.results.iter().all(|row| row.reduction == reduction), "{flags}");
        }
    }
}

#[test]
fn the_report_names_the_algorithm_that_was_used() {
    let cases: [(&str, &[&str]); 5] = [
        ("broadcast", &["tree", "tree", "ring"]),
        ("reduce", &["tree", "tree", "chain"]),
        ("scan", &["chain", "chain", "chain"]),
        ("all_to_all", &["direct", "direct", "direct"]),
        ("barrier", &["dissemination"]),
    ];
    for (operation, expected) in cases {
        let (report, table) =
            measure_on_ranks(2, format!("{operation} -b 4K -e 1M -f 16 -n 1 -w 0")).swap_remove(0);
        let algorithms: Vec<&str> = report.results.iter().map(|row| row.algorithm).collect();
        assert_eq!(algorithms, expected, "{operation}");
        let printed: Vec<&str> = table
            .lines()
            .filter(|line| line.starts_with(' '))
            .filter_map(|row| row.split_whitespace().last())
            .collect();
        assert_eq!(printed, expected, "{operation}:\n{table}");
    }
}

#[test]
fn operations_with_equal_parts_report_the_size_of_all_parts() {
    for operation in ["gather", "scatter", "all_to_all"] {
        let (report, _) =
            measure_on_ranks(3, format!("{operation} -b 4 -e 256 -f 4 -n 1 -w 0")).swap_remove(1);
        let bytes: Vec<u64> = report.results.iter().map(|row| row.bytes).collect();
        assert_eq!(bytes, [12, 60, 252], "{operation}");
        let row = &report.results[2];
        assert!((row.busbw_gb_per_s - row.algbw_gb_per_s * 2.0 / 3.0).abs() < 1e-9, "{operation}");
    }
}

#[test]
fn only_rank_0_prints_and_all_ranks_report_the_same_times() {
    let results = measure_on_ranks(2, "all_reduce -b 64 -e 64 -n 4");
    let row = |rank: usize| &results[rank].0.results[0];
    assert_eq!(row(0).time_us, row(1).time_us, "every rank must report the slowest rank's time");
    assert_eq!((row(0).transport, row(0).algorithm), ("tcp", "one-shot"));
    assert!(row(0).time_us_min <= row(0).time_us && row(0).time_us <= row(0).time_us_p99);
    // The slowest rank of each iteration need not be the same rank.
    assert_eq!(row(0).time_us_mean, row(1).time_us_mean);
    assert!(0.0 < row(0).time_us_mean && row(0).time_us_mean <= row(0).time_us_p99);
    assert_eq!(row(0).busbw_gb_per_s, row(0).algbw_gb_per_s, "2(n-1)/n is 1 for n = 2");
    assert!(results[1].1.is_empty());
    let header = &results[0].1;
    for line in ["2 ranks", "transport tcp  congestion control", "#  Rank  1 Pid", "iters: 4 validation: 1"] {
        assert!(header.contains(line), "{line} in\n{header}");
    }
}

#[test]
fn the_flags_for_the_input_are_used_and_reported() {
    for transport in [LocalTransport::Tcp, LocalTransport::Shm] {
        let last_bytes = if runs_long_tests() { "3M" } else { "300K" };
        let flags = format!(
            "all_reduce --alloc --rewrite-input -b 4 -e {last_bytes} -f 90 -n 2 -w 1 -o sum,avg -t f32,u8"
        );
        let adjust = |options: &mut JoinOptions| options.transport = transport;
        for (report, table) in ranks::run_with(3, adjust, move |mut group| run_benchmark(&mut group, &flags))
        {
            let BenchEnvironment { alloc, rewrite_input, .. } = report.environment;
            assert_eq!((report.wrong_elements(), alloc, rewrite_input), (Some(0), true, true));
            let text = "in buffers from Group::alloc (--alloc), of rewritten inputs (--rewrite-input)";
            assert!(table.is_empty() || table.contains(text), "{table}");
        }
    }
    let (report, table) = measure_on_ranks(2, "all_reduce -b 4 -e 4 -n 1 -w 0").swap_remove(0);
    let BenchEnvironment { alloc, rewrite_input, .. } = report.environment;
    assert!(!alloc && !rewrite_input && !table.contains("--alloc") && !table.contains("rewrit"), "{table}");
}

#[test]
fn a_root_that_does_not_exist_is_a_usage_error_on_every_rank() {
    let errors = ranks::run(2, |mut group| {
        let plan = make_plan("broadcast -e 4 --root 2");
        bench(&mut group, &plan, SEGMENT_BYTES, &mut std::io::sink()).err()
    });
    for error in errors {
        let error = error.expect("the benchmark must fail");
        assert!(matches!(error, BenchError::Plan(_)), "{error}");
        assert_eq!(error.exit_code(), Exit::Usage);
    }
}

#[test]
fn message_benchmarks_need_two_ranks() {
    for operation in ["ping_pong", "send_receive"] {
        let error =
            bench(&mut Group::solo(), &make_plan(operation), SEGMENT_BYTES, &mut std::io::sink()).err();
        let error = error.expect("the benchmark must fail");
        assert_eq!(error.exit_code(), Exit::Usage, "{error}");
        assert!(error.to_string().starts_with(operation), "{error}");
    }
}

#[test]
fn ranks_with_different_flags_fail_with_a_mismatch() {
    let errors = ranks::run(2, |mut group| {
        let mine = if group.rank() == Rank::ZERO { "all_reduce -e 4" } else { "all_reduce -e 4 -o max" };
        bench(&mut group, &make_plan(mine), SEGMENT_BYTES, &mut std::io::sink()).err()
    });
    for error in errors {
        let error = error.expect("the benchmark must fail");
        assert_eq!(error.exit_code(), Exit::Mismatch, "{error}");
    }
}

#[test]
fn wrong_results_have_a_separate_exit_code() {
    assert_eq!(BenchError::WrongElements(3).exit_code() as u8, 15);
    assert_eq!(BenchError::WrongElements(3).to_string(), "3 elements of the results are wrong");
}
