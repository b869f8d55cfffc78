//! Checks that the default settings reach the optimum of convex models, on any number of ranks. The tests compute the
//! optimum with other methods.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use ndarray::{Array1, Array2, Axis, concatenate, s};
use ringtrain::train::data::DataSource;
use ringtrain::train::{CompletedStep, Config, EpochRecord, Observer, Report, SilentObserver, run};

use super::library::{PrintedLines, config, train};
use super::util::{ranks, runs_long_tests};

/// A generator of uniform random numbers from -1 to 1. The seed determines the sequence.
struct UniformNumbers(u64);

impl UniformNumbers {
    fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 11) as f64 / (1_u64 << 52) as f64 - 1.0
    }

    fn array(&mut self, rows: usize, columns: usize) -> Array2<f64> {
        Array2::from_shape_simple_fn((rows, columns), || self.next())
    }
}

/// Writes a CSV file with the features and, in the column `y`, the target.
fn write_table(directory: &Path, name: &str, features: &Array2<f64>, target: &Array1<f64>) -> PathBuf {
    let path = directory.join(name);
    let names: Vec<String> = (0..features.ncols()).map(|column| format!("x{column}")).collect();
    let mut text = format!("{},y\n", names.join(","));
    for (row, value) in features.rows().into_iter().zip(target) {
        for x in row {
            write!(text, "{x},").unwrap();
        }
        writeln!(text, "{value}").unwrap();
    }
    std::fs::write(&path, text).unwrap();
    path
}

/// Solves a symmetric positive definite system by Gaussian elimination.
fn solve_linear_system(mut matrix: Array2<f64>, mut right: Array1<f64>) -> Array1<f64> {
    let size = right.len();
    for pivot in 0..size {
        for row in pivot + 1..size {
            let factor = matrix[[row, pivot]] / matrix[[pivot, pivot]];
            for column in pivot..size {
                matrix[[row, column]] -= factor * matrix[[pivot, column]];
            }
            right[row] -= factor * right[pivot];
        }
    }
    for row in (0..size).rev() {
        let known: f64 = (row + 1..size).map(|column| matrix[[row, column]] * right[column]).sum();
        right[row] = (right[row] - known) / matrix[[row, row]];
    }
    right
}

/// Returns the features and a column of ones for the bias.
fn add_column_of_ones(features: &Array2<f64>) -> Array2<f64> {
    concatenate![Axis(1), *features, Array2::ones((features.nrows(), 1))]
}

/// Returns the R² of the least-squares solution.
fn best_r2(features: &Array2<f64>, target: &Array1<f64>) -> f64 {
    let x = add_column_of_ones(features);
    let weights = solve_linear_system(x.t().dot(&x), x.t().dot(target));
    let mean = target.mean().unwrap();
    let total: f64 = target.iter().map(|y| (y - mean).powi(2)).sum();
    1.0 - (target - &x.dot(&weights)).mapv(|error| error * error).sum() / total
}

/// Computes the maximum-likelihood logistic regression with Newton's method, and returns its accuracy.
fn best_accuracy(features: &Array2<f64>, target: &Array1<f64>) -> f64 {
    let x = add_column_of_ones(features);
    let mut weights = Array1::zeros(x.ncols());
    for _ in 0..20 {
        let probabilities = x.dot(&weights).mapv(|score: f64| 1.0 / (1.0 + (-score).exp()));
        let curvature = probabilities.mapv(|p| p * (1.0 - p)).insert_axis(Axis(1));
        weights = &weights
            + &solve_linear_system(x.t().dot(&(&x * &curvature)), x.t().dot(&(target - &probabilities)));
    }
    let correct =
        x.dot(&weights).iter().zip(target).filter(|(score, y)| (**score > 0.0) == (**y > 0.5)).count();
    correct as f64 / target.len() as f64
}

/// Returns a configuration that trains `model` on the table at `path` with the default settings.
fn default_config(path: PathBuf, model: &str) -> Config {
    Config {
        source: DataSource::Csv(path),
        target: Some("y".into()),
        model: Some(model.parse().unwrap()),
        test_fraction: 0.0,
        ..config()
    }
}

/// Regression test: before the fix, the default was Adam at a constant rate, and the results of these runs were up to
/// 40% below the optimum.
#[test]
#[ignore = "runs with tools/test --full"]
fn linear_and_softmax_reach_the_optimum_with_the_defaults() {
    let directory = tempfile::tempdir().unwrap();
    let mut numbers = UniformNumbers(1);
    // 60 rows with an exact linear relation. The second feature has a different unit.
    let mut exact = numbers.array(60, 4);
    exact.slice_mut(s![.., 1]).mapv_inplace(|x| 100.0 * x - 300.0);
    let exact_target = exact.dot(&ndarray::array![1.5, -2.0, 0.25, 30.0]) + 7.0;
    let noisy = numbers.array(500, 8);
    let noisy_target = noisy.dot(&numbers.array(8, 1)).remove_axis(Axis(1)) + numbers.array(500, 1).column(0);
    // Six features: the last three are linear combinations of the first three, plus small differences. The target
    // depends strongly on one of these differences.
    let base = numbers.array(300, 3);
    let difference = numbers.array(300, 3) * 0.02;
    let mixtures = base.dot(&numbers.array(3, 3)) + &difference;
    let correlated = concatenate![Axis(1), base, mixtures];
    let correlated_target = correlated.sum_axis(Axis(1)) + difference.column(0).mapv(|x| 50.0 * x);
    for (name, features, target) in [
        ("exact.csv", exact, exact_target),
        ("noisy.csv", noisy.clone(), noisy_target.clone()),
        ("correlated.csv", correlated, correlated_target),
    ] {
        // In the short tests, `softmax` learns this table.
        if name == "noisy.csv" && !runs_long_tests() {
            continue;
        }
        let expected = best_r2(&features, &target);
        let path = write_table(directory.path(), name, &features, &target);
        let report = train(&default_config(path, "linear")).unwrap().report;
        let found = report.train_r2.unwrap();
        assert!(
            (found - expected).abs() < 1e-3 * expected,
            "{name}: {found} {expected}, {} epochs",
            report.epochs
        );
    }
    let classes = noisy_target.mapv(|y| f64::from(u8::from(y > 0.0)));
    let expected = best_accuracy(&noisy, &classes);
    let path = write_table(directory.path(), "classes.csv", &noisy, &classes);
    let report = train(&default_config(path, "softmax")).unwrap().report;
    let found = report.train_accuracy.unwrap();
    assert!((found - expected).abs() <= 0.005, "{found} {expected}");
    assert_eq!((report.optimizer.as_str(), report.batch_size), ("accelerated", 500));
}

/// Regression test: before the fix, the default was 40 epochs, even if an epoch had only one step. With 40 epochs,
/// the accuracy on the iris flowers was only 0.77.
#[test]
#[ignore = "runs with tools/test --full"]
fn the_default_settings_take_enough_steps_on_a_small_table() {
    let directory = tempfile::tempdir().unwrap();
    let mut numbers = UniformNumbers(5);
    // The table resembles that of the iris flowers: the features of a row are the mean of one of three species, plus
    // random numbers of a similar range.
    let means = ndarray::array![[5.0, 3.4, 1.5, 0.2], [5.9, 2.8, 4.3, 1.3], [6.6, 3.0, 5.6, 2.0]];
    let classes = Array1::from_shape_fn(60, |row| (row % 3) as f64);
    let mut features = numbers.array(60, 4) * &ndarray::array![0.9, 0.6, 0.8, 0.4];
    for (mut row, class) in features.rows_mut().into_iter().zip(&classes) {
        row += &means.row(*class as usize);
    }
    let path = write_table(directory.path(), "flowers.csv", &features, &classes);
    let report = train(&Config { model: None, ..default_config(path, "linear") }).unwrap().report;
    assert!(report.train_accuracy.unwrap() >= 0.95, "{:?}", report.train_accuracy);
    assert_eq!((report.model.as_str(), report.epochs, report.history.len()), ("mlp:128", 480, 40));
}

/// Trains on `count` ranks and returns their reports.
fn train_on_ranks(count: u32, config: &Config) -> Vec<Report> {
    let config = config.clone();
    let train = move |mut group| {
        run(&mut group, &config, &AtomicBool::new(false), &mut SilentObserver).unwrap().report
    };
    ranks::run(count, train)
}

#[test]
fn the_default_settings_give_the_same_result_on_every_number_of_ranks() {
    let directory = tempfile::tempdir().unwrap();
    let mut numbers = UniformNumbers(2);
    let features = numbers.array(61, 3);
    let target = features.sum_axis(Axis(1)) + numbers.array(61, 1).column(0);
    let path = write_table(directory.path(), "table.csv", &features, &target);
    let config = Config { epochs: Some(100), ..default_config(path, "linear") };
    let reports: Vec<Report> = [1, 2, 3].iter().flat_map(|&count| train_on_ranks(count, &config)).collect();
    for report in &reports {
        assert_eq!((report.lr, report.epochs), (reports[0].lr, reports[0].epochs));
        let (found, expected) = (report.train_loss, reports[0].train_loss);
        assert!((found - expected).abs() < 1e-6 * expected, "{found} {expected}");
    }
}

#[test]
fn a_run_reports_whether_it_converged_or_needs_more_epochs() {
    let directory = tempfile::tempdir().unwrap();
    let features = UniformNumbers(3).array(40, 2);
    let path = write_table(directory.path(), "table.csv", &features, &features.sum_axis(Axis(1)));
    let converging = default_config(path, "linear");
    let short = Config { epochs: Some(5), learning_rate: Some(1e-3), ..converging.clone() };
    for (config, expected) in
        [(converging, "converged: the loss"), (short, "still improving: raise --epochs or --lr")]
    {
        let mut lines = PrintedLines(Vec::new());
        run(&mut ringtrain::Group::solo(), &config, &AtomicBool::new(false), &mut lines).unwrap();
        assert!(lines.0.iter().any(|line| line.starts_with(expected)), "{expected}: {:?}", lines.0);
    }
}

/// Flips one bit of a parameter after epoch 2, as defective memory does.
struct FlipBit {
    /// The number of completed epochs.
    epochs: u64,
}

impl Observer for FlipBit {
    fn notice(&mut self, _: &str) {}
    fn epoch_started(&mut self, _: u64, _: u64, _: u64, _: u64) {}
    fn step_taken(&mut self, _: &CompletedStep) {}
    fn epoch_ended(&mut self, _: u64, _: Option<&EpochRecord>) {}
    fn adjust_parameters(&mut self, parameters: &mut [f32]) {
        self.epochs += 1;
        if self.epochs == 2 {
            parameters[3] = f32::from_bits(parameters[3].to_bits() ^ 1);
        }
    }
}

/// Trains on `count` ranks. Rank 1 flips a bit after epoch 2. Returns the errors of all ranks.
fn errors_after_rank_1_flips_a_bit(count: u32, config: &Config) -> Vec<String> {
    let config = config.clone();
    ranks::run(count, move |mut group| {
        let stop = AtomicBool::new(false);
        let result = if group.rank().get() == 1 {
            run(&mut group, &config, &stop, &mut FlipBit { epochs: 0 })
        } else {
            run(&mut group, &config, &stop, &mut SilentObserver)
        };
        result.unwrap_err().to_string()
    })
}

/// Regression test: in an early version, ranks with a corrupted parameter trained different models, and ended with
/// exit code 0. A later version compared the parameters only after those epochs that are reported. In the second run
/// here, which has 100 epochs of one step each, epoch 2 is not reported.
#[test]
fn a_corrupted_parameter_ends_the_job_on_all_ranks() {
    let digits = Config { epochs: Some(3), batch_size: Some(500), ..config() };
    let directory = tempfile::tempdir().unwrap();
    let features = UniformNumbers(4).array(40, 3);
    let path = write_table(directory.path(), "table.csv", &features, &features.sum_axis(Axis(1)));
    let table = Config { epochs: Some(100), ..default_config(path, "linear") };
    for config in [digits, table] {
        for (count, expected) in [
            (2, "ranks 0, 1 hold different parameters after epoch 2"),
            (3, "rank 1 holds different parameters than the other ranks after epoch 2"),
        ] {
            let errors = errors_after_rank_1_flips_a_bit(count, &config);
            assert!(errors.iter().all(|error| error.starts_with(expected)), "{errors:?}");
            assert!(errors[0].contains("resume from the last checkpoint"), "{errors:?}");
        }
    }
}
