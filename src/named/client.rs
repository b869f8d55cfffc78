//! The client side of the negotiation, in which the ranks agree on the tensors of the next operations. Every rank has
//! a client. The client keeps this rank's submitted tensors until their results are known. The client writes reports
//! for the coordinator on rank 0, and handles the coordinator's messages. The client uses no clock and no IO.

use std::collections::BTreeMap;

use super::NamedStatistics;
use super::cache::RankCache;
use super::error::{NamedError, Violation};
use super::message::{
    CoordinatorMessage, Instruction, REQUESTS_MAX, RankReport, RefusalKind, Request, Signature,
    check_tensor_name,
};
use crate::types::{Rank, WorldSize};

/// At any time, a rank may have at most this number of submitted tensors without a result.
pub const UNFINISHED_TENSORS_MAX: usize = 1 << 16;

/// The state machine of a rank: reports submitted tensors to the coordinator, and handles the coordinator's messages.
/// `P` is the type of a tensor's data.
pub(super) struct Client<P> {
    world: WorldSize,
    cache: RankCache,
    /// The submitted tensors without a result, by name. The data are `None` after the tensor's operation has begun.
    tensors: BTreeMap<String, (Signature, Option<P>)>,
    /// The contents of the next report.
    report: RankReport,
    has_joined: bool,
    has_closed: bool,
    statistics: NamedStatistics,
}

/// An action that a message of the coordinator requires of this rank.
#[derive(PartialEq, Eq, Debug)]
pub(super) enum ClientAction<P> {
    /// Run a single operation on all these tensors. If the data of a tensor are `None`, this rank has called `join`,
    /// and contributes zeros.
    Run(Vec<(Request, Option<P>)>),
    /// Report this error to the handle of the tensor. The first field is the data of the tensor.
    Fail(P, NamedError),
    /// Report to the thread that waits in `join` that all ranks have joined. The field is the last rank that joined.
    Joined(Rank),
    /// Shut the named tensors down, because all ranks have closed.
    End,
}

impl<P> Client<P> {
    pub(super) fn new(world: WorldSize) -> Self {
        Self {
            world,
            cache: RankCache::default(),
            tensors: BTreeMap::new(),
            report: RankReport::default(),
            has_joined: false,
            has_closed: false,
            statistics: NamedStatistics::default(),
        }
    }

    pub(super) fn world(&self) -> WorldSize {
        self.world
    }

    pub(super) fn statistics(&self) -> NamedStatistics {
        self.statistics
    }

    /// Submits a tensor. Returns an error if the name or the size is invalid, or if this rank may not submit this
    /// tensor now.
    pub(super) fn submit(
        &mut self,
        name: &str,
        signature: Signature,
        payload: impl FnOnce() -> P,
    ) -> Result<(), NamedError> {
        let limit_error = |reason: String| {
            let shown_len = name.floor_char_boundary(40);
            NamedError::Limit { name: name[..shown_len].to_owned(), reason }
        };
        check_tensor_name(name)
            .and_then(|()| signature.check_size_and_operation(self.world))
            .map_err(|violation| limit_error(violation.0))?;
        if self.has_closed {
            return Err(NamedError::Closed);
        }
        if self.has_joined {
            return Err(NamedError::HasJoined);
        }
        if self.tensors.contains_key(name) {
            return Err(NamedError::InFlight(name.to_owned()));
        }
        if self.tensors.len() >= UNFINISHED_TENSORS_MAX {
            return Err(limit_error(format!(
                "{UNFINISHED_TENSORS_MAX} tensors are already in flight on this rank"
            )));
        }
        self.tensors.insert(name.to_owned(), (signature, Some(payload())));
        self.statistics.tensors += 1;
        if let Some(slot) = self.cache.find_slot(name, &signature) {
            self.statistics.cached += 1;
            self.report.slots.insert(slot);
        } else {
            self.report.requests.push(Request { name: name.to_owned(), signature });
        }
        Ok(())
    }

    /// Records that this rank has no more data.
    pub(super) fn join(&mut self) -> Result<(), NamedError> {
        if self.has_closed {
            return Err(NamedError::Closed);
        }
        if self.has_joined {
            return Err(NamedError::HasJoined);
        }
        self.has_joined = true;
        self.report.joins = true;
        Ok(())
    }

    /// Records that this rank will submit no more tensors.
    pub(super) fn close(&mut self) {
        if !self.has_closed {
            self.has_closed = true;
            self.report.closes = true;
        }
    }

    /// Returns the next report to the coordinator, or `None` if there is nothing to report. A report contains the
    /// name and signature of at most [`REQUESTS_MAX`] tensors. If several reports are needed, only the last report
    /// contains this rank's join or close, so that the coordinator receives all tensors first.
    pub(super) fn take_report(&mut self) -> Option<RankReport> {
        let report = &mut self.report;
        if report.slots.is_empty() && report.requests.is_empty() && !report.joins && !report.closes {
            return None;
        }
        self.statistics.reports += 1;
        let mut next_report = RankReport { messages_read: report.messages_read, ..std::mem::take(report) };
        report.messages_read = next_report.messages_read;
        if next_report.requests.len() > REQUESTS_MAX {
            report.requests = next_report.requests.split_off(REQUESTS_MAX);
            report.joins = std::mem::take(&mut next_report.joins);
            report.closes = std::mem::take(&mut next_report.closes);
        }
        Some(next_report)
    }

    /// Processes a message of the coordinator, and returns what this rank must do now.
    pub(super) fn handle_message(
        &mut self,
        message: CoordinatorMessage,
    ) -> Result<Vec<ClientAction<P>>, Violation> {
        let mut actions = Vec::with_capacity(message.instructions.len());
        for instruction in message.instructions {
            match instruction {
                Instruction::Run(tensors) => {
                    let mut tensors_to_run = Vec::with_capacity(tensors.len());
                    for tensor in tensors {
                        let request = self.cache.apply_announcement(tensor)?;
                        let payload = self.take_payload(&request)?;
                        tensors_to_run.push((request, payload));
                    }
                    check_fused_run(&tensors_to_run)?;
                    self.statistics.operations += 1;
                    actions.push(ClientAction::Run(tensors_to_run));
                }
                Instruction::Refuse { name, refusal, reason } => {
                    if let Some(payload) = self.tensors.remove(&name).and_then(|(_, payload)| payload) {
                        let error = match refusal {
                            RefusalKind::Disagreement => NamedError::Disagreement { name, requests: reason },
                            RefusalKind::NeedsJoinedRanks => {
                                NamedError::NeedsJoinedRanks { name, detail: reason }
                            }
                            RefusalKind::RankClosed => NamedError::RankClosed { name, detail: reason },
                        };
                        actions.push(ClientAction::Fail(payload, error));
                    }
                }
                Instruction::Joined(last_joined) => {
                    self.has_joined = false;
                    actions.push(ClientAction::Joined(last_joined));
                }
                Instruction::End => actions.push(ClientAction::End),
            }
        }
        for slot in message.retired {
            let Some(request) = self.cache.clear_slot(slot) else { continue };
            // If the next report contains the retired slot, replace the slot by the name and the signature of its
            // tensor.
            if self.report.slots.remove(&slot) {
                self.report.requests.push(request);
            }
        }
        self.report.messages_read += 1;
        Ok(actions)
    }

    /// Removes and returns the data of a tensor whose operation begins. Returns `None` if this rank has joined and
    /// contributes zeros.
    fn take_payload(&mut self, request: &Request) -> Result<Option<P>, Violation> {
        let Request { name, signature } = request;
        match self.tensors.get_mut(name) {
            Some((submitted, payload @ Some(_))) if *submitted == *signature => Ok(payload.take()),
            // `Some((_, None))`: this rank submitted a tensor with this name before it joined, and the tensor's
            // operation still runs on this rank. Other ranks have finished the operation and submitted the name again.
            None | Some((_, None)) if self.has_joined => Ok(None),
            Some((submitted, _)) => {
                Err(Violation(format!("it ran `{name}` as {signature}, but this rank submitted {submitted}")))
            }
            None => Err(Violation(format!("it ran `{name}`, which this rank has not submitted"))),
        }
    }

    /// Returns whether all tensors that this rank has submitted have results, and this rank does not wait in `join`.
    #[cfg(test)]
    pub(super) fn is_idle(&self) -> bool {
        self.tensors.is_empty() && !self.has_joined
    }

    /// Makes the name of a tensor available again, because the result of the tensor is known. Do not call this function
    /// for a tensor to which this rank contributed zeros: this rank may have submitted a new tensor with the same name.
    pub(super) fn release_name(&mut self, name: &str) {
        self.tensors.remove(name);
    }

    /// Ends the client. Returns the data of the tensors whose operations have not begun.
    pub(super) fn end_and_take_payloads(&mut self) -> Vec<P> {
        self.has_closed = true;
        self.report = RankReport::default();
        std::mem::take(&mut self.tensors).into_values().filter_map(|(_, payload)| payload).collect()
    }
}

/// Checks that the coordinator fused only tensors with the same operation and element type.
fn check_fused_run<P>(run: &[(Request, Option<P>)]) -> Result<(), Violation> {
    let kind = |request: &Request| (request.signature.kind, request.signature.dtype);
    let Some((first, _)) = run.first() else {
        return Err(Violation("it ran an operation without tensors".into()));
    };
    match run.iter().find(|(request, _)| kind(request) != kind(first)) {
        Some((other, _)) => {
            let (first, other) = (first.signature, other.signature);
            Err(Violation(format!("it fused tensors of different kinds: {first} and {other}")))
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::named::message::{AnnouncedTensor, TensorOp};
    use crate::types::{DType, ReduceOp};

    const SUM_SIGNATURE: Signature =
        Signature { kind: TensorOp::AllReduce(ReduceOp::Sum), dtype: DType::F32, count: 3 };

    fn make_client() -> Client<u32> {
        Client::new(WorldSize::new(2).unwrap())
    }

    fn instruction_to_run(tensor: AnnouncedTensor) -> CoordinatorMessage {
        CoordinatorMessage { instructions: vec![Instruction::Run(vec![tensor])], retired: Vec::new() }
    }

    fn announced_tensor(name: &str, slot: Option<u16>) -> AnnouncedTensor {
        AnnouncedTensor::Named(Request { name: name.into(), signature: SUM_SIGNATURE }, slot)
    }

    #[test]
    fn a_cached_tensor_is_reported_by_its_slot() {
        let mut client = make_client();
        client.submit("a", SUM_SIGNATURE, || 1).unwrap();
        let report = client.take_report().unwrap();
        assert_eq!((report.requests.len(), report.slots.len(), report.messages_read), (1, 0, 0));
        assert_eq!(client.take_report(), None);
        let actions = client.handle_message(instruction_to_run(announced_tensor("a", Some(5)))).unwrap();
        assert!(matches!(&actions[..], [ClientAction::Run(run)] if run[0].1 == Some(1)));
        assert_eq!(client.submit("a", SUM_SIGNATURE, || 2), Err(NamedError::InFlight("a".into())));
        client.release_name("a");
        client.submit("a", SUM_SIGNATURE, || 2).unwrap();
        let report = client.take_report().unwrap();
        assert_eq!((report.requests.len(), report.slots, report.messages_read), (0, [5].into(), 1));
        client.handle_message(instruction_to_run(AnnouncedTensor::Cached(5))).unwrap();
        client.release_name("a");
        // A tensor with the same name but another count is not the cached tensor.
        client.submit("a", Signature { count: 4, ..SUM_SIGNATURE }, || 3).unwrap();
        assert_eq!(client.take_report().unwrap().requests.len(), 1);
        assert_eq!(client.statistics(), NamedStatistics { tensors: 3, cached: 1, operations: 2, reports: 3 });
    }

    #[test]
    fn an_unreported_tensor_is_reported_in_full_if_its_slot_is_retired() {
        let mut client = make_client();
        client.submit("a", SUM_SIGNATURE, || 1).unwrap();
        client.handle_message(instruction_to_run(announced_tensor("a", Some(5)))).unwrap();
        client.release_name("a");
        client.take_report();
        client.submit("a", SUM_SIGNATURE, || 2).unwrap();
        client
            .handle_message(CoordinatorMessage { retired: vec![5], ..CoordinatorMessage::default() })
            .unwrap();
        let report = client.take_report().unwrap();
        assert_eq!((report.requests.len(), report.slots.len(), report.messages_read), (1, 0, 2));
    }

    #[test]
    fn a_long_report_is_split_and_only_the_last_part_contains_the_join() {
        let mut client = make_client();
        for index in 0..=REQUESTS_MAX as u32 {
            client.submit(&index.to_string(), SUM_SIGNATURE, || index).unwrap();
        }
        client.join().unwrap();
        assert_eq!(client.submit("late", SUM_SIGNATURE, || 0), Err(NamedError::HasJoined));
        assert_eq!(client.join(), Err(NamedError::HasJoined));
        let first = client.take_report().unwrap();
        assert_eq!((first.requests.len(), first.joins), (REQUESTS_MAX, false));
        let second = client.take_report().unwrap();
        assert_eq!((second.requests.len(), second.joins), (1, true));
        assert_eq!(client.end_and_take_payloads().len(), REQUESTS_MAX + 1);
        assert_eq!(client.submit("late", SUM_SIGNATURE, || 0), Err(NamedError::Closed));
    }

    #[test]
    fn invalid_messages_of_the_coordinator_are_violations() {
        let mut without_tensors = make_client();
        assert!(
            without_tensors
                .handle_message(instruction_to_run(announced_tensor("a", None)))
                .unwrap_err()
                .0
                .contains("has not submitted")
        );
        assert!(
            make_client()
                .handle_message(instruction_to_run(AnnouncedTensor::Cached(0)))
                .unwrap_err()
                .0
                .contains("empty")
        );
        let mut joined = make_client();
        joined.join().unwrap();
        let actions = joined.handle_message(instruction_to_run(announced_tensor("a", None))).unwrap();
        assert!(matches!(&actions[..], [ClientAction::Run(run)] if run[0].1.is_none()));
        let mut with_other_count = make_client();
        with_other_count.submit("a", Signature { count: 9, ..SUM_SIGNATURE }, || 1).unwrap();
        let violation =
            with_other_count.handle_message(instruction_to_run(announced_tensor("a", None))).unwrap_err();
        assert!(violation.0.contains("but this rank submitted"));
        let empty_run = CoordinatorMessage {
            instructions: vec![Instruction::Run(Vec::new())],
            ..CoordinatorMessage::default()
        };
        assert!(make_client().handle_message(empty_run).is_err());
    }

    #[test]
    fn invalid_names_and_sizes_are_refused() {
        let mut client = make_client();
        let long = "x".repeat(300);
        assert!(matches!(client.submit(&long, SUM_SIGNATURE, || 1), Err(NamedError::Limit { .. })));
        assert!(matches!(client.submit("", SUM_SIGNATURE, || 1), Err(NamedError::Limit { .. })));
        let huge = Signature { count: 1 << 60, ..SUM_SIGNATURE };
        assert!(matches!(client.submit("x", huge, || 1), Err(NamedError::Limit { .. })));
        assert_eq!(client.take_report(), None);
    }
}
