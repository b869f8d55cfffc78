//! Models: fully connected networks on one flat vector of parameters, with a backward pass layer by layer.

mod dense;
mod loss;
mod network;
mod spec;

pub use loss::{Loss, LossSums, Scale};
pub use network::{Network, Workspace};
pub use spec::ModelSpec;
