//! Checks which package `from mpi4py import MPI` imports on the ranks, with and without `ringrun --mpi4py`. In
//! these tests, a fake package takes the place of an installed mpi4py.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::util::{FinishedProgram, processes_with_environment, ringrun, run, wait_until};
use tempfile::TempDir;

/// The source of a fake module `ringtrain.mpi.path`. The fake module prints the directory of ringtrain's `mpi4py`.
/// Each time the module runs, it also appends a line to a file.
const FAKE_PATH_MODULE: &str = "
import os
home = os.environ['HOME_OF_FAKES']
open(home + '/asked', 'a').write('once\\n')
print('a line before the directory')
print(home + '/shim')
";

/// A Python script that imports `mpi4py`, and prints which package it has imported and the variable `PYTHONPATH`.
const PRINT_PACKAGE_SCRIPT: &str =
    "from mpi4py import MPI; import os; print(MPI.NAME, os.environ['PYTHONPATH'])";

/// Returns whether python3 is on PATH. If python3 is missing, prints that the test `test` is skipped.
fn has_python(test: &str) -> bool {
    let found = Command::new("python3").arg("--version").output().is_ok_and(|output| output.status.success());
    if !found {
        eprintln!("SKIPPED {test}: there is no python3 on PATH");
    }
    found
}

fn write_file_and_folders(path: &Path, text: &str) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

/// Makes a folder with three fake packages: `ringtrain`, the replacement for `mpi4py` in ringtrain, and `mpi4py`
/// itself. `module` is the source of `ringtrain.mpi.path`. Returns the folder and its path.
fn make_fake_packages(module: &str) -> (TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let home = folder.path().canonicalize().unwrap();
    write_file_and_folders(&home.join("packages/ringtrain/__init__.py"), "");
    write_file_and_folders(&home.join("packages/ringtrain/mpi/__init__.py"), "");
    write_file_and_folders(&home.join("packages/ringtrain/mpi/path.py"), module);
    for (folder, name) in [("shim", "ringtrain"), ("packages", "installed")] {
        write_file_and_folders(&home.join(folder).join("mpi4py/__init__.py"), "");
        write_file_and_folders(&home.join(folder).join("mpi4py/MPI.py"), &format!("NAME = '{name}'\n"));
    }
    (folder, home)
}

/// Runs ringrun with the fake packages in the variable `PYTHONPATH` of the ranks.
fn run_with_fakes(home: &Path, arguments: &[&str]) -> FinishedProgram {
    let packages = home.join("packages");
    run(ringrun(arguments).env("HOME_OF_FAKES", home).env("PYTHONPATH", packages).env("NAMED", "PYTHONPATH"))
}

#[test]
fn with_the_mpi4py_option_every_rank_imports_mpi4py_from_ringtrain() {
    if !has_python("with_the_mpi4py_option_every_rank_imports_mpi4py_from_ringtrain") {
        return;
    }
    let (_folder, home) = make_fake_packages(FAKE_PATH_MODULE);
    let shown = home.display();
    let own = format!("PYTHONPATH={shown}/packages:{shown}/more");
    let script = format!("exec python3 -c \"{PRINT_PACKAGE_SCRIPT}\"");
    let cases: [(&[&str], &[&str], String); 4] = [
        (&[], &["python3", "-c", PRINT_PACKAGE_SCRIPT], format!("ringtrain {shown}/shim:{shown}/packages")),
        // The command of the next case is a shell, not a Python interpreter.
        (&[], &["sh", "-c", &script], format!("ringtrain {shown}/shim:{shown}/packages")),
        (
            &["-x", "PYTHONPATH"],
            &["python3", "-c", PRINT_PACKAGE_SCRIPT],
            format!("ringtrain {shown}/shim:{shown}/packages"),
        ),
        (
            &["-x", &own],
            &["python3", "-c", PRINT_PACKAGE_SCRIPT],
            format!("ringtrain {shown}/shim:{shown}/packages:{shown}/more"),
        ),
    ];
    for (number, (flags, command, expected)) in cases.iter().enumerate() {
        let arguments = [&["--mpi4py", "-n", "3", "--no-tag-output"], *flags, *command].concat();
        let done = run_with_fakes(&home, &arguments);
        assert_eq!(done.code(), Some(0), "{arguments:?}: {}", done.stderr());
        assert_eq!(done.sorted_lines(), vec![expected.clone(); 3], "{arguments:?}");
        let asked = fs::read_to_string(home.join("asked")).unwrap().lines().count();
        assert_eq!(asked, number + 1, "the interpreter should run once for all ranks");
    }
    let done = run_with_fakes(
        &home,
        &["--mpi4py=installed", "-n", "1", "--no-tag-output", "python3", "-c", PRINT_PACKAGE_SCRIPT],
    );
    assert_eq!(done.stdout(), format!("installed {shown}/packages\n"));
}

/// Regression test: before the fix, each of two ranks imported an installed mpi4py and was a world of size 1, so the
/// program printed its result twice.
#[test]
#[ignore = "runs with tools/test --full"]
fn without_the_mpi4py_option_the_import_error_names_the_option() {
    if !has_python("without_the_mpi4py_option_the_import_error_names_the_option") {
        return;
    }
    let (_folder, home) = make_fake_packages(FAKE_PATH_MODULE);
    for is_installed in [true, false] {
        if !is_installed {
            fs::remove_dir_all(home.join("packages/mpi4py")).unwrap();
        }
        for script in [PRINT_PACKAGE_SCRIPT, "import mpi4py.futures"] {
            let done = run_with_fakes(&home, &["-n", "2", "--no-tag-output", "python3", "-c", script]);
            let errors = done.stderr();
            assert_eq!((done.code(), done.stdout().as_str()), (Some(1), ""), "{errors}");
            let sentence = "ModuleNotFoundError: mpi4py is not available on ranks that ringrun started";
            assert!(errors.contains(sentence) && errors.contains("`ringrun --mpi4py`"), "{errors}");
        }
        let optional = "try:\n import mpi4py\nexcept ModuleNotFoundError:\n print('without')";
        let done = run_with_fakes(&home, &["-n", "2", "--no-tag-output", "python3", "-c", optional]);
        assert_eq!(
            (done.code(), done.stdout().as_str()),
            (Some(0), "without\nwithout\n"),
            "{}",
            done.stderr()
        );
    }
    let done = run_with_fakes(&home, &["-n", "1", "python3", "-c", PRINT_PACKAGE_SCRIPT]);
    assert!(done.stderr().contains("`ringrun --mpi4py`"), "wrong error for one rank: {}", done.stderr());
}

/// In a job of one rank, the rank may use the installed mpi4py. A rank may also start `mpiexec`, whose processes use
/// the installed mpi4py.
#[test]
#[ignore = "runs with tools/test --full"]
fn single_ranks_and_mpiexec_use_the_installed_mpi4py() {
    if !has_python("single_ranks_and_mpiexec_use_the_installed_mpi4py") {
        return;
    }
    let (_folder, home) = make_fake_packages(FAKE_PATH_MODULE);
    let script = "from mpi4py import MPI; print(MPI.NAME)";
    let in_mpi = format!("PMI_RANK=0 exec python3 -c '{script}'");
    let cases: [(&[&str], &str); 3] = [
        (&["-n", "1", "--no-tag-output", "python3", "-c", script], "installed\n"),
        (&["-n", "2", "--no-tag-output", "sh", "-c", &in_mpi], "installed\ninstalled\n"),
        (
            &["--mpi4py=installed", "-n", "2", "--no-tag-output", "python3", "-c", script],
            "installed\ninstalled\n",
        ),
    ];
    for (arguments, expected) in cases {
        let done = run_with_fakes(&home, arguments);
        assert_eq!((done.code(), done.stdout().as_str()), (Some(0), expected), "{}", done.stderr());
    }
    // `PMI_RANK` shows that an MPI launcher started ringrun. The ranks are still started by ringrun, so importing
    // mpi4py must still be an error.
    let packages = home.join("packages");
    let arguments = ["-n", "2", "python3", "-c", script];
    let done = run(ringrun(&arguments).env("PYTHONPATH", packages).env("PMI_RANK", "0"));
    assert!(done.stderr().contains("`ringrun --mpi4py`"), "{}", done.stderr());
}

/// After each of these errors, ringrun must not start a rank.
#[test]
fn a_missing_package_is_an_error_that_says_how_to_install_it() {
    if !has_python("a_missing_package_is_an_error_that_says_how_to_install_it") {
        return;
    }
    let cases = [
        (
            "import no_such_module",
            "it exited with code 1: ModuleNotFoundError: No module named 'no_such_module'",
        ),
        ("raise SystemExit(3)", "it exited with code 3 without output"),
        ("", "it printed nothing"),
        ("print()", "it printed nothing"),
        ("print('some/where')", "it printed `some/where`, which is not an absolute path"),
        ("print('/dev/null')", "it printed `/dev/null`, which is not a directory"),
        ("print('/')", "it printed `/`, which does not contain the package mpi4py"),
    ];
    for (module, expected) in cases {
        let (_folder, home) = make_fake_packages(module);
        let done = run_with_fakes(&home, &["--mpi4py", "-n", "2", "python3", "-c", "print('started')"]);
        assert_not_started(&done, "python3", expected);
    }
    let (_folder, home) = make_fake_packages("");
    fs::remove_dir_all(home.join("packages/ringtrain")).unwrap();
    let done = run_with_fakes(&home, &["--mpi4py", "-n", "2", "python3", "-I", "-c", "print('started')"]);
    assert_not_started(&done, "python3", "No module named 'ringtrain'");
}

#[track_caller]
fn assert_not_started(done: &FinishedProgram, interpreter: &str, expected: &str) {
    let errors = done.stderr();
    assert_eq!((done.code(), done.stdout().as_str()), (Some(5), ""), "{expected}: {errors}");
    let begin = format!("ringrun: --mpi4py: {interpreter} cannot find the package ringtrain: ");
    assert!(errors.starts_with(&begin) && errors.contains(expected), "`{expected}` is not in: {errors}");
    assert!(errors.ends_with(&format!("{interpreter} -m pip install ./bindings/python\n")), "{errors}");
    assert_eq!(errors.lines().count(), 1, "{errors}");
}

#[test]
fn an_interpreter_that_does_not_answer_is_killed() {
    if !has_python("an_interpreter_that_does_not_answer_is_killed") {
        return;
    }
    let (_folder, home) = make_fake_packages("import signal\nsignal.pause()\n");
    let command = ["--mpi4py", "--start-timeout", "0.2", "-n", "2", "python3", "-c", "print('started')"];
    let done = run_with_fakes(&home, &command);
    assert_not_started(&done, "python3", "it did not answer within 0.2 s (--start-timeout)");
    let entry = format!("HOME_OF_FAKES={}", home.display());
    wait_until("the interpreter has been killed", || processes_with_environment(&entry).is_empty());
}

#[test]
fn a_missing_interpreter_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let home = folder.path().canonicalize().unwrap();
    // The missing interpreter is the command itself.
    let done = run_with_fakes(&home, &["--mpi4py", "-n", "2", "python-nowhere", "x.py"]);
    assert_eq!(done.code(), Some(127), "{}", done.stderr());
    assert!(done.stderr().contains("`python-nowhere` is not on PATH"), "{}", done.stderr());
    // The command is a shell, and the missing interpreter is the default, python3.
    let path = format!("PATH={}", home.display());
    let done = run_with_fakes(&home, &["--mpi4py", "-n", "2", "-x", &path, "/bin/sh", "-c", "echo started"]);
    assert_not_started(&done, "python3", "command not found: `python3` is not on PATH");
}
