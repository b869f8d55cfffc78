//! The program `ringrun`. The executable also contains `ringtrain` and `ringbench`: as in busybox, the name under which
//! the executable is called selects the program.

use std::env;
use std::ffi::OsStr;
use std::path::Path;
use std::process::ExitCode;

use ringtrain::{cli, launch};

fn main() -> ExitCode {
    let mut arguments = env::args_os();
    let program_path = arguments.next().unwrap_or_default();
    let name = Path::new(&program_path).file_name().unwrap_or(OsStr::new("ringrun"));
    match name.to_str() {
        Some("ringtrain") => {
            launch::set_process_name("ringtrain");
            cli::train::run_ringtrain(env::args_os())
        }
        Some("ringbench") => {
            launch::set_process_name("ringbench");
            cli::bench::run_ringbench(env::args_os())
        }
        Some(launch::HOST_CHECK_NAME) => cli::doctor::run_host_check(arguments),
        _ if name == launch::WATCHDOG_NAME || name == launch::SHIM_NAME => {
            launch::run_internal_program(name, arguments).unwrap_or(ExitCode::FAILURE)
        }
        _ => cli::run::run_ringrun(arguments),
    }
}
