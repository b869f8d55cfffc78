//! Tests that the symbolic executor rejects schedules that contain a mistake.

use super::{MoveOrder, Proof, SimulatedWorld, own_contribution};
use crate::schedule::chain::reduce;
use crate::schedule::tree::reduce_tree;
use crate::schedule::{Action, Schedule, Step, StepDependency};
use crate::types::{Rank, WorldSize};

/// Returns the schedules of two ranks that exchange messages in one step. Rank r sends `sent[r]` elements and expects
/// to receive `received[r]` elements.
fn exchange_schedules(sent: [usize; 2], received: [usize; 2], action: Action) -> Vec<Schedule> {
    let step = |rank: usize| {
        let peer = Rank::new(1 - rank as u32);
        Step {
            send: Step::send(peer, 0..sent[rank], None).send,
            ..Step::receive(peer, 0..received[rank], action, None)
        }
    };
    [0, 1].map(|rank| vec![step(rank)].into()).into()
}

fn run_schedules(schedules: Vec<Schedule>, order: &mut MoveOrder) {
    let world = WorldSize::new(schedules.len() as u32).unwrap();
    let buffers = world.ranks().map(|rank| own_contribution(world, rank, 4)).collect();
    SimulatedWorld::new(schedules, buffers, 1).run(order);
}

/// The receive of step 0 does not wait until step 1 has sent the same elements. Arriving elements therefore overwrite
/// elements that the rank still has to send.
#[test]
#[should_panic(expected = "step 0 changes what step 1 still has to send")]
fn a_receive_that_overwrites_unsent_data_is_found() {
    let mut schedules = exchange_schedules([4, 4], [4, 4], Action::Copy);
    for schedule in &mut schedules {
        // Move the send to a second step, because a receive waits for a send of the same step.
        let send = schedule.steps[0].send.take();
        schedule.steps.push(Step { send, receive: None, action: Action::Copy });
    }
    run_schedules(schedules, &mut MoveOrder::Random(Box::new(rand::SeedableRng::seed_from_u64(1))));
}

#[test]
#[should_panic(expected = "the message is for another step")]
fn a_send_that_is_longer_than_its_receive_is_found() {
    run_schedules(exchange_schedules([2, 1], [1, 1], Action::Copy), &mut MoveOrder::Lockstep);
}

#[test]
#[should_panic(expected = "the message never arrives")]
fn a_receive_without_a_send_is_found() {
    let mut schedules = exchange_schedules([1, 1], [1, 1], Action::Copy);
    schedules[0].steps[0].send = None;
    run_schedules(schedules, &mut MoveOrder::Eager);
}

#[test]
#[should_panic(expected = "a contribution is reduced twice")]
fn a_contribution_that_is_reduced_twice_is_found() {
    let mut schedules = exchange_schedules([1, 1], [1, 1], Action::Reduce);
    for schedule in &mut schedules {
        let mut again = schedule.steps[0].clone();
        again.send.as_mut().unwrap().awaited_step = Some(StepDependency(0));
        schedule.steps.push(again);
    }
    run_schedules(schedules, &mut MoveOrder::Eager);
}

/// With 3 ranks and root 0, the chain reduces the contributions in the order 1, 2, 0. The rank order is 0, 1, 2.
#[test]
#[should_panic(expected = "out of rank order")]
fn a_reduction_out_of_rank_order_is_found() {
    let build = |world, rank, count| reduce(world, rank, Rank::ZERO, count);
    Proof { worlds: 3..=3, in_rank_order: true, ..Proof::new() }.run(
        build,
        own_contribution,
        |_, _, _, _| (),
    );
}

#[test]
#[should_panic(expected = "a receive waits for another receive")]
fn a_receive_that_waits_for_another_receive_is_found() {
    let build = |world, rank, count| reduce_tree(world, rank, Rank::ZERO, count);
    Proof { worlds: 3..=3, ..Proof::new() }.run(build, own_contribution, |_, _, _, _| ());
}

/// In this faulty schedule, rank 0 reduces the contributions in the order in which they arrive.
#[test]
#[should_panic(expected = "contributions are reduced in the order of arrival")]
fn a_reduction_in_order_of_arrival_is_found() {
    let build = |world: WorldSize, rank: Rank, count| {
        let reduce_from = |peer| Step::receive(peer, 0..count, Action::Reduce, None);
        let steps = match rank {
            Rank::ZERO => world.ranks().skip(1).map(reduce_from).collect(),
            _ => vec![Step::send(Rank::ZERO, 0..count, None)],
        };
        steps.into()
    };
    Proof { worlds: 3..=3, ..Proof::new() }.run(build, own_contribution, |_, _, _, _| ());
}
