//! Buffers that ranks have of their group: in shared memory, where peers reduce them in place.
//!
//! Each rank makes its own memory, as the first one does for the board, and says in a gathering where it is; all open all
//! others'. Everybody has everything or nobody uses it.

use std::fmt;
use std::io;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use super::buffer::sealed::Sealed;
use super::out_of_place::{layout, zeroed};
use super::share::{WORDS, from_words, to_words};
use super::shm_executor::ShmExecutor;
use super::{Buffer, Error, Group, Input, OwnedBuffer};
use crate::schedule::CollectiveSpec;
use crate::schedule::partition::Partition;
use crate::transport::shm::{BUFFERS_MAX, ExposedBuffer, RemoteBuffer, TOKEN_BYTES};
use crate::types::{Element, Site};

/// What a rank says of itself before the words of its memory.
const HAS_MEMORY: u64 = 1;
const HAS_NONE: u64 = 2;
const HAS_TOO_MANY: u64 = 3;
const CANNOT_COUNT: u64 = 4;
/// That, the bytes of its buffer, and where it is.
const CARD_WORDS: usize = 2 + WORDS;
/// Tells the gathering from one of the program's own.
const LAYOUT: [usize; 2] = [CARD_WORDS, 0x616c_6c6f];

/// Elements in memory that a group allocated ([`Group::alloc`]). It dereferences to a slice, and can be sent to
/// another thread.
///
/// If [`SharedBuffer::is_shared`] returns true, the elements lie in memory that all ranks of the group can access: an
/// all-reduce of the buffer, or of a part of it, moves nothing through slots or sockets. All other operations treat
/// it as ordinary memory. Dropping it frees the memory, at once on this rank and on the others with the next
/// [`Group::alloc`] or drop while no operation is under way there. It leaves no named object in the system. It may
/// outlive its group. After a failed operation no other rank accesses the part that the operation was on.
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
    Private(Vec<T>),
    SharedElements(SharedElements<T>),
}

struct SharedElements<T> {
    exposed: ExposedBuffer,
    /// The desk's sign that the window is mapped.
    alive: Option<Arc<()>>,
    shm_executor: Weak<Mutex<ShmExecutor>>,
    element: PhantomData<T>,
}

impl Group {
    /// Allocates a buffer of `count` zeros, which peers can reduce in place if the group's ranks share memory
    /// ([`SharedBuffer::is_shared`]). In a world of one, over TCP, and if a rank cannot have such memory it is
    /// ordinary memory.
    ///
    /// All ranks have to call it, as a collective (`MPI_Win_allocate_shared`); their counts and element types may
    /// differ. A call costs two all-gathers of a few words; allocate once, and use the buffer often. An all-reduce
    /// runs in place if all ranks call it with such a buffer or a part of one, not necessarily the same part. If only
    /// some do, it takes as long as with ordinary memory. The results have the same bits in any case.
    ///
    /// # Errors
    ///
    /// On all ranks: [`Error::TooManyBuffers`] if one of them has 1,024 buffers of the group,
    /// [`Error::InvalidCounts`] if one requests more than memory can hold; and as [`Group::all_gather`]. Without
    /// shared memory, [`Error::InvalidCounts`] and [`Error::System`] only on a rank that has too little memory.
    #[track_caller]
    pub fn alloc<T: Element>(&mut self, count: usize) -> Result<SharedBuffer<T>, Error> {
        let site = Site::here();
        let Some(shm_executor) = self.shm_executor.clone() else {
            self.driver()?;
            log::info!("group {} shares no memory, and its buffers are of each rank's own", self.id);
            return SharedBuffer::private(count);
        };
        match self.try_to_alloc(&shm_executor, count, site)? {
            Ok(shared) => Ok(SharedBuffer(BufferKind::SharedElements(shared))),
            Err(why) => {
                log::info!("a buffer of group {} is of each rank's own: {why}", self.id);
                SharedBuffer::private(count)
            }
        }
    }

    /// A buffer that all ranks reach, or what is in the way.
    fn try_to_alloc<T: Element>(
        &self,
        shm_executor: &Arc<Mutex<ShmExecutor>>,
        count: usize,
        site: Site,
    ) -> Result<Result<SharedElements<T>, String>, Error> {
        let is_full = lock(shm_executor).has_max_buffers();
        let bytes = count.checked_mul(size_of::<T>()).filter(|&bytes| isize::try_from(bytes).is_ok());
        let (card, created) = match bytes {
            None => (card(CANNOT_COUNT), None),
            Some(_) if is_full => (card(HAS_TOO_MANY), None),
            Some(bytes) => create(bytes),
        };
        let cards = self.gather_words(card, site)?;
        for (said, error) in [
            (CANNOT_COUNT, Error::InvalidCounts("they come to more than memory can hold")),
            (HAS_TOO_MANY, Error::TooManyBuffers(BUFFERS_MAX)),
        ] {
            if cards.iter().any(|card| card[0] == said) {
                return Err(error);
            }
        }
        if cards.iter().any(|card| card[0] != HAS_MEMORY) {
            return Ok(Err(created
                .and_then(Result::err)
                .map_or_else(|| "another rank could not make its own".into(), |error| error.to_string())));
        }
        let others = cards.iter().enumerate().filter(|(rank, _)| *rank != self.rank.index());
        let opened: io::Result<Vec<RemoteBuffer>> = others.map(|(_, card)| open(card)).collect();
        let have_opened = self.gather_words([u64::from(opened.is_ok())], site)?;
        match (created, opened) {
            (Some(Ok(mut exposed)), Ok(others)) if have_opened.iter().all(|&[has]| has == 1) => {
                exposed.close();
                let alive = Arc::new(());
                lock(shm_executor).register_buffer(&mut exposed, Arc::downgrade(&alive), others);
                let shm_executor = Arc::downgrade(shm_executor);
                Ok(Ok(SharedElements { exposed, alive: Some(alive), shm_executor, element: PhantomData }))
            }
            (_, Err(error)) => Ok(Err(error.to_string())),
            _ => Ok(Err("another rank could not open it".into())),
        }
    }

    /// Every rank's words.
    fn gather_words<const N: usize>(&self, own: [u64; N], site: Site) -> Result<Vec<[u64; N]>, Error> {
        let mut all = vec![[0u64; N]; self.world.as_usize()];
        all[self.rank.index()] = own;
        let work = CollectiveSpec::AllGather(Partition::of_equal_parts(N, self.world));
        let call = self.call::<u64>(work, site).with_layout(layout(LAYOUT));
        self.run(call, all.as_flattened_mut())?;
        Ok(all)
    }
}

/// What a rank says that has no memory for the others.
fn card(said: u64) -> [u64; CARD_WORDS] {
    let mut card = [0; CARD_WORDS];
    card[0] = said;
    card
}

/// New memory, and what its owner says of it.
fn create(bytes: usize) -> ([u64; CARD_WORDS], Option<io::Result<ExposedBuffer>>) {
    let token: [u8; TOKEN_BYTES] = rand::random();
    let exposed = ExposedBuffer::create(bytes, &token);
    let mut words = card(HAS_NONE);
    if let Some(place) = exposed.as_ref().ok().and_then(ExposedBuffer::place) {
        words[..2].copy_from_slice(&[HAS_MEMORY, bytes as u64]);
        words[2..].copy_from_slice(&to_words(place, &token));
    }
    (words, Some(exposed))
}

fn open(card: &[u64; CARD_WORDS]) -> io::Result<RemoteBuffer> {
    let [_, bytes, words @ ..] = card;
    let there_is_none = || io::Error::other("it does not say where it is");
    let (place, token) = from_words(words).ok_or_else(there_is_none)?;
    let bytes = usize::try_from(*bytes).map_err(|_| io::ErrorKind::OutOfMemory)?;
    RemoteBuffer::open(place, bytes, &token)
}

fn lock(shm_executor: &Mutex<ShmExecutor>) -> MutexGuard<'_, ShmExecutor> {
    shm_executor.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<T: Element> SharedBuffer<T> {
    fn private(count: usize) -> Result<Self, Error> {
        zeroed(count).map(|elements| Self(BufferKind::Private(elements)))
    }

    /// Whether all ranks of the group can access this memory. All of them get the same answer for the same
    /// [`Group::alloc`].
    pub fn is_shared(&self) -> bool {
        matches!(self.0, BufferKind::SharedElements(_))
    }
}

impl<T> Drop for SharedElements<T> {
    fn drop(&mut self) {
        self.exposed.withdraw();
        self.alive = None;
        // Whoever is at the desk now looks for what has been given up later.
        if let Some(shm_executor) = self.shm_executor.upgrade()
            && let Ok(mut shm_executor) = shm_executor.try_lock()
        {
            shm_executor.remove_dropped_buffers();
        }
    }
}

impl<T: Element> Deref for SharedBuffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        match &self.0 {
            BufferKind::Private(elements) => elements,
            BufferKind::SharedElements(shared) => bytemuck::cast_slice(shared.exposed.bytes()),
        }
    }
}

impl<T: Element> DerefMut for SharedBuffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        match &mut self.0 {
            BufferKind::Private(elements) => elements,
            BufferKind::SharedElements(shared) => bytemuck::cast_slice_mut(shared.exposed.bytes_mut()),
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

impl<T: Element> Buffer for SharedBuffer<T> {
    type Element = T;

    fn elements_mut(&mut self) -> Result<&mut [T], Error> {
        Ok(self)
    }
}

impl<T: Element> Input for SharedBuffer<T> {
    type Element = T;

    fn elements(&self) -> Result<&[T], Error> {
        Ok(self)
    }
}

impl<T: Element> Sealed for SharedBuffer<T> {}

impl<T: Element> OwnedBuffer for SharedBuffer<T> {
    type Element = T;
}

impl<T: Element> fmt::Debug for SharedBuffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&**self, f)
    }
}
