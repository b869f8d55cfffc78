//! Checks what `ringtrain --metrics` serves, the table of `ringrun top`, and the page of `--html`.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use crate::progress::PseudoTerminal;
use crate::util::{FinishedProgram, TEST_TIMEOUT, finish, ringrun, run, send_signal, wait_for, wait_until};

/// Reads the metrics from standard input with the reference parser. Prints the names of all samples.
const PARSE_SCRIPT: &str = "
import sys
from prometheus_client.parser import text_string_to_metric_families
for family in text_string_to_metric_families(sys.stdin.read()):
    for sample in family.samples:
        print(family.type, sample.name, sorted(sample.labels), sample.value >= 0)
";

/// A training job of two ranks that runs until it is stopped.
struct TrainingJob {
    directory: tempfile::TempDir,
    child: Child,
}

impl TrainingJob {
    fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let line = "-n 2 ringtrain --transport tcp --data synthetic:2000x5 --epochs 100000 --metrics 0";
        let mut command = ringrun(&line.split(' ').collect::<Vec<_>>());
        let child = command.env("XDG_RUNTIME_DIR", directory.path()).spawn().unwrap();
        Self { directory, child }
    }

    /// Waits until both ranks take steps, and returns their status.
    fn wait_until_training(&self) -> Vec<serde_json::Value> {
        wait_for("both ranks train and know their links", || {
            let done = self.top(&["--json"]);
            let views: serde_json::Value = serde_json::from_str(&done.stdout()).ok()?;
            let statuses: Vec<_> =
                views["ranks"].as_array()?.iter().map(|view| view["status"].clone()).collect();
            let is_training =
                |status: &serde_json::Value| status["links"][0]["bytes_sent"].as_u64() > Some(0);
            (statuses.len() == 2 && statuses.iter().all(is_training)).then_some(statuses)
        })
    }

    fn top(&self, arguments: &[&str]) -> FinishedProgram {
        run(&mut self.top_command(arguments))
    }

    fn top_command(&self, arguments: &[&str]) -> Command {
        let mut command = ringrun(&["top"]);
        command.args(arguments).env("XDG_RUNTIME_DIR", self.directory.path());
        command
    }

    /// Stops the job, which must succeed.
    fn stop(self) {
        send_signal("TERM", self.child.id());
        let done = finish(self.child);
        assert_eq!(done.code(), Some(0), "{}", done.stderr());
        let left = fs::read_dir(self.directory.path().join("ringtrain")).unwrap().count();
        assert_eq!(left, 0, "the ranks remove their files");
    }
}

/// Sends a request, and returns what the server sends.
fn exchange(address: &str, request: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(TEST_TIMEOUT)).unwrap();
    // The server may refuse the request before it is complete.
    let _ = stream.write_all(request);
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    text
}

fn get(address: &str, path: &str) -> String {
    let response = exchange(address, format!("GET {path} HTTP/1.1\r\nHost: a\r\n\r\n").as_bytes());
    let (head, body) = response.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
    body.to_owned()
}

#[test]
fn each_rank_shows_its_progress_and_no_client_stops_the_training() {
    let job = TrainingJob::start();
    let statuses = job.wait_until_training();
    for (rank, status) in statuses.iter().enumerate() {
        assert_eq!((status["rank"].as_u64(), status["transport"].as_str()), (Some(rank as u64), Some("tcp")));
        let address = status["address"].as_str().unwrap();
        assert_eq!(get(address, "/healthz"), "ok\n");
        let metrics = get(address, "/metrics");
        assert!(
            metrics.contains(&format!("ringtrain_link_sent_bytes_total{{peer=\"{}\"}}", 1 - rank)),
            "{metrics}"
        );
        check_with_reference_parser(&metrics);
        // A request of a megabyte, many clients that send nothing, and one that does not complete its request.
        assert!(exchange(address, &vec![b'a'; 1 << 20]).starts_with("HTTP/1.1 431 "));
        let mut idle: Vec<TcpStream> = (0..200).map(|_| TcpStream::connect(address).unwrap()).collect();
        idle[199].write_all(b"GET /metrics HT").unwrap();
        let step =
            |text: &str| serde_json::from_str::<serde_json::Value>(text).unwrap()["step"].as_u64().unwrap();
        let before = step(&get(address, "/status"));
        wait_until("the job takes steps", || step(&get(address, "/status")) > before);
    }
    let table = job.top(&["--once"]);
    assert_eq!(table.code(), Some(0), "{}", table.stderr());
    for expected in ["2 ranks, allreduce over tcp", "rank  host", "links:  0->1 ", "slowest: "] {
        assert!(table.stdout().contains(expected), "{}", table.stdout());
    }
    job.stop();
}

/// Checks the metrics with the parser of the Python package `prometheus_client`.
fn check_with_reference_parser(metrics: &str) {
    let probe =
        Command::new("python3").args(["-c", "import prometheus_client"]).stderr(Stdio::null()).status();
    if !probe.is_ok_and(|status| status.success()) {
        return eprintln!("SKIPPED: python3 has no package prometheus_client");
    }
    let mut command = Command::new("python3");
    command.args(["-c", PARSE_SCRIPT]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(metrics.as_bytes()).unwrap();
    let done = finish(child);
    assert_eq!(done.code(), Some(0), "{}\n{metrics}", done.stderr());
    for expected in [
        "counter ringtrain_steps_total [] True",
        "counter ringtrain_link_sent_bytes_total ['peer'] True",
        "counter ringtrain_step_seconds_total ['part'] True",
        "gauge ringtrain_loss [] True",
        "gauge ringtrain_build_info ['host', 'job', 'rank', 'strategy', 'transport', 'version'] True",
    ] {
        assert!(done.stdout().lines().any(|line| line == expected), "{expected}\n{}", done.stdout());
    }
}

#[test]
fn the_live_view_restores_the_terminal() {
    let job = TrainingJob::start();
    job.wait_until_training();
    let (mut terminal, child, mut keyboard) = PseudoTerminal::start_interactive(&mut job.top_command(&[]));
    terminal.read_until(Some("slowest: "));
    assert!(terminal.text().starts_with("\x1b[?1049h\x1b[?25l"), "{:?}", terminal.text());
    keyboard.write_all(b"q").unwrap();
    let done = finish(child);
    assert_eq!(done.code(), Some(0), "{}", done.stderr());
    terminal.read_until(Some("\x1b[?25h\x1b[?1049l"));
    job.stop();
    let (directory, nothing) = (tempfile::tempdir().unwrap(), "no run of this user");
    let done = run(ringrun(&["top"]).env("XDG_RUNTIME_DIR", directory.path()));
    assert!(done.code() == Some(1) && done.stderr().contains(nothing), "{}", done.stderr());
}

#[test]
fn wrong_addresses_and_pages_are_refused_before_the_training() {
    let busy = TcpListener::bind("127.0.0.1:0").unwrap();
    let busy = busy.local_addr().unwrap().port().to_string();
    for (option, value, code, expected) in [
        ("--metrics", &busy[..], 11, "because another program does; pass another port"),
        ("--metrics", "192.0.2.1:9400", 2, "192.0.2.1 is not an address of the host of rank 0"),
        ("--metrics", "65535", 2, "the highest port is 65535"),
        ("--metrics", "node:x", 2, "pass a port such as 9400"),
        ("--html", "/proc/page.html", 10, "write the page of --html"),
    ] {
        let directory = tempfile::tempdir().unwrap();
        let mut command = ringrun(&["-n", "2", "ringtrain", "--epochs", "1", option, value]);
        let done = run(command.env("XDG_RUNTIME_DIR", directory.path()));
        let stderr = done.stderr();
        assert!(done.code() == Some(code) && stderr.contains(expected), "{option} {value}: {stderr}");
        assert!(!stderr.contains("panicked") && !done.stdout().contains("train loss"), "{stderr}");
    }
    for (address, code, expected) in
        [("nowhere", 2, "pass PORT or HOST:PORT"), (&busy[..], 1, "no answer within 500 ms")]
    {
        let done = run(&mut ringrun(&["top", address]));
        let text = done.stderr() + &done.stdout();
        assert!(done.code() == Some(code) && text.contains(expected), "{address}: {text}");
    }
}

#[test]
#[ignore = "runs with tools/test --full"]
fn the_page_of_a_run_shows_all_ranks_and_needs_nothing_else() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    let (page, report) = (path("page.html"), path("report.json"));
    let line = "-n 2 ringtrain --transport tcp --epochs 2 --html";
    let mut command = ringrun(&line.split(' ').collect::<Vec<_>>());
    let done = run(command.args([&page, "--report", &report]));
    assert_eq!(done.code(), Some(0), "{}", done.stderr());
    let html = fs::read_to_string(Path::new(&page)).unwrap();
    // Three curves of losses and accuracy, three of the parts of a step, and one of the speed.
    assert_eq!((html.matches("<svg ").count(), html.matches("<polyline").count()), (4, 7), "{html}");
    for absent in ["http:", "https:", "<script", "src=", "url(", "@import", "NaN"] {
        assert!(!html.contains(absent), "{absent}");
    }
    let report: serde_json::Value = serde_json::from_slice(&fs::read(report).unwrap()).unwrap();
    for rank in 0..2 {
        let measured = &report["ranks"][rank];
        assert!(html.contains(measured["host"].as_str().unwrap()), "{measured}");
        assert_eq!(
            (&measured["step_times"]["steps"], &measured["links"][0]["peer"]),
            (&report["steps"], &(1 - rank).into())
        );
        assert!(measured["links"][0]["bytes_sent"].as_u64() >= measured["bytes_sent"].as_u64(), "{measured}");
    }
    assert!(report["ranks"][0]["bytes_sent"].as_u64() > Some(0), "{report}");
}
