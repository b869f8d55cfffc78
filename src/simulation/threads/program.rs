//! What the threads of a simulated rank do.

use std::sync::Arc;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

use crate::engine::Timestamp;

/// The time at which the clock stops.
pub(super) const LAST_TICK: u64 = 3;

/// How an operation of the simulated core ends.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) enum SimEnding {
    /// A peer answers over a socket.
    Socket,
    /// A peer answers through a queue in shared memory. If this rank sleeps, the peer sends a wake byte over a socket.
    Queue,
    /// A peer posts in shared memory. If this rank sleeps, the peer sends a wake frame over a socket.
    Post,
    /// The operation fails at this time.
    Deadline(Timestamp),
    Never,
}

/// An operation.
#[derive(Clone, Copy, Debug)]
pub(super) struct SimOperation {
    pub(super) ending: SimEnding,
    /// A peer answers only when this rank has also sent the request of this operation.
    pub(super) needs: Option<usize>,
    /// The number of parts of an answer over a socket or through a queue. Only the last part ends the operation.
    pub(super) parts: usize,
}

impl SimOperation {
    pub(super) fn is_answered(&self) -> bool {
        !matches!(self.ending, SimEnding::Deadline(_) | SimEnding::Never)
    }
}

/// What a thread of the program does.
#[derive(Clone, Copy, Debug)]
pub(super) enum ThreadAction {
    /// Runs an operation, and waits for it.
    Block(usize),
    Submit(usize, AfterSubmit),
    /// Submits two operations, waits until any of them has ended, and drops the handles.
    WaitAny([usize; 2]),
}

/// What a thread does after it has begun an asynchronous operation.
#[derive(Clone, Copy, Debug)]
pub(super) enum AfterSubmit {
    Wait,
    /// Waits until this time, and then without a limit.
    WaitLonger(Timestamp),
    /// Waits until this time, and then drops the handle.
    WaitUntil(Timestamp),
    /// Asks this many times whether the operation has ended, and then drops the handle.
    Test(usize),
    /// Drops the handle. Only the progress thread completes the operation.
    Drop,
}

/// What the threads of a rank do.
#[derive(Debug)]
pub(super) struct ThreadProgram {
    pub(super) operations: Arc<[SimOperation]>,
    pub(super) actions: Vec<Vec<ThreadAction>>,
    pub(super) peers: usize,
    pub(super) has_clock: bool,
    /// Whether the core reads sockets whose events no thread has handled.
    pub(super) reads_unserved: bool,
}

impl ThreadProgram {
    pub(super) fn new(seed: u64) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let has_clock = random.random_bool(0.3);
        let mut operations = Vec::new();
        let mut actions = Vec::new();
        let mut of_first_thread = 0;
        for thread in 0..random.random_range(1..=3) {
            let count = random.random_range(1..=3);
            let mut action = |_| random_action(&mut random, has_clock, &mut operations);
            actions.push((0..count).map(&mut action).collect());
            if thread == 0 {
                of_first_thread = operations.len();
            }
        }
        // Only operations of one thread need operations of other threads, so that the operations do not need each other.
        let others = of_first_thread..operations.len();
        for operation in &mut operations[..of_first_thread] {
            operation.needs =
                (!others.is_empty() && random.random_bool(0.5)).then(|| random.random_range(others.clone()));
        }
        // In some programs most answers are entries of queues, and threads often read the wake bytes for other threads.
        let has_only_queues = random.random_bool(0.4);
        for operation in
            operations.iter_mut().filter(|operation| has_only_queues && operation.ending == SimEnding::Socket)
        {
            operation.ending = SimEnding::Queue;
        }
        Self {
            operations: operations.into(),
            actions,
            peers: random.random_range(1..=2),
            has_clock,
            reads_unserved: has_only_queues || random.random_bool(0.5),
        }
    }
}

fn random_action(random: &mut StdRng, has_clock: bool, operations: &mut Vec<SimOperation>) -> ThreadAction {
    let random_time = |random: &mut StdRng| Duration::from_secs(random.random_range(0..=LAST_TICK));
    let mut operation = |random: &mut StdRng| {
        let ending = match random.random_range(0..if has_clock { 8 } else { 7 }) {
            0..2 => SimEnding::Socket,
            2..5 => SimEnding::Queue,
            5..7 => SimEnding::Post,
            _ => SimEnding::Deadline(random_time(random)),
        };
        operations.push(SimOperation { ending, needs: None, parts: random.random_range(1..=4) });
        operations.len() - 1
    };
    match random.random_range(0..8) {
        0..3 => ThreadAction::Block(operation(random)),
        3 => ThreadAction::WaitAny([operation(random), operation(random)]),
        _ => {
            let id = operation(random);
            let after = match random.random_range(0..6) {
                0 => AfterSubmit::Wait,
                1 if has_clock => AfterSubmit::WaitLonger(random_time(random)),
                2 if has_clock => AfterSubmit::WaitUntil(random_time(random)),
                1..4 => AfterSubmit::Test(random.random_range(1..10)),
                _ => AfterSubmit::Drop,
            };
            if matches!(after, AfterSubmit::Drop) && random.random_bool(0.2) {
                operations[id].ending = SimEnding::Never;
            }
            ThreadAction::Submit(id, after)
        }
    }
}
