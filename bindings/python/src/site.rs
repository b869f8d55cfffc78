//! Finds the source line at which the user's Python program calls this package. Errors then name the user's line
//! instead of a line of this package.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyString;
use ringtrain::{Site, group};

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

/// Runs the closure `calls`. If `site` is `Some`, the errors of operations that begin in the closure name the source
/// line `site`.
pub(crate) fn run_at<R>(site: Option<Site>, calls: impl FnOnce() -> R) -> R {
    match site {
        Some(site) => group::at(site, calls),
        None => calls(),
    }
}

/// Returns the line of the innermost stack frame outside this package and the frameworks. If all frames are inside,
/// as in a thread that a framework started, returns the line of the outermost frame.
pub(crate) fn find_user_line(py: Python<'_>) -> Option<Site> {
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
