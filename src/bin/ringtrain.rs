//! The program `ringtrain`.

use std::process::ExitCode;

fn main() -> ExitCode {
    ringtrain::cli::train::run(std::env::args_os())
}
