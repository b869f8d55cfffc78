//! Proves that schedules are correct. Buffers contain symbolic elements instead of numbers: each element records its
//! index in the operation and the ranks that have contributed to it.

mod chain;
mod direct;
mod dissemination;
mod double_tree;
mod faulty;
mod hierarchy;
mod partitioned;
mod ring;
mod rounds;
mod tree;

use std::collections::VecDeque;
use std::ops::{Range, RangeInclusive};

use rand::rngs::StdRng;
use rand::seq::SliceRandom as _;
use rand::{RngExt as _, SeedableRng as _};

use super::partition::{Partition, segment};
use super::{Action, AfterStep, Schedule};
use crate::types::{Rank, WorldSize};

/// The limits of the proofs.
struct ProofLimits {
    /// The number of ranks in the largest world for which a schedule is proved.
    world_size_max: u32,
    /// The number of elements in the longest operation that is simulated.
    count_max: usize,
    /// The number of random orders of moves that are simulated for each small world.
    random_orders: u64,
}

/// Only `tools/test --full` proves the schedules for large worlds, because the time grows with the cube of the number
/// of ranks. Under Miri, which is a thousand times slower, small worlds suffice: they run the same code as large
/// worlds.
fn proof_limits() -> ProofLimits {
    if cfg!(miri) {
        ProofLimits { world_size_max: 3, count_max: 7, random_orders: 1 }
    } else {
        let is_full = std::env::var_os("TEST_FULL").is_some();
        let (world_size_max, random_orders) = if is_full { (64, 8) } else { (12, 2) };
        ProofLimits { world_size_max, count_max: 97, random_orders }
    }
}

/// The symbolic content of one element of a buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Value {
    /// The ranks that have contributed: bit r is set if rank r has contributed.
    ranks: u64,
    /// The element's index in the operation, independent of its index in the buffer.
    element: usize,
}

impl Value {
    /// An unspecified value, which must not be reduced.
    const BLANK: Self = Self { ranks: 0, element: usize::MAX };

    /// Returns the contribution of one rank to an element.
    fn contribution(rank: Rank, element: usize) -> Self {
        Self { ranks: 1 << rank.get(), element }
    }

    /// Returns the reduction of the contributions of the first `ranks` ranks.
    fn from_first_ranks(ranks: u32, element: usize) -> Self {
        Self { ranks: u64::MAX >> (64 - ranks), element }
    }

    /// Returns whether the last rank in this value is just before the first rank in `other`. If this
    /// function returns true for every reduced pair, each value is the reduction of consecutive ranks in rank order.
    fn comes_just_before(self, other: Self) -> bool {
        64 - self.ranks.leading_zeros() == other.ranks.trailing_zeros()
    }
}

/// All ranks' buffers and the messages between them.
struct SimulatedWorld {
    ranks: Vec<RankState>,
    /// The messages in flight: `links[sender][receiver]`.
    links: Vec<Vec<VecDeque<SimulatedMessage>>>,
    /// The number of elements in a segment.
    segment: usize,
    /// Whether contributions must be reduced in rank order.
    in_rank_order: bool,
}

struct RankState {
    schedule: Schedule,
    /// The number of peers of the rank.
    peers: usize,
    /// The index of the first step that is not done.
    first_open: usize,
    buffer: Vec<Value>,
    /// For each element, how often `Action::ReduceLast` has completed its reduction. Each reduction must be completed
    /// exactly once.
    finished: Vec<u32>,
    /// The progress of each step's send.
    sent: Vec<TransferProgress>,
    /// The progress of each step's receive.
    applied: Vec<TransferProgress>,
}

#[derive(Clone, Copy, Default)]
struct TransferProgress {
    elements: usize,
    /// Whether the step is done. An empty range is done after one empty message.
    done: bool,
}

/// A message with one segment.
struct SimulatedMessage {
    /// The index of the segment's first element in the sender's range. The receiver's range may be elsewhere in the
    /// buffer.
    offset: usize,
    /// The number of elements in the sender's range.
    range_len: usize,
    values: Vec<Value>,
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

    /// Checks that the receive of step `receiving` does not change elements that another step still has to send,
    /// unless that send waits for this receive or for the receive of a later step.
    fn assert_no_unsent_data_is_overwritten(&self, receiving: usize, changed: &Range<usize>) {
        for (step, s) in self.schedule.steps.iter().enumerate().skip(self.first_open) {
            let Some(send) = s.send.as_ref().filter(|_| !self.sent[step].done) else { continue };
            let unsent = send.range.start + self.sent[step].elements..send.range.end;
            let overlaps = unsent.start.max(changed.start) < unsent.end.min(changed.end);
            let waits =
                step >= receiving && send.after.is_some_and(|AfterStep(awaited)| awaited >= receiving);
            assert!(!overlaps || waits, "step {receiving} changes what step {step} still has to send");
        }
    }
}

/// The order in which ranks make their moves. A move is the send or the receive of one message.
enum MoveOrder {
    /// One rank makes all moves that it can, then the next rank makes all its moves, and so on.
    Eager,
    /// One rank makes one move, then the previous rank makes one move, and so on.
    Lockstep,
    /// The order is random.
    Random(Box<StdRng>),
}

impl MoveOrder {
    fn rank_order(&mut self, n: usize) -> Vec<usize> {
        let mut ranks: Vec<usize> = (0..n).collect();
        match self {
            Self::Eager => {}
            Self::Lockstep => ranks.reverse(),
            Self::Random(random) => ranks.shuffle(random),
        }
        ranks
    }

    fn moves_in_a_row_max(&mut self) -> usize {
        match self {
            Self::Eager => usize::MAX,
            Self::Lockstep => 1,
            Self::Random(random) => random.random_range(1..4),
        }
    }

    /// Returns how many possible moves the executor collects before it chooses one. 16 are more than a rank in a ring
    /// or a tree ever has.
    fn choice_count(&self) -> usize {
        if matches!(self, Self::Random(_)) { 16 } else { 1 }
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

impl SimulatedWorld {
    fn new(schedules: Vec<Schedule>, buffers: Vec<Vec<Value>>, segment: usize) -> Self {
        let n = schedules.len();
        let ranks = schedules
            .into_iter()
            .zip(buffers)
            .map(|(schedule, buffer)| RankState {
                peers: schedule.peers().len(),
                first_open: 0,
                finished: vec![0; buffer.len()],
                sent: vec![TransferProgress::default(); schedule.steps.len()],
                applied: vec![TransferProgress::default(); schedule.steps.len()],
                schedule,
                buffer,
            })
            .collect();
        let links = (0..n).map(|_| (0..n).map(|_| VecDeque::new()).collect()).collect();
        Self { ranks, links, segment, in_rank_order: false }
    }

    /// Returns whether the first `upto` elements of `range` no longer wait for the receive that `after` names.
    fn is_satisfied(&self, rank: usize, after: Option<AfterStep>, range: &Range<usize>, upto: usize) -> bool {
        let Some(AfterStep(step)) = after else { return true };
        let state = &self.ranks[rank];
        let awaited = state.schedule.steps[step].receive.as_ref().expect("a dependency is on a receive");
        let progress = state.applied[step];
        progress.done || (awaited.range == *range && !range.is_empty() && progress.elements >= upto)
    }

    /// Returns the moves that `rank` can make now, at most `moves_max` moves. Only the next message to each peer and
    /// the next message from each peer are considered.
    fn possible_moves(&mut self, rank: usize, moves_max: usize) -> Vec<Move> {
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
                if self.is_satisfied(rank, send.after, &send.range, next.end - send.range.start) {
                    moves.push(Move::Send { rank, step });
                }
            }
            if let Some(receive) = &s.receive
                && !state.applied[step].done
                && senders_seen & (1 << receive.peer.index()) == 0
            {
                senders_seen |= 1 << receive.peer.index();
                let next = segment(&receive.range, state.applied[step].elements, self.segment);
                let may_overwrite = !s.must_send_before_receiving(step)
                    || state.sent[step].elements >= next.end - receive.range.start;
                if may_overwrite
                    && !self.links[receive.peer.index()][rank].is_empty()
                    && self.is_satisfied(rank, receive.after, &receive.range, next.end - receive.range.start)
                {
                    moves.push(Move::Receive { rank, step });
                }
            }
            let directions_seen = (receivers_seen.count_ones() + senders_seen.count_ones()) as usize;
            if directions_seen == 2 * peers || moves.len() >= moves_max {
                break;
            }
        }
        moves
    }

    fn make_move(&mut self, next: Move) {
        match next {
            Move::Send { rank, step } => self.send(rank, step),
            Move::Receive { rank, step } => self.receive(rank, step),
        }
    }

    fn send(&mut self, rank: usize, step: usize) {
        let state = &mut self.ranks[rank];
        let send = state.schedule.steps[step].send.as_ref().expect("the step sends");
        let offset = state.sent[step].elements;
        let values = state.buffer[segment(&send.range, offset, self.segment)].to_vec();
        advance(&mut state.sent[step], &send.range, values.len());
        let message = SimulatedMessage { offset, range_len: send.range.len(), values };
        self.links[rank][send.peer.index()].push_back(message);
    }

    fn receive(&mut self, rank: usize, step: usize) {
        let state = &mut self.ranks[rank];
        let receive = state.schedule.steps[step].receive.as_ref().expect("the step receives");
        let message = self.links[receive.peer.index()][rank].pop_front().expect("a message waits");
        let expected = (state.applied[step].elements, receive.range.len());
        let arrived = (message.offset, message.range_len);
        assert_eq!(arrived, expected, "rank {rank} step {step}: the message is for another step");
        let range = segment(&receive.range, message.offset, self.segment);
        state.assert_no_unsent_data_is_overwritten(step, &range);
        for (element, arrived) in range.clone().zip(message.values) {
            let mine = &mut state.buffer[element];
            if receive.action == Action::Copy {
                *mine = arrived;
                continue;
            }
            assert_eq!(
                mine.element, arrived.element,
                "rank {rank} step {step}: different elements are reduced"
            );
            assert_eq!(
                mine.ranks & arrived.ranks,
                0,
                "rank {rank} step {step}: a contribution is reduced twice"
            );
            assert!(
                !self.in_rank_order || arrived.comes_just_before(*mine),
                "rank {rank} step {step}: out of rank order"
            );
            mine.ranks |= arrived.ranks;
            if receive.action == Action::ReduceLast {
                state.finished[element] += 1;
            }
        }
        advance(&mut state.applied[step], &receive.range, range.len());
    }

    /// Makes moves in the given order until no move is possible. Checks that every rank has done all its steps.
    fn run(&mut self, order: &mut MoveOrder) {
        loop {
            let mut moved = false;
            for rank in order.rank_order(self.ranks.len()) {
                for _ in 0..order.moves_in_a_row_max() {
                    let moves = self.possible_moves(rank, order.choice_count());
                    let Some(&next) = moves.get(order.choose(moves.len())) else { break };
                    self.make_move(next);
                    moved = true;
                }
            }
            if !moved {
                break;
            }
        }
        for (rank, state) in self.ranks.iter().enumerate() {
            for (step, s) in state.schedule.steps.iter().enumerate() {
                assert!(
                    s.send.is_none() || state.sent[step].done,
                    "rank {rank} step {step}: the send is never possible"
                );
                assert!(
                    s.receive.is_none() || state.applied[step].done,
                    "rank {rank} step {step}: the message never arrives"
                );
            }
        }
        assert!(
            self.links.iter().flatten().all(VecDeque::is_empty),
            "every message should have been received"
        );
    }
}

fn advance(progress: &mut TransferProgress, range: &Range<usize>, elements: usize) {
    progress.elements += elements;
    progress.done = progress.elements == range.len();
}

/// The worlds for which a schedule is proved, and what the proof requires of the schedule besides the right result.
#[derive(Clone)]
struct Proof {
    /// The sizes of the worlds for which the schedule is proved.
    worlds: RangeInclusive<u32>,
    /// Whether contributions must be reduced in rank order.
    in_rank_order: bool,
    /// Whether a receive may wait for another receive, so that a rank may have to store data that arrive early.
    receives_may_wait: bool,
}

impl Proof {
    fn new() -> Self {
        Self { worlds: 1..=proof_limits().world_size_max, in_rank_order: false, receives_may_wait: false }
    }

    /// Runs one collective for every world, every length and several orders of moves, and passes the final state of
    /// every rank to `check`. `initial` returns the initial buffer of a rank.
    fn run(
        self,
        build: impl Fn(WorldSize, Rank, usize) -> Schedule,
        initial: impl Fn(WorldSize, Rank, usize) -> Vec<Value>,
        mut check: impl FnMut(WorldSize, Rank, usize, &RankState),
    ) {
        for ranks in self.worlds.clone() {
            let world = WorldSize::new(ranks).unwrap();
            for count in tested_lengths(world) {
                let schedules: Vec<Schedule> = world.ranks().map(|rank| build(world, rank, count)).collect();
                let buffers: Vec<Vec<Value>> =
                    world.ranks().map(|rank| initial(world, rank, count)).collect();
                self.check_schedules(&schedules);
                // Small worlds are cheap to simulate and can have every race that large worlds have.
                let orders = if ranks <= 8 { proof_limits().random_orders } else { 1 };
                let more_orders = (0..orders).map(|order| (3 + order, 1 + order as usize % 3));
                for (seed, segment) in [(0, 1), (1, 3), (2, usize::MAX >> 1)].into_iter().chain(more_orders) {
                    let mut run = SimulatedWorld::new(schedules.clone(), buffers.clone(), segment);
                    run.in_rank_order = self.in_rank_order;
                    run.run(&mut match seed {
                        0 => MoveOrder::Eager,
                        1 => MoveOrder::Lockstep,
                        _ => MoveOrder::Random(Box::new(StdRng::seed_from_u64(seed))),
                    });
                    for rank in world.ranks() {
                        check(world, rank, count, &run.ranks[rank.index()]);
                    }
                }
            }
        }
    }

    /// Checks all ranks' schedules without simulating a run.
    fn check_schedules(&self, schedules: &[Schedule]) {
        for (rank, schedule) in schedules.iter().enumerate() {
            let this = Rank::new(rank as u32);
            for peer in schedule.peers() {
                let peers = &schedules[peer.index()];
                assert_eq!(schedule.sent_elements(peer), peers.received_elements(this), "{this} to {peer}");
                assert_eq!(schedule.received_elements(peer), peers.sent_elements(this), "{peer} to {this}");
                assert_ne!(peer, this, "no rank is its own peer");
            }
            let waits = schedule.steps.iter().any(|s| s.receive.as_ref().is_some_and(|r| r.after.is_some()));
            assert!(self.receives_may_wait || !waits, "{this}: a receive waits for another receive");
            assert_reduction_order_is_fixed(schedule);
        }
    }
}

/// Checks that contributions are not reduced in the order of their arrival. If two steps reduce into the same
/// elements, the later step must wait for the earlier step, directly or through other steps.
fn assert_reduction_order_is_fixed(schedule: &Schedule) {
    let receive = |step: usize| schedule.steps[step].receive.as_ref();
    let reducing = |step: &usize| receive(*step).filter(|receive| receive.action != Action::Copy);
    for (later, second) in (0..schedule.steps.len()).filter_map(|step| Some((step, reducing(&step)?))) {
        for (earlier, first) in (0..later).filter_map(|step| Some((step, reducing(&step)?))) {
            let overlaps = first.range.start.max(second.range.start) < first.range.end.min(second.range.end);
            let awaited =
                |&step: &usize| receive(step).and_then(|receive| receive.after).map(|AfterStep(step)| step);
            let mut awaited_steps = std::iter::successors(Some(later), awaited);
            assert!(
                !overlaps || awaited_steps.any(|step| step == earlier),
                "contributions are reduced in the order of arrival"
            );
        }
    }
}

fn tested_lengths(world: WorldSize) -> Vec<usize> {
    let n = world.as_usize();
    let mut lengths = vec![0, 1, n - 1, n, n + 1, 2 * n + 1, 3 * n - 1, proof_limits().count_max];
    lengths.sort_unstable();
    lengths.dedup();
    lengths
}

/// Returns the roots to test: the first rank, the last rank and ranks between them.
fn tested_roots(world: WorldSize) -> Vec<Rank> {
    let mut roots: Vec<Rank> = [0, 1, 5, world.get() - 1].map(|shift| world.after(Rank::ZERO, shift)).into();
    roots.sort_unstable();
    roots.dedup();
    roots
}

/// Returns a buffer that contains the contribution of `rank` to every element.
fn own_contribution(_: WorldSize, rank: Rank, count: usize) -> Vec<Value> {
    (0..count).map(|element| Value::contribution(rank, element)).collect()
}

/// Returns a buffer in which every element is the reduction of the contributions of all ranks.
fn all_contributions(world: WorldSize, count: usize) -> Vec<Value> {
    (0..count).map(|element| Value::from_first_ranks(world.get(), element)).collect()
}

/// Returns the partition for the test case with number `which`. If `which` is even, the parts have equal lengths. If
/// `which` is odd, the parts grow with the rank and the first parts are often empty, or one rank has all elements.
fn tested_partition(count: usize, world: WorldSize, which: usize) -> Partition {
    let n = world.as_usize();
    let upto = |index: usize| count * index.pow(2) / n.pow(2);
    let counts: Vec<usize> = match (which % 2, (n + count) % 3) {
        (0, _) => return Partition::even(count, world),
        (_, 0) => (0..n).map(|index| if index == count % n { count } else { 0 }).collect(),
        (_, _) => (0..n).map(|index| upto(index + 1) - upto(index)).collect(),
    };
    Partition::from_counts(&counts).expect("the sum is small")
}

/// Returns a buffer for all parts that contains only the rank's own part.
fn own_part(partition: &Partition, rank: Rank) -> Vec<Value> {
    let own = partition.range(rank);
    let value =
        |element| if own.contains(&element) { Value::contribution(rank, element) } else { Value::BLANK };
    (0..partition.total()).map(value).collect()
}

/// Returns a buffer that contains the parts of all ranks.
fn every_part(partition: &Partition, world: WorldSize) -> Vec<Value> {
    let part = |rank| partition.range(rank).map(move |element| Value::contribution(rank, element));
    world.ranks().flat_map(part).collect()
}
