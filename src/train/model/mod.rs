//! Models: chains of layers whose parameters are one flat vector. The backward pass computes gradients layer by layer.

mod architecture;
mod class_targets;
mod cnn_spec;
mod convolution;
mod dense;
mod dropout;
mod layer;
mod loss;
mod network;
mod pooling;
mod spec;
mod stage;

pub use architecture::InputShape;
pub use class_targets::ClassTargets;
pub use cnn_spec::{CnnLayer, CnnSpec};
pub use layer::{EarlierGradients, StepSeed};
pub use loss::{Loss, LossSums, Scale};
pub(crate) use network::PARAMETERS_MAX;
pub use network::{Network, TrainingBatch};
pub use spec::ModelSpec;
pub use stage::Workspace;
