//! Converts the targets with which predictions are compared.

use std::collections::BTreeMap;

use crate::train::data::{
    CLASS_NUMBER_LIMIT, Task, describe_unknown_class, join_first_classes, parse_number,
};
use crate::train::metrics::Truth;
use crate::train::model_file::ModelDescription;

/// Converts the cells of a target column.
#[derive(Debug)]
pub(crate) struct TruthParser {
    task: Task,
    /// The index of each class name.
    classes: BTreeMap<String, usize>,
    /// The names of the classes for error messages, or only the first names if there are many.
    names_shown: String,
}

impl TruthParser {
    pub(crate) fn new(description: &ModelDescription) -> Self {
        let classes = &description.classes;
        Self {
            task: description.task,
            classes: classes.iter().enumerate().map(|(index, name)| (name.clone(), index)).collect(),
            names_shown: join_first_classes(classes),
        }
    }

    /// Converts a cell of a target column. An error says what is wrong with the cell.
    pub(crate) fn parse(&self, cell: &str) -> Result<Truth, String> {
        match self.task {
            Task::Regression => parse_number(cell.as_bytes()).map(Truth::Number),
            Task::Classification => self.find_class(cell),
            Task::Text => Err("a model for texts has no target column".into()),
        }
    }

    /// Converts a number of a target column. An error says what is wrong with the number.
    pub(crate) fn convert_number(&self, value: f64) -> Result<Truth, String> {
        match self.task {
            Task::Regression if value.is_finite() => Ok(Truth::Number(value)),
            Task::Regression => Err(format!("{value} is not a finite number")),
            Task::Classification => self.find_class(&(value + 0.0).to_string()),
            Task::Text => Err("a model for texts has no target column".into()),
        }
    }

    /// Finds a class by its name. If the classes are integers, `3.0` and `03` are names of the class `3`.
    fn find_class(&self, name: &str) -> Result<Truth, String> {
        let integer = || {
            let is_integer = |value: &f64| value.fract() == 0.0 && value.abs() < CLASS_NUMBER_LIMIT;
            let value = name.parse::<f64>().ok().filter(is_integer)?;
            self.classes.get(&((value + 0.0) as i64).to_string())
        };
        let class = self.classes.get(name).or_else(integer);
        class.map(|&class| Truth::Class(class)).ok_or_else(|| describe_unknown_class(name, &self.names_shown))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_are_found_by_name_or_as_integers() {
        let names = ["3", "9007199254740992", "red"];
        let classes = names.iter().enumerate().map(|(index, name)| (name.to_string(), index)).collect();
        let parser = TruthParser { task: Task::Classification, classes, names_shown: names.join(", ") };
        for (name, expected) in [
            ("3", Some(0)),
            ("03.0", Some(0)),
            ("red", Some(2)),
            ("9007199254740992", Some(1)),
            // As an `f64`, this integer is rounded to 9007199254740992.
            ("9007199254740993", None),
            ("3.5", None),
        ] {
            assert_eq!(parser.parse(name).ok(), expected.map(Truth::Class), "{name}");
        }
        assert_eq!(parser.convert_number(3.0), Ok(Truth::Class(0)));
    }
}
