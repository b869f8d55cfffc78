//! The client of the negotiation: which tensors of a rank are in flight, which are to be reported, and how the
//! coordinator's messages affect them. It uses no clock and no IO; `P` is the data of a tensor.

use std::collections::BTreeMap;

use super::NamedStatistics;
use super::cache::CacheView;
use super::error::{NamedError, Violation};
use super::message::{
    CoordinatorMessage, Instruction, REQUESTS_MAX, RefusalKind, Report, Request, Signature, check_name,
};
use crate::types::{Rank, WorldSize};

/// The largest number of tensors that a rank may have in flight.
pub const TENSORS_MAX: usize = 1 << 16;

/// A rank's side of the negotiation.
pub(super) struct Client<P> {
    world: WorldSize,
    slots: CacheView,
    /// The tensors in flight, without their data once they are being run.
    tensors: BTreeMap<String, (Signature, Option<P>)>,
    report: Report,
    has_joined: bool,
    has_closed: bool,
    statistics: NamedStatistics,
}

/// An action that a message requires of this rank.
#[derive(PartialEq, Eq, Debug)]
pub(super) enum ClientAction<P> {
    /// Run these as one operation. For tensors without data this rank has joined and contributes zeros.
    Run(Vec<(Request, Option<P>)>),
    /// This tensor gets an error.
    Fail(P, NamedError),
    /// All ranks have joined, this one last.
    Joined(Rank),
    /// All ranks have closed.
    End,
}

impl<P> Client<P> {
    pub(super) fn new(world: WorldSize) -> Self {
        Self {
            world,
            slots: CacheView::default(),
            tensors: BTreeMap::new(),
            report: Report::default(),
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

    /// Submits a tensor. Errors that do not concern other ranks are returned here.
    pub(super) fn submit(
        &mut self,
        name: &str,
        signature: Signature,
        payload: impl FnOnce() -> P,
    ) -> Result<(), NamedError> {
        let limit = |reason: String| {
            let shown = name.floor_char_boundary(40);
            NamedError::Limit { name: name[..shown].to_owned(), reason }
        };
        check_name(name).and_then(|()| signature.check(self.world)).map_err(|wrong| limit(wrong.0))?;
        if self.has_closed {
            return Err(NamedError::Closed);
        }
        if self.has_joined {
            return Err(NamedError::HasJoined);
        }
        if self.tensors.contains_key(name) {
            return Err(NamedError::InFlight(name.to_owned()));
        }
        if self.tensors.len() >= TENSORS_MAX {
            return Err(limit(format!("{TENSORS_MAX} tensors are in flight")));
        }
        self.tensors.insert(name.to_owned(), (signature, Some(payload())));
        self.statistics.tensors += 1;
        if let Some(slot) = self.slots.find(name, &signature) {
            self.statistics.cached += 1;
            self.report.slots.insert(slot);
        } else {
            self.report.requests.push(Request { name: name.to_owned(), signature });
        }
        Ok(())
    }

    /// This rank has no more data.
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

    /// This rank will submit nothing more.
    pub(super) fn close(&mut self) {
        if !self.has_closed {
            self.has_closed = true;
            self.report.closes = true;
        }
    }

    /// The next report to the coordinator, as much as fits a message. Joining and closing come last.
    pub(super) fn take_report(&mut self) -> Option<Report> {
        let report = &mut self.report;
        if report.slots.is_empty() && report.requests.is_empty() && !report.joins && !report.closes {
            return None;
        }
        self.statistics.reports += 1;
        let mut taken = Report { seen: report.seen, ..std::mem::take(report) };
        report.seen = taken.seen;
        if taken.requests.len() > REQUESTS_MAX {
            report.requests = taken.requests.split_off(REQUESTS_MAX);
            report.joins = std::mem::take(&mut taken.joins);
            report.closes = std::mem::take(&mut taken.closes);
        }
        Some(taken)
    }

    /// Processes a message of the coordinator.
    pub(super) fn read(&mut self, message: CoordinatorMessage) -> Result<Vec<ClientAction<P>>, Violation> {
        let mut steps = Vec::with_capacity(message.instructions.len());
        for instruction in message.instructions {
            match instruction {
                Instruction::Run(tensors) => {
                    let mut run = Vec::with_capacity(tensors.len());
                    for tensor in tensors {
                        let request = self.slots.read(tensor)?;
                        let payload = self.take(&request)?;
                        run.push((request, payload));
                    }
                    check_run(&run)?;
                    self.statistics.operations += 1;
                    steps.push(ClientAction::Run(run));
                }
                Instruction::Refuse { name, refusal, reason } => {
                    if let Some(payload) = self.tensors.remove(&name).and_then(|(_, payload)| payload) {
                        let error = match refusal {
                            RefusalKind::Disagreement => NamedError::Disagreement { name, asked: reason },
                            RefusalKind::WithoutJoined => NamedError::WithoutJoined { name, detail: reason },
                            RefusalKind::Left => NamedError::Left { name, detail: reason },
                        };
                        steps.push(ClientAction::Fail(payload, error));
                    }
                }
                Instruction::Joined(last) => {
                    self.has_joined = false;
                    steps.push(ClientAction::Joined(last));
                }
                Instruction::End => steps.push(ClientAction::End),
            }
        }
        for slot in message.retired {
            let Some(request) = self.slots.retire(slot) else { continue };
            // An unreported submission would use a slot that must not be named any more.
            if self.report.slots.remove(&slot) {
                self.report.requests.push(request);
            }
        }
        self.report.seen += 1;
        Ok(steps)
    }

    /// The data of a tensor that is to be run.
    fn take(&mut self, request: &Request) -> Result<Option<P>, Violation> {
        let Request { name, signature } = request;
        match self.tensors.get_mut(name) {
            Some((own, payload @ Some(_))) if *own == *signature => Ok(payload.take()),
            // An operation that this rank submitted before it joined may still be running here while the others have
            // gone on.
            None | Some((_, None)) if self.has_joined => Ok(None),
            Some((own, _)) => Err(Violation(format!("{signature} of `{name}`, which is {own} here"))),
            None => Err(Violation(format!("{signature} of `{name}`, which this rank has not submitted"))),
        }
    }

    /// Whether no tensor is in flight and no join waits for other ranks.
    #[cfg(test)]
    pub(super) fn is_idle(&self) -> bool {
        self.tensors.is_empty() && !self.has_joined
    }

    /// Frees the name of a tensor that this rank has submitted, because its result is known. Must not be called for a
    /// tensor to which this rank contributed zeros, because it may have submitted that name since.
    pub(super) fn finish(&mut self, name: &str) {
        self.tensors.remove(name);
    }

    /// Everything has ended: returns the tensors that had no result yet.
    pub(super) fn end(&mut self) -> Vec<P> {
        self.has_closed = true;
        self.report = Report::default();
        std::mem::take(&mut self.tensors).into_values().filter_map(|(_, payload)| payload).collect()
    }
}

/// All tensors of one operation must be of one kind.
fn check_run<P>(run: &[(Request, Option<P>)]) -> Result<(), Violation> {
    let of = |request: &Request| (request.signature.kind, request.signature.dtype);
    let Some((first, _)) = run.first() else { return Err(Violation("an operation without tensors".into())) };
    match run.iter().find(|(request, _)| of(request) != of(first)) {
        Some((other, _)) => {
            Err(Violation(format!("one operation of {} and {}", first.signature, other.signature)))
        }
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::named::message::{AnnouncedTensor, TensorOp};
    use crate::types::{DType, ReduceOp};

    const SUM: Signature =
        Signature { kind: TensorOp::AllReduce(ReduceOp::Sum), dtype: DType::F32, count: 3 };

    fn client() -> Client<u32> {
        Client::new(WorldSize::new(2).unwrap())
    }

    fn run(tensor: AnnouncedTensor) -> CoordinatorMessage {
        CoordinatorMessage { instructions: vec![Instruction::Run(vec![tensor])], retired: Vec::new() }
    }

    fn named(name: &str, slot: Option<u16>) -> AnnouncedTensor {
        AnnouncedTensor::Named(Request { name: name.into(), signature: SUM }, slot)
    }

    #[test]
    fn what_is_known_is_reported_by_its_slot() {
        let mut client = client();
        client.submit("a", SUM, || 1).unwrap();
        let report = client.take_report().unwrap();
        assert_eq!((report.requests.len(), report.slots.len(), report.seen), (1, 0, 0));
        assert_eq!(client.take_report(), None);
        let steps = client.read(run(named("a", Some(5)))).unwrap();
        assert!(matches!(&steps[..], [ClientAction::Run(run)] if run[0].1 == Some(1)));
        assert_eq!(client.submit("a", SUM, || 2), Err(NamedError::InFlight("a".into())));
        client.finish("a");
        client.submit("a", SUM, || 2).unwrap();
        let report = client.take_report().unwrap();
        assert_eq!((report.requests.len(), report.slots, report.seen), (0, [5].into(), 1));
        client.read(run(AnnouncedTensor::Cached(5))).unwrap();
        client.finish("a");
        // Another count is another tensor.
        client.submit("a", Signature { count: 4, ..SUM }, || 3).unwrap();
        assert_eq!(client.take_report().unwrap().requests.len(), 1);
        assert_eq!(client.statistics(), NamedStatistics { tensors: 3, cached: 1, operations: 2, reports: 3 });
    }

    #[test]
    fn what_waits_to_be_reported_by_a_retired_slot_is_reported_in_full() {
        let mut client = client();
        client.submit("a", SUM, || 1).unwrap();
        client.read(run(named("a", Some(5)))).unwrap();
        client.finish("a");
        client.take_report();
        client.submit("a", SUM, || 2).unwrap();
        client.read(CoordinatorMessage { retired: vec![5], ..CoordinatorMessage::default() }).unwrap();
        let report = client.take_report().unwrap();
        assert_eq!((report.requests.len(), report.slots.len(), report.seen), (1, 0, 2));
    }

    #[test]
    fn a_long_report_goes_in_parts_and_joins_with_the_last() {
        let mut client = client();
        for index in 0..=REQUESTS_MAX as u32 {
            client.submit(&index.to_string(), SUM, || index).unwrap();
        }
        client.join().unwrap();
        assert_eq!(client.submit("late", SUM, || 0), Err(NamedError::HasJoined));
        assert_eq!(client.join(), Err(NamedError::HasJoined));
        let first = client.take_report().unwrap();
        assert_eq!((first.requests.len(), first.joins), (REQUESTS_MAX, false));
        let second = client.take_report().unwrap();
        assert_eq!((second.requests.len(), second.joins), (1, true));
        assert_eq!(client.end().len(), REQUESTS_MAX + 1);
        assert_eq!(client.submit("late", SUM, || 0), Err(NamedError::Closed));
    }

    #[test]
    fn what_the_coordinator_must_not_say_is_a_violation() {
        let mut fresh = client();
        assert!(fresh.read(run(named("a", None))).unwrap_err().0.contains("has not submitted"));
        assert!(client().read(run(AnnouncedTensor::Cached(0))).unwrap_err().0.contains("empty"));
        let mut joined = client();
        joined.join().unwrap();
        assert!(
            matches!(&joined.read(run(named("a", None))).unwrap()[..], [ClientAction::Run(run)] if run[0].1.is_none())
        );
        let mut other = client();
        other.submit("a", Signature { count: 9, ..SUM }, || 1).unwrap();
        assert!(other.read(run(named("a", None))).unwrap_err().0.contains("which is"));
        let nothing = CoordinatorMessage {
            instructions: vec![Instruction::Run(Vec::new())],
            ..CoordinatorMessage::default()
        };
        assert!(client().read(nothing).is_err());
    }

    #[test]
    fn names_and_sizes_have_limits() {
        let mut client = client();
        let long = "x".repeat(300);
        assert!(matches!(client.submit(&long, SUM, || 1), Err(NamedError::Limit { .. })));
        assert!(matches!(client.submit("", SUM, || 1), Err(NamedError::Limit { .. })));
        let huge = Signature { count: 1 << 60, ..SUM };
        assert!(matches!(client.submit("x", huge, || 1), Err(NamedError::Limit { .. })));
        assert_eq!(client.take_report(), None);
    }
}
