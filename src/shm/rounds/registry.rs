//! The registered buffers: the buffers in shared memory that all ranks of a host have mapped. A rank *exposes* a part of its
//! buffer: it posts the location of its elements instead of the elements. The other ranks check the location, and then read and
//! write the part in place, until each rank has posted that it is done.

use std::collections::BTreeMap;
use std::sync::Weak;

use super::super::buffer::{ExposedBuffer, RemoteBuffer};
use super::super::segment::SparePages;

/// The maximum number of registered buffers that a rank of a group may have at a time.
pub const BUFFERS_MAX: usize = 1024;
pub(super) const BUFFER_REF_BYTES: usize = 2 * size_of::<u64>();

/// The location of elements in a registered buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BufferRef {
    /// The number of the buffer. All ranks number their buffers in the same order.
    pub buffer: u64,
    /// The offset of the first element in bytes.
    pub offset: u64,
}

#[derive(Default)]
pub struct BufferRegistry {
    rank: usize,
    /// The number of buffers that each rank has registered, including dropped buffers. The next buffer gets this number.
    count: u64,
    /// This rank's own buffers, by the address of their first element.
    own: BTreeMap<usize, OwnBuffer>,
    /// The buffers of the other ranks, by number and then by rank. A buffer stays mapped until its owner withdraws it.
    pub(super) others: BTreeMap<u64, Vec<Option<RemoteBuffer>>>,
    pub(super) exposed_parts: ExposedParts,
}

struct OwnBuffer {
    number: u64,
    length: usize,
    spare: Option<SparePages>,
    /// Can be upgraded while the buffer is mapped.
    alive: Weak<()>,
}

/// The parts that the other ranks have exposed in `round`.
#[derive(Default)]
pub(super) struct ExposedParts {
    pub(super) round: u64,
    pub(super) part_bytes: usize,
    /// The location of the part of each rank, by rank; `None` for a rank that has exposed nothing.
    pub(super) locations: Vec<Option<BufferRef>>,
}

impl BufferRegistry {
    pub(super) fn new(rank: usize) -> Self {
        Self { rank, ..Self::default() }
    }

    pub fn own_buffer_count(&self) -> usize {
        self.own.len()
    }

    /// Registers one buffer of each rank, under the next number. All ranks must register their buffers in the same order.
    /// `others` are the buffers of the other ranks, in rank order. Drop the last `Arc` of `alive` before `own` is unmapped.
    pub fn register(
        &mut self,
        own: &mut ExposedBuffer,
        alive: Weak<()>,
        others: impl IntoIterator<Item = RemoteBuffer>,
    ) {
        let mut buffers: Vec<_> = others.into_iter().map(Some).collect();
        buffers.insert(self.rank.min(buffers.len()), None);
        let number = self.count;
        self.count += 1;
        self.others.insert(number, buffers);
        let (spare, bytes) = (own.spare_pages.take(), own.bytes());
        let own_buffer = OwnBuffer { number, length: bytes.len(), spare, alive };
        self.own.insert(bytes.as_ptr().addr(), own_buffer);
    }

    /// Removes this rank's own buffers that the program has dropped. If no operation is in progress (`is_busy` is false),
    /// also unmaps the buffers that other ranks have withdrawn.
    pub fn unmap_dropped_buffers(&mut self, is_busy: bool) {
        self.own.retain(|_, own| own.alive.strong_count() > 0);
        if is_busy {
            return;
        }
        self.others.retain(|_, buffers| {
            for buffer in buffers.iter_mut() {
                buffer.take_if(|buffer| buffer.is_withdrawn());
            }
            buffers.iter().any(Option::is_some)
        });
    }

    /// Returns the location of `bytes`, if a buffer of this rank has them at an offset that is a multiple of `element_bytes`.
    pub fn find_buffer_ref(&self, bytes: &[u8], element_bytes: usize) -> Option<BufferRef> {
        let (first, own) = self.own_buffer_at(bytes)?;
        let offset = bytes.as_ptr().addr() - first;
        let is_found = offset.is_multiple_of(element_bytes) && own.length - offset >= bytes.len();
        is_found.then_some(BufferRef { buffer: own.number, offset: offset as u64 })
    }

    /// Returns this rank's registered buffer in which `bytes` begin, and the address of its first element.
    fn own_buffer_at(&self, bytes: &[u8]) -> Option<(usize, &OwnBuffer)> {
        let address = bytes.as_ptr().addr();
        let (&first, own) = self.own.range(..=address).next_back()?;
        (address - first <= own.length && own.alive.strong_count() > 0).then_some((first, own))
    }

    /// Replaces all pages that contain any of `bytes` by private pages with the same content: other ranks may still write to
    /// the shared pages after a failure. Meanwhile, other threads of this process may use the other bytes of these pages.
    pub fn stop_exposing(&mut self, bytes: &[u8]) {
        let Some((first, _)) = self.own_buffer_at(bytes) else { return };
        let spare = self.own.get_mut(&first).and_then(|own| own.spare.as_mut());
        if let Some(Err(error)) = spare.map(|spare| spare.replace(bytes)) {
            log::warn!("a buffer stays shared after its operation failed: {error}");
        }
    }

    pub(super) fn buffer(&self, buffer: u64, rank: usize) -> Option<&RemoteBuffer> {
        self.others.get(&buffer)?.get(rank)?.as_ref()
    }

    /// Checks that `bytes` bytes are inside a buffer of `rank` at the location, whose offset is a multiple of `element_bytes`.
    pub(super) fn check_location(
        &self,
        rank: usize,
        location: BufferRef,
        bytes: usize,
        element_bytes: usize,
    ) -> Result<(), &'static str> {
        let remote = self.buffer(location.buffer, rank);
        let remote = remote.ok_or("it posted a location in a buffer that this rank does not know")?;
        let end = location.offset.checked_add(bytes as u64);
        if end.is_none_or(|end| end > remote.length() as u64) {
            return Err("it posted a location that does not end inside its buffer");
        }
        if !location.offset.is_multiple_of(element_bytes as u64) {
            return Err("it posted a location whose offset is not a multiple of the element size");
        }
        Ok(())
    }
}
