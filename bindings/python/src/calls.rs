//! What each call of the library does besides its work: it refuses a forked process, finds the line of the program for error
//! messages, releases the interpreter's lock, drops objects that other threads have left, and raises an exception of a signal
//! handler.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyString;
use ringtrain::{Site, group};

use crate::errors;

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

/// The time between two checks whether a signal handler has raised an exception.
pub(crate) const SIGNAL_CHECK_INTERVAL: Duration = Duration::from_millis(50);

thread_local! {
    /// Whether the current thread is Python's main thread, which runs signal handlers. `None` if this thread has not
    /// yet determined whether it is the main thread.
    static IS_MAIN: Cell<Option<bool>> = const { Cell::new(None) };
    /// The exception that a signal handler raised while this thread waited.
    static RAISED: RefCell<Option<PyErr>> = const { RefCell::new(None) };
}

/// Runs pending signal handlers. Returns whether a handler raised an exception, which [`detach`] returns later.
/// A waiting thread calls this function without the interpreter's lock.
pub(crate) fn is_interrupted() -> bool {
    // Python runs signal handlers only in its main thread, so other threads need not take the interpreter's lock.
    if IS_MAIN.get() == Some(false) {
        return false;
    }
    let is_interrupted = Python::try_attach(|py| {
        // Both `check_signals` and `is_main_thread` can run signal handlers, so this function must store an exception
        // from either call.
        let checked = match IS_MAIN.get() {
            Some(_) => py.check_signals(),
            None => is_main_thread(py).and_then(|is_main| {
                IS_MAIN.set(Some(is_main));
                py.check_signals()
            }),
        };
        let Err(raised) = checked else { return false };
        RAISED.set(Some(raised));
        true
    });
    // An interpreter that has ended runs no handlers.
    is_interrupted.unwrap_or(false)
}

fn is_main_thread(py: Python<'_>) -> PyResult<bool> {
    let threading = py.import("threading")?;
    let main: u64 = threading.call_method0("main_thread")?.getattr("ident")?.extract()?;
    Ok(threading.call_method0("get_ident")?.extract::<u64>()? == main)
}

/// Calls `wait` until it returns a value, and runs Python's signal handlers between the calls. Passes the time that `wait` may
/// take. Returns `None` after `timeout`.
pub(crate) fn wait_in_intervals<R>(
    py: Python<'_>,
    timeout: Option<Duration>,
    mut wait: impl FnMut(Duration) -> PyResult<Option<R>>,
) -> PyResult<Option<R>> {
    let started = Instant::now();
    loop {
        let left = timeout.map(|timeout| timeout.saturating_sub(started.elapsed()));
        let result = wait(left.map_or(SIGNAL_CHECK_INTERVAL, |left| left.min(SIGNAL_CHECK_INTERVAL)))?;
        if result.is_some() {
            return Ok(result);
        }
        py.check_signals()?;
        if left == Some(Duration::ZERO) {
            return Ok(None);
        }
    }
}

/// The objects of dropped references.
static DROPPED: Mutex<Vec<Py<PyAny>>> = Mutex::new(Vec::new());
/// Whether `DROPPED` contains objects. While this flag is false, calls need not lock `DROPPED`.
static HAS_DROPPED: AtomicBool = AtomicBool::new(false);

/// A reference to an object that any thread may drop, with or without the interpreter's lock. Dropping it puts the object on a
/// list, and the next call that holds the interpreter's lock drops the objects on the list.
///
/// Every call through `PyO3` locks a similar list of `PyO3`, and in a forked child, that list may stay locked
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
    FILES.with_borrow_mut(|files| {
        let address = name.as_ptr() as usize;
        if let Some(file) = files.get(&address) {
            return Some(*file);
        }
        if files.len() >= CACHED_FILES_MAX {
            return None;
        }
        let text = name.to_str().ok()?;
        let is_internal = package_directory(py).is_some_and(|directory| text.starts_with(&directory))
            || FRAMEWORK_PATHS.iter().any(|framework| text.contains(framework));
        // The name of each file is leaked, but the number of files is bounded.
        let file = SourceFile { name: text.to_owned().leak(), is_internal };
        std::mem::forget(name.clone());
        files.insert(address, file);
        Some(file)
    })
}

/// Returns the directory of this package, with a slash at the end.
fn package_directory(py: Python<'_>) -> Option<String> {
    let file: String = py.import("ringtrain").ok()?.getattr("__file__").ok()?.extract().ok()?;
    file.strip_suffix("__init__.py").map(str::to_owned)
}
