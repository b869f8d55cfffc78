//! The state of a group and of its job.

use std::io;
use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use super::kept_plan::Plan;
use super::options::{JoinOptions, OPERATION_TIMEOUT};
use super::selection::AlgorithmSelection;
use crate::engine::Settings;
use crate::observe::recorder::Recorder;
use crate::rendezvous::Roster;
use crate::runtime::driver::{Core, Driver, Interrupt};
use crate::runtime::error::Error;
use crate::runtime::failure_report::FailureReporter;
use crate::runtime::host_rounds::{HostRounds, LastUsed};
use crate::runtime::link_driver::LinkDriver;
use crate::runtime::measurements::{LinkBytes, Meter, Profile, Statistics};
use crate::schedule::hierarchy::HostLayout;
use crate::schedule::partition;
use crate::transport::local_links::LinkTransport;
use crate::transport::tcp::TcpTransport;
use crate::types::{HOSTS_GROUP_BIT, RESULTS_GROUP_BIT, Rank, WorldSize};
use crate::wire::Cause;

pub(super) struct SharedJob {
    pub(super) driver: Driver,
    /// A counter for numbering new groups whose first member is this rank.
    pub(super) next_group: AtomicU32,
    pub(super) congestion: Option<String>,
    pub(super) streams: u8,
    /// The bytes of each rank's chunk of a block in an all-reduce on the ring. All ranks have the same value.
    pub(super) chunk_bytes: usize,
    /// Selects the algorithm of each operation. All ranks have the same value.
    pub(super) selection: AlgorithmSelection,
    /// The data that [`Group::isolated`] needs to start another job; `None` for a world of one.
    pub(super) origin: Option<Origin>,
}

impl SharedJob {
    /// Returns a job over these sockets. `epoch` is the start of the engine's clock. Fails without an event queue.
    pub(super) fn new(
        (sockets, settings): (TcpTransport, Settings),
        epoch: Instant,
        (chunk_bytes, streams): (usize, u8),
        origin: Option<Origin>,
    ) -> io::Result<Self> {
        let world = WorldSize::new(settings.host_names.len() as u32).unwrap_or(WorldSize::ONE);
        let congestion = sockets.options.congestion.clone();
        let link_driver = LinkDriver::new(settings, LinkTransport::new(sockets, world));
        let failure_reporter = origin.as_ref().and_then(|origin| origin.failure_reporter.clone());
        let (ranks_per_processor, interrupt) = origin
            .as_ref()
            .map_or((1, None), |origin| (origin.ranks_per_processor, origin.options.interrupt));
        let core = Core::new(link_driver, failure_reporter);
        let driver = Driver::new(core, epoch, ranks_per_processor, interrupt)?;
        let (next_group, selection) = (AtomicU32::new(1), AlgorithmSelection::default());
        Ok(Self { driver, next_group, congestion, streams, chunk_bytes, selection, origin })
    }
}

/// The options with which this rank joined its job. The rank starts isolated jobs with the same options.
pub(super) struct Origin {
    pub(super) options: JoinOptions,
    /// The ranks of the job, and the addresses at which this rank reaches them.
    pub(super) roster: Roster,
    /// The number of ranks on this machine for each of its processors, rounded up.
    pub(super) ranks_per_processor: u32,
    /// Reports failures of the job to `ringrun`; `None` if `ringrun` did not start the job.
    pub(super) failure_reporter: Option<FailureReporter>,
}

pub(super) struct HierarchicalData {
    pub(super) layout: HostLayout,
    /// The rounds of the first stage and of the last stage, until the first hierarchical collective hands them over to the core.
    /// Empty if this rank is alone on its host.
    pub(super) stage_rounds: Vec<HostRounds>,
}

/// A group of ranks of a job, from the view of one rank.
///
/// All ranks of a group have to call the same collectives in the same order, with buffers of the same length and
/// element type. If the calls differ, the job fails with an error that shows the calls of two ranks and their lines.
/// Different groups can be used at the same time. A collective blocks until this rank's part is done, or returns a
/// [`Handle`](super::Handle). Ranks that get the same result get the same bits.
///
/// If a peer dies, the current or next call of every rank returns an error that names the peer. After a failed
/// operation, the content of the buffer is unspecified, and every later call of any group returns the same error.
///
/// The ranks of a group are numbered from 0. Error messages show the ranks in the whole job.
pub struct Group {
    /// `None` for a world of one rank, which has no links.
    pub(super) job: Option<Arc<SharedJob>>,
    /// The group's number in the job. The group of all ranks has number 0.
    pub(super) id: u32,
    /// The members' ranks in the job, in the order of their ranks in the group.
    pub(super) members: Arc<[Rank]>,
    pub(super) rank: Rank,
    pub(super) world: WorldSize,
    /// For each rank of the job, the number of the rank's machine. Ranks with the same number are on the same machine.
    pub(super) machine_numbers: Arc<[u32]>,
    pub(super) timeout: Duration,
    /// In a world of one rank: the job that carries the rank's messages to itself. The first message creates this job.
    pub(super) self_job: Arc<OnceLock<Arc<SharedJob>>>,
    /// In a world of one rank: the error that all calls return after [`Group::abort`].
    pub(super) abort_error: Arc<OnceLock<Error>>,
    pub(super) shares_memory: bool,
    /// If all members share memory: the rounds of collectives in this memory, which a blocking collective uses without a lock.
    /// `None` while the core has the rounds, because of an asynchronous collective.
    pub(super) host_rounds: Option<Box<HostRounds>>,
    pub(super) kept_plans: LastUsed<Box<Plan>>,
    /// The data for hierarchical collectives; `None` if all members are on one host, or if those on a host share no memory.
    pub(super) hierarchical_data: Option<HierarchicalData>,
    pub(super) compressed_calls: u64,
    pub(super) recorder: Option<Arc<Recorder>>,
    /// The group and all its messengers share this value.
    pub(super) retirement: Arc<GroupRetirement>,
}

/// Tells the engine, when it is dropped, that the group of this job and with this number was dropped.
pub(super) struct GroupRetirement(pub(super) Option<(Arc<SharedJob>, u32)>);

impl Drop for GroupRetirement {
    fn drop(&mut self) {
        if let Some((job, id)) = &self.0 {
            let mut core = job.driver.core();
            for bits in [0, HOSTS_GROUP_BIT, HOSTS_GROUP_BIT | RESULTS_GROUP_BIT] {
                core.retire_group(*id | bits);
            }
        }
    }
}

impl Group {
    /// Creates a group of this process alone. Every collective returns at once, and messages go to the rank itself.
    pub fn solo() -> Self {
        Self {
            job: None,
            id: 0,
            members: Arc::from([Rank::ZERO]),
            rank: Rank::ZERO,
            world: WorldSize::ONE,
            machine_numbers: Arc::from([0]),
            timeout: OPERATION_TIMEOUT,
            self_job: Arc::default(),
            abort_error: Arc::default(),
            shares_memory: false,
            host_rounds: None,
            kept_plans: LastUsed::new(),
            hierarchical_data: None,
            compressed_calls: 0,
            recorder: None,
            retirement: Arc::new(GroupRetirement(None)),
        }
    }

    /// Returns the same group without its shared memory, for messages or for other collectives.
    pub(super) fn without_memory(&self) -> Self {
        Self {
            job: self.job.clone(),
            id: self.id,
            members: Arc::clone(&self.members),
            rank: self.rank,
            world: self.world,
            machine_numbers: Arc::clone(&self.machine_numbers),
            timeout: self.timeout,
            self_job: Arc::clone(&self.self_job),
            abort_error: Arc::clone(&self.abort_error),
            retirement: Arc::clone(&self.retirement),
            recorder: self.recorder.clone(),
            ..Self::solo()
        }
    }

    /// Returns this process's rank in the group.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// Returns the number of ranks of the group.
    pub fn size(&self) -> WorldSize {
        self.world
    }

    /// Returns this process's number among the group's ranks on its host.
    pub fn local_rank(&self) -> Rank {
        let position = self.local_members().position(|member| member == self.members[self.rank.index()]);
        Rank::new(position.unwrap_or_default() as u32)
    }

    /// Returns the number of the group's ranks on this host.
    pub fn local_size(&self) -> WorldSize {
        WorldSize::new(self.local_members().count() as u32).unwrap_or(WorldSize::ONE)
    }

    pub(super) fn local_members(&self) -> impl Iterator<Item = Rank> {
        let machine = |rank: Rank| self.machine_numbers.get(rank.index());
        let own = machine(self.members[self.rank.index()]);
        self.members.iter().copied().filter(move |&rank| machine(rank) == own)
    }

    /// Returns whether all members share memory, so that their collectives use no links. All members return the same.
    pub fn shares_memory(&self) -> bool {
        self.shares_memory || self.world == WorldSize::ONE
    }

    /// Returns the members' ranks in the job, in the order of their ranks in the group.
    pub fn members(&self) -> &[Rank] {
        &self.members
    }

    /// Returns the number of connections of each link; 0 in a world of one rank.
    pub fn streams(&self) -> u8 {
        self.job.as_ref().map_or(0, |job| job.streams)
    }

    /// Returns the congestion control that links use; `None` for the host's default or a world of one rank.
    pub fn congestion_control(&self) -> Option<&str> {
        self.job.as_ref().and_then(|job| job.congestion.as_deref())
    }

    /// Returns the transport: `tcp`, `shm` (shared memory), `shm+tcp` (`tcp` between hosts), or `none` in a world of one rank.
    pub fn transport(&self) -> &'static str {
        match &self.job {
            None => "none",
            Some(_) if self.shares_memory => "shm",
            Some(_) if self.hierarchical_data.is_some() => "shm+tcp",
            Some(_) => "tcp",
        }
    }

    /// Returns the maximum time of one operation.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Sets the maximum time of each operation of this group that begins from now on.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    /// Returns the job's statistics on this rank, in all groups.
    pub fn statistics(&self) -> Statistics {
        self.job.as_ref().map(|job| job.driver.statistics()).unwrap_or_default()
    }

    /// Returns the bytes that each open link has carried, by peer, in all groups. Collectives in shared memory use no links.
    pub fn link_bytes(&self) -> Vec<LinkBytes> {
        let job = self.job.as_ref();
        job.map(|job| job.driver.core().link_driver.link_bytes().collect()).unwrap_or_default()
    }

    /// Switches the profile of the job's operations on this rank ([`Group::profile`]) on or off, for all groups. It is off at
    /// first. In a world of one rank, it stays empty.
    pub fn set_profiling(&self, is_on: bool) {
        self.meter().switch(is_on);
    }

    /// Returns how the job's operations on this rank, in all groups, have spent their time while the profile was on.
    pub fn profile(&self) -> Profile {
        self.meter().profile()
    }

    /// Returns the file descriptors of the job's sockets. A forked child process should close its copies. Otherwise peers do
    /// not notice when the parent process ends. The child process must not use or drop the group.
    pub fn descriptors(&self) -> Vec<RawFd> {
        let job = self.job.as_ref().or_else(|| self.self_job.get());
        job.map(|job| job.driver.core().link_driver.transport.sockets.descriptors()).unwrap_or_default()
    }

    /// Returns the host of a rank of the group, for use in errors: its name and address.
    pub(crate) fn host(&self, rank: Rank) -> String {
        let rank_in_job = self.members[rank.index()];
        let host = |job: &Arc<SharedJob>| job.driver.core().link_driver.engine.host(rank_in_job);
        self.job.as_ref().map_or_else(|| "this host".into(), host)
    }

    pub(crate) fn interrupt(&self) -> Option<Interrupt> {
        self.job.as_ref()?.origin.as_ref()?.options.interrupt
    }

    /// Returns the meter of the job's profile; in a world of one rank, a meter of nothing.
    pub(super) fn meter(&self) -> Meter {
        self.job.as_ref().map(|job| job.driver.meter().clone()).unwrap_or_default()
    }

    /// Returns the chunk of `rank`: its range of elements in [`Group::reduce_scatter`] and [`Group::all_gather`] of a buffer of
    /// `count` elements. The chunks are in rank order, and their lengths differ by at most one element.
    pub fn chunk(&self, count: usize, rank: Rank) -> Range<usize> {
        partition::chunk(count, self.world, rank)
    }

    /// Fails the job on every rank with an error that shows this rank and `message`. Returns this error.
    pub fn abort(&self, message: &str) -> Error {
        if let Some(job) = &self.job {
            return job.driver.abort(message);
        }
        if let Some(job) = self.self_job.get() {
            job.driver.abort(message);
        }
        let cause = Cause::Aborted { rank: self.rank, host: "this host".into(), message: message.to_owned() };
        self.abort_error.get_or_init(|| Error::Failed { cause, reported_by: None }).clone()
    }

    /// Tells `ringrun` that the program of this rank ends because `rank` failed for a reason of its own.
    pub(crate) fn report_failed_rank(&self, rank: Rank) {
        let origin = self.job.as_ref().and_then(|job| job.origin.as_ref());
        if let Some(reporter) = origin.and_then(|origin| origin.failure_reporter.as_ref())
            && let Some(&rank_in_job) = self.members.get(rank.index())
        {
            reporter.report_failed_rank(rank_in_job);
        }
    }

    /// Closes the group. Dropping the group does the same. When the last group of a job is closed, this rank waits up to
    /// five seconds for operations whose handles were dropped. Then it sends all peers a goodbye and closes every connection.
    pub fn close(self) {
        drop(self);
    }
}
