//! The public API: a [`Group`] of ranks and the collectives they call together.
//!
//! ```
//! use ringtrain::{Group, ReduceOp};
//!
//! // Under `ringrun -n 4` this is one of four; without it, a group of its own.
//! let mut group = Group::from_environment()?;
//! let mut gradients = vec![1.0f32, 2.0, 3.0];
//! group.all_reduce(&mut gradients, ReduceOp::Average)?;
//! assert_eq!(gradients, [1.0, 2.0, 3.0]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod alloc;
mod asynchronous;
mod buffer;
mod call;
mod collectives;
mod converted;
mod deferred_drop;
mod driver;
mod error;
mod foreign;
mod functions;
mod gathered;
mod handle;
mod hosts;
mod isolated;
mod join;
pub mod link_driver;
mod link_io;
mod membership;
pub mod memory;
mod messages;
mod objects;
mod objects_async;
mod out_of_place;
mod profile;
mod selection;
mod share;
mod shm_executor;
mod site;
mod streams;
mod tune;

use std::borrow::Cow;
use std::ops::Range;
use std::os::fd::RawFd;
use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

pub use crate::rendezvous::Checksums;
pub use alloc::SharedBuffer;
pub use buffer::{Buffer, Input, OwnedBuffer};
pub use error::Error;
pub use foreign::ForeignBuffer;
pub use handle::{
    Handle, test_all, test_any, wait_all, wait_all_timeout, wait_any, wait_any_timeout, wait_until_any_ended,
};
pub use join::{Interrupt, JoinMethod, JoinOptions, OPERATION_TIMEOUT, SEGMENT_BYTES, START_TIMEOUT};
pub use messages::{Messenger, Received, SendOptions, Source, Status};
pub use objects::OBJECT_BYTES_MAX;
pub use profile::{Profile, Spent};
pub use selection::Algorithms;
pub use share::LocalTransport;
pub use site::at;
pub use streams::Streams;

pub use crate::engine::SendMode;

use self::driver::Driver;
use self::hosts::Hosts;
use self::isolated::Origin;
use self::profile::Meter;
use self::selection::AlgorithmSelection;
use self::shm_executor::ShmExecutor;
use crate::rendezvous::StartError;
use crate::schedule::partition;
use crate::types::{HOSTS_GROUP_BIT, Rank, WorldSize};
pub use crate::wire::Cause;

/// Statistics of a job on this rank, in all its groups.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Statistics {
    /// Operations completed.
    pub operations: u64,
    /// Bytes this rank sent, headers included.
    pub bytes_sent: u64,
    /// Bytes this rank received, headers included.
    pub bytes_received: u64,
    /// Time in which at least one operation was under way, including the wait for slower ranks. The shortest
    /// operations in shared memory take less time than reading the clock; one in eight of them is timed and counts
    /// for all.
    pub communication: Duration,
    /// Time that callers spent waiting for operations: the part of the communication that did not overlap with other
    /// work.
    pub exposed: Duration,
}

/// What all groups of a job share.
struct SharedJob {
    driver: Driver,
    /// What makes the number of the next group whose first member this rank is.
    next_group: AtomicU32,
    congestion: Option<String>,
    /// Of how many connections links consist.
    streams: u8,
    /// Bytes of a chunk of an all-reduce's block, the same on all ranks.
    chunk_bytes: usize,
    /// Which algorithm operations take, the same on all ranks.
    selection: AlgorithmSelection,
    /// What [`Group::isolated`] needs to start another job; `None` for a world of one.
    origin: Option<Origin>,
}

/// A group of ranks of a job, as one of them sees it.
///
/// All ranks of a group have to call the same collectives in the same order, with buffers of the same length and
/// element type. If the calls differ the job ends with an error that says what each rank requested and where.
/// Different groups can be used at the same time. A collective blocks until this rank's part is done, or returns a
/// [`Handle`]. Ranks that get the same result get the same bits. When a peer dies every rank's current or next call
/// returns an error that names it. After a failed operation the buffer's content is unspecified, and every later call
/// of any group returns the same error.
///
/// Ranks are numbered within the group, from 0; errors use the numbers of the job.
pub struct Group {
    /// `None` for a world of one, which has no links.
    job: Option<Arc<SharedJob>>,
    /// The group's number in the job: 0 for the one of all ranks.
    id: u32,
    /// The members' ranks in the job, in the order of their ranks here.
    members: Arc<[Rank]>,
    rank: Rank,
    world: WorldSize,
    /// This rank's number among the group's ranks of its machine, and how many those are.
    local: (Rank, WorldSize),
    /// The machine of each rank of the job, as a number.
    machines: Arc<[u32]>,
    /// How long one operation may take.
    timeout: Duration,
    /// How many collectives of objects have been begun that go on by themselves.
    objects: u32,
    /// What carries a world of one's messages to itself, once it has sent or awaited one.
    own: Arc<OnceLock<Arc<SharedJob>>>,
    /// Why a world of one has been given up.
    abandoned: Arc<OnceLock<Error>>,
    /// Where the members do their collectives, if they share memory.
    shm_executor: Option<Arc<Mutex<ShmExecutor>>>,
    /// What they do by hosts, if they are on several and share memory there.
    hosts: Option<Hosts>,
    /// Tells the engine when the group is gone.
    membership: Arc<Membership>,
}

/// A group's number, for as long as the group is used.
struct Membership(Option<(Arc<SharedJob>, u32)>);

impl Drop for Membership {
    fn drop(&mut self) {
        if let Some((job, id)) = &self.0 {
            job.driver.retire_group(*id);
            job.driver.retire_group(*id | HOSTS_GROUP_BIT);
        }
    }
}

impl Group {
    /// A group of this process alone: every collective returns at once, and messages go to the rank itself.
    pub fn solo() -> Self {
        Self {
            job: None,
            id: 0,
            members: Arc::from([Rank::ZERO]),
            rank: Rank::ZERO,
            world: WorldSize::ONE,
            local: (Rank::ZERO, WorldSize::ONE),
            machines: Arc::from([0]),
            timeout: OPERATION_TIMEOUT,
            objects: 0,
            own: Arc::default(),
            abandoned: Arc::default(),
            shm_executor: None,
            hosts: None,
            membership: Arc::new(Membership(None)),
        }
    }

    /// Joins the job that the options describe: connects to the other ranks, opens the ring and returns when all of
    /// it is connected.
    ///
    /// # Errors
    ///
    /// [`StartError`], which names the ranks that are missing, or says what is wrong and on which side.
    pub fn join(options: &JoinOptions) -> Result<Self, StartError> {
        join::join(options)
    }

    /// Joins the job for which `ringrun` has started this process; without `ringrun`, a group of this process alone.
    ///
    /// # Errors
    ///
    /// As [`Group::join`] and [`JoinOptions::from_environment`].
    pub fn from_environment() -> Result<Self, StartError> {
        Self::join(&JoinOptions::from_environment()?)
    }

    /// This process's rank in the group.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// The number of ranks.
    pub fn size(&self) -> WorldSize {
        self.world
    }

    /// This process's number among the group's ranks on its host.
    pub fn local_rank(&self) -> Rank {
        self.local.0
    }

    /// The number of the group's ranks on this host.
    pub fn local_size(&self) -> WorldSize {
        self.local.1
    }

    /// The members' ranks in the job, in the order of their ranks in the group.
    pub fn members(&self) -> &[Rank] {
        &self.members
    }

    /// The number of connections of each link; 0 in a world of one.
    pub fn streams(&self) -> u8 {
        self.job.as_ref().map_or(0, |job| job.streams)
    }

    /// The congestion control that links use; `None` for the host's default or a world of one.
    pub fn congestion_control(&self) -> Option<&str> {
        self.job.as_ref().and_then(|job| job.congestion.as_deref())
    }

    /// The transport: `tcp`, `shm` (shared memory), `shm+tcp` (shared memory within hosts and TCP between them), or
    /// `none` in a world of one.
    pub fn transport(&self) -> &'static str {
        match &self.job {
            None => "none",
            Some(_) if self.shm_executor.is_some() => "shm",
            Some(_) if self.hosts.is_some() => "shm+tcp",
            Some(_) => "tcp",
        }
    }

    /// The deadline of one operation.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Changes the deadline of this group's operations that begin from now on.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout;
    }

    /// The job's statistics on this rank, in all groups.
    pub fn statistics(&self) -> Statistics {
        self.job.as_ref().map(|job| job.driver.statistics()).unwrap_or_default()
    }

    /// Switches the measurement of where the time of the job's operations goes on this rank, in all groups, on or
    /// off. It is off at first. Switched on it reads the clock twice for each attempt to send, to receive or to wait
    /// and for each segment that is reduced; switched off it reads a flag. A world of one has nothing to measure.
    pub fn set_profiling(&self, is_on: bool) {
        self.meter().switch(is_on);
    }

    /// Where the time of the job's operations on this rank went while it was measured, in all groups.
    pub fn profile(&self) -> Profile {
        self.meter().profile()
    }

    /// The file descriptors of the job's sockets. If a program forks, its child should close its copies of them:
    /// until then peers do not notice that this process has ended. The child must not use the group, nor drop it.
    pub fn descriptors(&self) -> Vec<RawFd> {
        let job = self.job.as_ref().or_else(|| self.own.get());
        job.map(|job| job.driver.descriptors()).unwrap_or_default()
    }

    /// What measures where time goes; in a world of one, nothing.
    fn meter(&self) -> Meter {
        self.job.as_ref().map(|job| job.driver.meter().clone()).unwrap_or_default()
    }

    fn selection(&self) -> Cow<'_, AlgorithmSelection> {
        self.job
            .as_ref()
            .map_or_else(|| Cow::Owned(AlgorithmSelection::default()), |job| Cow::Borrowed(&job.selection))
    }

    /// The elements of a buffer of `count` that belong to `rank` in [`Group::reduce_scatter`] and [`Group::all_gather`]:
    /// contiguous, in rank order, sizes differing by at most one.
    pub fn chunk(&self, count: usize, rank: Rank) -> Range<usize> {
        partition::chunk(count, self.world, rank)
    }

    /// Ends the job on every rank with an error that gives this rank's `message` as the reason. Returns that error.
    pub fn abort(&self, message: &str) -> Error {
        if let Some(job) = &self.job {
            return job.driver.abort(message);
        }
        if let Some(own) = self.own.get() {
            own.driver.abort(message);
        }
        let cause = Cause::Aborted { rank: self.rank, host: "this host".into(), message: message.to_owned() };
        self.abandoned.get_or_init(|| Error::Failed { cause, reported_by: None }).clone()
    }

    /// Closes the group. The last group of a job says goodbye to all peers and closes every connection in order.
    /// Dropping it does the same. Operations whose handles were dropped get five seconds to end.
    pub fn close(self) {
        drop(self);
    }
}
