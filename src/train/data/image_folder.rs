//! Reads a directory with a folder of images for each class.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use ndarray::Array2;
use sha2::{Digest, Sha256};

use super::file_digest::FileDigest;
use super::image_file::{self, DecodedImage};
use super::part_of_source::{PartOfSource, read_samples};
use super::sample_blocks::{BlockReader, RowOrigins, SampleBlock};
use super::{BlocksOfRank, Column, DataError, ELEMENTS_MAX, Features, ImageShape, UninterpretedSamples};
use crate::train::rank_checks::short_digest;
use crate::types::counted;

/// The extensions of the names of image files, in lower case.
const IMAGE_FILE_EXTENSIONS: [&str; 3] = ["png", "jpg", "jpeg"];
/// Bytes are divided by this number, so that 255 becomes 1.
const PIXEL_DIVISOR: f32 = 255.0;

/// The images in a directory, in the order in which they are read.
struct ImageList {
    /// The path and the class of each image. The class is empty if the image is not in the folder of a class.
    images: Vec<(PathBuf, String)>,
    /// The files whose names do not have the extension of an image.
    other_files: Vec<PathBuf>,
}

impl ImageList {
    /// Returns a hash of the names, the classes and the sizes in bytes of all images. A single rank hashes nothing, because there
    /// is no other hash to compare.
    fn digest(&self, share: BlocksOfRank) -> Result<u64, DataError> {
        let mut hasher = Sha256::new();
        let images = if share == BlocksOfRank::ALL { &[][..] } else { &self.images };
        for (path, class) in images {
            let name = path.file_name().unwrap_or_default().as_encoded_bytes();
            let metadata = fs::metadata(path).map_err(|error| DataError::unreadable(path, error))?;
            let len = metadata.len().to_le_bytes();
            hasher.update([class.as_bytes(), b"\0", name, b"\0", &len].concat());
        }
        Ok(short_digest(&hasher.finalize()))
    }
}

/// Returns whether a directory holds images, or folders that may hold images. Returns `false` for a directory of IDX
/// files.
pub(crate) fn is_image_folder(directory: &Path) -> bool {
    let Ok(entries) = fs::read_dir(directory) else { return false };
    let names: Vec<(String, PathBuf)> = entries
        .flatten()
        .map(|entry| (entry.file_name().to_string_lossy().into_owned(), entry.path()))
        .filter(|(name, _)| !name.starts_with('.'))
        .collect();
    let is_idx = names.iter().any(|(name, _)| name.contains("-ubyte"));
    !is_idx && names.iter().any(|(_, path)| has_image_name(path) || path.is_dir())
}

/// Reads this rank's part of the images of a directory. The name of a folder in the directory is the class of the images in
/// this folder. The classes, and the images of a class, are in the order of their names. Each rank lists all images, but
/// decodes only its own images and the first image, which determines the size of all images.
///
/// # Errors
///
/// - The directory has no folders, or has images beside its folders.
/// - A folder has no images, or holds another folder.
/// - An image of this rank cannot be read or has another size than the first image.
/// - `wanted_shape` is given, and an image of this rank has another shape.
pub(crate) fn read_part_of_folder(
    directory: &Path,
    wanted_shape: Option<ImageShape>,
    (share, stream_directory): (BlocksOfRank, Option<&Path>),
) -> Result<PartOfSource, DataError> {
    let mut list = list_images(directory)?;
    if list.images.iter().any(|(_, class)| class.is_empty()) {
        let problem = "holds images that are not in the folder of a class; move each image to a folder that has the name of its \
                       class";
        return Err(DataError::malformed(directory, problem));
    }
    let digests = vec![FileDigest { path: directory.to_owned(), value: list.digest(share)? }];
    let count = list.images.len();
    let wanted = wanted_shape.map(|shape| WantedImages { inputs: shape.value_count(), shape: Some(shape) });
    let (first_path, _) = list.images.first().expect("a list of images has at least one image");
    let first_image = image_file::read_image_file(first_path)?;
    let pixels = PixelRows::new(first_path, &first_image, wanted, count)?;
    let own = share.range_of(count as u64);
    list.images.truncate(own.end as usize);
    list.images.drain(..own.start as usize);
    let notes = describe_ignored_files(&list.other_files).into_iter().collect();
    let mut reader = ImageReader { pixels: Some(pixels), ..ImageReader::new(list, wanted) };
    let samples = read_samples(&mut reader, stream_directory)?;
    let image = reader.pixels.map(|pixels| pixels.shape);
    Ok(PartOfSource { samples, image, digests, notes, rounding: None })
}

/// The images that a model takes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct WantedImages {
    /// The number of inputs of the model.
    pub(crate) inputs: usize,
    /// The shape of the training images. `None` if the model file does not hold the shape.
    pub(crate) shape: Option<ImageShape>,
}

/// Reads the images of a directory block by block.
pub(crate) struct ImageReader {
    /// The path and the class of each image that has not been read yet.
    images: std::vec::IntoIter<(PathBuf, String)>,
    /// The images that the model takes. `None` if there is no model yet.
    wanted: Option<WantedImages>,
    /// `None` before the first image has been read.
    pixels: Option<PixelRows>,
}

impl ImageReader {
    /// Lists the images of a directory for a model. The images need not be in folders of classes.
    ///
    /// # Errors
    ///
    /// The errors of [`read_part_of_folder`] about folders, except for the error about images that are not in folders.
    /// [`read_block`](Self::read_block) returns an error if an image does not have the size of the images with which the model
    /// was trained, or has colours although the model has inputs for grey images.
    pub(crate) fn open(directory: &Path, wanted: WantedImages) -> Result<Self, DataError> {
        Ok(Self::new(list_images(directory)?, Some(wanted)))
    }

    fn new(list: ImageList, wanted: Option<WantedImages>) -> Self {
        Self { images: list.images.into_iter(), wanted, pixels: None }
    }
}

impl BlockReader for ImageReader {
    /// Converts grey images to colour images if any image of the block has colours, or if the model takes colour images.
    fn read_block(&mut self, rows_max: usize) -> Result<SampleBlock, DataError> {
        let (paths, classes): (Vec<PathBuf>, Vec<String>) = self.images.by_ref().take(rows_max).unzip();
        for path in &paths {
            let image = image_file::read_image_file(path)?;
            let pixels = match &mut self.pixels {
                Some(pixels) => pixels,
                None => self.pixels.insert(PixelRows::new(path, &image, self.wanted, paths.len())?),
            };
            pixels.push(&image).map_err(|problem| DataError::malformed(path, problem))?;
        }
        let (values, columns) = match &mut self.pixels {
            Some(pixels) => (std::mem::take(&mut pixels.values), pixels.shape.value_count()),
            None => (Vec::new(), 0),
        };
        let values = Array2::from_shape_vec((paths.len(), columns), values)
            .expect("all images have the same number of values");
        let target = Column::Text(classes.iter().map(String::as_str).collect());
        let samples =
            UninterpretedSamples { features: Features::Pixels { values, divisor: PIXEL_DIVISOR }, target };
        Ok(SampleBlock { samples, origins: RowOrigins::Files(paths) })
    }
}

/// Returns the entries of a directory in the order of their names, without hidden entries.
fn sorted_entries(directory: &Path) -> Result<Vec<PathBuf>, DataError> {
    let unreadable = |error| DataError::unreadable(directory, error);
    let mut paths = Vec::new();
    for entry in fs::read_dir(directory).map_err(unreadable)? {
        let entry = entry.map_err(unreadable)?;
        if !entry.file_name().as_encoded_bytes().starts_with(b".") {
            paths.push(entry.path());
        }
    }
    paths.sort();
    Ok(paths)
}

/// Returns whether the name of a file ends with the extension of an image.
fn has_image_name(path: &Path) -> bool {
    let extension = path.extension().and_then(|extension| extension.to_str());
    extension
        .is_some_and(|extension| IMAGE_FILE_EXTENSIONS.contains(&extension.to_ascii_lowercase().as_str()))
}

/// Lists the images of a directory. Returns an error if there are no images, or if only some of the images are in
/// folders of classes.
fn list_images(directory: &Path) -> Result<ImageList, DataError> {
    let mut list = ImageList { images: Vec::new(), other_files: Vec::new() };
    for path in sorted_entries(directory)? {
        if path.is_dir() {
            list_images_of_class(&path, &mut list)?;
        } else if has_image_name(&path) {
            list.images.push((path, String::new()));
        } else {
            list.other_files.push(path);
        }
    }
    let folders: BTreeSet<bool> = list.images.iter().map(|(_, class)| class.is_empty()).collect();
    match folders.len() {
        0 => Err(DataError::malformed(
            directory,
            "holds no images; ringtrain reads images from folders, one for each class: DIR/CLASS/IMAGE.png or .jpg",
        )),
        1 => Ok(list),
        _ => {
            let single = list.images.iter().find(|(_, class)| class.is_empty());
            let path = single.map_or(directory, |(path, _)| path.as_path());
            Err(DataError::malformed(
                path,
                "is not in a folder, but other images are; move it to the folder of its class",
            ))
        }
    }
}

/// Adds the images in the folder of one class to `list`.
fn list_images_of_class(folder: &Path, list: &mut ImageList) -> Result<(), DataError> {
    let Some(class) = folder.file_name().and_then(|name| name.to_str()) else {
        return Err(DataError::malformed(
            folder,
            "the name of the folder is not UTF-8, so it cannot name a class",
        ));
    };
    let count = list.images.len();
    for path in sorted_entries(folder)? {
        if path.is_dir() {
            let problem = "is a folder in the folder of a class, which may hold only images";
            return Err(DataError::malformed(&path, problem));
        }
        if has_image_name(&path) {
            list.images.push((path, class.to_owned()));
        } else {
            list.other_files.push(path);
        }
    }
    if list.images.len() == count {
        let problem = "holds no images (.png, .jpg, .jpeg); remove the folder, or add images of this class";
        return Err(DataError::malformed(folder, problem));
    }
    Ok(())
}

/// Returns a message for the user about the files that are not images. Returns `None` if there are no such files.
fn describe_ignored_files(files: &[PathBuf]) -> Option<String> {
    let first = files.first()?;
    Some(format!(
        "ignored {}, because only names that end in .png, .jpg or .jpeg are images, for example {}",
        counted(files.len(), "file"),
        first.display()
    ))
}

/// Returns an error if `image_count` images of this shape have too many values.
pub(crate) fn check_pixel_count(shape: ImageShape, image_count: usize) -> Result<(), String> {
    let values = (shape.value_count() as u64).saturating_mul(image_count as u64);
    if values > ELEMENTS_MAX {
        return Err(format!(
            "{image_count} images of this size have {values} values; the limit is {ELEMENTS_MAX}; scale the images down"
        ));
    }
    Ok(())
}

/// The values of the images of a block. The values of an image are ordered as [`ImageShape`] says.
struct PixelRows {
    /// The shape of all images.
    shape: ImageShape,
    /// The file of the first image.
    first_path: PathBuf,
    /// The values, image by image.
    values: Vec<u8>,
    /// Whether images with colours are refused, because the model takes grey images.
    only_grey: bool,
    /// The maximum number of images of a block.
    image_count: usize,
}

impl PixelRows {
    /// Creates an empty list for blocks of up to `image_count` images of the size of `image`, which is in the file `path`.
    fn new(
        path: &Path,
        image: &DecodedImage,
        wanted: Option<WantedImages>,
        image_count: usize,
    ) -> Result<Self, DataError> {
        let DecodedImage { width, height, .. } = *image;
        let pixels = width * height;
        let inputs = wanted.map(|wanted| wanted.inputs);
        let channels = match inputs {
            None => image.channels,
            Some(inputs) if inputs == pixels => 1,
            Some(inputs) if inputs == 3 * pixels => 3,
            Some(inputs) => {
                let problem = format!(
                    "has {width} x {height} pixels, but the model has {inputs} inputs; scale the image to the size of the training \
                     images"
                );
                return Err(DataError::malformed(path, problem));
            }
        };
        let shape = ImageShape { channels, height, width };
        if let Some(trained) = wanted.and_then(|wanted| wanted.shape)
            && trained != shape
        {
            let problem = format!(
                "has {width} x {height} pixels, but the model was trained on images of {} x {} pixels",
                trained.width, trained.height
            );
            return Err(DataError::malformed(path, problem));
        }
        let rows = Self {
            shape,
            first_path: path.to_owned(),
            values: Vec::new(),
            only_grey: inputs == Some(pixels),
            image_count,
        };
        rows.check_element_count().map_err(|problem| DataError::malformed(path, problem))?;
        Ok(rows)
    }

    /// Returns an error if all images together have too many values.
    fn check_element_count(&self) -> Result<(), String> {
        check_pixel_count(self.shape, self.image_count)
    }

    /// Adds the values of an image.
    fn push(&mut self, image: &DecodedImage) -> Result<(), String> {
        let ImageShape { channels, height, width } = self.shape;
        if (image.height, image.width) != (height, width) {
            return Err(format!(
                "has {} x {} pixels, but {} has {width} x {height}; all images must have the same size",
                image.width,
                image.height,
                self.first_path.display()
            ));
        }
        if image.channels > channels {
            if self.only_grey {
                return Err("has colours, but the model was trained on grey images".into());
            }
            self.convert_rows_to_colour()?;
        }
        for channel in 0..self.shape.channels {
            let from = channel.min(image.channels - 1);
            self.values.extend(image.pixels.iter().skip(from).step_by(image.channels));
        }
        Ok(())
    }

    /// Converts the grey images that have been read to images with three equal channels.
    fn convert_rows_to_colour(&mut self) -> Result<(), String> {
        let grey = std::mem::take(&mut self.values);
        self.shape.channels = 3;
        self.check_element_count()?;
        for image in grey.chunks(self.shape.height * self.shape.width) {
            self.values.extend_from_slice(&image.repeat(3));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::part_of_source::load_parts;
    use super::super::unsplit_data::UnsplitData;
    use super::*;
    use crate::group::Group;
    use crate::train::TrainError;

    const GREY_JPEG: &[u8] = include_bytes!("images/grey.jpg");
    const COLOUR_PNG: &[u8] = include_bytes!("images/palette.png");

    fn load_image_folder(directory: &Path) -> Result<UnsplitData, TrainError> {
        load_parts("images", &mut Group::solo(), |share| read_part_of_folder(directory, None, (share, None)))
    }

    fn make_image_folder(files: &[(&str, &[u8])]) -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        for (name, bytes) in files {
            let path = directory.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, bytes).unwrap();
        }
        directory
    }

    #[test]
    fn grey_images_get_three_channels_if_another_image_has_colours() {
        let directory = make_image_folder(&[
            ("b/2.PNG", COLOUR_PNG),
            ("b/10.jpeg", GREY_JPEG),
            ("a/x.jpg", GREY_JPEG),
            ("a/Thumbs.db", b""),
            (".hidden/x", b""),
        ]);
        let UnsplitData { samples, image, notes, .. } = load_image_folder(directory.path()).unwrap();
        assert_eq!(image, Some(ImageShape { channels: 3, height: 2, width: 3 }));
        let Features::Pixels { values, .. } = samples.features.into_memory() else {
            panic!("images are pixels")
        };
        let grey = vec![100_u8; 18];
        let colour = [[200_u8; 6], [50; 6], [10; 6]].concat();
        let rows: Vec<Vec<u8>> = values.rows().into_iter().map(|row| row.to_vec()).collect();
        assert_eq!(rows, [grey.clone(), grey, colour]);
        let Column::Text(classes) = &samples.target else { panic!("classes have names") };
        assert_eq!((classes.indices.as_slice(), &*classes.distinct[1]), (&[0, 1, 1][..], "b"));
        assert!(notes[0].starts_with("ignored 1 file,") && notes[0].ends_with("a/Thumbs.db"));
        let wanted = WantedImages { inputs: 18, shape: None };
        let block = ImageReader::open(directory.path(), wanted).unwrap().read_block(2).unwrap();
        let error = block.origins.error(1, "problem").to_string();
        assert!(error.ends_with("b/10.jpeg: problem"), "{error}");
    }

    #[test]
    fn images_are_converted_to_the_channels_of_the_model() {
        let read = |directory: &tempfile::TempDir, wanted| {
            ImageReader::open(directory.path(), wanted).unwrap().read_block(9)
        };
        let directory = make_image_folder(&[("2.jpg", GREY_JPEG), ("1.jpg", GREY_JPEG)]);
        for inputs in [6, 18] {
            let features = read(&directory, WantedImages { inputs, shape: None }).unwrap().samples.features;
            assert_eq!((features.rows(), features.columns()), (2, inputs));
        }
        let turned = Some(ImageShape { channels: 1, height: 3, width: 2 });
        for (inputs, shape, expected) in [
            (12, None, "1.jpg: has 3 x 2 pixels, but the model has 12 inputs"),
            (6, turned, "1.jpg: has 3 x 2 pixels, but the model was trained on images of 2 x 3 pixels"),
        ] {
            let error = read(&directory, WantedImages { inputs, shape }).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
        let directory = make_image_folder(&[("2.png", COLOUR_PNG)]);
        let error = read(&directory, WantedImages { inputs: 6, shape: None }).unwrap_err().to_string();
        assert!(error.contains("2.png: has colours, but the model was trained on grey images"), "{error}");
        assert!(
            load_image_folder(directory.path())
                .unwrap_err()
                .to_string()
                .contains("not in the folder of a class")
        );
    }

    #[test]
    fn unsuitable_folders_cause_errors_that_name_the_file() {
        let other_size: &[u8] = include_bytes!("images/other_size.png");
        for (files, expected) in [
            (&[("a/1.jpg", GREY_JPEG), ("b/1.png", other_size)][..], "b/1.png: has 4 x 2 pixels, but"),
            (
                &[("a/1.jpg", GREY_JPEG), ("b/x.txt", b"")],
                "b: holds no images (.png, .jpg, .jpeg); remove the folder",
            ),
            (
                &[("a/1.jpg", GREY_JPEG), ("a/c/1.jpg", GREY_JPEG)],
                "a/c: is a folder in the folder of a class",
            ),
            (
                &[("a/1.jpg", GREY_JPEG), ("1.jpg", GREY_JPEG)],
                "1.jpg: is not in a folder, but other images are",
            ),
            (&[("a/1.jpg", b"text")], "a/1.jpg: is not a PNG or JPEG image"),
            (&[("x.txt", b"")], "holds no images; ringtrain reads images from folders"),
        ] {
            let directory = make_image_folder(files);
            let error = load_image_folder(directory.path()).unwrap_err().to_string();
            assert!(error.contains(expected), "{error} / {expected}");
        }
        assert!(
            load_image_folder(Path::new("/absent")).unwrap_err().to_string().contains("cannot read /absent")
        );
    }
}
