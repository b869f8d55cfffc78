//! Collectives of ranks on several hosts, some of which share a host. Ranks of one host use shared memory. Between
//! hosts every rank carries its slice of the buffer, so that a host's network link carries no more than if the host
//! were one rank.
//!
//! The buffer is cut into as many slices as the largest host has ranks. On each host every slice has a carrier, which
//! gets the host's reduction of it, reduces that with the carriers of the other hosts, and passes the result on to
//! the ranks of its host. Hosts need not have the same number of ranks: on a smaller one a rank carries several
//! adjacent slices.
//!
//! Between hosts the algorithms are those of ranks, one instance for each slice. Worlds are not reduced to a power of
//! two.

use std::ops::Range;

use super::partition::Partition;
use super::{After, CollectiveSpec, Schedule, barrier};
use crate::types::{Algorithm, Rank, WorldSize};

/// The hosts of a group's ranks, as one of the ranks sees them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Layout {
    /// Each host's ranks in their order; the hosts in the order of their first ranks.
    hosts: Vec<Vec<Rank>>,
    /// This rank's host, and its number there.
    host: usize,
    local: usize,
}

/// A phase of an operation on one rank. The phases run one after another.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Phases {
    /// With the ranks of its host, by their numbers on the host.
    pub before: CollectiveSpec,
    /// With other hosts, by ranks of the group.
    pub across: Schedule,
    /// With the ranks of its host again.
    pub after: CollectiveSpec,
}

impl Layout {
    /// The layout for `rank`, from the host of each rank; `None` if a hierarchy has no advantage: one host, or no two
    /// ranks on the same host.
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

    /// The number of those ranks, and this rank's number among them.
    pub fn local(&self) -> (WorldSize, Rank) {
        (world(self.local_ranks().len()), Rank::new(self.local as u32))
    }

    /// The number of hosts.
    pub fn hosts(&self) -> WorldSize {
        world(self.hosts.len())
    }

    /// The number of slices of a buffer.
    pub fn slices(&self) -> WorldSize {
        world(self.hosts.iter().map(Vec::len).max().unwrap_or(1))
    }

    /// The phases of this rank for an operation on a buffer, or on a block of one. Between hosts it uses `algorithm`;
    /// if that has blocks, they are `block` elements long.
    ///
    /// # Panics
    ///
    /// If the operation has no hierarchy ([`is_possible_by_hosts`](super::cost::is_possible_by_hosts)).
    pub fn phases(&self, spec: &CollectiveSpec, algorithm: Algorithm, block: usize) -> Phases {
        let here = |root: Rank| self.hosts[self.host].iter().position(|&rank| rank == root);
        let (count, root) = (spec.count(), spec.root());
        let parts = self.parts(count);
        let (gather, barrier) = (CollectiveSpec::AllGather(parts.clone()), CollectiveSpec::Barrier);
        let (before, after) = match spec {
            CollectiveSpec::Barrier => {
                let across = if self.local == 0 { self.first_ranks_barrier() } else { Schedule::default() };
                return Phases { before: barrier.clone(), across, after: barrier };
            }
            CollectiveSpec::AllReduce { .. } => (CollectiveSpec::ReduceScatter(parts), gather),
            // The other ranks on the root's host do not need the result, but it does no harm there.
            CollectiveSpec::Reduce { .. } => {
                (CollectiveSpec::ReduceScatter(parts), if here(root).is_some() { gather } else { barrier })
            }
            CollectiveSpec::Broadcast { .. } => match here(root) {
                Some(local) => (CollectiveSpec::Broadcast { count, root: Rank::new(local as u32) }, barrier),
                None => (barrier, gather),
            },
            _ => unreachable!("no hierarchy for {spec:?}"),
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

    /// A barrier of the first ranks of all hosts.
    fn first_ranks_barrier(&self) -> Schedule {
        let mut schedule = barrier(self.hosts(), Rank::new(self.host as u32));
        for step in &mut schedule.steps {
            let peers = step.send.as_mut().map(|send| &mut send.peer).into_iter();
            for peer in peers.chain(step.receive.as_mut().map(|receive| &mut receive.peer)) {
                *peer = self.hosts[peer.index()][0];
            }
        }
        schedule
    }

    /// The numbers of the slices that a rank of a host carries.
    fn carried(&self, host: usize, local: usize) -> Range<usize> {
        let (slices, ranks) = (self.slices().as_usize(), self.hosts[host].len());
        (local * slices).div_ceil(ranks)..((local + 1) * slices).div_ceil(ranks)
    }

    /// The carrier of a slice on a host.
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
