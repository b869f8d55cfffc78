//! Reads IDX files, the format of MNIST and similar data. A file consists of a magic number, the lengths of the dimensions, and
//! the data bytes.

use std::io::Read;
use std::ops::Range;
use std::path::{Path, PathBuf};

use ndarray::Array2;

use super::file::{checked_element_count, stream_error};
use super::file_digest::FileDigest;
use super::part_of_source::{PartOfSource, load_parts, read_samples};
use super::sample_blocks::{BlockReader, RowOrigins, SampleBlock};
use super::skippable_reader::{DataBytes, SkippableReader};
use super::unsplit_data::UnsplitData;
use super::{BlocksOfRank, Column, DataError, Features, ImageShape, UninterpretedSamples};
use crate::group::Group;
use crate::train::TrainError;

/// The magic number of images: two zero bytes, 8 for the type `unsigned byte`, and the number of dimensions.
const IMAGES_MAGIC: u32 = 0x0000_0803;
/// The magic number of labels.
const LABELS_MAGIC: u32 = 0x0000_0801;

/// Loads the training and the test set from a directory with the four files `{train,t10k}-{images-idx3,labels-idx1}-ubyte`. The
/// name of each file may end in `.gz`, and may have `.` instead of `-` before `idx`. If there is a `stream_directory`, the images
/// are in temporary files in this directory. All ranks must call this function.
///
/// # Errors
///
/// If a file is missing, truncated, too long or of another format, if the numbers of images and labels differ, or if the
/// training images and the test images have different shapes.
pub(crate) fn load_idx_directory(
    directory: &Path,
    stream_directory: Option<&Path>,
    group: &mut Group,
) -> Result<(UnsplitData, UnsplitData), TrainError> {
    let name = directory.display().to_string();
    let mut load =
        |set| load_parts(&name, group, |share| read_part_of_set(directory, set, (share, stream_directory)));
    let (train, test) = (load(IdxSet::Train)?, load(IdxSet::Test)?);
    if train.image != test.image {
        let size = |set: &UnsplitData| set.image.map_or_else(String::new, |shape| shape.to_string());
        let problem = format!(
            "training images have the shape {}, but test images have the shape {} (channels x height x width)",
            size(&train),
            size(&test)
        );
        return Err(DataError::malformed(directory, problem).into());
    }
    Ok((train, test))
}

/// Reads this rank's part of the images and the labels of a set.
fn read_part_of_set(
    directory: &Path,
    set: IdxSet,
    (share, stream_directory): (BlocksOfRank, Option<&Path>),
) -> Result<PartOfSource, DataError> {
    let mut reader = IdxReader::open(directory, set)?;
    let shape = format!("{} {}", reader.rows, reader.shape);
    let images = FileDigest::of_file(&reader.images.data.path, &shape, share)?;
    let labels = FileDigest::of_file(&reader.labels.data.path, &shape, share)?;
    reader.restrict_to_rows(share.range_of(reader.rows as u64))?;
    let samples = read_samples(&mut reader, stream_directory)?;
    let digests = vec![images, labels];
    Ok(PartOfSource { samples, image: Some(reader.shape), digests, notes: Vec::new(), rounding: None })
}

/// A set of images with labels in a directory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum IdxSet {
    Train,
    Test,
}

impl IdxSet {
    /// Returns the first part of the names of the set's files.
    fn name(self) -> &'static str {
        match self {
            Self::Train => "train",
            Self::Test => "t10k",
        }
    }
}

/// Reads the images and the labels of a set block by block.
pub(crate) struct IdxReader {
    /// The name of the data in errors.
    name: String,
    images: IdxFile,
    labels: IdxFile,
    shape: ImageShape,
    /// The number of images before the end of the part that is read.
    rows: usize,
    /// The number of images that have been read or skipped.
    rows_read: usize,
}

impl IdxReader {
    /// Opens the two files of a set, and reads their headers.
    ///
    /// # Errors
    ///
    /// If a file is missing or of another format, if there are no images, or if the numbers of images and labels differ.
    pub(crate) fn open(directory: &Path, set: IdxSet) -> Result<Self, DataError> {
        let images = IdxFile::open(&find_file(directory, set.name(), "images", 3)?, IMAGES_MAGIC)?;
        let labels = IdxFile::open(&find_file(directory, set.name(), "labels", 1)?, LABELS_MAGIC)?;
        let [rows, height, width] = images.shape.map(|length| length as usize);
        let shape = ImageShape { channels: 1, height, width };
        if rows == 0 || shape.value_count() == 0 {
            return Err(DataError::malformed(&images.data.path, "holds no images"));
        }
        if labels.shape != [rows as u64, 1, 1] {
            let problem = format!(
                "holds {} labels for the {rows} images of {}",
                labels.shape[0],
                images.data.path.display()
            );
            return Err(DataError::malformed(&labels.data.path, problem));
        }
        Ok(Self { name: directory.display().to_string(), images, labels, shape, rows, rows_read: 0 })
    }

    /// Returns the shape of the images.
    pub(crate) fn image_shape(&self) -> ImageShape {
        self.shape
    }

    /// Skips the images and the labels before `range`. Later calls read only the images and labels in `range`.
    fn restrict_to_rows(&mut self, range: Range<u64>) -> Result<(), DataError> {
        (self.rows_read, self.rows) = (range.start as usize, range.end as usize);
        self.images.data.skip_to(range.start * self.shape.value_count() as u64)?;
        self.labels.data.skip_to(range.start)
    }
}

impl BlockReader for IdxReader {
    fn read_block(&mut self, rows_max: usize) -> Result<SampleBlock, DataError> {
        let origins = RowOrigins::Numbers(self.name.clone(), self.rows_read);
        let rows = rows_max.min(self.rows - self.rows_read);
        let pixels = self.shape.value_count();
        let images = self.images.data.read((rows * pixels) as u64)?;
        let labels = self.labels.data.read(rows as u64)?;
        self.rows_read += rows;
        let values = Array2::from_shape_vec((rows, pixels), images).expect("`rows * pixels` bytes were read");
        let samples = UninterpretedSamples {
            features: Features::Pixels { values, divisor: 255.0 },
            target: Column::Numbers(labels.into_iter().map(f64::from).collect()),
        };
        Ok(SampleBlock { samples, origins })
    }
}

/// Returns the path of the file with the images (`kind` is `images`) or the labels (`kind` is `labels`) of a set: see
/// [`load_images_and_labels`]. `dimensions` is the number after `idx` in the name.
fn find_file(directory: &Path, set_name: &str, kind: &str, dimensions: u32) -> Result<PathBuf, DataError> {
    let names = ['-', '.'].map(|dot| format!("{set_name}-{kind}{dot}idx{dimensions}-ubyte"));
    let found = names.iter().flat_map(|name| [directory.join(name), directory.join(format!("{name}.gz"))]);
    found.into_iter().find(|path| path.exists()).ok_or_else(|| {
        if let Err(error) = std::fs::metadata(directory) {
            return DataError::unreadable(directory, error);
        }
        let problem = format!("has no {} or {0}.gz; MNIST and Fashion-MNIST have four such files", names[0]);
        DataError::malformed(directory, problem)
    })
}

/// An IDX file whose header has been read.
struct IdxFile {
    /// The lengths of the dimensions. Labels have one dimension, and here two more dimensions of length 1.
    shape: [u64; 3],
    data: DataBytes,
}

impl IdxFile {
    /// Opens a file, and reads its header.
    fn open(path: &Path, magic_wanted: u32) -> Result<Self, DataError> {
        let mut reader = SkippableReader::open(path)?;
        let magic = read_u32(&mut reader, path)?;
        if magic != magic_wanted {
            let problem = format!(
                "is not the IDX file that its name indicates: it starts with {magic:#010x} instead of {magic_wanted:#010x}"
            );
            return Err(DataError::malformed(path, problem));
        }
        let mut shape = [1_u64; 3];
        for length in shape.iter_mut().take((magic & 0xff) as usize) {
            *length = u64::from(read_u32(&mut reader, path)?);
        }
        let len = checked_element_count(&shape, path)?;
        Ok(Self { shape, data: DataBytes::new(reader, path, len) })
    }
}

fn read_u32(reader: &mut dyn Read, path: &Path) -> Result<u32, DataError> {
    let mut bytes = [0; 4];
    reader.read_exact(&mut bytes).map_err(|error| match error.kind() {
        std::io::ErrorKind::UnexpectedEof => {
            DataError::malformed(path, "is truncated: it ends within its header")
        }
        _ => stream_error(path, error),
    })?;
    Ok(u32::from_be_bytes(bytes))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Write;

    use flate2::Compression;
    use flate2::write::GzEncoder;

    use super::*;

    fn load(directory: &Path) -> Result<(UnsplitData, UnsplitData), TrainError> {
        load_idx_directory(directory, None, &mut Group::solo())
    }

    /// Returns the content of an IDX file.
    fn idx_file(magic: u32, shape: &[u32], data: &[u8]) -> Vec<u8> {
        let header = std::iter::once(&magic).chain(shape).flat_map(|word| word.to_be_bytes());
        header.chain(data.iter().copied()).collect()
    }

    /// Returns the content of an IDX file with two images.
    fn images_file() -> Vec<u8> {
        idx_file(IMAGES_MAGIC, &[2, 2, 3], &[0, 255, 0, 51, 0, 0, 1, 2, 3, 4, 5, 6])
    }

    /// Creates a directory with valid training and test sets.
    fn data_directory() -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        for part in ["train", "t10k"] {
            fs::write(directory.path().join(format!("{part}-images-idx3-ubyte")), images_file()).unwrap();
            let labels = idx_file(LABELS_MAGIC, &[2], &[7, 3]);
            fs::write(directory.path().join(format!("{part}-labels.idx1-ubyte")), labels).unwrap();
        }
        directory
    }

    #[test]
    fn plain_and_compressed_files_give_the_same_features() {
        let directory = data_directory();
        let (train, test) = load(directory.path()).unwrap();
        assert_eq!(train.image, Some(ImageShape { channels: 1, height: 2, width: 3 }));
        let [train, test] = [train, test].map(|set| set.samples.features.into_memory());
        assert_eq!(train, test);
        assert_eq!((train.rows(), train.columns()), (2, 6));
        let plain = directory.path().join("train-images-idx3-ubyte");
        let file = fs::File::create(directory.path().join("train-images-idx3-ubyte.gz")).unwrap();
        let mut encoder = GzEncoder::new(file, Compression::fast());
        encoder.write_all(&images_file()).unwrap();
        encoder.finish().unwrap();
        fs::remove_file(plain).unwrap();
        assert_eq!(load(directory.path()).unwrap().0.samples.features.into_memory(), train);
        fs::remove_file(directory.path().join("t10k-labels.idx1-ubyte")).unwrap();
        let error = load(directory.path()).unwrap_err().to_string();
        assert!(error.contains("t10k-labels-idx1-ubyte"), "{error}");
    }

    #[test]
    fn bad_files_cause_errors_that_name_the_file() {
        let full = images_file();
        let mut cases: Vec<(Vec<u8>, &str)> =
            (0..full.len()).map(|len| (full[..len].to_vec(), "truncated")).collect();
        cases.push(([full.as_slice(), &[0]].concat(), "more than the 12 bytes"));
        cases.push((idx_file(IMAGES_MAGIC, &[u32::MAX; 3], &[]), "limit"));
        cases.push((idx_file(IMAGES_MAGIC, &[2, 30_000, 30_000], &[1]), "truncated"));
        cases.push((idx_file(IMAGES_MAGIC, &[0, 2, 3], &[]), "no images"));
        cases.push((
            idx_file(IMAGES_MAGIC, &[2, 3, 2], &[0; 12]),
            "training images have the shape 1x3x2, but",
        ));
        cases.push((idx_file(LABELS_MAGIC, &[12], &[0; 12]), "not the IDX file"));
        cases.push((idx_file(IMAGES_MAGIC, &[1, 2, 3], &[0; 6]), "2 labels for the 1 images"));
        for (bytes, expected) in cases {
            let directory = data_directory();
            fs::write(directory.path().join("train-images-idx3-ubyte"), &bytes).unwrap();
            let error = load(directory.path()).unwrap_err().to_string();
            assert!(error.contains(expected) && error.contains("train"), "{error} / {expected}");
        }
    }

    #[test]
    fn truncated_gzip_is_an_error_at_every_length() {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(&images_file()).unwrap();
        let full = encoder.finish().unwrap();
        for len in 0..full.len() {
            let directory = tempfile::tempdir().unwrap();
            fs::write(directory.path().join("train-images-idx3-ubyte.gz"), &full[..len]).unwrap();
            fs::write(
                directory.path().join("train-labels-idx1-ubyte"),
                idx_file(LABELS_MAGIC, &[2], &[7, 3]),
            )
            .unwrap();
            let error = load(directory.path()).unwrap_err().to_string();
            assert!(error.contains("truncated"), "{len}: {error}");
        }
    }
}
