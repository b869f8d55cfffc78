//! The convolutional networks that `--model cnn:...` can name.

use std::fmt;
use std::str::FromStr;

use super::hidden_layer::{HiddenLayer, check_hidden_layers};

/// The layers of `--model cnn` without a list of layers.
const DEFAULT_LAYERS: &str = "conv16x3,pool2,conv32x3,pool2,dense128";

/// The hidden layers of a convolutional network. At least one layer is a convolution.
#[derive(Clone, PartialEq, Debug)]
pub struct CnnSpec {
    layers: Vec<HiddenLayer>,
}

impl CnnSpec {
    /// Returns the hidden layers, in the order in which they are applied.
    pub fn layers(&self) -> &[HiddenLayer] {
        &self.layers
    }
}

/// The default layers suit images of 28 x 28 and of 8 x 8 pixels. They are similar to the layers of `LeNet` (`LeCun`
/// et al., "Gradient-based learning applied to document recognition", 1998).
impl Default for CnnSpec {
    fn default() -> Self {
        DEFAULT_LAYERS.parse().expect("a test parses the default layers")
    }
}

/// Parses a list of layers, separated by commas.
impl FromStr for CnnSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let layers: Vec<HiddenLayer> = text.split(',').map(str::parse).collect::<Result<_, _>>()?;
        check_hidden_layers(&layers)?;
        let is_spatial =
            |layer: &HiddenLayer| matches!(layer, HiddenLayer::Convolution { .. } | HiddenLayer::Pooling(_));
        if !layers.iter().any(|layer| matches!(layer, HiddenLayer::Convolution { .. })) {
            return Err(
                "has no convolution; pass mlp:WIDTH,WIDTH,... for a model without convolutions".into()
            );
        }
        let dense = layers.iter().position(|layer| matches!(layer, HiddenLayer::Dense(_)));
        if let Some(late) = layers[dense.unwrap_or(layers.len())..].iter().find(|layer| is_spatial(layer)) {
            return Err(format!("has `{late}` after a dense layer, whose output is not an image"));
        }
        Ok(Self { layers })
    }
}

impl fmt::Display for CnnSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let layers: Vec<String> = self.layers.iter().map(HiddenLayer::to_string).collect();
        f.write_str(&layers.join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_parsed_and_printed_unchanged_or_refused() {
        assert_eq!(CnnSpec::default().to_string(), DEFAULT_LAYERS);
        for text in [
            DEFAULT_LAYERS,
            "conv1x1",
            "conv4x3,batchnorm,dense8,batchnorm",
            "dropout0.25,conv8x5,pool3,dropout0,dense10,dropout0.5,dense7",
        ] {
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
            ("batchnorm,conv8x3", "has `batchnorm` as its first layer; write `batchnorm` directly after"),
            ("conv8x3,pool2,batchnorm", "has `batchnorm` after `pool2`"),
            ("conv8x3,batchnorm,batchnorm", "has `batchnorm` after `batchnorm`"),
            ("conv8x3,batchnorm2", "is not one of"),
            (&["conv8x3"; 65].join(","), "the maximum is 64"),
        ] {
            let error = text.parse::<CnnSpec>().unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
