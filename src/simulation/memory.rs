//! Shared memory for tests in one thread. Its accesses have all results that the memory model of Rust allows, except for loads
//! that see a later store.
//!
//! Simulated threads take turns, and a random generator chooses what each load sees. The model, which many checkers use:
//!
//! - A word keeps all its stores in one order. A load returns any of them, but none that is older than a store that the thread
//!   must see: one that it has seen before, one that happens before the load, or one that precedes it by two fences.
//! - A release store carries what happens before it to the acquire loads that see it. A fence does that for all relaxed stores
//!   after it and all relaxed loads before it.
//! - Bytes are not atomic. A read or a write of bytes is a data race if another thread accesses the same bytes, one of them
//!   writes, and neither happens before the other. A racing read returns a mixture of old and new bytes, and the race is noted.
//!   So a missing release after a read is noted, although no load sees a later store.
//!
//! Threads may also access buffers of this process in place. The simulated memory then has no bytes of its own, but notes races.
//!
//! A test can also change one access of the source, as if the source were wrong ([`Mutation`]).

mod accesses;
mod tests;

use std::cell::{Cell, RefCell, RefMut};
use std::collections::{BTreeMap, BTreeSet};
use std::panic::{Location, resume_unwind};
use std::rc::Rc;
use std::sync::atomic::Ordering;

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

pub use self::accesses::THREADS_MAX;
use self::accesses::{Access, Clock, LastAccesses, MappedBuffers, split_at_words};
use crate::shm::{RoundsMemory, SegmentMemory, WORD_BYTES};

/// The number of bytes of a chunk.
const CHUNK_BYTES: usize = 1024;
/// A thread that has not seen a store.
const NEVER: u32 = u32::MAX;

/// A line of the source that accesses the memory.
pub type AccessSite = &'static Location<'static>;

/// What a line of the source does with the memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AccessKind {
    /// Whether the access orders other accesses: it is a fence, or its ordering is not relaxed.
    pub is_ordered: bool,
    /// Whether the access is a fence.
    pub is_fence: bool,
}

/// A change of one access, as if the source were wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mutation {
    /// The access is relaxed. A fence does nothing.
    Relax,
    /// A load returns 0, and a store, a swap, a read or a write changes nothing.
    Skip,
}

/// What a thread knows of the accesses of all threads.
#[derive(Clone, Copy, Default)]
pub struct SimView {
    /// The accesses that happen before the next access of the thread.
    before: Clock,
    /// The accesses whose results the thread must see: those of `before`, and those that precede it by two fences.
    visible: Clock,
}

/// Shared memory of simulated threads, or a part of it.
pub struct SimMemory {
    /// The offset of the first byte of this part.
    base: usize,
    length: usize,
    whole: Rc<SimWhole>,
}

/// The whole of a shared memory, of which a [`SimMemory`] is a part.
struct SimWhole {
    thread: Cell<usize>,
    state: RefCell<SimState>,
    on_access: RefCell<Option<Box<dyn Fn()>>>,
}

struct SimState {
    random: StdRng,
    threads: [SimThread; THREADS_MAX],
    /// For each word that has been accessed, its stores in their order.
    words: BTreeMap<usize, Vec<SimStore>>,
    /// The words that have been set since the last [`SimMemory::settle`].
    unsettled: BTreeSet<usize>,
    /// What happens before the last fence of any thread.
    before_fences: Clock,
    /// The bytes, in chunks of [`CHUNK_BYTES`] bytes. A chunk that has not been accessed has only zeros.
    chunks: Vec<Option<Box<Chunk>>>,
    /// The buffers that threads access in place.
    buffers: MappedBuffers,
    race: Option<String>,
    sites: BTreeMap<AccessSite, AccessKind>,
    mutation: Option<(AccessSite, Mutation)>,
}

#[derive(Clone, Copy, Default)]
struct SimThread {
    now: u32,
    view: SimView,
    /// The view at the last fence, which relaxed stores carry.
    fenced: SimView,
    /// What relaxed loads have seen. The next fence acquires it.
    unacquired: SimView,
    has_ended: bool,
}

/// A store to a word.
#[derive(Clone)]
struct SimStore {
    value: u64,
    /// When each thread first saw the store.
    seen: Clock,
    /// What the store carries to acquire loads.
    released: SimView,
    /// Whether no store may come between this store and the one before.
    is_swap: bool,
}

/// Adjacent bytes.
struct Chunk {
    newest: [u8; CHUNK_BYTES],
    /// The bytes that the last writes have replaced.
    replaced: [u8; CHUNK_BYTES],
    blocks: [LastAccesses; CHUNK_BYTES / WORD_BYTES],
}

fn join(clock: &mut Clock, other: &Clock) {
    clock.iter_mut().zip(other).for_each(|(time, other)| *time = (*time).max(*other));
}

impl SimView {
    fn join(&mut self, other: &Self) {
        join(&mut self.before, &other.before);
        join(&mut self.visible, &other.visible);
    }
}

impl SimMemory {
    /// Creates memory of `length` bytes that are all zero. `seed` determines what loads see.
    pub fn new(length: usize, seed: u64) -> Self {
        let state = SimState {
            random: StdRng::seed_from_u64(seed),
            threads: Default::default(),
            words: BTreeMap::new(),
            unsettled: BTreeSet::new(),
            before_fences: Clock::default(),
            chunks: (0..length.div_ceil(CHUNK_BYTES)).map(|_| None).collect(),
            buffers: MappedBuffers::default(),
            race: None,
            sites: BTreeMap::new(),
            mutation: None,
        };
        let whole =
            SimWhole { thread: Cell::new(0), state: RefCell::new(state), on_access: RefCell::default() };
        Self { base: 0, length, whole: Rc::new(whole) }
    }

    /// Returns the part of `length` bytes that begins at `start`. All parts have the same threads.
    pub fn part(&self, start: usize, length: usize) -> Self {
        assert!(start + length <= self.length, "a part must be inside the memory");
        Self { base: self.base + start, length, whole: Rc::clone(&self.whole) }
    }

    /// Calls `on_access` before each access. The function may let other threads run.
    pub fn set_on_access(&self, on_access: Option<Box<dyn Fn()>>) {
        *self.whole.on_access.borrow_mut() = on_access;
    }

    /// Adds a buffer of `length` bytes that threads access in place. `mappings` are the addresses of its first byte.
    pub fn add_buffer(&self, length: usize, mappings: impl IntoIterator<Item = usize>) {
        self.whole.state.borrow_mut().buffers.add(length, mappings);
    }

    /// Changes the accesses of one line of the source.
    pub fn set_mutation(&self, mutation: Option<(AccessSite, Mutation)>) {
        self.whole.state.borrow_mut().mutation = mutation;
    }

    /// Runs `work` as the simulated thread with the number `thread`, which is less than [`THREADS_MAX`].
    pub fn run_as<T>(&self, thread: usize, work: impl FnOnce() -> T) -> T {
        let before = self.whole.thread.replace(thread);
        let result = work();
        self.whole.thread.set(before);
        result
    }

    /// Returns the simulated thread that runs.
    pub fn thread(&self) -> usize {
        self.whole.thread.get()
    }

    /// Ends a thread, as if its process were killed. Its further accesses change nothing.
    pub fn end_thread(&self, thread: usize) {
        self.whole.state.borrow_mut().threads[thread].has_ended = true;
    }

    /// Returns what the running thread knows, for example when it unlocks a mutex.
    pub fn view(&self) -> SimView {
        self.whole.state.borrow().threads[self.whole.thread.get()].view
    }

    /// Adds what another thread knew to what the running thread knows, for example when it locks a mutex.
    pub fn acquire_view(&self, view: &SimView) {
        self.whole.state.borrow_mut().threads[self.whole.thread.get()].view.join(view);
    }

    /// Makes all stores visible to all threads, because time has passed. That does not order accesses to bytes.
    pub fn settle(&self) {
        let mut state = self.whole.state.borrow_mut();
        let SimState { words, unsettled, .. } = &mut *state;
        for offset in std::mem::take(unsettled) {
            let Some(stores) = words.get_mut(&offset) else { continue };
            stores.drain(..stores.len() - 1);
            stores[0].seen = Clock::default();
        }
    }

    /// Returns the first data race.
    pub fn race(&self) -> Option<String> {
        self.whole.state.borrow().race.clone()
    }

    /// Returns the lines of the source that have accessed the memory while no line was changed.
    pub fn sites(&self) -> BTreeMap<AccessSite, AccessKind> {
        self.whole.state.borrow().sites.clone()
    }

    /// Sets a random word among those that have been accessed. The words of queues are random, or similar to right ones.
    pub fn corrupt_word(&self, random: &mut StdRng) {
        let mut state = self.whole.state.borrow_mut();
        let count = state.words.len();
        let Some(stores) = state.words.values_mut().nth(random.random_range(0..count.max(1))) else { return };
        let newest = stores[stores.len() - 1].value;
        stores[0].value = match random.random_range(0..3) {
            0 => random.random(),
            1 => newest.wrapping_add(random.random_range(1..4)).wrapping_sub(2),
            _ => random.random_range(0..1000) << 32 | 1,
        };
        stores.truncate(1);
        stores[0].seen = Clock::default();
    }

    /// Begins an access to `length` bytes from `start` on. Returns the mutation of its line.
    #[track_caller]
    fn begin(
        &self,
        (start, length): (usize, usize),
        is_ordered: bool,
        is_fence: bool,
    ) -> (RefMut<'_, SimState>, Option<Mutation>) {
        let is_inside = start.checked_add(length).is_some_and(|end| end <= self.length);
        assert!(is_inside, "an access to shared memory must be inside the memory");
        let site = Location::caller();
        let (mut state, has_ended) = self.count_access();
        if state.mutation.is_none() {
            state.sites.insert(site, AccessKind { is_ordered, is_fence });
        }
        let is_mutated = |mutated: AccessSite| mutated.line() == site.line() && mutated == site;
        let mutation = state.mutation.filter(|(mutated, _)| is_mutated(mutated));
        let mutation = if has_ended { Some(Mutation::Skip) } else { mutation.map(|(_, mutation)| mutation) };
        (state, mutation)
    }

    /// Lets other threads run, and then counts an access of the running thread. Also returns whether the thread has ended.
    fn count_access(&self) -> (RefMut<'_, SimState>, bool) {
        if let Some(on_access) = &*self.whole.on_access.borrow() {
            on_access();
        }
        let mut state = self.whole.state.borrow_mut();
        let index = self.whole.thread.get();
        let thread = &mut state.threads[index];
        thread.now += 1;
        (thread.view.before[index], thread.view.visible[index]) = (thread.now, thread.now);
        let has_ended = thread.has_ended;
        (state, has_ended)
    }
}

impl SimState {
    /// Returns the access of a thread that has just been counted.
    fn access(&self, thread: usize) -> Access {
        let SimThread { now, view, .. } = self.threads[thread];
        Access { thread, now, before: view.before }
    }

    /// Returns the chunk of a byte, and the index of the byte in the chunk.
    fn chunk(&mut self, offset: usize) -> (&mut Chunk, usize) {
        let new_chunk = || {
            let blocks = [LastAccesses::default(); CHUNK_BYTES / WORD_BYTES];
            Box::new(Chunk { newest: [0; CHUNK_BYTES], replaced: [0; CHUNK_BYTES], blocks })
        };
        (self.chunks[offset / CHUNK_BYTES].get_or_insert_with(new_chunk), offset % CHUNK_BYTES)
    }

    /// Returns the stores of a word, and the number of the oldest store that the thread may see.
    fn stores(&mut self, offset: usize, thread: usize) -> (&mut Vec<SimStore>, usize, &mut StdRng) {
        let initial =
            || SimStore { value: 0, seen: Clock::default(), released: SimView::default(), is_swap: false };
        let stores = self.words.entry(offset).or_insert_with(|| vec![initial()]);
        let visible = &self.threads[thread].view.visible;
        let must_see =
            |store: &SimStore| store.seen.iter().zip(visible).any(|(seen, visible)| seen <= visible);
        let oldest = stores.iter().rposition(must_see).unwrap_or(0);
        (stores, oldest, &mut self.random)
    }

    /// Records that the thread has seen a store.
    fn see(&mut self, thread: usize, offset: usize, index: usize, is_acquire: bool) -> u64 {
        let SimThread { now, view, unacquired, .. } = &mut self.threads[thread];
        let Some(store) = self.words.get_mut(&offset).and_then(|stores| stores.get_mut(index)) else {
            return 0;
        };
        store.seen[thread] = store.seen[thread].min(*now);
        (if is_acquire { view } else { unacquired }).join(&store.released);
        store.value
    }

    /// Inserts a store of `value` at the place `index` in the order of the stores of a word.
    fn insert(&mut self, thread: usize, offset: usize, (index, value): (usize, u64), is_release: bool) {
        let SimThread { now, view, fenced, .. } = self.threads[thread];
        let mut seen = [NEVER; THREADS_MAX];
        seen[thread] = now;
        let released = if is_release { view } else { fenced };
        self.unsettled.insert(offset);
        if let Some(stores) = self.words.get_mut(&offset) {
            stores.insert(index, SimStore { value, seen, released, is_swap: false });
        }
    }

    fn note_race(&mut self, thread: usize, what: &str, offset: usize) {
        self.race
            .get_or_insert_with(|| format!("thread {thread} {what} byte {offset} during another access"));
    }
}

fn is_acquire(ordering: Ordering, mutation: Option<Mutation>) -> bool {
    !matches!(ordering, Ordering::Relaxed | Ordering::Release) && mutation.is_none()
}

fn is_release(ordering: Ordering, mutation: Option<Mutation>) -> bool {
    !matches!(ordering, Ordering::Relaxed | Ordering::Acquire) && mutation.is_none()
}

impl SegmentMemory for SimMemory {
    fn length(&self) -> usize {
        self.length
    }

    fn load(&self, offset: usize, ordering: Ordering) -> u64 {
        let (mut state, mutation) = self.begin((offset, WORD_BYTES), ordering != Ordering::Relaxed, false);
        let (thread, offset) = (self.whole.thread.get(), self.base + offset);
        let (stores, oldest, random) = state.stores(offset, thread);
        let newest = stores.len() - 1;
        let index = match random.random_range(0..4) {
            0 | 1 => newest,
            2 => oldest,
            _ => random.random_range(oldest..=newest),
        };
        let value = state.see(thread, offset, index, is_acquire(ordering, mutation));
        if mutation == Some(Mutation::Skip) { 0 } else { value }
    }

    fn store(&self, offset: usize, value: u64, ordering: Ordering) {
        let (mut state, mutation) = self.begin((offset, WORD_BYTES), ordering != Ordering::Relaxed, false);
        if mutation == Some(Mutation::Skip) {
            return;
        }
        let (thread, offset) = (self.whole.thread.get(), self.base + offset);
        let (stores, oldest, random) = state.stores(offset, thread);
        let end = stores.len();
        // Other threads may have written later stores, but nothing comes between a swap and the store that it replaced.
        let possible: Vec<usize> =
            (oldest + 1..=end).filter(|&index| stores.get(index).is_none_or(|next| !next.is_swap)).collect();
        let index =
            if random.random_bool(0.7) { end } else { possible[random.random_range(0..possible.len())] };
        state.insert(thread, offset, (index, value), is_release(ordering, mutation));
    }

    fn swap(&self, offset: usize, value: u64, ordering: Ordering) -> u64 {
        let (mut state, mutation) = self.begin((offset, WORD_BYTES), ordering != Ordering::Relaxed, false);
        let (thread, offset) = (self.whole.thread.get(), self.base + offset);
        let (stores, oldest, random) = state.stores(offset, thread);
        let possible: Vec<usize> = (oldest..stores.len())
            .filter(|&index| stores.get(index + 1).is_none_or(|next| !next.is_swap))
            .collect();
        let replaced = possible[random.random_range(0..possible.len())];
        if mutation == Some(Mutation::Skip) {
            return state.see(thread, offset, replaced, false);
        }
        let before = state.see(thread, offset, replaced, is_acquire(ordering, mutation));
        state.insert(thread, offset, (replaced + 1, value), is_release(ordering, mutation));
        if let Some([replaced, own]) =
            state.words.get_mut(&offset).and_then(|s| s.get_mut(replaced..replaced + 2))
        {
            own.is_swap = true;
            // A swap also carries what the store that it replaced carries.
            own.released.join(&replaced.released);
        }
        before
    }

    fn fence(&self) {
        let (mut state, mutation) = self.begin((0, 0), true, true);
        if mutation.is_some() {
            return;
        }
        let SimState { threads, before_fences, .. } = &mut *state;
        let SimThread { view, fenced, unacquired, .. } = &mut threads[self.whole.thread.get()];
        view.join(unacquired);
        join(before_fences, &view.before);
        join(&mut view.visible, before_fences);
        *fenced = *view;
    }

    fn read(&self, start: usize, target: &mut [u8]) {
        let (mut state, mutation) = self.begin((start, target.len()), false, false);
        if mutation == Some(Mutation::Skip) {
            return;
        }
        let thread = self.whole.thread.get();
        let access = state.access(thread);
        for (offset, part) in split_at_words(self.base + start, target.len()) {
            let (chunk, index) = state.chunk(offset);
            let is_race = chunk.blocks[index / WORD_BYTES].read(&access);
            let bytes = index..index + part.len();
            let target = &mut target[part];
            target.copy_from_slice(&chunk.newest[bytes.clone()]);
            if is_race {
                let mut replaced = [0; WORD_BYTES];
                replaced[..target.len()].copy_from_slice(&chunk.replaced[bytes]);
                state.note_race(thread, "reads", offset);
                for (byte, replaced) in target.iter_mut().zip(replaced) {
                    if state.random.random_bool(0.5) {
                        *byte = replaced;
                    }
                }
            }
        }
    }

    fn write(&self, start: usize, source: &[u8]) {
        let (mut state, mutation) = self.begin((start, source.len()), false, false);
        if mutation == Some(Mutation::Skip) {
            return;
        }
        let thread = self.whole.thread.get();
        let access = state.access(thread);
        for (offset, part) in split_at_words(self.base + start, source.len()) {
            let (chunk, index) = state.chunk(offset);
            let is_race = chunk.blocks[index / WORD_BYTES].write(&access);
            let bytes = index..index + part.len();
            chunk.replaced[bytes.clone()].copy_from_slice(&chunk.newest[bytes.clone()]);
            chunk.newest[bytes].copy_from_slice(&source[part]);
            if is_race {
                state.note_race(thread, "writes", offset);
            }
        }
    }
}

impl RoundsMemory for SimMemory {
    type Bytes<'a> = Vec<u8>;

    unsafe fn bytes(&self, start: usize, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.read(start, &mut bytes);
        bytes
    }

    /// Notes data races. A thread that has ended unwinds, because it would access the bytes otherwise.
    fn before_access_in_place(&self, bytes: *const [u8], is_write: bool) {
        if self.whole.state.borrow_mut().buffers.words(bytes).is_empty() {
            return;
        }
        let (mut state, has_ended) = self.count_access();
        if has_ended {
            resume_unwind(Box::new("the thread has ended"));
        }
        let access = state.access(self.whole.thread.get());
        let words = state.buffers.words(bytes).iter_mut();
        let races = words
            .filter_map(|word| if is_write { word.write(&access) } else { word.read(&access) }.then_some(()));
        if races.count() > 0 {
            let what = if is_write { "writes" } else { "reads" };
            state.note_race(access.thread, what, bytes.cast::<u8>().addr());
        }
    }
}
