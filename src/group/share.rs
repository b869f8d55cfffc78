//! How the ranks of a group share memory, also for the queues of their links. Rank 0 of the group creates the memory and sends
//! its location to the other ranks over authenticated links. In a group of several hosts, the ranks of each host share memory.

use std::sync::Arc;
use std::{fmt, io};

use bytemuck::{Pod, Zeroable};

use super::selection::LocalTransport;
use super::state::HierarchicalData;
use super::{Error, Group};
use crate::engine::{CREDIT_BYTES, CREDIT_FRAMES_MAX};
use crate::runtime::host_rounds::HostRounds;
use crate::schedule::hierarchy::HostLayout;
use crate::shm::{
    HandoverBuffer, HostMemoryLayout, RoundsSize, Segment, SegmentLocation, ShmRounds, TOKEN_BYTES,
};
use crate::types::{Algorithm, Contract, Rank, RankSet, Site, WorldSize};

/// The size of a slot in bytes. It is also the size of the block that a round transfers. With shorter slots, ranks wait for each
/// other more often. With longer slots, the slots of four ranks do not fit into the third-level cache of a processor.
const SLOT_BYTES: usize = 512 << 10;
pub(super) const REPORT_WORDS: usize = size_of::<MemoryReport>() / size_of::<u64>();

// Early data must fit into a queue while the receiver computes: a send of early data completes at once, and a rank that
// leaves does not wait until they are read. A frame needs less space than credit, which counts 128 bytes for its header.
const _: () = assert!(HostMemoryLayout::has_space_for(CREDIT_FRAMES_MAX, CREDIT_BYTES as usize));

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
    ) -> (Self, io::Result<R>) {
        let token = rand::random();
        let created = create(bytes, &token);
        let report = match created.as_ref().ok().and_then(location) {
            Some(SegmentLocation { process, file }) => {
                Self { status: Self::HAS_MEMORY, bytes: bytes as u64, process, file, token }
            }
            None => Self::without_memory(Self::HAS_NO_MEMORY),
        };
        (report, created)
    }

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

/// The memory that all ranks have, or why no rank uses it.
pub(super) type Shared<R> = Result<R, String>;

impl Group {
    /// Creates shared memory for the group, if shared memory is possible and TCP was not requested. All ranks of the group have
    /// to call this method. Returns [`Error::System`] if [`LocalTransport::Shm`] is requested and not possible.
    pub(super) fn share_memory(&mut self) -> Result<(), Error> {
        let requested = self.job.as_ref().map_or(LocalTransport::Tcp, |job| job.selection.local_transport);
        if requested == LocalTransport::Tcp || self.world == WorldSize::ONE {
            return Ok(());
        }
        let shared = if self.local_size() == self.world {
            self.new_host_rounds()?.map(|host_rounds| {
                self.shares_memory = true;
                self.host_rounds = Some(Box::new(host_rounds));
            })
        } else {
            self.share_memory_on_each_host()?
        };
        let Err(why) = shared else { return Ok(()) };
        if requested == LocalTransport::Shm {
            return Err(Error::System { what: "shared memory", detail: why });
        }
        log::info!("group {} uses TCP within a host: {why}", self.id);
        Ok(())
    }

    /// Creates shared memory for the ranks of each host, if all hosts can. All ranks of the group have to call this method.
    fn share_memory_on_each_host(&mut self) -> Result<Shared<()>, Error> {
        let machine = |rank: &Rank| self.machine_numbers.get(rank.index()).copied().unwrap_or_default();
        let machines: Vec<u32> = self.members.iter().map(machine).collect();
        let Some(layout) = HostLayout::new(&machines, self.rank) else { return Ok(Ok(())) };
        // A rank that is alone on its host has no rounds of the first and of the last stage.
        let stage_rounds: Shared<Vec<HostRounds>> = if self.local_size() == WorldSize::ONE {
            Ok(Vec::new())
        } else {
            let mut local = self.local_group();
            [local.new_host_rounds()?, local.new_host_rounds()?].into_iter().collect()
        };
        let stage_rounds = self.confirm(stage_rounds, Site::here(), |_| {})?;
        let hierarchical_data = |stage_rounds| HierarchicalData { layout, stage_rounds };
        Ok(stage_rounds.map(|rounds| self.hierarchical_data = Some(hierarchical_data(rounds))))
    }

    /// Creates shared memory for a group whose ranks are all on this host. All ranks of the group have to call this method.
    fn new_host_rounds(&mut self) -> Result<Shared<HostRounds>, Error> {
        if self.world.get() > RankSet::RANKS_MAX {
            let (ranks_max, world) = (RankSet::RANKS_MAX, self.world);
            return Ok(Err(format!("at most {ranks_max} ranks can share memory, and the group has {world}")));
        }
        let size = RoundsSize { ranks: self.world.as_usize(), slot_bytes: SLOT_BYTES };
        let rank = self.rank.index();
        let rounds =
            self.share_segment(size.bytes(), |segment| ShmRounds::new(Arc::new(segment), size, rank))?;
        Ok(rounds.map(|rounds| HostRounds::new(rounds, Arc::clone(&self.members), self.meter())))
    }

    /// Creates memory of `count` words that the ranks of the group use in turns. Returns `None` if the ranks do not share memory.
    /// All ranks of the group have to call this method.
    pub(crate) fn share_in_turns(&mut self, count: usize) -> Result<Option<HandoverBuffer>, Error> {
        if !self.shares_memory {
            return Ok(None);
        }
        let shared = self.share_segment(HandoverBuffer::segment_bytes(count), HandoverBuffer)?;
        let log = |why| log::info!("group {} shares no memory for gradients: {why}", self.id);
        Ok(shared.map_err(log).ok())
    }

    /// Makes the links between ranks of this host go through queues in shared memory, if all these ranks can map the memory.
    /// All ranks of the job have to call this method.
    pub(super) fn open_local_queues(&self) -> Result<(), Error> {
        let ranks = self.local_size().as_usize();
        if ranks == 1 {
            return Ok(());
        }
        if ranks > HostMemoryLayout::RANKS_MAX {
            let most = HostMemoryLayout::RANKS_MAX;
            log::info!(
                "the {ranks} ranks of this host exchange messages over TCP: there are more than {most}"
            );
            return Ok(());
        }
        let mut local = self.local_group();
        let (members, own) = (Arc::clone(&local.members), local.rank.index());
        let Some(job) = &self.job else { return Ok(()) };
        let layout = HostMemoryLayout::new(ranks);
        // Isolated groups have no port. There may be so many of them that long arenas would take too much memory.
        let is_isolated = !job.driver.core().link_driver.transport.sockets.listener.has_port();
        let layout = if is_isolated { layout } else { layout.with_long_arenas() };
        // A rank that has its queues may get the first entry of a peer before it knows itself that all ranks have theirs. So each
        // rank adds its queues before it reports that it has the memory.
        let added = local.share_segment(layout.bytes(), |memory| {
            job.driver.core().link_driver.transport.add_queues(&Arc::new(memory), layout, &members, own);
        })?;
        if let Err(why) = added {
            job.driver.core().link_driver.transport.remove_queues();
            log::info!("the ranks of this host exchange messages over TCP: {why}");
            return Ok(());
        }
        job.driver.change_over_to_queues();
        Ok(())
    }

    /// Creates memory of `bytes` bytes for a group whose ranks are all on this host. All ranks of the group have to call this
    /// method. `prepare` is called before any other rank learns that all ranks have the memory.
    pub(super) fn share_segment<R>(
        &mut self,
        bytes: usize,
        prepare: impl FnOnce(Segment) -> R,
    ) -> Result<Shared<R>, Error> {
        let (mut report, created) = match self.rank {
            Rank::ZERO => MemoryReport::create(bytes, Segment::create, Segment::location),
            _ => (MemoryReport::zeroed(), Err(io::ErrorKind::NotFound.into())),
        };
        let words: &mut [u64; REPORT_WORDS] = bytemuck::cast_mut(&mut report);
        self.broadcast(words, Rank::ZERO)?;
        let open = |location, _, token: &_| Segment::open(location, bytes, token);
        let opened = if self.rank == Rank::ZERO { created } else { report.open(open) };
        // The file stays open until all ranks have opened it.
        let opened = opened.map(|mut segment| {
            let file = segment.take_file();
            (prepare(segment), file)
        });
        // This direct all-gather also opens the links over which ranks wake each other.
        let set_direct = |contract: &mut Contract| contract.algorithm = Algorithm::Direct;
        Ok(self.confirm(opened, Site::here(), set_direct)?.map(|(prepared, _file)| prepared))
    }

    /// Returns this rank's memory if all ranks have theirs. `change` sets what the ranks agree on besides.
    pub(super) fn confirm<R, E: fmt::Display>(
        &mut self,
        own: Result<R, E>,
        site: Site,
        change: impl FnOnce(&mut Contract),
    ) -> Result<Shared<R>, Error> {
        let all = self.gather_numbers([u64::from(own.is_ok())], site, change)?;
        if own.is_ok() && all.contains(&[0]) {
            return Ok(Err("another rank could not open the memory of a peer".into()));
        }
        Ok(own.map_err(|error| error.to_string()))
    }
}
