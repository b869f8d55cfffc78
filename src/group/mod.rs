//! The public API: a [`Group`] of ranks, and the collectives that the ranks call together.
//!
//! ```
//! use ringtrain::{Group, ReduceOp};
//!
//! // Under `ringrun -n 4`, this process is one of four ranks. Without a launcher, this process is the only rank.
//! let mut group = Group::from_environment()?;
//! let mut gradients = vec![1.0f32, 2.0, 3.0];
//! group.all_reduce(&mut gradients, ReduceOp::Average)?;
//! assert_eq!(gradients, [1.0, 2.0, 3.0]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod alloc;
mod call;
mod collective;
mod collectives;
mod compressed;
mod foreign;
mod handle;
mod hosts;
mod isolated;
mod join;
mod local_queues;
mod messages;
mod new_groups;
pub(crate) mod objects;
mod objects_async;
mod parts;
mod plan;
mod reducers;
mod rounds_home;
mod selection;
mod share;
mod site;
mod streams;
mod tune;
mod verb_plans;
pub mod verbs;

use std::borrow::Cow;
use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

pub use crate::rendezvous::Checksums;
pub use crate::runtime::buffer::{Buffer, Input, OwnedBuffer};
pub use crate::runtime::driver::Interrupt;
pub use crate::runtime::error::Error;
pub use crate::runtime::message_status::Status;
pub use crate::runtime::profile::{Profile, Spent};
pub use crate::runtime::statistics::Statistics;
pub use alloc::SharedBuffer;
pub use foreign::ForeignBuffer;
pub use handle::{
    Handle, test_all, test_any, wait_all, wait_all_timeout, wait_any, wait_any_timeout, wait_until_any_ended,
};
pub use join::{JoinMethod, JoinOptions, OPERATION_TIMEOUT, SEGMENT_BYTES, START_TIMEOUT};
pub use messages::{Messenger, Received, SendOptions, Source};
pub use selection::Algorithms;
pub use share::LocalTransport;
pub use site::at;
pub use streams::Streams;

pub use crate::engine::SendMode;

use self::hosts::HierarchicalData;
use self::isolated::Origin;
use self::rounds_home::RoundsHome;
use self::selection::AlgorithmSelection;
use crate::rendezvous::StartError;
use crate::runtime::driver::Driver;
use crate::runtime::profile::Meter;
use crate::schedule::partition;
use crate::types::{HOSTS_GROUP_BIT, Rank, WorldSize};
pub use crate::wire::Cause;

/// The state that all groups of a job share.
struct SharedJob {
    driver: Driver,
    /// A counter for numbering new groups whose first member is this rank.
    next_group: AtomicU32,
    /// The name of the congestion control; `None` for the host's default.
    congestion: Option<String>,
    /// The number of connections of each link.
    streams: u8,
    /// An all-reduce on the ring divides a long buffer into blocks. Each rank's chunk of a block has this many bytes. All ranks
    /// have the same value.
    chunk_bytes: usize,
    /// Selects the algorithm of each operation. All ranks have the same value.
    selection: AlgorithmSelection,
    /// The data that [`Group::isolated`] needs to start another job; `None` for a world of one.
    origin: Option<Origin>,
}

/// A group of ranks of a job, from the view of one rank.
///
/// All ranks of a group have to call the same collectives in the same order, with buffers of the same length and
/// element type. If the calls differ, the job fails with an error that shows the calls of two ranks and their lines.
/// Different groups can be used at the same time. A collective blocks until this rank's part is done, or returns a
/// [`Handle`]. Ranks that get the same result get the same bits.
///
/// If a peer dies, the current or next call of every rank returns an error that names the peer. After a failed
/// operation, the content of the buffer is unspecified, and every later call of any group returns the same error.
///
/// The ranks of a group are numbered from 0. Error messages show the ranks in the whole job.
pub struct Group {
    /// `None` for a world of one rank, which has no links.
    job: Option<Arc<SharedJob>>,
    /// The group's number in the job. The group of all ranks has number 0.
    id: u32,
    /// The members' ranks in the job, in the order of their ranks in the group.
    members: Arc<[Rank]>,
    rank: Rank,
    world: WorldSize,
    /// This rank's number among the group's ranks on its host, and the number of these ranks.
    local_rank_and_size: (Rank, WorldSize),
    /// For each rank of the job, the number of the rank's machine. Ranks with the same number are on the same machine.
    machine_numbers: Arc<[u32]>,
    /// The maximum time of one operation.
    timeout: Duration,
    /// The number of asynchronous collectives of objects that have begun. It is the tag of the messages of the next one.
    object_operations: u32,
    /// In a world of one rank: the job that carries the rank's messages to itself. The first message creates this job.
    self_job: Arc<OnceLock<Arc<SharedJob>>>,
    /// In a world of one rank: the error that all calls return after [`Group::abort`].
    abort_error: Arc<OnceLock<Error>>,
    /// The rounds of collectives in shared memory; `None` if not all members share memory.
    host_rounds: Option<RoundsHome>,
    /// The data for hierarchical collectives; `None` if all members are on one host, or if the members on a host do not share
    /// memory.
    hierarchical_data: Option<HierarchicalData>,
    /// When the group and all its messengers have been dropped, this value tells the engine.
    retirement: Arc<GroupRetirement>,
}

/// Tells the engine, when this value is dropped, that a group was dropped. Holds the job and the number of the group.
struct GroupRetirement(Option<(Arc<SharedJob>, u32)>);

impl Drop for GroupRetirement {
    fn drop(&mut self) {
        if let Some((job, id)) = &self.0 {
            job.driver.retire_group(*id);
            job.driver.retire_group(*id | HOSTS_GROUP_BIT);
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
            local_rank_and_size: (Rank::ZERO, WorldSize::ONE),
            machine_numbers: Arc::from([0]),
            timeout: OPERATION_TIMEOUT,
            object_operations: 0,
            self_job: Arc::default(),
            abort_error: Arc::default(),
            host_rounds: None,
            hierarchical_data: None,
            retirement: Arc::new(GroupRetirement(None)),
        }
    }

    /// Joins the job that the options describe. Returns when every rank is connected to its two neighbours in rank
    /// order.
    ///
    /// # Errors
    ///
    /// [`StartError`], which names the missing ranks, or says what is wrong and on which rank.
    pub fn join(options: &JoinOptions) -> Result<Self, StartError> {
        join::join(options)
    }

    /// Joins the job for which `ringrun` has started this process. Without `ringrun`, creates a group of this process alone.
    ///
    /// # Errors
    ///
    /// The same errors as [`Group::join`] and [`JoinOptions::from_environment`].
    pub fn from_environment() -> Result<Self, StartError> {
        Self::join(&JoinOptions::from_environment()?)
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
        self.local_rank_and_size.0
    }

    /// Returns the number of the group's ranks on this host.
    pub fn local_size(&self) -> WorldSize {
        self.local_rank_and_size.1
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

    /// Returns the transport: `tcp`, `shm` (shared memory), `shm+tcp` (shared memory within hosts and TCP between
    /// hosts), or `none` in a world of one rank.
    pub fn transport(&self) -> &'static str {
        match &self.job {
            None => "none",
            Some(_) if self.host_rounds.is_some() => "shm",
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

    /// Switches the profile of the job's operations on this rank ([`Group::profile`]) on or off, for all groups. At first,
    /// the profile is off. While the profile is on, the clock is read twice for each attempt to send, to receive or to wait,
    /// and for each segment that is reduced. In a world of one rank, the profile stays empty.
    pub fn set_profiling(&self, is_on: bool) {
        self.meter().switch(is_on);
    }

    /// Returns how long the job's operations on this rank, in all groups, have sent, received, reduced and waited while
    /// the profile was on.
    pub fn profile(&self) -> Profile {
        self.meter().profile()
    }

    /// Returns the file descriptors of the job's sockets. If a program forks, the child process should close its copies of
    /// these descriptors. Otherwise peers do not notice when the parent process ends. The child process must not use or drop
    /// the group.
    pub fn descriptors(&self) -> Vec<RawFd> {
        let job = self.job.as_ref().or_else(|| self.self_job.get());
        job.map(|job| job.driver.descriptors()).unwrap_or_default()
    }

    /// Returns the host of a rank of the group, for use in errors: its name and address.
    pub(crate) fn host(&self, rank: Rank) -> String {
        let rank_in_job = self.members[rank.index()];
        self.job.as_ref().map_or_else(|| "this host".into(), |job| job.driver.host(rank_in_job))
    }

    /// Returns the interrupt function with which this rank joined its job.
    pub(crate) fn interrupt(&self) -> Option<Interrupt> {
        self.job.as_ref()?.origin.as_ref()?.options.interrupt
    }

    /// Returns the meter of the job's profile. In a world of one rank, the meter measures nothing.
    fn meter(&self) -> Meter {
        self.job.as_ref().map(|job| job.driver.meter().clone()).unwrap_or_default()
    }

    /// Returns the data that decide which algorithm an operation uses.
    fn selection(&self) -> Cow<'_, AlgorithmSelection> {
        self.job
            .as_ref()
            .map_or_else(|| Cow::Owned(AlgorithmSelection::default()), |job| Cow::Borrowed(&job.selection))
    }

    /// Returns the chunk of `rank`: the range of elements that belong to `rank` in [`Group::reduce_scatter`] and
    /// [`Group::all_gather`] of a buffer of `count` elements. The chunks are in rank order, and their lengths differ by at
    /// most one element.
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
