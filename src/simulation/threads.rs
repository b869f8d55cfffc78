//! Runs the code with which the threads of a rank share a core (`runtime/driver/threads.rs`, `runtime/driver/core_lock.rs`) in
//! simulated threads of the crate `shuttle`, which chooses the thread that runs next. The core, its sockets and the clock are
//! simulated. If a wake-up is lost, all threads sleep, and `shuttle` reports a deadlock.

mod core;
mod program;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, TryLockError, Weak};
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use shuttle::scheduler::{PctScheduler, RandomScheduler, Scheduler};
use shuttle::sync::atomic::AtomicUsize;
use shuttle::sync::{Condvar, Mutex, MutexGuard};
use shuttle::thread::{self, JoinHandle};
use shuttle::{Config, MaxSteps, Runner};

use self::core::{Frame, SimCore, WorldState};
use self::program::{AfterSubmit, LAST_TICK, SimEnding, SimOperation, ThreadAction, ThreadProgram};
use super::{network_count_divisor, seeds};
use crate::engine::Timestamp;
use crate::runtime::driver::{
    CoreGuard, CoreLock, DrivenCore as _, PollProgress, Primitives, ThreadedDriver,
};

/// Threads that need more steps make no progress.
const STEPS_MAX: usize = 50_000;
/// The stack of a simulated thread in bytes. The default is too small for a build without optimisation.
const STACK_BYTES: usize = 256 << 10;
/// The number of schedules of each seed and each scheduler.
const SCHEDULES: usize = 10;
/// How often the scheduler `PctScheduler` changes the priorities of threads in a run.
const PRIORITY_CHANGES: usize = 4;

/// The locks and condition variables of `shuttle`, which may let another thread run at each access.
struct ShuttlePrimitives;

/// A condition variable. The clock wakes only the threads that wait with a timeout.
#[derive(Default)]
struct SimCondvar {
    without_timeout: Condvar,
    with_timeout: Condvar,
}

impl Primitives for ShuttlePrimitives {
    type Mutex<T: 'static> = Mutex<T>;
    type Guard<'a, T: 'static> = MutexGuard<'a, T>;
    type Condvar = SimCondvar;
    type Counter = AtomicUsize;

    fn new_mutex<T: 'static>(value: T) -> Mutex<T> {
        Mutex::new(value)
    }

    fn lock<T: 'static>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
        mutex.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn try_lock<T: 'static>(mutex: &Mutex<T>) -> Option<MutexGuard<'_, T>> {
        match mutex.try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(error)) => Some(error.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    fn wait<'a, T: 'static>(
        condvar: &SimCondvar,
        guard: Self::Guard<'a, T>,
        timeout: Option<Duration>,
    ) -> Self::Guard<'a, T> {
        // The clock may have stopped, so it would not wake the thread.
        if timeout == Some(Duration::ZERO) {
            return guard;
        }
        let condvar = if timeout.is_some() { &condvar.with_timeout } else { &condvar.without_timeout };
        condvar.wait(guard).unwrap_or_else(PoisonError::into_inner)
    }

    fn notify_all(condvar: &SimCondvar) {
        condvar.without_timeout.notify_all();
        condvar.with_timeout.notify_all();
    }

    fn add(counter: &AtomicUsize, count: usize) {
        counter.fetch_add(count, Ordering::SeqCst);
    }

    fn subtract(counter: &AtomicUsize, count: usize) {
        let before = counter.fetch_sub(count, Ordering::SeqCst);
        assert!(before >= count, "a thread is counted that does not wait for the lock");
    }

    fn get(counter: &AtomicUsize) -> usize {
        counter.load(Ordering::SeqCst)
    }

    fn yield_now() {
        thread::yield_now();
    }
}

/// What is outside the core: sockets, shared memory, and the clock.
struct World {
    state: Mutex<WorldState>,
    /// Signals the thread that waits for the sockets.
    sockets_changed: Condvar,
    /// Signals the peers.
    requests_changed: Condvar,
    /// Signals that an operation of the core has ended.
    completed: Condvar,
    /// The time in seconds. It changes only while the core and the state are locked.
    now: AtomicU64,
}

impl World {
    fn lock(&self) -> MutexGuard<'_, WorldState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> Timestamp {
        Duration::from_secs(self.now.load(Ordering::Relaxed))
    }

    /// Adds a frame to the data that have arrived on a socket.
    fn deliver(&self, state: &mut WorldState, frame: Frame) {
        state.frames.push_back(frame);
        self.sockets_changed.notify_all();
    }

    /// Answers the requests of this rank until all are answered.
    fn run_peer(&self, operations: &[SimOperation], mut random: StdRng) {
        let mut state = self.lock();
        while state.unanswered > 0 {
            let can_answer = |(id, _): &(usize, usize)| {
                operations[*id].needs.is_none_or(|needed| state.requested.contains(&needed))
            };
            let possible: Vec<usize> =
                (0..state.requests.len()).filter(|&index| can_answer(&state.requests[index])).collect();
            if possible.is_empty() {
                state = self.requests_changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            }
            let index = possible[random.random_range(0..possible.len())];
            let (id, parts) = state.requests.swap_remove(index);
            let is_whole = parts == 1 || operations[id].ending == SimEnding::Post;
            let answer = is_whole.then_some(id);
            match operations[id].ending {
                SimEnding::Socket => self.deliver(&mut state, Frame::Answer(answer)),
                SimEnding::Queue => {
                    state.entries.push_back(answer);
                    if std::mem::take(&mut state.is_asleep) {
                        self.deliver(&mut state, Frame::WakeByte);
                    }
                }
                SimEnding::Post => {
                    state.posted.insert(id);
                    if state.asleep.remove(&id) {
                        self.deliver(&mut state, Frame::Wake);
                    }
                }
                SimEnding::Deadline(_) | SimEnding::Never => {}
            }
            if is_whole {
                state.unanswered -= 1;
            } else {
                state.requests.push((id, parts - 1));
            }
            self.requests_changed.notify_all();
            drop(state);
            state = self.lock();
        }
    }
}

/// A simulated rank. Its threads share it as the threads of a job share `DriverShared`.
struct SimDriver {
    core: CoreLock<SimCore, ShuttlePrimitives>,
    world: Arc<World>,
}

type LockedSimCore<'a> = CoreGuard<'a, SimCore, ShuttlePrimitives>;

/// How a thread waits for events.
enum SimWait {
    /// Looks once at the posts and the sockets.
    Spin,
    Sleep {
        until: Option<Timestamp>,
    },
}

/// Whether there may be work, and whether the sockets have data.
struct SimFound {
    has_work: bool,
    is_readable: bool,
}

impl ThreadedDriver for SimDriver {
    type Core = SimCore;
    type Primitives = ShuttlePrimitives;
    type Wait = SimWait;
    type Found = SimFound;

    fn core(&self) -> &CoreLock<SimCore, ShuttlePrimitives> {
        &self.core
    }

    fn now(&self) -> Timestamp {
        self.world.now()
    }

    fn begin_spin(&self, core: &SimCore) -> Option<SimWait> {
        core.waits_for_posts_without_background().then_some(SimWait::Spin)
    }

    fn begin_sleep(&self, _core: &SimCore, timeout: Option<Duration>) -> SimWait {
        SimWait::Sleep { until: timeout.map(|timeout| self.now() + timeout) }
    }

    fn wait_for_events(&self, wait: SimWait) -> SimFound {
        let mut state = self.world.lock();
        assert!(!state.has_waiter, "two threads wait for the sockets");
        state.has_waiter = true;
        match wait {
            SimWait::Spin => {
                drop(state);
                thread::yield_now();
                state = self.world.lock();
            }
            SimWait::Sleep { until } => {
                // A peer wakes this rank only while its flag is set.
                let may_sleep = state.entries.is_empty();
                state.is_asleep = may_sleep;
                while may_sleep
                    && state.frames.is_empty()
                    && !state.is_interrupted
                    && until.is_none_or(|until| self.world.now() < until)
                {
                    let waited = self.world.sockets_changed.wait(state);
                    state = waited.unwrap_or_else(PoisonError::into_inner);
                }
                state.is_asleep = false;
            }
        }
        state.has_waiter = false;
        let is_readable = !state.frames.is_empty();
        let has_work = std::mem::take(&mut state.is_interrupted) || is_readable || !state.entries.is_empty();
        SimFound { has_work, is_readable }
    }

    fn handle_events(&self, core: &mut SimCore, found: SimFound) -> bool {
        core.handle_events(found.is_readable);
        found.has_work
    }

    fn interrupt_wait(&self) {
        self.world.lock().is_interrupted = true;
        self.world.sockets_changed.notify_all();
    }

    fn measure_wait<R>(&self, wait: impl FnOnce() -> R) -> R {
        wait()
    }
}

impl SimDriver {
    fn new(program: &ThreadProgram) -> Arc<Self> {
        let unanswered = program.operations.iter().filter(|operation| operation.is_answered()).count();
        let world = Arc::new(World {
            state: Mutex::new(WorldState { unanswered, ..WorldState::default() }),
            sockets_changed: Condvar::new(),
            requests_changed: Condvar::new(),
            completed: Condvar::new(),
            now: AtomicU64::new(0),
        });
        Arc::new_cyclic(|driver: &Weak<Self>| {
            let (operations, reads_unserved) = (Arc::clone(&program.operations), program.reads_unserved);
            let core = SimCore::new(Arc::clone(&world), operations, reads_unserved, Weak::clone(driver));
            Self { core: CoreLock::new(core), world }
        })
    }

    fn begin<'a>(&'a self, mut core: LockedSimCore<'a>, id: usize, is_awaited: bool) -> LockedSimCore<'a> {
        core.begin(id, is_awaited);
        self.announce_operation(&core, is_awaited);
        core
    }

    /// Waits for the result of an asynchronous operation, at most until the time `until`. Returns whether it has ended.
    fn wait(&self, id: usize, until: Option<Timestamp>) -> bool {
        let (core, ended, found) = self.drive_until(self.lock(), &[id], until, |core| core.take_result(id));
        drop(core);
        let is_late = until.is_some_and(|until| ended >= until);
        assert!(found.is_some() || is_late, "a thread stops waiting too early");
        found.is_some()
    }

    /// Does the same as `Driver::test`.
    fn test(&self, id: usize) {
        let mut core = self.lock();
        if core.is_active(id) && self.poll(&mut core, self.now()) == PollProgress::Progress {
            self.wake_all(&mut core);
        }
        drop(core);
        if self.core.is_contended() {
            thread::yield_now();
        }
    }

    fn run(&self, action: ThreadAction) {
        match action {
            ThreadAction::Block(id) => {
                let core = self.begin(self.lock(), id, true);
                let (_core, _, found) = self.drive_until(core, &[], None, |core| core.take_result(id));
                assert!(found.is_some(), "a thread without a limit stops waiting");
            }
            ThreadAction::Submit(id, after) => {
                drop(self.begin(self.lock(), id, false));
                let has_ended = match after {
                    AfterSubmit::Drop => return,
                    AfterSubmit::Wait => false,
                    AfterSubmit::WaitUntil(until) => {
                        self.wait(id, Some(until));
                        return;
                    }
                    AfterSubmit::WaitLonger(until) => self.wait(id, Some(until)),
                    AfterSubmit::Test(count) => {
                        for _ in 0..count {
                            self.test(id);
                        }
                        return;
                    }
                };
                assert!(has_ended || self.wait(id, None));
            }
            ThreadAction::WaitAny(ids) => {
                for id in ids {
                    drop(self.begin(self.lock(), id, false));
                }
                let has_any_ended =
                    |core: &mut SimCore| ids.iter().any(|&id| !core.is_active(id)).then_some(());
                drop(self.drive_until(self.lock(), &ids, None, has_any_ended));
            }
        }
    }

    /// Lets the time pass. Wakes the threads that wait with a timeout.
    fn run_clock(&self) {
        for tick in 1..=LAST_TICK {
            thread::yield_now();
            let core = self.lock();
            let state = self.world.lock();
            self.world.now.store(tick, Ordering::Relaxed);
            self.world.sockets_changed.notify_all();
            self.core.changed.with_timeout.notify_all();
            drop((state, core));
        }
    }
}

/// Starts a simulated thread. If it waits for ever, the error of `shuttle` has its name.
fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> JoinHandle<()> {
    thread::Builder::new().name(name.into()).spawn(work).expect("a simulated thread always starts")
}

/// Runs the threads of a program once, with the schedule of the current execution.
fn run_program(program: &ThreadProgram, seed: u64) {
    let driver = SimDriver::new(program);
    let ending = program.operations.iter().filter(|operation| operation.ending != SimEnding::Never).count();
    let mut threads = Vec::new();
    for actions in program.actions.clone() {
        let driver = Arc::clone(&driver);
        threads.push(spawn("program", move || actions.into_iter().for_each(|action| driver.run(action))));
    }
    for peer in 0..program.peers {
        let (world, operations) = (Arc::clone(&driver.world), Arc::clone(&program.operations));
        let random = StdRng::seed_from_u64(seed ^ (1 + peer as u64));
        threads.push(spawn("peer", move || world.run_peer(&operations, random)));
    }
    if program.has_clock {
        let driver = Arc::clone(&driver);
        threads.push(spawn("clock", move || driver.run_clock()));
    }
    let progress_driver = Arc::clone(&driver);
    let progress_thread = spawn("progress", move || progress_driver.run_progress_thread());
    for thread in threads {
        thread.join().expect("a panic of a thread ends the execution");
    }
    // The progress thread completes the operations whose handles were dropped, without the help of this thread.
    let mut state = driver.world.lock();
    while state.completed < ending || state.undropped > 0 {
        state = driver.world.completed.wait(state).unwrap_or_else(PoisonError::into_inner);
    }
    drop(state);
    driver.end_progress_thread();
    progress_thread.join().expect("a panic of a thread ends the execution");
    assert!(!driver.core.is_contended(), "a thread is counted that has ended");
}

/// Runs the program of a seed with several schedules.
pub(super) fn check_threads(seed: u64) {
    check_program(&Arc::new(ThreadProgram::new(seed)), seed);
}

/// Runs a program with several schedules, which the seed determines.
fn check_program(program: &Arc<ThreadProgram>, seed: u64) {
    let run = |scheduler: Box<dyn Scheduler + Send>| {
        let mut config = Config::new();
        config.stack_size = STACK_BYTES;
        config.max_steps = MaxSteps::FailAfter(STEPS_MAX);
        let program = Arc::clone(program);
        Runner::new(scheduler, config).run(move || run_program(&program, seed));
    };
    let result = catch_unwind(AssertUnwindSafe(|| {
        run(Box::new(RandomScheduler::new_from_seed(seed, SCHEDULES)));
        run(Box::new(PctScheduler::new_from_seed(seed, PRIORITY_CHANGES, SCHEDULES)));
    }));
    if let Err(panic) = result {
        eprintln!("the threads of seed {seed} fail: {program:?}");
        resume_unwind(panic);
    }
}

/// Regression test: before the fix, a thread that had spun for a post slept longer than until its time limit, by the time of the
/// spin.
#[test]
#[cfg_attr(miri, ignore = "Miri does not support the stacks of simulated threads")]
fn a_thread_stops_waiting_at_its_time_limit_after_it_has_spun() {
    // The peer posts only when the second operation has begun, after the thread has stopped waiting for the first one.
    let operation = |ending, needs| SimOperation { ending, needs, parts: 1 };
    let last = AfterSubmit::WaitUntil(Duration::from_secs(LAST_TICK));
    let program = Arc::new(ThreadProgram {
        operations: [operation(SimEnding::Post, Some(1)), operation(SimEnding::Socket, None)].into(),
        actions: vec![vec![ThreadAction::Submit(0, last), ThreadAction::Block(1)]],
        peers: 1,
        has_clock: true,
        reads_unserved: false,
    });
    (0..20).for_each(|seed| check_program(&program, seed));
}

#[test]
#[cfg_attr(miri, ignore = "Miri does not support the stacks of simulated threads")]
fn no_wake_up_of_a_thread_is_lost() {
    // 100 seeds in long tests, and 50 in short ones.
    seeds(100 * network_count_divisor().min(25)).for_each(check_threads);
}
