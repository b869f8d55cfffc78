//! Adds the inputs of the graph, and the nodes that encode these inputs according to `ColumnEncoding`.

use super::ExportError;
use super::graph::{
    ConstantValues, GraphBuilder, integer_attribute, integers_attribute, target_type_attribute,
    texts_attribute,
};
use super::onnx_proto::tensor_proto::DataType;
use crate::train::data::{ColumnEncoding, ColumnInputs, spellings_of_missing_values};

/// Adds an input for each column. Returns the name of the encoded values, an array with the shape (rows, inputs of
/// the model).
pub(super) fn add_column_inputs(graph: &mut GraphBuilder, columns: &[ColumnEncoding]) -> String {
    let mut parts = Vec::new();
    for (index, column) in columns.iter().enumerate() {
        // In ONNX, an empty name would mean that the input is absent.
        let name = if column.name.is_empty() { format!("column_{index}") } else { column.name.clone() };
        match &column.inputs {
            ColumnInputs::Number { .. } | ColumnInputs::ShiftedNumber { .. } => {
                parts.extend(add_numbers(graph, name, std::slice::from_ref(column)));
            }
            ColumnInputs::OneHot { categories } => parts.push(add_categories(graph, name, categories)),
            ColumnInputs::Hashed { buckets } => parts.push(add_buckets(graph, name, *buckets)),
        }
    }
    concatenate(graph, parts)
}

/// Adds one input `x` of the shape (rows, columns of the model). All columns must hold numbers. Returns the name of
/// the encoded values, an array with the shape (rows, inputs of the model).
pub(super) fn add_matrix_input(
    graph: &mut GraphBuilder,
    columns: &[ColumnEncoding],
) -> Result<String, ExportError> {
    if let Some(text) = columns.iter().find(|column| !column.is_number()) {
        return Err(ExportError::TextColumn { column: text.name.clone() });
    }
    let parts = add_numbers(graph, "x".into(), columns);
    let joined = concatenate(graph, parts);
    let order = indices_of_inputs(columns);
    let joined_count = if order.len() > columns.len() { 2 * columns.len() } else { columns.len() };
    if order.iter().copied().eq(0..joined_count as i64) {
        return Ok(joined);
    }
    let order = graph.add_constant("order", &[order.len()], ConstantValues::Integers(&order));
    Ok(graph.add_node("Gather", &[&joined, &order], vec![integer_attribute("axis", 1)]))
}

/// Returns the index of each input of the model in the result of [`add_numbers`], which holds all values before all
/// indicators. In the model, each indicator follows the value of its column.
fn indices_of_inputs(columns: &[ColumnEncoding]) -> Vec<i64> {
    let mut order = Vec::new();
    for (index, column) in columns.iter().enumerate() {
        order.push(index as i64);
        if column.width() > 1 {
            order.push((columns.len() + index) as i64);
        }
    }
    order
}

/// Adds an input for one or more columns of numbers. Returns the name of an array with the numbers. If a column has an
/// indicator, also returns the name of an array that is 1 for each missing number and 0 for each other number. Both
/// arrays have the shape (rows, `columns.len()`).
fn add_numbers(graph: &mut GraphBuilder, name: String, columns: &[ColumnEncoding]) -> Vec<String> {
    let count = columns.len();
    let offset = |column: &ColumnEncoding| match column.inputs {
        ColumnInputs::ShiftedNumber { offset, .. } => offset,
        ColumnInputs::Number { .. } | ColumnInputs::OneHot { .. } | ColumnInputs::Hashed { .. } => 0.0,
    };
    let is_shifted = columns.iter().any(|column| matches!(column.inputs, ColumnInputs::ShiftedNumber { .. }));
    let element_type = if is_shifted { DataType::Double } else { DataType::Float };
    let fills: Vec<f32> = columns.iter().map(|column| column.fill_value().unwrap_or(f32::NAN)).collect();
    let is_filled = fills.iter().any(|fill| !fill.is_nan());
    let missing = if is_filled { "NaN stands for a missing number" } else { "NaN is not allowed" };
    let has_dates = columns.iter().any(|column| column.is_date);
    let what = if has_dates { "Numbers; a date is the number of days since 1970" } else { "Numbers" };
    let mut value = graph.add_input(name, element_type, count, format!("{what}; {missing}."));
    if is_shifted {
        let offsets: Vec<f64> = columns.iter().map(offset).collect();
        let offsets = graph.add_constant("offset", &[count], ConstantValues::Doubles(&offsets));
        let difference = graph.add_node("Sub", &[&value, &offsets], Vec::new());
        value = graph.add_node("Cast", &[&difference], target_type_attribute(DataType::Float));
    }
    if !is_filled {
        return vec![value];
    }
    let is_missing = graph.add_node("IsNaN", &[&value], Vec::new());
    let fills = graph.add_constant("fill", &[count], ConstantValues::Floats(&fills));
    let mut parts = vec![graph.add_node("Where", &[&is_missing, &fills, &value], Vec::new())];
    if columns.iter().any(|column| column.width() > 1) {
        parts.push(graph.add_node("Cast", &[&is_missing], target_type_attribute(DataType::Float)));
    }
    parts
}

/// Adds an input for a column of texts. The result has a column for each category: 1 for the category of the text, and
/// 0 for all other categories.
fn add_categories(graph: &mut GraphBuilder, name: String, categories: &[String]) -> String {
    let documentation =
        "Texts without spaces at the beginning or the end; the empty text stands for a missing value.";
    let value = graph.add_input(name, DataType::String, 1, documentation.into());
    let mut keys = categories.to_vec();
    let mut indices: Vec<i64> = (0..categories.len() as i64).collect();
    if let Ok(missing) = categories.binary_search(&String::new()) {
        let spellings: Vec<String> =
            spellings_of_missing_values().filter(|text| !categories.contains(text)).collect();
        indices.resize(keys.len() + spellings.len(), missing as i64);
        keys.extend(spellings);
    }
    let attributes = vec![
        texts_attribute("keys_strings", &keys),
        integers_attribute("values_int64s", indices),
        integer_attribute("default_int64", -1),
    ];
    let index = graph.add_ml_node("LabelEncoder", &[&value], attributes);
    add_one_hot(graph, &index, categories.len())
}

/// Adds an input for the bucket numbers of a hashed column. The result has a column for each bucket: 1 for the bucket
/// of the text, and 0 for all other buckets.
fn add_buckets(graph: &mut GraphBuilder, name: String, buckets: u32) -> String {
    let documentation = format!(
        "Numbers of buckets. In Python, the bucket of a text is int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], \
         \"little\") % {buckets}. The text has no spaces at the beginning or the end, and a missing value is the empty text."
    );
    let index = graph.add_input(name, DataType::Int64, 1, documentation);
    add_one_hot(graph, &index, buckets as usize)
}

/// Adds nodes that convert the integer `index` of each row to `count` columns: column `index` is 1, and all other
/// columns are 0.
fn add_one_hot(graph: &mut GraphBuilder, index: &str, count: usize) -> String {
    let numbers: Vec<i64> = (0..count as i64).collect();
    let numbers = graph.add_constant("numbers", &[1, count], ConstantValues::Integers(&numbers));
    let is_equal = graph.add_node("Equal", &[index, &numbers], Vec::new());
    graph.add_node("Cast", &[&is_equal], target_type_attribute(DataType::Float))
}

/// Joins several arrays along the axis of columns.
fn concatenate(graph: &mut GraphBuilder, mut parts: Vec<String>) -> String {
    if parts.len() == 1 {
        return parts.remove(0);
    }
    let names: Vec<&str> = parts.iter().map(String::as_str).collect();
    graph.add_node("Concat", &names, vec![integer_attribute("axis", 1)])
}
