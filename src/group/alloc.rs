//! Buffers in shared memory, which the ranks of a group reduce in place (`docs/shared-memory.md`).

use std::fmt;
use std::io;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::call::layout_digest;
use super::parts::zeroed;
use super::share::{MemoryReport, REPORT_WORDS, Shared};
use super::{Error, Group, OwnedBuffer};
use crate::runtime::buffer::impl_buffer_of_slice;
use crate::runtime::buffer::sealed::Sealed;
use crate::runtime::host_rounds::HostRounds;
use crate::shm::{BUFFERS_MAX, ExposedBuffer, RemoteBuffer};
use crate::types::{Contract, Element, Site};

/// The status of a [`MemoryReport`] if the rank already has the maximum number of buffers.
const HAS_MAX_BUFFERS: u64 = 3;
const SIZE_OVERFLOWS: u64 = 4;
/// The engine distinguishes the all-gathers in [`Group::alloc`] from all-gathers of the program by the digest of these numbers.
const LAYOUT: [usize; 2] = [REPORT_WORDS, 0x616c_6c6f];

/// A buffer of elements of [`Group::alloc`]. The buffer dereferences to a slice, and can be sent to another thread.
///
/// Dropping the buffer frees the memory on this rank at once. Another rank unmaps the memory when it calls [`Group::alloc`], or a
/// collective after it has dropped such a buffer itself, if no operation is active there. The buffer may outlive its group. After
/// a failed operation, no other rank accesses the part of the buffer that the operation used.
///
/// ```
/// use ringtrain::{Group, ReduceOp};
///
/// let mut group = Group::from_environment()?;
/// let mut gradients = group.alloc::<f32>(100_000)?;
/// gradients.fill(1.0);
/// group.all_reduce(&mut gradients, ReduceOp::Average)?;
/// assert!(gradients.iter().all(|&gradient| gradient == 1.0));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct SharedBuffer<T: Element>(BufferKind<T>);

enum BufferKind<T: Element> {
    /// Ordinary memory, which only this rank can access.
    Private(Vec<T>),
    Shared(SharedElements<T>),
}

struct SharedElements<T> {
    /// This rank's memory, which the other ranks can access.
    exposed: ExposedBuffer,
    /// The rounds hold a weak reference to this value. `None` tells them that the buffer has been dropped.
    alive: Option<Arc<()>>,
    /// Makes the next operation remove dropped buffers.
    has_dropped_buffers: Arc<AtomicBool>,
    element: PhantomData<T>,
}

impl Group {
    /// Allocates a buffer of `count` zeros. If the group's ranks share memory, all ranks can access the buffer. It is ordinary
    /// memory in a world of one rank, over TCP, and if any rank cannot create shared memory.
    ///
    /// All ranks have to call this collective (`MPI_Win_allocate_shared`). It costs two all-gathers of a few words, so allocate
    /// once and use the buffer often. Counts and element types may differ. An all-reduce runs in place, without copies, if all
    /// ranks pass a shared buffer or a part of one, not necessarily the same part. The results have the same bits as with
    /// ordinary memory. All other operations treat the buffer as ordinary memory.
    ///
    /// # Errors
    ///
    /// On all ranks: [`Error::TooManyBuffers`] if any rank already has 1,024 buffers of the group, [`Error::InvalidCounts`] if
    /// any rank requests more than memory can hold, and the errors of [`Group::all_gather`]. Without shared memory, only a rank
    /// that has too little memory returns [`Error::InvalidCounts`] or [`Error::System`].
    #[track_caller]
    pub fn alloc<T: Element>(&mut self, count: usize) -> Result<SharedBuffer<T>, Error> {
        let site = Site::here();
        if !self.shares_memory {
            self.check_abort()?;
            log::info!("group {} has no shared memory, so its buffers use ordinary memory", self.id);
            return SharedBuffer::private(count);
        }
        match self.try_to_alloc(count, site)? {
            Ok(shared) => Ok(SharedBuffer(BufferKind::Shared(shared))),
            Err(why) => {
                log::info!("a buffer of group {} uses ordinary memory: {why}", self.id);
                SharedBuffer::private(count)
            }
        }
    }

    fn try_to_alloc<T: Element>(
        &mut self,
        count: usize,
        site: Site,
    ) -> Result<Shared<SharedElements<T>>, Error> {
        let has_max_buffers = self.with_rounds(HostRounds::has_max_buffers).unwrap_or(false);
        let bytes = count.checked_mul(size_of::<T>()).filter(|&bytes| isize::try_from(bytes).is_ok());
        let refused = |status| (MemoryReport::without_memory(status), Err(io::ErrorKind::OutOfMemory.into()));
        let (report, created) = match bytes {
            None => refused(SIZE_OVERFLOWS),
            Some(_) if has_max_buffers => refused(HAS_MAX_BUFFERS),
            Some(bytes) => MemoryReport::create(bytes, ExposedBuffer::create, ExposedBuffer::location),
        };
        let set_layout = |contract: &mut Contract| contract.layout = layout_digest(LAYOUT);
        let words: [u64; REPORT_WORDS] = bytemuck::cast(report);
        let all_words = self.gather_numbers(words, site, set_layout)?;
        let reports: &[MemoryReport] = bytemuck::cast_slice(&all_words);
        for (status, error) in [
            (SIZE_OVERFLOWS, Error::InvalidCounts("a rank requests more than memory can hold")),
            (HAS_MAX_BUFFERS, Error::TooManyBuffers(BUFFERS_MAX)),
        ] {
            if reports.iter().any(|report| report.status == status) {
                return Err(error);
            }
        }
        let mut exposed = match created {
            Ok(exposed) => exposed,
            Err(error) => return Ok(Err(error.to_string())),
        };
        if reports.iter().any(|report| report.status != MemoryReport::HAS_MEMORY) {
            return Ok(Err("another rank could not create its memory".into()));
        }
        let others = reports.iter().enumerate().filter(|(rank, _)| *rank != self.rank.index());
        let opened: io::Result<Vec<RemoteBuffer>> =
            others.map(|(_, report)| report.open(RemoteBuffer::open)).collect();
        Ok(self.confirm(opened, site, set_layout)?.and_then(|others| {
            exposed.close_file();
            let alive = Arc::new(());
            let weak = Arc::downgrade(&alive);
            let has_dropped_buffers = self
                .with_rounds(|host_rounds| host_rounds.register_buffer(&mut exposed, weak, others))
                .ok_or("the job has failed")?;
            Ok(SharedElements { exposed, alive: Some(alive), has_dropped_buffers, element: PhantomData })
        }))
    }

    /// Calls `use_rounds` with the rounds of the group, which the core may have. Returns `None` if the job has failed.
    fn with_rounds<R>(&mut self, use_rounds: impl FnOnce(&mut HostRounds) -> R) -> Option<R> {
        if let Some(host_rounds) = &mut self.host_rounds {
            return Some(use_rounds(host_rounds));
        }
        self.job.as_ref()?.driver.core().rounds.get_mut(&(self.id, 0)).map(|rounds| use_rounds(rounds))
    }
}

impl<T: Element> SharedBuffer<T> {
    fn private(count: usize) -> Result<Self, Error> {
        zeroed(count).map(|elements| Self(BufferKind::Private(elements)))
    }

    /// Returns whether all ranks of the group can access this memory. All ranks get the same answer for the same call.
    pub fn is_shared(&self) -> bool {
        matches!(self.0, BufferKind::Shared(_))
    }
}

impl<T> Drop for SharedElements<T> {
    fn drop(&mut self) {
        self.exposed.withdraw();
        self.alive = None;
        self.has_dropped_buffers.store(true, Ordering::Release);
    }
}

impl<T: Element> Deref for SharedBuffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match &self.0 {
            BufferKind::Private(elements) => elements,
            BufferKind::Shared(shared) => bytemuck::cast_slice(shared.exposed.bytes()),
        }
    }
}

impl<T: Element> DerefMut for SharedBuffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        match &mut self.0 {
            BufferKind::Private(elements) => elements,
            BufferKind::Shared(shared) => bytemuck::cast_slice_mut(shared.exposed.bytes_mut()),
        }
    }
}

impl<T: Element> AsRef<[T]> for SharedBuffer<T> {
    fn as_ref(&self) -> &[T] {
        self
    }
}

impl<T: Element> AsMut<[T]> for SharedBuffer<T> {
    fn as_mut(&mut self) -> &mut [T] {
        self
    }
}

impl_buffer_of_slice! { SharedBuffer<T>; }

impl<T: Element> Sealed for SharedBuffer<T> {}

impl<T: Element> OwnedBuffer for SharedBuffer<T> {
    type Element = T;
}

impl<T: Element> fmt::Debug for SharedBuffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&**self, f)
    }
}
