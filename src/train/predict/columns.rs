//! Finds the columns of a model in a new table.

use crate::train::model_file::{ColumnOrigin, ModelDescription};
use crate::types::counted;

/// The maximum number of names in a message.
const NAMES_SHOWN_MAX: usize = 20;

/// Returns the index in the table of each column of the model. `header` holds the names of the table's columns.
/// `has_header` is `false` if these names are only numbers. `target` is the index of the table's target column, or
/// `None` if no targets are read.
///
/// If both the model and the table have names, finds columns by name and ignores all other columns of the table.
/// Otherwise finds columns by position. The table must then have one of these sets of columns: all columns of the
/// training table, all except the target, or only the columns of the model.
///
/// # Errors
///
/// A text that names the missing columns, or says how many columns are needed.
pub(super) fn find_columns(
    description: &ModelDescription,
    header: &[String],
    has_header: bool,
    target: Option<usize>,
) -> Result<Vec<usize>, String> {
    if has_header && description.columns_from == ColumnOrigin::Header {
        return find_by_name(description, header);
    }
    if let Some(layout) = &description.layout {
        let is_feature = target.is_some_and(|target| layout.features.contains(&target));
        if header.len() == layout.columns && !is_feature {
            return Ok(layout.features.clone());
        }
        if header.len() + 1 == layout.columns && target.is_none() {
            return Ok(layout.features_without_target());
        }
    }
    let available: Vec<usize> = (0..header.len()).filter(|&index| Some(index) != target).collect();
    if available.len() == description.columns.len() {
        return Ok(available);
    }
    Err(wrong_column_count_error(description, header.len()))
}

/// Returns the error message for a table in which the columns of the model cannot be found by position. `found` is the
/// number of columns of the table.
fn wrong_column_count_error(description: &ModelDescription, found: usize) -> String {
    let count = description.columns.len();
    let names = join_first_names(description.columns.iter().map(|column| column.name.as_str()), count);
    let whole = match &description.layout {
        Some(layout) => format!(
            "the {} of the training table, or all of these but the target (column {}, counted from 0), or ",
            counted(layout.columns, "column"),
            layout.target
        ),
        None => String::new(),
    };
    format!(
        "has {}, but the model finds its columns by position and needs {whole}only its {} in this order: {names}",
        counted(found, "column"),
        counted(count, "feature")
    )
}

/// Does what [`find_columns`] does for a table and a model that both have names.
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

/// Returns the first [`NAMES_SHOWN_MAX`] names, separated by commas. `count` is the number of all names.
fn join_first_names<'a>(names: impl Iterator<Item = &'a str>, count: usize) -> String {
    let listed: Vec<&str> = names.take(NAMES_SHOWN_MAX).collect();
    let more = if count > listed.len() { ", ..." } else { "" };
    listed.join(", ") + more
}
