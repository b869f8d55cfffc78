//! What the core executes besides operations over links: operations in shared memory, and collectives of several stages.

use std::collections::VecDeque;
use std::time::Duration;

use super::link_stages::LinkStage;
use crate::engine::{Envelope, OperationRequest, Pattern, Timestamp};
use crate::observe::event::{Direction, OperationStart};
use crate::reduce::Kernels;
use crate::runtime::encoding::Encoding;
use crate::runtime::host_rounds::HostRounds;
use crate::runtime::host_rounds::operation::ShmOperation;
use crate::runtime::memory::{Memory, SplitBuffer};
use crate::schedule::hierarchy::Block;
use crate::shm::{Posts, Segment};
use crate::types::{Rank, RankSet};

/// The time for which a thread polls shared memory before it sleeps, if each rank has a processor. The other ranks usually need
/// less time for a round. If n ranks share a processor, a thread polls n times as long, and yields the processor meanwhile.
pub(super) const SHM_SPIN_TIME: Duration = Duration::from_micros(200);

pub(crate) enum Submission {
    /// A collective, its buffer and its reduction, and how its stages encode. The core has the rounds of its stages.
    Collective(Vec<Block>, (Memory, Option<Kernels>), Option<Encoding>),
    /// The send of a message. The receiver is this rank of the world.
    Send(Rank, Memory),
    Receive(Pattern, Memory),
}

impl Submission {
    pub(super) fn direction(&self) -> Direction {
        match self {
            Self::Collective(..) => Direction::Collective,
            Self::Send(to, _) => Direction::To(*to),
            Self::Receive(pattern, _) => Direction::From(pattern.source),
        }
    }
}

pub(super) fn operation_start(
    request: &OperationRequest,
    direction: Direction,
    submitted: Timestamp,
) -> OperationStart {
    let OperationRequest { group, contract, site, .. } = *request;
    OperationStart { group, contract, direction, site, submitted }
}

/// What a short call has done that goes on as an operation.
#[derive(Default)]
pub(crate) struct BegunShort {
    pub(crate) has_posted: bool,
    /// The sleeping ranks that have to learn of the post.
    pub(crate) sleeping_peers: Vec<Rank>,
}

pub(crate) struct OperationOutput {
    pub(crate) memory: Memory,
    /// The envelope of the message that a receive has received; `None` for other operations.
    pub(crate) envelope: Option<Envelope>,
    pub(crate) ended: Timestamp,
}

/// Identifies a shared memory: the number of its group, and the index of its stage in a hierarchical operation.
pub(crate) type RoundsKey = (u32, usize);

/// An operation in shared memory that the core executes: an asynchronous operation, a stage of a hierarchical operation, or a
/// blocking operation that has to wait for earlier operations, or has waited too long for its caller to go on without the core.
pub(super) struct ShmTask {
    pub(super) key: RoundsKey,
    pub(super) shm_operation: ShmOperation,
    pub(super) memory: Memory,
    /// The round for which the caller of an adopted operation has waited without sleeping. `None` for other operations.
    pub(super) spun_round: Option<u64>,
}

/// An operation in shared memory that its caller executes, with its rounds and its buffer.
pub(crate) type AdoptedOperation<M> = (Box<HostRounds<M>>, ShmOperation, Memory);

/// The posts of a round in shared memory for which an operation waits.
pub(super) struct AwaitedPosts<M = Segment> {
    pub(super) posts: Posts<M>,
    pub(super) round: u64,
    /// The ranks that have to post, numbered within the shared memory.
    pub(super) ranks: RankSet,
}

pub(super) struct StagedCollective {
    pub(super) whole: SplitBuffer,
    pub(super) request: OperationRequest,
    pub(super) number: u64,
    pub(super) remaining: Vec<VecDeque<PendingStage>>,
    pub(super) unfinished_blocks: usize,
}

/// A stage that a block has not begun, and so without the elements of the block. Its operation in shared memory is already added,
/// in the same order on all ranks of a host.
pub(super) enum PendingStage {
    OnHost(Box<ShmTask>),
    OverLinks(LinkStage),
}
