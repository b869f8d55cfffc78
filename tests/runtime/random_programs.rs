//! Random programs: many operations in flight on several groups, against a reference computed rank by rank.
//!
//! `PROGRAM_SEED=17 cargo test --test runtime random_programs` runs that one program alone. `PROGRAM_COUNT=5` runs five programs,
//! for sanitizers that take many times as long.

mod collective;
mod program;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

use crate::util::ranks::{self, TestTransport};
use program::{Program, Step, TWIN};
use rand::rngs::StdRng;
use rand::seq::SliceRandom as _;
use rand::{RngExt as _, SeedableRng as _};
use ringtrain::group::{Checksums, Handle, Received, Source, Status};
use ringtrain::{DType, Error, Group, JoinOptions, Rank, ReduceOp};

const PROGRAMS: u64 = 25;
/// Of messages that come from anybody: beyond those of all others, and the step is added.
const STEP_TAG: u32 = 1000;
const OPS: [ReduceOp; 4] = [ReduceOp::Sum, ReduceOp::BitXor, ReduceOp::Max, ReduceOp::Min];

/// What a rank of the world contributes to a step.
fn content(step: usize, rank: u32, count: usize) -> Vec<u64> {
    let salt = (step as u64) << 40 ^ u64::from(rank) << 34;
    (0..count as u64).map(|index| (salt ^ index).wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect()
}

fn combine(op: ReduceOp, a: u64, b: u64) -> u64 {
    match op {
        ReduceOp::Sum => a.wrapping_add(b),
        ReduceOp::BitXor => a ^ b,
        ReduceOp::Max => a.max(b),
        _ => a.min(b),
    }
}

/// x -> a x + b modulo 2^32 in one element, one after the other: associative, and does not commute.
fn after(first: u64, second: u64) -> u64 {
    let split = |one: u64| ((one >> 32) as u32, one as u32);
    let ((a, b), (c, d)) = (split(first), split(second));
    u64::from(a.wrapping_mul(c)) << 32 | u64::from(b.wrapping_mul(c).wrapping_add(d))
}

/// All of them combined, element by element, in order.
fn reduce(all: &[Vec<u64>], combine: impl Fn(u64, u64) -> u64) -> Vec<u64> {
    let (first, rest) = all.split_first().expect("a group has a rank");
    let mut result = first.clone();
    for one in rest {
        result.iter_mut().zip(one).for_each(|(own, &more)| *own = combine(*own, more));
    }
    result
}

/// An operation under way, and the comparison of its result.
type Waiting = Box<dyn FnOnce()>;

/// A rank that runs a program. What it does about blocking and waiting is its own affair, and differs from rank to rank.
struct Runner {
    own: u32,
    groups: Vec<Option<Group>>,
    rng: StdRng,
    waiting: Vec<Waiting>,
    /// The same, for the end: see [`Runner::anything`].
    last: Vec<Waiting>,
    /// Receives of anything, in their order, and what others have sent for them.
    anything: Vec<Handle<Received<u64>>>,
    expected: Vec<(u32, u32, Vec<u64>)>,
}

impl Runner {
    fn run(mut world: Group, program: &Program) {
        let own = world.rank().get();
        let twin = world.duplicate().unwrap();
        let mut runner = Self {
            own,
            groups: vec![Some(world), Some(twin)],
            rng: StdRng::seed_from_u64(program.seed << 8 | u64::from(own)),
            waiting: Vec::new(),
            last: Vec::new(),
            anything: Vec::new(),
            expected: Vec::new(),
        };
        for (index, step) in program.steps.iter().enumerate() {
            runner.step(index, step);
            if runner.rng.random_bool(0.25) && !runner.waiting.is_empty() {
                let index = runner.rng.random_range(0..runner.waiting.len());
                runner.waiting.swap_remove(index)();
            }
        }
        runner.end();
    }

    /// Waits for everything, in a random order.
    fn end(mut self) {
        self.waiting.append(&mut self.last);
        self.waiting.shuffle(&mut self.rng);
        self.waiting.into_iter().for_each(|wait| wait());
        for handle in self.anything {
            let Received { elements, status } = handle.wait().unwrap();
            // The messages of each sender come in the order in which it sent them.
            let next = self.expected.iter().position(|(from, ..)| *from == status.source.get());
            let (_, tag, expected) = self.expected.remove(next.expect("it has sent one"));
            assert_eq!(status.tag, tag, "messages of rank {} overtook each other", status.source);
            assert!(elements == expected, "the message of rank {} with tag {tag} is another", status.source);
        }
        assert!(self.expected.is_empty());
    }

    /// Looks at the result now or later, or never.
    fn finish<R: PartialEq + Debug + 'static>(&mut self, handle: Handle<R>, expected: R, what: String) {
        let check = move |result: Result<R, Error>| {
            let result = result.unwrap_or_else(|error| panic!("{what}: {error}"));
            assert!(result == expected, "{what}: the result is another");
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

    fn step(&mut self, index: usize, step: &Step) {
        match *step {
            Step::Split { parent, ref colours, ref keys } => self.split(parent, colours, keys),
            Step::Drop { group } => self.groups[group] = None,
            Step::Anything { from, to, tag, count } => self.anything(index, from, to, tag, count),
            Step::Collective { group, .. }
            | Step::Message { group, .. }
            | Step::FromAnybody { group, .. } => {
                // Taken out, so that the runner can be used beside it.
                let Some(mut found) = self.groups[group].take() else { return };
                match *step {
                    Step::Message { from, to, tag, count, .. } => {
                        self.message(index, &mut found, (from, to), tag, count);
                    }
                    Step::FromAnybody { to, count, .. } => {
                        self.messages_of_anybody(index, &mut found, to, count);
                    }
                    Step::Collective { kind, count, root, .. } => {
                        self.collective(index, &mut found, kind, count, root);
                    }
                    _ => unreachable!("steps without a group of their own"),
                }
                self.groups[group] = Some(found);
            }
        }
    }

    fn split(&mut self, parent: usize, colours: &[Option<u32>], keys: &[i64]) {
        let own = self.own as usize;
        let part = self.groups[parent].as_mut().and_then(|group| {
            let part = group.split(colours[own], keys[own]).unwrap();
            let mut members: Vec<Rank> = group
                .members()
                .iter()
                .copied()
                .filter(|rank| colours[rank.index()] == colours[own])
                .collect();
            // Of equal keys the order in the parent counts, which a stable sort keeps.
            members.sort_by_key(|rank| keys[rank.index()]);
            assert_eq!(part.is_some(), colours[own].is_some());
            part.inspect(|part| assert_eq!(part.members(), members))
        });
        self.groups.push(part);
    }

    fn message(
        &mut self,
        step: usize,
        group: &mut Group,
        (from, to): (usize, usize),
        tag: u32,
        count: usize,
    ) {
        let size = group.size().as_usize();
        let (from, to) = (Rank::new((from % size) as u32), Rank::new((to % size) as u32));
        let elements = content(step, group.members()[from.index()].get(), count);
        let what = format!("step {step}: {count} elements from {from} to {to}, tag {tag}");
        if from == to {
            return;
        }
        if group.rank() == from {
            if self.rng.random_bool(0.3) {
                group.send(&elements, to, tag).unwrap();
            } else {
                let handle = group.send_async(elements.clone(), to, tag).unwrap();
                self.finish(handle, elements, what);
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
                // Never dropped: that would withdraw it, and leave its message to a later one.
                self.waiting.push(Box::new(move || assert!(handle.wait().unwrap() == expected, "{what}")));
            }
        }
    }

    fn messages_of_anybody(&mut self, step: usize, group: &mut Group, to: usize, count: usize) {
        let to = Rank::new((to % group.size().as_usize()) as u32);
        let tag = STEP_TAG + step as u32;
        if group.rank() != to {
            let elements = content(step, self.own, count);
            let handle = group.send_async(elements.clone(), to, tag).unwrap();
            return self.finish(handle, elements, format!("step {step}: {count} elements to {to}"));
        }
        let mut missing: Vec<Rank> = group.size().ranks().filter(|&rank| rank != to).collect();
        while !missing.is_empty() {
            let mut buffer = vec![0; count];
            let status = group.receive(&mut buffer, Source::Any, tag).unwrap();
            let found = missing.iter().position(|&rank| rank == status.source);
            let from = missing.swap_remove(found.expect("each sends one"));
            assert!(buffer == content(step, group.members()[from.index()].get(), count), "step {step}");
        }
    }

    /// No rank waits for these before the end: which message a receive gets is a matter of chance, so that it may be one
    /// that is sent much later.
    fn anything(&mut self, step: usize, from: usize, to: usize, tag: u32, count: usize) {
        let twin = self.groups[TWIN].as_mut().expect("the twin is never dropped");
        if from == to {
            return;
        }
        if self.own as usize == from {
            let elements = content(step, self.own, count);
            let handle = twin.send_async(elements.clone(), Rank::new(to as u32), tag).unwrap();
            if self.rng.random_bool(0.2) {
                drop(handle);
            } else {
                self.last.push(Box::new(move || assert!(handle.wait().unwrap() == elements, "step {step}")));
            }
        } else if self.own as usize == to {
            self.anything.push(twin.receive_async(1 << 20, Source::Any, None).unwrap());
            self.expected.push((from as u32, tag, content(step, from as u32, count)));
        }
    }
}

fn check(seed: u64, adjust: impl Fn(&mut JoinOptions)) {
    // Shown if it fails.
    eprintln!("PROGRAM_SEED={seed}");
    let program = Arc::new(Program::random(seed));
    ranks::run_with(program.ranks, adjust, move |world| Runner::run(world, &program));
}

fn seeds() -> Vec<u64> {
    let number = |name| std::env::var(name).ok().map(|text| text.parse::<u64>().expect("a number"));
    match number("PROGRAM_SEED") {
        Some(seed) => vec![seed],
        None => (0..number("PROGRAM_COUNT").unwrap_or(PROGRAMS)).collect(),
    }
}

#[test]
fn random_programs() {
    for seed in seeds() {
        check(seed, |_| {});
    }
}

/// Collectives in shared memory, messages over sockets.
#[test]
fn random_programs_in_shared_memory() {
    for seed in seeds() {
        check(seed, |options| TestTransport::Shm.apply(options));
    }
}

/// Some of it in shared memory, some between hosts, the rest over sockets alone.
#[test]
fn random_programs_on_several_hosts() {
    for seed in seeds() {
        check(seed, |options| TestTransport::Hosts.apply(options));
    }
}

/// Segments of an odd length, many to a message, each with its checksum.
#[test]
fn random_programs_in_small_segments() {
    for seed in seeds() {
        check(seed, |options| {
            options.segment_bytes = 5000;
            options.checksums = Checksums::On;
        });
    }
}
