//! The buffers of a simulated rank: ordinary memory, and registered buffers, as `Group::alloc` returns them. Registered buffers
//! are real shared memory, in which the ranks reduce in place. Each rank has its own mapping of each buffer.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;

use rand::RngExt as _;
use rand::rngs::StdRng;

use crate::runtime::host_rounds::HostRounds;
use crate::shm::{ExposedBuffer, RemoteBuffer, RoundsMemory as _, TOKEN_BYTES};
use crate::simulation::memory::SimMemory;

const TOKEN: [u8; TOKEN_BYTES] = [7; TOKEN_BYTES];
/// What a program writes into a buffer that it gets back after a failure.
const RETURNED: f64 = -1.0;

/// The buffers of a rank.
#[derive(Default)]
pub struct RankBuffers {
    /// The registered buffers. The second value exists as long as the buffer.
    registered: Vec<(ExposedBuffer, Arc<()>)>,
    ordinary: Vec<f64>,
    /// The registered buffer of the current call and the range of its elements; `None` if the call uses ordinary memory.
    part: Option<(usize, Range<usize>)>,
}

impl RankBuffers {
    /// Makes `elements` the contents of the buffer of the next call. The buffer is a part of a registered buffer with the
    /// probability `registered_share`.
    pub fn begin(
        &mut self,
        elements: Vec<f64>,
        (registered_share, random): (f64, &RefCell<StdRng>),
        memory: &SimMemory,
    ) {
        self.part = self.random_part(elements.len(), registered_share, &mut random.borrow_mut());
        if self.part.is_none() {
            self.ordinary = elements;
            return;
        }
        let target = self.elements_mut();
        memory.before_access_in_place(bytemuck::cast_slice(target), true);
        target.copy_from_slice(&elements);
    }

    fn random_part(
        &self,
        length: usize,
        registered_share: f64,
        random: &mut StdRng,
    ) -> Option<(usize, Range<usize>)> {
        if self.registered.is_empty() || !random.random_bool(registered_share) {
            return None;
        }
        let buffer = random.random_range(0..self.registered.len());
        let buffer_length = self.registered[buffer].0.bytes().len() / size_of::<f64>();
        let start = random.random_range(0..=buffer_length - length);
        Some((buffer, start..start + length))
    }

    /// Returns the elements of the current call.
    pub fn elements_mut(&mut self) -> &mut [f64] {
        match &self.part {
            Some((buffer, part)) => {
                &mut bytemuck::cast_slice_mut(self.registered[*buffer].0.bytes_mut())[part.clone()]
            }
            None => &mut self.ordinary,
        }
    }

    /// Changes the elements of the current call, as the program of a rank may do after a failure.
    pub fn use_after_failure(&mut self) {
        self.elements_mut().fill(RETURNED);
    }

    /// Returns whether no rank has changed the elements since [`RankBuffers::use_after_failure`].
    pub fn is_unchanged_since_failure(&mut self) -> bool {
        self.elements_mut().iter().all(|&element| element == RETURNED)
    }
}

/// Registers one buffer of `elements` elements of each rank.
pub fn register_buffer(
    memory: &SimMemory,
    elements: usize,
    mut ranks: Vec<(&mut HostRounds<SimMemory>, &mut RankBuffers)>,
) {
    let length = elements * size_of::<f64>();
    let mut own_buffers: Vec<ExposedBuffer> =
        ranks.iter().map(|_| ExposedBuffer::create(length, &TOKEN).unwrap()).collect();
    let locations: Vec<_> = own_buffers.iter().map(|buffer| buffer.location().unwrap()).collect();
    let mut mappings: Vec<Vec<usize>> =
        own_buffers.iter().map(|own| vec![own.bytes().as_ptr().addr()]).collect();
    for (rank, ((host_rounds, buffers), mut own)) in ranks.iter_mut().zip(own_buffers.drain(..)).enumerate() {
        let mut others = Vec::new();
        for (other, location) in locations.iter().enumerate().filter(|(other, _)| *other != rank) {
            let buffer = RemoteBuffer::open(*location, length, &TOKEN).unwrap();
            mappings[other].push(buffer.address_of(&(0..length)).unwrap().addr().get());
            others.push(buffer);
        }
        let alive = Arc::new(());
        host_rounds.register_buffer(&mut own, Arc::downgrade(&alive), others);
        buffers.registered.push((own, alive));
    }
    for (_, buffers) in ranks {
        buffers.registered.iter_mut().for_each(|(buffer, _)| buffer.close_file());
    }
    for mappings in mappings {
        memory.add_buffer(length, mappings);
    }
}
