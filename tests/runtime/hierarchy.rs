//! Tests of groups whose ranks are on several simulated hosts. The ranks use shared memory within each host and
//! sockets between hosts.

use crate::util::{ranks, runs_long_tests};
use ringtrain::group::{Algorithms, LocalTransport};
use ringtrain::types::{Algorithm, Operation};
use ringtrain::verbs::AllGather;
use ringtrain::{Group, JoinMethod, JoinOptions, Rank, ReduceOp};

/// The tested placements. A placement lists, for each rank, the number of its host. Hosts have consecutive or
/// interleaved ranks, and equal or different numbers of ranks.
const PLACEMENTS: [&[u32]; 5] =
    [&[0, 0, 1, 1], &[0, 1, 0, 1], &[0, 0, 0, 1], &[0, 1, 1, 2, 2, 2], &[0, 0, 1, 1, 2, 2, 3, 3]];
/// The number of elements of a long buffer. Between hosts, each rank transfers one slice of the buffer. Each slice
/// has more than 512 KiB, so the ranks transfer a slice in several blocks.
const LONG_COUNT: usize = 1 << 19;

fn run_with_placement<R: Send + 'static>(
    hosts: &'static [u32],
    work: impl Fn(Group) -> R + Send + Sync + 'static,
) -> Vec<R> {
    let adjust = |options: &mut JoinOptions| {
        let JoinMethod::Launched(launched) = &options.method else { unreachable!("ranks are launched") };
        options.host_id = Some(format!("host {}", hosts[launched.rank.index()]));
        options.transport = LocalTransport::Auto;
    };
    ranks::run_with(hosts.len() as u32, adjust, work)
}

fn contributed_value(rank: usize, index: usize) -> f32 {
    ((index % 1021) * 3 + rank * 7) as f32
}

fn expected_sum(ranks: usize, index: usize) -> f32 {
    (ranks * (index % 1021) * 3 + ranks * (ranks - 1) / 2 * 7) as f32
}

fn contribution(group: &Group, count: usize) -> Vec<f32> {
    (0..count).map(|index| contributed_value(group.rank().index(), index)).collect()
}

#[test]
fn collectives_of_all_lengths_are_right_on_all_placements() {
    for hosts in PLACEMENTS {
        run_with_placement(hosts, |mut group| {
            let n = group.size().as_usize();
            let is_long_too = runs_long_tests() || n == 6;
            assert_eq!(group.transport(), "shm+tcp");
            for operation in
                [Operation::AllReduce, Operation::Reduce, Operation::Broadcast, Operation::Barrier]
            {
                assert_eq!(group.algorithm(operation, 1000), Algorithm::Hierarchy);
            }
            let medium = if runs_long_tests() { 70_001 } else { 7001 };
            for count in
                [0, 1, n - 1, n, 1000, medium].into_iter().chain(is_long_too.then_some(LONG_COUNT + 13))
            {
                let mut buffer = contribution(&group, count);
                group.all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
                assert!(
                    buffer.iter().enumerate().all(|(index, &found)| found == expected_sum(n, index)),
                    "{count} elements"
                );
                let mut buffer = contribution(&group, count);
                group.all_reduce(&mut buffer, ReduceOp::Average).unwrap();
                let average = |index| expected_sum(n, index) / n as f32;
                assert!(
                    buffer.iter().enumerate().all(|(index, &found)| found == average(index)),
                    "{count} elements"
                );
                for root in [0, n / 2, n - 1] {
                    let root_rank = Rank::new(root as u32);
                    let mut buffer = contribution(&group, count);
                    group.reduce(&mut buffer, ReduceOp::Sum, root_rank).unwrap();
                    let is_sum =
                        buffer.iter().enumerate().all(|(index, &found)| found == expected_sum(n, index));
                    assert!(group.rank() != root_rank || is_sum, "{count} elements to {root}");
                    let mut buffer = contribution(&group, count);
                    group.broadcast(&mut buffer, root_rank).unwrap();
                    let is_root = |(index, &found): (usize, &f32)| found == contributed_value(root, index);
                    assert!(buffer.iter().enumerate().all(is_root), "{count} elements from {root}");
                    group.barrier().unwrap();
                }
            }
        });
    }
}

/// Hierarchical operations and direct operations between ranks run at the same time, and the test waits for the
/// operations in reverse order.
#[test]
#[ignore = "runs with tools/test --full"]
fn hierarchical_and_direct_operations_run_at_the_same_time() {
    // Without `--full`, use only the placements in which hosts have different numbers of ranks.
    for hosts in if runs_long_tests() { &PLACEMENTS[..] } else { &PLACEMENTS[2..4] } {
        run_with_placement(hosts, |mut group| {
            let n = group.size().as_usize();
            let counts = [5, LONG_COUNT, 0, 1000, 300_000, 1, LONG_COUNT / 2];
            let mut sums = Vec::new();
            let mut gathers = Vec::new();
            for &count in &counts {
                sums.push(group.all_reduce_async(contribution(&group, count), ReduceOp::Sum).unwrap());
                let part = vec![group.rank().get(); n * 3];
                gathers.push(group.call(AllGather::new()).start(part).unwrap());
                let mut flat = vec![1.5f64; 10];
                group.reduce_scatter(&mut flat, ReduceOp::Max).unwrap();
            }
            let mut blocking = contribution(&group, 12_345);
            group.all_reduce(&mut blocking, ReduceOp::Sum).unwrap();
            assert!(blocking.iter().enumerate().all(|(index, &found)| found == expected_sum(n, index)));
            for (handle, count) in sums.into_iter().zip(counts).rev() {
                let buffer = handle.wait().unwrap();
                assert_eq!(buffer.len(), count);
                assert!(
                    buffer.iter().enumerate().all(|(index, &found)| found == expected_sum(n, index)),
                    "{count} elements"
                );
            }
            for handle in gathers {
                let all = handle.wait().unwrap();
                assert!(all.iter().enumerate().all(|(index, &rank)| rank as usize == index / 3));
            }
        });
    }
}

/// An operation continues after its handle is dropped, because the other ranks need the operation.
#[test]
fn operations_complete_after_their_handles_are_dropped() {
    run_with_placement(&[0, 0, 1, 1], |mut group| {
        for _ in 0..20 {
            drop(group.all_reduce_async(contribution(&group, 100_000), ReduceOp::Sum).unwrap());
        }
        group.barrier().unwrap();
    });
}

#[test]
#[ignore = "runs with tools/test --full"]
fn all_ranks_get_the_same_bits() {
    let noise = |rank: Rank, index: usize| (index as f32 * 0.37 + rank.get() as f32).sin() * 1e3;
    for hosts in PLACEMENTS {
        let results = run_with_placement(hosts, move |mut group| {
            let mut buffer: Vec<f32> = (0..if runs_long_tests() { 600_000 } else { 200_003 })
                .map(|index| noise(group.rank(), index))
                .collect();
            group.all_reduce(&mut buffer, ReduceOp::Sum).unwrap();
            buffer.into_iter().map(f32::to_bits).collect::<Vec<u32>>()
        });
        assert!(results.windows(2).all(|pair| pair[0] == pair[1]));
    }
}

/// The groups consist of all ranks of one host, of one rank of each host, or of three ranks on two hosts.
#[test]
fn groups_use_the_transport_that_their_hosts_allow() {
    run_with_placement(&[0, 0, 1, 1], |mut world| {
        let rank = world.rank().get();
        let mut host = world.split(Some(rank / 2), 0).unwrap().unwrap();
        let mut column = world.split(Some(rank % 2), 0).unwrap().unwrap();
        let mut three_ranks = world.split((rank != 3).then_some(0), -i64::from(rank)).unwrap();
        assert_eq!((host.transport(), column.transport()), ("shm", "tcp"));
        for _ in 0..3 {
            let mut one = [rank];
            host.all_reduce(&mut one, ReduceOp::Sum).unwrap();
            column.all_reduce(&mut one, ReduceOp::Sum).unwrap();
            assert_eq!(one, [6]);
            if let Some(three_ranks) = &mut three_ranks {
                assert_eq!(three_ranks.transport(), "shm+tcp");
                let mut one = vec![rank; 100_000];
                three_ranks.all_reduce(&mut one, ReduceOp::Sum).unwrap();
                assert!(one.iter().all(|&sum| sum == 3));
            }
        }
        world.duplicate().unwrap().barrier().unwrap();
    });
}

/// If the options name an algorithm, operations use this algorithm, unless it is impossible with this transport or
/// placement of the ranks.
#[test]
fn requested_algorithms_are_used_where_they_are_possible() {
    let run_with_options = |transport, algorithms: &str, hosts: [u32; 3]| {
        let algorithms: Algorithms = algorithms.parse().unwrap();
        let adjust = move |options: &mut JoinOptions| {
            let JoinMethod::Launched(launched) = &options.method else { unreachable!("ranks are launched") };
            options.host_id = Some(hosts[launched.rank.index()].to_string());
            options.transport = transport;
            options.algorithms = algorithms.clone();
        };
        let found = ranks::run_with(3, adjust, |mut group| {
            let mut one = [1u8; 100];
            group.all_reduce(&mut one, ReduceOp::Sum).unwrap();
            assert_eq!(one, [3; 100]);
            (group.transport(), group.algorithm(Operation::AllReduce, 100))
        });
        found[0]
    };
    let (auto, shm, tcp) = (LocalTransport::Auto, LocalTransport::Shm, LocalTransport::Tcp);
    assert_eq!(run_with_options(auto, "auto", [0, 0, 1]), ("shm+tcp", Algorithm::Hierarchy));
    assert_eq!(run_with_options(auto, "ring", [0, 0, 1]), ("shm+tcp", Algorithm::Ring));
    assert_eq!(run_with_options(shm, "hierarchy", [0, 0, 1]), ("shm+tcp", Algorithm::Hierarchy));
    assert_eq!(run_with_options(tcp, "ring:0-10;hierarchy:0-max", [0, 0, 1]).0, "tcp");
    assert_eq!(run_with_options(shm, "auto", [0, 1, 2]).0, "tcp");
    assert_eq!(run_with_options(auto, "hierarchy", [0, 0, 0]).0, "shm");
}
