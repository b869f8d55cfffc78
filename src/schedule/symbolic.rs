//! Proves schedules without bytes: each element of each rank's buffer records its index in the operation and the
//! ranks that have contributed to it.

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
use super::{Action, After, Schedule};
use crate::types::{Rank, WorldSize};

/// The sizes of the proofs.
struct Extent {
    worlds_max: u32,
    /// The longest operation, in elements.
    longest: usize,
    /// The number of random orders of events in a small world.
    lots: u64,
}

/// `tools/test --full` proves larger worlds: the time grows with the cube of the number of ranks. Miri takes a thousand
/// times as long and looks only for undefined behaviour, in code that worlds of all sizes share.
fn extent() -> Extent {
    if cfg!(miri) {
        Extent { worlds_max: 3, longest: 7, lots: 1 }
    } else {
        let is_full = std::env::var_os("TEST_FULL").is_some();
        Extent { worlds_max: if is_full { 64 } else { 20 }, longest: 97, lots: 8 }
    }
}

/// The symbolic content of one element of a buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Value {
    /// The ranks that have contributed, one bit each.
    ranks: u64,
    /// The element's index in the operation, independent of its index in the buffer.
    element: usize,
}

impl Value {
    /// An unspecified value, which must not be sent or reduced.
    const BLANK: Self = Self { ranks: 0, element: usize::MAX };

    /// One rank's contribution to an element.
    fn own(rank: Rank, element: usize) -> Self {
        Self { ranks: 1 << rank.get(), element }
    }

    /// The contributions of the first `n` ranks.
    fn of_first(ranks: u32, element: usize) -> Self {
        Self { ranks: u64::MAX >> (64 - ranks), element }
    }

    /// Whether the ranks that contributed to this value come just before those of the other. If all values so far
    /// were made in this way, each is an interval of ranks, reduced in rank order.
    fn comes_just_before(self, other: Self) -> bool {
        64 - self.ranks.leading_zeros() == other.ranks.trailing_zeros()
    }
}

/// All ranks' buffers and the messages between them.
struct SimulatedWorld {
    ranks: Vec<RankState>,
    /// Messages in flight from each rank to each rank, in order.
    links: Vec<Vec<VecDeque<SimulatedMessage>>>,
    segment: usize,
    /// Whether contributions have to be combined in the order of the ranks.
    in_rank_order: bool,
}

struct RankState {
    schedule: Schedule,
    /// The number of peers of the rank.
    peers: usize,
    /// All steps before this one are done.
    first_open: usize,
    buffer: Vec<Value>,
    /// How often the reduction of each element has been finished, which must be once.
    finished: Vec<u32>,
    /// The number of elements sent and applied, for each step; `None` until the (perhaps empty) range is done with at
    /// least one message.
    sent: Vec<StepProgress>,
    applied: Vec<StepProgress>,
}

#[derive(Clone, Copy, Default)]
struct StepProgress {
    elements: usize,
    done: bool,
}

/// A segment. Its position counts from the start of the step's range, which may differ between the two ranks.
struct SimulatedMessage {
    position: usize,
    /// The number of elements in the whole of the sender's range.
    whole: usize,
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

    /// A receive must not change elements that another step sends unchanged: an earlier step has to have sent them,
    /// and a later one has to wait for this receive or for one after it.
    fn assert_nothing_is_overtaken(&self, receiving: usize, changed: &Range<usize>) {
        for (step, s) in self.schedule.steps.iter().enumerate().skip(self.first_open) {
            let Some(send) = s.send.as_ref().filter(|_| !self.sent[step].done) else { continue };
            let unsent = send.range.start + self.sent[step].elements..send.range.end;
            let overlaps = unsent.start.max(changed.start) < unsent.end.min(changed.end);
            let waits = step >= receiving && send.after.is_some_and(|After(awaited)| awaited >= receiving);
            assert!(!overlaps || waits, "step {receiving} changes what step {step} still has to send");
        }
    }
}

/// The order of events.
enum DeliveryOrder {
    /// Each rank in turn makes as many moves as it can.
    Eager,
    /// The ranks take turns from the last to the first, one move each.
    Lockstep,
    /// At random.
    Random(Box<StdRng>),
}

impl DeliveryOrder {
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

    /// The number of possible moves from which the next one is chosen: enough for all peers of a ring or a tree.
    fn choice(&self) -> usize {
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
                sent: vec![StepProgress::default(); schedule.steps.len()],
                applied: vec![StepProgress::default(); schedule.steps.len()],
                schedule,
                buffer,
            })
            .collect();
        let links = (0..n).map(|_| (0..n).map(|_| VecDeque::new()).collect()).collect();
        Self { ranks, links, segment, in_rank_order: false }
    }

    fn satisfied(&self, rank: usize, after: Option<After>, range: &Range<usize>, upto: usize) -> bool {
        let Some(After(step)) = after else { return true };
        let state = &self.ranks[rank];
        let awaited = state.schedule.steps[step].receive.as_ref().expect("a dependency is on a receive");
        let progress = state.applied[step];
        progress.done || (awaited.range == *range && !range.is_empty() && progress.elements >= upto)
    }

    /// The next message to each peer and from each peer that `rank` could move now, the first `most` of them.
    fn moves(&mut self, rank: usize, most: usize) -> Vec<Move> {
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
                let is_vacated =
                    !s.leaves_first(step) || state.sent[step].elements >= next.end - receive.range.start;
                if is_vacated
                    && !self.links[receive.peer.index()][rank].is_empty()
                    && self.satisfied(rank, receive.after, &receive.range, next.end - receive.range.start)
                {
                    moves.push(Move::Receive { rank, step });
                }
            }
            let lanes_seen = (receivers_seen.count_ones() + senders_seen.count_ones()) as usize;
            if lanes_seen == 2 * peers || moves.len() >= most {
                break;
            }
        }
        moves
    }

    fn make(&mut self, next: Move) {
        match next {
            Move::Send { rank, step } => self.send(rank, step),
            Move::Receive { rank, step } => self.receive(rank, step),
        }
    }

    fn send(&mut self, rank: usize, step: usize) {
        let state = &mut self.ranks[rank];
        let send = state.schedule.steps[step].send.as_ref().expect("the step sends");
        let position = state.sent[step].elements;
        let values = state.buffer[segment(&send.range, position, self.segment)].to_vec();
        advance(&mut state.sent[step], &send.range, values.len());
        let message = SimulatedMessage { position, whole: send.range.len(), values };
        self.links[rank][send.peer.index()].push_back(message);
    }

    fn receive(&mut self, rank: usize, step: usize) {
        let state = &mut self.ranks[rank];
        let receive = state.schedule.steps[step].receive.as_ref().expect("the step receives");
        let message = self.links[receive.peer.index()][rank].pop_front().expect("a message waits");
        let expected = (state.applied[step].elements, receive.range.len());
        assert_eq!((message.position, message.whole), expected, "rank {rank} step {step}: another message");
        let range = segment(&receive.range, message.position, self.segment);
        state.assert_nothing_is_overtaken(step, &range);
        for (element, arrived) in range.clone().zip(message.values) {
            let mine = &mut state.buffer[element];
            if receive.action == Action::Copy {
                *mine = arrived;
                continue;
            }
            assert_eq!(mine.element, arrived.element, "rank {rank} step {step}: different elements");
            assert_eq!(
                mine.ranks & arrived.ranks,
                0,
                "rank {rank} step {step}: a contribution counted twice"
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

    /// Runs to the end in the given order of events.
    fn run(&mut self, order: &mut DeliveryOrder) {
        loop {
            let mut moved = false;
            for rank in order.ranks(self.ranks.len()) {
                for _ in 0..order.moves_in_a_row() {
                    let moves = self.moves(rank, order.choice());
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
        assert!(self.links.iter().flatten().all(VecDeque::is_empty), "a message without a receive");
    }
}

fn advance(progress: &mut StepProgress, range: &Range<usize>, elements: usize) {
    progress.elements += elements;
    progress.done = progress.elements == range.len();
}

/// What is proved of a schedule besides its outcome.
#[derive(Clone)]
struct Proof {
    worlds: RangeInclusive<u32>,
    /// Contributions are combined in the order of the ranks.
    in_rank_order: bool,
    /// It is for short messages: a receive may wait for another one.
    receives_may_wait: bool,
}

impl Proof {
    fn new() -> Self {
        Self { worlds: 1..=extent().worlds_max, in_rank_order: false, receives_may_wait: false }
    }

    /// Runs one collective for every length and several orders of events, and passes every end state to `check`.
    fn run(
        self,
        build: impl Fn(WorldSize, Rank, usize) -> Schedule,
        initial: impl Fn(WorldSize, Rank, usize) -> Vec<Value>,
        mut check: impl FnMut(WorldSize, Rank, usize, &RankState),
    ) {
        for ranks in self.worlds.clone() {
            let world = WorldSize::new(ranks).unwrap();
            for count in lengths(world) {
                let schedules: Vec<Schedule> = world.ranks().map(|rank| build(world, rank, count)).collect();
                let buffers: Vec<Vec<Value>> =
                    world.ranks().map(|rank| initial(world, rank, count)).collect();
                self.check_schedules(&schedules);
                // Small worlds are cheap, and show every race.
                let lots = if ranks <= 8 { extent().lots } else { 1 };
                let by_lot = (0..lots).map(|lot| (3 + lot, 1 + lot as usize % 3));
                for (seed, segment) in [(0, 1), (1, 3), (2, usize::MAX >> 1)].into_iter().chain(by_lot) {
                    let mut run = SimulatedWorld::new(schedules.clone(), buffers.clone(), segment);
                    run.in_rank_order = self.in_rank_order;
                    run.run(&mut match seed {
                        0 => DeliveryOrder::Eager,
                        1 => DeliveryOrder::Lockstep,
                        _ => DeliveryOrder::Random(Box::new(StdRng::seed_from_u64(seed))),
                    });
                    for rank in world.ranks() {
                        check(world, rank, count, &run.ranks[rank.index()]);
                    }
                }
            }
        }
    }

    /// Checks all ranks' schedules without running them.
    fn check_schedules(&self, schedules: &[Schedule]) {
        for (rank, schedule) in schedules.iter().enumerate() {
            let this = Rank::new(rank as u32);
            for peer in schedule.peers() {
                let its = &schedules[peer.index()];
                assert_eq!(schedule.sent_elements(peer), its.received_elements(this), "{this} to {peer}");
                assert_eq!(schedule.received_elements(peer), its.sent_elements(this), "{peer} to {this}");
                assert_ne!(peer, this, "no rank is its own peer");
            }
            let waits = schedule.steps.iter().any(|s| s.receive.as_ref().is_some_and(|r| r.after.is_some()));
            assert!(self.receives_may_wait || !waits, "{this}: a receive waits for another");
            assert_sums_are_in_order(schedule);
        }
    }
}

/// Of two receives that add to the same elements, the later step waits for the earlier one, or for one that does.
/// Otherwise the order of a sum would be the order of arrival.
fn assert_sums_are_in_order(schedule: &Schedule) {
    let receive = |step: usize| schedule.steps[step].receive.as_ref();
    let adding = |step: &usize| receive(*step).filter(|receive| receive.action != Action::Copy);
    for (later, second) in (0..schedule.steps.len()).filter_map(|step| Some((step, adding(&step)?))) {
        for (earlier, first) in (0..later).filter_map(|step| Some((step, adding(&step)?))) {
            let overlaps = first.range.start.max(second.range.start) < first.range.end.min(second.range.end);
            let awaited =
                |&step: &usize| receive(step).and_then(|receive| receive.after).map(|After(step)| step);
            let mut before = std::iter::successors(Some(later), awaited);
            assert!(!overlaps || before.any(|step| step == earlier), "two sums in the order of arrival");
        }
    }
}

fn lengths(world: WorldSize) -> Vec<usize> {
    let n = world.as_usize();
    let mut lengths = vec![0, 1, n - 1, n, n + 1, 2 * n + 1, 3 * n - 1, extent().longest];
    lengths.sort_unstable();
    lengths.dedup();
    lengths
}

/// Roots at both ends of the ring and inside.
fn roots(world: WorldSize) -> Vec<Rank> {
    let mut roots: Vec<Rank> = [0, 1, 5, world.get() - 1].map(|shift| world.after(Rank::ZERO, shift)).into();
    roots.sort_unstable();
    roots.dedup();
    roots
}

/// Every rank's buffer is its own contribution.
fn own(_: WorldSize, rank: Rank, count: usize) -> Vec<Value> {
    (0..count).map(|element| Value::own(rank, element)).collect()
}

/// The contributions of all ranks, each once.
fn everyone(world: WorldSize, count: usize) -> Vec<Value> {
    (0..count).map(|element| Value::of_first(world.get(), element)).collect()
}

/// If `which` is even: even parts. Otherwise parts that grow with the rank, of which the first are often empty, or
/// all elements for one rank.
fn cut(count: usize, world: WorldSize, which: usize) -> Partition {
    let n = world.as_usize();
    let upto = |index: usize| count * index.pow(2) / n.pow(2);
    let counts: Vec<usize> = match (which % 2, (n + count) % 3) {
        (0, _) => return Partition::even(count, world),
        (_, 0) => (0..n).map(|index| if index == count % n { count } else { 0 }).collect(),
        (_, _) => (0..n).map(|index| upto(index + 1) - upto(index)).collect(),
    };
    Partition::from_counts(&counts).expect("the sum is small")
}

/// A whole buffer in which only the rank's own part is known.
fn own_part(partition: &Partition, rank: Rank) -> Vec<Value> {
    let own = partition.range(rank);
    let value = |element| if own.contains(&element) { Value::own(rank, element) } else { Value::BLANK };
    (0..partition.total()).map(value).collect()
}

/// A whole buffer with each rank's part in its place.
fn every_part(partition: &Partition, world: WorldSize) -> Vec<Value> {
    let part = |rank| partition.range(rank).map(move |element| Value::own(rank, element));
    world.ranks().flat_map(part).collect()
}
