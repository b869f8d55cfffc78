//! How the ranks of a group share memory. Rank 0 of the group creates the memory and sends its location to the other ranks over
//! authenticated links. In a group of several hosts, the ranks of each host share memory for [hierarchical
//! collectives](crate::schedule::hierarchy).

use std::io;
use std::sync::Arc;

use super::selection::LocalTransport;
use super::state::HierarchicalData;
use super::{Error, Group};
use crate::runtime::host_rounds::HostRounds;
use crate::schedule::CollectiveSpec;
use crate::schedule::hierarchy::HostLayout;
use crate::shm::{RoundsSize, Segment, SegmentLocation, ShmRounds, TOKEN_BYTES};
use crate::types::{Algorithm, Contract, Rank, RankSet, ReduceOp, Site, WorldSize};

/// The size of a slot in bytes. It is also the size of the block that a round transfers. With shorter slots, ranks wait for each
/// other more often. With longer slots, the slots of four ranks do not fit into the third-level cache of a processor.
const SLOT_BYTES: usize = 512 << 10;
/// The number of 64-bit words in which a rank sends the location of its memory.
pub(super) const LOCATION_WORDS: usize = 3 + TOKEN_BYTES / 8;

/// Why ranks do not share memory.
pub(super) enum ShareError {
    /// The job has failed.
    Failed(Error),
    /// Sharing memory is not possible, for this reason. No rank uses the memory.
    Impossible(String),
}

impl ShareError {
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

impl From<io::Error> for ShareError {
    fn from(error: io::Error) -> Self {
        Self::Impossible(error.to_string())
    }
}

impl From<&str> for ShareError {
    fn from(why: &str) -> Self {
        Self::Impossible(why.into())
    }
}

impl Group {
    /// Creates shared memory for the group, if shared memory is possible and TCP was not requested. All ranks of the group have
    /// to call this method.
    ///
    /// # Errors
    ///
    /// [`Error::System`] if [`LocalTransport::Shm`] is requested and not possible.
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
        let member = |rank: &Rank| self.members[rank.index()];
        let stage_rounds = match self.new_stage_rounds(layout.local_ranks().iter().map(member).collect()) {
            Ok(stage_rounds) => Ok(stage_rounds),
            Err(error) => Err(error.reason()?),
        };
        // Shared memory is used only if all ranks have it.
        let mut have_all = [u8::from(stage_rounds.is_ok())];
        self.all_reduce(&mut have_all, ReduceOp::Min)?;
        let stage_rounds = stage_rounds.map_err(ShareError::Impossible)?;
        if have_all != [1] {
            return Err("ranks of another host could not share memory".into());
        }
        self.hierarchical_data = Some(HierarchicalData { layout, stage_rounds });
        Ok(())
    }

    /// Creates the rounds of the first and of the last stage for the members on this host. Returns no rounds for a rank that is
    /// alone on its host.
    fn new_stage_rounds(&self, local_members: Arc<[Rank]>) -> Result<Vec<HostRounds>, ShareError> {
        if local_members.len() == 1 {
            return Ok(Vec::new());
        }
        let mut local = self.with_local_members(local_members);
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

    /// Creates memory of `bytes` bytes for a group whose ranks are all on this host. All ranks of the group have to call this
    /// method. `prepare` is called before any other rank learns that all ranks have the memory.
    pub(super) fn share_segment<R>(
        &mut self,
        bytes: usize,
        prepare: impl FnOnce(Segment) -> R,
    ) -> Result<R, ShareError> {
        let (mut words, created) =
            if self.rank == Rank::ZERO { create_segment(bytes) } else { ([0; LOCATION_WORDS], None) };
        let site = Site::here();
        let spec = CollectiveSpec::Broadcast { count: LOCATION_WORDS, root: Rank::ZERO };
        self.run(&mut self.new_call::<u64>(spec, site), &mut words)?;
        let opened = created.unwrap_or_else(|| open_segment(bytes, &words));
        // The file stays open until all ranks have opened it.
        let opened = opened.map(|mut segment| {
            let file = segment.take_file();
            (prepare(segment), file)
        });
        // Shared memory is used only if all ranks have opened it. This direct all-gather also opens the links over which ranks
        // wake each other.
        let set_direct = |contract: &mut Contract| contract.algorithm = Algorithm::Direct;
        let all = self.gather_numbers([u64::from(opened.is_ok())], site, set_direct)?;
        let (prepared, _file) = opened?;
        if all.contains(&[0]) {
            return Err("another rank could not open the memory".into());
        }
        Ok(prepared)
    }
}

/// Creates memory of `bytes` bytes. Returns the words with its location, and the memory or the error.
fn create_segment(bytes: usize) -> ([u64; LOCATION_WORDS], Option<io::Result<Segment>>) {
    let token: [u8; TOKEN_BYTES] = rand::random();
    let segment = Segment::create(bytes, &token);
    let location = segment.as_ref().ok().and_then(Segment::location);
    (location.map_or([0; LOCATION_WORDS], |location| location_to_words(location, &token)), Some(segment))
}

/// Encodes the location and the token of a memory. The first word is 1.
pub(super) fn location_to_words(
    location: SegmentLocation,
    token: &[u8; TOKEN_BYTES],
) -> [u64; LOCATION_WORDS] {
    let mut words = [0; LOCATION_WORDS];
    words[..3].copy_from_slice(&[1, u64::from(location.process), u64::from(location.file)]);
    for (word, bytes) in words[3..].iter_mut().zip(token.as_chunks().0) {
        *word = u64::from_le_bytes(*bytes);
    }
    words
}

/// Decodes the words of [`location_to_words`]. Returns `None` if the first word is not 1, which means that there is no memory.
pub(super) fn location_from_words(
    words: &[u64; LOCATION_WORDS],
) -> Option<(SegmentLocation, [u8; TOKEN_BYTES])> {
    let [1, process, file, token @ ..] = words else { return None };
    let location = SegmentLocation { process: *process as u32, file: *file as u32 };
    let mut bytes = [0; TOKEN_BYTES];
    for (chunk, word) in bytes.as_chunks_mut().0.iter_mut().zip(token) {
        *chunk = word.to_le_bytes();
    }
    Some((location, bytes))
}

/// Opens the memory whose location rank 0 of the group has sent.
fn open_segment(bytes: usize, words: &[u64; LOCATION_WORDS]) -> io::Result<Segment> {
    let no_memory = || io::Error::other("rank 0 of the group could not create the memory");
    let (location, token) = location_from_words(words).ok_or_else(no_memory)?;
    Segment::open(location, bytes, &token)
}
