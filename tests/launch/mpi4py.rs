//! ringrun --mpi4py: `from mpi4py import MPI` on the ranks is the package's, wherever that is. A package of that name made here
//! stands for the real one.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::util::{Done, processes_with, ringrun, run, wait_until};
use tempfile::TempDir;

/// Names the place of `mpi4py` beside its own package, and leaves a line each time that it is asked.
const ANSWER: &str = "
import os
home = os.environ['HOME_OF_FAKES']
open(home + '/asked', 'a').write('once\\n')
print('some chatter')
print(home + '/shim')
";

/// What a rank sees.
const SCRIPT: &str = "from mpi4py import MPI; import os; print(MPI.WHOSE, os.environ['PYTHONPATH'])";

/// Whether there is an interpreter; if not, it says that this test is skipped.
fn has_python(test: &str) -> bool {
    let found = Command::new("python3").arg("--version").output().is_ok_and(|output| output.status.success());
    if !found {
        eprintln!("SKIPPED {test}: there is no python3 on PATH");
    }
    found
}

fn write(path: &Path, text: &str) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

/// A folder with the package `ringtrain`, whose module `ringtrain.mpi.path` is this program, its `mpi4py` and another one.
fn fakes(module: &str) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let home = folder.path().canonicalize().unwrap();
    write(&home.join("packages/ringtrain/__init__.py"), "");
    write(&home.join("packages/ringtrain/mpi/__init__.py"), "");
    write(&home.join("packages/ringtrain/mpi/path.py"), module);
    for (place, whose) in [("shim", "ours"), ("packages", "theirs")] {
        write(&home.join(place).join("mpi4py/__init__.py"), "");
        write(&home.join(place).join("mpi4py/MPI.py"), &format!("WHOSE = '{whose}'\n"));
    }
    (folder, home)
}

/// Runs ringrun where the packages are found.
fn run_with(home: &Path, arguments: &[&str]) -> Done {
    let packages = home.join("packages");
    run(ringrun(arguments).env("HOME_OF_FAKES", home).env("PYTHONPATH", packages).env("NAMED", "PYTHONPATH"))
}

#[test]
fn every_rank_finds_ours_first() {
    if !has_python("every_rank_finds_ours_first") {
        return;
    }
    let (_folder, home) = fakes(ANSWER);
    let shown = home.display();
    let own = format!("PYTHONPATH={shown}/packages:{shown}/more");
    let script = format!("exec python3 -c \"{SCRIPT}\"");
    let cases: [(&[&str], &[&str], String); 4] = [
        (&[], &["python3", "-c", SCRIPT], format!("ours {shown}/shim:{shown}/packages")),
        // A command that is no interpreter by its name.
        (&[], &["sh", "-c", &script], format!("ours {shown}/shim:{shown}/packages")),
        (&["-x", "PYTHONPATH"], &["python3", "-c", SCRIPT], format!("ours {shown}/shim:{shown}/packages")),
        (
            &["-x", &own],
            &["python3", "-c", SCRIPT],
            format!("ours {shown}/shim:{shown}/packages:{shown}/more"),
        ),
    ];
    for (number, (flags, command, expected)) in cases.iter().enumerate() {
        let arguments = [&["--mpi4py", "-n", "3", "--no-tag-output"], *flags, *command].concat();
        let done = run_with(&home, &arguments);
        assert_eq!(done.code(), Some(0), "{arguments:?}: {}", done.stderr());
        assert_eq!(done.sorted_lines(), vec![expected.clone(); 3], "{arguments:?}");
        let asked = fs::read_to_string(home.join("asked")).unwrap().lines().count();
        assert_eq!(asked, number + 1, "it is asked once for all ranks");
    }
    let done = run_with(&home, &["-n", "1", "--no-tag-output", "python3", "-c", SCRIPT]);
    assert_eq!(done.stdout(), format!("theirs {shown}/packages\n"), "without the flag nothing changes");
}

/// Each of these ends with its sentence, and before any rank is started.
#[test]
fn a_package_that_cannot_be_found_is_told_with_what_to_do() {
    if !has_python("a_package_that_cannot_be_found_is_told_with_what_to_do") {
        return;
    }
    let cases = [
        (
            "import no_such_module",
            "it exited with code 1: ModuleNotFoundError: No module named 'no_such_module'",
        ),
        ("raise SystemExit(3)", "it exited with code 3 without a word"),
        ("", "it printed nothing"),
        ("print()", "it printed nothing"),
        ("print('some/where')", "it printed `some/where`, which is no absolute path"),
        ("print('/dev/null')", "it printed `/dev/null`, which is not a directory"),
        ("print('/')", "it printed `/`, which holds no package mpi4py"),
    ];
    for (module, expected) in cases {
        let (_folder, home) = fakes(module);
        let done = run_with(&home, &["--mpi4py", "-n", "2", "python3", "-c", "print('started')"]);
        assert_not_started(&done, "python3", expected);
    }
    let (_folder, home) = fakes("");
    fs::remove_dir_all(home.join("packages/ringtrain")).unwrap();
    let done = run_with(&home, &["--mpi4py", "-n", "2", "python3", "-I", "-c", "print('started')"]);
    assert_not_started(&done, "python3", "No module named 'ringtrain'");
}

#[track_caller]
fn assert_not_started(done: &Done, interpreter: &str, expected: &str) {
    let told = done.stderr();
    assert_eq!((done.code(), done.stdout().as_str()), (Some(5), ""), "{expected}: {told}");
    let begin = format!("ringrun: --mpi4py: {interpreter} cannot say where the package ringtrain is: ");
    assert!(told.starts_with(&begin) && told.contains(expected), "`{expected}` is not in: {told}");
    assert!(told.ends_with(&format!("{interpreter} -m pip install ringtrain\n")), "{told}");
    assert_eq!(told.lines().count(), 1, "{told}");
}

#[test]
fn an_interpreter_that_does_not_answer_is_killed() {
    if !has_python("an_interpreter_that_does_not_answer_is_killed") {
        return;
    }
    let (_folder, home) = fakes("import signal\nsignal.pause()\n");
    let command = ["--mpi4py", "--start-timeout", "0.2", "-n", "2", "python3", "-c", "print('started')"];
    let done = run_with(&home, &command);
    assert_not_started(&done, "python3", "it did not answer within 0.2 s (--start-timeout)");
    let entry = format!("HOME_OF_FAKES={}", home.display());
    wait_until("nothing of it is left", || processes_with(&entry).is_empty());
}

#[test]
fn an_interpreter_that_is_not_there() {
    let folder = tempfile::tempdir().unwrap();
    let home = folder.path().canonicalize().unwrap();
    // The command itself, as ever.
    let done = run_with(&home, &["--mpi4py", "-n", "2", "python-nowhere", "x.py"]);
    assert_eq!(done.code(), Some(127), "{}", done.stderr());
    assert!(done.stderr().contains("`python-nowhere` is not on PATH"), "{}", done.stderr());
    // One that is asked for a command that is none.
    let path = format!("PATH={}", home.display());
    let done = run_with(&home, &["--mpi4py", "-n", "2", "-x", &path, "/bin/sh", "-c", "echo started"]);
    assert_not_started(&done, "python3", "command not found: `python3` is not on PATH");
}
