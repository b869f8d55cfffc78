//! Tests of a GPT on plain text. Programs without the feature `candle` only test that the model is refused.

use std::fs;
use std::path::Path;

use super::program::{assert_fails, ringtrain_stdout};

/// Some sentences with a pattern that a small model learns in a few steps.
fn write_text(directory: &Path) {
    fs::write(directory.join("a.txt"), "the sea – the whale – the ship.\n".repeat(40)).unwrap();
}

#[cfg(not(feature = "candle"))]
#[test]
fn a_program_without_candle_says_how_to_build_it() {
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path();
    write_text(place);
    let expected = "--model gpt:1,1,8 needs the feature `candle`, but this program was built without this feature; build";
    assert_fails(place, "--data a.txt --model gpt:1,1,8", 2, expected);
    assert_fails(place, "--data a.txt --model gpt:1,1,8 --tokens bpe:300", 2, expected);
    assert_fails(
        place,
        "--data a.txt --format text",
        2,
        "is plain text; pass --model gpt:LAYERS,HEADS,WIDTH",
    );
    assert!(ringtrain_stdout(place, "--help").contains("needs a program built"));
}

#[cfg(feature = "candle")]
mod with_candle {
    use std::num::NonZeroU32;
    use std::sync::atomic::AtomicBool;

    use ringtrain::Group;
    use ringtrain::train::data::{DataSource, TextOptions, TokenKind};
    use ringtrain::train::optimizer::Rule;
    use ringtrain::train::{BucketBytes, Config, ExistingCheckpoint, StrategySpec, run};
    use serde_json::Value;

    use super::super::library::{StopAfter, checkpoint_in, config, train};
    use super::super::strategies::{NONE, train_and_compare, train_on};
    use super::*;

    /// Returns the configuration of a run of 18 steps on the text in `directory`.
    fn gpt_config(directory: &Path, tokens: TokenKind) -> Config {
        write_text(directory);
        Config {
            source: DataSource::Text(vec![directory.join("a.txt")]),
            model: Some("gpt:2,2,16".parse().unwrap()),
            text: TextOptions { tokens, context: 16 },
            epochs: Some(3),
            batch_size: Some(12),
            rule: Some(Rule::Momentum { momentum: 0.9 }),
            learning_rate: Some(0.1),
            ..config()
        }
    }

    #[test]
    fn the_parameters_do_not_depend_on_the_number_of_ranks() {
        let directory = tempfile::tempdir().unwrap();
        for tokens in [TokenKind::Characters, TokenKind::Bytes, TokenKind::BytePairs { vocabulary: 280 }] {
            let config = gpt_config(directory.path(), tokens);
            let expected = train(&config).unwrap();
            let strategies = [StrategySpec::AllReduce, "hybrid:1x3".parse().unwrap()];
            for (strategy, bucket_bytes) in strategies.into_iter().zip([Some(1000), None]) {
                let config =
                    Config { strategy, bucket_bytes: bucket_bytes.map(BucketBytes::Fixed), ..config.clone() };
                let found = train_and_compare(3, &config);
                for (found, expected) in found.parameters.iter().zip(&expected.parameters) {
                    assert!((found - expected).abs() < 1e-5, "{tokens}, {strategy}: {found} {expected}");
                }
            }
            let accumulated = Config { micro_batches: NonZeroU32::new(5).unwrap(), ..config };
            let found = train(&accumulated).unwrap();
            for (found, expected) in found.parameters.iter().zip(&expected.parameters) {
                assert!((found - expected).abs() < 1e-5, "{tokens}, micro-batches: {found} {expected}");
            }
        }
    }

    /// Also tests that two runs give the same bits.
    #[test]
    fn a_resumed_run_gives_the_same_bits_as_an_uninterrupted_run() {
        let directory = tempfile::tempdir().unwrap();
        let uninterrupted = gpt_config(directory.path(), TokenKind::BytePairs { vocabulary: 270 });
        let expected = train(&uninterrupted).unwrap();
        let stop = AtomicBool::new(false);
        let checkpoint = |existing| Some(checkpoint_in(&directory.path().join("c"), existing));
        let first = Config { checkpoint: checkpoint(ExistingCheckpoint::Refuse), ..uninterrupted.clone() };
        let mut observer = StopAfter { steps: 7, stop: &stop };
        assert!(run(&mut Group::solo(), &first, &stop, &mut observer).unwrap().report.stopped);
        let resumed = Config { checkpoint: checkpoint(ExistingCheckpoint::Resume), ..uninterrupted };
        assert_eq!(train(&resumed).unwrap().parameters, expected.parameters);
        let text = TextOptions { context: 15, ..resumed.text };
        let error = train(&Config { text, ..resumed }).unwrap_err().to_string();
        assert!(error.contains("--context"), "{error}");
    }

    #[test]
    fn every_strategy_learns_a_text() {
        let directory = tempfile::tempdir().unwrap();
        let base = gpt_config(directory.path(), TokenKind::Characters);
        for strategy in [
            "allreduce",
            "model-average:1",
            "local-sgd:2",
            "diloco:2",
            "ps-sync",
            "ps-async",
            "gossip",
            "pipeline:3",
        ] {
            let config = Config {
                strategy: strategy.parse().unwrap(),
                epochs: Some(20),
                rule: None,
                learning_rate: Some(0.005),
                bucket_bytes: None,
                ..base.clone()
            };
            let report = train_on(3, &config, NONE).remove(0).unwrap().report;
            let perplexity = report.test_perplexity.unwrap();
            // A model that always predicts the frequencies of the characters has a perplexity of 10.6.
            assert!(perplexity < 5.0, "{strategy}: {perplexity}");
            assert!((perplexity.ln() - report.test_loss.unwrap()).abs() < 1e-9);
        }
    }

    #[test]
    fn a_saved_model_is_evaluated_and_continues_a_text() {
        let directory = tempfile::tempdir().unwrap();
        let place = directory.path();
        write_text(place);
        for tokens in ["characters", "bytes", "bpe:270"] {
            let line = format!(
                "--data a.txt --model gpt:1,2,16 --context 15 --tokens {tokens} --epochs 60 --lr 0.01 --batch-size 8 \
                 --test-fraction 0 --save-model m --report r"
            );
            let output = ringtrain_stdout(place, &line);
            assert!(output.contains("train perplexity"), "{output}");
            let report: Value = serde_json::from_str(&fs::read_to_string(place.join("r")).unwrap()).unwrap();
            let number = |value: &Value| value.as_f64().unwrap();
            let evaluation = ringtrain_stdout(place, "eval --model m --data a.txt --json");
            let evaluation: Value = serde_json::from_str(&evaluation).unwrap();
            let (found, expected) = (number(&evaluation["perplexity"]), number(&report["train_perplexity"]));
            assert!(
                (found - expected).abs() < 1e-6 * expected && found < 2.0,
                "{tokens}: {found} {expected}"
            );
            let generate = "generate --model m --prompt the --length 60 --temperature";
            let text = ringtrain_stdout(place, &format!("{generate} 0"));
            assert!(text.starts_with("the ") && text.contains("the whale"), "{tokens}: {text}");
            let text = ringtrain_stdout(place, &format!("{generate} 1 --seed 3"));
            assert_eq!(text, ringtrain_stdout(place, &format!("{generate} 1 --seed 3")));
            let inspection = ringtrain_stdout(place, "inspect m");
            assert!(inspection.contains("windows of 15 tokens"), "{inspection}");
        }
        fs::write(place.join("one.txt"), "t").unwrap();
        for (line, code, expected) in [
            ("predict --model m --data a.txt --header", 2, "do not apply to a model that reads plain text"),
            ("predict --model m --data digits", 4, "pass the name of a text file"),
            ("predict --model m --data one.txt", 4, "the text has 1 token, but needs at least 2"),
            ("export --model m --output o", 2, "reads texts, and ringtrain does not export"),
            ("eval --model m --data a.txt --top-k 3", 2, "do not apply to a model that reads plain text"),
            ("eval --model m --data digits", 4, "pass the name of a text file"),
        ] {
            assert_fails(place, line, code, expected);
        }
        ringtrain_stdout(place, "--model linear --task regression --epochs 1 --save-model d");
        assert_fails(place, "generate --model d", 4, "the model linear does not predict text");
        assert_fails(place, "eval --model d --data a.txt --format text", 4, "--format text is for models");
    }

    /// The tokens after the last whole window also have predictions.
    #[test]
    fn the_tokens_of_a_text_have_probabilities() {
        let directory = tempfile::tempdir().unwrap();
        let place = directory.path();
        write_text(place);
        let training = "--model gpt:1,2,16 --data a.txt --context 16 --lr 0.01 --batch-size 8";
        for tokens in ["characters", "bytes"] {
            let line =
                format!("{training} --epochs 20 --tokens {tokens} --test-fraction 0 --save-model {tokens}");
            ringtrain_stdout(place, &line);
            let evaluation = ringtrain_stdout(place, &format!("eval --model {tokens} --data a.txt --json"));
            let evaluation: Value = serde_json::from_str(&evaluation).unwrap();
            let counted = evaluation["tokens"].as_u64().unwrap() as usize;
            let csv = ringtrain_stdout(place, &format!("predict --model {tokens} --data a.txt"));
            let mut reader = csv::Reader::from_reader(csv.as_bytes());
            assert_eq!(reader.headers().unwrap(), vec!["token", "log_probability", "prediction"]);
            let rows: Vec<(String, f64, String)> = reader.deserialize().map(Result::unwrap).collect();
            let text = fs::read_to_string(place.join("a.txt")).unwrap();
            let found: String = rows.iter().map(|(token, ..)| token.as_str()).collect();
            let dash = if tokens == "bytes" { "\\xe2\\x80\\x93" } else { "–" };
            assert_eq!(found, text[1..].replace('–', dash), "{tokens}");
            let loss = -rows[..counted].iter().map(|(_, value, _)| value).sum::<f64>() / counted as f64;
            let expected = evaluation["loss"].as_f64().unwrap();
            assert!((loss - expected).abs() < 1e-5 * expected, "{tokens}: {loss}, expected {expected}");
            let right = rows.iter().filter(|(token, _, likeliest)| token == likeliest).count();
            assert!(right * 2 > rows.len(), "{tokens}: {right} of {} tokens are right", rows.len());
            ringtrain_stdout(place, &format!("predict --model {tokens} --data a.txt --output p.npy"));
            let array = fs::read(place.join("p.npy")).unwrap();
            let numbers = rows.iter().flat_map(|(_, value, _)| value.to_le_bytes());
            assert!(array[128..].iter().copied().eq(numbers), "{tokens}");
        }
    }

    #[test]
    fn texts_and_options_that_do_not_fit_are_refused_with_a_reason() {
        let directory = tempfile::tempdir().unwrap();
        let place = directory.path();
        write_text(place);
        fs::write(place.join("latin1.txt"), b"caf\xe9\n".repeat(50)).unwrap();
        for (line, code, expected) in [
            ("--model gpt:1,1,8", 2, "--model gpt:1,1,8 learns from plain text; pass --data FILE.txt"),
            ("--model gpt:1,3,8 --data a.txt", 2, "the width 8 must be a multiple of the number of heads"),
            ("--model gpt:1,1,8 --data a.txt --format table", 2, "--format table does not suit"),
            ("--model gpt:1,1,8 --data a.txt --target y", 2, "--target is for tables"),
            ("--model gpt:1,1,8 --data a.txt --task regression", 2, "predicts the next token"),
            ("--model gpt:1,1,8 --data a.txt --reproducible", 2, "--reproducible does not apply"),
            ("--model gpt:1,1,8 --data a.txt --context 0", 2, "--context 0: it must be from 1"),
            ("--model gpt:1,1,8 --data a.txt --tokens words", 2, "--tokens words: it is not one of"),
            (
                "--model gpt:1,1,8 --data a.txt --optimizer accelerated --strategy local-sgd:2",
                2,
                "accelerated",
            ),
            ("--tokens bytes", 2, "--tokens is for texts; pass --model gpt"),
            ("--data a.txt --format text", 2, "is plain text; pass --model gpt"),
            ("--model gpt:1,1,8 --data none.txt", 4, "cannot read none.txt"),
            ("--model gpt:1,1,8 --data .", 4, "is a directory"),
            (
                "--model gpt:1,1,8 --data a.txt --context 2000",
                4,
                "but with --context 2000, each of the two sets needs at least 2001",
            ),
            ("--model gpt:1,1,8 --data latin1.txt", 4, "line 1: the text is not UTF-8; convert it to UTF-8"),
            ("--model gpt:1,1,8 --data a.txt --label-smoothing 0.1", 4, "is for classes and not for texts"),
            ("--model gpt:1,64,65536 --data a.txt --context 200", 4, "lower --context"),
        ] {
            assert_fails(place, line, code, expected);
        }
    }
}
