//! Finds the columns of a model in a new table.

use crate::train::model_file::{ColumnOrigin, ModelDescription};

/// The maximum number of names in a message.
const NAMES_MAX: usize = 20;

/// Returns, for each column of the model, the index of the same column in the table. `header` has the names of the
/// columns of the table. `target` is the index of the target column of the table, if targets are read.
///
/// If both the model and the table have names, columns are found by name, and other columns of the table are ignored. Otherwise
/// columns are found by position: the table must have the same columns as the training data, with or without the target.
///
/// # Errors
///
/// A text that names the missing columns.
pub(super) fn find_columns(
    description: &ModelDescription,
    header: &[String],
    has_header: bool,
    target: Option<usize>,
) -> Result<Vec<usize>, String> {
    if has_header && description.columns_from == ColumnOrigin::Header {
        return find_by_name(description, header);
    }
    let count = description.columns.len();
    let available: Vec<usize> = (0..header.len()).filter(|&index| Some(index) != target).collect();
    if available.len() == count {
        return Ok(available);
    }
    // If the model was trained on a table without a header, the name of each of its columns is the number of the
    // column in that table.
    let is_numbered = description.columns_from == ColumnOrigin::Position && description.target.name.is_some();
    let number = |name: &str| name.parse().ok().filter(|&index| is_numbered && index < header.len());
    let numbers: Option<Vec<usize>> = description.columns.iter().map(|column| number(&column.name)).collect();
    numbers.ok_or_else(|| {
        let names = description.columns.iter().map(|column| column.name.as_str());
        format!(
            "has {} columns besides the target, but the model needs {count}, in the order of the training data ({})",
            available.len(),
            join_first_names(names, count)
        )
    })
}

fn find_by_name(description: &ModelDescription, header: &[String]) -> Result<Vec<usize>, String> {
    let mut by_name = std::collections::BTreeMap::<&str, Vec<usize>>::new();
    for (index, name) in header.iter().enumerate() {
        by_name.entry(name.as_str()).or_default().push(index);
    }
    let mut found = Vec::new();
    let mut missing = Vec::new();
    for column in &description.columns {
        match by_name.get(column.name.as_str()).map(Vec::as_slice) {
            Some(&[index]) => found.push(index),
            Some(_) => return Err(format!("has more than one column `{}`", column.name)),
            None => missing.push(column.name.as_str()),
        }
    }
    if missing.is_empty() {
        return Ok(found);
    }
    let columns = if missing.len() == 1 { "column" } else { "columns" };
    let count = missing.len();
    Err(format!(
        "has no {} {}, which the model needs; its columns are {}",
        columns,
        join_first_names(missing.into_iter(), count),
        join_first_names(header.iter().map(String::as_str), header.len())
    ))
}

/// Returns the first names, separated by commas.
fn join_first_names<'a>(names: impl Iterator<Item = &'a str>, count: usize) -> String {
    let listed: Vec<&str> = names.take(NAMES_MAX).collect();
    let more = if count > listed.len() { ", ..." } else { "" };
    listed.join(", ") + more
}
