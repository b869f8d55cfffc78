//! How the ranks of a group share memory. Rank 0 of the group creates the memory and sends its location to the other ranks over
//! authenticated links.

use std::io;
use std::sync::Arc;

use super::rounds_home::RoundsHome;
use super::selection::LocalTransport;
use super::{Error, Group};
use crate::runtime::host_rounds::HostRounds;
use crate::schedule::CollectiveSpec;
use crate::schedule::partition::Partition;
use crate::schedule::program::RankSet;
use crate::shm::{RoundsSize, Segment, SegmentLocation, ShmRounds, TOKEN_BYTES};
use crate::types::{Rank, Site, WorldSize};

/// The size of a slot in bytes. It is also the size of the block that a round transfers. With shorter slots, ranks wait for each
/// other more often. With longer slots, the slots of four ranks do not fit into the third-level cache of a processor.
const SLOT_BYTES: usize = 512 << 10;
/// The most ranks that share one memory. In rounds, each rank reads the slots of all other ranks.
pub(super) const RANKS_MAX: u32 = RankSet::RANKS_MAX;
/// The number of 64-bit words in which a rank sends the location of its memory.
pub(super) const LOCATION_WORDS: usize = 3 + TOKEN_BYTES / 8;

impl Group {
    /// Creates shared memory for the group, if shared memory is possible and TCP was not requested. All ranks of the group have
    /// to call this method.
    ///
    /// # Errors
    ///
    /// [`Error::System`] if [`LocalTransport::Shm`] is requested and not possible.
    pub(super) fn share_memory(&mut self) -> Result<(), Error> {
        let requested = self.selection().local_transport;
        if requested == LocalTransport::Tcp || self.world == WorldSize::ONE {
            return Ok(());
        }
        let shared = if self.local_size() == self.world {
            self.new_host_rounds()?.map(|host_rounds| self.host_rounds = Some(RoundsHome::Owned(host_rounds)))
        } else {
            self.share_memory_on_each_host()?
        };
        match shared {
            Ok(()) => Ok(()),
            Err(why) if requested == LocalTransport::Shm => {
                Err(Error::System { what: "shared memory", detail: why })
            }
            Err(why) => {
                log::info!("group {} uses TCP within a host: {why}", self.id);
                Ok(())
            }
        }
    }

    /// Creates shared memory for a group whose ranks are all on this host, or returns why that failed. All ranks of the group
    /// have to call this method.
    pub(super) fn new_host_rounds(&mut self) -> Result<Result<Box<HostRounds>, String>, Error> {
        if self.world.get() > RANKS_MAX {
            return Ok(Err(format!(
                "at most {RANKS_MAX} ranks can share memory, and the group has {}",
                self.world
            )));
        }
        let size = RoundsSize { ranks: self.world.as_usize(), slot_bytes: SLOT_BYTES };
        let rank = self.rank.index();
        let rounds =
            self.share_segment(size.bytes(), |segment| ShmRounds::new(Arc::new(segment), size, rank))?;
        Ok(rounds.map(|rounds| Box::new(HostRounds::new(rounds, self.meter()))))
    }

    /// Creates memory of `bytes` bytes for a group whose ranks are all on this host, or returns why that failed. All ranks of the
    /// group have to call this method. `prepare` is called before any other rank learns that all ranks have the memory.
    pub(super) fn share_segment<R>(
        &mut self,
        bytes: usize,
        prepare: impl FnOnce(Segment) -> R,
    ) -> Result<Result<R, String>, Error> {
        let (mut words, created) =
            if self.rank == Rank::ZERO { create_segment(bytes) } else { ([0; LOCATION_WORDS], None) };
        let site = Site::here();
        let spec = CollectiveSpec::Broadcast { count: LOCATION_WORDS, root: Rank::ZERO };
        self.run(self.new_call::<u64>(spec, site), &mut words)?;
        let opened = match created {
            Some(created) => created,
            None => open_segment(bytes, &words),
        };
        // The file stays open until all ranks have opened it.
        let opened = opened.map(|mut segment| {
            let file = segment.take_file();
            (prepare(segment), file)
        });
        // Shared memory is used only if all ranks have opened it. This direct all-gather also opens the links over which ranks
        // wake each other.
        let mut all = vec![0u64; self.world.as_usize()];
        all[self.rank.index()] = u64::from(opened.is_ok());
        let gather_call =
            self.new_call::<u64>(CollectiveSpec::AllGather(Partition::of_equal_parts(1, self.world)), site);
        self.run(gather_call.with_direct_algorithm(), &mut all)?;
        match opened {
            Ok((prepared, _file)) if all.iter().all(|&has_opened| has_opened == 1) => Ok(Ok(prepared)),
            Ok(_) => Ok(Err("another rank could not open the memory".into())),
            Err(error) => Ok(Err(error.to_string())),
        }
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
