//! Writes the same table as a Parquet file and as a table of text.

use std::fs::File;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use ::parquet::column::writer::ColumnWriter;
use ::parquet::data_type::{ByteArray, FixedLenByteArray, Int96};
use ::parquet::file::properties::WriterPropertiesBuilder;
use ::parquet::file::writer::SerializedFileWriter;
use ::parquet::schema::parser::parse_message_type;

/// A value as a Parquet file stores it.
pub(super) enum Stored {
    Boolean(bool),
    I32(i32),
    I64(i64),
    I96([u32; 3]),
    F32(f32),
    F64(f64),
    Bytes(Vec<u8>),
    Fixed(Vec<u8>),
}

/// Returns the value of a row, as a Parquet file stores it and as a CSV file writes it. Returns `None` if the value is
/// missing.
type ValueOfRow = Box<dyn Fn(usize) -> Option<(Stored, String)>>;

/// A column of a test table.
pub(super) struct TestColumn {
    pub(super) name: String,
    /// The declaration of the column in the schema. `{}` stands for the name.
    declaration: String,
    /// The values. `None` for a nested column, in which all values are missing.
    values: Option<ValueOfRow>,
}

impl TestColumn {
    /// Creates a column whose values may be missing. `declared_type` is the type in the schema, in which `#` stands for the name
    /// of the column. Without `#`, the name follows the type.
    pub(super) fn new(
        name: &str,
        declared_type: &str,
        value_of_row: impl Fn(usize) -> Option<(Stored, String)> + 'static,
    ) -> Self {
        let declared_type =
            if declared_type.contains('#') { declared_type.to_owned() } else { format!("{declared_type} #") };
        let declaration = format!("optional {};", declared_type.replace('#', "{}"));
        Self { name: name.into(), declaration, values: Some(Box::new(value_of_row)) }
    }

    /// Creates a nested column with one leaf. `declaration` is the complete declaration in the schema.
    pub(super) fn nested(name: &str, declaration: &str) -> Self {
        Self { name: name.into(), declaration: declaration.into(), values: None }
    }

    fn value(&self, row: usize) -> Option<(Stored, String)> {
        self.values.as_ref().and_then(|value_of_row| value_of_row(row))
    }
}

/// Writes the given rows as a CSV file.
pub(super) fn write_csv(path: &Path, columns: &[TestColumn], rows: Range<usize>) {
    let join = |cells: Vec<String>| cells.join(",") + "\n";
    let mut text = join(columns.iter().map(|column| column.name.clone()).collect());
    for row in rows {
        let cell = |column: &TestColumn| column.value(row).map_or(String::new(), |(_, text)| text);
        text += &join(columns.iter().map(cell).collect());
    }
    std::fs::write(path, text).unwrap();
}

/// Writes a Parquet file. Row group i has the rows from `bounds[i]` up to, but not including, `bounds[i + 1]`.
pub(super) fn write_parquet(
    path: &Path,
    columns: &[TestColumn],
    bounds: &[usize],
    properties: WriterPropertiesBuilder,
) {
    let declarations: String =
        columns.iter().map(|column| column.declaration.replace("{}", &column.name)).collect();
    let schema = parse_message_type(&format!("message table {{ {declarations} }}")).unwrap();
    let file = File::create(path).unwrap();
    let mut writer = SerializedFileWriter::new(file, Arc::new(schema), Arc::new(properties.build())).unwrap();
    for rows in bounds.windows(2).map(|bounds| bounds[0]..bounds[1]) {
        let mut group = writer.next_row_group().unwrap();
        for column in columns {
            let mut chunk = group.next_column().unwrap().unwrap();
            let values: Vec<Option<Stored>> =
                rows.clone().map(|row| column.value(row).map(|(stored, _)| stored)).collect();
            write_column(chunk.untyped(), values);
            chunk.close().unwrap();
        }
        group.close().unwrap();
    }
    writer.close().unwrap();
}

/// Writes the cells of a column in one row group.
fn write_column(writer: &mut ColumnWriter<'_>, cells: Vec<Option<Stored>>) {
    let levels: Vec<i16> = cells.iter().map(|cell| i16::from(cell.is_some())).collect();
    let stored = cells.into_iter().flatten();
    macro_rules! write_values {
        ($writer:expr, $variant:ident, $convert:expr) => {{
            let values: Vec<_> = stored
                .map(|value| match value {
                    Stored::$variant(value) => $convert(value),
                    _ => panic!("the column has another type"),
                })
                .collect();
            // Only a nested column with a list has repetition levels.
            let repetitions = vec![0; levels.len()];
            $writer.write_batch(&values, Some(&levels), Some(&repetitions)).unwrap();
        }};
    }
    match writer {
        ColumnWriter::BoolColumnWriter(writer) => write_values!(writer, Boolean, |value| value),
        ColumnWriter::Int32ColumnWriter(writer) => write_values!(writer, I32, |value| value),
        ColumnWriter::Int64ColumnWriter(writer) => write_values!(writer, I64, |value| value),
        ColumnWriter::Int96ColumnWriter(writer) => {
            write_values!(writer, I96, |[low, high, day]: [u32; 3]| Int96::from(vec![low, high, day]));
        }
        ColumnWriter::FloatColumnWriter(writer) => write_values!(writer, F32, |value| value),
        ColumnWriter::DoubleColumnWriter(writer) => write_values!(writer, F64, |value| value),
        ColumnWriter::ByteArrayColumnWriter(writer) => write_values!(writer, Bytes, ByteArray::from),
        ColumnWriter::FixedLenByteArrayColumnWriter(writer) => {
            write_values!(writer, Fixed, |value: Vec<u8>| FixedLenByteArray::from(value));
        }
    }
}
