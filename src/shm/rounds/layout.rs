//! Where the headers and payloads of the ranks are in the memory of [rounds](super). The headers of a rank are in a few pages: a
//! short collective takes less time than a look for some pages in the second level of a processor's TLB.

use crate::shm::memory::{UNIT_BYTES, WORD_BYTES};
use crate::types::part_index;

/// How many rounds a rank may be ahead of the others, if its payloads follow their headers or are in cells.
pub const LEAD_MAX: u64 = 32;
/// The same for cells of two ranks. With more of them, two ranks read more memory that is in no cache (ADR 105).
pub(super) const LEAD_OF_TWO: u64 = 8;
/// The same for long cells.
pub(super) const LONG_LEAD_MAX: u64 = 16;
/// The number of post headers of a rank. A rank that may post round r + [`LEAD_MAX`] knows only that all others have posted round
/// r, and these compare the headers of round r - [`LEAD_MAX`] before they post round r.
pub(super) const HEADERS: u64 = 2 * LEAD_MAX;
/// The distance between the headers of two rounds. They are not next to each other: a processor that reads a header may also
/// fetch the next lines, while another rank writes them. An odd number, so that all headers are used.
pub(super) const HEADER_STEP: u64 = 37;
/// The maximum length in bytes of a payload that directly follows its header; up to 16 are in its cache line.
pub(super) const INLINE_PAYLOAD_BYTES_MAX: usize = UNIT_BYTES - POST_HEADER_BYTES;
/// The length in bytes of a cell, which contains one payload.
pub const SHORT_PAYLOAD_BYTES_MAX: usize = 4 << 10;
/// The number of cells that a rank uses. More than it may be ahead are necessary, because the others may still read the oldest of
/// these rounds; a power of two is fast.
pub(super) const CELLS: u64 = 2 * LEAD_MAX;
pub(super) const CELLS_OF_TWO: u64 = 2 * LEAD_OF_TWO;
pub(super) const LONG_CELLS: u64 = 2 * LONG_LEAD_MAX;
/// The length in bytes of a long cell, which contains a payload of a rank that reads nothing in the round.
pub(super) const LONG_CELL_BYTES: usize = 16 << 10;
/// The number of payloads of maximum length for which a ring buffer has space. At least three are necessary: for the payload that
/// other ranks read, for the one that this rank writes, and for the unused space at the end. ADR 35 says why it is longer.
pub(super) const RING_BUFFER_SLOTS: usize = 4;
/// The number of bytes that the payloads in the ring buffers of all ranks use together, unless they are too long for that. With
/// more memory, the ranks would read memory that is in no cache, and have more page faults.
pub(super) const USED_BYTES_OF_ALL_RANKS: usize = 8 << 20;
/// The number of bits of a stamp, the first word of a post header, that contain the place of the payload ([`NextPost::place`]).
pub(super) const PLACE_BITS: u32 = 16;
/// The place in the stamp of a rank that exposes its elements. In this case, the payload follows the header, and contains
/// only the location of the elements ([`BufferRef`](super::registry::BufferRef)).
pub(super) const EXPOSED_PLACE: usize = (1 << PLACE_BITS) - 1;
/// The place in the stamp of a payload in a cell.
pub(super) const CELL_PLACE: usize = EXPOSED_PLACE - 1;
/// The place in the stamp of a payload in exchange buffers.
pub(super) const EXCHANGE_PLACE: usize = CELL_PLACE - 1;
/// The place in the stamp of a payload in a long cell. Smaller numbers than this are places in the ring buffer.
pub(super) const LONG_CELL_PLACE: usize = EXCHANGE_PLACE - 1;
/// The number of exchange buffers of a rank. A rank may write a payload of round r there when the others have posted round r - 1.
/// Then they no longer read the payloads of round r - 2, which were in the same buffers.
const EXCHANGE_BUFFERS: u64 = 2;
/// The number of 64-bit words of a post header without its stamp.
pub const HEADER_WORDS: usize = 5;

/// The words of a post header without its stamp. The caller decides what the words mean.
pub type Header = [u64; HEADER_WORDS];

/// The sizes that determine the memory layout of a [`ShmRounds`](super::ShmRounds).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RoundsSize {
    /// The number of ranks that share the memory.
    pub ranks: usize,
    /// The maximum length of a payload in bytes.
    pub slot_bytes: usize,
}

impl RoundsSize {
    /// Returns the size of the memory in bytes. Panics if it does not fit into a `usize` and the build checks for overflow.
    pub const fn bytes(self) -> usize {
        UNIT_BYTES + self.ranks * self.bytes_per_rank()
    }

    pub(super) const fn bytes_per_rank(self) -> usize {
        RING_BUFFER_OFFSET
            + self.ring_buffer_bytes()
            + EXCHANGE_BUFFERS as usize * self.exchange_buffer_bytes()
    }

    pub(super) const fn exchange_buffer_bytes(self) -> usize {
        in_units(self.slot_bytes)
    }

    /// Returns where the elements are that the rank `from` posts for `to` in exchange buffers in `round`: the rank in whose
    /// memory they are, the index of the part, and the offset in the memory of this rank. A part has `part_bytes` bytes, or is
    /// the whole payload of one of two ranks. The place is that of the part of `to` for `from` two rounds before. So each rank
    /// writes memory that it has read, which its processor has in the cache (ADR 102).
    pub(super) fn exchange_place(
        self,
        (from, to): (usize, usize),
        round: u64,
        part_bytes: usize,
    ) -> (usize, usize, usize) {
        let is_swapped = round / EXCHANGE_BUFFERS % 2 == 1;
        let (owner, other) = if is_swapped { (to, from) } else { (from, to) };
        let part = part_index(owner, other);
        let buffer = (round % EXCHANGE_BUFFERS) as usize * self.exchange_buffer_bytes();
        (owner, part, RING_BUFFER_OFFSET + self.ring_buffer_bytes() + buffer + part * part_bytes)
    }

    /// Returns how many bytes at the start of the ring buffer payloads use, unless they are too long for that.
    pub(super) fn used_ring_bytes(self) -> usize {
        self.ring_buffer_bytes().min(USED_BYTES_OF_ALL_RANKS / self.ranks)
    }

    pub(super) const fn ring_buffer_bytes(self) -> usize {
        RING_BUFFER_SLOTS * in_units(self.slot_bytes)
    }
}

/// The length in bytes of a post header: the stamp, with the number of the round and, in the lowest [`PLACE_BITS`] bits, the
/// place of the payload; and then the words of [`Header`].
pub(super) const POST_HEADER_BYTES: usize = (1 + HEADER_WORDS) * WORD_BYTES;
/// Where the cells, the long cells and the ring buffer begin in the memory of a rank, after the sleep flag and the headers, one
/// unit for each. The exchange buffers follow the ring buffer.
pub(super) const CELLS_OFFSET: usize = (1 + HEADERS as usize) * UNIT_BYTES;
pub(super) const LONG_CELLS_OFFSET: usize = CELLS_OFFSET + CELLS as usize * SHORT_PAYLOAD_BYTES_MAX;
pub(super) const RING_BUFFER_OFFSET: usize = LONG_CELLS_OFFSET + LONG_CELLS as usize * LONG_CELL_BYTES;

/// What a rank posts in a round.
#[derive(Clone, Copy, Default, Debug)]
pub struct Payload {
    pub bytes: usize,
    /// If the payload has a part for each other rank, which only this rank reads: the length of a part. Otherwise 0.
    pub part_bytes: usize,
    /// Whether this rank also reads payloads in the round.
    pub is_exchanged: bool,
}

impl Payload {
    /// Returns the place of this payload of one of `ranks` ranks; `None` if it goes to the ring buffer. With several readers of a
    /// byte, exchange buffers are slower than the ring buffer. A rank that also reads in the round is not ahead of the others
    /// anyway, so it needs no long cell, and for two ranks the ring buffer is faster (ADR 103).
    fn fixed_place(&self, ranks: usize) -> Option<usize> {
        match self.bytes {
            bytes if bytes <= INLINE_PAYLOAD_BYTES_MAX => Some(0),
            bytes if bytes <= SHORT_PAYLOAD_BYTES_MAX => Some(CELL_PLACE),
            _ if self.is_exchanged && (self.part_bytes > 0 || ranks == 2) => Some(EXCHANGE_PLACE),
            bytes if bytes <= LONG_CELL_BYTES && !self.is_exchanged && ranks > 2 => Some(LONG_CELL_PLACE),
            _ => None,
        }
    }

    /// Returns how many rounds this one of `ranks` ranks may be ahead of the others when it writes the payload.
    pub fn lead_max(&self, ranks: usize) -> u64 {
        match self.fixed_place(ranks) {
            Some(0) => LEAD_MAX,
            Some(CELL_PLACE) if ranks == 2 => LEAD_OF_TWO,
            Some(CELL_PLACE) => LEAD_MAX,
            Some(LONG_CELL_PLACE) => LONG_LEAD_MAX,
            _ => 1,
        }
    }
}

/// The payload that this rank posts next.
#[derive(Default)]
pub(super) struct NextPost {
    /// The round in which this rank posts the payload; 0 before the first round.
    pub(super) round: u64,
    /// The place of the payload: 0 means directly after the header, and n at the nth unit of the ring buffer. Numbers from
    /// [`LONG_CELL_PLACE`] on have other meanings.
    pub(super) place: usize,
    pub(super) payload: Payload,
    /// The length of the last payload in the ring buffer.
    length_in_ring: usize,
    /// The offset in bytes at which the next long payload begins in the ring buffer.
    cursor: usize,
}

impl NextPost {
    /// Reserves memory for a payload that does not overlap the payload of the round before, which other ranks may still read.
    pub(super) fn reserve(&mut self, round: u64, payload: Payload, size: RoundsSize) {
        (self.round, self.payload) = (round, payload);
        self.place =
            payload.fixed_place(size.ranks).unwrap_or_else(|| self.reserve_in_ring(payload.bytes, size));
    }

    fn reserve_in_ring(&mut self, bytes: usize, size: RoundsSize) -> usize {
        // If the cursor is so far that the payload has to begin at 0, the payload before begins after the end of this one.
        let separate = 2 * in_units(bytes) + in_units(self.length_in_ring);
        let end_max = separate.max(size.used_ring_bytes()).min(size.ring_buffer_bytes());
        let start = if self.cursor + bytes > end_max { 0 } else { self.cursor };
        (self.cursor, self.length_in_ring) = (in_units(start + bytes), bytes);
        start / UNIT_BYTES + 1
    }
}

const fn in_units(bytes: usize) -> usize {
    bytes.next_multiple_of(UNIT_BYTES)
}
