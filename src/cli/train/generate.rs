//! The command `ringtrain generate`, which lets a model continue a text.

use std::io::{self, Write as _};
use std::path::PathBuf;

use clap::Args;

use super::{ProgramFailure, usage_error};
use crate::exit::Exit;
use crate::train::model_file::SavedModel;
use crate::train::predict::{GenerationOptions, TextGenerator};

pub(super) const GENERATE_AFTER_HELP: &str = "\
Example:
  ringtrain generate --model whale.model --prompt 'Call me ' --length 300 --temperature 0.8

The command prints the prompt and then the new tokens. The same seed gives the same text.

Exit codes:
  0   success
  1   the text cannot be written
  2   an option is unknown or has a wrong value, or options do not fit together
  4   the prompt is wrong, or the model does not predict text
  10  the model file cannot be read";

#[derive(Args, Debug)]
pub(super) struct GenerateArgs {
    /// The model file, which `ringtrain --save-model FILE` has written
    #[arg(long, value_name = "FILE")]
    model: PathBuf,

    /// The text that the model continues [default: a line break]
    #[arg(long, value_name = "TEXT", default_value = "\n", hide_default_value = true)]
    prompt: String,

    /// The number of new tokens
    #[arg(long, value_name = "TOKENS", default_value_t = 500)]
    length: u64,

    /// How random the tokens are: a number of at least 0. With 0, each new token is the most probable token. With 1,
    /// each token is drawn with the probability that the model computes. Numbers below 1 favor probable tokens
    #[arg(long, value_name = "NUMBER", default_value_t = 1.0)]
    temperature: f32,

    /// The seed of the random choice of tokens
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    seed: u64,
}

/// Prints the prompt, and the tokens with which the model continues the prompt.
pub(super) fn generate(args: &GenerateArgs) -> Result<(), ProgramFailure> {
    let &GenerateArgs { length, temperature, seed, .. } = args;
    if !(temperature.is_finite() && temperature >= 0.0) {
        return Err(usage_error(format!("--temperature {temperature}: it must be a number of at least 0")));
    }
    let mut model = SavedModel::load(&args.model)?;
    let generator = TextGenerator::new(&mut model, &args.prompt, GenerationOptions { temperature, seed });
    let generator =
        generator.map_err(|error| ProgramFailure { exit: Exit::Data, message: error.to_string() })?;
    let mut out = io::stdout().lock();
    let mut write = |text: &str| out.write_all(text.as_bytes()).and_then(|()| out.flush());
    let mut decoder = Utf8Decoder::default();
    let write_all = || {
        write(&args.prompt)?;
        for token in generator.take(usize::try_from(length).unwrap_or(usize::MAX)) {
            write(&decoder.decode(&token))?;
        }
        write(decoder.decode_rest())?;
        write("\n")
    };
    match write_all() {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(ProgramFailure {
            exit: Exit::Failure,
            message: format!("standard output could not be written: {error}"),
        }),
        _ => Ok(()),
    }
}

/// Converts bytes to text while they arrive. A character may consist of the bytes of several tokens. Bytes that are not
/// UTF-8 become the replacement character U+FFFD.
#[derive(Default)]
struct Utf8Decoder {
    /// The first bytes of a character whose other bytes have not arrived yet.
    incomplete: Vec<u8>,
}

impl Utf8Decoder {
    /// Adds bytes, and returns the characters that these bytes complete.
    fn decode(&mut self, bytes: &[u8]) -> String {
        self.incomplete.extend_from_slice(bytes);
        let mut text = String::new();
        let mut rest = self.incomplete.as_slice();
        loop {
            let error = match std::str::from_utf8(rest) {
                Ok(valid) => {
                    text += valid;
                    rest = &[];
                    break;
                }
                Err(error) => error,
            };
            let (valid, invalid) = rest.split_at(error.valid_up_to());
            text += &String::from_utf8_lossy(valid);
            rest = invalid;
            let Some(length) = error.error_len() else { break };
            text.push(char::REPLACEMENT_CHARACTER);
            rest = &rest[length..];
        }
        self.incomplete = rest.to_vec();
        text
    }

    /// Returns the end of the text: U+FFFD if the last character is incomplete, otherwise an empty text.
    fn decode_rest(self) -> &'static str {
        if self.incomplete.is_empty() { "" } else { "\u{fffd}" }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: GenerateArgs,
    }

    #[test]
    fn bad_arguments_are_rejected_with_a_reason() {
        for (line, expected) in [
            ("g --model m --temperature -1", "--temperature -1: it must be a number of at least 0"),
            ("g --model m --temperature nan", "--temperature NaN: it must be"),
            ("g --model /no/such/file", "cannot read the model file /no/such/file"),
        ] {
            let line = line.replace("--temperature ", "--temperature=");
            let args = Line::try_parse_from(line.split_whitespace()).expect("the line can be parsed").args;
            let failure = generate(&args).expect_err("the command fails");
            assert!(failure.message.contains(expected), "{line}: {}", failure.message);
        }
    }

    #[test]
    fn characters_of_several_tokens_are_decoded_and_other_bytes_are_replaced() {
        for (tokens, expected) in [
            (&[&b"a\xc3"[..], b"\xa4b", b"\xe2\x82", b"\xac"][..], "a\u{e4}b\u{20ac}"),
            (&[b"\x80a", b"\xe2\x82a", b"\xff\xffb"], "\u{fffd}a\u{fffd}a\u{fffd}\u{fffd}b"),
            (&[b"a\xe2\x82"], "a\u{fffd}"),
            (&[], ""),
        ] {
            let mut decoder = Utf8Decoder::default();
            let text: String = tokens.iter().map(|token| decoder.decode(token)).collect();
            assert_eq!(text + decoder.decode_rest(), expected);
        }
    }
}
