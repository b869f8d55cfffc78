//! A simulated core: operations that end when a peer answers, or at a deadline.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::mem;
use std::sync::{Arc, Weak};

use super::program::{SimEnding, SimOperation};
use super::{SimDriver, World};
use crate::engine::Timestamp;
use crate::runtime::driver::{DrivenCore, PollProgress, ThreadedDriver as _};
use crate::types::SortedSet;

/// What a peer sends over a socket.
pub(super) enum Frame {
    /// The answer to an operation, or an early part of an answer.
    Answer(Option<usize>),
    /// Wakes the thread that sleeps, because a queue has an entry.
    WakeByte,
    /// Wakes a thread that waits for a post.
    Wake,
}

/// The sockets and the shared memory.
#[derive(Default)]
pub(super) struct WorldState {
    /// The operations whose requests have been sent.
    pub(super) requested: BTreeSet<usize>,
    /// The operations that peers have not answered, each with the number of parts of the answer that are left.
    pub(super) requests: Vec<(usize, usize)>,
    /// The number of operations, begun or not, that no peer has answered.
    pub(super) unanswered: usize,
    /// The frames that have arrived over sockets and have not been read.
    pub(super) frames: VecDeque<Frame>,
    /// The answers in queues, and the early parts of answers.
    pub(super) entries: VecDeque<Option<usize>>,
    /// The operations whose peers have posted.
    pub(super) posted: BTreeSet<usize>,
    /// The operations for whose posts a thread sleeps.
    pub(super) asleep: BTreeSet<usize>,
    /// Whether a peer that writes an entry has to send a wake byte.
    pub(super) is_asleep: bool,
    /// Whether a thread waits for the sockets.
    pub(super) has_waiter: bool,
    /// Whether the thread that waits for the sockets must return.
    pub(super) is_interrupted: bool,
    /// The number of operations of the core that have ended.
    pub(super) completed: usize,
    /// The number of values of the user that have to be dropped.
    pub(super) undropped: usize,
}

impl WorldState {
    /// Sends the request of an operation.
    pub(super) fn request(&mut self, id: usize, operation: &SimOperation) {
        self.requested.insert(id);
        if operation.is_answered() {
            self.requests.push((id, operation.parts));
        }
    }

    /// Returns whether a peer has posted. Otherwise, the peer has to send a wake frame.
    pub(super) fn is_posted_or_sleeps(&mut self, id: usize) -> bool {
        self.asleep.insert(id);
        let is_posted = self.posted.contains(&id);
        if is_posted {
            self.asleep.remove(&id);
        }
        is_posted
    }
}

/// A value of the user that takes the lock when it is dropped.
pub(super) struct DropsWithLock(Weak<SimDriver>);

impl Drop for DropsWithLock {
    fn drop(&mut self) {
        if let Some(driver) = self.0.upgrade() {
            drop(driver.lock());
            driver.world.lock().undropped -= 1;
            driver.world.completed.notify_all();
        }
    }
}

pub(super) struct SimCore {
    world: Arc<World>,
    driver: Weak<SimDriver>,
    operations: Arc<[SimOperation]>,
    /// Whether the core reads sockets whose events no thread has handled.
    reads_unserved: bool,
    /// The active operations, each with whether its request has been sent.
    active: BTreeMap<usize, bool>,
    results: BTreeSet<usize>,
    background: SortedSet<usize>,
    /// Whether a socket may have data.
    is_readable: bool,
    has_read_wake_byte: bool,
    deferred: Vec<DropsWithLock>,
}

impl SimCore {
    pub(super) fn new(
        world: Arc<World>,
        operations: Arc<[SimOperation]>,
        reads_unserved: bool,
        driver: Weak<SimDriver>,
    ) -> Self {
        Self {
            world,
            driver,
            operations,
            reads_unserved,
            active: BTreeMap::new(),
            results: BTreeSet::new(),
            background: SortedSet::default(),
            is_readable: false,
            has_read_wake_byte: false,
            deferred: Vec::new(),
        }
    }

    pub(super) fn begin(&mut self, id: usize, is_awaited: bool) {
        self.active.insert(id, false);
        if !is_awaited {
            self.background.insert(id);
        }
    }

    pub(super) fn take_result(&mut self, id: usize) -> Option<()> {
        self.results.remove(&id).then_some(())
    }

    pub(super) fn handle_events(&mut self, is_readable: bool) {
        self.is_readable |= is_readable;
    }

    /// Returns whether operations wait for posts, and the progress thread drives no operation.
    pub(super) fn waits_for_posts_without_background(&self) -> bool {
        self.background.is_empty()
            && self.active.keys().any(|&id| self.operations[id].ending == SimEnding::Post)
    }

    fn complete(&mut self, id: usize) {
        self.active.remove(&id);
        self.background.remove(&id);
        self.results.insert(id);
        self.deferred.push(DropsWithLock(Weak::clone(&self.driver)));
        self.world.completed.notify_all();
    }
}

impl DrivenCore for SimCore {
    type OpId = usize;
    type Deferred = Vec<DropsWithLock>;

    fn begin_locking() {}

    fn take_deferred(&mut self) -> Vec<DropsWithLock> {
        mem::take(&mut self.deferred)
    }

    fn has_deferred_drops(&self) -> bool {
        !self.deferred.is_empty()
    }

    /// Sends the requests of new operations, and reads at most one frame and one entry.
    fn poll(&mut self, now: Timestamp) -> PollProgress {
        let world = Arc::clone(&self.world);
        let mut state = world.lock();
        let (mut is_busy, mut is_progress, mut ended) = (false, false, Vec::new());
        for (&id, is_sent) in &mut self.active {
            if !mem::replace(is_sent, true) {
                state.request(id, &self.operations[id]);
                world.requests_changed.notify_all();
                is_busy = true;
            }
            let has_ended = match self.operations[id].ending {
                SimEnding::Post => state.posted.contains(&id),
                SimEnding::Deadline(deadline) => now >= deadline,
                SimEnding::Socket | SimEnding::Queue | SimEnding::Never => false,
            };
            ended.extend(has_ended.then_some(id));
        }
        if self.is_readable || self.reads_unserved {
            match state.frames.pop_front() {
                Some(Frame::Answer(id)) => {
                    ended.extend(id);
                    is_busy = true;
                }
                Some(Frame::WakeByte) => self.has_read_wake_byte = true,
                Some(Frame::Wake) => is_progress = true,
                None => {}
            }
            self.is_readable &= !state.frames.is_empty();
            is_busy |= !state.frames.is_empty();
        }
        if let Some(entry) = state.entries.pop_front() {
            ended.extend(entry);
            is_busy = true;
        }
        state.completed += ended.len();
        state.undropped += ended.len();
        drop(state);
        is_progress |= !ended.is_empty();
        for id in ended {
            self.complete(id);
        }
        match (is_progress, is_busy) {
            (true, _) => PollProgress::Progress,
            (false, true) => PollProgress::Busy,
            (false, false) => PollProgress::Blocked,
        }
    }

    fn take_wake_bytes(&mut self) -> bool {
        mem::take(&mut self.has_read_wake_byte)
    }

    fn prepare_to_sleep(&mut self) -> bool {
        assert!(self.deferred.is_empty(), "a thread falls asleep before it drops values of the user");
        let mut state = self.world.lock();
        let posts = self.active.keys().filter(|&&id| self.operations[id].ending == SimEnding::Post);
        posts.fold(false, |is_ready, &id| is_ready | state.is_posted_or_sleeps(id))
    }

    fn next_deadline(&self) -> Option<Timestamp> {
        let deadlines = self.active.keys().map(|&id| match self.operations[id].ending {
            SimEnding::Deadline(deadline) => Some(deadline),
            _ => None,
        });
        deadlines.flatten().min()
    }

    fn is_active(&self, id: usize) -> bool {
        self.active.contains_key(&id)
    }

    fn background(&mut self) -> &mut SortedSet<usize> {
        &mut self.background
    }
}
