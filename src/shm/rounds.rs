//! The rounds of operations in shared memory (`docs/shared-memory.md`). In each round, every rank of a host posts a header and a
//! payload. To post, a rank writes the payload and the header, and then the number of the round, for which the other ranks wait.
//!
//! A rank that has posted round r + 1 no longer reads payloads of round r. Before a rank posts round r + [`LEAD_MAX`], it
//! compares its header with that of the next rank in round r. So a rank may post round r when all other ranks have posted round
//! r - [`LEAD_MAX`]: no rank reads a header of round r - [`HEADERS`] any more. For a payload in a long cell, all others must have
//! posted round r - 16, and for one in a cell of two ranks, round r - 8. A payload in the ring buffer may overlap earlier ones
//! except that of the round before, and one in exchange buffers those of round r - 2, also of other ranks. So all others must
//! have posted the round before.
//!
//! If ranks call different operations in a round, they may divide exchange buffers differently and write the same bytes. No rank
//! uses these bytes, because every rank compares all headers before it reads. Two ranks always write different buffers.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

mod exposed;
mod layout;
mod registry;
#[cfg(test)]
mod tests;

use self::layout::{
    CELL_PLACE, CELLS, CELLS_OF_TWO, CELLS_OFFSET, EXCHANGE_PLACE, EXPOSED_PLACE, HEADER_STEP, HEADERS,
    INLINE_PAYLOAD_BYTES_MAX, LONG_CELL_BYTES, LONG_CELL_PLACE, LONG_CELLS, LONG_CELLS_OFFSET, NextPost,
    PLACE_BITS, POST_HEADER_BYTES, RING_BUFFER_OFFSET,
};
pub use self::layout::{HEADER_WORDS, Header, LEAD_MAX, Payload, RoundsSize, SHORT_PAYLOAD_BYTES_MAX};
pub use self::registry::BUFFERS_MAX;
#[cfg(test)]
pub use self::registry::BufferRef;
use self::registry::{BUFFER_REF_BYTES, BufferRegistry};
use super::memory::{RoundsMemory, UNIT_BYTES, Uses, WORD_BYTES};
use super::segment::Segment;
use crate::types::part_index;

/// One rank's access to the shared memory of a group of ranks.
pub struct ShmRounds<M = Segment> {
    posts: Posts<M>,
    rank: usize,
    posted: u64,
    /// The last round that all other ranks have posted, as far as this rank knows.
    posted_by_all: u64,
    next_post: NextPost,
    /// The uses of the cells, the long cells and the ring buffer.
    uses: [Uses; 3],
    pub registry: BufferRegistry,
}

/// The posts of all ranks. A thread can look for posts while another thread uses the [`ShmRounds`].
pub struct Posts<M = Segment> {
    memory: Arc<M>,
    size: RoundsSize,
    /// [`RoundsSize::bytes_per_rank`].
    bytes_per_rank: usize,
}

impl<M> Clone for Posts<M> {
    fn clone(&self) -> Self {
        Self { memory: Arc::clone(&self.memory), size: self.size, bytes_per_rank: self.bytes_per_rank }
    }
}

pub struct PostedRound<'a, M> {
    /// Whether the rank has posted the location of its elements instead ([`ShmRounds::read_exposed_locations`]).
    pub is_exposed: bool,
    header_offset: usize,
    start: usize,
    /// The number of bytes from `start` to the end of the memory that a payload at this place can use.
    pub payload_bytes_max: usize,
    memory: &'a M,
}

const _: () = assert!(BUFFER_REF_BYTES <= INLINE_PAYLOAD_BYTES_MAX);
const _: () = assert!(SHORT_PAYLOAD_BYTES_MAX.is_multiple_of(UNIT_BYTES));

/// The result of [`ShmRounds::read_short_post`].
pub enum ShortPost<'a, M> {
    Absent,
    /// The payload of the post is not short, or the rank has exposed its elements.
    NotShort,
    Posted(PostedRound<'a, M>),
}

impl<'a, M: RoundsMemory> PostedRound<'a, M> {
    #[inline]
    pub fn header(&self) -> Header {
        self.memory.load_words(self.header_offset + WORD_BYTES)
    }

    /// Returns the bytes of the payload in `range`; `None` if the range does not end in the memory for the payload.
    #[inline]
    pub fn bytes(&self, range: Range<usize>) -> Option<M::Bytes<'a>> {
        if range.start > range.end || range.end > self.payload_bytes_max {
            return None;
        }
        // SAFETY: no rank overwrites the bytes before this rank has posted the next round. To post, this rank borrows the
        // `ShmRounds` mutably, so the borrow `'a` has ended by then.
        Some(unsafe { self.memory.bytes(self.start + range.start, range.len()) })
    }
}

impl<M: RoundsMemory> ShmRounds<M> {
    /// Creates the access of rank number `rank` to the memory. Panics if the memory is smaller than [`RoundsSize::bytes`], if
    /// `rank` is not below `size.ranks`, or if a ring buffer has more units than a stamp can count.
    pub fn new(memory: Arc<M>, size: RoundsSize, rank: usize) -> Self {
        assert!(memory.length() >= size.bytes(), "the memory must be large enough for all ranks");
        assert!(rank < size.ranks, "the rank must be below the number of ranks");
        assert!(
            size.ring_buffer_bytes() / UNIT_BYTES < LONG_CELL_PLACE,
            "a stamp must be able to count the units of a ring buffer"
        );
        let posts = Posts { memory, size, bytes_per_rank: size.bytes_per_rank() };
        Self {
            posts,
            rank,
            posted: 0,
            posted_by_all: 0,
            next_post: NextPost::default(),
            uses: [Uses::default(); 3],
            registry: BufferRegistry::new(rank),
        }
    }

    pub fn size(&self) -> RoundsSize {
        self.posts.size
    }

    pub fn posts(&self) -> &Posts<M> {
        &self.posts
    }

    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Returns whether this rank may write a payload with this [`Payload::lead_max`] for `round`.
    pub fn may_write(&mut self, round: u64, lead_max: u64) -> bool {
        let awaited = round.saturating_sub(lead_max);
        self.posted_by_all >= awaited || self.look_for_all(awaited)
    }

    /// Returns whether all other ranks have posted the round `awaited`, after a look at their posts.
    #[cold]
    fn look_for_all(&mut self, awaited: u64) -> bool {
        // A rank that is far ahead of the others does not look at all of them in each round. Both are among its last rounds.
        let middle = awaited + self.posted.saturating_sub(awaited) / 2;
        for candidate in [middle, awaited] {
            let has_posted = |rank| rank == self.rank || self.posts.has_posted(rank, candidate);
            if self.posted_by_all < awaited && (0..self.posts.size.ranks).all(has_posted) {
                self.posted_by_all = candidate;
            }
        }
        self.posted_by_all >= awaited
    }

    /// Records that this rank has read the posts of all other ranks in `round`.
    pub fn handle_all_read(&mut self, round: u64) {
        self.posted_by_all = round;
    }

    /// Copies `source` to part number `part` of this rank's payload for `round`, from byte `start` of the part on. Call this for
    /// all bytes of the payload, and then [`ShmRounds::post`]. Panics if other ranks may still read the memory
    /// ([`ShmRounds::may_write`]), if this rank has already posted the round, or if the payload is too long or ends too early.
    pub fn write_payload(
        &mut self,
        round: u64,
        payload: Payload,
        (part, start, source): (usize, usize, &[u8]),
    ) {
        if self.next_post.round != round {
            let lead_max = payload.lead_max(self.posts.size.ranks);
            assert!(self.may_write(round, lead_max), "another rank may read this memory");
            self.reserve_payload(round, payload);
        }
        let NextPost { place, payload: Payload { bytes, part_bytes, .. }, .. } = self.next_post;
        let is_inside = part * part_bytes + start + source.len() <= bytes
            && (part_bytes == 0 || start + source.len() <= part_bytes);
        assert!(is_inside, "the payload must be long enough");
        assert!(self.posted < round, "another rank may read this memory");
        // The inverse of `part_index`.
        let to = part + usize::from(part >= self.rank);
        let (offset, _) = self.part_offset((self.rank, to), round, (place, part_bytes));
        self.posts.memory.write(offset + start, source);
    }

    fn reserve_payload(&mut self, round: u64, payload: Payload) {
        let bytes_max = self.posts.size.slot_bytes.max(SHORT_PAYLOAD_BYTES_MAX);
        let bytes_of_parts = payload.part_bytes * (self.posts.size.ranks - 1);
        assert!(payload.bytes.max(bytes_of_parts) <= bytes_max, "a payload must not be longer than a slot");
        self.next_post.reserve(round, payload, self.posts.size);
        self.count_use(self.next_post.place);
    }

    /// Counts a payload at this [`NextPost::place`]. If there have been several, populates the memory for the next ones.
    fn count_use(&mut self, place: usize) {
        let size = self.posts.size;
        let cells = if size.ranks == 2 { CELLS_OF_TWO } else { CELLS };
        let (part, bytes) = match place {
            0 | EXPOSED_PLACE | EXCHANGE_PLACE => return,
            CELL_PLACE => (0, CELLS_OFFSET..CELLS_OFFSET + cells as usize * SHORT_PAYLOAD_BYTES_MAX),
            LONG_CELL_PLACE => (1, LONG_CELLS_OFFSET..RING_BUFFER_OFFSET),
            _ => (2, RING_BUFFER_OFFSET..RING_BUFFER_OFFSET + size.used_ring_bytes()),
        };
        if self.uses[part].count() {
            // Of two ranks, each also writes the cells of the other.
            let other = (part == 0 && size.ranks == 2).then(|| 1 - self.rank);
            for start in [self.rank].into_iter().chain(other).map(|rank| self.posts.rank_offset(rank)) {
                self.posts.memory.populate(start + bytes.start..start + bytes.end);
            }
        }
    }

    /// Posts this rank's header, and the payload of [`ShmRounds::write_payload`], which is otherwise empty.
    pub fn post(&mut self, round: u64, header: &Header) {
        if self.next_post.round != round {
            self.reserve_payload(round, Payload::default());
        }
        let (memory, stamp) = (&*self.posts.memory, self.posts.header_offset(self.rank, round));
        memory.store_words(stamp + WORD_BYTES, header);
        memory.store(stamp, round << PLACE_BITS | self.next_post.place as u64, Ordering::Release);
        self.posted = round;
    }

    /// Does the same as [`ShmRounds::write_payload`] and [`ShmRounds::post`] for a short payload of `bytes` bytes, with fewer
    /// instructions. `lead_max` is its [`Payload::lead_max`]. `parts` are its parts, and where they begin in it.
    pub fn post_short<'a>(
        &mut self,
        round: u64,
        header: &Header,
        (bytes, lead_max, parts): (usize, u64, impl Iterator<Item = (usize, &'a [u8])>),
    ) {
        let is_free = self.posted < round && self.posted_by_all >= round.saturating_sub(lead_max);
        assert!(is_free, "another rank may read this memory");
        let place = if bytes > INLINE_PAYLOAD_BYTES_MAX { CELL_PLACE } else { 0 };
        if place == CELL_PLACE {
            self.count_use(place);
        }
        let (memory, stamp) = (&*self.posts.memory, self.posts.header_offset(self.rank, round));
        let payload = self.payload_offset(self.rank, round, place);
        for (start, part) in parts {
            let is_inside = start + part.len() <= bytes.min(SHORT_PAYLOAD_BYTES_MAX);
            assert!(is_inside, "the payload must be long enough");
            memory.write(payload + start, part);
        }
        memory.store_words(stamp + WORD_BYTES, header);
        memory.store(stamp, round << PLACE_BITS | place as u64, Ordering::Release);
        (self.next_post.round, self.next_post.place) = (round, place);
        self.posted = round;
    }

    /// Posts a header with a stamp that names any place of the payload.
    #[cfg(test)]
    pub fn post_with_place(&mut self, round: u64, header: &Header, place: usize) {
        self.reserve_payload(round, Payload::default());
        self.next_post.place = place;
        self.post(round, header);
    }

    /// Returns the post of `rank` in `round`; `None` if there is none, or this rank has already posted the next round. The
    /// payload is this rank's part of `part_bytes` bytes, or the whole payload if `part_bytes` is 0.
    pub fn read_post(&self, rank: usize, round: u64, part_bytes: usize) -> Option<PostedRound<'_, M>> {
        // After this rank has posted the next round, the payload may be overwritten.
        let (header_offset, stamp) = self.posts.stamp(rank, round).filter(|_| self.posted <= round)?;
        let place = stamp as usize & EXPOSED_PLACE;
        let part_bytes = if place == EXPOSED_PLACE { 0 } else { part_bytes };
        let (start, part) = self.part_offset((rank, self.rank), round, (place, part_bytes));
        let size = self.posts.size;
        let bytes_max = match place {
            0 => INLINE_PAYLOAD_BYTES_MAX,
            EXPOSED_PLACE => BUFFER_REF_BYTES,
            CELL_PLACE => SHORT_PAYLOAD_BYTES_MAX,
            EXCHANGE_PLACE if part_bytes == 0 && size.ranks != 2 => 0,
            EXCHANGE_PLACE => size.exchange_buffer_bytes(),
            LONG_CELL_PLACE => LONG_CELL_BYTES,
            _ => size.ring_buffer_bytes().saturating_sub((place - 1) * UNIT_BYTES),
        };
        let payload_bytes_max = bytes_max.saturating_sub(part * part_bytes);
        let (is_exposed, memory) = (place == EXPOSED_PLACE, &*self.posts.memory);
        Some(PostedRound { is_exposed, header_offset, start, payload_bytes_max, memory })
    }

    /// Does the same as [`ShmRounds::read_post`] for a short payload, with fewer instructions.
    #[inline]
    pub fn read_short_post(&self, rank: usize, round: u64) -> ShortPost<'_, M> {
        let Some((header_offset, stamp)) = self.posts.stamp(rank, round).filter(|_| self.posted <= round)
        else {
            return ShortPost::Absent;
        };
        let (start, payload_bytes_max) = match stamp as usize & EXPOSED_PLACE {
            0 => (header_offset + POST_HEADER_BYTES, INLINE_PAYLOAD_BYTES_MAX),
            CELL_PLACE => (self.payload_offset(rank, round, CELL_PLACE), SHORT_PAYLOAD_BYTES_MAX),
            _ => return ShortPost::NotShort,
        };
        let memory = &*self.posts.memory;
        ShortPost::Posted(PostedRound { is_exposed: false, header_offset, start, payload_bytes_max, memory })
    }

    /// Begins to fetch the second half of a header with its payload, or a payload of more `bytes` in a cell.
    pub fn prefetch_payload(&self, rank: usize, round: u64, bytes: usize) {
        let offset = if bytes > INLINE_PAYLOAD_BYTES_MAX {
            self.payload_offset(rank, round, CELL_PLACE)
        } else {
            self.posts.header_offset(rank, round) + UNIT_BYTES / 2
        };
        self.posts.memory.prefetch(offset);
    }

    /// Call this method before this rank writes `bytes` of its own buffer, which it may have exposed.
    pub fn before_own_write(&self, bytes: &[u8]) {
        self.posts.memory.before_access_in_place(bytes, true);
    }

    /// Makes the next rank that posts wake this rank. After this call, check again for posts before you sleep.
    pub fn mark_asleep(&self) {
        self.posts.memory.store(self.posts.sleep_flag(self.rank), 1, Ordering::Relaxed);
        self.posts.memory.fence();
    }

    pub fn mark_awake(&self) {
        self.posts.memory.store(self.posts.sleep_flag(self.rank), 0, Ordering::Relaxed);
    }

    /// Calls `wake` with each rank that sleeps, and marks the rank as awake. Call this method after a post.
    pub fn wake_sleepers(&self, mut wake: impl FnMut(usize)) {
        // The fence pairs with that in `mark_asleep`: either this rank sees the flag of the sleeping rank, or the sleeping rank
        // sees this rank's post when it checks again.
        self.posts.memory.fence();
        for rank in (0..self.posts.size.ranks).filter(|&rank| rank != self.rank) {
            let (memory, sleep_flag) = (&*self.posts.memory, self.posts.sleep_flag(rank));
            if memory.load(sleep_flag, Ordering::Relaxed) != 0
                && memory.swap(sleep_flag, 0, Ordering::Relaxed) != 0
            {
                wake(rank);
            }
        }
    }

    /// Returns the offset of the part of the payload of `from` in `round` that the rank `to` reads, and the index of the part.
    /// The payload is at this [`NextPost::place`]. Its parts have `part_bytes` bytes. If it is not divided, this is 0.
    fn part_offset(
        &self,
        (from, to): (usize, usize),
        round: u64,
        (place, part_bytes): (usize, usize),
    ) -> (usize, usize) {
        if place == EXCHANGE_PLACE {
            let (owner, part, offset) = self.posts.size.exchange_place((from, to), round, part_bytes);
            return (self.posts.rank_offset(owner) + offset, part);
        }
        let part = part_index(from, to);
        (self.payload_offset(from, round, place) + part * part_bytes, part)
    }

    /// Returns the offset of the payload of `rank` in `round`, at [`NextPost::place`] `place`, which is not [`EXCHANGE_PLACE`].
    /// Of two ranks, each writes the cells that it has read before.
    #[inline]
    fn payload_offset(&self, rank: usize, round: u64, place: usize) -> usize {
        match place {
            0 | EXPOSED_PLACE => self.posts.header_offset(rank, round) + POST_HEADER_BYTES,
            CELL_PLACE => {
                let (owner, cell) = if self.posts.size.ranks == 2 {
                    (rank ^ (round / CELLS_OF_TWO % 2) as usize, round % CELLS_OF_TWO)
                } else {
                    (rank, round % CELLS)
                };
                self.posts.rank_offset(owner) + CELLS_OFFSET + cell as usize * SHORT_PAYLOAD_BYTES_MAX
            }
            LONG_CELL_PLACE => {
                let cell = (round % LONG_CELLS) as usize;
                self.posts.rank_offset(rank) + LONG_CELLS_OFFSET + cell * LONG_CELL_BYTES
            }
            _ => self.posts.rank_offset(rank) + RING_BUFFER_OFFSET + (place - 1) * UNIT_BYTES,
        }
    }
}

impl<M: RoundsMemory> Posts<M> {
    /// Returns whether `rank` has posted `round` or a later round that uses the same header.
    pub fn has_posted(&self, rank: usize, round: u64) -> bool {
        self.memory.load(self.header_offset(rank, round), Ordering::Acquire) >> PLACE_BITS >= round
    }

    /// Returns whether the header of `rank` for `round` has the number of a later round, for which it had to wait for this rank.
    pub fn is_ahead(&self, rank: usize, round: u64) -> bool {
        self.memory.load(self.header_offset(rank, round), Ordering::Relaxed) >> PLACE_BITS > round
    }

    /// Returns the header of `rank` in `round`, if it is there. A rank may read those of the last [`LEAD_MAX`] rounds it posted.
    pub fn header(&self, rank: usize, round: u64) -> Option<Header> {
        let (offset, _) = self.stamp(rank, round)?;
        Some(self.memory.load_words(offset + WORD_BYTES))
    }

    /// Returns the offset and the stamp of the header of `rank` in `round`, if the rank has posted the round.
    fn stamp(&self, rank: usize, round: u64) -> Option<(usize, u64)> {
        let offset = self.header_offset(rank, round);
        let stamp = self.memory.load(offset, Ordering::Acquire);
        (stamp >> PLACE_BITS == round).then_some((offset, stamp))
    }

    fn rank_offset(&self, rank: usize) -> usize {
        assert!(rank < self.size.ranks, "the rank must be below the number of ranks");
        UNIT_BYTES + rank * self.bytes_per_rank
    }

    fn header_offset(&self, rank: usize, round: u64) -> usize {
        self.rank_offset(rank) + (1 + round * HEADER_STEP % HEADERS) as usize * UNIT_BYTES
    }

    fn sleep_flag(&self, rank: usize) -> usize {
        self.rank_offset(rank)
    }
}
