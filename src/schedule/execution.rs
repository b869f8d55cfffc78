//! The progress of one rank in a program. This state machine decides which round the rank posts, for which ranks the rank waits,
//! and when the operation is complete. Its owner moves the elements: the driver in shared memory, or a proof.

use std::sync::Arc;

use super::program::{Program, RankSet, Round};

/// A program that runs.
pub struct Execution {
    program: Arc<Program>,
    /// The index of the current phase, its repetition, and the index of the current round in the phase.
    position: (usize, usize, usize),
    is_posted: bool,
}

impl Execution {
    /// Begins a program.
    pub fn new(program: Arc<Program>) -> Self {
        Self { program, position: (0, 0, 0), is_posted: false }
    }

    /// Returns the current round, and the number of the block on which it works.
    pub fn round(&self) -> (&Round, usize) {
        let (phase, repetition, round) = self.position;
        (&self.program.phases[phase].rounds[round], repetition)
    }

    /// Returns whether a rank may post the address of its buffer in the current round, instead of elements.
    pub fn may_expose(&self) -> bool {
        self.program.if_all_expose.is_some() && self.position == (0, 0, 0)
    }

    /// Returns the ranks that must have posted the current round before this rank does the work of the round. Returns `None` if
    /// this rank has not posted the round itself: then it waits for the posts of all ranks in the round before.
    pub fn awaited(&self) -> Option<RankSet> {
        self.is_posted.then(|| self.round().0.sources)
    }

    /// Records that this rank has posted the current round.
    pub fn handle_posted(&mut self) {
        self.is_posted = true;
    }

    /// Records that all ranks have posted the addresses of their buffers in the current round. Call this before the work of the
    /// round is done.
    pub fn handle_all_exposed(&mut self) {
        if let Some(in_place) = self.program.if_all_expose.clone().filter(|_| self.may_expose()) {
            self.program = in_place;
        }
    }

    /// Records that the work of the current round is done. Returns whether the operation is complete.
    pub fn handle_worked(&mut self) -> bool {
        let (phase, repetition, round) = self.position;
        let current = &self.program.phases[phase];
        self.is_posted = false;
        self.position = if round + 1 < current.rounds.len() {
            (phase, repetition, round + 1)
        } else if repetition + 1 < current.times {
            (phase, repetition + 1, 0)
        } else {
            (phase + 1, 0, 0)
        };
        self.position.0 == self.program.phases.len()
    }
}
