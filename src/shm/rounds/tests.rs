use std::os::unix::fs::MetadataExt as _;

use super::layout::USED_BYTES_OF_ALL_RANKS;
use super::*;
use crate::shm::memory::SegmentMemory as _;

#[test]
#[should_panic(expected = "another rank may read this memory")]
fn writing_memory_that_another_rank_may_read_panics() {
    let size = RoundsSize { ranks: 2, slot_bytes: 128 };
    let mut rounds = ShmRounds::new(Arc::new(Segment::for_tests(size.bytes(), 1).remove(0)), size, 0);
    rounds.post(1, &[0; HEADER_WORDS]);
    rounds.write_payload(1 + LEAD_MAX, Payload { bytes: 1, ..Payload::default() }, (0, 0, &[7]));
}

#[test]
fn a_payload_does_not_overlap_the_payload_before_and_many_ranks_use_little_memory() {
    let slot_bytes = 512 << 10;
    for ranks in [2, 4, 16, 64] {
        let size = RoundsSize { ranks, slot_bytes };
        // Otherwise payloads of two ranks would be in exchange buffers, and payloads of more ranks in long cells.
        let is_exchanged = ranks > 2;
        let mut next = NextPost::default();
        let mut reserve = |round, bytes| {
            next.reserve(round, Payload { bytes, is_exchanged, ..Payload::default() }, size);
            let start = next.place.checked_sub(1)? * UNIT_BYTES;
            (start + bytes <= size.ring_buffer_bytes()).then_some(start..start + bytes)
        };
        // A long payload, then short and long ones in an irregular order, and then only payloads of 20 KiB.
        let mut before = reserve(1, slot_bytes);
        let mut random = ranks;
        for round in 2..5000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let limit = [slot_bytes, 20_000, 5000][(random >> 40) % 3];
            let bytes = if round < 4000 { (random >> 33) % (limit + 1) } else { 20 << 10 };
            let reserved = reserve(round, bytes);
            assert_eq!(reserved.is_some(), bytes > SHORT_PAYLOAD_BYTES_MAX, "it must be in the ring buffer");
            if let (Some(before), Some(reserved)) = (&before, &reserved) {
                let is_separate = before.end <= reserved.start || reserved.end <= before.start;
                assert!(is_separate, "{before:?} {reserved:?}");
            }
            before = reserved;
            let used_max = USED_BYTES_OF_ALL_RANKS / ranks;
            assert!(round < 4010 || before.as_ref().is_some_and(|range| range.end <= used_max), "{before:?}");
        }
    }
}

/// The simulation shows that no rank writes memory that another rank may read.
#[test]
fn each_rank_writes_cells_and_exchange_buffers_that_it_has_read() {
    let size = RoundsSize { ranks: 2, slot_bytes: 600 };
    let rounds = ShmRounds::new(Arc::new(Segment::for_tests(size.bytes(), 1).remove(0)), size, 0);
    let cell = |rank, round| rounds.payload_offset(rank, round, CELL_PLACE);
    let five = RoundsSize { ranks: 5, ..size };
    for round in 20..60 {
        assert_eq!(cell(0, round), cell(1, round - CELLS_OF_TWO));
        assert_eq!(size.exchange_place((0, 1), round, 0), size.exchange_place((1, 0), round - 2, 0));
        assert_eq!(five.exchange_place((3, 1), round, 150), five.exchange_place((1, 3), round - 2, 150));
    }
}

#[test]
fn memory_for_payloads_is_populated_at_the_fourth_payload() {
    for (ranks, bytes, is_exchanged, populated) in [
        (2, 1000, false, 2 * CELLS_OF_TWO as usize * SHORT_PAYLOAD_BYTES_MAX),
        (3, 1000, false, CELLS as usize * SHORT_PAYLOAD_BYTES_MAX),
        (3, 9000, false, LONG_CELLS as usize * LONG_CELL_BYTES),
        (3, 9000, true, 4 * (64 << 10)),
    ] {
        let size = RoundsSize { ranks, slot_bytes: 64 << 10 };
        let mut segments = Segment::for_tests(size.bytes(), ranks);
        if !segments[0].populate(0..1) {
            eprintln!("skipped: this kernel cannot populate memory (Linux 5.14 or later can)");
            return;
        }
        let file = std::fs::File::from(segments[0].take_file().unwrap());
        let allocated = || file.metadata().unwrap().blocks() as usize * 512;
        let segments = segments.into_iter().enumerate();
        let mut all: Vec<ShmRounds> =
            segments.map(|(rank, segment)| ShmRounds::new(Arc::new(segment), size, rank)).collect();
        let payload = Payload { bytes, part_bytes: 0, is_exchanged };
        for round in 1..5 {
            assert!(allocated() < populated, "{payload:?}");
            all[1].write_payload(round, payload, (0, 0, &vec![round as u8; bytes]));
            for rounds in &mut all {
                rounds.post(round, &[0; HEADER_WORDS]);
            }
            let post = all[0].read_post(1, round, 0).unwrap();
            assert_eq!(post.bytes(0..bytes).unwrap(), vec![round as u8; bytes], "{payload:?}");
        }
        assert!((populated..populated + (64 << 10)).contains(&allocated()), "and a few pages for headers");
    }
}
