//! What each rank of a host posts, round by round, for the others to read.
//!
//! Every rank has two heads, for even and for odd rounds, each with room for a short payload behind it, and an arena for
//! longer ones, in which one follows the other. It writes a payload, then its round's number, which others wait for. Memory is
//! written again two rounds later at the earliest. That is safe once every other rank has posted the round between: by then
//! it has read all that it wanted of the round before. [`ShmRounds::may_write`] says so, and [`ShmRounds::write`] insists.
//!
//! The arena is larger than a processor's second cache, because memory that another processor has just read, and still has in
//! its cache, takes longer to write than memory that both have forgotten.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

mod registry;

use self::registry::{BUFFER_REF_BYTES, BufferRegistry};
pub use self::registry::{BUFFERS_MAX, BufferRef};
use super::segment::{Segment, TOKEN_BYTES};

/// Bytes that two processors do not share by accident: a cache line and the one that is fetched along with it.
const LINE: usize = 128;
/// The longest payload that has its place behind the head, in bytes: it comes along with it.
const SHORT_BYTES: usize = 4 << 10;
/// How many of the longest payloads an arena has room for. Three would do: one that is read, one that is written, and what is
/// left over at the end.
const SLOTS: usize = 4;
/// The bits of a stamp that say where the payload lies.
const PLACE_BITS: u32 = 16;
/// What a stamp says instead where there is no payload: the elements are lent, and behind the head it is said where they lie.
const EXPOSED: usize = (1 << PLACE_BITS) - 1;
/// Words of a head beside its stamp.
pub const HEADER_WORDS: usize = 7;

/// What a rank says of what it has posted.
pub type Header = [u64; HEADER_WORDS];

/// How large a board is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RoundsSize {
    /// How many ranks share it.
    pub ranks: usize,
    /// Bytes of the longest payload.
    pub slot_bytes: usize,
}

impl RoundsSize {
    /// Bytes of the memory.
    ///
    /// # Panics
    ///
    /// If that is more than a `usize` can count.
    pub const fn bytes(self) -> usize {
        LINE + self.ranks * self.rank_bytes()
    }

    /// A rank's flag, its heads and its arena.
    const fn rank_bytes(self) -> usize {
        LINE + 2 * HEAD_STRIDE + self.arena_bytes()
    }

    const fn arena_bytes(self) -> usize {
        SLOTS * self.slot_bytes.next_multiple_of(LINE)
    }
}

/// One rank's view of the board.
pub struct ShmRounds {
    segment: Segment,
    size: RoundsSize,
    rank: usize,
    next: NextPost,
    /// Everybody's buffers that can be lent.
    registry: BufferRegistry,
}

/// What this rank posts next.
#[derive(Default)]
struct NextPost {
    /// The round that it is for; 0 before there is any.
    round: u64,
    /// Where its payload lies: 0 behind the head, otherwise the line of the arena, counted from 1.
    place: usize,
    length: usize,
    /// Where the arena goes on.
    cursor: usize,
}

/// What a rank has posted.
pub struct PostedRound<'a> {
    /// What it says of it.
    pub header: Header,
    /// There is no payload: its elements are lent ([`ShmRounds::collect_exposed`]).
    pub is_exposed: bool,
    start: *const u8,
    /// Bytes from there to the end of what can be a payload.
    limit: usize,
    rounds: PhantomData<&'a ShmRounds>,
}

/// What comes before a short payload.
#[repr(C)]
struct PostHead {
    /// The round, and in the lowest bits where the payload lies.
    stamp: AtomicU64,
    header: [AtomicU64; HEADER_WORDS],
}

const HEAD_STRIDE: usize = (size_of::<PostHead>() + SHORT_BYTES).next_multiple_of(LINE);

const _: () = assert!(size_of::<PostHead>() == 64 && size_of::<PostHead>() <= LINE && TOKEN_BYTES <= LINE);

impl<'a> PostedRound<'a> {
    /// Some bytes of the payload.
    ///
    /// # Panics
    ///
    /// If it cannot be so long.
    pub fn bytes(&self, range: Range<usize>) -> &'a [u8] {
        assert!(range.start <= range.end && range.end <= self.limit, "the payload is not so long");
        // SAFETY: they are inside of the mapping. Their owner writes them again only after this rank has posted the next round,
        // for which the board has to be borrowed anew; so nobody writes them while this borrow lives.
        unsafe { std::slice::from_raw_parts(self.start.add(range.start), range.len()) }
    }
}

impl ShmRounds {
    /// The view of the rank of this number, of those that share the board.
    ///
    /// # Panics
    ///
    /// If the memory is too small for the board, there is no such rank, or an arena has more lines than a stamp can count.
    pub fn new(segment: Segment, size: RoundsSize, rank: usize) -> Self {
        assert!(segment.length() >= size.bytes(), "the memory is as large as the board");
        assert!(rank < size.ranks, "the rank is on the board");
        assert!(size.arena_bytes() / LINE < EXPOSED, "every line has a number");
        Self { segment, size, rank, next: NextPost::default(), registry: BufferRegistry::default() }
    }

    /// How large it is.
    pub fn size(&self) -> RoundsSize {
        self.size
    }

    /// This rank's number on the board.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The memory, to be told of to others.
    pub fn segment_mut(&mut self) -> &mut Segment {
        &mut self.segment
    }

    /// Whether this rank may write its slot for `round`: all others have posted the round before.
    pub fn may_write(&self, round: u64) -> bool {
        round <= 1 || (0..self.size.ranks).all(|rank| rank == self.rank || self.has_posted(rank, round - 1))
    }

    /// Whether `rank` has posted this round.
    pub fn has_posted(&self, rank: usize, round: u64) -> bool {
        self.head(rank, round).stamp.load(Ordering::Acquire) >> PLACE_BITS >= round
    }

    /// This rank's payload of so many bytes for `round`, to be filled before [`ShmRounds::post`]. Asked for again it is the same.
    ///
    /// # Panics
    ///
    /// If others may still read what was there ([`ShmRounds::may_write`]), if the round has been posted, or if it is longer than
    /// payloads may be.
    pub fn write(&mut self, round: u64, bytes: usize) -> &mut [u8] {
        assert!(self.may_write(round) && !self.has_posted(self.rank, round), "nobody reads what is written");
        if self.next.round != round {
            self.find_place(round, bytes);
        }
        let NextPost { place, length, .. } = self.next;
        let start = self.payload(self.rank, round, place);
        // SAFETY: it is inside of the mapping. Other ranks read it only after its round has been posted and before they post the
        // next one, and neither is the case now: in the arena it overlaps nothing but what is two rounds older. `&mut self`
        // keeps this process's other threads away.
        unsafe { std::slice::from_raw_parts_mut(start, length) }
    }

    fn find_place(&mut self, round: u64, bytes: usize) {
        assert!(bytes <= self.size.slot_bytes.max(SHORT_BYTES), "a payload is no longer than a slot");
        let mut place = 0;
        if bytes > SHORT_BYTES {
            let start = if self.next.cursor + bytes > self.size.arena_bytes() { 0 } else { self.next.cursor };
            place = start / LINE + 1;
            self.next.cursor = (start + bytes).next_multiple_of(LINE);
        }
        (self.next.round, self.next.place, self.next.length) = (round, place, bytes);
    }

    /// Posts the round, whose payload has been filled; one that was not asked for is empty.
    pub fn post(&mut self, round: u64, header: &Header) {
        if self.next.round != round {
            self.find_place(round, 0);
        }
        let head = self.head(self.rank, round);
        for (word, value) in head.header.iter().zip(header) {
            word.store(*value, Ordering::Relaxed);
        }
        head.stamp.store(round << PLACE_BITS | self.next.place as u64, Ordering::Release);
    }

    /// What `rank` has posted in `round`, if it has and this rank has not posted a later one.
    pub fn posted(&self, rank: usize, round: u64) -> Option<PostedRound<'_>> {
        let head = self.head(rank, round);
        let stamp = head.stamp.load(Ordering::Acquire);
        // Later rounds than this one's successor may have overwritten it.
        if stamp >> PLACE_BITS != round || self.has_posted(self.rank, round + 1) {
            return None;
        }
        let header = std::array::from_fn(|index| head.header[index].load(Ordering::Relaxed));
        let place = (stamp & ((1 << PLACE_BITS) - 1)) as usize;
        let (place, limit) = match place {
            0 => (0, SHORT_BYTES),
            EXPOSED => (0, BUFFER_REF_BYTES),
            _ => (place, self.size.arena_bytes().checked_sub((place - 1) * LINE)?),
        };
        let is_exposed = stamp as usize & EXPOSED == EXPOSED;
        let start = self.payload(rank, round, place);
        Some(PostedRound { header, is_exposed, start, limit, rounds: PhantomData })
    }

    /// Says that this rank is about to sleep until it is told of a post. It has to look once more afterwards.
    pub fn fall_asleep(&self) {
        self.flag(self.rank).store(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// Says that this rank is awake.
    pub fn wake_up(&self) {
        self.flag(self.rank).store(0, Ordering::Relaxed);
    }

    /// The ranks that sleep and have to be told of what has been posted; each is named once.
    pub fn take_sleepers(&self, mut tell: impl FnMut(usize)) {
        // What was posted is seen by whoever falls asleep after this, or its flag is seen here.
        fence(Ordering::SeqCst);
        for rank in (0..self.size.ranks).filter(|&rank| rank != self.rank) {
            let flag = self.flag(rank);
            if flag.load(Ordering::Relaxed) != 0 && flag.swap(0, Ordering::SeqCst) != 0 {
                tell(rank);
            }
        }
    }

    fn offset_of(&self, rank: usize) -> usize {
        debug_assert!(rank < self.size.ranks, "the rank is on the board");
        LINE + rank * self.size.rank_bytes()
    }

    fn head_offset(&self, rank: usize, round: u64) -> usize {
        self.offset_of(rank) + LINE + (round % 2) as usize * HEAD_STRIDE
    }

    fn flag(&self, rank: usize) -> &AtomicU32 {
        assert!(rank < self.size.ranks, "the rank is on the board");
        // SAFETY: the flag is inside of the mapping and aligned, and all processes use it as an atomic alone.
        unsafe { self.segment.base().add(self.offset_of(rank)).cast::<AtomicU32>().as_ref() }
    }

    fn head(&self, rank: usize, round: u64) -> &PostHead {
        assert!(rank < self.size.ranks, "the rank is on the board");
        // SAFETY: the head is inside of the mapping and aligned, and all processes use its words as atomics alone.
        unsafe { self.segment.base().add(self.head_offset(rank, round)).cast::<PostHead>().as_ref() }
    }

    fn payload(&self, rank: usize, round: u64, place: usize) -> *mut u8 {
        assert!(rank < self.size.ranks, "the rank is on the board");
        assert!(place <= self.size.arena_bytes() / LINE, "the place is in the arena");
        let offset = match place {
            0 => self.head_offset(rank, round) + size_of::<PostHead>(),
            _ => self.offset_of(rank) + LINE + 2 * HEAD_STRIDE + (place - 1) * LINE,
        };
        // SAFETY: the payload begins inside of the mapping.
        unsafe { self.segment.base().add(offset).as_ptr() }
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    /// The views of all ranks.
    fn views(size: RoundsSize) -> Vec<ShmRounds> {
        let token = [1; TOKEN_BYTES];
        let first = Segment::create(size.bytes(), &token).unwrap();
        let place = first.place().unwrap();
        let others = (1..size.ranks).map(|_| Segment::open(place, size.bytes(), &token).unwrap());
        let segments: Vec<Segment> = others.collect();
        let segments = std::iter::once(first).chain(segments);
        segments.enumerate().map(|(rank, segment)| ShmRounds::new(segment, size, rank)).collect()
    }

    #[test]
    fn what_is_posted_is_read_once_it_is_whole() {
        let mut views = views(RoundsSize { ranks: 2, slot_bytes: 256 });
        assert!(views[0].posted(1, 1).is_none());
        views[1].write(1, 3).copy_from_slice(b"one");
        assert!(views[0].posted(1, 1).is_none(), "it has been written, not posted");
        views[1].post(1, &[9; HEADER_WORDS]);
        let posted = views[0].posted(1, 1).unwrap();
        assert_eq!((posted.bytes(0..3), posted.header), (&b"one"[..], [9; HEADER_WORDS]));
        assert!(!views[1].may_write(2), "rank 0 may not have read what was in the slot before");
        views[0].post(1, &[0; HEADER_WORDS]);
        assert!(views[1].may_write(2));
        views[1].post(2, &[0; HEADER_WORDS]);
        assert!(views[0].posted(1, 1).is_some(), "the other slot is for round 2");
        views[0].post(2, &[0; HEADER_WORDS]);
        assert!(views[0].posted(1, 1).is_none(), "whoever has posted the next round has no business with it");
    }

    #[test]
    #[should_panic(expected = "nobody reads what is written")]
    fn a_slot_that_may_be_read_is_not_written() {
        let mut views = views(RoundsSize { ranks: 2, slot_bytes: 128 });
        views[0].post(1, &[0; HEADER_WORDS]);
        views[0].write(2, 1);
    }

    #[test]
    fn who_sleeps_is_told_once() {
        let views = views(RoundsSize { ranks: 3, slot_bytes: 128 });
        views[2].fall_asleep();
        let mut told = Vec::new();
        for _ in 0..2 {
            views[0].take_sleepers(|rank| told.push(rank));
        }
        assert_eq!(told, [2]);
        views[1].fall_asleep();
        views[1].wake_up();
        views[0].take_sleepers(|_| panic!("nobody sleeps"));
    }

    #[test]
    fn threads_that_post_and_read_see_whole_rounds() {
        let size = RoundsSize { ranks: 3, slot_bytes: 9000 };
        // Short ones, long ones, and such as leave something over at the end of the arena.
        let length = |round: u64, rank: usize| [5, 9000, 4097, 8191, 4096, 0][(round as usize + rank) % 6];
        let last = if cfg!(miri) { 20 } else { 2000 };
        let play = move |mut rounds: ShmRounds| {
            for round in 1..=last {
                while !rounds.may_write(round) {
                    thread::yield_now();
                }
                let fill = (round as usize * 3 + rounds.rank()) as u8;
                rounds.write(round, length(round, rounds.rank())).fill(fill);
                rounds.post(round, &[round; HEADER_WORDS]);
                for rank in 0..size.ranks {
                    let posted = loop {
                        match rounds.posted(rank, round) {
                            Some(posted) => break posted,
                            None => thread::yield_now(),
                        }
                    };
                    assert_eq!(posted.header, [round; HEADER_WORDS]);
                    let payload = posted.bytes(0..length(round, rank));
                    assert!(payload.iter().all(|&byte| byte == (round as usize * 3 + rank) as u8));
                }
            }
        };
        let threads: Vec<_> =
            views(size).into_iter().map(|rounds| thread::spawn(move || play(rounds))).collect();
        for thread in threads {
            thread.join().unwrap();
        }
    }
}
