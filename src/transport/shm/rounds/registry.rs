//! Buffers that the ranks of a board have of the runtime. A rank posts where its elements lie in such a buffer instead of the
//! elements, and so lends it: until it has seen that all others are done, they read and write it where it lies.
//!
//! What a rank says of where they lie is checked against the memory that this rank has mapped before anything is touched.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Weak;

use rustix::param::page_size;

use super::super::buffer::{ExposedBuffer, RemoteBuffer};
use super::super::segment::SparePages;
use super::{EXPOSED, Header, ShmRounds};

/// The most buffers of one group that a rank has at a time.
pub const BUFFERS_MAX: usize = 1024;
/// Bytes in which a rank says where its elements lie.
pub(super) const BUFFER_REF_BYTES: usize = 2 * size_of::<u64>();

/// Where a rank's elements lie: in which of its buffers, all ranks counting alike, and at which byte.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BufferRef {
    /// The buffer's number.
    pub buffer: u64,
    /// The first byte.
    pub offset: u64,
}

/// What this rank knows of everybody's buffers.
#[derive(Default)]
pub(super) struct BufferRegistry {
    /// How many there have been.
    count: u64,
    /// This rank's own, by the address of the first byte that can be lent.
    own: BTreeMap<usize, OwnBuffer>,
    /// The others', by the buffer's number and by rank. They stay here while their owner may lend them.
    others: BTreeMap<u64, Vec<Option<RemoteBuffer>>>,
    /// What the others have lent in a round.
    exposed_parts: ExposedParts,
}

struct OwnBuffer {
    number: u64,
    length: usize,
    mapping: Range<usize>,
    spare: Option<SparePages>,
    /// Its owner keeps the other end for as long as it is mapped.
    alive: Weak<()>,
}

#[derive(Default)]
struct ExposedParts {
    round: u64,
    bytes: usize,
    of: Vec<Option<BufferRef>>,
}

impl ShmRounds {
    /// How many buffers of its own this rank has.
    pub fn own_buffers(&self) -> usize {
        self.registry.own.len()
    }

    /// Takes note of a buffer of each rank, the others' in rank order, and gives it the next number: all ranks do so in the
    /// same order. `alive` has to die before the rank's own is unmapped.
    pub fn register_buffer(
        &mut self,
        own: &mut ExposedBuffer,
        alive: Weak<()>,
        others: impl IntoIterator<Item = RemoteBuffer>,
    ) {
        let mut others = others.into_iter();
        let buffers = (0..self.size.ranks).map(|rank| if rank == self.rank { None } else { others.next() });
        let buffers = buffers.collect();
        let number = self.registry.count;
        self.registry.count += 1;
        self.registry.others.insert(number, buffers);
        let (mapping, first) = own.extent();
        let spare = own.take_spare_pages();
        let length = own.bytes().len();
        self.registry.own.insert(first, OwnBuffer { number, length, mapping, spare, alive });
    }

    /// Forgets this rank's own buffers that are gone, and, if no operation is under way, gives up the mappings of those whose
    /// owners have.
    pub fn prune(&mut self, is_busy: bool) {
        self.registry.own.retain(|_, own| own.alive.strong_count() > 0);
        if is_busy {
            return;
        }
        self.registry.others.retain(|_, buffers| {
            for buffer in buffers.iter_mut() {
                if buffer.as_ref().is_some_and(RemoteBuffer::is_withdrawn) {
                    *buffer = None;
                }
            }
            buffers.iter().any(Option::is_some)
        });
    }

    /// Where these bytes lie, if they are some of one of this rank's buffers, and a multiple of `unit` from its beginning.
    pub fn buffer_ref(&self, bytes: &[u8], unit: usize) -> Option<BufferRef> {
        let (first, own) = self.own_of(bytes)?;
        let offset = bytes.as_ptr().addr() - first;
        let is_found = offset.is_multiple_of(unit) && own.length - offset >= bytes.len();
        is_found.then_some(BufferRef { buffer: own.number, offset: offset as u64 })
    }

    /// The buffer in which these bytes begin.
    fn own_of(&self, bytes: &[u8]) -> Option<(usize, &OwnBuffer)> {
        let address = bytes.as_ptr().addr();
        let (&first, own) = self.registry.own.range(..=address).next_back()?;
        (address - first <= own.length && own.alive.strong_count() > 0).then_some((first, own))
    }

    /// Posts the round, for which nothing was written: the elements lie there, and are lent.
    pub fn post_exposed(&mut self, round: u64, header: &Header, buffer_ref: BufferRef) {
        let words = self.write(round, BUFFER_REF_BYTES);
        let (buffer, offset) = words.split_at_mut(size_of::<u64>());
        buffer.copy_from_slice(&buffer_ref.buffer.to_le_bytes());
        offset.copy_from_slice(&buffer_ref.offset.to_le_bytes());
        self.next.place = EXPOSED;
        self.post(round, header);
    }

    /// Looks at who has lent so many bytes in this round, which all have posted, and whether all others have. The bytes begin
    /// at a multiple of `unit`.
    ///
    /// # Errors
    ///
    /// The rank whose loan cannot be, and why.
    pub fn collect_exposed(
        &mut self,
        round: u64,
        bytes: usize,
        unit: usize,
    ) -> Result<bool, (usize, &'static str)> {
        let mut of = std::mem::take(&mut self.registry.exposed_parts.of);
        of.clear();
        for rank in 0..self.size.ranks {
            let exposed_part =
                if rank == self.rank { Ok(None) } else { self.exposed_part(rank, round, bytes, unit) };
            of.push(exposed_part.map_err(|why| (rank, why))?);
        }
        let exposed = of.iter().flatten().count();
        self.registry.exposed_parts = ExposedParts { round, bytes, of };
        Ok(exposed + 1 == self.size.ranks)
    }

    fn exposed_part(
        &self,
        rank: usize,
        round: u64,
        bytes: usize,
        unit: usize,
    ) -> Result<Option<BufferRef>, &'static str> {
        let Some(posted) = self.posted(rank, round).filter(|posted| posted.is_exposed) else {
            return Ok(None);
        };
        let (words, _) = posted.bytes(0..BUFFER_REF_BYTES).as_chunks();
        let [buffer, offset] = [0, 1].map(|index| u64::from_le_bytes(words[index]));
        let remote = self.registry.buffer(buffer, rank);
        let remote = remote.ok_or("it lent a buffer that this rank does not know")?;
        let start = usize::try_from(offset).ok();
        let end = start.and_then(|start| start.checked_add(bytes)).filter(|&end| end <= remote.length());
        match (start, end) {
            (Some(start), Some(_)) if start.is_multiple_of(unit) => Ok(Some(BufferRef { buffer, offset })),
            (Some(_), Some(_)) => Err("it lent elements that do not begin where elements can"),
            _ => Err("it lent more than its buffer has"),
        }
    }

    /// Some of the bytes that a rank has lent in this round ([`ShmRounds::collect_exposed`]); `None` if it has lent none.
    ///
    /// # Panics
    ///
    /// If there are not so many.
    pub fn exposed(&self, rank: usize, round: u64, range: &Range<usize>) -> Option<&[u8]> {
        let start = self.exposed_at(rank, round, range)?;
        // SAFETY: they are inside of the mapping. Of what is lent every byte belongs to one rank until all have posted the next
        // round, and those of this rank are written by nobody else; here only through `&mut self`, with this borrow over.
        Some(unsafe { std::slice::from_raw_parts(start, range.len()) })
    }

    /// Writes some of the bytes that a rank has lent in this round; nothing, if it has lent none.
    ///
    /// # Panics
    ///
    /// If there are not so many.
    pub fn write_exposed(&mut self, rank: usize, round: u64, at: usize, bytes: &[u8]) {
        let Some(start) = self.exposed_at(rank, round, &(at..at + bytes.len())) else { return };
        // SAFETY: they are inside of the mapping, in other memory than `bytes`, and belong to this rank until it has posted the
        // next round: nobody else reads or writes them.
        unsafe { start.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    }

    fn exposed_at(&self, rank: usize, round: u64, range: &Range<usize>) -> Option<*mut u8> {
        let ExposedParts { round: taken, bytes, of } = &self.registry.exposed_parts;
        if *taken != round || self.has_posted(self.rank, round + 1) {
            return None;
        }
        let BufferRef { buffer, offset } = (*of.get(rank)?)?;
        assert!(range.start <= range.end && range.end <= *bytes, "so much was lent");
        let start = usize::try_from(offset).ok()?;
        let buffer = self.registry.buffer(buffer, rank)?;
        Some(buffer.part(&(start + range.start..start + range.end))?.as_ptr())
    }

    /// Takes these bytes of a buffer away from the other ranks, which may still write to them although this rank's operation
    /// has failed: all pages that hold them become this process's own, with their content. Other threads of this process may
    /// use the rest of the pages meanwhile.
    pub fn stop_exposing(&mut self, bytes: &[u8]) {
        let Some((first, _)) = self.own_of(bytes) else { return };
        let Some(own) = self.registry.own.get_mut(&first) else { return };
        let (pages, start) = (own.pages_of(bytes), own.mapping.start);
        let replaced = own.spare.as_mut().map_or(Ok(()), |spare| spare.replace(start, &pages));
        if let Err(error) = replaced {
            log::warn!("a buffer stays shared though its operation has failed: {error}");
        }
    }
}

impl OwnBuffer {
    /// The pages that hold any of these bytes, as offsets in the mapping.
    fn pages_of(&self, bytes: &[u8]) -> Range<usize> {
        let (page, start) = (page_size(), bytes.as_ptr().addr() - self.mapping.start);
        start - start % page..(start + bytes.len()).next_multiple_of(page)
    }
}

impl BufferRegistry {
    fn buffer(&self, buffer: u64, rank: usize) -> Option<&RemoteBuffer> {
        self.others.get(&buffer)?.get(rank)?.as_ref()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::transport::shm::{HEADER_WORDS, RoundsSize, Segment, TOKEN_BYTES};

    const HEADER: Header = [5; HEADER_WORDS];

    /// A rank, and a buffer of its own of this length.
    struct Seat {
        rounds: ShmRounds,
        own: Option<(ExposedBuffer, Arc<()>)>,
    }

    fn register_buffer(seats: &mut [Seat], length: usize) {
        let token = [2; TOKEN_BYTES];
        let buffers: Vec<ExposedBuffer> =
            seats.iter().map(|_| ExposedBuffer::create(length, &token).unwrap()).collect();
        let places: Vec<_> = buffers.iter().map(|buffer| buffer.place().unwrap()).collect();
        for (rank, (seat, mut buffer)) in seats.iter_mut().zip(buffers).enumerate() {
            let others = places.iter().enumerate().filter(|(other, _)| *other != rank);
            let others = others.map(|(_, place)| RemoteBuffer::open(*place, length, &token).unwrap());
            let alive = Arc::new(());
            seat.rounds.register_buffer(&mut buffer, Arc::downgrade(&alive), others);
            seat.own = Some((buffer, alive));
        }
    }

    fn seats(length: usize) -> Vec<Seat> {
        let size = RoundsSize { ranks: 2, slot_bytes: 128 };
        let token = [1; TOKEN_BYTES];
        let first = Segment::create(size.bytes(), &token).unwrap();
        let second = Segment::open(first.place().unwrap(), size.bytes(), &token).unwrap();
        let views = [first, second].into_iter().enumerate();
        let mut seats: Vec<Seat> =
            views.map(|(rank, s)| Seat { rounds: ShmRounds::new(s, size, rank), own: None }).collect();
        register_buffer(&mut seats, length);
        seats
    }

    #[test]
    fn what_is_lent_is_read_and_written_where_it_lies() {
        let mut seats = seats(1000);
        let [one, two] = &mut seats[..] else { panic!("two ranks") };
        let (own, _) = two.own.as_mut().unwrap();
        own.bytes_mut()[100..108].copy_from_slice(b"contents");
        let buffer_ref = two.rounds.buffer_ref(&own.bytes()[96..200], 8).unwrap();
        assert_eq!(buffer_ref, BufferRef { buffer: 0, offset: 96 });
        two.rounds.post_exposed(1, &HEADER, buffer_ref);
        one.rounds.post(1, &HEADER);
        assert_eq!(one.rounds.collect_exposed(1, 104, 8), Ok(true));
        assert_eq!(two.rounds.collect_exposed(1, 104, 8), Ok(false), "rank 0 lends nothing");
        assert_eq!(one.rounds.exposed(1, 1, &(4..12)), Some(&b"contents"[..]));
        assert!(two.rounds.exposed(0, 1, &(4..12)).is_none() && one.rounds.exposed(1, 2, &(4..12)).is_none());
        one.rounds.write_exposed(1, 1, 103, b"!");
        one.rounds.post(2, &HEADER);
        assert!(one.rounds.exposed(1, 1, &(4..12)).is_none(), "it has said that it is done");
        one.rounds.write_exposed(1, 1, 0, b"too late");
        let bytes = two.own.as_ref().unwrap().0.bytes();
        assert_eq!((bytes[199], bytes[96]), (b'!', 0));
    }

    #[test]
    fn a_rank_that_lends_what_it_does_not_have_is_found_out() {
        let buffer_ref = |buffer, offset| BufferRef { buffer, offset };
        for (buffer_ref, expected) in [
            (buffer_ref(0, 896), Ok(true)),
            (buffer_ref(1, 0), Err("it lent a buffer that this rank does not know")),
            (buffer_ref(u64::MAX, 0), Err("it lent a buffer that this rank does not know")),
            (buffer_ref(0, 904), Err("it lent more than its buffer has")),
            (buffer_ref(0, 1000), Err("it lent more than its buffer has")),
            (buffer_ref(0, u64::MAX - 7), Err("it lent more than its buffer has")),
            (buffer_ref(0, 4), Err("it lent elements that do not begin where elements can")),
        ] {
            let mut seats = seats(1000);
            seats[1].rounds.post_exposed(1, &HEADER, buffer_ref);
            seats[0].rounds.post(1, &HEADER);
            let found = seats[0].rounds.collect_exposed(1, 104, 8);
            assert_eq!(found, expected.map_err(|what| (1, what)), "{buffer_ref:?}");
        }
    }

    #[test]
    fn only_what_is_in_a_buffer_is_lent() {
        let mut seats = seats(1000);
        let Seat { rounds, own } = &mut seats[0];
        let (buffer, _) = own.as_ref().unwrap();
        assert!(rounds.buffer_ref(&buffer.bytes()[8..], 8).is_some());
        assert!(rounds.buffer_ref(&buffer.bytes()[1000..], 8).is_some(), "nothing, at its end");
        assert!(
            rounds.buffer_ref(&buffer.bytes()[4..], 8).is_none(),
            "it begins in the middle of an element"
        );
        assert!(rounds.buffer_ref(&vec![0u8; 1000], 8).is_none());
        let address = buffer.bytes().as_ptr().addr();
        *own = None;
        assert!(rounds.registry.own.contains_key(&address));
        rounds.prune(true);
        assert_eq!(rounds.own_buffers(), 0);
    }

    #[test]
    fn buffers_stay_for_as_long_as_one_rank_may_lend_its_own() {
        let mut seats = seats(64);
        let (buffer, _) = seats[0].own.take().unwrap();
        buffer.withdraw();
        drop(buffer);
        for seat in &mut seats {
            seat.rounds.prune(false);
        }
        assert_eq!(seats.iter().map(|seat| seat.rounds.own_buffers()).collect::<Vec<_>>(), [0, 1]);
        let known =
            |seats: &[Seat]| seats.iter().map(|seat| seat.rounds.registry.others.len()).collect::<Vec<_>>();
        assert_eq!(known(&seats), [1, 0], "rank 1 may still lend its own, rank 0 not");
        register_buffer(&mut seats, 64);
        let exposed = seats[0].own.as_ref().unwrap().0.bytes();
        assert_eq!(
            seats[0].rounds.buffer_ref(exposed, 1),
            Some(BufferRef { buffer: 1, offset: 0 }),
            "another number"
        );
    }

    #[test]
    fn what_is_taken_back_keeps_its_content_and_is_nobody_elses() {
        let mut seats = seats(10_000);
        seats[0].own.as_mut().unwrap().0.bytes_mut().fill(3);
        let buffer_ref = BufferRef { buffer: 0, offset: 0 };
        seats[0].rounds.post_exposed(1, &HEADER, buffer_ref);
        seats[1].rounds.post(1, &HEADER);
        assert_eq!(seats[1].rounds.collect_exposed(1, 10_000, 1), Ok(true));
        let Seat { rounds, own } = &mut seats[0];
        rounds.stop_exposing(own.as_ref().unwrap().0.bytes());
        seats[1].rounds.write_exposed(0, 1, 0, &[9; 10_000]);
        let own = &mut seats[0].own.as_mut().unwrap().0;
        assert!(own.bytes().iter().all(|&byte| byte == 3));
        own.bytes_mut().fill(4);
        assert!(seats[1].rounds.exposed(0, 1, &(0..10_000)).unwrap().iter().all(|&byte| byte == 9));
    }

    /// Pages at the ends of the part stayed shared, and other ranks wrote to what the program held a `&mut` to.
    #[test]
    fn a_part_that_is_no_longer_exposed_is_on_private_pages() {
        let page = page_size();
        let mut seats = seats(4 * page);
        seats[0].rounds.post_exposed(1, &HEADER, BufferRef { buffer: 0, offset: 0 });
        seats[1].rounds.post(1, &HEADER);
        assert_eq!(seats[1].rounds.collect_exposed(1, 4 * page, 1), Ok(true));
        let Seat { rounds, own } = &mut seats[0];
        let own = &mut own.as_mut().unwrap().0;
        own.bytes_mut().fill(3);
        let part = page + 100..3 * page;
        rounds.stop_exposing(&own.bytes()[part.clone()]);
        // Again, and in pages of which some are private already.
        rounds.stop_exposing(&own.bytes()[part.start - 10..part.end - page]);
        seats[1].rounds.write_exposed(0, 1, 0, &vec![9; 4 * page]);
        let bytes = seats[0].own.as_ref().unwrap().0.bytes();
        assert!(bytes[part].iter().all(|&byte| byte == 3), "the other rank does not reach the part");
        let head = bytes.as_ptr().addr() % page;
        assert!(bytes[..page - head].iter().all(|&byte| byte == 9), "the first page has none of it");
    }
}
