use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use super::operation::ShmOperation;
use super::*;
use crate::engine::OperationRequest;
use crate::reduce;
use crate::schedule::CollectiveSpec;
use crate::shm::{BufferRef, Payload, RoundsSize, Segment, TOKEN_BYTES};
use crate::types::{Algorithm, DType, Operation, ReduceOp, Site};

const RANKS: u32 = 3;
/// The number of elements of a slot.
const SLOT: usize = 64;
/// The number of elements of an all-reduce.
const COUNT: usize = 1001;
const TOKEN: [u8; TOKEN_BYTES] = [6; TOKEN_BYTES];

/// A rank with one shared buffer.
struct ShmRank {
    host_rounds: HostRounds,
    own: ExposedBuffer,
    alive: Arc<()>,
    has_dropped_buffers: Arc<AtomicBool>,
}

fn new_ranks() -> Vec<ShmRank> {
    let size = RoundsSize { ranks: RANKS as usize, slot_bytes: SLOT * size_of::<f32>() };
    let bytes = COUNT * size_of::<f32>();
    let own: Vec<ExposedBuffer> = (0..RANKS).map(|_| ExposedBuffer::create(bytes, &TOKEN).unwrap()).collect();
    let locations: Vec<_> = own.iter().map(|own| own.location().unwrap()).collect();
    let segments = Segment::for_tests(size.bytes(), size.ranks).into_iter();
    let rank_state = |(rank, (segment, mut own)): (usize, (Segment, ExposedBuffer))| {
        let rounds = ShmRounds::new(Arc::new(segment), size, rank);
        let members = (0..RANKS).map(Rank::new).collect();
        let mut host_rounds = HostRounds::new(rounds, members, Meter::default());
        let others = locations.iter().enumerate().filter(|(other, _)| *other != rank);
        let others =
            others.map(|(_, location)| RemoteBuffer::open(*location, bytes, &TOKEN).unwrap()).collect();
        let alive = Arc::new(());
        let has_dropped_buffers = host_rounds.register_buffer(&mut own, Arc::downgrade(&alive), others);
        ShmRank { host_rounds, own, alive, has_dropped_buffers }
    };
    segments.zip(own).enumerate().map(rank_state).collect()
}

fn begin(host_rounds: &mut HostRounds, spec: &CollectiveSpec) -> ShmOperation {
    let contract = Contract {
        operation: spec.operation(),
        dtype: DType::F32,
        reduction: (spec.operation() == Operation::AllReduce).then_some(ReduceOp::Sum),
        algorithm: Algorithm::Direct,
        count: spec.count() as u64,
        ..Contract::NONE
    };
    let site = Site::from(std::panic::Location::caller());
    let request = OperationRequest::new(0, contract, Duration::MAX, site);
    let kernels = reduce::kernels(DType::F32, ReduceOp::Sum);
    host_rounds.add_operation((&request, None), spec, (kernels, false))
}

/// The simulation of rounds checks the results if only some ranks use shared buffers.
#[test]
fn an_all_reduce_of_shared_buffers_takes_two_rounds() {
    let mut ranks = new_ranks();
    let mut operations = Vec::new();
    for (rank, ShmRank { host_rounds, own, .. }) in ranks.iter_mut().enumerate() {
        operations.push(begin(host_rounds, &CollectiveSpec::AllReduce { count: COUNT }));
        let elements: &mut [f32] = bytemuck::cast_slice_mut(own.bytes_mut());
        elements.iter_mut().enumerate().for_each(|(index, element)| *element = (index * 4 + rank) as f32);
    }
    let mut is_done = vec![false; ranks.len()];
    while is_done.contains(&false) {
        for (rank, ShmRank { host_rounds, own, .. }) in ranks.iter_mut().enumerate() {
            if !is_done[rank] {
                let memory = &mut BufferAccess::from(own.bytes_mut());
                let poll = host_rounds.poll(&mut operations[rank], memory, |_| {});
                is_done[rank] = poll.unwrap() == Poll::Ready(());
            }
        }
    }
    let expected: Vec<f32> = (0..COUNT).map(|index| (index * 12 + 3) as f32).collect();
    for ShmRank { host_rounds, own, .. } in &ranks {
        assert_eq!(host_rounds.last_round, 2);
        assert_eq!(bytemuck::cast_slice::<u8, f32>(own.bytes()), expected);
    }
}

#[test]
fn the_next_operation_removes_a_dropped_buffer() {
    let ShmRank { mut host_rounds, own, alive, has_dropped_buffers } = new_ranks().remove(0);
    begin(&mut host_rounds, &CollectiveSpec::Barrier);
    drop((alive, own));
    has_dropped_buffers.store(true, Ordering::Release);
    begin(&mut host_rounds, &CollectiveSpec::Barrier);
    assert_eq!(host_rounds.rounds.registry.own_buffer_count(), 1, "an operation is active");
    host_rounds.oldest_position = host_rounds.next_position;
    begin(&mut host_rounds, &CollectiveSpec::Barrier);
    assert_eq!(host_rounds.rounds.registry.own_buffer_count(), 0);
}

/// Lets the rank `reader` poll an operation after other ranks have posted. If the post of a rank is invalid, returns why.
fn find_invalid_post(
    reader: usize,
    spec: &CollectiveSpec,
    post: impl FnOnce(&mut [ShmRank], &Header),
) -> Option<(Rank, &'static str)> {
    let mut ranks = new_ranks();
    let mut operations: Vec<ShmOperation> =
        ranks.iter_mut().map(|rank_state| begin(&mut rank_state.host_rounds, spec)).collect();
    post(&mut ranks, &operations[1].header);
    let ShmRank { host_rounds, own, .. } = &mut ranks[reader];
    let memory = &mut own.bytes_mut()[..spec.count() * size_of::<f32>()];
    match host_rounds
        .poll(&mut operations[reader], &mut BufferAccess::from(memory), |_| {})
        .map_err(|error| *error)
    {
        Ok(_) => None,
        Err(ShmFailure::Invalid(rank, what)) => Some((rank, what)),
        Err(failure) => panic!("{failure:?}"),
    }
}

/// Regression test: a wrong stamp near the end of the ring buffer caused a panic, and one after the end a wait without end.
#[test]
fn a_payload_that_does_not_end_in_the_ring_buffer_is_reported_with_the_rank_that_posted_it() {
    // A ring buffer has 8 units of 128 bytes: 4 slots of 256 bytes. The reductions need bytes 0 to 88 of the payload of rank 1,
    // or 88 to 172, and the broadcast needs 256 bytes. At place 0, directly after the header, there are 80 bytes.
    const EXCHANGE_PLACE: usize = 65_533;
    for place in [0, 1, 7, 8, 9, 60_000, 65_532, EXCHANGE_PLACE, 65_534] {
        for (reader, last_place, spec) in [
            (0, 8, CollectiveSpec::AllReduce { count: SLOT }),
            (2, 7, CollectiveSpec::AllReduce { count: SLOT }),
            (0, 7, CollectiveSpec::Broadcast { count: SLOT, root: Rank::new(1) }),
        ] {
            let is_valid = match place {
                // A broadcast among three ranks has no exchange buffers.
                EXCHANGE_PLACE => spec.operation() == Operation::AllReduce,
                // Places in cells and long cells.
                65_532 | 65_534 => true,
                _ => (1..=last_place).contains(&place),
            };
            let found = find_invalid_post(reader, &spec, |ranks, header| {
                if reader != 0 {
                    ranks[0].host_rounds.rounds.post_with_place(1, header, 1);
                }
                ranks[1].host_rounds.rounds.post_with_place(1, header, place);
            });
            let expected = (Rank::new(1), "it posted a payload that does not end inside its memory");
            assert_eq!(found, (!is_valid).then_some(expected), "rank {reader} at place {place}");
        }
    }
}

/// A rank checks the buffer address that another rank posts before it accesses memory.
#[test]
fn an_invalid_buffer_address_is_reported_with_the_rank_that_posted_it() {
    for (spec, buffer, expected) in [
        (CollectiveSpec::AllReduce { count: COUNT }, 9, "a buffer that this rank does not know"),
        (CollectiveSpec::Barrier, 0, "without in-place reduction"),
        (CollectiveSpec::Broadcast { count: COUNT, root: Rank::new(1) }, 0, "without in-place reduction"),
    ] {
        let found = find_invalid_post(0, &spec, |ranks, header| {
            ranks[1].host_rounds.rounds.post_exposed(1, header, BufferRef { buffer, offset: 0 });
            let payload = Payload { bytes: SLOT * size_of::<f32>(), ..Payload::default() };
            ranks[2].host_rounds.rounds.write_payload(1, payload, (0, 0, &[]));
            ranks[2].host_rounds.rounds.post(1, header);
        });
        let (rank, what) = found.expect(expected);
        assert!(rank == Rank::new(1) && what.contains(expected), "rank {rank}: {what}");
    }
}

/// Without this check, a rank would look for the post again and again, without sleeping and without a deadline.
#[test]
fn a_rank_that_posts_the_number_of_a_wrong_round_is_named() {
    let found = find_invalid_post(0, &CollectiveSpec::AllReduce { count: SLOT }, |ranks, _| {
        // This round has the same header as the first round.
        ranks[1].host_rounds.rounds.post(1 + 2 * LEAD_MAX, &[0; HEADER_WORDS]);
    });
    assert_eq!(found, Some((Rank::new(1), "it posted the number of a wrong round")));
}
