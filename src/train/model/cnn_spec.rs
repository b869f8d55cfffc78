//! The convolutional networks that `--model cnn:...` can name.

use std::fmt;
use std::str::FromStr;

use super::pooling::WINDOW_MAX;
use super::spec::{LAYERS_MAX, WIDTH_MAX};

/// The layers of `--model cnn` without a list of layers.
const DEFAULT: &str = "conv16x3,pool2,conv32x3,pool2,dense128";
/// The maximum height and width of a kernel.
const KERNEL_MAX: usize = 31;

/// The hidden layers of a convolutional network. At least one layer is a convolution.
#[derive(Clone, PartialEq, Debug)]
pub struct CnnSpec {
    layers: Vec<CnnLayer>,
}

/// A hidden layer of a convolutional network.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum CnnLayer {
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
    /// `dropoutPROBABILITY`: each input becomes 0 with this probability in training.
    Dropout(f32),
}

impl CnnSpec {
    /// Returns the hidden layers, in the order in which they are applied.
    pub fn layers(&self) -> &[CnnLayer] {
        &self.layers
    }
}

/// The layers of `--model cnn` suit images of 28 x 28 and of 8 x 8 pixels. The layers are similar to `LeNet` (`LeCun`
/// et al., "Gradient-based learning applied to document recognition", 1998).
impl Default for CnnSpec {
    fn default() -> Self {
        DEFAULT.parse().expect("a test parses the default layers")
    }
}

/// Parses a list of layers, separated by commas.
impl FromStr for CnnSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let layers: Vec<CnnLayer> = text.split(',').map(str::parse).collect::<Result<_, _>>()?;
        if layers.len() > LAYERS_MAX {
            return Err(format!("has {} hidden layers; the maximum is {LAYERS_MAX}", layers.len()));
        }
        let is_spatial =
            |layer: &CnnLayer| matches!(layer, CnnLayer::Convolution { .. } | CnnLayer::Pooling(_));
        if !layers.iter().any(|layer| matches!(layer, CnnLayer::Convolution { .. })) {
            return Err(
                "has no convolution; pass mlp:WIDTH,WIDTH,... for a model without convolutions".into()
            );
        }
        let dense = layers.iter().position(|layer| matches!(layer, CnnLayer::Dense(_)));
        if let Some(late) = layers[dense.unwrap_or(layers.len())..].iter().find(|layer| is_spatial(layer)) {
            return Err(format!("has `{late}` after a dense layer, whose output is not an image"));
        }
        Ok(Self { layers })
    }
}

impl fmt::Display for CnnSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let layers: Vec<String> = self.layers.iter().map(CnnLayer::to_string).collect();
        f.write_str(&layers.join(","))
    }
}

impl FromStr for CnnLayer {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let unknown = || {
            format!(
                "has `{text}`, which is not one of convCHANNELSxKERNEL, poolWINDOW, denseUNITS, dropoutPROBABILITY"
            )
        };
        let number = |digits: &str, max: usize| {
            let value = digits.parse::<usize>().map_err(|_| unknown())?;
            if (1..=max).contains(&value) {
                return Ok(value);
            }
            Err(format!("has `{text}`; the number {value} must be from 1 to {max}"))
        };
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

impl fmt::Display for CnnLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Convolution { channels, kernel } => write!(f, "conv{channels}x{kernel}"),
            Self::Pooling(window) => write!(f, "pool{window}"),
            Self::Dense(units) => write!(f, "dense{units}"),
            Self::Dropout(probability) => write!(f, "dropout{probability}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_parsed_and_printed_unchanged_or_refused() {
        assert_eq!(CnnSpec::default().to_string(), DEFAULT);
        for text in [DEFAULT, "conv1x1", "dropout0.25,conv8x5,pool3,dropout0,dense10,dropout0.5,dense7"] {
            assert_eq!(text.parse::<CnnSpec>().unwrap().to_string(), text);
        }
        for (text, expected) in [
            ("", "has ``, which is not one of"),
            ("conv16", "is not one of"),
            ("conv16x", "is not one of"),
            ("conv-1x3", "is not one of"),
            ("conv16x4", "odd number"),
            ("conv16x33", "from 1 to 31"),
            ("conv0x3", "from 1 to 65536"),
            ("conv8x3,pool9", "from 1 to 8"),
            ("conv8x3,,pool2", "has ``"),
            ("conv8x3,dropout1", "below 1"),
            ("conv8x3,dropoutNaN", "below 1"),
            ("dense8", "no convolution"),
            ("conv8x3,dense8,pool2", "has `pool2` after a dense layer"),
            (&["conv8x3"; 65].join(","), "the maximum is 64"),
        ] {
            let error = text.parse::<CnnSpec>().unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
