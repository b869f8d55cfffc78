use std::sync::Arc;

use super::*;
use crate::reduce;
use crate::schedule::CollectiveSpec;
use crate::transport::shm::{BufferRef, RoundsSize, Segment, TOKEN_BYTES};
use crate::types::{Algorithm, DType, Operation, ReduceOp, Site, WorldSize};

const RANKS: u32 = 3;
/// Elements of a slot.
const SLOT: usize = 64;
const COUNT: usize = 1001;
const TOKEN: [u8; TOKEN_BYTES] = [6; TOKEN_BYTES];

/// A rank, which has a buffer of the group.
struct Seat {
    shm_executor: ShmExecutor,
    own: ExposedBuffer,
    _alive: Arc<()>,
}

fn world() -> WorldSize {
    WorldSize::new(RANKS).unwrap()
}

fn seats() -> Vec<Seat> {
    let size = RoundsSize { ranks: RANKS as usize, slot_bytes: SLOT * size_of::<f32>() };
    let bytes = COUNT * size_of::<f32>();
    let first = Segment::create(size.bytes(), &TOKEN).unwrap();
    let place = first.place().unwrap();
    let others = (1..RANKS).map(|_| Segment::open(place, size.bytes(), &TOKEN).unwrap());
    let segments: Vec<Segment> = others.collect();
    let own: Vec<ExposedBuffer> = (0..RANKS).map(|_| ExposedBuffer::create(bytes, &TOKEN).unwrap()).collect();
    let places: Vec<_> = own.iter().map(|own| own.place().unwrap()).collect();
    let segments = std::iter::once(first).chain(segments);
    let seat = |(rank, (segment, mut own)): (usize, (Segment, ExposedBuffer))| {
        let mut shm_executor = ShmExecutor::new(ShmRounds::new(segment, size, rank), Meter::default());
        let others = places.iter().enumerate().filter(|(other, _)| *other != rank);
        let others = others.map(|(_, place)| RemoteBuffer::open(*place, bytes, &TOKEN).unwrap()).collect();
        let alive = Arc::new(());
        shm_executor.register_buffer(&mut own, Arc::downgrade(&alive), others);
        Seat { shm_executor, own, _alive: alive }
    };
    segments.zip(own).enumerate().map(seat).collect()
}

fn begin(shm_executor: &mut ShmExecutor, work: CollectiveSpec) -> ShmOperation {
    let contract = Contract {
        operation: work.operation(),
        dtype: DType::F32,
        reduction: (work.operation() == Operation::AllReduce).then_some(ReduceOp::Sum),
        algorithm: Algorithm::Direct,
        root: Rank::ZERO,
        count: work.count() as u64,
        layout: 0,
    };
    let rank = Rank::new(shm_executor.rounds.rank() as u32);
    let kernels = reduce::kernels(DType::F32, ReduceOp::Sum);
    let plan = RoundPlan::new(world(), rank, SLOT, 0, work);
    shm_executor.add_operation((contract, Site::here()), ShmRequest { plan, kernels, divisor: RANKS })
}

/// How many rounds an all-reduce takes, of buffers that some lend, and the results.
fn play(lends: impl Fn(usize) -> bool) -> (u64, Vec<Vec<f32>>) {
    let mut seats = seats();
    let mut private = vec![vec![0f32; COUNT]; seats.len()];
    let mut errands = Vec::new();
    for (rank, Seat { shm_executor, own, .. }) in seats.iter_mut().enumerate() {
        errands.push(begin(shm_executor, CollectiveSpec::AllReduce { count: COUNT }));
        let elements = bytemuck::cast_slice_mut(own.bytes_mut());
        for elements in [&mut private[rank][..], elements] {
            elements.iter_mut().enumerate().for_each(|(index, element)| *element = (index * 4 + rank) as f32);
        }
    }
    let mut is_over = vec![false; seats.len()];
    while is_over.contains(&false) {
        for (rank, Seat { shm_executor, own, .. }) in seats.iter_mut().enumerate() {
            if is_over[rank] {
                continue;
            }
            let private = bytemuck::cast_slice_mut(&mut private[rank]);
            let bytes = if lends(rank) { own.bytes_mut() } else { private };
            let poll = shm_executor.poll(&mut errands[rank], &mut BufferAccess::from(bytes), |_| {});
            assert!(matches!(poll, ShmPoll::Done | ShmPoll::Waits));
            is_over[rank] = matches!(poll, ShmPoll::Done);
        }
    }
    let result = |(rank, seat): (usize, &Seat)| {
        let own: &[f32] = bytemuck::cast_slice(seat.own.bytes());
        if lends(rank) { own.to_vec() } else { private[rank].clone() }
    };
    (seats[0].shm_executor.round, seats.iter().enumerate().map(result).collect())
}

#[test]
fn in_place_it_takes_two_rounds() {
    let by_slots = 2 * COUNT.div_ceil(SLOT) as u64;
    let expected: Vec<f32> = (0..COUNT).map(|index| (index * 12 + 3) as f32).collect();
    let lending: [fn(usize) -> bool; 4] = [|_| true, |_| false, |rank| rank == 1, |rank| rank != 1];
    for (case, lends) in lending.into_iter().enumerate() {
        let (rounds, results) = play(lends);
        assert_eq!(rounds, if case == 0 { 2 } else { by_slots }, "case {case}");
        assert!(results.iter().all(|result| *result == expected), "case {case}");
    }
}

/// What a rank says of its buffer is looked at before anything is touched.
#[test]
fn a_rank_that_lends_what_cannot_be_is_blamed() {
    for (work, buffer_ref, expected) in [
        (
            CollectiveSpec::AllReduce { count: COUNT },
            BufferRef { buffer: 9, offset: 0 },
            "a buffer that this rank does not know",
        ),
        (
            CollectiveSpec::AllReduce { count: COUNT },
            BufferRef { buffer: 0, offset: 4 },
            "more than its buffer has",
        ),
        (
            CollectiveSpec::AllReduce { count: COUNT - 9 },
            BufferRef { buffer: 0, offset: 6 },
            "where elements can",
        ),
        (CollectiveSpec::Barrier, BufferRef { buffer: 0, offset: 0 }, "where nobody can take it"),
        (
            CollectiveSpec::Broadcast { count: COUNT, root: Rank::new(1) },
            BufferRef { buffer: 0, offset: 0 },
            "nobody can take",
        ),
    ] {
        let mut seats = seats();
        let bytes = work.count() * size_of::<f32>();
        let mut errands: Vec<ShmOperation> =
            seats.iter_mut().map(|seat| begin(&mut seat.shm_executor, work.clone())).collect();
        let header = errands[1].asked.header;
        seats[1].shm_executor.rounds.post_exposed(1, &header, buffer_ref);
        seats[2].shm_executor.rounds.post(1, &header);
        let Seat { shm_executor, own, .. } = &mut seats[0];
        let memory = &mut own.bytes_mut()[..bytes];
        match shm_executor.poll(&mut errands[0], &mut BufferAccess::from(memory), |_| {}) {
            ShmPoll::Broken(rank, what) => {
                assert_eq!(rank, Rank::new(1));
                assert!(what.contains(expected), "{what}");
            }
            _ => panic!("{expected}: it went unnoticed"),
        }
    }
}
