//! The whole negotiation without IO: a coordinator and its clients, with messages delivered in any order that links
//! allow.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;

use super::client::{Client, ClientAction};
use super::coordinator::{Coordinator, CoordinatorLimits, Timestamp};
use super::message::{CoordinatorMessage, Report, Signature, TensorOp};
use super::stalls::StallWatch;
use crate::types::{DType, Rank, ReduceOp, WorldSize};

/// The next actions of a rank, in order: submit this tensor in this step, or join.
#[derive(Clone, Copy, Debug)]
enum TestAction {
    Submit { tensor: usize, step: usize },
    Join,
    Close,
}

/// A tensor that has been run, and what this rank contributed.
type FinishedTensor = (String, Option<(usize, usize)>);

struct SimulatedRank {
    client: Client<(usize, usize)>,
    deeds: VecDeque<TestAction>,
    reports: VecDeque<Report>,
    messages: VecDeque<CoordinatorMessage>,
    /// Operations under way, oldest first: the names that this rank has submitted.
    running: VecDeque<Vec<String>>,
    /// The operations that have run, and whether this rank contributed.
    done: Vec<Vec<FinishedTensor>>,
    joined: usize,
    has_ended: bool,
}

struct SimulatedGroup {
    coordinator: Coordinator,
    nodes: Vec<SimulatedRank>,
    size: WorldSize,
}

/// Every third tensor changes its length in every other step.
fn signature(tensor: usize, step: usize) -> Signature {
    let count = if tensor.is_multiple_of(3) { 1 + step as u64 % 2 } else { 2 };
    let op = if tensor.is_multiple_of(5) { ReduceOp::Average } else { ReduceOp::Sum };
    Signature { kind: TensorOp::AllReduce(op), dtype: DType::F32, count }
}

impl SimulatedGroup {
    fn new(orders: Vec<Vec<TestAction>>, capacity: u16, fusion_bytes: u64) -> Self {
        let size = WorldSize::new(orders.len() as u32).unwrap();
        let members: Arc<[Rank]> = size.ranks().collect();
        let rules = CoordinatorLimits { fusion_bytes, capacity, outstanding_max: 2 };
        let watch = StallWatch::new(Duration::from_secs(1), None);
        let node = |deeds: Vec<TestAction>| SimulatedRank {
            client: Client::new(size),
            deeds: deeds.into(),
            reports: VecDeque::new(),
            messages: VecDeque::new(),
            running: VecDeque::new(),
            done: Vec::new(),
            joined: 0,
            has_ended: false,
        };
        let nodes = orders.into_iter().map(node).collect();
        Self { coordinator: Coordinator::new(rules, members, watch), nodes, size }
    }

    fn send_messages(&mut self) {
        while let Some(message) = self.coordinator.next_message() {
            let sent = CoordinatorMessage::decode(&message.encode(), self.size)
                .expect("a sent message can be decoded");
            assert_eq!(sent, message);
            self.nodes.iter_mut().for_each(|node| node.messages.push_back(message.clone()));
        }
    }

    /// Makes one move on one rank; returns whether there was one.
    fn act(&mut self, rank: usize, what: usize) -> bool {
        let node = &mut self.nodes[rank];
        match what {
            0 => match node.deeds.front().copied() {
                Some(TestAction::Submit { tensor, step }) => {
                    let name = format!("t{tensor}");
                    // It is refused while the tensor of the previous step is in flight, or until all have joined.
                    let submitted = node.client.submit(&name, signature(tensor, step), || (tensor, step));
                    if submitted.is_ok() {
                        node.deeds.pop_front();
                    }
                    submitted.is_ok()
                }
                Some(TestAction::Join) => node.client.join().map(|()| node.deeds.pop_front()).is_ok(),
                Some(TestAction::Close) if node.client.is_idle() => {
                    node.client.close();
                    node.deeds.pop_front();
                    true
                }
                _ => false,
            },
            1 => node.client.take_report().map(|report| node.reports.push_back(report)).is_some(),
            2 => {
                let Some(report) = node.reports.pop_front() else { return false };
                let sent =
                    Report::decode(&report.encode(), self.size).expect("a sent message can be decoded");
                assert_eq!(sent, report);
                self.coordinator
                    .report(Timestamp::ZERO, Rank::new(rank as u32), report)
                    .expect("it is allowed");
                self.send_messages();
                true
            }
            3 => {
                let Some(message) = node.messages.pop_front() else { return false };
                for step in node.client.read(message).expect("it makes sense") {
                    match step {
                        ClientAction::Run(run) => {
                            let own = run.iter().filter(|(_, payload)| payload.is_some());
                            node.running.push_back(own.map(|(request, _)| request.name.clone()).collect());
                            let named =
                                |(request, payload): (super::message::Request, _)| (request.name, payload);
                            node.done.push(run.into_iter().map(named).collect());
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
                    node.client.finish(&name);
                }
                if rank == 0 {
                    self.coordinator.complete(Timestamp::ZERO);
                    self.send_messages();
                }
                true
            }
        }
    }

    /// Runs until no move is possible, first by the choices and then in turn.
    fn run(&mut self, choices: &[(usize, usize)]) {
        let n = self.nodes.len();
        for &(rank, what) in choices {
            self.act(rank % n, what % 5);
        }
        while (0..n * 5).filter(|index| self.act(index % n, index / n)).count() > 0 {}
    }
}

/// Epochs of steps, which a rank may leave early; in each step every tensor once, in a different order on each rank.
fn plan(rank: usize, tensors: usize, epochs: usize, order: &[usize]) -> Vec<TestAction> {
    let mut deeds = Vec::new();
    let mut place = rank;
    for epoch in 0..epochs {
        let steps = 1 + (rank + epoch) % 3;
        for step in 0..steps {
            let mut left: Vec<usize> = (0..tensors).collect();
            while !left.is_empty() {
                place += 1;
                let tensor = left.remove(order[place % order.len()] % left.len());
                deeds.push(TestAction::Submit { tensor, step });
            }
        }
        deeds.push(TestAction::Join);
    }
    deeds.push(TestAction::Close);
    deeds
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn every_tensor_runs_once_on_all_ranks_in_one_order_for_any_sequence_of_events(
        n in 1usize..5,
        tensors in 1usize..9,
        epochs in 1usize..4,
        capacity in 0u16..10,
        fusion in 0u64..40,
        order in proptest::collection::vec(0usize..1000, 64),
        choices in proptest::collection::vec((0usize..4, 0usize..5), 0..600),
    ) {
        let orders: Vec<Vec<TestAction>> = (0..n).map(|rank| plan(rank, tensors, epochs, &order)).collect();
        let submitted: Vec<usize> =
            orders.iter().map(|deeds| deeds.iter().filter(|d| matches!(d, TestAction::Submit { .. })).count()).collect();
        let mut world = SimulatedGroup::new(orders, capacity, fusion);
        world.run(&choices);
        let names = |node: &SimulatedRank| -> Vec<Vec<String>> {
            node.done.iter().map(|run| run.iter().map(|(name, _)| name.clone()).collect()).collect()
        };
        let first = names(&world.nodes[0]);
        for (rank, node) in world.nodes.iter().enumerate() {
            prop_assert!(node.has_ended && node.deeds.is_empty(), "rank {} is stuck at {:?}", rank, node.deeds);
            prop_assert_eq!(node.joined, epochs);
            prop_assert_eq!(&names(node), &first);
            let contributed = node.done.iter().flatten().filter(|(_, payload)| payload.is_some()).count();
            prop_assert_eq!(contributed, submitted[rank]);
        }
        // Tensors that run together belong to the same step on all ranks that take part.
        for (operation, names) in first.iter().enumerate() {
            for tensor in 0..names.len() {
                let of = |node: &SimulatedRank| node.done[operation][tensor].1;
                let mut taking_part = world.nodes.iter().filter_map(of);
                let one = taking_part.next();
                prop_assert!(one.is_some() && taking_part.all(|other| Some(other) == one));
            }
        }
    }
}
