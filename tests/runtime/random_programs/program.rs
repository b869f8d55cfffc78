//! A random program, the same for all ranks: a list of steps that every rank walks in order.
//!
//! It is legal with blocking and asynchronous calls: an operation that blocks waits only for others to come to its step,
//! and the rank that is furthest behind never waits for one that is further behind still.

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

/// The group of all ranks, and a duplicate of it for messages from any source with any tag.
pub(crate) const WORLD: usize = 0;
pub(crate) const TWIN: usize = 1;

#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Kind {
    AllReduce,
    AllReduceWith,
    Reduce,
    ReduceScatter,
    AllGather,
    Gather,
    Scatter,
    Broadcast,
    AllToAll,
    Scan,
    Exscan,
    Barrier,
    Object,
}

const KINDS: [Kind; 13] = [
    Kind::AllReduce,
    Kind::AllReduceWith,
    Kind::Reduce,
    Kind::ReduceScatter,
    Kind::AllGather,
    Kind::Gather,
    Kind::Scatter,
    Kind::Broadcast,
    Kind::AllToAll,
    Kind::Scan,
    Kind::Exscan,
    Kind::Barrier,
    Kind::Object,
];

/// Groups are places in a list to which each split adds one; ranks within a group are taken modulo its size.
#[derive(Clone, Debug)]
pub(crate) enum Step {
    /// By rank of the world; who is not in the parent does nothing.
    Split {
        parent: usize,
        colours: Vec<Option<u32>>,
        keys: Vec<i64>,
    },
    Drop {
        group: usize,
    },
    Collective {
        group: usize,
        kind: Kind,
        count: usize,
        root: usize,
    },
    Message {
        group: usize,
        from: usize,
        to: usize,
        tag: u32,
        count: usize,
    },
    /// Every other rank sends one message with this step's own tag, and they are received as they come.
    FromAnybody {
        group: usize,
        to: usize,
        count: usize,
    },
    /// Received by a receive that takes anything, in the twin of the world.
    Anything {
        from: usize,
        to: usize,
        tag: u32,
        count: usize,
    },
}

pub(crate) struct Program {
    pub(crate) seed: u64,
    pub(crate) ranks: u32,
    pub(crate) steps: Vec<Step>,
}

impl Program {
    pub(crate) fn random(seed: u64) -> Self {
        let mut rng = StdRng::seed_from_u64(seed);
        let ranks = rng.random_range(2..=5);
        let length = rng.random_range(10..120);
        let mut groups = vec![true, true];
        let steps = (0..length).map(|_| step(&mut rng, ranks as usize, &mut groups)).collect();
        Self { seed, ranks, steps }
    }
}

fn step(rng: &mut StdRng, ranks: usize, groups: &mut Vec<bool>) -> Step {
    let group = loop {
        let group = rng.random_range(0..groups.len());
        if groups[group] {
            break group;
        }
    };
    let (from, to, root) =
        (rng.random_range(0..ranks), rng.random_range(0..ranks), rng.random_range(0..ranks));
    // The duplicate's messages are received from any source with any tag.
    let talking = if group == TWIN { WORLD } else { group };
    match rng.random_range(0..100) {
        0..8 => {
            groups.push(true);
            let is_duplicate = rng.random_bool(0.3);
            let colour = |rng: &mut StdRng| rng.random_bool(0.9).then(|| rng.random_range(0..3));
            let colours = (0..ranks).map(|_| if is_duplicate { Some(0) } else { colour(rng) }).collect();
            Step::Split {
                parent: group,
                colours,
                keys: (0..ranks).map(|_| rng.random_range(-2..3)).collect(),
            }
        }
        8..11 if group > TWIN => {
            groups[group] = false;
            Step::Drop { group }
        }
        8..55 => {
            let kind = KINDS[rng.random_range(0..KINDS.len())];
            Step::Collective { group, kind, count: count(rng, 300_000), root }
        }
        55..78 => Step::Message {
            group: talking,
            from,
            to,
            tag: rng.random_range(0..3),
            count: count(rng, 600_000),
        },
        78..86 => Step::FromAnybody { group: talking, to, count: count(rng, 100_000) },
        _ => Step::Anything { from, to, tag: rng.random_range(0..3), count: count(rng, 200_000) },
    }
}

/// Mostly short; some beyond what may be sent unasked, 32 Ki elements; a few much longer.
fn count(rng: &mut StdRng, max: usize) -> usize {
    match rng.random_range(0..20) {
        0..3 => 0,
        3..12 => rng.random_range(1..1000),
        12..16 => rng.random_range(1000..20_000),
        16..19 => rng.random_range(30_000..70_000),
        _ => rng.random_range(70_000..max),
    }
}
