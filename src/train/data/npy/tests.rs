use std::fs;

use ndarray::array;

use super::*;
use crate::group::Group;
use crate::train::TrainError;
use crate::train::data::HeldFeatures;
use crate::train::data::part_of_source::load_parts;
use crate::train::data::unsplit_data::UnsplitData;

/// Reads all rows of two arrays. Asserts that the rows and the errors are the same if the rows are in a temporary file.
pub(super) fn load_array_pair(features: &Path, targets: &Path) -> Result<UnsplitData, TrainError> {
    let load = |stream_directory: Option<&Path>| {
        load_parts("arrays", &mut Group::solo(), |share| {
            read_part_of_arrays(features, targets, (share, stream_directory))
        })
    };
    let directory = tempfile::tempdir().unwrap();
    let (memory, disk) = (load(None), load(Some(directory.path())));
    match (&memory, disk) {
        (Ok(memory), Ok(disk)) => {
            assert!(
                matches!(&disk.samples.features, HeldFeatures::OnDisk(held) if held.format().rows() == 0)
            );
            assert_eq!(disk.samples.features.into_memory(), memory.samples.features.clone().into_memory());
            assert_eq!(disk.samples.target, memory.samples.target);
            assert_eq!((disk.image, disk.notes), (memory.image, memory.notes.clone()));
        }
        (Err(memory), Err(disk)) => assert_eq!(disk.to_string(), memory.to_string()),
        (memory, disk) => panic!("{memory:?} {disk:?}"),
    }
    memory
}

/// Writes an array to a file. The other arguments are those of [`npy_bytes`].
fn write_npy<T: bytemuck::Pod>(path: &Path, descr: &str, order: StorageOrder, shape: &str, elements: &[T]) {
    fs::write(path, npy_bytes(descr, order, shape, elements)).unwrap();
}

/// Returns the content of a file in the same format as numpy. `shape` is a tuple in Python's notation.
pub(super) fn npy_bytes<T: bytemuck::Pod>(
    descr: &str,
    order: StorageOrder,
    shape: &str,
    elements: &[T],
) -> Vec<u8> {
    let is_fortran = if order == StorageOrder::ColumnMajor { "True" } else { "False" };
    let text = format!("{{'descr': '{descr}', 'fortran_order': {is_fortran}, 'shape': {shape}, }}");
    // The header starts at byte 10 and ends with a newline. The data starts at a multiple of 64 bytes.
    let padded = (text.len() + 11).next_multiple_of(64) - 11;
    let length = u16::try_from(padded + 1).unwrap().to_le_bytes();
    let header = format!("{text:padded$}\n");
    [&b"\x93NUMPY\x01\x00"[..], &length, header.as_bytes(), bytemuck::cast_slice(elements)].concat()
}

#[derive(Clone, Copy, PartialEq)]
pub(super) enum StorageOrder {
    RowMajor,
    ColumnMajor,
}

/// Regression test: before the fix, different numbers of a column became equal as f32 without a message.
#[test]
fn columns_in_which_rounding_hides_differences_are_named() {
    let directory = tempfile::tempdir().unwrap();
    let (x, y) = (directory.path().join("x.npy"), directory.path().join("y.npy"));
    write_npy(&y, "<i8", StorageOrder::RowMajor, "(2,)", &[7_i64, -8]);
    for (order, values) in [
        (StorageOrder::RowMajor, [1.0, 1.7e9, 3.0, 2.0, 1.7e9 + 1.0, 4.0]),
        (StorageOrder::ColumnMajor, [1.0, 2.0, 1.7e9, 1.7e9 + 1.0, 3.0, 4.0]),
    ] {
        write_npy(&x, "<f8", order, "(2, 3)", &values);
        let notes = load_array_pair(&x, &y).unwrap().notes;
        assert!(notes.len() == 1 && notes[0].contains("x.npy, column 1 (counted from 0)"), "{notes:?}");
    }
}

#[test]
fn files_in_the_format_of_numpy_are_read() {
    let directory = tempfile::tempdir().unwrap();
    let (x, y) = (directory.path().join("x.npy"), directory.path().join("y.npy"));
    let values = array![[1.0_f32, 2.0, 3.0], [4.0, 5.0, 6.0]];
    write_npy(&y, "<i8", StorageOrder::RowMajor, "(2,)", &[7_i64, -8]);
    let load_x = || {
        let UnsplitData { samples, image, notes, .. } = load_array_pair(&x, &y).unwrap();
        assert!(notes.is_empty() && image.is_none(), "{notes:?}");
        assert_eq!(samples.target, Column::Numbers(vec![7.0, -8.0]));
        assert_eq!(samples.features.into_memory(), Features::Numbers(values.clone()));
    };
    write_npy(&x, "<f4", StorageOrder::RowMajor, "(2, 3)", &[1.0_f32, 2.0, 3.0, 4.0, 5.0, 6.0]);
    load_x();
    write_npy(&x, "<f8", StorageOrder::ColumnMajor, "(2, 3)", &[1.0_f64, 4.0, 2.0, 5.0, 3.0, 6.0]);
    load_x();
    write_npy(&x, "|u1", StorageOrder::RowMajor, "(2, 3)", &[1_u8, 2, 3, 4, 5, 6]);
    load_x();
    write_npy(&x, "<i4", StorageOrder::RowMajor, "(2, 3)", &[1_i32, 2, 3, 4, 5, 6]);
    load_x();
    write_npy(&x, ">u2", StorageOrder::RowMajor, "(2, 3)", &[1_u16, 2, 3, 4, 5, 6].map(u16::to_be));
    load_x();
}

/// Regression test: before the fix, 2^53 and 2^53 + 1 became equal without a message.
#[test]
fn integers_that_are_rounded_are_counted() {
    let directory = tempfile::tempdir().unwrap();
    let (x, y) = (directory.path().join("x.npy"), directory.path().join("y.npy"));
    write_npy(&y, "<u8", StorageOrder::RowMajor, "(2,)", &[5_u64, 1 << 60]);
    for (descr, values, expected) in [
        ("<i8", [-(1_i64 << 53), (1 << 53) + 1], &["x.npy: 2 integers", "y.npy: 1 integer "][..]),
        ("<u8", [(1 << 53) - 1, -1], &["x.npy: 1 integer ", "y.npy: 1 integer "]),
        // These bytes are two small floating-point numbers.
        ("<f8", [1 << 53, 1 << 54], &["y.npy: 1 integer "]),
    ] {
        write_npy(&x, descr, StorageOrder::RowMajor, "(2, 1)", &values);
        let notes = load_array_pair(&x, &y).unwrap().notes;
        let found: Vec<&String> = notes.iter().filter(|note| note.contains("magnitude of 2^53")).collect();
        assert_eq!(found.len(), expected.len(), "{descr}: {notes:?}");
        assert!(found.iter().zip(expected).all(|(note, expected)| note.contains(expected)), "{notes:?}");
    }
}

#[test]
fn arrays_of_three_or_four_dimensions_are_images() {
    let directory = tempfile::tempdir().unwrap();
    let (x, y) = (directory.path().join("x.npy"), directory.path().join("y.npy"));
    write_npy(&y, "<i8", StorageOrder::RowMajor, "(2,)", &[7_i64, -8]);
    let pixels: Vec<u8> = (0..12).collect();
    // In column-major order, element (i, j, k) of an array of shape (2, 2, 3) is at index i + 2 j + 4 k.
    let by_columns: Vec<u8> = [0, 6, 3, 9, 1, 7, 4, 10, 2, 8, 5, 11].into();
    for (shape, order, bytes, channels, height) in [
        ("(2, 2, 3)", StorageOrder::RowMajor, &pixels, 1, 2),
        ("(2, 2, 3)", StorageOrder::ColumnMajor, &by_columns, 1, 2),
        ("(2, 2, 1, 3)", StorageOrder::RowMajor, &pixels, 2, 1),
    ] {
        write_npy(&x, "|u1", order, shape, bytes);
        let UnsplitData { samples, image, .. } = load_array_pair(&x, &y).unwrap();
        assert_eq!(image, Some(ImageShape { channels, height, width: 3 }));
        let values = Array2::from_shape_vec((2, 6), pixels.clone()).unwrap();
        assert_eq!(samples.features.into_memory(), Features::Pixels { values, divisor: 255.0 });
    }
    write_npy(&x, "<f4", StorageOrder::RowMajor, "(2, 1, 2)", &[1.0_f32, 2.0, 3.0, 4.0]);
    let loaded = load_array_pair(&x, &y).unwrap();
    assert_eq!(loaded.samples.features.into_memory(), Features::Numbers(array![[1.0, 2.0], [3.0, 4.0]]));
    assert_eq!(loaded.image, Some(ImageShape { channels: 1, height: 1, width: 2 }));
}

#[test]
fn bad_files_cause_errors_that_name_the_file() {
    let directory = tempfile::tempdir().unwrap();
    let (x, y) = (directory.path().join("x.npy"), directory.path().join("y.npy"));
    write_npy(&y, "<f8", StorageOrder::RowMajor, "(2,)", &[1.0_f64, 2.0]);
    write_npy(&x, "<f4", StorageOrder::RowMajor, "(2, 1)", &[1.0_f32, 2.0]);
    let full = fs::read(&x).unwrap();
    let text = String::from_utf8_lossy(&full).into_owned();
    let edit = |from: &str, to: &str| {
        assert!(text.contains(from), "{text}");
        let position = full.windows(from.len()).position(|window| window == from.as_bytes()).unwrap();
        let mut bytes = full.clone();
        bytes.splice(position..position + from.len(), to.bytes());
        bytes
    };
    let mut cases: Vec<(Vec<u8>, &str)> =
        (0..full.len()).map(|len| (full[..len].to_vec(), "truncated")).collect();
    cases.push(([full.as_slice(), &[0]].concat(), "holds more"));
    cases.push((edit("<f4", "<c8"), "values of type `<c8`; save it as"));
    cases.push((edit("'<f4'", "[('<f4', 'O')]"), "values of type `[('<f4', 'O')]`; save it as"));
    cases.push((edit("(2, 1)", "(9**9)"), "not numpy's"));
    cases.push((edit("(2, 1), }", "(9999999"), "not numpy's"));
    cases.push((edit("NUMPY", "numpy"), "not a .npy"));
    for (bytes, expected) in cases {
        fs::write(&x, &bytes).unwrap();
        let error = load_array_pair(&x, &y).unwrap_err().to_string();
        assert!(error.contains(expected) && error.contains("x.npy"), "{error} / {expected}");
    }
    write_npy(&x, "<f4", StorageOrder::RowMajor, "(2, 1)", &[1.0_f32, f32::NAN]);
    assert!(load_array_pair(&x, &y).unwrap_err().to_string().contains("row 1, column 0"));
    write_npy(&x, "<f4", StorageOrder::RowMajor, "(2,)", &[0.0_f32; 2]);
    assert!(load_array_pair(&x, &y).unwrap_err().to_string().contains("two dimensions"));
    write_npy(&x, "<f4", StorageOrder::RowMajor, "(3, 1)", &[1.0_f32, 2.0, 3.0]);
    assert!(load_array_pair(&x, &y).unwrap_err().to_string().contains("2 targets for the 3 rows"));
}
