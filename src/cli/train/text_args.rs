//! The arguments of `ringtrain` that say how to read a text.

use clap::Args;

use crate::train::data::{CONTEXT_DEFAULT, TextOptions};
use crate::train::model::ModelSpec;

/// How to read a text.
#[derive(Args, Debug)]
#[command(next_help_heading = "Texts (--model gpt:...)")]
pub(super) struct TextArgs {
    /// The tokens of the text. characters: each character is a token. bytes: each byte of the file is a token.
    /// bpe:SIZE: a token is a sequence of bytes. Byte-pair encoding finds frequent sequences in the training text. The
    /// vocabulary has at most SIZE tokens: the 256 bytes and these sequences [default: characters]
    #[arg(long, value_name = "characters|bytes|bpe:SIZE")]
    tokens: Option<String>,

    /// The number of tokens in a window of the text. A window is a sample. At each position of a window, the model
    /// predicts the next token from the tokens of the window up to this position [default: 128]
    #[arg(long, value_name = "TOKENS")]
    context: Option<usize>,
}

impl TextArgs {
    /// Checks the arguments.
    ///
    /// # Errors
    ///
    /// Returns a sentence that says which argument is wrong and what to do.
    pub(super) fn to_text_options(&self, model: Option<&ModelSpec>) -> Result<TextOptions, String> {
        for (name, given) in [("--tokens", self.tokens.is_some()), ("--context", self.context.is_some())] {
            if given && !matches!(model, Some(ModelSpec::Gpt(_))) {
                return Err(format!("{name} is for texts; pass --model gpt:LAYERS,HEADS,WIDTH"));
            }
        }
        let parse = |text: &String| text.parse().map_err(|why| format!("--tokens {text}: {why}"));
        let tokens = self.tokens.as_ref().map(parse).transpose()?.unwrap_or_default();
        Ok(TextOptions { tokens, context: self.context.unwrap_or(CONTEXT_DEFAULT) })
    }
}
