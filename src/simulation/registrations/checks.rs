//! Checks how the processes of a simulated start have ended.

use std::collections::BTreeMap;
use std::time::Duration;

use rand::SeedableRng as _;
use rand::rngs::StdRng;

use super::process::{ProcessEnd, ProcessKind};
use super::server::{SimulatedServer, own_member};
use super::{NETWORK_TIME, ProcessOutcome, StartScenario, run};
use crate::Rank;
use crate::rendezvous::registration::ANSWER_TIMEOUT;
use crate::rendezvous::{Roster, StartError};
use crate::wire::handshake::{HandshakeError, Refusal};

/// What has happened in a run.
struct RunRecord<'a> {
    scenario: &'a StartScenario,
    outcomes: &'a [ProcessOutcome<'a>],
    server: &'a SimulatedServer,
}

/// Checks that all ranks get the same roster, or that each rank gets an error in time that names the cause. Returns whether
/// the job has started.
pub(crate) fn check_registrations(seed: u64) -> bool {
    let scenario = StartScenario::random(&mut StdRng::seed_from_u64(seed));
    let (outcomes, server) = run(&scenario, seed);
    let record = RunRecord { scenario: &scenario, outcomes: &outcomes, server: &server };
    let result = &server.result;
    let describe =
        |ProcessOutcome { plan, at, end }: &ProcessOutcome<'_>| format!("{plan:?}: {end:?} at {at:?}\n");
    record.check().unwrap_or_else(|problem| {
        let outcomes: String = outcomes.iter().map(describe).collect();
        panic!("seed {seed}: {problem}\n{outcomes}rendezvous: {result:?}, closed at {:?}", server.closed_at)
    });
    matches!(result, Some((_, Ok(_))))
}

/// Returns an error with this text if a condition is false.
fn ensure(condition: bool, problem: &str) -> Result<(), String> {
    if condition { Ok(()) } else { Err(problem.to_owned()) }
}

impl RunRecord<'_> {
    fn check(&self) -> Result<(), String> {
        match &self.server.result {
            Some((at, Ok(roster))) => self.check_roster(roster, *at)?,
            result => {
                ensure(!self.scenario.must_start(), "the job does not start")?;
                if let Some((at, Err(error))) = result {
                    self.check_server_error(error, *at)?;
                }
            }
        }
        for outcome in self.outcomes {
            let named = |problem| format!("{problem}: rank {}", outcome.plan.rank);
            self.check_outcome(outcome).map_err(named)?;
        }
        Ok(())
    }

    /// Checks that the roster has the addresses of processes with these ranks.
    fn check_roster(&self, roster: &Roster, started_at: Duration) -> Result<(), String> {
        ensure(roster.members.len() == self.scenario.world.as_usize(), "the roster is not complete")?;
        for (rank, member) in self.scenario.world.ranks().zip(&roster.members) {
            if !self.scenario.has_launcher && rank == Rank::ZERO {
                ensure(*member == own_member(), "the roster has a wrong rank 0")?;
                continue;
            }
            let of_member = |outcome: &&ProcessOutcome<'_>| outcome.plan.address == member.address;
            let outcome = self.outcomes.iter().find(of_member).ok_or("the roster has a wrong address")?;
            ensure(outcome.plan.rank == rank && outcome.plan.host() == member.host, "the roster is wrong")?;
            let is_broken = outcome.plan.kind == ProcessKind::BrokenMember;
            ensure(
                is_broken || outcome.plan.kind == ProcessKind::Member,
                "the roster has a process that is no rank",
            )?;
            let has_roster = is_broken || matches!(outcome.end, ProcessEnd::Registered(Ok(_)));
            ensure(
                has_roster || self.may_lose_answers(outcome, started_at + NETWORK_TIME),
                "a rank of the roster does not get it",
            )?;
        }
        Ok(())
    }

    /// Returns whether a process may miss an answer that arrives before the time `answered_at`.
    fn may_lose_answers(&self, outcome: &ProcessOutcome<'_>, answered_at: Duration) -> bool {
        let plan = outcome.plan;
        plan.cut.is_some()
            || plan.killed_at.is_some()
            || self.scenario.server_killed_at.is_some()
            || plan.deadline() <= answered_at.max(plan.busy_until) + NETWORK_TIME
    }

    /// Returns whether the process that serves the rendezvous ended before it had read the registration of a process.
    fn is_closed_unregistered(&self, outcome: &ProcessOutcome<'_>) -> bool {
        let is_registered = if let Some((_, Ok(roster))) = &self.server.result {
            roster.members.iter().any(|member| member.address == outcome.plan.address)
        } else {
            let rank = outcome.plan.rank;
            let is_of_rank = |other: &&ProcessOutcome<'_>| other.plan.rank == rank;
            let has_one_process = self.outcomes.iter().filter(is_of_rank).count() == 1;
            has_one_process && self.server.registered_at.contains_key(&rank)
        };
        !is_registered && self.server.closed_at.is_some_and(|closed| closed <= outcome.at)
    }

    fn check_outcome(&self, outcome: &ProcessOutcome<'_>) -> Result<(), String> {
        let (plan, at) = (outcome.plan, outcome.at);
        let ProcessEnd::Registered(result) = &outcome.end else { return Ok(()) };
        let late = plan.deadline().max(plan.busy_until) + ANSWER_TIMEOUT + Duration::from_millis(1);
        ensure(at <= late, "a process misses its deadline")?;
        let error = match result {
            Ok(roster) => {
                let own = roster.members.get(plan.rank.index()).map(|member| member.address);
                ensure(own == Some(plan.address), "a process has a roster with another process of its rank")?;
                let server = self.server.result.as_ref().map(|result| &result.1);
                return ensure(
                    matches!(server, Some(Ok(sent)) if sent == roster),
                    "a process has another roster",
                );
            }
            Err(error) => error,
        };
        match error {
            StartError::Handshake { source, .. } => {
                let expected = match plan.kind {
                    ProcessKind::WrongSecret => HandshakeError::Secret,
                    ProcessKind::WrongJob => HandshakeError::Refused(Refusal::Job),
                    ProcessKind::WrongWorld => HandshakeError::Refused(Refusal::World),
                    _ => return Err("the handshake of a rank fails".into()),
                };
                ensure(*source == expected, "a process with wrong options gets a wrong reason")
            }
            StartError::NoRendezvous { .. } => {
                let is_closed = self.server.closed_at.is_some_and(|closed| closed <= at);
                let is_late = plan.deadline() < plan.busy_until.max(plan.began) + NETWORK_TIME;
                ensure(at + NETWORK_TIME >= plan.deadline(), "a process gives up early")?;
                ensure(is_closed || is_late || plan.cut.is_some(), "the rendezvous does not answer")
            }
            _ if !plan.kind.knows_secret() => Err("a process with wrong options registers".into()),
            StartError::Refused(reason) => self.check_refusal(outcome, reason),
            StartError::RendezvousLost { .. } => ensure(
                self.may_lose_answers(outcome, at) || self.is_closed_unregistered(outcome),
                "the connection of a rank is closed without a reason",
            ),
            StartError::Missing { missing, .. } => {
                let is_over = at >= plan.deadline()
                    || self
                        .first_registration()
                        .is_some_and(|first| at >= first + self.scenario.start_timeout);
                ensure(is_over, "a start timeout ends early")?;
                self.check_missing(missing, at)
            }
            StartError::PeerLost { rank, host, .. } => self.check_lost(*rank, host, at),
            error => Err(format!("unexpected error {error}")),
        }
    }

    fn first_registration(&self) -> Option<Duration> {
        self.server.registered_at.values().min().copied()
    }

    /// Only a process whose rank another process has registered is refused.
    fn check_refusal(&self, outcome: &ProcessOutcome<'_>, reason: &str) -> Result<(), String> {
        let plan = outcome.plan;
        let others = self.outcomes.iter().filter(|other| other.plan.rank == plan.rank);
        let mut others = others.filter(|other| other.plan.address != plan.address);
        // A process that connects again may find its own registration.
        let has_other = plan.cut.is_some()
            || others.any(|other| matches!(other.plan.kind, ProcessKind::Member | ProcessKind::BrokenMember));
        ensure(has_other, "a rank is refused although it was started once")?;
        ensure(self.server.registered_at.contains_key(&plan.rank), "a rank that is free is refused")?;
        ensure(
            reason.contains("is already taken by a process") || reason.contains("the job already runs"),
            "a rank is refused for a wrong reason",
        )
    }

    /// Checks that an error names the ranks that had not registered.
    fn check_missing(&self, missing: &str, at: Duration) -> Result<(), String> {
        let named = missing.split(" (").next().unwrap_or_default();
        for rank in self.scenario.world.ranks() {
            let is_named = named.split(", ").any(|name| name == format!("rank {rank}"));
            match self.server.registered_at.get(&rank) {
                // The rendezvous creates its answer up to `ANSWER_TIMEOUT` before the answer arrives.
                Some(registered) if is_named => {
                    let busy = self.outcomes.iter().map(|outcome| outcome.plan.busy_until).max();
                    let is_recent = *registered + ANSWER_TIMEOUT + NETWORK_TIME >= at;
                    ensure(is_recent || busy >= Some(at), "an error names a rank that is not missing")?;
                }
                None => ensure(is_named, "an error does not name a missing rank")?,
                Some(_) => {}
            }
        }
        Ok(())
    }

    /// Checks that a rank that an error names was lost before the time `at`.
    fn check_lost(&self, rank: Rank, host: &str, at: Duration) -> Result<(), String> {
        let of_rank = || self.outcomes.iter().filter(|outcome| outcome.plan.rank == rank);
        let was_lost = |outcome: &ProcessOutcome<'_>| {
            let has_given_up = matches!(outcome.end, ProcessEnd::Registered(Err(_)));
            match outcome.plan.kind {
                ProcessKind::BrokenMember => true,
                ProcessKind::Member => {
                    outcome.at <= at && (has_given_up || matches!(outcome.end, ProcessEnd::Died))
                        || outcome.plan.cut.is_some()
                }
                _ => false,
            }
        };
        ensure(of_rank().any(was_lost), "an error names a rank that was not lost")?;
        let is_host_known = self.server.registered_at.contains_key(&rank);
        let is_right = if is_host_known {
            of_rank().any(|outcome| outcome.plan.host() == host)
        } else {
            host == "an unknown host"
        };
        ensure(is_right, "an error names a wrong host")
    }

    fn check_server_error(&self, error: &StartError, at: Duration) -> Result<(), String> {
        match error {
            StartError::Missing { missing, .. } => {
                let first = self.first_registration().ok_or("no rank has registered")?;
                ensure(at == first + self.scenario.start_timeout, "the start timeout is wrong")?;
                self.check_missing(missing, at)?;
                self.check_notes(missing, at)
            }
            StartError::PeerLost { rank, host, .. } => self.check_lost(*rank, host, at),
            _ => Err("a wrong error".into()),
        }
    }

    /// Checks that an error says which missing ranks died after their handshake.
    fn check_notes(&self, missing: &str, at: Duration) -> Result<(), String> {
        let mut died: BTreeMap<Rank, Duration> = BTreeMap::new();
        for ProcessOutcome { plan, at, end } in self.outcomes {
            if plan.kind == ProcessKind::DiesUnregistered
                && matches!(end, ProcessEnd::Died)
                && plan.cut.is_none()
                && plan.killed_at.is_none()
            {
                died.insert(plan.rank, *at);
            }
        }
        for (rank, died_at) in died {
            let text = format!("rank {rank} connected, but was lost before it registered");
            let is_missing = !self.server.registered_at.contains_key(&rank);
            ensure(
                !is_missing || died_at + NETWORK_TIME >= at || missing.contains(&text),
                "an error does not say that a missing rank died",
            )?;
        }
        Ok(())
    }
}
