//! A random program: a list of steps that all ranks run in the same order.
//!
//! A program cannot deadlock, even if all of its calls block. A blocking call waits only until the other ranks reach
//! the same step, so the rank that is furthest behind never has to wait.

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

/// The index of the group of all ranks.
pub(crate) const WORLD_GROUP_INDEX: usize = 0;
/// The index of a duplicate of the group of all ranks. Receives in the duplicate accept any source and any tag.
pub(crate) const DUPLICATE_GROUP_INDEX: usize = 1;

#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum CollectiveKind {
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

const COLLECTIVE_KINDS: [CollectiveKind; 13] = [
    CollectiveKind::AllReduce,
    CollectiveKind::AllReduceWith,
    CollectiveKind::Reduce,
    CollectiveKind::ReduceScatter,
    CollectiveKind::AllGather,
    CollectiveKind::Gather,
    CollectiveKind::Scatter,
    CollectiveKind::Broadcast,
    CollectiveKind::AllToAll,
    CollectiveKind::Scan,
    CollectiveKind::Exscan,
    CollectiveKind::Barrier,
    CollectiveKind::Object,
];

/// A step of a program. `group` is an index into the list of groups. Each split adds a group to this list. Fields
/// that name a rank of the group are taken modulo the size of the group.
#[derive(Clone, Debug)]
pub(crate) enum Step {
    /// `colours` and `keys` are indexed by the rank in the world. Ranks outside the parent group do nothing.
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
        kind: CollectiveKind,
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
    /// Every rank of the group except `to` sends one message to `to`, with a tag that only this step uses. The rank
    /// `to` receives these messages from any source.
    FromAnySource {
        group: usize,
        to: usize,
        count: usize,
    },
    /// A message in the duplicate of the world. Receives in the duplicate accept any source and any tag.
    AnyMessage {
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
        let mut group_exists = vec![true, true];
        let steps = (0..length).map(|_| random_step(&mut rng, ranks as usize, &mut group_exists)).collect();
        Self { seed, ranks, steps }
    }
}

/// Returns a random step. `group_exists[g]` is true until a step drops group `g`. A split appends `true`.
fn random_step(rng: &mut StdRng, ranks: usize, group_exists: &mut Vec<bool>) -> Step {
    let group = loop {
        let group = rng.random_range(0..group_exists.len());
        if group_exists[group] {
            break group;
        }
    };
    let (from, to, root) =
        (rng.random_range(0..ranks), rng.random_range(0..ranks), rng.random_range(0..ranks));
    // Other messages stay out of the duplicate, because its receives accept any source and any tag.
    let message_group = if group == DUPLICATE_GROUP_INDEX { WORLD_GROUP_INDEX } else { group };
    match rng.random_range(0..100) {
        0..8 => {
            group_exists.push(true);
            let is_duplicate = rng.random_bool(0.3);
            let colour = |rng: &mut StdRng| rng.random_bool(0.9).then(|| rng.random_range(0..3));
            let colours = (0..ranks).map(|_| if is_duplicate { Some(0) } else { colour(rng) }).collect();
            Step::Split {
                parent: group,
                colours,
                keys: (0..ranks).map(|_| rng.random_range(-2..3)).collect(),
            }
        }
        8..11 if group > DUPLICATE_GROUP_INDEX => {
            group_exists[group] = false;
            Step::Drop { group }
        }
        8..55 => {
            let kind = COLLECTIVE_KINDS[rng.random_range(0..COLLECTIVE_KINDS.len())];
            Step::Collective { group, kind, count: random_count(rng, 300_000), root }
        }
        55..78 => Step::Message {
            group: message_group,
            from,
            to,
            tag: rng.random_range(0..3),
            count: random_count(rng, 600_000),
        },
        78..86 => Step::FromAnySource { group: message_group, to, count: random_count(rng, 100_000) },
        _ => Step::AnyMessage { from, to, tag: rng.random_range(0..3), count: random_count(rng, 200_000) },
    }
}

/// Returns a random number of elements below `max`. Most numbers are small. Some are above 32 Ki, the largest number
/// of elements that a rank may send before the receive is posted. A few are much larger.
fn random_count(rng: &mut StdRng, max: usize) -> usize {
    match rng.random_range(0..20) {
        0..3 => 0,
        3..12 => rng.random_range(1..1000),
        12..16 => rng.random_range(1000..20_000),
        16..19 => rng.random_range(30_000..70_000),
        _ => rng.random_range(70_000..max),
    }
}
