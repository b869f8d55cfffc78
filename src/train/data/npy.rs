//! Reads numpy's arrays, in `.npy` files or in a `.npz` file: one array with features and one array with targets.
//!
//! This module does not use the crate `ndarray-npy`, because a malformed header can make that crate allocate all
//! memory or overflow the stack. Format: <https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html>.

mod element_type;
mod npz;

use std::io::Read;
use std::path::Path;

use ndarray::{Array2, ArrayD, ShapeBuilder};

use self::element_type::ElementType;
pub(crate) use self::npz::{NpzFile, file_of_array};
use super::file::{checked_element_count, read_exactly, stream_error};
use super::numbers::NumberRange;
use super::{
    CLASS_NUMBER_LIMIT, Column, DataError, ELEMENTS_MAX, Features, ImageShape, UninterpretedSamples,
};

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
/// single column. The elements are integers, floating-point numbers or booleans of at most 64 bits. Images of u8 are pixels
/// from 0 to 255.
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
    let mut notes: Vec<String> = [(&features, features_path), (&targets, targets_path)]
        .iter()
        .filter_map(|(array, path)| array.describe_rounded_integers(path))
        .collect();
    let is_pixels = features.element_type.is_byte() && image.is_some();
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
    notes.extend(describe_rounding(&values, features_path));
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
    element_type: ElementType,
    /// The elements in the order of the file.
    pub(crate) values: Vec<f64>,
}

impl NpyArray {
    /// Returns a message for the user if the array holds integers that [`values`](Self::values) may hold only rounded.
    fn describe_rounded_integers(&self, path: &Path) -> Option<String> {
        let is_rounded = |value: &&f64| value.abs() >= CLASS_NUMBER_LIMIT;
        let count = self.values.iter().filter(is_rounded).count();
        (self.element_type.is_wide_integer() && count > 0).then(|| {
            format!(
                "{}: {count} integers have a magnitude of 2^53 or more; ringtrain rounds them to 64-bit floating-point numbers",
                path.display()
            )
        })
    }

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
    element_type: ElementType,
    /// The elements that have not been read yet.
    reader: Box<dyn Read>,
}

impl NpyStream {
    /// Reads the next `count` elements. If `is_last`, checks that the file ends after these elements.
    pub(crate) fn read_values(
        &mut self,
        count: u64,
        is_last: bool,
        path: &Path,
    ) -> Result<Vec<f64>, DataError> {
        let len = count * self.element_type.size;
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
        Ok(self.element_type.decode(&bytes))
    }
}

/// Reads a whole array. `path` is that of [`open_npy_stream`].
pub(crate) fn read_npy_file(path: &Path) -> Result<NpyArray, DataError> {
    let mut stream = open_npy_stream(path)?;
    let count = stream.shape.iter().product();
    let values = stream.read_values(count, true, path)?;
    let NpyStream { shape, fortran_order, element_type, .. } = stream;
    Ok(NpyArray { shape, fortran_order, element_type, values })
}

/// Opens an array and reads its header. `path` is the path of a `.npy` file, or of an array in a `.npz` file: `d.npz/x.npy`.
pub(crate) fn open_npy_stream(path: &Path) -> Result<NpyStream, DataError> {
    let mut reader = npz::open_array(path)?;
    let header = read_header(&mut *reader, path)?;
    let malformed = |problem: String| DataError::malformed(path, problem);
    let description = header_from_value(&header, "descr").and_then(parse_description);
    let fortran_order =
        header_from_value(&header, "fortran_order").is_some_and(|text| text.starts_with("True"));
    let shape = header_from_value(&header, "shape").and_then(parse_shape);
    let (Some(description), Some(shape)) = (description, shape) else {
        return Err(malformed(format!("its header is not numpy's: {}", header.trim())));
    };
    let element_type = ElementType::parse(description).ok_or_else(|| {
        malformed(format!(
            "holds values of type `{description}`; save it as integers, booleans or floating-point numbers of at most 64 bits, \
             for example as float32"
        ))
    })?;
    checked_element_count(&shape, path)?;
    Ok(NpyStream { shape, fortran_order, element_type, reader })
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

/// Returns the type of the elements: a text in quotes such as `<f4`, or a list for an array of records.
fn parse_description(text: &str) -> Option<&str> {
    match text.strip_prefix(['\'', '"']) {
        Some(rest) => rest.split(['\'', '"']).next(),
        None => text.split_inclusive(']').next(),
    }
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
mod tests;
