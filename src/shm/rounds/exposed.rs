//! Rounds in which ranks expose parts of their buffers ([`BufferRegistry`](super::registry::BufferRegistry)).

use std::ops::Range;
use std::ptr;

use super::super::memory::RoundsMemory;
use super::ShmRounds;
use super::layout::{EXPOSED_PLACE, Header, Payload};
use super::registry::{BUFFER_REF_BYTES, BufferRef, ExposedParts};

impl<M: RoundsMemory> ShmRounds<M> {
    /// Posts the location of exposed elements instead of a payload. Do not call [`ShmRounds::write_payload`] for this round.
    pub fn post_exposed(&mut self, round: u64, header: &Header, buffer_ref: BufferRef) {
        let words = [buffer_ref.buffer, buffer_ref.offset].map(u64::to_le_bytes);
        let payload = Payload { bytes: BUFFER_REF_BYTES, ..Payload::default() };
        self.write_payload(round, payload, (0, 0, words.as_flattened()));
        self.next_post.place = EXPOSED_PLACE;
        self.post(round, header);
    }

    /// Reads and checks the locations that all other ranks have posted in `round`. All ranks must have posted the round. At
    /// each location, there must be `bytes` bytes, and its offset must be a multiple of `element_bytes`. Returns whether
    /// all other ranks have posted a location. An error names the rank that has posted an invalid location, and the reason.
    pub fn read_exposed_locations(
        &mut self,
        round: u64,
        bytes: usize,
        element_bytes: usize,
    ) -> Result<bool, (usize, &'static str)> {
        let mut locations = std::mem::take(&mut self.registry.exposed_parts.locations);
        locations.clear();
        for rank in 0..self.size().ranks {
            let location = self.read_exposed_location(rank, round, bytes, element_bytes);
            locations.push(location.map_err(|why| (rank, why))?);
        }
        let exposed = locations.iter().flatten().count();
        self.registry.exposed_parts = ExposedParts { round, part_bytes: bytes, locations };
        Ok(exposed + 1 == self.size().ranks)
    }

    /// Reads and checks the location that another rank has posted in `round`. Returns `None` if it has posted elements instead.
    fn read_exposed_location(
        &self,
        rank: usize,
        round: u64,
        bytes: usize,
        element_bytes: usize,
    ) -> Result<Option<BufferRef>, &'static str> {
        let posted =
            Some(rank).filter(|&rank| rank != self.rank).and_then(|rank| self.read_post(rank, round, 0));
        let Some(posted) = posted.filter(|posted| posted.is_exposed) else { return Ok(None) };
        let posted = posted.bytes(0..BUFFER_REF_BYTES).ok_or("it posted no location")?;
        let (words, _) = posted.as_chunks();
        let [buffer, offset]: [u64; 2] = [0, 1].map(|index| u64::from_le_bytes(words[index]));
        let location = BufferRef { buffer, offset };
        self.registry.check_location(rank, location, bytes, element_bytes).map(|()| Some(location))
    }

    /// Returns the bytes in `range` of the part that `rank` has exposed in `round`, on the conditions of `exposed_address`.
    /// Call [`ShmRounds::read_exposed_locations`] first.
    pub fn exposed_bytes(&self, rank: usize, round: u64, range: &Range<usize>) -> Option<&[u8]> {
        let start = self.exposed_address(rank, round, range, false)?;
        // SAFETY: the bytes are inside the mapping. Until all ranks have posted the next round, each exposed byte is assigned
        // to one rank, and no other rank writes to it. This rank writes to its bytes only with `&mut self`.
        Some(unsafe { std::slice::from_raw_parts(start, range.len()) })
    }

    /// Writes `bytes` to the part that `rank` has exposed in `round`, from byte `offset` on. Does nothing, or panics, on the
    /// conditions of `exposed_address`.
    pub fn write_exposed(&mut self, rank: usize, round: u64, offset: usize, bytes: &[u8]) {
        let range = offset..offset + bytes.len();
        let Some(start) = self.exposed_address(rank, round, &range, true) else { return };
        // SAFETY: the destination is inside the mapping and does not overlap `bytes`. Until this rank posts the next round,
        // no other rank reads or writes the destination.
        unsafe { start.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
    }

    /// Returns the address of the bytes in `range` of the part that `rank` has exposed in `round`, unless it has exposed nothing,
    /// or this rank has posted the next round. The caller then accesses the bytes. Panics if `range` is not inside the part.
    fn exposed_address(
        &self,
        rank: usize,
        round: u64,
        range: &Range<usize>,
        is_write: bool,
    ) -> Option<*mut u8> {
        let ExposedParts { round: exposed_round, part_bytes, locations } = &self.registry.exposed_parts;
        if *exposed_round != round || self.posted > round {
            return None;
        }
        let BufferRef { buffer, offset } = (*locations.get(rank)?)?;
        let is_inside = range.start <= range.end && range.end <= *part_bytes;
        assert!(is_inside, "the range must be inside the exposed part");
        let start = usize::try_from(offset).ok()?;
        let buffer = self.registry.buffer(buffer, rank)?;
        let start = buffer.address_of(&(start + range.start..start + range.end))?.as_ptr();
        let bytes = ptr::slice_from_raw_parts(start, range.len());
        self.posts.memory.before_access_in_place(bytes, is_write);
        Some(start)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::shm::{ExposedBuffer, HEADER_WORDS, RemoteBuffer, RoundsSize, Segment, TOKEN_BYTES};

    const HEADER: Header = [5; HEADER_WORDS];

    /// Returns the rounds of two ranks, each with its own registered buffer, which stays registered while the `Arc` lives.
    fn ranks(length: usize) -> Vec<(ShmRounds, ExposedBuffer, Arc<()>)> {
        let (size, token) = (RoundsSize { ranks: 2, slot_bytes: 128 }, [2; TOKEN_BYTES]);
        let buffers = [(); 2].map(|()| ExposedBuffer::create(length, &token).unwrap());
        let locations = buffers.each_ref().map(|buffer| buffer.location().unwrap());
        let others = [1, 0].map(|other: usize| RemoteBuffer::open(locations[other], length, &token).unwrap());
        let segments = Segment::for_tests(size.bytes(), 2).into_iter().zip(buffers).zip(others).enumerate();
        let register = |(rank, ((segment, mut own), other))| {
            let (mut rounds, alive) = (ShmRounds::new(Arc::new(segment), size, rank), Arc::new(()));
            rounds.registry.register(&mut own, Arc::downgrade(&alive), [other]);
            (rounds, own, alive)
        };
        segments.map(register).collect()
    }

    #[test]
    fn an_invalid_location_is_an_error() {
        for (buffer, offset, expected) in [
            (0, 896, Ok(true)),
            (1, 0, Err("it posted a location in a buffer that this rank does not know")),
            (u64::MAX, 0, Err("it posted a location in a buffer that this rank does not know")),
            (0, 904, Err("it posted a location that does not end inside its buffer")),
            (0, 1000, Err("it posted a location that does not end inside its buffer")),
            (0, u64::MAX - 7, Err("it posted a location that does not end inside its buffer")),
            (0, 4, Err("it posted a location whose offset is not a multiple of the element size")),
        ] {
            let mut ranks = ranks(1000);
            ranks[1].0.post_exposed(1, &HEADER, BufferRef { buffer, offset });
            ranks[0].0.post(1, &HEADER);
            let found = ranks[0].0.read_exposed_locations(1, 104, 8);
            assert_eq!(found, expected.map_err(|what| (1, what)), "{buffer} {offset}");
        }
    }

    #[test]
    fn only_aligned_bytes_inside_a_registered_buffer_have_a_location() {
        let (rounds, own, alive) = &mut ranks(1000)[0];
        let has_location = |bytes| rounds.registry.find_buffer_ref(bytes, 8).is_some();
        assert!(has_location(&own.bytes()[8..]));
        assert!(has_location(&own.bytes()[1000..]), "no bytes, at the end of the buffer");
        assert!(!has_location(&own.bytes()[4..]), "the bytes begin in the middle of an element");
        assert!(!has_location(&[0; 1000]));
        *alive = Arc::new(());
        assert!(!has_location(own.bytes()), "the buffer is dropped");
    }

    #[test]
    fn a_buffer_stays_mapped_until_its_owner_withdraws_it() {
        let mut ranks = ranks(64);
        let (_, own, alive) = &mut ranks[0];
        own.withdraw();
        *alive = Arc::new(());
        let counts = |(rounds, ..): &mut (ShmRounds, ExposedBuffer, Arc<()>)| {
            rounds.registry.unmap_dropped_buffers(false);
            (rounds.registry.own_buffer_count(), rounds.registry.others.len())
        };
        let counts: Vec<_> = ranks.iter_mut().map(counts).collect();
        assert_eq!(counts, [(0, 1), (1, 0)], "rank 1 has not withdrawn its buffer");
    }
}
