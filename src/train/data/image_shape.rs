//! The shape of images.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The shape of the images of a data set. The features of a sample are the values of its image: channel by channel,
/// in each channel row by row, in each row from left to right. `PyTorch` uses the same order: (channels, height,
/// width).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct ImageShape {
    /// The number of channels: 1 for grey images, 3 for colour images.
    pub channels: usize,
    /// The number of rows of pixels.
    pub height: usize,
    /// The number of columns of pixels.
    pub width: usize,
}

impl ImageShape {
    /// Returns the number of values of an image. Returns `usize::MAX` if the number does not fit `usize`.
    pub fn value_count(&self) -> usize {
        self.channels.saturating_mul(self.height).saturating_mul(self.width)
    }
}

/// Prints the shape as `CHANNELSxHEIGHTxWIDTH`.
impl fmt::Display for ImageShape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{}x{}", self.channels, self.height, self.width)
    }
}
