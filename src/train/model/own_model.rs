//! A model whose layers a program builds itself.

use std::fmt;
use std::sync::Arc;

use super::{InputShape, Layer, SampleLoss};
use crate::types::counted;

/// Builds the layers of a model for inputs of this shape and for this number of outputs.
type BuildLayers = dyn Fn(InputShape, usize) -> Result<Vec<Arc<dyn Layer>>, String> + Send + Sync;

/// A model whose layers a program builds itself. [`Layer`] describes what a layer has to do.
///
/// The model has one output for each class, or one output for a number. The trainer computes the loss from the outputs: the
/// cross-entropy of their softmax, or the squared error, or a [loss of your own](Self::with_loss). For texts, the inputs are the
/// tokens of a window, and there is an output for each token of the window and each token of the vocabulary.
///
/// [`SavedModel::load_own`](crate::train::model_file::SavedModel::load_own) reads the model file of a run.
#[derive(Clone)]
pub struct OwnModel {
    name: String,
    build: Arc<BuildLayers>,
    loss: Option<Arc<dyn SampleLoss>>,
}

impl OwnModel {
    /// Creates a model. `name` must be the same on all ranks and in resumed runs. `build` returns the layers, from the first
    /// to the last, or a text that says why the model does not fit, such as `needs images`. All ranks must get the same
    /// layers.
    pub fn new(
        name: impl Into<String>,
        build: impl Fn(InputShape, usize) -> Result<Vec<Arc<dyn Layer>>, String> + Send + Sync + 'static,
    ) -> Self {
        Self { name: name.into(), build: Arc::new(build), loss: None }
    }

    /// Trains with a loss of your own. All ranks must use the same loss.
    #[must_use]
    pub fn with_loss(self, loss: impl SampleLoss) -> Self {
        Self { loss: Some(Arc::new(loss)), ..self }
    }

    /// Returns the loss of [`with_loss`](Self::with_loss).
    pub(crate) fn loss(&self) -> Option<&Arc<dyn SampleLoss>> {
        self.loss.as_ref()
    }

    /// Returns the number of outputs of the model if it predicts a number.
    pub(crate) fn outputs_for_number(&self) -> usize {
        self.loss.as_ref().map_or(1, |loss| loss.outputs_for_number())
    }

    /// Builds the layers. Checks that each layer has as many inputs as the layer before it has outputs, and that the
    /// last layer has `outputs` outputs.
    pub(super) fn build_layers(
        &self,
        input: InputShape,
        outputs: usize,
    ) -> Result<Vec<Arc<dyn Layer>>, String> {
        let layers = (self.build)(input, outputs)?;
        let mut width = input.features;
        for (number, layer) in (1..).zip(&layers) {
            if layer.inputs() != width {
                return Err(format!(
                    "has {} in layer {number}, but this layer gets {}",
                    counted(layer.inputs(), "input"),
                    counted(width, "value")
                ));
            }
            width = layer.outputs();
        }
        if layers.is_empty() || width != outputs {
            return Err(format!(
                "has {} and {}, but needs {}",
                counted(layers.len(), "layer"),
                counted(width, "output"),
                counted(outputs, "output")
            ));
        }
        Ok(layers)
    }
}

/// Models are equal if they have the same name.
impl PartialEq for OwnModel {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

impl fmt::Debug for OwnModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("OwnModel").field(&self.name).finish()
    }
}

impl fmt::Display for OwnModel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}
