//! The two-step exchange of encoded elements. Each rank owns one chunk of the elements. In the first step, every rank sends
//! its encoded contribution to each chunk to the owner of the chunk. The owner decodes and reduces the contributions, and
//! encodes the result once. In the second step, it sends the encoded result to all ranks. So each contribution and each result
//! is encoded once, and the error does not grow with the number of ranks.
//!
//! Source: the server and the workers of Alistarh et al., "QSGD: communication-efficient SGD via gradient quantization and
//! encoding", NIPS 2017, with one server for each chunk, as in Tang et al., "1-bit Adam", ICML 2021.

use std::ops::Range;

use super::partition::{Partition, shifted};
use super::{Action, Schedule, Step};
use crate::types::{Rank, WorldSize};

/// The exchange of one block of a buffer, as one of its ranks sees it. Elements are counted from the start of the block.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct TwoStepExchange {
    /// The slices that this rank exchanges. Each slice has its own participants.
    pub slices: Vec<ExchangedSlice>,
    /// The number of words of the workspace, which holds encoded chunks.
    pub workspace_words: usize,
    /// The messages of the first step, on the words of the workspace.
    pub first: Schedule,
    /// The messages of the second step; `None` if only the owner of a chunk gets its result.
    pub second: Option<Schedule>,
}

/// A slice, which is divided into one chunk for each of its participants, in their order.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ExchangedSlice {
    /// The index of this rank among the participants.
    pub own: usize,
    pub chunks: Vec<ExchangedChunk>,
}

/// What a rank knows about the chunk of one participant.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ExchangedChunk {
    pub owner: Rank,
    pub elements: Range<usize>,
    /// The words of the workspace that first hold this rank's encoded contribution, and then the encoded result.
    pub words: Range<usize>,
    /// The words of the workspace for the contribution of this participant to this rank's own chunk. Empty for this rank itself.
    pub received: Range<usize>,
}

impl TwoStepExchange {
    /// Adds a slice, which begins at the element `start` of the block. `partition` divides it into the chunks of the
    /// `participants`, whose order is the same on all of them. This rank is the participant with the index `own`. `encoded_words`
    /// returns the number of words of an encoded chunk.
    pub fn add_slice(
        &mut self,
        partition: &Partition,
        (participants, own): (&[Rank], usize),
        start: usize,
        encoded_words: &dyn Fn(usize) -> usize,
    ) {
        let mut take = |words: usize| {
            let range = self.workspace_words..self.workspace_words + words;
            self.workspace_words = range.end;
            range
        };
        let part = |index: usize| partition.range(Rank::new(index as u32));
        let own_words = encoded_words(part(own).len());
        let chunk = |(index, &owner): (usize, &Rank)| {
            let elements = part(index);
            let words = take(encoded_words(elements.len()));
            let received = take(if index == own { 0 } else { own_words });
            ExchangedChunk { owner, elements: shifted(&elements, start), words, received }
        };
        let chunks: Vec<ExchangedChunk> = participants.iter().enumerate().map(chunk).collect();
        let slice = ExchangedSlice { own, chunks };
        self.first.steps.extend(slice.steps(|to, from| (to.words.clone(), from.received.clone())));
        if let Some(second) = &mut self.second {
            let own_words = &slice.chunks[own].words;
            second.steps.extend(slice.steps(|_, from| (own_words.clone(), from.words.clone())));
        }
        self.slices.push(slice);
    }

    /// Replaces each rank by the rank that `name` returns for it.
    pub fn rename_peers(&mut self, name: impl Fn(Rank) -> Rank) {
        for schedule in std::iter::once(&mut self.first).chain(&mut self.second) {
            schedule.rename_peers(&name);
        }
        for chunk in self.slices.iter_mut().flat_map(|slice| &mut slice.chunks) {
            chunk.owner = name(chunk.owner);
        }
    }
}

impl ExchangedSlice {
    /// Returns the exchange with all other participants: in step k, participant r sends to participant r + k and receives from
    /// participant r - k. `ranges` returns the words to send to the first one, and the words to receive from the second one.
    fn steps(
        &self,
        ranges: impl Fn(&ExchangedChunk, &ExchangedChunk) -> (Range<usize>, Range<usize>),
    ) -> impl Iterator<Item = Step> {
        let world = WorldSize::new(self.chunks.len() as u32).unwrap_or(WorldSize::ONE);
        let own = Rank::new(self.own as u32);
        (1..world.get()).map(move |distance| {
            let to = &self.chunks[world.rank_after(own, distance).index()];
            let from = &self.chunks[world.rank_before(own, distance).index()];
            let (sent, received) = ranges(to, from);
            Step::send(to.owner, sent, None).and(Step::receive(from.owner, received, Action::Copy, None))
        })
    }
}
