//! The command `ringrun top`: shows the progress of runs that were started with `--metrics`.

mod rank_view;
mod screen;
mod table;

use std::env;
use std::ffi::OsString;
use std::io::{self, IsTerminal as _, Write as _};
use std::net::{SocketAddr, ToSocketAddrs as _};
use std::path::PathBuf;
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use clap::Parser;
use serde::Serialize;

use self::rank_view::RankView;
use self::screen::{Screen, ScreenContent};
use self::table::draw_jobs;
use crate::cli::print_error::print_error;
use crate::exit::Exit;
use crate::monitor::{RunDirectory, get};

/// How often the view is refreshed.
const REFRESH_INTERVAL: Duration = Duration::from_secs(1);
/// How long to wait for the status of a rank.
const ANSWER_TIMEOUT: Duration = Duration::from_millis(500);
/// The number of ranks that are asked at the same time.
const REQUESTS_MAX: usize = 32;

/// Shows the step, the loss and the speed of each rank of the runs of this user on this host, where their time goes, the bytes
/// of each link, and the slowest rank. A run is shown if it was started with `ringtrain --metrics ADDRESS`.
#[derive(Parser, Debug)]
#[command(name = "ringrun top", version, max_term_width = 130, after_help = AFTER_OPTIONS)]
struct TopArgs {
    /// Show the ranks that serve their metrics at these addresses, instead of the ranks of this host: PORT or HOST:PORT.
    #[arg(value_name = "ADDRESS")]
    addresses: Vec<String>,

    /// Print one table and exit. This is the default if the standard output is not a terminal.
    #[arg(long)]
    once: bool,

    /// Print the status of all ranks as one JSON object and exit.
    #[arg(long, conflicts_with = "once")]
    json: bool,
}

const AFTER_OPTIONS: &str = "\
Examples:
  ringrun -n 4 ringtrain --metrics 0      train, and serve the metrics of each rank at any free port
  ringrun top                             show all these ranks, refreshed each second; q or Ctrl-C leaves
  ringrun top --once                      print one table
  ringrun top node1:9400 node2:9400       show ranks of other hosts

Exit codes:
  0  the status of at least one rank was shown
  1  no rank was found, or no rank answered
  2  an option or an address is wrong";

/// Where to find ranks.
enum RankSource {
    Directory(RunDirectory),
    Addresses(Vec<SocketAddr>),
}

/// Runs `ringrun top` and returns its exit code. `arguments` are those after `top`.
pub(super) fn run_top(arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let args = match TopArgs::try_parse_from(std::iter::once("ringrun top".into()).chain(arguments)) {
        Ok(args) => args,
        Err(error) => {
            let _ = error.print();
            return ExitCode::from(error.exit_code() as u8);
        }
    };
    let source = match find_source(&args.addresses) {
        Ok(source) => source,
        Err(message) => {
            print_error("ringrun top", message);
            return Exit::Usage.into();
        }
    };
    let shown = if args.json {
        source.collect_views().and_then(|views| print_json(&views))
    } else if args.once || !io::stdout().is_terminal() {
        source.collect_views().and_then(|views| print_table(&source, &views))
    } else {
        show_until_left(&source)
    };
    match shown {
        Ok(exit) => exit.into(),
        Err(message) => {
            print_error("ringrun top", message);
            Exit::Failure.into()
        }
    }
}

/// Parses the addresses. Without addresses, the source is the run directory of this user.
fn find_source(addresses: &[String]) -> Result<RankSource, String> {
    if addresses.is_empty() {
        let runtime = env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
        return Ok(RankSource::Directory(RunDirectory::new(runtime)));
    }
    addresses.iter().map(|text| parse_address(text)).collect::<Result<_, _>>().map(RankSource::Addresses)
}

fn parse_address(text: &str) -> Result<SocketAddr, String> {
    let place = text.trim_start_matches("http://").split('/').next().unwrap_or_default();
    if let Ok(port) = place.parse::<u16>() {
        return Ok(SocketAddr::from(([127, 0, 0, 1], port)));
    }
    if !place.contains(':') {
        return Err(format!("{text}: pass PORT or HOST:PORT"));
    }
    let mut found =
        place.to_socket_addrs().map_err(|error| format!("{text}: {error}; pass PORT or HOST:PORT"))?;
    found.next().ok_or_else(|| format!("{text}: the host has no address"))
}

impl RankSource {
    /// Asks all ranks for their status.
    fn collect_views(&self) -> Result<Vec<RankView>, String> {
        let targets: Vec<(SocketAddr, Option<(String, u32)>)> = match self {
            Self::Addresses(addresses) => addresses.iter().map(|&address| (address, None)).collect(),
            Self::Directory(directory) => {
                let runs = directory.find_runs().map_err(|error| {
                    format!("cannot look for runs in {}: {error}", directory.path().display())
                })?;
                runs.into_iter()
                    .map(|run| (loopback_if_any(run.address), Some((run.job, run.rank))))
                    .collect()
            }
        };
        let mut views = Vec::with_capacity(targets.len());
        for targets in targets.chunks(REQUESTS_MAX) {
            thread::scope(|scope| {
                let requests: Vec<_> = targets
                    .iter()
                    .map(|(address, known)| scope.spawn(move || ask_rank(*address, known.clone())))
                    .collect();
                // A thread that panics has printed why.
                views.extend(requests.into_iter().filter_map(|request| request.join().ok()));
            });
        }
        Ok(views)
    }

    /// Returns the sentence for an empty view.
    fn describe_absence(&self) -> String {
        match self {
            Self::Addresses(_) => "no rank answers at these addresses".to_owned(),
            Self::Directory(directory) => format!(
                "no run of this user is in {}; start runs with `ringtrain --metrics 0`, or pass the addresses of ranks",
                directory.path().display()
            ),
        }
    }
}

/// Returns the loopback address if the rank listens at all addresses.
fn loopback_if_any(mut address: SocketAddr) -> SocketAddr {
    if address.ip().is_unspecified() {
        address.set_ip(match address {
            SocketAddr::V4(_) => std::net::Ipv4Addr::LOCALHOST.into(),
            SocketAddr::V6(_) => std::net::Ipv6Addr::LOCALHOST.into(),
        });
    }
    address
}

fn ask_rank(address: SocketAddr, known: Option<(String, u32)>) -> RankView {
    let status = get(address, "/status", ANSWER_TIMEOUT).and_then(|text| {
        serde_json::from_str(&text).map_err(|_| "the answer is not the status of a rank".to_owned())
    });
    match status {
        Ok(status) => RankView { address, status: Some(status), error: None, known },
        Err(error) => RankView { address, status: None, error: Some(error), known },
    }
}

/// Returns the exit code for these views.
fn exit_of(views: &[RankView]) -> Exit {
    if views.iter().any(|view| view.status.is_some()) { Exit::Success } else { Exit::Failure }
}

fn print_json(views: &[RankView]) -> Result<Exit, String> {
    #[derive(Serialize)]
    struct Views<'a> {
        ranks: &'a [RankView],
    }
    let text = serde_json::to_string_pretty(&Views { ranks: views }).map_err(|error| error.to_string())?;
    print(&(text + "\n")).map(|()| exit_of(views))
}

fn print_table(source: &RankSource, views: &[RankView]) -> Result<Exit, String> {
    if views.is_empty() {
        return Err(source.describe_absence());
    }
    print(&draw_jobs(views)).map(|()| exit_of(views))
}

fn print(text: &str) -> Result<(), String> {
    match io::stdout().write_all(text.as_bytes()) {
        // A closed pipe, as in `ringrun top --once | head`, is not an error.
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(format!("cannot write to standard output: {error}"))
        }
        _ => Ok(()),
    }
}

/// Shows the view until the user presses q or Ctrl-C, or until a signal ends the program.
fn show_until_left(source: &RankSource) -> Result<Exit, String> {
    let mut screen = Screen::open().map_err(|error| format!("cannot use the terminal: {error}"))?;
    loop {
        let (text, content) = match source.collect_views() {
            Ok(views) if views.is_empty() => (source.describe_absence(), ScreenContent::Sentence),
            Ok(views) => (draw_jobs(&views), ScreenContent::Tables),
            Err(message) => (message, ScreenContent::Sentence),
        };
        screen.draw(&text, content).map_err(|error| format!("cannot write to the terminal: {error}"))?;
        if screen.wait_for_leave(REFRESH_INTERVAL) {
            return Ok(Exit::Success);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_ports_or_hosts_with_ports() {
        for (text, expected) in [
            ("9400", Ok("127.0.0.1:9400")),
            ("http://127.0.0.2:80/metrics", Ok("127.0.0.2:80")),
            ("[::1]:80", Ok("[::1]:80")),
            ("node", Err("pass PORT or HOST:PORT")),
            ("127.0.0.1:x", Err("pass PORT or HOST:PORT")),
        ] {
            match (parse_address(text), expected) {
                (Ok(address), Ok(expected)) => assert_eq!(address.to_string(), expected),
                (Err(error), Err(part)) => assert!(error.contains(part), "{error}"),
                (found, _) => panic!("{text}: {found:?}"),
            }
        }
    }
}
