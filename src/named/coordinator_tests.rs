//! Tests of the coordinator without clients. Each test passes reports to the coordinator, and checks the
//! coordinator's messages.

use std::time::Duration;

use super::coordinator::{Coordinator, CoordinatorLimits};
use super::message::{AnnouncedTensor, Instruction, RankReport, RefusalKind, Request, Signature, TensorOp};
use super::stalls::{StallReport, StallWatch};
use crate::types::{DType, Rank, ReduceOp};

const SUM_SIGNATURE: Signature =
    Signature { kind: TensorOp::AllReduce(ReduceOp::Sum), dtype: DType::F32, count: 4 };
const LIMITS: CoordinatorLimits =
    CoordinatorLimits { fusion_bytes: 64, cache_capacity: 8, running_operations_max: 1 };
const START_TIME: Duration = Duration::ZERO;

fn make_coordinator(n: u32) -> Coordinator {
    // In the job, the ranks of the group have the numbers 10, 11, ...
    let job_ranks = (10..10 + n).map(Rank::new).collect();
    let watch = StallWatch::new(Duration::from_secs(10), Some(Duration::from_secs(30)));
    Coordinator::new(LIMITS, job_ranks, watch)
}

fn make_request(name: &str, signature: Signature) -> Request {
    Request { name: name.into(), signature }
}

fn submission_report(names: &[&str], signature: Signature) -> RankReport {
    let requests = names.iter().map(|name| make_request(name, signature)).collect();
    RankReport { requests, ..RankReport::default() }
}

fn send_report(coordinator: &mut Coordinator, rank: u32, report: RankReport) {
    coordinator.handle_report(START_TIME, Rank::new(rank), report).expect("the report should be valid");
}

/// Returns the names of the tensors in each operation of the next message. For a cached tensor, the message contains
/// only the slot; for slot 3, for example, this function returns `#3` as the name.
fn next_operations(coordinator: &mut Coordinator) -> Vec<Vec<String>> {
    let message = coordinator.next_message().unwrap_or_default();
    let runs = message.instructions.into_iter().filter_map(|instruction| match instruction {
        Instruction::Run(tensors) => Some(tensors),
        _ => None,
    });
    let name = |tensor| match tensor {
        AnnouncedTensor::Named(request, _) => request.name,
        AnnouncedTensor::Cached(slot) => format!("#{slot}"),
    };
    runs.map(|tensors| tensors.into_iter().map(name).collect()).collect()
}

fn join_report() -> RankReport {
    RankReport { joins: true, ..RankReport::default() }
}

fn close_report() -> RankReport {
    RankReport { closes: true, ..RankReport::default() }
}

#[test]
fn tensors_that_become_ready_while_an_operation_runs_are_fused() {
    let mut coordinator = make_coordinator(2);
    send_report(&mut coordinator, 0, submission_report(&["a", "b", "c", "d", "e", "f"], SUM_SIGNATURE));
    assert_eq!(coordinator.next_message(), None);
    send_report(&mut coordinator, 1, submission_report(&["c"], SUM_SIGNATURE));
    assert_eq!(next_operations(&mut coordinator), [["c"]]);
    send_report(&mut coordinator, 1, submission_report(&["f", "a", "e", "b", "d"], SUM_SIGNATURE));
    assert_eq!(coordinator.next_message(), None, "one operation still runs");
    coordinator.record_completion(START_TIME);
    // Each tensor has 16 bytes, and a fused operation at most 64 bytes. The tensors are in the order in which they
    // became ready.
    assert_eq!(next_operations(&mut coordinator), [["f", "a", "e", "b"]]);
    coordinator.record_completion(START_TIME);
    assert_eq!(next_operations(&mut coordinator), [["d"]]);
}

#[test]
fn only_tensors_of_the_same_kind_are_fused_and_others_run_later() {
    let mut coordinator = make_coordinator(1);
    let max = Signature { kind: TensorOp::AllReduce(ReduceOp::Max), ..SUM_SIGNATURE };
    let gather = Signature { kind: TensorOp::AllGather, ..SUM_SIGNATURE };
    let long = Signature { count: 100, ..SUM_SIGNATURE };
    let all = [
        ("a", SUM_SIGNATURE),
        ("m", max),
        ("b", SUM_SIGNATURE),
        ("g", gather),
        ("h", gather),
        ("l", long),
        ("n", max),
    ];
    let requests = all.map(|(name, signature)| make_request(name, signature)).to_vec();
    send_report(&mut coordinator, 0, RankReport { requests, ..RankReport::default() });
    let mut order = Vec::new();
    for _ in 0..5 {
        order.extend(next_operations(&mut coordinator));
        coordinator.record_completion(START_TIME);
    }
    assert_eq!(order, [vec!["a", "b"], vec!["m", "n"], vec!["g"], vec!["h"], vec!["l"]]);
}

#[test]
fn a_cached_tensor_is_reported_and_announced_by_its_slot() {
    let mut coordinator = make_coordinator(1);
    send_report(&mut coordinator, 0, submission_report(&["a"], SUM_SIGNATURE));
    assert_eq!(next_operations(&mut coordinator), [["a"]]);
    coordinator.record_completion(START_TIME);
    send_report(
        &mut coordinator,
        0,
        RankReport { messages_read: 1, slots: [0].into(), ..RankReport::default() },
    );
    assert_eq!(next_operations(&mut coordinator), [["#0"]]);
}

#[test]
fn a_disagreement_is_refused_with_the_request_of_each_rank() {
    let mut coordinator = make_coordinator(4);
    for rank in [0, 2, 3] {
        send_report(&mut coordinator, rank, submission_report(&["x"], SUM_SIGNATURE));
    }
    assert_eq!(coordinator.next_message(), None);
    send_report(
        &mut coordinator,
        1,
        submission_report(&["x"], Signature { dtype: DType::F64, ..SUM_SIGNATURE }),
    );
    let message = coordinator.next_message().expect("there should be a refusal");
    let reason = "ranks 10, 12 and 13: all_reduce(sum, 4 x f32); rank 11: all_reduce(sum, 4 x f64)".into();
    let refuse = Instruction::Refuse { name: "x".into(), refusal: RefusalKind::Disagreement, reason };
    assert_eq!(message.instructions, [refuse]);
}

#[test]
fn sums_run_without_ranks_that_have_joined_and_other_operations_are_refused() {
    let mut coordinator = make_coordinator(3);
    let max = Signature { kind: TensorOp::AllReduce(ReduceOp::Max), ..SUM_SIGNATURE };
    send_report(&mut coordinator, 0, submission_report(&["a"], SUM_SIGNATURE));
    send_report(&mut coordinator, 2, submission_report(&["a"], SUM_SIGNATURE));
    send_report(&mut coordinator, 1, join_report());
    assert_eq!(next_operations(&mut coordinator), [["a"]]);
    send_report(&mut coordinator, 0, submission_report(&["m"], max));
    send_report(&mut coordinator, 2, submission_report(&["m"], max));
    let message = coordinator.next_message().expect("there should be a refusal");
    assert!(matches!(
        &message.instructions[..],
        [Instruction::Refuse { refusal: RefusalKind::NeedsJoinedRanks, .. }]
    ));
    let late = coordinator.handle_report(START_TIME, Rank::new(1), submission_report(&["z"], SUM_SIGNATURE));
    assert!(late.unwrap_err().0.contains("after it had joined"));
    send_report(&mut coordinator, 2, join_report());
    send_report(&mut coordinator, 0, join_report());
    coordinator.record_completion(START_TIME);
    let message = coordinator.next_message().expect("all ranks should have joined");
    assert_eq!(message.instructions, [Instruction::Joined(Rank::ZERO)]);
    send_report(
        &mut coordinator,
        1,
        RankReport { messages_read: 3, ..submission_report(&["b"], SUM_SIGNATURE) },
    );
    assert_eq!(coordinator.next_message(), None);
}

#[test]
fn tensors_that_a_closed_rank_has_not_submitted_are_refused() {
    let mut coordinator = make_coordinator(2);
    send_report(&mut coordinator, 0, submission_report(&["a", "b"], SUM_SIGNATURE));
    send_report(&mut coordinator, 1, RankReport { closes: true, ..submission_report(&["b"], SUM_SIGNATURE) });
    let message = coordinator.next_message().expect("there should be a message");
    let reason = "rank 11 closed without submitting it".into();
    let refuse = Instruction::Refuse { name: "a".into(), refusal: RefusalKind::RankClosed, reason };
    assert_eq!(message.instructions[0], refuse);
    assert!(matches!(&message.instructions[1], Instruction::Run(tensors) if tensors.len() == 1));
    assert!(
        coordinator
            .handle_report(START_TIME, Rank::new(1), close_report())
            .unwrap_err()
            .0
            .contains("after it had closed")
    );
    assert!(!coordinator.expects_reports());
    send_report(&mut coordinator, 0, close_report());
    assert_eq!(coordinator.next_message().expect("there should be an end").instructions, [Instruction::End]);
    assert_eq!(coordinator.next_message(), None);
}

#[test]
fn invalid_reports_are_violations() {
    let violation = |report| make_coordinator(2).handle_report(START_TIME, Rank::ZERO, report).unwrap_err().0;
    assert!(violation(submission_report(&["a", "a"], SUM_SIGNATURE)).contains("twice"));
    assert!(violation(RankReport { slots: [3].into(), ..RankReport::default() }).contains("empty"));
    assert!(violation(RankReport { slots: [9000].into(), ..RankReport::default() }).contains("empty"));
    assert!(violation(RankReport { messages_read: 1, ..RankReport::default() }).contains("has read"));
    let from_rank_2_of_2 = make_coordinator(2).handle_report(START_TIME, Rank::new(2), close_report());
    assert!(from_rank_2_of_2.unwrap_err().0.contains("not a rank of the group"));
}

#[test]
fn a_stall_is_reported_once_and_ends_the_job_after_the_abort_limit() {
    let seconds = Duration::from_secs;
    let mut coordinator = make_coordinator(3);
    coordinator.handle_report(seconds(1), Rank::ZERO, submission_report(&["x"], SUM_SIGNATURE)).unwrap();
    assert_eq!(coordinator.check_for_stalls(seconds(10)), StallReport::default());
    let report = coordinator.check_for_stalls(seconds(11));
    assert_eq!(report.abort_reason, None);
    let text = "tensor `x` has waited 10.0s for ranks 11 and 12 to submit it";
    assert_eq!(report.stalls.iter().map(ToString::to_string).collect::<Vec<_>>(), [text]);
    assert!(coordinator.check_for_stalls(seconds(12)).stalls.is_empty(), "a stall is reported once");
    assert_eq!(coordinator.reported_stalls(), report.stalls);
    coordinator.handle_report(seconds(13), Rank::new(2), submission_report(&["x"], SUM_SIGNATURE)).unwrap();
    let report = coordinator.check_for_stalls(seconds(31));
    assert_eq!(report.abort_reason.as_deref(), Some("tensor `x` has waited 30.0s for rank 11 to submit it"));
    coordinator.handle_report(seconds(32), Rank::new(1), submission_report(&["x"], SUM_SIGNATURE)).unwrap();
    assert_eq!(coordinator.reported_stalls(), []);
    assert_eq!(coordinator.check_for_stalls(seconds(100)), StallReport::default());
}

#[test]
fn a_join_or_close_is_no_stall_as_long_as_other_ranks_are_active() {
    let seconds = Duration::from_secs;
    let mut coordinator = make_coordinator(2);
    coordinator.handle_report(seconds(1), Rank::new(1), join_report()).unwrap();
    coordinator.handle_report(seconds(25), Rank::ZERO, submission_report(&["x"], SUM_SIGNATURE)).unwrap();
    assert!(next_operations(&mut coordinator).len() == 1);
    coordinator.record_completion(seconds(26));
    assert!(coordinator.check_for_stalls(seconds(35)).stalls.is_empty());
    let report = coordinator.check_for_stalls(seconds(56));
    assert_eq!(report.stalls[0].tensor, None);
    let text = "ranks that have joined or closed have waited 30.0s for rank 10";
    assert_eq!(report.abort_reason.as_deref(), Some(text));
}
