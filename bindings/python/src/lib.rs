//! The compiled part of the Python package `ringtrain`: groups of ranks, and operations on memory.
//!
//! `python/ringtrain/_core.pyi` documents the functions of this module. Each call finds the memory of its arguments, releases the
//! interpreter's lock, and calls the Rust library.

mod arguments;
mod array_group;
mod buffer_view;
mod byte_collectives;
mod bytes;
mod calls;
mod closable;
mod collectives;
mod compressor;
mod elements;
mod errors;
mod exchanges;
mod fork;
mod gossip;
mod group;
mod handle;
mod join;
mod messages;
mod named;
mod parameter_server;
mod reductions;
mod shared;
mod signals;

use pyo3::prelude::*;

#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    elements::find_numpy(module.py())?;
    module.add_class::<array_group::PyArrayGroup>()?;
    module.add_class::<compressor::PyCompressor>()?;
    module.add_class::<gossip::PyGossip>()?;
    module.add_class::<group::PyGroup>()?;
    module.add_class::<handle::PyHandle>()?;
    module.add_class::<join::Rendezvous>()?;
    module.add_class::<named::PyNamedTensors>()?;
    module.add_class::<parameter_server::PyParameterServer>()?;
    module.add_class::<arguments::PyMemory>()?;
    module.add_class::<shared::PySharedBuffer>()?;
    module.add_function(wrap_pyfunction!(handle::wait_any, module)?)?;
    module.add_function(wrap_pyfunction!(fork::after_fork, module)?)?;
    module.add_function(wrap_pyfunction!(fork::before_fork, module)?)?;
    module.add_function(wrap_pyfunction!(join::join, module)?)?;
    module.add_function(wrap_pyfunction!(join::solo, module)?)?;
    errors::add_classes(module)
}
