//! Models: fully connected networks whose parameters are one flat vector. The backward pass computes gradients layer by layer.

mod class_targets;
mod dense;
mod loss;
mod network;
mod spec;
mod stage;

pub use class_targets::ClassTargets;
pub(crate) use dense::EarlierGradients;
pub use loss::{Loss, LossSums, Scale};
pub use network::Network;
pub(crate) use network::PARAMETERS_MAX;
pub use spec::ModelSpec;
pub(crate) use stage::Stage;
pub use stage::Workspace;
