//! Tests of `ringtrain --data -`: rank 0 reads a table from its standard input, and shares it with the other ranks.

use std::fs;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};

use super::shared_tables::write_table;
use super::util::{FinishedProgram, finish, ringrun, run, runs_long_tests};

/// The options for the table that `write_table` writes.
const OPTIONS: &str = "--target y --missing indicator --drop comment --model mlp:4 --batch-size 100";

/// Returns a command that runs `ringtrain` with the arguments in `line` on `ranks` ranks. One rank runs without
/// `ringrun`.
fn ringtrain_on(ranks: u32, place: &Path, line: &str) -> Command {
    let mut command = match ranks {
        1 => Command::new(env!("CARGO_BIN_EXE_ringtrain")),
        _ => ringrun(&["-n", &ranks.to_string(), "--no-tag-output", "ringtrain"]),
    };
    command.args(line.split_whitespace()).current_dir(place);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Runs a command with the file `input` as its standard input.
fn run_with_input(command: &mut Command, input: &Path) -> FinishedProgram {
    run(command.stdin(fs::File::open(input).unwrap()))
}

/// Returns the lines with the hashes of the parameters.
fn parameter_hashes(done: &FinishedProgram) -> Vec<String> {
    assert_eq!(done.code(), Some(0), "{}", done.stderr());
    done.sorted_lines().into_iter().filter(|line| line.contains("parameters_hash")).collect()
}

#[test]
fn a_table_on_standard_input_gives_the_same_parameters_as_a_file() {
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path();
    let path = place.join("table.csv");
    write_table(&path, (0, "1"));
    for ranks in [1, 3] {
        let expected = parameter_hashes(&run(&mut ringtrain_on(
            ranks,
            place,
            &format!("--data table.csv --epochs 1 {OPTIONS}"),
        )));
        assert_eq!(expected.len(), ranks as usize);
        // From a pipe, reads return fewer bytes than from a file.
        let line = format!("--data - --epochs 1 {OPTIONS}");
        let mut command = Command::new("sh");
        command.args(["-c", "cat table.csv | \"$0\" \"$@\""]).current_dir(place);
        let program = ringtrain_on(ranks, place, &line);
        command.arg(program.get_program()).args(program.get_args());
        let piped = run(command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()));
        assert_eq!(parameter_hashes(&piped), expected);
    }
    // The test set may come from standard input, and the rows may be stored in temporary files.
    let line = format!("--data table.csv --test-data TEST --stream . --epochs 1 {OPTIONS}");
    let with_file = run(&mut ringtrain_on(2, place, &line.replace("TEST", "table.csv")));
    let with_input = run_with_input(&mut ringtrain_on(2, place, &line.replace("TEST", "-")), &path);
    let losses = |done: &FinishedProgram| {
        let line = done.stdout().lines().find(|line| line.contains("final: ")).map(str::to_owned).unwrap();
        line.split(';').next().unwrap().to_owned()
    };
    assert_eq!(parameter_hashes(&with_input), parameter_hashes(&with_file));
    assert_eq!(losses(&with_input), losses(&with_file));
}

#[test]
#[ignore = "runs with tools/test --full"]
fn a_run_resumes_only_with_the_same_input() {
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path();
    let [path, other] = ["table.csv", "other.csv"].map(|name| place.join(name));
    write_table(&path, (0, "1"));
    write_table(&other, (0, "2"));
    let whole = run_with_input(&mut ringtrain_on(2, place, &format!("--data - --epochs 2 {OPTIONS}")), &path);
    let begun = run_with_input(
        &mut ringtrain_on(2, place, &format!("--data - --epochs 1 --checkpoint c {OPTIONS}")),
        &path,
    );
    assert_eq!(begun.code(), Some(0), "{}", begun.stderr());
    let mut resume = ringtrain_on(2, place, "--resume c --epochs 2");
    let refused = run_with_input(&mut resume, &other);
    assert_eq!(refused.code(), Some(10), "{}", refused.stderr());
    let expected = "--data standard input of this run contains different";
    assert!(refused.stderr().contains(expected), "{}", refused.stderr());
    assert_eq!(parameter_hashes(&run_with_input(&mut resume, &path)), parameter_hashes(&whole));
}

/// The input does not end: the program that writes it may be a server. All ranks must end although only one rank parses
/// the damaged cell.
#[test]
fn a_damaged_cell_ends_all_ranks_before_the_input_ends() {
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path();
    write_table(&place.join("table.csv"), (400, "broken"));
    let mut command = ringtrain_on(3, place, &format!("--data - {OPTIONS}"));
    let mut child = command.stdin(Stdio::piped()).spawn().unwrap();
    let mut input = child.stdin.take().unwrap();
    input.write_all(&fs::read(place.join("table.csv")).unwrap()).unwrap();
    let done = finish(child);
    drop(input);
    assert_eq!(done.code(), Some(4), "{}", done.stderr());
    // The comment of each row has a line break.
    let expected = "standard input: line 802, column `x`: `broken` is not a number";
    let errors = done.stderr();
    let messages: Vec<&str> = errors.lines().filter(|line| line.starts_with("ringtrain: error: ")).collect();
    assert!(messages.iter().all(|line| line.contains(expected)) && messages.len() == 3, "{errors}");
}

#[test]
fn unsuitable_input_is_refused_with_a_reason() {
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path();
    let input = place.join("input");
    for (ranks, line, bytes, code, expected) in [
        (1, "--data - --target y", &b""[..], 4, "standard input: is empty; pipe a table into it"),
        (2, "--data - --target y", b"", 4, "standard input: is empty; pipe a table into it"),
        (1, "--data - --target y", b"\x1f\x8b\x08 data", 4, "standard input: is compressed; decompress the"),
        (1, "--data - --target y", b"\xff\xfea\0", 4, "standard input: is UTF-16 text"),
        (1, "--data - --target y", b"a,y\nx,1\n\xff,2\n", 4, "standard input: line 3, column `a`: "),
        (1, "--data - --target z", b"a,y\n1,1\n2,2\n", 4, "standard input: has no column `z`"),
        (1, "--data -", b"", 2, "is a table: name the column to predict with --target"),
        (2, "--data - --test-data - --target y", b"", 2, "--data - and --test-data - both name standard"),
        (1, "--data - a.csv --target y", b"", 2, "--data -: standard input cannot be one of several files"),
        (1, "--data - --format libsvm", b"", 2, "must hold a table of text, and not the format libsvm"),
        (1, "--data - --model gpt:1,1,8", b"", 2, "must hold a table of text, and not the format text"),
    ] {
        fs::write(&input, bytes).unwrap();
        let done = run_with_input(&mut ringtrain_on(ranks, place, line), &input);
        assert!(done.stderr().contains(expected), "{line}: {}", done.stderr());
        assert_eq!(done.code(), Some(code), "{line}: {}", done.stderr());
    }
}

/// The ranks wait for the program that writes the table, even if it pauses for longer than the deadline of an operation.
#[test]
fn a_slow_writer_does_not_exceed_the_deadline_of_an_operation() {
    if !runs_long_tests() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path();
    write_table(&place.join("table.csv"), (0, "1"));
    let line = format!("--timeout 3 --epochs 1 {OPTIONS} --data");
    let expected = run(&mut ringtrain_on(2, place, &format!("{line} table.csv")));
    let program = ringtrain_on(2, place, &format!("{line} -"));
    let mut command = Command::new("sh");
    let script = "(head -c 100000 table.csv; sleep 6; tail -c +100001 table.csv) | \"$0\" \"$@\"";
    command.args(["-c", script]).current_dir(place).arg(program.get_program()).args(program.get_args());
    let slow = run(command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()));
    assert_eq!(parameter_hashes(&slow), parameter_hashes(&expected));
}
