//! Evaluates a model on a text, predicts each token of a text, and lets the model continue a text.

use std::path::PathBuf;

use ndarray::{ArrayView1, s};
use rand::Rng as _;

use super::{Evaluation, InputOptions, PredictError, PredictionInput};
use crate::train::data::text::{TextEncoding, load_tokens, load_windows};
use crate::train::data::{DataError, DataSource};
use crate::train::model::LossSums;
use crate::train::model_file::SavedModel;
use crate::train::portable_math::{exp, ln};
use crate::train::random::{self, RandomStream};

/// Returns the files of a text.
fn text_files(input: &InputOptions) -> Result<&[PathBuf], DataError> {
    match &input.data {
        PredictionInput::Table(files) | PredictionInput::Source(DataSource::Text(files)) => Ok(files),
        _ => Err(DataError::Unsuitable(
            "the model reads plain text; pass the name of a text file to --data".into(),
        )),
    }
}

/// Computes the loss of a model on all windows of a text.
pub(super) fn evaluate_text(
    model: &mut SavedModel,
    input: &InputOptions,
) -> Result<Evaluation, PredictError> {
    let encoding =
        model.description().text.as_ref().expect("the caller has checked that the model is for texts");
    let samples = load_windows(text_files(input)?, encoding)?;
    let (count, context) = (samples.len(), encoding.context);
    let mut sums = LossSums::default();
    let rows_at_once = model.inputs_mut().nrows();
    for start in (0..count).step_by(rows_at_once) {
        sums.add(model.evaluate(&samples, start..count.min(start + rows_at_once)));
    }
    let loss = sums.loss / count as f64;
    Ok(Evaluation::Text { tokens: (count * context) as u64, loss, perplexity: exp(loss) })
}

/// What a model predicts for a token of a text.
pub(super) struct TokenPrediction {
    /// The token in the text. The bytes of a token that is not UTF-8 are written as `\xNN`.
    pub(super) token: String,
    /// The natural logarithm of the probability of this token.
    pub(super) log_probability: f64,
    /// The most probable token at this place.
    pub(super) likeliest: String,
}

/// Reads the tokens of a text. `encoding` is that of the model.
pub(super) fn read_tokens(input: &InputOptions, encoding: &TextEncoding) -> Result<Vec<u16>, DataError> {
    load_tokens(text_files(input)?, encoding)
}

/// Calls `each` with each token of a text except the first. The windows are those of [`evaluate_text`], but the last
/// window may be shorter. Returns the number of calls.
pub(super) fn for_each_token(
    model: &mut SavedModel,
    tokens: &[u16],
    mut each: impl FnMut(&TokenPrediction) -> Result<(), PredictError>,
) -> Result<u64, PredictError> {
    let (rows_max, context) = model.inputs_mut().dim();
    let next_tokens = tokens.get(1..).unwrap_or_default();
    let block = rows_max * context;
    for (known, next) in tokens.chunks(block).zip(next_tokens.chunks(block)) {
        // The positions after the last token may hold any tokens, because an output does not depend on later positions.
        model.inputs_mut().fill(0.0);
        model.inputs_mut().iter_mut().zip(known).for_each(|(input, &token)| *input = token.into());
        let outputs = model.compute_outputs(next.len().div_ceil(context));
        let (rows, vocabulary) = (outputs.nrows(), outputs.ncols() / context);
        let outputs = outputs.to_shape((rows * context, vocabulary));
        let outputs = outputs.expect("each position has one output for each token of the vocabulary");
        let predicted: Vec<(f64, usize)> =
            outputs.rows().into_iter().zip(next).map(log_probability).collect();
        let tokenizer = model.tokenizer().expect("a model for texts has a tokenizer");
        let text_of = |token| text_of_token(tokenizer.decode(token));
        for (&token, (log_probability, likeliest)) in next.iter().zip(predicted) {
            if !log_probability.is_finite() {
                let problem =
                    "the outputs of the model are not finite; train the model again with a lower --lr";
                return Err(DataError::Unsuitable(problem.into()).into());
            }
            let (token, likeliest) = (text_of(token), text_of(likeliest as u16));
            each(&TokenPrediction { token, log_probability, likeliest })?;
        }
    }
    Ok(next_tokens.len() as u64)
}

/// Returns the natural logarithm of the probability of `token`, and the most probable token. `outputs` has one number for each
/// token of the vocabulary.
fn log_probability((outputs, &token): (ArrayView1<'_, f32>, &u16)) -> (f64, usize) {
    let max = outputs.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let likeliest = outputs.iter().position(|&value| value == max).unwrap_or_default();
    let difference = |value: f32| f64::from(value) - f64::from(max);
    let sum: f64 = outputs.iter().map(|&value| exp(difference(value))).sum();
    (difference(outputs[usize::from(token)]) - ln(sum), likeliest)
}

/// Returns the text of a token. If its bytes are not UTF-8, returns the bytes that are not ASCII as `\xNN`.
fn text_of_token(bytes: Vec<u8>) -> String {
    let escape =
        |&byte: &u8| if byte.is_ascii() { char::from(byte).to_string() } else { format!("\\x{byte:02x}") };
    String::from_utf8(bytes).unwrap_or_else(|error| error.as_bytes().iter().map(escape).collect())
}

/// How a [`TextGenerator`] chooses tokens.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct GenerationOptions {
    /// The outputs of the model are divided by this number before the softmax. With 0, the generator always chooses the most
    /// probable token.
    pub temperature: f32,
    /// The seed of the random choice.
    pub seed: u64,
}

/// Continues a text, token by token. The iterator returns the bytes of each token, and never ends.
#[derive(Debug)]
pub struct TextGenerator<'a> {
    model: &'a mut SavedModel,
    /// The tokens of the prompt, followed by the generated tokens.
    tokens: Vec<u16>,
    /// The number of tokens that the model reads at once.
    context: usize,
    /// See [`GenerationOptions::temperature`].
    temperature: f64,
    random: RandomStream,
}

impl<'a> TextGenerator<'a> {
    /// Creates a generator that continues `prompt`.
    ///
    /// # Errors
    ///
    /// If the model is not for texts, or if the prompt is empty or has a character that the model does not know.
    pub fn new(
        model: &'a mut SavedModel,
        prompt: &str,
        options: GenerationOptions,
    ) -> Result<Self, DataError> {
        let refuse = |problem: String| DataError::Unsuitable(format!("--prompt: {problem}"));
        let Some((encoding, tokenizer)) = model.description().text.as_ref().zip(model.tokenizer()) else {
            let name = &model.description().model;
            return Err(DataError::Unsuitable(format!(
                "the model {name} does not predict text; pass a model that was trained with --model gpt:..."
            )));
        };
        let tokens = tokenizer.encode(prompt.as_bytes()).map_err(refuse)?;
        if tokens.is_empty() {
            return Err(refuse("it must hold at least one character, which the model continues".into()));
        }
        let (context, temperature) = (encoding.context, options.temperature.into());
        let random = random::random_stream("generate", options.seed, 0);
        Ok(Self { model, tokens, context, temperature, random })
    }

    /// Chooses the next token. `outputs` has one number for each token of the vocabulary.
    fn choose_token(&mut self, outputs: &[f32]) -> usize {
        let max = outputs.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let likeliest = outputs.iter().position(|&value| value == max).unwrap_or_default();
        if self.temperature == 0.0 {
            return likeliest;
        }
        let weights: Vec<f64> =
            outputs.iter().map(|&value| exp(f64::from(value - max) / self.temperature)).collect();
        // 53 bits are the precision of an f64.
        let unit = (self.random.next_u64() >> 11) as f64 / (1_u64 << 53) as f64;
        let mut rest = unit * weights.iter().sum::<f64>();
        let chosen = weights.iter().position(|weight| {
            rest -= weight;
            rest < 0.0
        });
        chosen.unwrap_or(likeliest)
    }
}

impl Iterator for TextGenerator<'_> {
    type Item = Vec<u8>;

    fn next(&mut self) -> Option<Vec<u8>> {
        let known = &self.tokens[self.tokens.len().saturating_sub(self.context)..];
        // The positions after the last token may hold any tokens, because an output does not depend on later
        // positions.
        let mut row = self.model.inputs_mut().slice_move(s![0, ..]);
        row.fill(0.0);
        row.iter_mut().zip(known).for_each(|(input, &token)| *input = token.into());
        let position = known.len() - 1;
        let outputs = self.model.compute_outputs(1);
        let vocabulary = outputs.len() / self.context;
        let outputs: Vec<f32> =
            outputs.iter().skip(position * vocabulary).take(vocabulary).copied().collect();
        let token = self.choose_token(&outputs) as u16;
        self.tokens.push(token);
        self.model.tokenizer().map(|tokenizer| tokenizer.decode(token))
    }
}

#[cfg(test)]
mod tests {
    use super::text_of_token;

    #[test]
    fn only_bytes_that_are_neither_ascii_nor_utf_8_are_escaped() {
        for (bytes, expected) in [
            (&b"a\"\n"[..], "a\"\n"),
            ("\u{e9}".as_bytes(), "\u{e9}"),
            (b"\"\n\\\xe2", "\"\n\\\\xe2"),
            (b"\x80\x81", "\\x80\\x81"),
        ] {
            assert_eq!(text_of_token(bytes.to_vec()), expected);
        }
    }
}
