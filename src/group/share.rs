//! How the ranks of a group come to share memory: the first one makes it and tells the others where it is, over links that
//! are authenticated.

use std::io;
use std::sync::{Arc, Mutex};

use super::shm_executor::ShmExecutor;
use super::{Error, Group};
use crate::schedule::CollectiveSpec;
use crate::schedule::partition::Partition;
use crate::transport::shm::{RoundsSize, Segment, SegmentLocation, ShmRounds, TOKEN_BYTES};
use crate::types::{Rank, Site, WorldSize};

/// Bytes of a slot, and so of a round's block: with shorter ones ranks wait for each other more often, with longer ones the
/// arenas of four ranks are more than a processor's third cache.
const SLOT_BYTES: usize = 512 << 10;
/// The most ranks that share a board; every rank looks at every other one's slot.
const RANKS_MAX: u32 = 64;
/// Words in which a rank says where memory is.
pub(super) const WORDS: usize = 3 + TOKEN_BYTES / 8;

/// The transport between ranks of one host.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum LocalTransport {
    /// Shared memory if possible, TCP otherwise.
    #[default]
    Auto,
    /// TCP.
    Tcp,
    /// Shared memory; joining fails if that is not possible.
    Shm,
}

impl Group {
    /// Gives the group a board, if it is to have one and can; all of its ranks have to call this.
    ///
    /// # Errors
    ///
    /// If it is to have one and nothing else will do: why it cannot.
    pub(super) fn share_memory(&mut self) -> Result<(), Error> {
        let wanted = self.selection().local;
        if wanted == LocalTransport::Tcp || self.world == WorldSize::ONE {
            return Ok(());
        }
        let shared = if self.local_size() == self.world {
            self.new_shm_executor()?.map(|shm_executor| self.shm_executor = Some(shm_executor))
        } else {
            self.share_memory_by_hosts()?
        };
        match shared {
            Ok(()) => Ok(()),
            Err(why) if wanted == LocalTransport::Shm => {
                Err(Error::System { what: "shared memory", detail: why })
            }
            Err(why) => {
                log::info!("group {} talks by TCP: {why}", self.id);
                Ok(())
            }
        }
    }

    /// Memory for a group whose ranks are all on this host, or what is in the way. All of its ranks have to call this.
    pub(super) fn new_shm_executor(&self) -> Result<Result<Arc<Mutex<ShmExecutor>>, String>, Error> {
        if self.world.get() > RANKS_MAX {
            return Ok(Err(format!("at most {RANKS_MAX} ranks share memory, and it has {}", self.world)));
        }
        let size = RoundsSize { ranks: self.world.as_usize(), slot_bytes: SLOT_BYTES };
        let (mut words, created) = if self.rank == Rank::ZERO { create(size) } else { ([0; WORDS], None) };
        let site = Site::here();
        self.run(self.broadcast_call::<u64>(WORDS, Rank::ZERO, site)?, &mut words)?;
        let opened = match created {
            Some(created) => created,
            None => open(size, &words),
        };
        // Everybody has it or nobody uses it. All links are open afterwards, by which ranks wake each other.
        let mut all = vec![0u64; size.ranks];
        all[self.rank.index()] = u64::from(opened.is_ok());
        let gathering =
            self.call::<u64>(CollectiveSpec::AllGather(Partition::of_equal_parts(1, self.world)), site);
        self.run(gathering.with_direct_algorithm(), &mut all)?;
        match opened {
            Ok(segment) if all.iter().all(|&has_it| has_it == 1) => {
                let mut board = ShmRounds::new(segment, size, self.rank.index());
                board.segment_mut().close();
                Ok(Ok(Arc::new(Mutex::new(ShmExecutor::new(board, self.meter())))))
            }
            Ok(_) => Ok(Err("another rank could not open it".into())),
            Err(error) => Ok(Err(error.to_string())),
        }
    }
}

/// New memory, and the words that say where it is.
fn create(size: RoundsSize) -> ([u64; WORDS], Option<io::Result<Segment>>) {
    let token: [u8; TOKEN_BYTES] = rand::random();
    let segment = Segment::create(size.bytes(), &token);
    let place = segment.as_ref().ok().and_then(Segment::place);
    (place.map_or([0; WORDS], |place| to_words(place, &token)), Some(segment))
}

/// Where memory is and by which token it is known, in words that begin with 1.
pub(super) fn to_words(place: SegmentLocation, token: &[u8; TOKEN_BYTES]) -> [u64; WORDS] {
    let mut words = [0; WORDS];
    words[..3].copy_from_slice(&[1, u64::from(place.process), u64::from(place.file)]);
    for (word, bytes) in words[3..].iter_mut().zip(token.as_chunks().0) {
        *word = u64::from_le_bytes(*bytes);
    }
    words
}

/// What such words say; `None` if there is no memory.
pub(super) fn from_words(words: &[u64; WORDS]) -> Option<(SegmentLocation, [u8; TOKEN_BYTES])> {
    let [1, process, file, token @ ..] = words else { return None };
    let place = SegmentLocation { process: *process as u32, file: *file as u32 };
    let mut bytes = [0; TOKEN_BYTES];
    for (chunk, word) in bytes.as_chunks_mut().0.iter_mut().zip(token) {
        *chunk = word.to_le_bytes();
    }
    Some((place, bytes))
}

fn open(size: RoundsSize, words: &[u64; WORDS]) -> io::Result<Segment> {
    let there_is_none = || io::Error::other("rank 0 of the group could not make it");
    let (place, token) = from_words(words).ok_or_else(there_is_none)?;
    Segment::open(place, size.bytes(), &token)
}
