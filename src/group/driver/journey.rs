//! Operations by hosts: each block meets on a board, travels between hosts and meets on another board, while the blocks
//! behind it are where they have come to. All ranks send their blocks on in the same order.

use std::ops::Range;

use super::Outcome;
use super::core::Core;
use super::local::{Task, lock};
use crate::engine::{Begin, Failure, OpId, Timestamp};
use crate::group::desk::{Errand, Order};
use crate::group::hosts::Place;
use crate::group::memory::{Memory, Parted};
use crate::group::pump::Work;
use crate::reduce::Kernels;
use crate::schedule::Schedule;
use crate::types::GROUP_FLAGS;

/// An operation by hosts.
pub(in crate::group) struct Journey {
    /// Where the ranks of this host meet before the wire and after it; nowhere, if this one is alone there.
    pub(in crate::group) places: Option<[Place; 2]>,
    pub(in crate::group) blocks: Vec<Block>,
    /// The whole buffer.
    pub(in crate::group) memory: Memory,
    /// How elements are reduced between hosts, if they are, and by what an average is divided.
    pub(in crate::group) kernels: Option<Kernels>,
    pub(in crate::group) divisor: u32,
}

/// A block of it, with ranks of the job.
pub(in crate::group) struct Block {
    /// The bytes of the buffer.
    pub(in crate::group) bytes: Range<usize>,
    pub(in crate::group) before: Option<Order>,
    pub(in crate::group) across: Schedule,
    pub(in crate::group) after: Option<Order>,
}

/// An operation by hosts that is under way.
pub(super) struct Travelling {
    whole: Parted,
    begin: Begin,
    began: Timestamp,
    places: Option<[Place; 2]>,
    kernels: Option<Kernels>,
    divisor: u32,
    /// What is left of each block's way.
    ways: Vec<Way>,
    /// Blocks that have not arrived.
    left: usize,
}

/// What a block has before it.
#[derive(Default)]
struct Way {
    across: Option<Schedule>,
    after: Option<Errand>,
}

impl Core {
    /// Takes on an operation by hosts.
    pub(super) fn begin_journey(
        &mut self,
        now: Timestamp,
        begin: Begin,
        journey: Journey,
    ) -> Result<OpId, Failure> {
        let Journey { places, blocks, memory, kernels, divisor } = journey;
        let asked = (begin.contract, begin.site);
        let id = self.pump.engine_mut().number(begin.group & !GROUP_FLAGS, asked);
        let ranges: Vec<Range<usize>> = blocks.iter().map(|block| block.bytes.clone()).collect();
        let (whole, parts) = memory.into_parts(&ranges);
        let engine = self.pump.engine_mut();
        let mut take_on = |at: usize, order: Option<Order>| {
            let (desk, _) = &places.as_ref()?[at];
            let errand = lock(desk).take_on(asked, order?);
            // For a rank of this host that comes to it later and asks for something else.
            engine.remember(begin.group, errand.sequence(), asked);
            Some(errand)
        };
        let mut ways = Vec::with_capacity(blocks.len());
        let mut first = Vec::with_capacity(blocks.len());
        for Block { before, across, after, .. } in blocks {
            first.push(take_on(0, before));
            ways.push(Way { across: Some(across), after: take_on(1, after) });
        }
        let left = ways.len();
        let travelling = Travelling { whole, begin, began: now, places, kernels, divisor, ways, left };
        // It keeps the whole buffer until nothing is left of its parts, whatever happens from here on.
        self.journeys.insert(id, travelling);
        for (block, (errand, memory)) in first.into_iter().zip(parts).enumerate() {
            match errand {
                Some(errand) => self.meet(now, (id, block), 0, errand, memory)?,
                None => self.go_on(now, (id, block), memory)?,
            }
        }
        Ok(id)
    }

    /// A block has come to the end of a part of its way; whether that was one.
    pub(super) fn has_come(&mut self, now: Timestamp, part: OpId, memory: Memory) -> Result<(), Memory> {
        let Some(block) = self.stages.remove(&part) else { return Err(memory) };
        // The pump knows of a failure, and so will everybody.
        let _ = self.go_on(now, block, memory);
        Ok(())
    }

    /// Sends a block on.
    fn go_on(&mut self, now: Timestamp, block: (OpId, usize), memory: Memory) -> Result<(), Failure> {
        let Some(journey) = self.journeys.get_mut(&block.0) else { return Ok(()) };
        let way = &mut journey.ways[block.1];
        if let Some(schedule) = way.across.take() {
            let begin = journey.begin_at(now);
            let work = Work { memory, kernels: journey.kernels.clone(), divisor: journey.divisor };
            let part = self.pump.begin(now, begin, schedule, work)?;
            self.stages.insert(part, block);
        } else if let Some(errand) = way.after.take() {
            self.meet(now, block, 1, errand, memory)?;
        } else {
            drop(memory);
            self.arrive(now, block.0);
        }
        Ok(())
    }

    /// Has a block meet those of the host's other ranks at one of the places.
    fn meet(
        &mut self,
        now: Timestamp,
        block: (OpId, usize),
        at: usize,
        errand: Errand,
        memory: Memory,
    ) -> Result<(), Failure> {
        let Some(journey) = self.journeys.get(&block.0) else { return Ok(()) };
        let Some(places) = &journey.places else { return Ok(()) };
        let (begin, place) = (journey.begin_at(now), places[at].clone());
        let part = self.pump.watch(now, begin, errand.sequence())?;
        self.desk_tasks.insert(part, Task::new(begin.group, place, errand, memory));
        self.stages.insert(part, block);
        Ok(())
    }

    /// One of its blocks has arrived.
    fn arrive(&mut self, now: Timestamp, id: OpId) {
        let Some(journey) = self.journeys.get_mut(&id) else { return };
        journey.left -= 1;
        if journey.left == 0
            && let Some(journey) = self.journeys.remove(&id)
        {
            self.statistics.operations += 1;
            self.left_over.extend(journey.kernels);
            let outcome = Outcome { memory: journey.whole.into_whole(), envelope: None };
            self.settle(id, now, Ok(outcome));
        }
    }

    /// Gives up what is under way, once its parts are gone.
    pub(super) fn give_up_journeys(&mut self) {
        self.stages.clear();
        let journeys = std::mem::take(&mut self.journeys);
        self.left_over.extend(journeys.into_values().filter_map(|journey| journey.kernels));
    }
}

impl Travelling {
    /// How a part of it begins: its time is that of the whole.
    fn begin_at(&self, now: Timestamp) -> Begin {
        Begin { spent: now.saturating_sub(self.began), ..self.begin }
    }
}
