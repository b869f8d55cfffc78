//! Tests of collectives and messages of objects that serde can serialise.

use std::collections::{BTreeMap, HashMap};

use crate::util::if_long_tests_else;
use crate::util::ranks::TestTransport;
use ringtrain::group::Source;
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
                let gathered = group.gather_object(&own, root).unwrap();
                assert_eq!(gathered, if rank == root { &all[..] } else { &[] });
                let scattered = group.scatter_object(if rank == root { &all } else { &[] }, root).unwrap();
                assert_eq!(scattered, own);
            }
            assert_eq!(group.broadcast_object(&(), Rank::ZERO), Ok(()));
            assert_eq!(group.all_gather_object(&None::<String>).unwrap(), vec![None; size.as_usize()]);
        });
    }
}

fn objects_can_be_sent_and_received(transport: TestTransport) {
    transport.run(3, |group| {
        if group.rank() != Rank::ZERO {
            let rank = group.rank().get();
            group.send_object(&make_checkpoint(rank), Rank::ZERO, rank).unwrap();
            group.send_object(&"short", Rank::ZERO, 9).unwrap();
            return;
        }
        let (from_rank_2, status) = group.receive_object::<Checkpoint>(Rank::new(2), 2).unwrap();
        assert_eq!((from_rank_2, status.source, status.tag), (make_checkpoint(2), Rank::new(2), 2));
        let (from_rank_1, status) = group.receive_object::<Checkpoint>(Source::Any, 1).unwrap();
        assert_eq!((from_rank_1, status.source), (make_checkpoint(1), Rank::new(1)));
        for _ in 0..2 {
            let (text, status) = group.receive_object::<String>(Source::Any, None).unwrap();
            assert_eq!((text.as_str(), status.tag), ("short", 9));
        }
    });
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
            for root in group.size().ranks() {
                assert!(matches!(group.gather_object(&broken(), root), Err(Error::Object(_))));
                assert_usable(&mut group);
            }
            let all: Vec<BrokenObject> = (0..n).map(|_| broken()).collect();
            assert!(matches!(group.scatter_object(&all, root), Err(Error::Object(_))));
            assert_usable(&mut group);
            // The root passes one object too few. Only the root knows that an object is missing, but all ranks must
            // get an error.
            let few = vec![0u8; n as usize - 1];
            assert!(group.scatter_object(&few, Rank::ZERO).is_err());
            assert_usable(&mut group);
            if n > 1 {
                // The call fails before anything is sent, so the other rank posts no receive.
                let next = group.size().rank_after(group.rank(), 1);
                let own = BrokenObject { failing_rank: rank, rank };
                assert!(matches!(group.send_object(&own, next, 0), Err(Error::Object(_))));
            }
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

fn asynchronous_object_operations_return_the_objects(transport: TestTransport) {
    for n in [1, 2, 3, 5] {
        transport.run(n, |mut group| {
            let (size, rank) = (group.size(), group.rank());
            let own = make_checkpoint(rank.get());
            let all: Vec<Checkpoint> = size.ranks().map(|rank| make_checkpoint(rank.get())).collect();
            let root = Rank::new(size.get() - 1);
            let others = if rank == root { &all[..] } else { &[] };
            let broadcast = group.broadcast_object_async(&own, root).unwrap();
            let from_all = group.all_gather_object_async(&own).unwrap();
            // This receive must not match a message of the object collectives.
            let next = group.receive_object_async::<Checkpoint>(Source::Any, None).unwrap();
            let gathered = group.gather_object_async(&own, root).unwrap();
            let scattered = group.scatter_object_async(others, root).unwrap();
            let pairs: Vec<(u32, u32)> = size.ranks().map(|to| (rank.get(), to.get())).collect();
            let exchanged = group.all_to_all_object_async(&pairs).unwrap();
            let sent = group.send_object_async(&own, size.rank_after(rank, 1), 3).unwrap();
            let expected: Vec<(u32, u32)> = size.ranks().map(|from| (from.get(), rank.get())).collect();
            assert_eq!(group.all_to_all_object(&pairs).unwrap(), expected);
            assert_eq!(exchanged.wait().unwrap(), expected);
            assert_eq!(scattered.wait().unwrap(), own);
            assert_eq!(gathered.wait().unwrap(), others);
            assert_eq!(from_all.wait().unwrap(), all);
            assert_eq!(broadcast.wait().unwrap(), all[root.index()]);
            sent.wait().unwrap();
            let (object, status) = next.wait().unwrap();
            assert_eq!(
                (object, status.source),
                (all[size.rank_before(rank, 1).index()].clone(), size.rank_before(rank, 1))
            );
            group.barrier().unwrap();
        });
    }
}

fn an_asynchronous_collective_fails_if_an_object_cannot_be_encoded(transport: TestTransport) {
    for n in [1, 2, 4] {
        transport.run(n, move |mut group| {
            let (rank, root) = (group.rank().get(), Rank::new(n - 1));
            let broken = || BrokenObject { failing_rank: n - 1, rank };
            let from_all = group.all_gather_object_async(&broken()).unwrap();
            let broadcast = group.broadcast_object_async(&broken(), root).unwrap();
            assert!(matches!(broadcast.wait(), Err(Error::Object(_))));
            assert!(matches!(from_all.wait(), Err(Error::Object(_))));
            let too_few = vec![0u8; n as usize - 1];
            assert!(group.all_to_all_object(&too_few).is_err());
            group.barrier().unwrap();
        });
    }
}

on_every_transport! {
    collectives_return_objects_unchanged,
    objects_can_be_sent_and_received,
    a_collective_fails_on_every_rank_if_an_object_cannot_be_encoded,
    an_object_that_cannot_be_decoded_fails_only_its_receiver,
    asynchronous_object_operations_return_the_objects,
    an_asynchronous_collective_fails_if_an_object_cannot_be_encoded,
}
