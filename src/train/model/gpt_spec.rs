//! The sizes of a GPT.

use std::fmt;
use std::str::FromStr;

use super::hidden_layer::{LAYERS_MAX, WIDTH_MAX};

/// The sizes of a GPT: a transformer that predicts the next token of a text from the tokens before it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct GptSpec {
    /// The number of transformer blocks.
    pub layers: usize,
    /// The number of attention heads of a block.
    pub heads: usize,
    /// The number of values that represent a token. A multiple of `heads`.
    pub width: usize,
}

impl FromStr for GptSpec {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let numbers: Option<Vec<usize>> = text.split(',').map(|number| number.parse().ok()).collect();
        let Some(&[layers, heads, width]) = numbers.as_deref() else {
            return Err("needs three numbers gpt:LAYERS,HEADS,WIDTH (try gpt:4,4,128)".into());
        };
        if !(1..=LAYERS_MAX).contains(&layers) {
            return Err(format!("has {layers} layers; the number must be from 1 to {LAYERS_MAX}"));
        }
        if !(1..=WIDTH_MAX).contains(&width) {
            return Err(format!("has the width {width}; a width must be from 1 to {WIDTH_MAX}"));
        }
        if heads == 0 || !width.is_multiple_of(heads) {
            return Err(format!(
                "has {heads} heads, but the width {width} must be a multiple of the number of heads"
            ));
        }
        Ok(Self { layers, heads, width })
    }
}

impl fmt::Display for GptSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{},{},{}", self.layers, self.heads, self.width)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_that_do_not_fit_are_refused() {
        assert_eq!("4,2,64".parse::<GptSpec>().unwrap().to_string(), "4,2,64");
        for (text, expected) in [
            ("", "three numbers"),
            ("4,4", "three numbers"),
            ("4,4,x", "three numbers"),
            ("4,4,128,1", "three numbers"),
            ("0,4,128", "0 layers"),
            ("65,4,128", "from 1 to 64"),
            ("4,0,128", "0 heads"),
            ("4,3,128", "multiple"),
            ("4,4,0", "width 0"),
            ("4,4,131072", "width 131072"),
        ] {
            let error = text.parse::<GptSpec>().unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
