//! IDX files, the format of MNIST and similar data: a magic number, the lengths of the dimensions, the bytes.

use std::io::Read;
use std::path::{Path, PathBuf};

use ndarray::Array2;

use super::file::{bounded, open, read_exactly, stream_error};
use super::{Column, DataError, Features, Table};

/// Two zero bytes, 8 for unsigned bytes, and the number of dimensions.
const IMAGES_MAGIC: u32 = 0x0000_0803;
const LABELS_MAGIC: u32 = 0x0000_0801;

/// Reads the training and the test set of a directory that holds
/// `{train,t10k}-{images-idx3,labels-idx1}-ubyte`, each plain or `.gz`, also with `.` instead of the `-` before `idx`.
///
/// # Errors
///
/// A file is missing, truncated, too long or of another format, or the numbers of images and labels differ.
pub(crate) fn load(directory: &Path) -> Result<(Table, Table), DataError> {
    let train = load_pair(directory, "train")?;
    let test = load_pair(directory, "t10k")?;
    if train.features.columns() != test.features.columns() {
        let (train, test) = (train.features.columns(), test.features.columns());
        let problem = format!("training images have {train} pixels, test images {test}");
        return Err(DataError::malformed(directory, problem));
    }
    Ok((train, test))
}

fn load_pair(directory: &Path, part: &str) -> Result<Table, DataError> {
    let images_path = find(directory, part, "images", 3)?;
    let labels_path = find(directory, part, "labels", 1)?;
    let (images, shape) = read(&images_path, IMAGES_MAGIC)?;
    let (labels, _) = read(&labels_path, LABELS_MAGIC)?;
    let rows = shape[0] as usize;
    let pixels = (shape[1] * shape[2]) as usize;
    if rows == 0 || pixels == 0 {
        return Err(DataError::malformed(&images_path, "holds no images"));
    }
    if labels.len() != rows {
        let problem =
            format!("holds {} labels for the {rows} images of {}", labels.len(), images_path.display());
        return Err(DataError::malformed(&labels_path, problem));
    }
    let values =
        Array2::from_shape_vec((rows, pixels), images).expect("the length was checked against the header");
    Ok(Table {
        features: Features::Pixels { values, divisor: 255.0 },
        target: Column::Numbers(labels.into_iter().map(f64::from).collect()),
    })
}

fn find(directory: &Path, part: &str, kind: &str, dimensions: u32) -> Result<PathBuf, DataError> {
    let names = ['-', '.'].map(|dot| format!("{part}-{kind}{dot}idx{dimensions}-ubyte"));
    let found = names.iter().flat_map(|name| [directory.join(name), directory.join(format!("{name}.gz"))]);
    found.into_iter().find(|path| path.exists()).ok_or_else(|| {
        if let Err(error) = std::fs::metadata(directory) {
            return DataError::unreadable(directory, error);
        }
        let problem = format!("has no {} or {0}.gz; MNIST and Fashion-MNIST have four such files", names[0]);
        DataError::malformed(directory, problem)
    })
}

/// A file's bytes and dimensions. Images have three dimensions; labels have one, and two of length 1 are added.
fn read(path: &Path, magic_wanted: u32) -> Result<(Vec<u8>, [u64; 3]), DataError> {
    let mut reader = open(path)?;
    let magic = read_u32(&mut *reader, path)?;
    if magic != magic_wanted {
        let problem = format!(
            "is not the IDX file it is named after: starts with {magic:#010x} instead of {magic_wanted:#010x}"
        );
        return Err(DataError::malformed(path, problem));
    }
    let mut shape = [1_u64; 3];
    for length in shape.iter_mut().take((magic & 0xff) as usize) {
        *length = u64::from(read_u32(&mut *reader, path)?);
    }
    let len = bounded(&shape, path)?;
    Ok((read_exactly(&mut *reader, len, path)?, shape))
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

    fn idx(magic: u32, shape: &[u32], data: &[u8]) -> Vec<u8> {
        let header = std::iter::once(&magic).chain(shape).flat_map(|word| word.to_be_bytes());
        header.chain(data.iter().copied()).collect()
    }

    fn images() -> Vec<u8> {
        idx(IMAGES_MAGIC, &[2, 2, 3], &[0, 255, 0, 51, 0, 0, 1, 2, 3, 4, 5, 6])
    }

    fn directory() -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        for part in ["train", "t10k"] {
            fs::write(directory.path().join(format!("{part}-images-idx3-ubyte")), images()).unwrap();
            let labels = idx(LABELS_MAGIC, &[2], &[7, 3]);
            fs::write(directory.path().join(format!("{part}-labels.idx1-ubyte")), labels).unwrap();
        }
        directory
    }

    #[test]
    fn plain_and_compressed_files_read_the_same() {
        let directory = directory();
        let (train, test) = load(directory.path()).unwrap();
        assert_eq!(train.features, test.features);
        assert_eq!((train.features.rows(), train.features.columns()), (2, 6));
        let plain = directory.path().join("train-images-idx3-ubyte");
        let file = fs::File::create(directory.path().join("train-images-idx3-ubyte.gz")).unwrap();
        let mut encoder = GzEncoder::new(file, Compression::fast());
        encoder.write_all(&images()).unwrap();
        encoder.finish().unwrap();
        fs::remove_file(plain).unwrap();
        assert_eq!(load(directory.path()).unwrap().0.features, train.features);
        fs::remove_file(directory.path().join("t10k-labels.idx1-ubyte")).unwrap();
        let error = load(directory.path()).unwrap_err().to_string();
        assert!(error.contains("t10k-labels-idx1-ubyte"), "{error}");
    }

    #[test]
    fn bad_files_are_named_and_nothing_panics() {
        let full = images();
        let mut cases: Vec<(Vec<u8>, &str)> =
            (0..full.len()).map(|len| (full[..len].to_vec(), "truncated")).collect();
        cases.push(([full.as_slice(), &[0]].concat(), "more than the 12 bytes"));
        cases.push((idx(IMAGES_MAGIC, &[u32::MAX; 3], &[]), "limit"));
        cases.push((idx(IMAGES_MAGIC, &[1000, 1000, 1000], &[1]), "truncated"));
        cases.push((idx(IMAGES_MAGIC, &[0, 2, 3], &[]), "no images"));
        cases.push((idx(LABELS_MAGIC, &[12], &[0; 12]), "not the IDX file"));
        cases.push((idx(IMAGES_MAGIC, &[1, 2, 3], &[0; 6]), "2 labels for the 1 images"));
        for (bytes, expected) in cases {
            let directory = directory();
            fs::write(directory.path().join("train-images-idx3-ubyte"), &bytes).unwrap();
            let error = load(directory.path()).unwrap_err().to_string();
            assert!(error.contains(expected) && error.contains("train-"), "{error} / {expected}");
        }
    }

    #[test]
    fn broken_gzip_is_an_error_at_every_length() {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        encoder.write_all(&images()).unwrap();
        let full = encoder.finish().unwrap();
        for len in 0..full.len() {
            let directory = tempfile::tempdir().unwrap();
            fs::write(directory.path().join("train-images-idx3-ubyte.gz"), &full[..len]).unwrap();
            fs::write(directory.path().join("train-labels-idx1-ubyte"), idx(LABELS_MAGIC, &[2], &[7, 3]))
                .unwrap();
            let error = load(directory.path()).unwrap_err().to_string();
            assert!(error.contains("truncated"), "{len}: {error}");
        }
    }
}
