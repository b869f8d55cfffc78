//! Checks that no thread of the library polls: ranks without an operation must use almost no processor time.
//!
//! This program has only one test, because the test measures the whole process.

mod util;

use std::fs;
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use ringtrain::group::{LocalTransport, Streams};
use ringtrain::train::{ParameterServer, ParameterServerOptions};
use ringtrain::{Group, JoinOptions, NamedOptions, NamedTensors, Rank, ReduceOp, wait_all};
use rustix::time::{ClockId, clock_gettime};

use self::util::{ranks, wait_until};

/// The time for which the ranks are idle. The measurement itself uses a processor for far less than a thousandth of
/// this time.
const IDLE_TIME: Duration = Duration::from_secs(5);
/// The fraction of one core that all ranks together may use.
const CORE_FRACTION_MAX: f64 = 0.001;
/// The number of times per second that all threads together may wake up. A single thread that polls every 100 ms
/// already wakes up ten times per second.
const WAKE_UPS_MAX: f64 = 5.0;
/// The number of ranks of each job.
const RANKS: u32 = 3;

/// The settings of a job. With named tensors or a parameter server, threads of an idle job wait for a message. Without
/// these, no operation is in progress in an idle job.
#[derive(Clone, Copy)]
struct JobSettings {
    transport: LocalTransport,
    streams: u8,
    /// Whether the job has named tensors and a parameter server.
    waits_for_messages: bool,
}

const JOBS: [JobSettings; 6] = [
    JobSettings { transport: LocalTransport::Tcp, streams: 1, waits_for_messages: false },
    JobSettings { transport: LocalTransport::Tcp, streams: 1, waits_for_messages: true },
    JobSettings { transport: LocalTransport::Tcp, streams: 4, waits_for_messages: false },
    JobSettings { transport: LocalTransport::Tcp, streams: 4, waits_for_messages: true },
    JobSettings { transport: LocalTransport::Shm, streams: 1, waits_for_messages: false },
    JobSettings { transport: LocalTransport::Shm, streams: 1, waits_for_messages: true },
];

/// Returns the processor time that this process has used.
fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Returns the number of voluntary context switches of all threads. A thread makes one such switch each time it goes
/// to sleep.
fn voluntary_switches() -> u64 {
    let count = |line: &str| line.strip_prefix("voluntary_ctxt_switches:")?.trim().parse::<u64>().ok();
    thread_statuses().iter().filter_map(|status| status.lines().find_map(count)).sum()
}

/// Returns whether all threads except the calling thread sleep.
fn other_threads_sleep() -> bool {
    let is_awake = |status: &&String| !status.lines().any(|line| line.starts_with("State:\tS"));
    thread_statuses().iter().filter(is_awake).count() <= 1
}

/// Returns the text of `/proc/self/task/ID/status` for each thread of this process.
fn thread_statuses() -> Vec<String> {
    let entries = fs::read_dir("/proc/self/task").expect("/proc is mounted").flatten();
    entries.filter_map(|thread| fs::read_to_string(thread.path().join("status")).ok()).collect()
}

/// Runs every kind of operation after which a thread could wrongly continue to poll: blocking and asynchronous
/// collectives, messages, and a collective in a subgroup.
fn run_operations(group: &mut Group) {
    let mut buffer = vec![1f32; 1 << 18];
    group.all_reduce(&mut buffer, ReduceOp::Sum).expect("no rank fails");
    group.barrier().expect("no rank fails");
    let begin = |count| group.all_reduce_async(vec![1f32; count], ReduceOp::Sum).expect("no rank fails");
    let handles: Vec<_> = [16, 1 << 18].into_iter().map(begin).collect();
    wait_all(handles).expect("no rank fails");
    let (next, previous) =
        (group.size().rank_after(group.rank(), 1), group.size().rank_before(group.rank(), 1));
    let mut received = [0u64];
    group.send_receive((&[7u64], next, 0), (&mut received, previous.into(), Some(0))).expect("no rank fails");
    let colour = u32::from(group.rank() == Rank::ZERO);
    let mut subgroup = group.split(Some(colour), 0).expect("no rank fails").expect("every rank has a colour");
    subgroup.all_reduce(&mut buffer[..16], ReduceOp::Max).expect("no rank fails");
}

/// Sums a named tensor over all ranks.
fn sum_named_tensor(tensors: &NamedTensors) {
    let sum = tensors.all_reduce("gradient", vec![1f32; 1000], ReduceOp::Sum).expect("the tensor is valid");
    assert_eq!(sum.wait().expect("no rank fails")[999], RANKS as f32);
}

/// Pulls the parameter of a parameter server, on a worker.
fn pull_from_server(servers: &mut ParameterServer) {
    if !servers.is_server() {
        servers.pull(&mut [1.0]).expect("no rank fails");
    }
}

/// Starts a job. The ranks run operations, are idle between the barriers `idle_start` and `idle_end`, and then run
/// operations again.
fn start_job(
    settings: JobSettings,
    idle_start: &Arc<Barrier>,
    idle_end: &Arc<Barrier>,
) -> thread::JoinHandle<()> {
    let (idle_start, idle_end) = (Arc::clone(idle_start), Arc::clone(idle_end));
    let run_rank = move |mut group: Group| {
        run_operations(&mut group);
        let options = NamedOptions::default();
        let tensors = settings
            .waits_for_messages
            .then(|| NamedTensors::new(&mut group, options).expect("no rank fails"));
        tensors.iter().for_each(sum_named_tensor);
        let options = ParameterServerOptions::default();
        let mut servers = settings
            .waits_for_messages
            .then(|| ParameterServer::start(&mut group, &[0.0], &options).expect("no rank fails"));
        servers.iter_mut().for_each(pull_from_server);
        group.barrier().expect("no rank fails");
        idle_start.wait();
        idle_end.wait();
        tensors.iter().for_each(sum_named_tensor);
        servers.iter_mut().for_each(pull_from_server);
        group.barrier().expect("no rank fails");
        run_operations(&mut group);
    };
    let adjust = move |options: &mut JoinOptions| {
        options.transport = settings.transport;
        options.streams = Streams::new(settings.streams).expect("the number of streams is within the limit");
    };
    thread::spawn(move || {
        ranks::run_with(RANKS, adjust, run_rank);
    })
}

#[test]
fn idle_ranks_use_no_processor_time() {
    let barrier = || Arc::new(Barrier::new(JOBS.len() * RANKS as usize + 1));
    let (idle_start, idle_end) = (barrier(), barrier());
    let jobs = JOBS.map(|settings| start_job(settings, &idle_start, &idle_end));
    idle_start.wait();
    wait_until("every other thread sleeps", other_threads_sleep);
    // Count the switches before the measured interval, because counting takes more processor time than the ranks may
    // use.
    let switches_before = voluntary_switches();
    let (started, used_before) = (Instant::now(), processor_time());
    thread::sleep(IDLE_TIME);
    let (seconds, used) = (started.elapsed().as_secs_f64(), processor_time().saturating_sub(used_before));
    let switches = voluntary_switches() - switches_before;
    idle_end.wait();
    for job in jobs {
        job.join().expect("no rank panics");
    }
    let (core, wake_ups) = (used.as_secs_f64() / seconds, switches as f64 / seconds);
    println!("{:.4}% of a core, {wake_ups:.1} wake-ups per second", 100.0 * core);
    assert!(core < CORE_FRACTION_MAX, "idle ranks use {:.3}% of a core", 100.0 * core);
    assert!(wake_ups < WAKE_UPS_MAX, "idle ranks wake up {wake_ups:.1} times per second");
}
