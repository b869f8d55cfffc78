//! Tests of collectives of values with an index (`MinLoc` and `MaxLoc`), arrays, refused arguments,
//! statistics and page faults.

use crate::messages::CREDIT_BYTES;
use crate::util::ranks::{self, TestTransport};
use ndarray::{Array2, Array3};
use ringtrain::verbs::AllToAll;
use ringtrain::wire::frame::HEADER_BYTES;
use ringtrain::{DType, Error, F64Loc, Rank, ReduceOp};

const WORLD_SIZES: [u32; 6] = [1, 2, 3, 4, 5, 8];

/// Rank r contributes its distance from the middle rank, so the first and the last rank both contribute the
/// largest value.
#[test]
fn min_loc_and_max_loc_return_the_value_with_the_lowest_index() {
    for n in WORLD_SIZES {
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
            // The call fails before it sends data, so the group can still be used.
            let refused = group.all_reduce(&mut smallest, ReduceOp::Max);
            assert_eq!(refused, Err(Error::Unsupported { op: ReduceOp::Max, dtype: DType::F64Loc }));
            group.barrier().unwrap();
        });
    }
}

#[test]
fn contiguous_arrays_are_reduced_in_place_and_others_refused() {
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
    // Each rank sends 2(n-1) = 6 chunks of 1 MB. Each chunk has 4 segments of at most 256 KiB, and each segment has a
    // header. Each rank also sends one ready frame, and any number of credit frames. The number of credit frames
    // depends on how many bytes arrived before this rank was ready for them.
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

/// Returns the number of page faults of this thread so far.
fn page_faults() -> u64 {
    let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
    let (_, fields) = stat.rsplit_once(") ").unwrap();
    fields.split(' ').nth(7).unwrap().parse().unwrap()
}

/// Regression test: before the fix, the all-to-all copied both buffers through new memory, and most of its time was
/// spent in page faults.
#[test]
fn an_all_to_all_between_two_buffers_uses_no_new_memory() {
    let bytes = 4 << 20;
    for transport in TestTransport::ALL {
        let faults = transport.run(2, move |mut group| {
            let (input, mut output) = (vec![1u8; bytes], vec![2u8; bytes]);
            let before = page_faults();
            group.call(AllToAll::new()).run_into(&input, &mut output).unwrap();
            assert_eq!(output, input);
            page_faults() - before
        });
        // Some page faults are needed to map the shared memory. If the all-to-all copied both buffers, there would be
        // twice as many page faults as this limit allows.
        let faults_max = (bytes / rustix::param::page_size()) as u64;
        assert!(
            faults.iter().all(|&count| count < faults_max),
            "{transport:?}: {faults:?}, not below {faults_max}"
        );
    }
}
