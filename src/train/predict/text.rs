//! Evaluates a model on a text, and lets the model continue a text.

use ndarray::s;
use rand::Rng as _;

use super::{Evaluation, InputOptions, PredictError, PredictionInput};
use crate::train::data::text::load_windows;
use crate::train::data::{DataError, DataSource};
use crate::train::model::LossSums;
use crate::train::model_file::SavedModel;
use crate::train::portable_math::exp;
use crate::train::random::{self, RandomStream};

/// The error message of `ringtrain predict` for a model for texts.
pub(super) const NO_PREDICTIONS_MESSAGE: &str = "the model predicts the next token of a text, so there are no rows to predict; use \
                                                 `ringtrain eval` for its perplexity, or `ringtrain generate` to continue a text";

/// Computes the loss of a model on all windows of a text.
pub(super) fn evaluate_text(
    model: &mut SavedModel,
    input: &InputOptions,
) -> Result<Evaluation, PredictError> {
    let (PredictionInput::Table(files) | PredictionInput::Source(DataSource::Text(files))) = &input.data
    else {
        let problem = "the model reads plain text; pass the name of a text file to --data";
        return Err(DataError::Unsuitable(problem.into()).into());
    };
    let encoding =
        model.description().text.as_ref().expect("the caller has checked that the model is for texts");
    let samples = load_windows(files, encoding)?;
    let (count, context) = (samples.len(), encoding.context);
    let mut sums = LossSums::default();
    let rows_at_once = model.inputs_mut().nrows();
    for start in (0..count).step_by(rows_at_once) {
        sums.add(model.evaluate(&samples, start..count.min(start + rows_at_once)));
    }
    let loss = sums.loss / count as f64;
    Ok(Evaluation::Text { tokens: (count * context) as u64, loss, perplexity: exp(loss) })
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
