//! Models: fully connected networks whose parameters are one flat vector. The backward pass computes gradients layer by layer.

mod class_targets;
mod dense;
mod loss;
mod network;
mod spec;

pub use class_targets::ClassTargets;
pub(crate) use dense::EarlierGradients;
pub use loss::{Loss, LossSums, Scale};
pub(crate) use network::PARAMETERS_MAX;
pub use network::{Network, Workspace};
pub use spec::ModelSpec;
