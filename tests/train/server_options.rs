//! `ParameterServer` with optimizers that need whole tensors, and with learning rates that change.

use std::num::NonZeroU32;
use std::ops::Range;

use ringtrain::train::optimizer::{AdamOptions, Optimizer, Rule};
use ringtrain::train::{ParameterServer, ParameterServerError, ParameterServerOptions};

use super::util::{if_long_tests_else, ranks};

const COUNT: usize = 40;

/// The tensor without elements is at the border between the parts of two servers.
fn tensors() -> Vec<Range<usize>> {
    vec![0..5, 5..21, 21..21, 21..22, 22..40]
}

/// The learning rate and the gradient of each step. The rate changes before every second step, and is 0 at last.
fn steps() -> impl Iterator<Item = (f32, Vec<f32>)> {
    let gradient =
        |step: usize| (0..COUNT).map(|i| ((step * COUNT + i) as f32).sin() * (i + 1) as f32).collect();
    [0.5, 0.5, 0.25, 0.25, 2.0, 2.0, 0.0]
        .into_iter()
        .enumerate()
        .map(move |(step, rate)| (rate, gradient(step)))
}

fn initial() -> Vec<f32> {
    (0..COUNT).map(|i| (i as f32).cos() * (COUNT - i) as f32).collect()
}

/// Returns the parameters after all steps of one worker. The worker sets the rate of each step before the push.
fn train_with_servers(options: &ParameterServerOptions) -> Vec<f32> {
    let options = options.clone();
    let results = ranks::run(options.servers.get() + 1, move |mut group| {
        let mut server = ParameterServer::start(&mut group, &initial(), &options).unwrap();
        let mut parameters = vec![0.0; COUNT];
        if server.is_server() {
            server.wait_for_workers(None);
            assert!(server.lost_workers().is_empty());
        } else {
            let mut current = options.learning_rate;
            for (rate, gradient) in steps() {
                if rate != current {
                    server.set_learning_rate(rate).unwrap();
                    current = rate;
                }
                server.push_pull(&gradient, &mut parameters).unwrap();
            }
        }
        parameters
    });
    results.into_iter().next_back().unwrap()
}

/// Returns the parameters after all steps of an optimizer in this process.
fn train_alone(rule: Rule, tensors: Vec<Range<usize>>) -> Vec<f32> {
    let mut optimizer = Optimizer::new(rule, 0.0, 0.01, COUNT);
    optimizer.tensors = tensors;
    let mut parameters = initial();
    for (rate, mut gradient) in steps() {
        optimizer.learning_rate = rate;
        optimizer.step(&mut parameters, &mut gradient);
    }
    parameters
}

#[test]
fn several_servers_compute_what_one_optimizer_computes() {
    let lars = Rule::Lars { momentum: 0.9 };
    for rule in [Rule::Lamb(AdamOptions::DEFAULT), lars, Rule::Momentum { momentum: 0.9 }] {
        let nonempty = tensors().into_iter().filter(|tensor| !tensor.is_empty()).collect();
        let expected = train_alone(rule, nonempty);
        let of_one_tensor = train_alone(rule, std::iter::once(0..COUNT).collect());
        assert_eq!(expected == of_one_tensor, !rule.needs_whole_tensors());
        for &servers in if_long_tests_else(&[1, 2, 4][..], &[2]) {
            for synchronous in [false, true] {
                let options = ParameterServerOptions {
                    servers: NonZeroU32::new(servers).unwrap(),
                    rule,
                    tensors: tensors(),
                    learning_rate: 0.5,
                    weight_decay: 0.01,
                    synchronous,
                    ..ParameterServerOptions::default()
                };
                assert_eq!(train_with_servers(&options), expected, "{options:?}");
            }
        }
    }
}

#[test]
fn wrong_tensors_and_rates_are_refused() {
    let lars = ParameterServerOptions {
        servers: NonZeroU32::new(2).unwrap(),
        rule: Rule::Lars { momentum: 0.9 },
        ..ParameterServerOptions::default()
    };
    ranks::run(3, move |mut group| {
        let mut check = |tensors: &[Range<usize>], expected: &str| {
            let options = ParameterServerOptions { tensors: tensors.to_vec(), ..lars.clone() };
            let error = ParameterServer::start(&mut group, &initial(), &options).err().unwrap();
            assert!(matches!(error, ParameterServerError::Unsupported(_)), "{error}");
            assert!(error.to_string().contains(expected), "{error}");
        };
        check(&[], "set ParameterServerOptions::tensors, or use 1 server");
        check(&[0..5, 6..40], "the tensor 6..40 must begin at 5");
        check(&[0..5, 4..40], "the tensor 4..40 must begin at 5");
        #[expect(clippy::reversed_empty_ranges, reason = "the servers must refuse this range")]
        check(&[0..5, 5..4, 4..40], "the tensor 5..4 must begin at 5");
        check(&[0..5, 5..41], "the tensors end at 41, but there are 40 parameters");
        check(&[0..40, 40..40], "it has only 1 tensors");
        let mut server =
            ParameterServer::start(&mut group, &initial(), &ParameterServerOptions::default()).unwrap();
        if server.is_server() {
            server.wait_for_workers(None);
            return;
        }
        for rate in [-0.1, f32::NAN, f32::INFINITY] {
            let error = server.set_learning_rate(rate).unwrap_err().to_string();
            assert!(error.contains("must be a finite number"), "{error}");
        }
        server.pull(&mut [0.0; COUNT]).unwrap();
    });
}
