//! The compiled part of the Python package `ringtrain`: groups of ranks, and operations on memory.
//!
//! `python/ringtrain/_core.pyi` says what it offers. Nothing here is a protocol of its own: a call finds the memory of its
//! arguments, lets other Python threads run, and calls the Rust library.

mod bytes;
mod collectives;
mod dtype;
mod errors;
mod exchanges;
mod fork;
mod graves;
mod group;
mod handle;
mod interrupt;
mod join;
mod messages;
mod reductions;
mod region;
mod shared;
mod site;
mod slot;
mod view;

use pyo3::prelude::*;

#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<group::Group>()?;
    module.add_class::<handle::Handle>()?;
    module.add_class::<join::Rendezvous>()?;
    module.add_class::<region::Memory>()?;
    module.add_class::<shared::Shared>()?;
    module.add_function(wrap_pyfunction!(handle::wait_any, module)?)?;
    module.add_function(wrap_pyfunction!(fork::after_fork, module)?)?;
    module.add_function(wrap_pyfunction!(fork::before_fork, module)?)?;
    module.add_function(wrap_pyfunction!(join::join, module)?)?;
    module.add_function(wrap_pyfunction!(join::solo, module)?)?;
    errors::add_to(module)
}
