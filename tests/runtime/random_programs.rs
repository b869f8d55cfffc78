//! Runs random programs with many operations in flight on several groups, and compares the results with a reference
//! that each rank computes alone.
//!
//! `PROGRAM_SEED=17 cargo test --test runtime random_programs` runs only the program that seed 17 gives. If a
//! sanitizer makes the tests slow, run fewer programs: for example, `PROGRAM_COUNT=5` runs 5.

mod collective;
mod program;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use crate::util::ranks::{self, TestTransport};
use program::{DUPLICATE_GROUP_INDEX, Program, Step};
use rand::rngs::StdRng;
use rand::seq::SliceRandom as _;
use rand::{RngExt as _, SeedableRng as _};
use ringtrain::group::{Checksums, Handle, Received, Source, Status};
use ringtrain::{DType, Error, Group, JoinOptions, Rank, ReduceOp};

/// The number of programs that a test runs by default.
const PROGRAM_COUNT: u64 = 3;
/// The tag of a [`Step::FromAnySource`] message is this number plus the index of the step. All other tags are lower.
const FIRST_STEP_TAG: u32 = 1000;
const REDUCTIONS: [ReduceOp; 4] = [ReduceOp::Sum, ReduceOp::BitXor, ReduceOp::Max, ReduceOp::Min];

/// Returns what a rank of the world contributes to a step.
fn contributed_elements(step: usize, rank: u32, count: usize) -> Vec<u64> {
    let salt = (step as u64) << 40 ^ u64::from(rank) << 34;
    (0..count as u64).map(|index| (salt ^ index).wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect()
}

fn apply_reduction(op: ReduceOp, a: u64, b: u64) -> u64 {
    match op {
        ReduceOp::Sum => a.wrapping_add(b),
        ReduceOp::BitXor => a ^ b,
        ReduceOp::Max => a.max(b),
        _ => a.min(b),
    }
}

/// Composes two functions of the form x -> a x + b modulo 2^32. Each argument encodes one function: a in the upper
/// and b in the lower 32 bits. Composition is associative, but not commutative.
fn compose_affine(first: u64, second: u64) -> u64 {
    let split = |one: u64| ((one >> 32) as u32, one as u32);
    let ((a, b), (c, d)) = (split(first), split(second));
    u64::from(a.wrapping_mul(c)) << 32 | u64::from(b.wrapping_mul(c).wrapping_add(d))
}

/// Combines the vectors of all ranks element by element, in rank order.
fn reduce_in_rank_order(all: &[Vec<u64>], combine: impl Fn(u64, u64) -> u64) -> Vec<u64> {
    let (first, rest) = all.split_first().expect("a group has at least one rank");
    let mut result = first.clone();
    for one in rest {
        result.iter_mut().zip(one).for_each(|(own, &more)| *own = combine(*own, more));
    }
    result
}

/// A function that waits for an operation and checks its result.
type ResultCheck = Box<dyn FnOnce()>;

/// A rank that runs a program. Each rank decides at random which calls block and when it waits.
struct ProgramRunner {
    own: u32,
    groups: Vec<Option<Group>>,
    rng: StdRng,
    waiting: Vec<ResultCheck>,
    /// The checks that run only at the end of the program, see `run_send_or_receive_from_any_source`.
    waiting_at_end: Vec<ResultCheck>,
    /// The handles of the receives with any source and any tag, in the order in which the receives were posted.
    any_receives: Vec<Handle<Received<u64>>>,
    /// The sender, tag and elements of the messages for `any_receives`.
    any_messages: Vec<(u32, u32, Vec<u64>)>,
}

impl ProgramRunner {
    fn run(mut world: Group, program: &Program) {
        let own = world.rank().get();
        let duplicate = world.duplicate().unwrap();
        let mut runner = Self {
            own,
            groups: vec![Some(world), Some(duplicate)],
            rng: StdRng::seed_from_u64(program.seed << 8 | u64::from(own)),
            waiting: Vec::new(),
            waiting_at_end: Vec::new(),
            any_receives: Vec::new(),
            any_messages: Vec::new(),
        };
        for (index, step) in program.steps.iter().enumerate() {
            runner.run_step(index, step);
            if runner.rng.random_bool(0.25) && !runner.waiting.is_empty() {
                let index = runner.rng.random_range(0..runner.waiting.len());
                runner.waiting.swap_remove(index)();
            }
        }
        runner.wait_for_all_operations();
    }

    /// Waits for all operations, in a random order.
    fn wait_for_all_operations(mut self) {
        self.waiting.append(&mut self.waiting_at_end);
        self.waiting.shuffle(&mut self.rng);
        self.waiting.into_iter().for_each(|wait| wait());
        for handle in self.any_receives {
            let Received { elements, status } = handle.wait().unwrap();
            // The messages of each sender arrive in the order in which that rank sent them.
            let next = self.any_messages.iter().position(|(from, ..)| *from == status.source.get());
            let (_, tag, expected) = self.any_messages.remove(next.expect("the source has sent a message"));
            assert_eq!(status.tag, tag, "messages of rank {} overtook each other", status.source);
            assert!(elements == expected, "the message of rank {} with tag {tag} is wrong", status.source);
        }
        assert!(self.any_messages.is_empty());
    }

    /// Decides at random whether to check the result now, to check the result later, or to drop the handle.
    fn check_handle_result_or_drop_handle<R: PartialEq + Debug + 'static>(
        &mut self,
        handle: Handle<R>,
        expected: R,
        what: String,
    ) {
        let check = move |result: Result<R, Error>| {
            let result = result.unwrap_or_else(|error| panic!("{what}: {error}"));
            assert!(result == expected, "{what}: the result is wrong");
        };
        match self.rng.random_range(0..8) {
            0 => drop(handle),
            1 => check(handle.wait()),
            2 if handle.test() => check(handle.wait()),
            3 => match handle.wait_timeout(Duration::from_micros(200)) {
                Ok(result) => check(result),
                Err(handle) => self.waiting.push(Box::new(move || check(handle.wait()))),
            },
            _ => self.waiting.push(Box::new(move || check(handle.wait()))),
        }
    }

    fn run_step(&mut self, index: usize, step: &Step) {
        match *step {
            Step::Split { parent, ref colours, ref keys } => self.run_split(parent, colours, keys),
            Step::Drop { group } => self.groups[group] = None,
            Step::AnyMessage { from, to, tag, count } => {
                self.run_send_or_receive_from_any_source(index, from, to, tag, count);
            }
            Step::Collective { group, .. }
            | Step::Message { group, .. }
            | Step::FromAnySource { group, .. } => {
                // Take the group out of the list, so that the methods can borrow both the group and the runner.
                let Some(mut found) = self.groups[group].take() else { return };
                match *step {
                    Step::Message { from, to, tag, count, .. } => {
                        self.run_message(index, &mut found, (from, to), tag, count);
                    }
                    Step::FromAnySource { to, count, .. } => {
                        self.run_messages_from_any_source(index, &mut found, to, count);
                    }
                    Step::Collective { kind, count, root, .. } => {
                        self.run_collective(index, &mut found, kind, count, root);
                    }
                    _ => unreachable!("these steps have no group"),
                }
                self.groups[group] = Some(found);
            }
        }
    }

    fn run_split(&mut self, parent: usize, colours: &[Option<u32>], keys: &[i64]) {
        let own = self.own as usize;
        let part = self.groups[parent].as_mut().and_then(|group| {
            let part = group.split(colours[own], keys[own]).unwrap();
            let mut members: Vec<Rank> = group
                .members()
                .iter()
                .copied()
                .filter(|rank| colours[rank.index()] == colours[own])
                .collect();
            // Ranks with equal keys must keep their order, and `sort_by_key` is stable.
            members.sort_by_key(|rank| keys[rank.index()]);
            assert_eq!(part.is_some(), colours[own].is_some());
            part.inspect(|part| assert_eq!(part.members(), members))
        });
        self.groups.push(part);
    }

    fn run_message(
        &mut self,
        step: usize,
        group: &mut Group,
        (from, to): (usize, usize),
        tag: u32,
        count: usize,
    ) {
        let size = group.size().as_usize();
        let (from, to) = (Rank::new((from % size) as u32), Rank::new((to % size) as u32));
        let elements = contributed_elements(step, group.members()[from.index()].get(), count);
        let what = format!("step {step}: {count} elements from {from} to {to}, tag {tag}");
        if from == to {
            return;
        }
        if group.rank() == from {
            if self.rng.random_bool(0.3) {
                group.send(&elements, to, tag).unwrap();
            } else {
                let handle = group.send_async(elements.clone(), to, tag).unwrap();
                self.check_handle_result_or_drop_handle(handle, elements, what);
            }
        } else if group.rank() == to {
            let room = count + self.rng.random_range(0..3);
            if self.rng.random_bool(0.3) {
                let mut buffer = vec![0; room];
                let status = group.receive(&mut buffer, from, tag).unwrap();
                assert_eq!((status.source, status.tag, status.count), (from, tag, count), "{what}");
                assert!(buffer[..count] == elements, "{what}");
            } else {
                let handle = group.receive_async::<u64>(room, from, tag).unwrap();
                let expected =
                    Received { elements, status: Status { source: from, tag, dtype: DType::U64, count } };
                // Keep the handle. Dropping the handle would cancel the receive, and a later receive would get this
                // message.
                self.waiting.push(Box::new(move || assert!(handle.wait().unwrap() == expected, "{what}")));
            }
        }
    }

    fn run_messages_from_any_source(&mut self, step: usize, group: &mut Group, to: usize, count: usize) {
        let to = Rank::new((to % group.size().as_usize()) as u32);
        let tag = FIRST_STEP_TAG + step as u32;
        if group.rank() != to {
            let elements = contributed_elements(step, self.own, count);
            let handle = group.send_async(elements.clone(), to, tag).unwrap();
            return self.check_handle_result_or_drop_handle(
                handle,
                elements,
                format!("step {step}: {count} elements to {to}"),
            );
        }
        let mut missing: Vec<Rank> = group.size().ranks().filter(|&rank| rank != to).collect();
        while !missing.is_empty() {
            let mut buffer = vec![0; count];
            let status = group.receive(&mut buffer, Source::Any, tag).unwrap();
            let found = missing.iter().position(|&rank| rank == status.source);
            let from = missing.swap_remove(found.expect("each rank sends one message"));
            assert!(
                buffer == contributed_elements(step, group.members()[from.index()].get(), count),
                "step {step}"
            );
        }
    }

    /// Sends a message, or posts a receive with any source and any tag. No rank waits for these operations before the
    /// end of the program, because the receive may match a message that is sent much later.
    fn run_send_or_receive_from_any_source(
        &mut self,
        step: usize,
        from: usize,
        to: usize,
        tag: u32,
        count: usize,
    ) {
        let duplicate = self.groups[DUPLICATE_GROUP_INDEX].as_mut().expect("the duplicate is never dropped");
        if from == to {
            return;
        }
        if self.own as usize == from {
            let elements = contributed_elements(step, self.own, count);
            let handle = duplicate.send_async(elements.clone(), Rank::new(to as u32), tag).unwrap();
            if self.rng.random_bool(0.2) {
                drop(handle);
            } else {
                self.waiting_at_end
                    .push(Box::new(move || assert!(handle.wait().unwrap() == elements, "step {step}")));
            }
        } else if self.own as usize == to {
            self.any_receives.push(duplicate.receive_async(1 << 20, Source::Any, None).unwrap());
            self.any_messages.push((from as u32, tag, contributed_elements(step, from as u32, count)));
        }
    }
}

fn run_program(seed: u64, adjust: impl Fn(&mut JoinOptions)) {
    // The test runner shows this line if the test fails.
    eprintln!("PROGRAM_SEED={seed}");
    let program = Arc::new(Program::random(seed));
    ranks::run_with(program.ranks, adjust, move |world| ProgramRunner::run(world, &program));
}

fn seeds() -> Vec<u64> {
    let number = |name| std::env::var(name).ok().map(|text| text.parse::<u64>().expect("must be a number"));
    match number("PROGRAM_SEED") {
        Some(seed) => vec![seed],
        None => (0..number("PROGRAM_COUNT").unwrap_or(PROGRAM_COUNT)).collect(),
    }
}

#[test]
#[ignore = "runs with tools/test --full"]
fn random_programs_give_right_results_over_tcp() {
    for seed in seeds() {
        run_program(seed, |_| {});
    }
}

/// Collectives use shared memory, and messages use sockets.
#[test]
fn random_programs_give_right_results_in_shared_memory() {
    for seed in seeds() {
        run_program(seed, |options| TestTransport::Shm.apply(options));
    }
}

/// Collectives use shared memory within hosts and sockets between hosts; groups that
/// have one rank on each host use only sockets.
#[test]
fn random_programs_give_right_results_on_several_hosts() {
    for seed in seeds() {
        run_program(seed, |options| TestTransport::Hosts.apply(options));
    }
}

/// Messages consist of many segments of 5000 bytes, each with a checksum.
#[test]
#[ignore = "runs with tools/test --full"]
fn random_programs_give_right_results_in_small_segments() {
    for seed in seeds() {
        run_program(seed, |options| {
            options.segment_bytes = 5000;
            options.checksums = Checksums::On;
        });
    }
}
