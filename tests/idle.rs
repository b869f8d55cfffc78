//! A rank that has nothing to do does nothing: no thread of the library looks for work again and again.
//!
//! All is in one test, because what is measured is the whole process.

mod util;

use std::fs;
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use ringtrain::group::{LocalTransport, Streams};
use ringtrain::{Group, JoinOptions, NamedOptions, NamedTensors, Rank, ReduceOp, wait_all};
use rustix::time::{ClockId, clock_gettime};

use self::util::{ranks, wait_until};

/// How long nothing is done: a thousandth of it is far more than the measurement itself takes.
const IDLE: Duration = Duration::from_secs(5);
/// The part of one core that all ranks together may use.
const CORE_MAX: f64 = 0.001;
/// How often all threads together may wake up in a second. Who looks every 100 ms does so ten times.
const WAKE_UPS_MAX: f64 = 5.0;
/// Ranks of each job.
const RANKS: u32 = 3;

/// A job. With tensors by name its progress thread always has a receive to attend to, without them nothing.
#[derive(Clone, Copy)]
struct Kind {
    transport: LocalTransport,
    streams: u8,
    has_tensors: bool,
}

const KINDS: [Kind; 6] = [
    Kind { transport: LocalTransport::Tcp, streams: 1, has_tensors: false },
    Kind { transport: LocalTransport::Tcp, streams: 1, has_tensors: true },
    Kind { transport: LocalTransport::Tcp, streams: 4, has_tensors: false },
    Kind { transport: LocalTransport::Tcp, streams: 4, has_tensors: true },
    Kind { transport: LocalTransport::Shm, streams: 1, has_tensors: false },
    Kind { transport: LocalTransport::Shm, streams: 1, has_tensors: true },
];

/// The processors' time that this process has used.
fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// How often the threads of this process have gone to sleep of their own accord, and so woken up.
fn switches() -> u64 {
    let count = |line: &str| line.strip_prefix("voluntary_ctxt_switches:")?.trim().parse::<u64>().ok();
    threads().iter().filter_map(|status| status.lines().find_map(count)).sum()
}

/// Whether the thread that asks is the only one that does not sleep.
fn all_sleep() -> bool {
    let is_awake = |status: &&String| !status.lines().any(|line| line.starts_with("State:\tS"));
    threads().iter().filter(is_awake).count() <= 1
}

/// What the kernel says of each thread of this process.
fn threads() -> Vec<String> {
    let entries = fs::read_dir("/proc/self/task").expect("/proc is mounted").flatten();
    entries.filter_map(|thread| fs::read_to_string(thread.path().join("status")).ok()).collect()
}

/// One of everything that could leave something behind: blocking and asynchronous collectives, messages, groups of some of
/// the ranks.
fn work(group: &mut Group) {
    let mut buffer = vec![1f32; 1 << 18];
    group.all_reduce(&mut buffer, ReduceOp::Sum).expect("all are there");
    group.barrier().expect("all are there");
    let begin = |count| group.all_reduce_async(vec![1f32; count], ReduceOp::Sum).expect("all are there");
    let begun: Vec<_> = [16, 1 << 18].into_iter().map(begin).collect();
    wait_all(begun).expect("all are there");
    let (next, previous) = (group.size().after(group.rank(), 1), group.size().before(group.rank(), 1));
    let mut received = [0u64];
    group.send_receive((&[7u64], next, 0), (&mut received, previous.into(), Some(0))).expect("all are there");
    let colour = u32::from(group.rank() == Rank::ZERO);
    let mut part = group.split(Some(colour), 0).expect("all are there").expect("every rank has a colour");
    part.all_reduce(&mut buffer[..16], ReduceOp::Max).expect("all are there");
}

/// Sums a tensor by its name.
fn sum_by_name(tensors: &NamedTensors) {
    let sum = tensors.all_reduce("gradient", vec![1f32; 1000], ReduceOp::Sum).expect("a sound tensor");
    assert_eq!(sum.wait().expect("all are there")[999], RANKS as f32);
}

/// Starts a job whose ranks work, meet at `before`, do nothing until `after`, work again and end.
fn job(kind: Kind, before: &Arc<Barrier>, after: &Arc<Barrier>) -> thread::JoinHandle<()> {
    let (before, after) = (Arc::clone(before), Arc::clone(after));
    let rank = move |mut group: Group| {
        work(&mut group);
        let options = NamedOptions::default();
        let tensors =
            kind.has_tensors.then(|| NamedTensors::new(&mut group, options).expect("all are there"));
        tensors.iter().for_each(sum_by_name);
        group.barrier().expect("all are there");
        before.wait();
        after.wait();
        tensors.iter().for_each(sum_by_name);
        work(&mut group);
    };
    let adjust = move |options: &mut JoinOptions| {
        options.transport = kind.transport;
        options.streams = Streams::new(kind.streams).expect("a link may have so many");
    };
    thread::spawn(move || {
        ranks::run_with(RANKS, adjust, rank);
    })
}

#[test]
fn ranks_without_an_operation_use_no_processor() {
    let meeting = || Arc::new(Barrier::new(KINDS.len() * RANKS as usize + 1));
    let (before, after) = (meeting(), meeting());
    let jobs = KINDS.map(|kind| job(kind, &before, &after));
    before.wait();
    wait_until("every thread has gone to sleep", all_sleep);
    // What counts the switches takes longer than all ranks may, so it is outside.
    let switches_before = switches();
    let (started, used_before) = (Instant::now(), processor_time());
    thread::sleep(IDLE);
    let (seconds, used) = (started.elapsed().as_secs_f64(), processor_time().saturating_sub(used_before));
    let switched = switches() - switches_before;
    after.wait();
    for job in jobs {
        job.join().expect("the job ends well");
    }
    let (core, wake_ups) = (used.as_secs_f64() / seconds, switched as f64 / seconds);
    println!("{:.4}% of a core, {wake_ups:.1} wake-ups a second", 100.0 * core);
    assert!(core < CORE_MAX, "idle ranks use {:.3}% of a core", 100.0 * core);
    assert!(wake_ups < WAKE_UPS_MAX, "idle ranks wake up {wake_ups:.1} times a second");
}
