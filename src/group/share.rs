//! How the ranks of a group share memory. Rank 0 of the group creates the memory and sends its location to the other ranks over
//! authenticated links. In a group of several hosts, the ranks of each host share memory for [hierarchical
//! collectives](crate::schedule::hierarchy).

use std::io;
use std::sync::Arc;

use bytemuck::{Pod, Zeroable};

use super::selection::LocalTransport;
use super::state::HierarchicalData;
use super::{Error, Group};
use crate::runtime::host_rounds::HostRounds;
use crate::schedule::CollectiveSpec;
use crate::schedule::hierarchy::HostLayout;
use crate::shm::{HandoverBuffer, RoundsSize, Segment, SegmentLocation, ShmRounds, TOKEN_BYTES};
use crate::types::{Algorithm, Contract, Rank, RankSet, ReduceOp, Site, WorldSize};

/// The size of a slot in bytes. It is also the size of the block that a round transfers. With shorter slots, ranks wait for each
/// other more often. With longer slots, the slots of four ranks do not fit into the third-level cache of a processor.
const SLOT_BYTES: usize = 512 << 10;
/// The number of 64-bit words in which a rank sends a [`MemoryReport`].
pub(super) const REPORT_WORDS: usize = size_of::<MemoryReport>() / size_of::<u64>();

/// What a rank says about memory that other ranks have to open.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct MemoryReport {
    /// [`HAS_MEMORY`](Self::HAS_MEMORY), or any other number if the rank has created no memory.
    pub(super) status: u64,
    bytes: u64,
    /// The fields of [`SegmentLocation`].
    process: u32,
    file: u32,
    token: [u8; TOKEN_BYTES],
}

impl MemoryReport {
    pub(super) const HAS_MEMORY: u64 = 1;
    const HAS_NO_MEMORY: u64 = 2;

    /// Returns the report of a rank that has created no memory.
    pub(super) fn without_memory(status: u64) -> Self {
        Self { status, ..Self::zeroed() }
    }

    /// Creates memory of `bytes` bytes. Returns its report, and the memory or the error.
    pub(super) fn create<R>(
        bytes: usize,
        create: impl FnOnce(usize, &[u8; TOKEN_BYTES]) -> io::Result<R>,
        location: impl FnOnce(&R) -> Option<SegmentLocation>,
    ) -> (Self, Option<io::Result<R>>) {
        let token = rand::random();
        let created = create(bytes, &token);
        let report = match created.as_ref().ok().and_then(location) {
            Some(SegmentLocation { process, file }) => {
                Self { status: Self::HAS_MEMORY, bytes: bytes as u64, process, file, token }
            }
            None => Self::without_memory(Self::HAS_NO_MEMORY),
        };
        (report, Some(created))
    }

    /// Opens the memory of the rank that has sent this report.
    pub(super) fn open<R>(
        &self,
        open: impl FnOnce(SegmentLocation, usize, &[u8; TOKEN_BYTES]) -> io::Result<R>,
    ) -> io::Result<R> {
        let Self { status, bytes, process, file, ref token } = *self;
        if status != Self::HAS_MEMORY {
            return Err(io::Error::other("rank 0 of the group could not create the memory"));
        }
        let bytes = usize::try_from(bytes).map_err(|_| io::ErrorKind::OutOfMemory)?;
        open(SegmentLocation { process, file }, bytes, token)
    }
}

pub(super) enum ShareError {
    /// The job has failed.
    Failed(Error),
    /// Sharing memory is not possible, for this reason. No rank uses the memory.
    Impossible(String),
}

impl ShareError {
    pub(super) fn impossible(why: impl Into<Box<dyn std::error::Error>>) -> Self {
        Self::Impossible(why.into().to_string())
    }

    /// Returns why sharing memory is not possible, or the error of the job.
    pub(super) fn reason(self) -> Result<String, Error> {
        match self {
            Self::Failed(error) => Err(error),
            Self::Impossible(why) => Ok(why),
        }
    }
}

impl From<Error> for ShareError {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

impl Group {
    /// Creates shared memory for the group, if shared memory is possible and TCP was not requested. All ranks of the group have
    /// to call this method. Returns [`Error::System`] if [`LocalTransport::Shm`] is requested and not possible.
    pub(super) fn share_memory(&mut self) -> Result<(), Error> {
        let requested = self.job.as_ref().map_or(LocalTransport::Tcp, |job| job.selection.local_transport);
        if requested == LocalTransport::Tcp || self.world == WorldSize::ONE {
            return Ok(());
        }
        let shared = if self.local_size() == self.world {
            self.new_host_rounds().map(|host_rounds| {
                self.shares_memory = true;
                self.host_rounds = Some(Box::new(host_rounds));
            })
        } else {
            self.share_memory_on_each_host()
        };
        let Err(error) = shared else { return Ok(()) };
        let why = error.reason()?;
        if requested == LocalTransport::Shm {
            return Err(Error::System { what: "shared memory", detail: why });
        }
        log::info!("group {} uses TCP within a host: {why}", self.id);
        Ok(())
    }

    /// Creates shared memory for the ranks of each host, or for no host if any host cannot create it. All ranks of the group have
    /// to call this method.
    fn share_memory_on_each_host(&mut self) -> Result<(), ShareError> {
        let machine = |rank: &Rank| self.machine_numbers.get(rank.index()).copied().unwrap_or_default();
        let machines: Vec<u32> = self.members.iter().map(machine).collect();
        let Some(layout) = HostLayout::new(&machines, self.rank) else { return Ok(()) };
        let stage_rounds = match self.new_stage_rounds() {
            Ok(stage_rounds) => Ok(stage_rounds),
            Err(error) => Err(error.reason()?),
        };
        // Shared memory is used only if all ranks have it.
        let mut have_all = [u8::from(stage_rounds.is_ok())];
        self.all_reduce(&mut have_all, ReduceOp::Min)?;
        let stage_rounds = stage_rounds.map_err(ShareError::Impossible)?;
        if have_all != [1] {
            return Err(ShareError::impossible("ranks of another host could not share memory"));
        }
        self.hierarchical_data = Some(HierarchicalData { layout, stage_rounds });
        Ok(())
    }

    /// Creates the rounds of the first and of the last stage for the members on this host. Returns no rounds for a rank that is
    /// alone on its host.
    fn new_stage_rounds(&self) -> Result<Vec<HostRounds>, ShareError> {
        if self.local_size() == WorldSize::ONE {
            return Ok(Vec::new());
        }
        let mut local = self.local_group();
        Ok(vec![local.new_host_rounds()?, local.new_host_rounds()?])
    }

    /// Creates shared memory for a group whose ranks are all on this host. All ranks of the group have to call this method.
    fn new_host_rounds(&mut self) -> Result<HostRounds, ShareError> {
        if self.world.get() > RankSet::RANKS_MAX {
            let (ranks_max, world) = (RankSet::RANKS_MAX, self.world);
            let why = format!("at most {ranks_max} ranks can share memory, and the group has {world}");
            return Err(ShareError::Impossible(why));
        }
        let size = RoundsSize { ranks: self.world.as_usize(), slot_bytes: SLOT_BYTES };
        let rank = self.rank.index();
        let rounds =
            self.share_segment(size.bytes(), |segment| ShmRounds::new(Arc::new(segment), size, rank))?;
        Ok(HostRounds::new(rounds, Arc::clone(&self.members), self.meter()))
    }

    /// Creates memory of `count` words that the ranks of the group use in turns. Returns `None` if the ranks do not share memory.
    /// All ranks of the group have to call this method.
    pub(crate) fn share_in_turns(&mut self, count: usize) -> Result<Option<HandoverBuffer>, Error> {
        if !self.shares_memory {
            return Ok(None);
        }
        let shared = self.share_segment(HandoverBuffer::segment_bytes(count), HandoverBuffer);
        let Err(error) = shared else { return Ok(shared.ok()) };
        let why = error.reason()?;
        log::info!("group {} shares no memory for gradients: {why}", self.id);
        Ok(None)
    }

    /// Creates memory of `bytes` bytes for a group whose ranks are all on this host. All ranks of the group have to call this
    /// method. `prepare` is called before any other rank learns that all ranks have the memory.
    pub(super) fn share_segment<R>(
        &mut self,
        bytes: usize,
        prepare: impl FnOnce(Segment) -> R,
    ) -> Result<R, ShareError> {
        let (mut report, created) = match self.rank {
            Rank::ZERO => MemoryReport::create(bytes, Segment::create, Segment::location),
            _ => (MemoryReport::zeroed(), None),
        };
        let site = Site::here();
        let spec = CollectiveSpec::Broadcast { count: REPORT_WORDS, root: Rank::ZERO };
        let words: &mut [u64; REPORT_WORDS] = bytemuck::cast_mut(&mut report);
        self.run(&mut self.new_call::<u64>(spec, site), words)?;
        let open = |location, _, token: &_| Segment::open(location, bytes, token);
        let opened = created.unwrap_or_else(|| report.open(open));
        // The file stays open until all ranks have opened it.
        let opened = opened.map(|mut segment| {
            let file = segment.take_file();
            (prepare(segment), file)
        });
        // Shared memory is used only if all ranks have opened it. This direct all-gather also opens the links over which ranks
        // wake each other.
        let set_direct = |contract: &mut Contract| contract.algorithm = Algorithm::Direct;
        let all = self.gather_numbers([u64::from(opened.is_ok())], site, set_direct)?;
        let (prepared, _file) = opened.map_err(ShareError::impossible)?;
        if all.contains(&[0]) {
            return Err(ShareError::impossible("another rank could not open the memory"));
        }
        Ok(prepared)
    }
}
