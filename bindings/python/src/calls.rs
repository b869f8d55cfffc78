//! What each call of the library does besides its work: it refuses a forked process, finds the line of the program for error
//! messages, releases the interpreter's lock, waits until no other thread uses the group, drops objects that other threads have
//! left, and raises an exception of a signal handler.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyString;
use ringtrain::{Error, Group, Messenger, Site, group};

use crate::errors;
use crate::signals::{SIGNAL_CHECK_INTERVAL, run_signal_handlers};

/// Runs `work` without the interpreter's lock, so that other Python threads can run. The errors of operations that begin in
/// `work` name the line of the user's program. Fails in a process that was forked from a rank.
pub(crate) fn run<R: Send>(py: Python<'_>, work: impl FnOnce() -> R + Send) -> PyResult<R> {
    fail_if_forked(py)?;
    let site = find_user_line(py);
    detach(py, || match site {
        Some(site) => group::at(site, work),
        None => work(),
    })
}

/// Runs `work` without the interpreter's lock. If a signal handler raised an exception meanwhile, returns this exception, even if
/// `work` has a result.
pub(crate) fn detach<R: Send>(py: Python<'_>, work: impl FnOnce() -> R + Send) -> PyResult<R> {
    let result = py.detach(work);
    drop_deferred(py);
    RAISED.take().map_or(Ok(result), Err)
}

/// Whether this process was forked from a rank.
static IS_FORKED: AtomicBool = AtomicBool::new(false);

/// Makes all further calls fail, because this process was forked from a rank. Returns whether they already failed.
pub(crate) fn set_forked() -> bool {
    IS_FORKED.swap(true, Ordering::AcqRel)
}

/// Returns whether this process was forked from a rank.
pub(crate) fn is_forked() -> bool {
    IS_FORKED.load(Ordering::Acquire)
}

/// Returns an error in a process that was forked from a rank.
pub(crate) fn fail_if_forked(py: Python<'_>) -> PyResult<()> {
    if is_forked() { Err(errors::forked(py)) } else { Ok(()) }
}

thread_local! {
    /// The exception that a signal handler raised while this thread waited.
    static RAISED: RefCell<Option<PyErr>> = const { RefCell::new(None) };
}

/// Runs pending signal handlers. Returns whether a handler raised an exception, which [`detach`] returns later. A waiting thread
/// calls this function without the interpreter's lock.
pub(crate) fn is_interrupted() -> bool {
    run_signal_handlers(|raised| RAISED.set(Some(raised)))
}

const CLOSED: &str = "the group has been closed";

/// A thread, for as long as it lives. The standard library counts the references to the thread of its own identifier.
#[derive(Clone, Copy, PartialEq, Eq)]
struct ThreadId(usize);

impl ThreadId {
    fn current() -> Self {
        thread_local! {
            static MARK: u8 = const { 0 };
        }
        MARK.with(|mark| Self(std::ptr::from_ref(mark) as usize))
    }
}

/// The state of the group: free, in use by a thread, or dropped.
enum Holder {
    /// No thread uses the group.
    Free(Box<Group>),
    /// A thread uses the group. If `is_closing` is true, this thread drops the group when it has finished using the
    /// group.
    Thread { id: ThreadId, is_closing: bool },
    /// The group has been dropped.
    Closed,
}

struct LockState {
    holder: Holder,
    /// The number of threads that wait for `returned`. To notify a condition variable is a system call.
    waiters: usize,
}

/// A group and its messenger. Only one thread at a time can use the group. Any thread can use the messenger.
pub(crate) struct GroupLock {
    state: Mutex<LockState>,
    returned: Condvar,
    messenger: Mutex<Option<Arc<Messenger>>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl GroupLock {
    pub(crate) fn new(group: Group, messenger: Arc<Messenger>) -> Self {
        Self {
            messenger: Mutex::new(Some(messenger)),
            state: Mutex::new(LockState { holder: Holder::Free(Box::new(group)), waiters: 0 }),
            returned: Condvar::new(),
        }
    }

    /// Waits until no other thread uses the group, and then calls `work` with the group. Other Python threads can run meanwhile.
    pub(crate) fn with_group<R: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut Group) -> Result<R, Error> + Send,
    ) -> PyResult<R> {
        let result = run(py, || self.take_group().map(|mut guard| work(guard.group())))?;
        match result {
            Ok(result) => result.map_err(|error| errors::from_error(py, &error)),
            Err(reason) => Err(errors::base_error(py, reason)),
        }
    }

    /// Waits until no other thread uses the group, and returns the group. If the thread cannot use the group, returns the reason.
    fn take_group(&self) -> Result<GroupGuard<'_>, &'static str> {
        let own = ThreadId::current();
        let mut state = lock(&self.state);
        loop {
            match std::mem::replace(&mut state.holder, Holder::Thread { id: own, is_closing: false }) {
                Holder::Free(group) => return Ok(GroupGuard { lock: self, group: Some(group) }),
                other => state.holder = other,
            }
            match state.holder {
                Holder::Thread { is_closing: false, id } if id == own => {
                    return Err(
                        "a signal handler called a collective of a group while the interrupted thread was in \
                                another collective of that group",
                    );
                }
                Holder::Thread { is_closing: false, .. } => {}
                _ => return Err(CLOSED),
            }
            state.waiters += 1;
            let (guard, waited) = self
                .returned
                .wait_timeout(state, SIGNAL_CHECK_INTERVAL)
                .unwrap_or_else(PoisonError::into_inner);
            state = guard;
            state.waiters -= 1;
            if waited.timed_out() {
                drop(state);
                if is_interrupted() {
                    return Err("the thread was interrupted");
                }
                state = lock(&self.state);
            }
        }
    }

    /// Calls `work` with the group's messenger. Other Python threads can run during `work`.
    pub(crate) fn with_messenger<R: Send>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&Messenger) -> Result<R, Error> + Send,
    ) -> PyResult<R> {
        // If another thread closes the group during `work`, `messenger` is the last messenger, and dropping it closes the
        // connections. So it is dropped without the interpreter's lock.
        let messenger = self.messenger(py)?;
        let result = run(py, move || work(&messenger))?;
        result.map_err(|error| errors::from_error(py, &error))
    }

    /// Returns the group's messenger. Fails if the group is closed or this process was forked.
    pub(crate) fn messenger(&self, py: Python<'_>) -> PyResult<Arc<Messenger>> {
        fail_if_forked(py)?;
        lock(&self.messenger).clone().ok_or_else(|| errors::base_error(py, CLOSED))
    }

    /// Replaces the messenger, unless the group is closed.
    pub(crate) fn replace_messenger(&self, renewed: Arc<Messenger>) {
        let mut messenger = lock(&self.messenger);
        if messenger.is_some() {
            *messenger = Some(renewed);
        }
    }

    /// Drops the group. If a thread uses the group, that thread drops the group when it has finished.
    pub(crate) fn close(&self) {
        let messenger = lock(&self.messenger).take();
        let mut state = lock(&self.state);
        let group = match std::mem::replace(&mut state.holder, Holder::Closed) {
            Holder::Free(group) => Some(group),
            Holder::Thread { id, .. } => {
                state.holder = Holder::Thread { id, is_closing: true };
                None
            }
            Holder::Closed => None,
        };
        drop(state);
        self.returned.notify_all();
        drop((messenger, group));
    }

    /// Returns whether the group has been closed.
    pub(crate) fn is_closed(&self) -> bool {
        matches!(lock(&self.state).holder, Holder::Closed | Holder::Thread { is_closing: true, .. })
    }

    /// Gives up the group without dropping it, so that its connections stay open. A forked process must not close the
    /// connections, because they belong to its parent.
    pub(crate) fn leak(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        std::mem::forget(std::mem::replace(&mut state.holder, Holder::Closed));
        std::mem::forget(self.messenger.get_mut().unwrap_or_else(PoisonError::into_inner).take());
    }
}

/// A thread that holds this guard may use the group. When the guard is dropped, the guard puts the group back into
/// the lock.
struct GroupGuard<'a> {
    lock: &'a GroupLock,
    group: Option<Box<Group>>,
}

impl GroupGuard<'_> {
    fn group(&mut self) -> &mut Group {
        self.group.as_mut().expect("only `drop` takes the group")
    }
}

impl Drop for GroupGuard<'_> {
    fn drop(&mut self) {
        let Some(group) = self.group.take() else { return };
        let mut state = lock(&self.lock.state);
        let (next, closed) = match state.holder {
            Holder::Thread { is_closing: true, .. } => (Holder::Closed, Some(group)),
            _ => (Holder::Free(group), None),
        };
        state.holder = next;
        let has_waiters = state.waiters > 0;
        drop(state);
        if has_waiters {
            self.lock.returned.notify_one();
        }
        drop(closed);
    }
}

/// The objects of dropped references.
static DROPPED: Mutex<Vec<Py<PyAny>>> = Mutex::new(Vec::new());
/// Whether `DROPPED` contains objects. While this flag is false, calls need not lock `DROPPED`.
static HAS_DROPPED: AtomicBool = AtomicBool::new(false);

/// A reference to an object that any thread may drop, with or without the interpreter's lock. Dropping it puts the object on a
/// list, and the next call that holds the interpreter's lock drops the objects on the list.
///
/// Every call through `PyO3` may lock a similar list of `PyO3`, and in a forked child, that list may stay locked
/// forever. A forked child never locks the list of this module, and never frees the objects.
pub(crate) struct DeferredDrop(Option<Py<PyAny>>);

impl DeferredDrop {
    pub(crate) fn new(object: Py<PyAny>) -> Self {
        Self(Some(object))
    }
}

impl Drop for DeferredDrop {
    fn drop(&mut self) {
        let Some(object) = self.0.take() else { return };
        if is_forked() {
            std::mem::forget(object);
            return;
        }
        DROPPED.lock().unwrap_or_else(PoisonError::into_inner).push(object);
        HAS_DROPPED.store(true, Ordering::Release);
    }
}

/// Drops the objects in [`DROPPED`]. The caller holds the interpreter's lock.
pub(crate) fn drop_deferred(_py: Python<'_>) {
    if !HAS_DROPPED.load(Ordering::Acquire) || is_forked() {
        return;
    }
    HAS_DROPPED.store(false, Ordering::Release);
    let objects = std::mem::take(&mut *DROPPED.lock().unwrap_or_else(PoisonError::into_inner));
    // The list must not be locked here: dropping an object may run the program's destructor, and this destructor may
    // add other objects to the list.
    drop(objects);
}

/// The maximum number of stack frames in which `find_user_line` looks for a line of the user's program.
const STACK_FRAMES_MAX: usize = 8;
/// The maximum number of entries in `FILES`. Once `FILES` is full, lines in further files are not found.
const CACHED_FILES_MAX: usize = 4096;

/// A source file.
#[derive(Clone, Copy)]
struct SourceFile {
    name: &'static str,
    /// Whether the file belongs to this package or to a framework, and not to the user's program.
    is_internal: bool,
}

/// The maximum number of code objects that a thread keeps alive. Lines of further code objects are looked up in each call.
const KEPT_CODES_MAX: usize = 1024;
/// The number of entries in `LINES`.
const CACHED_LINES: usize = 256;
/// Addresses of code objects are multiples of this number.
const CODE_ALIGNMENT: usize = 16;

/// A line of a source file.
#[derive(Clone, Copy)]
struct SourceLine {
    site: Site,
    /// As in `SourceFile`.
    is_internal: bool,
}

/// The address of a code object, and the index of an instruction in it.
type CodePosition = (usize, i32);

thread_local! {
    /// Lines that calls of this thread have found. To find the line of an instruction may take as long as a short collective.
    static LINES: RefCell<[Option<(CodePosition, SourceLine)>; CACHED_LINES]> =
        const { RefCell::new([None; CACHED_LINES]) };
    /// The addresses of the code objects in `LINES`, now or earlier.
    static KEPT_CODES: RefCell<HashSet<usize>> = RefCell::new(HashSet::new());
    /// The known files. The key is the address of the Python string that contains the file's name. The strings are
    /// never dropped, because dropping a Python string needs the interpreter's lock, and a thread that ends may not
    /// have the lock.
    static FILES: RefCell<HashMap<usize, SourceFile>> = RefCell::new(HashMap::new());
}

/// Parts of paths. A file whose path contains one of these parts belongs to a framework, which calls this package on
/// behalf of the user's program.
const FRAMEWORK_PATHS: [&str; 1] = ["/site-packages/torch/"];

/// Returns the line of the innermost stack frame outside this package and the frameworks. If all frames are inside,
/// as in a thread that a framework started, returns the line of the outermost frame.
fn find_user_line(py: Python<'_>) -> Option<Site> {
    // SAFETY: the interpreter's lock is held; the frame is borrowed, or there is none.
    let frame = unsafe { Bound::from_borrowed_ptr_or_opt(py, ffi::PyEval_GetFrame().cast()) };
    let (mut frame, mut fallback) = (frame?, None);
    for _ in 0..STACK_FRAMES_MAX {
        let line = find_line(&frame)?;
        if !line.is_internal {
            return Some(line.site);
        }
        fallback = Some(line.site);
        match frame.getattr(pyo3::intern!(py, "f_back")) {
            Ok(back) if !back.is_none() => frame = back,
            _ => break,
        }
    }
    fallback
}

/// Returns the line that a frame executes.
fn find_line(frame: &Bound<'_, PyAny>) -> Option<SourceLine> {
    let py = frame.py();
    // SAFETY: `frame` is a Python frame, and the result is a new reference.
    let code = unsafe { Bound::from_owned_ptr(py, ffi::PyFrame_GetCode(frame.as_ptr().cast()).cast()) };
    let instruction: i32 = frame.getattr(pyo3::intern!(py, "f_lasti")).ok()?.extract().ok()?;
    let key = (code.as_ptr() as usize, instruction);
    let slot = (key.0 / CODE_ALIGNMENT).wrapping_add(instruction as usize) % CACHED_LINES;
    let cached = LINES.with_borrow(|lines| lines[slot]).filter(|(cached, _)| *cached == key);
    if let Some((_, line)) = cached {
        return Some(line);
    }
    let name = code.getattr(pyo3::intern!(py, "co_filename")).ok()?.cast_into::<PyString>().ok()?;
    let file = find_file(py, &name)?;
    // SAFETY: `frame` is a Python frame.
    let number = unsafe { ffi::PyFrame_GetLineNumber(frame.as_ptr().cast()) };
    let line =
        SourceLine { site: Site::new(file.name, number.unsigned_abs()), is_internal: file.is_internal };
    if keep_code(&code) {
        LINES.with_borrow_mut(|lines| lines[slot] = Some((key, line)));
    }
    Some(line)
}

/// Keeps a code object alive for ever, so that no other code object gets its address. Returns false if too many are kept.
fn keep_code(code: &Bound<'_, PyAny>) -> bool {
    KEPT_CODES.with_borrow_mut(|kept| {
        let address = code.as_ptr() as usize;
        if kept.contains(&address) {
            return true;
        }
        let is_kept = kept.len() < KEPT_CODES_MAX;
        if is_kept {
            kept.insert(address);
            std::mem::forget(code.clone());
        }
        is_kept
    })
}

fn find_file(py: Python<'_>, name: &Bound<'_, PyString>) -> Option<SourceFile> {
    let address = name.as_ptr() as usize;
    let (known, count) = FILES.with_borrow(|files| (files.get(&address).copied(), files.len()));
    if known.is_some() || count >= CACHED_FILES_MAX {
        return known;
    }
    let text = name.to_str().ok()?;
    // `FILES` is not borrowed here: an import can run Python code that calls this function.
    let is_internal = package_directory(py).is_some_and(|directory| text.starts_with(&directory))
        || FRAMEWORK_PATHS.iter().any(|framework| text.contains(framework));
    // The name of each file is leaked, but the number of files is bounded.
    let file = SourceFile { name: text.to_owned().leak(), is_internal };
    std::mem::forget(name.clone());
    FILES.with_borrow_mut(|files| files.insert(address, file));
    Some(file)
}

/// Returns the directory of this package, with a slash at the end.
fn package_directory(py: Python<'_>) -> Option<String> {
    let file: String = py.import("ringtrain").ok()?.getattr("__file__").ok()?.extract().ok()?;
    file.strip_suffix("__init__.py").map(str::to_owned)
}
