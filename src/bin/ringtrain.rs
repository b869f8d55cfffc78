//! The program `ringtrain`.

use std::process::ExitCode;

fn main() -> ExitCode {
    ringtrain::cli::train::run_ringtrain(std::env::args_os())
}
