//! `--strategy ps-async` with a worker that is ten times slower than the others, and with a worker that is killed at a random
//! step.

use std::fmt;
use std::fs;
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Condvar, Mutex};

use ndarray::{ArrayView2, ArrayViewMut2};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use ringtrain::train::model::{
    BackwardPass, ForwardMode, GradientSink, InputShape, Layer, ModelSpec, OwnModel, SavedForBackward,
};
use ringtrain::train::{Config, Report, ServerSettings, SilentObserver, run};
use ringtrain::{Group, Rank};
use rustix::process::{Signal, getpid, kill_process};

use super::library::train;
use super::own_model::layers;
use super::strategies::{parse_strategy, sgd_config};
use super::util::{TEST_TIMEOUT, finish, ranks, ringrun, runs_long_tests, wait_until};

/// The number of batches of a run: 20 epochs of 12 batches.
const BATCHES: u64 = 240;

/// A function that a rank calls with the number of each batch, before the rank computes the gradient of this batch.
type BeforeStep = dyn Fn(u64) + Send + Sync;

/// A layer that returns its inputs, and calls a function in each training step.
struct CallbackLayer {
    width: usize,
    before_step: Arc<BeforeStep>,
}

impl fmt::Debug for CallbackLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CallbackLayer").field("width", &self.width).finish_non_exhaustive()
    }
}

impl Layer for CallbackLayer {
    fn inputs(&self) -> usize {
        self.width
    }

    fn outputs(&self) -> usize {
        self.width
    }

    fn forward(
        &self,
        _: &[f32],
        input: ArrayView2<'_, f32>,
        mut output: ArrayViewMut2<'_, f32>,
        _: &mut SavedForBackward,
        mode: ForwardMode<'_>,
    ) -> Result<(), String> {
        output.assign(&input);
        if let ForwardMode::Training(pass) = mode {
            (self.before_step)(pass.step.step);
        }
        Ok(())
    }

    fn backward(&self, _: &[f32], pass: BackwardPass<'_>, _: &mut GradientSink<'_>) -> Result<(), String> {
        if let Some(mut input_delta) = pass.input_delta {
            input_delta.assign(&pass.delta);
        }
        Ok(())
    }
}

/// Returns the configuration of a softmax regression on the digits, in which this rank calls `before_step`.
fn config_with_callback(before_step: impl Fn(u64) + Send + Sync + 'static) -> Config {
    let before_step: Arc<BeforeStep> = Arc::new(before_step);
    let build = move |input: InputShape, outputs| {
        let mut chain = layers(&[input.features, outputs]);
        chain.push(Arc::new(CallbackLayer { width: outputs, before_step: Arc::clone(&before_step) }));
        Ok(chain)
    };
    let model = Some(ModelSpec::Own(OwnModel::new("softmax with a callback", build)));
    Config { model, epochs: Some(20), ..sgd_config() }
}

const SLOW_WORKER: Rank = Rank::new(3);

/// The slow worker waits only until the other workers have begun this number of steps together. Without a limit, the slow
/// worker would wait at the end of the run for steps that the other workers do not take.
const SLOW_UNTIL: u64 = 210;

/// The number of steps that the fast workers have begun together.
#[derive(Default)]
struct FastSteps {
    count: Mutex<u64>,
    changed: Condvar,
}

impl FastSteps {
    /// Makes the slow worker ten times slower: before each of its steps, it waits until the two other workers have begun 20
    /// steps together.
    fn begin_step(&self, rank: Rank) {
        let mut count = self.count.lock().unwrap();
        if rank != SLOW_WORKER {
            *count += 1;
            self.changed.notify_all();
            return;
        }
        let end = (*count + 20).min(SLOW_UNTIL);
        let waited = self.changed.wait_timeout_while(count, TEST_TIMEOUT, |count| *count < end);
        assert!(!waited.unwrap().1.timed_out(), "the fast workers do not take steps");
    }
}

/// If workers waited for each other, all workers would take the same number of steps. The gradients of the slow worker are
/// about 20 updates old: the default bound of 48 accepts these gradients, and a bound of 8 does not.
#[test]
fn a_slow_worker_does_not_delay_the_others() {
    let alone = train(&config_with_callback(|_| {})).unwrap().report;
    for (text, bound) in [("ps-async", 48), ("ps-async:8", 8)] {
        let fast_steps = Arc::new(FastSteps::default());
        let mut reports = ranks::run(4, move |mut group| {
            let (rank, fast_steps) = (group.rank(), Arc::clone(&fast_steps));
            let config = config_with_callback(move |_| fast_steps.begin_step(rank));
            let config = Config { strategy: parse_strategy(text), ..config };
            run(&mut group, &config, &AtomicBool::new(false), &mut SilentObserver).unwrap().report
        });
        let report = reports.swap_remove(0);
        let server = report.parameter_server.unwrap();
        let (found, expected) = (report.test_accuracy.unwrap(), alone.test_accuracy.unwrap());
        println!("{text}: accuracy {found}, alone {expected}; {}", serde_json::to_string(&server).unwrap());
        assert!(found >= expected - 0.01, "{text}: {found}, alone {expected}");
        assert_eq!(server.updates.iter().map(|(_, count)| count).sum::<u64>(), BATCHES, "{text}");
        let slow = server.updates.iter().find(|(rank, _)| *rank == SLOW_WORKER.get()).unwrap().1;
        assert!(5 * slow < BATCHES, "{text}: {:?}", server.updates);
        assert!(
            server.staleness_max <= bound && server.staleness.len() as u64 <= bound + 1,
            "{text}: {server:?}"
        );
        if bound == 8 {
            assert!(server.dropped > 0, "{text}: {server:?}");
        } else {
            assert!(server.staleness_max >= 15, "{text}: {server:?}");
        }
    }
}

/// The variable that [`kill_a_worker`] passes to [`program_of_a_rank`]: the fields of a [`KillPlan`].
const PLAN_VARIABLE: &str = "KILLED_WORKER_PLAN";

const KILL_RANKS: u32 = 5;

/// Which worker is killed, and when.
struct KillPlan {
    /// The first ranks are servers, and the other ranks are workers.
    servers: u32,
    victim: u32,
    /// The victim is killed in its first step with this batch or a later one.
    batch: u64,
    folder: PathBuf,
}

impl KillPlan {
    fn random(seed: u64, folder: &Path) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let servers = random.random_range(1..=2);
        let victim = random.random_range(servers..KILL_RANKS);
        Self { servers, victim, batch: random.random_range(0..200), folder: folder.to_owned() }
    }

    fn to_text(&self) -> String {
        format!("{} {} {} {}", self.servers, self.victim, self.batch, self.folder.display())
    }

    fn parse(text: &str) -> Self {
        let [servers, victim, batch, folder] = text.splitn(4, ' ').collect::<Vec<_>>().try_into().unwrap();
        Self {
            servers: servers.parse().unwrap(),
            victim: victim.parse().unwrap(),
            batch: batch.parse().unwrap(),
            folder: folder.into(),
        }
    }

    fn path(&self, name: &str, rank: u32) -> PathBuf {
        self.folder.join(format!("{name}.{rank}"))
    }

    /// Kills this process if `rank` is the victim and the time has come. The first steps of all workers begin together, and the
    /// other workers wait for the kill before they are far ahead. Otherwise, on a busy machine, the run could end before.
    fn begin_step(&self, rank: u32, batch: u64) {
        let begun = self.path("begun", rank);
        if !begun.exists() {
            fs::write(begun, "").unwrap();
            wait_until("all workers begin", || {
                (self.servers..KILL_RANKS).all(|worker| self.path("begun", worker).exists())
            });
        }
        let killed = self.path("killed", self.victim);
        if rank != self.victim {
            if batch > self.batch + 30 {
                wait_until("the victim is killed", || killed.exists());
            }
        } else if batch >= self.batch {
            fs::write(killed, "").unwrap();
            kill_process(getpid(), Signal::KILL).unwrap();
        }
    }
}

/// The program that ringrun starts for each rank. If the test program runs without ringrun, this test does nothing.
#[test]
fn program_of_a_rank() {
    let Ok(plan) = std::env::var(PLAN_VARIABLE) else { return };
    let plan = KillPlan::parse(&plan);
    let mut group = Group::from_environment().unwrap();
    let rank = group.rank().get();
    let report_path = plan.path("report", rank);
    let parameter_server = ServerSettings { servers: NonZeroU32::new(plan.servers), staleness_aware: false };
    let config = Config {
        strategy: parse_strategy("ps-async"),
        parameter_server,
        ..config_with_callback(move |batch| plan.begin_step(rank, batch))
    };
    let summary = run(&mut group, &config, &AtomicBool::new(false), &mut SilentObserver).unwrap();
    fs::write(report_path, serde_json::to_string(&summary.report).unwrap()).unwrap();
    group.close();
}

/// Kills a worker with SIGKILL in a run of five ranks. The other ranks complete the run: the servers apply each batch once.
fn kill_a_worker(seed: u64) {
    let folder = tempfile::tempdir().unwrap();
    let plan = KillPlan::random(seed, folder.path());
    let program = std::env::current_exe().unwrap();
    let child =
        ringrun(&["-n", &KILL_RANKS.to_string(), "--tolerate-failures", "--", program.to_str().unwrap()])
            .args(["--exact", "slow_and_killed_workers::program_of_a_rank", "--nocapture"])
            .env(PLAN_VARIABLE, plan.to_text())
            .spawn()
            .unwrap();
    let done = finish(child);
    let text = format!("seed {seed}, {}: {}{}", plan.to_text(), done.stdout(), done.stderr());
    assert_eq!(done.code(), Some(0), "{text}");
    for rank in 0..KILL_RANKS {
        let found = fs::read_to_string(plan.path("report", rank));
        assert_eq!(found.is_err(), rank == plan.victim, "{text}");
        let Ok(report) = found.map(|report| serde_json::from_str::<Report>(&report).unwrap()) else {
            continue;
        };
        let server = report.parameter_server.as_ref().unwrap();
        assert_eq!(server.lost_workers, [plan.victim], "{text}");
        let updates: u64 = server.updates.iter().map(|(_, count)| count).sum();
        assert_eq!((updates, report.steps, report.stopped), (BATCHES, BATCHES, false), "{text}");
        assert!(report.test_accuracy.unwrap() > 0.85, "{:?}, {text}", report.test_accuracy);
    }
}

#[test]
#[ignore = "runs with tools/test --full"]
fn the_other_ranks_finish_if_a_worker_is_killed_at_a_random_step() {
    for seed in 0..if runs_long_tests() { 20 } else { 1 } {
        kill_a_worker(seed);
    }
}
