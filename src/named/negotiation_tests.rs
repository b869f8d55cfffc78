//! Tests of the negotiation without IO: a coordinator and its clients exchange messages. The messages are delivered
//! in all interleavings that links allow.

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

struct SimulatedRank {
    client: Client<(usize, usize)>,
    actions: VecDeque<TestAction>,
    reports: VecDeque<RankReport>,
    messages: VecDeque<CoordinatorMessage>,
    /// The running operations, the oldest first. Each operation is a list of the names of the tensors that this rank
    /// has submitted.
    running: VecDeque<Vec<String>>,
    /// All operations that have begun, each with its tensors.
    begun: Vec<Vec<BegunTensor>>,
    joined: usize,
    has_ended: bool,
}

struct SimulatedGroup {
    coordinator: Coordinator,
    nodes: Vec<SimulatedRank>,
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
    fn new(orders: Vec<Vec<TestAction>>, capacity: u16, fusion_bytes: u64) -> Self {
        let size = WorldSize::new(orders.len() as u32).unwrap();
        let members: Arc<[Rank]> = size.ranks().collect();
        let limits = CoordinatorLimits { fusion_bytes, capacity, outstanding_max: 2 };
        let watch = StallWatch::new(Duration::from_secs(1), None);
        let node = |actions: Vec<TestAction>| SimulatedRank {
            client: Client::new(size),
            actions: actions.into(),
            reports: VecDeque::new(),
            messages: VecDeque::new(),
            running: VecDeque::new(),
            begun: Vec::new(),
            joined: 0,
            has_ended: false,
        };
        let nodes = orders.into_iter().map(node).collect();
        Self { coordinator: Coordinator::new(limits, members, watch), nodes, size }
    }

    fn send_messages(&mut self) {
        while let Some(message) = self.coordinator.next_message() {
            let sent = CoordinatorMessage::decode(&message.encode(), self.size)
                .expect("a sent message can be decoded");
            assert_eq!(sent, message);
            self.nodes.iter_mut().for_each(|node| node.messages.push_back(message.clone()));
        }
    }

    /// Makes one move on one rank. `move_kind` selects the move: 0 makes the next call, 1 takes a report, 2 delivers
    /// a report, 3 delivers a message, and 4 ends an operation. Returns whether the move was possible.
    fn make_move(&mut self, rank: usize, move_kind: usize) -> bool {
        let node = &mut self.nodes[rank];
        match move_kind {
            0 => match node.actions.front().copied() {
                Some(TestAction::Submit { tensor, step }) => {
                    let name = format!("t{tensor}");
                    // The submission fails while the same tensor of the previous step is in flight. The submission
                    // also fails if this rank has joined and other ranks have not.
                    let submitted = node.client.submit(&name, signature(tensor, step), || (tensor, step));
                    if submitted.is_ok() {
                        node.actions.pop_front();
                    }
                    submitted.is_ok()
                }
                Some(TestAction::Join) => node.client.join().map(|()| node.actions.pop_front()).is_ok(),
                Some(TestAction::Close) if node.client.is_idle() => {
                    node.client.close();
                    node.actions.pop_front();
                    true
                }
                _ => false,
            },
            1 => node.client.take_report().map(|report| node.reports.push_back(report)).is_some(),
            2 => {
                let Some(report) = node.reports.pop_front() else { return false };
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
                let Some(message) = node.messages.pop_front() else { return false };
                for step in node.client.handle_message(message).expect("the message is valid") {
                    match step {
                        ClientAction::Run(run) => {
                            let own = run.iter().filter(|(_, payload)| payload.is_some());
                            node.running.push_back(own.map(|(request, _)| request.name.clone()).collect());
                            let named =
                                |(request, payload): (super::message::Request, _)| (request.name, payload);
                            node.begun.push(run.into_iter().map(named).collect());
                        }
                        ClientAction::Joined(_) => node.joined += 1,
                        ClientAction::End => node.has_ended = true,
                        ClientAction::Fail(_, error) => panic!("{error}"),
                    }
                }
                true
            }
            _ => {
                let Some(names) = node.running.pop_front() else { return false };
                for name in names {
                    node.client.release_name(&name);
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
        let n = self.nodes.len();
        for &(rank, what) in choices {
            self.make_move(rank % n, what % 5);
        }
        while (0..n * 5).filter(|index| self.make_move(index % n, index / n)).count() > 0 {}
    }
}

/// Returns the actions of a rank. In each step the rank submits every tensor once. The order of the tensors depends
/// on the rank and on the numbers in `order`. The number of steps in an epoch also differs from rank to rank, and
/// each rank joins at the end of an epoch.
fn make_actions(rank: usize, tensors: usize, epochs: usize, order: &[usize]) -> Vec<TestAction> {
    let mut actions = Vec::new();
    let mut index = rank;
    for epoch in 0..epochs {
        let steps = 1 + (rank + epoch) % 3;
        for step in 0..steps {
            let mut left: Vec<usize> = (0..tensors).collect();
            while !left.is_empty() {
                index += 1;
                let tensor = left.remove(order[index % order.len()] % left.len());
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
        capacity in 0u16..10,
        fusion in 0u64..40,
        order in proptest::collection::vec(0usize..1000, 64),
        choices in proptest::collection::vec((0usize..4, 0usize..5), 0..600),
    ) {
        let orders: Vec<Vec<TestAction>> = (0..n).map(|rank| make_actions(rank, tensors, epochs, &order)).collect();
        let submitted: Vec<usize> =
            orders.iter().map(|actions| actions.iter().filter(|d| matches!(d, TestAction::Submit { .. })).count()).collect();
        let mut world = SimulatedGroup::new(orders, capacity, fusion);
        world.run(&choices);
        let names = |node: &SimulatedRank| -> Vec<Vec<String>> {
            node.begun.iter().map(|run| run.iter().map(|(name, _)| name.clone()).collect()).collect()
        };
        let first = names(&world.nodes[0]);
        for (rank, node) in world.nodes.iter().enumerate() {
            prop_assert!(node.has_ended && node.actions.is_empty(), "rank {} is stuck at {:?}", rank, node.actions);
            prop_assert_eq!(node.joined, epochs);
            prop_assert_eq!(&names(node), &first);
            let contributed = node.begun.iter().flatten().filter(|(_, payload)| payload.is_some()).count();
            prop_assert_eq!(contributed, submitted[rank]);
        }
        // If several ranks contribute to a tensor in one operation, they contribute their data of the same step.
        for (operation, names) in first.iter().enumerate() {
            for tensor in 0..names.len() {
                let contribution = |node: &SimulatedRank| node.begun[operation][tensor].1;
                let mut contributions = world.nodes.iter().filter_map(contribution);
                let first = contributions.next();
                prop_assert!(first.is_some() && contributions.all(|other| Some(other) == first));
            }
        }
    }
}
