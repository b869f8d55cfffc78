//! Model files. A model file is a safetensors file with the architecture, the parameters, the task, the names and
//! encodings of the feature columns, the scaling of the inputs, and the names of the classes. `docs/model-format.md`
//! describes each field.

mod description;
mod digest;
mod error;
mod inspection;
mod model_of_run;
mod saved_model;
mod storage;

#[cfg(test)]
mod tests;

pub use description::{ColumnOrigin, ModelDescription, TargetDescription, TrainingRecord};
pub(crate) use digest::{StoredTensor, content_digest};
pub use error::ModelFileError;
pub use inspection::{Inspection, TensorSummary};
pub(crate) use model_of_run::{check_model_can_be_saved, make_saved_model};
pub use saved_model::SavedModel;
pub(crate) use storage::save_model;

/// The maximum number of columns in a model file.
pub const COLUMNS_MAX: usize = 1 << 19;
