//! Several programs in one job, and their common world.

use crate::util::{ringrun, run};

#[test]
fn several_programs_are_the_ranks_of_one_job() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().canonicalize().expect("a path");
    let path = path.to_str().expect("text");
    let script = "echo $RANK/$WORLD_SIZE $LOCAL_RANK ${A-none} $(pwd)";
    let line = [
        "-n", "1", "-x", "A=1", "--wdir", "/", "sh", "-c", script, ":", "-n", "2", "--wdir", path, "sh", "-c",
    ];
    let job = run(ringrun(&line).arg(script));
    let expected = [
        "[0]<stdout>:0/3 0 1 /".to_owned(),
        format!("[1]<stdout>:1/3 1 none {path}"),
        format!("[2]<stdout>:2/3 2 none {path}"),
    ];
    assert_eq!(job.sorted_lines(), expected, "{}", job.stderr());
    // The programs are checked before any of them starts, and the failure of one ends the job.
    let job = run(&mut ringrun(&["-n", "1", "echo", "x", ":", "-n", "1", "no-such-program"]));
    assert_eq!((job.code(), job.stdout().as_str()), (Some(127), ""));
    let job =
        run(&mut ringrun(&["--grace", "0", "-n", "1", "sleep", "300", ":", "-n", "1", "sh", "-c", "exit 9"]));
    assert_eq!(job.code(), Some(9));
    assert!(job.stderr().contains("rank 1 "), "{}", job.stderr());
    // Two programs of this project train together.
    let train = "ringtrain --epochs 1 --data synthetic:64x4";
    let line = format!("-n 1 {train} : -n 2 {train}");
    let job = run(&mut ringrun(&line.split(' ').collect::<Vec<_>>()));
    assert_eq!(job.code(), Some(0), "{}", job.stderr());
}
