//! Buffers that the ranks of a board have of the runtime. A rank posts where its elements lie in such a buffer instead of the
//! elements, and so lends it: until it has seen that all others are done, they read and write it where it lies.
//!
//! What a rank says of where they lie is checked against the memory that this rank has mapped before anything is touched.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Weak;

use rustix::param::page_size;

use super::super::segment;
use super::super::window::{OwnWindow, Window};
use super::{Board, Header, LENT};

/// The most buffers of one group that a rank has at a time.
pub const BUFFERS_MAX: usize = 1024;
/// Bytes in which a rank says where its elements lie.
pub(super) const SPOT_BYTES: usize = 2 * size_of::<u64>();

/// Where a rank's elements lie: in which of its buffers, all ranks counting alike, and at which byte.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Spot {
    /// The buffer's number.
    pub buffer: u64,
    /// The first byte.
    pub offset: u64,
}

/// What this rank knows of everybody's buffers.
#[derive(Default)]
pub(super) struct Shelf {
    /// How many there have been.
    count: u64,
    /// This rank's own, by the address of the first byte that can be lent.
    own: BTreeMap<usize, Own>,
    /// The others', by the buffer's number and by rank. They stay here while their owner may lend them.
    others: BTreeMap<u64, Vec<Option<Window>>>,
    /// What the others have lent in a round.
    loans: Loans,
}

struct Own {
    number: u64,
    length: usize,
    mapping: Range<usize>,
    /// Its owner keeps the other end for as long as it is mapped.
    alive: Weak<()>,
}

#[derive(Default)]
struct Loans {
    round: u64,
    bytes: usize,
    of: Vec<Option<Spot>>,
}

impl Board {
    /// How many buffers of its own this rank has.
    pub fn own_buffers(&self) -> usize {
        self.shelf.own.len()
    }

    /// Takes note of a buffer of each rank, the others' in rank order, and gives it the next number: all ranks do so in the
    /// same order. `alive` has to die before the rank's own is unmapped.
    pub fn shelve(&mut self, own: &OwnWindow, alive: Weak<()>, others: impl IntoIterator<Item = Window>) {
        let mut others = others.into_iter();
        let windows = (0..self.size.ranks).map(|rank| if rank == self.rank { None } else { others.next() });
        let windows = windows.collect();
        let number = self.shelf.count;
        self.shelf.count += 1;
        self.shelf.others.insert(number, windows);
        let (mapping, first) = own.extent();
        self.shelf.own.insert(first, Own { number, length: own.bytes().len(), mapping, alive });
    }

    /// Forgets this rank's own buffers that are gone, and, if no operation is under way, gives up the mappings of those whose
    /// owners have.
    pub fn prune(&mut self, is_busy: bool) {
        self.shelf.own.retain(|_, own| own.alive.strong_count() > 0);
        if is_busy {
            return;
        }
        self.shelf.others.retain(|_, windows| {
            for window in windows.iter_mut() {
                if window.as_ref().is_some_and(Window::is_withdrawn) {
                    *window = None;
                }
            }
            windows.iter().any(Option::is_some)
        });
    }

    /// Where these bytes lie, if they are some of one of this rank's buffers, and a multiple of `unit` from its beginning.
    pub fn spot_of(&self, bytes: &[u8], unit: usize) -> Option<Spot> {
        let (first, own) = self.own_of(bytes)?;
        let offset = bytes.as_ptr().addr() - first;
        let is_found = offset.is_multiple_of(unit) && own.length - offset >= bytes.len();
        is_found.then_some(Spot { buffer: own.number, offset: offset as u64 })
    }

    /// The buffer in which these bytes begin.
    fn own_of(&self, bytes: &[u8]) -> Option<(usize, &Own)> {
        let address = bytes.as_ptr().addr();
        let (&first, own) = self.shelf.own.range(..=address).next_back()?;
        (address - first <= own.length && own.alive.strong_count() > 0).then_some((first, own))
    }

    /// Posts the round, for which nothing was written: the elements lie there, and are lent.
    pub fn post_lent(&mut self, round: u64, header: &Header, spot: Spot) {
        let words = self.write(round, SPOT_BYTES);
        let (buffer, offset) = words.split_at_mut(size_of::<u64>());
        buffer.copy_from_slice(&spot.buffer.to_le_bytes());
        offset.copy_from_slice(&spot.offset.to_le_bytes());
        self.next.place = LENT;
        self.post(round, header);
    }

    /// Looks at who has lent so many bytes in this round, which all have posted, and whether all others have. The bytes begin
    /// at a multiple of `unit`.
    ///
    /// # Errors
    ///
    /// The rank whose loan cannot be, and why.
    pub fn take_loans(
        &mut self,
        round: u64,
        bytes: usize,
        unit: usize,
    ) -> Result<bool, (usize, &'static str)> {
        let mut of = std::mem::take(&mut self.shelf.loans.of);
        of.clear();
        for rank in 0..self.size.ranks {
            let loan = if rank == self.rank { Ok(None) } else { self.loan(rank, round, bytes, unit) };
            of.push(loan.map_err(|why| (rank, why))?);
        }
        let lent = of.iter().flatten().count();
        self.shelf.loans = Loans { round, bytes, of };
        Ok(lent + 1 == self.size.ranks)
    }

    fn loan(&self, rank: usize, round: u64, bytes: usize, unit: usize) -> Result<Option<Spot>, &'static str> {
        let Some(posted) = self.posted(rank, round).filter(|posted| posted.is_lent) else { return Ok(None) };
        let (words, _) = posted.bytes(0..SPOT_BYTES).as_chunks();
        let [buffer, offset] = [0, 1].map(|index| u64::from_le_bytes(words[index]));
        let window = self.shelf.window(buffer, rank);
        let window = window.ok_or("it lent a buffer that this rank does not know")?;
        let start = usize::try_from(offset).ok();
        let end = start.and_then(|start| start.checked_add(bytes)).filter(|&end| end <= window.length());
        match (start, end) {
            (Some(start), Some(_)) if start.is_multiple_of(unit) => Ok(Some(Spot { buffer, offset })),
            (Some(_), Some(_)) => Err("it lent elements that do not begin where elements can"),
            _ => Err("it lent more than its buffer has"),
        }
    }

    /// Some of the bytes that a rank has lent in this round ([`Board::take_loans`]); `None` if it has lent none.
    ///
    /// # Panics
    ///
    /// If there are not so many.
    pub fn lent(&self, rank: usize, round: u64, range: &Range<usize>) -> Option<&[u8]> {
        let start = self.lent_at(rank, round, range)?;
        // SAFETY: they are inside of the mapping. Of what is lent every byte belongs to one rank until all have posted the next
        // round, and those of this rank are written by nobody else; here only through `&mut self`, with this borrow over.
        Some(unsafe { std::slice::from_raw_parts(start, range.len()) })
    }

    /// Writes some of the bytes that a rank has lent in this round; nothing, if it has lent none.
    ///
    /// # Panics
    ///
    /// If there are not so many.
    pub fn write_lent(&mut self, rank: usize, round: u64, at: usize, bytes: &[u8]) {
        let Some(start) = self.lent_at(rank, round, &(at..at + bytes.len())) else { return };
        // SAFETY: they are inside of the mapping, in other memory than `bytes`, and belong to this rank until it has posted the
        // next round: nobody else reads or writes them.
        unsafe { start.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    }

    fn lent_at(&self, rank: usize, round: u64, range: &Range<usize>) -> Option<*mut u8> {
        let Loans { round: taken, bytes, of } = &self.shelf.loans;
        if *taken != round || self.has_posted(self.rank, round + 1) {
            return None;
        }
        let Spot { buffer, offset } = (*of.get(rank)?)?;
        assert!(range.start <= range.end && range.end <= *bytes, "so much was lent");
        let start = usize::try_from(offset).ok()?;
        let window = self.shelf.window(buffer, rank)?;
        Some(window.part(&(start + range.start..start + range.end))?.as_ptr())
    }

    /// Takes these bytes of a buffer away from the others, who may still be at them though this rank's operation has failed:
    /// their owner keeps what is in them, in memory that is its own. Pages that hold other parts of the buffer too, which
    /// another thread may be at, stay shared. The owner must have lent the bytes to the caller.
    pub fn take_back(&self, bytes: &[u8]) {
        let Some((first, own)) = self.own_of(bytes) else { return };
        let pages = own.pages_within(first, bytes);
        if pages.is_empty() {
            return;
        }
        if let Err(error) = segment::make_private(pages) {
            log::warn!("a buffer stays shared though its operation has failed: {error}");
        }
    }
}

impl Own {
    /// The addresses of the pages on which nothing but these bytes lies, whose first one may be the buffer's.
    fn pages_within(&self, first: usize, bytes: &[u8]) -> Range<usize> {
        let (page, start) = (page_size(), bytes.as_ptr().addr());
        let end = start + bytes.len();
        // Beside the buffer there is its head, which is this rank's.
        let from = if start == first { self.mapping.start } else { start.next_multiple_of(page) };
        let to = if end == first + self.length { self.mapping.end } else { end - end % page };
        from..to
    }
}

impl Shelf {
    fn window(&self, buffer: u64, rank: usize) -> Option<&Window> {
        self.others.get(&buffer)?.get(rank)?.as_ref()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::transport::shm::{BoardSize, HEADER_WORDS, Segment, TOKEN_BYTES};

    const HEADER: Header = [5; HEADER_WORDS];

    /// A rank, and a buffer of its own of this length.
    struct Seat {
        board: Board,
        own: Option<(OwnWindow, Arc<()>)>,
    }

    fn shelve(seats: &mut [Seat], length: usize) {
        let token = [2; TOKEN_BYTES];
        let windows: Vec<OwnWindow> =
            seats.iter().map(|_| OwnWindow::create(length, &token).unwrap()).collect();
        let places: Vec<_> = windows.iter().map(|window| window.place().unwrap()).collect();
        for (rank, (seat, window)) in seats.iter_mut().zip(windows).enumerate() {
            let others = places.iter().enumerate().filter(|(other, _)| *other != rank);
            let others = others.map(|(_, place)| Window::open(*place, length, &token).unwrap());
            let alive = Arc::new(());
            seat.board.shelve(&window, Arc::downgrade(&alive), others);
            seat.own = Some((window, alive));
        }
    }

    fn seats(length: usize) -> Vec<Seat> {
        let size = BoardSize { ranks: 2, slot_bytes: 128 };
        let token = [1; TOKEN_BYTES];
        let first = Segment::create(size.bytes(), &token).unwrap();
        let second = Segment::open(first.place().unwrap(), size.bytes(), &token).unwrap();
        let boards = [first, second].into_iter().enumerate();
        let mut seats: Vec<Seat> =
            boards.map(|(rank, s)| Seat { board: Board::new(s, size, rank), own: None }).collect();
        shelve(&mut seats, length);
        seats
    }

    #[test]
    fn what_is_lent_is_read_and_written_where_it_lies() {
        let mut seats = seats(1000);
        let [one, two] = &mut seats[..] else { panic!("two ranks") };
        let (own, _) = two.own.as_mut().unwrap();
        own.bytes_mut()[100..108].copy_from_slice(b"contents");
        let spot = two.board.spot_of(&own.bytes()[96..200], 8).unwrap();
        assert_eq!(spot, Spot { buffer: 0, offset: 96 });
        two.board.post_lent(1, &HEADER, spot);
        one.board.post(1, &HEADER);
        assert_eq!(one.board.take_loans(1, 104, 8), Ok(true));
        assert_eq!(two.board.take_loans(1, 104, 8), Ok(false), "rank 0 lends nothing");
        assert_eq!(one.board.lent(1, 1, &(4..12)), Some(&b"contents"[..]));
        assert!(two.board.lent(0, 1, &(4..12)).is_none() && one.board.lent(1, 2, &(4..12)).is_none());
        one.board.write_lent(1, 1, 103, b"!");
        one.board.post(2, &HEADER);
        assert!(one.board.lent(1, 1, &(4..12)).is_none(), "it has said that it is done");
        one.board.write_lent(1, 1, 0, b"too late");
        let bytes = two.own.as_ref().unwrap().0.bytes();
        assert_eq!((bytes[199], bytes[96]), (b'!', 0));
    }

    #[test]
    fn a_rank_that_lends_what_it_does_not_have_is_found_out() {
        let spot = |buffer, offset| Spot { buffer, offset };
        for (spot, expected) in [
            (spot(0, 896), Ok(true)),
            (spot(1, 0), Err("it lent a buffer that this rank does not know")),
            (spot(u64::MAX, 0), Err("it lent a buffer that this rank does not know")),
            (spot(0, 904), Err("it lent more than its buffer has")),
            (spot(0, 1000), Err("it lent more than its buffer has")),
            (spot(0, u64::MAX - 7), Err("it lent more than its buffer has")),
            (spot(0, 4), Err("it lent elements that do not begin where elements can")),
        ] {
            let mut seats = seats(1000);
            seats[1].board.post_lent(1, &HEADER, spot);
            seats[0].board.post(1, &HEADER);
            let found = seats[0].board.take_loans(1, 104, 8);
            assert_eq!(found, expected.map_err(|what| (1, what)), "{spot:?}");
        }
    }

    #[test]
    fn only_what_is_in_a_buffer_is_lent() {
        let mut seats = seats(1000);
        let Seat { board, own } = &mut seats[0];
        let (window, _) = own.as_ref().unwrap();
        assert!(board.spot_of(&window.bytes()[8..], 8).is_some());
        assert!(board.spot_of(&window.bytes()[1000..], 8).is_some(), "nothing, at its end");
        assert!(board.spot_of(&window.bytes()[4..], 8).is_none(), "it begins in the middle of an element");
        assert!(board.spot_of(&vec![0u8; 1000], 8).is_none());
        let address = window.bytes().as_ptr().addr();
        *own = None;
        assert!(board.shelf.own.contains_key(&address));
        board.prune(true);
        assert_eq!(board.own_buffers(), 0);
    }

    #[test]
    fn buffers_stay_for_as_long_as_one_rank_may_lend_its_own() {
        let mut seats = seats(64);
        let (window, _) = seats[0].own.take().unwrap();
        window.withdraw();
        drop(window);
        for seat in &mut seats {
            seat.board.prune(false);
        }
        assert_eq!(seats.iter().map(|seat| seat.board.own_buffers()).collect::<Vec<_>>(), [0, 1]);
        let known =
            |seats: &[Seat]| seats.iter().map(|seat| seat.board.shelf.others.len()).collect::<Vec<_>>();
        assert_eq!(known(&seats), [1, 0], "rank 1 may still lend its own, rank 0 not");
        shelve(&mut seats, 64);
        let lent = seats[0].own.as_ref().unwrap().0.bytes();
        assert_eq!(seats[0].board.spot_of(lent, 1), Some(Spot { buffer: 1, offset: 0 }), "another number");
    }

    #[test]
    fn what_is_taken_back_keeps_its_content_and_is_nobody_elses() {
        let mut seats = seats(10_000);
        seats[0].own.as_mut().unwrap().0.bytes_mut().fill(3);
        let spot = Spot { buffer: 0, offset: 0 };
        seats[0].board.post_lent(1, &HEADER, spot);
        seats[1].board.post(1, &HEADER);
        assert_eq!(seats[1].board.take_loans(1, 10_000, 1), Ok(true));
        let Seat { board, own } = &mut seats[0];
        board.take_back(own.as_ref().unwrap().0.bytes());
        seats[1].board.write_lent(0, 1, 0, &[9; 10_000]);
        let own = &mut seats[0].own.as_mut().unwrap().0;
        assert!(own.bytes().iter().all(|&byte| byte == 3));
        own.bytes_mut().fill(4);
        assert!(seats[1].board.lent(0, 1, &(0..10_000)).unwrap().iter().all(|&byte| byte == 9));
    }

    #[test]
    fn of_a_part_that_is_taken_back_whole_pages_are() {
        let page = page_size();
        let mut seats = seats(4 * page);
        seats[0].board.post_lent(1, &HEADER, Spot { buffer: 0, offset: 0 });
        seats[1].board.post(1, &HEADER);
        assert_eq!(seats[1].board.take_loans(1, 4 * page, 1), Ok(true));
        let Seat { board, own } = &mut seats[0];
        let own = own.as_ref().unwrap().0.bytes();
        let head = own.as_ptr().addr() % page;
        board.take_back(&own[page..3 * page]);
        seats[1].board.write_lent(0, 1, 0, &vec![9; 4 * page]);
        let bytes = seats[0].own.as_ref().unwrap().0.bytes();
        let (taken, left) =
            (2 * page - head..3 * page - head, [0..2 * page - head, 3 * page - head..4 * page]);
        assert!(bytes[taken].iter().all(|&byte| byte == 0), "one page lies in it as a whole");
        assert!(left.into_iter().all(|part| bytes[part].iter().all(|&byte| byte == 9)));
    }
}
