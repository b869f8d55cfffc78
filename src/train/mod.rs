//! Training: data, models, optimisers, the step loop and its checkpoints. Sees of the rest only the group's public API.

mod batches;
pub mod data;
pub mod model;
pub mod optimizer;
mod random;

pub use batches::{Batches, part};
