//! Adds the inputs of the graph, and the nodes that encode the inputs as `ColumnEncoding` does.

use super::ExportError;
use super::graph::{ConstantValues, GraphBuilder, integer, integers, texts, to_type};
use super::onnx_proto::tensor_proto::DataType;
use crate::train::data::{ColumnEncoding, ColumnInputs, missing_spellings};

/// Adds an input for each column. Returns the name of the encoded values, which have the shape (rows, inputs of the
/// model).
pub(super) fn add_columns(graph: &mut GraphBuilder, columns: &[ColumnEncoding]) -> String {
    let mut parts = Vec::new();
    for (index, column) in columns.iter().enumerate() {
        // In ONNX, the empty name stands for an input that is absent.
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

/// Adds one input `x` with a column for each column of the model, which must all hold numbers. Returns the name of
/// the encoded values, which have the shape (rows, inputs of the model).
pub(super) fn add_matrix(
    graph: &mut GraphBuilder,
    columns: &[ColumnEncoding],
) -> Result<String, ExportError> {
    if let Some(text) = columns.iter().find(|column| !column.is_number()) {
        return Err(ExportError::TextColumn { column: text.name.clone() });
    }
    let parts = add_numbers(graph, "x".into(), columns);
    let joined = concatenate(graph, parts);
    let order = order_of_inputs(columns);
    let joined_count = if order.len() > columns.len() { 2 * columns.len() } else { columns.len() };
    if order.iter().copied().eq(0..joined_count as i64) {
        return Ok(joined);
    }
    let order = graph.constant("order", &[order.len()], ConstantValues::Integers(&order));
    Ok(graph.node("Gather", &[&joined, &order], vec![integer("axis", 1)]))
}

/// [`add_numbers`] puts the values of all columns before all indicators. In the inputs of a model, an indicator
/// follows the value of its own column. Returns, for each input of the model, where [`add_numbers`] puts this input.
fn order_of_inputs(columns: &[ColumnEncoding]) -> Vec<i64> {
    let mut order = Vec::new();
    for (index, column) in columns.iter().enumerate() {
        order.push(index as i64);
        if column.width() > 1 {
            order.push((columns.len() + index) as i64);
        }
    }
    order
}

/// Adds an input for one or more columns of numbers. Returns the names of one or two values. Each value has a column for
/// each of `columns`. The first value holds the numbers. The second value is 1 for each missing number; it exists only if
/// a column has an indicator.
fn add_numbers(graph: &mut GraphBuilder, name: String, columns: &[ColumnEncoding]) -> Vec<String> {
    let count = columns.len();
    let offset = |column: &ColumnEncoding| match column.inputs {
        ColumnInputs::ShiftedNumber { offset, .. } => offset,
        ColumnInputs::Number { .. } | ColumnInputs::OneHot { .. } | ColumnInputs::Hashed { .. } => 0.0,
    };
    let is_shifted = columns.iter().any(|column| matches!(column.inputs, ColumnInputs::ShiftedNumber { .. }));
    let element_type = if is_shifted { DataType::Double } else { DataType::Float };
    let fills: Vec<f32> = columns.iter().map(|column| column.fill().unwrap_or(f32::NAN)).collect();
    let is_filled = fills.iter().any(|fill| !fill.is_nan());
    let missing = if is_filled { "NaN stands for a missing number" } else { "NaN is not allowed" };
    let mut value = graph.input(name, element_type, count, format!("Numbers; {missing}."));
    if is_shifted {
        let offsets: Vec<f64> = columns.iter().map(offset).collect();
        let offsets = graph.constant("offset", &[count], ConstantValues::Doubles(&offsets));
        let difference = graph.node("Sub", &[&value, &offsets], Vec::new());
        value = graph.node("Cast", &[&difference], to_type(DataType::Float));
    }
    if !is_filled {
        return vec![value];
    }
    let is_missing = graph.node("IsNaN", &[&value], Vec::new());
    let fills = graph.constant("fill", &[count], ConstantValues::Floats(&fills));
    let mut parts = vec![graph.node("Where", &[&is_missing, &fills, &value], Vec::new())];
    if columns.iter().any(|column| column.width() > 1) {
        parts.push(graph.node("Cast", &[&is_missing], to_type(DataType::Float)));
    }
    parts
}

/// Adds an input for a column of texts. The result is 1 for the category of the text, and 0 for the other categories.
fn add_categories(graph: &mut GraphBuilder, name: String, categories: &[String]) -> String {
    let documentation =
        "Texts without spaces at the beginning or the end; the empty text stands for a missing value.";
    let value = graph.input(name, DataType::String, 1, documentation.into());
    let mut keys = categories.to_vec();
    let mut indices: Vec<i64> = (0..categories.len() as i64).collect();
    if let Ok(missing) = categories.binary_search(&String::new()) {
        let spellings: Vec<String> = missing_spellings().filter(|text| !categories.contains(text)).collect();
        indices.resize(keys.len() + spellings.len(), missing as i64);
        keys.extend(spellings);
    }
    let attributes =
        vec![texts("keys_strings", &keys), integers("values_int64s", indices), integer("default_int64", -1)];
    let index = graph.ml_node("LabelEncoder", &[&value], attributes);
    compare_with_numbers(graph, &index, categories.len())
}

/// Adds an input for the buckets of a column of texts. The result is 1 for the bucket, and 0 for the other buckets.
fn add_buckets(graph: &mut GraphBuilder, name: String, buckets: u32) -> String {
    let documentation = format!(
        "Numbers of buckets. In Python, the bucket of a text is int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], \
         \"little\") % {buckets}. The text has no spaces at the beginning or the end, and a missing value is the empty text."
    );
    let index = graph.input(name, DataType::Int64, 1, documentation);
    compare_with_numbers(graph, &index, buckets as usize)
}

/// Compares the value `index` of each row with the numbers from 0 to `count` - 1. The result is 1 for the equal
/// number, and 0 for the other numbers.
fn compare_with_numbers(graph: &mut GraphBuilder, index: &str, count: usize) -> String {
    let numbers: Vec<i64> = (0..count as i64).collect();
    let numbers = graph.constant("numbers", &[1, count], ConstantValues::Integers(&numbers));
    let is_equal = graph.node("Equal", &[index, &numbers], Vec::new());
    graph.node("Cast", &[&is_equal], to_type(DataType::Float))
}

/// Puts the columns of several values beside each other.
fn concatenate(graph: &mut GraphBuilder, mut parts: Vec<String>) -> String {
    if parts.len() == 1 {
        return parts.remove(0);
    }
    let names: Vec<&str> = parts.iter().map(String::as_str).collect();
    graph.node("Concat", &names, vec![integer("axis", 1)])
}
