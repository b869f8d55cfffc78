//! The program `ringbench`.

use std::process::ExitCode;

fn main() -> ExitCode {
    ringtrain::cli::bench::run_ringbench(std::env::args_os())
}
