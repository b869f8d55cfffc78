//! Models: chains of layers whose parameters are one flat vector. The backward pass computes gradients layer by layer.

mod architecture;
mod batch_norm;
#[cfg(feature = "candle")]
mod candle_layer;
#[cfg(feature = "candle")]
mod candle_parameters;
mod cnn_spec;
mod convolution;
mod cross_entropy_options;
mod dense;
mod dropout;
#[cfg(feature = "candle")]
mod gpt;
mod gpt_spec;
mod hidden_layer;
mod layer;
mod loss;
mod mlp_spec;
mod network;
mod own_loss;
mod own_model;
mod pooling;
mod prediction;
mod spec;
mod stage;
mod tensor_split;

pub use architecture::InputShape;
#[cfg(feature = "candle")]
pub use candle_layer::{CandleLayer, CandleModule};
pub use cnn_spec::CnnSpec;
pub use cross_entropy_options::CrossEntropyOptions;
pub use gpt_spec::GptSpec;
pub use hidden_layer::HiddenLayer;
pub use layer::{
    BackwardPass, ForwardMode, GradientSink, GradientUpdate, Layer, LayerError, OneRank, SavedForBackward,
    StepSeed, SumOverRanks, TrainingPass,
};
pub use loss::{Loss, LossSums, TargetScale};
pub use mlp_spec::MlpSpec;
pub(crate) use network::PARAMETERS_MAX;
pub use network::{Network, ParameterTensor, TrainingBatch};
pub use own_loss::{OwnLoss, SampleLoss, SampleTarget};
pub use own_model::OwnModel;
pub use prediction::Prediction;
pub use spec::ModelSpec;
pub(crate) use spec::{CANDLE_NEEDED, OWN_PREFIX};
pub(crate) use stage::Stage;
pub use stage::Workspace;
pub(crate) use tensor_split::{TensorSegment, check_tensor_split, parameter_ranges_of_rank, tensor_segments};
