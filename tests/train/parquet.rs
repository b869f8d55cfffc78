//! Tests of tables in Parquet files. Programs without the feature `parquet` only test that the files are refused.

#[cfg(not(feature = "parquet"))]
#[test]
fn a_program_without_parquet_says_how_to_build_it() {
    use std::fs;

    use super::program::assert_fails;

    let directory = tempfile::tempdir().unwrap();
    let place = directory.path();
    for name in ["a.parquet", "b.PQ", "c.parquet.gz", "data"] {
        fs::write(place.join(name), "PAR1, and no text").unwrap();
    }
    let expected = "is a Parquet file and needs the feature `parquet`, but this program was built without this feature; build the \
                    program with `cargo build --release --features parquet`, or save the table as .csv";
    for data in ["a.parquet", "b.PQ", "c.parquet.gz", "data", "a.parquet b.PQ", "data --format parquet"] {
        assert_fails(place, &format!("--data {data} --target y"), 2, expected);
    }
    assert_fails(place, "predict --model absent --data a.parquet", 2, expected);
}

#[cfg(feature = "parquet")]
mod columns;
#[cfg(feature = "parquet")]
mod damaged;
#[cfg(feature = "parquet")]
mod loading;
#[cfg(feature = "parquet")]
mod programs;
#[cfg(feature = "parquet")]
mod written_file;
