//! Sums a range of the gradients, or of the changes of the parameters, over all ranks, each tensor with its own compression.
//!
//! The tensors with the same compression form a lane. The values of a lane travel together in one all-reduce, so that small exact
//! tensors cost one message and not many. With [`SumTarget::OwnChunk`], a rank gets only the sums of its chunk of the range, by
//! a reduce-scatter. If the range has several lanes, the reduce-scatter of a compressed lane has zeros in place of the other
//! lanes, so that all lanes have the same chunks; exact lanes are then all-reduced.

use std::ops::Range;

use super::bucket_ranges::{chunk_of_bucket, overlap};
use super::compression_memory::CompressionMemory;
use super::compression_plan::CompressionPlan;
use super::compression_schedule::CompressionSchedule;
use super::low_rank::LowRankSum;
use super::random::SplitMix;
use super::runtime::{PendingSum, Runtime, SumBuffer, SumTarget};
use crate::codec::Compression;
use crate::group::{AutoReport, Compressor, CompressorState, Error};

/// Sums of the same range of a vector, again and again.
pub(crate) struct RangeSum {
    range: Range<usize>,
    lanes: Vec<Lane>,
    low_rank: LowRankSum,
    /// The number of sums that were started.
    calls: u64,
    schedule: CompressionSchedule,
}

/// The elements of a range that have the same compression.
struct Lane {
    /// The ranges of the elements in the vector.
    pieces: Vec<Range<usize>>,
    /// With [`SumTarget::Everything`], the lane reduces all pieces, one after the other. With [`SumTarget::OwnChunk`], it reduces
    /// the whole range, with zeros between the pieces.
    target: SumTarget,
    /// The compression after the warm-up.
    compression: Compression,
    /// The compressor of the last sum.
    compressor: Compressor,
    /// The seed of the compressor.
    seed: u64,
    pending: Option<PendingSum>,
    free_buffer: Option<SumBuffer>,
    /// Memory for the pieces and the zeros between them.
    padded: Vec<f32>,
    /// The elements of the vector whose sums this rank gets with [`SumTarget::OwnChunk`].
    own: Range<usize>,
}

impl RangeSum {
    /// Prepares sums of `range` of the vector of parameters that `plan` describes. A matrix of `PowerSGD` belongs to the range in
    /// which it starts, and is summed there as a whole. `number` is different for each range.
    pub(crate) fn new(
        plan: &CompressionPlan,
        range: Range<usize>,
        (target, number): (SumTarget, u64),
    ) -> Self {
        let mut low_rank = LowRankSum::new(plan.seed ^ number);
        let mut lanes: Vec<(Compression, Vec<Range<usize>>)> = Vec::new();
        for tensor in &plan.tensors {
            if let Compression::PowerSgd(rank) = tensor.compression {
                if range.contains(&tensor.range.start) {
                    low_rank.add_matrix(tensor.range.clone(), tensor.matrix, rank);
                }
                continue;
            }
            let piece = overlap(&tensor.range, &range);
            if piece.is_empty() {
                continue;
            }
            match lanes.iter_mut().find(|(compression, _)| *compression == tensor.compression) {
                None => lanes.push((tensor.compression, vec![piece])),
                Some((_, pieces)) => match pieces.last_mut() {
                    Some(last) if last.end == piece.start => last.end = piece.end,
                    _ => pieces.push(piece),
                },
            }
        }
        let is_whole = lanes.len() == 1 && lanes[0].1 == [range.clone()];
        let make_lane = |(index, (compression, pieces)): (usize, (Compression, Vec<Range<usize>>))| {
            let is_all_reduced = compression == Compression::None && !is_whole;
            // A lane has the same number on all ranks, so that codecs draw the same random numbers.
            let seed = SplitMix::new(plan.seed, (number << 8) + index as u64).next_word();
            Lane {
                pieces,
                target: if is_all_reduced { SumTarget::Everything } else { target },
                compression,
                compressor: Compressor::new(compression).with_seed(seed),
                seed,
                pending: None,
                free_buffer: None,
                padded: Vec::new(),
                own: 0..0,
            }
        };
        let lanes = lanes.into_iter().enumerate().map(make_lane).collect();
        Self { range, lanes, low_rank, calls: 0, schedule: plan.schedule }
    }

    /// Returns the range. All gradients from its start on must be final when a sum starts.
    pub(crate) fn range(&self) -> &Range<usize> {
        &self.range
    }

    /// Returns whether the range is summed by a single reduce-scatter, so that the only result is the rank's chunk.
    pub(crate) fn is_single_chunk(&self) -> bool {
        self.low_rank.is_empty() && matches!(self.lanes.as_slice(), [lane] if lane.is_whole(&self.range))
    }

    /// Returns whether all elements travel exactly in all steps.
    pub(crate) fn is_exact(&self) -> bool {
        self.low_rank.is_empty() && self.lanes.iter().all(|lane| lane.compression == Compression::None)
    }

    /// Starts to sum the range of `vector`, in step `step` of the run. The previous sum must be finished.
    pub(crate) fn start(
        &mut self,
        runtime: &mut dyn Runtime,
        vector: &[f32],
        step: u64,
    ) -> Result<(), Error> {
        for lane in &mut self.lanes {
            lane.set_compression(self.schedule.compression_at(step, lane.compression), self.calls);
            lane.start(runtime, vector, &self.range)?;
        }
        self.calls += 1;
        if self.low_rank.is_empty() { Ok(()) } else { self.low_rank.start(runtime, vector, self.calls) }
    }

    /// Starts the second step of sums of two steps. All ranks must call this function in the same order.
    pub(crate) fn advance(&mut self, runtime: &mut dyn Runtime) -> Result<(), Error> {
        if self.low_rank.is_empty() { Ok(()) } else { self.low_rank.advance(runtime) }
    }

    /// Waits for the sums. Calls `on_summed` with each part of the range and its sums; with [`SumTarget::OwnChunk`], at least
    /// with the rank's chunk. May write to `vector`.
    pub(crate) fn wait(
        &mut self,
        vector: &mut [f32],
        mut on_summed: impl FnMut(Range<usize>, &mut [f32]),
    ) -> Result<(), Error> {
        for lane in &mut self.lanes {
            lane.wait(&mut on_summed)?;
        }
        if self.low_rank.is_empty() { Ok(()) } else { self.low_rank.finish(vector, on_summed) }
    }

    /// Waits for the sums and writes them to `vector`.
    pub(crate) fn wait_and_write(&mut self, vector: &mut [f32]) -> Result<(), Error> {
        for lane in &mut self.lanes {
            lane.wait(&mut |range, sums: &mut [f32]| vector[range].copy_from_slice(sums))?;
        }
        if self.low_rank.is_empty() { Ok(()) } else { self.low_rank.finish(vector, |_, _| ()) }
    }

    /// Returns the codecs that `auto` has chosen.
    pub(crate) fn codec_choices(&self) -> impl Iterator<Item = AutoReport> {
        self.lanes.iter().filter_map(|lane| lane.compressor.report())
    }

    /// Copies the memory of these sums to the memory of a rank. No sum may be in progress.
    pub(crate) fn copy_memory_to(&self, memory: &mut CompressionMemory) {
        memory.calls = self.calls;
        for residual in &mut memory.residuals {
            for lane in self.lanes.iter().filter(|lane| lane.compression.needs_error_feedback()) {
                let CompressorState { residual: saved, result, .. } = lane.compressor.state();
                for (piece, at) in lane.places(&self.range) {
                    if !saved.is_empty() {
                        residual[piece.clone()].copy_from_slice(&saved[at..at + piece.len()]);
                    }
                    if !result.is_empty() {
                        memory.results[piece.clone()].copy_from_slice(&result[at..at + piece.len()]);
                    }
                }
            }
            self.low_rank.copy_residuals_to(residual);
        }
        self.low_rank.copy_factors_to(&mut memory.factors);
    }

    /// Replaces the memory of these sums by the memory of a rank. If a tensor had EF21 when the memory was saved, but does not
    /// have it any more, a rank with `adds_results` adds the results to its residual.
    pub(crate) fn set_memory(&mut self, memory: &CompressionMemory, adds_results: bool) {
        self.calls = memory.calls;
        let residual = memory.residuals.first();
        for lane in self.lanes.iter().filter(|lane| lane.compression != Compression::None) {
            let mut state = CompressorState { calls: memory.calls, ..CompressorState::default() };
            if let (Some(residual), true) = (residual, lane.compression.needs_error_feedback()) {
                state.residual = lane.pack(residual, &self.range);
                if !memory.results.is_empty() {
                    let result = lane.pack(&memory.results, &self.range);
                    if lane.compression.adds_last_result() {
                        state.result = result;
                    } else if adds_results {
                        state
                            .residual
                            .iter_mut()
                            .zip(&result)
                            .for_each(|(residual, result)| *residual += result);
                    }
                }
            }
            lane.compressor.set_state(state);
        }
        let results = if adds_results { &memory.results[..] } else { &[] };
        self.low_rank.set_memory(residual, results, &memory.factors);
    }
}

impl Lane {
    /// Sets the compression of the next sum, and keeps the memory. `calls` is the number of sums so far, also exact ones.
    fn set_compression(&mut self, compression: Compression, calls: u64) {
        if compression != self.compressor.compression() {
            let state = CompressorState { calls, ..self.compressor.state() };
            self.compressor = Compressor::new(compression).with_seed(self.seed);
            self.compressor.set_state(state);
        }
    }

    fn is_whole(&self, range: &Range<usize>) -> bool {
        matches!(self.pieces.as_slice(), [piece] if piece == range)
    }

    /// Returns the pieces, and where each piece starts in the vector that the lane reduces.
    fn places(&self, range: &Range<usize>) -> Vec<(Range<usize>, usize)> {
        let mut end = 0;
        let place = |piece: &Range<usize>| {
            let start = if self.target == SumTarget::OwnChunk { piece.start - range.start } else { end };
            end += piece.len();
            (piece.clone(), start)
        };
        self.pieces.iter().map(place).collect()
    }

    /// Returns the lane's elements of a vector with an element for each parameter, where they are in the vector that the lane
    /// reduces.
    fn pack(&self, vector: &[f32], range: &Range<usize>) -> Vec<f32> {
        let mut packed = vec![0.0; self.vector_len(range)];
        for (piece, at) in self.places(range) {
            packed[at..at + piece.len()].copy_from_slice(&vector[piece]);
        }
        packed
    }

    /// Returns the number of elements of the vector that the lane reduces.
    fn vector_len(&self, range: &Range<usize>) -> usize {
        match self.target {
            SumTarget::OwnChunk => range.len(),
            SumTarget::Everything => self.pieces.iter().map(Range::len).sum(),
        }
    }

    fn start(
        &mut self,
        runtime: &mut dyn Runtime,
        vector: &[f32],
        range: &Range<usize>,
    ) -> Result<(), Error> {
        self.own = chunk_of_bucket(range, runtime.rank_and_size());
        let has_gaps = self.target == SumTarget::OwnChunk && !self.is_whole(range);
        let parts: Vec<&[f32]> = if has_gaps {
            self.padded.resize(range.len(), 0.0);
            for (piece, at) in self.places(range) {
                self.padded[at..at + piece.len()].copy_from_slice(&vector[piece]);
            }
            vec![&self.padded]
        } else {
            self.pieces.iter().map(|piece| &vector[piece.clone()]).collect()
        };
        let reuse = self.free_buffer.take();
        self.pending = Some(runtime.start_sum(&parts, (self.target, &self.compressor), reuse)?);
        Ok(())
    }

    /// Waits for the sums, and calls `on_summed` for each piece.
    fn wait(&mut self, on_summed: &mut impl FnMut(Range<usize>, &mut [f32])) -> Result<(), Error> {
        let Some(pending) = self.pending.take() else { return Ok(()) };
        let (own, pieces, target) = (&self.own, &self.pieces, self.target);
        let buffer = pending.wait(|sums| match target {
            SumTarget::Everything => {
                let mut rest = sums;
                for piece in pieces {
                    let (start, end) = rest.split_at_mut(piece.len());
                    on_summed(piece.clone(), start);
                    rest = end;
                }
            }
            SumTarget::OwnChunk => {
                for piece in pieces.iter().map(|piece| overlap(piece, own)) {
                    on_summed(piece.clone(), &mut sums[piece.start - own.start..piece.end - own.start]);
                }
            }
        })?;
        self.free_buffer = Some(buffer);
        Ok(())
    }
}
