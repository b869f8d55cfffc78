//! The hidden layers that `--model mlp:...` and `--model cnn:...` can name.

use std::fmt;
use std::str::FromStr;

use super::pooling::WINDOW_MAX;

/// The maximum number of hidden layers.
pub(super) const LAYERS_MAX: usize = 64;
/// The maximum number of units or channels of a hidden layer.
pub(super) const WIDTH_MAX: usize = 1 << 16;
/// The maximum height and width of a kernel.
const KERNEL_MAX: usize = 31;

/// A hidden layer of a network.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum HiddenLayer {
    /// `convCHANNELSxKERNEL`: a convolution with this number of output channels and a square kernel, followed by a
    /// rectifier (`ReLU`).
    Convolution {
        /// The number of output channels.
        channels: usize,
        /// The height and the width of the kernel: an odd number.
        kernel: usize,
    },
    /// `poolWINDOW`: max pooling with square windows of this height and width.
    Pooling(usize),
    /// `denseUNITS`: a fully connected layer with this number of units, followed by a rectifier.
    Dense(usize),
    /// `batchnorm`: normalizes the outputs of the convolution or fully connected layer before it. The rectifier of that
    /// layer follows the normalization.
    BatchNorm,
    /// `dropoutPROBABILITY`: each input becomes 0 with this probability in training.
    Dropout(f32),
}

impl HiddenLayer {
    /// Returns whether layers of this kind have a rectifier. The rectifier follows the layer, or the batch normalization
    /// after the layer.
    pub(crate) fn has_rectifier(self) -> bool {
        match self {
            Self::Convolution { .. } | Self::Dense(_) | Self::BatchNorm => true,
            Self::Pooling(_) | Self::Dropout(_) => false,
        }
    }
}

/// Checks the number of hidden layers, and the kind of the layer before each batch normalization.
pub(super) fn check_hidden_layers(layers: &[HiddenLayer]) -> Result<(), String> {
    if layers.len() > LAYERS_MAX {
        return Err(format!("has {} hidden layers; the maximum is {LAYERS_MAX}", layers.len()));
    }
    for (index, _) in layers.iter().enumerate().filter(|(_, layer)| **layer == HiddenLayer::BatchNorm) {
        let place = match index.checked_sub(1).map(|before| layers[before]) {
            Some(HiddenLayer::Convolution { .. } | HiddenLayer::Dense(_)) => continue,
            Some(before) => format!("after `{before}`"),
            None => "as its first layer".into(),
        };
        return Err(format!(
            "has `batchnorm` {place}; write `batchnorm` directly after a convolution or a dense layer"
        ));
    }
    Ok(())
}

/// Parses the number of units of a fully connected layer of a multilayer perceptron.
pub(super) fn parse_width(text: &str) -> Result<usize, String> {
    let unknown = || {
        format!("has `{text}`, which is not one of WIDTH, batchnorm, dropoutPROBABILITY (try mlp:256,128)")
    };
    parse_number(text, text, WIDTH_MAX)?.ok_or_else(unknown)
}

/// Parses `digits`, a number in the layer `text`. Returns `None` if `digits` is not a number, and an error if the number
/// is not from 1 to `max`.
fn parse_number(text: &str, digits: &str, max: usize) -> Result<Option<usize>, String> {
    let Ok(value) = digits.parse::<usize>() else { return Ok(None) };
    if (1..=max).contains(&value) {
        return Ok(Some(value));
    }
    Err(format!("has `{text}`; the number {value} must be from 1 to {max}"))
}

impl FromStr for HiddenLayer {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let unknown = || {
            format!(
                "has `{text}`, which is not one of convCHANNELSxKERNEL, poolWINDOW, denseUNITS, batchnorm, \
                 dropoutPROBABILITY"
            )
        };
        let number = |digits: &str, max: usize| parse_number(text, digits, max)?.ok_or_else(unknown);
        if let Some(numbers) = text.strip_prefix("conv") {
            let (channels, kernel) = numbers.split_once('x').ok_or_else(unknown)?;
            let (channels, kernel) = (number(channels, WIDTH_MAX)?, number(kernel, KERNEL_MAX)?);
            if kernel.is_multiple_of(2) {
                return Err(format!(
                    "has `{text}`; the kernel must be an odd number, so that the output has the size of the image"
                ));
            }
            Ok(Self::Convolution { channels, kernel })
        } else if let Some(window) = text.strip_prefix("pool") {
            Ok(Self::Pooling(number(window, WINDOW_MAX)?))
        } else if let Some(units) = text.strip_prefix("dense") {
            Ok(Self::Dense(number(units, WIDTH_MAX)?))
        } else if text == "batchnorm" {
            Ok(Self::BatchNorm)
        } else if let Some(probability) = text.strip_prefix("dropout") {
            let probability = probability.parse::<f32>().map_err(|_| unknown())?;
            if (0.0..1.0).contains(&probability) {
                return Ok(Self::Dropout(probability));
            }
            Err(format!("has `{text}`; the probability must be at least 0 and below 1"))
        } else {
            Err(unknown())
        }
    }
}

impl fmt::Display for HiddenLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Convolution { channels, kernel } => write!(f, "conv{channels}x{kernel}"),
            Self::Pooling(window) => write!(f, "pool{window}"),
            Self::Dense(units) => write!(f, "dense{units}"),
            Self::BatchNorm => f.write_str("batchnorm"),
            Self::Dropout(probability) => write!(f, "dropout{probability}"),
        }
    }
}
