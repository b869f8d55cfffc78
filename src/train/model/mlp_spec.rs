//! The multilayer perceptrons that `--model mlp:...` can name.

use std::fmt;
use std::str::FromStr;

use super::hidden_layer::{HiddenLayer, check_hidden_layers, parse_width};

/// The hidden layers of a multilayer perceptron. At least one layer is fully connected. The other layers can be fully
/// connected, batch normalization or dropout.
#[derive(Clone, PartialEq, Debug)]
pub struct MlpSpec {
    layers: Vec<HiddenLayer>,
}

impl MlpSpec {
    /// Returns the hidden layers, in the order in which they are applied.
    pub fn layers(&self) -> &[HiddenLayer] {
        &self.layers
    }
}

/// The default is one hidden layer of 128 units.
impl Default for MlpSpec {
    fn default() -> Self {
        Self { layers: vec![HiddenLayer::Dense(128)] }
    }
}

/// Parses a list of layers, separated by commas. A number stands for a fully connected layer with this number of units.
impl FromStr for MlpSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parse = |text: &str| match text.parse() {
            Ok(layer @ (HiddenLayer::BatchNorm | HiddenLayer::Dropout(_))) => Ok(layer),
            Err(why) if text.starts_with("dropout") => Err(why),
            _ => parse_width(text).map(HiddenLayer::Dense),
        };
        let layers: Vec<HiddenLayer> = text.split(',').map(parse).collect::<Result<_, _>>()?;
        check_hidden_layers(&layers)?;
        if !layers.iter().any(|layer| matches!(layer, HiddenLayer::Dense(_))) {
            return Err("has no layer with units (try mlp:128)".into());
        }
        Ok(Self { layers })
    }
}

impl fmt::Display for MlpSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = self.layers.iter().map(|layer| match layer {
            HiddenLayer::Dense(units) => units.to_string(),
            other => other.to_string(),
        });
        f.write_str(&names.collect::<Vec<_>>().join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_parsed_and_printed_unchanged_or_refused() {
        for text in ["256,128", "1", "8,batchnorm,dropout0.5,8,batchnorm", "dropout0.1,8"] {
            assert_eq!(text.parse::<MlpSpec>().unwrap().to_string(), text);
        }
        for (text, expected) in [
            ("", "has ``, which is not one of WIDTH, batchnorm"),
            ("8,,8", "has ``"),
            ("-1", "has `-1`"),
            ("0", "the number 0 must be from 1 to 65536"),
            ("70000", "from 1 to 65536"),
            ("dense8", "has `dense8`, which is not one of WIDTH"),
            ("8,pool2", "has `pool2`"),
            ("8,dropout1", "below 1"),
            ("batchnorm,8", "has `batchnorm` as its first layer"),
            ("8,dropout0.5,batchnorm", "has `batchnorm` after `dropout0.5`"),
            ("dropout0.5", "has no layer with units"),
            (&["8"; 65].join(","), "has 65 hidden layers; the maximum is 64"),
        ] {
            let error = text.parse::<MlpSpec>().unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
