//! The description of a model: a JSON document in the metadata of a model file.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::COLUMNS_MAX;
use crate::train::data::{
    CLASSES_MAX, ColumnEncoding, ColumnInputs, ImageShape, MissingPolicy, TableEncoding, TableLayout, Task,
    TextEncoding,
};
use crate::train::model::{InputShape, Loss, ModelSpec, Network, OwnModel, TargetScale};
use crate::types::plural;

/// The maximum number of categories of a one-hot column, and the maximum number of buckets of a hashed column.
const CATEGORIES_MAX: usize = 1 << 16;

/// The description of a model. `ModelDescription::check` checks all fields that predictions use.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct ModelDescription {
    /// The program that wrote the file, with its version.
    pub written_by: String,
    /// Whether the model predicts classes, numbers or the next token of a text.
    pub task: Task,
    /// The architecture, as `--model` names it: `linear`, `softmax`, `mlp:WIDTH,WIDTH,...`, `cnn:LAYER,LAYER,...` or
    /// `gpt:LAYERS,HEADS,WIDTH`; or `own:NAME` for a program's [own model](OwnModel).
    pub model: String,
    /// The origin of the names of the columns.
    pub columns_from: ColumnOrigin,
    /// The feature columns, in the order in which the model uses them.
    pub columns: Vec<ColumnEncoding>,
    /// Where the columns are in the training table. `None` if the training data was not a table, or if an earlier
    /// version wrote the file.
    pub layout: Option<TableLayout>,
    /// How training handled missing values. With `error` and `drop`, a missing value in new data is an error.
    pub missing: MissingPolicy,
    /// Pixels are divided by this number, for example 255. `None` if the inputs are not pixels.
    pub pixel_divisor: Option<f32>,
    /// The shape of the images. `None` if the training data was not images, or if an earlier version wrote the file.
    #[serde(default)]
    pub image: Option<ImageShape>,
    /// How a text becomes tokens. `None` if the model does not read texts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<TextEncoding>,
    /// The column that the model predicts, and its scale.
    pub target: TargetDescription,
    /// The names of the classes, in the order of the outputs of the model. Empty for regression.
    pub classes: Vec<String>,
    /// How the model was trained. Predictions do not need this record.
    pub training: TrainingRecord,
}

/// Where the names of the feature columns come from.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ColumnOrigin {
    /// The names come from the header of a table. New data need columns with these names, in any order.
    Header,
    /// The name of each column is its number, counted from 0, because the training data had no names or used a name
    /// twice. New data need the same columns in the same order.
    Position,
}

/// The target of a model.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct TargetDescription {
    /// The name of the column, or its number if the training table had no header. `None` if the training data was not
    /// a table.
    pub name: Option<String>,
    /// A regression model predicts `mean + deviation * output`. The mean is 0 for classification.
    pub mean: f64,
    /// The `deviation` in `mean + deviation * output`. Above 0. For classification, the deviation is 1.
    pub deviation: f64,
}

/// How a model was trained.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct TrainingRecord {
    /// The name of the data.
    pub data: String,
    /// The number of samples in the training set.
    pub train_samples: usize,
    /// The number of samples in the test set.
    pub test_samples: usize,
    /// The name of the optimizer.
    pub optimizer: String,
    /// The number of completed epochs.
    pub epochs: u64,
    /// The number of steps.
    pub steps: u64,
    /// The seed.
    pub seed: u64,
    /// Whether a signal ended the training early.
    pub stopped: bool,
    /// The mean loss of the training set.
    pub train_loss: f64,
    /// The mean loss of the test set. `None` if there is no test set, or if a signal ended the training early.
    pub test_loss: Option<f64>,
    /// The fraction of correct predictions on the test set. `None` for regression.
    pub test_accuracy: Option<f64>,
    /// The coefficient of determination (R²) on the test set. `None` for classification.
    pub test_r2: Option<f64>,
    /// The hash of the parameters. `ringtrain` prints this hash after training.
    pub parameters_hash: String,
}

impl ModelDescription {
    /// Returns the number of inputs of the model.
    pub fn inputs(&self) -> usize {
        self.text
            .as_ref()
            .map_or_else(|| self.columns.iter().map(ColumnEncoding::width).sum(), |text| text.context)
    }

    /// Returns how the values of a row become inputs, without the division of pixels and the scaling of inputs.
    pub fn encoding(&self) -> TableEncoding {
        let target = self.target.name.clone().unwrap_or_default();
        TableEncoding { target, missing: self.missing, columns: self.columns.clone() }
    }

    /// Checks all fields that predictions use, and returns the network. `own` builds the layers if the model is a program's own
    /// model.
    ///
    /// # Errors
    ///
    /// A text that says which field is wrong.
    pub(crate) fn check(&self, own: Option<&OwnModel>) -> Result<Network, String> {
        let spec: ModelSpec = match own {
            Some(own) => ModelSpec::Own(own.clone()),
            None => self.model.parse().map_err(|why| format!("the model {} {why}", self.model))?,
        };
        if self.text.is_some() || self.task == Task::Text {
            return self.check_text_model(&spec);
        }
        self.check_columns()?;
        let TargetDescription { mean, deviation, .. } = self.target;
        if !mean.is_finite() || !deviation.is_finite() || deviation <= 0.0 {
            return Err(format!(
                "its target has the mean {mean} and the deviation {deviation}, but both must be finite, and the deviation must \
                 be above 0"
            ));
        }
        let classes = self.classes.len();
        let (loss, outputs) = match self.task {
            Task::Classification if !(2..=CLASSES_MAX).contains(&classes) => {
                return Err(format!(
                    "it has {classes} {}, but a classifier has from 2 to {CLASSES_MAX} classes",
                    plural(classes, "class", "classes")
                ));
            }
            Task::Classification if self.classes.iter().collect::<BTreeSet<_>>().len() < classes => {
                return Err("two classes have the same name".into());
            }
            Task::Regression if classes > 0 => {
                return Err(format!(
                    "it has {classes} {}, but predicts numbers",
                    plural(classes, "class", "classes")
                ));
            }
            Task::Classification if spec == ModelSpec::Linear => {
                return Err("a linear model cannot predict classes".into());
            }
            Task::Regression if spec == ModelSpec::Softmax => {
                return Err("a softmax model cannot predict numbers".into());
            }
            Task::Classification => (Loss::CrossEntropy, classes),
            Task::Regression | Task::Text => {
                let outputs = own.map_or(1, OwnModel::outputs_for_number);
                (Loss::SquaredError(TargetScale { mean, deviation }), outputs)
            }
        };
        let input = InputShape { features: self.inputs(), image: self.image };
        Network::new(&spec, input, outputs, loss).map_err(|why| format!("the model {} {why}", self.model))
    }

    /// Checks the fields of a model that predicts the next token of a text.
    fn check_text_model(&self, spec: &ModelSpec) -> Result<Network, String> {
        let (Some(text), Task::Text, ModelSpec::Gpt(_)) = (&self.text, self.task, spec) else {
            return Err(format!(
                "a model that reads a text is a GPT with the task `text` and a vocabulary, but the model is {}",
                self.model
            ));
        };
        if !self.columns.is_empty() || !self.classes.is_empty() {
            return Err("a model that reads a text has no columns and no classes".into());
        }
        let token_count = text.create_tokenizer()?.token_count();
        Network::new(spec, text.context, text.context * token_count, Loss::NextToken)
            .map_err(|why| format!("the model {} {why}", self.model))
    }

    fn check_columns(&self) -> Result<(), String> {
        let count = self.columns.len();
        if count == 0 || count > COLUMNS_MAX {
            return Err(format!("it has {count} columns, but the number must be from 1 to {COLUMNS_MAX}"));
        }
        let names: BTreeSet<&str> = self.columns.iter().map(|column| column.name.as_str()).collect();
        if names.len() < count {
            return Err("two columns have the same name".into());
        }
        if let Some(layout) = &self.layout {
            layout.check(count)?;
        }
        if let Some(image) = &self.image
            && image.value_count() != self.inputs()
        {
            let inputs = self.inputs();
            return Err(format!("its images have the shape {image}, but it has {inputs} inputs"));
        }
        if let Some(divisor) = self.pixel_divisor
            && !(divisor.is_finite() && divisor > 0.0)
        {
            return Err(format!("pixels are divided by {divisor}, which is not a finite number above 0"));
        }
        self.columns.iter().try_for_each(check_column_inputs)
    }
}

/// Checks how the values of a column become inputs.
fn check_column_inputs(column: &ColumnEncoding) -> Result<(), String> {
    let ColumnEncoding { name, is_date, inputs } = column;
    match inputs {
        _ if *is_date && !column.is_number() => Err(format!("column `{name}` holds both dates and text")),
        ColumnInputs::ShiftedNumber { offset, .. } if !offset.is_finite() => {
            Err(format!("the offset {offset} of column `{name}` is not finite"))
        }
        ColumnInputs::Number { fill: Some(fill), .. }
        | ColumnInputs::ShiftedNumber { fill: Some(fill), .. }
            if !fill.is_finite() =>
        {
            Err(format!("missing values of column `{name}` are replaced by {fill}, which is not finite"))
        }
        ColumnInputs::OneHot { categories } if !categories.is_sorted_by(|a, b| a < b) => {
            Err(format!("the categories of column `{name}` are not sorted, or two are equal"))
        }
        ColumnInputs::OneHot { categories } if categories.len() > CATEGORIES_MAX => {
            Err(format!("column `{name}` has {} categories, more than {CATEGORIES_MAX}", categories.len()))
        }
        ColumnInputs::Hashed { buckets } if !(1..=CATEGORIES_MAX).contains(&(*buckets as usize)) => {
            Err(format!(
                "column `{name}` has {buckets} buckets, but the number must be from 1 to {CATEGORIES_MAX}"
            ))
        }
        _ => Ok(()),
    }
}
