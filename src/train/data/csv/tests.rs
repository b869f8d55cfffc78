use ndarray::array;

use super::super::{Column, ColumnInputs, Features, HeldFeatures, MissingPolicy, UninterpretedSamples};
use super::*;
use crate::group::Group;
use crate::train::TrainError;
use crate::train::data::numbers::Numbers;
use crate::train::data::raw_table::{RawColumn, RawTable, RawTexts, RawValues, RowSets};

fn parse_table(bytes: &[u8], target: &str) -> Result<RawTable, DataError> {
    parse_table_with_options(bytes, target, &TableOptions::default())
}

fn parse_table_with_header_row(bytes: &[u8], target: &str, header: HeaderRow) -> Result<RawTable, DataError> {
    parse_table_with_options(bytes, target, &TableOptions { header, ..TableOptions::default() })
}

fn parse_table_with_options(
    bytes: &[u8],
    target: &str,
    options: &TableOptions,
) -> Result<RawTable, DataError> {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("table.csv");
    std::fs::write(&path, bytes).unwrap();
    load_csv_files(&[path], target, options)
}

/// Reads a table on one rank.
fn load_csv_files(paths: &[PathBuf], target: &str, options: &TableOptions) -> Result<RawTable, DataError> {
    let files = TableFiles { paths, train_file_count: paths.len(), standard_input: None };
    let merged = read_rows_of_rank(files, target, options, (BlocksOfRank::ALL, None))?
        .into_raw_table(&mut Group::solo());
    merged.map_err(|error| match error {
        TrainError::Data(error) => error,
        other => panic!("{other}"),
    })
}

/// Returns the features of encoded rows.
fn in_memory(samples: &UninterpretedSamples<HeldFeatures>) -> &Features {
    let HeldFeatures::InMemory(features) = &samples.features else { panic!("the rows are in memory") };
    features
}

/// Returns a column of numbers.
fn number_column(name: &str, values: &[f32]) -> RawColumn {
    RawColumn {
        name: name.into(),
        is_date: false,
        values: RawValues::Numbers(Numbers::Single(values.to_vec().into())),
    }
}

/// Returns a column of texts.
fn text_column(name: &str, indices: &[u32], distinct: &[&str]) -> RawColumn {
    let distinct = distinct.iter().map(|&text| text.into()).collect();
    RawColumn {
        name: name.into(),
        is_date: false,
        values: RawValues::Texts(RawTexts { indices: indices.to_vec().into(), distinct }),
    }
}

/// Regression test: before the fix, the first row of a table without a header was taken for a header and lost.
#[test]
fn csv_whose_first_row_has_numbers_needs_a_header_option() {
    for (bytes, target) in [
        (&b"1,2,3\n4,5,6\n"[..], "2"),
        (b"5.1,3.5,setosa\n6,2,virginica\n", "2"),
        (b"UA,JFK,5\nAA,LGA,NA\nUA,LGA,7\n", "0"),
    ] {
        let rows = bytes.split(|&byte| byte == b'\n').count() - 1;
        let error = parse_table_with_header_row(bytes, target, HeaderRow::Expected).unwrap_err().to_string();
        assert!(error.contains("--no-header") && error.contains("--header if"), "{error}");
        let options = TableOptions { missing: MissingPolicy::Mean, ..TableOptions::default() };
        for (header, expected) in [(HeaderRow::Absent, rows), (HeaderRow::Present, rows - 1)] {
            let table =
                parse_table_with_options(bytes, target, &TableOptions { header, ..options.clone() }).unwrap();
            assert_eq!(table.row_map.rows(), expected);
        }
    }
    for header in
        [&b"0,1,2\n4,5,6\n"[..], b"0,1,target\n4,5,6\n", b"2019,rooms,price\n1,2,3\n", b",0,1\n0,7,8\n"]
    {
        let table = parse_table_with_header_row(header, "2", HeaderRow::Expected).unwrap();
        assert_eq!(table.row_map.rows(), 1);
    }
}

/// A first row is read as data only if nothing speaks for names.
#[test]
fn a_first_row_that_is_certainly_data_needs_no_option() {
    let parse = |bytes: &[u8], target: &str, drop: &[&str]| {
        let drop = drop.iter().map(|&name| name.into()).collect();
        parse_table_with_options(bytes, target, &TableOptions { drop, ..TableOptions::default() })
    };
    for (bytes, target) in [
        (&b"5.1,3.5,setosa\n6,2,virginica\n5,3,setosa\n"[..], "2"),
        (b"3,2,4\n4,5,6\n7,8,9\n", "0"),
        (b"2,8,8,x\n4,5,6,x\n3,4,5,y\n", "2"),
    ] {
        let table = parse(bytes, target, &["1"]).unwrap();
        assert!(!table.layout.has_header && table.row_map.rows() == 3, "{table:?}");
        assert!(table.target_name == target && table.notes[0].contains("pass --header"), "{:?}", table.notes);
    }
    for (bytes, target, drop) in [
        // A cell is a name, a text does not occur again or is above numbers, a value is missing, or there is no other row.
        (&b"1,2,3\n4,5,6\n"[..], "2", &[][..]),
        (b"2019,2020,2021\n1,2,3\n", "2020", &[]),
        (b"2019,2020,2021\n1,2,3\n", "0", &["2020"]),
        (b"5.1,3.5,setosa\n6,2,virginica\n", "2", &[]),
        (b"5,3,id\n6,2,id\n1,2,3\n4,5,6\n7,8,9\n", "0", &[]),
        (b"1,,3\n4,5,6\n", "0", &[]),
        (b"1,2,3\n", "0", &[]),
    ] {
        let error = parse(bytes, target, drop).unwrap_err().to_string();
        assert!(error.contains("looks like data"), "{}: {error}", bytes.escape_ascii());
    }
    assert!(parse(b"0,1,2\n4,5,6\n", "0", &[]).unwrap().layout.has_header);
}

#[test]
fn the_target_is_found_by_name_or_number() {
    for target in ["y", "1"] {
        let table = parse_table(b"a,y,b\n1, 5 ,2\n3,6,4\n", target).unwrap();
        assert_eq!(table.columns, [number_column("a", &[1.0, 3.0]), number_column("b", &[2.0, 4.0])]);
        assert_eq!((table.target_name.as_str(), table.target), ("y", Column::Numbers(vec![5.0, 6.0])));
    }
    let table = parse_table(b"a,kind\n1,cat\n2,7\n", "kind").unwrap();
    assert_eq!(table.target, Column::Text(["cat", "7"].into_iter().collect()));
}

#[test]
fn tables_with_any_separator_byte_order_mark_and_line_end_are_read() {
    let expected = parse_table(b"a,y\n1,2\n3,4\n", "y").unwrap();
    for bytes in [
        &b"\xef\xbb\xbfa,y\n1,2\n3,4\n"[..],
        b"\xef\xbb\xbf\"a\";y\n1;2\n3;4\n",
        b"a\ty\r\n1\t2\n\r\n3\t4",
        b"a|y\r1|2\n3|4\r\n",
        b"a y\n1 2\n3 4\n",
        b"\"a\",\"y\"\n\"1\", 2 \n 3,\"4\"\n",
    ] {
        assert_eq!(parse_table(bytes, "y").unwrap(), expected, "{}", bytes.escape_ascii());
    }
    let separator = Some(":".parse().unwrap());
    let options = TableOptions { separator, ..TableOptions::default() };
    assert_eq!(parse_table_with_options(b"a:y\n1:2\n3:4\n", "y", &options).unwrap(), expected);
    let error = parse_table(b"a:y\n1:2\n3:4\n", "0").unwrap_err().to_string();
    assert!(error.contains("no column besides the target") && error.contains("--separator"), "{error}");
}

#[test]
fn rows_without_target_and_missing_values_are_counted() {
    let bytes = b"a,name,y\n1,x,1\nNA,?,2\n3,x,\n,z,4\n5,,nan\n";
    let with =
        |missing| parse_table_with_options(bytes, "y", &TableOptions { missing, ..TableOptions::default() });
    let error = with(MissingPolicy::Error).unwrap_err().to_string();
    assert!(
        error.contains("table.csv: line 3, column `a`: the value is missing; pass --missing drop"),
        "{error}"
    );
    let dropped = with(MissingPolicy::Drop).unwrap();
    assert_eq!(dropped.columns, [number_column("a", &[1.0]), text_column("name", &[0], &["x"])]);
    assert_eq!(
        dropped.notes,
        [
            "dropped 2 of 5 rows, because their target `y` is missing",
            "dropped 2 of 5 rows, because values are missing (--missing drop): `a` 2, `name` 1"
        ]
    );
    let filled = with(MissingPolicy::Mean).unwrap();
    assert_eq!(filled.target, Column::Numbers(vec![1.0, 2.0, 4.0]));
    assert_eq!(filled.columns[1], text_column("name", &[0, 1, 2], &["x", "", "z"]));
    let RawValues::Numbers(Numbers::Single(values)) = &filled.columns[0].values else {
        panic!("`a` holds numbers")
    };
    let values = values.to_vec();
    assert!(values[0] == 1.0 && values[1].is_nan() && values[2].is_nan());
    assert!(filled.notes[1].ends_with("(--missing mean): `a` 2, `name` 1"), "{:?}", filled.notes);
    let error = parse_table(b"a,y\n1,NA\n2,?\n", "y").unwrap_err().to_string();
    assert!(error.starts_with("no row remains: dropped 2 of 2 rows"), "{error}");
}

#[test]
fn columns_are_chosen_by_name_or_number() {
    let bytes = b"a,b,y,id\n1,2,3,x\n4,5,6,z\n";
    let list = |names: &str| names.split_whitespace().map(String::from).collect::<Vec<_>>();
    let parse_columns = |features: &str, drop: &str, categorical: &str| {
        let (features, drop, categorical) = (list(features), list(drop), list(categorical));
        let options = TableOptions { features, drop, categorical, ..TableOptions::default() };
        parse_table_with_options(bytes, "y", &options).map_err(|error| error.to_string())
    };
    for (features, drop, categorical, expected) in [
        ("a 1", "", "", vec![number_column("a", &[1.0, 4.0]), number_column("b", &[2.0, 5.0])]),
        ("", "id a", "", vec![number_column("b", &[2.0, 5.0])]),
        ("b", "", "b y", vec![text_column("b", &[0, 1], &["2", "5"])]),
        ("", "0 1", "", vec![text_column("id", &[0, 1], &["x", "z"])]),
    ] {
        assert_eq!(parse_columns(features, drop, categorical).unwrap().columns, expected);
    }
    assert_eq!(parse_columns("a", "", "y").unwrap().target, Column::Text(["3", "6"].into_iter().collect()));
    for (features, drop, categorical, expected) in [
        ("c", "", "", "has no column `c`; its columns are a, b, y, id"),
        ("", "4", "", "has no column `4`"),
        ("", "y", "", "--drop names column `y`, which is the target"),
        ("y", "", "", "--features names column `y`, which is the target"),
        ("a", "0", "", "both --features and --drop name column `a`"),
        ("a", "", "id", "--categorical names column `id`, which is not used"),
        ("", "a b id", "", "no column besides the target"),
    ] {
        let error = parse_columns(features, drop, categorical).unwrap_err();
        assert!(error.contains(expected) && error.contains("table.csv"), "{error}");
    }
}

#[test]
fn errors_name_the_line_and_the_column_of_bad_cells() {
    let cases: [(&[u8], &str); 19] = [
        (b"a,y\n1,2\n2,3\nabc,3\n", "line 4, column `a`: `abc` is not a number, but the first values"),
        (b"a,y\n1,2\n\"x\ny\",3\n3,z\n4,5\n", "line 3, column `a`"),
        (b"a,y\r\n1,2\r\n2,3\r\nabc,3\r\n", "line 4, column `a`"),
        (b"a,y\r1,2\r2,3\rabc,3", "line 4, column `a`"),
        (b"\na,y\n1,2\n\n2,3\n\nabc,3\n", "line 7, column `a`"),
        (b"a,y\ninf,3\n", "line 2, column `a`: `inf` is not a finite number"),
        (b"a,y\n1e300,3\n", "line 2, column `a`: `1e300` is not a finite number"),
        (b"a,y\n1,inf\n", "line 2, column `y`: `inf` is not a finite number"),
        (b"a,y\n,3\n", "line 2, column `a`: the value is missing"),
        (b"a,y\n1,2,3\n", "line 2 has 3 cells, but the first row has 2"),
        (b"a,y\n1\n", "line 2 has 1 cells, but the first row has 2"),
        (b"a,b\n1,2\n", "has no column `y`; its columns are a, b"),
        (b"y,y\n1,2\n", "more than one column `y`"),
        (b"y\n1\n", "no column besides"),
        (b"a,y\n\xff,2\n", "line 2, column `a`: the text is not UTF-8"),
        (b"y,\xff\n1,2\n", "line 1, column number 2: the text is not UTF-8"),
        (
            b"a,y\n\"1\n2,3\n4,5\n",
            "line 2 has 1 cells, but the first row has 2; a cell of this row contains a line break",
        ),
        (b"", "is empty"),
        // Regression test: before the fix, the error was about --test-fraction and named no file.
        (b"a,y\n", "has no rows below its header; pass --no-header if"),
    ];
    for (bytes, expected) in cases {
        let error = parse_table(bytes, "y").unwrap_err().to_string();
        assert!(error.contains(expected) && error.contains("table.csv"), "{error} / {expected}");
    }
    let error = load_csv_files(&["/nonexistent/x.csv".into()], "y", &TableOptions::default()).unwrap_err();
    assert!(error.to_string().contains("/nonexistent/x.csv"), "{error}");
}

/// A damaged cell far below the first rows must not silently turn a column of numbers into text.
#[test]
fn a_column_that_changes_from_numbers_to_text_is_an_error() {
    let mut bytes = b"a,y\n".to_vec();
    for row in 0..5000 {
        bytes.extend(format!("{row},{}\n", row % 7).bytes());
    }
    bytes.extend(b"unknown,3\n");
    let error = parse_table(&bytes, "y").unwrap_err().to_string();
    assert!(error.contains("line 5002, column `a`: `unknown` is not a number"), "{error}");
    assert!(error.contains("--categorical a") && error.contains("--drop a"), "{error}");
    let error = parse_table(&bytes, "a").unwrap_err().to_string();
    assert!(error.contains("--categorical a") && !error.contains("--drop"), "{error}");
    let categorical = vec!["a".into()];
    let table =
        parse_table_with_options(&bytes, "y", &TableOptions { categorical, ..TableOptions::default() })
            .unwrap();
    assert_eq!(table.row_map.rows(), 5001);
}

/// A row that begins in the first `FILE_START_BYTES` bytes of a file and ends after them must be read as one row.
#[test]
fn files_longer_than_file_start_bytes_are_read_completely() {
    let mut bytes = b"a,name,y\n".to_vec();
    for row in 0..10_000 {
        bytes.extend(format!("{row},a long text of a cell {},{}\n", row % 3, row % 7).bytes());
    }
    let table = parse_table(&bytes, "y").unwrap();
    let RawValues::Numbers(Numbers::Single(values)) = &table.columns[0].values else {
        panic!("`a` holds numbers")
    };
    let values = values.to_vec();
    assert!(bytes.len() > 1 << 18 && values.iter().enumerate().all(|(row, &value)| value == row as f32));
    assert_eq!((table.row_map.rows(), values.len()), (10_000, 10_000));
}

/// Regression test: before the fix, a column of text was taken for numbers if the first row of data was longer than
/// `FILE_START_BYTES`.
#[test]
fn rows_longer_than_file_start_bytes_decide_the_kinds_of_columns() {
    let long = "x".repeat(1 << 20);
    for text in [format!("name,a,y\n{long},1,2\nz,3,4\n"), format!("{long},a,y\nx,1,2\nz,3,4\n")] {
        for mark in ["", "\u{feff}"] {
            let table = parse_table(format!("{mark}{text}").as_bytes(), "y").unwrap();
            let RawValues::Texts(texts) = &table.columns[0].values else { panic!("text is expected") };
            assert_eq!(
                (texts.indices.to_vec(), &table.columns[1]),
                (vec![0, 1], &number_column("a", &[1.0, 3.0]))
            );
        }
    }
    let error = parse_table(format!("5,1,{long}\n6,3,4\n").as_bytes(), "1").unwrap_err().to_string();
    assert!(error.contains("looks like data"), "{error}");
}

#[test]
fn several_files_are_read_as_one_table() {
    let directory = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| {
        let path = directory.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path
    };
    let first = write("1.csv", b"a,name,y\n1,x,1\n2,z,NA\n");
    let second = write("2.tsv", b"\xef\xbb\xbfa\tname\ty\n3\tz\t3\n");
    let empty = write("3.csv", b"a,name,y\n");
    let table = load_csv_files(&[first.clone(), second, empty], "y", &TableOptions::default()).unwrap();
    assert_eq!(table.columns, [number_column("a", &[1.0, 3.0]), text_column("name", &[0, 1], &["x", "z"])]);
    assert_eq!(table.notes, ["dropped 1 of 3 rows, because their target `y` is missing"]);
    for (bytes, expected) in [
        (&b"a,b,y\n1,x,2\n"[..], "line 1, column number 2: the name of the column is `b`, but in "),
        (b"a,y\n1,2\n", "has 2 columns, but "),
        (b"a,name,y\nx,x,1\n", "line 2, column `a`: `x` is not a number"),
        (b"", "is empty"),
    ] {
        let other = write("other.csv", bytes);
        let error =
            load_csv_files(&[first.clone(), other], "y", &TableOptions::default()).unwrap_err().to_string();
        assert!(error.contains(expected) && error.contains("other.csv"), "{error}");
    }
    let headers = ["4.csv", "5.csv"].map(|name| write(name, b"a,y\n"));
    let error = load_csv_files(&headers, "y", &TableOptions::default()).unwrap_err().to_string();
    assert!(error.ends_with("4.csv: this file and 1 more file have no rows below their headers"), "{error}");
    let options = TableOptions { header: HeaderRow::Absent, ..TableOptions::default() };
    let [one, two] = ["one.csv", "two.csv"].map(|name| write(name, b"1,2\n3,4\n"));
    assert_eq!(load_csv_files(&[one, two], "1", &options).unwrap().row_map.rows(), 4);
}

fn make_row_sets(train: &[usize], test: &[usize]) -> RowSets {
    RowSets { fitted: train.to_vec(), train: train.to_vec(), test: test.to_vec() }
}

#[test]
fn encodings_are_fitted_on_the_training_rows() {
    let bytes = b"a,b,name,y\n1,1,x,1\nNA,2,?,2\n3,3,z,3\nNA,NA,w,4\n";
    let encode = |missing, categories_max| {
        let table =
            parse_table_with_options(bytes, "y", &TableOptions { missing, ..TableOptions::default() })
                .unwrap();
        let rows = make_row_sets(&[0, 1, 2], &[3]);
        table.encode(&rows, (missing, categories_max), None, &mut Group::solo()).unwrap()
    };
    let inputs = |samples: &UninterpretedSamples<HeldFeatures>| {
        let features = in_memory(samples);
        let mut inputs = ndarray::Array2::zeros((features.rows(), features.columns()));
        features.write_rows(0..features.rows(), None, inputs.view_mut());
        inputs
    };
    let encoded = encode(MissingPolicy::Mean, 3);
    // The columns are `a`, `b`, `name=` (the name is missing), `name=x` and `name=z`.
    let rows = array![[1.0, 1.0, 0.0, 1.0, 0.0], [2.0, 2.0, 1.0, 0.0, 0.0], [3.0, 3.0, 0.0, 0.0, 1.0]];
    assert_eq!(inputs(&encoded.train), rows);
    assert_eq!(inputs(&encoded.test), array![[2.0, 2.0, 0.0, 0.0, 0.0]]);
    let notes = encoded.notes.join("\n");
    assert!(notes.contains("1 test row has a value of `name` that no training row has"), "{notes}");
    assert!(
        notes.contains("column `name` holds text with 3 distinct values: one input for each value"),
        "{notes}"
    );
    // Only `a` has an indicator, because no other column lacks numbers in the training rows.
    let encoded = encode(MissingPolicy::Indicator, 2);
    assert_eq!((encoded.encoding.width(), in_memory(&encoded.train).columns()), (5, 5));
    assert_eq!(inputs(&encoded.test).row(0).to_vec()[..3], [2.0, 1.0, 2.0]);
    assert_eq!(inputs(&encoded.train).sum_axis(ndarray::Axis(1)), array![3.0, 6.0, 7.0]);
    assert!(encoded.notes.iter().any(|note| note.contains("hashed to 2 inputs")), "{:?}", encoded.notes);
    let only = parse_table_with_options(
        b"a,b,y\nNA,1,1\n2,2,2\n",
        "y",
        &TableOptions { missing: MissingPolicy::Mean, ..TableOptions::default() },
    );
    let rows = make_row_sets(&[0], &[1]);
    let encoded = only.unwrap().encode(&rows, (MissingPolicy::Mean, 2), None, &mut Group::solo());
    let error = encoded.err().unwrap().to_string();
    assert!(error.contains("column `a` holds no value in the training rows"), "{error}");
}

/// Regression test: before the fix, numbers were rounded to f32 before their mean was subtracted, so different
/// numbers became equal.
#[test]
fn small_differences_between_large_numbers_are_kept() {
    let encode = |values: [&str; 4], missing| {
        let rows = values.map(|value| format!("{value},0\n")).concat();
        let options = TableOptions { missing, ..TableOptions::default() };
        let table = parse_table_with_options(format!("t,y\n{rows}").as_bytes(), "y", &options).unwrap();
        let rows = make_row_sets(&[0, 1, 3], &[2]);
        let encoded = table.encode(&rows, (missing, 2), None, &mut Group::solo()).unwrap();
        (encoded.encoding.columns[0].inputs.clone(), encoded)
    };
    let shifted = |offset, fill| ColumnInputs::ShiftedNumber { offset, fill, indicator: false };
    let plain = ColumnInputs::Number { fill: None, indicator: false };
    for (values, expected, train, test, note) in [
        (
            ["1700000001", "1700000002", "1700000007", "1700000006"],
            shifted(1_700_000_003.0, None),
            [-2.0, -1.0, 3.0],
            4.0,
            Some("1700000003 is subtracted from each number"),
        ),
        // The numbers of the training rows are equal. The test row has a different number.
        (["1e9", "1e9", "1000000001", "1e9"], plain.clone(), [1e9; 3], 1e9, Some("treated as constant")),
        (
            ["0.3", "0.3", "0.3", "0.30000000000000004"],
            plain.clone(),
            [0.3; 3],
            0.3,
            Some("treated as constant"),
        ),
        (["0.3", "0.3", "0.3", "0.3"], plain.clone(), [0.3; 3], 0.3, None),
        (["2013", "2014", "2015", "2016"], plain, [2013.0, 2014.0, 2016.0], 2015.0, None),
    ] {
        let (inputs, encoded) = encode(values, MissingPolicy::Error);
        assert_eq!(inputs, expected, "{values:?}");
        let Features::Numbers(cells) = in_memory(&encoded.train) else { panic!("the column is one input") };
        assert_eq!(cells.column(0).to_vec(), train);
        assert_eq!(in_memory(&encoded.test), &Features::Numbers(array![[test]]));
        assert_eq!(
            encoded
                .notes
                .iter()
                .map(String::as_str)
                .any(|found| found.contains(note.unwrap_or("column `t`"))),
            note.is_some()
        );
    }
    let (inputs, encoded) = encode(["1700000001", "NA", "", "1700000002"], MissingPolicy::Mean);
    assert_eq!(inputs, shifted(1_700_000_001.5, Some(0.0)));
    assert_eq!(in_memory(&encoded.train), &Features::Numbers(array![[-0.5], [0.0], [0.5]]));
    assert_eq!(in_memory(&encoded.test), &Features::Numbers(array![[0.0]]));
}

#[test]
fn dates_become_days_since_1970() {
    let bytes = b"when,name,y\n1970-01-02,2020-01-01,1\n?,2020-01-02,2\n1970-01-03 12:00,,3\n";
    let options =
        TableOptions { missing: MissingPolicy::Mean, dates: vec!["when".into()], ..TableOptions::default() };
    let table = parse_table_with_options(bytes, "y", &options).unwrap();
    let encoded = table
        .encode(&make_row_sets(&[0, 1, 2], &[]), (MissingPolicy::Mean, 9), None, &mut Group::solo())
        .unwrap();
    let column = &encoded.encoding.columns[0];
    assert!(column.is_date && !encoded.encoding.columns[1].is_date);
    assert_eq!(column.inputs, ColumnInputs::Number { fill: Some(1.75), indicator: false });
    let mut inputs = ndarray::Array2::zeros((3, encoded.encoding.width()));
    in_memory(&encoded.train).write_rows(0..3, None, inputs.view_mut());
    assert_eq!(inputs.column(0).to_vec(), [1.0, 1.75, 2.5]);
    // The note about a text column with dates names the option.
    assert!(encoded.notes.iter().any(|note| note.ends_with("; if these are dates, pass --dates name")));
    let with = |dates: &[&str], categorical: &[&str], missing| {
        let names = |list: &[&str]| list.iter().map(|name| (*name).to_owned()).collect();
        let (dates, categorical) = (names(dates), names(categorical));
        let options = TableOptions { missing, categorical, dates, ..TableOptions::default() };
        parse_table_with_options(b"a,b,y\n2024-01-01,1,1\n2024-13-01,2,2\n", "y", &options)
            .unwrap_err()
            .to_string()
    };
    for (dates, categorical, expected) in [
        (&["a"][..], &[][..], "line 3, column `a`: `2024-13-01` has the month 13"),
        (&["b"], &[], "line 2, column `b`: `1` is not a date; write dates as"),
        (&["y"], &[], "--dates names column `y`, which is the target"),
        (&["a"], &["a"], "both --categorical and --dates name column `a`"),
        (&["c"], &[], "has no column `c`"),
    ] {
        let error = with(dates, categorical, MissingPolicy::Error);
        assert!(error.contains(expected), "{error}");
    }
}
