//! Collectives of ranks on several hosts, some of which share a host: the ranks of a host meet in shared memory, and between
//! hosts every one of them carries its slice of the buffer, so that no host's wire has more to carry than if it were one rank.
//!
//! The buffer is cut into as many slices as the largest host has ranks. On each host every slice has a carrier, who ends with
//! the host's reduction of it, reduces that with the carriers of the other hosts, and passes the result on to its own host's
//! ranks. Hosts need not have equally many ranks: on a smaller one a rank carries several slices that lie side by side.
//!
//! Between hosts the algorithms are those of ranks, one instance for each slice. Nothing is folded to a power of two.

use std::ops::Range;

use super::partition::Partition;
use super::{After, CollectiveSpec, Schedule, barrier};
use crate::types::{Algorithm, Rank, WorldSize};

/// Which ranks of a group share a host, as one of them sees it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Layout {
    /// Each host's ranks in their order; the hosts in the order of their first ranks.
    hosts: Vec<Vec<Rank>>,
    /// This rank's host, and its number there.
    host: usize,
    local: usize,
}

/// What a rank does, one after the other.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Phases {
    /// With the ranks of its host, whose numbers are those that they have there.
    pub before: CollectiveSpec,
    /// With other hosts, by ranks of the group.
    pub across: Schedule,
    /// With the ranks of its host again.
    pub after: CollectiveSpec,
}

impl Layout {
    /// The layout for `rank`, from the host of each rank; `None` where there is nothing to gain: one host, or nobody who
    /// shares one.
    ///
    /// # Panics
    ///
    /// If there is no such rank.
    pub fn new(machines: &[u32], rank: Rank) -> Option<Self> {
        let mut known: Vec<u32> = Vec::new();
        let mut hosts: Vec<Vec<Rank>> = Vec::new();
        for (member, machine) in machines.iter().enumerate() {
            let host = known.iter().position(|other| other == machine).unwrap_or_else(|| {
                known.push(*machine);
                hosts.push(Vec::new());
                hosts.len() - 1
            });
            hosts[host].push(Rank::new(member as u32));
        }
        let place = |ranks: &Vec<Rank>| ranks.iter().position(|&member| member == rank);
        let (host, local) = hosts
            .iter()
            .enumerate()
            .find_map(|(host, ranks)| Some((host, place(ranks)?)))
            .expect("the rank is one of them");
        let is_useful = hosts.len() > 1 && hosts.len() < machines.len();
        is_useful.then_some(Self { hosts, host, local })
    }

    /// The ranks of this rank's host.
    pub fn local_ranks(&self) -> &[Rank] {
        &self.hosts[self.host]
    }

    /// How many those are, and which of them this one is.
    pub fn local(&self) -> (WorldSize, Rank) {
        (world(self.local_ranks().len()), Rank::new(self.local as u32))
    }

    /// How many hosts there are.
    pub fn hosts(&self) -> WorldSize {
        world(self.hosts.len())
    }

    /// Into how many slices a buffer is cut.
    pub fn slices(&self) -> WorldSize {
        world(self.hosts.iter().map(Vec::len).max().unwrap_or(1))
    }

    /// What this rank does for some work on a buffer, or a block of one. Between hosts it goes by `algorithm`, whose block,
    /// where it has one, is so many elements.
    ///
    /// # Panics
    ///
    /// If there is no such way for the work ([`is_possible_by_hosts`](super::cost::is_possible_by_hosts)).
    pub fn phases(&self, spec: &CollectiveSpec, algorithm: Algorithm, block: usize) -> Phases {
        let here = |root: Rank| self.hosts[self.host].iter().position(|&rank| rank == root);
        let (count, root) = (spec.count(), spec.root());
        let parts = self.parts(count);
        let (gather, meet) = (CollectiveSpec::AllGather(parts.clone()), CollectiveSpec::Barrier);
        let (before, after) = match spec {
            CollectiveSpec::Barrier => {
                let across = if self.local == 0 { self.meeting() } else { Schedule::default() };
                return Phases { before: meet.clone(), across, after: meet };
            }
            CollectiveSpec::AllReduce { .. } => (CollectiveSpec::ReduceScatter(parts), gather),
            // What the others of the root's host get with it is of no use to them, and in its way to nobody.
            CollectiveSpec::Reduce { .. } => {
                (CollectiveSpec::ReduceScatter(parts), if here(root).is_some() { gather } else { meet })
            }
            CollectiveSpec::Broadcast { .. } => match here(root) {
                Some(local) => (CollectiveSpec::Broadcast { count, root: Rank::new(local as u32) }, meet),
                None => (meet, gather),
            },
            _ => unreachable!("no way for {spec:?}"),
        };
        Phases { before, across: self.across(spec, algorithm, block), after }
    }

    /// The slices of this rank, each reduced or copied among its carriers.
    fn across(&self, spec: &CollectiveSpec, algorithm: Algorithm, block: usize) -> Schedule {
        let of = |root: Rank| self.hosts.iter().position(|ranks| ranks.contains(&root)).unwrap_or_default();
        let root = Rank::new(of(spec.root()) as u32);
        let slices = Partition::even(spec.count(), self.slices());
        let place = (self.hosts(), Rank::new(self.host as u32));
        let mut all = Schedule::default();
        for slice in self.carried(self.host, self.local) {
            let range = slices.range(Rank::new(slice as u32));
            let count = range.len();
            let spec = match spec {
                CollectiveSpec::Reduce { .. } => CollectiveSpec::Reduce { count, root },
                CollectiveSpec::Broadcast { .. } => CollectiveSpec::Broadcast { count, root },
                _ => CollectiveSpec::AllReduce { count },
            };
            let first = all.steps.len();
            let schedule = spec.schedule(algorithm, place, block, false);
            all.steps.extend(schedule.steps.into_iter().map(|mut step| {
                let moved = |part: &Range<usize>| range.start + part.start..range.start + part.end;
                let later = |after: Option<After>| after.map(|After(step)| After(first + step));
                if let Some(send) = &mut step.send {
                    send.peer = self.carrier(send.peer.index(), slice);
                    send.range = moved(&send.range);
                    send.after = later(send.after);
                }
                if let Some(receive) = &mut step.receive {
                    receive.peer = self.carrier(receive.peer.index(), slice);
                    receive.range = moved(&receive.range);
                    receive.after = later(receive.after);
                }
                step
            }));
        }
        all
    }

    /// The first ranks of all hosts meet.
    fn meeting(&self) -> Schedule {
        let mut schedule = barrier(self.hosts(), Rank::new(self.host as u32));
        for step in &mut schedule.steps {
            let peers = step.send.as_mut().map(|send| &mut send.peer).into_iter();
            for peer in peers.chain(step.receive.as_mut().map(|receive| &mut receive.peer)) {
                *peer = self.hosts[peer.index()][0];
            }
        }
        schedule
    }

    /// The slices, by their numbers, that a host's rank carries.
    fn carried(&self, host: usize, local: usize) -> Range<usize> {
        let (slices, ranks) = (self.slices().as_usize(), self.hosts[host].len());
        (local * slices).div_ceil(ranks)..((local + 1) * slices).div_ceil(ranks)
    }

    /// Who carries a slice on a host.
    fn carrier(&self, host: usize, slice: usize) -> Rank {
        self.hosts[host][slice * self.hosts[host].len() / self.slices().as_usize()]
    }

    /// The elements that each rank of this host carries.
    fn parts(&self, count: usize) -> Partition {
        let slices = Partition::even(count, self.slices());
        let elements = |slice: usize| slices.range(Rank::new(slice as u32)).len();
        let carried = |local| self.carried(self.host, local).map(elements).sum();
        let counts: Vec<usize> = (0..self.local_ranks().len()).map(carried).collect();
        Partition::from_counts(&counts).expect("together they are the buffer")
    }
}

fn world(ranks: usize) -> WorldSize {
    WorldSize::new(ranks as u32).expect("every host has a rank")
}
