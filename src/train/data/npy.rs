//! Reads numpy's `.npy` files: one file with features and one file with targets.
//!
//! This module does not use the crate `ndarray-npy`, because a malformed header can make that crate allocate all
//! memory or overflow the stack. Format: <https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html>.

use std::io::Read;
use std::path::Path;

use ndarray::{Array2, ArrayD, ShapeBuilder};

use super::file::{checked_element_count, open_data_file, read_exactly, stream_error};
use super::numbers::NumberRange;
use super::{Column, DataError, ELEMENTS_MAX, Features, ImageShape, UninterpretedSamples};

/// The maximum length in bytes of a header. The headers that numpy writes usually have 128 bytes.
const HEADER_BYTES_MAX: u32 = 1 << 16;

/// A message about rounded numbers names at most this many columns of the data.
const ROUNDED_COLUMNS_SHOWN_MAX: usize = 8;

/// The content of a file of features and a file of targets.
#[derive(Debug)]
pub(crate) struct NpyDataset {
    pub(crate) samples: UninterpretedSamples,
    /// The shape of the images. `None` if the samples are not images.
    pub(crate) image: Option<ImageShape>,
    /// Messages for the user.
    pub(crate) notes: Vec<String>,
}

/// Reads an array of features and an array of targets. The features have two dimensions, (rows, features), or are images:
/// (rows, height, width) or (rows, channels, height, width). The targets have one dimension, or two dimensions with a
/// single column. The element types f32, f64, i32, i64 and u8 are supported. Images of u8 are pixels from 0 to 255.
///
/// # Errors
///
/// - A file is missing, truncated, too long, or of another format or type.
/// - A file holds NaN or infinity.
/// - The two files have different numbers of rows.
pub(crate) fn load_array_pair(features_path: &Path, targets_path: &Path) -> Result<NpyDataset, DataError> {
    let features = read_npy_file(features_path)?;
    let targets = read_npy_file(targets_path)?;
    let FeatureShape { rows, image, .. } =
        FeatureShape::new(&features.shape).map_err(|why| DataError::malformed(features_path, why))?;
    if !matches!(targets.shape.as_slice(), [_] | [_, 1]) {
        let problem = format!("has shape {:?}; targets need one dimension, (rows,)", targets.shape);
        return Err(DataError::malformed(targets_path, problem));
    }
    if targets.shape[0] != rows as u64 {
        let problem =
            format!("holds {} targets for the {rows} rows of {}", targets.shape[0], features_path.display());
        return Err(DataError::malformed(targets_path, problem));
    }
    let is_pixels = features.is_bytes && image.is_some();
    let values = features.into_rows().map_err(|why| DataError::malformed(features_path, why))?;
    if let Some(((row, column), value)) =
        values.indexed_iter().find(|(_, value)| !(**value as f32).is_finite())
    {
        let problem =
            format!("row {row}, column {column} (both counted from 0): {value} is not a finite number");
        return Err(DataError::malformed(features_path, problem));
    }
    if let Some((row, value)) = targets.values.iter().enumerate().find(|(_, value)| !value.is_finite()) {
        return Err(DataError::malformed(
            targets_path,
            format!("row {row} (counted from 0): {value} is not a finite number"),
        ));
    }
    let notes = describe_rounding(&values, features_path).into_iter().collect();
    let features = if is_pixels {
        Features::Pixels { values: values.mapv(|value| value as u8), divisor: 255.0 }
    } else {
        Features::Numbers(values.mapv(|value| value as f32))
    };
    let samples = UninterpretedSamples { features, target: Column::Numbers(targets.values) };
    Ok(NpyDataset { samples, image, notes })
}

/// The shape of an array of features.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct FeatureShape {
    pub(crate) rows: usize,
    /// The number of features of a row.
    pub(crate) columns: usize,
    /// The shape of the images. `None` if the rows are not images.
    pub(crate) image: Option<ImageShape>,
}

impl FeatureShape {
    /// Interprets the shape of an array.
    ///
    /// # Errors
    ///
    /// A text that says which shapes are possible.
    pub(crate) fn new(shape: &[u64]) -> Result<Self, String> {
        // A length of 0 counts as 1, so that a shape such as (0, 2^40, 2^40) is refused.
        let count = shape.iter().try_fold(1_u64, |count, &length| count.checked_mul(length.max(1)));
        if count.is_none_or(|count| count > ELEMENTS_MAX) {
            return Err(format!("has shape {shape:?}; the limit is {ELEMENTS_MAX} elements"));
        }
        let image = |channels: u64, height: u64, width: u64| ImageShape {
            channels: channels as usize,
            height: height as usize,
            width: width as usize,
        };
        let (columns, image) = match *shape {
            [_, columns] => (columns as usize, None),
            [_, height, width] => ((height * width) as usize, Some(image(1, height, width))),
            [_, channels, height, width] => {
                ((channels * height * width) as usize, Some(image(channels, height, width)))
            }
            _ => {
                return Err(format!(
                    "has shape {shape:?}; features need two dimensions, (rows, features), and images three or four, (rows, \
                     height, width) or (rows, channels, height, width)"
                ));
            }
        };
        Ok(Self { rows: shape[0] as usize, columns, image })
    }
}

/// Returns a message for the user that names the columns whose differences f32 cannot represent.
fn describe_rounding(values: &Array2<f64>, path: &Path) -> Option<String> {
    let mut ranges = vec![NumberRange::EMPTY; values.ncols()];
    for row in values.rows() {
        ranges.iter_mut().zip(row).for_each(|(range, &value)| range.add(value));
    }
    let rounded = ranges.iter().enumerate().filter(|(_, range)| range.needs_f64());
    let columns: Vec<String> = rounded.map(|(column, _)| column.to_string()).collect();
    let shown =
        columns.iter().take(ROUNDED_COLUMNS_SHOWN_MAX).map(String::as_str).collect::<Vec<_>>().join(", ");
    let more = if columns.len() > ROUNDED_COLUMNS_SHOWN_MAX { ", ..." } else { "" };
    (!columns.is_empty()).then(|| {
        format!(
            "{}, column {shown}{more} (counted from 0): large numbers that differ little lose their differences as 32-bit \
             floating-point numbers; subtract a constant, such as the mean, from the column before you save the array",
            path.display()
        )
    })
}

/// An array that was read from a file.
pub(crate) struct NpyArray {
    pub(crate) shape: Vec<u64>,
    /// Whether the elements are stored in column-major order.
    pub(crate) fortran_order: bool,
    /// Whether the elements of the file are bytes.
    pub(crate) is_bytes: bool,
    /// The elements in the order of the file.
    pub(crate) values: Vec<f64>,
}

impl NpyArray {
    /// Returns the features as a matrix (rows x features).
    ///
    /// # Errors
    ///
    /// The errors of [`FeatureShape::new`].
    pub(crate) fn into_rows(self) -> Result<Array2<f64>, String> {
        let FeatureShape { rows, columns, .. } = FeatureShape::new(&self.shape)?;
        let lengths: Vec<usize> = self.shape.iter().map(|&length| length as usize).collect();
        let array = ArrayD::from_shape_vec(lengths.set_f(self.fortran_order), self.values)
            .expect("the length was checked against the header");
        let array = array.as_standard_layout().into_owned();
        Ok(array.into_shape_with_order((rows, columns)).expect("the number of elements stays the same"))
    }
}

/// An open file whose header has been read.
pub(crate) struct NpyStream {
    pub(crate) shape: Vec<u64>,
    /// Whether the elements are stored in column-major order.
    pub(crate) fortran_order: bool,
    /// The type of the elements, as numpy names it, such as `<f4`.
    element_type: String,
    /// The elements that have not been read yet.
    reader: Box<dyn Read>,
}

impl NpyStream {
    /// Returns the size of an element in bytes.
    fn element_bytes(&self) -> u64 {
        match self.element_type.as_str() {
            "|u1" => 1,
            "<f4" | "<i4" => 4,
            _ => 8,
        }
    }

    /// Reads the next `count` elements. If `is_last`, checks that the file ends after these elements.
    pub(crate) fn read_values(
        &mut self,
        count: u64,
        is_last: bool,
        path: &Path,
    ) -> Result<Vec<f64>, DataError> {
        let len = count * self.element_bytes();
        let bytes = if is_last {
            read_exactly(&mut *self.reader, len, path)?
        } else {
            let mut bytes = Vec::new();
            (&mut self.reader)
                .take(len)
                .read_to_end(&mut bytes)
                .map_err(|error| stream_error(path, error))?;
            if (bytes.len() as u64) < len {
                let shape = &self.shape;
                let problem = format!("is truncated: it ends before the last element of the shape {shape:?}");
                return Err(DataError::malformed(path, problem));
            }
            bytes
        };
        Ok(match self.element_type.as_str() {
            "|u1" => bytes.iter().map(|&byte| f64::from(byte)).collect(),
            "<f4" => decode_values(&bytes, |bytes| f64::from(f32::from_le_bytes(bytes))),
            "<i4" => decode_values(&bytes, |bytes| f64::from(i32::from_le_bytes(bytes))),
            "<i8" => decode_values(&bytes, |bytes| i64::from_le_bytes(bytes) as f64),
            _ => decode_values(&bytes, f64::from_le_bytes),
        })
    }
}

/// Reads an array from a file.
pub(crate) fn read_npy_file(path: &Path) -> Result<NpyArray, DataError> {
    let mut stream = open_npy_stream(path)?;
    let count = stream.shape.iter().product();
    let values = stream.read_values(count, true, path)?;
    let NpyStream { shape, fortran_order, element_type, .. } = stream;
    Ok(NpyArray { shape, fortran_order, is_bytes: element_type == "|u1", values })
}

/// Opens a file and reads its header.
pub(crate) fn open_npy_stream(path: &Path) -> Result<NpyStream, DataError> {
    let mut reader = open_data_file(path)?;
    let header = read_header(&mut *reader, path)?;
    let malformed = |problem: String| DataError::malformed(path, problem);
    let description = header_from_value(&header, "descr").and_then(|text| text.split(['\'', '"']).nth(1));
    let fortran_order =
        header_from_value(&header, "fortran_order").is_some_and(|text| text.starts_with("True"));
    let shape = header_from_value(&header, "shape").and_then(parse_shape);
    let (Some(description), Some(shape)) = (description, shape) else {
        return Err(malformed(format!("its header is not numpy's: {}", header.trim())));
    };
    if !["|u1", "<f4", "<i4", "<f8", "<i8"].contains(&description) {
        let problem = format!(
            "holds values of type `{description}`; save it as float32, float64, int32, int64 or uint8"
        );
        return Err(malformed(problem));
    }
    checked_element_count(&shape, path)?;
    Ok(NpyStream { element_type: description.to_owned(), shape, fortran_order, reader })
}

/// Converts the bytes of elements to f64. `decode` converts the bytes of one element.
fn decode_values<const N: usize>(bytes: &[u8], decode: impl Fn([u8; N]) -> f64) -> Vec<f64> {
    bytes.as_chunks::<N>().0.iter().map(|&bytes| decode(bytes)).collect()
}

/// Returns the header, which is the text of a Python dictionary. After the call, the reader is at the start of the data.
fn read_header(reader: &mut dyn Read, path: &Path) -> Result<String, DataError> {
    let mut read_bytes = |len: usize| {
        let mut bytes = vec![0; len];
        reader.read_exact(&mut bytes).map(|()| bytes).map_err(|error| match error.kind() {
            std::io::ErrorKind::UnexpectedEof => {
                DataError::malformed(path, "is truncated: it ends within its header")
            }
            _ => stream_error(path, error),
        })
    };
    if read_bytes(6)? != b"\x93NUMPY" {
        return Err(DataError::malformed(path, "is not a .npy file"));
    }
    let len = match read_bytes(2)?[0] {
        1 => read_bytes(2)?.iter().rev().fold(0, |len, &byte| len << 8 | u32::from(byte)),
        2 | 3 => read_bytes(4)?.iter().rev().fold(0, |len, &byte| len << 8 | u32::from(byte)),
        version => return Err(DataError::malformed(path, format!("has the unknown .npy version {version}"))),
    };
    if len > HEADER_BYTES_MAX {
        let problem = format!("its header is {len} bytes long; the limit is {HEADER_BYTES_MAX}");
        return Err(DataError::malformed(path, problem));
    }
    String::from_utf8(read_bytes(len as usize)?)
        .map_err(|_| DataError::malformed(path, "its header is not text"))
}

/// Returns the rest of the header from the value of `key` on.
fn header_from_value<'a>(header: &'a str, key: &str) -> Option<&'a str> {
    ['\'', '"'].iter().find_map(|quote| {
        let (_, rest) = header.split_once(&format!("{quote}{key}{quote}"))?;
        rest.trim_start().strip_prefix(':').map(str::trim_start)
    })
}

/// Parses a tuple of lengths, such as `(3, 4)` or `(3,)`.
fn parse_shape(text: &str) -> Option<Vec<u64>> {
    let (inner, _) = text.strip_prefix('(')?.split_once(')')?;
    inner
        .split(',')
        .map(str::trim)
        .filter(|length| !length.is_empty())
        .map(|length| length.parse().ok())
        .collect()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use ndarray::array;

    use super::*;

    /// Writes a file in the same format as numpy. `shape` is a tuple in Python's notation.
    fn write_npy<T: bytemuck::Pod>(
        path: &Path,
        descr: &str,
        order: StorageOrder,
        shape: &str,
        elements: &[T],
    ) {
        let is_fortran = if order == StorageOrder::ColumnMajor { "True" } else { "False" };
        let text = format!("{{'descr': '{descr}', 'fortran_order': {is_fortran}, 'shape': {shape}, }}");
        // The header starts at byte 10 and ends with a newline. The data starts at a multiple of 64 bytes.
        let padded = (text.len() + 11).next_multiple_of(64) - 11;
        let length = u16::try_from(padded + 1).unwrap().to_le_bytes();
        let header = format!("{text:padded$}\n");
        let parts = [&b"\x93NUMPY\x01\x00"[..], &length, header.as_bytes(), bytemuck::cast_slice(elements)];
        fs::write(path, parts.concat()).unwrap();
    }

    #[derive(Clone, Copy, PartialEq)]
    enum StorageOrder {
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
            let NpyDataset { samples, image, notes } = load_array_pair(&x, &y).unwrap();
            assert!(notes.is_empty() && image.is_none(), "{notes:?}");
            assert_eq!(samples.target, Column::Numbers(vec![7.0, -8.0]));
            assert_eq!(samples.features, Features::Numbers(values.clone()));
        };
        write_npy(&x, "<f4", StorageOrder::RowMajor, "(2, 3)", &[1.0_f32, 2.0, 3.0, 4.0, 5.0, 6.0]);
        load_x();
        write_npy(&x, "<f8", StorageOrder::ColumnMajor, "(2, 3)", &[1.0_f64, 4.0, 2.0, 5.0, 3.0, 6.0]);
        load_x();
        write_npy(&x, "|u1", StorageOrder::RowMajor, "(2, 3)", &[1_u8, 2, 3, 4, 5, 6]);
        load_x();
        write_npy(&x, "<i4", StorageOrder::RowMajor, "(2, 3)", &[1_i32, 2, 3, 4, 5, 6]);
        load_x();
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
            let NpyDataset { samples, image, .. } = load_array_pair(&x, &y).unwrap();
            assert_eq!(image, Some(ImageShape { channels, height, width: 3 }));
            let values = Array2::from_shape_vec((2, 6), pixels.clone()).unwrap();
            assert_eq!(samples.features, Features::Pixels { values, divisor: 255.0 });
        }
        write_npy(&x, "<f4", StorageOrder::RowMajor, "(2, 1, 2)", &[1.0_f32, 2.0, 3.0, 4.0]);
        let loaded = load_array_pair(&x, &y).unwrap();
        assert_eq!(loaded.samples.features, Features::Numbers(array![[1.0, 2.0], [3.0, 4.0]]));
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
        cases.push((edit("<f4", ">f4"), "values of type `>f4`"));
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
}
