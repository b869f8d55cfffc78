//! Simulates the networks of many seeds on all processors, for `tools/simulate`.

use std::env;
use std::num::NonZero;
use std::panic::catch_unwind;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, available_parallelism};
use std::time::Instant;

use super::handshakes::check_handshakes;
use super::jobs::{
    check_collectives_of_a_host, check_last_barrier, check_messages_of_a_host, check_operation,
    check_stopped_rank_of_a_host, check_survivors, check_without_faults, check_wrong_call_between_equal_ones,
    check_wrong_calls, check_wrong_words,
};
use super::program::OPERATIONS;
use super::registrations::check_registrations;
use super::rounds::check_rounds;
use super::threads::check_threads;

/// The environment variable with the seeds: the first seed, a colon, and the number of seeds.
const SEEDS_VARIABLE: &str = "SIM_SEEDS";

/// A check of the networks of one seed, and its name. A check panics if it fails.
type NamedCheck = (&'static str, fn(u64));

const CHECKS: [NamedCheck; 14] = [
    ("without faults", check_without_faults),
    ("with faults", |seed| {
        check_last_barrier(seed);
    }),
    ("one operation", |seed| {
        check_operation(OPERATIONS[seed as usize % OPERATIONS.len()], seed);
    }),
    ("a killed rank", |seed| {
        check_survivors(seed);
    }),
    ("messages of a host", |seed| {
        check_messages_of_a_host(seed);
    }),
    ("handshakes", check_handshakes),
    ("registrations", |seed| {
        check_registrations(seed);
    }),
    ("wrong words", |seed| {
        check_wrong_words(seed);
    }),
    ("wrong calls", check_wrong_calls),
    ("a wrong call between equal ones", check_wrong_call_between_equal_ones),
    ("collectives of a host", check_collectives_of_a_host),
    ("a stopped rank", |seed| {
        check_stopped_rank_of_a_host(seed);
    }),
    ("rounds", check_rounds),
    ("threads", check_threads),
];

#[test]
#[ignore = "tools/simulate runs this test"]
fn the_networks_of_many_seeds_pass_all_checks() {
    let Ok(seeds) = env::var(SEEDS_VARIABLE) else { return };
    let (first, count) = seeds.split_once(':').expect("SIM_SEEDS is FIRST:COUNT");
    let [first, count] = [first, count].map(|number| number.parse::<u64>().expect("a number"));
    let (next, failures) = (AtomicU64::new(first), Mutex::new(Vec::new()));
    let started = Instant::now();
    thread::scope(|scope| {
        for _ in 0..available_parallelism().map_or(1, NonZero::get) {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= first + count {
                        return;
                    }
                    for (name, check) in CHECKS {
                        if catch_unwind(|| check(seed)).is_err() {
                            failures.lock().expect("no thread panics with the lock").push((seed, name));
                        }
                    }
                }
            });
        }
    });
    let mut failures = failures.into_inner().expect("no thread panics with the lock");
    failures.sort_unstable();
    for (seed, name) in &failures {
        println!("failed: {name}; repeat it with SIM_SEED={seed} cargo test --locked --lib simulation::");
    }
    let checks = count * CHECKS.len() as u64;
    println!("{checks} checks, {} failures, {:.1} s", failures.len(), started.elapsed().as_secs_f64());
    assert!(failures.is_empty(), "{} checks failed", failures.len());
}
