//! Dropout: in a training step, each input becomes 0 with a probability p, and the other inputs are divided by 1 - p.
//! In an evaluation, the layer returns its inputs unchanged.
//!
//! Source: Srivastava et al., "Dropout: a simple way to prevent neural networks from overfitting", JMLR 15 (2014).

use ndarray::{ArrayView2, ArrayViewMut2, Zip};
use rand::Rng as _;

use super::layer::{BackwardPass, ForwardMode, GradientSink, Layer, SavedForBackward, TrainingPass};
use crate::train::random;

/// A layer of dropout.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Dropout {
    /// The number of inputs, which is also the number of outputs.
    pub(crate) width: usize,
    /// The probability with which an input becomes 0: at least 0 and below 1.
    pub(crate) probability: f32,
    /// The index of this layer among the dropout layers, so that each layer draws different random numbers.
    pub(crate) number: u64,
}

impl Layer for Dropout {
    fn inputs(&self) -> usize {
        self.width
    }

    fn outputs(&self) -> usize {
        self.width
    }

    fn allocate_saved(&self, rows: usize) -> SavedForBackward {
        SavedForBackward { values: vec![1.0; rows * self.width], ..SavedForBackward::default() }
    }

    fn forward(
        &self,
        _: &[f32],
        input: ArrayView2<'_, f32>,
        mut output: ArrayViewMut2<'_, f32>,
        saved: &mut SavedForBackward,
        mode: ForwardMode<'_>,
    ) -> Result<(), String> {
        let ForwardMode::Training(TrainingPass { step, indices, .. }) = mode else {
            output.assign(&input);
            return Ok(());
        };
        let key = random::random_stream(&format!("dropout {}", self.number), step.seed, step.step).next_u64();
        let kept_factor = 1.0 / (1.0 - self.probability);
        // An input is dropped if a random number of 32 bits is below this number.
        let threshold = (f64::from(self.probability) * 4_294_967_296.0) as u64;
        for (factors, &sample) in saved.values.chunks_exact_mut(self.width).zip(indices) {
            let mut numbers = random::SplitMix::new(key, u64::from(sample));
            for pair in factors.chunks_mut(2) {
                let bits = numbers.next_word();
                for (factor, bits) in pair.iter_mut().zip([bits >> 32, bits & 0xffff_ffff]) {
                    *factor = if bits < threshold { 0.0 } else { kept_factor };
                }
            }
        }
        let factors = saved_factors(saved, input.dim());
        Zip::from(&mut output).and(&input).and(&factors).for_each(|y, &x, &factor| *y = x * factor);
        Ok(())
    }

    fn backward(&self, _: &[f32], pass: BackwardPass<'_>, _: &mut GradientSink<'_>) -> Result<(), String> {
        let Some(mut input_delta) = pass.input_delta else { return Ok(()) };
        let factors = saved_factors(pass.saved, pass.delta.dim());
        Zip::from(&mut input_delta)
            .and(&pass.delta)
            .and(&factors)
            .for_each(|to, &d, &factor| *to = d * factor);
        Ok(())
    }
}

/// Returns the saved factors of the inputs for the first `rows` samples. A factor is 0 or 1 / (1 - p) in a training step.
fn saved_factors(saved: &SavedForBackward, (rows, width): (usize, usize)) -> ArrayView2<'_, f32> {
    ArrayView2::from_shape((rows, width), &saved.values[..rows * width])
        .expect("the saved values have a factor for each input")
}
