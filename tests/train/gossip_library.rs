//! Gossip averaging through the library ([`Gossip`]).

use std::sync::{Arc, Barrier};
use std::time::Duration;

use ringtrain::train::{AverageCounts, Gossip, GossipError, GossipOptions};
use ringtrain::{Group, Rank};

use super::util::ranks;

/// A time that no rank of a test needs.
const LONG: Duration = Duration::from_secs(30);

fn start(group: &mut Group, parameters: &mut [f32]) -> Gossip {
    Gossip::start(group, parameters, &GossipOptions::default()).unwrap()
}

#[test]
fn a_single_rank_keeps_its_parameters_and_skips_all_averages() {
    let mut group = Group::solo();
    let mut parameters = [0.1, -3.7];
    let mut gossip = start(&mut group, &mut parameters);
    for step in 0..5 {
        parameters[0] += 0.3;
        let expected = parameters;
        assert!(!gossip.step(&mut parameters), "step {step}");
        assert_eq!(parameters, expected);
    }
    let expected = parameters;
    gossip.finish(&mut parameters, LONG).unwrap();
    assert_eq!(parameters, expected);
    assert_eq!((gossip.averages(), gossip.lost_ranks()), (AverageCounts { done: 0, skipped: 5 }, vec![]));
}

/// Averages do not change the sum of the parameters of all ranks, although the ranks take steps during the averages.
#[test]
fn the_final_average_contains_the_steps_of_all_ranks() {
    let results = ranks::run(4, |mut group| {
        let own = group.rank().get() as f32;
        let mut parameters = [own; 3];
        let mut gossip = start(&mut group, &mut parameters);
        assert_eq!(parameters, [0.0; 3], "all ranks start with the parameters of rank 0");
        let mut steps = 0;
        while gossip.averages().done < 5 || steps < 100 {
            if steps < 100 {
                parameters = parameters.map(|parameter| parameter + own);
            }
            gossip.step(&mut parameters);
            steps += 1;
        }
        gossip.finish(&mut parameters, LONG).unwrap();
        let AverageCounts { done, skipped } = gossip.averages();
        assert_eq!(done + skipped, steps);
        assert_eq!(gossip.lost_ranks(), []);
        parameters.map(f32::to_bits)
    });
    assert!(results.iter().all(|bits| *bits == results[0]), "{results:?}");
    let average = f32::from_bits(results[0][0]);
    assert!((average - 150.0).abs() < 1e-3, "{average}");
}

#[test]
fn the_other_ranks_finish_without_a_rank_that_closes_its_gossip() {
    for victim in [0, 2] {
        let results = ranks::run(3, move |mut group| {
            let own = group.rank().get();
            let mut parameters = [0.0; 2];
            let mut gossip = start(&mut group, &mut parameters);
            if own == victim {
                return None;
            }
            parameters[1] = own as f32;
            while gossip.lost_ranks().is_empty() {
                gossip.step(&mut parameters);
            }
            gossip.finish(&mut parameters, LONG).unwrap();
            Some((parameters.map(f32::to_bits), gossip.lost_ranks()))
        });
        let finished: Vec<_> = results.into_iter().flatten().collect();
        assert_eq!(finished.len(), 2);
        for (bits, lost) in &finished {
            assert_eq!(*bits, finished[0].0);
            assert_eq!(lost.iter().map(|(rank, _)| *rank).collect::<Vec<_>>(), [Rank::new(victim)]);
            let problem = &lost[0].1;
            assert!(problem.starts_with("on "), "{problem}");
            assert!(problem.ends_with("): it closed its gossip before it finished"), "{problem}");
        }
    }
}

/// If a late rank could finish alone, it would have other final parameters than the other ranks.
#[test]
#[ignore = "runs with tools/test --full"]
fn a_rank_that_finishes_too_late_is_left_out_and_gets_an_error() {
    for late in [0, 2] {
        let (others_have_finished, others_are_ready) = (Arc::new(Barrier::new(3)), Arc::new(Barrier::new(2)));
        let results = ranks::run(3, move |mut group| {
            let own = group.rank().get();
            let mut parameters = [0.0];
            let mut gossip = start(&mut group, &mut parameters);
            parameters[0] = [100.0, 10.0, 1.0][own as usize];
            gossip.step(&mut parameters);
            if own == late {
                others_have_finished.wait();
                let before = parameters;
                let error = gossip.finish(&mut parameters, LONG).unwrap_err();
                assert_eq!(parameters, before);
                return Err(error);
            }
            others_are_ready.wait();
            let result = gossip.finish(&mut parameters, Duration::from_secs(1));
            others_have_finished.wait();
            result.map(|()| (parameters, gossip.lost_ranks()))
        });
        let mut finished = Vec::new();
        for (rank, result) in results.into_iter().enumerate() {
            match result {
                Ok((parameters, lost)) => {
                    assert_eq!(lost[0].0.get(), late, "{lost:?}");
                    finished.push(parameters[0].to_bits());
                }
                Err(error) => {
                    assert_eq!(rank as u32, late, "{error}");
                    let GossipError::TooFewRanks { reached: 1, ranks: 3, missing, .. } = &error else {
                        panic!("{error}");
                    };
                    assert!(missing.contains("it did not finish within 1 s"), "{missing}");
                }
            }
        }
        assert_eq!(finished.len(), 2);
        assert_eq!(finished[0], finished[1]);
    }
}

#[test]
fn ranks_with_different_numbers_of_parameters_get_an_error() {
    let results = ranks::run(2, |mut group| {
        let mut parameters = vec![0.0; 3 + group.rank().index()];
        Gossip::start(&mut group, &mut parameters, &GossipOptions::default()).map(|_| ())
    });
    for result in results {
        assert!(matches!(result, Err(GossipError::Group(_))), "{result:?}");
    }
}
