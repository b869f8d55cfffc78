//! The coordinator's decisions, one report at a time.

use std::time::Duration;

use super::coordinator::{Coordinator, CoordinatorLimits, Timestamp};
use super::message::{AnnouncedTensor, Instruction, RefusalKind, Report, Request, Signature, TensorOp};
use super::stalls::{StallReport, StallWatch};
use crate::types::{DType, Rank, ReduceOp};

const SUM: Signature = Signature { kind: TensorOp::AllReduce(ReduceOp::Sum), dtype: DType::F32, count: 4 };
const RULES: CoordinatorLimits = CoordinatorLimits { fusion_bytes: 64, capacity: 8, outstanding_max: 1 };
const T0: Timestamp = Timestamp::ZERO;

fn coordinator(n: u32) -> Coordinator {
    // In the job they are ranks 10, 11, ...
    let members = (10..10 + n).map(Rank::new).collect();
    let watch = StallWatch::new(Duration::from_secs(10), Some(Duration::from_secs(30)));
    Coordinator::new(RULES, members, watch)
}

fn request(name: &str, signature: Signature) -> Request {
    Request { name: name.into(), signature }
}

fn asks(names: &[&str], signature: Signature) -> Report {
    let requests = names.iter().map(|name| request(name, signature)).collect();
    Report { requests, ..Report::default() }
}

fn say(coordinator: &mut Coordinator, rank: u32, report: Report) {
    coordinator.report(T0, Rank::new(rank), report).expect("it is allowed");
}

/// The names in each operation of the next message.
fn runs(coordinator: &mut Coordinator) -> Vec<Vec<String>> {
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

fn joins() -> Report {
    Report { joins: true, ..Report::default() }
}

fn closes() -> Report {
    Report { closes: true, ..Report::default() }
}

#[test]
fn what_all_have_submitted_runs_and_what_becomes_ready_meanwhile_is_fused() {
    let mut coordinator = coordinator(2);
    say(&mut coordinator, 0, asks(&["a", "b", "c", "d", "e", "f"], SUM));
    assert_eq!(coordinator.next_message(), None);
    say(&mut coordinator, 1, asks(&["c"], SUM));
    assert_eq!(runs(&mut coordinator), [["c"]]);
    say(&mut coordinator, 1, asks(&["f", "a", "e", "b", "d"], SUM));
    assert_eq!(coordinator.next_message(), None, "one operation is under way");
    coordinator.complete(T0);
    // 16 bytes each, 64 at most, in the order in which they became ready.
    assert_eq!(runs(&mut coordinator), [["f", "a", "e", "b"]]);
    coordinator.complete(T0);
    assert_eq!(runs(&mut coordinator), [["d"]]);
}

#[test]
fn only_what_is_alike_is_fused_and_the_others_are_passed_over() {
    let mut coordinator = coordinator(1);
    let max = Signature { kind: TensorOp::AllReduce(ReduceOp::Max), ..SUM };
    let gather = Signature { kind: TensorOp::AllGather, ..SUM };
    let long = Signature { count: 100, ..SUM };
    let all = [("a", SUM), ("m", max), ("b", SUM), ("g", gather), ("h", gather), ("l", long), ("n", max)];
    let requests = all.map(|(name, signature)| request(name, signature)).to_vec();
    say(&mut coordinator, 0, Report { requests, ..Report::default() });
    let mut order = Vec::new();
    for _ in 0..5 {
        order.extend(runs(&mut coordinator));
        coordinator.complete(T0);
    }
    assert_eq!(order, [vec!["a", "b"], vec!["m", "n"], vec!["g"], vec!["h"], vec!["l"]]);
}

#[test]
fn what_is_known_is_said_and_asked_by_its_slot() {
    let mut coordinator = coordinator(1);
    say(&mut coordinator, 0, asks(&["a"], SUM));
    assert_eq!(runs(&mut coordinator), [["a"]]);
    coordinator.complete(T0);
    say(&mut coordinator, 0, Report { seen: 1, slots: [0].into(), ..Report::default() });
    assert_eq!(runs(&mut coordinator), [["#0"]]);
}

#[test]
fn ranks_that_disagree_are_named_with_what_they_asked_for() {
    let mut coordinator = coordinator(4);
    for rank in [0, 2, 3] {
        say(&mut coordinator, rank, asks(&["x"], SUM));
    }
    assert_eq!(coordinator.next_message(), None);
    say(&mut coordinator, 1, asks(&["x"], Signature { dtype: DType::F64, ..SUM }));
    let message = coordinator.next_message().expect("a refusal");
    let reason = "ranks 10, 12 and 13: all_reduce(sum, 4 x f32); rank 11: all_reduce(sum, 4 x f64)".into();
    let refuse = Instruction::Refuse { name: "x".into(), refusal: RefusalKind::Disagreement, reason };
    assert_eq!(message.instructions, [refuse]);
}

#[test]
fn who_has_joined_is_not_waited_for_and_all_go_on_when_all_have() {
    let mut coordinator = coordinator(3);
    let max = Signature { kind: TensorOp::AllReduce(ReduceOp::Max), ..SUM };
    say(&mut coordinator, 0, asks(&["a"], SUM));
    say(&mut coordinator, 2, asks(&["a"], SUM));
    say(&mut coordinator, 1, joins());
    assert_eq!(runs(&mut coordinator), [["a"]]);
    say(&mut coordinator, 0, asks(&["m"], max));
    say(&mut coordinator, 2, asks(&["m"], max));
    let message = coordinator.next_message().expect("a refusal");
    assert!(matches!(
        &message.instructions[..],
        [Instruction::Refuse { refusal: RefusalKind::WithoutJoined, .. }]
    ));
    let late = coordinator.report(T0, Rank::new(1), asks(&["z"], SUM));
    assert!(late.unwrap_err().0.contains("joined before"));
    say(&mut coordinator, 2, joins());
    say(&mut coordinator, 0, joins());
    coordinator.complete(T0);
    let message = coordinator.next_message().expect("all have joined");
    assert_eq!(message.instructions, [Instruction::Joined(Rank::ZERO)]);
    say(&mut coordinator, 1, Report { seen: 3, ..asks(&["b"], SUM) });
    assert_eq!(coordinator.next_message(), None);
}

#[test]
fn what_a_closed_rank_has_not_submitted_is_refused_and_the_end_comes_last() {
    let mut coordinator = coordinator(2);
    say(&mut coordinator, 0, asks(&["a", "b"], SUM));
    say(&mut coordinator, 1, Report { closes: true, ..asks(&["b"], SUM) });
    let message = coordinator.next_message().expect("a refusal and an operation");
    let reason = "rank 11 closed without submitting it".into();
    let refuse = Instruction::Refuse { name: "a".into(), refusal: RefusalKind::Left, reason };
    assert_eq!(message.instructions[0], refuse);
    assert!(matches!(&message.instructions[1], Instruction::Run(tensors) if tensors.len() == 1));
    assert!(coordinator.report(T0, Rank::new(1), closes()).unwrap_err().0.contains("closed before"));
    assert!(!coordinator.is_expecting_others());
    say(&mut coordinator, 0, closes());
    assert_eq!(coordinator.next_message().expect("the end").instructions, [Instruction::End]);
    assert_eq!(coordinator.next_message(), None);
}

#[test]
fn what_a_rank_must_not_say_is_a_violation() {
    let wrong = |report| coordinator(2).report(T0, Rank::ZERO, report).unwrap_err().0;
    assert!(wrong(asks(&["a", "a"], SUM)).contains("twice"));
    assert!(wrong(Report { slots: [3].into(), ..Report::default() }).contains("empty"));
    assert!(wrong(Report { slots: [9000].into(), ..Report::default() }).contains("empty"));
    assert!(wrong(Report { seen: 1, ..Report::default() }).contains("has read"));
    let stranger = coordinator(2).report(T0, Rank::new(2), closes());
    assert!(stranger.unwrap_err().0.contains("not in the group"));
}

#[test]
fn a_stall_is_told_once_and_ends_the_job_in_the_end() {
    let second = Duration::from_secs;
    let mut coordinator = coordinator(3);
    coordinator.report(second(1), Rank::ZERO, asks(&["x"], SUM)).unwrap();
    assert_eq!(coordinator.check(second(10)), StallReport::default());
    let report = coordinator.check(second(11));
    assert_eq!(report.abort, None);
    let text = "tensor `x` has waited 10.0s for ranks 11 and 12 to submit it";
    assert_eq!(report.stalls.iter().map(ToString::to_string).collect::<Vec<_>>(), [text]);
    assert!(coordinator.check(second(12)).stalls.is_empty(), "once");
    assert_eq!(coordinator.stalled(), report.stalls);
    coordinator.report(second(13), Rank::new(2), asks(&["x"], SUM)).unwrap();
    let report = coordinator.check(second(31));
    assert_eq!(report.abort.as_deref(), Some("tensor `x` has waited 30.0s for rank 11 to submit it"));
    coordinator.report(second(32), Rank::new(1), asks(&["x"], SUM)).unwrap();
    assert_eq!(coordinator.stalled(), []);
    assert_eq!(coordinator.check(second(100)), StallReport::default());
}

#[test]
fn who_has_joined_or_closed_waits_as_long_as_anything_happens() {
    let second = Duration::from_secs;
    let mut coordinator = coordinator(2);
    coordinator.report(second(1), Rank::new(1), joins()).unwrap();
    coordinator.report(second(25), Rank::ZERO, asks(&["x"], SUM)).unwrap();
    assert!(runs(&mut coordinator).len() == 1);
    coordinator.complete(second(26));
    assert!(coordinator.check(second(35)).stalls.is_empty());
    let report = coordinator.check(second(56));
    assert_eq!(report.stalls[0].tensor, None);
    let text = "ranks that have joined or closed have waited 30.0s for rank 10";
    assert_eq!(report.abort.as_deref(), Some(text));
}
