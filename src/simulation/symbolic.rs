//! Proves that schedules are correct. Buffers contain symbolic values instead of numbers: each value records the index
//! of its element in the operation, and the ranks that have contributed to the element.

mod chain;
mod direct_exchange;
mod double_tree;
mod doubling;
mod faulty_schedules;
mod hierarchy;
mod partitioned_collectives;
mod ring;
mod rounds;
mod test_inputs;
mod tree;

use std::collections::VecDeque;
use std::ops::{Range, RangeInclusive};

use rand::rngs::StdRng;
use rand::seq::SliceRandom as _;
use rand::{RngExt as _, SeedableRng as _};

use self::test_inputs::{
    all_contributions, every_part, own_contribution, own_part, tested_lengths, tested_partition, tested_roots,
};
use crate::schedule::partition::segment;
use crate::schedule::{Action, Schedule, Step, StepDependency};
use crate::types::{Rank, WorldSize};

/// The limits of the proofs.
struct ProofLimits {
    /// The number of ranks in the largest world for which a schedule is proved.
    world_size_max: u32,
    /// The number of elements in the longest operation that is simulated.
    count_max: usize,
    /// The number of random orders of moves that are simulated for each small world.
    random_order_count: u64,
}

/// Returns small limits, unless `tools/test --full` runs the proofs: the time of a proof grows with the cube of the
/// number of ranks. Under Miri, which is a thousand times slower, the limits are even smaller. Small worlds run the
/// same code as large worlds.
fn proof_limits() -> ProofLimits {
    if cfg!(miri) {
        ProofLimits { world_size_max: 3, count_max: 7, random_order_count: 1 }
    } else {
        let is_full = std::env::var_os("TEST_FULL").is_some();
        let (world_size_max, random_order_count) = if is_full { (64, 8) } else { (10, 2) };
        ProofLimits { world_size_max, count_max: 97, random_order_count }
    }
}

impl Schedule {
    /// Returns the number of elements that all steps together send to `peer`.
    fn sent_elements(&self, peer: Rank) -> usize {
        let sends = self.steps.iter().filter_map(|step| step.send.as_ref());
        sends.filter(|send| send.peer == peer).map(|send| send.range.len()).sum()
    }

    /// Returns the number of elements that all steps together receive from `peer`.
    fn received_elements(&self, peer: Rank) -> usize {
        let receives = self.steps.iter().filter_map(|step| step.receive.as_ref());
        receives.filter(|receive| receive.peer == peer).map(|receive| receive.range.len()).sum()
    }
}

/// The symbolic content of one element of a buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct SymbolicValue {
    /// The ranks that have contributed: bit r is set if rank r has contributed.
    ranks: u64,
    /// The index of the element in the operation. The element may have another index in the buffer.
    element: usize,
}

impl SymbolicValue {
    /// An unspecified value, which must not be reduced.
    const UNSPECIFIED: Self = Self { ranks: 0, element: usize::MAX };

    /// Returns the contribution of one rank to an element.
    fn contribution(rank: Rank, element: usize) -> Self {
        Self { ranks: 1 << rank.get(), element }
    }

    /// Returns the reduction of the contributions of the first `ranks` ranks.
    fn from_first_ranks(ranks: u32, element: usize) -> Self {
        Self { ranks: u64::MAX >> (64 - ranks), element }
    }

    /// Returns whether the last rank in this value is just before the first rank in `other`. If this function returns
    /// true for every reduced pair, each value is a reduction of consecutive ranks in rank order.
    fn comes_just_before(self, other: Self) -> bool {
        64 - self.ranks.leading_zeros() == other.ranks.trailing_zeros()
    }
}

/// The state of all ranks, and the messages between the ranks.
struct SimulatedWorld {
    ranks: Vec<RankState>,
    /// The messages that have been sent and not received: `links[sender][receiver]`.
    links: Vec<Vec<VecDeque<SimulatedMessage>>>,
    /// The number of elements in a segment.
    segment_len: usize,
    /// Whether contributions must be reduced in rank order.
    in_rank_order: bool,
}

/// The state of one rank.
struct RankState {
    schedule: Schedule,
    /// The number of peers of the rank.
    peer_count: usize,
    /// The index of the first step that is not done.
    first_unfinished_step: usize,
    buffer: Vec<SymbolicValue>,
    /// For each element, how often `Action::ReduceLast` has completed its reduction. Each reduction must be completed
    /// exactly once.
    completions: Vec<u32>,
    /// The progress of each step's send.
    send_progress: Vec<TransferProgress>,
    /// The progress of each step's receive.
    receive_progress: Vec<TransferProgress>,
}

/// The progress of one send or receive.
#[derive(Clone, Copy, Default)]
struct TransferProgress {
    /// The number of elements that have been sent or applied.
    elements: usize,
    /// Whether the send or receive is done. An empty range needs one empty message.
    is_done: bool,
}

/// A message with one segment.
struct SimulatedMessage {
    /// The index of the segment's first element, relative to the start of the sender's range.
    offset: usize,
    /// The number of elements in the sender's range.
    range_len: usize,
    values: Vec<SymbolicValue>,
}

impl RankState {
    fn skip_finished_steps(&mut self) {
        while let Some(step) = self.schedule.steps.get(self.first_unfinished_step) {
            let sent = step.send.is_none() || self.send_progress[self.first_unfinished_step].is_done;
            let applied = step.receive.is_none() || self.receive_progress[self.first_unfinished_step].is_done;
            if !(sent && applied) {
                break;
            }
            self.first_unfinished_step += 1;
        }
    }

    /// Checks that the receive of step `receiving` does not change elements that a step still has to send. A send may
    /// still have to send these elements only if it waits for this receive or for the receive of a later step.
    fn assert_no_unsent_data_is_overwritten(&self, receiving: usize, changed: &Range<usize>) {
        for (step, s) in self.schedule.steps.iter().enumerate().skip(self.first_unfinished_step) {
            let Some(send) = s.send.as_ref().filter(|_| !self.send_progress[step].is_done) else { continue };
            let unsent = send.range.start + self.send_progress[step].elements..send.range.end;
            let overlaps = unsent.start.max(changed.start) < unsent.end.min(changed.end);
            let waits = step >= receiving
                && send.awaited_step.is_some_and(|StepDependency(awaited)| awaited >= receiving);
            assert!(!overlaps || waits, "step {receiving} changes what step {step} still has to send");
        }
    }
}

/// The order in which ranks make their moves. A move is the send or the receive of one message.
enum MoveOrder {
    /// Rank 0 makes all moves that it can, then rank 1 makes all its moves, and so on.
    Eager,
    /// The last rank makes one move, then the second to last rank makes one move, and so on, down to rank 0.
    Lockstep,
    /// The order is random.
    Random(Box<StdRng>),
}

impl MoveOrder {
    fn order_of_ranks(&mut self, rank_count: usize) -> Vec<usize> {
        let mut ranks: Vec<usize> = (0..rank_count).collect();
        match self {
            Self::Eager => {}
            Self::Lockstep => ranks.reverse(),
            Self::Random(random) => ranks.shuffle(random),
        }
        ranks
    }

    /// Returns how many moves a rank may make before it is the turn of another rank.
    fn successive_moves_max(&mut self) -> usize {
        match self {
            Self::Eager => usize::MAX,
            Self::Lockstep => 1,
            Self::Random(random) => random.random_range(1..4),
        }
    }

    /// Returns how many possible moves the executor collects before it chooses one of them. A rank in a ring or a tree
    /// never has more than 16 possible moves.
    fn considered_moves_max(&self) -> usize {
        if matches!(self, Self::Random(_)) { 16 } else { 1 }
    }

    /// Returns the index of the move to make, of `move_count` possible moves.
    fn choose_move(&mut self, move_count: usize) -> usize {
        match self {
            Self::Random(random) if move_count > 0 => random.random_range(0..move_count),
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
    fn new(schedules: Vec<Schedule>, buffers: Vec<Vec<SymbolicValue>>, segment_len: usize) -> Self {
        let n = schedules.len();
        let ranks = schedules
            .into_iter()
            .zip(buffers)
            .map(|(schedule, buffer)| RankState {
                peer_count: schedule.peers().len(),
                first_unfinished_step: 0,
                completions: vec![0; buffer.len()],
                send_progress: vec![TransferProgress::default(); schedule.steps.len()],
                receive_progress: vec![TransferProgress::default(); schedule.steps.len()],
                schedule,
                buffer,
            })
            .collect();
        let links = (0..n).map(|_| (0..n).map(|_| VecDeque::new()).collect()).collect();
        Self { ranks, links, segment_len, in_rank_order: false }
    }

    /// Returns whether the first `upto` elements of `range` no longer wait for the receive of `awaited_step`.
    fn is_dependency_satisfied(
        &self,
        rank: usize,
        awaited_step: Option<StepDependency>,
        range: &Range<usize>,
        upto: usize,
    ) -> bool {
        let Some(StepDependency(step)) = awaited_step else { return true };
        let state = &self.ranks[rank];
        let awaited = state.schedule.steps[step].receive.as_ref().expect("a dependency is on a receive");
        let progress = state.receive_progress[step];
        progress.is_done || (awaited.range == *range && !range.is_empty() && progress.elements >= upto)
    }

    /// Returns the moves that `rank` can make now, at most `moves_max` moves. A rank can send only the next message to
    /// each peer, and receive only the next message from each peer.
    fn possible_moves(&mut self, rank: usize, moves_max: usize) -> Vec<Move> {
        self.ranks[rank].skip_finished_steps();
        let mut moves = Vec::new();
        let (mut receivers_seen, mut senders_seen) = (0u64, 0u64);
        let state = &self.ranks[rank];
        let peer_count = state.peer_count;
        for (step, s) in state.schedule.steps.iter().enumerate().skip(state.first_unfinished_step) {
            if let Some(send) = &s.send
                && !state.send_progress[step].is_done
                && receivers_seen & (1 << send.peer.index()) == 0
            {
                receivers_seen |= 1 << send.peer.index();
                let next = segment(&send.range, state.send_progress[step].elements, self.segment_len);
                if self.is_dependency_satisfied(
                    rank,
                    send.awaited_step,
                    &send.range,
                    next.end - send.range.start,
                ) {
                    moves.push(Move::Send { rank, step });
                }
            }
            if let Some(receive) = &s.receive
                && !state.receive_progress[step].is_done
                && senders_seen & (1 << receive.peer.index()) == 0
            {
                senders_seen |= 1 << receive.peer.index();
                let next = segment(&receive.range, state.receive_progress[step].elements, self.segment_len);
                let may_overwrite = !s.must_send_before_receiving(step)
                    || state.send_progress[step].elements >= next.end - receive.range.start;
                if may_overwrite
                    && !self.links[receive.peer.index()][rank].is_empty()
                    && self.is_dependency_satisfied(
                        rank,
                        receive.awaited_step,
                        &receive.range,
                        next.end - receive.range.start,
                    )
                {
                    moves.push(Move::Receive { rank, step });
                }
            }
            let directions_seen = (receivers_seen.count_ones() + senders_seen.count_ones()) as usize;
            if directions_seen == 2 * peer_count || moves.len() >= moves_max {
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
        let offset = state.send_progress[step].elements;
        let values = state.buffer[segment(&send.range, offset, self.segment_len)].to_vec();
        advance_progress(&mut state.send_progress[step], &send.range, values.len());
        let message = SimulatedMessage { offset, range_len: send.range.len(), values };
        self.links[rank][send.peer.index()].push_back(message);
    }

    fn receive(&mut self, rank: usize, step: usize) {
        let state = &mut self.ranks[rank];
        let Step { receive, action, .. } = &state.schedule.steps[step];
        let receive = receive.as_ref().expect("the step receives");
        let message = self.links[receive.peer.index()][rank].pop_front().expect("a message waits");
        let expected = (state.receive_progress[step].elements, receive.range.len());
        let arrived = (message.offset, message.range_len);
        assert_eq!(arrived, expected, "rank {rank} step {step}: the message is for another step");
        let range = segment(&receive.range, message.offset, self.segment_len);
        state.assert_no_unsent_data_is_overwritten(step, &range);
        for (element, arrived) in range.clone().zip(message.values) {
            let mine = &mut state.buffer[element];
            if *action == Action::Copy {
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
            if *action == Action::ReduceLast {
                state.completions[element] += 1;
            }
        }
        advance_progress(&mut state.receive_progress[step], &receive.range, range.len());
    }

    /// Makes moves in the given order until no move is possible. Checks that every rank has finished all its steps.
    fn run(&mut self, order: &mut MoveOrder) {
        loop {
            let mut moved = false;
            for rank in order.order_of_ranks(self.ranks.len()) {
                for _ in 0..order.successive_moves_max() {
                    let moves = self.possible_moves(rank, order.considered_moves_max());
                    let Some(&next) = moves.get(order.choose_move(moves.len())) else { break };
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
                    s.send.is_none() || state.send_progress[step].is_done,
                    "rank {rank} step {step}: the send is never possible"
                );
                assert!(
                    s.receive.is_none() || state.receive_progress[step].is_done,
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

/// Records that `elements` more elements of `range` have been sent or applied.
fn advance_progress(progress: &mut TransferProgress, range: &Range<usize>, elements: usize) {
    progress.elements += elements;
    progress.is_done = progress.elements == range.len();
}

/// The worlds for which a schedule is proved, and the requirements on the schedule besides the right result.
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

    /// Runs the schedules of one collective for every world, every length and several orders of moves. `build` returns
    /// the schedule of a rank, and `initial` the rank's initial buffer. Passes the final state of every rank to
    /// `check`.
    fn run(
        self,
        build: impl Fn(WorldSize, Rank, usize) -> Schedule,
        initial: impl Fn(WorldSize, Rank, usize) -> Vec<SymbolicValue>,
        mut check: impl FnMut(WorldSize, Rank, usize, &RankState),
    ) {
        for ranks in self.worlds.clone() {
            let world = WorldSize::new(ranks).unwrap();
            for count in tested_lengths(world) {
                let schedules: Vec<Schedule> = world.ranks().map(|rank| build(world, rank, count)).collect();
                let buffers: Vec<Vec<SymbolicValue>> =
                    world.ranks().map(|rank| initial(world, rank, count)).collect();
                self.check_schedules(&schedules);
                // Small worlds are cheap to simulate and can have every race that large worlds have.
                let orders = if ranks <= 8 { proof_limits().random_order_count } else { 1 };
                let more_orders = (0..orders).map(|order| (3 + order, 1 + order as usize % 3));
                for (seed, segment_len) in
                    [(0, 1), (1, 3), (2, usize::MAX >> 1)].into_iter().chain(more_orders)
                {
                    let mut run = SimulatedWorld::new(schedules.clone(), buffers.clone(), segment_len);
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
                let peer_schedule = &schedules[peer.index()];
                assert_eq!(
                    schedule.sent_elements(peer),
                    peer_schedule.received_elements(this),
                    "rank {this} sends another number of elements to rank {peer} than rank {peer} receives"
                );
                assert_eq!(
                    schedule.received_elements(peer),
                    peer_schedule.sent_elements(this),
                    "rank {peer} sends another number of elements to rank {this} than rank {this} receives"
                );
                assert_ne!(peer, this, "no rank is its own peer");
            }
            let waits =
                schedule.steps.iter().any(|s| s.receive.as_ref().is_some_and(|r| r.awaited_step.is_some()));
            assert!(self.receives_may_wait || !waits, "rank {this}: a receive waits for another receive");
            assert_reduction_order_is_fixed(schedule);
        }
    }
}

/// Checks that the order of reductions does not depend on the order in which contributions arrive: if two steps reduce
/// into the same elements, the later step must wait for the earlier step, directly or through other steps.
fn assert_reduction_order_is_fixed(schedule: &Schedule) {
    let receive = |step: usize| schedule.steps[step].receive.as_ref();
    let reducing = |step: &usize| receive(*step).filter(|_| schedule.steps[*step].action != Action::Copy);
    for (later, second) in (0..schedule.steps.len()).filter_map(|step| Some((step, reducing(&step)?))) {
        for (earlier, first) in (0..later).filter_map(|step| Some((step, reducing(&step)?))) {
            let overlaps = first.range.start.max(second.range.start) < first.range.end.min(second.range.end);
            let awaited = |&step: &usize| {
                receive(step).and_then(|receive| receive.awaited_step).map(|StepDependency(step)| step)
            };
            let mut awaited_steps = std::iter::successors(Some(later), awaited);
            assert!(
                !overlaps || awaited_steps.any(|step| step == earlier),
                "contributions are reduced in the order of arrival"
            );
        }
    }
}
