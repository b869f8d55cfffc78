//! The models that `--model` can name.

use std::fmt;
use std::str::FromStr;

use super::{CnnSpec, GptSpec, HiddenLayer, MlpSpec, OwnModel};

/// The reason why a program without the feature `candle` refuses a GPT or a byte-pair encoding.
pub(crate) const CANDLE_NEEDED: &str = "needs the feature `candle`, but this program was built without this feature; build the \
                                        program with `cargo build --release --features candle`";

/// The first part of the name of a program's own model.
pub(crate) const OWN_PREFIX: &str = "own:";

/// A kind of model.
#[derive(Clone, PartialEq, Debug)]
pub enum ModelSpec {
    /// Linear regression with mean squared error.
    Linear,
    /// Multinomial logistic regression.
    Softmax,
    /// A network of fully connected layers, which predicts classes or a number.
    Mlp(MlpSpec),
    /// A convolutional network, which predicts classes or a number for each image.
    Cnn(CnnSpec),
    /// A transformer, which predicts the next token of a text. Only programs with the feature `candle` can train it.
    Gpt(GptSpec),
    /// A model whose layers the program builds itself. The command line cannot name it.
    Own(OwnModel),
}

impl ModelSpec {
    /// Returns whether the model has no hidden layers, so that its loss is a convex function of the parameters.
    pub fn is_convex(&self) -> bool {
        matches!(self, Self::Linear | Self::Softmax)
    }

    /// Returns the hidden layers of `mlp` and `cnn`, in the order of the forward pass. Returns an empty slice for
    /// other models.
    pub fn hidden_layers(&self) -> &[HiddenLayer] {
        match self {
            Self::Linear | Self::Softmax | Self::Gpt(_) | Self::Own(_) => &[],
            Self::Mlp(mlp) => mlp.layers(),
            Self::Cnn(cnn) => cnn.layers(),
        }
    }

    /// Returns whether the model has batch normalization, which makes the output for a sample depend on its batch.
    pub fn has_batch_norm(&self) -> bool {
        self.hidden_layers().contains(&HiddenLayer::BatchNorm)
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
        if let Some(sizes) = text.strip_prefix("gpt:") {
            return sizes.parse().map(Self::Gpt);
        }
        let layers = text.strip_prefix("mlp:").ok_or(
            "is not one of linear, softmax, mlp:WIDTH,WIDTH,..., cnn, cnn:LAYER,LAYER,..., gpt:LAYERS,HEADS,WIDTH",
        )?;
        layers.parse().map(Self::Mlp)
    }
}

impl fmt::Display for ModelSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Linear => f.write_str("linear"),
            Self::Softmax => f.write_str("softmax"),
            Self::Mlp(mlp) => write!(f, "mlp:{mlp}"),
            // The name lists all layers, because a later version may change the default layers of `cnn`.
            Self::Cnn(cnn) => write!(f, "cnn:{cnn}"),
            Self::Gpt(gpt) => write!(f, "gpt:{gpt}"),
            Self::Own(own) => write!(f, "{OWN_PREFIX}{own}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn model_names_are_parsed_and_printed_unchanged() {
        for text in ["linear", "softmax", "mlp:256,128", "mlp:1", "cnn:conv8x3,pool2", "gpt:4,2,64"] {
            assert_eq!(text.parse::<ModelSpec>().unwrap().to_string(), text);
        }
        for text in ["", "mlp", "mlp:", "mlp:8,,8", "tree", "cnn:", "cnn:8"] {
            assert!(text.parse::<ModelSpec>().is_err(), "{text}");
        }
    }
}
