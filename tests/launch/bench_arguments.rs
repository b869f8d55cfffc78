//! Runs `ringbench` as a process. Checks the error messages for wrong arguments, the table, the JSON report and the
//! exit code.

use std::fs;
use std::process::{Command, Output, Stdio};

fn ringbench(flags: &str) -> Output {
    Command::new(env!("CARGO_BIN_EXE_ringbench"))
        .args(flags.split_whitespace())
        .output()
        .expect("ringbench runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn wrong_arguments_are_reported_and_exit_with_2() {
    let cases = [
        ("", "OPERATION"),
        ("all_scatter", "`all_scatter` is not one of all_reduce"),
        ("all_scatter", "all_to_all, scan, exscan, barrier, ping_pong, send_receive"),
        ("all_reduce --nosuch", "--nosuch"),
        ("all_reduce_perf", "did you mean `all_reduce`?"),
        ("all_reduce -b 64TB", "`64TB` is not a size"),
        ("all_reduce -b 1.3K", "`1.3K` is not a whole number of bytes"),
        ("all_reduce -e ten", "`ten` is not a size"),
        ("all_reduce -b 8 -e 4", "(-b 8) is larger than the largest (-e 4)"),
        ("all_reduce -b 8 -e 16 -f 1", "a factor of 1 (-f) does not increase a size of 8 bytes"),
        ("all_reduce -f -2", "'-2'"),
        ("all_reduce -i 0", "a step of 0 bytes"),
        ("all_reduce -i 1 -f 2", "cannot be used with"),
        ("all_reduce -i 1", "more than 10000 rows"),
        ("all_reduce -n 0", "0 is not in 1..=1000000"),
        ("all_reduce -w -1", "'-1'"),
        ("all_reduce -t f8", "`f8` is not one of f16"),
        ("all_reduce -o mean", "`mean` is not one of sum"),
        ("all_reduce -c yes", "invalid digit"),
        ("all_reduce --transport pigeon", "[possible values: auto, tcp, shm]"),
        ("all_reduce -b 1G -e 1000000G", "are available; choose a smaller -e"),
        ("broadcast --root 1 -e 4", "root 1 is not a rank of this job of 1"),
        ("reduce --root 1 -e 4", "root 1 is not a rank of this job of 1"),
        ("gather --root 1 -e 4", "root 1 is not a rank of this job of 1"),
        ("scatter --root 1 -e 4", "root 1 is not a rank of this job of 1"),
        ("scan -o avg", "scan accepts all reductions except avg"),
        ("exscan -o sum,avg", "exscan accepts all reductions except avg"),
        ("ping_pong", "ping_pong needs 2 ranks or more, and this job has 1"),
        ("sendrecv -e 4", "send_receive needs 2 ranks or more, and this job has 1"),
        ("all_reduce --json /nonexistent/out.json", "its directory does not exist"),
        ("all_reduce --json /", "--json /: "),
        ("all_reduce --json /dev", "--json /dev: the file could not be written there: is a directory"),
        ("all_reduce --plot /dev", "--plot /dev: the file could not be written there: is a directory"),
        ("all_reduce --plot a.svg --json a.svg", "--json and --plot both name a.svg"),
        ("barrier --plot a.svg", "a barrier has no size"),
        ("all_reduce -t f16,f32,f64,i8,u8 --plot a.svg", "draws at most 4 curves"),
        ("compare", "<BEFORE.json>"),
        ("compare a b --threshold 0.9", "`0.9` is not a ratio of at least 1"),
        ("all_reduce --json /dev/full", "No space left"),
        ("all_reduce --json /proc/report", "--json /proc/report"),
        ("all_reduce --rank 0", "--peers"),
    ];
    for (flags, expected) in cases {
        let output = ringbench(flags);
        let errors = text(&output.stderr);
        assert!(errors.contains(expected), "`ringbench {flags}` says:\n{errors}");
        assert_eq!(output.status.code(), Some(2), "`ringbench {flags}`");
        assert!(output.stdout.is_empty(), "`ringbench {flags}` prints a table");
    }
}

#[test]
fn help_and_version_exit_with_0() {
    // The test program has the features and the target of `ringbench`.
    let target = format!("\ntarget: {}", env!("RINGTRAIN_TARGET"));
    for (flags, expected) in [
        ("--help", "Examples:"),
        ("-V", env!("CARGO_PKG_VERSION")),
        ("--version", concat!("\ncommit: ", env!("RINGTRAIN_COMMIT"), "\nfeatures: cli, ")),
        ("--version", &target),
    ] {
        let output = ringbench(flags);
        assert!(output.status.success() && text(&output.stdout).contains(expected), "{flags}");
    }
}

#[test]
fn a_single_rank_prints_the_table_and_writes_the_report() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("out.json");
    let plot = directory.path().join("out.svg");
    let flags = format!(
        "allreduce -b 4 -e 64 -f 4 -n 3 -t f32,i8 -o avg --json {} --plot {}",
        path.display(),
        plot.display()
    );
    let output = ringbench(&flags);
    let table = text(&output.stdout);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let titles = table.lines().find(|line| line.contains("busbw")).expect("titles");
    for title in ["size", "count", "type", "redop", "root", "time min", "median", "p99", "algbw", "#wrong"] {
        assert!(titles.contains(title), "{title} in {titles}");
    }
    let rows: Vec<&str> = table.lines().filter(|line| line.starts_with(' ')).collect();
    assert_eq!(rows.len(), 6, "{table}");
    assert!(rows.iter().all(|row| row.split_whitespace().count() == 13), "{table}");
    assert!(table.contains("# Out of bounds values : 0 OK"), "{table}");

    let report: serde_json::Value =
        serde_json::from_slice(&fs::read(&path).expect("a report")).expect("JSON");
    for key in ["versions", "host", "cpu", "kernel", "congestion_control", "streams"] {
        assert!(!report["environment"][key].is_null(), "{key} in {report:#}");
    }
    let results = report["results"].as_array().expect("results");
    assert_eq!(results.len(), 6);
    let first = &results[0];
    for key in ["time_us", "time_us_mean", "time_us_min", "time_us_p99", "algbw_gb_per_s", "busbw_gb_per_s"] {
        assert!(first[key].is_f64(), "{key} in {first}");
    }
    assert_eq!(
        (&first["operation"], &first["dtype"], &first["reduction"]),
        (&"all_reduce".into(), &"f32".into(), &"avg".into())
    );
    assert_eq!((&first["algorithm"], &first["transport"]), (&"none".into(), &"none".into()));
    assert_eq!((&first["world_size"], &first["bytes"], &first["count"]), (&1.into(), &4.into(), &1.into()));
    assert_eq!(first["wrong"], 0);
    let left: Vec<_> = fs::read_dir(directory.path()).expect("a directory").collect();
    assert_eq!(left.len(), 2, "the directory should contain only the report and the plot: {left:?}");

    // In a job of one rank, the bus bandwidths are zero, so only the times are drawn: a curve for each type.
    let svg = fs::read_to_string(&plot).expect("a plot");
    assert_eq!(svg.matches("<polyline").count(), 2, "{svg}");
    for expected in
        ["all_reduce: 1 rank", "Median time", "size in bytes, logarithmic", ">f32</text>", ">16</text>"]
    {
        assert!(svg.contains(expected), "{expected}: {svg}");
    }
}

#[test]
fn ringbench_accepts_other_spellings_of_operations() {
    for name in ["alltoall", "All-Gather", "reduce", "scatter", "gather", "scan", "exscan", "barrier"] {
        let output = ringbench(&format!("{name} -b 8 -e 8 -n 1 -w 0"));
        let table = text(&output.stdout);
        assert!(output.status.success() && table.contains("values : 0 OK"), "{name}: {table}");
    }
}

#[test]
fn ringbench_without_checks_prints_na_for_wrong_values() {
    let output = ringbench("broadcast -b 8 -e 8 -n 1 -w 0 -c 0");
    let table = text(&output.stdout);
    assert!(output.status.success() && table.contains(" N/A "), "{table}");
    assert!(table.contains("# Out of bounds values : N/A"), "{table}");
}

/// Even if a reader such as `head` closes the pipe before `ringbench` has printed its table, `ringbench` must finish
/// and exit with 0.
#[test]
fn ringbench_exits_with_0_if_its_standard_output_is_closed() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_ringbench"))
        .args(["all_reduce", "-e", "1K", "-n", "2"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("ringbench runs");
    drop(child.stdout.take());
    let output = child.wait_with_output().expect("it ends");
    assert!(output.status.success() && output.stderr.is_empty(), "{}", text(&output.stderr));
}

/// Returns the report of a run of 2 ranks with one row for each size and time in microseconds.
fn make_report(operation: &str, wrong: u64, rows: &[(u64, f64)]) -> String {
    let row = |&(bytes, time_us): &(u64, f64)| {
        serde_json::json!({
            "operation": operation, "dtype": "f32", "reduction": "sum", "algorithm": "ring", "transport": "shm",
            "world_size": 2, "root": null, "bytes": bytes, "time_us": time_us, "busbw_gb_per_s": 1.0, "wrong": wrong,
        })
    };
    let rows: Vec<_> = rows.iter().map(row).collect();
    serde_json::json!({ "environment": {"cpu": operation}, "results": rows }).to_string()
}

#[test]
fn reports_are_compared_and_the_exit_code_tells_the_result() {
    let directory = tempfile::tempdir().expect("a directory");
    let write = |name: &str, text: &str| fs::write(directory.path().join(name), text).expect("a file");
    write("a.json", &make_report("all_reduce", 0, &[(4, 100.0), (8, 100.0)]));
    write("b.json", &make_report("all_reduce", 0, &[(4, 104.0), (8, 120.0)]));
    write("broadcast.json", &make_report("broadcast", 0, &[(4, 100.0)]));
    write("wrong.json", &make_report("all_reduce", 3, &[(4, 100.0)]));
    write("zero.json", &make_report("all_reduce", 0, &[(4, 0.0)]));
    write("other.json", &make_report("all_reduce", 0, &[(5, 1.0)]));
    write("empty.json", "{\"results\": []}");
    write("text.json", "size 4");
    for (flags, code, expected) in [
        ("a.json a.json", 0, "2 rows: 1.000; slower by more than 1.05: 0 rows"),
        ("a.json b.json", 17, "1.200     1.00     1.00 slower"),
        ("a.json b.json --threshold 1.25", 0, "slower by more than 1.25: 0 rows"),
        ("b.json a.json", 0, " faster"),
        ("a.json broadcast.json", 2, "a.json measures `all_reduce` with 2 ranks, and broadcast.json"),
        ("a.json other.json", 2, "no row with the same size"),
        ("a.json wrong.json", 15, "wrong.json: 3 elements of the results are wrong"),
        ("zero.json a.json", 4, "zero.json: the time of 4 bytes is not a number above 0"),
        ("a.json empty.json", 4, "has no rows"),
        ("a.json text.json", 4, "text.json: not a report of `ringbench --json`"),
        ("a.json missing.json", 4, "missing.json: No such file"),
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_ringbench"))
            .arg("compare")
            .args(flags.split_whitespace())
            .current_dir(directory.path())
            .output()
            .expect("ringbench runs");
        let printed = text(&output.stdout) + &text(&output.stderr);
        assert!(printed.contains(expected), "`ringbench compare {flags}` says:\n{printed}");
        assert_eq!(output.status.code(), Some(code), "`ringbench compare {flags}`: {printed}");
    }
}
