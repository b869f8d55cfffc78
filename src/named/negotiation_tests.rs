//! Tests of the negotiation without IO: a coordinator and its clients exchange messages. The tests deliver the messages
//! in random interleavings. As on links, the messages from one rank to another keep their order.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;

use super::client::{Client, ClientAction};
use super::coordinator::{Coordinator, CoordinatorLimits};
use super::message::{CoordinatorMessage, RankReport, Signature, TensorOp};
use super::stalls::StallWatch;
use crate::types::{DType, Rank, ReduceOp, WorldSize};

/// A call of a rank: submit a tensor in a training step, join, or close.
#[derive(Clone, Copy, Debug)]
enum TestAction {
    Submit { tensor: usize, step: usize },
    Join,
    Close,
}

/// A tensor of an operation that has begun: its name, and this rank's contribution (tensor number, step number). The
/// contribution is `None` if this rank contributes zeros.
type BegunTensor = (String, Option<(usize, usize)>);

/// The state of one rank, with the messages from and to the coordinator that have not been delivered.
struct TestedRank {
    client: Client<(usize, usize)>,
    actions: VecDeque<TestAction>,
    reports: VecDeque<RankReport>,
    messages: VecDeque<CoordinatorMessage>,
    /// The running operations, the oldest first. Each operation is a list of the names of the tensors that this rank
    /// has submitted.
    running: VecDeque<Vec<String>>,
    /// All operations that have begun, each with its tensors.
    begun: Vec<Vec<BegunTensor>>,
    /// How often all ranks have joined.
    join_count: usize,
    has_ended: bool,
}

struct SimulatedGroup {
    coordinator: Coordinator,
    ranks: Vec<TestedRank>,
    size: WorldSize,
}

/// Returns the signature of a tensor in a step. The length of every third tensor alternates from step to step, and
/// all other lengths are constant.
fn signature(tensor: usize, step: usize) -> Signature {
    let count = if tensor.is_multiple_of(3) { 1 + step as u64 % 2 } else { 2 };
    let op = if tensor.is_multiple_of(5) { ReduceOp::Average } else { ReduceOp::Sum };
    Signature { kind: TensorOp::AllReduce(op), dtype: DType::F32, count }
}

impl SimulatedGroup {
    fn new(actions_by_rank: Vec<Vec<TestAction>>, cache_capacity: u16, fusion_bytes: u64) -> Self {
        let size = WorldSize::new(actions_by_rank.len() as u32).unwrap();
        let job_ranks: Arc<[Rank]> = size.ranks().collect();
        let limits = CoordinatorLimits { fusion_bytes, cache_capacity, running_operations_max: 2 };
        let watch = StallWatch::new(Duration::from_secs(1), None);
        let rank_state = |actions: Vec<TestAction>| TestedRank {
            client: Client::new(size),
            actions: actions.into(),
            reports: VecDeque::new(),
            messages: VecDeque::new(),
            running: VecDeque::new(),
            begun: Vec::new(),
            join_count: 0,
            has_ended: false,
        };
        let ranks = actions_by_rank.into_iter().map(rank_state).collect();
        Self { coordinator: Coordinator::new(limits, job_ranks, watch), ranks, size }
    }

    fn send_messages(&mut self) {
        while let Some(message) = self.coordinator.next_message() {
            let sent = CoordinatorMessage::decode(&message.encode(), self.size)
                .expect("a sent message can be decoded");
            assert_eq!(sent, message);
            self.ranks.iter_mut().for_each(|rank_state| rank_state.messages.push_back(message.clone()));
        }
    }

    /// Makes one move on one rank. `move_kind` selects the move: 0 makes the next call, 1 takes a report, 2 delivers
    /// a report, 3 delivers a message, and 4 ends an operation. Returns whether the move was possible.
    fn make_move(&mut self, rank: usize, move_kind: usize) -> bool {
        let rank_state = &mut self.ranks[rank];
        match move_kind {
            0 => match rank_state.actions.front().copied() {
                Some(TestAction::Submit { tensor, step }) => {
                    let name = format!("t{tensor}");
                    // The submission fails while the same tensor of the previous step is in flight. The submission
                    // also fails if this rank has joined and other ranks have not.
                    let submitted =
                        rank_state.client.submit(&name, signature(tensor, step), || (tensor, step));
                    if submitted.is_ok() {
                        rank_state.actions.pop_front();
                    }
                    submitted.is_ok()
                }
                Some(TestAction::Join) => {
                    rank_state.client.join().map(|()| rank_state.actions.pop_front()).is_ok()
                }
                Some(TestAction::Close) if rank_state.client.is_idle() => {
                    rank_state.client.close();
                    rank_state.actions.pop_front();
                    true
                }
                _ => false,
            },
            1 => rank_state.client.take_report().map(|report| rank_state.reports.push_back(report)).is_some(),
            2 => {
                let Some(report) = rank_state.reports.pop_front() else { return false };
                let sent =
                    RankReport::decode(&report.encode(), self.size).expect("a sent message can be decoded");
                assert_eq!(sent, report);
                self.coordinator
                    .handle_report(Duration::ZERO, Rank::new(rank as u32), report)
                    .expect("the report is valid");
                self.send_messages();
                true
            }
            3 => {
                let Some(message) = rank_state.messages.pop_front() else { return false };
                for action in rank_state.client.handle_message(message).expect("the message is valid") {
                    match action {
                        ClientAction::Run(run) => {
                            let submitted = run.iter().filter(|(_, payload)| payload.is_some());
                            rank_state
                                .running
                                .push_back(submitted.map(|(request, _)| request.name.clone()).collect());
                            let named =
                                |(request, payload): (super::message::Request, _)| (request.name, payload);
                            rank_state.begun.push(run.into_iter().map(named).collect());
                        }
                        ClientAction::Joined(_) => rank_state.join_count += 1,
                        ClientAction::End => rank_state.has_ended = true,
                        ClientAction::Fail(_, error) => panic!("{error}"),
                    }
                }
                true
            }
            _ => {
                let Some(names) = rank_state.running.pop_front() else { return false };
                for name in names {
                    rank_state.client.release_name(&name);
                }
                if rank == 0 {
                    self.coordinator.record_completion(Duration::ZERO);
                    self.send_messages();
                }
                true
            }
        }
    }

    /// Makes the moves in `choices`. After that, tries all moves in turn until no move is possible.
    fn run(&mut self, choices: &[(usize, usize)]) {
        let n = self.ranks.len();
        for &(rank, move_kind) in choices {
            self.make_move(rank % n, move_kind % 5);
        }
        while (0..n * 5).filter(|index| self.make_move(index % n, index / n)).count() > 0 {}
    }
}

/// Returns the actions of a rank. In each step the rank submits every tensor once. The order of the tensors depends
/// on the rank and on the numbers in `order`. The number of steps in an epoch depends on the rank and the epoch. At the
/// end of each epoch, the rank joins. At the end of the last epoch, the rank also closes.
fn make_actions(rank: usize, tensors: usize, epochs: usize, order: &[usize]) -> Vec<TestAction> {
    let mut actions = Vec::new();
    let mut index = rank;
    for epoch in 0..epochs {
        let steps = 1 + (rank + epoch) % 3;
        for step in 0..steps {
            let mut remaining: Vec<usize> = (0..tensors).collect();
            while !remaining.is_empty() {
                index += 1;
                let tensor = remaining.remove(order[index % order.len()] % remaining.len());
                actions.push(TestAction::Submit { tensor, step });
            }
        }
        actions.push(TestAction::Join);
    }
    actions.push(TestAction::Close);
    actions
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn all_ranks_run_every_tensor_once_and_in_the_same_order(
        n in 1usize..5,
        tensors in 1usize..9,
        epochs in 1usize..4,
        cache_capacity in 0u16..10,
        fusion_bytes in 0u64..40,
        order in proptest::collection::vec(0usize..1000, 64),
        choices in proptest::collection::vec((0usize..4, 0usize..5), 0..600),
    ) {
        let actions_by_rank: Vec<Vec<TestAction>> = (0..n).map(|rank| make_actions(rank, tensors, epochs, &order)).collect();
        let is_submission = |action: &&TestAction| matches!(action, TestAction::Submit { .. });
        let submitted: Vec<usize> =
            actions_by_rank.iter().map(|actions| actions.iter().filter(is_submission).count()).collect();
        let mut group = SimulatedGroup::new(actions_by_rank, cache_capacity, fusion_bytes);
        group.run(&choices);
        let names = |rank_state: &TestedRank| -> Vec<Vec<String>> {
            rank_state.begun.iter().map(|run| run.iter().map(|(name, _)| name.clone()).collect()).collect()
        };
        let names_on_rank_0 = names(&group.ranks[0]);
        for (rank, rank_state) in group.ranks.iter().enumerate() {
            let is_finished = rank_state.has_ended && rank_state.actions.is_empty();
            prop_assert!(is_finished, "rank {} is stuck at {:?}", rank, rank_state.actions);
            prop_assert_eq!(rank_state.join_count, epochs);
            prop_assert_eq!(&names(rank_state), &names_on_rank_0);
            let contributed = rank_state.begun.iter().flatten().filter(|(_, payload)| payload.is_some()).count();
            prop_assert_eq!(contributed, submitted[rank]);
        }
        // If several ranks contribute to a tensor in one operation, they contribute their data of the same step.
        for (operation, names) in names_on_rank_0.iter().enumerate() {
            for tensor in 0..names.len() {
                let contribution = |rank_state: &TestedRank| rank_state.begun[operation][tensor].1;
                let mut contributions = group.ranks.iter().filter_map(contribution);
                let first = contributions.next();
                prop_assert!(first.is_some() && contributions.all(|other| Some(other) == first));
            }
        }
    }
}
