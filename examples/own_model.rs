//! Trains a model of your own: a softmax regression whose matrix of weights is the product of two smaller matrices,
//! y = B (A x) + c. This file has the forward and the backward pass. The trainer divides the batches among the ranks,
//! exchanges gradients or parameters, takes the steps and tests the model.
//!
//! ```sh
//! ringrun -n 4 target/release/examples/own_model
//! ```

use std::num::NonZeroU32;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use ndarray::linalg::general_mat_mul;
use ndarray::{Array2, ArrayView2, ArrayViewMut2, Axis, s};
use ringtrain::train::data::DataSource;
use ringtrain::train::model::{
    BackwardPass, ForwardMode, GradientSink, Layer, ModelSpec, OwnModel, SavedForBackward,
};
use ringtrain::train::{Config, SilentObserver, StrategySpec, run};
use ringtrain::{Group, Rank};

/// The number of rows of A.
const FACTORS: usize = 6;

/// The layer y = B (A x) + c. The parameters are A, B and c, one after the other.
#[derive(Debug)]
struct FactorizedLayer {
    inputs: usize,
    outputs: usize,
}

impl FactorizedLayer {
    /// Returns A (factors, inputs), B (outputs, factors) and c.
    fn split<'a>(&self, parameters: &'a [f32]) -> (ArrayView2<'a, f32>, ArrayView2<'a, f32>, &'a [f32]) {
        let (a, rest) = parameters.split_at(FACTORS * self.inputs);
        let (b, c) = rest.split_at(self.outputs * FACTORS);
        let matrix = |shape, values| ArrayView2::from_shape(shape, values).expect("the lengths fit");
        (matrix((FACTORS, self.inputs), a), matrix((self.outputs, FACTORS), b), c)
    }
}

impl Layer for FactorizedLayer {
    fn inputs(&self) -> usize {
        self.inputs
    }

    fn outputs(&self) -> usize {
        self.outputs
    }

    fn tensor_names_and_shapes(&self) -> Vec<(String, Vec<usize>)> {
        vec![
            ("a".into(), vec![FACTORS, self.inputs]),
            ("b".into(), vec![self.outputs, FACTORS]),
            ("c".into(), vec![self.outputs]),
        ]
    }

    fn initialize(&self, parameters: &mut [f32], uniform: &mut dyn FnMut() -> f32) {
        let bias_start = parameters.len() - self.outputs;
        parameters[..bias_start].fill_with(|| 0.3 * uniform());
    }

    fn forward(
        &self,
        parameters: &[f32],
        input: ArrayView2<'_, f32>,
        mut output: ArrayViewMut2<'_, f32>,
        _: &mut SavedForBackward,
        _: ForwardMode<'_>,
    ) -> Result<(), String> {
        let (a, b, c) = self.split(parameters);
        output.assign(&ArrayView2::from_shape((1, self.outputs), c).expect("the lengths fit"));
        general_mat_mul(1.0, &input.dot(&a.t()), &b.t(), 1.0, &mut output);
        Ok(())
    }

    fn backward(
        &self,
        parameters: &[f32],
        pass: BackwardPass<'_>,
        gradients: &mut GradientSink<'_>,
    ) -> Result<(), String> {
        let (a, b, _) = self.split(parameters);
        let BackwardPass { input, delta, input_delta, .. } = pass;
        // The derivative of the loss with respect to A x.
        let hidden_delta = delta.dot(&b);
        gradients.add_gradients(input.nrows(), |rows, gradients| {
            let (x, d) = (input.slice(s![rows.clone(), ..]), delta.slice(s![rows.clone(), ..]));
            let of_a = hidden_delta.slice(s![rows, ..]).t().dot(&x);
            let of_b: Array2<f32> = d.t().dot(&x.dot(&a.t()));
            let of_c = d.sum_axis(Axis(0));
            let new = of_a.iter().chain(&of_b).chain(&of_c);
            gradients.iter_mut().zip(new).for_each(|(sum, value)| *sum += value);
        });
        if let Some(mut input_delta) = input_delta {
            general_mat_mul(1.0, &hidden_delta, &a, 0.0, &mut input_delta);
        }
        Ok(())
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut group = Group::from_environment()?;
    let model = OwnModel::new("factorized softmax", |input, outputs| {
        Ok(vec![Arc::new(FactorizedLayer { inputs: input.features, outputs }) as Arc<dyn Layer>])
    });
    let steps = NonZeroU32::new(4).ok_or("the number of steps is above 0")?;
    for strategy in [StrategySpec::AllReduce, StrategySpec::LocalSgd { steps }] {
        let config = Config {
            model: Some(ModelSpec::Own(model.clone())),
            strategy,
            epochs: Some(15),
            learning_rate: Some(0.02),
            ..Config::new(DataSource::Digits)
        };
        let summary = run(&mut group, &config, &AtomicBool::new(false), &mut SilentObserver)?;
        let accuracy = summary.report.test_accuracy.ok_or("the digits have a test set")?;
        if group.rank() == Rank::ZERO {
            println!("{strategy}: {} ranks, test accuracy {accuracy:.3}", group.size());
        }
        assert!(accuracy > 0.9, "the model learns the digits");
    }
    Ok(())
}
