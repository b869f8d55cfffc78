//! Columns of all types for the tests of Parquet files, and a function that loads tables.

use std::path::Path;

use ::parquet::file::properties::{WriterProperties, WriterPropertiesBuilder};
use ringtrain::train::data::{DataSource, Dataset, LoadOptions, MissingPolicy, TableOptions};

use super::written_file::{Stored, TestColumn};

/// Returns the default properties of a Parquet file, which the caller can change.
pub(super) fn properties() -> WriterPropertiesBuilder {
    WriterProperties::builder()
}

/// Loads a table on one rank.
pub(super) fn load(source: &DataSource, target: &str, table: &TableOptions) -> Result<Dataset, String> {
    let options = LoadOptions { target: Some(target.into()), table: table.clone(), ..LoadOptions::default() };
    source.load(&options).map_err(|error| error.to_string())
}

/// Returns a table that consists of one Parquet file.
pub(super) fn parquet_source(path: &Path) -> DataSource {
    DataSource::Parquet(vec![path.to_owned()])
}

/// Returns a column of integers in which every third value is missing. `declared_type` is the parameter of the same name of
/// [`TestColumn::new`], and `stored` converts an integer to the stored value. The integers of `numbers` repeat.
fn integers(
    name: &'static str,
    declared_type: &'static str,
    stored: fn(i64) -> Stored,
    numbers: [i64; 4],
) -> TestColumn {
    TestColumn::new(name, declared_type, move |row| {
        let number = numbers[row % 4];
        (row % 3 != 1).then(|| (stored(number), number.to_string()))
    })
}

fn i32_of(value: i64) -> Stored {
    Stored::I32(value as i32)
}

/// Returns a column of times in which every fifth value is missing. `declared_type` is the parameter of the same name of
/// [`TestColumn::new`], and `stored` converts seconds since 1970 to the stored value.
fn times(name: &'static str, declared_type: &'static str, stored: fn(i64) -> Stored) -> TestColumn {
    TestColumn::new(name, declared_type, move |row| {
        let seconds = 1_709_208_000 + row as i64 * 3_601;
        let (hour, minute, second) = (row * 3_601 / 3_600 % 24, row * 3_601 / 60 % 60, row * 3_601 % 60);
        let day = 29 + (12 + row * 3_601 / 3_600) / 24;
        let (month, day) = if day > 29 { (3, day - 29) } else { (2, day) };
        let hour = (hour + 12) % 24;
        (row % 5 != 2)
            .then(|| (stored(seconds), format!("2024-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02}")))
    })
}

/// Returns a column of each supported type, and the target.
pub(super) fn columns_of_all_types() -> Vec<TestColumn> {
    let columns = [columns_of_integers(), columns_of_other_numbers(), columns_of_dates_and_texts()];
    columns.into_iter().flatten().chain([target_column()]).collect()
}

fn columns_of_integers() -> Vec<TestColumn> {
    vec![
        TestColumn::new("flag", "boolean", |row| {
            let flag = row % 4 == 1;
            (row % 7 != 3).then(|| (Stored::Boolean(flag), if flag { "True" } else { "False" }.into()))
        }),
        integers("i8", "int32 # (INTEGER(8,true))", i32_of, [-128, 0, 5, 127]),
        integers("u8", "int32 # (INTEGER(8,false))", i32_of, [255, 0, 5, 127]),
        integers("i16", "int32 # (INT_16)", i32_of, [-32_768, 0, 5, 32_767]),
        integers("u32", "int32 # (UINT_32)", i32_of, [4_294_967_295, 0, 5, 2_147_483_648]),
        integers("i32", "int32 #", i32_of, [-2_147_483_648, 0, 5, 2_147_483_647]),
        integers("i64", "int64 #", Stored::I64, [i64::MIN, 0, 1 << 53, i64::MAX]),
        TestColumn::new("u64", "int64 # (INTEGER(64,false))", |row| {
            let number = u64::MAX - row as u64 % 5;
            Some((Stored::I64(number as i64), number.to_string()))
        }),
        integers("code", "int32 #", i32_of, [7, 8, 7, 10]),
    ]
}

fn columns_of_other_numbers() -> Vec<TestColumn> {
    let decimal =
        |row: usize| (row as i64 * 37 - 5_000, format!("{:.2}", (row as f64 * 37.0 - 5_000.0) / 100.0));
    let number = |row: usize| (row as f64 - 40.0) / 8.0;
    vec![
        TestColumn::new("half", "fixed_len_byte_array(2) # (FLOAT16)", move |row| {
            let number = number(row);
            let bytes = half::f16::from_f64(number).to_le_bytes().to_vec();
            Some((Stored::Fixed(bytes), number.to_string()))
        }),
        TestColumn::new("float", "float #", move |row| {
            Some((Stored::F32(number(row) as f32), number(row).to_string()))
        }),
        TestColumn::new("double", "double #", |row| {
            let number = row as f64 / 3.0;
            let missing = row % 4 == 2;
            // NaN and a null are both missing values.
            let stored = if row % 8 == 2 { Stored::F64(f64::NAN) } else { Stored::F64(number) };
            (row % 8 != 6).then(|| (stored, if missing { "nan".into() } else { number.to_string() }))
        }),
        TestColumn::new("d32", "int32 # (DECIMAL(9,2))", move |row| {
            Some((Stored::I32(decimal(row).0 as i32), decimal(row).1))
        }),
        TestColumn::new("d64", "int64 # (DECIMAL(18,2))", move |row| {
            Some((Stored::I64(decimal(row).0), decimal(row).1))
        }),
        TestColumn::new("dfixed", "fixed_len_byte_array(16) # (DECIMAL(38,2))", move |row| {
            let bytes = i128::from(decimal(row).0).to_be_bytes().to_vec();
            Some((Stored::Fixed(bytes), decimal(row).1))
        }),
        TestColumn::new("dbytes", "byte_array # (DECIMAL(30,2))", move |row| {
            Some((Stored::Bytes((decimal(row).0 as i16).to_be_bytes().to_vec()), decimal(row).1))
        }),
    ]
}

fn columns_of_dates_and_texts() -> Vec<TestColumn> {
    vec![
        TestColumn::new("day", "int32 # (DATE)", |row| {
            (row % 6 != 1)
                .then(|| (Stored::I32(19_783 + row as i32 % 9), format!("2024-03-0{}", 1 + row % 9)))
        }),
        times("ms", "int64 # (TIMESTAMP(MILLIS,true))", |seconds| Stored::I64(seconds * 1_000)),
        times("us", "int64 # (TIMESTAMP_MICROS)", |seconds| Stored::I64(seconds * 1_000_000)),
        times("ns", "int64 # (TIMESTAMP(NANOS,false))", |seconds| Stored::I64(seconds * 1_000_000_000)),
        times("i96", "int96 #", |seconds| {
            let nanoseconds = (seconds % 86_400 * 1_000_000_000) as u64;
            Stored::I96([
                nanoseconds as u32,
                (nanoseconds >> 32) as u32,
                2_440_588 + (seconds / 86_400) as u32,
            ])
        }),
        TestColumn::new("name", "byte_array # (STRING)", |row| {
            let name = [" a ", "b", "", "NA", "ä"][row % 5];
            (row % 9 != 4).then(|| (Stored::Bytes(name.into()), name.into()))
        }),
        TestColumn::new("raw", "byte_array #", |row| {
            let text = format!("text {}", row % 300);
            Some((Stored::Bytes(text.clone().into()), text))
        }),
        TestColumn::new("written_day", "byte_array # (STRING)", |row| {
            let text = format!("2024-01-{:02}", 1 + row % 31);
            Some((Stored::Bytes(text.clone().into()), text))
        }),
    ]
}

/// Returns the column `y`, in which some values are missing.
pub(super) fn target_column() -> TestColumn {
    TestColumn::new("y", "double #", |row| {
        let number = (row * 57 % 503) as f64 / 4.0;
        (row % 50 != 3).then(|| (Stored::F64(number), number.to_string()))
    })
}

/// Returns options that read the same data from a table of text and from a Parquet file of [`columns_of_all_types`].
pub(super) fn options_for_all_types(dates: &[&str]) -> TableOptions {
    TableOptions {
        missing: MissingPolicy::Indicator,
        categorical: vec!["code".into()],
        dates: dates.iter().map(|&name| name.to_owned()).collect(),
        ..TableOptions::default()
    }
}

/// Returns columns with numbers, dates, texts and missing values. With 110 more columns, the table is so large that each
/// rank holds only its part.
pub(super) fn columns_for_training() -> Vec<TestColumn> {
    let mut columns: Vec<TestColumn> = columns_of_all_types()
        .into_iter()
        .filter(|column| ["flag", "i8", "double", "us", "name", "y"].contains(&column.name.as_str()))
        .collect();
    for index in 0..110 {
        columns.push(TestColumn::new(&format!("small{index}"), "int32 #", move |row| {
            let number = row * index % 23;
            Some((Stored::I32(number as i32), number.to_string()))
        }));
    }
    columns
}
