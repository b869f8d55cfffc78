//! Tests of truncated and damaged Parquet files.

use std::fs;
use std::path::Path;

use ::parquet::basic::{Compression, ZstdLevel};
use ::parquet::file::properties::WriterVersion;
use rand::rngs::StdRng;
use rand::{Rng, RngExt, SeedableRng};
use ringtrain::train::data::TableOptions;

use super::super::program::run_ringtrain_in;
use super::super::util::runs_long_tests;
use super::columns::{
    columns_for_training, columns_of_all_types, load, options_for_all_types, parquet_source, properties,
};
use super::written_file::{TestColumn, write_parquet};

/// Loads a file with the content `bytes`, which may be damaged. The result must be a table, or an error that names the file
/// or a column. Returns whether the result is an error.
fn is_refused(path: &Path, bytes: &[u8], table: &TableOptions) -> bool {
    fs::write(path, bytes).unwrap();
    match load(&parquet_source(path), "y", table) {
        Ok(dataset) => {
            assert!(dataset.train.len() <= 120);
            false
        }
        Err(error) => {
            assert!(error.contains("damaged.parquet") || error.contains("column `"), "{error}");
            true
        }
    }
}

#[test]
fn truncated_or_damaged_files_cause_errors_and_not_panics() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("damaged.parquet");
    let columns: Vec<TestColumn> = columns_of_all_types();
    let table = options_for_all_types(&[]);
    let seed = 20;
    let mut random = StdRng::seed_from_u64(seed);
    let case_count = if runs_long_tests() { 4_000 } else { 150 };
    for properties in [
        properties().set_compression(Compression::SNAPPY),
        properties()
            .set_writer_version(WriterVersion::PARQUET_2_0)
            .set_compression(Compression::ZSTD(ZstdLevel::default())),
    ] {
        write_parquet(&path, &columns, &[0, 40, 60], properties);
        let bytes = fs::read(&path).unwrap();
        assert!(!is_refused(&path, &bytes, &table));
        for _ in 0..case_count / 5 {
            let length = random.random_range(0..bytes.len());
            assert!(
                is_refused(&path, &bytes[..length], &table),
                "{length} of {} bytes, seed {seed}",
                bytes.len()
            );
        }
        let mut refused = 0;
        for _ in 0..case_count {
            let mut damaged = bytes.clone();
            for _ in 0..random.random_range(1..4) {
                let index = random.random_range(0..damaged.len());
                damaged[index] ^= 1 << random.random_range(0..8);
            }
            refused += usize::from(is_refused(&path, &damaged, &table));
        }
        assert!(refused > case_count / 3, "{refused} of {case_count} damaged files are refused");
    }
}

/// Panics of the crate `parquet` become errors, so no message of a panic may be on standard error.
#[test]
fn the_program_reports_a_damaged_file_in_one_message() {
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path();
    write_parquet(&place.join("a.parquet"), &columns_for_training(), &[0, 60], properties());
    let bytes = fs::read(place.join("a.parquet")).unwrap();
    let mut random = StdRng::seed_from_u64(21);
    for _ in 0..if runs_long_tests() { 40 } else { 4 } {
        let mut damaged = bytes.clone();
        let start = random.random_range(4..damaged.len() - 200);
        random.fill_bytes(&mut damaged[start..start + 100]);
        fs::write(place.join("damaged.parquet"), damaged).unwrap();
        let line = "--data damaged.parquet --target y --missing mean --epochs 1 --batch-size 64";
        let output = run_ringtrain_in(place, line);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(!stderr.contains("panicked"), "{stderr}");
        assert!(output.status.success() || stderr.contains("damaged.parquet: "), "{output:?}");
    }
}
