//! Tests of the processors to which ringrun binds its ranks. Other jobs (for example, of other tests) may run at the
//! same time, so these tests do not assume which processors are free.

use std::fs;

use crate::util::{FinishedProgram, finish, read_pid, ringrun, ringrun_script, run, send_signal};

/// A script that prints the rank, the processors that the rank may use, and `OMP_NUM_THREADS`.
const PRINT_BINDING_SCRIPT: &str =
    "echo $RANK $(sed -n 's/Cpus_allowed_list:\t//p' /proc/self/status) $OMP_NUM_THREADS";

/// Parses a list of numbers such as `0-3,8`.
fn parse_number_list(list: &str) -> Vec<usize> {
    let run = |run: &str| {
        let (first, last) = run.split_once('-').unwrap_or((run, run));
        first.parse().unwrap()..=last.parse().unwrap()
    };
    list.split(',').flat_map(run).collect()
}

/// Returns the processors that this test may use.
fn allowed_processors() -> Vec<usize> {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    parse_number_list(status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:\t")).unwrap())
}

/// Parses the output of [`PRINT_BINDING_SCRIPT`]. Returns, for each rank in rank order, its processors and the value of
/// `OMP_NUM_THREADS`.
fn parse_processor_shares(done: &FinishedProgram) -> Vec<(Vec<usize>, usize)> {
    assert_eq!(done.code(), Some(0), "{}", done.stderr());
    let share = |line: &String| {
        let words: Vec<&str> = line.split(' ').collect();
        (parse_number_list(words[1]), words[2].parse().unwrap())
    };
    done.sorted_lines().iter().map(share).collect()
}

fn run_job(arguments: &[&str]) -> FinishedProgram {
    let all = [&["--no-tag-output"], arguments].concat();
    run(ringrun_script(&all, PRINT_BINDING_SCRIPT).env_remove("OMP_NUM_THREADS"))
}

/// Ranks should not share a processor: a small message between two ranks takes 0.5 us on two processors, but 20 us on
/// one.
#[test]
fn every_rank_is_bound_to_an_even_share() {
    let processors = allowed_processors().len();
    for ranks in [2, 3, processors, 2 * processors + 1] {
        let found = parse_processor_shares(&run_job(&["-n", &ranks.to_string()]));
        assert_eq!(found.len(), ranks);
        let mut ranks_on = vec![0; allowed_processors().last().unwrap() + 1];
        for (share, threads) in &found {
            assert!(share.iter().all(|processor| allowed_processors().contains(processor)));
            assert!((1..=share.len()).contains(threads), "{share:?} {threads}");
            for &processor in share {
                ranks_on[processor] += 1;
            }
        }
        let most = ranks_on.iter().max().unwrap();
        assert!(*most <= ranks.div_ceil(processors), "{ranks} ranks on {processors}: {found:?}");
    }
}

#[test]
fn bindings_are_reported_and_can_be_turned_off() {
    let done = run_job(&["-n", "2", "--report-bindings"]);
    let messages = done.stderr();
    for (rank, (share, _)) in parse_processor_shares(&done).iter().enumerate() {
        let start = format!("ringrun: rank {rank} is bound to processor");
        let line =
            messages.lines().find(|line| line.starts_with(&start)).unwrap_or_else(|| panic!("{messages}"));
        assert_eq!(&parse_number_list(line.rsplit(' ').next().unwrap()), share, "{messages}");
    }
    let done = run_job(&["-n", "2", "--bind-to", "none", "--report-bindings"]);
    assert!(done.stderr().contains("rank 1 is not bound"), "{}", done.stderr());
    assert!(parse_processor_shares(&done).iter().all(|(share, _)| *share == allowed_processors()));
}

/// ringrun itself may be limited to some processors: taskset, Slurm and containers set the affinity mask of the
/// processes that they start.
#[test]
fn an_inherited_affinity_mask_is_respected() {
    let Some(&last) = allowed_processors().last() else { return };
    let mut command = std::process::Command::new("taskset");
    command.args([
        "-c",
        &last.to_string(),
        env!("CARGO_BIN_EXE_ringrun"),
        "-n",
        "3",
        "--no-tag-output",
        "--",
        "sh",
        "-c",
        PRINT_BINDING_SCRIPT,
    ]);
    command
        .env_remove("OMP_NUM_THREADS")
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped());
    let Ok(child) = command.spawn() else { return eprintln!("SKIPPED: there is no taskset") };
    assert_eq!(parse_processor_shares(&finish(child)), vec![(vec![last], 1); 3]);
}

#[test]
fn omp_num_threads_of_the_user_is_kept() {
    let done = run(ringrun_script(&["-n", "2"], "echo $OMP_NUM_THREADS").env("OMP_NUM_THREADS", "7"));
    assert_eq!(done.sorted_lines(), ["[0]<stdout>:7", "[1]<stdout>:7"]);
    let done = run(&mut ringrun_script(&["-n", "1", "-x", "OMP_NUM_THREADS=5"], "echo $OMP_NUM_THREADS"));
    assert_eq!(done.sorted_lines(), ["[0]<stdout>:5"]);
}

/// A first job has claimed all processors, so a second job shares them with the first job. The ranks of the second
/// job must not poll for messages.
#[test]
fn a_job_counts_no_processors_that_another_job_has_claimed() {
    let folder = tempfile::tempdir().unwrap();
    let ranks = allowed_processors().len().to_string();
    let script = "echo $$ > \"$DIR/part.$RANK\" && mv \"$DIR/part.$RANK\" \"$DIR/pid.$RANK\"; sleep 1000";
    let first = ringrun_script(&["-n", &ranks], script).env("DIR", folder.path()).spawn().unwrap();
    read_pid(&folder.path().join("pid.0"));
    let done = run(&mut ringrun_script(&["-n", "1", "--no-tag-output"], "echo $RING_LOCAL_PROCESSORS"));
    assert_eq!(done.stdout(), "0\n", "{}", done.stderr());
    send_signal("KILL", first.id());
    finish(first);
}

/// Regression test: before the fix, the error explained how to print the help, but not which value of `--bind-to` to
/// use instead.
#[test]
fn a_bind_to_value_of_another_launcher_is_refused_with_one_sentence() {
    let done = run(&mut ringrun(&["-n", "2", "--bind-to", "socket", "true"]));
    let sentence = "error: --bind-to socket: use --bind-to numa, which binds each rank to the NUMA nodes of its share of the processors\n";
    assert_eq!((done.code(), done.stderr().as_str()), (Some(2), sentence));
}

/// A Python script that forbids the system call `sched_setaffinity`, as a sandbox does, and then runs the command in
/// its arguments. The call has the number 203 on x86-64, and 122 on aarch64. The instructions of the seccomp filter
/// are: load the number of the system call; if it is the number of `sched_setaffinity`, return EPERM; otherwise allow
/// the call.
const SANDBOX_SCRIPT: &str = "
import ctypes, os, platform, struct, sys
number = {'x86_64': 203, 'aarch64': 122}[platform.machine()]
code = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7fff0000)]
program = ctypes.create_string_buffer(b''.join(struct.pack('HBBI', *line) for line in code))
prctl = ctypes.CDLL(None, use_errno=True).prctl
filter = struct.pack('HxxxxxxP', len(code), ctypes.addressof(program))
assert prctl(38, 1, 0, 0, 0) == 0 and prctl(22, 2, filter, 0, 0) == 0, os.strerror(ctypes.get_errno())
os.execv(sys.argv[1], sys.argv[1:])
";

/// Regression test: before the fix, ranks ran unbound without a message, and `--report-bindings` printed processors
/// to which no rank was bound.
#[test]
fn a_sandbox_that_forbids_binding_causes_one_warning() {
    let mut command = std::process::Command::new("python3");
    command.args([
        "-c",
        SANDBOX_SCRIPT,
        env!("CARGO_BIN_EXE_ringrun"),
        "-n",
        "2",
        "--report-bindings",
        "--",
        "true",
    ]);
    command.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
    let Ok(child) = command.spawn() else { return eprintln!("SKIPPED: there is no python3") };
    let done = finish(child);
    let messages = done.stderr();
    if messages.contains("AssertionError") {
        return eprintln!("SKIPPED: this system allows no seccomp filter: {messages}");
    }
    let expected = "ringrun: this system does not let ringrun bind ranks to processors; ringrun continues as \
        with --bind-to none: Operation not permitted (os error 1)\nringrun: rank 0 is not bound\nringrun: rank 1 is not bound\n";
    assert_eq!((done.code(), messages.as_str()), (Some(0), expected));
}
