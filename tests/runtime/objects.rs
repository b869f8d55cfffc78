//! Tests of collectives of objects that serde can serialise.

use std::collections::{BTreeMap, HashMap};

use crate::util::if_long_tests_else;
use crate::util::ranks::TestTransport;
use ringtrain::{Error, Group, Rank, ReduceOp};
use serde::{Deserialize, Serialize, Serializer};

#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
struct Checkpoint {
    name: String,
    step: Option<u64>,
    shapes: Vec<(usize, usize)>,
    metrics: HashMap<String, f64>,
    inner: Option<Box<Checkpoint>>,
    kind: Kind,
}

#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
enum Kind {
    Empty,
    Weights(Vec<f32>),
    Named { words: BTreeMap<i8, char>, unit: () },
}

/// Returns an object whose content and length differ on every rank.
fn make_checkpoint(rank: u32) -> Checkpoint {
    let leaf = Checkpoint {
        name: "é\u{1f980}".repeat(rank as usize),
        step: (!rank.is_multiple_of(2)).then_some(u64::MAX - u64::from(rank)),
        shapes: vec![(rank as usize, usize::MAX); rank as usize],
        metrics: (0..rank).map(|i| (format!("metric {i}"), f64::from(i) / 3.0)).collect(),
        inner: None,
        kind: Kind::Empty,
    };
    let words = BTreeMap::from([(-1, 'a'), (i8::MAX, '\0')]);
    Checkpoint {
        kind: if rank.is_multiple_of(2) {
            Kind::Named { words, unit: () }
        } else {
            Kind::Weights(vec![f32::MIN_POSITIVE; 50_000 * rank as usize])
        },
        inner: Some(Box::new(leaf.clone())),
        ..leaf
    }
}

fn collectives_return_objects_unchanged(transport: TestTransport) {
    for &n in if_long_tests_else(&[1, 2, 3, 5][..], &[1, 3]) {
        transport.run(n, |mut group| {
            let (size, rank) = (group.size(), group.rank());
            let own = make_checkpoint(rank.get());
            let all: Vec<Checkpoint> = size.ranks().map(|rank| make_checkpoint(rank.get())).collect();
            assert_eq!(group.all_gather_object(&own).unwrap(), all);
            for root in size.ranks() {
                assert_eq!(group.broadcast_object(&own, root).unwrap(), all[root.index()]);
            }
            assert_eq!(group.broadcast_object(&(), Rank::ZERO), Ok(()));
            assert_eq!(group.all_gather_object(&None::<String>).unwrap(), vec![None; size.as_usize()]);
        });
    }
}

/// An object that cannot be encoded if `rank` equals `failing_rank`. `rank` is the rank that encodes the object.
#[derive(Deserialize)]
struct BrokenObject {
    failing_rank: u32,
    rank: u32,
}

impl Serialize for BrokenObject {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.failing_rank == self.rank {
            return Err(serde::ser::Error::custom("a lock is held"));
        }
        (self.failing_rank, self.rank).serialize(serializer)
    }
}

fn a_collective_fails_on_every_rank_if_an_object_cannot_be_encoded(transport: TestTransport) {
    for n in [1, 2, 4] {
        transport.run(n, move |mut group| {
            let (rank, failing_rank) = (group.rank().get(), n - 1);
            let root = Rank::new(failing_rank);
            let broken = || BrokenObject { failing_rank, rank };
            let assert_usable = |group: &mut Group| {
                let mut sum = [1];
                group.all_reduce(&mut sum, ReduceOp::Sum).unwrap();
                assert_eq!(sum, [n]);
            };
            assert!(matches!(group.broadcast_object(&broken(), root), Err(Error::Object(_))));
            assert_usable(&mut group);
            assert!(matches!(group.all_gather_object(&broken()), Err(Error::Object(_))));
            assert_usable(&mut group);
        });
    }
}

/// Rank 2 expects another type than the root sends. Only rank 2 gets an error, and the group can still be used.
fn an_object_that_cannot_be_decoded_fails_only_its_receiver(transport: TestTransport) {
    transport.run(3, |mut group| {
        if group.rank().get() == 2 {
            assert!(matches!(group.broadcast_object(&Kind::Empty, Rank::ZERO), Err(Error::Object(_))));
        } else {
            assert_eq!(group.broadcast_object(&vec![7u8], Rank::ZERO), Ok(vec![7]));
        }
        group.barrier().unwrap();
    });
}

on_every_transport! {
    collectives_return_objects_unchanged,
    a_collective_fails_on_every_rank_if_an_object_cannot_be_encoded,
    an_object_that_cannot_be_decoded_fails_only_its_receiver,
}
