//! A trained model that computes predictions.

use std::fmt;
use std::ops::Range;
use std::path::Path;

use ndarray::{ArrayView2, ArrayViewMut2, s};

use super::{ModelDescription, ModelFileError, TargetDescription, storage};
use crate::train::data::text::Tokenizer;
use crate::train::data::{Samples, Standardizer, Task, TextEncoding};
use crate::train::evaluation_work::EvaluationWork;
use crate::train::model::{
    LayerError, LossSums, Network, OwnModel, ParameterTensor, Prediction, TargetScale, Workspace,
};

/// The message of `expect` for passes of a network that reads texts. Such a network is a GPT, whose layers do not fail for tokens
/// of their vocabulary.
const PASS_MESSAGE: &str = "the layers of a GPT do not fail";

/// A trained model that can predict: its description, network, parameters and the scaling of its inputs.
pub struct SavedModel {
    description: ModelDescription,
    network: Network,
    standardizer: Option<Standardizer>,
    parameters: Vec<f32>,
    workspace: Workspace,
    /// Converts texts to tokens. `None` if the model does not read texts.
    tokenizer: Option<Tokenizer>,
}

impl fmt::Debug for SavedModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SavedModel").field("description", &self.description).finish_non_exhaustive()
    }
}

impl SavedModel {
    /// Creates a model. `own` builds the layers if the model is a program's own model. Returns an error text if the arguments do
    /// not match each other.
    pub(crate) fn new(
        description: ModelDescription,
        own: Option<&OwnModel>,
        standardizer: Option<Standardizer>,
        parameters: Vec<f32>,
    ) -> Result<Self, String> {
        let network = description.check(own)?;
        let inputs = description.inputs();
        let fits = standardizer
            .as_ref()
            .is_none_or(|found| found.mean.len() == inputs && found.inverse_deviation.len() == inputs);
        if !fits {
            return Err(format!("the scaling of its inputs does not have {inputs} values"));
        }
        let (found, needed) = (parameters.len(), network.parameter_count());
        if found != needed {
            return Err(format!("it has {found} parameters, but its description needs {needed}"));
        }
        let is_negative =
            |tensor: &ParameterTensor| parameters[tensor.range.clone()].iter().any(|&value| value < 0.0);
        if let Some(tensor) = network.running_variances().find(is_negative) {
            return Err(format!("the tensor {} has a negative variance", tensor.name));
        }
        let workspace = network.allocate_workspace(network.evaluation_rows());
        let tokenizer = description.text.as_ref().map(TextEncoding::create_tokenizer).transpose()?;
        Ok(Self { description, network, standardizer, parameters, workspace, tokenizer })
    }

    /// Reads a model file.
    ///
    /// # Errors
    ///
    /// Returns an error if the file cannot be read, is truncated or corrupt, has another format, or was written by a newer
    /// version of ringtrain.
    pub fn load(path: &Path) -> Result<Self, ModelFileError> {
        storage::load_model_file(path, None)
    }

    /// Reads a model file of a program's own model. `own` builds the layers, and must have the same name as in training.
    ///
    /// # Errors
    ///
    /// The errors of [`load`](Self::load). Also fails if the file holds another model, or if the layers of `own` have other
    /// parameters than the file.
    pub fn load_own(path: &Path, own: &OwnModel) -> Result<Self, ModelFileError> {
        storage::load_model_file(path, Some(own))
    }

    /// Returns the description of the model.
    pub fn description(&self) -> &ModelDescription {
        &self.description
    }

    /// Returns the layers of the model. The returned network does not contain the parameters.
    pub fn network(&self) -> &Network {
        &self.network
    }

    /// Returns the scaling of the inputs. Returns `None` if the inputs are not scaled.
    pub fn standardizer(&self) -> Option<&Standardizer> {
        self.standardizer.as_ref()
    }

    /// Returns the parameters, in the order of [`Network::parameter_tensors`].
    pub fn parameters(&self) -> &[f32] {
        &self.parameters
    }

    /// Returns the tokenizer of a model that reads texts. Returns `None` for other models.
    pub(crate) fn tokenizer(&self) -> Option<&Tokenizer> {
        self.tokenizer.as_ref()
    }

    /// Evaluates the samples with the indices `rows`. The number of these samples must not exceed the number of rows of
    /// [`inputs_mut`](Self::inputs_mut).
    pub(crate) fn evaluate(&mut self, samples: &Samples, rows: Range<usize>) -> LossSums {
        let Self { network, parameters, workspace, standardizer, .. } = self;
        let standardizer = standardizer.as_ref();
        EvaluationWork { network, parameters, workspace, samples, standardizer, rows, metrics: None }
            .evaluate()
            .expect(PASS_MESSAGE)
    }

    /// Computes the outputs of the last layer for the first `rows` rows of [`inputs_mut`](Self::inputs_mut).
    pub(crate) fn compute_outputs(&mut self, rows: usize) -> ArrayView2<'_, f32> {
        self.network.compute_outputs(&self.parameters, &mut self.workspace, rows).expect(PASS_MESSAGE)
    }

    /// Returns the array of inputs. Write the encoded rows to the first rows of this array, then call
    /// [`predict`](Self::predict).
    pub(crate) fn inputs_mut(&mut self) -> ArrayViewMut2<'_, f32> {
        self.workspace.input.view_mut()
    }

    /// Standardizes the first `rows` rows of [`inputs_mut`](Self::inputs_mut) in place, and predicts each of these
    /// rows. Only the layers of a program's own model can fail.
    pub(crate) fn predict(&mut self, rows: usize) -> Result<Vec<Prediction>, LayerError> {
        if let Some(Standardizer { mean, inverse_deviation }) = &self.standardizer {
            for mut row in self.workspace.input.slice_mut(s![..rows, ..]).rows_mut() {
                for ((value, mean), inverse) in row.iter_mut().zip(mean).zip(inverse_deviation) {
                    *value = (*value - mean) * inverse;
                }
            }
        }
        let outputs = self.network.compute_outputs(&self.parameters, &mut self.workspace, rows)?;
        let TargetDescription { mean, deviation, .. } = self.description.target;
        let scale = (self.description.task == Task::Regression).then_some(TargetScale { mean, deviation });
        Ok(outputs.rows().into_iter().map(|output| Prediction::from_outputs(&output, scale)).collect())
    }
}
