//! Compares every collective over real TCP with a naive reference, for every element type, reduction, world size and length.

use crate::util::ranks;
use ndarray::{Array2, Array3};
use ringtrain::engine::CREDIT_BYTES;
use ringtrain::wire::frame::HEADER_BYTES;
use ringtrain::{Compression, DType, Error, F64Loc, Rank, ReduceOp};

const WORLDS: [u32; 6] = [1, 2, 3, 4, 5, 8];

/// An element type and its conversions. The test values are so small that sums and products are exact in every type.
trait Sample: Element {
    fn from_small(value: i64) -> Self;
    fn to_f64(self) -> f64;
}

macro_rules! samples {
    ($($ty:ty: $from:expr, $to:expr);+ $(;)?) => { $( impl Sample for $ty {
        fn from_small(value: i64) -> Self { let from: fn(i64) -> Self = $from; from(value) }
        fn to_f64(self) -> f64 { let to: fn(Self) -> f64 = $to; to(self) }
    } )+ };
}

samples! {
    f16: |v| f16::from_f64(v as f64), f16::to_f64;
    bf16: |v| bf16::from_f64(v as f64), bf16::to_f64;
    f32: |v| v as f32, f64::from;
    f64: |v| v as f64, |v| v;
    i8: |v| v as i8, f64::from;
    u8: |v| v.unsigned_abs() as u8, f64::from;
    i16: |v| v as i16, f64::from;
    u16: |v| v.unsigned_abs() as u16, f64::from;
    i32: |v| v as i32, f64::from;
    u32: |v| v.unsigned_abs() as u32, f64::from;
    i64: |v| v, |v| v as f64;
    u64: |v| v.unsigned_abs(), |v| v as f64;
}

/// Returns what `rank` contributes at `index`: a small value that differs between ranks, and for products mostly 1.
fn value<T: Sample>(op: ReduceOp, rank: u32, index: usize) -> T {
    let mixed = (index as i64 * 7 + i64::from(rank) * 13) % 11 - 5;
    match op {
        ReduceOp::Product => T::from_small(if (index + rank as usize).is_multiple_of(5) { 2 } else { 1 }),
        _ => T::from_small(mixed),
    }
}

fn expected<T: Sample>(op: ReduceOp, n: u32, index: usize) -> f64 {
    let truth = |is_true| if is_true { 1.0 } else { 0.0 };
    let mut values = (0..n).map(|rank| value::<T>(op, rank, index).to_f64());
    match op {
        ReduceOp::Sum | ReduceOp::PreMulSum => values.sum(),
        ReduceOp::Product => values.product(),
        ReduceOp::Min => values.fold(f64::INFINITY, f64::min),
        ReduceOp::Max => values.fold(f64::NEG_INFINITY, f64::max),
        ReduceOp::Average => {
            let average = values.sum::<f64>() / f64::from(n);
            let is_integer = !matches!(T::DTYPE.name(), "f16" | "bf16" | "f32" | "f64");
            if is_integer { average.trunc() } else { T::round(average) }
        }
        ReduceOp::BitAnd => values.fold(-1, |bits, value| bits & value as i64) as f64,
        ReduceOp::BitOr => values.fold(0, |bits, value| bits | value as i64) as f64,
        ReduceOp::BitXor => values.fold(0, |bits, value| bits ^ value as i64) as f64,
        ReduceOp::LogicalAnd => truth(values.all(|value| value != 0.0)),
        ReduceOp::LogicalOr => truth(values.any(|value| value != 0.0)),
        ReduceOp::LogicalXor => truth(values.filter(|&value| value != 0.0).count() % 2 == 1),
        ReduceOp::MinLoc | ReduceOp::MaxLoc | ReduceOp::Custom => unreachable!("no reductions of numbers"),
    }
}

/// Rounds to a float type. Only averages need it, because all other results are exact.
trait Round {
    fn round(value: f64) -> f64;
}

impl<T: Sample> Round for T {
    fn round(value: f64) -> f64 {
        match T::DTYPE.name() {
            "f16" => f16::from_f64(value).to_f64(),
            "bf16" => bf16::from_f64(value).to_f64(),
            "f32" => f64::from(value as f32),
            _ => value,
        }
    }
}

fn lengths(n: u32) -> Vec<usize> {
    let n = n as usize;
    vec![0, 1, n - 1, n, n + 1, 1000, 100_003]
}

fn check_type<T: Sample>(group: &mut Group) {
    let (n, rank) = (group.size().get(), group.rank());
    for &op in ReduceOp::ALL.iter().filter(|op| op.applies_to(T::DTYPE) && **op != ReduceOp::Custom) {
        for count in lengths(n) {
            let own: Vec<T> = (0..count).map(|i| value(op, rank.get(), i)).collect();
            let mut all = own.clone();
            group.all_reduce(&mut all, op).unwrap();
            let mut part = own.clone();
            let mine = group.reduce_scatter(&mut part, op).unwrap();
            assert_eq!(mine, group.chunk(count, rank));
            for index in 0..count {
                let expected = expected::<T>(op, n, index);
                let context = format!("{} {op} n={n} count={count} [{index}]", T::DTYPE);
                assert_eq!(all[index].to_f64(), expected, "all_reduce {context}");
                if mine.contains(&index) {
                    assert_eq!(part[index].to_f64(), expected, "reduce_scatter {context}");
                }
            }
        }
    }
    for count in lengths(n) {
        let mut gathered = vec![T::from_small(0); count];
        for index in group.chunk(count, rank) {
            gathered[index] = value(ReduceOp::Sum, rank.get(), index);
        }
        group.all_gather(&mut gathered).unwrap();
        for owner in ranks::ranks(n) {
            for index in group.chunk(count, owner) {
                assert_eq!(
                    gathered[index],
                    value(ReduceOp::Sum, owner.get(), index),
                    "all_gather n={n} {count}"
                );
            }
        }
        for root in ranks::ranks(n) {
            let mut sent: Vec<T> = (0..count).map(|i| value(ReduceOp::Sum, rank.get(), i)).collect();
            group.broadcast(&mut sent, root).unwrap();
            let expected: Vec<T> = (0..count).map(|i| value(ReduceOp::Sum, root.get(), i)).collect();
            assert!(sent == expected, "broadcast from {root} n={n} {count}");
        }
    }
    group.barrier().unwrap();
}

fn check_all_types(mut group: Group) {
    check_type::<f16>(&mut group);
    check_type::<bf16>(&mut group);
    check_type::<f32>(&mut group);
    check_type::<f64>(&mut group);
    check_type::<i8>(&mut group);
    check_type::<u8>(&mut group);
    check_type::<i16>(&mut group);
    check_type::<u16>(&mut group);
    check_type::<i32>(&mut group);
    check_type::<u32>(&mut group);
    check_type::<i64>(&mut group);
    check_type::<u64>(&mut group);
    group.close();
}

#[test]
fn every_collective_is_right_for_every_type_and_reduction() {
    for n in WORLDS {
        ranks::run(n, check_all_types);
    }
}

/// Rank r contributes its distance from the middle rank, so the largest value is tied between the first and the last rank.
#[test]
fn min_loc_and_max_loc_return_the_value_with_the_lowest_index() {
    for n in WORLDS {
        ranks::run(n, move |mut group| {
            let rank = group.rank().get();
            let distance = |rank: u32| f64::from((2 * rank).abs_diff(n - 1));
            let own = vec![F64Loc::new(distance(rank), u64::from(rank)); 1000];
            let mut largest = own.clone();
            group.all_reduce(&mut largest, ReduceOp::MaxLoc).unwrap();
            assert!(largest.iter().all(|&found| found == F64Loc::new(distance(0), 0)), "n={n}");
            let mut smallest = own.clone();
            group.all_reduce(&mut smallest, ReduceOp::MinLoc).unwrap();
            let middle = (n - 1) / 2;
            assert!(smallest.iter().all(|&found| found == F64Loc::new(distance(middle), middle.into())));
            // The call is refused before anything is sent, and the group can still be used.
            let refused = group.all_reduce(&mut smallest, ReduceOp::Max);
            assert_eq!(refused, Err(Error::Unsupported { op: ReduceOp::Max, dtype: DType::F64Loc }));
            group.barrier().unwrap();
        });
    }
}

/// Each segment has 1000 bytes and a checksum. Segments do not end where chunks end.
#[test]
fn small_segments_with_checksums_give_right_results() {
    let adjust = |options: &mut JoinOptions| {
        options.segment_bytes = 1000;
        options.checksums = Checksums::On;
    };
    ranks::run_with(3, adjust, |mut group| {
        check_type::<f16>(&mut group);
        check_type::<f64>(&mut group);
        check_type::<u8>(&mut group);
    });
}

/// Sums of floats depend on their order; all ranks must still end with the same bits.
#[test]
fn results_are_bit_identical_on_every_rank() {
    for n in [2, 3, 4, 7] {
        let results = ranks::run(n, |mut group| {
            let rank = group.rank().get() as f32;
            let mut x: Vec<f32> = (0..70_001).map(|i| ((i as f32) * 0.37 + rank * 1.7).sin() * 1e3).collect();
            group.all_reduce(&mut x, ReduceOp::Sum).unwrap();
            x.into_iter().map(f32::to_bits).collect::<Vec<_>>()
        });
        assert!(results.windows(2).all(|pair| pair[0] == pair[1]), "n={n}");
    }
}

#[test]
fn compressed_sums_are_close_and_equal_on_all_ranks() {
    // The buffer has several blocks, and the last one is shorter.
    let count = (1 << 20) + 1234;
    for (compression, tolerance) in
        [(Compression::None, 1e-6), (Compression::Fp16, 2e-3), (Compression::Bf16, 2e-2)]
    {
        let results = ranks::run(3, move |mut group| {
            let rank = group.rank().get() as f32;
            let mut x: Vec<f32> = (0..count).map(|i| (i % 100) as f32 * 0.01 + rank + 1.0).collect();
            group.all_reduce_compressed(&mut x, ReduceOp::Average, compression).unwrap();
            x
        });
        assert!(results.windows(2).all(|pair| pair[0] == pair[1]), "{compression}: ranks differ");
        for (i, &x) in results[0].iter().enumerate() {
            let expected = (i % 100) as f32 * 0.01 + 2.0;
            assert!((x - expected).abs() <= tolerance * expected, "{compression} [{i}]: {x}, not {expected}");
        }
    }
}

#[test]
fn arrays_are_reduced_in_place() {
    let results = ranks::run(2, |mut group| {
        let rank = group.rank().get() as f32;
        let mut matrix = Array2::from_elem((3, 5), rank + 1.0);
        group.all_reduce(&mut matrix, ReduceOp::Sum).unwrap();
        let mut cube = Array3::from_elem((2, 2, 2), rank);
        group.broadcast(&mut cube, Rank::new(1)).unwrap();
        let mut transposed = Array2::<f32>::zeros((3, 5)).reversed_axes();
        let refused = group.all_reduce(&mut transposed, ReduceOp::Sum);
        (matrix.sum(), cube.sum(), refused)
    });
    for (matrix, cube, refused) in results {
        assert_eq!((matrix, cube), (45.0, 8.0));
        assert_eq!(refused, Err(Error::NotContiguous));
    }
}

#[test]
fn an_invalid_root_is_refused_before_anything_is_sent() {
    ranks::run(2, |mut group| {
        let refused = group.broadcast(&mut [1u8], Rank::new(2));
        assert!(matches!(refused, Err(Error::InvalidRoot { .. })));
        group.barrier().unwrap();
    });
}

/// An all-reduce counts as one operation, and its payloads, headers and control frames count as sent bytes.
#[test]
fn statistics_count_operations_and_sent_bytes() {
    let results = ranks::run(4, |mut group| {
        let before = group.statistics();
        group.all_reduce(&mut vec![1.0f32; 1_000_000], ReduceOp::Sum).unwrap();
        let after = group.statistics();
        (after.bytes_sent - before.bytes_sent, after.operations - before.operations)
    });
    // The payload is 2(n-1)/n S = 6 MB. There is a header for each of 6 x 4 segments, and one ready frame. The number of credit
    // frames depends on how much data came early, in this operation and while the group formed.
    let payload = 6_000_000;
    let headers = 6 * 4 + 1;
    let header_bytes = HEADER_BYTES as u64;
    let credits_max = payload / (CREDIT_BYTES / 2) + 1;
    for (bytes, operations) in results {
        assert_eq!(operations, 1);
        let extra = bytes.checked_sub(payload + headers * header_bytes);
        let extra = extra.unwrap_or_else(|| panic!("{bytes} bytes are too few"));
        assert!(extra.is_multiple_of(header_bytes) && extra / header_bytes <= credits_max, "{bytes} bytes");
    }
}
