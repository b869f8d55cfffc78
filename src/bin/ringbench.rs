//! The program `ringbench`.

use std::process::ExitCode;

fn main() -> ExitCode {
    ringtrain::cli::bench::run(std::env::args_os())
}
