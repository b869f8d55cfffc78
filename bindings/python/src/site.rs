//! The line of the Python program that makes a call: errors name it, and not a line of this package.

use std::cell::RefCell;
use std::collections::HashMap;

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyString;
use ringtrain::{Site, group};

/// How many stack frames are searched for a line of the program.
const FRAMES_MAX: usize = 8;
/// How many files are remembered; lines of further files are not found.
const FILES_MAX: usize = 4096;

/// A source file.
#[derive(Clone, Copy)]
struct File {
    name: &'static str,
    /// It belongs to this package or to a framework.
    is_ours: bool,
}

thread_local! {
    /// Files by the address of the name's object, which is never dropped: names are few, and a thread that ends may not have
    /// the interpreter's lock.
    static FILES: RefCell<HashMap<usize, File>> = RefCell::new(HashMap::new());
}

/// Paths of frameworks, which call this package on behalf of a program.
const FRAMEWORKS: [&str; 1] = ["/site-packages/torch/"];

/// Makes `calls` with this line as their place in the program, if it is known.
pub(crate) fn at<R>(site: Option<Site>, calls: impl FnOnce() -> R) -> R {
    match site {
        Some(site) => group::at(site, calls),
        None => calls(),
    }
}

/// The innermost line outside this package and the frameworks. If there is none, the outermost line: a thread of theirs calls.
pub(crate) fn find(py: Python<'_>) -> Option<Site> {
    // SAFETY: the interpreter's lock is held; the frame is borrowed, or there is none.
    let frame = unsafe { Bound::from_borrowed_ptr_or_opt(py, ffi::PyEval_GetFrame().cast()) };
    let (mut frame, mut fallback) = (frame?, None);
    for _ in 0..FRAMES_MAX {
        let code = frame.getattr(pyo3::intern!(py, "f_code")).ok()?;
        let name = code.getattr(pyo3::intern!(py, "co_filename")).ok()?.cast_into::<PyString>().ok()?;
        let Some(file) = file_of(py, &name) else { break };
        // SAFETY: it is a frame.
        let line = unsafe { ffi::PyFrame_GetLineNumber(frame.as_ptr().cast()) };
        let site = Site::new(file.name, line.unsigned_abs());
        if !file.is_ours {
            return Some(site);
        }
        fallback = Some(site);
        match frame.getattr(pyo3::intern!(py, "f_back")) {
            Ok(back) if !back.is_none() => frame = back,
            _ => break,
        }
    }
    fallback
}

fn file_of(py: Python<'_>, name: &Bound<'_, PyString>) -> Option<File> {
    FILES.with_borrow_mut(|files| {
        let address = name.as_ptr() as usize;
        if let Some(file) = files.get(&address) {
            return Some(*file);
        }
        if files.len() >= FILES_MAX {
            return None;
        }
        let text = name.to_str().ok()?;
        let is_ours = package(py).is_some_and(|package| text.starts_with(&package))
            || FRAMEWORKS.iter().any(|framework| text.contains(framework));
        // The number of files is bounded, so their names are never freed.
        let file = File { name: text.to_owned().leak(), is_ours };
        std::mem::forget(name.clone());
        files.insert(address, file);
        Some(file)
    })
}

/// The directory of this package, with its slash.
fn package(py: Python<'_>) -> Option<String> {
    let file: String = py.import("ringtrain").ok()?.getattr("__file__").ok()?.extract().ok()?;
    file.strip_suffix("__init__.py").map(str::to_owned)
}
