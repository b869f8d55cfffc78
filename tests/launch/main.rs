//! Tests of the programs as users start them: `ringrun`, `ringtrain` and `ringbench` as processes.

mod bench_arguments;
mod binding;
mod blame;
mod doctor;
mod ending;
mod examples;
mod exit_codes;
mod faulty_network;
mod hosts;
mod killed_ranks;
mod metrics;
mod mpi4py;
mod nodes;
mod other_launchers;
mod output;
mod ports;
mod programs;
mod progress;
mod recording;
mod relays;
mod service;
mod shared_memory;
mod standard_input;
mod tolerated_failures;
#[path = "../util/mod.rs"]
mod util;
