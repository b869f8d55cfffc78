//! Reads numpy's arrays, in `.npy` files or in a `.npz` file: one array with features and one array with targets.
//!
//! This module does not use the crate `ndarray-npy`, because a malformed header can make that crate allocate all
//! memory or overflow the stack. Format: <https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html>.

mod element_type;
mod npz;
mod rounding;

use std::io::Read;
use std::ops::Range;
use std::path::Path;

use ndarray::{Array2, ArrayD, ShapeBuilder};

use self::element_type::ElementType;
pub(crate) use self::npz::{NpzFile, file_of_array};
pub(crate) use self::rounding::ArrayRounding;
use super::file::{checked_element_count, read_exactly, stream_error};
use super::file_digest::FileDigest;
use super::part_of_source::{PartOfSource, read_samples};
use super::sample_blocks::{BlockReader, RowOrigins, SampleBlock};
use super::skippable_reader::{DataBytes, SkippableReader};
use super::{BlocksOfRank, Column, DataError, ELEMENTS_MAX, Features, ImageShape, UninterpretedSamples};

/// The maximum length in bytes of a header. The headers that numpy writes usually have 128 bytes.
const HEADER_BYTES_MAX: u32 = 1 << 16;

/// Reads this rank's part of the rows of an array of features and of an array of targets. The features have two dimensions,
/// (rows, features), or are images: (rows, height, width) or (rows, channels, height, width). The targets have one dimension,
/// or two dimensions with a single column. The elements are integers, floating-point numbers or booleans of at most 64 bits.
/// Images of u8 are pixels from 0 to 255.
///
/// # Errors
///
/// - A file is missing, truncated, too long, or of another format or type.
/// - The rows of this rank hold NaN or infinity.
/// - The two files have different numbers of rows.
pub(crate) fn read_part_of_arrays(
    features_path: &Path,
    targets_path: &Path,
    (share, stream_directory): (BlocksOfRank, Option<&Path>),
) -> Result<PartOfSource, DataError> {
    let features = ArrayFile::open(features_path)?;
    let targets = ArrayFile::open(targets_path)?;
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
    let digests = [(features_path, &features), (targets_path, &targets)];
    let digests =
        digests.map(|(path, array)| FileDigest::of_file(file_of_array(path), &array.describe(), share));
    let digests = digests.into_iter().collect::<Result<_, _>>()?;
    let rounding = ArrayRounding::new([features_path, targets_path]);
    let is_pixels = features.element_type.is_byte() && image.is_some();
    let rows = share.range_of(rows as u64);
    let mut reader = ArrayReader { features, targets, is_pixels, rows, rounding };
    let samples = read_samples(&mut reader, stream_directory)?;
    Ok(PartOfSource { samples, image, digests, notes: Vec::new(), rounding: Some(reader.rounding) })
}

/// Reads rows of an array of features and of an array of targets block by block.
struct ArrayReader {
    features: ArrayFile,
    targets: ArrayFile,
    /// Whether the features are pixels from 0 to 255.
    is_pixels: bool,
    /// The rows that have not been read yet.
    rows: Range<u64>,
    rounding: ArrayRounding,
}

impl BlockReader for ArrayReader {
    fn read_block(&mut self, rows_max: usize) -> Result<SampleBlock, DataError> {
        let first = self.rows.start;
        self.rows.start = self.rows.end.min(first.saturating_add(rows_max as u64));
        let rows = first..self.rows.start;
        let features = self.features.read_rows(rows.clone())?;
        let targets = self.targets.read_rows(rows.clone())?;
        let [features_path, targets_path] = [&self.features.data.path, &self.targets.data.path];
        self.rounding.count_rounded_integers([&features, &targets]);
        let values = features.into_rows().map_err(|why| DataError::malformed(features_path, why))?;
        if let Some(((row, column), value)) =
            values.indexed_iter().find(|(_, value)| !(**value as f32).is_finite())
        {
            let row = first + row as u64;
            let problem =
                format!("row {row}, column {column} (both counted from 0): {value} is not a finite number");
            return Err(DataError::malformed(features_path, problem));
        }
        if let Some((row, value)) = rows.zip(&targets.values).find(|(_, value)| !value.is_finite()) {
            return Err(DataError::malformed(
                targets_path,
                format!("row {row} (counted from 0): {value} is not a finite number"),
            ));
        }
        self.rounding.add_features(&values);
        let features = if self.is_pixels {
            Features::Pixels { values: values.mapv(|value| value as u8), divisor: 255.0 }
        } else {
            Features::Numbers(values.mapv(|value| value as f32))
        };
        let samples = UninterpretedSamples { features, target: Column::Numbers(targets.values) };
        let origins = RowOrigins::Numbers(features_path.display().to_string(), first as usize);
        Ok(SampleBlock { samples, origins })
    }
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
    reader: SkippableReader,
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
            read_exactly(&mut self.reader, len, path)?
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

/// An open file of which rows are read. The header has been read.
struct ArrayFile {
    shape: Vec<u64>,
    /// Whether the elements are stored in column-major order.
    fortran_order: bool,
    element_type: ElementType,
    data: DataBytes,
}

impl ArrayFile {
    /// Opens a file, and reads its header.
    fn open(path: &Path) -> Result<Self, DataError> {
        let NpyStream { shape, fortran_order, element_type, reader } = open_npy_stream(path)?;
        let len = shape.iter().product::<u64>() * element_type.size;
        Ok(Self { shape, fortran_order, element_type, data: DataBytes::new(reader, path, len) })
    }

    /// Returns the shape, the order and the type of the elements as text.
    fn describe(&self) -> String {
        format!("{:?} {} {}", self.shape, self.fortran_order, self.element_type.name())
    }

    /// Reads the elements whose first index is in `rows`. The array must have at least one dimension, and `rows` must be in
    /// range. If the array is in column-major order, each call after the first one opens the file again.
    fn read_rows(&mut self, rows: Range<u64>) -> Result<NpyArray, DataError> {
        let Self { ref shape, fortran_order, element_type, .. } = *self;
        let (row_count, columns) = (shape[0], shape[1..].iter().product::<u64>());
        // In row-major order, the elements of the rows follow each other. In column-major order, they follow each other in each
        // column.
        let (run_count, run_stride, columns_per_run) =
            if fortran_order { (columns, row_count, 1) } else { (1, 0, columns) };
        let mut shape = shape.clone();
        shape[0] = rows.end - rows.start;
        if rows.start * columns_per_run * element_type.size < self.data.position() {
            *self = Self::open(&self.data.path)?;
        }
        let mut bytes = Vec::new();
        for run in 0..run_count {
            let start = (run * run_stride + rows.start * columns_per_run) * element_type.size;
            self.data.skip_to(start)?;
            bytes.extend(self.data.read(shape[0] * columns_per_run * element_type.size)?);
        }
        Ok(NpyArray { shape, fortran_order, element_type, values: element_type.decode(&bytes) })
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
    let header = read_header(&mut reader, path)?;
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
