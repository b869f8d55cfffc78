//! Proves schedules without bytes: each element of each rank's buffer is the set of ranks that have contributed to it.

use std::collections::VecDeque;
use std::ops::{Range, RangeInclusive};

use rand::rngs::StdRng;
use rand::seq::SliceRandom as _;
use rand::{RngExt as _, SeedableRng as _};

use super::partition::{chunk, segment};
use super::{Action, After, Schedule, all_gather, all_reduce, barrier, broadcast, reduce_scatter};
use crate::types::{Rank, WorldSize};

/// The ranks that have contributed to an element, a bit each.
type Contributions = u64;

/// All ranks' buffers and the messages between them.
struct World {
    ranks: Vec<RankState>,
    /// Messages in flight from each rank to each rank, in order.
    links: Vec<Vec<VecDeque<Message>>>,
    segment: usize,
}

struct RankState {
    schedule: Schedule,
    /// How many ranks it exchanges messages with.
    peers: usize,
    /// All steps before this one are done.
    first_open: usize,
    buffer: Vec<Contributions>,
    /// Elements whose reduction has been finished, which must happen once.
    finished: Vec<u32>,
    /// Elements sent and applied, by step; `None` until the (perhaps empty) range is done with at least one message.
    sent: Vec<Progress>,
    applied: Vec<Progress>,
}

#[derive(Clone, Copy, Default)]
struct Progress {
    elements: usize,
    done: bool,
}

struct Message {
    range: Range<usize>,
    values: Vec<Contributions>,
}

impl RankState {
    fn skip_finished_steps(&mut self) {
        while let Some(step) = self.schedule.steps.get(self.first_open) {
            let sent = step.send.is_none() || self.sent[self.first_open].done;
            let applied = step.receive.is_none() || self.applied[self.first_open].done;
            if !(sent && applied) {
                break;
            }
            self.first_open += 1;
        }
    }
}

/// Which of the events that could happen next does.
enum Order {
    /// Each rank in turn goes as far as it can.
    Eager,
    /// The ranks take turns from the last to the first, a move each.
    Lockstep,
    /// By lot.
    Random(Box<StdRng>),
}

impl Order {
    fn ranks(&mut self, n: usize) -> Vec<usize> {
        let mut ranks: Vec<usize> = (0..n).collect();
        match self {
            Self::Eager => {}
            Self::Lockstep => ranks.reverse(),
            Self::Random(random) => ranks.shuffle(random),
        }
        ranks
    }

    fn moves_in_a_row(&mut self) -> usize {
        match self {
            Self::Eager => usize::MAX,
            Self::Lockstep => 1,
            Self::Random(random) => random.random_range(1..4),
        }
    }

    fn choose(&mut self, moves: usize) -> usize {
        match self {
            Self::Random(random) if moves > 0 => random.random_range(0..moves),
            _ => 0,
        }
    }
}

#[derive(Clone, Copy)]
enum Move {
    Send { rank: usize, step: usize },
    Receive { rank: usize, step: usize },
}

impl World {
    fn new(schedules: Vec<Schedule>, buffers: Vec<Vec<Contributions>>, segment: usize) -> Self {
        let n = schedules.len();
        let ranks = schedules
            .into_iter()
            .zip(buffers)
            .map(|(schedule, buffer)| RankState {
                peers: schedule.peers().len(),
                first_open: 0,
                finished: vec![0; buffer.len()],
                sent: vec![Progress::default(); schedule.steps.len()],
                applied: vec![Progress::default(); schedule.steps.len()],
                schedule,
                buffer,
            })
            .collect();
        Self { ranks, links: (0..n).map(|_| (0..n).map(|_| VecDeque::new()).collect()).collect(), segment }
    }

    fn satisfied(&self, rank: usize, after: Option<After>, range: &Range<usize>, upto: usize) -> bool {
        let Some(After(step)) = after else { return true };
        let state = &self.ranks[rank];
        let awaited = state.schedule.steps[step].receive.as_ref().expect("a dependency is on a receive");
        let progress = state.applied[step];
        progress.done || (awaited.range == *range && !range.is_empty() && progress.elements >= upto)
    }

    /// The next message to each peer and from each peer that `rank` could move now.
    fn moves(&mut self, rank: usize) -> Vec<Move> {
        self.ranks[rank].skip_finished_steps();
        let mut moves = Vec::new();
        let (mut receivers_seen, mut senders_seen) = (0u64, 0u64);
        let state = &self.ranks[rank];
        let peers = state.peers;
        for (step, s) in state.schedule.steps.iter().enumerate().skip(state.first_open) {
            if let Some(send) = &s.send
                && !state.sent[step].done
                && receivers_seen & (1 << send.peer.index()) == 0
            {
                receivers_seen |= 1 << send.peer.index();
                let next = segment(&send.range, state.sent[step].elements, self.segment);
                if self.satisfied(rank, send.after, &send.range, next.end - send.range.start) {
                    moves.push(Move::Send { rank, step });
                }
            }
            if let Some(receive) = &s.receive
                && !state.applied[step].done
                && senders_seen & (1 << receive.peer.index()) == 0
            {
                senders_seen |= 1 << receive.peer.index();
                let next = segment(&receive.range, state.applied[step].elements, self.segment);
                if !self.links[receive.peer.index()][rank].is_empty()
                    && self.satisfied(rank, receive.after, &receive.range, next.end - receive.range.start)
                {
                    moves.push(Move::Receive { rank, step });
                }
            }
            if (receivers_seen.count_ones() + senders_seen.count_ones()) as usize == 2 * peers {
                break;
            }
        }
        moves
    }

    fn make(&mut self, next: Move) {
        match next {
            Move::Send { rank, step } => {
                let state = &mut self.ranks[rank];
                let send = state.schedule.steps[step].send.as_ref().expect("the step sends");
                let range = segment(&send.range, state.sent[step].elements, self.segment);
                let values = state.buffer[range.clone()].to_vec();
                advance(&mut state.sent[step], &send.range, range.len());
                self.links[rank][send.peer.index()].push_back(Message { range, values });
            }
            Move::Receive { rank, step } => {
                let state = &mut self.ranks[rank];
                let receive = state.schedule.steps[step].receive.as_ref().expect("the step receives");
                let message = self.links[receive.peer.index()][rank].pop_front().expect("a message waits");
                let expected = segment(&receive.range, state.applied[step].elements, self.segment);
                assert_eq!(message.range, expected, "rank {rank} step {step}: the sender's range differs");
                for (element, value) in message.range.clone().zip(message.values) {
                    let mine = &mut state.buffer[element];
                    if receive.action == Action::Copy {
                        *mine = value;
                        continue;
                    }
                    assert_eq!(*mine & value, 0, "rank {rank} step {step}: a contribution counted twice");
                    *mine |= value;
                    if receive.action == Action::ReduceLast {
                        state.finished[element] += 1;
                    }
                }
                let range = receive.range.clone();
                advance(&mut state.applied[step], &range, message.range.len());
            }
        }
    }

    /// Runs to the end in the given order of events.
    fn run(&mut self, order: &mut Order) {
        loop {
            let mut moved = false;
            for rank in order.ranks(self.ranks.len()) {
                for _ in 0..order.moves_in_a_row() {
                    let moves = self.moves(rank);
                    let Some(&next) = moves.get(order.choose(moves.len())) else { break };
                    self.make(next);
                    moved = true;
                }
            }
            if !moved {
                break;
            }
        }
        for (rank, state) in self.ranks.iter().enumerate() {
            for (step, s) in state.schedule.steps.iter().enumerate() {
                assert!(s.send.is_none() || state.sent[step].done, "rank {rank} step {step}: never sent");
                assert!(
                    s.receive.is_none() || state.applied[step].done,
                    "rank {rank} step {step}: never came"
                );
            }
        }
        assert!(self.links.iter().flatten().all(VecDeque::is_empty), "a message that nobody expects");
    }
}

fn advance(progress: &mut Progress, range: &Range<usize>, elements: usize) {
    progress.elements += elements;
    progress.done = progress.elements == range.len();
}

/// Runs one collective for every length and several orders of events, and hands every end state to `check`.
fn prove(
    worlds: RangeInclusive<u32>,
    build: impl Fn(WorldSize, Rank, usize) -> Schedule,
    initial: impl Fn(WorldSize, Rank, usize) -> Vec<Contributions>,
    check: impl Fn(WorldSize, Rank, usize, &RankState),
) {
    for ranks in worlds {
        let world = WorldSize::new(ranks).unwrap();
        let n = ranks as usize;
        let mut lengths = vec![0, 1, n - 1, n, n + 1, 2 * n + 1, 3 * n - 1, 97];
        lengths.sort_unstable();
        lengths.dedup();
        for count in lengths {
            for (seed, segment) in [(0u64, 1usize), (1, 3), (2, usize::MAX >> 1)] {
                let schedules = world.ranks().map(|rank| build(world, rank, count)).collect();
                let buffers = world.ranks().map(|rank| initial(world, rank, count)).collect();
                let mut run = World::new(schedules, buffers, segment);
                run.run(&mut match seed {
                    0 => Order::Eager,
                    1 => Order::Lockstep,
                    _ => Order::Random(Box::new(StdRng::seed_from_u64(seed))),
                });
                for rank in world.ranks() {
                    check(world, rank, count, &run.ranks[rank.index()]);
                }
            }
        }
    }
}

fn own(_: WorldSize, rank: Rank, count: usize) -> Vec<Contributions> {
    vec![1 << rank.get(); count]
}

fn everyone(world: WorldSize) -> Contributions {
    Contributions::MAX >> (64 - world.get())
}

#[test]
fn all_reduce_gives_every_rank_every_contribution_once() {
    // One block for every world, then several: the steps grow with both, and so does the time of the proof.
    for (worlds, block) in [(1..=64, usize::MAX >> 1), (1..=12, 7)] {
        let build = |world, rank, count| all_reduce(world, rank, count, block);
        prove(worlds, build, own, |world, rank, count, state| {
            assert_eq!(
                state.buffer,
                vec![everyone(world); count],
                "rank {rank} of {world}, {count} elements"
            );
            for (element, &finished) in state.finished.iter().enumerate() {
                let start = element / block * block;
                let chunk = chunk(count.min(start + block) - start, world, rank);
                let owner = chunk.contains(&(element - start)) && world != WorldSize::ONE;
                assert_eq!(finished, u32::from(owner), "an element is finished once, by its owner");
            }
        });
    }
}

#[test]
fn reduce_scatter_gives_every_rank_its_chunk() {
    prove(1..=64, reduce_scatter, own, |world, rank, count, state| {
        for element in chunk(count, world, rank) {
            assert_eq!(state.buffer[element], everyone(world));
            assert_eq!(state.finished[element], u32::from(world != WorldSize::ONE));
        }
    });
}

#[test]
fn all_gather_gives_every_rank_every_chunk() {
    let initial = |world, rank: Rank, count| {
        let mut buffer = vec![0; count];
        buffer[chunk(count, world, rank)].fill(1 << rank.get());
        buffer
    };
    prove(1..=64, all_gather, initial, |world, _, count, state| {
        for owner in world.ranks() {
            assert!(state.buffer[chunk(count, world, owner)].iter().all(|&c| c == 1 << owner.get()));
        }
    });
}

#[test]
fn broadcast_gives_every_rank_the_roots_buffer() {
    for shift in [0, 1, 5] {
        let root = |world: WorldSize| world.after(Rank::ZERO, shift);
        prove(
            1..=64,
            |world, rank, count| broadcast(world, rank, root(world), count),
            own,
            |world, _, count, state| assert_eq!(state.buffer, vec![1 << root(world).get(); count]),
        );
    }
}

/// A barrier that let a rank out before another had entered would not be one: the last rank to enter holds up all.
#[test]
fn no_rank_leaves_a_barrier_before_all_have_entered() {
    for ranks in 2..=64u32 {
        let world = WorldSize::new(ranks).unwrap();
        for late in [0, ranks / 2, ranks - 1] {
            let schedules = world.ranks().map(|rank| barrier(world, rank)).collect();
            let mut run = World::new(schedules, vec![Vec::new(); ranks as usize], 1);
            while let Some(next) = (0..ranks as usize)
                .filter(|&rank| rank != late as usize)
                .find_map(|rank| run.moves(rank).first().copied())
            {
                run.make(next);
            }
            for (rank, state) in run.ranks.iter().enumerate() {
                let left =
                    state.applied.iter().all(|step| step.done) && state.sent.iter().all(|step| step.done);
                assert!(!left, "rank {rank} of {ranks} left before rank {late} entered");
            }
            run.run(&mut Order::Eager);
        }
    }
}
