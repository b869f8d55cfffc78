//! Tests of models whose layers or losses the program implements itself.

use std::sync::Arc;

use ndarray::linalg::general_mat_mul;
use ndarray::{ArrayView2, ArrayViewMut2, s};
use ringtrain::train::data::{DataSource, HeaderRow, Task, TextOptions};
use ringtrain::train::model::{
    BackwardPass, ForwardMode, GradientSink, InputShape, Layer, ModelSpec, OwnModel, SampleLoss,
    SampleTarget, SavedForBackward,
};
use ringtrain::train::model_file::SavedModel;
use ringtrain::train::predict::{
    Evaluation, InputOptions, PredictionInput, PredictionOutput, TargetColumn, evaluate, predict,
};
use ringtrain::train::{BucketBytes, Config, ExistingCheckpoint, Recipe, TrainError};

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
        let config = Config {
            strategy: parse_strategy(strategy),
            bucket_bytes: bucket_bytes.map(BucketBytes::Fixed),
            ..config.clone()
        };
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
    let tensor = Config { strategy: parse_strategy("tensor"), ..own_config(4) };
    for (config, expected) in [
        (own(&[64, 8, 9]), "has 2 layers and 9 outputs, but needs 10 outputs"),
        (own(&[63, 10]), "has 63 inputs in layer 1, but this layer gets 64 values"),
        (own(&[64]), "has 0 layers"),
        (tensor, "--strategy tensor divides fully connected layers only"),
    ] {
        let error: TrainError = train(&config).unwrap_err();
        assert!(error.to_string().contains(expected), "{error}");
    }
}

/// Returns the options for reading all digits.
fn digits() -> InputOptions {
    InputOptions {
        data: PredictionInput::Source(DataSource::Digits),
        header: HeaderRow::Expected,
        separator: None,
        target: TargetColumn::SameName,
    }
}

#[test]
fn a_saved_model_predicts_in_a_program_that_has_its_layers() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let config = Config { model_file: Some(path("m")), test_fraction: 0.0, ..own_config(9) };
    let expected = train(&config).unwrap().report.train_accuracy.unwrap();
    let Some(ModelSpec::Own(own)) = &config.model else { panic!("the model is an own model") };
    let mut model = SavedModel::load_own(&path("m"), own).unwrap();
    let Evaluation::Classification { accuracy, .. } = evaluate(&mut model, &digits(), None).unwrap() else {
        panic!("the model predicts classes")
    };
    assert!(expected > 0.6 && (accuracy - expected).abs() < 1e-9, "{accuracy} {expected}");
    let rows = predict(&mut model, &digits(), &PredictionOutput::Csv(path("out.csv"))).unwrap();
    assert_eq!((rows, std::fs::read_to_string(path("out.csv")).unwrap().lines().count()), (1797, 1798));

    let build = |widths: &'static [usize]| move |_: InputShape, _| Ok(layers(widths));
    for (name, widths, problem) in [
        ("linear 8", &[64, 9, 10][..], "the program passed the model own:linear 8"),
        ("linear 9", &[64, 8, 10], "the tensor layers.0.matrix has the shape [9, 64] and not [8, 64]"),
    ] {
        let error = SavedModel::load_own(&path("m"), &OwnModel::new(name, build(widths))).unwrap_err();
        assert!(error.to_string().contains(problem), "{error}");
    }
    let error = SavedModel::load(&path("m")).unwrap_err().to_string();
    assert!(error.contains("own:linear 9") && error.contains("`SavedModel::load_own`"), "{error}");
}

/// The quantile loss: a model with this loss predicts the number below which a fraction of 0.8 of the targets lie.
struct Quantile;

impl SampleLoss for Quantile {
    fn differentiate(&self, outputs: &[f32], target: SampleTarget, derivatives: &mut [f32]) -> f64 {
        let SampleTarget::Number(target) = target else { panic!("the loss is for numbers") };
        let error = target - f64::from(outputs[0]);
        let factor = if error > 0.0 { 0.8 } else { -0.2 };
        derivatives[0] = -factor as f32;
        factor * error
    }
}

/// The negative logarithm of the normal density. The outputs are the mean and the logarithm of the deviation.
struct NormalDensity;

impl SampleLoss for NormalDensity {
    fn outputs_for_number(&self) -> usize {
        2
    }

    fn differentiate(&self, outputs: &[f32], target: SampleTarget, derivatives: &mut [f32]) -> f64 {
        let SampleTarget::Number(target) = target else { panic!("the loss is for numbers") };
        let (mean, log_deviation) = (f64::from(outputs[0]), f64::from(outputs[1]));
        let distance = (target - mean) / log_deviation.exp();
        derivatives[0] = (-distance / log_deviation.exp()) as f32;
        derivatives[1] = (1.0 - distance * distance) as f32;
        0.5 * distance * distance + log_deviation
    }
}

/// The cross-entropy.
struct Entropy;

impl SampleLoss for Entropy {
    fn differentiate(&self, outputs: &[f32], target: SampleTarget, derivatives: &mut [f32]) -> f64 {
        let SampleTarget::Class(class) = target else { panic!("the loss is for classes") };
        let sum: f64 = outputs.iter().map(|&output| f64::from(output).exp()).sum();
        for (derivative, &output) in derivatives.iter_mut().zip(outputs) {
            *derivative = (f64::from(output).exp() / sum) as f32;
        }
        derivatives[class] -= 1.0;
        sum.ln() - f64::from(outputs[class])
    }
}

/// Returns a configuration with the layers of [`own_config`] and with an own loss.
fn config_with_loss(loss: impl SampleLoss) -> Config {
    let build = |input: InputShape, outputs| Ok(layers(&[input.features, 9, outputs]));
    Config { model: Some(ModelSpec::Own(OwnModel::new("linear 9", build).with_loss(loss))), ..own_config(9) }
}

#[test]
fn an_own_cross_entropy_gives_the_same_run_as_the_built_in_loss() {
    let expected = train(&own_config(9)).unwrap();
    let config = config_with_loss(Entropy);
    for (strategy, ranks) in [("allreduce", 1), ("pipeline:2", 2), ("ps-sync", 3)] {
        let found =
            train_and_compare(ranks, &Config { strategy: parse_strategy(strategy), ..config.clone() });
        assert_close(&found.parameters, &expected.parameters, strategy);
        assert_eq!(found.report.test_accuracy, expected.report.test_accuracy);
        assert!((found.report.test_loss.unwrap() - expected.report.test_loss.unwrap()).abs() < 1e-6);
    }
}

/// The target is uniform noise from 0 to 10, so the loss of the best prediction is known. The only feature is always 1, so the
/// prediction is the same in all rows.
#[test]
fn own_losses_of_numbers_are_minimized() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("noise.csv");
    let rows: Vec<String> =
        (0..1000).map(|row| format!("1,{}", f64::from(row * 389 % 1000) / 100.0)).collect();
    std::fs::write(&path, format!("x,y\n{}\n", rows.join("\n"))).unwrap();
    let table = |config: Config| Config {
        source: DataSource::Csv(path.clone()),
        target: Some("y".into()),
        task: Some(Task::Regression),
        standardize: false,
        rule: None,
        epochs: Some(20),
        learning_rate: Some(0.02),
        test_fraction: 0.0,
        ..config
    };
    let deviation = 10.0 / 12.0_f64.sqrt();
    for (config, expected) in
        [(config_with_loss(Quantile), 0.8), (config_with_loss(NormalDensity), 0.5 + deviation.ln())]
    {
        let report = train(&table(config)).unwrap().report;
        assert!((report.train_loss - expected).abs() < 0.03, "{} {expected}", report.train_loss);
        assert_eq!(report.train_r2, None);
    }
}

#[test]
fn own_losses_refuse_options_for_other_losses() {
    let recipe = Recipe { label_smoothing: 0.1, ..Recipe::default() };
    let error = train(&Config { recipe, ..config_with_loss(Entropy) }).unwrap_err().to_string();
    assert!(error.contains("--label-smoothing and --class-weights do not apply"), "{error}");
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("a.txt");
    std::fs::write(&path, "the sea and the ship ".repeat(100)).unwrap();
    let text = TextOptions { context: 16, ..TextOptions::default() };
    let config = Config { source: DataSource::Text(vec![path]), text, ..config_with_loss(Entropy) };
    let error = train(&config).unwrap_err().to_string();
    assert!(error.contains("a loss of your own is for numbers and classes, and not for texts"), "{error}");
}
