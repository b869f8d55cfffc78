//! The models that `--model` can name.

use std::fmt;
use std::str::FromStr;

use super::CnnSpec;

/// The maximum number of hidden layers.
pub(crate) const LAYERS_MAX: usize = 64;
/// The maximum number of units in a hidden layer.
pub(crate) const WIDTH_MAX: usize = 1 << 16;

/// A kind of model.
#[derive(Clone, PartialEq, Debug)]
pub enum ModelSpec {
    /// Linear regression with mean squared error.
    Linear,
    /// Multinomial logistic regression.
    Softmax,
    /// A network with hidden layers of these widths, each followed by a rectifier (`ReLU`). The network predicts classes or a
    /// number.
    Mlp(Vec<usize>),
    /// A convolutional network, which predicts classes or a number for each image.
    Cnn(CnnSpec),
}

impl ModelSpec {
    /// Returns whether the model has no hidden layers, so that its loss is a convex function of the parameters.
    pub fn is_convex(&self) -> bool {
        matches!(self, Self::Linear | Self::Softmax)
    }
}

impl FromStr for ModelSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "linear" => return Ok(Self::Linear),
            "softmax" => return Ok(Self::Softmax),
            "cnn" => return Ok(Self::Cnn(CnnSpec::default())),
            _ => {}
        }
        if let Some(layers) = text.strip_prefix("cnn:") {
            return layers.parse().map(Self::Cnn);
        }
        let widths = text
            .strip_prefix("mlp:")
            .ok_or("is not one of linear, softmax, mlp:WIDTH,WIDTH,..., cnn, cnn:LAYER,LAYER,...")?;
        let widths: Vec<usize> = widths
            .split(',')
            .map(|width| {
                width.parse().map_err(|_| format!("`{width}` is not the width of a layer (try mlp:256,128)"))
            })
            .collect::<Result<_, _>>()?;
        if let Some(width) = widths.iter().find(|&&width| width == 0 || width > WIDTH_MAX) {
            return Err(format!("has a layer of {width} units; a width must be from 1 to {WIDTH_MAX}"));
        }
        if widths.len() > LAYERS_MAX {
            return Err(format!("has {} hidden layers; the maximum is {LAYERS_MAX}", widths.len()));
        }
        Ok(Self::Mlp(widths))
    }
}

impl fmt::Display for ModelSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Linear => f.write_str("linear"),
            Self::Softmax => f.write_str("softmax"),
            Self::Mlp(widths) => {
                let widths: Vec<String> = widths.iter().map(usize::to_string).collect();
                write!(f, "mlp:{}", widths.join(","))
            }
            // The name lists all layers, because a later version may change the default layers of `cnn`.
            Self::Cnn(cnn) => write!(f, "cnn:{cnn}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn model_names_are_parsed_and_printed_unchanged() {
        for text in ["linear", "softmax", "mlp:256,128", "mlp:1", "cnn:conv8x3,pool2"] {
            assert_eq!(text.parse::<ModelSpec>().unwrap().to_string(), text);
        }
        let too_many = format!("mlp:{}", vec!["8"; 65].join(","));
        for text in [
            "",
            "mlp",
            "mlp:",
            "mlp:0",
            "mlp:8,,8",
            "mlp:-1",
            "mlp:70000",
            "tree",
            "cnn:",
            "cnn:8",
            &too_many,
        ] {
            assert!(text.parse::<ModelSpec>().is_err(), "{text}");
        }
    }
}
