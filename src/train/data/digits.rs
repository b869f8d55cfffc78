//! The handwritten digits that are compiled into the program.

use std::io::{BufRead as _, BufReader, Lines};

use flate2::read::GzDecoder;
use ndarray::Array2;

use super::sample_blocks::{BlockReader, RowOrigins, SampleBlock};
use super::{Column, DataError, Features, ImageShape, UninterpretedSamples};

/// The compressed table of digits. The source is "Optical Recognition of Handwritten Digits" by Alpaydin and Kaynak,
/// UCI, CC BY 4.0. See `DIGITS.md`.
const COMPRESSED_TABLE: &[u8] = include_bytes!("digits.csv.gz");
/// The number of rows of the table: one for each handwritten digit.
const ROWS: usize = 1797;
/// The number of pixels of the image of a digit.
pub(crate) const PIXELS: usize = 64;
/// The shape of the images.
pub(crate) const IMAGE_SHAPE: ImageShape = ImageShape { channels: 1, height: 8, width: 8 };
/// The largest value of a pixel.
const PIXEL_MAX: f32 = 16.0;

/// Returns the 1,797 digits. The features are 8 x 8 pixels from 0 to 1, and the targets are the digits 0 to 9.
///
/// # Panics
///
/// If the compiled-in data is corrupt. A test checks that this data is correct.
pub(crate) fn load_digits() -> UninterpretedSamples {
    DigitReader::new().read_samples(ROWS)
}

/// Reads the digits block by block.
pub(crate) struct DigitReader {
    /// The lines of the table that have not been read yet.
    lines: Lines<BufReader<GzDecoder<&'static [u8]>>>,
    /// The number of digits that have been read.
    rows_read: usize,
}

impl DigitReader {
    pub(crate) fn new() -> Self {
        Self { lines: BufReader::new(GzDecoder::new(COMPRESSED_TABLE)).lines(), rows_read: 0 }
    }

    /// Reads the next digits, at most `rows_max`.
    fn read_samples(&mut self, rows_max: usize) -> UninterpretedSamples {
        let (mut pixels, mut labels) = (Vec::new(), Vec::new());
        for line in self.lines.by_ref().take(rows_max) {
            let line = line.expect("the embedded digits are valid gzip of ASCII text");
            let mut values =
                line.split(',').map(|value| value.parse::<u8>().expect("the embedded digits are integers"));
            pixels.extend(values.by_ref().take(PIXELS));
            labels.extend(values.map(f64::from));
        }
        self.rows_read += labels.len();
        let values = Array2::from_shape_vec((labels.len(), PIXELS), pixels)
            .expect("each line has 64 pixels and a label");
        UninterpretedSamples {
            features: Features::Pixels { values, divisor: PIXEL_MAX },
            target: Column::Numbers(labels),
        }
    }
}

impl BlockReader for DigitReader {
    fn read_block(&mut self, rows_max: usize) -> Result<SampleBlock, DataError> {
        let origins = RowOrigins::Numbers("digits".into(), self.rows_read);
        Ok(SampleBlock { samples: self.read_samples(rows_max), origins })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_digit_occurs_as_often_as_published() {
        let samples = load_digits();
        let Column::Numbers(labels) = &samples.target else { panic!("the digits are not numbers") };
        assert_eq!((samples.features.rows(), samples.features.columns(), labels.len()), (1797, 64, 1797));
        let counts: Vec<usize> =
            (0..10).map(|digit| labels.iter().filter(|&&label| label == f64::from(digit)).count()).collect();
        // https://archive.ics.uci.edu/dataset/80 publishes these numbers of samples of each digit.
        assert_eq!(counts, [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]);
    }
}
