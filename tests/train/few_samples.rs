//! Training sets with fewer samples than ranks.

use std::fs;

use ringtrain::train::data::{DataSource, Task};
use ringtrain::train::optimizer::Rule;
use ringtrain::train::{Config, Recipe, SHARDS_DEFAULT};

use super::cnn::write_array;
use super::library::{config, train};
use super::strategies::{assert_close, parse_strategy, train_and_compare};
use super::util::runs_long_tests;

/// Strategies, and whether each strategy takes the steps of a single process. Without `tools/test --full`, the test runs only
/// the first three.
const STRATEGIES: &[(&str, bool)] = &[
    ("allreduce", true),
    ("ps-async", false),
    ("gossip", false),
    ("local-sgd:1", true),
    ("ps-sync", true),
    ("tensor", true),
    ("hybrid:5x1", true),
    ("local-sgd:2", false),
    ("diloco:2", false),
    ("model-average", false),
];

/// Two or more of the five ranks have no sample in any step. No strategy refuses such a run.
#[test]
#[ignore = "runs with tools/test --full"]
fn three_samples_train_on_five_ranks() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    fs::write(path("t.csv"), "a,b,y\n1,7,2\n3,2,5\n4,4,9\n").unwrap();
    write_array(&path("x.npy"), &[3, 2], &[1, 7, 3, 2, 4, 4]);
    write_array(&path("y.npy"), &[3], &[2, 5, 9]);
    let sources = [
        (DataSource::Csv(path("t.csv")), Some("y".into())),
        (DataSource::Npy(path("x.npy"), path("y.npy")), None),
    ];
    for (source, target) in sources {
        let task = Some(Task::Regression);
        let by_default = Config { source, target, task, epochs: Some(20), test_fraction: 0.0, ..config() };
        let sgd = Config {
            model: Some("mlp:6".parse().unwrap()),
            rule: Some(Rule::Sgd),
            learning_rate: Some(0.1),
            epochs: Some(3),
            ..by_default.clone()
        };
        let recipe = Recipe { reproducible_shards: Some(SHARDS_DEFAULT), ..Recipe::default() };
        let mut runs = vec![("defaults", by_default.clone(), true)];
        for &(text, is_synchronous) in STRATEGIES {
            let strategy = parse_strategy(text);
            runs.push((text, Config { strategy, ..sgd.clone() }, is_synchronous));
        }
        runs.push(("--shard-optimizer", Config { shard_optimizer: true, ..sgd.clone() }, true));
        runs.push(("--reproducible", Config { recipe, ..sgd.clone() }, true));
        runs.truncate(if runs_long_tests() { usize::MAX } else { 3 });
        for (name, config, is_synchronous) in runs {
            let found = train_and_compare(5, &config);
            assert_eq!(found.report.train_samples, 3, "{name}");
            assert!(found.report.train_loss.is_finite(), "{name}: {:?}", found.report);
            if is_synchronous {
                let alone = Config { strategy: parse_strategy("allreduce"), ..config };
                assert_close(&found.parameters, &train(&alone).unwrap().parameters, name);
            }
        }
    }
}

/// The ranks divide the rows of this table, because it has more than 65,536 cells. Two ranks hold no row, and still take part in
/// the statistics of the columns.
#[test]
#[ignore = "runs with tools/test --full"]
fn three_wide_rows_train_on_five_ranks() {
    const COLUMNS: usize = 22_000;
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("wide.csv");
    let join = |cell: &dyn Fn(usize) -> String| (0..COLUMNS).map(cell).collect::<Vec<_>>().join(",");
    let row = |row: usize| format!("{},{row}\n", join(&|column| format!("{}", (row + 1) * column % 997)));
    let names = join(&|column| format!("c{column}"));
    fs::write(&path, format!("{names},y\n{}{}{}", row(0), row(1), row(2))).unwrap();
    let config = Config {
        source: DataSource::Csv(path),
        target: Some("y".into()),
        task: Some(Task::Regression),
        epochs: Some(2),
        test_fraction: 0.0,
        ..config()
    };
    let (alone, found) = (train(&config).unwrap(), train_and_compare(5, &config));
    assert_eq!(found.report.train_samples, 3);
    assert_close(&found.parameters, &alone.parameters, "22,000 columns");
}
