//! Tests of models whose layers the program builds itself.

use std::sync::Arc;

use ndarray::linalg::general_mat_mul;
use ndarray::{ArrayView2, ArrayViewMut2, s};
use ringtrain::train::model::{
    BackwardPass, ForwardMode, GradientSink, InputShape, Layer, ModelSpec, OwnModel, SavedForBackward,
};
use ringtrain::train::{Config, ExistingCheckpoint, TrainError};

use super::library::{checkpoint_in, train};
use super::strategies::{assert_close, parse_strategy, sgd_config, train_and_compare};

/// The layer y = W x.
#[derive(Debug)]
struct Linear {
    inputs: usize,
    outputs: usize,
}

impl Linear {
    fn weight<'a>(&self, parameters: &'a [f32]) -> ArrayView2<'a, f32> {
        ArrayView2::from_shape((self.outputs, self.inputs), parameters).unwrap()
    }
}

impl Layer for Linear {
    fn inputs(&self) -> usize {
        self.inputs
    }

    fn outputs(&self) -> usize {
        self.outputs
    }

    fn tensor_names_and_shapes(&self) -> Vec<(String, Vec<usize>)> {
        vec![("matrix".into(), vec![self.outputs, self.inputs])]
    }

    fn initialize(&self, parameters: &mut [f32], uniform: &mut dyn FnMut() -> f32) {
        parameters.fill_with(|| 0.2 * uniform());
    }

    fn forward(
        &self,
        parameters: &[f32],
        input: ArrayView2<'_, f32>,
        mut output: ArrayViewMut2<'_, f32>,
        _: &mut SavedForBackward,
        _: ForwardMode<'_>,
    ) -> Result<(), String> {
        general_mat_mul(1.0, &input, &self.weight(parameters).t(), 0.0, &mut output);
        Ok(())
    }

    fn backward(
        &self,
        parameters: &[f32],
        pass: BackwardPass<'_>,
        gradients: &mut GradientSink<'_>,
    ) -> Result<(), String> {
        let BackwardPass { input, delta, input_delta, .. } = pass;
        gradients.add_gradients(input.nrows(), |rows, gradients| {
            let (x, d) = (input.slice(s![rows.clone(), ..]), delta.slice(s![rows, ..]));
            let new = d.t().dot(&x);
            gradients.iter_mut().zip(&new).for_each(|(sum, value)| *sum += value);
        });
        if let Some(mut input_delta) = input_delta {
            general_mat_mul(1.0, &delta, &self.weight(parameters), 0.0, &mut input_delta);
        }
        Ok(())
    }
}

pub(crate) fn layers(widths: &[usize]) -> Vec<Arc<dyn Layer>> {
    let layer = |pair: &[usize]| Arc::new(Linear { inputs: pair[0], outputs: pair[1] }) as Arc<dyn Layer>;
    widths.windows(2).map(layer).collect()
}

/// Returns a configuration with a model of two layers, `hidden` wide.
fn own_config(hidden: usize) -> Config {
    let build = move |input: InputShape, outputs| Ok(layers(&[input.features, hidden, outputs]));
    let model = Some(ModelSpec::Own(OwnModel::new(format!("linear {hidden}"), build)));
    Config { model, epochs: Some(2), batch_size: Some(90), ..sgd_config() }
}

/// The model has the same parameters with each of these strategies: they use its layers, buckets and gradients.
#[test]
fn the_parameters_do_not_depend_on_the_ranks_that_hold_them() {
    let config = own_config(9);
    let expected = train(&config).unwrap();
    assert!(expected.report.test_accuracy.unwrap() > 0.6, "{:?}", expected.report);
    for (strategy, ranks, bucket_bytes) in [("allreduce", 3, Some(500)), ("pipeline:2", 2, None)] {
        let config = Config { strategy: parse_strategy(strategy), bucket_bytes, ..config.clone() };
        let found = train_and_compare(ranks, &config);
        assert_close(&found.parameters, &expected.parameters, strategy);
    }
}

#[test]
fn a_run_resumes_only_with_the_same_model() {
    let directory = tempfile::tempdir().unwrap();
    let checkpoint = |existing| Some(checkpoint_in(directory.path(), existing));
    let short =
        Config { epochs: Some(1), checkpoint: checkpoint(ExistingCheckpoint::Refuse), ..own_config(4) };
    train(&short).unwrap();
    let resumed = Config { checkpoint: checkpoint(ExistingCheckpoint::Resume), ..own_config(4) };
    assert_eq!(train(&resumed).unwrap().parameters, train(&own_config(4)).unwrap().parameters);
    let other = Config { checkpoint: resumed.checkpoint, ..own_config(5) };
    let error = train(&other).unwrap_err().to_string();
    assert!(error.contains("own:linear 4") && error.contains("own:linear 5"), "{error}");
}

#[test]
fn layers_and_options_that_do_not_fit_are_refused() {
    let own = |widths: &'static [usize]| {
        let model = OwnModel::new("test", move |_, _| Ok(layers(widths)));
        Config { model: Some(ModelSpec::Own(model)), ..own_config(4) }
    };
    let saves = Config { model_file: Some("m".into()), ..own_config(4) };
    let tensor = Config { strategy: parse_strategy("tensor"), ..own_config(4) };
    for (config, expected) in [
        (own(&[64, 8, 9]), "has 2 layers and 9 outputs, but needs 10 outputs"),
        (own(&[63, 10]), "has 63 inputs in layer 1, but this layer gets 64 values"),
        (own(&[64]), "has 0 layers"),
        (saves, "cannot describe the layers of the program's own model linear 4"),
        (tensor, "--strategy tensor divides fully connected layers only"),
    ] {
        let error: TrainError = train(&config).unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
    }
}
